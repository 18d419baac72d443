"""The child process: jobs come in through a channel, run in slots, and their outcomes go out.

An executor knows nothing of the queue. It has `threads` slots for plain job functions, each a thread, and
`async_slots` for async ones, all on one event loop. Before a body is entered, a mark says that it starts: so
whatever kills this process, the supervisor knows which jobs it took along. The outcomes of short jobs that
return nothing are gathered for some milliseconds while there is more to do, since each message makes all
threads change places. Their marks tell as much, should the message never be sent.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import astuple
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import Any, NamedTuple
from uuid import UUID

from asgiref.sync import SyncToAsync, ThreadSensitiveContext, sync_to_async
from django.db import connections
from django.db.backends.signals import connection_created

from . import execution, jobs, signals, slotconnections
from .abort import TaskAbort, ThreadAbort
from .channel import Channel, clock
from .context import Report
from .exceptions import JobStopped, JobTimeout
from .lifecycle import NO_RESULT, Event, Failed, JobError, Outcome, Unstarted, to_plain
from .marks import Marks
from .store import Claim

logger = logging.getLogger(__name__)

SHORT = 0.001  # seconds within which a job is likely to end, for the outcomes before it to wait for its own
LINGER = 0.003  # seconds that an outcome waits for others at most, where its mark tells it

ABORTS = {"timeout": JobTimeout, "stop": JobStopped}


class Assignment:
    """One job on its way through an executor."""

    __slots__ = ("claim", "start_by", "ticket")

    def __init__(self, ticket: int, start_by: float, claim: Claim) -> None:
        self.ticket = ticket  # the supervisor's name for this claim
        self.start_by = start_by  # when too much of the lease is gone to start
        self.claim = claim

    def to_plain(self) -> list[Any]:
        id, token, *rest = self.claim
        return [self.ticket, self.start_by, id, token.hex if token else None, *rest]

    @classmethod
    def from_plain(cls, values: list[Any]) -> Assignment:
        ticket, start_by, id, token, *rest = values
        return cls(ticket, start_by, Claim(id, _token(token), *rest))


@lru_cache(maxsize=256)
def _token(text: str | None) -> UUID | None:
    """A claim's token; all that one statement has claimed share it."""
    return None if text is None else UUID(text)


class Finished(NamedTuple):
    """What became of an attempt, on its way to those who want to be told."""

    claim: Claim
    event: Event
    duration: float | None  # seconds
    error: JobError | None

    def to_plain(self) -> list[Any]:
        error = None if self.error is None else astuple(self.error)
        return [*Assignment(0, 0.0, self.claim).to_plain(), str(self.event), self.duration, error]

    @classmethod
    def from_plain(cls, values: list[Any]) -> Finished:
        *claim, event, duration, error = values
        made = None if error is None else JobError(*error)
        return cls(Assignment.from_plain(claim).claim, Event(event), duration, made)


class Executor:
    """Serves one channel until the supervisor says stop, or is gone."""

    def __init__(self, sock: socket.socket, threads: int, async_slots: int, marks: Marks) -> None:
        self.channel = Channel(sock, blocking=True)
        # A process that a job forks is not one of ours.
        os.register_at_fork(after_in_child=self.channel.close)
        self.progress = _Progress(self.channel)
        self.slots = _ThreadSlots(self.channel, marks, self.progress)
        self.async_slots = _AsyncSlots(self.channel, async_slots, marks, self.progress)
        self.announcer = _Announcer()

    def serve(self) -> bool:
        """Hand out what comes in. True once everything is done after a stop, False when orphaned."""
        self.channel.send([["ready"]])
        while not self.channel.closed:
            for message in self.channel.receive():
                match message:
                    case ["run", assignments]:
                        self._accept([Assignment.from_plain(values) for values in assignments])
                    case ["recall", tickets]:
                        wanted = set(tickets)
                        taken = self.slots.recall(wanted) + self.async_slots.recall(wanted)
                        self.channel.send([["recalled", taken]])
                    case ["abort", ticket, reason, text]:
                        # The answer shows that this process still runs Python code.
                        self.channel.send([["aborting", ticket]])
                        error = ABORTS[reason](text)
                        self.slots.abort(ticket, error)
                        self.async_slots.abort(ticket, error)
                    case ["finished", news]:
                        self.announcer.tell(news)
                    case ["stop"]:
                        self.slots.stop()
                        self.async_slots.stop()
                        self.announcer.stop()
                        self.progress.stop()
                        return True
        return False

    def _accept(self, assignments: list[Assignment]) -> None:
        plain: list[Assignment] = []
        async_: list[Assignment] = []
        for assignment in assignments:
            function = jobs.find(assignment.claim.job_name)
            (async_ if function is not None and function.is_async else plain).append(assignment)
        if plain:
            self.slots.accept(plain)
        if async_:
            self.async_slots.accept(async_)


