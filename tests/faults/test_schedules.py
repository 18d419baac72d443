"""Hosts die while they take ticks: each tick has one job, and no tick has two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.faults import schedule_jobs
from tests.faults.audit import Audit
from tests.faults.conftest import Chunk
from tests.faults.fleet import Fleet, draw_blows

SECOND = timedelta(seconds=1)


@pytest.fixture
def fleet(
    tmp_path: Path, child_environment: dict[str, str], audit: Audit, observer: psycopg.Connection[Any]
) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, child_environment, audit, observer, schedule_jobs.__name__)
    yield fleet
    fleet.end()


def ticks_of(connection: psycopg.Connection[Any], schedule: str) -> list[datetime]:
    rows = connection.execute(
        "SELECT metadata ->> 'tick' FROM background_jobs WHERE metadata ->> 'schedule' = %s ORDER BY id",
        [schedule],
    ).fetchall()
    return [datetime.fromisoformat(tick) for (tick,) in rows]


@pytest.mark.chunks(large=10)
def test_each_tick_has_one_job_whoever_dies(
    chunk: Chunk, fleet: Fleet, observer: psycopg.Connection[Any]
) -> None:
    kills = chunk.size(small=15, large=60)
    fleet.start(3, "--processes", "1", "--threads", "2")
    blows = draw_blows(chunk.random, kills, {"kill host": 1.0}, every=(0.2, 1.2))
    fleet.storm(blows, feed=lambda share: None)
    (now,) = observer.execute("SELECT statement_timestamp()").fetchone() or (None,)
    assert now is not None
    fleet.until(
        lambda: all(
            (taken := ticks_of(observer, name)) and taken[-1] > now for name in ("ticks.all", "ticks.once")
        ),
        what="the ticks after the storm",
    )
    fleet.stop()

    for name in ("ticks.all", "ticks.once", "ticks.skip", "ticks.alone"):
        taken = ticks_of(observer, name)
        assert [tick for tick, count in Counter(taken).items() if count > 1] == [], name
        assert all(a < b for a, b in pairwise(taken)), name
    taken = ticks_of(observer, "ticks.all")
    assert all(b - a == SECOND for a, b in pairwise(taken))
    (lateness,) = observer.execute(
        "SELECT max(EXTRACT(EPOCH FROM created_at - (metadata ->> 'tick')::timestamptz))"
        "  FROM background_jobs WHERE metadata ->> 'schedule' = 'ticks.all'"
    ).fetchone() or (0,)
    chunk.record(kills=kills, ticks=len(taken), max_lateness=float(lateness))
