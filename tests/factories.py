"""Rows for tests: a job of any status, with the columns that its status implies, and what a table holds."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db import connections
from django.db.models.functions import Now

from django_pgjobs.lifecycle import Status
from django_pgjobs.models import BackgroundJob
from django_pgjobs.store import Claim


def _claimed() -> dict[str, Any]:
    return {
        "attempts": 1,
        "locked_at": Now(),
        "locked_by": uuid.uuid4(),
        "worker_id": uuid.uuid4(),
        "started_at": Now(),
        "attempted_at": Now(),
    }


def _failed() -> dict[str, Any]:
    error = {
        "at": "2026-01-02T03:04:05+00:00",
        "attempt": 3,
        "worker": str(uuid.uuid4()),
        "exception": "builtins.ValueError",
        "message": "boom",
        "traceback": "Traceback (most recent call last):\nValueError: boom",
    }
    return _claimed() | {
        "attempts": 3,
        "last_error": "ValueError: boom",
        "errors": [error],
        "error_fingerprint": "boom",
    }


IMPLIED: dict[Status, Callable[[], dict[str, Any]]] = {
    Status.QUEUED: dict,
    Status.PROCESSING: _claimed,
    Status.FAILED: _failed,
    Status.COMPLETED: _claimed,
    Status.CANCELLED: dict,
}


def make_job(status: str = Status.QUEUED, *, using: str = "default", **columns: Any) -> BackgroundJob:
    """Insert a job and return it as it stands in the table.

    Its columns are what `status` implies, unless given. A timedelta is an instant, counted from the
    database's clock: run_at=timedelta(hours=1) is due in an hour, updated_at=-timedelta(days=4) is old.
    """
    values = {
        "job_name": "tests.jobs.add",
        "payload": {"args": [1, 2]},
        "status": Status(status).value,
        **IMPLIED[Status(status)](),
        **columns,
    }
    for name, value in values.items():
        if isinstance(value, timedelta):
            values[name] = Now() + value
    return BackgroundJob.objects.using(using).create(**values).refresh()


def claim_of(job: BackgroundJob) -> Claim:
    """The claim that the row says somebody holds."""
    return Claim(
        id=job.pk,
        token=job.locked_by,
        attempts=job.attempts,
        max_attempts=job.max_attempts,
        job_name=job.job_name,
        queue_name=job.queue_name,
        payload="{}",
        crashes=job.crashes,
        rerun_if_lost=job.rerun_if_lost,
    )


def rows(using: str = "default") -> dict[int, dict[str, Any]]:
    """Every column of every job, by id."""
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT * FROM background_jobs ORDER BY id")
        names = [column.name for column in cursor.description]
        return {row[0]: dict(zip(names, row, strict=True)) for row in cursor.fetchall()}
