"""The functions that run the statements of `sql`, in the same order.

Nothing else writes to the queue's tables, apart from rows that are inserted through the models; so this is
the only place where a status changes. Functions on the path of a worker take a cursor, Django's or psycopg's,
and leave transactions to their caller; those that people's decisions and pages come through take the alias of
a database. No policy lives here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from django.db import IntegrityError, connections, transaction

from . import sql
from .conf import config
from .lifecycle import Event, Status, Verdict

LARGEST_ID = 2**63 - 1


class Cursor(Protocol):
    """What the statements need of a cursor."""

    def execute(self, query: Any, params: Any = ...) -> Any: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    @property
    def rowcount(self) -> int: ...


class Claim(NamedTuple):
    """The right to run one attempt of a job, and all that running it needs."""

    id: int
    token: UUID | None  # None only for claims of clients that use bare SQL
    attempts: int
    max_attempts: int
    job_name: str
    queue_name: str
    payload: str  # JSON text: whoever runs the job decodes it, since anyone may have written it
    crashes: int = 0
    rerun_if_lost: bool = True
    interruptions: int = 0
    claimed_at: float = 0.0  # seconds of the database's epoch clock
    unknown_since: float | None = None
    context: str | None = None  # JSON text, out of the metadata

    def __str__(self) -> str:
        """How each line of the log begins that is about a claimed job."""
        name, queue = map(in_one_line, (self.job_name, self.queue_name))
        return f"job={self.id} name={name} queue={queue} attempt={self.attempts}"

    def __repr__(self) -> str:
        """Without the payload, since what shows errors to people shows variables as well."""
        return f"<Claim {self}>"

    def __sentry_repr__(self) -> str:
        """The same for Sentry, which would send it as a list."""
        return repr(self)


def in_one_line(text: str) -> str:
    """A name that anyone may have written, as it can stand in a log."""
    return text if text.isprintable() else ascii(text)


Reached = dict[tuple[str, int], tuple[float, int]]
"""After which run_at (seconds of the epoch) and id to claim at each level, a (queue, priority).

It is the job that was claimed last, or just before the first one that waits, and not in the future. After a
claim that was fast, only the levels are here from which something was claimed.
"""


class Claimed(NamedTuple):
    claims: list[Claim]
    due_at: list[float]  # since when each has been due, in seconds of the database's epoch clock
    next_due: float | None  # seconds until the next job is due, where fewer than the limit were found
    reached: Reached
    tells_levels: bool = False  # whether `reached` has all levels that there are


Settlement = tuple[Claim, Verdict]


class NewJob(NamedTuple):
    """Everything about a job to be enqueued but its payload."""

    queue_name: str
    job_name: str
    priority: int
    run_at: datetime | None
    delay: timedelta
    max_attempts: int
    rerun_if_lost: bool
    metadata: str = "{}"  # JSON text


@contextmanager
def own_transaction(alias: str, *, lock_patience: timedelta | None = None) -> Iterator[Cursor]:
    """A READ COMMITTED transaction of our own on the project's connection, whatever the project sets.

    No statement waits for a lock for longer than `lock_patience`; one that would raises OperationalError.
    Inside a transaction of the caller (a TestCase, say) it is a savepoint, and what the caller set stands.
    """
    connection = connections[alias]
    outermost = not connection.in_atomic_block and connection.get_autocommit()
    with transaction.atomic(using=alias), connection.cursor() as cursor:
        if outermost:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            cursor.execute(sql.PLANNER)
            if lock_patience is not None:
                milliseconds = int(lock_patience.total_seconds() * 1000)
                cursor.execute(sql.LOCK_PATIENCE, {"milliseconds": milliseconds})
        yield cursor


# ── Enqueueing ────────────────────────────────────────────────────────────────────────────────────────────


def enqueue(new: NewJob, payload: str, using: str) -> tuple[int, datetime, datetime]:
    """Insert a job in the caller's transaction. Returns its id, run_at and created_at."""
    with connections[using].cursor() as cursor:
        cursor.execute(sql.ENQUEUE, new._asdict() | {"payload": payload})
        row: tuple[int, datetime, datetime] = cursor.fetchone()
        return row


def enqueue_many(new: NewJob, payloads: Sequence[str], using: str) -> list[int]:
    """Insert one job for each payload, a line of JSON, with one statement. Returns the ids in their order."""
    with connections[using].cursor() as cursor:
        cursor.execute(sql.ENQUEUE_MANY, new._asdict() | {"payloads": "\n".join(payloads)})
        return sorted(id for (id,) in cursor.fetchall())


class Enqueued(NamedTuple):
    """A job as its enqueuer gets to know it: a new one, or one that was there and has its unique key."""

    unique_key: str | None  # None: it has none, as when it was processing and its key has just been freed
    is_new: bool
    id: int
    queue_name: str
    status: str
    priority: int
    run_at: datetime
    attempts: int
    max_attempts: int
    rerun_if_lost: bool
    created_at: datetime
    payload: str | None = None  # JSON text of a job that was there; None where it is the one that was given


def enqueue_or_keep(cursor: Cursor, new: NewJob, payloads: Mapping[str, str]) -> list[Enqueued]:
    """Insert a job for each key of `payloads` that no job has which waits or runs. Returns the new ones."""
    return _enqueue_unique(cursor, sql.ENQUEUE_OR_KEEP, new, payloads)


def enqueue_or_free(cursor: Cursor, new: NewJob, payloads: Mapping[str, str]) -> list[Enqueued]:
    """The same for each key that no job has which waits. Returns, too, the jobs that have lost theirs."""
    return _enqueue_unique(cursor, sql.ENQUEUE_OR_FREE, new, payloads)


