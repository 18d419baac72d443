"""The permission to pause and resume queues; nothing in the database's tables of ours."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("django_pgjobs", "0005_export")]

    operations = [
        migrations.AlterModelOptions(
            name="backgroundqueue",
            options={
                "default_permissions": ("view",),
                "permissions": [("pause_queue", "Can pause and resume queues")],
                "verbose_name": "queue",
            },
        ),
    ]
