"""A trigger, in tests only, that writes down every change of every job: also those by bugs and by hand.

It writes in the transaction of the change, so what is rolled back leaves nothing. The changes of one job come
in the order in which they took effect, since each of them locks the row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import psycopg

from django_pgjobs.lifecycle import Status

INSTALL = """
CREATE TABLE pgjobs_audit (
    sequence bigint GENERATED ALWAYS AS IDENTITY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    transaction bigint NOT NULL DEFAULT txid_current(),
    backend integer NOT NULL DEFAULT pg_backend_pid(),
    application text NOT NULL DEFAULT current_setting('application_name'),
    job bigint NOT NULL,
    job_name text NOT NULL,
    number text,
    old_status text, old_token uuid, old_attempts integer, old_crashes integer, old_run_at timestamptz,
    old_locked_at timestamptz, old_interruptions text,
    status text, token uuid, attempts integer, crashes integer, run_at timestamptz,
    locked_at timestamptz, interruptions text,
    max_attempts integer NOT NULL,
    rerun_if_lost boolean NOT NULL,
    worker uuid,
    stop_requested boolean NOT NULL,
    unknown_since text,
    last_error text
);

CREATE FUNCTION pgjobs_audit() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    job background_jobs;
BEGIN
    IF TG_OP = 'DELETE' THEN
        job := OLD;
    ELSE
        job := NEW;
    END IF;
    INSERT INTO pgjobs_audit (
        job, job_name, number,
        old_status, old_token, old_attempts, old_crashes, old_run_at, old_locked_at, old_interruptions,
        status, token, attempts, crashes, run_at, locked_at, interruptions,
        max_attempts, rerun_if_lost, worker, stop_requested, unknown_since, last_error)
    VALUES (
        job.id, job.job_name, CASE WHEN TG_OP = 'INSERT' THEN job.payload #>> '{args,0}' END,
        OLD.status, OLD.locked_by, OLD.attempts, OLD.crashes, OLD.run_at, OLD.locked_at,
        OLD.metadata ->> 'interruptions',
        NEW.status, NEW.locked_by, NEW.attempts, NEW.crashes, NEW.run_at, NEW.locked_at,
        NEW.metadata ->> 'interruptions',
        job.max_attempts, job.rerun_if_lost, job.worker_id, job.stop_requested_at IS NOT NULL,
        job.metadata ->> 'unknown_since',
        CASE WHEN NEW.status IN ('queued', 'failed') THEN left(job.last_error, 300) END);
    RETURN NULL;
END
$$;

CREATE TRIGGER pgjobs_audit AFTER INSERT OR UPDATE OR DELETE ON background_jobs
    FOR EACH ROW EXECUTE FUNCTION pgjobs_audit();
"""

REMOVE = """
DROP TRIGGER IF EXISTS pgjobs_audit ON background_jobs;
DROP FUNCTION IF EXISTS pgjobs_audit();
DROP TABLE IF EXISTS pgjobs_audit;
"""

READ = """
SELECT sequence, EXTRACT(EPOCH FROM at)::float8, transaction, backend, application, job, job_name, number,
       old_status, old_token::text, old_attempts, old_crashes, EXTRACT(EPOCH FROM old_run_at)::float8,
       EXTRACT(EPOCH FROM old_locked_at)::float8, old_interruptions,
       status, token::text, attempts, crashes, EXTRACT(EPOCH FROM run_at)::float8,
       EXTRACT(EPOCH FROM locked_at)::float8, interruptions,
       max_attempts, rerun_if_lost, worker::text, stop_requested, unknown_since, last_error
  FROM pgjobs_audit
 ORDER BY sequence
"""


class Change(NamedTuple):
    """One change of one job. What is inserted has nothing old, and what is deleted nothing new."""

    sequence: int
    at: float  # seconds, as all times
    transaction: int
    backend: int
    application: str
    job: int
    job_name: str
    number: str | None  # the job's first argument; insertions only

    old_status: Status | None
    old_token: str | None
    old_attempts: int
    old_crashes: int
    old_run_at: float
    old_locked_at: float | None
    old_interruptions: str | None

    status: Status | None
    token: str | None
    attempts: int
    crashes: int
    run_at: float
    locked_at: float | None
    interruptions: str | None

    max_attempts: int
    rerun_if_lost: bool
    worker: str | None  # the host that holds or last held it
    stop_requested: bool
    unknown_since: str | None
    last_error: str | None  # only where the job is then queued or failed

    def __str__(self) -> str:
        old, new = self.old_status or "nothing", self.status or "nothing"
        token = (self.token or self.old_token or "no token")[:8]
        attempts = self.old_attempts if self.status is None else self.attempts
        error = f", {self.last_error!r}" if self.last_error else ""
        return (
            f"[{self.sequence}: {old} → {new} at {self.at:.3f}, {token}, attempts {attempts}, by"
            f" {self.application or 'nobody'} ({self.backend}){error}]"
        )


class Audit:
    """The trigger on the database of one connection, which is in autocommit mode and stays open."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def install(self) -> None:
        self.remove()
        self._connection.execute(INSTALL, prepare=False)

    def remove(self) -> None:
        self._connection.execute(REMOVE, prepare=False)

    def changes(self) -> list[Change]:
        """Every change that has been committed."""
        return [_change(row) for row in self._connection.execute(READ).fetchall()]


def _change(row: tuple[Any, ...]) -> Change:
    change = Change(*row)
    return change._replace(
        old_status=None if change.old_status is None else Status(change.old_status),
        status=None if change.status is None else Status(change.status),
    )
