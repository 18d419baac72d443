from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest

from django_pgjobs.lifecycle import (
    BACKOFF_CEILING,
    FINISHED,
    LONGEST_DELAY,
    REFUNDED,
    TRANSITIONS,
    Completed,
    Crashed,
    Event,
    Failed,
    Interrupted,
    JobError,
    Lost,
    Policy,
    Snoozed,
    Status,
    Stopped,
    Unknown,
    Unstarted,
    Verdict,
    backoff_delay,
    decide,
    default_backoff,
    from_plain,
    in_seconds,
    is_delay,
    to_plain,
)

ERROR = JobError("builtins.ValueError", "boom", "Traceback ...", "f1")
OUTCOMES = [
    Completed(),
    Completed("[1]"),
    Completed(problem="too large"),
    Failed(ERROR),
    Failed(ERROR, retry_in=0.0),
    Failed(ERROR, give_up=True),
    Snoozed(5.0),
    Unstarted(),
    Interrupted(),
    Stopped(),
    Unknown(ERROR),
    Crashed(ERROR),
    Lost(ERROR),
]


@dataclass(frozen=True)
class Row:
    attempts: int = 1
    max_attempts: int = 3
    crashes: int = 0
    rerun_if_lost: bool = True
    interruptions: int = 0
    claimed_at: float = 1_000_000.0
    unknown_since: float | None = None


LAST = Row(attempts=3)
ONCE = Row(rerun_if_lost=False)
POLICY = Policy()


# ── The transition table ──────────────────────────────────────────────────────────────────────────────────


def test_the_statuses_stand_in_the_order_of_the_enum_type():
    assert [status.value for status in Status] == ["queued", "processing", "failed", "completed", "cancelled"]


def test_every_event_has_its_transition():
    assert set(TRANSITIONS) == set(Event)


def test_every_status_can_be_reached_or_is_where_a_job_begins():
    reached = {target for _, target in TRANSITIONS.values()}

    assert reached == set(Status)


def test_nothing_leads_out_of_completed():
    assert not [event for event, (sources, _) in TRANSITIONS.items() if Status.COMPLETED in sources]


def test_only_a_persons_decision_leads_out_of_failed_and_cancelled():
    leaving = {event for event, (sources, _) in TRANSITIONS.items() if sources & FINISHED}

    assert leaving == {Event.RETRY, Event.DISCARD}


def test_no_event_leaves_a_job_where_it_is():
    assert not [event for event, (sources, target) in TRANSITIONS.items() if target in sources]


def test_attempts_are_refunded_only_to_jobs_that_are_queued_again():
    assert {TRANSITIONS[event] for event in REFUNDED} == {(frozenset({Status.PROCESSING}), Status.QUEUED)}


