"""The job functions that the fuzzing of `test_fuzz.py` runs."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from django_pgjobs import job
from tests.faults import hostile


@job(backoff=0)
def echo(*args: Any, **kwargs: Any) -> Any:
    return {"args": args, "kwargs": kwargs}


@job(backoff=0)
async def echo_async(*args: Any, **kwargs: Any) -> Any:
    await asyncio.sleep(0)
    return {"args": args, "kwargs": kwargs}


@job(backoff=0)
def give(kind: str) -> Any:
    return hostile.RESULTS[kind]()


@job(backoff=0)
async def give_async(kind: str) -> Any:
    return hostile.RESULTS[kind]()


@job(backoff=0, max_attempts=2)
def fail(kind: str | int) -> None:
    raise _exception(kind)


@job(backoff=0, max_attempts=2)
async def fail_async(kind: str | int) -> None:
    await asyncio.sleep(0)
    raise _exception(kind)


@job(backoff=0, max_attempts=2)
def fail_while_failing(first: str | int, second: str | int) -> None:
    try:
        raise _exception(first)
    finally:
        raise _exception(second)


def _exception(kind: str | int) -> BaseException:
    if isinstance(kind, int):
        return hostile.exception(random.Random(kind))
    return hostile.EXCEPTIONS[kind]()


# ── Names ─────────────────────────────────────────────────────────────────────────────────────────────────

NAMES = [name for name in hostile.TEXTS if 0 < len(name) <= 255] + ["n" * 255, "\U0001f980" * 255]
NAMED = [job(name=name, backoff=0)(lambda *args: args) for name in NAMES]


# ── Rules that fail ───────────────────────────────────────────────────────────────────────────────────────


class NoSubclass(type):
    def __subclasscheck__(cls, subclass: type) -> bool:
        raise SystemExit("no subclass")

    def __instancecheck__(cls, instance: object) -> bool:
        raise KeyboardInterrupt


class Checked(Exception, metaclass=NoSubclass):
    pass


class Wait(float):
    def __float__(self) -> float:
        raise RuntimeError("no float")

    __repr__ = __float__  # type: ignore[assignment]


def _backoff(kind: str) -> Any:
    def backoff(error: BaseException, claim: Any) -> Any:
        match kind:
            case "hostile":
                raise hostile.NoTextAtAll
            case "exits":
                raise SystemExit(1)
            case "interrupts":
                raise KeyboardInterrupt
            case "cancels":
                raise asyncio.CancelledError
            case "raises the same":
                raise error
            case "recurses":
                return backoff(error, claim)
            case "gives up":
                return None
            case "text":
                return "soon"
            case "unprintable":
                return hostile.Unprintable()
            case "nan":
                return float("nan")
            case "infinity":
                return float("inf")
            case "past":
                return -1
            case "huge":
                return 10**400
            case "odd float":
                return Wait(5)

    return backoff


BACKOFFS = [
    "hostile", "exits", "interrupts", "cancels", "raises the same", "recurses", "gives up", "text",
    "unprintable", "nan", "infinity", "past", "huge", "odd float",
]  # fmt: skip

RULES = [
    job(name=f"backoff {kind} {how}", backoff=_backoff(kind), max_attempts=2)(body.func)
    for kind in BACKOFFS
    for how, body in (("plain", fail), ("async", fail_async))
]
RULES += [
    job(name="give up on hostile", give_up_on=Checked, max_attempts=2)(fail.func),
    job(name="retry on hostile", retry_on=Checked, max_attempts=2)(fail.func),
    job(name="give up on hostile, async", give_up_on=Checked, max_attempts=2)(fail_async.func),
]
