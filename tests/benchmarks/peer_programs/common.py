"""What the programs have in common. They run in environments that have nothing of ours, by these commands:

install           make the peer's tables
fill JOB COUNT    enqueue so many jobs
work JOB          run jobs of this kind until told to stop
enqueue SECONDS   enqueue one by one, then a thousand at once; print how many jobs each way did in a second
trickle COUNT     enqueue one job at a time, each at a moment when workers are idle; print when

The jobs are `nothing`, `nothing_async` and `moment`, which notes in a file when it was started.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

URL = os.environ["DATABASE_URL"]
THREADS = int(os.environ["BENCHMARK_THREADS"])  # of each of our executor processes
ASYNC_SLOTS = int(os.environ["BENCHMARK_ASYNC_SLOTS"])
BATCH = int(os.environ["BENCHMARK_BATCH"] or 0)  # jobs that are claimed at once; 0: as the peer decides
MOMENTS = Path(os.environ["BENCHMARK_MOMENTS"])

logging.disable(logging.INFO)  # as for ours

One = Callable[[str, int], Any]  # enqueues a job with this number; may be a coroutine function
Many = Callable[[str, int], Any]  # enqueues so many jobs by the peer's own way; the same


_has_begun = False


def nothing(number: int) -> None:
    """Does nothing, but for the first one of each process, which notes when that was."""
    global _has_begun
    if not _has_begun:
        _has_begun = True
        moment(number)


async def nothing_async(number: int) -> None:
    nothing(number)


def moment(number: int) -> None:
    file = os.open(MOMENTS, os.O_WRONLY | os.O_APPEND)
    os.write(file, f"{number} {time.monotonic()}\n".encode())
    os.close(file)


def main(install: Callable[[], object], work: Callable[[str], object], client: Callable[[], Any]) -> None:
    """Carry out the command. `client` makes a context manager, async or not, that gives (One, Many)."""
    command, *arguments = sys.argv[1:]
    if command == "install":
        install()
    elif command == "work":
        work(arguments[0])
    else:
        manager = client()
        if hasattr(manager, "__aenter__"):
            asyncio.run(in_async(manager, CLIENTS[command], arguments))
        else:
            with manager as (one, many):
                without_loop(CLIENTS[command](one, many, *arguments))


async def in_async(manager: Any, command: Callable[..., Any], arguments: list[str]) -> None:
    async with manager as (one, many):
        await command(one, many, *arguments)


def without_loop(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits: there must be no event loop, beside which Django refuses to work."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise RuntimeError("A client that is not async has waited.")


async def fill(one: One, many: Many, job: str, count: str) -> None:
    left = int(count)
    while left > 0:
        await result(many(job, min(left, 1000)))
        left -= 1000


async def enqueue(one: One, many: Many, seconds: str) -> None:
    singly = await rate(lambda: one("nothing", 1), 1, float(seconds))
    at_once = await rate(lambda: many("nothing", 1000), 1000, float(seconds))
    print(json.dumps({"one by one": singly, "a thousand at once": at_once}))


async def trickle(one: One, many: Many, count: str) -> None:
    for number in range(-5, 0):  # until the worker is warm
        await result(one("moment", number))
        deadline = time.monotonic() + 60
        while f"{number} " not in MOMENTS.read_text():
            if time.monotonic() > deadline:
                raise RuntimeError("Within a minute, no worker has started the job.")
            time.sleep(0.02)
    sent = {}
    for number in range(int(count)):
        time.sleep(random.uniform(0.05, 0.15))
        sent[number] = time.monotonic()
        await result(one("moment", number))
    print(json.dumps(sent))


CLIENTS = {"fill": fill, "enqueue": enqueue, "trickle": trickle}


async def rate(way: Callable[[], Any], jobs: int, seconds: float) -> float:
    await result(way())
    done, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        await result(way())
        done += jobs
    return done / elapsed


async def result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