def enqueue_or_replace(
    cursor: Cursor,
    new: NewJob,
    payloads: Mapping[str, str],
    *,
    debounce: timedelta | None,
    max_wait: timedelta | None,
) -> list[Enqueued]:
    """The same, and give the payloads to the jobs that wait, which are returned as well."""
    limits = {"debounce": debounce, "max_wait": max_wait}
    return _enqueue_unique(cursor, sql.ENQUEUE_OR_REPLACE, new, payloads, limits)


def _enqueue_unique(
    cursor: Cursor,
    statement: str,
    new: NewJob,
    payloads: Mapping[str, str],
    limits: Mapping[str, timedelta | None] | None = None,
) -> list[Enqueued]:
    given = {"keys": list(payloads), "payloads": list(payloads.values())}
    cursor.execute(statement, {**new._asdict(), **given, **(limits or {})})
    return [Enqueued(*row) for row in cursor.fetchall()]


def live(cursor: Cursor, job_name: str, keys: Sequence[str]) -> list[Enqueued]:
    """The jobs with these unique keys that wait or run."""
    cursor.execute(sql.LIVE, {"job_name": job_name, "keys": list(keys)})
    return [Enqueued(*row) for row in cursor.fetchall()]


def recent(
    cursor: Cursor, job_name: str, keys: Sequence[str], *, period: timedelta, but: Sequence[int] = ()
) -> list[Enqueued]:
    """Of each of these unique keys the latest job that was created within `period`. See `sql.RECENT`."""
    given = {"job_name": job_name, "keys": list(keys), "period": period, "but": list(but)}
    cursor.execute(sql.RECENT, given)
    return [Enqueued(*row) for row in cursor.fetchall()]


def isolation(cursor: Cursor) -> str:
    """The isolation level of the transaction, such as "read committed"."""
    cursor.execute(sql.ISOLATION, {})
    return str(cursor.fetchone()[0])


# ── Schedules ─────────────────────────────────────────────────────────────────────────────────────────────


class Declared(NamedTuple):
    """A schedule as code declares it."""

    name: str
    job_name: str
    payload: str  # JSON text
    cron: str
    seconds: float | None  # of the interval, where there is no cron text
    timezone: str
    missed: str
    overlap: bool


class Undeclared(NamedTuple):
    """A schedule that is not in the table as code declares it."""

    name: str
    is_taken: bool  # by one that people have made
    keeps_time: bool  # only other things have changed
    now: datetime


class DueSchedule(NamedTuple):
    """A row of the table, which anyone may have written."""

    name: str
    job_name: str
    payload: str | None  # None if it is too large
    cron: str
    seconds: float | None
    timezone: str
    missed: str
    overlap: bool
    last_tick: datetime | None
    next_tick_at: datetime | None


class Due(NamedTuple):
    """What `due_schedules` has found. `wait` is in how many seconds another one is due, if there is any."""

    now: datetime
    wait: float | None
    schedules: list[DueSchedule]


def declare_lock(cursor: Cursor) -> bool:
    """Become the only host that declares, until the end of the transaction. False when another one is."""
    cursor.execute(sql.DECLARE_LOCK, {})
    return bool(cursor.fetchone()[0])


def undeclared(cursor: Cursor, schedules: Sequence[Declared]) -> list[Undeclared]:
    """Those of the schedules that are not in the table as given."""
    columns = {
        "names": [schedule.name for schedule in schedules],
        "job_names": [schedule.job_name for schedule in schedules],
        "payloads": [schedule.payload for schedule in schedules],
        "crons": [schedule.cron for schedule in schedules],
        "seconds": [schedule.seconds for schedule in schedules],
        "timezones": [schedule.timezone for schedule in schedules],
        "missed": [schedule.missed for schedule in schedules],
        "overlaps": [schedule.overlap for schedule in schedules],
    }
    cursor.execute(sql.UNDECLARED, columns)
    return [Undeclared(*row) for row in cursor.fetchall()]


def declare(cursor: Cursor, schedule: Declared, *, next_tick_at: datetime | None, keeps_time: bool) -> bool:
    """Write a schedule down, with its next tick unless it keeps that. False when somebody has locked it."""
    plan = {"next_tick_at": next_tick_at, "keeps_time": keeps_time}
    cursor.execute(sql.DECLARE, schedule._asdict() | plan)
    return cursor.fetchone() is not None


def due_schedules(
    cursor: Cursor,
    *,
    job_names: Collection[str],
    declared: Collection[str],
    avoided: Collection[str],
    limit: int,
) -> Due:
    """Lock schedules that are due, of those whose ticks this host may take; see `sql.DUE_SCHEDULES`."""
    cursor.execute(
        sql.DUE_SCHEDULES,
        {
            "job_names": list(job_names),
            "declared": list(declared),
            "avoided": list(avoided),
            "largest": config().MAX_PAYLOAD_BYTES,
            "limit": limit,
        },
    )
    rows = cursor.fetchall()
    now, wait, *_ = rows[0]
    return Due(now, wait, [DueSchedule(*row) for _, _, *row in rows if row[0] is not None])


def plan(cursor: Cursor, name: str, next_tick_at: datetime | None) -> None:
    """Put down the next tick of a schedule that is locked."""
    cursor.execute(sql.PLAN, {"name": name, "next_tick_at": next_tick_at})


def tick(
    cursor: Cursor,
    name: str,
    ticks: Sequence[datetime],
    *,
    next_tick_at: datetime | None,
    new: NewJob,
    unique_key: str | None,
) -> int | None:
    """Enqueue a job for each tick of a schedule, in their order, and move the schedule on.

    Returns how many were enqueued: fewer than there are ticks where jobs must not overlap. None, and nothing
    is done, when one of the ticks was taken before.
    """
    cursor.execute(
        sql.TICK,
        new._asdict()
        | {
            "name": name,
            "first_tick": ticks[0],
            "last_tick": ticks[-1],
            "next_tick_at": next_tick_at,
            "ticks": [tick.isoformat() for tick in ticks],
            "unique_key": unique_key,
        },
    )
    row = cursor.fetchone()
    return None if row is None else int(row[0])


