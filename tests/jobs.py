"""Job functions for tests. What one does is picked by its arguments."""

from __future__ import annotations

import asyncio
import logging
import os
import time

from django_pgjobs import GiveUp, Retry, Snooze, job

logger = logging.getLogger(__name__)


@job
def add(x: int, y: int) -> int:
    return x + y


@job
def say(text: str) -> None:
    logger.info(text)


@job
def boom(text: str = "boom") -> None:
    raise ValueError(text)


@job
def snooze(seconds: float) -> None:
    raise Snooze(seconds)


@job
def again(seconds: float | None = None) -> None:
    raise Retry(seconds)


@job
def give_up(reason: str = "") -> None:
    raise GiveUp(reason)


@job
def slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@job
def kill_self(signal: int) -> None:
    os.kill(os.getpid(), signal)


@job(rerun_if_lost=False)
def at_most_once(x: int = 0) -> int:
    return x


@job
async def add_async(x: int, y: int) -> int:
    await asyncio.sleep(0)
    return x + y


@job
async def boom_async(text: str = "boom") -> None:
    raise ValueError(text)


@job
async def slow_async(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


@job
def sign_in(user: str, password: str, **options: object) -> None:
    raise ValueError(f"{user} could not sign in: {password!r} is refused ({options})")
