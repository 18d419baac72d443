"""Reads a history and says where it breaks the contract: each violation is a sentence.

The history is what the audit wrote down, what bodies left in the ledger, and what producers were told. The
transitions are those of `lifecycle`; what a change of a row meant is read from the row alone, so that a bug
in the package cannot explain itself away. The work grows with the length of the history and no faster.

K1   What was acknowledged is there once and comes to an end; what was rolled back is not there.
K2   Statuses change as they may.
K3   One claim is valid at a time, and is not taken from a holder who vouches for it.
K4   Hosts write under their own claims.
K5   Attempts count claims, and bodies start under one.
K6   A body starts again for a reason that was recorded.
K7   Nothing runs before it is due, or is completed without having run to its end.
K8   Nothing is completed without its effect, or repeated where that is forbidden.
K10  The server met no deadlock, and no error that was not expected.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from django_pgjobs.lifecycle import FINISHED, TRANSITIONS, Event, Status
from tests.faults.audit import Change
from tests.faults.ledger import Effect, Producer

WORKER = "django_pgjobs worker"  # the application name under which hosts talk to the queue
LOST = "Worker timeout detected"
BODIES = "tests.faults.bodies."  # how the names of jobs begin that write into the ledger

ALLOWED = {(old, new) for olds, new in TRANSITIONS.values() for old in olds}
BY_PEOPLE = {
    (old, TRANSITIONS[event][1])
    for event in (Event.CANCEL, Event.RETRY, Event.DISCARD)
    for old in TRANSITIONS[event][0]
}


@dataclass
class History:
    """All that is known about a run. Without `effects`, nothing is said about bodies."""

    changes: Sequence[Change]
    effects: Sequence[Effect] | None = None
    producer: Producer | None = None
    lease: float | None = None  # seconds; without it, nothing is said about when a claim may be lost
    deletes_completed: bool = False  # completing a job deletes it
    tolerance: float = 0.001  # seconds by which the ledger's clock may differ from the database's
    jobs: dict[int, Job] = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = _jobs(self)


@dataclass
class Hold:
    """The time of one claim, from its first change to the one that ended it."""

    claim: Change
    last: Change  # the latest change under it
    end: Change | None = None
    how: str = ""  # it ended: see `_how_it_ended`

    @property
    def ended_at(self) -> float:
        return float("inf") if self.end is None else self.end.at


@dataclass
class Run:
    """One run of a body."""

    start: Effect | None = None
    end: Effect | None = None


@dataclass
class Job:
    id: int
    changes: list[Change] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)  # in the order of their starts

    @property
    def name(self) -> str:
        return self.changes[0].job_name

    @property
    def number(self) -> int | None:
        number = self.changes[0].number
        return int(number) if number is not None and number.isdecimal() else None

    @property
    def final(self) -> Change:
        return self.changes[-1]

    @property
    def starts(self) -> int:
        return sum(run.start is not None for run in self.runs)


def check(history: History, *, everything_ended: bool = True, faultless: bool = False) -> list[str]:
    """Every violation of the rules. With `faultless`, no body may have started twice."""
    violations = list(_check_producer(history, everything_ended))
    hosts: dict[int, set[str]] = defaultdict(set)  # by backend, those that have claimed through it
    for change in history.changes:
        violations += _check_writer(change, hosts)
    for job in history.jobs.values():
        violations += _check_changes(job, history)
        if everything_ended and job.final.status not in {None, *FINISHED}:
            violations.append(_says("K1", job, "did not come to an end", job.final))
        if history.effects is not None:
            violations += _check_runs(job, history, faultless)
    return violations


def assert_kept(history: History, *, everything_ended: bool = True, faultless: bool = False) -> None:
    """Fail, with the first violations, if the history breaks a rule."""
    violations = check(history, everything_ended=everything_ended, faultless=faultless)
    if violations:
        shown = "\n".join(violations[:10])
        raise AssertionError(f"{len(violations)} violations, of which the first are:\n{shown}")


def _says(rule: str, job: Job, what: str, *changes: Change | None) -> str:
    rows = " ".join(str(change) for change in changes if change is not None)
    return f"{rule}: job {job.id} ({job.name}) {what}. {rows}".rstrip()


# ── Reading the history ───────────────────────────────────────────────────────────────────────────────────


def _jobs(history: History) -> dict[int, Job]:
    jobs: dict[int, Job] = {}
    by_number: dict[int, Job] = {}
    for change in history.changes:
        job = jobs.get(change.job)
        if job is None:
            job = jobs[change.job] = Job(change.job)
        job.changes.append(change)
        if change.old_status is None and job.number is not None:
            by_number.setdefault(job.number, job)
        _follow(job, change)
    runs: dict[str, Run] = {}
    for effect in history.effects or ():
        if effect.number not in by_number:
            continue
        if effect.run not in runs:
            runs[effect.run] = Run()
            by_number[effect.number].runs.append(runs[effect.run])
        if effect.what == "start":
            runs[effect.run].start = effect
        else:
            runs[effect.run].end = effect
    return jobs


def _follow(job: Job, change: Change) -> None:
    """Keep track of the claims on a job."""
    hold = job.holds[-1] if job.holds and job.holds[-1].end is None else None
    if change.status is Status.PROCESSING and change.old_status is not Status.PROCESSING:
        job.holds.append(Hold(change, change))
    elif hold is not None:
        hold.last = change
        if change.status is not Status.PROCESSING:
            hold.end = change
            hold.how = _how_it_ended(change)


def _how_it_ended(end: Change) -> str:
    """What a change that took a job out of `processing` meant."""
    if end.status in (None, Status.COMPLETED):
        return "completed"
    lost = (end.last_error or "").startswith(LOST)
    refunded = end.attempts == end.old_attempts - 1
    if end.status is Status.CANCELLED:
        return "stopped"
    if end.status is Status.FAILED:
        return "lost" if lost else "buried"
    if not refunded:
        return "lost" if lost and end.crashes == end.old_crashes else "failed"
    if end.interruptions != end.old_interruptions:
        return "interrupted"
    if end.run_at == end.old_run_at:
        return "released"
    return "snoozed" if end.unknown_since is None else "parked"


# ── What producers were told ──────────────────────────────────────────────────────────────────────────────


def _check_producer(history: History, everything_ended: bool) -> Iterator[str]:
    if history.producer is None:
        return
    copies: dict[int, int] = defaultdict(int)
    for job in history.jobs.values():
        if job.number is not None and job.changes[0].old_status is None:
            copies[job.number] += 1
    for number in sorted(history.producer.acknowledged):
        if copies[number] != 1:
            yield f"K1: job number {number} was acknowledged and is there {copies[number]} times."
    for number in sorted(history.producer.rolled_back):
        if copies[number]:
            yield f"K1: job number {number} was rolled back and is there."
    for number in sorted(history.producer.unknown):
        if copies[number] > 1:
            yield f"K1: job number {number}, which may be there once, is there {copies[number]} times."


# ── Who may write ─────────────────────────────────────────────────────────────────────────────────────────


def _check_writer(change: Change, hosts: dict[int, set[str]]) -> Iterator[str]:
    """A host writes for its own claims, and as a sweeper; people's decisions are not a host's to make."""
    if change.application != WORKER:
        return
    job = Job(change.job, [change])
    if change.status is Status.PROCESSING and change.old_status is Status.QUEUED:
        if change.worker is not None:
            hosts[change.backend].add(change.worker)
    elif change.old_status is Status.PROCESSING:
        known = hosts.get(change.backend)
        ended = change.status is not Status.PROCESSING
        swept = ended and _how_it_ended(change) == "lost"
        if known and not swept and change.worker is not None and change.worker not in known:
            yield _says("K4", job, "was written by a host that did not hold its claim", change)
    elif (change.old_status, change.status) in BY_PEOPLE or change.old_status is change.status:
        yield _says("K4", job, "was changed by a host although nobody held it", change)


# ── The changes of one job ────────────────────────────────────────────────────────────────────────────────


def _check_changes(job: Job, history: History) -> Iterator[str]:
    before: Change | None = None
    tokens: set[str] = set()
    for change in job.changes:
        if before is not None and _new(before) != _old(change):
            yield _says("K2", job, "changed without a change that was seen", before, change)
        yield from _check_transition(job, before, change, history)
        if change.old_status is Status.QUEUED and change.status is Status.PROCESSING:
            yield from _check_claim(job, before, change, tokens)
        elif change.old_status is Status.PROCESSING and change.status is Status.PROCESSING:
            yield from _check_renewal(job, before, change)
        elif change.old_status is Status.PROCESSING and change.status is not None:
            yield from _check_end(job, before, change, history)
        elif change.old_status in FINISHED and change.status is Status.QUEUED:
            if change.attempts or change.crashes:
                yield _says("K5", job, "was retried by a person without fresh attempts", before, change)
        elif None not in (change.old_status, change.status) and change.attempts != change.old_attempts:
            yield _says("K5", job, "has other attempts without a claim", before, change)
        before = change


def _old(change: Change) -> tuple[object, ...]:
    return (change.old_status, change.old_token, change.old_attempts, change.old_crashes, change.old_run_at)


def _new(change: Change) -> tuple[object, ...]:
    return (change.status, change.token, change.attempts, change.crashes, change.run_at)


def _check_transition(job: Job, before: Change | None, change: Change, history: History) -> Iterator[str]:
    old, new = change.old_status, change.status
    if old is None:
        allowed = new is Status.QUEUED and before is None
    elif new is None:
        allowed = old in FINISHED or (history.deletes_completed and old is Status.PROCESSING)
    else:
        allowed = (old, new) in ALLOWED or (old is new and old not in {Status.COMPLETED})
    if not allowed:
        yield _says("K2", job, f"went from {old or 'nothing'} to {new or 'nothing'}", before, change)


def _check_claim(job: Job, before: Change | None, change: Change, tokens: set[str]) -> Iterator[str]:
    if change.at < change.old_run_at:
        yield _says("K7", job, f"was claimed before it was due, at {change.old_run_at:.3f}", before, change)
    if change.attempts != change.old_attempts + 1:
        yield _says("K5", job, "was claimed without its attempts being raised by one", before, change)
    if change.attempts > change.max_attempts:
        yield _says("K5", job, f"was claimed beyond its {change.max_attempts} attempts", before, change)
    if change.token is not None and change.token in tokens:
        yield _says("K3", job, "was claimed with a token that it has had before", before, change)
    if change.stop_requested:
        yield _says("K3", job, "was claimed with the wish to stop that was meant for another", before, change)
    if change.token is not None:
        tokens.add(change.token)


def _check_renewal(job: Job, before: Change | None, change: Change) -> Iterator[str]:
    if change.token != change.old_token:
        yield _says("K3", job, "got another token while its claim was valid", before, change)
    if change.attempts != change.old_attempts:
        yield _says("K5", job, "has other attempts without a claim", before, change)
    if change.locked_at is None or change.locked_at < (change.old_locked_at or 0.0):
        yield _says("K3", job, "was locked for an earlier time than before", before, change)


def _check_end(job: Job, before: Change | None, change: Change, history: History) -> Iterator[str]:
    how = _how_it_ended(change)
    refund = change.old_attempts - change.attempts
    may_refund = change.status in (Status.QUEUED, Status.CANCELLED)
    if refund not in ((0, 1) if may_refund else (0,)) or change.attempts < 0:
        yield _says("K5", job, f"was {how} and its attempts fell by {refund}", before, change)
    if change.crashes not in (change.old_crashes, change.old_crashes + 1):
        yield _says("K5", job, "has other crashes than one more", before, change)
    if change.status is Status.QUEUED and change.token is not None:
        yield _says("K3", job, "waits with a token, by which somebody may still write", before, change)
    if change.status is not Status.QUEUED and change.token not in (None, change.old_token):
        yield _says("K3", job, "got another token while its claim was valid", before, change)
    if how == "failed" and change.old_attempts >= change.max_attempts:
        yield _says("K6", job, f"is to run again after its {change.max_attempts} attempts", before, change)
    if how in ("failed", "buried") and not change.last_error:
        yield _says("K6", job, f"was {how} without a reason", before, change)
    taken_away = how in ("lost", "interrupted") or change.crashes > change.old_crashes
    if taken_away and change.status is Status.QUEUED and not change.rerun_if_lost:
        yield _says("K8", job, f"is to run at most once, was {how}, and is queued", before, change)
    if how == "lost" and history.lease is not None and change.old_token is not None:
        silent = change.at - (change.old_locked_at or 0.0)
        if silent < history.lease - 1e-6:
            yield _says(
                "K3", job, f"was taken from a holder who had been silent for {silent:.3f} s", before, change
            )


# ── The runs of one job's body ────────────────────────────────────────────────────────────────────────────


def _check_runs(job: Job, history: History, faultless: bool) -> Iterator[str]:
    runs = [run for run in job.runs if run.start is not None]
    for run in job.runs:
        if run.start is None:
            yield _says("K7", job, f"ended a run, {run.end}, that never started")
    started_at = [run.start.at + history.tolerance for run in runs if run.start is not None]
    claimed_at = [hold.claim.at for hold in job.holds]
    for place, at in enumerate(started_at, start=1):
        if bisect_right(claimed_at, at) < place:
            claim = job.holds[min(place, len(job.holds)) - 1].claim if job.holds else None
            yield _says("K5", job, f"had started {place} times at {at:.3f}, more than claimed", claim)
    allowed = [hold for hold in job.holds if hold.how not in ("released", "parked")]
    if len(runs) > len(allowed):
        unstarted = [hold for hold in job.holds if hold not in allowed]
        rows: tuple[Change | None, ...]
        rows = (unstarted[0].claim, unstarted[0].end) if unstarted else (job.final,)
        what = f"started {len(runs)} times, of which {len(allowed)} are accounted for"
        yield _says("K6", job, what, *rows)
    yield from _check_at_most_once(job, runs)
    if faultless and len(runs) > 1:
        yield _says("K6", job, f"started {len(runs)} times although nothing went wrong", job.final)
    for hold in job.holds:
        if hold.how == "completed" and job.name.startswith(BODIES):
            yield from _check_completion(job, hold, runs, history.tolerance)


def _check_at_most_once(job: Job, runs: Sequence[Run]) -> Iterator[str]:
    """Such a job starts again only because it asked, failed by itself, or a person decided so."""
    if not job.changes[0].rerun_if_lost:
        own = sum(hold.how in ("snoozed", "failed") for hold in job.holds)
        people = sum(
            change.old_status in FINISHED and change.status is Status.QUEUED for change in job.changes
        )
        if len(runs) > 1 + own + people:
            yield _says("K8", job, f"is to run at most once and started {len(runs)} times", job.final)


def _check_completion(job: Job, hold: Hold, runs: Iterable[Run], tolerance: float) -> Iterator[str]:
    for run in runs:
        if run.start is not None and run.end is not None:
            began = run.start.at + tolerance >= hold.claim.at
            if began and run.end.at <= hold.ended_at + tolerance:
                return
    rule = "K7" if job.starts else "K8"
    what = "without the end of a run under this claim" if job.starts else "and its body never started"
    yield _says(rule, job, f"was completed {what}", hold.claim, hold.end)


# ── Figures ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Death:
    """Somebody killed a host, by the id under which it claimed, or one of its executors, by its pid."""

    at: float  # seconds of the clock that the database also goes by
    worker: str | None = None
    executor: int | None = None


@dataclass
class Recoveries:
    """Seconds from deaths to the time when the jobs that they hit could be claimed again, and were.

    The second also depends on how many jobs wait before them. Claims that were not lost count for neither.
    """

    hosts: list[float] = field(default_factory=list)
    hosts_reclaimed: list[float] = field(default_factory=list)
    executors: list[float] = field(default_factory=list)
    executors_reclaimed: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        return {
            **spread("host_recovery", self.hosts),
            **spread("host_reclaim", self.hosts_reclaimed),
            **spread("executor_recovery", self.executors),
            **spread("executor_reclaim", self.executors_reclaimed),
        }


def recoveries(history: History, deaths: Iterable[Death]) -> Recoveries:
    found = Recoveries()
    hosts = {death.worker: death.at for death in deaths if death.worker is not None}
    executors = {death.executor: death.at for death in deaths if death.executor is not None}
    for job in history.jobs.values():
        claimed_at = [hold.claim.at for hold in job.holds]
        for place, hold in enumerate(job.holds):
            died_at = hosts.get(hold.claim.worker or "")
            if died_at is not None and hold.how == "lost" and hold.claim.at <= died_at <= hold.ended_at:
                found.hosts.append(hold.ended_at - died_at)
                if place + 1 < len(job.holds):
                    found.hosts_reclaimed.append(claimed_at[place + 1] - died_at)
        for run in job.runs:
            if run.start is None or run.start.pid not in executors:
                continue
            died_at = executors[run.start.pid]
            place = bisect_right(claimed_at, died_at) - 1
            if place < 0 or (run.end is not None and run.end.at <= died_at):
                continue
            hold = job.holds[place]
            if hold.ended_at >= died_at and hold.how in ("failed", "buried"):
                found.executors.append(hold.ended_at - died_at)
                if place + 1 < len(job.holds):
                    found.executors_reclaimed.append(claimed_at[place + 1] - died_at)
    return found


def spread(prefix: str, seconds: Collection[float]) -> dict[str, float]:
    """The median and the maximum of durations, for a record; the maximum over chunks of each."""
    if not seconds:
        return {}
    return {f"max_{prefix}_median": median(seconds), f"max_{prefix}": max(seconds)}


def repeats(history: History) -> int:
    """How many starts there were beyond the first of each job."""
    return sum(max(job.starts - 1, 0) for job in history.jobs.values())


# ── The server's log ──────────────────────────────────────────────────────────────────────────────────────

PREFIX = "%m [%p] db=%d app=%a state=%e "  # the log_line_prefix that can be read
TOO_SLOW = frozenset({"57014", "55P03"})  # what a busy machine may lead to: statement and lock timeouts
_LINE = re.compile(
    r"app=(?P<application>.*?) state=(?P<state>\w{5}) (?P<level>ERROR|FATAL|PANIC): +(?P<text>.*)"
)


def check_log(text: str, *, allowed: Collection[str] = (), applications: str = "django_pgjobs") -> list[str]:
    """Every deadlock, and every error of applications with such names but of the allowed SQL states."""
    violations = []
    for line in text.splitlines():
        found = _LINE.search(line)
        if found is None:
            continue
        ours = found["application"].startswith(applications)
        if found["state"] == "40P01" or (ours and found["state"] not in allowed):
            application = found["application"] or "nobody"
            violations.append(f"K10: {application} met {found['state']}, {found['text']!r}.")
    return violations
