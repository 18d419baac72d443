"""How hosts end, whatever they are told and whatever they are doing; and how one deploy follows another.

What a single stop does in detail (no new jobs, what comes late stays) stands in tests/test_runjobs.py, as do
executors that end with their supervisor, and unknown names without a deploy.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from django.db.models import Count

from django_pgjobs.models import BackgroundJob, BackgroundWorker
from tests import tasks
from tests.faults import shutdown_jobs
from tests.faults.conftest import Chunk
from tests.models import Effect
from tests.workers import Worker, Workers, is_running, until

pytestmark = pytest.mark.processes

NEW_CODE = {"PGJOBS_TEST_IMPORT": "tests.faults.shutdown_jobs"}

# ── The table: signal x state → effect ────────────────────────────────────────────────────────────────────

IDLE = "idle"
IN_JOBS = "in jobs that end within the grace"
IN_LONG_JOBS = "in jobs that do not"
IN_A_STUBBORN_JOB = "in a job that ignores everything"

FINISHED = "its jobs finish"
INTERRUPTED = (
    "its jobs are killed and queued again, the attempt refunded; those to run at most once have failed"
)
LOST = "its jobs die with it, and wait for a sweep"


class Ends(NamedTuple):
    """How a host ends, and what becomes of the jobs that it runs."""

    exit_status: int
    jobs: str | None = None


GRACEFULLY = {
    IDLE: Ends(0),
    IN_JOBS: Ends(0, FINISHED),
    IN_LONG_JOBS: Ends(0, INTERRUPTED),
    IN_A_STUBBORN_JOB: Ends(0, INTERRUPTED),
}
AT_ONCE = GRACEFULLY | {IN_JOBS: Ends(0, INTERRUPTED)}
DEAD = {
    IDLE: Ends(-signal.SIGKILL),
    IN_JOBS: Ends(-signal.SIGKILL, LOST),
    IN_LONG_JOBS: Ends(-signal.SIGKILL, LOST),
    IN_A_STUBBORN_JOB: Ends(-signal.SIGKILL, LOST),
}

EFFECTS = {
    "TERM": GRACEFULLY,
    "INT": GRACEFULLY,
    "HUP": GRACEFULLY,
    "TERM to all its processes": GRACEFULLY,  # as from systemd
    "INT to all its processes": GRACEFULLY,  # as from Ctrl-C
    "its terminal is closed": GRACEFULLY,
    "TERM twice": AT_ONCE,
    "INT twice to all its processes": AT_ONCE,
    "TERM, then INT": AT_ONCE,
    "KILL": DEAD,
}

# ── Sending ───────────────────────────────────────────────────────────────────────────────────────────────


def to_it(number: int) -> Callable[[Host], None]:
    return lambda host: host.worker.signal(number)


def to_all(number: int) -> Callable[[Host], None]:
    return lambda host: os.killpg(host.worker.pid, number)


STEPS: dict[str, list[Callable[[Host], None]]] = {
    "TERM": [to_it(signal.SIGTERM)],
    "INT": [to_it(signal.SIGINT)],
    "HUP": [to_it(signal.SIGHUP)],
    "TERM to all its processes": [to_all(signal.SIGTERM)],
    "INT to all its processes": [to_all(signal.SIGINT)],
    "its terminal is closed": [lambda host: os.close(host.terminal)],
    "TERM twice": [to_it(signal.SIGTERM), to_it(signal.SIGTERM)],
    "INT twice to all its processes": [to_all(signal.SIGINT), to_all(signal.SIGINT)],
    "TERM, then INT": [to_it(signal.SIGTERM), to_it(signal.SIGINT)],
    "KILL": [to_it(signal.SIGKILL)],
}

# The jobs of a host: some that wait for a file, or the one that waits for nothing.
WAITING = {"plain": tasks.wait_for_file, "once": tasks.wait_once, "async": tasks.await_file}


class Host:
    """A host in one of the states, on a terminal of its own, serving a queue with the state's name."""

    def __init__(self, workers: Workers, state: str, file: Path, grace: float) -> None:
        self.state = state
        self.file = file
        self.jobs: dict[str, BackgroundJob] = {}
        if state == IN_A_STUBBORN_JOB:
            self._enqueue(shutdown_jobs.ignore_everything, "stubborn")
        elif state != IDLE:
            for kind, function in WAITING.items():
                self._enqueue(function, kind, str(file))
        self.terminal, theirs = os.openpty()
        self.worker = workers.start(
            *("--processes", "1", "--queue", state, "--grace", f"{grace:g}", "--no-maintenance"),
            environment=NEW_CODE | {shutdown_jobs.TERMINAL: os.ttyname(theirs)},
        )
        self.workers_end = theirs  # of the terminal; ours, until the worker has opened it by its name

    def _enqueue(self, function: Any, kind: str, *arguments: str) -> None:
        handle = function.using(queue=self.state).enqueue(*arguments, what=f"{self.state} {kind}")
        self.jobs[kind] = BackgroundJob.objects.get(pk=handle.pk)

    def until_busy(self) -> list[int]:
        """Wait until all its jobs have started. Returns its processes."""
        self.worker.until_listening()
        os.close(self.workers_end)
        for kind in self.jobs:
            until(Effect.objects.filter(what=f"{self.state} {kind} started").exists, what=kind)
        return self.worker.descendants()

    def tell(self, steps: list[Callable[[Host], None]]) -> None:
        first, *rest = steps
        first(self)
        for step in rest:
            until(lambda: self.worker.said("stopping") or self.worker.process.poll() is not None)
            if self.worker.process.poll() is None:
                step(self)

    def fates(self) -> set[str]:
        return {fate_of(kind, row) for kind, row in self.jobs.items()}


