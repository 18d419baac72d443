"""Schedules: when their ticks are, what the decorator takes, and what comes of rows that anyone may write."""

from __future__ import annotations

import json
import logging
import random
import re
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from django.db import IntegrityError, connection, transaction
from django.db.models.functions import Now

import tests.jobs
from django_pgjobs import DuplicateJobName, JobFunction, Schedule, job, jobs, sql, store
from django_pgjobs.models import FIRST_DAY, BackgroundJob, BackgroundSchedule
from django_pgjobs.schedules import EPOCH, Timing
from django_pgjobs.ticking import Ticker
from tests.sessions import session, work
from tests.workers import Workers, until

VIENNA = "Europe/Vienna"
NEW_YORK = "America/New_York"
SYDNEY = "Australia/Sydney"
LORD_HOWE = "Australia/Lord_Howe"  # its clocks are moved by half an hour

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)


def at(text: str, zone: str = "UTC") -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone))


def shown(cron: str, zone: str, after: str, count: int) -> list[str]:
    """The next ticks as a clock in that zone shows them, each with its distance from UTC."""
    ticks = Timing(cron, timezone=zone).ticks(at(after, zone))
    return [f"{tick.astimezone(ZoneInfo(zone)):%d %H:%M %z}" for tick in islice(ticks, count)]


# ── Ticks ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("cron", "zone", "after", "expected"),
    [
        # A time that the day lacks is made up for at the end of the gap.
        ("30 2 * * *", VIENNA, "2026-03-28T12:00", ["29 03:00 +0200", "30 02:30 +0200"]),
        ("0,30 2 * * *", VIENNA, "2026-03-28T12:00", ["29 03:00 +0200", "30 02:00 +0200"]),
        ("0 2,3 * * *", VIENNA, "2026-03-28T12:00", ["29 03:00 +0200", "30 02:00 +0200"]),
        ("30 2 * * *", NEW_YORK, "2026-03-07T12:00", ["08 03:00 -0400", "09 02:30 -0400"]),
        ("30 2 * * *", SYDNEY, "2026-10-03T12:00", ["04 03:00 +1100", "05 02:30 +1100"]),
        ("15 2 * * *", LORD_HOWE, "2026-10-03T12:00", ["04 02:30 +1100", "05 02:15 +1100"]),
        ("0 0 * * *", "America/Santiago", "2026-09-05T12:00", ["06 01:00 -0300", "07 00:00 -0300"]),
        # One that it has twice is taken the first time.
        ("30 2 * * *", VIENNA, "2026-10-24T12:00", ["25 02:30 +0200", "26 02:30 +0100"]),
        ("30 1 * * *", NEW_YORK, "2026-10-31T12:00", ["01 01:30 -0400", "02 01:30 -0500"]),
        ("30 2 * * *", SYDNEY, "2026-04-04T12:00", ["05 02:30 +1100", "06 02:30 +1000"]),
        ("45 1 * * *", LORD_HOWE, "2026-04-04T12:00", ["05 01:45 +1100", "06 01:45 +1030"]),
        # With a star, it goes by what the clock shows.
        ("*/30 2 * * *", VIENNA, "2026-03-28T12:00", ["30 02:00 +0200", "30 02:30 +0200"]),
        ("*/30 * * * *", VIENNA, "2026-03-29T01:10", ["29 01:30 +0100", "29 03:00 +0200"]),
        (
            "*/30 * * * *",
            VIENNA,
            "2026-10-25T01:40",
            ["25 02:00 +0200", "25 02:30 +0200", "25 02:00 +0100", "25 02:30 +0100", "25 03:00 +0100"],
        ),
        ("0 * * * *", SYDNEY, "2026-10-04T00:30", ["04 01:00 +1000", "04 03:00 +1100"]),
        ("0 * * * *", SYDNEY, "2026-04-05T01:30", ["05 02:00 +1100", "05 02:00 +1000", "05 03:00 +1000"]),
        ("*/15 * * * *", LORD_HOWE, "2026-10-04T01:40", ["04 01:45 +1030", "04 02:30 +1100"]),
        (
            "*/15 * * * *",
            LORD_HOWE,
            "2026-04-05T01:25",
            ["05 01:30 +1100", "05 01:45 +1100", "05 01:30 +1030", "05 01:45 +1030", "05 02:00 +1030"],
        ),
        ("* 5 * * *", LORD_HOWE, "2026-04-04T12:00", ["05 05:00 +1030", "05 05:01 +1030"]),
        ("0 12 L * *", "UTC", "2028-02-01T00:00", ["29 12:00 +0000", "31 12:00 +0000"]),
        ("0 12 * * MON#1", "UTC", "2026-11-30T00:00", ["07 12:00 +0000", "04 12:00 +0000"]),
    ],
)
def test_ticks_on_the_days_on_which_clocks_are_changed(
    cron: str, zone: str, after: str, expected: list[str]
) -> None:
    assert shown(cron, zone, after, len(expected)) == expected


