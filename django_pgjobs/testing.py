"""For the tests of projects: run what is due here and now, let time pass, and assert what was enqueued.

Everything goes through the same claim, execution, decision and settling as in a worker, on the connection of
the test: so it works inside a TestCase's transaction, and costs milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol, Self

from django.db import connections
from django.db.models import Max

from . import inplace, store
from .conf import config
from .jobs import JobFunction
from .lifecycle import Event, Status, Verdict
from .models import BackgroundJob
from .payload import decode_arguments, encode_arguments
from .store import Claim

__all__ = ["Drained", "JobsTestMixin", "Run", "assert_enqueued", "captured_jobs", "drain", "run_job"]

__unittest = True  # so that failures are shown where a test asked, and not where they were found

SHOWN = 20  # jobs that a failure lists
SHOWN_ERRORS = 10


# ── Running ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job."""

    claim: Claim
    verdict: Verdict
    after: timedelta = timedelta(0)  # the time of `drain(until=...)` that had passed

    @property
    def job_name(self) -> str:
        return self.claim.job_name

    @property
    def event(self) -> Event:
        return self.verdict.event

    @property
    def problem(self) -> str:
        """What went wrong, with the traceback; "" where nothing did. To snooze is not wrong."""
        if self.event not in _NEXT:
            return ""
        claim, error = self.claim, self.verdict.error
        call = claim.job_name + _call(*_arguments(claim.payload))
        if error is None:
            what = f"No job function is named {claim.job_name!r} here: {call}"
        elif error.exception:
            what = f"{call} raised {error}"
        else:
            what = f"{call} failed: {error}"
        then = _NEXT[self.event].format(delay=_duration(self.verdict.delay or 0))
        if self.event is Event.BURY and claim.attempts >= claim.max_attempts:
            then = "no attempt is left, so it is a dead letter"
        where = f"job #{claim.id} in queue {claim.queue_name!r}"
        when = f", {self.after} after the start" if self.after else ""
        text = f"{what}\n  {where}, attempt {claim.attempts} of {claim.max_attempts}{when}: {then}"
        for line in (error.traceback if error else "").splitlines():
            text += f"\n    {line}".rstrip()
        return text


_NEXT = {
    Event.FAIL: "it is tried again in {delay}",
    Event.BURY: "it is a dead letter, whatever attempts are left",
    Event.PARK: "it waits for a worker that knows it",
}


@dataclass(slots=True)
class Drained:
    """What `drain` ran, in order."""

    runs: list[Run] = field(default_factory=list)

    def count(self, event: Event) -> int:
        return sum(run.event is event for run in self.runs)

    @property
    def completed(self) -> int:
        return self.count(Event.COMPLETE)

    @property
    def failed(self) -> int:
        """Failed attempts, those that made a dead letter included."""
        return self.count(Event.FAIL) + self.count(Event.BURY)

    @property
    def errors(self) -> list[str]:
        """A text for each run that went wrong, with its traceback."""
        return [run.problem for run in self.runs if run.problem]

    def check(self) -> Self:
        """Return self if all went well. Raises AssertionError with `errors` otherwise."""
        __tracebackhide__ = True
        errors = self.errors
        if not errors:
            return self
        shown = "\n\n".join(errors[:SHOWN_ERRORS])
        more = f"\n\nand {len(errors) - SHOWN_ERRORS} more" if len(errors) > SHOWN_ERRORS else ""
        raise AssertionError(f"{len(errors)} of {_count(len(self), 'run')} failed.\n\n{shown}{more}")

    def __len__(self) -> int:
        return len(self.runs)


def drain(
    *,
    queue: str | None = None,
    limit: int = 1000,
    until: timedelta | None = None,
    tick: Callable[[timedelta], object] | None = None,
) -> Drained:
    """Run jobs, one after the other, until none is due. Jobs that they enqueue are run, too.

    With `until`, that much time passes for the queue: what comes due meanwhile is run in order, retries and
    snoozed jobs included, and what is due later has come nearer. `tick` is called with each stretch of time,
    for clocks that a test has stopped.

    A failed job is not an error of `drain`; `check()` makes it one. Raises AssertionError after `limit` runs,
    naming the jobs that keep coming back.
    """
    __tracebackhide__ = True
    alias = config().DATABASE
    left = until = _checked_duration("until", timedelta(0) if until is None else until)
    after = timedelta(0)
    drained = Drained()
    with inplace.line():
        while True:
            claim = inplace.claim_next(alias, queue)
            if claim is None:
                if not left:
                    return drained
                with store.own_transaction(alias) as cursor:
                    stretch = store.pass_time(cursor, queue=queue, most=left)
                left -= stretch
                # It lacks the moment that the test itself has taken.
                nominal = timedelta(seconds=round(stretch.total_seconds())) or stretch
                nominal = min(nominal, until - after) if left else until - after
                after += nominal
                if tick is not None and nominal:
                    tick(nominal)
                continue
            if len(drained) >= limit:
                inplace.put_back(claim, alias)
                raise AssertionError(
                    f"drain() has run {_count(limit, 'job')} and more are due"
                    f"{f' after {after}' if after else ''}. {_latest(drained)}"
                )
            drained.runs.append(Run(claim, inplace.execute(claim, alias).verdict, after))


