"""Taking ticks: jobs are enqueued when their schedules say so, by whichever worker host comes first.

There is no scheduler process. Any number of hosts look, one of them gets the lock on a row that is due, and
enqueues the job and moves the row on in one transaction: so a tick has one job, whoever dies when. All
instants are the database's. A row may have been written by anyone, so one that cannot be carried out is
told of in the log, left as it is, and looked at again a minute later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from . import jobs, store
from .channel import clock
from .conf import LARGEST_PAYLOAD, config
from .database import is_busy, is_outage
from .jobs import JobFunction
from .payload import decode_arguments
from .schedules import Schedule, Timing
from .store import Cursor, Declared, DueSchedule

logger = logging.getLogger(__name__)

BATCH = 100  # schedules whose ticks are taken in one transaction
MOST_TICKS = 100  # of one schedule that are made up for in one transaction
GRACE = timedelta(minutes=1)  # the age at which a tick counts as missed where those are skipped
LOOK_AGAIN = 60.0  # seconds until a schedule that could not be carried out is tried again

_INSTANT = timedelta(microseconds=1)


class Ticker:
    """What a worker host knows of schedules. Used by its database thread."""

    def __init__(self) -> None:
        self._has_declared = False
        self._avoided: dict[str, float] = {}  # until when, by name
        self._problems: dict[str, str] = {}  # what the log has been told, by name

    def tick(self, cursor: Cursor) -> float | None:
        """Take the ticks that are due, in the transaction of `cursor`.

        The first time, what the code declares is written down before. Returns in how many seconds there is
        something to do again; None where no schedule is known.
        """
        declared = jobs.declared_schedules()
        if not self._has_declared:
            self._has_declared = self._declare(cursor, declared)
        self._avoided = {name: until for name, until in self._avoided.items() if until > clock()}
        due = store.due_schedules(
            cursor, job_names=jobs.registry, declared=declared, avoided=self._avoided, limit=BATCH
        )
        waits = [LOOK_AGAIN] if self._avoided else []
        if due.wait is not None:
            waits.append(due.wait)
        if len(due.schedules) == BATCH or not self._has_declared:
            waits.append(1.0)
        for schedule in due.schedules:
            with self._carefully(cursor, schedule.name):
                next_tick = carry_out(cursor, schedule, due.now)
                waits.append((next_tick - due.now).total_seconds())
        return min(waits, default=None)

    def _declare(
        self, cursor: Cursor, declared: Mapping[str, tuple[JobFunction[..., Any], Schedule]]
    ) -> bool:
        """Write down what the code declares, where the table differs. False if some of it has to wait."""
        rows = {name: as_declared(*schedule) for name, schedule in sorted(declared.items())}
        if not rows or not store.undeclared(cursor, list(rows.values())):
            return True
        if not store.declare_lock(cursor):
            return False
        complete = True
        for each in store.undeclared(cursor, list(rows.values())):
            if each.is_taken:
                self._complain(
                    each.name,
                    "the code declares it, and people have made one of this name. That one stays, and the"
                    " code's is not carried out. Give one of them another name.",
                )
                continue
            with self._carefully(cursor, each.name):
                _, schedule = declared[each.name]
                complete &= store.declare(
                    cursor,
                    rows[each.name],
                    next_tick_at=schedule.timing.next(each.now),
                    keeps_time=each.keeps_time,
                )
        return complete

    @contextmanager
    def _carefully(self, cursor: Cursor, name: str) -> Iterator[None]:
        """Let no schedule stop the others: tell the log what is wrong with it, and undo what was begun."""
        cursor.execute("SAVEPOINT schedule", ())
        try:
            yield
        except Exception as error:
            if is_outage(error) and not is_busy(error):
                raise
            cursor.execute("ROLLBACK TO SAVEPOINT schedule", ())
            self._avoided[name] = clock() + LOOK_AGAIN
            self._complain(name, str(error).strip() or type(error).__name__)
        else:
            self._problems.pop(name, None)
        cursor.execute("RELEASE SAVEPOINT schedule", ())

    def _complain(self, name: str, problem: str) -> None:
        if self._problems.get(name) != problem:
            self._problems[name] = problem
            logger.error("The schedule %r is not carried out: %s", name, problem)


def carry_out(cursor: Cursor, schedule: DueSchedule, now: datetime) -> datetime:
    """Take the ticks of a schedule that is locked. Returns its next one, which is over if there are more.

    Raises ValueError or InvalidArguments, in a sentence, for one that cannot be carried out.
    """
    timing = timing_of(schedule)
    latest = max(now, schedule.last_tick or now)
    if schedule.next_tick_at is None:
        ticks, following = [], timing.next(latest)
    else:
        after = schedule.next_tick_at - _INSTANT
        if schedule.last_tick is not None:
            after = max(after, schedule.last_tick)
        ticks = _ticks_to_take(schedule, timing, after, now)
        following = timing.next(ticks[-1] if ticks and schedule.missed == "all" else latest)
    if following is None:
        raise ValueError("It has no tick any more.")
    if not ticks:
        store.plan(cursor, schedule.name, following)
        return following
    function, unique_key = job_of(schedule.name, schedule.job_name, schedule.payload, schedule.overlap)
    enqueued = store.tick(
        cursor,
        schedule.name,
        ticks,
        next_tick_at=following,
        new=function.new_job(metadata="{}"),
        unique_key=unique_key,
    )
    if enqueued is not None and enqueued < len(ticks):
        logger.info("schedule=%r tick=%s skipped: an earlier job waits or runs.", schedule.name, ticks[-1])
    return following


def _ticks_to_take(schedule: DueSchedule, timing: Timing, after: datetime, now: datetime) -> list[datetime]:
    if schedule.missed == "all":
        return timing.between(after, now, MOST_TICKS)
    tick = timing.latest(after, now)
    if tick is None:
        return []
    if schedule.missed == "skip" and now - tick > GRACE:
        logger.info("schedule=%r tick=%s skipped: no worker was there for it.", schedule.name, tick)
        return []
    return [tick]


def timing_of(schedule: DueSchedule) -> Timing:
    """When the ticks of a row are. Raises ValueError where that cannot be said."""
    interval = None if schedule.seconds is None else timedelta(seconds=schedule.seconds)
    return Timing(schedule.cron, interval, schedule.timezone)


def job_of(
    name: str, job_name: str, payload: str | None, overlap: bool
) -> tuple[JobFunction[..., Any], str | None]:
    """The job function of a schedule, and the unique key of its jobs.

    That is the function's own, where it is declared to be unique; else what keeps two jobs of the schedule
    from being there at once, where they must not. Raises ValueError or InvalidArguments, in a sentence, for
    a name that is not known here, and for arguments that do not fit. No code of the project is called.
    """
    function = jobs.find(job_name)
    if function is None:
        raise ValueError(f"No job function is named {job_name!r} here.")
    if payload is None:
        raise ValueError(
            f"Its arguments take more than {config().MAX_PAYLOAD_BYTES:,} bytes, which is what"
            " PGJOBS['MAX_PAYLOAD_BYTES'] allows."
        )
    args, kwargs = decode_arguments(payload)
    key = function.tick_key(args, kwargs, function.encode(args, kwargs))
    if key is None and not overlap:
        key = f"schedule:{name}"
    return function, key


def as_declared(function: JobFunction[..., Any], schedule: Schedule) -> Declared:
    """A schedule of the code as it stands in the table."""
    timing = schedule.timing
    return Declared(
        name=schedule.name or function.name,
        job_name=function.name,
        payload=function.encode(schedule.args, dict(schedule.kwargs), LARGEST_PAYLOAD),
        cron=timing.cron,
        seconds=None if timing.interval is None else timing.interval.total_seconds(),
        timezone=timing.timezone,
        missed=schedule.missed,
        overlap=schedule.overlap,
    )
