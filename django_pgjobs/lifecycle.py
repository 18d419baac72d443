"""The whole state machine of a job, and nothing else: no clock, no database, no settings.

Statuses, the events that lead from one to another, the outcomes that running a job can have, and
`decide`, which says what an outcome means. Everything else in the package either produces an outcome or
carries out a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any, Protocol, TypeGuard, assert_never, get_args


class Status(StrEnum):
    """The five statuses of a job, in the order in which the database declares them."""

    QUEUED = "queued"  # waits for run_at, then for a worker
    PROCESSING = "processing"  # somebody holds a claim on it
    FAILED = "failed"  # a dead letter: waits for a person
    COMPLETED = "completed"
    CANCELLED = "cancelled"  # a person or the code decided not to run it


FINISHED = frozenset({Status.FAILED, Status.COMPLETED, Status.CANCELLED})


class Event(StrEnum):
    """What can happen to a job."""

    CLAIM = "claim"  # a worker takes it
    COMPLETE = "complete"  # its function returned
    FAIL = "fail"  # it failed or was lost; attempts are left
    BURY = "bury"  # it failed or was lost; no attempts are left, or it gave up
    SNOOZE = "snooze"  # it asked to be run later
    RELEASE = "release"  # it was claimed and never started
    INTERRUPT = "interrupt"  # it was started, and stopped by us
    PARK = "park"  # no function of its name is known here
    STOP = "stop"  # it was started, and stopped because somebody asked
    CANCEL = "cancel"  # a person or the code does not want it any more
    RETRY = "retry"  # a person wants it run again
    DISCARD = "discard"  # a person has decided against it


# event: (the statuses that it may leave, the status that it enters)
TRANSITIONS: dict[Event, tuple[frozenset[Status], Status]] = {
    Event.CLAIM: (frozenset({Status.QUEUED}), Status.PROCESSING),
    Event.COMPLETE: (frozenset({Status.PROCESSING}), Status.COMPLETED),
    Event.FAIL: (frozenset({Status.PROCESSING}), Status.QUEUED),
    Event.BURY: (frozenset({Status.PROCESSING}), Status.FAILED),
    Event.SNOOZE: (frozenset({Status.PROCESSING}), Status.QUEUED),
    Event.RELEASE: (frozenset({Status.PROCESSING}), Status.QUEUED),
    Event.INTERRUPT: (frozenset({Status.PROCESSING}), Status.QUEUED),
    Event.PARK: (frozenset({Status.PROCESSING}), Status.QUEUED),
    Event.STOP: (frozenset({Status.PROCESSING}), Status.CANCELLED),
    Event.CANCEL: (frozenset({Status.QUEUED}), Status.CANCELLED),
    Event.RETRY: (frozenset({Status.FAILED, Status.CANCELLED}), Status.QUEUED),
    Event.DISCARD: (frozenset({Status.FAILED}), Status.CANCELLED),
}

# Events after which the attempt counts as never made.
REFUNDED = frozenset({Event.SNOOZE, Event.RELEASE, Event.INTERRUPT, Event.PARK})


@dataclass(frozen=True, slots=True)
class JobError:
    """What a failed attempt leaves behind, as plain text."""

    exception: str  # dotted path of the exception's class, or "" where nothing was raised
    message: str
    traceback: str = ""
    fingerprint: str = ""  # equal for failures that are alike

    def __str__(self) -> str:
        name = self.exception.rpartition(".")[2]
        return f"{name}: {self.message}" if name else self.message


# ── Outcomes: what became of a claimed job ────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Completed:
    """The function returned. `result` is JSON text; `problem` says why a result could not be kept.

    `recorded` is set where an atomic job has committed this together with its effects.
    """

    result: str | None = None
    problem: str = ""
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The function raised. `retry_in` (seconds) and `give_up` are what the job asked for, if it did."""

    error: JobError
    retry_in: float | None = None
    give_up: bool = False


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The function asked to be run again after `delay` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class Unstarted:
    """The job was claimed here and its function was never entered. It may be claimed again after `delay`."""

    delay: float | None = None  # seconds


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The function was entered, and we stopped it for reasons that are not its own."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Somebody asked to stop the job, and it no longer runs."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """No function of this name is registered here."""

    error: JobError


