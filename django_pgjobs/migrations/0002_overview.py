"""The place of the overview in the admin; nothing in the database."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("django_pgjobs", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="Overview",
            fields=[],
            options={
                "verbose_name": "overview",
                "verbose_name_plural": "overview",
                "proxy": True,
                "default_permissions": (),
                "indexes": [],
                "constraints": [],
            },
            bases=("django_pgjobs.backgroundjob",),
        ),
    ]
