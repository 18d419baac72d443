"""What people decide about jobs and queues: acts on given jobs, on all that a filter finds, and pauses.

Commands and the admin come through here, so that the same is refused, said and logged whoever asks. An act on
all that a filter finds is an operation: a row that holds the filter and how far it has come. It is carried on
in small transactions, by a worker or by whoever has begun it, and may be stopped between any two of them.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Self

import psycopg
from django.apps import apps
from django.db import DatabaseError, OperationalError, models, router, transaction
from django.db.models.functions import Now

from . import store
from .conf import config
from .context import current_job
from .exceptions import InvalidArguments, Snooze
from .jobs import find, job
from .lifecycle import LONGEST_DELAY, Status
from .models import (
    FIRST_DAY,
    LAST_DAY,
    BackgroundJob,
    BackgroundOperation,
    BackgroundQueue,
    BackgroundWorker,
)
from .payload import clean_text
from .redaction import Redacted

logger = logging.getLogger(__name__)

BATCH = 500  # jobs that are changed in one transaction
LOOK = 10_000  # jobs that a filter is held against at once
MOST_COUNTED = 100_000  # jobs among which those that match are counted
PATIENCE = timedelta(seconds=1)  # for a row that somebody has locked
MOST_WAITING = 10_000  # the same of those that wait, which lie all over the table
TURN = 10.0  # seconds after which a worker's slot is given to others
REASON_LIMIT = 1000  # bytes
HIGHEST = 100  # priority


class Person(NamedTuple):
    """Who decides."""

    name: str
    user_key: str = ""  # the primary key of a user of the site, in whose name the history is written

    @classmethod
    def of(cls, user: Any) -> Self:
        return cls(str(user)[:255], str(user.pk))


# ── Acts on given jobs ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How jobs are retried: after a delay, so many a minute, in another queue; as far as these are given."""

    delay: timedelta = timedelta(0)
    per_minute: int | None = None
    queue: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.delay.total_seconds() <= LONGEST_DELAY:
            raise ValueError(f"The delay is {self.delay}; it must be between zero and ten years.")
        if self.per_minute is not None and not 1 <= self.per_minute <= 1_000_000:
            raise ValueError(f"{self.per_minute} jobs a minute must be from 1 to 1,000,000.")
        if self.queue is not None and (not 0 < len(self.queue) <= 255 or "\x00" in self.queue):
            raise ValueError(f"The queue {self.queue!r} must be a text of 1 to 255 characters, without NUL.")

    @property
    def spread(self) -> timedelta:
        """The time from one job to the next."""
        return timedelta(0) if self.per_minute is None else timedelta(minutes=1) / self.per_minute

    def as_json(self) -> dict[str, Any]:
        given: dict[str, Any] = {"delay": self.delay.total_seconds()} if self.delay else {}
        others = {"per_minute": self.per_minute, "queue": self.queue}
        return given | {name: value for name, value in others.items() if value is not None}

    @classmethod
    def of_json(cls, stored: Mapping[str, Any]) -> Self:
        delay = timedelta(seconds=stored.get("delay", 0))
        return cls(delay=delay, per_minute=stored.get("per_minute"), queue=stored.get("queue"))

    def __str__(self) -> str:
        """As it ends the sentence "They are queued again ..."."""
        parts = [f"due in {self.delay}" if self.delay else "due now"]
        if self.per_minute is not None:
            parts.append(f"at most {self.per_minute:,} a minute")
        if self.queue is not None:
            parts.append(f"in the queue {self.queue!r}")
        return ", ".join(parts)


AT_ONCE = Manner()


class Act(NamedTuple):
    """Something that people may do to jobs. URLs and rows go by its name."""

    name: str
    permission: str
    statuses: frozenset[Status]  # in which a job can be changed so
    change: Callable[[Collection[int], str, Manner], set[int]]
    done: str  # as in "3 jobs discarded"
    after: str  # what the history says that they are then
    refused: str  # what a job is that is in no such status
    left: str = "busy"  # why a job in such a status is not changed

    @property
    def is_about_workers(self) -> bool:
        """Whether workers may be writing to these jobs at the same time."""
        return Status.PROCESSING in self.statuses


