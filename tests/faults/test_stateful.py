"""Whatever workers, sweepers and people do one after the other, the table holds what a dictionary foretells.

Hypothesis makes up what happens. Each actor has a connection of its own, and a worker may leave its
transaction open for a while; then the others pass over what it has locked. After every step each of them sees
the rows that the dictionary says it sees. At the end the audit's history is checked, as after any harness.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, ClassVar

import psycopg
import pytest
from django.db import IntegrityError, connection
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from django_pgjobs import maintenance, sql, store
from django_pgjobs.lifecycle import (
    FINISHED,
    Completed,
    Crashed,
    Failed,
    Interrupted,
    JobError,
    Outcome,
    Policy,
    Snoozed,
    Status,
    Stopped,
    Unknown,
    Unstarted,
    decide,
)
from django_pgjobs.models import BackgroundJob
from django_pgjobs.store import Claim, NewJob
from tests.factories import make_job
from tests.faults.audit import Audit
from tests.faults.checker import WORKER, History, check
from tests.sessions import session

pytestmark = pytest.mark.django_db(transaction=True)

QUEUED, PROCESSING, FAILED, COMPLETED, CANCELLED = Status

LEASE = timedelta(hours=1)
LATER = timedelta(hours=1)
POLICY = Policy(backoff=LATER, max_crashes=2)
TIME = "time"  # the application name of what only passes time

ERROR = JobError("builtins.ValueError", "boom")
OUTCOMES: dict[str, Outcome] = {
    "ok": Completed("3"),
    "failed": Failed(ERROR),
    "asked to be retried now": Failed(ERROR, retry_in=0.0),
    "gave up": Failed(ERROR, give_up=True),
    "snoozed": Snoozed(LATER.total_seconds()),
    "unstarted": Unstarted(),
    "interrupted": Interrupted(),
    "stopped": Stopped(),
    "crashed": Crashed(JobError("", "executor died with signal 9")),
    "unknown": Unknown(JobError("", "unknown")),
}


@dataclass(frozen=True)
class Job:
    """What the table must hold of a job. Where `run_at` is None it is read, and must be due as `due` says."""

    status: Status = QUEUED
    token: uuid.UUID | None = None
    attempts: int = 0
    max_attempts: int = 3
    crashes: int = 0
    rerun_if_lost: bool = True
    unique_key: str | None = None
    priority: int = 0
    run_at: datetime | None = None
    due: bool = True
    expired: bool = False  # its holder has been silent for longer than the lease
    stop_requested: bool = False
    errors: int = 0
    interruptions: int = 0
    old: bool = False  # nothing has happened to it for long

    @property
    def is_live(self) -> bool:
        return self.status in (QUEUED, PROCESSING)

    def is_held_by(self, claim: Claim) -> bool:
        return self.status is PROCESSING and self.token == claim.token and self.attempts == claim.attempts


Rows = dict[int, Job]


# ── What must come of things ──────────────────────────────────────────────────────────────────────────────


def claimed(job: Job, token: uuid.UUID) -> Job:
    attempts = job.attempts + 1
    return replace(job, status=PROCESSING, token=token, attempts=attempts, expired=False, old=False)


def ended(job: Job, status: Status) -> Job:
    return replace(job, status=status, expired=False, stop_requested=False, old=False)


def queued_again(job: Job, *, refund: bool = False, due: bool | None = None) -> Job:
    """Queued once more; unless somebody has asked to stop it. With `due`, at another time than before."""
    queued = replace(ended(job, CANCELLED if job.stop_requested else QUEUED), token=None)
    if due is not None:
        queued = replace(queued, run_at=None, due=due)
    return replace(queued, attempts=job.attempts - refund)


def failed(job: Job, *, due: bool) -> Job:
    job = replace(job, errors=job.errors + 1)
    return ended(job, FAILED) if job.attempts >= job.max_attempts else queued_again(job, due=due)


def buried(job: Job) -> Job:
    return ended(replace(job, errors=job.errors + 1), FAILED)


def interrupted(job: Job) -> Job:
    if not job.rerun_if_lost:
        return buried(job)
    return queued_again(replace(job, interruptions=job.interruptions + 1), refund=True)


def crashed(job: Job) -> Job:
    job = replace(job, crashes=job.crashes + 1)
    last = job.crashes >= POLICY.max_crashes or not job.rerun_if_lost
    return buried(job) if last else failed(job, due=False)


def lost(job: Job) -> Job:
    return failed(job, due=False) if job.rerun_if_lost else buried(job)


def retried(job: Job) -> Job:
    fresh = replace(job, attempts=0, crashes=0, token=None, run_at=None, due=True)
    return ended(fresh, QUEUED)


SETTLED: dict[str, Callable[[Job], Job]] = {
    "ok": lambda job: ended(job, COMPLETED),
    "failed": lambda job: failed(job, due=False),
    "asked to be retried now": lambda job: failed(job, due=True),
    "gave up": buried,
    "snoozed": lambda job: queued_again(job, refund=True, due=False),
    "unstarted": lambda job: queued_again(job, refund=True),
    "interrupted": interrupted,
    "stopped": lambda job: ended(job, CANCELLED),
    "crashed": crashed,
    "unknown": lambda job: queued_again(job, refund=True, due=False),
}


# ── Who does them ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Worker:
    """A worker host: its connection, the claims that it believes in, and what it has not yet committed."""

    connection: psycopg.Connection[Any]
    id: uuid.UUID = field(default_factory=uuid.uuid4)
    claims: list[Claim] = field(default_factory=list)
    uncommitted: Rows = field(default_factory=dict)
    is_open: bool = False

    def cursor(self) -> psycopg.Cursor[Any]:
        if not self.is_open:
            self.connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
            self.connection.execute(sql.PLANNER)
            self.is_open = True
        return self.connection.cursor()

    def end(self, how: str) -> None:
        self.connection.execute(how)
        self.is_open = False
        self.uncommitted = {}


@dataclass
class World:
    """The connections of all actors, which outlive the examples."""

    workers: list[psycopg.Connection[Any]]
    sweeper: psycopg.Connection[Any]
    time: psycopg.Connection[Any]
    audit: Audit


some_job = st.integers(0, 5)
some_jobs = st.lists(st.integers(0, 5), min_size=1, max_size=3)
some_worker = st.integers(0, 1)
some_settlements = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(sorted(SETTLED))), min_size=1, max_size=3
)
whether_to_commit = st.sampled_from([True, True, False])


class Machine(RuleBasedStateMachine):
    world: ClassVar[World]
    done: ClassVar[Counter[str]] = Counter()  # what the examples have come to, for the record

    def __init__(self) -> None:
        super().__init__()
        BackgroundJob.objects.all()._raw_delete("default")
        self.world.audit.install()
        self.jobs: Rows = {}
        self.workers = [Worker(connection) for connection in self.world.workers]
        self.steps = 0

    def teardown(self) -> None:
        for worker in self.workers:
            if worker.is_open:
                worker.end("ROLLBACK")
        changes = [change for change in self.world.audit.changes() if change.application != TIME]
        assert check(History(changes), everything_ended=False) == []
        self.done.update(examples=1, steps=self.steps, changes=len(changes))

    @initialize()
    def begin_with_some_jobs(self) -> None:
        for max_attempts in (1, 2, 3):
            self.enqueue(due=True, max_attempts=max_attempts, rerun_if_lost=max_attempts != 2, priority=0)
        self.enqueue_with_a_unique_key(key="a")

    # ── New jobs ──────────────────────────────────────────────────────────────────────────────────────────

    @rule(
        due=st.booleans(),
        max_attempts=st.integers(1, 3),
        rerun_if_lost=st.booleans(),
        priority=st.sampled_from([0, 0, 5]),
    )
    def enqueue(self, due: bool, max_attempts: int, rerun_if_lost: bool, priority: int) -> None:
        new = NewJob(
            queue_name="default",
            job_name="tests.jobs.add",
            priority=priority,
            run_at=None,
            delay=timedelta() if due else LATER,
            max_attempts=max_attempts,
            rerun_if_lost=rerun_if_lost,
        )
        id, _, _ = store.enqueue(new, "{}", "default")
        self.jobs[id] = Job(
            due=due, max_attempts=max_attempts, rerun_if_lost=rerun_if_lost, priority=priority
        )
        self.compare()

    @rule(key=st.sampled_from(["a", "b"]))
    def enqueue_with_a_unique_key(self, key: str) -> None:
        changing = (job for worker in self.workers for job in worker.uncommitted.values())
        if any(job.unique_key == key for job in changing):
            return  # it would wait for what becomes of that job
        if any(job.unique_key == key and job.is_live for job in self.jobs.values()):
            with pytest.raises(IntegrityError):
                make_job(unique_key=key)
        else:
            self.jobs[make_job(unique_key=key).pk] = Job(unique_key=key)
        self.compare()

    # ── Workers ───────────────────────────────────────────────────────────────────────────────────────────

    @rule(who=some_worker, limit=st.integers(1, 3), commit=whether_to_commit)
    def claim(self, who: int, limit: int, commit: bool) -> None:
        worker = self.workers[who]
        seen = self.seen_by(worker)
        token = uuid.uuid4()
        waiting = [
            (-job.priority, job.run_at, id)
            for id, job in seen.items()
            if job.status is QUEUED and job.due and id not in self.locked_for(worker)
        ]
        expected = [id for *_, id in sorted(waiting)[:limit]]

        found = store.claim(worker.cursor(), token=token, worker_id=worker.id, limit=limit).claims

        assert [claim.id for claim in found] == expected
        worker.claims += found
        self.changed(worker, {id: replace(claimed(seen[id], token), stop_requested=False) for id in expected})
        self.maybe_commit(worker, commit)

    @precondition(lambda self: any(worker.claims for worker in self.workers))
    @rule(who=some_worker, which=some_settlements, commit=whether_to_commit)
    def settle(self, who: int, which: list[tuple[int, str]], commit: bool) -> None:
        worker = self.worker(who, lambda worker: bool(worker.claims))
        # A host settles what it holds once; it may still have claims that it lost without knowing.
        chosen = {worker.claims[place % len(worker.claims)]: outcome for place, outcome in which}
        valid = {claim: outcome for claim, outcome in chosen.items() if self.is_valid(worker, claim)}

        verdicts = [
            (claim, decide(OUTCOMES[outcome], long_unknown(claim), POLICY))
            for claim, outcome in chosen.items()
        ]
        settled = store.settle(worker.cursor(), verdicts)

        assert settled == {claim.id for claim in valid}
        seen = self.seen_by(worker)
        self.changed(worker, {claim.id: SETTLED[how](seen[claim.id]) for claim, how in valid.items()})
        held, _ = store.held(worker.cursor(), list(chosen))
        assert held == {claim.id for claim in chosen if self.holds(worker, claim)}
        worker.claims = [one for one in worker.claims if one not in chosen or one.id in held]
        self.maybe_commit(worker, commit)

    @precondition(lambda self: any(worker.claims for worker in self.workers))
    @rule(who=some_worker, commit=whether_to_commit)
    def renew(self, who: int, commit: bool) -> None:
        worker = self.worker(who, lambda worker: bool(worker.claims))
        seen = self.seen_by(worker)
        valid = {claim.id for claim in worker.claims if self.is_valid(worker, claim)}

        renewed = store.renew(worker.cursor(), worker.claims)

        assert renewed == {id: seen[id].stop_requested for id in valid}
        self.changed(worker, {id: replace(seen[id], expired=False) for id in valid})
        self.maybe_commit(worker, commit)

    @precondition(lambda self: any(worker.claims for worker in self.workers))
    @rule(who=some_worker, which=st.integers(0, 3))
    def complete_in_the_executor(self, who: int, which: int) -> None:
        worker = self.worker(who, lambda worker: bool(worker.claims))
        claim = worker.claims[which % len(worker.claims)]
        if claim.id in self.locked():
            return  # it would wait
        valid = claim.id in self.jobs and self.jobs[claim.id].is_held_by(claim)
        verdict = decide(OUTCOMES["ok"], claim, POLICY)

        with connection.cursor() as cursor:
            assert store.complete_own(cursor, claim, verdict) is valid

        if valid:
            self.jobs[claim.id] = ended(self.jobs[claim.id], COMPLETED)
        self.compare()

    @precondition(lambda self: any(worker.is_open for worker in self.workers))
    @rule(who=some_worker)
    def commit(self, who: int) -> None:
        self.maybe_commit(self.worker(who, lambda worker: worker.is_open), True)

    @precondition(lambda self: any(worker.is_open for worker in self.workers))
    @rule(who=some_worker)
    def break_the_connection(self, who: int) -> None:
        """What was not committed is undone. The host forgets what it held, as if it had died."""
        worker = self.worker(who, lambda worker: worker.is_open)
        worker.end("ROLLBACK")
        worker.claims = []
        self.compare()

    # ── The sweeper, the pruner and time ──────────────────────────────────────────────────────────────────

    @rule()
    def sweep(self) -> None:
        gone = {id for id, job in self.jobs.items() if job.status is PROCESSING and job.expired}
        gone -= self.locked()

        with self.world.sweeper.transaction(), self.world.sweeper.cursor() as cursor:
            swept = maintenance.sweep(cursor)

        self.jobs |= {id: lost(self.jobs[id]) for id in gone}
        assert swept.total == len(gone)
        assert swept.buried == sum(self.jobs[id].status is FAILED for id in gone)
        self.compare()

    @precondition(lambda self: self.jobs)
    @rule(status=st.sampled_from(sorted(FINISHED)))
    def prune(self, status: Status) -> None:
        old = {id for id, job in self.jobs.items() if job.status is status and job.old}
        with connection.cursor() as cursor:
            assert store.prune(cursor, status, age=LEASE, limit=100) == len(old)
        for id in old:
            del self.jobs[id]
        self.compare()

    @precondition(lambda self: any(job.status is PROCESSING for job in self.jobs.values()))
    @rule(which=some_job)
    def lose_the_lease(self, which: int) -> None:
        id = self.one_of(which, lambda job: job.status is PROCESSING)
        if id is None:
            return
        self.pass_time("locked_at = statement_timestamp() - interval '2 hours'", id)
        self.jobs[id] = replace(self.jobs[id], expired=True)
        self.compare()

    @precondition(lambda self: any(job.status in FINISHED for job in self.jobs.values()))
    @rule(which=some_job)
    def grow_old(self, which: int) -> None:
        id = self.one_of(which, lambda job: job.status in FINISHED)
        if id is None:
            return
        self.pass_time("updated_at = statement_timestamp() - interval '2 hours'", id)
        self.jobs[id] = replace(self.jobs[id], old=True)
        self.compare()

    @precondition(lambda self: any(job.status is QUEUED for job in self.jobs.values()))
    @rule(which=some_job, due=st.booleans())
    def shift_run_at(self, which: int, due: bool) -> None:
        id = self.one_of(which, lambda job: job.status is QUEUED)
        if id is None:
            return
        with connection.cursor() as cursor:
            cursor.execute(
                "UPDATE background_jobs SET run_at = statement_timestamp() + %s WHERE id = %s",
                [-LATER if due else LATER, id],
            )
        self.jobs[id] = replace(self.jobs[id], run_at=None, due=due)
        self.compare()

    # ── People ────────────────────────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: self.jobs)
    @rule(which=some_jobs)
    def cancel(self, which: list[int]) -> None:
        self.people_change(store.cancel, which, {QUEUED}, lambda job: ended(job, CANCELLED))

    @precondition(lambda self: self.jobs)
    @rule(which=some_jobs)
    def discard(self, which: list[int]) -> None:
        self.people_change(store.discard, which, {FAILED}, lambda job: ended(job, CANCELLED))

    @precondition(lambda self: self.jobs)
    @rule(which=some_jobs)
    def request_stop(self, which: list[int]) -> None:
        if not self.locked().isdisjoint(self.some_of(which)):
            return  # it would wait
        self.people_change(
            store.request_stop, which, {PROCESSING}, lambda job: replace(job, stop_requested=True)
        )

    @precondition(lambda self: self.jobs)
    @rule(which=some_jobs)
    def retry(self, which: list[int]) -> None:
        taken = {job.unique_key for job in self.jobs.values() if job.is_live and job.unique_key}
        free = []
        for id in sorted(self.some_of(which)):
            job = self.jobs[id]
            if job.status in (FAILED, CANCELLED) and job.unique_key not in taken:
                free.append(id)
                if job.unique_key:
                    taken.add(job.unique_key)  # by the first of those who want it

        assert store.retry(self.some_of(which)) == set(free)

        self.jobs |= {id: retried(self.jobs[id]) for id in free}
        self.compare()

    def people_change(
        self,
        decision: Callable[[Iterable[int]], set[int]],
        which: list[int],
        statuses: set[Status],
        change: Callable[[Job], Job],
    ) -> None:
        ids = self.some_of(which)
        expected = {id for id in ids if self.jobs[id].status in statuses} - self.locked()
        assert decision(ids) == expected
        self.jobs |= {id: change(self.jobs[id]) for id in expected}
        self.compare()

    # ── The dictionary ────────────────────────────────────────────────────────────────────────────────────

    def worker(self, who: int, fits: Callable[[Worker], bool]) -> Worker:
        """A worker that fits. There must be one."""
        fitting = [worker for worker in self.workers if fits(worker)]
        return fitting[who % len(fitting)]

    def seen_by(self, worker: Worker) -> Rows:
        return self.jobs | worker.uncommitted

    def locked(self) -> set[int]:
        return {id for worker in self.workers for id in worker.uncommitted}

    def locked_for(self, worker: Worker) -> set[int]:
        return {id for other in self.workers if other is not worker for id in other.uncommitted}

    def holds(self, worker: Worker, claim: Claim) -> bool:
        seen = self.seen_by(worker)
        return claim.id in seen and seen[claim.id].is_held_by(claim)

    def is_valid(self, worker: Worker, claim: Claim) -> bool:
        """Whether a write under this claim takes effect now."""
        return self.holds(worker, claim) and claim.id not in self.locked_for(worker)

    def some_of(self, which: list[int]) -> list[int]:
        ids = sorted(self.jobs)
        return list(dict.fromkeys(ids[place % len(ids)] for place in which))

    def one_of(self, which: int, fits: Callable[[Job], bool]) -> int | None:
        """A job that fits and that nobody has locked, if there is one."""
        ids = [id for id, job in self.jobs.items() if fits(job) and id not in self.locked()]
        return ids[which % len(ids)] if ids else None

    def pass_time(self, assignment: str, id: int) -> None:
        self.world.time.execute(f"UPDATE background_jobs SET {assignment} WHERE id = %s", [id])  # noqa: S608

    def changed(self, worker: Worker, rows: Rows) -> None:
        worker.uncommitted |= rows

    def maybe_commit(self, worker: Worker, commit: bool) -> None:
        if commit:
            self.jobs |= worker.uncommitted
            worker.end("COMMIT")
        self.compare()

    def compare(self) -> None:
        """The table holds what is committed, and each worker sees its own changes as well."""
        self.steps += 1
        with connection.cursor() as cursor:
            self.jobs = agreed(cursor, self.jobs)
        for worker in self.workers:
            if worker.is_open:
                seen = agreed(worker.connection.cursor(), self.seen_by(worker))
                worker.uncommitted = {id: seen[id] for id in worker.uncommitted}


def long_unknown(claim: Claim) -> Claim:
    """As if its name had been unknown for so long that it is parked for minutes."""
    return claim._replace(unknown_since=claim.claimed_at - 1000)


LOOK = """
SELECT id, status::text, locked_by, attempts, max_attempts, crashes, rerun_if_lost, unique_key, priority,
       run_at, run_at <= statement_timestamp(),
       status = 'processing' AND locked_at < statement_timestamp() - interval '1 hour',
       stop_requested_at IS NOT NULL, jsonb_array_length(errors),
       COALESCE((metadata ->> 'interruptions')::integer, 0),
       updated_at < statement_timestamp() - interval '1 hour'
  FROM background_jobs
