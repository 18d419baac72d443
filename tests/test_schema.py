"""The tables: how they come and go, where they may live, and what they refuse, notify and allow."""

import json

import pytest
from django.core.management import call_command
from django.db import IntegrityError, connection, migrations, transaction
from django.db.migrations.loader import MigrationLoader

from django_pgjobs.lifecycle import Status
from django_pgjobs.models import BackgroundJob, BackgroundQueue, BackgroundWorker, DeadLetter
from tests.factories import make_job, rows
from tests.scratch import scratch_database

pytestmark = pytest.mark.django_db

# All that a schema can hold and that migrations can make, as text.
CATALOG = """
SELECT 'class', relname, relkind::text || ' ' || COALESCE(reloptions::text, '')
  FROM pg_class WHERE relnamespace = %(schema)s::regnamespace
UNION ALL
SELECT 'column', attrelid::regclass::text || '.' || attname,
       format_type(atttypid, atttypmod) || ' ' || attnotnull::text || ' ' || attidentity::text || ' '
       || COALESCE((SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef
                     WHERE adrelid = attrelid AND adnum = attnum), '')
  FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
 WHERE relnamespace = %(schema)s::regnamespace AND attnum > 0 AND NOT attisdropped
UNION ALL
SELECT 'index', indexrelid::regclass::text, pg_get_indexdef(indexrelid)
  FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
 WHERE relnamespace = %(schema)s::regnamespace
UNION ALL
SELECT 'constraint', conname, pg_get_constraintdef(oid)
  FROM pg_constraint WHERE connamespace = %(schema)s::regnamespace AND contype <> 'n'
UNION ALL
SELECT 'type', typname, typtype::text FROM pg_type WHERE typnamespace = %(schema)s::regnamespace
UNION ALL
SELECT 'function', proname, pg_get_functiondef(oid)
  FROM pg_proc WHERE pronamespace = %(schema)s::regnamespace
UNION ALL
SELECT 'trigger', tgname, pg_get_triggerdef(pg_trigger.oid)
  FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid
 WHERE relnamespace = %(schema)s::regnamespace AND NOT tgisinternal
 ORDER BY 1, 2, 3
"""

ENQUEUE_AND_DRAIN = """
from django_pgjobs.testing import drain
from django_pgjobs.models import BackgroundJob
from django_pgjobs.conf import config
from tests.jobs import add, boom
job = add.enqueue(2, 3)
boom.using(max_attempts=1).enqueue("no")
add.enqueue_many([((1, 1), {})] * 2)
drained = drain()
job.refresh()
print(drained.completed, drained.failed, job.status, job.result, job._state.db)
"""


def catalog(connection, schema="public"):
    return connection.execute(CATALOG, {"schema": schema}).fetchall()


@pytest.fixture
def scratch(django_db_setup, django_db_blocker):
    with django_db_blocker.unblock(), scratch_database() as database:
        yield database


@pytest.fixture
def settings_module(tmp_path, scratch):
    """Give the scratch database's processes other settings: a function of lines of Python."""

    def write(*lines):
        (tmp_path / "scratch_settings.py").write_text("\n".join(["from tests.settings import *", *lines]))
        scratch.environment |= {"DJANGO_SETTINGS_MODULE": "scratch_settings", "PYTHONPATH": f"{tmp_path}:."}

    return write


# ── Migrations ────────────────────────────────────────────────────────────────────────────────────────────


def test_migrating_forwards_and_back_and_forwards_again_leaves_nothing_behind(scratch):
    with scratch.session() as session:
        scratch.manage("migrate", "contenttypes")
        before = catalog(session)
        scratch.manage("migrate", "django_pgjobs")
        forwards = catalog(session)
        scratch.manage("migrate", "django_pgjobs", "zero")
        assert catalog(session) == before
        scratch.manage("migrate", "django_pgjobs")
        assert catalog(session) == forwards
    assert len(forwards) > len(before) + 50


def test_the_models_need_no_further_migration():
    call_command("makemigrations", "django_pgjobs", check=True, dry_run=True, verbosity=0)


def test_every_migration_can_be_reversed():
    loader = MigrationLoader(None)
    for (app, name), migration in loader.disk_migrations.items():
        if app == "django_pgjobs":
            assert all(operation.reversible for operation in migration.operations), name