def run_now(name: str, *, new: NewJob, unique_key: str | None, using: str) -> int | None:
    """Enqueue a job of a schedule. Returns its id; None when one waits or runs, and they must not overlap."""
    with connections[using].cursor() as cursor:
        cursor.execute(sql.RUN_NOW, new._asdict() | {"name": name, "unique_key": unique_key})
        row = cursor.fetchone()
        return None if row is None else int(row[0])


def enable(name: str, *, enabled: bool, next_tick_at: datetime | None, changed_by: str, using: str) -> bool:
    """Enable or disable a schedule. False if it was so before."""
    with connections[using].cursor() as cursor:
        cursor.execute(
            sql.ENABLE,
            {"name": name, "enabled": enabled, "next_tick_at": next_tick_at, "changed_by": changed_by},
        )
        return cursor.fetchone() is not None


def announce_schedules(using: str) -> None:
    """Have worker hosts look at the schedules, when the transaction is committed."""
    with connections[using].cursor() as cursor:
        cursor.execute(sql.ANNOUNCE_SCHEDULES, {})


# ── Claiming ──────────────────────────────────────────────────────────────────────────────────────────────


def claim(
    cursor: Cursor,
    *,
    token: UUID,
    worker_id: UUID,
    limit: int,
    queues: Sequence[str] | None = None,
    after: str = "",
    reached: Reached | None = None,
) -> Claimed:
    """Take up to `limit` due jobs, in order. See `sql.CLAIM` for what `queues` and `after` mean.

    With `reached`, only jobs beyond that, at these levels.
    """
    cursor.execute(
        sql.CLAIM,
        {
            "token": token,
            "worker_id": worker_id,
            "limit": limit,
            **_where_to_claim(queues, after, reached),
        },
    )
    claims, due_at = [], []
    next_due = None
    new_reached = dict(reached or {})
    tells_levels = False
    for *facts, priority, run_at, due, levels in cursor.fetchall():
        tells_levels |= levels is not None
        for queue, level, first_run_at, first_id in levels or ():
            new_reached[queue, level] = float(first_run_at), first_id - 1
        if facts[0] is None:
            next_due = due
        else:
            claim = _claim_of(token, *facts)
            claims.append(claim)
            due_at.append(run_at)
            new_reached[claim.queue_name, priority] = run_at, claim.id
    return Claimed(claims, due_at, next_due, new_reached, tells_levels)


def _where_to_claim(
    queues: Sequence[str] | None = None, after: str = "", reached: Reached | None = None
) -> dict[str, Any]:
    return {
        "queues": None if queues is None else list(dict.fromkeys(queues)),
        "after": after,
        "reached_queues": reached and [queue for queue, _ in reached],
        "reached_priorities": reached and [priority for _, priority in reached],
        "reached_times": reached and [run_at for run_at, _ in reached.values()],
        "reached_ids": reached and [id for _, id in reached.values()],
    }


def claim_this(
    cursor: Cursor, id: int, *, token: UUID, worker_id: UUID, regardless: bool = False
) -> Claim | None:
    """Take one job, if it is queued, due, and its queue not paused; the latter two `regardless`, if so.

    None when it is not to be had.
    """
    parameters = {"id": id, "token": token, "worker_id": worker_id, "regardless": regardless}
    cursor.execute(sql.CLAIM_THIS, parameters)
    facts = cursor.fetchone()
    return None if facts is None else _claim_of(token, *facts)


def _claim_of(token: UUID, *facts: Any) -> Claim:
    """A claim out of a row of CLAIM or CLAIM_THIS."""
    id, attempts, most, name, queue, payload, crashes, rerun, interruptions, at, since, context = facts
    interrupted = 0 if interruptions is None else int(_number(interruptions) or 0)
    unknown_since = None if since is None else _number(since)
    return Claim(
        id,
        token,
        attempts,
        most,
        name,
        queue,
        payload,
        crashes,
        rerun,
        interrupted,
        at,
        unknown_since,
        context,
    )