class _Progress:
    """Passes on what jobs say of their progress.

    In a thread of its own: an exception that ends a body may hit it anywhere, and half a frame would make the
    channel useless.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._notes: SimpleQueue[tuple[int, str] | None] = SimpleQueue()
        self._last: dict[int, str] = {}  # by ticket
        threading.Thread(target=self._pass_on, name="pgjobs-progress", daemon=True).start()

    def report_of(self, ticket: int) -> Report:
        def report(note: str) -> None:
            self._last[ticket] = note
            self._notes.put((ticket, note))

        return report

    def last_words(self, ticket: int) -> list[list[Any]]:
        """The last note of a job that has ended, again: it has to arrive before its outcome does."""
        note = self._last.pop(ticket, None)
        return [] if note is None else [["progress", ticket, note]]

    def stop(self) -> None:
        self._notes.put(None)

    def _pass_on(self) -> None:
        while (said := self._notes.get()) is not None:
            ticket, note = said
            self._channel.send([["progress", ticket, note]])


class _Announcer:
    """Tells the receivers of `job_finished`, in a thread of its own, so that they take nobody's slot."""

    def __init__(self) -> None:
        self._news: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def tell(self, news: list[Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="pgjobs-signals", daemon=True)
            self._thread.start()
        self._news.put(news)

    def stop(self) -> None:
        """Return once everything is told."""
        if self._thread is not None:
            self._news.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while (news := self._news.get()) is not None:
            slotconnections.refresh(slotconnections.open_here())
            for values in news:
                ended = Finished.from_plain(values)
                try:
                    execution.announce(*ended)
                except BaseException:  # SystemExit, say, which would end this thread and silence the signal
                    logger.exception("%s: a receiver of job_finished failed.", ended.claim)
                slotconnections.leave_no_transaction(ended.claim, slotconnections.open_here())
        connections.close_all()


class _Reports:
    """What is to be said of jobs that have ended. One message will do for all that have returned nothing."""

    def __init__(self) -> None:
        self._messages: list[list[Any]] = []
        self._returned: list[float] = []  # in turns, a ticket and the seconds that it took

    def __bool__(self) -> bool:
        return bool(self._returned or self._messages)

    def add(self, ticket: int, outcome: Outcome, duration: float, last_words: list[list[Any]]) -> None:
        self._messages += last_words
        if outcome is NO_RESULT:
            self._returned += (ticket, duration)
        else:
            self._messages.append(["done", ticket, duration, to_plain(outcome)])

    def take(self) -> list[list[Any]]:
        """All of it, as messages. What jobs have said themselves comes before their ends."""
        messages = self._messages + ([["returned", self._returned]] if self._returned else [])
        self._messages, self._returned = [], []
        return messages


class _Outbox:
    """The outcomes of one thread's jobs, on their way to the supervisor, and the marks that go with them."""

    def __init__(self, channel: Channel, marks: Marks, cells: range) -> None:
        self.since = 0.0  # when the oldest of them came
        self._channel = channel
        self._marks = marks
        self._cells = cells
        self._next = 0
        self._reports = _Reports()
        self._ended: list[int] = []  # cells
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._reports)

    @property
    def is_full(self) -> bool:
        return len(self._ended) >= len(self._cells) - 1

    def start(self, ticket: int) -> None:
        self._marks.start(self._cells[self._next], ticket)

    def end(
        self, ticket: int, outcome: Outcome, duration: float, last_words: list[list[Any]], now: float
    ) -> None:
        """Take in what is to be said at the end of the job that was started last.

        Only what its mark tells as well may wait for others: all else would be lost with the process.
        """
        cell = self._cells[self._next]
        self._next = (self._next + 1) % len(self._cells)
        if outcome is NO_RESULT:
            self._marks.complete(cell)
        with self._lock:
            self.since = self.since if self._reports else now
            self._reports.add(ticket, outcome, duration, last_words)
            self._ended.append(cell)
        if outcome is not NO_RESULT or self.is_full:
            self.send()

    def send(self) -> None:
        with self._lock:
            if self._reports:
                self._channel.send(self._reports.take())
                self._marks.clear(self._ended)
                self._ended = []