def test_the_tables_own_storage_settings_are_in_place():
    with connection.cursor() as cursor:
        cursor.execute("SELECT reloptions FROM pg_class WHERE oid = 'background_jobs'::regclass")
        ((options,),) = cursor.fetchall()
    expected = {}
    loader = MigrationLoader(None)
    for (app, _), migration in sorted(loader.disk_migrations.items()):
        for operation in migration.operations if app == "django_pgjobs" else ():
            if (
                isinstance(operation, migrations.RunSQL)
                and "ALTER TABLE background_jobs SET (" in operation.sql
            ):
                pairs = operation.sql.partition("(")[2].rpartition(")")[0].split(",")
                expected |= dict(pair.split(" = ") for pair in map(str.strip, pairs))
    assert {"fillfactor", "autovacuum_vacuum_scale_factor"} <= set(expected)
    assert dict(option.split("=") for option in options) == expected


def test_the_enum_has_the_statuses_in_their_order():
    with connection.cursor() as cursor:
        cursor.execute("SELECT unnest(enum_range(NULL::job_status))::text")
        assert [label for (label,) in cursor.fetchall()] == list(Status)


# ── Where the tables may live ─────────────────────────────────────────────────────────────────────────────


def test_tables_made_without_migrations_work_and_can_be_made_twice(scratch, settings_module):
    settings_module('MIGRATION_MODULES = {"django_pgjobs": None, "contenttypes": None, "auth": None}')

    for _ in range(2):
        scratch.manage("migrate", "--run-syncdb")
        assert scratch.run(ENQUEUE_AND_DRAIN) == "3 1 completed 5 default\n"

    with scratch.session() as session:
        names = {name for kind, name, _ in catalog(session) if kind in ("index", "constraint")}
    assert {
        "idx_jobs_queued_run_at", "idx_jobs_processing", "idx_jobs_finished", "uq_jobs_unique_key",
        "idx_jobs_unique_key", "ck_jobs_priority", "ck_jobs_counts", "ck_jobs_dates",
    } <= names  # fmt: skip


def test_the_tables_may_live_in_another_schema(scratch, settings_module):
    settings_module('PGJOBS = {"LEASE": 0.1}')
    with scratch.session() as session:
        session.execute("CREATE SCHEMA jobs")
        scratch.environment["PGOPTIONS"] = "-c search_path=jobs"
        scratch.manage("migrate")
        assert catalog(session) == []
        assert scratch.run(ENQUEUE_AND_DRAIN) == "3 1 completed 5 default\n"

        session.execute("LISTEN job_created")
        session.execute(
            "INSERT INTO jobs.background_jobs (queue_name, job_name, payload)"
            """ VALUES ('elsewhere', 'tests.jobs.add', '{"args": [4, 5]}')"""
        )
        assert [one.payload for one in session.notifies(timeout=10, stop_after=1)] == ["elsewhere"]
        assert scratch.manage("sweepjobs") == "0 lost jobs queued again, 0 made dead letters.\n"
        assert scratch.run("from django_pgjobs.testing import drain; print(drain().completed)") == "1\n"

        scratch.manage("migrate", "django_pgjobs", "zero")
        assert [
            row for row in catalog(session, "jobs") if "job_status" in row or "background" in row[1]
        ] == []


def test_with_the_router_the_tables_are_on_the_queues_database_only(scratch, settings_module):
    settings_module(
        'PGJOBS = {"DATABASE": "other", "LEASE": 0.1}',
        'DATABASE_ROUTERS = ["django_pgjobs.router.Router"]',
    )
    with scratch.copy() as other:
        scratch.environment["PGJOBS_TEST_OTHER_DATABASE_NAME"] = other.name
        scratch.manage("migrate")
        scratch.manage("migrate", "--database=other")

        with scratch.session() as on_default, other.session() as on_other:
            kinds = "class", "type", "function"
            here = {name for kind, name, _ in catalog(on_default) if kind in kinds}
            there = {name for kind, name, _ in catalog(on_other) if kind in kinds}
        ours = {"background_jobs", "background_queues", "background_workers", "job_status"}
        assert ours <= there
        assert not {name for name in here if name in ours or "background" in name}
        assert scratch.run(ENQUEUE_AND_DRAIN) == "3 1 completed 5 other\n"
        assert json.loads(scratch.manage("jobstats", "--json"))["queues"][0]["failed"] == 1
        assert scratch.manage("sweepjobs") == "0 lost jobs queued again, 0 made dead letters.\n"


