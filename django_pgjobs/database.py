"""The worker host's own connections to the queue's database, and the thread that runs its statements.

The supervisor's loop never blocks on SQL: it hands a piece of work to the thread, goes on, and is woken when
the answer is there. Job code never uses these connections.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Self, TypeVar

import psycopg
from django.db import connections
from psycopg import errors

from . import sql
from .channel import NEVER, clock
from .store import Cursor

logger = logging.getLogger(__name__)

T = TypeVar("T")

# What psycopg says where no server answers; and a server that is going down, has turned read-only, or changed
# a table under a prepared plan.
_AWAY = (
    psycopg.OperationalError
    | psycopg.InterfaceError
    | errors.ReadOnlySqlTransaction
    | errors.FeatureNotSupported
)
# Kinds of the first one that are about the statement, and leave the connection as it was.
_BUSY = errors.QueryCanceled | errors.LockNotAvailable | errors.DeadlockDetected
# What a pooler answers that hands sessions on.
_FORGETFUL = errors.DuplicatePreparedStatement | errors.InvalidSqlStatementName


def connect(alias: str, timeout: float, purpose: str) -> psycopg.Connection[Any]:
    """A psycopg connection of our own, in autocommit mode, outside of any pool. Raises psycopg.Error."""
    wrapper = connections[alias]
    params = wrapper.get_connection_params()
    for ours in ("context", "cursor_factory", "prepare_threshold", "pool", "autocommit"):
        params.pop(ours, None)
    defaults: dict[str, Any] = {
        "application_name": f"django_pgjobs {purpose}",
        "connect_timeout": max(int(timeout), 2),
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
    }
    return psycopg.connect(**(defaults | params), autocommit=True)


def is_pooled(connection: psycopg.Connection[Any]) -> bool:
    """Whether a pooler is in between, by whose word the process of our session is another than the server's.

    So it is with PgBouncer. A pooler that is not found out is noticed by what then does not work.
    """
    (pid,) = connection.execute("SELECT pg_backend_pid()", prepare=False).fetchone() or (None,)
    return bool(pid != connection.info.backend_pid)


def cut(connection: psycopg.Connection[Any]) -> None:
    """Cut a connection that another thread waits for, perhaps for ever. That thread gets an error at once."""
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as sock:
            sock.shutdown(socket.SHUT_RDWR)
    except (OSError, psycopg.Error):
        pass  # it has ended by itself


class _Cursor(psycopg.Cursor[Any]):
    """Tells of each answer, so that many slow ones are not taken for none."""

    def __init__(self, connection: psycopg.Connection[Any], answered: Callable[[], None]) -> None:
        super().__init__(connection)
        self._answered = answered

    def execute(self, *args: Any, **kwargs: Any) -> Self:
        super().execute(*args, **kwargs)
        self._answered()
        return self


class Database:
    """Runs pieces of work, one at a time, each in a transaction, on a thread that owns a connection."""

    def __init__(self, alias: str, lease: timedelta, wake: Callable[[], None]) -> None:
        self.alias = alias
        # Long before a lease is over, a statement that hangs has to make way for one that renews it.
        self.timeout = lease.total_seconds() / 4
        self._wake = wake
        self._prepares = True
        self._connection: psycopg.Connection[Any] | None = None
        self._closing = threading.Lock()  # so that nobody cuts a connection while it is closed
        self._begin = ""
        self._future: Future[Any] | None = None  # of the work at hand
        self._overdue_at = NEVER
        self._work: queue.SimpleQueue[tuple[Callable[[Cursor], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._serve, name="pgjobs-database", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[Cursor], T]) -> Future[T]:
        """Run `work` with a cursor, in a transaction. The future fails with what it raised."""
        future: Future[T] = Future()
        self._future = future
        self._answered()
        self._work.put((work, future))
        return future

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def next_deadline(self) -> float:
        """When `enforce` has to be called."""
        return NEVER if self._future is None or self._future.done() else self._overdue_at

    def enforce(self) -> None:
        """Cut a connection on which nothing is heard: the limits that the server enforces need a server.

        A new connection then has half of the lease left to renew what is held.
        """
        now = clock()
        late = now - self.next_deadline
        if late < 0:
            return
        if late > 1.0:
            self._overdue_at = now + 1.0  # this process was stopped, and the answer may have come meanwhile
            return
        self._answered()
        with self._closing:
            if self._connection is not None:
                logger.warning(
                    "The database has not answered for %g s; trying a new connection.", 2 * self.timeout
                )
                cut(self._connection)

    def _answered(self) -> None:
        """Be patient anew: the server has just answered, or is asked something."""
        self._overdue_at = clock() + 2 * self.timeout

    def close(self) -> None:
        """End the thread, unless the database hangs; then it ends with the process."""
        self._work.put(None)
        self._thread.join(timeout=1.0)

    def _serve(self) -> None:
        while (task := self._work.get()) is not None:
            work, future = task
            try:
                future.set_result(self._in_transaction(work))
            except BaseException as error:
                future.set_exception(error)
            self._wake()
        self._disconnect()

    def _in_transaction(self, work: Callable[[Cursor], T]) -> T:
        connection = self._connected()
        try:
            with _Cursor(connection, self._answered) as cursor:
                cursor.execute(self._begin, prepare=False)  # several statements at once
                result = work(cursor)
                cursor.execute("COMMIT", prepare=False)
                return result
        except Exception as error:
            self._recover(connection, error)
            raise

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None:
            self._connection = connect(self.alias, self.timeout, "worker")
            # Sessions of a pooler may bring what others listen for; nobody would ever take it in.
            self._connection.add_notify_handler(lambda notification: None)
            milliseconds = int(self.timeout * 1000)
            begin = sql.BEGIN if self._connection.info.server_version < 170000 else sql.BEGIN_17
            self._begin = begin.format(statement=milliseconds, lock=milliseconds // 2, idle=4 * milliseconds)
            try:
                if not self._prepares or is_pooled(self._connection):
                    self._connection.prepare_threshold = None
                assume_role(self._connection, self.alias)
            except psycopg.Error:
                self._disconnect()
                raise
        return self._connection

    def _recover(self, connection: psycopg.Connection[Any], error: Exception) -> None:
        """Leave a connection that can be used again, or none."""
        if isinstance(error, _FORGETFUL):
            logger.warning("The server forgets prepared statements (a pooler?); doing without them.")
            self._prepares = False
            self._disconnect()
            return
        if isinstance(error, _AWAY) and not is_busy(error):
            self._disconnect()  # the next attempt deserves a new one; all else is about the statement alone
            return
        try:
            connection.execute("ROLLBACK", prepare=False)
        except psycopg.Error:
            self._disconnect()

    def _disconnect(self) -> None:
        with self._closing:
            if self._connection is not None:
                self._connection.close()
                self._connection = None


class Outages:
    """Whether the database answers: when to ask it again, and what the log has to say of that.

    Times are those of `clock` at which something was sent.
    """

    def __init__(self, lease: float) -> None:
        self.not_before = 0.0  # when it is asked again
        self.total = 0  # failures so far
        self._lease = lease
        self._failures = 0  # in a row
        self._refusing_since = NEVER  # although it was there, it has not done as it was asked
        self._complaint = ""  # of the last one
        self._away_since = 0.0  # from the start, it has yet to answer
        self._answers_since = NEVER  # without a pause in which peers may have missed a renewal

    def failed(self, error: BaseException, sent_at: float) -> bool:
        """Take note of a failure. True once the database has refused us for three leases."""
        self.total += 1
        self._failures += 1
        self._refusing_since = NEVER if is_outage(error) else min(self._refusing_since, sent_at)
        self._away_since = min(self._away_since, sent_at)
        pause = min(0.1 * 2.0 ** min(self._failures, 10), 3.0)
        self.not_before = clock() + pause * random.uniform(0.5, 1.0)
        before, self._complaint = self._complaint, str(error).strip()
        if isinstance(error, errors.UndefinedTable | errors.UndefinedColumn):
            self._complaint = f"If it has not been migrated, run: manage.py migrate. {self._complaint}"
        if self._complaint != before:
            logger.warning("The database does not answer as it should; trying again. %s", self._complaint)
        if not isinstance(error, psycopg.Error):
            logger.error("Unexpected error on the database thread.", exc_info=error)
        return sent_at - self._refusing_since > 3 * self._lease

    def answered(self, sent_at: float) -> bool:
        """Take note of an answer. True if the one before was a failure."""
        now = clock()
        if now - min(self._away_since, sent_at) >= self._lease / 4:
            self._answers_since = now
        self._away_since = NEVER
        self._refusing_since = NEVER
        failures, self._failures = self._failures, 0
        if failures:
            logger.info("The database answers again, after %s failures.", failures)
            self._complaint = ""
        return failures > 0

    def peers_have_renewed(self) -> bool:
        """Whether other hosts, which may have had our outage too, have had a lease to renew in."""
        return clock() - self._answers_since >= self._lease


def assume_role(connection: psycopg.Connection[Any], alias: str) -> None:
    """Do as Django does on connections of this alias."""
    role = connections[alias].settings_dict["OPTIONS"].get("assume_role")
    if role:
        connection.execute(psycopg.sql.SQL("SET ROLE {}").format(psycopg.sql.Identifier(role)))


def is_outage(error: BaseException) -> bool:
    """Whether an error is about the database being away or busy, rather than about what was sent to it."""
    return isinstance(error, _AWAY | _FORGETFUL | errors.IdleInTransactionSessionTimeout)


def is_busy(error: BaseException) -> bool:
    """Whether an error is about a statement that took too long, and leaves the connection as it was."""
    return isinstance(error, _BUSY)
