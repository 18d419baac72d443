"""Processes of workers die at any time, again and again: no job is lost, none is repeated without reason."""

from __future__ import annotations

import re

import pytest

from django_pgjobs import JobFunction
from django_pgjobs.lifecycle import Status
from tests.faults import bodies, checker
from tests.faults.checker import History
from tests.faults.conftest import Chunk
from tests.faults.fleet import Feeder, Fleet, draw_blows
from tests.faults.ledger import Producer
from tests.faults.serverlog import ServerLog

KINDS = {"kill host": 0.4, "kill executor": 0.55, "kill fork server": 0.05}
NOT_OURS = checker.TOO_SLOW | {"08006"}  # and a client that is gone

CRASHED = re.compile(r"executor (died with signal 9|exited with status 1|died with its fork server)")
PERHAPS = "It may have run, and is declared with rerun_if_lost=False."


@pytest.mark.chunks(large=20)
def test_jobs_survive_any_death(
    chunk: Chunk, fleet: Fleet, producer: Producer, server_log: ServerLog
) -> None:
    kills, jobs = chunk.size(small=30, large=50), chunk.size(small=600, large=1000)
    history = run_storm(chunk, fleet, producer, bodies.work, kills, jobs)
    checker.assert_kept(history)
    assert len(history.jobs) == jobs
    assert {job.final.status for job in history.jobs.values()} == {Status.COMPLETED}
    assert unexplained(history, fleet) == []
    assert checker.check_log(server_log.text(), allowed=NOT_OURS) == []


@pytest.mark.chunks(large=6)
def test_at_most_once_jobs_never_start_twice(
    chunk: Chunk, fleet: Fleet, producer: Producer, server_log: ServerLog
) -> None:
    kills, jobs = chunk.size(small=20, large=50), chunk.size(small=300, large=1000)
    history = run_storm(chunk, fleet, producer, bodies.work_once, kills, jobs)
    checker.assert_kept(history, faultless=True)
    assert len(history.jobs) == jobs
    ends = [job.final for job in history.jobs.values()]
    failed = [end for end in ends if end.status is Status.FAILED]
    assert len(failed) + sum(end.status is Status.COMPLETED for end in ends) == jobs
    for reason in {end.last_error or "" for end in failed}:
        assert reason.endswith(PERHAPS), reason
        assert reason.startswith(checker.LOST) or CRASHED.match(reason), reason
    assert checker.check_log(server_log.text(), allowed=NOT_OURS) == []
    chunk.record(failed=len(failed))


def run_storm(
    chunk: Chunk,
    fleet: Fleet,
    producer: Producer,
    body: JobFunction[[int, float], None],
    kills: int,
    jobs: int,
) -> History:
    """Kill so many processes while so many jobs are enqueued and run, and wait for the end of all."""
    fleet.spared = 1  # somebody has to be there who sweeps
    fleet.start(4, "--processes", "1", "--threads", "4")
    fleet.storm(draw_blows(chunk.random, kills, KINDS), Feeder(chunk.random, producer, body, jobs))
    fleet.until_everything_ended()
    fleet.stop()
    history = fleet.history(producer)
    recoveries = checker.recoveries(history, fleet.deaths())
    chunk.record(
        kills=kills,
        jobs=jobs,
        repeats=checker.repeats(history),
        lost_by_the_living=len(fleet.lost_by_the_living(history)),
        **recoveries.figures(),
    )
    # Upper limits for a slow machine, of what ought to take 1 s, and a lease and two sweeps.
    assert max(recoveries.executors, default=0.0) < 10.0
    assert max(recoveries.hosts, default=0.0) < 20.0
    return history


def unexplained(history: History, fleet: Fleet) -> list[str]:
    """Claims that came to a bad end, other than by silence, although nothing of their host was hit."""
    return [
        f"job {job.id} was {hold.how}: {hold.end}"
        for job in history.jobs.values()
        for hold in job.holds
        if hold.how in ("failed", "buried", "interrupted", "stopped") and not fleet.was_hit(hold)
    ]