def test_ticks_can_be_counted_from_any_instant_of_an_hour_that_comes_twice() -> None:
    """Each as if one had come along from the day before: none twice, none left out, none that is over."""
    for cron in ("30 2 * * *", "*/10 * * * *", "5,35 */2 * * *", "0 1-3 * * *"):
        timing = Timing(cron, timezone=VIENNA)
        begin = at("2026-10-24T20:00")
        all_ticks = timing.between(begin, begin + timedelta(days=1), 1000)
        assert all(a < b for a, b in pairwise(all_ticks))
        for minutes in range(0, 24 * 60, 7):
            instant = begin + minutes * MINUTE + timedelta(seconds=13)
            coming = [tick for tick in all_ticks if tick > instant]
            assert timing.between(instant, begin + timedelta(days=1), 1000) == coming, (cron, instant)
            gone = [tick for tick in all_ticks if tick <= instant]
            assert timing.latest(begin, instant) == (gone[-1] if gone else None), (cron, instant)


@pytest.mark.parametrize("zone", [VIENNA, NEW_YORK, SYDNEY, "Asia/Beirut", "Africa/Casablanca", "UTC"])
@pytest.mark.parametrize("cron", ["30 2 * * *", "*/20 * * * *", "0 * * * *", "10,40 1-3 * * *", "* 2 * * 0"])
def test_where_clocks_are_moved_by_an_hour_ticks_are_those_of_the_library(cron: str, zone: str) -> None:
    for begin, end in (("2026-02-10", "2026-04-10"), ("2026-09-30", "2026-11-05")):
        after, until = at(begin), at(end)
        expected: list[datetime] = []
        for tick in CronSim(cron, after.astimezone(ZoneInfo(zone))):
            instant = tick.astimezone(UTC)
            if instant > until:
                break
            if not expected or instant > expected[-1]:
                expected.append(instant)
        assert Timing(cron, timezone=zone).between(after, until, 1_000_000) == expected


def test_intervals_are_counted_from_one_instant_on_all_hosts() -> None:
    timing = Timing(interval=timedelta(minutes=7))
    ticks = list(islice(timing.ticks(at("2026-03-29T00:59:59.5")), 3))
    assert all((tick - EPOCH) % timedelta(minutes=7) == timedelta(0) for tick in ticks)
    assert timing.next(ticks[0]) == ticks[1]
    assert timing.next(ticks[0] - timedelta(microseconds=1)) == ticks[0]
    assert Timing(interval=timedelta(days=7)).next(at("2026-11-30T12:00")) == at("2026-12-07T00:00")


@pytest.mark.parametrize(
    "timing",
    [
        Timing("* * * * *", timezone=VIENNA),
        Timing("* * * 1-6 *", timezone=VIENNA),
        Timing("0 3 29 2 *"),
        Timing("30 2 * * *", timezone=VIENNA),
        Timing(interval=timedelta(seconds=1)),
        Timing(interval=timedelta(days=3650)),
    ],
    ids=str,
)
def test_the_latest_of_two_thousand_years_is_found_at_once(timing: Timing) -> None:
    until = at("2026-11-30T03:58:51.25")
    latest = timing.latest(at("0001-01-02T00:00"), until)
    assert latest is not None
    assert latest <= until
    following = timing.next(latest)
    assert following is not None
    assert following > until
    assert timing.latest(latest, until) is None


def test_ticks_end_with_the_calendar() -> None:
    last = at("9999-12-30T00:00")
    for timing in (
        Timing("0 0 1 1 *"),
        Timing("* * * * *", timezone=VIENNA),
        Timing(interval=timedelta(days=9)),
    ):
        assert len(list(islice(timing.ticks(last), 10_000))) < 10_000
    assert Timing("0 0 1 1 *").next(last) is None