class _ThreadSlots:
    """Threads that take jobs from one line."""

    def __init__(self, channel: Channel, marks: Marks, progress: _Progress) -> None:
        self._progress = progress
        self._line: deque[Assignment] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._running: dict[int, ThreadAbort] = {}  # by ticket
        self._durations: dict[str, float] = {}  # seconds, of the last job of a name
        self._outboxes = [_Outbox(channel, marks, ring) for ring in marks.rings]
        self._opened = slotconnections.Opened()
        connection_created.connect(self._opened.note)
        self._lingers = False  # an outcome waits for others
        self._linger = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._work_or_die, args=[outbox], name=f"pgjobs-slot-{number}", daemon=True
            )
            for number, outbox in enumerate(self._outboxes)
        ]
        for thread in self._threads:
            thread.start()
        threading.Thread(target=self._send_what_lingers, name="pgjobs-outbox", daemon=True).start()

    def accept(self, assignments: list[Assignment]) -> None:
        self._line.extend(assignments)
        with self._changed:
            self._changed.notify(len(assignments))

    def recall(self, tickets: set[int]) -> list[int]:
        return _take_back(self._line, tickets)

    def abort(self, ticket: int, error: BaseException) -> None:
        if abort := self._running.get(ticket):
            abort.abort(error)

    def stop(self) -> None:
        """Finish what is in the line, then close the slots' connections."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._linger.set()

    def _work_or_die(self, outbox: _Outbox) -> None:
        try:
            self._work(outbox)
        except BaseException:
            # A slot that is gone would hold its job for ever. What a dead process held is settled.
            logger.exception("A slot of this executor failed, so the executor ends.")
            os._exit(1)

    def _work(self, outbox: _Outbox) -> None:
        while assignment := self._next(outbox):
            claim, ticket = assignment.claim, assignment.ticket
            began = time.perf_counter()
            if outbox and not self._may_linger(outbox, claim, began):
                outbox.send()
            if not may_start(assignment):
                outbox.end(ticket, Unstarted(), 0.0, [], began)
                del self._running[ticket]
                continue
            abort = self._running[ticket]
            self._opened.refresh()
            outcome = execution.run(claim, abort, self._progress.report_of(ticket))
            now = time.perf_counter()
            self._durations[claim.job_name] = now - began
            del self._running[ticket]
            if abort.error is not None:
                slotconnections.discard_all()  # it may have been in the middle of anything
            self._opened.leave_no_transaction(claim)
            # Only now: who hears of the end of a job may count on it that nothing is left of it.
            outbox.end(ticket, outcome, now - began, self._progress.last_words(ticket), now)
        connections.close_all()

    def _next(self, outbox: _Outbox) -> Assignment | None:
        """The next job, marked as started; None when there is none and the slots are stopping.

        Nothing is locked as long as there is one: threads that wait for a lock and for the interpreter take
        turns at every job, which costs several times what the job does.
        """
        while True:
            try:
                assignment = self._line.popleft()
            except IndexError:
                if outbox:
                    outbox.send()
                    continue
                with self._changed:
                    if not self._line:
                        if self._stopping:
                            return None
                        self._changed.wait()
                continue
            self._running[assignment.ticket] = ThreadAbort()
            outbox.start(assignment.ticket)
            return assignment

    def _may_linger(self, outbox: _Outbox, claim: Claim, now: float) -> bool:
        """Whether outcomes can wait for that of the next job."""
        is_short = self._durations.get(claim.job_name, SHORT) < SHORT
        if not is_short or now - outbox.since > LINGER:
            return False
        if not self._lingers:
            self._lingers = True
            self._linger.set()
        return True

    def _send_what_lingers(self) -> None:
        """Where a job that was thought to be short is not, the outcomes before it do not wait for it."""
        while not self._stopping:
            self._linger.wait()
            self._linger.clear()
            time.sleep(LINGER)
            self._lingers = False
            for outbox in self._outboxes:
                outbox.send()


class _AsyncSlots:
    """An event loop in a thread of its own, started with the first async job."""

    def __init__(self, channel: Channel, limit: int, marks: Marks, progress: _Progress) -> None:
        self.channel = channel
        self._marks = marks
        self._cells = list(marks.singles)  # those that are free
        self._cell_of: dict[int, int] = {}  # by ticket
        self._ended: list[int] = []  # cells of those whose outcomes are to be sent
        self.limit = limit
        self._progress = progress
        self._line: deque[Assignment] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[int, TaskAbort] = {}  # by ticket
        self._reports = _Reports()
        self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def accept(self, assignments: list[Assignment]) -> None:
        self._line.extend(assignments)
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._serve, name="pgjobs-event-loop", daemon=True)
            self._thread.start()
        self._loop.call_soon_threadsafe(self._start_waiting)

    def _serve(self) -> None:
        assert self._loop is not None
        while not self._stopped:
            try:
                self._loop.run_forever()
            except BaseException:  # SystemExit in a task that a job has started comes out here
                logger.exception("A task of an async job ended the event loop, which goes on.")

    def recall(self, tickets: set[int]) -> list[int]:
        return _take_back(self._line, tickets)

    def abort(self, ticket: int, error: BaseException) -> None:
        if (abort := self._running.get(ticket)) and self._loop is not None:
            self._loop.call_soon_threadsafe(abort.abort, error)

    def stop(self) -> None:
        """Finish what was accepted, then end the loop."""
        if self._loop is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._drained(), self._loop).result()
            self._stopped = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _drained(self) -> None:
        while self._tasks or self._line:
            self._start_waiting()
            if self._tasks:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self._send_reports()

    def _start_waiting(self) -> None:
        assert self._loop is not None
        starting: list[Assignment] = []
        too_late: list[Assignment] = []
        while len(self._tasks) + len(starting) < self.limit:
            try:
                assignment = self._line.popleft()
            except IndexError:
                break
            if may_start(assignment):
                self._mark(assignment.ticket)
                starting.append(assignment)
            else:
                too_late.append(assignment)
        for assignment in too_late:
            self._reports.add(assignment.ticket, Unstarted(), 0.0, [])
        if too_late:
            self._send_reports()
        for assignment in starting:
            run = self._run(assignment, self._running[assignment.ticket])
            task = self._loop.create_task(run, context=contextvars.Context())
            self._tasks.add(task)
            task.add_done_callback(partial(self._finished, assignment))

    def _mark(self, ticket: int) -> None:
        self._running[ticket] = TaskAbort()
        if not self._cells:
            self._send_reports()
        cell = self._cell_of[ticket] = self._cells.pop()
        self._marks.start(cell, ticket)

    def _finished(self, assignment: Assignment, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if assignment.ticket in self._running:  # another job has cancelled it before its first step
            self._end(assignment, Unstarted(), 0.0)
        if self._line:
            self._start_waiting()

    async def _run(self, assignment: Assignment, abort: TaskAbort) -> None:
        began = time.perf_counter()
        duration = 0.0
        outcome: Outcome = Failed(JobError("", "What surrounds the job was disturbed; the log says how."))
        try:
            async with ThreadSensitiveContext() as context:
                report = self._progress.report_of(assignment.ticket)
                outcome = await execution.arun(assignment.claim, abort, report)
                duration = time.perf_counter() - began
                # Only a job that used sync code, the ORM above all, has a thread and perhaps connections.
                if context in SyncToAsync.context_to_thread_executor:
                    await asyncio.shield(sync_to_async(slotconnections.discard_all)())
        except BaseException:  # a job may have cancelled its own task, which takes effect here
            logger.exception("%s: what follows an async job was disturbed.", assignment.claim)
        self._end(assignment, outcome, duration)

    def _end(self, assignment: Assignment, outcome: Outcome, duration: float) -> None:
        del self._running[assignment.ticket]
        cell = self._cell_of.pop(assignment.ticket)
        if outcome is NO_RESULT:
            self._marks.complete(cell)
        self._ended.append(cell)
        assert self._loop is not None
        if not (outcome is NO_RESULT and self._line and duration < SHORT):
            self._loop.call_soon(self._send_reports)
        elif not self._reports:
            self._loop.call_later(LINGER, self._send_reports)
        last_words = self._progress.last_words(assignment.ticket)
        self._reports.add(assignment.ticket, outcome, duration, last_words)

    def _send_reports(self) -> None:
        if self._reports:
            self.channel.send(self._reports.take())
            self._marks.clear(self._ended)
            self._cells += self._ended
            self._ended = []


def may_start(assignment: Assignment) -> bool:
    return clock() < assignment.start_by


def _take_back(line: deque[Assignment], tickets: set[int]) -> list[int]:
    """Take jobs out of a line from which others take jobs at the same time. Returns the tickets of these."""
    taken = []
    for assignment in line.copy():
        if assignment.ticket in tickets:
            try:
                line.remove(assignment)
            except ValueError:
                continue  # it has just been started
            taken.append(assignment.ticket)
    return taken


# ── The process ───────────────────────────────────────────────────────────────────────────────────────────


def main(sock: socket.socket, threads: int, async_slots: int, marks: Marks, name: str) -> None:
    """The life of an executor process, from just after the fork to its exit."""
    # Handlers that do nothing, and not SIG_IGN, which the job's own subprocesses would inherit. A terminal's
    # Ctrl-C reaches the whole process group; it is the supervisor that decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    slotconnections.keep(name)
    signals.executor_started.send_robust(None)
    executor = Executor(sock, threads, async_slots, marks)
    executor.channel.when_lost = lambda: os._exit(1)  # nobody would hear what its jobs come to
    stopped = executor.serve()
    if stopped:
        signals.executor_stopping.send_robust(None)
    flush_streams()
    os._exit(0 if stopped else 1)  # without the handlers that were inherited from the supervisor


def flush_streams() -> None:
    """Write out what is buffered, so that it is not written twice. A stream may be closed or missing."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            pass
