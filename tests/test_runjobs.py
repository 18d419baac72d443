"""What a worker host does, seen from outside: real processes, real signals, real rows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction

from django_pgjobs import jobs
from django_pgjobs.channel import NEVER, clock
from django_pgjobs.children import Held
from django_pgjobs.dispatch import MOST_SUSPECTS
from django_pgjobs.lifecycle import Event, Status, Verdict
from django_pgjobs.models import BackgroundJob, BackgroundQueue, BackgroundWorker
from django_pgjobs.store import Claim, Claimed
from django_pgjobs.supervisor import BATCH_BYTES, Options, Supervisor
from tests import tasks
from tests.jobs import again
from tests.models import Effect
from tests.sessions import session
from tests.workers import Worker, Workers, cpu_seconds, is_running, until

pytestmark = pytest.mark.processes

# Nothing but notifications and deadlines can make a worker look before an hour has passed.
NO_POLLING = ("--poll-interval", "3600")
ONE_SLOT = ("--processes", "1", "--threads", "1")
# A lease that tests can outlive, and no pause before what was lost may run again.
SHORT_LEASE = {"LEASE": 2, "SWEEP_INTERVAL": 0.3, "LOST_DELAY": 0}


def effects(what: str) -> int:
    return Effect.objects.filter(what=what).count()


def executor_of(what: str) -> int:
    """The process that left an Effect."""
    return until(lambda: Effect.objects.filter(what=what).values_list("pid", flat=True).first(), what=what)


def ends_as(job: BackgroundJob, status: Status) -> Callable[[], bool]:
    return lambda: job.refresh().status == status


def execute(statement: str, *parameters: Any) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []


# ── Running ───────────────────────────────────────────────────────────────────────────────────────────────


def test_it_runs_plain_and_async_jobs_and_keeps_their_results(workers: Workers) -> None:
    plain, async_ = tasks.note.enqueue("plain"), tasks.anote.enqueue("async")
    assert workers.start("--drain").wait() == 0
    assert [(job.refresh().status, job.result) for job in (plain, async_)] == [
        ("completed", "plain"),
        ("completed", "async"),
    ]
    assert effects("plain") == effects("async") == 1
    assert plain.attempts == 1
    assert plain.started_at is not None
    assert not BackgroundWorker.objects.exists()


def test_a_notification_starts_a_job_at_once(workers: Workers) -> None:
    worker = workers.start(*NO_POLLING).until_listening()
    job = tasks.note.enqueue("told")
    until(ends_as(job, Status.COMPLETED))
    assert worker.stop() == 0


def test_without_notifications_polling_finds_jobs(workers: Workers) -> None:
    worker = workers.start("--poll-interval", "0.2").until_listening()
    with transaction.atomic():
        execute("SET LOCAL pgjobs.notify = 'off'")
        job = tasks.note.enqueue("untold")
    until(ends_as(job, Status.COMPLETED))
    assert worker.stop() == 0


def test_jobs_enqueued_while_every_slot_is_busy_are_not_forgotten(workers: Workers, tmp_path: Path) -> None:
    worker = workers.start(*NO_POLLING, *ONE_SLOT).until_listening()
    tasks.wait_for_file.enqueue(str(tmp_path / "go"))
    until(lambda: effects("waited started"))
    job = tasks.note.enqueue("later")
    (tmp_path / "go").touch()
    until(ends_as(job, Status.COMPLETED))
    assert worker.stop() == 0


def test_what_was_queued_before_the_worker_started_is_found(workers: Workers) -> None:
    ids = tasks.nothing.enqueue_many([((number,), {}) for number in range(50)])
    workers.start(*NO_POLLING)
    done = BackgroundJob.objects.filter(pk__in=ids, status="completed")
    until(lambda: done.count() == 50)


def test_a_failed_job_is_retried_when_its_backoff_is_over_and_not_at_the_next_poll(workers: Workers) -> None:
    workers.start(*NO_POLLING).until_listening()
    job = tasks.fail_twice.enqueue("shy")
    until(ends_as(job, Status.COMPLETED))
    assert job.attempts == 3
    assert [error["message"] for error in job.errors] == ["shy is not ready"] * 2
    assert job.last_error == "RuntimeError: shy is not ready"


def test_a_delayed_job_starts_when_it_is_due(workers: Workers) -> None:
    workers.start(*NO_POLLING).until_listening()
    job = tasks.note.using(run_at=timedelta(seconds=0.5)).enqueue("in a moment")
    until(ends_as(job, Status.COMPLETED))
    assert job.attempted_at >= job.run_at


def test_drain_runs_what_jobs_enqueue_too(workers: Workers) -> None:
    tasks.fan_out.enqueue(30)
    assert workers.start("--drain").wait() == 0
    assert Effect.objects.filter(what__startswith="child").count() == 30


def test_it_serves_the_queues_that_it_is_told_to_in_their_order(workers: Workers) -> None:
    low, high = (tasks.note.using(queue=name) for name in ("low", "high"))
    low.enqueue("low"), high.enqueue("high")
    other = tasks.note.using(queue="other").enqueue("other")
    assert workers.start(*ONE_SLOT, "--drain", "--queue", "high", "--queue", "low").wait() == 0
    assert list(Effect.objects.order_by("id").values_list("what", flat=True)) == ["high", "low"]
    assert other.refresh().status == "queued"


def test_a_paused_queue_waits(workers: Workers) -> None:
    BackgroundQueue.objects.create(name="slow", paused_at="2026-01-01T00:00Z")
    job = tasks.note.using(queue="slow").enqueue("paused")
    assert workers.start("--drain").wait() == 0
    assert job.refresh().status == "queued"


def test_with_zero_retention_completing_a_job_deletes_it(workers: Workers) -> None:
    tasks.note.enqueue("gone")
    tasks.give_back.enqueue({"a": 1})
    failing = tasks.fail_twice.using(max_attempts=1).enqueue("kept")
    assert workers.start("--drain", settings={"COMPLETED_RETENTION": 0}).wait() == 0
    assert effects("gone") == 1
    assert list(BackgroundJob.objects.all()) == [failing]


def test_results_that_cannot_be_stored_do_not_hold_up_their_job(workers: Workers) -> None:
    workers.start().until_listening()
    with transaction.atomic():
        execute(
            "INSERT INTO background_jobs (job_name, payload) VALUES (%s, %s)",
            "tests.tasks.give_back", '{"args": ["fine"]}',
        )  # fmt: skip
        execute("ALTER TABLE background_jobs ADD CONSTRAINT no_poison CHECK (result <> '\"poison\"')")
    try:
        bad = tasks.give_back.enqueue("poison")
        good = tasks.give_back.enqueue("food")
        until(ends_as(bad, Status.COMPLETED))
        until(ends_as(good, Status.COMPLETED))
        assert bad.result is None
        assert "could not be stored" in bad.metadata["result_problem"]
        assert good.result == "food"
    finally:
        execute("ALTER TABLE background_jobs DROP CONSTRAINT no_poison")


def test_rows_written_by_anyone_cannot_stop_a_worker(workers: Workers) -> None:
    bad = ['"text"', "[1]", '{"args": 1}', '{"x": 1}', '{"args": [1e5000]}', '{"kwargs": {"nope": 1}}', "{}"]
    for payload in bad:
        execute(
            "INSERT INTO background_jobs (job_name, payload, max_attempts, metadata) VALUES (%s, %s, 1, %s)",
            "tests.tasks.note", payload, '{"interruptions": "many", "unknown_since": [1]}',
        )  # fmt: skip
    good = tasks.note.enqueue("good")
    assert workers.start("--drain").wait() == 0
    assert BackgroundJob.objects.filter(status="failed").count() == len(bad)
    assert good.refresh().status == "completed"


def test_a_locked_row_does_not_hold_up_the_others(workers: Workers, tmp_path: Path) -> None:
    worker = workers.start("--processes", "1", "--threads", "4").until_listening()
    locked = tasks.wait_for_file.enqueue(str(tmp_path / "go"))
    until(lambda: effects("waited started"))
    with transaction.atomic():
        execute("SELECT FROM background_jobs WHERE id = %s FOR UPDATE", locked.pk)
        (tmp_path / "go").touch()
        until(lambda: effects("waited ended"))
        with_it = tasks.note.enqueue("unhindered")
    until(ends_as(with_it, Status.COMPLETED))
    until(ends_as(locked, Status.COMPLETED))
    assert worker.stop() == 0


# ── Names that are not known here ─────────────────────────────────────────────────────────────────────────


def test_an_unknown_name_is_parked_without_costing_an_attempt(workers: Workers) -> None:
    execute("INSERT INTO background_jobs (job_name, payload) VALUES ('shop.jobs.gone', '{}')")
    assert workers.start("--drain").wait() == 0
    job = BackgroundJob.objects.get()
    assert (job.status, job.attempts) == ("queued", 0)
    assert job.run_at - job.attempted_at == pytest.approx(timedelta(seconds=5), abs=timedelta(seconds=2))
    assert "unknown_since" in job.metadata


def test_a_name_that_stays_unknown_becomes_a_dead_letter(workers: Workers) -> None:
    execute("INSERT INTO background_jobs (job_name, payload) VALUES ('shop.jobs.gone', '{}')")
    assert workers.start("--drain", settings={"UNKNOWN_JOB_AFTER": 0}).wait() == 0
    job = BackgroundJob.objects.get()
    assert job.status == "failed"
    assert job.last_error == (
        "No job function is named 'shop.jobs.gone' here. Was it renamed? Keep the old name with"
        " @job(aliases=[...])."
    )


def test_a_job_claimed_too_often_is_a_dead_letter_without_starting(workers: Workers) -> None:
    job = tasks.note.using(max_attempts=2).enqueue("spent")
    execute("UPDATE background_jobs SET attempts = 2")
    assert workers.start("--drain").wait() == 0
    assert job.refresh().status == "failed"
    assert job.last_error == "Claimed 3 times, although max_attempts is 2."
    assert effects("spent") == 0


# ── Executors that die ────────────────────────────────────────────────────────────────────────────────────


def test_a_killed_executor_costs_its_running_job_one_attempt_and_nobody_else(
    workers: Workers, tmp_path: Path
) -> None:
    worker = workers.start("--processes", "1", "--threads", "1", *NO_POLLING).until_listening()
    running = tasks.wait_for_file.enqueue(str(tmp_path / "go"))
    executor = executor_of("waited started")
    waiting = tasks.note.enqueue("waiting")
    os.kill(executor, signal.SIGKILL)
    until(lambda: effects("waited started") == 2)  # started again, in another executor
    assert running.refresh().attempts == 2
    assert running.crashes == 1
    assert running.last_error == "executor died with signal 9; possibly out of memory"
    (tmp_path / "go").touch()
    until(ends_as(running, Status.COMPLETED))
    until(ends_as(waiting, Status.COMPLETED))
    assert waiting.attempts == 1
    assert worker.stop() == 0


def test_the_log_tells_of_an_executor_that_dies_without_a_job(workers: Workers) -> None:
    worker = workers.start("--processes", "1", *NO_POLLING).until_listening()
    job = tasks.note.enqueue("done")
    executor = executor_of("done")
    until(ends_as(job, Status.COMPLETED))
    os.kill(executor, signal.SIGKILL)
    worker.until_said(f"Executor {executor} died with signal 9; possibly out of memory. Jobs that it had: 0.")
    assert worker.stop() == 0


@pytest.mark.parametrize(
    ("job", "argument", "reason"),
    [
        (tasks.kill_executor, signal.SIGKILL, "died with signal 9; possibly out of memory"),
        (tasks.kill_executor, signal.SIGSEGV, "died with signal 11"),
        (tasks.exit_process, 0, "exited with status 0"),
        (tasks.exit_process, 3, "exited with status 3"),
    ],
)
def test_a_job_that_kills_its_executor_ends_as_a_dead_letter(
    workers: Workers, job: jobs.JobFunction[[int], None], argument: int, reason: str
) -> None:
    killer = job.using(max_attempts=10).enqueue(int(argument))
    good = [tasks.note.enqueue(f"good {number}") for number in range(5)]
    assert workers.start("--drain").wait() == 0
    assert killer.refresh().status == "failed"
    assert (killer.attempts, killer.crashes) == (3, 3)
    assert killer.last_error == f"The job killed its executor 3 times (executor {reason})."
    assert all(one.refresh().status == "completed" for one in good)


def test_an_executor_is_replaced_after_its_share_of_jobs(workers: Workers) -> None:
    for number in range(6):
        tasks.note.enqueue(f"job {number}")
    options = ("--drain", *ONE_SLOT, "--max-jobs-per-executor", "2")
    assert workers.start(*options).wait() == 0
    assert BackgroundJob.objects.filter(status="completed", attempts=1).count() == 6
    assert max(Counter(Effect.objects.values_list("pid", flat=True)).values()) <= 2


def test_without_its_fork_server_a_host_ends_and_says_so(workers: Workers, tmp_path: Path) -> None:
    worker = workers.start("--processes", "1", *NO_POLLING).until_listening()
    job = tasks.wait_for_file.enqueue(str(tmp_path / "never"))
    executor = executor_of("waited started")
    fork_server = worker.descendants()[0]
    assert fork_server != executor
    os.kill(fork_server, signal.SIGKILL)
    assert worker.wait() == 1
    assert worker.said("The fork server has died")
    assert not is_running(executor)
    assert (job.refresh().status, job.attempts, job.crashes) == ("queued", 1, 1)


# ── Workers that die ──────────────────────────────────────────────────────────────────────────────────────


def test_executors_end_with_their_supervisor(workers: Workers, tmp_path: Path) -> None:
    worker = workers.start().until_listening()
    tasks.wait_for_file.enqueue(str(tmp_path / "never"))
    executor = executor_of("waited started")
    family = worker.descendants()
    assert executor in family
    worker.signal(signal.SIGKILL)
    until(lambda: not any(map(is_running, family)), what="the executors to end")


def test_what_a_dead_worker_held_is_recovered_by_another(workers: Workers, tmp_path: Path) -> None:
    dying = workers.start(settings=SHORT_LEASE).until_listening()
    job = tasks.wait_for_file.enqueue(str(tmp_path / "go"))
    until(lambda: effects("waited started"))
    dying.signal(signal.SIGKILL)
    dying.wait()
    assert job.refresh().status == "processing"
    workers.start(settings=SHORT_LEASE)
    until(lambda: effects("waited started") == 2, what="the second start")
    assert (job.refresh().attempts, job.last_error) == (2, "Worker timeout detected")
    (tmp_path / "go").touch()
    until(ends_as(job, Status.COMPLETED))


def test_a_lost_job_that_must_not_run_twice_becomes_a_dead_letter(workers: Workers, tmp_path: Path) -> None:
    dying = workers.start(settings=SHORT_LEASE).until_listening()
    job = tasks.wait_once.enqueue(str(tmp_path / "never"))
    until(lambda: effects("once started"))
    dying.signal(signal.SIGKILL)
    workers.start(settings=SHORT_LEASE)
    until(ends_as(job, Status.FAILED))
    assert effects("once started") == 1
    assert job.last_error == (
        "Worker timeout detected. It may have run, and is declared with rerun_if_lost=False."
    )


def test_a_job_that_runs_for_longer_than_the_lease_keeps_its_claim(workers: Workers, tmp_path: Path) -> None:
    settings = {"LEASE": 1, "SWEEP_INTERVAL": 0.1, "LOST_DELAY": 0}
    for _ in range(2):
        workers.start(settings=settings).until_listening()
    job = tasks.wait_for_file.enqueue(str(tmp_path / "go"))
    until(lambda: effects("waited started"))
    started_at = job.refresh().attempted_at
    until(lambda: job.refresh().locked_at - started_at > timedelta(seconds=3), what="three leases to pass")
    (tmp_path / "go").touch()
    until(ends_as(job, Status.COMPLETED))
    assert (effects("waited started"), job.attempts) == (1, 1)


def test_a_worker_that_was_stopped_for_too_long_is_refused(workers: Workers, tmp_path: Path) -> None:
    stopped = workers.start(settings=SHORT_LEASE).until_listening()
    job = tasks.wait_for_file.enqueue(str(tmp_path / "go"))
    executor = executor_of("waited started")
    stopped.signal(signal.SIGSTOP)
    workers.start(settings=SHORT_LEASE).until_listening()
    until(lambda: effects("waited started") == 2, what="the job to start elsewhere")
    token = job.refresh().locked_by
    stopped.signal(signal.SIGCONT)
    stopped.until_said("the claim was lost")
    assert (job.refresh().status, job.locked_by) == ("processing", token)
    (tmp_path / "go").touch()
    until(ends_as(job, Status.COMPLETED))
    assert job.attempts == 2
    assert executor != Effect.objects.filter(what="waited started").latest("id").pid
    assert stopped.stop() == 0


# ── Stopping ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_signal_lets_running_jobs_finish_and_takes_no_new_ones(
    workers: Workers, tmp_path: Path
) -> None:
    worker = workers.start(*ONE_SLOT).until_listening()
    running = tasks.wait_for_file.enqueue(str(tmp_path / "go"))
    until(lambda: effects("waited started"))
    worker.signal(signal.SIGTERM)
    worker.until_said("stopping")
    late = tasks.note.enqueue("late")
    (tmp_path / "go").touch()
    assert worker.wait() == 0
    assert running.refresh().status == "completed"
    assert (late.refresh().status, late.attempts) == ("queued", 0)
    assert not BackgroundWorker.objects.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_worker_ends_at_once(workers: Workers, number: int) -> None:
    worker = workers.start(*NO_POLLING).until_listening()
    family = worker.descendants()
    worker.signal(number)
    assert worker.wait() == 0
    assert not any(map(is_running, family))


def test_what_does_not_finish_within_the_grace_is_interrupted(workers: Workers, tmp_path: Path) -> None:
    worker = workers.start("--grace", "0.3").until_listening()
    rerun = tasks.wait_for_file.enqueue(str(tmp_path / "never"))
    once = tasks.wait_once.enqueue(str(tmp_path / "never"))
    async_ = tasks.await_file.enqueue(str(tmp_path / "never"))
    executors = [executor_of(what) for what in ("waited started", "once started", "awaited started")]
    assert worker.stop() == 0
    assert not any(map(is_running, executors))
    for job in (rerun, async_):
        assert (job.refresh().status, job.attempts, job.locked_by) == ("queued", 0, None)
        assert job.metadata["interruptions"] == 1
        assert job.errors == []
    assert once.refresh().status == "failed"


def test_as_the_first_process_of_a_container_it_stops_and_sees_orphans_off(
    workers: Workers, tmp_path: Path
) -> None:
    container = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*container, "true"], capture_output=True, check=False).returncode:
        pytest.skip("Processes of a container's own are not to be had here.")
    outside = workers.start(*ONE_SLOT, below=container).until_listening()
    assert outside.said("runjobs 1:")
    host = outside.descendants()[0]
    tasks.leave_an_orphan.enqueue(str(tmp_path / "go"))
    until(lambda: "sh" in children_of(host))
    (tmp_path / "go").touch()
    until(lambda: not any(name.startswith("sh") for name in children_of(host)), what="the orphan to be gone")
    os.kill(host, signal.SIGTERM)
    assert outside.wait() == 0


def children_of(pid: int) -> list[str]:
    """The names of the programs, those that have ended and wait to be seen off included."""
    shown = subprocess.run(
        ["ps", "-o", "comm=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [line.split()[0] for line in shown.stdout.splitlines()]


def test_a_second_signal_stops_at_once(workers: Workers, tmp_path: Path) -> None:
    worker = workers.start("--grace", "3600").until_listening()
    job = tasks.wait_for_file.enqueue(str(tmp_path / "never"))
    until(lambda: effects("waited started"))
    worker.signal(signal.SIGTERM)
    worker.until_said("stopping")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert (job.refresh().status, job.attempts) == ("queued", 0)


def test_a_worker_says_what_it_serves_and_never_shows_arguments(workers: Workers) -> None:
    tasks.note.enqueue("a secret")
    again.enqueue(60.123456)
    worker = workers.start("--drain", "--processes", "2", "--threads", "3", "--async-slots", "5")
    assert worker.wait() == 0
    assert worker.said("serving all queues of database 'default'")
    assert worker.said("2 processes of 3 threads and 5 async slots; at most 18 connections")
    assert worker.said("name=tests.tasks.note queue=default attempt=1 completed seconds=")
    assert worker.said("name=tests.jobs.again queue=default attempt=1 failed again_in=60.123s seconds=")
    assert not worker.said("secret")


# ── The database goes away ────────────────────────────────────────────────────────────────────────────────


def terminate_connections(purpose: str) -> int:
    return len(
        execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = %s AND datname = current_database()",
            f"django_pgjobs {purpose}",
        )
    )


def test_a_lost_connection_costs_nothing(workers: Workers, tmp_path: Path) -> None:
    worker = workers.start(*ONE_SLOT).until_listening()
    job = tasks.wait_for_file.enqueue(str(tmp_path / "go"))
    until(lambda: effects("waited started"))
    assert terminate_connections("worker") == 1
    (tmp_path / "go").touch()
    until(ends_as(job, Status.COMPLETED))
    assert job.attempts == 1
    assert worker.stop() == 0


def test_a_lost_listener_listens_again(workers: Workers) -> None:
    worker = workers.start(*NO_POLLING).until_listening()
    assert terminate_connections("listener") == 1
    worker.until_said("Not listening for new jobs")
    until(lambda: worker.log.read_text().count("Listening for new jobs.") == 2)
    job = tasks.note.enqueue("heard again")
    until(ends_as(job, Status.COMPLETED))
    assert worker.process.poll() is None


def test_a_worker_does_not_spin_while_the_database_refuses(workers: Workers) -> None:
    worker = workers.start("--poll-interval", "3600", settings={"LEASE": 1}).until_listening()
    execute("ALTER TABLE background_workers RENAME TO background_workers_away")
    try:
        worker.until_said("The database does not answer as it should")
        before = cpu_seconds(worker.pid)
        began = time.monotonic()
        until(lambda: time.monotonic() - began > 2)
        assert cpu_seconds(worker.pid) - before < 1
    finally:
        execute("ALTER TABLE background_workers_away RENAME TO background_workers")
    worker.until_said("The database answers again")
    assert worker.stop() == 0


def test_a_worker_waits_for_a_database_that_is_not_there_yet(workers: Workers) -> None:
    execute("ALTER TABLE background_jobs RENAME TO background_jobs_away")
    try:
        worker = workers.start("--drain")
        worker.until_said(
            "The database does not answer as it should; trying again."
            ' If it has not been migrated, run: manage.py migrate. relation "background_jobs" does not exist'
        )
    finally:
        execute("ALTER TABLE background_jobs_away RENAME TO background_jobs")
    job = tasks.note.enqueue("patience")
    assert worker.wait() == 0
    assert job.refresh().status == "completed"


# ── One job does not disturb the next ─────────────────────────────────────────────────────────────────────


def test_an_open_transaction_is_rolled_back_and_told(workers: Workers) -> None:
    worker = workers.start(*ONE_SLOT).until_listening()
    messy = tasks.leave_a_mess.enqueue()
    until(ends_as(messy, Status.COMPLETED))
    clean = tasks.note.enqueue("clean")
    until(ends_as(clean, Status.COMPLETED))
    assert effects("never committed") == 0
    assert Effect.objects.get(what="clean").detail == "en-us"
    worker.until_said("left a transaction open on 'default'")


@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_forked_child_of_a_job_does_not_go_on_as_an_executor(workers: Workers, threads: str) -> None:
    worker = workers.start("--processes", "1", "--threads", threads, *NO_POLLING).until_listening()
    forks = tasks.fork_and_exit.enqueue()
    until(ends_as(forks, Status.COMPLETED))
    after = [tasks.note.enqueue("after") for _ in range(4)]
    until(lambda: all(job.refresh().status == "completed" for job in after))
    assert (forks.attempts, effects("after")) == (1, 4)
    assert worker.stop() == 0


def test_a_forked_child_of_an_async_job_does_not_end_the_job(workers: Workers, tmp_path: Path) -> None:
    """It shares the memory with the marks, by which a job counts as done even if its executor dies then."""
    workers.start("--processes", "1", *NO_POLLING).until_listening()
    job = tasks.fork_and_wait.enqueue(str(tmp_path / "go"))
    os.kill(executor_of("forked"), signal.SIGKILL)
    until(lambda: job.refresh().status in ("completed", "failed"))
    assert (job.status, job.crashes) == ("failed", 1)


def test_an_async_job_that_cancels_itself_is_settled(workers: Workers) -> None:
    workers.start("--processes", "1", *NO_POLLING).until_listening()
    until(ends_as(tasks.cancel_itself.enqueue(), Status.COMPLETED))
    until(ends_as(tasks.anote.enqueue("next"), Status.COMPLETED))


def test_an_async_job_that_another_cancels_before_its_first_step_is_run_again(workers: Workers) -> None:
    with transaction.atomic():
        first = tasks.cancel_the_others.using(priority=1).enqueue()
        others = [tasks.anote.enqueue("cancelled") for _ in range(3)]
    workers.start("--processes", "1", *NO_POLLING)
    for job in [first, *others]:
        until(ends_as(job, Status.COMPLETED))
    assert [(job.attempts, job.last_error) for job in others] == [(1, None)] * 3


def test_a_job_that_closes_every_file_costs_its_executor(workers: Workers) -> None:
    workers.start(*ONE_SLOT, *NO_POLLING).until_listening()
    job = tasks.close_everything_and_tell.using(max_attempts=1).enqueue()
    until(ends_as(job, Status.FAILED))
    assert job.last_error == "executor exited with status 1"
    until(ends_as(tasks.note.enqueue("next"), Status.COMPLETED))


def test_suspects_do_not_hold_up_a_host_of_one_process(workers: Workers, tmp_path: Path) -> None:
    """Neither the one that runs alone, nor those that wait to do so: there are more of them than slots."""
    small = ["--processes", "1", "--threads", "2", "--async-slots", "1"]
    workers.start(*small, *NO_POLLING).until_listening()
    long = tasks.wait_for_file.enqueue(str(tmp_path / "go"))
    until(lambda: effects("waited started"))
    suspects = enqueue_suspects(12, tmp_path)
    until(lambda: effects("suspect started"))
    until(ends_as(tasks.note.enqueue("unhindered"), Status.COMPLETED))
    assert effects("suspect started") == 1
    (tmp_path / "go").touch()
    until(ends_as(long, Status.COMPLETED))
    for suspect in suspects:
        until(ends_as(suspect, Status.COMPLETED))
        assert suspect.attempts == 1


def test_whoever_has_locked_the_row_of_a_worker_does_not_keep_it_from_its_jobs(
    workers: Workers, tmp_path: Path
) -> None:
    """A forgotten transaction, say, in which somebody has tidied up the table of workers."""
    workers.start("--processes", "1", settings=SHORT_LEASE).until_listening()
    until(BackgroundWorker.objects.exists)
    job = tasks.wait_for_file.enqueue(str(tmp_path / "go"))
    executor_of("waited started")
    with session() as forgotten, forgotten.transaction(force_rollback=True):
        forgotten.execute("DELETE FROM background_workers")
        for _ in range(3):
            renewed_at = job.refresh().locked_at
            until(lambda renewed_at=renewed_at: job.refresh().locked_at > renewed_at, what="a renewal")
        (tmp_path / "go").touch()
        until(ends_as(job, Status.COMPLETED))
    assert job.attempts == 1


def test_a_drain_waits_for_suspects_that_it_has_given_back(workers: Workers, tmp_path: Path) -> None:
    suspects = enqueue_suspects(MOST_SUSPECTS + 3, tmp_path)
    (tmp_path / "go").touch()
    assert workers.start("--drain", "--processes", "1", *NO_POLLING).wait() == 0
    assert BackgroundJob.objects.filter(status="completed").count() == len(suspects)


def enqueue_suspects(count: int, directory: Path) -> list[BackgroundJob]:
    with transaction.atomic():
        jobs = [tasks.wait_for_file.enqueue(str(directory / "go"), "suspect") for _ in range(count)]
        BackgroundJob.objects.filter(pk__in=[job.pk for job in jobs]).update(crashes=1)
    return jobs


def test_housekeeping_takes_turns_with_all_else_and_waits_for_renewals() -> None:
    """So a host that is never without something to settle sweeps all the same."""
    host = Supervisor(Options(inline=True), None)
    try:
        kept = []
        for renewal_at in (NEVER, NEVER, NEVER, 0.0, NEVER):
            host.housekeeping._next_prune = 0.0  # there is always something to prune
            host.next_renewal = renewal_at
            kept.append(host._keeps_house(clock()))
        assert kept == [True, False, True, False, True]
    finally:
        host._close()


def test_a_host_that_drains_waits_for_a_claim_from_the_beginning() -> None:
    """Behind an old snapshot. Whether nothing is left is known only then, and nobody asks until then."""
    host = Supervisor(Options(inline=True, drain=True), None)
    try:
        polling, now = host.polling, clock()
        claim = Claim(1, uuid.uuid4(), 1, 3, tasks.note.name, "default", "{}")
        found = Claimed([claim], [0.0], None, {("default", 0): (0.0, 1)}, tells_levels=True)
        polling.start(now)
        polling.learn(found, limit=10, took=1.0, now=now, hears=True)
        polling.start(now)
        polling.learn(found._replace(claims=[]), limit=10, took=0.001, now=now, hears=True)
        assert not polling.found_nothing
        assert now < host._next_claim() <= now + 5
    finally:
        host._close()


def test_a_host_that_is_told_to_stop_again_and_again_does_not_stop_later() -> None:
    """While the database is away, the last it may wait for counts from the first time that it has to end."""
    host = Supervisor(Options(inline=True, grace=0.0), None)
    try:
        ends = []
        for _ in range(4):
            host.signals.append(signal.SIGINT)
            host._obey_signals()
            ends.append(host.stop_by)
        assert ends == sorted(ends, reverse=True)
    finally:
        host._close()


def test_large_results_are_written_a_few_at_a_time_and_before_more_are_claimed() -> None:
    """A transaction that takes too long is given up and begun again, as often as it is the same."""
    host = Supervisor(Options(inline=True), None)
    try:
        host._room = lambda: 5  # type: ignore[method-assign]
        sizes = [BATCH_BYTES // 4] * 5 + [BATCH_BYTES * 2] + [BATCH_BYTES // 4] * 3
        for ticket, size in enumerate(sizes):
            claim = Claim(ticket, uuid.uuid4(), 1, 3, tasks.note.name, "default", "{}")
            held = Held(ticket, claim, tasks.note, clock())
            host.unsettled.append((held, Verdict(Event.COMPLETE, result=f'"{"x" * size}"')))
        turns = []
        while not turns or turns[-1].settlements:
            turns.append(host._next_turn(clock())[0])
        assert [len(turn.settlements) for turn in turns] == [4, 2, 3, 0]
        assert [turn.limit > 0 for turn in turns] == [False, False, True, True]
        assert not host.unsettled
    finally:
        host._close()


def test_a_task_of_an_async_job_cannot_end_the_event_loop(workers: Workers) -> None:
    workers.start("--processes", "1", *NO_POLLING).until_listening()
    until(ends_as(tasks.exit_in_a_task.enqueue(), Status.COMPLETED))
    next_one = tasks.anote.enqueue("next")
    until(ends_as(next_one, Status.COMPLETED))
    assert next_one.attempts == 1


def test_a_connection_that_died_between_two_jobs_is_replaced(workers: Workers) -> None:
    workers.start(*ONE_SLOT).until_listening()
    until(ends_as(tasks.lose_connection.enqueue(), Status.COMPLETED))
    backend = Effect.objects.get(what="backend").detail
    execute("SELECT pg_terminate_backend(%s)", int(backend))
    until(lambda: not execute("SELECT FROM pg_stat_activity WHERE pid = %s", int(backend)))
    job = tasks.note.enqueue("next")
    until(ends_as(job, Status.COMPLETED))
    assert job.attempts == 1


def test_connections_of_jobs_are_kept_and_bounded(workers: Workers) -> None:
    worker = workers.start("--processes", "1", "--threads", "2", *NO_POLLING).until_listening()
    for number in range(20):
        tasks.lose_connection.enqueue()
        tasks.anote.enqueue(f"async {number}")
    done = BackgroundJob.objects.filter(status="completed")
    until(lambda: done.count() == 40)
    backends = Effect.objects.filter(what="backend").values("detail").distinct().count()
    assert backends <= 2
    assert worker.stop() == 0


# ── Other ways to run ─────────────────────────────────────────────────────────────────────────────────────


def test_inline_runs_jobs_in_the_worker_itself(workers: Workers) -> None:
    tasks.note.enqueue("here"), tasks.anote.enqueue("here too")
    worker = workers.start("--inline", "--drain")
    pid = worker.pid
    assert worker.wait() == 0
    assert set(Effect.objects.values_list("pid", flat=True)) == {pid}


def test_reload_starts_again_when_code_changes(workers: Workers, tmp_path: Path) -> None:
    module = tmp_path / "reloaded_module.py"
    module.write_text("")
    environment = {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}",
        "PGJOBS_TEST_IMPORT": "reloaded_module",
    }
    worker = workers.start("--reload", environment=environment)
    worker.until_listening()
    before = worker.log.read_text().count("Listening for new jobs.")
    os.utime(module, (0, 0))
    worker.until_said("Code has changed; starting again.")
    until(lambda: worker.log.read_text().count("Listening for new jobs.") > before)
    job = tasks.note.enqueue("reloaded")
    until(ends_as(job, Status.COMPLETED))
    family = worker.descendants()
    assert worker.stop() == 0
    assert not any(map(is_running, family))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--queue", ""], "'' must be the name of a queue, of 1 to 255 characters."),
        (["--processes", "0"], "'0' must be a whole number, at least 1."),
        (["--threads", "many"], "'many' must be a whole number, at least 1."),
        (["--grace", "-1"], "must be a number of seconds"),
        (["--poll-interval", "0"], "'0' must be longer than zero."),
    ],
)
def test_impossible_options_are_refused(arguments: list[str], sentence: str) -> None:
    with pytest.raises(CommandError, match=sentence):
        call_command("runjobs", *arguments)


def test_executors_that_cannot_live_are_started_ever_more_slowly(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "deadly_module.py").write_text(
        "import os\n"
        "host = os.getpid()\n"
        "def die():\n"
        "    if os.getppid() != host:  # the fork server may live\n"
        "        os._exit(7)\n"
        "os.register_at_fork(after_in_child=die)\n"
    )
    environment = {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}",
        "PGJOBS_TEST_IMPORT": "deadly_module",
    }
    worker = workers.start("--processes", "1", environment=environment)
    worker.until_said("exited with status 7 before it was ready; the next is started in 0.2 s.")
    worker.until_said("before it was ready; the next is started in 1.6 s.")
    assert worker.stop() == 0


def test_executors_that_do_not_end_by_themselves_are_ended(workers: Workers, tmp_path: Path) -> None:
    """A host that waited for all of them, for ever, would one day have room for no further one."""
    (tmp_path / "hanging_module.py").write_text(
        "import threading\n"
        "from django_pgjobs import children\n"
        "from django_pgjobs.signals import executor_stopping\n"
        "children.STOP_WITHIN = 0.2\n"
        "def hang(**kwargs):\n"
        "    threading.Event().wait()\n"
        "executor_stopping.connect(hang)\n"
    )
    environment = {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}",
        "PGJOBS_TEST_IMPORT": "hanging_module",
    }
    worker = workers.start(
        *ONE_SLOT, "--async-slots", "1", "--max-jobs-per-executor", "1", environment=environment
    )
    notes = [tasks.note.enqueue("one of many") for _ in range(12)]
    until(lambda: all(job.refresh().status == "completed" for job in notes))
    assert worker.stop() == 0
    assert worker.said("is killed, since it does not end by itself.")


def test_a_broken_job_module_stops_the_start_with_its_traceback(
    child_environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "broken_module.py").write_text("raise ImportError('the module is broken')")
    environment = child_environment | {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}",
        "PGJOBS_TEST_IMPORT": "broken_module",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "django", "runjobs", "--drain"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "the module is broken" in ended.stderr


def test_a_worker_row_shows_who_is_there(workers: Workers) -> None:
    worker: Worker = workers.start("--queue", "mail").until_listening()
    row = until(lambda: BackgroundWorker.objects.first())
    assert (row.pid, row.queues, row.state) == (worker.pid, ["mail"], "running")
    assert worker.stop() == 0
