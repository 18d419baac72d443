"""A model of the protocol, small enough to look at every state that it can get into.

A few jobs, a few workers with one slot each, a sweeper and a person do whatever the protocol lets them do, in
every order; workers die, answers get lost, and leases end at any moment, which stands for every pause and
every clock. What an outcome means is not written down here again: `lifecycle.decide`, TRANSITIONS and
REFUNDED are asked, so that the model cannot drift from the code.

Two simplifications. A token is known only by whether it is the one in the row, since nothing else about it
ever matters. And nobody starts a job on a claim whose lease has ended: the worker looks at its age before it
hands a job out (variant "start on an old claim" shows what that is for).

`explore` walks breadth-first, so the way to a violation that it finds is a shortest one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import NamedTuple

from django_pgjobs.lifecycle import (
    FINISHED,
    REFUNDED,
    TRANSITIONS,
    Completed,
    Crashed,
    Event,
    Failed,
    Interrupted,
    JobError,
    Lost,
    Outcome,
    Policy,
    Snoozed,
    Status,
    Stopped,
    Unknown,
    Unstarted,
    decide,
)

_ERROR = JobError("", "boom")
OUTCOMES: dict[str, Outcome] = {
    "ok": Completed(),
    "failed": Failed(_ERROR),
    "gave up": Failed(_ERROR, give_up=True),
    "snoozed": Snoozed(1.0),
    "unstarted": Unstarted(),
    "interrupted": Interrupted(),
    "stopped": Stopped(),
    "crashed": Crashed(_ERROR),
    "unknown": Unknown(_ERROR),
    "long unknown": Unknown(_ERROR),
    "lost": Lost(_ERROR),
}
UNSTARTED = ("unstarted", "unknown", "long unknown")  # what can become of a job that is not started
BODY_ENDS = ("ok", "failed", "gave up", "snoozed")  # how a body can end by itself


# ── The properties ────────────────────────────────────────────────────────────────────────────────────────

ILLEGAL = "a job changes in a way that the table of transitions does not have"
FINAL = "a finished job is changed by others than a person and the pruner"
STALE = "an outcome is recorded by a holder whose claim is no longer valid"
STALE_RENEWAL = "a claim is renewed by somebody who does not hold it"
LIVE_CLAIM_SWEPT = "a claim is swept whose lease has not ended"
TOO_MANY_STARTS = "a job is started more often than max_attempts"
TOO_MANY_ATTEMPTS = "attempts exceed max_attempts"
STARTED_AGAIN = "an at-most-once job is started again, though what became of its last start is unknown"
TWO_BODIES = "two bodies of a job run at once, though no lease has ended"
EFFECT_WITHOUT_COMPLETION = "a holder commits its effects, though its completion was refused"
STUCK = "there is no way to a final status without further faults"


# ── The protocol, sound or weakened ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Protocol:
    """How jobs are kept. The defaults are the sound protocol; each other value weakens it."""

    jobs: int = 1
    workers: int = 2
    max_attempts: int = 2
    rerun_if_lost: bool = True
    outcomes: frozenset[str] = frozenset(OUTCOMES)  # those that occur; with few of them, more workers fit in
    answers_get_lost: bool = True
    people: bool = True  # cancel, stop, retry, discard

    guard: str = "token"  # or "status", or "none"
    sweep: str = "locked"  # or "guarded ids", "ids": read first, written later; or "none"
    counts_at_claim: bool = True  # or at a failure that the worker records
    looks_at_row_count: bool = True
    awaits_kill: bool = True
    looks_at_age: bool = True


class Job(NamedTuple):
    """A row, and below it what nobody in the protocol can see."""

    status: Status | None = Status.QUEUED  # None: deleted
    attempts: int = 0
    expired: bool = False  # locked_at is older than the lease
    stop_requested: bool = False

    starts: int = 0  # that were not refunded, since a person last asked for the job
    in_doubt: bool = False  # it was started, and what became of that has not been recorded


class Worker(NamedTuple):
    """A worker host with one slot. `job` is what it holds, or what its unanswered claim took, if any."""

    phase: str = "idle"  # asked, holding, running, done, or leaving: gave back a job whose body still runs
    job: int | None = None
    claim: str = ""  # valid, swept, or given back
    outcome: str = ""
    has_body: bool = False


class State(NamedTuple):
    jobs: tuple[Job, ...]
    workers: tuple[Worker, ...]
    swept_ids: frozenset[int] = frozenset()  # what a sweeper has read and not yet written


class Step(NamedTuple):
    """What somebody does, and where that leads. `wrong` lists the properties that it violates."""

    name: str
    state: State
    is_fault: bool = False  # or something that only a person can do
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What `decide` is told of a job."""

    attempts: int
    max_attempts: int
    rerun_if_lost: bool
    unknown_since: float | None = None
    crashes: int = 0
    interruptions: int = 0
    claimed_at: float = 0.0