# ── decide() ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("outcome", "row", "verdict"),
    [
        pytest.param(Completed(), Row(), Verdict(Event.COMPLETE), id="completed"),
        pytest.param(
            Completed("[1]"), Row(), Verdict(Event.COMPLETE, result="[1]"), id="completed with a result"
        ),
        pytest.param(
            Completed(None, "too large"),
            Row(),
            Verdict(Event.COMPLETE, note={"result_problem": "too large"}),
            id="completed with a result that cannot be stored",
        ),
        pytest.param(Failed(ERROR), Row(), Verdict(Event.FAIL, 20.0, ERROR), id="failed, attempts left"),
        pytest.param(Failed(ERROR), LAST, Verdict(Event.BURY, error=ERROR), id="failed, none left"),
        pytest.param(
            Failed(ERROR), Row(attempts=7), Verdict(Event.BURY, error=ERROR), id="failed, more than allowed"
        ),
        pytest.param(
            Failed(ERROR, retry_in=1.5), Row(), Verdict(Event.FAIL, 1.5, ERROR), id="asked for a retry"
        ),
        pytest.param(
            Failed(ERROR, retry_in=0.0), Row(), Verdict(Event.FAIL, 0.0, ERROR), id="asked for one at once"
        ),
        pytest.param(
            Failed(ERROR, retry_in=1.5), LAST, Verdict(Event.BURY, error=ERROR), id="asked, none left"
        ),
        pytest.param(Failed(ERROR, give_up=True), Row(), Verdict(Event.BURY, error=ERROR), id="gave up"),
        pytest.param(
            Failed(ERROR, retry_in=1.0, give_up=True),
            Row(),
            Verdict(Event.BURY, error=ERROR),
            id="giving up goes before a retry",
        ),
        pytest.param(Snoozed(5.0), LAST, Verdict(Event.SNOOZE, 5.0), id="snoozed at the last attempt"),
        pytest.param(Unstarted(), LAST, Verdict(Event.RELEASE), id="never started"),
        pytest.param(Unstarted(), ONCE, Verdict(Event.RELEASE), id="never started, at most once"),
        pytest.param(Unstarted(5.0), LAST, Verdict(Event.RELEASE, 5.0), id="never started, and not soon"),
        pytest.param(
            Interrupted(),
            Row(attempts=3, interruptions=4),
            Verdict(Event.INTERRUPT, note={"interruptions": 5}),
            id="interrupted at the last attempt",
        ),
        pytest.param(
            Interrupted(),
            ONCE,
            Verdict(
                Event.BURY,
                error=JobError(
                    "",
                    "The job was interrupted: its worker stopped, or its executor was killed because"
                    " of another job. It may have run, and is declared with"
                    " rerun_if_lost=False.",
                ),
            ),
            id="interrupted, at most once",
        ),
        pytest.param(Stopped(), Row(), Verdict(Event.STOP), id="stopped"),
        pytest.param(Stopped(), ONCE, Verdict(Event.STOP), id="stopped, at most once"),
        pytest.param(Lost(ERROR), Row(), Verdict(Event.FAIL, 60.0, ERROR), id="lost"),
        pytest.param(Lost(ERROR), LAST, Verdict(Event.BURY, error=ERROR), id="lost, none left"),
        pytest.param(
            Lost(ERROR),
            ONCE,
            Verdict(
                Event.BURY,
                error=JobError("", "boom. It may have run, and is declared with rerun_if_lost=False."),
            ),
            id="lost, at most once",
        ),
        pytest.param(Crashed(ERROR), Row(), Verdict(Event.FAIL, 20.0, ERROR, crashed=True), id="crashed"),
        pytest.param(
            Crashed(ERROR), LAST, Verdict(Event.BURY, None, ERROR, crashed=True), id="crashed, none left"
        ),
        pytest.param(
            Crashed(ERROR),
            ONCE,
            Verdict(
                Event.BURY,
                error=JobError("", "boom. It may have run, and is declared with rerun_if_lost=False."),
                crashed=True,
            ),
            id="crashed, at most once",
        ),
        pytest.param(
            Crashed(ERROR),
            Row(attempts=1, crashes=2, max_attempts=100),
            Verdict(
                Event.BURY,
                error=JobError("", "The job killed its executor 3 times (boom).", "Traceback ..."),
                crashed=True,
            ),
            id="crashed too often",
        ),
        pytest.param(
            Unknown(ERROR),
            Row(attempts=3),
            Verdict(Event.PARK, 5.0, note={"unknown_since": 1_000_000.0}),
            id="unknown for the first time",
        ),
        pytest.param(
            Unknown(ERROR),
            Row(unknown_since=999_980.0),
            Verdict(Event.PARK, 20.0, note={"unknown_since": 999_980.0}),
            id="unknown for 20 s",
        ),
        pytest.param(
            Unknown(ERROR),
            Row(unknown_since=1_000_000.0 - 86_399),
            Verdict(Event.PARK, 300.0, note={"unknown_since": 1_000_000.0 - 86_399}),
            id="unknown for almost a day",
        ),
        pytest.param(
            Unknown(ERROR),
            Row(unknown_since=1_000_000.0 - 86_400),
            Verdict(Event.BURY, error=ERROR),
            id="unknown for a day",
        ),
        pytest.param(
            Unknown(ERROR),
            Row(unknown_since=2_000_000.0),
            Verdict(Event.PARK, 5.0, note={"unknown_since": 1_000_000.0}),
            id="unknown since tomorrow",
        ),
    ],
)
def test_an_outcome_is_decided_by_the_row_and_the_rules(outcome, row, verdict):
    assert decide(outcome, row, POLICY) == verdict


def test_the_jobs_own_backoff_applies_to_failures_and_crashes():
    policy = Policy(backoff=[1, timedelta(minutes=1)])

    assert decide(Failed(ERROR), Row(attempts=1), policy).delay == 1.0
    assert decide(Failed(ERROR), Row(attempts=2), policy).delay == 60.0
    assert decide(Crashed(ERROR), Row(attempts=2), policy).delay == 60.0


def test_the_projects_limits_apply():
    assert decide(Crashed(ERROR), Row(), Policy(max_crashes=1)).event is Event.BURY
    assert decide(Lost(ERROR), Row(), Policy(lost_delay=0.0)).delay == 0.0
    assert decide(Unknown(ERROR), Row(), Policy(unknown_job_after=0.0)).event is Event.BURY


