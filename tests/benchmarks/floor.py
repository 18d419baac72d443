"""The floor: the same work by bare statements, with nothing around them. Functions for `Clients`."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import NamedTuple

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

COMPLETE = """
UPDATE background_jobs
   SET status = 'completed',
       updated_at = statement_timestamp()
 WHERE id = ANY (%s)
"""


class Done(NamedTuple):
    jobs: int
    began: float  # by the clock that all processes share
    ended: float


def drain(url: str, batch: int, queue: str = "default") -> Generator[None, None, Done]:
    """Claim and complete until nothing is due, with one statement for each."""
    with psycopg.connect(url, autocommit=True, prepare_threshold=1) as connection:
        yield
        jobs, began = 0, time.monotonic()
        while claimed := connection.execute(CLAIM, (queue, batch)).fetchall():
            connection.execute(COMPLETE, ([row[0] for row in claimed],))
            jobs += len(claimed)
        return Done(jobs, began, time.monotonic())
