"""The jobs that are measured. Each takes a number, so that their payloads are alike."""

from __future__ import annotations

import asyncio
import time

from django_pgjobs import job


@job
def nothing(number: int) -> None:
    pass


@job
async def nothing_async(number: int) -> None:
    pass


@job
def account(number: int) -> None:
    """One read and one write by the ORM."""
    from tests.benchmarks.models import Account

    found = Account.objects.get(pk=number % 1000 + 1)
    found.balance += 1
    found.save(update_fields=["balance"])


@job
def sleep_5(number: int) -> None:
    time.sleep(0.005)


@job
def sleep_50(number: int) -> None:
    time.sleep(0.05)


@job
async def sleep_5_async(number: int) -> None:
    await asyncio.sleep(0.005)


@job
async def sleep_50_async(number: int) -> None:
    await asyncio.sleep(0.05)


@job
def moment(number: int) -> float:
    """When it started, by the clock that all processes of a machine share."""
    return time.monotonic()