def _number(text: str) -> float | None:
    """A number out of metadata, which anyone may have written; None where it is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def claimed_by(cursor: Cursor, token: UUID) -> list[tuple[int, int]]:
    """The (id, attempts) of the jobs that a claim statement took whose answer was never received."""
    cursor.execute(sql.CLAIMED_BY, {"token": token})
    return cursor.fetchall()


# ── Holding and settling ──────────────────────────────────────────────────────────────────────────────────


def renew(cursor: Cursor, claims: Collection[Claim]) -> dict[int, bool]:
    """Vouch for claims. Returns the ids that still hold, each with whether a stop was asked for."""
    cursor.execute(sql.RENEW, _guards(claims))
    return dict(cursor.fetchall())


def progress(cursor: Cursor, notes: Sequence[tuple[Claim, str]]) -> set[int]:
    """Merge notes, each a JSON text, into the metadata of claimed jobs. Returns the ids that changed."""
    guards = _guards([claim for claim, _ in notes])
    cursor.execute(sql.PROGRESS, guards | {"notes": [note for _, note in notes]})
    return {id for (id,) in cursor.fetchall()}


def held(cursor: Cursor, claims: Collection[Claim]) -> tuple[set[int], set[int]]:
    """The ids among `claims` whose claim still holds, and of those that their holder has completed."""
    cursor.execute(sql.HELD, _guards(claims))
    rows = cursor.fetchall()
    return {id for id, completed in rows if not completed}, {id for id, completed in rows if completed}


def settle(cursor: Cursor, settlements: Sequence[Settlement]) -> set[int]:
    """Write verdicts under the guard of their claims. Returns the ids that changed.

    An id that is missing from the answer is either locked by somebody just now or no longer ours; `held`
    tells which. The caller must look.
    """
    plain: list[Settlement] = []
    other: list[Settlement] = []
    for settlement in settlements:
        claim, verdict = settlement
        is_plain = verdict.event is Event.COMPLETE and not verdict.note and claim.unknown_since is None
        (plain if is_plain or _deletes(verdict) else other).append(settlement)
    settled: set[int] = set()
    if plain:
        guards = _guards([claim for claim, _ in plain])
        if config().deletes_completed:
            cursor.execute(sql.COMPLETE_AND_DELETE, guards)
        else:
            cursor.execute(sql.COMPLETE, guards | {"results": [verdict.result for _, verdict in plain]})
        settled.update(id for (id,) in cursor.fetchall())
    if other:
        cursor.execute(sql.SETTLE, _settlement_parameters(other))
        settled.update(id for (id,) in cursor.fetchall())
    return settled


def complete_own(cursor: Cursor, claim: Claim, verdict: Verdict) -> bool:
    """Complete a job in the transaction of its own effects. False when the claim was lost."""
    statement = sql.COMPLETE_OWN_AND_DELETE if _deletes(verdict) else sql.COMPLETE_OWN
    guard = {"id": claim.id, "token": claim.token, "attempts": claim.attempts}
    cursor.execute(statement, guard | {"result": verdict.result, "note": json.dumps(verdict.note)})
    return cursor.fetchone() is not None


def _deletes(verdict: Verdict) -> bool:
    return verdict.event is Event.COMPLETE and config().deletes_completed


def _guards(claims: Collection[Claim]) -> dict[str, Any]:
    return {
        "ids": _array(claim.id for claim in claims),
        "tokens": _array(map(_token, claims)),
        "attempts": _array(claim.attempts for claim in claims),
    }


def _token(claim: Claim) -> str:
    return "NULL" if claim.token is None else claim.token.hex


def _array(values: Iterable[object]) -> str:
    """Numbers and UUIDs as an array literal: one type of parameter, and one conversion, for all of them."""
    return "{" + ",".join(map(str, values)) + "}"


def _settlement_parameters(settlements: Sequence[Settlement]) -> dict[str, Any]:
    verdicts = [verdict for _, verdict in settlements]
    errors = [verdict.error for verdict in verdicts]
    return _guards([claim for claim, _ in settlements]) | {
        "statuses": [verdict.status.value for verdict in verdicts],
        "delays": [None if verdict.delay is None else float(verdict.delay) for verdict in verdicts],
        "refunds": [int(verdict.refunded) for verdict in verdicts],
        "crashes": [int(verdict.crashed) for verdict in verdicts],
        "results": [verdict.result for verdict in verdicts],
        "notes": [json.dumps(verdict.note) for verdict in verdicts],
        "last_errors": [None if error is None else str(error) for error in errors],
        "fingerprints": [error.fingerprint or None if error else None for error in errors],
        "errors": [
            None
            if error is None
            else json.dumps(
                {"exception": error.exception, "message": error.message, "traceback": error.traceback}
            )
            for error in errors
        ],
    }


# ── Sweeping ──────────────────────────────────────────────────────────────────────────────────────────────


def sweep_lock(cursor: Cursor) -> bool:
    """Become the only sweeper until the end of the transaction. False when another one is at work."""
    cursor.execute(sql.SWEEP_LOCK, {})
    return bool(cursor.fetchone()[0])


def leases(cursor: Cursor) -> tuple[timedelta | None, timedelta]:
    """The longest lease among live worker hosts, if there are any; and the server's uptime."""
    cursor.execute(sql.LEASES, {})
    longest, uptime = cursor.fetchone()
    return longest, uptime


def lost(cursor: Cursor, *, lease: timedelta, timeout: timedelta, limit: int) -> list[Claim]:
    """Claims whose holders have been silent for longer than `lease` (`timeout` without a token), locked."""
    cursor.execute(sql.LOST, {"lease": lease, "timeout": timeout, "limit": limit})
    return [
        Claim(id, token, attempts, most, name, queue, "", crashes, rerun)
        for id, token, attempts, most, name, queue, crashes, rerun in cursor.fetchall()
    ]


# ── What people decide ────────────────────────────────────────────────────────────────────────────────────


def cancel(ids: Iterable[int], using: str | None = None) -> set[int]:
    """Cancel queued jobs. Returns the ids that changed; the others are not queued, or just being claimed."""
    return _change(sql.CANCEL, ids, using)


def bring_forward(ids: Iterable[int], using: str | None = None) -> set[int]:
    """Make queued jobs due now that are due later. Returns the ids that changed."""
    return _change(sql.BRING_FORWARD, ids, using)


def request_stop(ids: Iterable[int], using: str | None = None) -> set[int]:
    """Ask the workers that run these jobs to stop them. Returns the ids that are being run by one."""
    return _change(sql.REQUEST_STOP, ids, using)


def retry(
    ids: Iterable[int],
    using: str | None = None,
    *,
    delay: timedelta = timedelta(0),
    spread: timedelta = timedelta(0),
    queue_name: str | None = None,
) -> set[int]:
    """Queue failed and cancelled jobs again, with fresh attempts. Returns the ids that changed.

    They are due after `delay`, each `spread` after the one before, and in the queue `queue_name` if it is
    given. A job whose unique key is taken by one that waits or runs is left; of several, the first takes the
    key.
    """
    ids = sorted(ids)
    how = {"delay": delay, "spread": spread, "queue_name": queue_name}
    try:
        with transaction.atomic(using=using or config().DATABASE):
            return _change(sql.RETRY, ids, using, how)
    except IntegrityError as error:  # somebody has taken a key at this very moment
        if getattr(getattr(error.__cause__, "diag", None), "constraint_name", None) != "uq_jobs_unique_key":
            raise
        if len(ids) == 1:
            return set()
        half = len(ids) // 2
        halves = (ids[:half], ids[half:])
        first, second = (
            retry(some, using, delay=delay, spread=spread, queue_name=queue_name) for some in halves
        )
        return first | second


