"""Run jobs in this thread, on its own connection: for tests, and in immediate mode.

They go through the same claim, execution, decision and settling as in a worker. What a worker has and this
has not: processes to lose, and timeouts, for which somebody else has to watch.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import psycopg
from django.db import InterfaceError, OperationalError, connections

from . import execution, jobs, store
from .abort import ThreadAbort
from .conf import config
from .lifecycle import Completed, Outcome, Unstarted, Verdict, decide
from .store import Claim

logger = logging.getLogger(__name__)

WORKER = uuid.UUID(int=0)  # the worker_id of jobs that were run here
LIMIT = 1000  # runs that one call may lead to; what takes more is taken for a loop
NAMED = 20  # runs whose jobs are named then


class Ran(NamedTuple):
    """What came of running one job."""

    verdict: Verdict
    raised: BaseException | None  # what came out of the function


# ── Immediate mode ────────────────────────────────────────────────────────────────────────────────────────


class _Line(threading.local):
    """The ids of jobs that were enqueued here in immediate mode while another one ran; None outside."""

    ids: deque[int] | None = None


_line = _Line()


def run_now(ids: Iterable[int]) -> None:
    """Run those of these jobs that are queued and due, and the jobs that they enqueue.

    Inside of a job it only notes them down: like in a worker, they start when that one has ended. What a job
    raises is recorded, and not raised here. Raises RuntimeError after `LIMIT` runs, naming the jobs.
    """
    with line() as waiting:
        waiting.extend(ids)


@contextmanager
def line() -> Iterator[deque[int]]:
    """Jobs that are enqueued here in immediate mode run at the end of the outermost such block."""
    if _line.ids is not None:
        yield _line.ids
        return
    _line.ids = deque()
    try:
        yield _line.ids
        _run_all(_line.ids)
    finally:
        _line.ids = None


def _run_all(waiting: deque[int]) -> None:
    names: deque[str] = deque(maxlen=NAMED)
    runs = 0
    while waiting:
        alias = config().DATABASE
        claim = claim_this(waiting.popleft(), alias)
        if claim is None:
            continue
        if runs == LIMIT:
            put_back(claim, alias)
            raise RuntimeError(
                f"Immediate mode has run {LIMIT} jobs that enqueued each other, and more wait."
                f" {latest(names)}"
            )
        names.append(claim.job_name)
        execute(claim, alias)
        runs += 1


def latest(names: Iterable[str]) -> str:
    """A sentence about the jobs that were run last before a limit was reached."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    listed = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
    return f"The last {sum(counts.values())} were {listed}: do they enqueue each other, or come back?"


# ── One job ───────────────────────────────────────────────────────────────────────────────────────────────


def claim_next(alias: str, queue: str | None = None) -> Claim | None:
    """Claim what a worker would claim next. None if nothing is due."""
    with store.own_transaction(alias) as cursor:
        queues = None if queue is None else [queue]
        claimed = store.claim(cursor, token=uuid.uuid4(), worker_id=WORKER, limit=1, queues=queues)
    return claimed.claims[0] if claimed.claims else None


def claim_this(id: int, alias: str, *, regardless: bool = False) -> Claim | None:
    """Claim one job. None unless it is queued and, but for `regardless`, due, and its queue not paused."""
    with store.own_transaction(alias) as cursor:
        return store.claim_this(cursor, id, token=uuid.uuid4(), worker_id=WORKER, regardless=regardless)


def put_back(claim: Claim, alias: str) -> None:
    """Release a job that is not run after all."""
    _settle(claim, Unstarted(), alias)


def execute(claim: Claim, alias: str) -> Ran:
    """Run a claimed job and write down what became of it."""
    began = time.perf_counter()
    outcome, raised = _run(claim, connections[alias])
    duration = time.perf_counter() - began
    verdict = _settle(claim, outcome, alias)
    execution.announce(claim, verdict.event, duration, verdict.error)
    return Ran(verdict, raised)


def _settle(claim: Claim, outcome: Outcome, alias: str) -> Verdict:
    verdict = decide(outcome, claim, jobs.policy_of(claim.job_name))
    if not isinstance(outcome, Completed) or not outcome.recorded:
        try:
            _write_down(claim, verdict, alias)
        except (OperationalError, InterfaceError):
            if is_in_transaction(connections[alias]):
                raise  # it is gone with all that the caller did
            connections[alias].close()  # the body has lost it
            _write_down(claim, verdict, alias)
    return verdict


def _write_down(claim: Claim, verdict: Verdict, alias: str) -> None:
    with store.own_transaction(alias) as cursor:
        store.settle(cursor, [(claim, verdict)])


