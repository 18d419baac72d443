"""sweepjobs, prunejobs and jobstats, as people call them."""

import json
import re
import signal
import subprocess
import sys
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import override_settings

from django_pgjobs import store
from django_pgjobs.models import BackgroundOperation, BackgroundQueue, BackgroundWorker
from tests.factories import make_job, rows
from tests.sessions import session

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def short_lease(settings):
    """The server has to be up for a lease before anything is swept, and a test's server is young."""
    settings.PGJOBS = {"LEASE": 0.1}


def run(*arguments):
    out = StringIO()
    call_command(*arguments, stdout=out)
    return out.getvalue()


def insert(count, status, age, attempts=1):
    """Insert many jobs that were claimed, and written for the last time, long ago."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO background_jobs
                   (job_name, payload, status, attempts, locked_by, locked_at, updated_at)
            SELECT 'tests.jobs.add', '{}', %s::job_status, %s, gen_random_uuid(),
                   statement_timestamp() - %s, statement_timestamp() - %s
              FROM generate_series(1, %s)
            """,
            [status, attempts, age, age, count],
        )


# ── sweepjobs ─────────────────────────────────────────────────────────────────────────────────────────────


def test_sweepjobs_says_what_it_did_and_finds_nothing_the_second_time():
    insert(2, "processing", timedelta(hours=1))
    insert(1, "processing", timedelta(hours=1), attempts=3)

    assert run("sweepjobs") == "2 lost jobs queued again, 1 made dead letters.\n"
    assert run("sweepjobs") == "0 lost jobs queued again, 0 made dead letters.\n"


def test_sweepjobs_goes_on_until_nothing_is_lost():
    insert(2001, "processing", timedelta(hours=1))

    assert run("sweepjobs") == "2,001 lost jobs queued again, 0 made dead letters.\n"
    assert {row["status"] for row in rows().values()} == {"queued"}


def test_a_dry_run_of_sweepjobs_changes_nothing():
    insert(2, "processing", timedelta(hours=1))
    before = rows()

    assert run("sweepjobs", "--dry-run") == "Would be done: 2 lost jobs queued again, 0 made dead letters.\n"
    assert rows() == before


def test_the_timeout_of_sweepjobs_is_the_age_of_claims_without_a_token():
    make_job("processing", locked_by=None, locked_at=-timedelta(minutes=5))

    assert run("sweepjobs").startswith("0 ")
    assert run("sweepjobs", "--timeout", "6m").startswith("0 ")
    assert run("sweepjobs", "--timeout", "240").startswith("1 ")


# ── prunejobs ─────────────────────────────────────────────────────────────────────────────────────────────


def test_prunejobs_goes_by_the_retentions():
    for status in ("completed", "failed", "cancelled"):
        insert(3, status, timedelta(days=4))
    insert(1, "completed", timedelta(days=2))

    assert run("prunejobs") == (
        "Deleted: 3 completed (older than 3d), failed kept, cancelled kept, 0 operations (older than 90d).\n"
    )
    assert (
        sorted(row["status"] for row in rows().values()) == ["cancelled"] * 3 + ["completed"] + ["failed"] * 3
    )


def test_prunejobs_goes_by_what_it_is_told():
    for status in ("completed", "failed", "cancelled"):
        insert(3, status, timedelta(hours=2))

    ages = ("--completed", "1h", "--failed=90m", "--cancelled", "1d", "--operations", "2h")
    assert run("prunejobs", *ages) == (
        "Deleted: 3 completed (older than 1h), 3 failed (older than 90m), 0 cancelled (older than 1d),"
        " 0 operations (older than 2h).\n"
    )


def test_prunejobs_deletes_operations_that_have_been_finished_for_long():
    settings = {"OPERATIONS_RETENTION": None}
    for state in ("running", "stopped", "finished"):
        for days in (1, 3):
            operation = BackgroundOperation.objects.create(act="retry", filter={}, state=state)
            BackgroundOperation.objects.filter(pk=operation.pk).update(
                updated_at=Now() - timedelta(days=days)
            )
    assert "0 operations" in run("prunejobs")
    with override_settings(PGJOBS=settings):
        assert run("prunejobs").endswith("operations kept.\n")
        assert "1 operations (older than" in run("prunejobs", "--operations", "2d", "--dry-run")
        assert "1 operations (older than" in run("prunejobs", "--operations", "2d", "--batch-size", "1")
    left = BackgroundOperation.objects.order_by("id").values_list("state", flat=True)
    assert list(left) == ["running", "running", "stopped", "stopped", "finished"]


