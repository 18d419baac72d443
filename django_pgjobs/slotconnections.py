"""The database connections of the threads in which jobs run: Django's own, kept from one job to the next.

A job may leave anything on them: a transaction, a broken session, one that has died meanwhile. The next one
finds connections that work.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Sequence
from typing import Any

from django.db import connections

from .conf import config
from .store import Claim

logger = logging.getLogger(__name__)

# An open connection that has been idle for longer is asked whether it works before the next job uses it.
HEALTHY_FOR = 5.0  # seconds


def keep(name: str) -> None:
    """Let the project's connections outlive a job, even where CONN_MAX_AGE is 0, and name them after us.

    Before any is opened. The name is what lets the supervisor end them once this process is killed.
    """
    for alias in connections:
        settings = connections.settings[alias]
        if connections[alias].vendor == "postgresql":
            settings.setdefault("OPTIONS", {}).setdefault("application_name", name)
        if settings.get("CONN_MAX_AGE") == 0 and not settings.get("OPTIONS", {}).get("pool"):
            settings["CONN_MAX_AGE"] = config().JOB_CONN_MAX_AGE.total_seconds()


class Opened(threading.local):
    """The connections that a thread has open, as far as it has looked: that takes longer than a short job."""

    def __init__(self) -> None:
        self._connections: Sequence[Any] = ()
        self._has_opened = False  # one since

    def note(self, **kwargs: Any) -> None:
        """A receiver of Django's `connection_created`."""
        self._has_opened = True

    def refresh(self) -> None:
        """Before a job; see below."""
        if self._connections:
            refresh(self._connections)

    def leave_no_transaction(self, claim: Claim) -> None:
        """After a job; see below."""
        if self._connections or self._has_opened:
            self._has_opened = False
            self._connections = open_here()
            leave_no_transaction(claim, self._connections)


def open_here() -> list[Any]:
    """The database connections that this thread has open."""
    return [one for one in connections.all(initialized_only=True) if one.connection is not None]


def refresh(opened: Sequence[Any]) -> None:
    """Before a job: close connections that are too old or no longer work, forget logged queries."""
    for connection in opened:
        connection.close_if_unusable_or_obsolete()
        if connection.connection is not None and _is_doubtful(connection) and not connection.is_usable():
            connection.close()
        connection.queries_log.clear()


def _is_doubtful(connection: Any) -> bool:
    """Whether a connection was idle for long, or its socket has something to say although nobody asked."""
    now = time.monotonic()
    idle_since = getattr(connection, "_pgjobs_idle_since", now)
    connection._pgjobs_idle_since = now
    if now - idle_since > HEALTHY_FOR:
        return True
    try:
        readable, _, _ = select.select([connection.connection], [], [], 0)
    except Exception:
        return True
    return bool(readable)


def leave_no_transaction(claim: Claim, opened: Sequence[Any]) -> None:
    """After a job: close connections on which it left a transaction open or broken, and say so."""
    for connection in opened:
        connection._pgjobs_idle_since = time.monotonic()
        if (
            connection.in_atomic_block
            or connection.autocommit != connection.settings_dict["AUTOCOMMIT"]
            or _in_transaction(connection)
        ):
            logger.warning(
                "%s: it left a transaction open on %r; that is rolled back, and the connection closed.",
                claim,
                connection.alias,
            )
            _discard(connection)


def discard_all() -> None:
    """Close all connections of this thread, whatever they are in the middle of."""
    for connection in connections.all(initialized_only=True):
        _discard(connection)


def _discard(connection: Any) -> None:
    """Close a connection so that its next use opens a new one, also out of the middle of a transaction."""
    connection.in_atomic_block = False  # else close() would only be noted down
    connection.closed_in_transaction = False
    connection.needs_rollback = False
    connection.savepoint_ids = []
    connection.atomic_blocks = []
    try:
        connection.close()
    except Exception:
        logger.exception("A connection to %r could not be closed, and is forgotten.", connection.alias)
        connection.connection = None


def _in_transaction(connection: Any) -> bool:
    info = getattr(connection.connection, "info", None)
    status = getattr(info, "transaction_status", None)
    return status is not None and status != 0  # psycopg's TransactionStatus.IDLE