_POLICY = Policy()


# ── Moves ─────────────────────────────────────────────────────────────────────────────────────────────────


class Moves:
    """Everything that can happen in a state."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol

    def start(self) -> State:
        return State((Job(),) * self.protocol.jobs, (Worker(),) * self.protocol.workers)

    def steps(self, state: State) -> Iterator[Step]:
        seen = set()
        for index, worker in enumerate(state.workers):
            if worker not in seen:  # workers that are alike can do alike
                seen.add(worker)
                yield from self._worker(state, index, worker)
        yield from self._sweeper(state)
        for index, job in enumerate(state.jobs):
            yield from self._time(state, index, job)
            yield from self._person(state, index, job)

    def canonical(self, state: State) -> State:
        """One state for all that differ only in which worker and which job is which, or in what is forgotten.

        A holder whose settle will be refused by its token may as well have forgotten the outcome.
        """
        workers = state.workers
        if self.protocol.guard == "token" and self.protocol.looks_at_row_count:
            workers = tuple(
                worker._replace(outcome="") if worker.claim in ("swept", "given back") else worker
                for worker in workers
            )
        if len(state.jobs) == 1:
            return State(state.jobs, tuple(sorted(workers, key=_order)), state.swept_ids)
        return min(
            (_renumbered(state, workers, places) for places in permutations(range(len(state.jobs)))),
            key=lambda state: ([_order_of_job(job) for job in state.jobs], [*map(_order, state.workers)]),
        )

    # A worker.

    def _worker(self, state: State, w: int, worker: Worker) -> Iterator[Step]:
        if worker != Worker():
            yield self._kill(state, w, worker)
        match worker.phase:
            case "idle":
                yield from self._claims(state, w)
            case "asked":
                yield self._look_up(state, w, worker)
            case "holding":
                yield from self._holds(state, w, worker)
            case "running":
                yield from self._runs(state, w, worker)
            case "done":
                yield from self._settles(state, w, worker)
            case "leaving":
                yield Step("the body ends", _with_worker(state, w, Worker()))
        if worker.phase in ("holding", "running", "done"):
            yield from self._renews(state, w, worker)

    def _kill(self, state: State, w: int, worker: Worker) -> Step:
        return Step(f"kill {worker.phase}", _with_worker(state, w, Worker()), is_fault=True)

    def _claims(self, state: State, w: int) -> Iterator[Step]:
        lossy = self.protocol.answers_get_lost
        if lossy:
            yield Step("claim, not received", _with_worker(state, w, Worker("asked")), is_fault=True)
        for j, job in enumerate(state.jobs):
            if job.status is not Status.QUEUED:
                continue
            counted = job.attempts + int(self.protocol.counts_at_claim)
            claimed = job._replace(
                status=Status.PROCESSING, attempts=counted, expired=False, stop_requested=False
            )
            taken = _with_job(_without_claim(state, j, "swept"), j, claimed)
            wrong = (TOO_MANY_ATTEMPTS,) if counted > self.protocol.max_attempts else ()
            holding = _with_worker(taken, w, Worker("holding", j, "valid"))
            yield Step("claim", holding, wrong=wrong)
            if lossy:
                unanswered = _with_worker(taken, w, Worker("asked", j, "valid"))
                yield Step("claim, answer lost", unanswered, is_fault=True, wrong=wrong)

    def _look_up(self, state: State, w: int, worker: Worker) -> Step:
        """Release what the unanswered claim took, if it still holds."""
        if worker.claim == "valid" and worker.job is not None:
            state, _ = self._write(state, worker.job, Event.RELEASE)
        return Step("look up, release", _with_worker(state, w, Worker()))

    def _holds(self, state: State, w: int, worker: Worker) -> Iterator[Step]:
        assert worker.job is not None
        job = state.jobs[worker.job]
        for outcome in self._occurring(UNSTARTED):
            yield Step(outcome, _with_worker(state, w, worker._replace(phase="done", outcome=outcome)))
        is_old = worker.claim != "valid" or job.expired
        if is_old and self.protocol.looks_at_age:
            return
        started = job._replace(starts=job.starts + 1, in_doubt=True)
        wrong = []
        if started.starts > self.protocol.max_attempts:
            wrong.append(TOO_MANY_STARTS)
        if job.in_doubt and not self.protocol.rerun_if_lost:
            wrong.append(STARTED_AGAIN)
        running = _with_worker(
            _with_job(state, worker.job, started), w, worker._replace(phase="running", has_body=True)
        )
        yield Step("start", running, wrong=(*wrong, *_two_bodies(running)))

    def _runs(self, state: State, w: int, worker: Worker) -> Iterator[Step]:
        ended = worker._replace(phase="done", has_body=False)
        for outcome in self._occurring(BODY_ENDS):
            yield Step(f"end: {outcome}", _with_worker(state, w, ended._replace(outcome=outcome)))
        for outcome in self._occurring(("interrupted", "crashed")):
            goes_on = outcome == "interrupted" and not self.protocol.awaits_kill
            halted = ended._replace(outcome=outcome, has_body=goes_on)
            yield Step(outcome, _with_worker(state, w, halted), is_fault=True)

    def _occurring(self, outcomes: tuple[str, ...]) -> Iterator[str]:
        return (outcome for outcome in outcomes if outcome in self.protocol.outcomes)

    def _renews(self, state: State, w: int, worker: Worker) -> Iterator[Step]:
        assert worker.job is not None
        job = state.jobs[worker.job]
        if not self._passes_guard(job, worker):
            if worker.phase == "holding":
                yield Step("renew, refused", _with_worker(state, w, Worker()))
            return
        wrong = () if worker.claim == "valid" else (STALE_RENEWAL,)
        renewed = _with_job(state, worker.job, job._replace(expired=False))
        if job.expired:
            yield Step("renew", renewed, wrong=wrong)
        if job.stop_requested and worker.phase != "done":
            stopped = worker._replace(phase="done", outcome="stopped", has_body=False)
            yield Step("renew, stop", _with_worker(renewed, w, stopped), wrong=wrong)

    def _settles(self, state: State, w: int, worker: Worker) -> Iterator[Step]:
        assert worker.job is not None
        job = state.jobs[worker.job]
        name = f"settle {worker.outcome}"
        gone = Worker("leaving", worker.job, "given back", has_body=True) if worker.has_body else Worker()
        if not self._passes_guard(job, worker):
            swept = worker.claim == "swept"  # it was never accepted, not even with an answer that was lost
            believes = worker.outcome == "ok" and swept and not self.protocol.looks_at_row_count
            wrong = (EFFECT_WITHOUT_COMPLETION,) if believes else ()
            yield Step(f"{name}, refused", _with_worker(state, w, gone), wrong=wrong)
            return
        event = self._decide(job, worker.outcome)
        settled, wrong = self._write(state, worker.job, event, worker)
        if worker.claim != "valid":
            wrong = (STALE, *wrong)
        yield Step(name, _with_worker(settled, w, gone), wrong=wrong)
        if self.protocol.answers_get_lost:
            yield Step(f"{name}, answer lost", settled, is_fault=True, wrong=wrong)

    def _passes_guard(self, job: Job, worker: Worker) -> bool:
        match self.protocol.guard:
            case "token":
                return worker.claim == "valid" and job.status is Status.PROCESSING
            case "status":
                return job.status is Status.PROCESSING
            case _:
                return job.status is not None

    # The sweeper.

    def _sweeper(self, state: State) -> Iterator[Step]:
        lost = frozenset(
            j for j, job in enumerate(state.jobs) if job.status is Status.PROCESSING and job.expired
        )
        if self.protocol.sweep == "none":
            return
        if self.protocol.sweep == "locked":
            if lost:
                yield self._sweep("sweep", state, lost)
            return
        if lost - state.swept_ids:
            yield Step("sweeper reads", state._replace(swept_ids=lost))
        if state.swept_ids:
            read = state.swept_ids
            if self.protocol.sweep == "guarded ids":  # the token is compared, so the claim is still the same
                read = frozenset(j for j in read if state.jobs[j].status is Status.PROCESSING)
            yield self._sweep("sweeper writes", state._replace(swept_ids=frozenset()), read)

    def _sweep(self, name: str, state: State, ids: frozenset[int]) -> Step:
        wrong: tuple[str, ...] = ()
        for j in sorted(ids):
            job = state.jobs[j]
            if job.status is None:
                continue
            if job.status is Status.PROCESSING and not job.expired:
                wrong = (*wrong, LIVE_CLAIM_SWEPT)
            state, more = self._write(state, j, self._decide(job, "lost"))
            wrong = (*wrong, *more)
        return Step(name, state, wrong=wrong)

    # Time, and people.

    def _time(self, state: State, j: int, job: Job) -> Iterator[Step]:
        if job.status is Status.PROCESSING and not job.expired:
            is_held = any(worker.job == j and worker.claim == "valid" for worker in state.workers)
            yield Step("expire", _with_job(state, j, job._replace(expired=True)), is_fault=is_held)
        if job.status in FINISHED:
            yield Step("prune", _with_job(state, j, Job(None)), is_fault=True)

    def _person(self, state: State, j: int, job: Job) -> Iterator[Step]:
        if not self.protocol.people:
            return
        for event in (Event.CANCEL, Event.RETRY, Event.DISCARD):
            sources, target = TRANSITIONS[event]
            if job.status in sources:
                # A person who wants a job run again starts the counting anew.
                decided = Job(target) if event is Event.RETRY else job._replace(status=target)
                yield Step(event.value, _with_job(state, j, decided), is_fault=True)
        if job.status is Status.PROCESSING and not job.stop_requested:
            asked = job._replace(stop_requested=True)
            yield Step("request stop", _with_job(state, j, asked), is_fault=True)

    # What is written.

    def _decide(self, job: Job, outcome: str) -> Event:
        since = -Policy().unknown_job_after if outcome == "long unknown" else None
        attempts = job.attempts + self._counts_late(outcome)
        facts = Facts(attempts, self.protocol.max_attempts, self.protocol.rerun_if_lost, since)
        return decide(OUTCOMES[outcome], facts, _POLICY).event

    def _counts_late(self, outcome: str) -> bool:
        return not self.protocol.counts_at_claim and outcome in ("failed", "gave up", "crashed")

    def _write(
        self, state: State, j: int, event: Event, holder: Worker | None = None
    ) -> tuple[State, tuple[str, ...]]:
        """Write a verdict, as SETTLE does, for a holder who has passed the guard, or for a sweeper."""
        job = state.jobs[j]
        sources, target = TRANSITIONS[event]
        wrong: tuple[str, ...] = ()
        if job.status not in sources:
            wrong = (FINAL,) if job.status in FINISHED else (ILLEGAL,)
        if target is Status.QUEUED and job.stop_requested:
            target = Status.CANCELLED
        outcome = "" if holder is None else holder.outcome
        attempts, starts = job.attempts, job.starts
        if event in REFUNDED:
            attempts = max(attempts - self.protocol.counts_at_claim, 0)
            starts = max(starts - (outcome in ("snoozed", "interrupted")), 0)
        attempts += self._counts_late(outcome)
        written = job._replace(
            status=target,
            attempts=attempts,
            expired=False,
            stop_requested=False,
            starts=starts,
            in_doubt=job.in_doubt and outcome not in ("failed", "snoozed"),
        )
        how = "swept" if holder is None else "given back"
        return _with_job(_without_claim(state, j, how), j, written), wrong


def _two_bodies(state: State) -> tuple[str, ...]:
    """Whether two bodies run of which neither has outlived its lease."""
    running = [w.job for w in state.workers if w.has_body and w.claim != "swept"]
    return (TWO_BODIES,) if len(running) > len(set(running)) else ()


def _with_job(state: State, j: int, job: Job) -> State:
    return state._replace(jobs=(*state.jobs[:j], job, *state.jobs[j + 1 :]))


def _with_worker(state: State, w: int, worker: Worker) -> State:
    return state._replace(workers=(*state.workers[:w], worker, *state.workers[w + 1 :]))


def _without_claim(state: State, j: int, how: str) -> State:
    """Nobody's token is in row `j` any more."""
    workers = tuple(
        worker._replace(claim=how) if worker.job == j and worker.claim == "valid" else worker
        for worker in state.workers
    )
    return state._replace(workers=workers)


