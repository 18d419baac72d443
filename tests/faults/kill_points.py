"""Kills a worker host or its executor at a named point. The workers of test_kill_points import this.

Nothing in the package knows of it: functions of the package are wrapped, in the worker's process, before it
forks. All jobs of a worker meet at the point, so that one kill hits them all in the same state; the victim is
killed once, and what comes after it runs as ever.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async

from django_pgjobs import Snooze, execution, job, maintenance, store, supervisor
from django_pgjobs.channel import Channel
from django_pgjobs.database import Database
from django_pgjobs.lifecycle import Event
from django_pgjobs.marks import Marks
from django_pgjobs.turns import Report
from tests.models import Effect

ORDER = "PGJOBS_TEST_KILL"  # the environment variable that tells a worker whom to kill, and when


# ── The jobs ──────────────────────────────────────────────────────────────────────────────────────────────


@job(backoff=0)
def rerun(what: str, outcome: str) -> None:
    body(what, outcome)


@job(backoff=0, rerun_if_lost=False)
def run_once(what: str, outcome: str) -> None:
    body(what, outcome)


@job(backoff=0)
async def rerun_async(what: str, outcome: str) -> None:
    await sync_to_async(body)(what, outcome)


@job(backoff=0, atomic=True)
def rerun_atomic(what: str, outcome: str) -> None:
    body(what, outcome)


@job(backoff=0, atomic=True, rerun_if_lost=False)
def run_once_atomic(what: str, outcome: str) -> None:
    body(what, outcome)


def body(what: str, outcome: str) -> None:
    """Leave an Effect for the start, meet the other jobs if that is where the kill is, and end."""
    Effect.objects.create(what=what, pid=os.getpid())
    killer.in_body()
    if outcome == "fails":
        raise ValueError("no luck")
    if outcome == "snoozes" and Effect.objects.filter(what=what).count() == 1:
        raise Snooze(0)


# ── Killing ───────────────────────────────────────────────────────────────────────────────────────────────


class Killer:
    """Without an order: kills nobody."""

    def in_body(self) -> None:
        pass


class Hired(Killer):
    """Kills `victim` once, when all `jobs` jobs have come to `point`."""

    def __init__(self, victim: str, point: str, directory: str, jobs: int) -> None:
        self.victim = victim
        self.point = point
        self.jobs = jobs
        self.killed = Path(directory, "killed")
        self.executor = Path(directory, "executor")  # its pid, once all jobs are in their bodies
        self.supervisor = os.getpid()
        self.start_together = threading.Barrier(jobs)
        self.arrived = 0
        self.lock = threading.Lock()

    def kill(self) -> None:
        """Kill the victim, unless that has been done."""
        pid = self.supervisor if self.victim == "supervisor" else int(self.executor.read_text())
        try:
            self.killed.touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(pid, signal.SIGKILL)

    def stay(self, at_last: Callable[[], None]) -> None:
        """Wait here for the end. The last of the jobs to arrive brings it about."""
        if self.killed.exists():
            return
        with self.lock:
            self.arrived += 1
            everybody = self.arrived == self.jobs
        if everybody:
            self.executor.write_text(str(os.getpid()))
            at_last()
        threading.Event().wait()

    def in_body(self) -> None:
        match self.point:
            case "in the body":
                self.stay(self.kill)
            case "in a renewal":
                self.stay(lambda: None)
            case "while stopping" | "at the very end":
                self.stay(lambda: os.kill(self.supervisor, signal.SIGTERM))
            case "before the settle is committed" | "after the settle is committed":
                self.start_together.wait()

    # What is wrapped, and when that kills.

    def wrap(self) -> None:
        match self.point:
            case "before the claim is committed":
                after(supervisor, "carry_out", lambda report: self._if(self._claimed(report)))
            case "after the claim is committed":
                after(Database, "_in_transaction", lambda report: self._if(self._claimed(report)))
            case "after the claim":
                after(supervisor.Supervisor, "_take_in", lambda _: self.kill())
            case "before the start is marked":
                before(Marks, "start", lambda: self.stay(self.kill))
            case "before the body":
                before(execution, "_prepare", lambda: self.stay(self.kill))
            case "after the body":
                for name in ("_outcome_of", "_outcome_of_result"):
                    after(execution, name, lambda _: self.stay(self.kill))
            case "before the end is told":
                self._meet_before_telling()
            case "before the completion is committed":
                after(store, "complete_own", lambda _: self.stay(self.kill))
            case "after the completion is committed":
                after(execution, "_run_atomically", lambda _: self.stay(self.kill))
            case "before the settle is committed":
                self._settle_together()
                after(supervisor, "carry_out", lambda report: self._if(self._settled(report)))
            case "after the settle is committed":
                self._settle_together()
                after(Database, "_in_transaction", lambda report: self._if(self._settled(report)))
            case "in a renewal":
                after(store, "renew", lambda renewed: self._if(self.executor.exists()))
            case "before the sweep is committed":
                after(maintenance, "sweep", lambda swept: self._if(swept.total >= self.jobs))
            case "after the sweep is committed":
                after(Database, "_in_transaction", lambda swept: self._if(self._swept(swept)))
            case "while stopping":
                after(supervisor.Supervisor, "_stop", lambda _: self.kill())
            case "at the very end":
                before(supervisor.Supervisor, "_close", self.kill)
            case "in the body":
                pass
            case _:
                raise ValueError(self.point)

    def _if(self, condition: bool) -> None:
        if condition:
            self.kill()

    def _claimed(self, report: object) -> bool:
        if not isinstance(report, Report) or report.claimed is None:
            return False
        return len(report.claimed.claims) == self.jobs

    def _settled(self, report: object) -> bool:
        return isinstance(report, Report) and len(report.settled) == self.jobs

    def _swept(self, swept: object) -> bool:
        return isinstance(swept, maintenance.Swept) and swept.total >= self.jobs

    def _meet_before_telling(self) -> None:
        send = Channel.send

        def wrapped(channel: Channel, messages: list[Any]) -> None:
            if any(message[0] in ("done", "returned") for message in messages):
                self.stay(self.kill)
            send(channel, messages)

        Channel.send = wrapped  # type: ignore[method-assign]

    def _settle_together(self) -> None:
        """Keep outcomes back until all of them can be settled in one turn, which claims nothing."""
        host = supervisor.Supervisor
        take, room = host._take_unsettled, host._room

        def take_all(self_: supervisor.Supervisor, now: float) -> list[Any]:
            released = any(verdict.event is Event.RELEASE for _, verdict in self_.unsettled)
            return take(self_, now) if released or len(self_.unsettled) >= self.jobs else []

        def room_for_missing(self_: supervisor.Supervisor) -> int:
            return room(self_) if len(self_.held) < self.jobs else 0

        host._take_unsettled = take_all  # type: ignore[method-assign]
        host._room = room_for_missing  # type: ignore[method-assign]


def before(owner: Any, name: str, act: Callable[[], None]) -> None:
    """Let `act` happen before each call of a function of the package."""
    function = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act()
        return function(*args, **kwargs)

    setattr(owner, name, wrapped)


def after(owner: Any, name: str, act: Callable[[Any], None]) -> None:
    """Let `act` happen after each call of a function of the package, and see what it returned."""
    function = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        act(result)
        return result

    setattr(owner, name, wrapped)


killer = Killer()
if order := os.environ.get(ORDER):
    killer = hired = Hired(**json.loads(order))
    hired.wrap()