def _retry(ids: Collection[int], alias: str, manner: Manner) -> set[int]:
    return store.retry(ids, alias, delay=manner.delay, spread=manner.spread, queue_name=manner.queue)


RETRY = Act(
    "retry",
    "retry_job",
    frozenset({Status.FAILED, Status.CANCELLED}),
    _retry,
    "queued again",
    "queued",
    refused="neither failed nor cancelled",
    left="taken",
)
DISCARD = Act(
    "discard",
    "discard_job",
    frozenset({Status.FAILED}),
    lambda ids, alias, _: store.discard(ids, alias),
    "discarded",
    "cancelled",
    refused="not failed",
)
RUN = Act(
    "run",
    "run_job",
    frozenset({Status.QUEUED}),
    lambda ids, alias, _: store.bring_forward(ids, alias),
    "due now",
    "queued, due now",
    refused="not queued",
    left="due",
)
CANCEL = Act(
    "cancel",
    "cancel_job",
    frozenset({Status.QUEUED}),
    lambda ids, alias, _: store.cancel(ids, alias),
    "cancelled",
    "cancelled",
    refused="not queued",
)
STOP = Act(
    "stop",
    "stop_job",
    frozenset({Status.PROCESSING}),
    lambda ids, alias, _: store.request_stop(ids, alias),
    "asked to stop",
    "processing, asked to stop",
    refused="not processing",
)
PURGE = CANCEL._replace(name="purge", permission="purge_queue", refused="no longer queued")
ACTS = {act.name: act for act in (RETRY, DISCARD, PURGE)}  # that operations carry out


@dataclass(slots=True)
class Done:
    """What became of jobs: how many were changed; skipped, by the reason; and refused."""

    changed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    failed: int = 0  # that the database refused to change
    problem: str = ""  # what it said, the last time

    def __iadd__(self, other: Done) -> Self:
        self.changed += other.changed
        self.skipped += other.skipped
        self.failed += other.failed
        self.problem = other.problem or self.problem
        return self

    @property
    def is_all(self) -> bool:
        """Whether something was changed and nothing was left."""
        return bool(self.changed) and not self.skipped and not self.failed

    def told(self, act: Act, refused: str = "") -> str:
        """The same as a sentence. `refused` says what a job is that the act is not for."""
        parts = [f"No job was {act.done}"]
        if self.changed:
            parts = [f"{self.changed:,} job{'' if self.changed == 1 else 's'} {act.done}"]
        refused = refused or act.refused
        for reason, one, several in (
            ("refused", f"it is {refused}", f"they are {refused}"),
            ("missing", "it no longer exists", "they no longer exist"),
            ("taken", "a job with its unique key waits or runs", "jobs with their unique keys wait or run"),
            ("due", "it is due already", "they are due already"),
            ("deaf", "a client runs it that cannot be asked", "clients run them that cannot be asked"),
            ("busy", "somebody else is changing it just now", "somebody else is changing them just now"),
        ):
            if count := self.skipped[reason]:
                was, why = ("was", one) if count == 1 else ("were", several)
                parts.append(f"{count:,} {was} skipped because {why}")
        if self.failed:
            parts.append(f"{self.failed:,} could not be changed: {self.problem.rstrip('.')}")
        return "; ".join(parts) + "."


def perform(
    act: Act,
    ids: Sequence[int],
    by: Person,
    *,
    reason: str = "",
    manner: Manner = AT_ONCE,
    statuses: Collection[Status] | None = None,
    until: datetime = LAST_DAY,
) -> Done:
    """Change jobs, in batches, and write it into the history of each. Returns what became of them.

    With `statuses`, only jobs in one of these are changed; with `until`, those that were in it by then.
    """
    done = Done()
    statuses = act.statuses if statuses is None else statuses
    patience = PATIENCE if act.is_about_workers else None  # the others skip what is locked
    for start in range(0, len(ids), BATCH):
        with store.own_transaction(config().DATABASE, lock_patience=patience) as cursor:
            part = ids[start : start + BATCH]
            done += _change(cursor, act, part, by, reason, manner, statuses, until)
    return done


