"""Timeouts that really stop, and running jobs that people stop: with real workers."""

from __future__ import annotations

import gc
import signal
import socket
import threading
import uuid
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import connection

from django_pgjobs.abort import ThreadAbort
from django_pgjobs.channel import Channel, clock
from django_pgjobs.children import Child, Held
from django_pgjobs.exceptions import JobStopped, JobTimeout
from django_pgjobs.marks import Marks
from django_pgjobs.models import BackgroundJob
from django_pgjobs.store import Claim
from django_pgjobs.timeouts import FEW, Timeouts
from tests import tasks
from tests.models import Effect
from tests.workers import Workers, is_running, until

pytestmark = pytest.mark.processes

NO_POLLING = ("--poll-interval", "3600")


def effects(what: str) -> int:
    return Effect.objects.filter(what=what).count()


def executor_of(what: str) -> int:
    return until(lambda: Effect.objects.filter(what=what).values_list("pid", flat=True).first(), what=what)


def is_finished(job: BackgroundJob) -> bool:
    return job.refresh().status in ("failed", "completed", "cancelled")


def test_an_overdue_job_is_told_and_its_executor_is_replaced(workers: Workers) -> None:
    workers.start("--processes", "1", *NO_POLLING).until_listening()
    job = tasks.overdue.enqueue("late", "patient")
    until(lambda: is_finished(job))
    assert (job.status, job.attempts, job.crashes) == ("failed", 1, 0)
    assert job.last_error == "JobTimeout: The job ran for longer than its timeout of 0.3 s."
    assert "in overdue" in job.errors[0]["traceback"]
    assert effects("late heeded") == 1
    next_one = tasks.note.enqueue("next")
    until(lambda: is_finished(next_one))
    assert executor_of("next") != executor_of("late started")


def test_a_transaction_of_an_overdue_job_is_rolled_back(workers: Workers, tmp_path: Path) -> None:
    """And what else runs in its executor, which is on its way out, is not disturbed."""
    workers.start("--processes", "1", "--threads", "2", *NO_POLLING).until_listening()
    neighbour = tasks.wait_for_file.enqueue(str(tmp_path / "go"), "neighbour")
    late = tasks.overdue_in_a_transaction.enqueue()
    until(lambda: is_finished(late))
    after = [tasks.note.enqueue("after") for _ in range(4)]
    until(lambda: all(map(is_finished, after)))
    (tmp_path / "go").touch()
    until(lambda: is_finished(neighbour))
    assert {job.status for job in (*after, neighbour)} == {"completed"}
    assert neighbour.attempts == 1
    assert effects("never committed") == 0


def test_an_overdue_async_job_is_cancelled(workers: Workers) -> None:
    workers.start("--processes", "1", *NO_POLLING).until_listening()
    job = tasks.overdue_async.enqueue("late", "patient")
    neighbour = tasks.anote.enqueue("neighbour")
    until(lambda: is_finished(job))
    assert job.last_error == "JobTimeout: The job ran for longer than its timeout of 0.3 s."
    until(lambda: is_finished(neighbour))
    assert neighbour.attempts == 1


@pytest.mark.parametrize(
    ("job", "how"),
    [
        (tasks.overdue, "greedy"),
        (tasks.overdue, "deaf"),
        (tasks.overdue, "stubborn"),
        (tasks.overdue_async, "deaf"),
    ],
)
def test_what_does_not_heed_its_timeout_is_killed(workers: Workers, job: object, how: str) -> None:
    worker = workers.start("--processes", "1", "--threads", "2", *NO_POLLING).until_listening()
    late = job.enqueue("late", how)  # type: ignore[attr-defined]
    executor = executor_of("late started")
    until(lambda: is_finished(late))
    assert not is_running(executor)
    assert (late.status, late.attempts, late.crashes) == ("failed", 1, 0)
    assert late.last_error == (
        "JobTimeout: The job ran for longer than its timeout of 0.3 s. It did not heed it, so its executor"
        " was killed."
    )
    next_one = tasks.note.enqueue("next")
    until(lambda: is_finished(next_one))
    assert executor_of("next") != executor
    assert worker.said(f"Executor {executor} is killed")
    assert not worker.said("out of memory")


