"""What is measured: processor time of whole process trees, memory, sizes of the table, medians.

Processor time and memory come from /proc, so they are missing where there is none.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

TICKS = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")

# What jobs cost, as a report calls it: 1,000 of them, but for the last.
COSTS = ("CPU s per 1,000: worker or client", "server", "WAL bytes per job")


@dataclass(frozen=True)
class Figure:
    """One figure of one run. `floor` names figures of the same scenario, of which the best is its floor."""

    name: str
    value: float
    unit: str
    floor: tuple[str, ...] = ()
    details: dict[str, float] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)  # over time; one of them is "seconds"

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Figure:
        return cls(**{**plain, "floor": tuple(plain["floor"])})


class Process(NamedTuple):
    pid: int
    parent: int
    own: float  # seconds of processor time
    reaped: float  # of its children that have ended, and theirs


def processes() -> dict[int, Process]:
    """Every process of this machine by its pid. Empty where there is no /proc."""
    found = {}
    for directory in PROC.glob("[0-9]*"):
        try:
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        user, system, children_user, children_system = (int(ticks) / TICKS for ticks in fields[11:15])
        pid = int(directory.name)
        found[pid] = Process(pid, int(fields[1]), user + system, children_user + children_system)
    return found


def below(roots: Iterable[int], table: dict[int, Process]) -> list[Process]:
    """The processes with these pids, and all their descendants."""
    children = defaultdict(list)
    for process in table.values():
        children[process.parent].append(process.pid)
    found, unseen = [], list(roots)
    while unseen:
        pid = unseen.pop()
        if pid in table:
            found.append(table[pid])
            unseen += children[pid]
    return found


def cpu_seconds(roots: Iterable[int], *, but: int | None = None) -> float:
    """The processor time of these processes and all below them, those that have ended included.

    One that has ended counts with its parent, so the roots themselves must not have been waited for.
    """
    family = below(roots, processes())
    if not family:
        return math.nan
    return sum(process.own + process.reaped for process in family if process.pid != but)


def memory(pid: int) -> dict[str, float]:
    """MB of a process: `rss` is all that it has in memory, `own` what it shares with no other process."""
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return {"rss": math.nan, "own": math.nan}
    sizes = {
        name.rstrip(":"): int(number) / 1024 for name, number, _ in map(str.split, text.splitlines()[1:])
    }
    return {"rss": sizes["Rss"], "own": sizes["Private_Clean"] + sizes["Private_Dirty"]}


def postmaster(connection: psycopg.Connection[Any]) -> int | None:
    """The pid of the server's first process, if it runs on this machine where we can see it."""
    backend = processes().get(connection.info.backend_pid)
    if backend is None:
        return None
    name = (PROC / str(backend.pid) / "comm").read_text()
    return backend.parent if name.startswith("postgres") else None


@dataclass(frozen=True)
class Cost:
    """What a stretch of time took: seconds of processor time, bytes of WAL."""

    worker: float
    server: float
    wal: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.worker + other.worker, self.server + other.server, self.wal + other.wal)

    def each(self, jobs: int) -> dict[str, float]:
        """What 1,000 jobs took, and the WAL of one."""
        if not jobs:
            return {}
        costs = (self.worker / jobs * 1000, self.server / jobs * 1000, self.wal / jobs)
        return {name: cost for name, cost in zip(COSTS, costs, strict=True) if not math.isnan(cost)}


class Meter:
    """Counts from when it is made until `read`."""

    def __init__(self, connection: psycopg.Connection[Any], roots: Sequence[int]) -> None:
        self._connection = connection
        self._roots = roots
        self._server = postmaster(connection)
        self._first = self._now()

    def read(self) -> Cost:
        now = self._now()
        return Cost(*(after - before for after, before in zip(now, self._first, strict=True)))

    def _now(self) -> tuple[float, float, float]:
        row = self._connection.execute("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn").fetchone()
        assert row is not None
        own = self._connection.info.backend_pid
        server = math.nan if self._server is None else cpu_seconds([self._server], but=own)
        return cpu_seconds(self._roots), server, float(row[0])


class Summary(NamedTuple):
    """The median of several runs, and how far they were apart."""

    median: float
    lowest: float
    highest: float


def summary(values: Sequence[float]) -> Summary:
    return Summary(statistics.median(values), min(values), max(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that this part of all values does not exceed; NaN where there are none."""
    if not values:
        return math.nan
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]