def edit(cursor: Cursor, id: int, *, payload: str, unique_key: str | None) -> bool:
    """Give a failed or cancelled job other arguments, before it is retried in the same transaction.

    `payload` is JSON text. False if the job is neither.
    """
    cursor.execute(sql.EDIT, {"id": id, "payload": payload, "unique_key": unique_key})
    return cursor.fetchone() is not None


def duplicate(cursor: Cursor, id: int, *, by: str) -> int | None:
    """Enqueue a copy of a job, due now. Returns its id.

    None where the job is gone, or one with its unique key waits or runs.
    """
    cursor.execute(sql.DUPLICATE, {"id": id, "by": by})
    row = cursor.fetchone()
    return None if row is None else int(row[0])


def discard(ids: Iterable[int], using: str | None = None) -> set[int]:
    """Make dead letters cancelled. Returns the ids that changed."""
    return _change(sql.DISCARD, ids, using)


def _change(
    statement: str, ids: Iterable[int], using: str | None, how: Mapping[str, Any] | None = None
) -> set[int]:
    with connections[using or config().DATABASE].cursor() as cursor:
        cursor.execute(statement, {"ids": list(ids), **(how or {})})
        return {id for (id,) in cursor.fetchall()}


class Seen(NamedTuple):
    """A job as it was before somebody decided about it."""

    id: int
    job_name: str
    status: str
    attempts: int
    max_attempts: int
    queue_name: str
    locked_by: UUID | None
    updated_at: datetime


def seen(cursor: Cursor, ids: Collection[int]) -> list[Seen]:
    """The jobs with these ids that there are."""
    cursor.execute(sql.SEEN, {"ids": list(ids)})
    return [Seen(*row) for row in cursor.fetchall()]


def hold(cursor: Cursor, ids: Collection[int]) -> list[Seen]:
    """The same, locked until the transaction ends; without those that somebody else has locked."""
    cursor.execute(sql.HOLD, {"ids": list(ids)})
    return [Seen(*row) for row in cursor.fetchall()]


# ── Acts on all jobs that a filter finds ──────────────────────────────────────────────────────────────────


class Position(NamedTuple):
    """A place in the order in which `look` goes through jobs."""

    priority: int  # zero, unless they are queued
    at: datetime  # when it came to its status; of queued ones, when it is due
    id: int


class Found(NamedTuple):
    """A job that a filter was held against."""

    id: int
    matches: bool
    priority: int
    at: datetime

    @property
    def position(self) -> Position:
        return Position(self.priority, self.at, self.id)


def look(
    cursor: Cursor, status: Status, criteria: Mapping[str, Any], *, after: Position, limit: int
) -> list[Found]:
    """Hold a filter against the next `limit` jobs of a status; see `sql.LOOK`. Fewer come back at the end."""
    place = {"after_priority": after.priority, "after": after.at, "after_id": after.id, "limit": limit}
    statements = sql.LOOK_AMONG if criteria["ids"] else sql.LOOK
    cursor.execute(statements[status], {**criteria, **place})
    return [Found(*row) for row in cursor.fetchall()]


def count(cursor: Cursor, status: Status, criteria: Mapping[str, Any], limit: int | None) -> tuple[int, int]:
    """How many jobs match among the latest `limit` of a status, or all; and how many were looked at."""
    statements = sql.COUNT_AMONG if criteria["ids"] else sql.COUNT
    cursor.execute(statements[status], {**criteria, "limit": limit})
    matching, looked_at = cursor.fetchone()
    return matching, looked_at


class Group(NamedTuple):
    """Jobs of one name with one fingerprint of their error."""

    job_name: str
    fingerprint: str  # empty: they have none
    jobs: int
    first_at: datetime
    last_at: datetime
    example: int  # the id of one of them
    error: str | None  # of that one
    groups: int  # how many groups there are
    total: int  # how many jobs are in all of them

    @property
    def number(self) -> str:
        """How many jobs it has, for people."""
        return f"{self.jobs:,}"


def groups(
    cursor: Cursor, status: Status, criteria: Mapping[str, Any], *, limit: int, most: int
) -> list[Group]:
    """The largest groups among the latest `limit` jobs of a status, as far as they match."""
    statements = sql.GROUPS_AMONG if criteria["ids"] else sql.GROUPS
    cursor.execute(statements[status], {**criteria, "limit": limit, "most": most})
    return [Group(*row) for row in cursor.fetchall()]


def edge(cursor: Cursor, limit: int) -> datetime | None:
    """When the dead letter came that has `limit` later ones; None where there are not so many."""
    cursor.execute(sql.EDGE, {"limit": limit})
    row = cursor.fetchone()
    return None if row is None else row[0]


def dead_names(cursor: Cursor, limit: int) -> tuple[list[str], list[str]]:
    """The names of jobs, and those of exceptions, among the latest `limit` dead letters."""
    cursor.execute(sql.DEAD_NAMES, {"limit": limit})
    job_names, exceptions = cursor.fetchone()
    return job_names or [], exceptions or []


# ── Queues ────────────────────────────────────────────────────────────────────────────────────────────────


class Pause(NamedTuple):
    """Since when a queue has been paused, by whom and why."""

    since: datetime
    by: str
    reason: str


def pause(cursor: Cursor, name: str, *, by: str, reason: str) -> bool:
    """Let workers claim nothing from a queue any more. False if it was paused before."""
    cursor.execute(sql.PAUSE, {"name": name, "by": by, "reason": reason})
    return cursor.fetchone() is not None


