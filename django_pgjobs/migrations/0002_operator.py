"""What people who run the queue need: the overview, operations, and a permission for each of their acts."""

import django.db.models.functions.datetime
from django.db import migrations, models


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
        migrations.CreateModel(
            name="BackgroundOperation",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("act", models.CharField(help_text="retry, discard or purge", max_length=20)),
                ("filter", models.JSONField(help_text="Which jobs it is about.")),
                (
                    "manner",
                    models.JSONField(
                        db_default=models.Value({}, models.JSONField()),
                        help_text="How jobs are retried, where that is not at once and in their own queues.",
                    ),
                ),
                ("reason", models.TextField(db_default="")),
                ("asked_by", models.CharField(db_default="", help_text="Who wanted it.", max_length=255)),
                (
                    "user_key",
                    models.CharField(
                        db_default="",
                        help_text="The primary key of that user; empty for a shell's.",
                        max_length=255,
                    ),
                ),
                (
                    "state",
                    models.CharField(
                        db_default="running", help_text="running, stopped or finished", max_length=10
                    ),
                ),
                (
                    "expected",
                    models.BigIntegerField(
                        help_text="How many jobs matched; null: more than counted.", null=True
                    ),
                ),
                ("changed", models.BigIntegerField(db_default=0)),
                (
                    "skipped",
                    models.JSONField(
                        db_default=models.Value({}, models.JSONField()),
                        help_text="How many jobs were, by the reason.",
                    ),
                ),
                (
                    "failed",
                    models.BigIntegerField(
                        db_default=0, help_text="Jobs that the database refused to change."
                    ),
                ),
                ("problem", models.TextField(db_default="", help_text="What it said, the last time.")),
                (
                    "cursor_priority",
                    models.SmallIntegerField(help_text="The priority of the last job that was", null=True),
                ),
                (
                    "cursor_at",
                    models.DateTimeField(
                        help_text="gone through, where these are queued; its time,", null=True
                    ),
                ),
                ("cursor_id", models.BigIntegerField(help_text="and its id.", null=True)),
                ("next_at", models.DateTimeField(help_text="When a paced one goes on.", null=True)),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        help_text="Jobs that came later are left alone.",
                    ),
                ),
                (
                    "updated_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now()),
                ),
            ],
            options={
                "verbose_name": "operation",
                "db_table": "background_operations",
                "default_permissions": ("view",),
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("state__in", ["running", "stopped", "finished"])),
                        name="ck_operations_state",
                    )
                ],
            },
        ),
        migrations.AlterModelOptions(
            name="backgroundjob",
            options={
                "default_permissions": ("view",),
                "permissions": [
                    ("retry_job", "Can retry failed and cancelled jobs"),
                    ("discard_job", "Can discard dead letters"),
                    ("edit_job", "Can retry jobs with edited arguments"),
                    ("duplicate_job", "Can enqueue copies of jobs"),
                    ("run_job", "Can run queued jobs now that are due later"),
                    ("cancel_job", "Can cancel queued jobs"),
                    ("stop_job", "Can stop running jobs"),
                    ("export_job", "Can export jobs, without secrets"),
                ],
                "verbose_name": "job",
            },
        ),
        migrations.AlterModelOptions(
            name="backgroundqueue",
            options={
                "default_permissions": ("view",),
                "permissions": [
                    ("pause_queue", "Can pause and resume queues"),
                    ("purge_queue", "Can cancel all jobs that wait in a queue"),
                ],
                "verbose_name": "queue",
            },
        ),
        migrations.AlterModelOptions(
            name="backgroundworker",
            options={
                "default_permissions": ("view",),
                "permissions": [("stop_worker", "Can ask workers to stop")],
                "verbose_name": "worker",
            },
        ),
        migrations.AddField(
            model_name="backgroundworker",
            name="executors",
            field=models.JSONField(
                db_default=models.Value([], models.JSONField()),
                help_text="Its processes when last seen: pid, state, jobs, and memory in bytes.",
            ),
        ),
        migrations.AddField(
            model_name="backgroundworker",
            name="stop_requested_at",
            field=models.DateTimeField(null=True),
        ),
        migrations.AddField(
            model_name="backgroundworker",
            name="stop_requested_by",
            field=models.CharField(db_default="", max_length=255),
        ),
    ]