def fate_of(kind: str, row: BackgroundJob) -> str:
    """What has become of a job, or all that there is to tell."""
    row.refresh_from_db()
    found = (row.status, row.attempts, row.metadata.get("interruptions", 0), row.last_error)
    match found:
        case ("completed", 1, 0, None):
            return FINISHED
        case ("queued", 0, 1, None) if kind != "once" and row.locked_by is None:
            return INTERRUPTED
        case ("failed", 1, 0, str(error)) if kind == "once" and "The job was interrupted" in error:
            return INTERRUPTED
        case ("processing", 1, 0, None):
            return LOST
    return f"{kind}: {found}"


@pytest.mark.chunks(large=5)
@pytest.mark.parametrize("sent", EFFECTS)
def test_a_host_ends_as_the_table_says(chunk: Chunk, workers: Workers, tmp_path: Path, sent: str) -> None:
    """The second signal, and only that, ends a grace of an hour."""
    expected = EFFECTS[sent]
    hosts = {}
    for number, state in enumerate(expected):
        late = expected is GRACEFULLY and state in (IN_LONG_JOBS, IN_A_STUBBORN_JOB)
        hosts[state] = Host(workers, state, tmp_path / f"go-{number}", grace=0.5 if late else 3600)
    families = [pid for host in hosts.values() for pid in host.until_busy()]
    slowest = 0.0
    for state, host in hosts.items():
        host.tell(STEPS[sent])
        told_at = time.monotonic()
        if expected[state].jobs == FINISHED:
            host.worker.until_said("stopping")
            host.file.touch()
        host.worker.wait()
        slowest = max(slowest, time.monotonic() - told_at)
        if sent != "its terminal is closed":
            os.close(host.terminal)

    found = {state: (host.worker.process.returncode, host.fates()) for state, host in hosts.items()}
    assert found == {
        state: (ends.exit_status, {ends.jobs} if ends.jobs else set()) for state, ends in expected.items()
    }
    until(lambda: not any(map(is_running, families)), what="all of their processes to end")
    assert BackgroundWorker.objects.count() == (len(hosts) if expected is DEAD else 0)
    chunk.record(ends=len(hosts), max_seconds_to_end=slowest)


# ── Stops under load ──────────────────────────────────────────────────────────────────────────────────────


class Naps:
    """Jobs of random lengths, each with a name of its own."""

    def __init__(self, random: Random, longest: float) -> None:
        self.count = 0
        self._random = random
        self._longest = longest  # seconds

    def enqueue(self, count: int) -> None:
        numbers = range(self.count, self.count + count)
        shutdown_jobs.nap.enqueue_many(
            [((f"nap {number}", self._random.uniform(0, self._longest)), {}) for number in numbers]
        )
        self.count += count

    def keep_waiting(self) -> None:
        """Have at least fifty that wait for a slot."""
        if BackgroundJob.objects.filter(status="queued").count() < 50:
            self.enqueue(100)


def assert_each_ran_once(count: int) -> None:
    """Nothing was lost, nothing was repeated, and no attempt was counted that was not made."""
    found = BackgroundJob.objects.values_list("status", "attempts", "crashes", "last_error", "metadata")
    assert [row for row in found if row != ("completed", 1, 0, None, {})] == []
    assert len(found) == count
    starts = Effect.objects.values("what").annotate(starts=Count("id")).values_list("starts", flat=True)
    assert list(starts) == [1] * count


def is_done() -> bool:
    return not BackgroundJob.objects.exclude(status="completed").exists()