def resume(cursor: Cursor, name: str) -> Pause | None:
    """Let workers claim from a queue again. Returns how it was paused; None if it was not."""
    cursor.execute(sql.RESUME, {"name": name})
    row = cursor.fetchone()
    return None if row is None else Pause(*row)


# ── Pruning ───────────────────────────────────────────────────────────────────────────────────────────────


def prune(cursor: Cursor, status: Status, *, age: timedelta, limit: int) -> int:
    """Delete up to `limit` jobs that finished with `status` longer than `age` ago. Returns how many."""
    cursor.execute(sql.PRUNE[status], {"age": age, "limit": limit})
    return cursor.rowcount


def prunable(cursor: Cursor, status: Status, *, age: timedelta) -> int:
    """How many jobs `prune` would find."""
    cursor.execute(sql.PRUNABLE[status], {"age": age})
    return int(cursor.fetchone()[0])


def prune_operations(cursor: Cursor, *, age: timedelta, limit: int) -> int:
    """Delete up to `limit` operations that were finished longer than `age` ago. Returns how many."""
    cursor.execute(sql.PRUNE_OPERATIONS, {"age": age, "limit": limit})
    return cursor.rowcount


def prunable_operations(cursor: Cursor, *, age: timedelta) -> int:
    """How many operations `prune_operations` would find."""
    cursor.execute(sql.PRUNABLE_OPERATIONS, {"age": age})
    return int(cursor.fetchone()[0])


# ── Worker hosts ──────────────────────────────────────────────────────────────────────────────────────────


class Host(NamedTuple):
    """What a worker host tells about itself."""

    id: UUID
    hostname: str
    pid: int
    queues: Sequence[str] | None
    processes: int
    threads: int
    async_slots: int
    lease: timedelta
    version: str


def announce_worker(
    cursor: Cursor, host: Host, *, state: str, running: int, executors: Sequence[Mapping[str, Any]] = ()
) -> str | None:
    """Say that a host is alive, what it is about, how many jobs it runs, and in which processes.

    Returns who has asked it to stop, if somebody has. Nothing happens while somebody has locked its row.
    """
    queues = None if host.queues is None else json.dumps(list(host.queues))
    now = {"state": state, "running": running, "executors": json.dumps(list(executors))}
    cursor.execute(sql.ANNOUNCE_WORKER, host._asdict() | {"queues": queues} | now)
    is_asked, by = cursor.fetchone() or (False, "")
    return str(by) or "somebody" if is_asked else None


def ask_worker_to_stop(cursor: Cursor, id: UUID, *, by: str) -> bool:
    """Ask a host to stop, as TERM would. False if it was asked before, or is not to be had just now."""
    cursor.execute(sql.ASK_WORKER_TO_STOP, {"id": id, "by": by})
    return cursor.fetchone() is not None


def forget_worker(cursor: Cursor, id: UUID) -> None:
    """Delete the row of a host that ends."""
    cursor.execute(sql.FORGET_WORKER, {"id": id})


def prune_workers(cursor: Cursor) -> int:
    """Delete the rows of hosts that ended without a word, a day later. Returns how many."""
    cursor.execute(sql.PRUNE_WORKERS, {})
    return cursor.rowcount


def end_sessions(cursor: Cursor, names: Sequence[str]) -> int:
    """End the database sessions of killed executors, by their application names. Returns how many."""
    cursor.execute(sql.END_SESSIONS, {"names": list(names)})
    return int(cursor.fetchone()[0])


# ── Looking ───────────────────────────────────────────────────────────────────────────────────────────────


class QueueStats(NamedTuple):
    """What there is in one queue. "Lately" is within the period of `Queues`; times are in seconds."""

    queue_name: str
    queued: int
    due: int
    oldest_due_age: float | None
    processing: int
    failed: int
    completed_lately: int
    failed_lately: int
    pickup_median: float | None  # from being due to being claimed, of the jobs that completed lately
    pickup_p95: float | None
    has_clients: bool  # something runs or completed lately which no worker host had claimed
    paused: bool
    paused_for: float | None
    paused_by: str
    paused_reason: str  # at most 300 characters
    at_least: list[str]  # the names of the figures that would be larger if they were counted to the end

    def shown(self, figure: str) -> str:
        """A figure as people read it: "10,000+" where it was not counted to the end."""
        return in_figures(getattr(self, figure), more=figure in self.at_least)


def in_figures(count: int, *, more: bool) -> str:
    return f"{count:,}{'+' if more else ''}"


class Queues(NamedTuple):
    """Queues by name, and how far was looked back at what finished: less far where it was a lot."""

    period: float  # seconds
    queues: list[QueueStats]


class Worker(NamedTuple):
    """A worker host as it last told of itself; times are in seconds."""

    id: UUID
    hostname: str
    pid: int
    queues: list[str] | None  # None: all
    state: str
    running: int
    slots: int
    up_for: float
    silent_for: float
    is_alive: bool  # heard of within its lease

    @property
    def name(self) -> str:
        return f"{in_one_line(self.hostname)}:{self.pid}"

    @property
    def serves(self) -> str:
        return "all queues" if self.queues is None else ", ".join(map(in_one_line, self.queues))


MOST_COUNTED = 10_000  # of one kind, in figures for people


def queue_stats(cursor: Cursor, window: timedelta, most: int = MOST_COUNTED) -> Queues:
    """One entry for each queue that is paused or has jobs that wait, run, failed, or completed in `window`.

    Nothing is counted much further than `most`; see `sql.QUEUE_STATS`.
    """
    cursor.execute(sql.QUEUE_STATS, {"window": window, "most": most})
    rows = cursor.fetchall()
    period = rows[0][-1] if rows else window.total_seconds()
    return Queues(period, [QueueStats(*row[:-1]) for row in rows])