def _change(
    cursor: store.Cursor,
    act: Act,
    ids: Collection[int],
    by: Person,
    reason: str,
    manner: Manner,
    statuses: Collection[Status],
    until: datetime,
) -> Done:
    """One batch, in the transaction of `cursor`: those jobs that were in one of the statuses at `until`.

    Jobs at rest are locked before, so that what is written into their history is what they were. Those that
    workers write to are not: to wait for them is for the statement that needs it.
    """
    look = store.seen if act.is_about_workers else store.hold
    seen = {job.id: job for job in look(cursor, ids)}
    absent = set(ids).difference(seen)
    busy = len(store.seen(cursor, absent)) if absent and not act.is_about_workers else 0
    left = {id for id, job in seen.items() if job.status in statuses and job.updated_at <= until}
    skipped = Counter(busy=busy, missing=len(absent) - busy, refused=len(seen) - len(left))
    changed, failed, problem = _change_or_halve(act, left, manner)
    history: dict[str, list[models.Model]] = defaultdict(list)
    for id in sorted(changed):
        history[_entry(act, seen[id], manner, reason)].append(_named(seen[id]))
    for id in left - changed - failed:
        is_deaf = seen[id].status == Status.PROCESSING and seen[id].locked_by is None
        skipped["deaf" if is_deaf else act.left] += 1
    _log(by, history)
    return Done(len(changed), +skipped, len(failed), problem)


def _change_or_halve(act: Act, ids: Collection[int], manner: Manner) -> tuple[set[int], set[int], str]:
    """What an act has changed, what the database refused to change, and what it said.

    Where it refuses some of the jobs (a trigger of the project may), the others are changed all the same.
    """
    alias = config().DATABASE
    if not ids:
        return set(), set(), ""
    try:
        with transaction.atomic(using=alias):
            return act.change(ids, alias, manner), set(), ""
    except OperationalError as error:
        if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
            return set(), set(), ""  # somebody has one of them for longer than people wait
        raise  # it is away: that says nothing about the jobs
    except DatabaseError as error:
        if len(ids) == 1:
            return set(), set(ids), clean_text(str(error).partition("\n")[0], REASON_LIMIT)
    ordered = sorted(ids)
    half = len(ordered) // 2
    changed, failed, problem = _change_or_halve(act, ordered[:half], manner)
    more_changed, more_failed, other = _change_or_halve(act, ordered[half:], manner)
    return changed | more_changed, failed | more_failed, other or problem


class Gone(Exception):
    """A job no longer exists."""


def duplicate(id: int, by: Person, *, reason: str = "") -> int | None:
    """Enqueue a copy of a job, due now, whatever has become of the job. Returns the id of the copy.

    None where a job with its unique key waits or runs. Raises Gone where there is no such job.
    """
    reason = clean_text(reason, REASON_LIMIT)
    with store.own_transaction(config().DATABASE) as cursor:
        seen = store.seen(cursor, [id])
        if not seen:
            raise Gone
        copy = store.duplicate(cursor, id, by=by.name)
        if copy is None:
            return None
        (original,) = seen
        made = BackgroundJob(id=copy, job_name=original.job_name)
        before, after = _as_it_was(original), f"the same, and job {copy} is queued"
        origin = _sentences(f"Enqueued as a copy of job {id}", "none", "queued, due now", reason)
        duplicated = _sentences("Duplicated", before, after, reason)
        _log(by, {duplicated: [_named(original)], origin: [made]})
    return copy


class Stale(Exception):
    """A job is not what it was when somebody looked at it."""


class _Undone(Exception):
    pass