@pytest.mark.parametrize(
    ("timing", "problem"),
    [
        ({"cron": "*/5 * * *"}, "The cron text '*/5 * * *' must have five fields"),
        ({"cron": "0 */5 * * * *"}, "must have five fields"),
        ({"cron": "@daily"}, "must have five fields"),
        ({"cron": ""}, "must have five fields"),
        ({"cron": "61 * * * *"}, "The cron text '61 * * * *' cannot be read (Bad minute)."),
        ({"cron": "0 0 30 2 *"}, "cannot be read (Bad day-of-month)."),
        ({"cron": "٣ * * * *"}, "cannot be read"),
        ({"cron": "*/0 * * * *"}, "cannot be read"),
        ({"cron": "1-/2 * * * *"}, "cannot be read"),
        ({"cron": "* * * * *", "timezone": "Europe/Wien"}, "There is no time zone 'Europe/Wien'."),
        ({"cron": "* * * * *", "timezone": "../etc/passwd"}, "There is no time zone"),
        ({"cron": "* * * * *", "timezone": "/etc/passwd"}, "There is no time zone"),
        ({"cron": "* * * * *", "timezone": "Europe"}, "There is no time zone"),
        ({"cron": "* * * * *", "timezone": "x\0"}, "There is no time zone"),
        ({"cron": "* * * * *", "timezone": "\udcff"}, "There is no time zone"),
        ({"interval": timedelta(seconds=0.9)}, "The interval is 0:00:00.900000; it must be from a second"),
        ({"interval": timedelta(days=-1)}, "it must be from a second to ten years."),
        ({"interval": timedelta.max}, "it must be from a second to ten years."),
        ({"cron": "* * * * *", "interval": HOUR}, "it must have one of them."),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(timing: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        Timing(**timing)


# ── The decorator ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "registry", {})


def declare(name: str = "shop.report", **options: Any) -> JobFunction[..., Any]:
    @job(name=name, **options)
    def report(region: str = "all", *, days: int = 1) -> None: ...

    return report


@pytest.mark.usefixtures("own_registry")
def test_a_schedule_is_a_cron_text_an_interval_a_value_or_several_of_these() -> None:
    assert declare("a").schedules == ()
    assert declare("b", schedule="*/5 * * * *").schedules == (Schedule("*/5 * * * *", name="b"),)
    assert declare("c", schedule=HOUR).schedules == (Schedule(HOUR, name="c"),)
    several = declare(
        "d",
        schedule=[
            "0 3 * * *",
            Schedule(HOUR, name="hourly", args=("north",)),
            Schedule("0 4 * * *", name="l", timezone="UTC", kwargs={"days": 7}, missed="all", overlap=False),
        ],
        timezone=VIENNA,
    )
    assert several.schedules == (
        Schedule("0 3 * * *", timezone=VIENNA, name="d"),
        Schedule(HOUR, name="hourly", args=("north",)),
        Schedule("0 4 * * *", name="l", timezone="UTC", kwargs={"days": 7}, missed="all", overlap=False),
    )
    assert several.using(priority=1).schedules == several.schedules
    assert sorted(jobs.declared_schedules()) == ["b", "c", "d", "hourly", "l"]


@pytest.mark.usefixtures("own_registry")
def test_the_time_zone_is_the_projects_unless_given(settings: Any) -> None:
    settings.TIME_ZONE = "Asia/Kathmandu"
    (schedule,) = declare(schedule="0 3 * * *").schedules
    assert schedule.timing == Timing("0 3 * * *", timezone="Asia/Kathmandu")
    assert Schedule("0 3 * * *", timezone=VIENNA).timing.timezone == VIENNA


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"schedule": "every day"}, "@job 'shop.report': The cron text 'every day' must have five fields"),
        ({"schedule": "99 * * * *"}, "@job 'shop.report': The cron text '99 * * * *' cannot be read"),
        ({"schedule": timedelta(0)}, "The interval is 0:00:00; it must be from a second to ten years."),
        ({"schedule": 60}, "A schedule is a cron text or a timedelta, not 60."),
        ({"schedule": [None]}, "A schedule is a cron text or a timedelta, not None."),
        ({"schedule": "* * * * *", "timezone": "Vienna"}, "There is no time zone 'Vienna'."),
        ({"schedule": "* * * * *", "timezone": 1}, "A time zone is a name, such as 'Europe/Vienna', not 1."),
        ({"timezone": VIENNA}, "there is no cron text that goes by the timezone 'Europe/Vienna'."),
        ({"schedule": HOUR, "timezone": VIENNA}, "there is no cron text that goes by the timezone"),
        (
            {"schedule": ["0 1 * * *", "0 2 * * *"]},
            "@job 'shop.report': it has several schedules named 'shop.report'. Give each a name of its own",
        ),
        (
            {"schedule": HOUR, "name": "x" * 201},
            "The name of a schedule must be a text of 1 to 200 characters",
        ),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_where_it_is_declared(
    options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        declare(**options)
    assert jobs.registry == {}


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"args": (1, 2)}, "@job 'shop.report': the arguments of the schedule 'shop.report' do not fit."),
        ({"kwargs": {"weeks": 1}}, "got an unexpected keyword argument 'weeks'"),
        ({"kwargs": {1: 2}}, "do not fit."),
        ({"args": [datetime(2026, 1, 1)]}, "args[0]: datetime is not JSON; pass an ISO string."),
    ],
)
def test_arguments_that_do_not_fit_are_refused_where_they_are_declared(
    arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        declare(schedule=Schedule(HOUR, **arguments))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"timezone": VIENNA}, "which an interval does not go by."),
        ({"missed": "twice"}, "missed is 'twice'; it must be one of 'once', 'skip', 'all'."),
        ({"missed": ["all"]}, "it must be one of"),
        ({"overlap": None}, "overlap is None; it must be True or False."),
        ({"args": "ab"}, "The args of a schedule must be a list or a tuple, not 'ab'."),
        ({"args": 1}, "The args of a schedule must be a list or a tuple, not 1."),
        ({"kwargs": [1]}, "The kwargs of a schedule must be a dict, not [1]."),
        ({"name": ""}, "The name of a schedule must be a text of 1 to 200 characters"),
        ({"name": "a\nb"}, "The name of a schedule must be a text"),
        ({"name": " a"}, "without spaces around it, not ' a'."),
        ({"name": 5}, "The name of a schedule must be a text"),
        ({"name": "\udcff"}, "The name of a schedule must be a text"),
    ],
)
def test_a_schedule_checks_itself(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        Schedule(HOUR, **values)


@pytest.mark.usefixtures("own_registry")
def test_two_job_functions_cannot_have_schedules_of_one_name() -> None:
    declare("a", schedule=Schedule(HOUR, name="hourly"))
    with pytest.raises(ValueError, match="Two schedules are named 'hourly'"):
        declare("b", schedule=Schedule(HOUR, name="hourly"))
    with pytest.raises(DuplicateJobName):
        declare("a", schedule=Schedule(HOUR, name="another"))
    assert sorted(jobs.registry) == ["a"]


# ── Ticking ───────────────────────────────────────────────────────────────────────────────────────────────


def look(ticker: Ticker | None = None) -> float | None:
    with store.own_transaction("default") as cursor:
        return (ticker or Ticker()).tick(cursor)


def row(name: str = "shop.report") -> BackgroundSchedule:
    return BackgroundSchedule.objects.get(pk=name)


def make_schedule(name: str = "shop.report", **columns: Any) -> BackgroundSchedule:
    """Insert a schedule of people's. A timedelta is an instant, counted from the database's clock."""
    values = {"job_name": "shop.report", "interval": HOUR, **columns}
    for column in ("last_tick", "next_tick_at"):
        if isinstance(values.get(column), timedelta):
            values[column] = Now() + values[column]
    BackgroundSchedule.objects.create(name=name, **values)
    return row(name)


def late(name: str = "shop.report", by: timedelta = HOUR) -> None:
    """As if nobody had looked for some time."""
    BackgroundSchedule.objects.filter(pk=name).update(next_tick_at=Now() - by)


def enqueued() -> list[tuple[str, str, str]]:
    """The job, schedule and tick of each job, in their order."""
    return [
        (one.job_name, one.metadata["schedule"], one.metadata["tick"])
        for one in BackgroundJob.objects.order_by("id")
    ]


def ticks_taken() -> list[datetime]:
    return [datetime.fromisoformat(tick) for _, _, tick in enqueued()]


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
def test_the_first_look_writes_down_what_the_code_declares() -> None:
    declare(schedule=Schedule("0 3 * * *", timezone=VIENNA, args=["north"], missed="all", overlap=False))
    look()
    schedule = row()
    assert (schedule.job_name, schedule.payload) == ("shop.report", {"args": ["north"], "kwargs": {}})
    assert (schedule.cron, schedule.interval, schedule.timezone) == ("0 3 * * *", None, VIENNA)
    assert (schedule.missed, schedule.overlap, schedule.enabled, schedule.declared) == (
        "all",
        False,
        True,
        True,
    )
    assert schedule.last_tick is None
    assert schedule.next_tick_at == schedule.timing.next(schedule.created_at)
    assert enqueued() == []


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
def test_what_the_code_changes_is_changed_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(schedule=Schedule(HOUR, args=["north"]))
    look()
    late()
    look()
    BackgroundSchedule.objects.update(enabled=False)
    before = row()
    assert before.last_tick is not None

    monkeypatch.setattr(jobs, "registry", {})
    declare(schedule=Schedule(HOUR, args=["south"]))
    look()
    after = row()
    assert (after.payload["args"], after.enabled) == (["south"], False)
    assert (after.last_tick, after.next_tick_at) == (before.last_tick, before.next_tick_at)

    monkeypatch.setattr(jobs, "registry", {})
    declare(schedule=Schedule("0 3 * * *"))
    look()
    changed = row()
    assert (changed.cron, changed.interval, changed.last_tick) == ("0 3 * * *", None, before.last_tick)
    assert changed.next_tick_at == changed.timing.next(changed.updated_at)


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
def test_a_host_declares_once_and_then_goes_by_the_row(django_assert_num_queries: Any) -> None:
    declare(schedule=HOUR)
    ticker = Ticker()
    look(ticker)
    BackgroundSchedule.objects.update(payload={"args": ["south"]})
    late()
    look(ticker)
    assert BackgroundJob.objects.get().payload == {"args": ["south"]}
    with django_assert_num_queries(3):  # a savepoint, its release, and the look itself
        look(ticker)


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
def test_a_schedule_of_people_is_not_overwritten_by_one_of_the_code(caplog: Any) -> None:
    make_schedule(cron="0 3 * * *", interval=None)
    declare(schedule=HOUR)
    ticker = Ticker()
    for _ in range(3):
        look(ticker)
    assert (row().cron, row().declared) == ("0 3 * * *", False)
    (record,) = caplog.records
    assert (
        "'shop.report' is not carried out: the code declares it, and people have made one" in record.message
    )


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
def test_a_tick_becomes_a_job_with_the_options_of_its_function() -> None:
    declare(
        schedule=Schedule(HOUR, args=["north"], kwargs={"days": 2}),
        queue="reports",
        priority=7,
        max_attempts=9,
    )
    look()
    late()
    wait = look()
    after = row()
    made = BackgroundJob.objects.get()
    assert after.last_tick is not None
    assert made.metadata == {"schedule": "shop.report", "tick": after.last_tick.isoformat()}
    assert (made.job_name, made.payload) == ("shop.report", {"args": ["north"], "kwargs": {"days": 2}})
    assert (made.queue_name, made.priority, made.max_attempts, made.status) == ("reports", 7, 9, "queued")
    assert after.next_tick_at == after.timing.next(store.now("default"))
    assert wait is not None
    assert 0 < wait <= 3600
    look()
    assert len(enqueued()) == 1


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("missed", ["once", "skip", "all"])
def test_what_becomes_of_missed_ticks(missed: Any) -> None:
    declare(schedule=Schedule(timedelta(minutes=5), missed=missed))
    look()
    late(by=timedelta(minutes=62))
    now = store.now("default")
    look()
    timing = row().timing
    all_ticks = timing.between(now - timedelta(minutes=62), now, 1000)
    assert len(all_ticks) in (12, 13)
    is_fresh = now - all_ticks[-1] < MINUTE
    expected = {"once": all_ticks[-1:], "all": all_ticks, "skip": all_ticks[-1:] if is_fresh else []}[missed]
    assert ticks_taken() == expected
    assert row().next_tick_at == timing.next(now)


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
def test_skipping_takes_what_is_not_a_minute_old() -> None:
    declare(schedule=Schedule(timedelta(seconds=1), missed="skip"))
    look()
    late(by=timedelta(seconds=30))
    look()
    assert len(enqueued()) == 1

    make_schedule("daily", interval=timedelta(days=1), missed="skip", next_tick_at=-timedelta(days=2))
    look()
    assert len([name for _, name, _ in enqueued() if name == "daily"]) == (1 if row("daily").last_tick else 0)


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
def test_catching_up_is_bounded_and_goes_on() -> None:
    declare(schedule=Schedule(timedelta(seconds=1), missed="all"))
    look()
    late(by=timedelta(seconds=350))
    counts = []
    for _ in range(4):
        wait = look()
        counts.append(len(enqueued()))
        assert wait is not None
    assert counts[:3] == [100, 200, 300]
    assert 350 <= counts[3] <= 352
    taken = ticks_taken()
    assert all(b - a == timedelta(seconds=1) for a, b in pairwise(taken))


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
def test_ticks_are_never_taken_twice_whatever_the_row_says() -> None:
    declare(schedule=Schedule(timedelta(minutes=5), missed="all"))
    look()
    late(by=HOUR)
    look()
    taken = ticks_taken()
    for back in (HOUR, timedelta(days=1), timedelta(minutes=1)):
        late(by=back)
        look()
    assert ticks_taken()[: len(taken)] == taken
    assert len(set(ticks_taken())) == len(ticks_taken())


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
def test_without_overlap_a_tick_is_skipped_while_an_earlier_job_is_there(caplog: Any) -> None:
    caplog.set_level(logging.INFO, "django_pgjobs")
    declare(schedule=Schedule(timedelta(minutes=5), missed="all", overlap=False))
    look()
    late(by=timedelta(minutes=30))
    look()
    assert len(enqueued()) == 1
    assert "skipped: an earlier job waits or runs." in caplog.text
    for status in ("queued", "processing"):
        BackgroundJob.objects.update(status=status)
        BackgroundSchedule.objects.update(last_tick=None)
        late(by=timedelta(minutes=30))
        look()
        assert len(enqueued()) == 1
    for number, status in enumerate(("completed", "failed", "cancelled"), start=2):
        BackgroundJob.objects.update(status=status)
        BackgroundSchedule.objects.update(last_tick=None)
        late(by=timedelta(minutes=30))
        look()
        assert len(enqueued()) == number


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
def test_the_longest_name_makes_a_unique_key() -> None:
    declare(name="x" * 200, schedule=Schedule(HOUR, overlap=False))
    look()
    late("x" * 200)
    look()
    assert BackgroundJob.objects.get().unique_key == f"schedule:{'x' * 200}"


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
def test_a_disabled_schedule_does_not_tick() -> None:
    declare(schedule=HOUR)
    look()
    late()
    BackgroundSchedule.objects.update(enabled=False)
    assert look() is None
    assert enqueued() == []


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
def test_a_host_leaves_alone_what_its_code_does_not_declare_or_know(monkeypatch: pytest.MonkeyPatch) -> None:
    declare("a", schedule=HOUR)
    declare("b", schedule=HOUR)
    make_schedule("of people", job_name="a", next_tick_at=-HOUR)
    make_schedule("of people, unknown", job_name="gone", next_tick_at=-HOUR)
    look()
    late("a"), late("b")
    monkeypatch.setattr(jobs, "registry", {})
    declare("a", aliases=["b"])
    wait = look()
    assert {name for _, name, _ in enqueued()} == {"of people"}
    assert wait is not None
    assert wait > 1


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
def test_a_schedule_of_a_former_name_enqueues_under_the_new_one() -> None:
    declare("new", aliases=["old"])
    make_schedule(job_name="old", next_tick_at=-HOUR)
    look()
    assert [name for name, _, _ in enqueued()] == ["new"]


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
def test_without_schedules_there_is_nothing_to_wait_for() -> None:
    declare()
    assert look() is None


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
def test_uniqueness_of_the_function_holds_for_ticks_as_well() -> None:
    report = declare(schedule=Schedule(HOUR, args=["north"]), unique=True)
    look()
    by_hand = report.enqueue("north")
    late()
    look()
    assert BackgroundJob.objects.get().pk == by_hand.pk
    assert row().last_tick is not None  # skipped, and not put off
    BackgroundJob.objects.update(status="completed")
    BackgroundSchedule.objects.update(last_tick=None)
    late()
    look()
    assert BackgroundJob.objects.filter(status="queued").get().unique_key == by_hand.refresh().unique_key


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
def test_no_code_of_the_project_is_called_for_a_tick(caplog: Any) -> None:
    def by(*args: Any) -> str:
        raise AssertionError

    with pytest.raises(ValueError, match="it cannot have a schedule: its unique= is a function"):
        declare(schedule=HOUR, unique=by)
    declare(unique=by)
    make_schedule(next_tick_at=-HOUR)
    look()
    assert "is not carried out: its unique= is a function, which nobody calls" in caplog.text


# What anyone may write

NINES = "9" * 5000
HOSTILE: dict[str, dict[str, Any]] = {
    "bad cron": {"cron": "* * *", "interval": None},
    "worse cron": {"cron": "1-/,#LW 99 * * *", "interval": None},
    "no such day": {"cron": "0 0 31 2 *", "interval": None},
    "bad zone": {"cron": "* * * * *", "interval": None, "timezone": "Mars/Phobos"},
    "a path": {"cron": "* * * * *", "interval": None, "timezone": "../../etc/passwd"},
    "args no list": {"payload": {"args": 5}},
    "kwargs no object": {"payload": {"kwargs": [1]}},
    "payload no object": {"payload": [1, 2]},
    "unknown keys": {"payload": {"arguments": []}},
    "too many arguments": {"payload": {"args": [1, 2, 3, 4]}},
    "too deep": {"payload": {"args": [json.loads("[" * 900 + "]" * 900)]}},
    "too large": {"payload": {"args": ["x" * 2_000_000]}},
    "a huge number": {"payload": {"args": [{"n": 1 << 10_000}]}},
}


def left_by_hosts(name: str) -> tuple[Any, ...]:
    columns = ("last_tick", "next_tick_at", "enabled", "updated_at")
    return BackgroundSchedule.objects.filter(pk=name).values_list(*columns).get()


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_row_that_cannot_be_carried_out_is_told_of_and_stops_nothing(kind: str, caplog: Any) -> None:
    declare("shop.report")
    make_schedule("hostile", next_tick_at=-HOUR * 2, **HOSTILE[kind])
    before = (
        BackgroundSchedule.objects.filter(pk="hostile").values("last_tick", "next_tick_at", "enabled").get()
    )
    make_schedule("good", next_tick_at=-HOUR)
    ticker = Ticker()
    wait = look(ticker)
    assert [name for _, name, _ in enqueued()] == ["good"]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.message.startswith("The schedule 'hostile' is not carried out: ")
    assert record.message.endswith((".", ")."))
    assert wait is not None
    assert wait > 1  # it is not looked at again at once
    after = (
        BackgroundSchedule.objects.filter(pk="hostile").values("last_tick", "next_tick_at", "enabled").get()
    )
    assert after == before
    ticker._avoided.clear()
    look(ticker)
    assert len(caplog.records) == 1  # said once


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    "columns",
    [
        {"next_tick_at": FIRST_DAY, "cron": "* * * * *", "interval": None},
        {
            "next_tick_at": FIRST_DAY,
            "cron": "0 0 29 2 *",
            "interval": None,
            "timezone": VIENNA,
        },
        {"next_tick_at": FIRST_DAY, "missed": "all"},
        {"next_tick_at": None, "last_tick": datetime(9999, 12, 29, tzinfo=UTC)},
        {"next_tick_at": -HOUR, "last_tick": datetime(9999, 12, 29, tzinfo=UTC)},
        {"next_tick_at": datetime(9999, 12, 29, tzinfo=UTC)},
        {"next_tick_at": None, "interval": timedelta(days=3650)},
        {"next_tick_at": -HOUR, "payload": {}},
        {"next_tick_at": -HOUR, "overlap": False},
        {"next_tick_at": -HOUR, "declared": True},
    ],
)
def test_odd_rows_do_no_harm(columns: dict[str, Any], caplog: Any) -> None:
    declare("shop.report")
    make_schedule("odd", **columns)
    make_schedule("good", next_tick_at=-HOUR)
    ticker = Ticker()
    look(ticker)
    look(ticker)
    assert "good" in {name for _, name, _ in enqueued()}
    assert len(enqueued()) == len(set(enqueued()))