def test_a_parked_job_waits_twice_as_long_each_time_up_to_five_minutes():
    delays = []
    row = Row()
    for _ in range(9):
        verdict = decide(Unknown(ERROR), row, POLICY)
        delays.append(verdict.delay)
        row = replace(
            row, claimed_at=row.claimed_at + verdict.delay, unknown_since=verdict.note["unknown_since"]
        )

    assert delays == [5, 5, 10, 20, 40, 80, 160, 300, 300]


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("row", [Row(), LAST, ONCE, Row(attempts=0, max_attempts=0), Row(attempts=2**31 - 1)])
@pytest.mark.parametrize("backoff", [None, 0, 10**400, math.nan, math.inf, -1, [0], timedelta.max])
def test_every_verdict_is_one_that_can_be_written(outcome, row, backoff):
    verdict = decide(outcome, row, Policy(backoff=backoff))

    assert Status.PROCESSING in TRANSITIONS[verdict.event][0]
    assert verdict.status is TRANSITIONS[verdict.event][1]
    assert verdict.delay is None or 0 <= verdict.delay <= LONGEST_DELAY
    assert (verdict.error is not None) == (verdict.event in {Event.FAIL, Event.BURY})
    assert verdict.refunded == (verdict.event in REFUNDED)
    assert not (verdict.event is Event.FAIL and row.attempts >= row.max_attempts)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (JobError("builtins.ValueError", "boom"), "ValueError: boom"),
        (JobError("shop.jobs.Outer.Refused", "no"), "Refused: no"),
        (JobError("", "Worker timeout detected"), "Worker timeout detected"),
    ],
)
def test_an_error_reads_as_python_prints_it(error, text):
    assert str(error) == text


# ── From one process to another ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_outcome_travels_as_plain_values(outcome):
    plain = to_plain(outcome)

    assert from_plain(plain) == outcome
    assert type(from_plain(plain)) is type(outcome)
    assert all(isinstance(value, str | float | bool | tuple | None) for value in plain)


# ── Backoff ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_default_backoff_doubles_from_twenty_seconds_to_an_hour():
    assert [default_backoff(attempts) for attempts in range(1, 11)] == [
        20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600,
    ]  # fmt: skip


def test_the_default_backoff_never_falls_and_never_fails():
    attempts = [-1, *range(101), 1000, 1024, 32_767, 2**31 - 1, 2**31]
    delays = [default_backoff(number) for number in attempts]

    assert delays == sorted(delays)
    assert 0 < delays[0] <= delays[-1] == BACKOFF_CEILING


@pytest.mark.parametrize(
    ("backoff", "delays"),
    [
        (None, [20, 40, 80]),
        (7, [7, 7, 7]),
        (0, [0, 0, 0]),
        (1.5, [1.5, 1.5, 1.5]),
        (timedelta(minutes=2), [120, 120, 120]),
        ([1, 5], [1, 5, 5]),
        ((timedelta(seconds=1), 5.5, timedelta(hours=1)), [1, 5.5, 3600]),
        (range(3), [0, 1, 2]),
    ],
)
def test_a_declared_backoff_gives_the_wait_after_each_attempt(backoff, delays):
    assert [backoff_delay(backoff, attempts) for attempts in (1, 2, 3)] == delays


@pytest.mark.parametrize("attempts", [-1, 0, 1])
def test_a_sequence_begins_with_its_first_element(attempts):
    assert backoff_delay([1, 5], attempts) == 1


def test_the_last_element_of_a_sequence_repeats():
    assert backoff_delay([1, 5], 2**31) == 5


@pytest.mark.parametrize(
    ("delay", "seconds"),
    [
        (0, 0.0),
        (3, 3.0),
        (0.25, 0.25),
        (timedelta(milliseconds=1), 0.001),
        (-1, 0.0),
        (-0.0, 0.0),
        (timedelta(days=-1), 0.0),
        (math.nan, 0.0),
        (math.inf, LONGEST_DELAY),
        (-math.inf, 0.0),
        (10**400, LONGEST_DELAY),
        (-(10**400), 0.0),
        (timedelta.max, LONGEST_DELAY),
        (timedelta.min, 0.0),
    ],
)
def test_a_delay_is_between_zero_and_ten_years(delay, seconds):
    assert in_seconds(delay) == seconds
    assert type(in_seconds(delay)) is float


@pytest.mark.parametrize("value", [0, 1, -1, 2.5, math.inf, 10**400, timedelta(1)])
def test_numbers_and_timedeltas_are_delays(value):
    assert is_delay(value)


@pytest.mark.parametrize("value", [math.nan, True, False, None, "5", b"5", [5], 5j, object()])
def test_everything_else_is_no_delay(value):
    assert not is_delay(value)
