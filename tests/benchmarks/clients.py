"""Processes that use the database at the same time: each runs one function, and all of them start together.

Such a function is a generator. It prepares itself, yields once, goes on when all are ready, and returns what
it has found.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Generator
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

import django
import psycopg

from django_pgjobs.sql import ENQUEUE

from . import floor
from .measure import Cost, Meter

Work = Callable[..., Generator[None, None, Any]]


class Clients:
    """Runs a function in processes of their own. On entering, all of them are ready to go."""

    def __init__(self, count: int, work: Work, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(theirs, work, args), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Clients:
        self.results()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()  # by which they end
        for process in self._processes:
            if error is not None:
                process.terminate()
            process.join()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def go(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)

    def results(self) -> list[Any]:
        """What the functions returned, once all have. Raises RuntimeError where one has failed."""
        results = []
        for pipe in self._pipes:
            try:
                failure, result = pipe.recv()
            except EOFError:
                raise RuntimeError("A client process ended without a word.") from None
            if failure:
                raise RuntimeError(f"A client process failed:\n{failure}")
            results.append(result)
        return results

    def run(self) -> list[Any]:
        self.go()
        return self.results()


def _run(pipe: Connection, work: Work, args: tuple[Any, ...]) -> None:
    try:
        steps = work(*args)
        next(steps)
        pipe.send(("", None))
        pipe.recv()
        try:
            next(steps)
        except StopIteration as end:
            pipe.send(("", end.value))
        pipe.recv()  # it stays until its processor time has been read
    except EOFError:
        pass
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    os._exit(0)


# ── What one client enqueues ──────────────────────────────────────────────────────────────────────────────

ROUNDS = 4


class Enqueued(NamedTuple):
    jobs: int
    seconds: float
    details: dict[str, float]


def enqueue(url: str, kind: str, seconds: float) -> Generator[None, None, dict[str, Enqueued]]:
    """Enqueue in each way of a kind in turn, each of them for so long in all.

    In one process, and in turns, so that they differ in nothing else.
    """
    django.setup()
    with floor.connect(url) as bare, floor.connect(url) as observer:
        ways = WAYS[kind](bare)
        for way in ways.values():
            way()
            way()  # so that statements are prepared
        yield
        jobs = dict.fromkeys(ways, 0)
        times = dict.fromkeys(ways, 0.0)
        costs = dict.fromkeys(ways, Cost(0, 0, 0))
        for _ in range(ROUNDS):
            for name, way in ways.items():
                meter, began = Meter(observer, [os.getpid()]), time.perf_counter()
                while (elapsed := time.perf_counter() - began) < seconds / ROUNDS:
                    jobs[name] += way()
                times[name] += elapsed
                costs[name] += meter.read()
    return {name: Enqueued(jobs[name], times[name], costs[name].each(jobs[name])) for name in ways}


BARE, THROUGH_DJANGO, UNNEST, OURS = "bare INSERT", "INSERT through Django's cursor", "bare unnest", "ours"

Way = Callable[[], int]  # enqueues a few jobs, and returns how many


def one_by_one(bare: psycopg.Connection[Any]) -> dict[str, Way]:
    from tests.benchmarks.jobs import nothing

    def insert() -> int:
        floor.insert(bare, "nothing")
        return 1

    def through_django() -> int:
        insert_through_django()
        return 1

    def ours() -> int:
        nothing.enqueue(1)
        return 1

    return {BARE: insert, THROUGH_DJANGO: through_django, OURS: ours}


def ten_at_once(bare: psycopg.Connection[Any]) -> dict[str, Way]:
    from django.db import transaction

    from tests.benchmarks.jobs import nothing

    def insert() -> int:
        with bare.transaction():
            for _ in range(10):
                floor.insert(bare, "nothing")
        return 10

    def through_django() -> int:
        with transaction.atomic():
            for _ in range(10):
                insert_through_django()
        return 10

    def ours() -> int:
        with transaction.atomic():
            for _ in range(10):
                nothing.enqueue(1)
        return 10

    return {BARE: insert, THROUGH_DJANGO: through_django, OURS: ours}


def thousand_at_once(bare: psycopg.Connection[Any]) -> dict[str, Way]:
    from tests.benchmarks.jobs import nothing

    def unnest() -> int:
        bare.execute(floor.INSERT_MANY, ([floor.PAYLOAD] * 1000,))
        return 1000

    def copy() -> int:
        with bare.cursor() as cursor, cursor.copy(floor.COPY) as rows:
            for _ in range(1000):
                rows.write_row(("default", "tests.benchmarks.jobs.nothing", floor.PAYLOAD))
        return 1000

    def ours() -> int:
        return len(nothing.enqueue_many(((1,), {}) for _ in range(1000)))

    return {UNNEST: unnest, "bare COPY": copy, OURS: ours}


WAYS: dict[str, Callable[[psycopg.Connection[Any]], dict[str, Way]]] = {
    "one by one": one_by_one,
    "ten in a transaction": ten_at_once,
    "a thousand at once": thousand_at_once,
}

# Beside which way each stands: ours beside the same statement without what stands around it.
BESIDE = {
    ("one by one", THROUGH_DJANGO): BARE,
    ("one by one", OURS): THROUGH_DJANGO,
    ("ten in a transaction", THROUGH_DJANGO): BARE,
    ("ten in a transaction", OURS): THROUGH_DJANGO,
    ("a thousand at once", OURS): UNNEST,
}


def insert_through_django() -> None:
    """The statement of `enqueue` without what stands around it."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            ENQUEUE,
            {
                "queue_name": "default",
                "job_name": "tests.benchmarks.jobs.nothing",
                "payload": floor.PAYLOAD,
                "priority": 0,
                "run_at": None,
                "delay": timedelta(0),
                "max_attempts": 3,
                "rerun_if_lost": True,
                "metadata": "{}",
            },
        )
        cursor.fetchone()