def retry_edited(
    id: int,
    args: list[Any],
    kwargs: dict[str, Any],
    by: Person,
    *,
    reason: str = "",
    statuses: Collection[Status],
    seen_at: datetime,
) -> Done:
    """Queue a job again with other arguments, checked as at enqueue. Returns what became of it.

    `seen_at` is the job's `updated_at` when it was looked at. Raises Stale where that has changed since,
    InvalidArguments for arguments that do not fit or are not JSON, and UnknownName where nobody can tell.
    """
    alias = config().DATABASE
    with store.own_transaction(alias) as cursor:
        held = store.hold(cursor, [id])
        if not held or held[0].status not in statuses:
            return _change(cursor, RETRY, [id], by, reason, AT_ONCE, statuses, LAST_DAY)
        if held[0].updated_at != seen_at:
            raise Stale
        row = BackgroundJob.objects.using(alias).only("job_name", "payload", "unique_key").get(pk=id)
        payload = check_arguments(row.job_name, args, kwargs)
        key = _key_of(row, args, kwargs, payload)
        try:
            with transaction.atomic(using=alias):
                store.edit(cursor, id, payload=payload, unique_key=key)
                done = _change(cursor, RETRY, [id], by, reason, AT_ONCE, statuses, LAST_DAY)
                if not done.is_all:
                    raise _Undone
        except _Undone:
            return done  # another job has the key of these arguments
        old, new = Redacted(row.job_name, json.dumps(row.payload)), Redacted(row.job_name, payload)
        before, after = (
            clean_text(json.dumps(each.payload, ensure_ascii=False), REASON_LIMIT) for each in (old, new)
        )
        if old.hidden != new.hidden:
            after += ", with other hidden values"
        _log(by, {_sentences("Arguments changed", before, after, ""): [_named(held[0])]})
    return done


class UnknownName(ValueError):
    """No job function has this name here; the text says so in a sentence."""


def check_arguments(job_name: str, args: list[Any], kwargs: dict[str, Any]) -> str:
    """The payload of a call, as JSON text. Raises InvalidArguments, and UnknownName where nobody can tell."""
    function = find(job_name)
    if function is None:
        raise UnknownName(
            f"No job function is named {job_name!r} here, so nobody can tell whether the arguments fit."
        )
    return function.encode(args, kwargs)


def _key_of(row: BackgroundJob, args: list[Any], kwargs: dict[str, Any], payload: str) -> str | None:
    """The unique key of a job that gets other arguments."""
    function = find(row.job_name)
    if function is None or function.uniqueness is None:
        return row.unique_key  # of a schedule, say
    try:
        return function.unique_key(args, kwargs, payload)
    except Exception as error:
        raise InvalidArguments(f"These arguments have no unique key: {error}") from error


# ── The history ───────────────────────────────────────────────────────────────────────────────────────────


def _entry(act: Act, job: store.Seen, manner: Manner, reason: str) -> str:
    after = f"queued, {manner}" if act.after == Status.QUEUED else act.after
    return _sentences(act.done.capitalize(), _as_it_was(job), after, reason)


def _as_it_was(job: store.Seen) -> str:
    return f"{job.status}, {job.attempts} of {job.max_attempts} attempts, queue {job.queue_name}"


def _sentences(what: str, before: str, after: str, reason: str) -> str:
    text = f"{what}. Before: {before}. After: {after}."
    return f"{text} Reason: {reason}" if reason else text


def _named(job: store.Seen) -> BackgroundJob:
    return BackgroundJob(id=job.id, job_name=job.job_name)


def note_export(by: Person, what: str) -> None:
    """Write down that somebody has taken jobs along. `what` says which and how, as in "as CSV: job 7"."""
    if not by.user_key or not apps.is_installed("django.contrib.admin"):
        return
    from django.contrib.admin.models import CHANGE, LogEntry
    from django.contrib.contenttypes.models import ContentType

    LogEntry.objects.create(
        user_id=by.user_key,
        content_type=ContentType.objects.get_for_model(BackgroundJob),
        object_repr="jobs",
        action_flag=CHANGE,
        change_message=f"Exported {what}.",
    )


