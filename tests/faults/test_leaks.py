"""What one job leaves behind reaches no other, and twenty thousand of them leave nothing."""

from __future__ import annotations

import os
import subprocess

import pytest

from django_pgjobs.models import BackgroundJob
from tests import tasks
from tests.faults import leak_jobs
from tests.faults.conftest import Chunk
from tests.workers import Workers, until

pytestmark = pytest.mark.processes

GROWTH = 5_000  # kB


@pytest.fixture
def child_environment(child_environment: dict[str, str]) -> dict[str, str]:
    return {**child_environment, "PGJOBS_TEST_IMPORT": "tests.faults.leak_jobs"}


def resident(pid: int) -> int:
    """The memory of a process, in kB."""
    done = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(done.stdout)


def completed(count: int) -> bool:
    return BackgroundJob.objects.filter(status="completed").count() >= count


@pytest.mark.chunks(large=3)
def test_neither_an_executor_nor_its_supervisor_grows(chunk: Chunk, workers: Workers) -> None:
    worker = workers.start("--processes", "1", "--threads", "2").until_listening()
    first = leak_jobs.state.enqueue()
    until(lambda: first.refresh().status == "completed")
    processes = {"executor": first.result["pid"], "supervisor": worker.pid}
    assert os.getpid() not in processes.values()

    # The first thousands make caches and pools as large as they will be.
    warming, count = chunk.size(small=4_000, large=10_000), chunk.size(small=20_000, large=100_000)
    tasks.nothing.enqueue_many([((), {})] * warming)
    until(lambda: completed(warming), deadline=120)
    before = {name: resident(pid) for name, pid in processes.items()}
    for done in range(0, count, 5_000):
        tasks.nothing.enqueue_many([((), {})] * 5_000)
        until(lambda done=done: completed(warming + done + 5_000), deadline=120)
    growth = {name: resident(pid) - before[name] for name, pid in processes.items()}
    assert all(grown <= GROWTH for grown in growth.values()), growth
    last = leak_jobs.state.enqueue()
    until(lambda: last.refresh().status == "completed")
    assert last.result["pid"] == first.result["pid"]
    assert worker.stop() == 0
    chunk.record(jobs=count, **{f"max_{name}_growth_kB": grown for name, grown in growth.items()})


@pytest.mark.parametrize("mess", [leak_jobs.leave_a_mess, leak_jobs.leave_a_mess_async])
@pytest.mark.parametrize("state", [leak_jobs.state, leak_jobs.state_async])
def test_a_job_finds_nothing_of_the_one_before(workers: Workers, mess: object, state: object) -> None:
    worker = workers.start("--processes", "1", "--threads", "1", "--async-slots", "1").until_listening()
    states = []
    for function in (state, mess, state):
        job = function.enqueue()  # type: ignore[attr-defined]
        until(lambda job=job: job.refresh().status == "completed")
        states.append(job.result)
    before, _, after = states
    assert after == before
    assert worker.stop() == 0
