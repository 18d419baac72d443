"""Jobs that hold the interpreter's lock beyond their timeout are ended, at no cost for their neighbours."""

from __future__ import annotations

import re
import time

import pytest
from django.db import connection

from django_pgjobs import job
from django_pgjobs.models import BackgroundJob
from tests.faults.conftest import Chunk
from tests.workers import Workers, until

TIMEOUT = 2.0  # seconds
SETTLED_WITHIN = 12.0  # seconds from its start


@job(timeout=TIMEOUT, max_attempts=1)
def hold_the_lock() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # for years, without a look at anything else


@job(timeout=3600, backoff=0)
def be_a_neighbour(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@pytest.fixture
def child_environment(child_environment: dict[str, str]) -> dict[str, str]:
    return {**child_environment, "PGJOBS_TEST_IMPORT": __name__}


@pytest.mark.chunks(large=1)
def test_jobs_that_hold_the_interpreter_are_ended(chunk: Chunk, workers: Workers) -> None:
    count = chunk.size(small=4, large=100)
    worker = workers.start("--processes", "4", "--threads", "2").until_listening()
    greedy, neighbours = [], []
    for _ in range(count):
        greedy.append(hold_the_lock.enqueue())
        for _ in range(2):
            neighbours.append(be_a_neighbour.enqueue(chunk.random.uniform(0.0, 3.0)))
    patience = 60.0 + count * (TIMEOUT + 10.0)
    until(lambda: not BackgroundJob.objects.filter(status__in=["queued", "processing"]), deadline=patience)
    (error,) = {job.refresh().last_error for job in greedy}
    assert error.endswith("its timeout of 2 s. It did not heed it, so its executor was killed.")
    assert {(job.refresh().status, job.attempts, job.crashes) for job in neighbours} == {("completed", 1, 0)}
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT EXTRACT(EPOCH FROM max(updated_at - attempted_at))::float8,
                   count(*) FILTER (WHERE updated_at - attempted_at > %s * interval '1 second')
              FROM background_jobs WHERE job_name = %s
            """,
            [SETTLED_WITHIN, hold_the_lock.name],
        )
        longest, late = cursor.fetchone()
    interrupted = sum(job.metadata.get("interruptions", 0) for job in neighbours)
    chunk.record(greedy=count, neighbours=2 * count, interrupted=interrupted, late=late, max_seconds=longest)
    assert late == 0 or not chunk.large
    assert worker.stop() == 0
