"""Jobs that kill the process in which they run end as dead letters; the good ones around them complete."""

from __future__ import annotations

import pytest

from django_pgjobs.lifecycle import Status
from tests.faults import bodies, checker
from tests.faults.conftest import Chunk
from tests.faults.fleet import Fleet, enqueue
from tests.faults.ledger import Producer

MAX_CRASHES = 3


@pytest.mark.chunks(large=3)
def test_killers_are_buried_and_the_others_complete(chunk: Chunk, fleet: Fleet, producer: Producer) -> None:
    killers, good = chunk.size(small=5, large=20), chunk.size(small=150, large=1000)
    fleet.start(2, "--processes", "1", "--threads", "4", MAX_CRASHES=MAX_CRASHES, LEASE=10)
    ways = list(bodies.WAYS_TO_DIE) * 3
    chunk.random.shuffle(ways)
    poisoned: dict[int, str] = {}
    for way in ways[:killers]:
        lengths = [chunk.random.uniform(0, 0.2) for _ in range(good // killers)]
        enqueue(producer, bodies.work, lengths)
        poisoned[enqueue_killer(producer, way)] = way
    fleet.until_everything_ended()
    fleet.stop()
    history = fleet.history(producer)
    checker.assert_kept(history)
    killed: set[int] = set()
    for job in history.jobs.values():
        if job.number not in poisoned:
            assert job.final.status is Status.COMPLETED, job.final
            continue
        way = poisoned[job.number]
        assert job.final.status is Status.FAILED, job.final
        assert job.starts <= job.final.crashes == MAX_CRASHES, job.final
        expected = f"The job killed its executor {MAX_CRASHES} times (executor {bodies.WAYS_TO_DIE[way][1]}"
        assert (job.final.last_error or "").startswith(expected), (way, job.final)
        killed |= {run.start.pid for run in job.runs if run.start is not None}
    assert len(killed) <= killers * MAX_CRASHES
    others = [job for job in history.jobs.values() if job.number not in poisoned]
    chunk.record(
        killers=killers,
        good=len(others),
        executors=len(killed),
        repeats_of_good_ones=sum(job.starts - 1 for job in others),
        max_crashes_of_good_ones=max(job.final.crashes for job in others),
    )


def enqueue_killer(producer: Producer, way: str) -> int:
    """Returns the number of the job."""
    (number,) = producer.enqueue(lambda numbers: bodies.die.enqueue(numbers[0], way))
    return number