"""


def agreed(cursor: Any, expected: Rows) -> Rows:
    """The expected rows, with the times that were read. Fails unless the table holds them and no others."""
    cursor.execute(LOOK)
    found = {id: Job(Status(status), *rest) for id, status, *rest in cursor.fetchall()}
    for id, job in expected.items():
        if id in found and job.run_at is None:
            expected[id] = replace(job, run_at=found[id].run_at)
    assert found == expected
    return expected


@pytest.fixture
def world(monkeypatch) -> Iterator[World]:
    monkeypatch.setattr(store, "leases", lambda cursor: (LEASE, timedelta(days=1)))
    monkeypatch.setattr("django_pgjobs.jobs.policy_of", lambda name: POLICY)
    with ExitStack() as stack:
        workers = [stack.enter_context(session(application_name=WORKER)) for _ in range(2)]
        sweeper, audit = (stack.enter_context(session()) for _ in range(2))
        time = stack.enter_context(session(application_name=TIME))
        world = World(workers, sweeper, time, Audit(audit))
        monkeypatch.setattr(Machine, "world", world, raising=False)
        yield world
        Audit(audit).remove()


def run(chunk: Any, *, examples: int, steps: int, phases: Sequence[Phase] = tuple(Phase)) -> None:
    run_state_machine_as_test(
        seed(chunk.seed)(Machine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            phases=phases,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.chunks(large=50)
def test_the_table_holds_what_a_dictionary_foretells(chunk, world):
    Machine.done = Counter()

    run(chunk, examples=chunk.size(small=40, large=100), steps=chunk.size(small=30, large=60))

    chunk.record(**Machine.done)


MUTANTS = {
    "a refund is forgotten": ("SETTLE", "job.attempts - held.refund", "job.attempts"),
    "a wish to stop is forgotten": ("SETTLE", "AND job.stop_requested_at IS NOT NULL", "AND false"),
    "a retry keeps the attempts": ("RETRY", "attempts = 0", "attempts = job.attempts"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_statement_is_found(chunk, world, monkeypatch, name):
    if name != "a refund is forgotten" and not chunk.large:
        pytest.skip("It is searched for in the large size.")
    statement, right, wrong = MUTANTS[name]
    assert right in getattr(sql, statement)
    monkeypatch.setattr(sql, statement, getattr(sql, statement).replace(right, wrong))

    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run(chunk, examples=100, steps=40, phases=[Phase.generate])