def enqueued(alias: str) -> int | None:
    """How many ids have been drawn for jobs so far, also in vain; None where our role may not know."""
    with connections[alias].cursor() as cursor:
        cursor.execute(sql.ENQUEUED, {})
        count: int | None = cursor.fetchone()[0]
        return count


def workers(cursor: Cursor) -> list[Worker]:
    """The worker hosts, those that ended without a word included until they are forgotten."""
    cursor.execute(sql.WORKERS, {})
    return [
        Worker(id, hostname, pid, _names(queues), *rest)
        for id, hostname, pid, queues, *rest in cursor.fetchall()
    ]


def _names(queues: Any) -> list[str] | None:
    """The queues that a host says it serves, as JSON text or decoded; None for all."""
    if isinstance(queues, str):
        queues = json.loads(queues)
    return [str(name) for name in queues] if isinstance(queues, list) else None


class Running(NamedTuple):
    """One of the jobs that a host has run for longest; or a client with statements of its own."""

    worker_id: UUID | None
    of_worker: int  # how many it runs
    id: int
    job_name: str
    queue_name: str
    attempts: int
    max_attempts: int
    running_for: float | None  # seconds; None for a job of such a client


def running(cursor: Cursor, *, each: int, most: int = MOST_COUNTED) -> list[Running]:
    """The `each` jobs of each host that have run for longest, out of `most` jobs that run."""
    cursor.execute(sql.RUNNING, {"each": each, "most": most})
    return [Running(*row) for row in cursor.fetchall()]


def unswept(cursor: Cursor, *, lease: timedelta, timeout: timedelta, most: int = MOST_COUNTED) -> int:
    """How many jobs `lost` would find, counted to `most`."""
    cursor.execute(sql.UNSWEPT, {"lease": lease, "timeout": timeout, "most": most})
    return int(cursor.fetchone()[0])


class Span(NamedTuple):
    """A span of time, and how many jobs finished in it; `at_least` is as in QueueStats."""

    start: datetime
    completed: int
    failed: int
    at_least: list[str]

    def shown(self, figure: str) -> str:
        return in_figures(getattr(self, figure), more=figure in self.at_least)


def history(cursor: Cursor, *, width: timedelta, spans: int, most: int = MOST_COUNTED) -> list[Span]:
    """What finished in each of the last spans of time, which are `width` long; the last one goes on."""
    cursor.execute(sql.HISTORY, {"width": width, "spans": spans, "most": most + 1})
    return [
        Span(
            start,
            min(completed, most),
            min(failed, most),
            [name for name, count in (("completed", completed), ("failed", failed)) if count > most],
        )
        for start, completed, failed in cursor.fetchall()
    ]


def oldest(cursor: Cursor, status: Status) -> float | None:
    """How many seconds ago the oldest job of a finished status finished, if there is one."""
    cursor.execute(sql.OLDEST[status], {})
    age: float | None = cursor.fetchone()[0]
    return age


class LateSchedule(NamedTuple):
    name: str
    declared: bool
    late_for: float  # seconds


def late_schedules(cursor: Cursor, age: timedelta, most: int = 100) -> list[LateSchedule]:
    """Schedules that are enabled, and whose next tick was due longer than `age` ago."""
    cursor.execute(sql.LATE_SCHEDULES, {"age": age, "most": most})
    return [LateSchedule(*row) for row in cursor.fetchall()]


def now(alias: str) -> datetime:
    """What time it is, by the database's clock."""
    with connections[alias].cursor() as cursor:
        cursor.execute(sql.NOW, {})
        instant: datetime = cursor.fetchone()[0]
        return instant


@contextmanager
def looking(alias: str, patience: timedelta) -> Iterator[None]:
    """A transaction of our own for reading a page, in which no statement takes longer than `patience`.

    One that would is cancelled, and raises OperationalError. Inside a transaction of the caller there is no
    limit, since it would not end with us.
    """
    outermost = not connections[alias].in_atomic_block
    with own_transaction(alias) as cursor:
        if outermost:
            cursor.execute(sql.PATIENCE, {"milliseconds": int(patience.total_seconds() * 1000)})
        yield


def estimate(alias: str) -> int:
    """Roughly how many jobs there are, at no cost; zero when nothing is known."""
    with connections[alias].cursor() as cursor:
        cursor.execute(sql.ESTIMATE, {})
        row = cursor.fetchone()
        return max(row[0], 0) if row else 0


def queue_names(alias: str, limit: int) -> list[str]:
    """Names of queues in which jobs wait, came lately, or failed, in order."""
    with connections[alias].cursor() as cursor:
        cursor.execute(sql.QUEUE_NAMES, {"limit": limit})
        return [name for (name,) in cursor.fetchall()]


class Text(NamedTuple):
    """A text of a job as a page can bear it."""

    size: int  # in bytes, of all of it
    shown: str
    cut: bool


def texts(id: int, alias: str, *, most: int, most_errors: int, pretty: int) -> dict[str, Text]:
    """The payload, result, metadata, errors and last error of a job, by name; without those it lacks."""
    with connections[alias].cursor() as cursor:
        cursor.execute(sql.TEXTS, {"id": id, "most": most, "most_errors": most_errors, "pretty": pretty})
        return {name: Text(*rest) for name, *rest in cursor.fetchall()}


class Related(NamedTuple):
    """Another job that has to do with one."""

    id: int
    status: str
    created_at: datetime


def with_key(alias: str, *, id: int, job_name: str, unique_key: str, most: int) -> list[Related]:
    """The latest jobs that have the unique key of a job, without the job itself."""
    given: dict[str, Any] = {"id": id, "job_name": job_name, "unique_key": unique_key, "most": most}
    with connections[alias].cursor() as cursor:
        cursor.execute(sql.WITH_KEY, given)
        return [Related(*row) for row in cursor.fetchall()]