def test_a_dry_run_of_prunejobs_counts_and_deletes_nothing():
    insert(1500, "completed", timedelta(days=4))
    insert(2, "failed", timedelta(days=4))

    assert run("prunejobs", "--failed", "3d", "--cancelled", "100", "--dry-run") == (
        "Would delete: 1,500 completed (older than 3d), 2 failed (older than 3d),"
        " 0 cancelled (older than 100s), 0 operations (older than 90d).\n"
    )
    assert len(rows()) == 1502


def test_prunejobs_deletes_in_batches_until_nothing_is_left():
    insert(25, "completed", timedelta(days=4))

    assert run("prunejobs", "--batch-size", "10").startswith("Deleted: 25 completed")
    assert rows() == {}


def test_prunejobs_shows_its_progress_on_a_terminal():
    class Terminal(StringIO):
        def isatty(self):
            return True

    insert(3, "completed", timedelta(days=4))
    terminal = Terminal()
    call_command("prunejobs", "--batch-size", "2", stdout=terminal)

    *progress, summary = terminal.getvalue().split("\r")
    assert [line.strip() for line in progress] == ["", "2 deleted", "3 deleted"]
    assert summary.startswith("Deleted: 3 completed")


def test_prunejobs_leaves_the_handling_of_signals_as_it_was():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run("prunejobs")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def wait_until_it_is_blocked(connection):
    """Come back when the process that prunes waits for a lock. Give up after 30 seconds."""
    connection.execute("SET statement_timeout = '30s'")
    connection.execute(
        """
        DO $$ BEGIN
            WHILE NOT EXISTS (SELECT FROM pg_stat_activity
                               WHERE application_name = 'pruning' AND wait_event_type = 'Lock'
                                 AND datname = current_database()) LOOP
                PERFORM pg_stat_clear_snapshot(), pg_sleep(0.01);
            END LOOP;
        END $$
        """
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.processes
@pytest.mark.django_db(transaction=True)
def test_a_signal_ends_prunejobs_after_its_batch(child_environment, number):
    insert(25, "completed", timedelta(days=4))
    with session() as locker, session() as watcher:
        with locker.transaction():
            locker.execute("LOCK TABLE background_jobs")
            process = subprocess.Popen(
                [sys.executable, "-m", "django", "prunejobs", "--batch-size", "10"],
                env={**child_environment, "PGAPPNAME": "pruning"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            wait_until_it_is_blocked(watcher)
            process.send_signal(number)
        out, err = process.communicate(timeout=30)

    assert (process.returncode, err) == (0, "")
    assert out == (
        "Deleted: 10 completed (older than 3d), failed kept, cancelled kept, 0 operations (older than 90d)."
        " Stopped before the end.\n"
    )
    assert len(rows()) == 15


# ── Arguments ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("argument", ["soon", "-1", "1y", "3 d", "1e9", "nan", "", "999999999w"])
@pytest.mark.parametrize(
    ("command", "option"),
    [("sweepjobs", "--timeout"), ("prunejobs", "--completed"), ("prunejobs", "--failed")],
)
def test_a_bad_span_of_time_is_refused(command, option, argument):
    with pytest.raises(CommandError) as raised:
        run(command, f"{option}={argument}")
    assert str(raised.value) == (
        f"Error: argument {option}: {argument!r} must be a number of seconds, or a number with a unit:"
        " 90s, 15m, 12h, 3d, 2w."
    )


@pytest.mark.parametrize("argument", ["0", "-5", "many", "1.5", ""])
def test_a_bad_number_is_refused(argument):
    with pytest.raises(CommandError) as raised:
        run("prunejobs", f"--batch-size={argument}")
    assert str(raised.value) == (
        f"Error: argument --batch-size: {argument!r} must be a whole number, at least 1."
    )


# ── jobstats ──────────────────────────────────────────────────────────────────────────────────────────────


def no_constant(name):
    raise AssertionError(f"{name} is not JSON.")


def stats():
    return json.loads(run("jobstats", "--json"), parse_constant=no_constant)


def test_jobstats_without_any_job():
    assert stats() == {"window_seconds": 300.0, "queues": [], "workers": []}
    assert run("jobstats").splitlines()[-1] == "No worker is alive. Start one with: manage.py runjobs"


def test_jobstats_as_json():
    make_job(queue_name="mail", run_at=-timedelta(seconds=90))
    make_job(queue_name="mail", run_at=timedelta(hours=1))
    make_job("processing", queue_name="mail")
    make_job("failed", queue_name="mail")
    make_job("failed", queue_name="mail", updated_at=-timedelta(minutes=6))
    make_job("completed", queue_name="mail")
    make_job("completed", queue_name="mail", updated_at=-timedelta(minutes=6))
    make_job("cancelled", queue_name="mail")
    make_job("completed", queue_name="quiet", updated_at=-timedelta(minutes=6))
    BackgroundQueue.objects.create(
        name="paused", paused_at=make_job(queue_name="b").run_at, paused_by="ada", reason="mail is down"
    )
    BackgroundQueue.objects.create(name="resumed")
    alive = BackgroundWorker.objects.create(
        hostname="box", pid=7, processes=2, threads=4, async_slots=0, lease=timedelta(minutes=1), version="1",
        queues=["mail"], running=3,
    )  # fmt: skip
    BackgroundWorker.objects.create(
        hostname="gone", pid=8, processes=2, threads=4, async_slots=0, lease=timedelta(minutes=1),
        version="1", last_seen_at=make_job("cancelled", run_at=-timedelta(minutes=2)).run_at,
    )  # fmt: skip

    shown = stats()

    nothing = dict.fromkeys(
        ["queued", "due", "processing", "failed", "completed_lately", "failed_lately"], 0
    ) | {"has_clients": False, "paused": False, "paused_by": "", "paused_reason": "", "at_least": []}
    ages = [queue.pop("oldest_due_age") for queue in shown["queues"]]
    pickups = [(queue.pop("pickup_median"), queue.pop("pickup_p95")) for queue in shown["queues"]]
    pauses = [queue.pop("paused_for") for queue in shown["queues"]]
    assert shown["queues"] == [
        nothing | {"queue_name": "b", "queued": 1, "due": 1},
        {
            "queue_name": "mail",
            "queued": 2,
            "due": 1,
            "processing": 1,
            "failed": 2,
            "completed_lately": 1,
            "failed_lately": 1,
            "has_clients": False,
            "paused": False,
            "paused_by": "",
            "paused_reason": "",
            "at_least": [],
        },
        nothing
        | {"queue_name": "paused", "paused": True, "paused_by": "ada", "paused_reason": "mail is down"},
    ]
    assert ages[0] >= 0
    assert ages[1] >= 90
    assert ages[2] is None
    assert pickups[0] == pickups[2] == (None, None)
    assert 0 <= pickups[1][0] == pickups[1][1]
    assert (pauses[0], pauses[1]) == (None, None)
    assert pauses[2] >= 0
    (worker,) = shown["workers"]
    assert 0 <= worker.pop("silent_for") <= worker.pop("up_for")
    assert worker == {
        "id": str(alive.pk), "hostname": "box", "pid": 7, "queues": ["mail"], "state": "running",
        "running": 3, "slots": 8, "is_alive": True,
    }  # fmt: skip


def queues_by_name(most):
    with connection.cursor() as cursor:
        period, queues = store.queue_stats(cursor, timedelta(minutes=5), most)
    return period, {queue.queue_name: queue for queue in queues}


def test_figures_are_counted_so_far_and_no_further():
    for priority in (0, 0, 0, 5):
        make_job(queue_name="a", priority=priority)
    for queue in ("a", "b", "b", "b"):
        make_job(queue_name=queue, run_at=timedelta(hours=1))
    for status in ("processing", "failed"):
        for queue in ("a", "b", "b"):
            make_job(status, queue_name=queue, updated_at=-timedelta(hours=1))

    _, queues = queues_by_name(most=2)

    a, b = queues["a"], queues["b"]
    assert (a.due, a.queued, a.at_least) == (3, 4, ["queued", "due", "processing", "failed"])
    assert (b.due, b.queued, b.at_least) == (0, 2, ["queued", "processing", "failed"])
    assert (b.shown("due"), b.shown("queued")) == ("0", "2+")
    assert not any(queue.at_least for queue in queues_by_name(most=3)[1].values())


def test_many_queues_share_what_is_counted(db):
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO background_jobs (queue_name, job_name, payload)
            SELECT 'queue ' || n % 20, 'tests.jobs.add', '{}' FROM generate_series(1, 3000) AS n
            """
        )
    for most, counted in ((300, 150), (250, 125), (1, 1)):
        _, queues = queues_by_name(most)
        assert {queue.due for queue in queues.values()} == {max(counted, min(100, most))}
        assert all(("due" in queue.at_least) == (counted < 150) for queue in queues.values())


@pytest.mark.parametrize("status", ["completed", "failed"])
def test_where_much_has_finished_the_period_is_shorter(status):
    for minutes in (1, 2, 3, 4):
        make_job(status, updated_at=-timedelta(minutes=minutes))
        make_job("failed" if status == "completed" else "completed", updated_at=-timedelta(minutes=4))

    period, queues = queues_by_name(most=10)
    assert (period, queues["default"].completed_lately, queues["default"].failed_lately) == (300, 4, 4)
    for _ in range(4):
        make_job(status, updated_at=-timedelta(seconds=90))
    period, queues = queues_by_name(most=6)
    assert 180 <= period < 240
    lately = (queues["default"].completed_lately, queues["default"].failed_lately)
    assert lately == ((6, 0) if status == "completed" else (0, 6))


@pytest.mark.parametrize("run_at", ["9999-12-30 00:00Z", "0001-01-02 00:00Z"])
def test_jobstats_bears_any_instant(run_at):
    make_job()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE background_jobs SET run_at = %s", [run_at])

    (queue,) = stats()["queues"]
    assert (queue["queued"], queue["due"]) == (1, int(run_at < "2"))
    assert (queue["oldest_due_age"] is None) == (run_at > "2")


def test_jobstats_as_a_table():
    insert(1200, "processing", timedelta(0))
    BackgroundQueue.objects.create(name="mail", paused_at=make_job().run_at)
    BackgroundWorker.objects.create(
        hostname="box", pid=7, processes=2, threads=4, async_slots=0, lease=timedelta(minutes=1), version="1",
        running=3,
    )  # fmt: skip

    header, default, mail, worker = re.sub(r"\b\d+ s\b", "0 s", run("jobstats")).splitlines()
    assert header.split() == [
        "queue", "queued", "due", "oldest", "due", "processing", "failed", "done/min", "failed/min",
    ]  # fmt: skip
    assert default.split() == ["default", "1", "1", "0", "s", "1,200", "0", "0.0", "0.0"]
    assert mail.split() == ["mail", "0", "0", "0", "0", "0.0", "0.0", "paused"]
    assert worker == "worker box:7 running, 3 jobs for 8 slots, serves all queues, seen 0 s ago"


@pytest.mark.processes
@pytest.mark.django_db(transaction=True)
def test_jobstats_watches_until_it_is_interrupted(child_environment):
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "django", "jobstats", "--watch", "--json"],
        env=child_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(2):
        assert json.loads(process.stdout.readline())["queues"] == []
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")


# ── Our own transactions ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.django_db(transaction=True)
def test_our_own_transactions_are_read_committed_whatever_the_project_sets():
    def level():
        with store.own_transaction("default") as cursor:
            cursor.execute("SHOW transaction_isolation")
            return cursor.fetchone()

    with connection.cursor() as cursor:
        cursor.execute("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        try:
            assert level() == ("read committed",)
            cursor.execute("SHOW enable_seqscan")
            assert cursor.fetchone() == ("on",)
        finally:
            cursor.execute("RESET ALL")
            connection.close()


@pytest.mark.django_db(transaction=True)
def test_our_statements_work_where_the_project_manages_transactions_itself():
    connection.set_autocommit(False)
    try:
        job = make_job("completed", updated_at=-timedelta(days=4))
        assert run("prunejobs").startswith("Deleted: 1 completed")
        assert job.pk not in rows()
    finally:
        connection.rollback()
        connection.set_autocommit(True)


# ── canceljobs ────────────────────────────────────────────────────────────────────────────────────────────


def test_ids_may_be_as_large_as_they_get():
    job = make_job(id=3_000_000_000)

    assert run("canceljobs", str(job.pk)) == "1 cancelled, 0 asked to stop, 0 left as they are.\n"
    with pytest.raises(CommandError, match="'0' must be an id, which is a whole number from 1"):
        run("canceljobs", "0")
