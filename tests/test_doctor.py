"""Each finding of the doctor: what brings it about, what it says, and what does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection, transaction
from django.db.models import F
from django.db.models.functions import Now

from django_pgjobs import doctor, store
from django_pgjobs.doctor import Facts, Finding, Severity
from django_pgjobs.lifecycle import Status
from django_pgjobs.models import BackgroundQueue, BackgroundSchedule, BackgroundWorker
from tests.factories import make_job, rows
from tests.sessions import session
from tests.workers import until

pytestmark = pytest.mark.django_db


def make_worker(silent: timedelta = timedelta(0), **columns: Any) -> BackgroundWorker:
    values: dict[str, Any] = {
        "hostname": "box", "pid": 7, "processes": 2, "threads": 4, "async_slots": 0,
        "lease": timedelta(minutes=1), "version": "1", **columns,
    }  # fmt: skip
    worker = BackgroundWorker.objects.create(**values)
    BackgroundWorker.objects.filter(pk=worker.pk).update(last_seen_at=F("last_seen_at") - silent)
    return worker


def found(name: str, change: Callable[[Facts], Facts] = lambda facts: facts) -> list[Finding]:
    """The findings of a name by what is in the tables just now; or by what they would be with other facts."""
    return [finding for finding in doctor.findings(change(doctor.look("default"))) if finding.name == name]


def problem(name: str, change: Callable[[Facts], Facts] = lambda facts: facts) -> str:
    (finding,) = found(name, change)
    assert finding.advice
    return finding.problem


def execute(statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


# ── Workers and queues ────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_wrong_with_a_worker_that_does_its_work() -> None:
    worker = make_worker(running=1)
    make_job("processing", worker_id=worker.pk)
    for status in ("queued", "completed", "failed", "cancelled"):
        make_job(status)
    make_job(run_at=timedelta(days=1))
    of_the_server = {"autovacuum-off", "connections"}  # which is the tests', and shared by them
    assert {one.name for one in doctor.findings(doctor.look("default"))} <= of_the_server


def test_no_worker(settings: Any) -> None:
    assert problem("no-worker") == "No worker is alive."
    settings.PGJOBS = {"IMMEDIATE": True}
    assert not found("no-worker")
    make_job(run_at=timedelta(hours=1))
    make_job(queue_name="paused")
    BackgroundQueue.objects.create(name="paused", paused_at=Now())
    assert not found("no-worker")
    make_job()
    make_worker(silent=timedelta(minutes=2))
    (finding,) = found("no-worker")
    assert finding[:3] == ("no-worker", Severity.ERROR, "No worker is alive, and 1 job is due.")
    make_worker(hostname="other")
    assert not found("no-worker")


def test_a_silent_worker() -> None:
    make_worker(silent=timedelta(seconds=30))
    assert not found("silent-worker")
    make_worker(silent=timedelta(minutes=12), pid=8)
    text = "The worker box:8 has been silent for 12 min, which is longer than its lease."
    assert problem("silent-worker") == text


def test_a_paused_queue_in_which_jobs_are_due() -> None:
    make_worker()
    BackgroundQueue.objects.create(
        name="mail", paused_at=Now() - timedelta(hours=3), paused_by="ada", reason="mail is down"
    )
    make_job(queue_name="mail", run_at=timedelta(hours=1))
    assert not found("paused-queue")
    for _ in range(2):
        make_job(queue_name="mail", run_at=-timedelta(hours=1))
    assert problem("paused-queue") == (
        "The queue 'mail' was paused 3 h ago by ada (mail is down), and 2 jobs are due in it."
    )
    assert not found("slow-pickup") + found("unserved-queue")


@pytest.mark.parametrize("worker", [{"queues": ["other"]}, {"state": "stopping"}], ids=str)
def test_a_queue_that_nobody_serves(worker: dict[str, Any]) -> None:
    make_worker(**worker)
    make_job(queue_name="my mail", run_at=-timedelta(seconds=20))
    assert not found("unserved-queue")
    make_job(queue_name="my mail", run_at=-timedelta(minutes=5))
    (finding,) = found("unserved-queue")
    assert finding == Finding(
        "unserved-queue",
        Severity.ERROR,
        "No worker serves the queue 'my mail', in which 2 jobs are due, the oldest for 5 min.",
        "Start one with: manage.py runjobs --queue 'my mail'. Or let one that runs serve it as well.",
        "my mail",
    )
    for status in ("completed", "processing"):
        make_job(status, queue_name="my mail")  # by a worker that has gone, or will go
    assert found("unserved-queue")


@pytest.mark.parametrize("status", ["completed", "processing"])
def test_a_queue_that_clients_of_its_own_serve(status: str) -> None:
    make_worker(queues=["other"])
    make_job(queue_name="mail", run_at=-timedelta(minutes=5))
    assert found("unserved-queue")
    make_job(status, queue_name="mail", locked_by=None, worker_id=None)
    assert not found("unserved-queue")


def test_due_jobs_that_wait_although_workers_serve_them() -> None:
    make_worker(queues=["mail"], running=8)
    make_job(queue_name="mail", run_at=-timedelta(seconds=20))
    assert not found("slow-pickup")
    make_job(queue_name="mail", run_at=-timedelta(minutes=9))
    (finding,) = found("slow-pickup")
    assert finding.problem == (
        "In the queue 'mail', 2 jobs are due, the oldest for 9 min, although workers serve it."
    )
    assert finding.advice.startswith("All 8 slots that serve it are taken")
    make_worker(hostname="other")
    (finding,) = found("slow-pickup")
    assert finding.advice.startswith("Of the 16 slots that serve it, 8 are taken.")


def test_a_queue_whose_jobs_mostly_fail() -> None:
    for _ in range(9):
        make_job("failed", queue_name="mail")
        make_job("completed", queue_name="mail")
    assert not found("failing-queue")
    for _ in range(2):
        make_job("failed", queue_name="mail")
    assert problem("failing-queue") == (
        "In the queue 'mail', 11 of the 20 jobs that finished in the last 60 min failed for good."
    )


# ── Jobs ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_lost_jobs_that_nobody_sweeps() -> None:
    make_job(
        "processing", locked_at=-timedelta(seconds=65)
    )  # of a lease of 60 s, and a sweep may be under way
    make_job("processing", locked_by=None, locked_at=-timedelta(minutes=9))
    assert not found("lost-jobs")
    make_job("processing", locked_at=-timedelta(minutes=5))
    make_job("processing", locked_by=None, locked_at=-timedelta(minutes=11))
    assert problem("lost-jobs").startswith("2 jobs are processing by their status, but nobody has vouched")
    make_worker(lease=timedelta(minutes=10))
    assert problem("lost-jobs").startswith("1 job is processing")


def test_a_job_that_runs_for_long(settings: Any) -> None:
    worker = make_worker()
    make_job("processing", worker_id=worker.pk, attempted_at=-timedelta(minutes=50))
    make_job("processing", attempted_at=-timedelta(hours=5))  # of a host that is gone
    assert not found("long-running")
    job = make_job("processing", worker_id=worker.pk, attempted_at=-timedelta(hours=3))
    (finding,) = found("long-running")
    assert finding.problem == f"Job {job.pk}, 'tests.jobs.add', has run for 3 h on box:7."
    assert f"manage.py canceljobs {job.pk}" in finding.advice
    settings.PGJOBS = {"TIMEOUT": timedelta(hours=4)}
    assert not found("long-running")
    settings.PGJOBS = {"TIMEOUT": timedelta(hours=2)}
    assert problem("long-running") == (
        f"Job {job.pk}, 'tests.jobs.add', has run for 3 h on box:7, although its timeout is 2 h."
    )


def test_dead_letters_that_become_more() -> None:
    for hours in range(2, 24):
        make_job("failed", updated_at=-timedelta(hours=hours))
    for _ in range(9):
        make_job("failed", updated_at=-timedelta(minutes=5))
    assert not found("rising-dead-letters")
    make_job("failed")
    assert problem("rising-dead-letters") == (
        "Dead letters are rising: 10 in the last hour, beside 1.0 an hour in the day before."
    )
    for _ in range(60):
        make_job("failed", updated_at=-timedelta(hours=12))
    assert not found("rising-dead-letters")


def test_old_jobs_that_nobody_prunes(settings: Any) -> None:
    settings.PGJOBS = {"COMPLETED_RETENTION": timedelta(days=3), "CANCELLED_RETENTION": timedelta(days=30)}
    for status in Status:
        make_job(status, updated_at=-timedelta(days=3, hours=20))
    assert not found("unpruned")
    for status in Status:
        make_job(status, updated_at=-timedelta(days=9))
    assert problem("unpruned") == (
        "Jobs that are completed should be deleted after 3 days (COMPLETED_RETENTION), but the oldest"
        " finished 9 days ago."
    )


def test_a_schedule_that_is_not_carried_out() -> None:
    common = {"job_name": "tests.jobs.add", "cron": "* * * * *"}
    late = Now() - timedelta(minutes=10)
    BackgroundSchedule.objects.create(name="late", next_tick_at=late, **common)
    BackgroundSchedule.objects.create(name="disabled", next_tick_at=late, enabled=False, **common)
    BackgroundSchedule.objects.create(name="at rest", next_tick_at=late, declared=True, **common)
    BackgroundSchedule.objects.create(name="due", next_tick_at=Now(), **common)
    assert not found("late-schedule")  # without a worker there is no wonder
    make_worker()
    assert problem("late-schedule") == "A tick of the schedule 'late' has been due for 10 min."


# ── The database ──────────────────────────────────────────────────────────────────────────────────────────


def test_autovacuum_that_is_off() -> None:
    assert not found("autovacuum-off", lambda facts: facts._replace(vacuum=store.Vacuum(0, 0, 0, True)))
    execute("ALTER TABLE background_jobs SET (autovacuum_enabled = off)")
    assert problem("autovacuum-off").startswith("Autovacuum is off")


@pytest.mark.django_db(transaction=True)
def test_dead_rows() -> None:
    with session() as other:
        before = doctor.look("default").vacuum.dead
        other.execute(
            "INSERT INTO background_jobs (job_name, payload) SELECT 'x', '{}' FROM generate_series(1, 500)"
        )
        other.execute("DELETE FROM background_jobs")

        def counted() -> bool:
            other.execute("SELECT pg_stat_force_next_flush()")
            return doctor.look("default").vacuum.dead >= before + 500

        until(counted, what="the server to count dead rows")

    def with_(*vacuum: Any) -> Callable[[Facts], Facts]:
        return lambda facts: facts._replace(vacuum=store.Vacuum(*vacuum))

    assert problem("dead-rows", with_(1_000, 30_000, None, True)) == (
        "The table background_jobs has about 30,000 dead rows beside 1,000 that live, and was never vacuumed."
    )
    assert problem("dead-rows", with_(1_000, 30_000, 7200, True)).endswith("and was last vacuumed 2 h ago.")
    for healthy in ((1_000, 30_000, 60, True), (1_000, 19_000, None, True), (200_000, 30_000, None, True)):
        assert not found("dead-rows", with_(*healthy))


@pytest.mark.django_db(transaction=True)
def test_a_snapshot_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    with session(application_name="pg_dump") as other:
        other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT 1")
        assert not found("old-snapshot")
        monkeypatch.setattr(doctor, "TOO_LONG_HELD", 0)
        (finding,) = found("old-snapshot")
        pid = other.info.backend_pid
        assert finding.problem.startswith(f"The session {pid} (")
        assert "pg_dump, idle in transaction) has held a snapshot for " in finding.problem
        assert finding.advice.endswith(f"SELECT pg_terminate_backend({pid}).")
        other.execute("ROLLBACK")
        assert str(pid) not in {one.subject for one in found("old-snapshot")}


@pytest.mark.parametrize(
    ("snapshot", "text", "advice"),
    [
        (
            store.Snapshot("prepared transaction", "it's", "ada", 7200, 3),
            "The prepared transaction it's (ada) has held a snapshot for 2 h.",
            "COMMIT PREPARED 'it''s', or ROLLBACK PREPARED 'it''s'.",
        ),
        (
            store.Snapshot("replication slot", "standby", "", None, 2_000_000),
            "The replication slot standby has held a snapshot for 2,000,000 transactions.",
            "SELECT pg_drop_replication_slot('standby').",
        ),
        (store.Snapshot("replication slot", "standby", "", None, 2_000), "", ""),
    ],
)
def test_snapshots_that_no_session_holds(snapshot: store.Snapshot, text: str, advice: str) -> None:
    findings = found("old-snapshot", lambda facts: facts._replace(snapshot=snapshot))
    assert len(findings) == bool(text)
    for finding in findings:
        assert finding.problem.startswith(text)
        assert finding.advice.endswith(advice)


@pytest.mark.django_db(transaction=True)
def test_a_table_that_is_mostly_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    execute(
        "INSERT INTO background_jobs (job_name, payload)"
        " SELECT repeat('x', 200), '{}' FROM generate_series(1, 3000)"
    )
    execute("VACUUM ANALYZE background_jobs")
    sizes = {size.name: size for size in doctor.look("default").sizes}
    assert 0.5 < sizes["background_jobs"].needed / sizes["background_jobs"].bytes < 2
    assert sizes["idx_jobs_queued_run_at"].needed > sizes["idx_jobs_queued_run_at"].bytes / 4
    execute("DELETE FROM background_jobs WHERE id % 300 <> (SELECT max(id) % 300 FROM background_jobs)")
    execute("VACUUM ANALYZE background_jobs")
    assert not found("bloat")
    monkeypatch.setattr(doctor, "TOO_LARGE", 50_000)
    findings = {one.subject: one for one in found("bloat")}
    assert findings["background_jobs"].problem == (
        "background_jobs takes 1 MB on disk, for contents of about 0 MB."
    )
    assert "VACUUM FULL" in findings["background_jobs"].advice
    assert findings["idx_jobs_queued_run_at"].advice == "REINDEX INDEX CONCURRENTLY idx_jobs_queued_run_at."


def test_sessions_that_run_out() -> None:
    assert doctor.look("default").connections.open >= 1

    def with_(open: int) -> Callable[[Facts], Facts]:
        return lambda facts: facts._replace(connections=store.Connections(97, None, None, open, 0, 0))

    assert not found("connections", with_(77))
    (finding,) = found("connections", with_(80))
    assert finding.severity is Severity.WARNING
    assert finding.problem == "Of the 97 sessions that the database server allows, 80 are open."
    (finding,) = found("connections", with_(93))
    assert finding.severity is Severity.ERROR


def test_two_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not found("clock")
    here = doctor.time.time
    monkeypatch.setattr(doctor.time, "time", lambda: here() + 4000)
    assert 3000 < doctor.look("default").clock_ahead <= 4000
    monkeypatch.setattr(doctor.time, "time", lambda: here() - 8000)
    assert -8000 <= doctor.look("default").clock_ahead < -3000

    def with_(seconds: float) -> Callable[[Facts], Facts]:
        return lambda facts: facts._replace(clock_ahead=seconds)

    assert not found("clock", with_(-4))
    assert problem("clock", with_(42)) == "The clock of this machine is 42 s ahead of the database's."
    assert problem("clock", with_(-4000)) == "The clock of this machine is 67 min behind the database's."


def test_a_slow_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    make_job()
    before = rows()
    assert "slow-claim" not in {one.name for one in doctor.examine("default")}
    monkeypatch.setattr(doctor, "TOO_MANY_PAGES", 3)
    (finding,) = [one for one in doctor.examine("default") if one.name == "slow-claim"]
    assert finding.problem.startswith("To claim a job, ")
    assert rows() == before


# ── What the checks find ──────────────────────────────────────────────────────────────────────────────────


def test_what_is_missing_is_found_at_a_glance_and_once(settings: Any) -> None:
    execute("ALTER TABLE background_jobs DISABLE TRIGGER background_jobs_inserted")
    for found in (doctor.glance("default")[1], doctor.examine("default")):
        (finding,) = [one for one in found if one.name == "django_pgjobs.W003"]
        assert finding.severity is Severity.WARNING
        assert "background_jobs_inserted" in finding.problem
        assert "manage.py migrate django_pgjobs" in finding.advice
    settings.SILENCED_SYSTEM_CHECKS = ["django_pgjobs.W003"]
    assert "django_pgjobs.W003" not in {one.name for one in doctor.glance("default")[1]}


def test_without_a_table_there_is_nothing_else_to_say() -> None:
    with transaction.atomic():
        execute("DROP TABLE background_jobs")
        facts, found = doctor.glance("default")
        assert facts is None
        assert [one.name for one in found] == [one.name for one in doctor.examine("default")]
        assert [(one.name, one.severity) for one in found] == [("django_pgjobs.W002", Severity.ERROR)]
        transaction.set_rollback(True)


def test_of_findings_that_are_alike_a_few_are_shown() -> None:
    make_worker(queues=[])
    for n in range(8):
        make_job(queue_name=f"queue {n}", run_at=-timedelta(minutes=5))
        make_worker(silent=timedelta(minutes=5), pid=n)
    found = doctor.examine("default")
    unserved = [one for one in found if one.name == "unserved-queue"]
    assert [one.subject for one in unserved] == [*(f"queue {n}" for n in range(5)), ""]
    assert unserved[-1].problem == "And 3 more like these."
    severities = [one.severity for one in found]
    assert severities == sorted(severities, reverse=True)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"), (0.0804, "80 ms"), (2.46, "2.5 s"), (9.96, "10 s"), (119.4, "119 s"), (119.6, "2 min"),
        (7199, "2 h"), (7100, "118 min"), (47 * 3600, "47 h"), (48 * 3600, "2 days"), (4e8, "4,630 days"),
    ],
)  # fmt: skip
def test_times_in_words(seconds: float, text: str) -> None:
    assert doctor.in_words(seconds) == text


# ── jobsdoctor ────────────────────────────────────────────────────────────────────────────────────────────


def jobsdoctor(*arguments: str) -> tuple[int, str]:
    out = StringIO()
    try:
        call_command("jobsdoctor", *arguments, stdout=out)
    except SystemExit as error:
        return int(error.code or 0), out.getvalue()
    return 0, out.getvalue()


def test_jobsdoctor_in_sentences() -> None:
    make_job(run_at=-timedelta(minutes=5))
    status, said = jobsdoctor()
    assert status == 2
    assert said.startswith(
        "error: No worker is alive, and 1 job is due. [no-worker]\n    Start one with: manage.py runjobs."
    )


def test_what_is_to_be_done_is_said_once() -> None:
    for hostname in ("a", "b\x1b[2J"):
        make_worker(silent=timedelta(minutes=5), hostname=hostname)
    _, said = jobsdoctor()
    lines = said.splitlines()
    begin = lines.index(next(line for line in lines if "silent-worker" in line))
    assert lines[begin].startswith("warning: The worker a:7 has been silent for 5 min")
    assert lines[begin + 1].startswith("warning: The worker 'b\\x1b[2J':7 has been silent for 5 min")
    assert lines[begin + 2].startswith("    It may have been killed")


def test_jobsdoctor_as_json() -> None:
    make_job(run_at=-timedelta(minutes=5))
    status, said = jobsdoctor("--json")
    assert status == 2
    shown = json.loads(said)
    assert shown["database"] == "default"
    assert shown["findings"][0] | {"advice": ""} == {
        "name": "no-worker",
        "severity": "error",
        "problem": "No worker is alive, and 1 job is due.",
        "advice": "",
        "subject": "",
    }


@pytest.mark.parametrize(
    ("severities", "status"), [([], 0), ([Severity.WARNING], 1), ([Severity.ERROR, Severity.WARNING], 2)]
)
def test_the_exit_status_is_the_worst_of_what_was_found(
    severities: list[Severity], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [Finding("name", severity, "Problem.", "Advice.") for severity in severities]
    monkeypatch.setattr(doctor, "examine", lambda alias: findings)
    found_status, said = jobsdoctor()
    assert found_status == status
    assert (said == "Nothing is wrong.\n") == (not findings)


def test_a_database_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OperationalError("connection refused\n")

    with monkeypatch.context() as patch:
        patch.setattr(store, "catalog", refuse)
        status, said = jobsdoctor()
        assert status == 2
        assert "could not be asked: connection refused [django_pgjobs.E009]" in said
    monkeypatch.setattr(store, "workers", refuse)
    with pytest.raises(CommandError, match=r"'default' could not be asked: connection refused$") as caught:
        jobsdoctor()
    assert caught.value.returncode == 2
    settings.PGJOBS = {"DATABASE": "nowhere"}
    with pytest.raises(CommandError, match="'nowhere', which is not an alias") as caught:
        jobsdoctor()
    assert caught.value.returncode == 2
