"""Processes that are halted at the wrong moment: nothing starts too late, or is settled too early."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from django_pgjobs import store
from tests import tasks
from tests.faults import shutdown_jobs
from tests.models import Effect
from tests.workers import Worker, Workers, descendants, is_running, until

pytestmark = pytest.mark.processes

ONE_SLOT = ("--processes", "1", "--threads", "1")
SETTINGS = {"LEASE": 2, "SWEEP_INTERVAL": 0.5, "LOST_DELAY": 0}


@pytest.fixture
def child_environment(child_environment: dict[str, str]) -> dict[str, str]:
    return {**child_environment, "PGJOBS_TEST_IMPORT": "tests.faults.shutdown_jobs"}


@contextmanager
def halted(pids: list[int]) -> Iterator[None]:
    """Hold processes up, and let them go on again."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            if is_running(pid):
                os.kill(pid, signal.SIGCONT)


def processes_of(worker: Worker) -> tuple[int, list[int]]:
    """The fork server of a worker; and its executors, one at work and one to spare."""
    worker.until_listening().until_said("Ready to run jobs.")
    family = until(lambda: len(found := worker.descendants()) == 3 and found, what="two executors")
    forkserver = family[0]
    assert set(descendants(forkserver)) == set(family[1:])
    return forkserver, family[1:]


def test_what_was_handed_over_long_ago_does_not_start(workers: Workers) -> None:
    """An executor that goes on before its supervisor finds a job whose claim may have been lost."""
    late = workers.start(*ONE_SLOT, "--no-maintenance", settings=SETTINGS)
    _, executors = processes_of(late)
    with halted(executors):
        job = tasks.note.enqueue("late")
        # By its first renewal a job has been handed over.
        until(lambda: job.refresh().locked_at is not None and job.locked_at > job.attempted_at)
        os.kill(late.pid, signal.SIGSTOP)
        other = workers.start(*ONE_SLOT, settings=SETTINGS).until_listening()
        until(lambda: job.refresh().status == "completed", what="the other host to run it")
    os.kill(late.pid, signal.SIGCONT)
    until(lambda: late.said("the claim was lost") or late.said("it is no longer ours"))
    assert [late.stop(), other.stop()] == [0, 0]
    assert Effect.objects.filter(what="late").count() == 1
    assert (job.refresh().attempts, job.status) == (2, "completed")


def test_what_a_killed_executor_held_is_settled_when_it_is_known_to_be_gone(workers: Workers) -> None:
    """Until then its body may go on, so nobody else may start it. Others are run meanwhile."""
    worker = workers.start(*ONE_SLOT)
    forkserver, _ = processes_of(worker)
    job = shutdown_jobs.ignore_everything.enqueue("stubborn")
    executor = until(lambda: Effect.objects.filter(what="stubborn started").first()).pid
    with halted([forkserver]):  # which alone hears from the kernel how an executor has ended
        assert store.request_stop([job.pk]) == {job.pk}
        worker.until_said(f"Executor {executor} is killed")
        until(lambda: not is_running(executor), what="the executor to die")
        for number in range(5):
            neighbour = tasks.note.enqueue(f"note {number}")
            until(lambda one=neighbour: one.refresh().status == "completed", what="another job")
        assert job.refresh().status == "processing"
    until(lambda: job.refresh().status == "cancelled", what="the job to be settled")
    assert worker.stop() == 0
