"""Hosts that fall silent and come back: what they held may be held by others, and they are told so."""

from __future__ import annotations

import re

import pytest

from django_pgjobs.lifecycle import Status
from tests.faults import bodies, checker
from tests.faults.checker import History
from tests.faults.conftest import Chunk
from tests.faults.fleet import Feeder, Fleet, draw_blows
from tests.faults.ledger import Producer
from tests.faults.serverlog import ServerLog

# What a busy machine may lead to, and that the server ends a transaction which a silent host has left open.
ALLOWED = checker.TOO_SLOW | {"25P03"}

REFUSED = re.compile(r"job=(\d+) .* attempt=(\d+): the claim was lost")
# Said where the connection broke while the outcome was written, so that it may have been stored.
DOUBTFUL = re.compile(r"job=(\d+) .* attempt=(\d+): its outcome was stored, and the answer got lost")


@pytest.mark.chunks(large=15)
def test_what_a_silent_host_has_lost_it_cannot_change(
    chunk: Chunk, fleet: Fleet, producer: Producer, server_log: ServerLog
) -> None:
    """Jobs are so long that many of those that a host has lost run elsewhere when it comes back."""
    stops, jobs = chunk.size(small=10, large=20), chunk.size(small=150, large=300)
    lease = fleet.lease
    blows = draw_blows(
        chunk.random,
        stops,
        {"pause host": 0.7, "pause executor": 0.3},
        every=(0.5, 2.0),
        seconds=(0.5 * lease, 3.0 * lease),
    )
    fleet.start(3, "--processes", "1", "--threads", "4")
    fleet.storm(blows, Feeder(chunk.random, producer, bodies.work, jobs, longest=1.5))
    fleet.until_everything_ended()
    history = fleet.history(producer)
    checker.assert_kept(history)
    lost = lost_claims(history)
    fleet.until(
        lambda: lost <= told(fleet, REFUSED) | told(fleet, DOUBTFUL), what="each lost claim to be logged"
    )
    fleet.stop()
    history = fleet.history(producer)
    checker.assert_kept(history)
    assert {job.final.status for job in history.jobs.values()} == {Status.COMPLETED}
    lost, refused = lost_claims(history), told(fleet, REFUSED)
    assert refused <= lost
    assert lost - refused <= told(fleet, DOUBTFUL)
    assert checker.check_log(server_log.text(), allowed=ALLOWED) == []
    chunk.record(
        stops=stops, jobs=jobs, lost=len(lost), refused=len(refused), repeats=checker.repeats(history),
        lost_by_the_living=len(fleet.lost_by_the_living(history)),
    )  # fmt: skip


def lost_claims(history: History) -> set[tuple[int, int]]:
    """The job and the attempt of each claim that a sweep has taken away."""
    return {
        (job.id, hold.claim.attempts)
        for job in history.jobs.values()
        for hold in job.holds
        if hold.how == "lost"
    }


def told(fleet: Fleet, what: re.Pattern[str]) -> set[tuple[int, int]]:
    """The job and the attempt of each claim of which hosts have said this."""
    return {(int(job), int(attempt)) for job, attempt in what.findall(fleet.logs())}


@pytest.mark.chunks(large=5)
def test_a_short_silence_repeats_nothing(chunk: Chunk, fleet: Fleet, producer: Producer) -> None:
    """The lease is long enough here that the rest of it covers what a busy machine adds to a pause."""
    stops, jobs = chunk.size(small=4, large=10), chunk.size(small=100, large=300)
    blows = draw_blows(
        chunk.random, stops, {"pause host": 0.8, "pause executor": 0.2}, every=(1.0, 3.0), seconds=(0.5, 4.5)
    )
    fleet.start(2, "--processes", "1", "--threads", "4", LEASE=10)
    fleet.storm(blows, Feeder(chunk.random, producer, bodies.work, jobs))
    fleet.until_everything_ended()
    fleet.stop()
    history = fleet.history(producer)
    checker.assert_kept(history, faultless=True)
    assert {job.final.status for job in history.jobs.values()} == {Status.COMPLETED}
    assert not lost_claims(history)
    chunk.record(stops=stops, jobs=jobs)