def of_schedule(
    alias: str, *, id: int, job_name: str, schedule: str, window: int, most: int
) -> list[Related]:
    """The jobs of a schedule next to one of them, at most `most` before and after it, the latest first.

    They are looked for among so many ids to each side.
    """
    nearby = {"first": max(id - window, -LARGEST_ID), "last": min(id + window, LARGEST_ID)}
    given: dict[str, Any] = {"id": id, "job_name": job_name, "schedule": schedule, "most": most, **nearby}
    with connections[alias].cursor() as cursor:
        cursor.execute(sql.OF_SCHEDULE, given)
        return [Related(*row) for row in cursor.fetchall()]


class Catalog(NamedTuple):
    """What the database knows of the table of jobs."""

    exists: bool
    statuses: list[str]  # in their order
    triggers: list[str]  # those that fire
    indexes: list[str]  # those that can be used
    storage: list[str] | None  # name=value


def catalog(alias: str) -> Catalog:
    """What the catalog says about the table of jobs, which may be missing."""
    with connections[alias].cursor() as cursor:
        cursor.execute(sql.CATALOG, {})
        return Catalog(*cursor.fetchone())


class Connections(NamedTuple):
    """How many sessions may be open, by each limit that there is, and what worker hosts may take of them."""

    server: int
    role: int | None
    database: int | None
    open: int  # on the server, by anyone
    hosts: int  # that are alive
    needed: int  # by these


def connections_of(cursor: Cursor) -> Connections:
    """The limits of sessions for this role and database, and what the hosts that are alive may take."""
    cursor.execute(sql.CONNECTIONS, {})
    server, role, database, open, hosts, needed = cursor.fetchone()
    return Connections(server, role, database, open, hosts, int(needed))


class Vacuum(NamedTuple):
    """What vacuum has done for the table of jobs, as far as the server has taken note."""

    live: int
    dead: int
    ago: float | None  # seconds; None: never
    is_automatic: bool


def vacuum(cursor: Cursor) -> Vacuum:
    cursor.execute(sql.VACUUM, {})
    return Vacuum(*cursor.fetchone())


class Snapshot(NamedTuple):
    """Whoever keeps vacuum from removing dead rows."""

    kind: str  # session, prepared transaction, replication slot
    name: str  # pid, gid, or the slot's name
    about: str
    held_for: float | None  # seconds; None where that may not be seen
    transactions: int  # that have begun since


def oldest_snapshot(cursor: Cursor) -> Snapshot | None:
    """Whoever has kept vacuum from removing dead rows for longest, our own session apart."""
    cursor.execute(sql.OLDEST_SNAPSHOT, {})
    row = cursor.fetchone()
    return None if row is None else Snapshot(*row)


class Size(NamedTuple):
    """What the table of jobs, or one of its indexes, takes on disk, and roughly how much of it is needed."""

    name: str
    is_table: bool
    bytes: int
    needed: int


def sizes(cursor: Cursor) -> list[Size]:
    """The table and its indexes, without those of which the planner knows nothing."""
    cursor.execute(sql.SIZES, {})
    return [Size(*row) for row in cursor.fetchall()]


class ClaimCost(NamedTuple):
    pages: int
    milliseconds: float


def claim_cost(alias: str) -> ClaimCost:
    """What claiming one job costs. It is done and taken back, so that nobody notices."""
    nobody = UUID(int=0)
    parameters = {"token": nobody, "worker_id": nobody, "limit": 1} | _where_to_claim()
    with own_transaction(alias) as cursor:
        cursor.execute(sql.EXPLAIN_CLAIM, parameters)
        (plan,) = cursor.fetchone()[0]
        transaction.set_rollback(True, using=alias)
    top = plan["Plan"]
    return ClaimCost(top["Shared Hit Blocks"] + top["Shared Read Blocks"], plan["Execution Time"])


def place(cursor: Cursor) -> tuple[str, float]:
    """What tells this database from any other."""
    cursor.execute(sql.PLACE, {})
    name, started_at = cursor.fetchone()
    return name, started_at


class CallForm(NamedTuple):
    """Jobs of one name that pass their arguments in the same way."""

    job_name: str
    is_call: bool  # False when the payload cannot be read as a call
    args: int  # positional arguments
    keywords: list[str]
    jobs: int  # among those that were looked at
    latest: int  # the id of one
    more: bool  # whether there may be jobs, of any name, that were not looked at


def live_calls(cursor: Cursor, limit: int) -> list[CallForm]:
    """The calls of jobs that run or wait: in each queue and priority, of the first and last `limit` jobs."""
    cursor.execute(sql.LIVE_CALLS, {"limit": limit})
    return [CallForm(*row) for row in cursor.fetchall()]


def dead_calls(cursor: Cursor, limit: int) -> list[CallForm]:
    """The calls of the latest dead letters, at most twice `limit`."""
    cursor.execute(sql.DEAD_CALLS, {"limit": limit})
    return [CallForm(*row) for row in cursor.fetchall()]


# ── In tests ──────────────────────────────────────────────────────────────────────────────────────────────


def pass_time(cursor: Cursor, *, queue: str | None, most: timedelta) -> timedelta:
    """Let time pass until the next job is due, of this queue if one is given; at most so much.

    All that waits comes nearer by as much. Returns how much time has passed.
    """
    cursor.execute(sql.PASS_TIME, {"queue": queue, "most": most.total_seconds()})
    return min(timedelta(seconds=cursor.fetchone()[0]), most)


# ── Notifications ─────────────────────────────────────────────────────────────────────────────────────────


def probe(cursor: Cursor, channel: str) -> None:
    """Notify a channel, to see whether our own listener hears it."""
    cursor.execute(sql.PROBE, {"channel": channel})
