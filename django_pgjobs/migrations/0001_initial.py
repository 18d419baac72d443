"""The tables, the enum type, the triggers that notify, and the table's own storage settings.

All DDL here is literal and frozen: to change something, write a new migration.
"""

import datetime
import uuid

import django.db.models.functions.datetime
from django.db import migrations, models

import django_pgjobs.models

# What Python can read, in any time zone.
DATES = (
    datetime.datetime(1, 1, 2, tzinfo=datetime.UTC),
    datetime.datetime(9999, 12, 30, tzinfo=datetime.UTC),
)

# Values may be added at the end one day, and are never removed, renamed or reordered.
CREATE_STATUS = """
CREATE TYPE job_status AS ENUM ('queued', 'processing', 'failed', 'completed', 'cancelled')
"""
DROP_STATUS = "DROP TYPE job_status"

# Room on each page for renewals to be HOT updates; dead rows are cleared long before they slow the claim.
SET_STORAGE = """
ALTER TABLE background_jobs SET (
    fillfactor = 85,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 100,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_analyze_threshold = 500
)
"""

# One notification for each queue and statement, when something is due soon enough to be worth waking up
# for. Postgres merges equal ones within a transaction. Nothing in here can raise, unless the server is out of
# shared memory: an error would abort the caller's INSERT. SET LOCAL pgjobs.notify = 'off' silences both. So
# do the worker hosts: where one holds the first of the two advisory locks, and none the second, nobody has to
# be told (HEAR and WANT_NO_MORE in `sql`). Sessions that try for the second one at the same time take each
# other for a host that wants to be told. Only who has it tries for the first, so that nobody is taken for a
# host that is there. All that is one expression, so that nothing comes between lock and unlock.
CREATE_TRIGGERS = """
CREATE FUNCTION background_jobs_notify_inserted() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF pg_catalog.current_setting('pgjobs.notify', true) IS DISTINCT FROM 'off'
       AND (CASE WHEN NOT pg_catalog.pg_try_advisory_lock(1785688435, 2)
                 THEN true
                 WHEN pg_catalog.pg_try_advisory_lock(1785688435, 1)
                 THEN pg_catalog.pg_advisory_unlock(1785688435, 1)
                      AND pg_catalog.pg_advisory_unlock(1785688435, 2)
                 ELSE NOT pg_catalog.pg_advisory_unlock(1785688435, 2)
            END)
    THEN
        PERFORM pg_catalog.pg_notify('job_created', due.queue_name)
           FROM (SELECT DISTINCT inserted.queue_name
                   FROM inserted
                  WHERE inserted.status = 'queued'
                    AND inserted.run_at <= pg_catalog.statement_timestamp() + interval '10 seconds'
                ) AS due;
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER background_jobs_inserted
    AFTER INSERT ON background_jobs
    REFERENCING NEW TABLE AS inserted
    FOR EACH STATEMENT
    EXECUTE FUNCTION background_jobs_notify_inserted();

CREATE FUNCTION background_jobs_notify_requeued() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF pg_catalog.current_setting('pgjobs.notify', true) IS DISTINCT FROM 'off'
       AND (CASE WHEN NOT pg_catalog.pg_try_advisory_lock(1785688435, 2)
                 THEN true
                 WHEN pg_catalog.pg_try_advisory_lock(1785688435, 1)
                 THEN pg_catalog.pg_advisory_unlock(1785688435, 1)
                      AND pg_catalog.pg_advisory_unlock(1785688435, 2)
                 ELSE NOT pg_catalog.pg_advisory_unlock(1785688435, 2)
            END)
    THEN
        PERFORM pg_catalog.pg_notify('job_created', NEW.queue_name);
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER background_jobs_requeued
    AFTER UPDATE OF status, run_at ON background_jobs
    FOR EACH ROW
    WHEN (NEW.status = 'queued'
          AND NEW.run_at <= pg_catalog.statement_timestamp() + interval '10 seconds'
          AND (OLD.status <> 'queued' OR NEW.run_at < OLD.run_at))
    EXECUTE FUNCTION background_jobs_notify_requeued();
"""
DROP_TRIGGERS = """
DROP TRIGGER background_jobs_requeued ON background_jobs;
DROP FUNCTION background_jobs_notify_requeued();
DROP TRIGGER background_jobs_inserted ON background_jobs;
DROP FUNCTION background_jobs_notify_inserted();
"""


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.RunSQL(CREATE_STATUS, DROP_STATUS),
        migrations.CreateModel(
            name="BackgroundQueue",
            fields=[
                ("name", models.CharField(max_length=255, primary_key=True, serialize=False)),
                ("paused_at", models.DateTimeField(null=True)),
                ("paused_by", models.CharField(db_default="", max_length=255)),
                ("reason", models.TextField(db_default="")),
            ],
            options={
                "verbose_name": "queue",
                "db_table": "background_queues",
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="BackgroundSchedule",
            fields=[
                ("name", models.CharField(max_length=200, primary_key=True, serialize=False)),
                (
                    "job_name",
                    models.CharField(help_text="The registered name of the job function.", max_length=255),
                ),
                (
                    "payload",
                    models.JSONField(
                        db_default=models.Value({}, models.JSONField()),
                        help_text='The arguments of its jobs: {"args": [...], "kwargs": {...}}.',
                    ),
                ),
                (
                    "cron",
                    models.CharField(
                        db_default="", help_text="Empty where there is an interval.", max_length=255
                    ),
                ),
                ("interval", models.DurationField(null=True)),
                (
                    "timezone",
                    models.CharField(db_default="", help_text="Of the cron text.", max_length=255),
                ),
                (
                    "missed",
                    models.CharField(db_default="once", help_text="One of once, skip, all.", max_length=10),
                ),
                ("overlap", models.BooleanField(db_default=True)),
                ("enabled", models.BooleanField(db_default=True)),
                (
                    "declared",
                    models.BooleanField(
                        db_default=False, help_text="By code, which then says what it is like."
                    ),
                ),
                ("last_tick", models.DateTimeField(help_text="The last one that was taken.", null=True)),
                (
                    "next_tick_at",
                    models.DateTimeField(help_text="Null until a worker host has seen the row.", null=True),
                ),
                ("created_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("updated_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                (
                    "changed_by",
                    models.CharField(db_default="", help_text="Who did; empty for the code.", max_length=255),
                ),
            ],
            options={
                "verbose_name": "schedule",
                "db_table": "background_schedules",
                "permissions": [
                    ("enable_schedule", "Can enable and disable schedules"),
                    ("run_schedule", "Can run the jobs of schedules now"),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("interval__isnull", True), models.Q(("cron", ""), _negated=True)),
                            models.Q(
                                ("cron", ""),
                                ("interval__isnull", False),
                                (
                                    "interval__range",
                                    (datetime.timedelta(seconds=1), datetime.timedelta(days=3650)),
                                ),
                            ),
                            _connector="OR",
                        ),
                        name="ck_schedules_timing",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("missed__in", ("once", "skip", "all"))),
                        name="ck_schedules_missed",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("created_at__range", DATES),
                            ("last_tick__range", DATES),
                            ("next_tick_at__range", DATES),
                            ("updated_at__range", DATES),
                        ),
                        name="ck_schedules_dates",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="BackgroundWorker",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, primary_key=True, serialize=False)),
                ("hostname", models.TextField()),
                ("pid", models.IntegerField()),
                ("queues", models.JSONField(help_text="Null when it serves every queue.", null=True)),
                ("processes", models.IntegerField()),
                ("threads", models.IntegerField()),
                ("async_slots", models.IntegerField()),
                (
                    "lease",
                    models.DurationField(help_text="For how long its jobs stay its own when it is silent."),
                ),
                ("version", models.TextField()),
                ("state", models.TextField(db_default="running", help_text="running or stopping")),
                ("running", models.IntegerField(db_default=0, help_text="Jobs in its slots when last seen.")),
                ("started_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("last_seen_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                "verbose_name": "worker",
                "db_table": "background_workers",
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="BackgroundJob",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("queue_name", models.CharField(db_default="default", max_length=255)),
                (
                    "job_name",
                    models.CharField(help_text="The registered name of the job function.", max_length=255),
                ),
                (
                    "payload",
                    models.JSONField(help_text='{"args": [...], "kwargs": {...}}; absent keys mean empty.'),
                ),
                ("status", django_pgjobs.models.StatusField(db_default="queued")),
                (
                    "priority",
                    models.SmallIntegerField(db_default=0, help_text="-100 to 100; higher goes first."),
                ),
                ("run_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("attempts", models.IntegerField(db_default=0, help_text="Claims that were not refunded.")),
                ("max_attempts", models.IntegerField(db_default=3)),
                (
                    "locked_at",
                    models.DateTimeField(
                        help_text="When it was claimed, or the claim last renewed.", null=True
                    ),
                ),
                ("locked_by", models.UUIDField(help_text="The token of the claim.", null=True)),
                (
                    "worker_id",
                    models.UUIDField(help_text="The worker host that holds or last held it.", null=True),
                ),
                ("last_error", models.TextField(null=True)),
                (
                    "errors",
                    models.JSONField(
                        db_default=models.Value([], models.JSONField()),
                        help_text="One entry for each failed attempt, newest last.",
                    ),
                ),
                ("error_fingerprint", models.TextField(null=True)),
                (
                    "crashes",
                    models.IntegerField(db_default=0, help_text="Executors that died while running it."),
                ),
                ("rerun_if_lost", models.BooleanField(db_default=True)),
                ("unique_key", models.CharField(max_length=255, null=True)),
                ("stop_requested_at", models.DateTimeField(null=True)),
                ("result", models.JSONField(null=True)),
                ("metadata", models.JSONField(db_default=models.Value({}, models.JSONField()))),
                ("started_at", models.DateTimeField(help_text="The first claim.", null=True)),
                ("attempted_at", models.DateTimeField(help_text="The latest claim.", null=True)),
                ("created_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("updated_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                "verbose_name": "job",
                "db_table": "background_jobs",
                "permissions": [
                    ("retry_job", "Can retry failed and cancelled jobs"),
                    ("discard_job", "Can discard dead letters"),
                    ("cancel_job", "Can cancel queued jobs and stop running ones"),
                ],
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        models.F("queue_name"),
                        models.OrderBy(models.F("priority"), descending=True),
                        models.F("run_at"),
                        models.F("id"),
                        condition=models.Q(("status", "queued")),
                        name="idx_jobs_queued_run_at",
                    ),
                    models.Index(
                        models.F("id"),
                        condition=models.Q(("status", "processing")),
                        name="idx_jobs_processing",
                    ),
                    models.Index(
                        models.F("status"),
                        models.F("updated_at"),
                        condition=models.Q(("status__in", ["cancelled", "completed", "failed"])),
                        name="idx_jobs_finished",
                    ),
                    models.Index(
                        models.F("job_name"),
                        models.F("unique_key"),
                        models.F("created_at"),
                        condition=models.Q(("unique_key__isnull", False)),
                        name="idx_jobs_unique_key",
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(
                            ("status__in", ["queued", "processing"]), ("unique_key__isnull", False)
                        ),
                        fields=("job_name", "unique_key"),
                        name="uq_jobs_unique_key",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("priority__gte", -100), ("priority__lte", 100)),
                        name="ck_jobs_priority",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("attempts__gte", 0), ("crashes__gte", 0), ("max_attempts__gte", 0)
                        ),
                        name="ck_jobs_counts",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("attempted_at__range", DATES),
                            ("created_at__range", DATES),
                            ("locked_at__range", DATES),
                            ("run_at__range", DATES),
                            ("started_at__range", DATES),
                            ("stop_requested_at__range", DATES),
                            ("updated_at__range", DATES),
                        ),
                        name="ck_jobs_dates",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="DeadLetter",
            fields=[],
            options={
                "verbose_name": "dead letter",
                "proxy": True,
                "default_permissions": ("view",),
                "indexes": [],
                "constraints": [],
            },
            bases=("django_pgjobs.backgroundjob",),
        ),
        migrations.RunSQL(SET_STORAGE, migrations.RunSQL.noop),
        migrations.RunSQL(CREATE_TRIGGERS, DROP_TRIGGERS),
    ]