def test_a_job_may_give_up_on_its_timeout(workers: Workers) -> None:
    workers.start("--processes", "1", *NO_POLLING).until_listening()
    job = tasks.never_again.enqueue()
    until(lambda: is_finished(job))
    assert (job.status, job.attempts) == ("failed", 1)


def test_a_job_that_starts_while_it_is_being_stopped_is_told() -> None:
    """The request to give it back, and the word that it has started, cross."""
    host = socket.socketpair()
    marks = Marks.private(1, 0)
    child = Child(1, host[0], "an executor", marks)
    claim = Claim(7, uuid.uuid4(), 1, 3, "tests.tasks.nothing", "default", "{}")
    held = Held(1, claim, None, clock())
    child.assign([held], half_lease=30)
    held.abort_reason = "stop"
    child.recall([held])
    marks.start(0, held.ticket)
    (started,) = child.read(["recalled", []])
    timeouts = Timeouts()
    timeouts.started(child, started.held, started.at)
    timeouts.enforce([child])
    assert not child.killed_for
    messages = Channel(host[1], blocking=True).receive()
    assert [message[0] for message in messages] == ["run", "recall", "abort"]
    child.channel.close()
    host[1].close()


def test_a_job_that_has_returned_is_not_aborted() -> None:
    """Its outcome is not heard yet: its process may be held up by a neighbour."""
    host = socket.socketpair()
    marks = Marks.private(1, 0)
    child = Child(1, host[0], "an executor", marks)
    claim = Claim(7, uuid.uuid4(), 1, 3, tasks.overdue.name, "default", "{}")
    held = Held(1, claim, tasks.overdue, clock())
    child.assign([held], half_lease=30)
    marks.start(0, held.ticket)
    (started,) = child.look()
    timeouts = Timeouts()
    timeouts.started(child, started.held, started.at - 10)
    marks.complete(0)
    assert child.look() == []
    timeouts.enforce([child])
    child.abort(held, "stop", JobStopped.message)
    assert held.abort_reason == ""
    child.channel.close()
    messages = Channel(host[1], blocking=True).receive()
    assert [message[0] for message in messages] == ["run"]
    host[1].close()


def test_a_job_that_has_ended_is_not_kept_until_it_would_be_overdue() -> None:
    """A host would else keep what has run in an hour, arguments included, where that is the timeout."""
    ours, theirs = socket.socketpair()
    child = Child(1, ours, "an executor", Marks.private(1, 0))
    child.channel.close()
    theirs.close()
    timeouts = Timeouts()
    claim = Claim(7, uuid.uuid4(), 1, 3, tasks.overdue.name, "default", "{}")

    def start(ticket: int, at: float) -> Held:
        held = Held(ticket, claim, tasks.overdue, clock())
        held.timeout = 3600
        child.assign([held], half_lease=30)
        timeouts.started(child, held, at)
        return held

    running = start(0, clock())
    for ticket in range(1, 5 * FEW):
        start(ticket, clock())
        list(child.read(["returned", [ticket, 0.1]]))
    assert len(timeouts._overdue_at) <= FEW
    kept = [one for one in gc.get_objects() if isinstance(one, Held) and one.claim is claim]
    assert kept == [running]
    assert timeouts.next_deadline([child]) <= clock() + 3600
    timeouts.enforce([child])
    assert running.abort_reason == ""
    late = start(5 * FEW, clock() - 3601)
    timeouts.enforce([child])
    assert late.abort_reason == "timeout"


