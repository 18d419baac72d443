"""The floor: the same work by bare statements, with nothing around them. Functions for `Clients`."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Generator, Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import psycopg

CLAIM = """
WITH due AS MATERIALIZED (
    SELECT id
      FROM background_jobs
     WHERE status = 'queued'
       AND queue_name = %s
       AND priority = 0
       AND run_at <= statement_timestamp()
     ORDER BY run_at, id
     LIMIT %s
       FOR UPDATE SKIP LOCKED
)
UPDATE background_jobs AS job
   SET status = 'processing',
       attempts = job.attempts + 1,
       locked_at = statement_timestamp()
  FROM due
 WHERE job.id = due.id
RETURNING job.id, job.job_name, job.payload
"""

# From a low-water mark on: what has been claimed before is not stepped over again.
CLAIM_ONWARDS = CLAIM.replace(
    "AND run_at <= statement_timestamp()",
    "AND run_at <= statement_timestamp()\n       AND (run_at, id) > (%s, %s)",
).replace("RETURNING job.id,", "RETURNING job.run_at, job.id,")

COMPLETE = """
UPDATE background_jobs
   SET status = 'completed',
       updated_at = statement_timestamp()
 WHERE id = ANY (%s)
"""


READ = "SELECT id, balance FROM benchmarks_account WHERE id = %s"
WRITE = "UPDATE benchmarks_account SET balance = %s WHERE id = %s"

INSERT = """
INSERT INTO background_jobs (queue_name, job_name, payload)
VALUES (%s, %s, %s::jsonb)
RETURNING id
"""


INSERT_MANY = """
INSERT INTO background_jobs (queue_name, job_name, payload)
SELECT 'default', 'tests.benchmarks.jobs.nothing', payload::jsonb
  FROM unnest(%s::text[]) AS payload
RETURNING id
"""

COPY = "COPY background_jobs (queue_name, job_name, payload) FROM STDIN"

PAYLOAD = '{"args": [1], "kwargs": {}}'


class Done(NamedTuple):
    jobs: int
    began: float  # by the clock that all processes share
    ended: float


def drain(url: str, batch: int, queues: Iterable[str] = ("default",)) -> Generator[None, None, Done]:
    """Claim and complete until nothing is due, with one statement for each. Queues take turns."""
    with connect(url) as connection:
        yield
        jobs, began = 0, time.monotonic()
        waiting = deque(queues)
        while waiting:
            claimed = connection.execute(CLAIM, (waiting[0], batch)).fetchall()
            if claimed:
                connection.execute(COMPLETE, ([row[0] for row in claimed],))
                jobs += len(claimed)
                waiting.rotate(-1)
            else:
                waiting.popleft()
        return Done(jobs, began, time.monotonic())


def drain_onwards(url: str, batch: int) -> Generator[None, None, Done]:
    """The same with a low-water mark: only for jobs that are due in the order in which they came."""
    with connect(url) as connection:
        yield
        jobs, began = 0, time.monotonic()
        reached: tuple[Any, int] = (datetime.min.replace(tzinfo=UTC), 0)
        while claimed := connection.execute(CLAIM_ONWARDS, ("default", *reached, batch)).fetchall():
            connection.execute(COMPLETE, ([row[1] for row in claimed],))
            reached = max((row[0], row[1]) for row in claimed)
            jobs += len(claimed)
        return Done(jobs, began, time.monotonic())


def use_accounts(url: str, batch: int) -> Generator[None, None, Done]:
    """The same, with one read and one write for each job."""
    with connect(url) as connection:
        yield
        jobs, began = 0, time.monotonic()
        while claimed := connection.execute(CLAIM, ("default", batch)).fetchall():
            for _, _, payload in claimed:
                [number] = payload["args"]
                row = connection.execute(READ, (number % 1000 + 1,)).fetchone()
                assert row is not None
                connection.execute(WRITE, (row[1] + 1, row[0]))
            connection.execute(COMPLETE, ([row[0] for row in claimed],))
            jobs += len(claimed)
        return Done(jobs, began, time.monotonic())


def listen(url: str) -> Generator[None, None, dict[int, float]]:
    """Claim and complete what comes, as soon as it comes, until told to stop by a notification.

    Returns when each job was picked up.
    """
    moments = {}
    with connect(url) as connection, connect(url) as listener:
        listener.execute("LISTEN job_created")
        listener.execute("LISTEN benchmark_stop")
        yield
        while True:
            while claimed := connection.execute(CLAIM, ("default", 100)).fetchall():
                now = time.monotonic()
                moments.update((row[0], now) for row in claimed)
                connection.execute(COMPLETE, ([row[0] for row in claimed],))
            for notification in listener.notifies(stop_after=1):
                if notification.channel == "benchmark_stop":
                    return moments


def offer(url: str, job: str, rate: float, seconds: float) -> Generator[None, None, dict[int, float]]:
    """Enqueue jobs one by one, at random moments, so many in a second. Returns when each was sent."""
    sent = {}
    with connect(url) as connection:
        yield
        now = began = time.monotonic()
        due = began
        while due < began + seconds:
            due += random.expovariate(rate)
            time.sleep(max(due - now, 0))
            now = time.monotonic()
            sent[insert(connection, job)] = now
            now = time.monotonic()
    return sent


def insert(connection: psycopg.Connection[Any], job: str) -> int:
    """Enqueue a job, and return its id."""
    row = connection.execute(INSERT, ("default", f"tests.benchmarks.jobs.{job}", PAYLOAD)).fetchone()
    assert row is not None
    return int(row[0])


def connect(url: str) -> psycopg.Connection[Any]:
    """A connection that prepares each statement when it sees it for the second time."""
    return psycopg.connect(url, autocommit=True, prepare_threshold=1)
