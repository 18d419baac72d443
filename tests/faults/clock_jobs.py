"""The job functions that workers with wrong clocks run for `test_clocks.py`. None of them calls time.sleep,
which the library that shifts the clock breaks."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

from django.db import connection

from django_pgjobs import job


@job(backoff=0)
def compare_clocks(pause: float = 0.0) -> dict[str, Any]:
    """What the clock of this process says, and that of the database, before and after a pause."""
    first = _both_clocks()
    threading.Event().wait(pause)
    return {"first": first, "second": _both_clocks()}


def _both_clocks() -> list[float]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8")
        return [time.time(), cursor.fetchone()[0]]


@job(backoff=0)
def enqueue_later(delay: float) -> int:
    return compare_clocks.using(run_at=timedelta(seconds=delay)).enqueue().pk