@dataclass(frozen=True, slots=True)
class Crashed:
    """The process that ran the function died."""

    error: JobError


@dataclass(frozen=True, slots=True)
class Lost:
    """The holder of the claim has been silent for longer than the lease."""

    error: JobError


Outcome = Completed | Failed | Snoozed | Unstarted | Interrupted | Stopped | Unknown | Crashed | Lost


def to_plain(outcome: Outcome) -> list[Any]:
    """An outcome as a list of plain values, to be sent from one process to another."""
    values = [getattr(outcome, name) for name in outcome.__dataclass_fields__]
    return [
        type(outcome).__name__,
        *(astuple(value) if isinstance(value, JobError) else value for value in values),
    ]


def from_plain(values: Sequence[Any]) -> Outcome:
    """The outcome that `to_plain` was given."""
    name, *rest = values
    outcome: Outcome = _OUTCOMES[name](*(JobError(*v) if isinstance(v, list | tuple) else v for v in rest))
    return outcome


NO_RESULT = Completed()  # of most jobs
_OUTCOMES: dict[str, Any] = {class_.__name__: class_ for class_ in get_args(Outcome)}


# ── Backoff ───────────────────────────────────────────────────────────────────────────────────────────────

BACKOFF_BASE = 10.0  # seconds
BACKOFF_CEILING = 3600.0  # seconds
LONGEST_DELAY = 10 * 365 * 86_400.0  # seconds; keeps every run_at a date that Python can read


def default_backoff(attempts: int) -> float:
    """Seconds to wait after the failure of attempt number `attempts`: 10 s x 2^attempts, at most one hour.

    So 20 s, 40 s, 80 s, ... The exponent is clamped before the power is taken, since 2^1024 is an error.
    """
    return min(BACKOFF_BASE * 2.0 ** min(max(attempts, 0), 30), BACKOFF_CEILING)


# What @job(backoff=...) may declare apart from a callable, which only an executor may call.
Backoff = float | timedelta | Sequence[float | timedelta] | None


