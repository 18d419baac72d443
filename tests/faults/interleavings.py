"""Plays the statements of several actors in every order, on a real database, as Postgres's isolation tester.

Each actor is a thread with a connection of its own and a script: statements of `store`, and where it commits.
A statement that waits for a lock is left waiting while the others go on, and finishes when it can. What must
come of an order is foretold by `foretell`, from what each statement does to a row and three rules: it sees
what has been committed, it passes over what somebody else has locked (some wait instead, and look again), and
what it did takes effect with the commit.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import psycopg
from django.db import Error, connections

from django_pgjobs import maintenance, store
from django_pgjobs.lifecycle import FINISHED, Event, Failed, JobError, Policy, Status, Verdict, decide
from django_pgjobs.models import BackgroundJob
from django_pgjobs.store import Claim
from tests.factories import claim_of, make_job
from tests.sessions import session

COMMIT = "commit"
WITH_A_CLAIM = {"holder", "stale"}  # the actors who have one from before; that of "stale" has been lost
DEADLINE = 60.0  # seconds; only something that hangs takes so long

LEASE = timedelta(hours=1)
LONG_AGO = -2 * LEASE


class Row(NamedTuple):
    """A job as far as it matters here. `holder` is the name of the actor whose token it has."""

    status: Status | None = Status.QUEUED  # None: deleted
    holder: str | None = None
    attempts: int = 0
    max_attempts: int = 3
    is_expired: bool = False  # locked_at is long ago
    is_old: bool = False  # updated_at is long ago, so that it may be pruned
    stop_requested: bool = False


GONE = Row(None)


# ── What each statement does to a row, and how it is sent ─────────────────────────────────────────────────


@dataclass(frozen=True)
class Statement:
    """`effect` returns the row as it is afterwards, or None when there is nothing to do."""

    effect: Callable[[Row, str], Row | None]
    send: Callable[[Actor], bool]  # returns whether it was told to have done something
    waits: bool = False
    looks_at: frozenset[Status | None] = frozenset()  # statuses of rows that it locks although it leaves them


def _claim(row: Row, actor: str) -> Row | None:
    if row.status is not Status.QUEUED:
        return None
    return Row(Status.PROCESSING, actor, row.attempts + 1, row.max_attempts)


def _held(change: Callable[[Row], Row]) -> Callable[[Row, str], Row | None]:
    def effect(row: Row, actor: str) -> Row | None:
        return change(row) if row.status is Status.PROCESSING and row.holder == actor else None

    return effect


def _ended(row: Row, status: Status) -> Row:
    return row._replace(status=status, is_expired=False, is_old=False, stop_requested=False)


def _queued_again(row: Row) -> Row:
    status = Status.CANCELLED if row.stop_requested else Status.QUEUED
    return _ended(row, status)._replace(holder=None)


def _failed(row: Row) -> Row:
    return _ended(row, Status.FAILED) if row.attempts >= row.max_attempts else _queued_again(row)


def _swept(row: Row, actor: str) -> Row | None:
    return _failed(row) if row.status is Status.PROCESSING and row.is_expired else None


def _decided(sources: Iterable[Status], change: Callable[[Row], Row]) -> Callable[[Row, str], Row | None]:
    sources = frozenset(sources)
    return lambda row, actor: change(row) if row.status in sources else None


def _send_claim(actor: Actor) -> bool:
    claims = store.claim(actor.cursor(), token=actor.token, worker_id=uuid.uuid4(), limit=1).claims
    if claims:
        actor.claim = claims[0]
    return bool(claims)


def _send_renew(actor: Actor) -> bool:
    return bool(actor.claim and store.renew(actor.cursor(), [actor.claim]))


def _settling(verdict: Verdict) -> Callable[[Actor], bool]:
    return lambda actor: bool(actor.claim and store.settle(actor.cursor(), [(actor.claim, verdict)]))


def _send_fail(actor: Actor) -> bool:
    if actor.claim is None:
        return False
    failed = Failed(JobError("builtins.ValueError", "boom"), retry_in=0.0)
    return bool(store.settle(actor.cursor(), [(actor.claim, decide(failed, actor.claim, Policy()))]))


def _send_complete_own(actor: Actor) -> bool:
    if actor.claim is None:
        return False
    return store.complete_own(actor.cursor(), actor.claim, Verdict(Event.COMPLETE))


def _send_sweep(actor: Actor) -> bool:
    return maintenance.sweep(actor.cursor()).total > 0


def _send_prune(actor: Actor) -> bool:
    return sum(store.prune(actor.cursor(), status, age=LEASE, limit=10) for status in FINISHED) > 0


def _send_expire(actor: Actor) -> bool:
    cursor = actor.cursor()
    cursor.execute(
        "UPDATE background_jobs SET locked_at = statement_timestamp() - %s"
        " WHERE id = ANY (%s) AND status = 'processing'",
        [2 * LEASE, actor.jobs],
    )
    return bool(cursor.rowcount)


def _send_delete(actor: Actor) -> bool:
    cursor = actor.cursor()
    cursor.execute("DELETE FROM background_jobs WHERE id = ANY (%s)", [actor.jobs])
    return bool(cursor.rowcount)


def _deciding(decide: Callable[[list[int]], set[int]]) -> Callable[[Actor], bool]:
    return lambda actor: bool(decide(actor.jobs))


STATEMENTS = {
    "claim": Statement(_claim, _send_claim),
    "renew": Statement(_held(lambda row: row._replace(is_expired=False)), _send_renew),
    "complete": Statement(
        _held(lambda row: _ended(row, Status.COMPLETED)), _settling(Verdict(Event.COMPLETE))
    ),
    "complete own": Statement(
        _held(lambda row: _ended(row, Status.COMPLETED)),
        _send_complete_own,
        waits=True,
    ),
    "fail": Statement(_held(_failed), _send_fail),
    "release": Statement(
        _held(lambda row: _queued_again(row)._replace(attempts=row.attempts - 1)),
        _settling(Verdict(Event.RELEASE)),
    ),
    "stop": Statement(_held(lambda row: _ended(row, Status.CANCELLED)), _settling(Verdict(Event.STOP))),
    "sweep": Statement(_swept, _send_sweep),
    "prune": Statement(
        lambda row, actor: GONE if row.status in FINISHED and row.is_old else None, _send_prune
    ),
    "cancel": Statement(
        _decided({Status.QUEUED}, lambda row: _ended(row, Status.CANCELLED)),
        _deciding(lambda ids: store.cancel(ids)),
    ),
    "request stop": Statement(
        _decided({Status.PROCESSING}, lambda row: row._replace(stop_requested=True)),
        _deciding(lambda ids: store.request_stop(ids)),
        waits=True,
        looks_at=frozenset({Status.QUEUED}),  # it may be being claimed
    ),
    "retry": Statement(
        _decided({Status.FAILED, Status.CANCELLED}, lambda row: Row(max_attempts=row.max_attempts)),
        _deciding(lambda ids: store.retry(ids)),
    ),
    "discard": Statement(
        _decided({Status.FAILED}, lambda row: _ended(row, Status.CANCELLED)),
        _deciding(lambda ids: store.discard(ids)),
    ),
    "expire": Statement(
        _decided({Status.PROCESSING}, lambda row: row._replace(is_expired=True)), _send_expire, waits=True
    ),
    "delete": Statement(
        _decided(Status, lambda row: GONE),
        _send_delete,
        waits=True,
    ),
}

Order = Sequence[str]  # whose turn it is, step after step
Scripts = dict[str, Sequence[str]]


def orders(scripts: Scripts) -> Iterator[tuple[str, ...]]:
    """Every order of the actors' steps that keeps each script's own order.

    Of orders that differ only in the names of actors who do the same, one is enough.
    """
    left = {name: len(script) for name, script in scripts.items()}

    def may_go(name: str) -> bool:
        """Whether those who do the same and are listed before have all begun."""
        if name in WITH_A_CLAIM or left[name] < len(scripts[name]):
            return bool(left[name])
        before = list(scripts)[: list(scripts).index(name)]
        alike = [other for other in before if scripts[other] == scripts[name] and other not in WITH_A_CLAIM]
        return all(left[other] < len(scripts[other]) for other in alike)

    def rest(so_far: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if not any(left.values()):
            yield so_far
        for name in [name for name in left if may_go(name)]:
            left[name] -= 1
            yield from rest((*so_far, name))
            left[name] += 1

    return rest(())


# ── What must come of an order ────────────────────────────────────────────────────────────────────────────


@dataclass
class Played:
    """What came of an order: the row, what each actor was told at each statement, and who had to wait."""

    row: Row
    answers: dict[str, list[bool | str]]
    waited: set[str] = field(default_factory=set)

    def told(self, actor: str) -> bool:
        """Whether the actor's last statement did something, as far as it knows."""
        return self.answers[actor][-1] is True