def run_job(job: BackgroundJob | _TaskResult) -> Any:
    """Run one job that was enqueued, whenever it is due, and return its result as it is stored.

    Raises what its function raised, once that is recorded as in any run. Raises AssertionError for a job that
    is not queued, and for one that could not be called.
    """
    __tracebackhide__ = True
    if not hasattr(job, "id"):
        raise TypeError(
            f"run_job takes what enqueueing returned, not {job!r}. A function can just be called."
        )
    alias = config().DATABASE
    rows = BackgroundJob.objects.using(alias).filter(pk=int(job.id))
    with inplace.line():
        claim = inplace.claim_this(int(job.id), alias, regardless=True)
        if claim is None:
            status = rows.values_list("status", flat=True).first()
            because = f"it is {status}" if status else "it does not exist"
            raise AssertionError(f"Job #{job.id} cannot be run, since {because}.")
        verdict, raised = inplace.execute(claim, alias)
    if raised is not None:
        raise raised
    problem = Run(claim, verdict).problem
    if problem:
        raise AssertionError(problem)
    if verdict.result is not None:
        return json.loads(verdict.result)
    return rows.values_list("result", flat=True).first()  # of an atomic job, which has written it itself


@contextmanager
def captured_jobs(*, execute: bool = False) -> Iterator[list[BackgroundJob]]:
    """Give a list that has, after the block, the jobs that were enqueued within it, in order.

    As this connection then sees them: those that were rolled back are not among them. With `execute`, those
    that are due are run after the block, and the jobs that they enqueue, each once; a failure is an
    AssertionError.
    """
    __tracebackhide__ = True
    alias = config().DATABASE
    rows = BackgroundJob.objects.using(alias)
    latest = rows.aggregate(latest=Max("pk"))["latest"] or 0
    captured: list[BackgroundJob] = []

    def fill() -> None:
        captured[:] = rows.filter(pk__gt=latest).order_by("pk")

    try:
        yield captured
    except BaseException:
        if not inplace.is_broken(connections[alias]):
            fill()
        raise
    executed = _execute_since(latest, alias) if execute else Drained()
    fill()
    executed.check()


def _execute_since(latest: int, alias: str) -> Drained:
    """Run the due jobs with higher ids, once each, and the jobs that they enqueue."""
    __tracebackhide__ = True
    executed = Drained()
    rows = BackgroundJob.objects.using(alias).filter(status=Status.QUEUED.value).order_by("pk")
    with inplace.line():
        while ids := list(rows.filter(pk__gt=latest).values_list("pk", flat=True)):
            for id in ids:
                latest = id
                claim = inplace.claim_this(id, alias)
                if claim is None:
                    continue
                if len(executed) >= inplace.LIMIT:
                    inplace.put_back(claim, alias)
                    raise AssertionError(
                        f"captured_jobs() has run {inplace.LIMIT} jobs and more are due. {_latest(executed)}"
                    )
                executed.runs.append(Run(claim, inplace.execute(claim, alias).verdict))
    return executed


def _latest(drained: Drained) -> str:
    return inplace.latest(run.job_name for run in drained.runs[-inplace.NAMED :])


# ── Asserting ─────────────────────────────────────────────────────────────────────────────────────────────


class _Task(Protocol):
    """What is asked of a Task of `django.tasks` here, since Django 5.2 has none."""

    @property
    def module_path(self) -> str: ...


class _TaskResult(Protocol):
    @property
    def id(self) -> str: ...


