"""Receivers of our signals that leave Effects behind, for workers that import this module."""

from __future__ import annotations

import os
from typing import Any

from django_pgjobs import CurrentJob, current_job
from django_pgjobs.lifecycle import Event, JobError
from django_pgjobs.models import BackgroundJob
from django_pgjobs.signals import job_finished, job_started
from tests.models import Effect


def started(sender: Any, job: CurrentJob, **kwargs: Any) -> None:
    assert current_job() is job
    Effect.objects.create(what=f"started {job.id}", pid=os.getpid(), detail=sender.name)
    raise RuntimeError("a receiver that fails")


def finished(
    sender: Any, job: CurrentJob, event: Event, duration: float | None, error: JobError | None, **kwargs: Any
) -> None:
    assert current_job() is None
    status = BackgroundJob.objects.get(pk=job.id).status  # settled by now, and committed
    detail = f"{event} {status} {job.attempt} {error or ''}".rstrip()
    Effect.objects.create(what=f"finished {job.id}", pid=os.getpid(), detail=detail)
    raise SystemExit("a receiver that would end its thread")


job_started.connect(started)
job_finished.connect(finished)
