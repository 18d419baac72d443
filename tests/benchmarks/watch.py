"""A queue watched over time: how many jobs are completed, how soon they start, how large the table grows.

A run is divided into windows, and these into tenths, of which the first and the last are compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psycopg

from .measure import Figure, percentile

WINDOWS = 60
TENTHS = 10

# What was completed between then and a moment ago, and that moment; long enough ago for its transactions to
# have ended. Costs what there is to count, and no more.
LOOK = """
SELECT count(*), array_agg(id), array_agg(result::float8),
       statement_timestamp() - %(ago)s * interval '1 second'
  FROM background_jobs
 WHERE status = 'completed'
   AND updated_at >= %(since)s
   AND updated_at < statement_timestamp() - %(ago)s * interval '1 second'
"""

SIZES = """
SELECT pg_relation_size('background_jobs') / 1e6, pg_indexes_size('background_jobs') / 1e6, n_dead_tup
  FROM pg_stat_user_tables
 WHERE relname = 'background_jobs'
"""


class Watch:
    """Looks at the queue from when it is made, for so many seconds.

    What is completed is counted `lag` seconds later. What commits even later is not, so that this must be
    long where every job counts.
    """

    def __init__(self, connection: psycopg.Connection[Any], seconds: float, *, lag: float = 1.0) -> None:
        self.completed = 0
        self.sent: dict[int, float] = {}  # when each job was sent
        self._connection = connection
        self._seconds = seconds
        self._lag = lag
        self._began = time.monotonic()
        self._since = self._clock()
        self._counts: list[tuple[float, float, int]] = []  # from when until when how many
        self._moments: dict[int, float] = {}  # when each job started, where it returned that
        self._sizes: list[tuple[float, float, float, float]] = []

    def _clock(self) -> Any:
        row = self._connection.execute("SELECT statement_timestamp()").fetchone()
        assert row is not None
        return row[0]

    def goes_on(self) -> bool:
        return self._now() < self._seconds

    def look(self) -> int:
        """Wait for a moment, and look. Returns how many jobs have been counted so far."""
        time.sleep(min(0.2, self._seconds / WINDOWS))
        if self._now() > self._lag:
            self._count(self._lag)
        if len(self._sizes) <= self._now() / self._seconds * WINDOWS:
            row = self._connection.execute(SIZES).fetchone()
            assert row is not None
            self._sizes.append((self._now(), *map(float, row)))
        return self.completed

    def finish(self) -> None:
        """Look for the last time, once all transactions have ended."""
        self._count(ago=0.0)

    def _count(self, ago: float) -> None:
        row = self._connection.execute(LOOK, {"since": self._since, "ago": ago}).fetchone()
        assert row is not None
        count, ids, moments, until = row
        span = (until - self._since).total_seconds()
        if span <= 0:
            return
        end = self._now() - ago
        self._counts.append((end - span, end, count))
        self._since = until
        self.completed += count
        self._moments |= {id: at for id, at in zip(ids or (), moments or (), strict=True) if at is not None}

    def _now(self) -> float:
        return time.monotonic() - self._began

    # ── What was found ────────────────────────────────────────────────────────────────────────────────────

    def rate(self, name: str, tenth: int, **more: Any) -> Figure:
        """How many jobs were completed in a second, in one tenth; with `series`, also over time."""
        series = {}
        if more.pop("series", False):
            series = {"seconds": self._middles(WINDOWS), "jobs/s": self._rates(WINDOWS)}
        return Figure(name, self._rates(TENTHS)[tenth], "jobs/s", series=series, **more)

    def pickups(self, name: str, details: dict[str, float]) -> Iterator[Figure]:
        """How soon jobs were picked up, in the first and in the last tenth."""
        missing = len(self.sent.keys() - self._moments.keys())
        if missing:
            raise RuntimeError(f"Of {len(self.sent):,} jobs, {missing:,} were not seen to be completed.")
        windows, tenths = self._waits(WINDOWS), self._waits(TENTHS)
        for percent in (50, 99):
            seen = [(at, waits) for at, waits in zip(self._middles(WINDOWS), windows, strict=True) if waits]
            over_time = {
                "seconds": [at for at, _ in seen],
                "ms": [percentile(waits, percent) for _, waits in seen],
            }
            first, last = percentile(tenths[0], percent), percentile(tenths[-1], percent)
            label = f"{name}, p{percent}"
            yield Figure(f"{label}, first tenth", first, "ms", (), details, over_time)
            yield Figure(f"{label}, last tenth", last, "ms", (f"{label}, first tenth",))
            details = {}

    def sizes(self) -> Iterator[Figure]:
        """How large the table was in the middle, and at the end."""
        seconds, *columns = (list(column) for column in zip(*self._sizes, strict=True))
        names = (("table", "MB"), ("indexes", "MB"), ("dead rows", "rows"))
        for (name, unit), column in zip(names, columns, strict=True):
            middle = f"{name}, half-way"
            yield Figure(middle, column[len(column) // 2], unit)
            yield Figure(
                f"{name}, at the end", column[-1], unit, (middle,), series={"seconds": seconds, unit: column}
            )

    def _middles(self, parts: int) -> list[float]:
        return [(part + 0.5) * self._seconds / parts for part in range(parts)]

    def _rates(self, parts: int) -> list[float]:
        """Each count goes to the part in which its middle lies."""
        counts, spans = [0] * parts, [0.0] * parts
        for begin, end, count in self._counts:
            part = self._part((begin + end) / 2, parts)
            counts[part] += count
            spans[part] += end - begin
        return [count / span if span else 0.0 for count, span in zip(counts, spans, strict=True)]

    def _waits(self, parts: int) -> list[list[float]]:
        """Milliseconds from when each job was sent to when it was picked up."""
        waits: list[list[float]] = [[] for _ in range(parts)]
        for id, at in self.sent.items():
            waits[self._part(at - self._began, parts)].append((self._moments[id] - at) * 1000)
        return waits

    def _part(self, at: float, parts: int) -> int:
        return min(max(int(at / self._seconds * parts), 0), parts - 1)