def foretell(start: Row, scripts: Scripts, order: Order, *, deletes_completed: bool = False) -> Played:
    """What must come of an order."""
    return _Foretold(start, scripts, deletes_completed).play(order)


class _Foretold:
    def __init__(self, start: Row, scripts: Scripts, deletes_completed: bool) -> None:
        self.committed = start
        self.changed: dict[str, Row] = {}  # by whoever has it locked
        self.sweeper: str | None = None  # only one at a time
        self.waiting: list[str] = []
        self.left = {name: list(script) for name, script in scripts.items()}
        self.turns = dict.fromkeys(scripts, 0)  # that came while the actor had to wait
        self.deletes_completed = deletes_completed
        self.played = Played(start, {name: [] for name in scripts})

    def play(self, order: Order) -> Played:
        for name in order:
            if name in self.waiting:
                self.turns[name] += 1
            else:
                self._step(name)
        self.played.row = self.committed
        return self.played

    def _step(self, name: str) -> None:
        step = self.left[name].pop(0)
        if step == COMMIT:
            self._commit(name)
        else:
            self._run(name, step)

    def _run(self, name: str, step: str) -> None:
        statement = STATEMENTS[step]
        if step == "sweep":
            if self.sweeper not in (None, name):
                self.played.answers[name].append(False)
                return
            self.sweeper = name
        new = statement.effect(self.changed.get(name, self.committed), name)
        if new is not None and new.status is Status.COMPLETED and self.deletes_completed:
            new = GONE
        row = self.changed.get(name, self.committed)
        locks = new is not None or row.status in statement.looks_at
        is_locked = bool(self.changed) and name not in self.changed
        if locks and is_locked and statement.waits:
            self.waiting.append(name)
            self.left[name].insert(0, step)
            self.played.waited.add(name)
            return
        if locks and not is_locked:
            self.changed[name] = row if new is None else new
        self.played.answers[name].append(new is not None and not is_locked)

    def _commit(self, name: str) -> None:
        if self.sweeper == name:
            self.sweeper = None
        if name not in self.changed:
            return
        self.committed = self.changed.pop(name)
        while self.waiting and not self.changed:
            self._go_on(self.waiting.pop(0))

    def _go_on(self, name: str) -> None:
        """Let someone who has waited look again. He keeps the lock then, whatever he finds."""
        if self.committed != GONE:
            self.changed[name] = self.committed
        for _ in range(1 + self.turns[name]):
            self._step(name)
        self.turns[name] = 0


