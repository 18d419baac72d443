"""When a worker host looks at the schedules, sweeps and prunes: a batch at a time.

Where a batch was full, the next one comes soon.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from . import maintenance
from .channel import NEVER, clock
from .conf import config
from .database import is_outage
from .store import Cursor, Settlement
from .ticking import Ticker

logger = logging.getLogger(__name__)

Work = tuple[Callable[[Cursor], Any], Callable[[Future[Any]], None]]

PRUNE_INTERVAL = 60.0  # seconds between batches of pruning, unless a batch was full
LOOK_INTERVAL = 10.0  # seconds between looks at the schedules, when none is due before
IDLE_LOOK_INTERVAL = 60.0  # the same where there is no schedule
TAKE_BREATH = 0.05  # seconds between two looks, for all the rest that a host has to do
LONGEST_PAUSE = 120.0  # seconds after a slow sweep


class Housekeeping:
    """With `takes_ticks`, jobs are enqueued by their schedules."""

    def __init__(self, tell: Callable[[list[Settlement]], None], *, takes_ticks: bool = True) -> None:
        self._tell = tell  # what a sweep has settled
        self._ticker = Ticker()
        self._next_look = 0.0 if takes_ticks else NEVER
        self._next_sweep = self._after_sweep()
        self._sweep_began = 0.0
        self._next_prune = _jittered(PRUNE_INTERVAL)

    @property
    def next_deadline(self) -> float:
        """When there is something to do, by `clock`."""
        return min(self._next_look, self._next_sweep, self._next_prune)

    def look_now(self) -> None:
        """Somebody has changed a schedule."""
        if self._next_look != NEVER:
            self._next_look = 0.0

    def tick_due(self) -> Work | None:
        """What to run in a transaction before anything else, and what to do with its future."""
        if clock() < self._next_look:
            return None
        self._next_look = clock() + LOOK_INTERVAL
        return self._ticker.tick, self._ticked

    def due(self, *, may_sweep: bool) -> Work | None:
        """What to run in a transaction now, and what to do with its future; None if it is nothing."""
        now = clock()
        if now >= self._next_sweep:
            self._next_sweep = self._after_sweep()
            if may_sweep:
                self._sweep_began = now
                return maintenance.sweep, self._swept
        elif now >= self._next_prune:
            self._next_prune = _jittered(PRUNE_INTERVAL)
            return maintenance.prune, self._pruned
        return None

    def _after_sweep(self) -> float:
        return _jittered(config().SWEEP_INTERVAL.total_seconds())

    def _ticked(self, future: Future[float | None]) -> None:
        wait: float | None = LOOK_INTERVAL
        if _succeeded("Looking at the schedules", future):
            wait = future.result()
        if wait is None:
            self._next_look = clock() + IDLE_LOOK_INTERVAL
        else:
            self._next_look = clock() + min(max(wait + 0.005, TAKE_BREATH), LOOK_INTERVAL)

    def _swept(self, future: Future[maintenance.Swept]) -> None:
        if not _succeeded("Sweeping", future):
            return
        self._tell(future.result().settled)
        if future.result().total >= maintenance.BATCH_SIZE:
            self._next_sweep = 0.0
            return
        # While somebody holds an old snapshot, a sweep steps over all jobs that have run since then, half a
        # second for a million of them. It may take a twentieth of the time.
        took = clock() - self._sweep_began
        self._next_sweep = max(self._next_sweep, clock() + min(20 * took, LONGEST_PAUSE))

    def _pruned(self, future: Future[bool]) -> None:
        if _succeeded("Pruning", future) and future.result():
            self._next_prune = clock() + 1.0


def _jittered(interval: float) -> float:
    return clock() + interval * random.uniform(0.8, 1.0)


def _succeeded(what: str, future: Future[Any]) -> bool:
    error = future.exception()
    if error is None:
        return True
    if is_outage(error):
        logger.warning("%s failed; it is tried again at its next turn. %s", what, str(error).strip())
    else:
        logger.error("%s failed; it is tried again at its next turn.", what, exc_info=error)
    return False
