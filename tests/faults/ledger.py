"""What happened outside of the tested transactions: the effects of bodies, and what producers were told.

A body appends a line when it starts and one when it ends, to a file that outlives its process and its
database. Jobs are known by a number of the test's own, their first argument, since a body is not told its id;
the audit knows which id has which number.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psycopg
from django.db import Error

VARIABLE = "PGJOBS_TEST_LEDGER"  # the environment variable that names the file

_runs = itertools.count(1)


class Effect(NamedTuple):
    """One line: the start or the end of one run of a body."""

    what: str  # "start" or "end"
    number: int  # of the job
    run: str  # of the body; equal in its start and its end only
    pid: int
    at: float  # seconds of the machine's clock, which is also the server's


def write(what: str, number: int, run: str) -> None:
    """Append a line to the ledger that the environment names, with one write."""
    line = f"{what} {number} {run} {os.getpid()} {time.time():.6f}\n"
    file = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def start(number: int) -> str:
    """Note that a body has started. Returns the name of this run."""
    run = f"{os.getpid()}-{next(_runs)}-{time.monotonic_ns()}"
    write("start", number, run)
    return run


@contextmanager
def entry(number: int) -> Iterator[None]:
    """Note that a body has started, and that it has ended unless it raises."""
    run = start(number)
    yield
    write("end", number, run)


def read(path: Path) -> list[Effect]:
    """All effects, in the order in which they came about."""
    effects = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if not line.endswith("\n"):
            break  # it is being written
        what, number, run, pid, at = line.split()
        effects.append(Effect(what, int(number), run, int(pid), float(at)))
    return effects


@dataclass
class Producer:
    """Numbers the jobs that it enqueues, and keeps what it was told about each."""

    acknowledged: set[int] = field(default_factory=set)
    rolled_back: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)  # the connection was lost while it committed
    _last: int = 0

    def numbers(self, count: int) -> list[int]:
        """Numbers that no job has had."""
        first = self._last + 1
        self._last += count
        return list(range(first, first + count))

    def enqueue(self, insert: Callable[[list[int]], object], count: int = 1) -> list[int]:
        """Let `insert` commit jobs with new numbers, and note what came of it. Returns the numbers.

        A database error means that nobody knows, and is not passed on. After any other exception the jobs
        count as rolled back.
        """
        numbers = self.numbers(count)
        try:
            insert(numbers)
        except (Error, psycopg.Error):
            self.unknown.update(numbers)
        except BaseException:
            self.rolled_back.update(numbers)
            raise
        else:
            self.acknowledged.update(numbers)
        return numbers