def assert_enqueued(
    job: JobFunction[..., Any] | _Task,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    queue: str | None = None,
    priority: int | None = None,
    run_at: datetime | timedelta | None = None,
    within: timedelta = timedelta(seconds=5),
    count: int | None = None,
) -> list[BackgroundJob]:
    """Assert that jobs of a job function, or of a task, are queued, as it is described.

    What is not given may be anything. `run_at` is an aware datetime, or a timedelta from now by the
    database's clock; a job may be due earlier or later by `within`. Without `count`, one job or more; zero
    asserts that there is none. Returns the jobs that match. The failure's text lists the nearest ones, with
    what is different about them.
    """
    __tracebackhide__ = True
    alias = config().DATABASE
    now = store.now(alias)
    expected = _Expected(
        name=job.name if isinstance(job, JobFunction) else job.module_path,
        args=None if args is None else _stored(args, {})["args"],
        kwargs=None if kwargs is None else _stored((), kwargs)["kwargs"],
        queue=queue,
        priority=priority,
        run_at=run_at,
        within=_checked_duration("within", within),
        now=now,
    )
    rows = BackgroundJob.objects.using(alias).filter(job_name=expected.name).order_by("pk")
    near = [(expected.differences(row), row) for row in rows.filter(status=Status.QUEUED.value)]
    matching = [row for differences, row in near if not differences]
    if bool(matching) if count is None else len(matching) == count:
        return matching
    wanted = {None: "a job", 0: "no job", 1: "one job"}.get(count, f"{count} jobs")
    matches = {0: "none matches", 1: "one matches"}.get(len(matching), f"{len(matching)} match")
    text = f"Expected {wanted} {expected} to be queued; {matches}."
    gone = rows.exclude(status=Status.QUEUED.value)[: 10 * SHOWN]
    raise AssertionError(
        text + _listed(expected, near, [row for row in gone if not expected.differences(row)], alias)
    )


@dataclass(frozen=True, slots=True)
class _Expected:
    """What a job should be like; None may be anything."""

    name: str
    args: list[Any] | None
    kwargs: dict[str, Any] | None
    queue: str | None
    priority: int | None
    run_at: datetime | timedelta | None
    within: timedelta
    now: datetime

    def __post_init__(self) -> None:
        if isinstance(self.run_at, datetime) and self.run_at.utcoffset() is None:
            raise ValueError(
                f"run_at is {self.run_at}, a naive datetime; make it aware, or pass a timedelta."
            )
        if not isinstance(self.run_at, datetime | timedelta | None):
            raise TypeError(f"run_at is {self.run_at!r}; it must be an aware datetime or a timedelta.")

    def __str__(self) -> str:
        text = self.name
        if self.args is not None or self.kwargs is not None:
            text += f" with {_call(self.args or [], self.kwargs or {})}"
        if self.queue is not None:
            text += f" in queue {self.queue!r}"
        if self.priority is not None:
            text += f" with priority {self.priority}"
        if self.run_at is not None:
            text += f" due {self._due} (within {_duration(self.within.total_seconds())})"
        return text

    @property
    def _due(self) -> str:
        if isinstance(self.run_at, timedelta):
            return _distance(self.run_at.total_seconds())
        return f"at {self.run_at}"

    def differences(self, row: BackgroundJob) -> list[str]:
        """What is different about a job of this name, in words."""
        found: list[str] = []
        if self.args is not None:
            found += _differences("args", _part(row.payload, "args", []), self.args)
        if self.kwargs is not None:
            found += _differences("kwargs", _part(row.payload, "kwargs", {}), self.kwargs)
        if self.queue not in (None, row.queue_name):
            found.append(f"queue is {row.queue_name!r}, not {self.queue!r}")
        if self.priority not in (None, row.priority):
            found.append(f"priority is {row.priority}, not {self.priority}")
        if isinstance(self.run_at, timedelta):
            if abs(row.run_at - (self.now + self.run_at)) > self.within:
                found.append(f"it is due {self._distance_of(row)}, not {self._due}")
        elif self.run_at is not None and abs(row.run_at - self.run_at) > self.within:
            found.append(f"run_at is {row.run_at}, not {self.run_at}")
        return found

    def described(self, row: BackgroundJob) -> str:
        text = f"{row.job_name}{_call_of(row.payload)} in queue {row.queue_name!r}"
        if row.priority:
            text += f" with priority {row.priority}"
        if row.run_at > self.now:
            text += f", due {self._distance_of(row)}"
        return text

    def _distance_of(self, row: BackgroundJob) -> str:
        return _distance((row.run_at - self.now).total_seconds())