# ── What the model allows ─────────────────────────────────────────────────────────────────────────────────

READ_ONLY = (
    "A job is not saved or deleted through its model: workers write to its row at the same time."
    " Use job.retry(), job.discard() or job.cancel(), or manage.py prunejobs."
)


@pytest.mark.parametrize("lookup", ["status", "status__in", "status__gt"])
def test_an_unknown_status_in_a_filter_is_a_clear_error(lookup):
    with pytest.raises(ValueError, match="is not a status") as raised:
        list(BackgroundJob.objects.filter(**{lookup: ["sleeping"] if lookup.endswith("in") else "sleeping"}))
    assert str(raised.value) == (
        "'sleeping' is not a status of a job."
        " The statuses are queued, processing, failed, completed, cancelled."
    )


def test_jobs_can_be_filtered_and_ordered_by_status():
    jobs = {status: make_job(status) for status in reversed(Status)}

    assert list(BackgroundJob.objects.order_by("status")) == [jobs[status] for status in Status]
    for value in (Status.FAILED, "failed"):
        assert BackgroundJob.objects.get(status=value) == jobs[Status.FAILED]
        assert BackgroundJob.objects.exclude(status=value).count() == len(Status) - 1
    assert BackgroundJob.objects.filter(status__in=["queued", Status.FAILED]).count() == 2
    assert [letter.pk for letter in DeadLetter.objects.all()] == [jobs[Status.FAILED].pk]


def test_a_job_can_be_inserted_and_read_but_not_saved():
    job = BackgroundJob(job_name="tests.jobs.add", payload={})
    job.save()
    job.refresh()
    assert (job.queue_name, job.status, job.attempts, job.max_attempts) == ("default", "queued", 0, 3)
    assert (job.errors, job.metadata, job.result, job.rerun_if_lost) == ([], {}, None, True)
    before = rows()

    job.status = "completed"
    for write in (job.save, job.delete, lambda: job.save(update_fields=["status"])):
        with pytest.raises(TypeError) as raised:
            write()
        assert str(raised.value) == READ_ONLY
    assert rows() == before


def test_a_new_instance_with_the_id_of_a_job_does_not_overwrite_it():
    job = make_job("processing")
    before = rows()

    with pytest.raises(IntegrityError), transaction.atomic():
        BackgroundJob(id=job.pk, job_name="tests.jobs.add", payload={}).save()
    assert rows() == before


@pytest.mark.parametrize("status", Status)
def test_the_handle_retries_discards_and_cancels(status):
    def after(decision):
        job = make_job(status)
        return getattr(job, decision)(), job.refresh().status

    assert after("retry") == ((True, "queued") if status in ("failed", "cancelled") else (False, status))
    assert after("discard") == ((True, "cancelled") if status == "failed" else (False, status))
    assert after("cancel") == {
        "queued": (True, "cancelled"),
        "processing": (True, "processing"),  # asked to stop
    }.get(status, (False, status))


def test_rows_read_well():
    assert str(make_job(id=7)) == "tests.jobs.add #7"
    assert str(BackgroundQueue(name="mail")) == "mail"
    assert str(BackgroundWorker(hostname="box", pid=12)) == "box:12"


@pytest.mark.parametrize(
    "broken",
    [{"priority": 101}, {"priority": -101}, {"attempts": -1}, {"max_attempts": -1}, {"crashes": -1}],
)
def test_numbers_out_of_their_range_are_refused(broken):
    with pytest.raises(IntegrityError), transaction.atomic():
        make_job(**broken)


def test_a_unique_key_is_taken_while_its_job_waits_or_runs():
    for status in Status:
        taken = make_job(status, job_name=status, unique_key="k")
        make_job(job_name="other", unique_key=f"{status}")
        if status in (Status.QUEUED, Status.PROCESSING):
            with pytest.raises(IntegrityError), transaction.atomic():
                make_job(job_name=taken.job_name, unique_key="k")
        else:
            make_job(job_name=taken.job_name, unique_key="k")
