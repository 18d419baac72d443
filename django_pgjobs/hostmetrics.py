"""What a worker host counts and measures, for Prometheus.

The supervisor hears of every start and every outcome, whichever executor they are of, so it alone counts. It
does so on its loop, in plain numbers; the thread that answers a scrape only reads them, and nobody waits for
anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from . import __version__, jobs
from .endpoint import Answer
from .exposition import MOST_QUEUES, OTHER, UNKNOWN, Distribution, Family, counter, exposition, gauge
from .lifecycle import TRANSITIONS, Event, Status
from .store import Claim, Claimed, Settlement

MOST_PAIRS = 1000  # of a queue and a job, that have figures of their own

# What may become of a claim.
VERDICTS = [event for event, (before, _) in TRANSITIONS.items() if before == {Status.PROCESSING}]


class Now(NamedTuple):
    """What else there is to say of a host when it is asked."""

    ready: bool
    listening: bool
    connections: Mapping[str, bool]  # by purpose
    running: int  # jobs that executors have
    waiting: int  # jobs that are claimed, and wait for an executor
    unsettled: int  # outcomes that are not yet written
    oldest_claim: float  # seconds since it was made
    slots: int
    executors: Mapping[str, int]  # by state
    executors_started: int
    executors_ended: Mapping[str, int]  # by how
    memory: Sequence[int]  # bytes of each executor
    turns: int  # of the loop
    database_failures: int
    missed_notifications: int


class Tally:
    """What has become of the jobs of one name in one queue."""

    __slots__ = ("durations", "finished", "lost", "started")

    def __init__(self) -> None:
        self.started = 0
        self.finished = dict.fromkeys(VERDICTS, 0)
        self.lost = 0
        self.durations: Distribution | None = None  # once one has ended


class HostMetrics:
    """The figures of a host. It counts from its start, and knows nothing of other hosts."""

    def __init__(self, queues: Sequence[str] | None, now: Callable[[], Now]) -> None:
        self._now = now
        self._queues = set(queues or ())  # that have figures of their own
        self._tallies: dict[tuple[str, str], Tally] = {}  # by queue and job, as they are labelled
        self._pickups: dict[str, Distribution] = {}  # by queue, as it is labelled
        self._swept = dict.fromkeys((Event.FAIL, Event.BURY), 0)
        # A counter that is first seen at one is not seen to have risen.
        for name, function in jobs.registry.items():
            if queues is None or function.queue in queues:
                self._of(function.queue, name)

    # ── Counting, on the loop ─────────────────────────────────────────────────────────────────────────────

    def claimed(self, claimed: Claimed) -> None:
        for claim, due_at in zip(claimed.claims, claimed.due_at, strict=True):
            if not claim.interruptions:  # it would have been due since before it was interrupted
                self._pickup(claim.queue_name).add(max(claim.claimed_at - due_at, 0.0))

    def started(self, claim: Claim) -> None:
        self._of(claim.queue_name, claim.job_name).started += 1

    def finished(self, claim: Claim, event: Event, seconds: float | None) -> None:
        """A verdict is written. `seconds`: how long the job has run, if it had started."""
        tally = self._of(claim.queue_name, claim.job_name)
        tally.finished[event] += 1
        if seconds is not None:
            if tally.durations is None:
                tally.durations = Distribution()
            tally.durations.add(seconds)

    def swept(self, settled: Sequence[Settlement]) -> None:
        for claim, verdict in settled:
            self._swept[verdict.event] += 1
            self.finished(claim, verdict.event, None)

    def lost(self, claim: Claim) -> None:
        self._of(claim.queue_name, claim.job_name).lost += 1

    def _of(self, queue: str, job: str) -> Tally:
        tally = self._tallies.get((queue, job))
        if tally is None:
            tally = self._tallies.setdefault(self._labels(queue, job), Tally())
        return tally

    def _labels(self, queue: str, job: str) -> tuple[str, str]:
        job = job if jobs.find(job) else UNKNOWN
        labels = self._label(queue), job
        return labels if labels in self._tallies or len(self._tallies) < MOST_PAIRS else (OTHER, job)

    def _pickup(self, queue: str) -> Distribution:
        pickups = self._pickups.get(queue)
        if pickups is None:
            pickups = self._pickups.setdefault(self._label(queue), Distribution())
        return pickups

    def _label(self, queue: str) -> str:
        """The name of a queue, if there are not too many yet."""
        if queue not in self._queues and len(self._queues) >= MOST_QUEUES:
            return OTHER
        self._queues.add(queue)
        return queue

    # ── Telling, in any thread ────────────────────────────────────────────────────────────────────────────

    def page(self, accept: str) -> Answer:
        text, content_type = exposition(self.families(), accept)
        return Answer(text, content_type=content_type)

    def families(self) -> Iterator[Family]:
        tallies = sorted(self._tallies.copy().items())
        yield Family(
            "pgjobs_started_total",
            "counter",
            "Attempts whose job function was entered; known a few seconds later, or when they end.",
            ("queue", "job_name"),
            {labels: tally.started for labels, tally in tallies},
        )
        yield Family(
            "pgjobs_finished_total",
            "counter",
            "Claims that have ended, by the verdict that was written; those that this worker swept included.",
            ("queue", "job_name", "verdict"),
            {(*of, event): count for of, tally in tallies for event, count in tally.finished.items()},
        )
        yield Family(
            "pgjobs_duration_seconds",
            "histogram",
            "How long attempts have run.",
            ("queue", "job_name"),
            {labels: tally.durations for labels, tally in tallies if tally.durations is not None},
        )
        yield Family(
            "pgjobs_pickup_seconds",
            "histogram",
            "How long claimed jobs had been due, without those that were interrupted before.",
            ("queue",),
            {(queue,): pickups for queue, pickups in sorted(self._pickups.copy().items())},
        )
        yield Family(
            "pgjobs_lost_claims_total",
            "counter",
            "Claims that this worker had and that no longer held: it was silent, or the row was changed.",
            ("queue", "job_name"),
            {labels: tally.lost for labels, tally in tallies},
        )
        yield Family(
            "pgjobs_swept_total",
            "counter",
            "Claims of workers gone silent that this worker has swept, by the verdict.",
            ("verdict",),
            {(event,): count for event, count in self._swept.items()},
        )
        yield from _of_now(self._now())


def _of_now(now: Now) -> Iterator[Family]:
    yield Family("pgjobs_worker_info", "gauge", "Always 1.", ("version",), {(__version__,): 1})
    yield gauge("pgjobs_ready", "Whether this worker is ready, as GET /readyz says.", now.ready)
    yield gauge("pgjobs_running", "Jobs that executors have been given, and have not ended.", now.running)
    yield gauge("pgjobs_waiting", "Jobs that are claimed and wait here for an executor.", now.waiting)
    yield gauge("pgjobs_unsettled", "Outcomes that are not yet written.", now.unsettled)
    yield gauge("pgjobs_oldest_claim_age_seconds", "Since the oldest claim that is held.", now.oldest_claim)
    yield gauge("pgjobs_slots", "Jobs that may run at once, async ones included.", now.slots)
    yield counter("pgjobs_loop_turns_total", "Turns of the supervisor's loop.", now.turns)
    yield counter(
        "pgjobs_database_failures_total", "Transactions of the supervisor that failed.", now.database_failures
    )
    yield gauge("pgjobs_listening", "Whether notifications are heard; else it polls.", now.listening)
    yield counter(
        "pgjobs_missed_notifications_total",
        "Notifications of this worker to itself that it did not hear.",
        now.missed_notifications,
    )
    yield Family(
        "pgjobs_connections",
        "gauge",
        "Open connections of the supervisor, by purpose; those of job code are not known to it.",
        ("purpose",),
        {(purpose,): float(is_open) for purpose, is_open in now.connections.items()},
    )
    yield Family(
        "pgjobs_executors",
        "gauge",
        "Executor processes, the warm spare included, by state.",
        ("state",),
        {(state,): count for state, count in now.executors.items()},
    )
    yield counter(
        "pgjobs_executors_started_total", "Executor processes that were started.", now.executors_started
    )
    yield Family(
        "pgjobs_executors_ended_total",
        "counter",
        "Executor processes that have ended: stopped or killed by the supervisor, or died.",
        ("how",),
        {(how,): count for how, count in now.executors_ended.items()},
    )
    yield gauge(
        "pgjobs_executors_memory_bytes",
        "Memory of all executors together; what they share counts for each.",
        sum(now.memory),
    )
    yield gauge(
        "pgjobs_executor_memory_max_bytes",
        "Memory of the largest executor, what it shares included.",
        max(now.memory, default=0),
    )