@pytest.mark.chunks(large=5)
def test_a_rolling_restart_under_load_loses_and_repeats_nothing(chunk: Chunk, workers: Workers) -> None:
    restarts = chunk.size(small=3, large=30)
    naps = Naps(chunk.random, longest=0.5)
    options = ("--processes", "1", "--threads", "2")
    fleet = [workers.start(*options, environment=NEW_CODE).until_listening() for _ in range(3)]

    def is_at_work(host: Worker, ended_before: int) -> bool:
        naps.keep_waiting()
        return host.log.read_text().count(" completed ") > ended_before

    for _ in range(restarts):
        oldest = fleet.pop(0)
        fleet.append(workers.start(*options, environment=NEW_CODE).until_listening())
        ended_before = oldest.log.read_text().count(" completed ")
        until(lambda host=oldest, n=ended_before: is_at_work(host, n), what="the oldest host to be at work")
        assert oldest.stop() == 0
    until(is_done, what="the new hosts to finish", deadline=120)
    assert [host.stop() for host in fleet] == [0, 0, 0]
    assert_each_ran_once(naps.count)
    chunk.record(jobs=naps.count, restarts=restarts)


@pytest.mark.chunks(large=10)
def test_a_signal_at_any_moment_of_a_host_loses_and_repeats_nothing(chunk: Chunk, workers: Workers) -> None:
    """Also while it starts: then it may die of the signal, and has claimed nothing yet."""
    stops = chunk.size(small=6, large=20)
    naps = Naps(chunk.random, longest=0.05)
    naps.enqueue(100 * stops)
    early = 0
    for _ in range(stops):
        host = workers.start("--processes", "1", "--threads", "2", environment=NEW_CODE)
        if chunk.random.random() < 0.7:
            host.until_said("Ready to run jobs.")
        time.sleep(chunk.random.uniform(0, 1))
        number = chunk.random.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
        host.signal(number)
        status = host.wait()
        starting = not host.said("stopping")
        early += starting
        if starting:
            assert status in {-number, 1}, host.log.read_text()
            assert not host.said("Ready to run jobs.")
        else:
            assert status == 0, host.log.read_text()
        assert not BackgroundJob.objects.filter(status="processing").exists()
    assert workers.start("--drain", environment=NEW_CODE).wait() == 0
    assert_each_ran_once(naps.count)
    chunk.record(stops=stops, while_starting=early, jobs=naps.count)


# ── Old and new code side by side ─────────────────────────────────────────────────────────────────────────


def test_a_job_that_old_code_does_not_know_waits_for_the_new_one_at_no_cost(workers: Workers) -> None:
    old = workers.start("--processes", "1").until_listening()
    enqueue = shutdown_jobs.nap.enqueue
    parked = [BackgroundJob.objects.get(pk=enqueue(f"nap {number}", 0.0).pk) for number in range(5)]
    until(lambda: all(row.refresh().status == "queued" and row.metadata for row in parked))
    assert [(row.attempts, row.last_error) for row in parked] == [(0, parked[0].last_error)] * 5
    tasks.nothing.enqueue()  # known to both
    new = workers.start("--processes", "1", environment=NEW_CODE).until_listening()
    assert old.stop() == 0
    until(is_done, what="the new host to run what the old one did not know", deadline=60)
    executors = set(new.descendants())
    assert set(Effect.objects.values_list("pid", flat=True)) <= executors
    assert new.stop() == 0
    assert [row.refresh().attempts for row in parked] == [1] * 5
    assert [row.errors for row in parked] == [[]] * 5
    assert Effect.objects.count() == 5


def test_a_host_with_a_longer_lease_keeps_its_claims(workers: Workers, tmp_path: Path) -> None:
    old = workers.start("--processes", "1", "--threads", "1", settings={"LEASE": 8}).until_listening()
    job = tasks.wait_for_file.enqueue(str(tmp_path / "go"))
    until(Effect.objects.filter(what="waited started").exists)
    sweeping = {"LEASE": 1, "SWEEP_INTERVAL": 0.1, "LOST_DELAY": 0}
    new = workers.start("--processes", "1", settings=sweeping).until_listening()
    new.until_said("A live worker goes by a lease of 0:00:08; sweeping by it, not by LEASE = 0:00:01.")
    # Three renewals, before each of which the claim was older than the new lease for a second.
    renewals = {BackgroundJob.objects.get(pk=job.pk).locked_at}
    until(lambda: renewals.add(job.refresh().locked_at) or len(renewals) == 4, what="three renewals")
    (tmp_path / "go").touch()
    until(is_done)
    assert [old.stop(), new.stop()] == [0, 0]
    assert (job.refresh().attempts, job.last_error) == (1, None)
    assert Effect.objects.filter(what="waited started").count() == 1
