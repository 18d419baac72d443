"""Which claimed job goes to which executor, and how many more can be used.

Jobs wait here between their claim and a slot, a moment at most. From what jobs of a name have lasted so far,
this knows how much work to claim ahead of free slots, so that short jobs flow in batches and long ones stay
in the queue for other hosts. It knows executors and claims, and neither outcomes nor the database.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .channel import NEVER, clock
from .children import Child, Held

BATCH = 1000  # jobs that one statement claims at most
MOST_AHEAD = 2000  # jobs that are claimed before a slot is free for them, however short they are
AHEAD = 0.1  # seconds of work that is claimed before a slot is free for it
AHEAD_BYTES = 16 * 1024 * 1024  # of payloads that are claimed before a slot is free for them
CHUNK = 0.02  # seconds of work that an executor is given beyond its slots
START_WITHIN = 1.0  # seconds after which a job that has not started goes back to the queue
MOST_SUSPECTS = 100  # jobs that wait to run alone, one after the other
FIRST_GUESS = 0.05  # seconds that jobs are taken to last before any has finished


class Line:
    """The jobs of one kind, plain or async, that wait for a slot."""

    def __init__(self, slots: int) -> None:
        self.slots = slots  # of this kind, in each executor
        self.jobs: deque[Held] = deque()
        self.crowded_until = 0.0  # jobs of this kind came in that found no slot


class Dispatch:
    """The jobs of a host that wait for a slot, and what has been learnt of how long jobs take."""

    def __init__(self, threads: int, async_slots: int, lease: float, look_again: float) -> None:
        self._threads = threads
        self._lease = lease
        self._look_again = look_again  # seconds for which jobs of a crowded kind are not claimed ahead
        self._lines = {False: Line(threads), True: Line(async_slots)}  # by whether it is async
        self._suspects: deque[Held] = deque()  # they have killed an executor, or were near when one died
        self._durations: dict[str, float] = {}  # seconds, by job name
        self._mean_duration = FIRST_GUESS
        self._mean_bytes = 1.0  # of a payload

    def add(self, held: Held) -> bool:
        """Let a claimed job wait for a slot. False if it is a suspect, and too many of these wait already."""
        self._mean_bytes += (len(held.claim.payload) - self._mean_bytes) * 0.05
        if not held.claim.crashes:
            self._lines[held.is_async].jobs.append(held)
        elif len(self._suspects) < MOST_SUSPECTS:
            self._suspects.append(held)
        else:
            return False
        return True

    def withdraw(self, held: Held) -> bool:
        """Take a job out again. False if it does not wait here."""
        for jobs in (self._suspects, *(line.jobs for line in self._lines.values())):
            if held in jobs:
                jobs.remove(held)
                return True
        return False

    def take_overdue(self, now: float, *, everything: bool) -> list[Held]:
        """Take out the jobs that have waited for too long: another host may have a slot for them."""
        overdue = []
        for line in self._lines.values():
            while line.jobs and (everything or line.jobs[0].claimed_at + START_WITHIN <= now):
                overdue.append(line.jobs.popleft())
                line.crowded_until = now + self._look_again
                self._mean_duration = max(self._mean_duration, START_WITHIN)  # they have turned out long
        while self._suspects and (everything or self._suspects[0].claimed_at + self._lease / 4 <= now):
            overdue.append(self._suspects.popleft())
        return overdue

    @property
    def next_deadline(self) -> float:
        """When a job has waited for too long, or jobs of a crowded kind may be claimed ahead again."""
        now = clock()
        deadlines = [line.crowded_until for line in self._lines.values() if line.crowded_until > now]
        deadlines += [line.jobs[0].claimed_at + START_WITHIN for line in self._lines.values() if line.jobs]
        deadlines += [held.claimed_at + self._lease / 4 for held in self._suspects]
        return min(deadlines, default=NEVER)

    def learn(self, name: str, seconds: float) -> None:
        """Take note of how long a job has run."""
        known = self._durations.get(name, seconds)
        self._durations[name] = known + (seconds - known) * 0.1
        self._mean_duration += (seconds - self._mean_duration) * 0.05

    def room(self, working: Sequence[Child], leaving: Sequence[Child] = ()) -> int:
        """How many more jobs are worth a claim: free slots, and some work ahead where jobs are short."""
        now = clock()
        free = {
            line: self._free_slots(line, working, leaving) - len(line.jobs) for line in self._lines.values()
        }
        crowded = [slots for line, slots in free.items() if now < line.crowded_until]
        if crowded:
            return max(min(crowded), 0)  # more jobs of this kind would fare no better
        seconds = len(working) * self._threads * AHEAD
        ahead = min(
            int(seconds / max(self._mean_duration, 1e-5)), int(AHEAD_BYTES / self._mean_bytes), MOST_AHEAD
        )
        room = min(sum(free.values()) + ahead, BATCH)
        # While there is plenty to do, fewer and larger claims are better.
        return room if room >= min(ahead, BATCH) // 2 else 0

    def _free_slots(self, line: Line, working: Sequence[Child], leaving: Sequence[Child]) -> int:
        """A job that still runs in an executor on its way out keeps a slot from the one that replaces it.

        Else a host that replaces executors for their size would run ever more of them. What is to end does
        not count, since nobody knows whether it will.
        """
        is_async = line is self._lines[True]
        taken = sum(child.count(is_async) for child in working)
        taken += sum(
            held.is_async is is_async and not held.abort_reason
            for child in leaving
            for held in child.jobs.values()
        )
        return len(working) * line.slots - taken

    def hand_out(
        self, working: Sequence[Child], spares: Sequence[Child], leaving: Sequence[Child] = ()
    ) -> None:
        """Give waiting jobs to executors: to free slots first, and a little ahead where jobs are short."""
        self._isolate_suspect([*spares, *working])
        working = [child for child in working if not child.isolates]
        for is_async, line in self._lines.items():
            if not line.jobs or not working:
                continue
            batches: dict[Child, list[Held]] = {child: [] for child in working}
            free = {child: min(line.slots - child.count(is_async), child.left) for child in working}
            most = self._free_slots(line, working, leaving) if leaving else BATCH
            while line.jobs and most > 0 and free[child := max(working, key=free.__getitem__)] > 0:
                batches[child].append(line.jobs.popleft())
                free[child] -= 1
                most -= 1
            if not is_async and most > 0:
                for child in working:
                    self._add_ahead(line, batches[child], child)
            for child, batch in batches.items():
                if batch:
                    child.assign(batch, self._lease / 2)

    def _add_ahead(self, line: Line, batch: list[Held], child: Child) -> None:
        """Add jobs that are likely to have started within CHUNK, to keep an executor from running dry."""
        queued = child.count(is_async=False) + len(batch) - line.slots
        seconds = queued * self._mean_duration
        while line.jobs and queued < BATCH and len(batch) < child.left:
            seconds += self._durations.get(line.jobs[0].claim.job_name, START_WITHIN)
            if seconds > CHUNK * self._threads:
                return
            batch.append(line.jobs.popleft())
            queued += 1

    def _isolate_suspect(self, children: Sequence[Child]) -> None:
        """Run one suspect at a time alone in an executor that has nothing else to do; a spare, if possible.

        So a job that kills its executor takes nobody else along the second time.
        """
        if self._suspects and not any(child.isolates for child in children):
            idle = next((child for child in children if not child.jobs and child.left > 0), None)
            if idle is not None:
                idle.assign([self._suspects.popleft()], self._lease / 2)