def _listed(
    expected: _Expected, near: list[tuple[list[str], BackgroundJob]], gone: list[BackgroundJob], alias: str
) -> str:
    """What there is instead: the nearest first, then what else is queued."""
    text = ""
    matching = [row for differences, row in near if not differences]
    others = sorted((pair for pair in near if pair[0]), key=lambda pair: len(pair[0]))
    room = SHOWN
    if matching:
        text += "\nMatching:" + "".join(f"\n  {expected.described(row)}" for row in matching[:room])
        room = max(room - len(matching), 0)
    if others and room:
        text += "\nNearest:"
        for differences, row in others[:room]:
            text += f"\n  {expected.described(row)}\n    {'; '.join(differences[:5])}"
        room = max(room - len(others), 0)
    queued = BackgroundJob.objects.using(alias).filter(status=Status.QUEUED.value)
    rest = queued.exclude(job_name=expected.name)
    if room and (rows := list(rest.order_by("pk")[:room])):
        text += "\nOther jobs:" + "".join(f"\n  {expected.described(row)}" for row in rows)
    hidden = len(near) + rest.count() - SHOWN
    if hidden > 0:
        text += f"\n  and {hidden} more"
    if gone:
        text += "\nNot queued any more:"
        text += "".join(f"\n  {row.job_name}{_call_of(row.payload)} is {row.status}" for row in gone[:3])
    return text or "\nNothing is queued."


def _differences(path: str, found: Any, wanted: Any) -> list[str]:
    """What is different between two values out of JSON, in words."""
    if found == wanted:
        return []
    if isinstance(found, dict) and isinstance(wanted, dict):
        words = [f"{path} lacks {key!r}" for key in wanted if key not in found]
        words += [f"{path} has {key!r} as well" for key in found if key not in wanted]
        for key in wanted:
            if key in found:
                words += _differences(f"{path}[{key!r}]", found[key], wanted[key])
        return words
    if isinstance(found, list) and isinstance(wanted, list):
        words = []
        if len(found) != len(wanted):
            words.append(f"{path} has {_count(len(found), 'value')}, not {len(wanted)}")
        for position, pair in enumerate(zip(found, wanted, strict=False)):
            words += _differences(f"{path}[{position}]", *pair)
        return words
    return [f"{path} is {_short(found)}, not {_short(wanted)}"]


# ── For test cases ────────────────────────────────────────────────────────────────────────────────────────


class JobsTestMixin:
    """The functions of this module as methods, for a TestCase of Django."""

    assertEnqueued = staticmethod(assert_enqueued)
    captureJobs = staticmethod(captured_jobs)
    drainJobs = staticmethod(drain)
    runJob = staticmethod(run_job)


# ── Words ─────────────────────────────────────────────────────────────────────────────────────────────────


def _checked_duration(name: str, value: object) -> timedelta:
    if not isinstance(value, timedelta):
        raise TypeError(f"{name} is {value!r}; it must be a timedelta.")
    if value < timedelta(0):
        raise ValueError(f"{name} is {value}; it must not be below zero.")
    return value


def _stored(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The arguments as they come back from the table: tuples are lists there."""
    return json.loads(encode_arguments(args, kwargs, config().MAX_PAYLOAD_BYTES))


def _arguments(payload: str) -> tuple[list[Any], dict[str, Any]]:
    """The arguments out of a payload, which anybody may have written; what is none is left out."""
    try:
        return decode_arguments(payload)
    except ValueError:
        return [], {}


def _part(payload: Any, name: str, empty: Any) -> Any:
    """A part of a payload, which anybody may have written."""
    part = payload.get(name) if isinstance(payload, dict) else None
    return part if isinstance(part, type(empty)) else empty


def _call_of(payload: Any) -> str:
    return _call(_part(payload, "args", []), _part(payload, "kwargs", {}))


def _call(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    arguments = [*map(_short, args), *(f"{name}={_short(value)}" for name, value in kwargs.items())]
    return f"({_cut(', '.join(arguments), 500)})"


def _short(value: Any) -> str:
    return _cut(repr(value), 100)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _distance(seconds: float) -> str:
    """From now to a time, in words."""
    if abs(seconds) < 0.5:
        return "now"
    return f"in {_duration(seconds)}" if seconds > 0 else f"{_duration(-seconds)} ago"


def _duration(seconds: float) -> str:
    return f"{round(seconds, 1):g} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