# ── Looking at every state ────────────────────────────────────────────────────────────────────────────────


@dataclass
class Found:
    """What an exploration has seen. `counterexamples` has a shortest way to each property's violation."""

    states: int = 0
    steps: int = 0
    counterexamples: dict[str, list[str]] = field(default_factory=dict)


def explore(protocol: Protocol, *, until: str | None = None) -> Found:
    """Visit every state that the protocol can get into, or stop once the property `until` is violated."""
    moves = Moves(protocol)
    start = moves.start()
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    leads_here: dict[State, list[State]] = {}  # by steps that are no faults
    waiting = deque([start])
    found = Found()
    while waiting:
        state = waiting.popleft()
        for step in moves.steps(state):
            found.steps += 1
            for name in step.wrong:
                if name not in found.counterexamples:
                    found.counterexamples[name] = [*_way_to(state, came_from), step.name]
            if until in found.counterexamples:
                found.states = len(came_from)
                return found
            following = moves.canonical(step.state)
            if not step.is_fault:
                leads_here.setdefault(following, []).append(state)
            if following not in came_from:
                came_from[following] = (state, step.name)
                waiting.append(following)
    found.states = len(came_from)
    stuck = _stuck(came_from, leads_here)
    if stuck is not None:
        found.counterexamples[STUCK] = _way_to(stuck, came_from)
    return found


