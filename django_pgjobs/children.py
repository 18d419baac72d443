"""The executors of a host as the supervisor sees them: starting, feeding, replacing and ending them.

A `Child` is the supervisor's handle on one of them.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .channel import NEVER, Channel, clock
from .executor import Assignment, Executor
from .forkserver import Exited, Forkserver, Spawned
from .jobs import JobFunction
from .lifecycle import NO_RESULT, Outcome, Unstarted, from_plain
from .marks import Marks
from .store import Claim
from .wakeup import Wakeup

logger = logging.getLogger(__name__)

RESPAWN_LONGEST = 30.0  # seconds between attempts to start executors that die at once
LOOK_AGAIN = 0.05  # seconds
END_WITHIN = 5.0  # seconds from the end of an executor's channel to its own, else it is killed
STOP_WITHIN = 60.0  # the same, once it has nothing left to do and was told so: receivers may still be at work


class Held:
    """A claim that this host holds, from the claim to the settled verdict."""

    __slots__ = (
        "abort_reason", "aborted_at", "assigned_at", "claim", "claimed_at", "completed", "doubted",
        "duration", "handed_at", "is_async", "is_atomic", "lost", "may_be_settled", "retry_at", "started",
        "started_at", "ticket", "timeout", "valid_since",
    )  # fmt: skip

    def __init__(self, ticket: int, claim: Claim, function: JobFunction[..., Any] | None, sent_at: float):
        self.ticket = ticket
        self.claim = claim
        self.is_async = function is not None and function.is_async
        self.is_atomic = function is not None and function.atomic
        self.timeout = None if function is None else function.time_limit  # seconds
        self.claimed_at = sent_at
        self.valid_since = sent_at  # just before the claim, or its last renewal, was sent
        self.assigned_at = NEVER  # when it was handed to an executor
        self.handed_at = NEVER  # the same, and never once it was asked back
        self.started = False
        self.started_at = NEVER  # unless its end was heard of first
        self.completed = False  # by its mark, which may be seen before its outcome is heard
        self.abort_reason = ""  # "timeout" or "stop", once it is to end
        self.aborted_at = NEVER
        self.may_be_settled = self.is_atomic  # without our having heard of it
        self.doubted = False  # its row is no longer ours, and so it is settled, or the claim was lost
        self.lost = False  # the row is no longer ours; whatever comes of it is dropped
        self.duration = 0.0
        self.retry_at = 0.0  # when to try again to settle it


class Started(NamedTuple):
    held: Held
    at: float  # by `clock`


class Ended(NamedTuple):
    held: Held
    outcome: Outcome


class Progressed(NamedTuple):
    held: Held
    note: str  # JSON text


News = Started | Ended | Progressed


class Child:
    """One executor. Without a pid it lives in a thread of this process."""

    def __init__(self, serial: int, sock: socket.socket, name: str, marks: Marks) -> None:
        self.serial = serial
        self.marks = marks
        self.name = name  # of its database sessions; none where it is inline
        self.channel = Channel(sock, blocking=False)
        self.pid: int | None = None
        self.ready_since = NEVER
        self.retiring = False
        self.deaf = False  # nothing more is expected from its channel
        self.end_by = NEVER  # when it is killed, should it still be there
        self.taken = 0  # jobs handed to it in its life
        self.most: float = NEVER  # jobs that it may take in its life
        self.jobs: dict[int, Held] = {}  # by ticket, as the following
        self.unstarted: dict[int, Held] = {}  # as far as we have looked, in the order of being handed over
        self.look_by = NEVER  # when to look again, since a job may be overdue or must be told to end
        self.aborting: dict[int, Held] = {}  # an exception was raised in them
        self.unanswered: set[int] = set()  # and not a word came from the process since
        self.killed_for = ""  # the jobs for which we have killed it; the others are not to blame
        self.exit: Exited | None = None
        self.stops = False  # it has been asked to
        self._doomed = False
        self._suspects = 0  # among its jobs

    @property
    def is_inline(self) -> bool:
        return not self.name

    @property
    def was_killed(self) -> bool:
        """Whether we have killed it."""
        return self._doomed

    @property
    def ready(self) -> bool:
        return self.ready_since != NEVER

    @property
    def isolates(self) -> bool:
        """Whether it runs a job that has crashed before, and so nothing else."""
        return self._suspects > 0

    @property
    def oldest_unstarted(self) -> float:
        """When the job that has waited for longest in it was handed over."""
        return next((held.handed_at for held in self.unstarted.values()), NEVER)

    @property
    def left(self) -> float:
        """How many more jobs it may take before it is replaced."""
        return self.most - self.taken

    def count(self, is_async: bool) -> int:
        return sum(held.is_async is is_async for held in self.jobs.values())

    def look(self) -> list[Started]:
        """The jobs that have been started since the last look, but for those that have ended, and say so."""
        started = []
        for ticket, completed, at in self.marks.read() if self.jobs else ():
            held = self.jobs.get(ticket)
            if held is None:
                continue
            held.completed = completed
            if self.unstarted.pop(ticket, None) is not None:
                held.started = True
                held.started_at = max(at, held.assigned_at)
                started.append(Started(held, held.started_at))
        self.look_by = min((_look_by(held) for held in self.unstarted.values()), default=NEVER)
        return started

    def read(self, message: list[Any]) -> Iterator[News]:
        """What a message means.

        Raises KeyError, TypeError, ValueError or OverflowError where it comes to mean nothing.
        """
        match message:
            case ["returned", pairs]:
                for ticket, duration in zip(pairs[::2], pairs[1::2], strict=True):
                    yield self._ended(ticket, NO_RESULT, duration)
            case ["done", ticket, duration, plain]:
                yield self._ended(ticket, from_plain(plain), duration)
            case ["progress", ticket, str(note)]:
                # It may arrive after the end of its job, which has said the same again.
                if ticket in self.jobs:
                    yield Progressed(self.jobs[ticket], note)
            case ["recalled", tickets]:
                for held in [self.unstarted[ticket] for ticket in tickets]:
                    yield Ended(self._take_out(held.ticket), Unstarted())
                yield from self.look()  # the others have started
            case ["aborting", ticket]:
                self.unanswered.discard(ticket)
            case ["ready"]:
                self.ready_since = clock()
            case _:
                raise ValueError(message)

    def _ended(self, ticket: int, outcome: Outcome, duration: Any) -> Ended:
        seconds = float(duration)
        held = self._take_out(ticket)
        held.duration = seconds
        held.started = not isinstance(outcome, Unstarted)
        if held.abort_reason and held.started and not (held.is_async or self.is_inline):
            # An exception that comes from outside may have hit a library between taking a lock and the `try`
            # that gives it back. Nobody should depend on this process any more.
            self.retiring = True
        return Ended(held, outcome)

    def _take_out(self, ticket: int) -> Held:
        held = self.jobs.pop(ticket)
        self._suspects -= held.claim.crashes > 0
        self.unstarted.pop(ticket, None)
        self.aborting.pop(ticket, None)
        self.unanswered.discard(ticket)
        return held

    def assign(self, held: Sequence[Held], half_lease: float) -> None:
        """Hand over jobs. They do not start when half of the lease has passed since it was last renewed."""
        now = clock()
        for one in held:
            one.handed_at = one.assigned_at = now
            self.jobs[one.ticket] = one
            self._suspects += one.claim.crashes > 0
            self.unstarted[one.ticket] = one
            if one.timeout is not None:
                self.look_by = min(self.look_by, _look_by(one))
        self.taken += len(held)
        assignments = [Assignment(one.ticket, one.valid_since + half_lease, one.claim) for one in held]
        self.channel.send([["run", [assignment.to_plain() for assignment in assignments]]])

    def recall(self, held: Iterable[Held]) -> None:
        """Ask for jobs back, where they have not started."""
        tickets = []
        for one in held:
            one.handed_at = NEVER
            tickets.append(one.ticket)
        if tickets:
            self.channel.send([["recall", tickets]])

    def abort(self, held: Held, reason: str, text: str) -> None:
        """Raise an exception in the body of a running job, unless its mark tells that it has returned."""
        if held.completed:
            return
        held.abort_reason = reason
        held.aborted_at = clock()
        self.aborting[held.ticket] = held
        self.unanswered.add(held.ticket)
        self.channel.send([["abort", held.ticket, reason, text]])

    def stop(self) -> None:
        """Let it end once it is done with what it has. One that is about to end by itself is not asked."""
        if not self.stops and not self.deaf:
            self.stops = self.retiring = True
            self.end_by = clock() + STOP_WITHIN
            self.channel.send([["stop"]])

    def kill(self, killed_for: str = "") -> None:
        """End the process. With `killed_for`, its other jobs are interrupted, and have not crashed it."""
        self.retiring = self._doomed = True
        self.end_by = NEVER
        self.killed_for = self.killed_for or killed_for
        if self.pid is not None and self.exit is None:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def was_spawned(self, pid: int) -> None:
        """Take note of its pid; below zero where there was no process to be had."""
        if pid < 0:
            self.exit = Exited(0, 1 << 8)
            logger.error("An executor could not be started: %s.", os.strerror(-pid))
            return
        self.pid = pid
        if self._doomed:
            self.kill()

    def resident_bytes(self) -> int:
        """The memory that the process has in use, what it shares with others included; zero if unknown."""
        if self.pid is None:
            return 0
        try:
            if sys.platform == "linux":
                return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
            ps = subprocess.run(["ps", "-o", "rss=", "-p", str(self.pid)], capture_output=True, check=False)
            return int(ps.stdout) * 1024
        except (OSError, ValueError):
            return 0

    def is_gone(self) -> bool:
        """Whether there is no such process any more, when nobody is left to tell us how it ended."""
        if self.pid is None:
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        return False


def _look_by(held: Held) -> float:
    """When it matters whether a job has been started."""
    if held.abort_reason:
        return clock() + LOOK_AGAIN  # it was asked back, and may have been about to start
    if held.timeout is None:
        return NEVER
    # An overdue job may still have to wait there.
    return max(held.assigned_at + held.timeout, clock() + LOOK_AGAIN)


class Children:
    """N executors and a warm spare; or one executor in a thread, for debuggers."""

    def __init__(
        self,
        wakeup: Wakeup,
        forkserver: Forkserver | None,
        processes: int,
        threads: int,
        async_slots: int,
        *,
        max_jobs: int | None = None,
        max_memory: int | None = None,
    ) -> None:
        self.processes = processes
        self.threads = threads
        self.async_slots = async_slots
        self.stopping = False  # no executor is started any more
        self.crashed = False  # the fork server is gone, and with it any hope of new executors
        self._wakeup = wakeup
        self._forkserver = forkserver
        self._children: dict[int, Child] = {}
        self._areas: dict[int, int] = {}  # of the marks, by serial
        self._max_jobs = max_jobs  # after which an executor is replaced
        self._max_memory = max_memory  # bytes beyond which it is
        self._next_weighing = 0.0
        self._last_serial = 0
        self._early_deaths = 0
        self._next_spawn = 0.0
        self.started = 0  # executors so far
        self.ended = {"stopped": 0, "killed": 0, "died": 0}  # the same
        if forkserver is not None:
            wakeup.watch(forkserver.sock, lambda: None)

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._children.values()))

    @property
    def working(self) -> list[Child]:
        """The executors that take jobs: N that are ready, not on their way out, and isolate no job."""
        return self._ready()[: self.processes]

    @property
    def spares(self) -> list[Child]:
        """The executors that are ready and wait for one of the working ones to end."""
        return self._ready()[self.processes :]

    @property
    def leaving(self) -> list[Child]:
        """The executors that take no more jobs, and may still run some."""
        return [child for child in self._children.values() if child.retiring]

    def _ready(self) -> list[Child]:
        """In the order in which they became ready; what isolates a job comes last, where the spares are."""
        ready = [child for child in self._children.values() if child.ready and not child.retiring]
        return sorted(ready, key=lambda child: (child.isolates, child.ready_since))

    def told(self) -> list[dict[str, Any]]:
        """What people may know of each executor, as JSON."""
        kinds = (("working", self.working), ("spare", self.spares), ("leaving", self.leaving))
        states = {child.serial: state for state, children in kinds for child in children}
        return [
            {
                "pid": child.pid,
                "state": states.get(child.serial, "starting"),
                "jobs": len(child.jobs),
                "memory": child.resident_bytes(),
            }
            for child in self
        ]

    @property
    def inline(self) -> bool:
        return self._forkserver is None

    @property
    def next_deadline(self) -> float:
        if self.crashed:
            return clock() + 0.1 if self._children else NEVER  # nobody tells us when they end
        deadlines = [min(child.end_by, child.look_by) for child in self]
        if self._missing():
            deadlines.append(self._next_spawn)
        if self._max_memory is not None and not self.stopping:
            deadlines.append(self._next_weighing)
        return min(deadlines, default=NEVER)

    @property
    def have_ended(self) -> bool:
        """Whether nothing runs any more. The thread of an inline executor stays."""
        return not any(child.jobs for child in self) if self.inline else not self._children

    def keep(self) -> None:
        """Let those that have grown old or large end with what they run; start what is missing."""
        for child in self:
            if child.left <= 0:
                child.retiring = True
        self._weigh()
        if clock() >= self._next_spawn and not self.crashed:
            for _ in range(self._missing()):
                try:
                    self._spawn()
                except OSError as error:  # no descriptors to be had just now, say
                    logger.error("An executor could not be started: %s.", error.strerror)
                    self._next_spawn = clock() + 1.0
                    return

    def _weigh(self) -> None:
        if self._max_memory is None or clock() < self._next_weighing:
            return
        self._next_weighing = clock() + 1.0
        for child in self:
            if child.taken and not child.retiring and (size := child.resident_bytes()) > self._max_memory:
                logger.info("Executor %s has grown to %.0f MiB and is replaced.", child.pid, size / 2**20)
                child.retiring = True

    def _missing(self) -> int:
        if self.stopping:
            return 0
        wanted = self.processes + (0 if self.inline else 1)
        return max(wanted - sum(not child.retiring for child in self._children.values()), 0)

    def _spawn(self) -> None:
        self._last_serial += 1
        serial = self._last_serial
        if self._forkserver is None:
            ours, theirs = socket.socketpair()
            marks = Marks.private(self.threads, self.async_slots)
            executor = Executor(theirs, self.threads, self.async_slots, marks)
            threading.Thread(target=executor.serve, name="pgjobs-executor", daemon=True).start()
            name = ""
        else:
            area = self._forkserver.areas.take()
            if area is None:
                self._next_spawn = clock() + 1.0  # until one of those on their way out has ended
                return
            try:
                ours = self._forkserver.spawn(serial, area, self.threads, self.async_slots)
            except OSError:
                self._forkserver.areas.give_back(area)
                raise
            self._areas[serial] = area
            name = self._forkserver.name_of(serial)
            marks = self._forkserver.areas.marks(area)
        child = Child(serial, ours, name, marks)
        if self._max_jobs is not None and not child.is_inline:
            child.most = self._max_jobs
        self._children[serial] = child
        self.started += 1
        self._wakeup.watch(child.channel, lambda: None)

    def events(self) -> Iterator[tuple[Child, News]]:
        """Everything that executors have sent."""
        for child in self:
            if child.end_by <= clock():
                logger.warning("Executor %s is killed, since it does not end by itself.", child.pid)
                child.kill()
            if child.deaf:
                continue
            yield from self.last_events(child)
            if child.channel.has_unsent:
                child.channel.flush()
            if child.channel.closed:
                # It is about to end, or its code has closed what it should not. How it ends by itself tells
                # people more than that we killed it.
                self._stop_watching(child)
                child.retiring = True
                child.end_by = clock() + END_WITHIN
            else:
                self._wakeup.watch_writable(child.channel, child.channel.has_unsent)

    def look(self) -> Iterator[tuple[Child, Started]]:
        """The jobs that have been started since the last look."""
        for child in self:
            for started in child.look():
                yield child, started

    def last_events(self, child: Child) -> Iterator[tuple[Child, News]]:
        """What one executor has sent, and nobody has read."""
        for message in child.channel.receive():
            try:
                for event in child.read(message):
                    yield child, event
            except (KeyError, TypeError, ValueError, OverflowError):
                logger.error("Executor %s sent what makes no sense, and is ended: %.200r", child.pid, message)
                child.kill()
                return

    def take_ended(self) -> list[Child]:
        """The executors that have ended since the last call. What they sent last is still to be read."""
        if self._forkserver is not None:
            for report in self._forkserver.reports():
                if isinstance(report, Spawned):
                    if report.serial in self._children:
                        self._children[report.serial].was_spawned(report.pid)
                else:
                    for child in self._children.values():
                        if child.pid == report.pid and child.exit is None:
                            child.exit = report
            if self._forkserver.gone and not self.crashed:
                self.crashed = True
                self._wakeup.unwatch(self._forkserver.sock)
                logger.error("The fork server has died; no executor can be started any more.")
        # The kernel's word counts: a closed channel alone is not enough while the process may still run.
        return [child for child in self if child.exit is not None or (self.crashed and child.is_gone())]

    def remove(self, child: Child) -> None:
        """Forget an executor that has ended."""
        self._stop_watching(child)
        child.channel.close()
        del self._children[child.serial]
        self.ended["killed" if child.was_killed else "stopped" if child.stops else "died"] += 1
        if self._forkserver is not None:
            self._forkserver.areas.give_back(self._areas.pop(child.serial))
        if not child.ready and not child.stops:
            self._early_deaths += 1
            pause = min(0.1 * 2.0 ** min(self._early_deaths, 10), RESPAWN_LONGEST)
            self._next_spawn = clock() + pause
            logger.error(
                "Executor %s %s before it was ready; the next is started in %.1f s.", child.pid,
                child.exit or "died", pause,
            )  # fmt: skip
        else:
            self._early_deaths = 0

    def _stop_watching(self, child: Child) -> None:
        if not child.deaf:
            child.deaf = True
            self._wakeup.unwatch(child.channel)

    def close(self) -> None:
        """End the fork server. Only when all executors have ended, or may die."""
        if self._forkserver is not None:
            self._forkserver.close()