def _log(by: Person, history: Mapping[str, Sequence[models.Model]]) -> None:
    """Write sentences into the histories of the objects that they are about, in the name of a user.

    They may live in another database. There they are committed first: what cannot be logged does not happen.
    Where the person is no user of the site, or the project has no admin, there is no history.
    """
    if not by.user_key or not apps.is_installed("django.contrib.admin"):
        return
    from django.contrib.admin.models import CHANGE, LogEntry

    with transaction.atomic(using=router.db_for_write(LogEntry)):
        for sentence, objects in history.items():
            LogEntry.objects.log_actions(by.user_key, objects, CHANGE, sentence)


# ── Filters ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which jobs an act is about: dead letters, cancelled jobs, or the queued jobs of one queue.

    What is not given does not matter.
    """

    status: Status = Status.FAILED
    ids: tuple[int, ...] = ()
    queue: str | None = None
    job: str | None = None  # its registered name
    fingerprint: str | None = None  # empty: those that have none
    exception: str | None = None  # the name of its class, without the module
    text: str | None = None  # somewhere in the last error; or its unique key, or its name
    unique_key: str | None = None
    since: datetime | None = None  # when it failed, or was cancelled
    until: datetime | None = None
    attempts_from: int | None = None
    attempts_to: int | None = None

    def __post_init__(self) -> None:
        for name in ("queue", "job", "fingerprint", "exception", "text", "unique_key"):
            value = getattr(self, name)
            if value is not None and ("\x00" in value or value != value.encode(errors="ignore").decode()):
                raise ValueError(f"{value!r} cannot be looked for: it is no text that Postgres can store.")
        if self.status is Status.QUEUED and (self.queue is None or self.ids):
            raise ValueError("Queued jobs are found by the queue that they wait in.")

    @property
    def is_open(self) -> bool:
        """Whether it finds all jobs of its status."""
        return self == type(self)(status=self.status)

    def criteria(self, until: datetime = LAST_DAY) -> dict[str, Any]:
        """What the statements bind. Nothing after `until` is found."""
        exception = None if self.exception is None else self.exception.rpartition(".")[2]
        return asdict(self) | {
            "ids": list(self.ids),
            "exception": exception,
            "since": self.since or FIRST_DAY,
            "until": min(self.until or LAST_DAY, until),
        }

    def as_json(self) -> dict[str, Any]:
        given = {name: value for name, value in asdict(self).items() if value not in (None, ())}
        return {
            name: value.isoformat() if isinstance(value, datetime) else value for name, value in given.items()
        }

    @classmethod
    def of_json(cls, stored: Mapping[str, Any]) -> Self:
        """A filter out of a row. Raises ValueError or TypeError for what `as_json` would not have written."""
        given = {each.name: stored[each.name] for each in fields(cls) if each.name in stored}
        for name in ("since", "until"):
            if name in given:
                given[name] = datetime.fromisoformat(given[name])
        given["status"] = Status(given.get("status", Status.FAILED))
        given["ids"] = tuple(given.get("ids", ()))
        return cls(**given)

    def __str__(self) -> str:
        """As it follows "all dead letters": "in the queue 'mail', of the job 'shop.jobs.send'"."""
        parts = {
            "with the ids {}": ", ".join(map(str, self.ids[:10])) + (", ..." if self.ids[10:] else ""),
            "in the queue {!r}": self.queue,
            "of the job {!r}": self.job,
            "with the fingerprint {!r}": self.fingerprint,
            "with the exception {!r}": self.exception,
            "with {!r} in their error": self.text,
            "with the unique key {!r}": self.unique_key,
            "since {:%Y-%m-%d %H:%M:%S %Z}": self.since,
            "until {:%Y-%m-%d %H:%M:%S %Z}": self.until,
            "after {} attempts or more": self.attempts_from,
            "after {} attempts or fewer": self.attempts_to,
        }
        return ", ".join(part.format(value) for part, value in parts.items() if value not in (None, ""))

    @property
    def noun(self) -> str:
        return "dead letter" if self.status is Status.FAILED else f"{self.status} job"


class Preview(NamedTuple):
    """How many jobs a filter finds."""

    number: int
    is_exact: bool  # or there are more, among those that were not looked at
    noun: str

    def __str__(self) -> str:
        """Such as "48,211 dead letters"."""
        if not self.is_exact:
            return f"at least {self.number:,} {self.noun}s" if self.number else f"perhaps older {self.noun}s"
        return f"{self.number:,} {self.noun}{'' if self.number == 1 else 's'}"

    @property
    def is_nothing(self) -> bool:
        return self.is_exact and not self.number

    @property
    def expected(self) -> int | None:
        """The number, where it is that of all."""
        return self.number if self.is_exact else None


def preview(filter: Filter, until: datetime = LAST_DAY, *, exactly: bool = False) -> Preview:
    """How many jobs a filter finds: exactly, unless there are more than `MOST_COUNTED` to look at.

    Of those that wait, that is `MOST_WAITING`. With `exactly` all are looked at, however long it takes.
    """
    most = MOST_WAITING if filter.status is Status.QUEUED else MOST_COUNTED
    with store.own_transaction(config().DATABASE) as cursor:
        limit = None if exactly else most
        number, looked_at = store.count(cursor, filter.status, filter.criteria(until), limit)
    return Preview(number, exactly or looked_at < most, filter.noun)


# ── Operations ────────────────────────────────────────────────────────────────────────────────────────────

RUNNING, STOPPED, FINISHED = "running", "stopped", "finished"


def begin(
    act: Act,
    filter: Filter,
    by: Person,
    *,
    reason: str = "",
    manner: Manner = AT_ONCE,
    at: datetime | None = None,
    found: Preview | None = None,
) -> BackgroundOperation:
    """Write down an act on all jobs that a filter finds; with `at`, on those that it found at that time.

    `found` is how many these are, where somebody has counted them. None of them is changed before the
    operation is carried on.
    """
    alias = config().DATABASE
    reason = clean_text(reason, REASON_LIMIT)
    now = store.now(alias)
    begun = min(at or now, now)
    found = found or preview(filter, begun)
    with store.own_transaction(alias):
        operation = BackgroundOperation.objects.using(alias).create(
            created_at=begun,
            act=act.name,
            filter=filter.as_json(),
            manner=manner.as_json(),
            reason=reason,
            asked_by=by.name,
            user_key=by.user_key,
            expected=found.expected,
        )
        if act is PURGE:  # which is in the history of the queue as well; and so the queue in the list of them
            queue, _ = BackgroundQueue.objects.using(alias).get_or_create(name=filter.queue)
            after = f"those are being cancelled ({operation})"
            _log(by, {_sentences("Purged", str(found), after, reason): [queue]})
    operation.refresh_from_db()
    logger.info("operation=%d act=%s by=%r begins", operation.pk, act.name, by.name)
    return operation


def hand_over(operation: BackgroundOperation) -> None:
    """Have a worker carry an operation on, once the transaction is committed."""
    carry_on.using(queue=config().OPERATIONS_QUEUE).enqueue(operation.pk)


# Whoever resumes an operation while its former job is about to end gets a job of its own.
@job(
    name="django_pgjobs.operations.carry_on",
    priority=100,
    max_attempts=20,
    timeout=300,
    unique=True,
    unique_until="started",
)
def carry_on(operation_id: int) -> str:
    """Carry an operation on, some seconds at a time, so that others get their turn. Returns its outcome."""
    end = time.monotonic() + TURN
    for wait in steps(operation_id):
        report_progress(operation_id)
        if wait or time.monotonic() > end:
            raise Snooze(wait)
    operation = _find(operation_id)
    return "It is gone." if operation is None else told(operation)


def report_progress(operation_id: int) -> None:
    operation, running = _find(operation_id), current_job()
    if operation is not None and running is not None:
        running.set_progress(gone_through(operation), operation.expected)


def steps(operation_id: int) -> Iterator[float]:
    """Carry an operation on, from where it is. Yields after each transaction: in how many seconds to go on.

    Ends when it is finished or stopped, or when somebody else carries it on as well.
    """
    while True:
        operation = _find(operation_id)
        if operation is None or operation.state != RUNNING:
            return
        if wait := _seconds_until(operation.next_at):
            yield wait
            continue
        filter = Filter.of_json(operation.filter)
        position = _position(operation)
        with store.own_transaction(config().DATABASE) as cursor:
            found = store.look(
                cursor, filter.status, filter.criteria(operation.created_at), after=position, limit=LOOK
            )
        manner = Manner.of_json(operation.manner)
        for part in _parts(found, min(manner.per_minute or BATCH, BATCH)):
            is_last = part[-1:] == found[-1:] and len(found) < LOOK
            wait_or_none = _advance(operation_id, position, part, is_last=is_last)
            if wait_or_none is None:
                return
            yield wait_or_none
            if wait_or_none:
                break
            if part:
                position = part[-1].position


def _position(operation: BackgroundOperation) -> store.Position:
    """How far an operation has come."""
    if operation.cursor_at is None:
        is_queued = Filter.of_json(operation.filter).status is Status.QUEUED
        return store.Position(HIGHEST + 1 if is_queued else 0, FIRST_DAY, 0)
    return store.Position(operation.cursor_priority or 0, operation.cursor_at, operation.cursor_id or 0)


def _parts(found: Sequence[store.Found], size: int) -> Iterator[Sequence[store.Found]]:
    """Parts of what was found, with at most `size` jobs that match in each; one part at least."""
    start = matching = 0
    for index, each in enumerate(found):
        matching += each.matches
        if matching == size:
            yield found[start : index + 1]
            start, matching = index + 1, 0
    if start < len(found) or not found:
        yield found[start:]


def _advance(
    operation_id: int, position: store.Position, part: Sequence[store.Found], *, is_last: bool
) -> float | None:
    """Act on the next part of an operation, in one transaction. Returns in how many seconds to go on.

    None, and nothing is done, when it was stopped, or is no longer where it was at `position`.
    """
    alias = config().DATABASE
    with store.own_transaction(alias) as cursor:
        rows = BackgroundOperation.objects.using(alias).select_for_update()
        operation = rows.filter(pk=operation_id, state=RUNNING).first()
        if operation is None:
            return None
        if _position(operation) != position:
            return None
        filter, manner = Filter.of_json(operation.filter), Manner.of_json(operation.manner)
        done = _change(
            cursor,
            ACTS[operation.act],
            [each.id for each in part if each.matches],
            _still_there(Person(operation.asked_by, operation.user_key)),
            f"{operation.reason} ({operation})".strip(),
            manner,
            {filter.status},
            operation.created_at,
        )
        operation.changed += done.changed
        operation.skipped = dict(Counter(operation.skipped) + done.skipped)
        operation.failed += done.failed
        operation.problem = done.problem or operation.problem
        if part:
            operation.cursor_priority, operation.cursor_at, operation.cursor_id = part[-1].position
        pause = manner.spread * done.changed
        operation.next_at = Now() + pause if pause and not is_last else None
        operation.updated_at = Now()
        if is_last:
            operation.state = FINISHED
        operation.save(using=alias)
    if is_last:
        logger.info("operation=%d finished: %s", operation_id, told(operation))
    return 0.0 if is_last else pause.total_seconds()


def _still_there(by: Person) -> Person:
    """A person without what the history would refer to, when that is gone."""
    if by.user_key and apps.is_installed("django.contrib.auth"):
        from django.contrib.auth import get_user_model

        if not get_user_model()._default_manager.filter(pk=by.user_key).exists():
            return Person(by.name)
    return by


def stop(operation: BackgroundOperation, by: Person) -> bool:
    """Let an operation rest where it is. False if it was not running."""
    return _switch(operation, by, RUNNING, STOPPED)


def resume(operation: BackgroundOperation, by: Person) -> bool:
    """Let an operation go on from where it was stopped. False if it was not. Whoever calls carries it on."""
    return _switch(operation, by, STOPPED, RUNNING)


def _switch(operation: BackgroundOperation, by: Person, before: str, after: str) -> bool:
    alias = config().DATABASE
    with store.own_transaction(alias):
        rows = BackgroundOperation.objects.using(alias).filter(pk=operation.pk, state=before)
        if not rows.update(state=after, updated_at=Now()):
            return False
        what = "Stopped" if after == STOPPED else "Resumed"
        _log(by, {_sentences(what, before, after, ""): [operation]})
    logger.info("operation=%d %s by=%r", operation.pk, what.lower(), by.name)
    operation.refresh_from_db()
    return True


def gone_through(operation: BackgroundOperation) -> int:
    """How many of the jobs that match an operation has gone through."""
    skipped: int = sum(operation.skipped.values())
    return operation.changed + operation.failed + skipped


def told(operation: BackgroundOperation) -> str:
    """What an operation has done, as a sentence."""
    act = ACTS[operation.act]
    done = Done(
        operation.changed,
        Counter(operation.skipped),
        operation.failed,
        operation.problem,
    )
    refused = "no longer failed" if Filter.of_json(operation.filter).status is Status.FAILED else ""
    return done.told(act, refused)


def _find(operation_id: int) -> BackgroundOperation | None:
    return BackgroundOperation.objects.using(config().DATABASE).filter(pk=operation_id).first()


def _seconds_until(instant: datetime | None) -> float:
    if instant is None:
        return 0.0
    return max((instant - store.now(config().DATABASE)).total_seconds(), 0.0)


# ── Queues ────────────────────────────────────────────────────────────────────────────────────────────────


def pause_queue(name: str, by: Person, reason: str) -> bool:
    """Let workers claim nothing from a queue any more; what runs goes on. False if it was paused before."""
    reason = clean_text(reason, REASON_LIMIT)
    with store.own_transaction(config().DATABASE) as cursor:
        if not store.pause(cursor, name, by=by.name, reason=reason):
            return False
        _log(by, {_sentences("Paused", "not paused", "paused", reason): [BackgroundQueue(name=name)]})
    logger.info("queue=%r paused by=%r: %s", name, by.name, reason)
    return True


def resume_queue(name: str, by: Person, reason: str = "") -> store.Pause | None:
    """Let workers claim from a queue again. Returns how it was paused; None if it was not."""
    reason = clean_text(reason, REASON_LIMIT)
    with store.own_transaction(config().DATABASE) as cursor:
        pause = store.resume(cursor, name)
        if pause is None:
            return None
        before = f"paused by {pause.by or 'somebody'}"
        _log(by, {_sentences("Resumed", before, "not paused", reason): [BackgroundQueue(name=name)]})
    logger.info("queue=%r resumed by=%r", name, by.name)
    return pause


# ── Workers ───────────────────────────────────────────────────────────────────────────────────────────────


def stop_worker(worker: BackgroundWorker, by: Person, reason: str = "") -> bool:
    """Ask a worker host to stop, as TERM does. False if it was not asked; `why_not_stopped` says why."""
    reason = clean_text(reason, REASON_LIMIT)
    with store.own_transaction(config().DATABASE) as cursor:
        if not store.ask_worker_to_stop(cursor, worker.pk, by=by.name):
            return False
        _log(by, {_sentences("Asked to stop", worker.state, "asked to stop", reason): [worker]})
    logger.warning("worker=%s asked to stop by=%r: %s", store.in_one_line(str(worker)), by.name, reason)
    return True


def why_not_stopped(worker: BackgroundWorker) -> str:
    """Why a worker host could not be asked to stop just now, in a sentence."""
    row = BackgroundWorker.objects.using(config().DATABASE).filter(pk=worker.pk).first()
    if row is None:
        return f"The worker {worker} has ended."
    if row.state != "running":
        return f"The worker {worker} is stopping already."
    if row.stop_requested_at is not None:
        return f"The worker {worker} was asked before, by {row.stop_requested_by or 'somebody'}."
    return f"The worker {worker} is just saying how it is. Ask it again."