def _renumbered(state: State, workers: Iterable[Worker], places: tuple[int, ...]) -> State:
    """The state with the job `places[n]` as job n, and the workers in an order of their own."""
    new = {old: place for place, old in enumerate(places)}
    moved = (w if w.job is None else w._replace(job=new[w.job]) for w in workers)
    return State(
        tuple(state.jobs[old] for old in places),
        tuple(sorted(moved, key=_order)),
        frozenset(new[j] for j in state.swept_ids),
    )


def _order_of_job(job: Job) -> tuple[str, int, bool, bool, int, bool]:
    return (job.status or "", *job[1:])


def _order(worker: Worker) -> tuple[str, int, str, str, bool]:
    phase, job, claim, outcome, has_body = worker
    return phase, -1 if job is None else job, claim, outcome, has_body


def _stuck(
    states: dict[State, tuple[State, str] | None], leads_here: dict[State, list[State]]
) -> State | None:
    """The first state, if any, from which no way without faults leads to where all jobs have finished."""
    good = {state for state in states if all(job.status in (None, *FINISHED) for job in state.jobs)}
    waiting = list(good)
    while waiting:
        for before in leads_here.get(waiting.pop(), ()):
            if before not in good:
                good.add(before)
                waiting.append(before)
    return next((state for state in states if state not in good), None)


def _way_to(state: State, came_from: dict[State, tuple[State, str] | None]) -> list[str]:
    way = []
    while (came := came_from[state]) is not None:
        state, name = came
        way.append(name)
    return way[::-1]
