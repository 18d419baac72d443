"""Hosts whose clocks are wrong keep to the database's: nothing starts early, and no live claim is swept."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from django_pgjobs.models import BackgroundJob
from tests.faults.clock_jobs import compare_clocks, enqueue_later
from tests.faults.conftest import Chunk
from tests.workers import Workers, until

pytestmark = pytest.mark.processes

LIBRARIES = [
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib64/faketime/libfaketimeMT.so.1",
    "/usr/lib/faketime/libfaketimeMT.so.1",
]
LEASE = 20.0  # seconds: far less than the clocks are wrong, and enough for a machine that is busy
SETTINGS = {"LEASE": LEASE, "SWEEP_INTERVAL": 0.3, "LOST_DELAY": 0, "POLL_INTERVAL": 2}
HOUR = 3600.0
STEP = 5.0
LONG = 4.0  # seconds that some jobs run, so that there are live claims to sweep by mistake


class Host:
    """A worker on a machine whose clock is wrong, with a queue of its own beside the one of all."""

    def __init__(self, workers: Workers, environment: dict[str, str], name: str) -> None:
        self.name = name
        self.environment = environment
        self.worker = workers.start(
            *("--queue", "default", "--queue", name, "--processes", "1", "--threads", "4"),
            settings=SETTINGS,
            environment=environment,
        )

    def sweep(self) -> str:
        """Run the command that sweeps, under the clock of this host."""
        command = [sys.executable, "-m", "django", "sweepjobs"]
        environment = self.environment | {"PGJOBS_TEST_SETTINGS": json.dumps(SETTINGS)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def clocks(self) -> list[list[float]]:
        """What a job in this host reads from both clocks, twice, a second apart."""
        job = compare_clocks.using(queue=self.name).enqueue(1.0)
        until(lambda: job.refresh().status == "completed", what=f"the clocks of {self.name}")
        return [job.result["first"], job.result["second"]]

    def offset(self) -> float:
        first, _ = self.clocks()
        return first[0] - first[1]

    def pace(self) -> float:
        """How fast the clock of this host goes, beside the database's."""
        first, second = self.clocks()
        return (second[0] - first[0]) / (second[1] - first[1])


@pytest.fixture
def library() -> str:
    for path in LIBRARIES:
        if Path(path).exists():
            return path
    pytest.skip("libfaketime is not installed.")


@pytest.fixture
def hosts(
    library: str, chunk: Chunk, tmp_path: Path, child_environment: dict[str, str], workers: Workers
) -> Iterator[dict[str, Host]]:
    """Hosts an hour behind, right, an hour ahead, and with a clock that steps or one of double pace."""
    steps = tmp_path / "steps"
    steps.write_text("+0\n")
    clocks = {"right": {}, "behind": {"FAKETIME": "-1h"}, "ahead": {"FAKETIME": "+1h"}}
    if chunk.random.random() < 0.5:
        clocks["fast"] = {"FAKETIME": "+0 x2"}
    else:
        clocks["stepping"] = {"FAKETIME_TIMESTAMP_FILE": str(steps), "FAKETIME_NO_CACHE": "1"}
    # The clocks that go on whatever the time is do so here as well.
    shifted = {"LD_PRELOAD": library, "FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_DONT_RESET": "1"}
    common = {**child_environment, "PGJOBS_TEST_IMPORT": "tests.faults.clock_jobs"}
    hosts = {
        name: Host(workers, common | (shifted | clock if clock else {}), name)
        for name, clock in clocks.items()
    }
    for host in hosts.values():
        host.worker.until_listening()
    with _stepping(steps):
        yield hosts


@contextmanager
def _stepping(file: Path) -> Iterator[None]:
    """Step the clock that the file sets by some seconds, forth and back, each second."""
    ended = threading.Event()

    def step() -> None:
        offset = STEP
        while not ended.wait(1.0):
            new = file.with_suffix(".new")
            new.write_text(f"{offset:+g}\n")
            new.replace(file)
            offset = -offset

    thread = threading.Thread(target=step)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.chunks(large=5)
def test_wrong_clocks_change_nothing(chunk: Chunk, hosts: dict[str, Host]) -> None:
    assert_wrong(hosts)
    until(lambda: uptime() > LEASE, what="a server that is up for long enough to be swept")

    count = chunk.size(small=60, large=400)
    jobs = [enqueue_one(chunk, number) for number in range(count)]
    parents = [enqueue_later.using(queue=name).enqueue(1.0) for name in hosts]
    sweeps = [host.sweep() for host in hosts.values()]
    until(lambda: not unfinished(), what="all jobs to end", deadline=120)
    assert set(sweeps) <= {NOTHING_LOST, "Another sweep is at work."}

    children = [BackgroundJob.objects.get(pk=parent.refresh().result) for parent in parents]
    for parent, child in zip(parents, children, strict=True):
        # However wrong the clock of the one who enqueues, the delay counts from the database's.
        assert child.run_at - child.created_at == timedelta(seconds=1)
        assert parent.started_at <= child.created_at <= parent.updated_at
    lateness = [check(job.refresh()) for job in [*jobs, *children]]
    for host in hosts.values():
        log = host.worker.log.read_text()
        assert " lost" not in log, log
        assert host.worker.stop() == 0
    hosts_at_work = BackgroundJob.objects.filter(queue_name="default").values("worker_id").distinct().count()
    assert hosts_at_work > 1
    chunk.record(jobs=len(lateness), max_seconds_late=max(lateness), max_hosts_at_work=hosts_at_work)


NOTHING_LOST = "0 lost jobs queued again, 0 made dead letters."


def assert_wrong(hosts: dict[str, Host]) -> None:
    """See that the clocks are as wrong as they are meant to be."""
    assert abs(hosts["right"].offset()) < 60
    assert hosts["behind"].offset() == pytest.approx(-HOUR, abs=60)
    assert hosts["ahead"].offset() == pytest.approx(HOUR, abs=60)
    if "fast" in hosts:
        assert hosts["fast"].pace() > 1.5
    else:
        until(lambda: abs(hosts["stepping"].offset()) > STEP / 2, what="the clock to step")


def uptime() -> float:
    """For how many seconds the server has been up."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT EXTRACT(EPOCH FROM clock_timestamp() - pg_postmaster_start_time())::float8")
        return float(cursor.fetchone()[0])


def enqueue_one(chunk: Chunk, number: int) -> BackgroundJob:
    delay = chunk.random.choice([0.0, chunk.random.uniform(0, 5)])
    function = compare_clocks.using(run_at=timedelta(seconds=delay))
    return function.enqueue(LONG if number % 20 == 0 else 0.0)


def unfinished() -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT id FROM background_jobs WHERE status IN ('queued', 'processing')")
        return cursor.fetchall()


def check(job: BackgroundJob) -> float:
    """See that a job ran once and not too early. Returns how many seconds after run_at it started."""
    assert (job.status, job.attempts, job.last_error) == ("completed", 1, None)
    # The first claim may have been released on a busy host, which is no attempt.
    assert job.run_at <= job.started_at <= job.attempted_at
    started = job.result["first"][1]
    assert started >= job.run_at.timestamp()
    return float(started - job.run_at.timestamp())
