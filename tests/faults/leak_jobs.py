"""Job functions that change whatever a job can change around itself, and one that tells what it finds."""

from __future__ import annotations

import contextvars
import decimal
import os
from typing import Any

from django.db import connection
from django.utils import timezone, translation

from django_pgjobs import job

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="untouched")


def _state() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "language": translation.get_language(),
        "zone": timezone.get_current_timezone_name(),
        "variable": variable.get(),
        "precision": decimal.getcontext().prec,
        "queries": len(connection.queries_log),
        "forced log": connection.force_debug_cursor,
        "in a transaction": connection.in_atomic_block,
    }


def _leave_a_mess() -> None:
    translation.activate("de")
    timezone.activate("Asia/Tokyo")
    variable.set("touched")
    decimal.getcontext().prec = 3


@job
def state() -> dict[str, Any]:
    return _state()


@job
async def state_async() -> dict[str, Any]:
    return _state()


@job
def leave_a_mess() -> None:
    _leave_a_mess()
    for _ in range(3):
        connection.queries_log.append({"sql": "SELECT 1", "time": "0"})
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


@job
async def leave_a_mess_async() -> None:
    _leave_a_mess()
