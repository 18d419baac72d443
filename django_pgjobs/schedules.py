"""When a job function is to run by itself, and the instants that follow from it: its ticks.

Pure: no database, and no clock, since every instant is counted from one that the caller got from the
database. `jobs` declares schedules, `ticking` carries them out, and the admin lets people edit them.
"""

from __future__ import annotations

import zoneinfo
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice, takewhile
from typing import Any, Literal, get_args

from cronsim import CronSim, CronSimError
from django.utils.timezone import get_default_timezone_name

from .lifecycle import LONGEST_DELAY

Missed = Literal["once", "skip", "all"]

MISSED: tuple[str, ...] = get_args(Missed)
SHORTEST = timedelta(seconds=1)
LONGEST = timedelta(seconds=LONGEST_DELAY)  # ten years
LONGEST_NAME = 200  # characters; a unique key is made of it, and has 255

# Where all intervals are counted from, so that all hosts agree: a Monday.
EPOCH = datetime(2001, 1, 1, tzinfo=UTC)

_MINUTE = timedelta(minutes=1)
_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Timing:
    """A cron text in a time zone, or an interval. Raises ValueError, in a sentence, if it cannot work.

    Cron texts have five fields: minute, hour, day of the month, month, day of the week. How they go through
    the days on which clocks are changed depends on whether the minute or the hour begins with a star. If
    neither does, a time that the day lacks is made up for at the end of the gap, and one that it has twice is
    taken the first time. If one does, the text goes by what the clock shows: never at a time that the day
    lacks, and twice at one that it has twice.
    """

    cron: str = ""
    interval: timedelta | None = None
    timezone: str = ""  # of the cron text; "" for the project's own

    def __post_init__(self) -> None:
        if self.interval is not None:
            if self.cron:
                raise ValueError(
                    f"It has a cron text, {self.cron!r}, and an interval; it must have one of them."
                )
            if not SHORTEST <= self.interval <= LONGEST:
                raise ValueError(f"The interval is {self.interval}; it must be from a second to ten years.")
            return
        if len(self.cron.split()) != 5:
            raise ValueError(
                f"The cron text {self.cron!r} must have five fields: minute, hour, day of the month, month,"
                " day of the week, such as '*/5 * * * *' for every five minutes."
            )
        find_zone(self.zone_name)
        try:
            CronSim(self.cron, EPOCH)
        except (CronSimError, ValueError, AssertionError) as error:
            what = f" ({error})" if str(error) else ""
            raise ValueError(f"The cron text {self.cron!r} cannot be read{what}.") from None

    def __str__(self) -> str:
        if self.interval is not None:
            return f"every {self.interval}"
        return f"{self.cron} ({self.zone_name})"

    @property
    def zone_name(self) -> str:
        """The time zone by which its instants are best shown."""
        if self.interval is not None:
            return "UTC"
        return self.timezone or get_default_timezone_name()

    def ticks(self, after: datetime) -> Iterator[datetime]:
        """The ticks after an instant, in order, in UTC. They end where the calendar does."""
        try:
            if self.interval is None:
                yield from _cron_ticks(self.cron, find_zone(self.zone_name), after)
            else:
                number = (after - EPOCH) // self.interval
                while True:
                    number += 1
                    yield EPOCH + number * self.interval
        except (OverflowError, ValueError):
            return  # year 10,000

    def next(self, after: datetime) -> datetime | None:
        """The first tick after an instant; None if there is none."""
        return next(self.ticks(after), None)

    def between(self, after: datetime, until: datetime, most: int) -> list[datetime]:
        """The first `most` ticks after an instant and not after another."""
        return list(islice(takewhile(lambda tick: tick <= until, self.ticks(after)), most))

    def latest(self, after: datetime, until: datetime) -> datetime | None:
        """The last tick after an instant and not after another; None if there is none.

        Found by halving, so that years in which nobody has looked cost no more than a few steps.
        """
        latest = None
        low, high = after, until  # there is no tick between `high` and `until`
        while (tick := self.next(low)) is not None and tick <= until:
            latest = low = tick
            middle = low + (high - low) / 2
            tick = self.next(middle)
            if tick is None or tick > until:
                high = middle
            else:
                latest = low = tick
        return latest