def test_a_neighbour_of_a_killed_job_may_finish_first(workers: Workers, tmp_path: Path) -> None:
    workers.start("--processes", "1", "--threads", "2", *NO_POLLING).until_listening()
    neighbour = tasks.wait_for_file.enqueue(str(tmp_path / "go"), "neighbour")
    late = tasks.overdue.enqueue("late", "deaf")
    assert executor_of("neighbour started") == executor_of("late started")
    elsewhere = tasks.note.enqueue("elsewhere")
    until(lambda: is_finished(elsewhere))  # by the spare, once the executor is on its way out
    assert executor_of("elsewhere") != executor_of("late started")
    (tmp_path / "go").touch()
    until(lambda: is_finished(neighbour))
    until(lambda: is_finished(late))
    assert (neighbour.status, neighbour.attempts) == ("completed", 1)
    assert late.status == "failed"


def test_sessions_of_a_killed_executor_are_ended(workers: Workers) -> None:
    workers.start("--processes", "1", *NO_POLLING).until_listening()
    late = tasks.sleep_in_the_database.enqueue()
    until(lambda: is_finished(late))
    assert late.status == "failed"
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND query LIKE 'SELECT pg_sleep(36%%'"
        )
        assert cursor.fetchone()[0] == 0


def test_a_running_job_is_stopped_when_somebody_asks(workers: Workers, tmp_path: Path) -> None:
    workers.start(*NO_POLLING).until_listening()
    plain = tasks.wait_for_file.enqueue(str(tmp_path / "never"), "plain")
    async_ = tasks.await_file.enqueue(str(tmp_path / "never"), "async")
    executor_of("plain started"), executor_of("async started")
    assert plain.cancel()
    call_command("canceljobs", str(async_.pk))
    until(lambda: is_finished(plain) and is_finished(async_))
    assert plain.status == async_.status == "cancelled"
    assert plain.stop_requested_at is None
    assert effects("plain ended") == 0


def test_a_stopped_job_is_not_run_again_when_its_worker_dies(workers: Workers, tmp_path: Path) -> None:
    settings = {"LEASE": 2, "SWEEP_INTERVAL": 0.3, "LOST_DELAY": 0}
    dying = workers.start(settings=settings).until_listening()
    job = tasks.wait_for_file.enqueue(str(tmp_path / "never"))
    executor_of("waited started")
    dying.signal(signal.SIGSTOP)
    assert job.cancel()
    dying.kill()
    workers.start(settings=settings)
    until(lambda: is_finished(job))
    assert job.status == "cancelled"
    assert effects("waited started") == 1


def test_a_job_that_waits_in_a_worker_is_stopped_too(workers: Workers, tmp_path: Path) -> None:
    workers.start("--processes", "1", "--threads", "1").until_listening()
    running = tasks.wait_for_file.enqueue(str(tmp_path / "go"))
    executor_of("waited started")
    queued = tasks.note.enqueue("never")
    assert queued.cancel()
    until(lambda: is_finished(queued))
    assert queued.status == "cancelled"
    (tmp_path / "go").touch()
    until(lambda: is_finished(running))
    assert effects("never") == 0


def test_finished_jobs_cannot_be_cancelled(db: None) -> None:
    job = tasks.note.enqueue("done")
    BackgroundJob.objects.update(status="completed")
    assert not job.cancel()


def test_an_abort_arrives_in_the_body_and_nowhere_else() -> None:
    """However close to the end of the body it is raised."""
    outside: list[BaseException] = []

    def work() -> None:
        for _ in range(2000):
            abort = ThreadAbort()
            current.append(abort)
            try:
                try:
                    with abort:
                        sum(range(20))
                except JobTimeout:
                    abort.close()
                sum(range(200))
            except JobTimeout as error:
                outside.append(error)
        done.set()

    current: list[ThreadAbort] = []
    done = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        if current:
            current[-1].abort(JobTimeout("now"))
    thread.join()
    assert outside == []