# ── Playing it ────────────────────────────────────────────────────────────────────────────────────────────


class Actor:
    """A thread with a connection, which does what it is given in turn."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.jobs: list[int] = []
        self.token = uuid.uuid4()
        self.claim: Claim | None = None
        self.collected: list[Claim] = []  # by a sweeper that reads before it writes
        self._transaction: AbstractContextManager[Any] | None = None
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"actor-{name}", daemon=True)
        self._thread.start()
        self.pid = self.do(self._connect).result(DEADLINE)

    def do(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((work, future))
        return future

    def step(self, name: str) -> Future[Any]:
        return self.do(self._commit if name == COMMIT else lambda: self._run(STATEMENTS[name]))

    def cursor(self) -> Any:
        return connections["default"].cursor()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(DEADLINE)

    def _serve(self) -> None:
        while (task := self._work.get()) is not None:
            work, future = task
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
        connections["default"].close()

    def _connect(self) -> int:
        connections["default"].ensure_connection()
        pid: int = connections["default"].connection.info.backend_pid
        return pid

    def _run(self, statement: Statement) -> bool | str:
        if self._transaction is None:
            self._transaction = store.own_transaction("default")
            self._transaction.__enter__()
        try:
            return statement.send(self)
        except Error as error:
            return type(error).__name__

    def _commit(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.__exit__(None, None, None)  # which rolls back when a statement has failed


class Stage:
    """Actors who play scripts, one order after the other."""

    def __init__(self, monitor: psycopg.Connection[Any]) -> None:
        self._monitor = monitor
        self._actors: dict[str, Actor] = {}

    def actor(self, name: str) -> Actor:
        if name not in self._actors:
            self._actors[name] = Actor(name)
        return self._actors[name]

    def close(self) -> None:
        for actor in self._actors.values():
            actor.close()

    def play(self, start: Row, scripts: Scripts, order: Order) -> Played:
        """Play one order on a job of its own, and say what came of it."""
        job = self._set_up(start, scripts)
        answers, waited = self.run(scripts, order)
        return Played(self._look(job, start, scripts), answers, waited)

    def run(self, scripts: Scripts, order: Order) -> tuple[dict[str, list[bool | str]], set[str]]:
        """Send the statements. Returns what each actor was told, and who had to wait."""
        left = {name: iter(script) for name, script in scripts.items()}
        sent: dict[str, list[tuple[str, Future[Any]]]] = {name: [] for name in scripts}
        waited: set[str] = set()
        for name in order:
            step = next(left[name])
            sent[name].append((step, self.actor(name).step(step)))
            waited |= self._settle_down(sent)
        answers = {
            name: [future.result(DEADLINE) for step, future in steps if step != COMMIT]
            for name, steps in sent.items()
        }
        for steps in sent.values():
            steps[-1][1].result(DEADLINE)
        return answers, waited

    def _settle_down(self, sent: dict[str, list[tuple[str, Future[Any]]]]) -> set[str]:
        """Wait until whoever is not done waits for a lock. Returns their names."""
        deadline = time.monotonic() + DEADLINE
        while True:
            unfinished = {
                name: [future for _, future in steps if not future.done()] for name, steps in sent.items()
            }
            busy = {name for name, futures in unfinished.items() if futures}
            if not busy:
                return busy
            done, _ = wait([future for futures in unfinished.values() for future in futures], timeout=0.01)
            if not done and busy <= self._blocked(busy):
                return busy
            assert time.monotonic() < deadline, "A statement neither ends nor waits for a lock."

    def _blocked(self, names: Iterable[str]) -> set[str]:
        pids = {self.actor(name).pid: name for name in names}
        found = self._monitor.execute(
            "SELECT pid FROM unnest(%s::integer[]) AS pid WHERE cardinality(pg_blocking_pids(pid)) > 0",
            [list(pids)],
        )
        return {pids[pid] for (pid,) in found.fetchall()}

    def _set_up(self, start: Row, scripts: Scripts) -> BackgroundJob:
        with connections["default"].cursor() as cursor:
            cursor.execute("DELETE FROM background_jobs")
        holds = start.holder is not None
        job = make_job(
            start.status or Status.QUEUED,
            attempts=start.attempts,
            max_attempts=start.max_attempts,
            locked_by=uuid.uuid4() if holds else None,
            locked_at=LONG_AGO if start.is_expired else timedelta() if holds else None,
            updated_at=LONG_AGO if start.is_old else timedelta(),
            stop_requested_at=timedelta() if start.stop_requested else None,
        )
        for name in scripts:
            actor = self.actor(name)
            actor.jobs, actor.token, actor.claim = [job.pk], uuid.uuid4(), None
            if name == start.holder:
                actor.claim = claim_of(job)
            elif name == "stale":
                actor.claim = claim_of(job)._replace(token=actor.token)
        return job

    def _look(self, job: BackgroundJob, start: Row, scripts: Scripts) -> Row:
        with connections["default"].cursor() as cursor:
            cursor.execute(
                "SELECT status::text, locked_by, attempts, max_attempts,"
                " locked_at < statement_timestamp() - %(age)s::interval AND status = 'processing',"
                " updated_at < statement_timestamp() - %(age)s::interval, stop_requested_at IS NOT NULL"
                " FROM background_jobs",
                {"age": LEASE},
            )
            found = cursor.fetchone()
        if found is None:
            return GONE
        names = {self.actor(name).token: name for name in scripts} | {job.locked_by: start.holder, None: None}
        status, token, attempts, max_attempts, is_expired, is_old, stop_requested = found
        return Row(
            Status(status), names[token], attempts, max_attempts, bool(is_expired), is_old, stop_requested
        )


@contextmanager
def stage() -> Iterator[Stage]:
    with session() as monitor:
        opened = Stage(monitor)
        try:
            yield opened
        finally:
            opened.close()