class _Body(ThreadAbort):
    """Entered around the body of a job. Remembers what it raised."""

    def __init__(self, at_the_end: Callable[[], None]) -> None:
        super().__init__()
        self.raised: BaseException | None = None
        self._at_the_end = at_the_end  # of a body that returns; may raise in its name

    def __exit__(self, *exc_info: Any) -> None:
        self.raised = exc_info[1]
        try:
            if self.raised is None:
                self._at_the_end()
        except BaseException as error:
            self.raised = error
            raise
        finally:
            super().__exit__(*exc_info)


def _run(claim: Claim, connection: Any) -> tuple[Outcome, BaseException | None]:
    def report(note: str) -> None:
        if not is_broken(connection):
            with store.own_transaction(connection.alias) as cursor:
                store.progress(cursor, [(claim, note)])

    if not is_in_transaction(connection):
        body = _Body(lambda: None)
        return execution.run(claim, body, report), body.raised
    # A TestCase, or the caller's own transaction. There, too, each statement stands or falls by itself.
    callbacks = _Callbacks(connection)
    function = jobs.find(claim.job_name)
    is_atomic = function is not None and function.atomic
    body = _Body((lambda: None) if is_atomic else callbacks.run)
    autocommit = _Autocommit(connection)
    savepoint = connection.savepoint()
    with connection.execute_wrapper(autocommit):
        outcome = execution.run(claim, body, report)
    if autocommit.is_broken():
        connection.needs_rollback = False
        connection.savepoint_rollback(savepoint)
        callbacks.drop()
        return outcome, body.raised
    connection.savepoint_commit(savepoint)
    try:
        callbacks.run()  # what is left after an atomic job, or one that has failed
    except Exception:
        logger.exception("%s: a callback of on_commit failed.", claim)
    return outcome, body.raised


# ── In somebody's transaction ─────────────────────────────────────────────────────────────────────────────


def is_in_transaction(connection: Any) -> bool:
    """Whether what is done on a Django connection is part of a transaction of whoever has called."""
    return bool(connection.in_atomic_block or not connection.get_autocommit())


def is_broken(connection: Any) -> bool:
    """Whether nothing but rolling back is possible on a Django connection."""
    info = getattr(connection.connection, "info", None)  # it may be closed
    status = getattr(info, "transaction_status", None)
    return bool(connection.needs_rollback or status == psycopg.pq.TransactionStatus.INERROR)


class _Callbacks:
    """What a body leaves to `transaction.on_commit`. In a TestCase, no commit would ever call it.

    In a transaction that may be committed it is left alone.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.others = len(connection.run_on_commit)
        blocks = connection.atomic_blocks
        self.are_ours = bool(blocks) and all(block._from_testcase for block in blocks)

    def run(self) -> None:
        """Call them, in order, and what they leave in turn. Raises what they do, unless they are robust."""
        while self.are_ours and len(self.connection.run_on_commit) > self.others:
            _, callback, robust = self.connection.run_on_commit.pop(self.others)
            try:
                callback()
            except Exception:
                if not robust:
                    raise
                logger.exception("A callback of on_commit failed: %r", callback)

    def drop(self) -> None:
        if self.are_ours:
            del self.connection.run_on_commit[self.others :]


class _Autocommit:
    """Undoes a statement that fails, and it alone, unless it is in an atomic block of the body's own."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.depth = len(connection.savepoint_ids)
        self.undone = False  # the latest statement; so what Django says of the transaction is not true

    def __call__(self, execute: Callable[..., Any], sql: Any, *args: Any) -> Any:
        if self.undone:
            self.connection.needs_rollback = False
            self.undone = False
        if len(self.connection.savepoint_ids) > self.depth or _is_savepoint(sql):
            return execute(sql, *args)
        # Past Django's cursor, so that these statements are in nobody's count of queries.
        run = self.connection.connection.execute
        run("SAVEPOINT pgjobs_inplace")
        try:
            result = execute(sql, *args)
        except BaseException:
            run("ROLLBACK TO SAVEPOINT pgjobs_inplace")
            self.undone = True
            raise
        run("RELEASE SAVEPOINT pgjobs_inplace")
        return result

    def is_broken(self) -> bool:
        """Whether nothing but undoing all of the body is left: it had a failing block without a savepoint."""
        if self.undone:
            self.connection.needs_rollback = False
        return is_broken(self.connection)


def _is_savepoint(sql: Any) -> bool:
    """Whether a statement begins or ends an atomic block of the body's own."""
    return (
        str(sql)[:50].lstrip().upper().startswith(("SAVEPOINT", "RELEASE SAVEPOINT", "ROLLBACK TO SAVEPOINT"))
    )
