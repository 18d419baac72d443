"""The permission to export jobs; nothing in the database's tables of ours."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("django_pgjobs", "0004_edited_arguments")]

    operations = [
        migrations.AlterModelOptions(
            name="backgroundjob",
            options={
                "default_permissions": ("view",),
                "permissions": [
                    ("retry_job", "Can retry failed and cancelled jobs"),
                    ("discard_job", "Can discard dead letters"),
                    ("edit_job", "Can retry jobs with edited arguments"),
                    ("export_job", "Can export jobs, without secrets"),
                    ("cancel_job", "Can cancel queued jobs and stop running ones"),
                ],
                "verbose_name": "job",
            },
        ),
    ]
