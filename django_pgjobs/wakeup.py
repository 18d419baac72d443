"""The supervisor's only wait, and the listener that can end it.

`Wakeup.wait` sleeps until a notification, a child, a signal or the database thread has something to say, or
until a deadline. Notifications are hints: whoever wakes up looks at the queue itself, and polls anyway.
"""

from __future__ import annotations

import logging
import os
import random
import selectors
import signal
import threading
from collections.abc import Callable
from typing import Any

import psycopg

from . import sql
from .channel import NEVER, clock
from .database import cut, is_pooled

logger = logging.getLogger(__name__)

JOB_CREATED = "job_created"
JOB_COMMANDS = "job_commands"

PROBE_INTERVAL = 10.0  # seconds between a listener's probes of itself
RECONNECT_FIRST = 0.5  # seconds
RECONNECT_LONGEST = 10.0
LOOKS = (0.01, 0.05, 0.25, 1.0)  # seconds after it hears, or wants to be notified again
POOLER_PAUSE = 300.0  # seconds; a pooler does not go away by itself


class Wakeup:
    """Sleeps on everything at once. `wake` may be called from any thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe()
        for end in (self._woken, self._waker):
            os.set_blocking(end, False)
        self.watch(self._woken, self._clear)

    def watch(self, source: Any, ready: Callable[[], object]) -> None:
        """Call `ready` during a wait, whenever `source` can be read."""
        self._selector.register(source, selectors.EVENT_READ, ready)

    def watch_writable(self, source: Any, wanted: bool) -> None:
        """Also end a wait, or no longer, when a watched source can be written."""
        key = self._selector.get_key(source)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        if key.events != events:
            self._selector.modify(source, events, key.data)

    def unwatch(self, source: Any) -> None:
        self._selector.unregister(source)

    def catch_signals(self) -> None:
        """Let signals end the wait. Their handlers have only to note that they came."""
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)

    def wake(self) -> None:
        """End the current wait, or the next one at once."""
        try:
            os.write(self._waker, b"\0")
        except BlockingIOError:
            pass  # full, so the wait ends anyway

    def wait(self, timeout: float) -> None:
        """Sleep for at most `timeout` seconds, which may be infinity; serve what has come up."""
        for key, _ in self._selector.select(None if timeout == NEVER else max(timeout, 0.0)):
            key.data()

    def _clear(self) -> None:
        os.read(self._woken, 4096)

    def close(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
        self._selector.close()
        os.close(self._woken)
        os.close(self._waker)


class Listener:
    """LISTENs on a connection of its own, and knows whether it still hears.

    Every PROBE_INTERVAL the host notifies a channel that only it listens on, from its other connection. Two
    probes in a row that are not heard mean that nothing is: a dead connection, or a pooler in between. Until
    a new connection hears again, `hears` is False and the host polls more often. Connecting happens in a
    thread, so that a database that does not answer never blocks the wait. Without `connect` it never listens.

    While so much is found that nobody has to be told of more, a host does not want to be notified, and says
    so by giving up a lock (`sql.WANT_NO_MORE`). Whoever creates a job then, and commits it when the host does
    want to be notified again, has notified nobody. So then it looks at once, and a few times soon after; and
    likewise when it begins to listen, since it may have been another host that did not want to be notified.

    What others notify is listened for only once a probe was heard: a pooler would hand the session on to
    others, and they would be told from then on. Where one is found, nothing is tried unless `past_poolers`
    says that this connection is a direct one, or as good.
    """

    def __init__(
        self,
        wakeup: Wakeup,
        channel: str,
        connect: Callable[[], psycopg.Connection[Any]] | None,
        *,
        patience: float = 30.0,
        past_poolers: bool = False,
    ) -> None:
        self.probe_channel = channel
        self.hears = False
        self.notified = False  # something was created since this was last cleared
        self.commanded = False  # somebody wants something of running jobs
        self.missed = 0  # probes that were not heard
        self._wakeup = wakeup
        self._connect = connect
        self._patience = patience  # seconds until an attempt to connect is broken off
        self._past_poolers = past_poolers
        self._connection: psycopg.Connection[Any] | None = None
        self._fd = -1  # of the connection, which no longer tells once it is lost
        self._attempt: _Attempt | None = None
        self._give_up_at = NEVER
        self._complained = False
        self._failures = 0
        self._next_try = 0.0
        self._next_probe = 0.0
        self._unheard = 0
        self._listens = False  # for more than probes
        self._wants = True  # to be notified
        self._told = True  # the server that it does
        self._asking = False  # the server has yet to answer
        self._looks: list[float] = []  # when to look without having been notified

    def keep(self) -> None:
        """Reconnect if need be, and notice when it is time to look."""
        now = clock()
        if self._connect is not None and self._connection is None:
            self._keep_connecting(now)
        if self._looks and now >= self._looks[0]:
            self._looks.pop(0)
            self.notified = True
        if self._connection is not None and self._unheard >= 2 and now >= self._next_probe:
            self.missed += 1
            self._lose("two probes in a row were not heard")

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def next_probe(self) -> float:
        """When a probe has to be sent, by `clock`. Not after two that were not heard: then it is lost."""
        return NEVER if self._connection is None or self._unheard >= 2 else self._next_probe

    def note_probe(self) -> None:
        """Take note that a probe is being sent."""
        self.missed += self._unheard > 0
        self._next_probe = clock() + PROBE_INTERVAL
        self._unheard += 1

    def probe_again(self) -> None:
        """The last probe was not sent after all."""
        self._next_probe = 0.0
        self._unheard = max(self._unheard - 1, 0)

    def want(self, wants: bool) -> None:
        """Say whether to be notified of new jobs. Takes effect when the server has answered."""
        self._wants = wants
        if self._wants != self._told and self.hears and not self._asking:
            self._told = wants
            try:
                self._ask(sql.WANT if wants else sql.WANT_NO_MORE)
            except psycopg.Error as error:
                self._lose(str(error).strip())

    def try_now(self) -> None:
        """Do not wait any longer: the database answers again."""
        self._next_try = 0.0

    @property
    def next_deadline(self) -> float:
        """When `keep` has to be called again, by `clock`."""
        if self._connect is None:
            return NEVER
        if self._connection is None:
            return self._next_try if self._attempt is None else self._give_up_at
        lost_at = self._next_probe if self._unheard >= 2 else NEVER
        return min([lost_at, *self._looks[:1]])

    def close(self) -> None:
        if self._connection is not None:
            self._wakeup.unwatch(self._fd)
            self._connection.close()
            self._connection = None
            self._looks = []

    def _keep_connecting(self, now: float) -> None:
        assert self._connect is not None
        if self._attempt is None:
            if now >= self._next_try:
                self._give_up_at = now + self._patience
                self._attempt = _Attempt(
                    self._connect, self.probe_channel, self._past_poolers, self._wakeup.wake
                )
        elif self._attempt.ended:
            attempt, self._attempt = self._attempt, None
            if attempt.connection is not None:
                self._take_over(attempt.connection)
            else:
                self._retry_later(attempt.problem, POOLER_PAUSE if attempt.is_pooled else None)
        elif now >= self._give_up_at:
            self._give_up_at = now + self._patience
            self._attempt.cut()

    def _take_over(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._fd = connection.fileno()
        self._wakeup.watch(self._fd, self._read)
        self._unheard = 0
        self._next_probe = clock()
        self._listens = self._asking = False
        self._looks = []

    def _read(self) -> None:
        """Take in what the server sent. Never blocks."""
        assert self._connection is not None
        try:
            self._connection.pgconn.consume_input()
            self._take_answers(self._connection.pgconn)
            while notification := self._connection.pgconn.notifies():
                channel = notification.relname.decode()
                self.notified |= channel == JOB_CREATED
                self.commanded |= channel == JOB_COMMANDS
                if channel == self.probe_channel:
                    self._heard()
        except psycopg.Error as error:
            self._lose(str(error).strip())

    def _heard(self) -> None:
        assert self._connection is not None
        self._unheard = 0
        self._failures = 0
        if not self._listens:
            self._listens = True
            self._told = True
            listen = f"LISTEN {JOB_CREATED}; LISTEN {JOB_COMMANDS}; {sql.HEAR}"
            self._ask(f"{listen}; SET idle_session_timeout = 0")  # it is silent from now on

    def _ask(self, statements: str) -> None:
        """Send statements whose answers come in when they come. Raises psycopg.Error."""
        assert self._connection is not None
        self._asking = True
        self._connection.pgconn.send_query(statements.encode())
        self._connection.pgconn.flush()

    def _take_answers(self, pgconn: psycopg.pq.abc.PGconn) -> None:
        """See what the server has answered. Raises psycopg.Error if it refuses."""
        while self._asking and not pgconn.is_busy():
            if result := pgconn.get_result():
                if result.status not in (psycopg.pq.ExecStatus.COMMAND_OK, psycopg.pq.ExecStatus.TUPLES_OK):
                    raise psycopg.OperationalError(result.get_error_message())
            else:
                self._asking = False
                self._answered()

    def _answered(self) -> None:
        if not self.hears:
            self.hears = True
            self._complained = False
            logger.info("Listening for new jobs.")
        if self._told:
            self.notified = True  # what was created before was not heard
            self._looks = [clock() + pause for pause in LOOKS]
        else:
            self._looks = []
        self.want(self._wants)

    def _lose(self, reason: str) -> None:
        self.close()
        self._retry_later(reason)

    def _retry_later(self, reason: str, pause: float | None = None) -> None:
        if self.hears or not self._complained:
            logger.warning("Not listening for new jobs, so polling for them: %s.", reason.rstrip("."))
            self._complained = True
        self.hears = False
        if pause is None:
            pause = min(RECONNECT_FIRST * 2.0 ** min(self._failures, 10), RECONNECT_LONGEST)
        self._failures += 1
        self._next_try = clock() + pause * random.uniform(0.5, 1.0)


class _Attempt:
    """An attempt to connect, in a thread. Once it has `ended`, it has a connection, or a problem."""

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        channel: str,
        past_poolers: bool,
        wake: Callable[[], None],
    ) -> None:
        self.ended = False
        self.connection: psycopg.Connection[Any] | None = None
        self.problem = ""
        self.is_pooled = False
        self._connect = connect
        self._channel = channel
        self._past_poolers = past_poolers
        self._wake = wake
        self._opened: psycopg.Connection[Any] | None = None
        self._closing = threading.Lock()  # so that nobody cuts a connection while it is closed
        try:
            threading.Thread(target=self._run, name="pgjobs-listen", daemon=True).start()
        except RuntimeError as error:  # no thread to be had just now
            self.problem = str(error)
            self.ended = True

    def _run(self) -> None:
        try:
            opened = self._opened = self._connect()
            self.is_pooled = not self._past_poolers and is_pooled(opened)
            if self.is_pooled:
                self.problem = (
                    "there is a pooler in front of the database. LISTEN_DATABASE may name an alias that goes"
                    " past it"
                )
            else:
                opened.execute(f'LISTEN "{self._channel}"')
                self.connection = opened
        except Exception as error:
            self.problem = str(error).strip()
        with self._closing:
            if self.connection is None and self._opened is not None:
                self._opened.close()
            self._opened = None
        self.ended = True
        self._wake()

    def cut(self) -> None:
        """Let it end."""
        with self._closing:
            if self._opened is not None:
                cut(self._opened)