def is_delay(value: object) -> TypeGuard[float | timedelta]:
    """Whether a value is a duration as people give it: a number of seconds or a timedelta; not NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
        return False
    return not (isinstance(value, float) and math.isnan(value))


def in_seconds(delay: float | timedelta) -> float:
    """`delay` as seconds, between zero and `LONGEST_DELAY`; zero for NaN."""
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    return float(min(max(0.0, seconds), LONGEST_DELAY))  # clamped first: an int may be larger than any float


def backoff_delay(backoff: Backoff, attempts: int) -> float:
    """Seconds to wait after attempt number `attempts` by a declared backoff.

    None stands for `default_backoff`; of a sequence the last element repeats.
    """
    match backoff:
        case None:
            return default_backoff(attempts)
        case int() | float() | timedelta():
            return in_seconds(backoff)
        case _:
            return in_seconds(backoff[min(max(attempts, 1), len(backoff)) - 1])


# ── The decision ──────────────────────────────────────────────────────────────────────────────────────────

PARK_SHORTEST = 5.0  # seconds
PARK_LONGEST = 300.0


class Facts(Protocol):
    """What `decide` needs to know of the row. A claim has all of it."""

    @property
    def attempts(self) -> int: ...  # claims that were not refunded, this one included
    @property
    def max_attempts(self) -> int: ...
    @property
    def crashes(self) -> int: ...  # executors that died while running it, before this outcome
    @property
    def rerun_if_lost(self) -> bool: ...
    @property
    def interruptions(self) -> int: ...
    @property
    def claimed_at(self) -> float: ...  # seconds of the database's epoch clock
    @property
    def unknown_since(self) -> float | None: ...  # the same clock; set while no worker has known the name


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules that a job goes by: its function's declared backoff, and the project's limits in seconds."""

    backoff: Backoff = None
    max_crashes: int = 3
    lost_delay: float = 60.0
    unknown_job_after: float = 86_400.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to write: one event, and the values that belong to it."""

    event: Event
    delay: float | None = None  # seconds from the database's clock; None leaves run_at unchanged
    error: JobError | None = None
    crashed: bool = False
    result: str | None = None
    note: dict[str, Any] = field(default_factory=dict)  # merged into the job's metadata

    @property
    def status(self) -> Status:
        return TRANSITIONS[self.event][1]

    @property
    def refunded(self) -> bool:
        return self.event in REFUNDED


_COMPLETED = Verdict(Event.COMPLETE)
_INTERRUPTED = (
    "The job was interrupted: its worker stopped, or its executor was killed because of another job."
)


def decide(outcome: Outcome, facts: Facts, policy: Policy) -> Verdict:
    """Say what an outcome means for a job that is `processing`. Never raises."""
    match outcome:
        case Completed(None, ""):
            return _COMPLETED
        case Completed(result, problem):
            return Verdict(Event.COMPLETE, result=result, note={"result_problem": problem} if problem else {})
        case Failed(error, give_up=True):
            return Verdict(Event.BURY, error=error)
        case Failed(error, retry_in):
            delay = backoff_delay(policy.backoff, facts.attempts) if retry_in is None else retry_in
            return _fail(error, facts, delay)
        case Snoozed(delay):
            return Verdict(Event.SNOOZE, delay)
        case Unstarted(delay):
            return Verdict(Event.RELEASE, delay)
        case Interrupted() if facts.rerun_if_lost:
            return Verdict(Event.INTERRUPT, note={"interruptions": facts.interruptions + 1})
        case Interrupted():
            return Verdict(Event.BURY, error=_at_most_once(_INTERRUPTED))
        case Stopped():
            return Verdict(Event.STOP)
        case Unknown(error):
            return _park(error, facts, policy)
        case Crashed(error):
            return _crash(error, facts, policy)
        case Lost(error) if facts.rerun_if_lost:
            return _fail(error, facts, policy.lost_delay)
        case Lost(error):
            return Verdict(Event.BURY, error=_at_most_once(error.message))
        case _:
            assert_never(outcome)


def _fail(error: JobError, facts: Facts, delay: float) -> Verdict:
    if facts.attempts >= facts.max_attempts:
        return Verdict(Event.BURY, error=error)
    return Verdict(Event.FAIL, delay, error=error)


def _crash(error: JobError, facts: Facts, policy: Policy) -> Verdict:
    crashes = facts.crashes + 1
    if crashes >= policy.max_crashes:
        killer = f"The job killed its executor {crashes} times ({error.message})."
        return Verdict(Event.BURY, error=JobError("", killer, error.traceback), crashed=True)
    if not facts.rerun_if_lost:
        return Verdict(Event.BURY, error=_at_most_once(error.message), crashed=True)
    verdict = _fail(error, facts, backoff_delay(policy.backoff, facts.attempts))
    return Verdict(verdict.event, verdict.delay, error=error, crashed=True)


def _park(error: JobError, facts: Facts, policy: Policy) -> Verdict:
    since = facts.claimed_at if facts.unknown_since is None else min(facts.unknown_since, facts.claimed_at)
    age = facts.claimed_at - since
    if age >= policy.unknown_job_after:
        return Verdict(Event.BURY, error=error)
    # Waiting for as long as the name has been unknown doubles the delay each time.
    return Verdict(Event.PARK, min(max(age, PARK_SHORTEST), PARK_LONGEST), note={"unknown_since": since})


def _at_most_once(message: str) -> JobError:
    return JobError("", f"{message.rstrip('.')}. It may have run, and is declared with rerun_if_lost=False.")