@dataclass(frozen=True, slots=True)
class Schedule:
    """When a job function runs by itself, and how: what `@job(schedule=...)` takes.

    when       a cron text of five fields, or an interval as a timedelta, of a second at least
    timezone   of the cron text; by default that of @job, or else settings.TIME_ZONE
    args       the arguments of its jobs, and
    kwargs       their keyword arguments
    missed     what becomes of ticks that no worker was there for: "once" runs one job for all of them, "skip"
               none, "all" one for each
    overlap    False: a tick is skipped while the job of an earlier one waits or runs
    name       its name in the table and in the admin; by default that of the job function

    Raises ValueError for what cannot work.
    """

    when: str | timedelta
    _: KW_ONLY
    timezone: str | None = None
    args: Sequence[Any] = field(default=(), hash=False)
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    missed: Missed = "once"
    overlap: bool = True
    name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.when, str | timedelta):
            raise ValueError(f"A schedule is a cron text or a timedelta, not {self.when!r}.")
        if self.timezone is not None:
            if not isinstance(self.timezone, str):
                raise ValueError(f"A time zone is a name, such as 'Europe/Vienna', not {self.timezone!r}.")
            if isinstance(self.when, timedelta):
                raise ValueError(
                    f"The schedule every {self.when} has the time zone {self.timezone!r}, which an interval"
                    " does not go by. Leave it out, or give a cron text."
                )
        if self.missed not in MISSED:
            raise ValueError(f"missed is {self.missed!r}; it must be one of {', '.join(map(repr, MISSED))}.")
        if not isinstance(self.overlap, bool):
            raise ValueError(f"overlap is {self.overlap!r}; it must be True or False.")
        if isinstance(self.args, str | bytes) or not isinstance(self.args, Sequence):
            raise ValueError(f"The args of a schedule must be a list or a tuple, not {self.args!r}.")
        if not isinstance(self.kwargs, Mapping):
            raise ValueError(f"The kwargs of a schedule must be a dict, not {self.kwargs!r}.")
        if self.name is not None and (problem := name_problem(self.name)):
            raise ValueError(problem)
        # The project's own zone is looked up later: settings need not be there yet.
        if isinstance(self.when, timedelta):
            Timing(interval=self.when)
        else:
            Timing(cron=self.when, timezone=self.timezone or "UTC")

    @property
    def timing(self) -> Timing:
        """When its ticks are."""
        if isinstance(self.when, timedelta):
            return Timing(interval=self.when)
        return Timing(cron=self.when, timezone=self.timezone or get_default_timezone_name())


def name_problem(name: object) -> str:
    """A sentence that says why something cannot be the name of a schedule; "" if it can."""
    if (
        isinstance(name, str)
        and 0 < len(name) <= LONGEST_NAME
        and "\x00" not in name
        and name.isprintable()
        and name.strip() == name
    ):
        return ""
    return (
        f"The name of a schedule must be a text of 1 to {LONGEST_NAME} characters that can be printed,"
        f" without spaces around it, not {name!r:.300}. Give it one with Schedule(..., name=...)."
    )


@lru_cache(maxsize=1000)
def find_zone(name: str) -> zoneinfo.ZoneInfo:
    """The time zone of a name. Raises ValueError, in a sentence, if there is none."""
    try:
        return zoneinfo.ZoneInfo(name)
    except (LookupError, ValueError, OSError):  # a name may look like a path, or like anything
        raise ValueError(
            f"There is no time zone {name!r}. Its name must be like 'Europe/Vienna', as in the time zone"
            " database of this machine or of the package tzdata."
        ) from None


# ── Cron texts ────────────────────────────────────────────────────────────────────────────────────────────
#
# CronSim is only asked what a clock on the wall shows. Given a time zone, it would step by elapsed hours,
# which loses half an hour where clocks are moved by that much, and after an hour that came twice it may name
# an instant that is over.


def _cron_ticks(cron: str, zone: zoneinfo.ZoneInfo, after: datetime) -> Iterator[datetime]:
    goes_by_the_clock = any(given.startswith("*") for given in cron.split()[:2])
    wall = after.astimezone(zone)
    # What the clock has shown already, and is about to show once more.
    to_come_again = max(_offset(wall) - _offset((after + _DAY).astimezone(zone)), timedelta(0))
    latest = after
    again: deque[datetime] = deque()
    for shown in CronSim(cron, wall.replace(tzinfo=None, fold=0) - to_come_again):
        first = shown.replace(tzinfo=zone).astimezone(UTC)
        second = shown.replace(tzinfo=zone, fold=1).astimezone(UTC)
        if first > second:  # the clock never shows this
            if goes_by_the_clock:
                continue
            first = _after_gap(shown, zone)
        while again and again[0] < first:
            if again[0] > latest:
                latest = again[0]
                yield latest
            again.popleft()
        if first < second and goes_by_the_clock:
            again.append(second)
        if first > latest:
            latest = first
            yield latest


def _offset(instant: datetime) -> timedelta:
    return instant.utcoffset() or timedelta(0)


def _after_gap(shown: datetime, zone: zoneinfo.ZoneInfo) -> datetime:
    """The instant at which the clock goes on, after it has jumped over what it would have shown."""
    while True:
        shown += _MINUTE
        first = shown.replace(tzinfo=zone).astimezone(UTC)
        if first <= shown.replace(tzinfo=zone, fold=1).astimezone(UTC):
            return first