@pytest.mark.django_db
@pytest.mark.parametrize(
    "columns",
    [
        {"interval": None},
        {"interval": timedelta(0)},
        {"interval": timedelta(days=4000)},
        {"interval": HOUR, "cron": "* * * * *"},
        {"missed": "never"},
        {"next_tick_at": datetime(1, 1, 1, tzinfo=UTC)},
    ],
)
def test_the_table_refuses_what_nobody_could_read(columns: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        make_schedule(**columns)


@pytest.mark.django_db
@pytest.mark.usefixtures("own_registry")
def test_a_statement_that_fails_undoes_its_schedule_alone(caplog: Any) -> None:
    declare("shop.report")
    for name in ("a", "b", "c"):
        make_schedule(name, next_tick_at=-HOUR)
    with connection.cursor() as cursor:
        cursor.execute(
            """CREATE FUNCTION refuse_b() RETURNS trigger LANGUAGE plpgsql AS $$
               BEGIN
                   IF NEW.metadata ->> 'schedule' = 'b' THEN RAISE EXCEPTION 'not b'; END IF;
                   RETURN NEW;
               END $$;
               CREATE TRIGGER refuse_b BEFORE INSERT ON background_jobs
                   FOR EACH ROW EXECUTE FUNCTION refuse_b()"""
        )
    look()
    assert sorted(name for _, name, _ in enqueued()) == ["a", "c"]
    assert row("b").last_tick is None
    assert "The schedule 'b' is not carried out: not b" in caplog.text


@pytest.mark.django_db
def test_saving_a_schedule_does_not_take_back_what_hosts_have_written() -> None:
    stale = make_schedule(next_tick_at=HOUR)
    BackgroundSchedule.objects.update(last_tick=Now(), next_tick_at=Now())
    fresh = row()
    stale.timezone = VIENNA
    stale.save()
    assert (row().timezone, row().last_tick, row().next_tick_at) == (
        VIENNA,
        fresh.last_tick,
        fresh.next_tick_at,
    )


# Several hosts


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("own_registry")
def test_a_schedule_that_one_host_has_locked_is_left_to_it() -> None:
    declare(schedule=HOUR)
    look()
    late()
    with session() as one, session() as other:
        with work(one) as cursor:
            assert Ticker().tick(cursor) is not None
            with work(other) as second:
                assert Ticker().tick(second) == 1.0
        with work(other) as second:
            Ticker().tick(second)
    assert len(enqueued()) == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("own_registry")
def test_a_host_that_dies_in_the_middle_leaves_the_tick_to_others() -> None:
    declare(schedule=HOUR)
    look()
    late()
    with session() as one:
        cursor = one.cursor()
        cursor.execute("BEGIN")
        Ticker().tick(cursor)
        one.close()
    with session() as other, work(other) as cursor:
        Ticker().tick(cursor)
    assert len(enqueued()) == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("own_registry")
def test_hosts_that_start_at_once_do_not_wait_for_each_other() -> None:
    declare("a", schedule=HOUR)
    declare("b", schedule=HOUR)
    with session() as one, session() as other:
        other.execute("SET lock_timeout = '1s'")
        second_host = Ticker()
        with work(one) as cursor:
            Ticker().tick(cursor)
            with work(other) as second:
                assert second_host.tick(second) == 1.0
        with work(other) as second:
            second_host.tick(second)
    assert BackgroundSchedule.objects.count() == 2


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("own_registry")
def test_two_thousand_minutes_with_jittering_hosts_give_two_thousand_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two hosts look at each minute, by clocks that are off by up to two seconds, while DST begins."""
    clock = "current_setting('tests.clock')::timestamptz"
    monkeypatch.setattr(sql, "DUE_SCHEDULES", sql.DUE_SCHEDULES.replace("statement_timestamp()", clock))
    declare("shop.report")
    begin, minutes = at("2026-03-28T12:00:00"), 2_000
    make_schedule(cron="* * * * *", interval=None, timezone=VIENNA, missed="all", next_tick_at=begin + MINUTE)
    chance = random.Random(1)
    looks = sorted(
        (begin + minute * MINUTE + timedelta(seconds=chance.uniform(-2, 2)), host)
        for minute in range(1, minutes + 1)
        for host in (0, 1)
    )
    looks.append((begin + minutes * MINUTE + timedelta(seconds=2), 0))
    hosts = [Ticker(), Ticker()]
    with session() as one:
        one.execute("SET synchronous_commit = off")  # 4,000 looks
        for instant, host in looks:
            one.execute("SELECT set_config('tests.clock', %s, false)", [instant.isoformat()])
            with work(one) as cursor:
                hosts[host].tick(cursor)
    assert ticks_taken() == [begin + minute * MINUTE for minute in range(1, minutes + 1)]


# Real hosts

SCHEDULED = {"PGJOBS_TEST_IMPORT": "tests.faults.schedule_jobs"}


def taken_by(name: str) -> int:
    return BackgroundJob.objects.filter(metadata__schedule=name, status="completed").count()


@pytest.mark.processes
def test_a_worker_takes_ticks_on_time_and_runs_their_jobs(workers: Workers) -> None:
    worker = workers.start("--processes", "1", environment=SCHEDULED)
    until(lambda: taken_by("ticks.all") >= 3 and taken_by("ticks.alone"), what="three ticks")
    assert worker.stop() == 0
    for made in BackgroundJob.objects.filter(metadata__schedule="ticks.all"):
        late_by = made.created_at - datetime.fromisoformat(made.metadata["tick"])
        assert timedelta(0) <= late_by < timedelta(seconds=5)  # and not with the next look


@pytest.mark.processes
def test_a_worker_hears_of_a_change_at_once(workers: Workers) -> None:
    """With no schedule at all, it would look once a minute."""
    workers.start("--processes", "1").until_listening()
    make_schedule(job_name="tests.jobs.add", payload={"args": [1, 2]}, interval=timedelta(seconds=1))
    store.announce_schedules("default")
    until(lambda: taken_by("shop.report"), what="a tick")


@pytest.mark.processes
@pytest.mark.parametrize("option", ["--no-maintenance", "--drain"])
def test_hosts_that_keep_no_house_take_no_ticks(workers: Workers, option: str) -> None:
    make_schedule(job_name="tests.jobs.add", payload={"args": [1, 2]}, next_tick_at=-HOUR)
    other = tests.jobs.add.enqueue(3, 4)
    worker = workers.start("--processes", "1", option, environment=SCHEDULED)
    until(lambda: other.refresh().status == "completed", what="the job")
    if option != "--drain":
        worker.stop()
    assert worker.wait() == 0
    assert BackgroundJob.objects.count() == 1
    assert BackgroundSchedule.objects.count() == 1
