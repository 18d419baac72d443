"""Ends running jobs that are overdue, or that somebody has asked to stop.

First gently: an exception is raised in the body. A body that goes on regardless costs its executor: that gets
no more jobs, its other jobs may finish, and then it is killed; at once where it does not even answer. What
became of its jobs is settled when the kernel has said that it is gone.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable

from .channel import NEVER, clock
from .children import Child, Held
from .exceptions import JobStopped
from .lifecycle import JobError

logger = logging.getLogger(__name__)

HEED_WITHIN = 5.0  # seconds that a body has to end after an exception was raised in it
KILL_GRACE = 30.0  # seconds that its neighbours have to finish before their executor is killed
FEW = 1000  # jobs that are watched before anybody looks which of them have ended


class Timeouts:
    def __init__(self) -> None:
        self._overdue_at: list[tuple[float, int, Child]] = []  # a heap; tickets keep it total
        self._most = FEW  # entries until those of jobs that have ended are thrown away

    def started(self, child: Child, held: Held, at: float) -> None:
        """Watch a job that has been started."""
        if held.abort_reason:  # somebody asked to stop it while it was on its way
            child.abort(held, held.abort_reason, JobStopped.message)
        elif held.timeout is not None:
            if len(self._overdue_at) >= self._most:
                self._forget_ended()
            heapq.heappush(self._overdue_at, (at + held.timeout, held.ticket, child))

    def _forget_ended(self) -> None:
        """Most jobs end long before they are overdue, and would be kept in mind until then."""
        self._overdue_at = [entry for entry in self._overdue_at if entry[1] in entry[2].jobs]
        heapq.heapify(self._overdue_at)
        self._most = max(2 * len(self._overdue_at), FEW)

    def enforce(self, children: Iterable[Child]) -> None:
        """Abort overdue jobs; end executors whose jobs do not heed it, or which no longer answer."""
        now = clock()
        while self._overdue_at and self._overdue_at[0][0] <= now:
            _, ticket, child = heapq.heappop(self._overdue_at)
            held = child.jobs.get(ticket)
            if held is not None and not held.abort_reason:
                child.abort(held, "timeout", error(held.timeout).message)
        for child in children:
            if child.killed_for or child.is_inline:
                continue
            stubborn = [held for held in child.aborting.values() if held.aborted_at + HEED_WITHIN <= now]
            if not stubborn:
                continue
            child.retiring = True
            others = any(held.started and not held.abort_reason for held in child.jobs.values())
            answers = not any(held.ticket in child.unanswered for held in stubborn)
            if others and answers and now < _kill_at(stubborn):
                continue
            names = ", ".join(sorted({held.claim.job_name for held in stubborn}))
            how = "went on after it was told to end" if answers else "no longer lets its process answer"
            logger.warning("Executor %s is killed: %s %s.", child.pid, names, how)
            child.kill(killed_for=names)

    def next_deadline(self, children: Iterable[Child]) -> float:
        """When `enforce` has to be called again."""
        now = clock()
        deadlines = [self._overdue_at[0][0]] if self._overdue_at else []
        for child in children:
            if child.aborting and not child.killed_for and not child.is_inline:
                heed_by = [held.aborted_at + HEED_WITHIN for held in child.aborting.values()]
                deadlines += [at for at in (*heed_by, _kill_at(child.aborting.values())) if at > now]
        return min(deadlines, default=NEVER)


def _kill_at(held: Iterable[Held]) -> float:
    return min(one.aborted_at for one in held) + HEED_WITHIN + KILL_GRACE


def error(timeout: float | None, then: str = "") -> JobError:
    """What is recorded of a job that was overdue."""
    text = f"The job ran for longer than its timeout of {timeout:g} s. {then}".strip()
    return JobError("django_pgjobs.exceptions.JobTimeout", text)
