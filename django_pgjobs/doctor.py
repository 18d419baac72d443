"""What is wrong, and what to do about it: for the admin's overview and for `manage.py jobsdoctor`.

Facts are read first, at a cost that does not grow with the table; findings are made of them. `glance` is for
the page; `examine` is for the command, which also does what takes longer than a look.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from enum import IntEnum
from itertools import groupby
from typing import NamedTuple

from django.core.checks import ERROR, CheckMessage

from . import checks, jobs, maintenance, store
from .conf import config
from .lifecycle import Status

HOUR, MINUTE = 3600, 60  # seconds

WINDOW = timedelta(hours=1)  # that "lately" means
TOO_LONG_DUE = MINUTE  # for which a job may be due, with a worker that has room
TOO_LONG_RUNNING = HOUR  # for a job without a time limit
PAST_LIMIT = MINUTE  # within which a worker has ended a job that runs for longer than it may
TOO_MANY_FAILED = 10  # in an hour, for them to mean anything
TOO_LONG_HELD = 10 * MINUTE  # for a snapshot
TOO_MANY_TRANSACTIONS = 1_000_000  # that have begun since, where nobody may see for how long it has been held
TOO_MANY_DEAD = 20_000  # rows, when they are also a fifth of those that live
TOO_LONG_DIRTY = 10 * MINUTE  # without a vacuum
TOO_LARGE = 100 * 2**20  # bytes, when it is also four times what is needed
TOO_LATE = timedelta(minutes=2)  # for a tick of a schedule
TOO_FAR_OFF = 5.0  # seconds between two clocks
TOO_MANY_PAGES = 5_000  # for a claim of one job
MOST_ALIKE = 5  # findings of one name
EACH = 5  # jobs that are shown of each worker

# Checks by which there is no table to look at.
_NO_TABLE = {"django_pgjobs.E006", "django_pgjobs.E008", "django_pgjobs.E009", "django_pgjobs.W002"}


class Severity(IntEnum):
    """How bad it is; also the exit status of the command."""

    WARNING = 1
    ERROR = 2


class Finding(NamedTuple):
    name: str
    severity: Severity
    problem: str
    advice: str
    subject: str = ""  # the queue, worker, job, schedule or relation that it is about, if it is about one


class Facts(NamedTuple):
    """What one look at the queue has found."""

    period: float  # seconds that "lately" means here
    queues: list[store.QueueStats]
    workers: list[store.Worker]
    running: list[store.Running]
    unswept: int
    hour: list[store.Span]
    day: list[store.Span]
    kept_for: dict[Status, float]  # seconds since the oldest job of this status finished
    late_schedules: list[store.LateSchedule]
    connections: store.Connections
    vacuum: store.Vacuum
    snapshot: store.Snapshot | None
    sizes: list[store.Size]
    clock_ahead: float  # seconds, at least, by which this machine's is ahead of the database's

    @property
    def alive(self) -> list[store.Worker]:
        return [worker for worker in self.workers if worker.is_alive]

    def serving(self, queue: str) -> list[store.Worker]:
        """The live workers that claim jobs of a queue."""
        return [
            worker
            for worker in self.alive
            if worker.state == "running" and (worker.queues is None or queue in worker.queues)
        ]


def look(alias: str) -> Facts:
    """Read the facts, in a transaction of our own."""
    settings = config()
    with store.own_transaction(alias) as cursor:
        workers = store.workers(cursor)
        longest, _ = store.leases(cursor)
        # Whoever sweeps does so within its interval, and has taken its time.
        silent = max(settings.LEASE, longest or settings.LEASE) + 2 * settings.SWEEP_INTERVAL
        period, queues = store.queue_stats(cursor, WINDOW)
        kept_for = {status: store.oldest(cursor, status) for status in maintenance.retentions()}
        return Facts(
            period=period,
            queues=queues,
            workers=workers,
            running=store.running(cursor, each=EACH),
            unswept=store.unswept(cursor, lease=silent, timeout=max(silent, maintenance.BARE_TIMEOUT)),
            hour=store.history(cursor, width=timedelta(minutes=1), spans=60),
            day=store.history(cursor, width=timedelta(minutes=15), spans=96),
            kept_for={status: age for status, age in kept_for.items() if age is not None},
            late_schedules=store.late_schedules(cursor, TOO_LATE),
            connections=store.connections_of(cursor),
            vacuum=store.vacuum(cursor),
            snapshot=store.oldest_snapshot(cursor),
            sizes=store.sizes(cursor),
            clock_ahead=_clock_ahead(alias),
        )


def findings(facts: Facts) -> list[Finding]:
    """What is wrong by the facts."""
    return [
        *_of_workers(facts),
        *_of_queues(facts),
        *_of_jobs(facts),
        *_of_schedules(facts),
        *_of_the_table(facts),
        *_of_the_server(facts),
    ]


def glance(alias: str) -> tuple[Facts | None, list[Finding]]:
    """The facts, unless there is no table, and what is wrong by them; quickly, and without a lock."""
    found = _checked(checks.drift(store.catalog(alias), alias))
    if _has_no_table(found):
        return None, found
    facts = look(alias)
    return facts, _in_order([*found, *findings(facts)])


def examine(alias: str) -> list[Finding]:
    """All that is wrong: also what takes a while to find out, or a lock for a moment.

    Raises django.db.Error when the database does not answer as it should.
    """
    found = _checked([*checks.check_alias(), *checks.check_database(databases=[alias])])
    if not _has_no_table(found):
        found += findings(look(alias))
        found += _of_the_claim(store.claim_cost(alias))
    return _in_order(found)


def _has_no_table(found: Iterable[Finding]) -> bool:
    return any(finding.name in _NO_TABLE for finding in found)


def grouped(found: Iterable[Finding]) -> Iterator[list[Finding]]:
    """Findings that follow each other and about which the same is to be done."""
    for _, alike in groupby(found, key=lambda finding: (finding.name, finding.severity, finding.advice)):
        yield list(alike)


def _checked(messages: Iterable[CheckMessage]) -> list[Finding]:
    """Findings by the name of the check that made them."""
    return [
        Finding(
            str(message.id),
            Severity.ERROR if message.level >= ERROR or message.id in _NO_TABLE else Severity.WARNING,
            message.msg,
            message.hint or "",
        )
        for message in messages
        if not message.is_silenced()
    ]


def _in_order(found: Iterable[Finding]) -> list[Finding]:
    """The worst first; of those that are alike only a few, and how many more there are."""
    ordered: list[Finding] = []
    by_name = sorted(found, key=lambda finding: (-finding.severity, finding.name))
    for _, group in groupby(by_name, key=lambda finding: (finding.severity, finding.name)):
        alike = list(group)
        ordered += alike[:MOST_ALIKE]
        if len(alike) > MOST_ALIKE:
            more = f"And {len(alike) - MOST_ALIKE:,} more like these."
            ordered.append(alike[0]._replace(problem=more, advice="Do the same about them.", subject=""))
    return ordered


# ── Workers and queues ────────────────────────────────────────────────────────────────────────────────────


def _of_workers(facts: Facts) -> Iterator[Finding]:
    waiting = [queue for queue in facts.queues if queue.due and not queue.paused]
    if not facts.alive and (waiting or not config().IMMEDIATE):
        more = any("due" in queue.at_least for queue in waiting)
        due = _jobs(sum(queue.due for queue in waiting), more=more)
        yield Finding(
            "no-worker",
            Severity.ERROR if waiting else Severity.WARNING,
            f"No worker is alive, and {due} due." if waiting else "No worker is alive.",
            "Start one with: manage.py runjobs. If one should be there, see the log of whatever starts it.",
        )
    for worker in facts.workers:
        if not worker.is_alive:
            yield Finding(
                "silent-worker",
                Severity.WARNING,
                f"The worker {worker.name} has been silent for {in_words(worker.silent_for)}, which is longer"
                " than its lease.",
                "It may have been killed, stopped, or cut off from the database: see its log. Its jobs are"
                " queued again by a sweep. Its row goes after a day.",
                worker.name,
            )


def _of_queues(facts: Facts) -> Iterator[Finding]:
    for queue in facts.queues:
        name, age = queue.queue_name, queue.oldest_due_age or 0
        oldest = f"the oldest for {in_words(age)}"
        due = _jobs(queue.due, more="due" in queue.at_least)
        if queue.paused and queue.due:
            by = f" by {store.in_one_line(queue.paused_by)}" if queue.paused_by else ""
            why = f" ({store.in_one_line(queue.paused_reason)})" if queue.paused_reason else ""
            yield Finding(
                "paused-queue",
                Severity.WARNING,
                f"The queue {name!r} was paused {in_words(queue.paused_for or 0)} ago{by}{why}, and {due} due"
                " in it.",
                f"When the reason is gone, resume it: manage.py resumequeue {shlex.quote(name)}.",
                name,
            )
        elif age > TOO_LONG_DUE and facts.alive:
            serving = facts.serving(name)
            if serving:
                yield _slow(queue, f"{due} due, {oldest}", serving)
            elif not queue.has_clients:
                yield Finding(
                    "unserved-queue",
                    Severity.ERROR,
                    f"No worker serves the queue {name!r}, in which {due} due, {oldest}.",
                    f"Start one with: manage.py runjobs --queue {shlex.quote(name)}. Or let one that runs"
                    " serve it as well.",
                    name,
                )
        failed, finished = queue.failed_lately, queue.failed_lately + queue.completed_lately
        if failed >= TOO_MANY_FAILED and 2 * failed > finished:
            yield Finding(
                "failing-queue",
                Severity.WARNING,
                f"In the queue {name!r}, {failed:,} of the {finished:,} jobs that finished in the last"
                f" {in_words(facts.period)} failed for good.",
                "See its dead letters for the reason. When it is gone, retry them.",
                name,
            )


def _slow(queue: store.QueueStats, what: str, serving: Sequence[store.Worker]) -> Finding:
    slots, taken = sum(worker.slots for worker in serving), sum(worker.running for worker in serving)
    if taken >= slots:
        advice = (
            f"All {slots:,} slots that serve it are taken: start more workers, or see what takes so long."
        )
    else:
        advice = (
            f"Of the {slots:,} slots that serve it, {taken:,} are taken. Higher priorities, and queues that"
            " are listed first, go first; otherwise see the log of the workers."
        )
    return Finding(
        "slow-pickup",
        Severity.WARNING,
        f"In the queue {queue.queue_name!r}, {what}, although workers serve it.",
        advice,
        queue.queue_name,
    )


# ── Jobs ──────────────────────────────────────────────────────────────────────────────────────────────────


def _of_jobs(facts: Facts) -> Iterator[Finding]:
    if facts.unswept:
        count = _jobs(facts.unswept, more=facts.unswept == store.MOST_COUNTED)
        yield Finding(
            "lost-jobs",
            Severity.ERROR,
            f"{count} processing by their status, but nobody has vouched for them for longer than the lease,"
            " and no sweep has queued them again.",
            "Run: manage.py sweepjobs. Then let a worker run without --no-maintenance, or cron run it.",
        )
    names = {worker.id: worker.name for worker in facts.alive}
    for job in facts.running:
        function = jobs.find(job.job_name)
        limit = None if function is None else function.time_limit
        most = TOO_LONG_RUNNING if limit is None else limit + PAST_LIMIT
        if job.running_for is None or job.running_for <= most or job.worker_id not in names:
            continue
        cancel = f"manage.py canceljobs {job.id}"
        yield Finding(
            "long-running",
            Severity.WARNING,
            f"Job {job.id}, {job.job_name!r}, has run for {in_words(job.running_for)} on"
            f" {names[job.worker_id]}"
            + (f", although its timeout is {in_words(limit)}." if limit is not None else "."),
            f"If it hangs, stop it with: {cancel}. If it takes that long, give it a timeout= that says so."
            if limit is None
            else f"Its worker should have ended it: see the log. Try: {cancel}.",
            str(job.id),
        )
    last = sum(span.failed for span in facts.hour)
    before = (sum(span.failed for span in facts.day) - last) / (len(facts.day) / 4 - 1)
    if last >= TOO_MANY_FAILED and last > 3 * before:
        yield Finding(
            "rising-dead-letters",
            Severity.WARNING,
            f"Dead letters are rising: {last:,} in the last hour, beside {max(before, 0):,.1f} an hour in the"
            " day before.",
            "See the latest of them for the reason. When it is gone, retry them.",
        )
    retentions = maintenance.retentions()
    for status, age in facts.kept_for.items():
        retention = retentions[status].total_seconds()
        if age > retention + 24 * HOUR:
            yield Finding(
                "unpruned",
                Severity.WARNING,
                f"Jobs that are {status} should be deleted after {in_words(retention)}"
                f" ({status.name}_RETENTION), but the oldest finished {in_words(age)} ago.",
                "Let a worker run without --no-maintenance, or cron run: manage.py prunejobs.",
                status.value,
            )


def _of_schedules(facts: Facts) -> Iterator[Finding]:
    declared = jobs.declared_schedules()
    for schedule in facts.late_schedules:
        if facts.alive and (not schedule.declared or schedule.name in declared):
            yield Finding(
                "late-schedule",
                Severity.WARNING,
                f"A tick of the schedule {schedule.name!r} has been due for {in_words(schedule.late_for)}.",
                "A worker that knows its job has to run without --no-maintenance. If one does, its log says"
                " why the schedule is not carried out.",
                schedule.name,
            )


# ── The database ──────────────────────────────────────────────────────────────────────────────────────────


def _of_the_table(facts: Facts) -> Iterator[Finding]:
    vacuum, snapshot = facts.vacuum, facts.snapshot
    held = snapshot is not None and (
        snapshot.transactions > TOO_MANY_TRANSACTIONS
        if snapshot.held_for is None
        else snapshot.held_for > TOO_LONG_HELD
    )
    if not vacuum.is_automatic:
        yield Finding(
            "autovacuum-off",
            Severity.WARNING,
            "Autovacuum is off, for the table background_jobs or for the whole server.",
            "ALTER TABLE background_jobs RESET (autovacuum_enabled); and see that the server has autovacuum"
            " and track_counts on.",
        )
    is_dirty = vacuum.dead > max(TOO_MANY_DEAD, vacuum.live / 5)
    if is_dirty and (vacuum.ago is None or vacuum.ago > TOO_LONG_DIRTY):
        yield Finding(
            "dead-rows",
            Severity.WARNING,
            f"The table background_jobs has about {vacuum.dead:,} dead rows beside {vacuum.live:,} that live,"
            " and was "
            + ("never vacuumed." if vacuum.ago is None else f"last vacuumed {in_words(vacuum.ago)} ago."),
            "They slow claims down. VACUUM (ANALYZE) background_jobs; and see why autovacuum does not come.",
        )
    if snapshot is not None and held:
        since = f"{snapshot.transactions:,} transactions"
        if snapshot.held_for is not None:
            since = in_words(snapshot.held_for)
        about = f" ({snapshot.about})" if snapshot.about else ""
        yield Finding(
            "old-snapshot",
            Severity.WARNING,
            f"The {snapshot.kind} {snapshot.name}{about} has held a snapshot for {since}. What has become"
            " dead since then, no vacuum can remove.",
            _ENDS[snapshot.kind].format(snapshot.name.replace("'", "''")),
            snapshot.name,
        )
    for size in facts.sizes:
        if size.bytes > TOO_LARGE and size.bytes > 4 * size.needed:
            yield Finding(
                "bloat",
                Severity.WARNING,
                f"{size.name} takes {_megabytes(size.bytes)} on disk, for contents of about"
                f" {_megabytes(size.needed)}.",
                "The room is used again. To give it back, stop the workers, and VACUUM FULL background_jobs."
                if size.is_table
                else f"REINDEX INDEX CONCURRENTLY {size.name}.",
                size.name,
            )


_ENDS = {
    "session": "Have its transaction ended. If nobody needs it: SELECT pg_terminate_backend({}).",
    "prepared transaction": "COMMIT PREPARED '{0}', or ROLLBACK PREPARED '{0}'.",
    "replication slot": "See that its standby keeps up. If there is none any more:"
    " SELECT pg_drop_replication_slot('{}').",
}


def _of_the_server(facts: Facts) -> Iterator[Finding]:
    open, most = facts.connections.open, facts.connections.server
    if open >= 0.8 * most:
        yield Finding(
            "connections",
            Severity.ERROR if open >= 0.95 * most else Severity.WARNING,
            f"Of the {most:,} sessions that the database server allows, {open:,} are open.",
            "Start workers and web processes with fewer processes or threads, put a pooler in between, or"
            " raise max_connections.",
        )
    if abs(facts.clock_ahead) > TOO_FAR_OFF:
        where = "ahead of" if facts.clock_ahead > 0 else "behind"
        yield Finding(
            "clock",
            Severity.WARNING,
            f"The clock of this machine is {in_words(abs(facts.clock_ahead))} {where} the database's.",
            "Jobs go by the database's clock; what this machine computes for run_at is off by as much. Have"
            " both clocks synchronised.",
        )


def _of_the_claim(cost: store.ClaimCost) -> Iterator[Finding]:
    if cost.pages > TOO_MANY_PAGES:
        yield Finding(
            "slow-claim",
            Severity.WARNING,
            f"To claim a job, {cost.pages:,} pages are read, which took {cost.milliseconds:,.0f} ms.",
            "Mostly it is dead rows: VACUUM (ANALYZE) background_jobs, and end what holds an old snapshot."
            " Otherwise it is the number of queues and priorities in which jobs wait.",
        )


def _clock_ahead(alias: str) -> float:
    before = time.time()
    theirs = store.now(alias).timestamp()
    after = time.time()
    return max(before - theirs, 0) or min(after - theirs, 0)


# ── In words ──────────────────────────────────────────────────────────────────────────────────────────────


def in_words(seconds: float) -> str:
    """A span of time, roughly: 80 ms, 2.5 s, 45 s, 12 min, 3 h, 5 days."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for unit, length in (("s", 1), ("min", MINUTE), ("h", HOUR)):
        if round(seconds / length) < {"s": 120, "min": 120, "h": 48}[unit]:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:,.0f} days"


def _jobs(count: int, *, more: bool = False) -> str:
    return "1 job is" if count == 1 and not more else f"{store.in_figures(count, more=more)} jobs are"


def _megabytes(bytes: int) -> str:
    return f"{bytes / 2**20:,.0f} MB"
