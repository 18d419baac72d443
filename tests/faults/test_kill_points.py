"""SIGKILL of a supervisor or an executor at each point of a job's way, times each outcome of the job.

`FATES` says what a kill at a point comes to, and `EXPECTED` what is left of each job in the end, once a
second, healthy worker has finished what was left over. Both are exact.
"""

from __future__ import annotations

import json
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from django.db import transaction
from django.db.models.functions import Now

from django_pgjobs.lifecycle import FINISHED
from django_pgjobs.models import BackgroundJob
from tests.faults import checker, kill_points
from tests.faults.audit import Audit
from tests.faults.checker import History
from tests.faults.conftest import Chunk
from tests.models import Effect
from tests.workers import Worker, Workers, until

pytestmark = pytest.mark.processes

# ── The tables ────────────────────────────────────────────────────────────────────────────────────────────

Place = tuple[str, str]  # victim and point

# What a kill there means for the jobs that the host holds at that moment.
FATES: dict[Place, str] = {
    ("supervisor", "before the claim is committed"): "as if nothing had happened",
    ("supervisor", "after the claim is committed"): "lost before the start",
    ("supervisor", "after the claim"): "lost before the start",
    ("supervisor", "before the start is marked"): "lost before the start",
    ("supervisor", "before the body"): "lost before the start",
    ("supervisor", "in the body"): "lost after the start",
    ("supervisor", "in a renewal"): "lost after the start",
    ("supervisor", "after the body"): "lost after the start",
    ("supervisor", "before the end is told"): "lost after the start",
    ("supervisor", "before the settle is committed"): "lost after the start",
    ("supervisor", "after the settle is committed"): "as if nothing had happened",
    ("supervisor", "while stopping"): "lost after the start",
    ("supervisor", "at the very end"): "interrupted",
    # Here the jobs are another host's, dead before, whose claims the victim is just sweeping.
    ("supervisor", "before the sweep is committed"): "lost before the start",
    ("supervisor", "after the sweep is committed"): "lost before the start",
    ("executor", "before the start is marked"): "as if nothing had happened",
    ("executor", "before the body"): "crashed before the start",
    ("executor", "in the body"): "crashed after the start",
    ("executor", "in a renewal"): "crashed after the start",
    ("executor", "after the body"): "crashed after the start",
    ("executor", "before the end is told"): "crashed after the end",
    ("executor", "while stopping"): "crashed after the start",
}


class Final(NamedTuple):
    """What is left of a job."""

    status: str
    attempts: int
    starts: int  # by the Effects of its body
    errors: list[str]  # one for each failed attempt, oldest first; the last one is `last_error`
    crashes: int = 0
    interruptions: int = 0


Finals = dict[Place, dict[str, Final]]  # by outcome

NO_LUCK = "no luck"
LOST = "Worker timeout detected"
CRASHED = "executor died with signal 9; possibly out of memory"
STOPPED = "The job was interrupted: its worker stopped, or its executor was killed because of another job"
NOT_AGAIN = ". It may have run, and is declared with rerun_if_lost=False."

# fate: outcome of the job's function: what is left
EXPECTED = {
    "as if nothing had happened": {
        "completes": Final("completed", 1, 1, []),
        "completes, async": Final("completed", 1, 1, []),
        "fails, attempts left": Final("failed", 3, 3, [NO_LUCK, NO_LUCK, NO_LUCK]),
        "fails, none left": Final("failed", 1, 1, [NO_LUCK]),
        "at most once": Final("completed", 1, 1, []),
        "snoozes": Final("completed", 1, 2, []),
    },
    "lost before the start": {
        "completes": Final("completed", 2, 1, [LOST]),
        "completes, async": Final("completed", 2, 1, [LOST]),
        "fails, attempts left": Final("failed", 3, 2, [LOST, NO_LUCK, NO_LUCK]),
        "fails, none left": Final("failed", 1, 0, [LOST]),
        "at most once": Final("failed", 1, 0, [LOST + NOT_AGAIN]),
        "snoozes": Final("completed", 2, 2, [LOST]),
    },
    "lost after the start": {
        "completes": Final("completed", 2, 2, [LOST]),
        "completes, async": Final("completed", 2, 2, [LOST]),
        "fails, attempts left": Final("failed", 3, 3, [LOST, NO_LUCK, NO_LUCK]),
        "fails, none left": Final("failed", 1, 1, [LOST]),
        "at most once": Final("failed", 1, 1, [LOST + NOT_AGAIN]),
        "snoozes": Final("completed", 2, 2, [LOST]),
    },
    "interrupted": {
        "completes": Final("completed", 1, 2, [], interruptions=1),
        "completes, async": Final("completed", 1, 2, [], interruptions=1),
        "fails, attempts left": Final("failed", 3, 4, [NO_LUCK, NO_LUCK, NO_LUCK], interruptions=1),
        "fails, none left": Final("failed", 1, 2, [NO_LUCK], interruptions=1),
        "at most once": Final("failed", 1, 1, [STOPPED + NOT_AGAIN]),
        "snoozes": Final("completed", 1, 2, [], interruptions=1),
    },
    "crashed before the start": {
        "completes": Final("completed", 2, 1, [CRASHED], crashes=1),
        "completes, async": Final("completed", 2, 1, [CRASHED], crashes=1),
        "fails, attempts left": Final("failed", 3, 2, [CRASHED, NO_LUCK, NO_LUCK], crashes=1),
        "fails, none left": Final("failed", 1, 0, [CRASHED], crashes=1),
        "at most once": Final("failed", 1, 0, [CRASHED + NOT_AGAIN], crashes=1),
        "snoozes": Final("completed", 2, 2, [CRASHED], crashes=1),
    },
    "crashed after the start": {
        "completes": Final("completed", 2, 2, [CRASHED], crashes=1),
        "completes, async": Final("completed", 2, 2, [CRASHED], crashes=1),
        "fails, attempts left": Final("failed", 3, 3, [CRASHED, NO_LUCK, NO_LUCK], crashes=1),
        "fails, none left": Final("failed", 1, 1, [CRASHED], crashes=1),
        "at most once": Final("failed", 1, 1, [CRASHED + NOT_AGAIN], crashes=1),
        "snoozes": Final("completed", 2, 2, [CRASHED], crashes=1),
    },
    # A mark says of those that have returned nothing that they have.
    "crashed after the end": {
        "completes": Final("completed", 1, 1, []),
        "completes, async": Final("completed", 1, 1, []),
        "fails, attempts left": Final("failed", 3, 3, [CRASHED, NO_LUCK, NO_LUCK], crashes=1),
        "fails, none left": Final("failed", 1, 1, [CRASHED], crashes=1),
        "at most once": Final("completed", 1, 1, []),
        "snoozes": Final("completed", 2, 2, [CRASHED], crashes=1),
    },
}

Outcome = tuple[Any, str, int]  # the job function, what its body does, and max_attempts

OUTCOMES: dict[str, Outcome] = {
    "completes": (kill_points.rerun, "completes", 3),
    "completes, async": (kill_points.rerun_async, "completes", 3),
    "fails, attempts left": (kill_points.rerun, "fails", 3),
    "fails, none left": (kill_points.rerun, "fails", 1),
    "at most once": (kill_points.run_once, "completes", 3),
    "snoozes": (kill_points.rerun, "snoozes", 3),
}

# The same for atomic jobs, by the effects that they have committed instead of by their starts.

ATOMIC_FATES: dict[Place, str] = {
    ("supervisor", "before the body"): "lost",
    ("supervisor", "in the body"): "lost",
    ("supervisor", "after the body"): "lost",
    ("supervisor", "before the completion is committed"): "lost",
    ("supervisor", "after the completion is committed"): "as if nothing had happened",
    ("executor", "before the body"): "crashed",
    ("executor", "in the body"): "crashed",
    ("executor", "after the body"): "crashed",
    ("executor", "before the completion is committed"): "crashed",
    ("executor", "after the completion is committed"): "as if nothing had happened",
}

ATOMIC_EXPECTED = {
    "as if nothing had happened": {
        "completes": Final("completed", 1, 1, []),
        "completes, no attempt left": Final("completed", 1, 1, []),
        "at most once": Final("completed", 1, 1, []),
    },
    "lost": {
        "completes": Final("completed", 2, 1, [LOST]),
        "completes, no attempt left": Final("failed", 1, 0, [LOST]),
        "at most once": Final("failed", 1, 0, [LOST + NOT_AGAIN]),
    },
    "crashed": {
        "completes": Final("completed", 2, 1, [CRASHED], crashes=1),
        "completes, no attempt left": Final("failed", 1, 0, [CRASHED], crashes=1),
        "at most once": Final("failed", 1, 0, [CRASHED + NOT_AGAIN], crashes=1),
    },
}

ATOMIC_OUTCOMES: dict[str, Outcome] = {
    "completes": (kill_points.rerun_atomic, "completes", 3),
    "completes, no attempt left": (kill_points.rerun_atomic, "completes", 1),
    "at most once": (kill_points.run_once_atomic, "completes", 3),
}

# ── The runs ──────────────────────────────────────────────────────────────────────────────────────────────

SETTINGS = {"LEASE": 2, "SWEEP_INTERVAL": 0.5, "LOST_DELAY": 0}
SLOTS = ("--processes", "1", "--threads", "5", "--async-slots", "1")  # one for each job
AT_ONCE = 4  # hosts
JOBS = {"PGJOBS_TEST_IMPORT": "tests.faults.kill_points"}


class Run:
    """One host that is killed, or whose executor is, with one job of each outcome."""

    def __init__(self, number: int, victim: str, point: str, directory: Path) -> None:
        self.victim = victim
        self.point = point
        self.directory = directory
        self.queue = f"run-{number}"
        self.jobs: dict[str, BackgroundJob] = {}  # by outcome
        self.worker: Worker

    @property
    def sweeps(self) -> bool:
        return "sweep" in self.point

    def what(self, outcome: str) -> str:
        return f"{self.queue} {outcome}"

    def enqueue(self, outcomes: list[tuple[str, Outcome]]) -> None:
        with transaction.atomic():
            for outcome, (function, does, max_attempts) in outcomes:
                handle = function.using(queue=self.queue, max_attempts=max_attempts).enqueue(
                    self.what(outcome), does
                )
                self.jobs[outcome] = BackgroundJob.objects.get(pk=handle.pk)
        if self.sweeps:
            ids = [row.pk for row in self.jobs.values()]
            BackgroundJob.objects.filter(pk__in=ids).update(**dead_hosts_claim())

    def start(self, workers: Workers) -> None:
        self.directory.mkdir()
        order = {
            "victim": self.victim,
            "point": self.point,
            "directory": str(self.directory),
            "jobs": len(self.jobs),
        }
        grace = "0" if self.point == "at the very end" else "60"
        # Without maintenance, no host of a run takes another one's jobs.
        options = () if self.sweeps else ("--no-maintenance",)
        self.worker = workers.start(
            *(*SLOTS, "--queue", self.queue, "--grace", grace, *options),
            settings=SETTINGS,
            environment=JOBS | {kill_points.ORDER: json.dumps(order)},
        )

    def finish(self) -> None:
        """Wait until the kill has had its effect on this host."""
        if self.victim == "supervisor":
            assert self.worker.wait() == -signal.SIGKILL, self.worker.log.read_text()
        elif self.point == "while stopping":
            assert self.worker.wait() == 0, self.worker.log.read_text()
        else:
            until(lambda: are_finished(self.queue), what=f"{self.victim} {self.point}", deadline=60)
            assert self.worker.stop() == 0
        assert (self.directory / "killed").exists(), self.worker.log.read_text()

    def finals(self) -> dict[str, Final]:
        return {outcome: self._final(outcome, row) for outcome, row in self.jobs.items()}

    def _final(self, outcome: str, row: BackgroundJob) -> Final:
        row.refresh_from_db()
        starts = Effect.objects.filter(what=self.what(outcome)).count()
        messages = [error["message"] for error in row.errors]
        assert (row.last_error or "").removeprefix("ValueError: ") == (messages[-1] if messages else "")
        return Final(
            row.status, row.attempts, starts, messages, row.crashes, row.metadata.get("interruptions", 0)
        )


def dead_hosts_claim() -> dict[str, Any]:
    """The columns of a job that a host has claimed which died an hour ago."""
    then = Now() - timedelta(hours=1)
    times = {"locked_at": then, "started_at": then, "attempted_at": then}
    return {"status": "processing", "attempts": 1, "locked_by": uuid4(), "worker_id": uuid4(), **times}


def are_finished(queue: str = "") -> bool:
    jobs = BackgroundJob.objects.filter(queue_name=queue) if queue else BackgroundJob.objects.all()
    return not jobs.exclude(status__in=FINISHED).exists()


def waves(runs: list[Run]) -> list[list[Run]]:
    """What runs at the same time: several hosts, but one that sweeps by itself."""
    plain = [run for run in runs if not run.sweeps]
    together = [plain[first : first + AT_ONCE] for first in range(0, len(plain), AT_ONCE)]
    return together + [[run] for run in runs if run.sweeps]


def run_all(
    chunk: Chunk, workers: Workers, directory: Path, fates: dict[Place, str], outcomes: dict[str, Outcome]
) -> Finals:
    """What is left of a job of each outcome after a kill at each place."""
    runs = [
        Run(number, *place, directory / f"run-{number}")
        for number, place in enumerate(chunk.random.sample(list(fates), len(fates)))
    ]
    for wave in waves(runs):
        for run in wave:
            run.enqueue(chunk.random.sample(list(outcomes.items()), len(outcomes)))
            run.start(workers)
        for run in wave:
            run.finish()
    healthy = workers.start(settings=SETTINGS, environment=JOBS).until_listening()
    until(are_finished, what="the healthy worker to finish what was left", deadline=60)
    assert healthy.stop() == 0
    chunk.record(kills=len(runs), cases=len(runs) * len(outcomes))
    return {(run.victim, run.point): run.finals() for run in runs}


def differences(found: Finals, expected: Finals) -> list[str]:
    """Every case that did not end as it should, in words."""
    assert found.keys() == expected.keys()
    return [
        f"{victim} killed {point}, {outcome}: expected {expected[victim, point][outcome]}, found {final}"
        for (victim, point), finals in found.items()
        for outcome, final in finals.items()
        if final != expected[victim, point][outcome]
    ]


@pytest.mark.chunks(large=20)
def test_each_kill_leaves_of_each_job_what_the_table_says(
    chunk: Chunk, workers: Workers, tmp_path: Path, audit: Audit
) -> None:
    found = run_all(chunk, workers, tmp_path, FATES, OUTCOMES)
    expected = {place: EXPECTED[fate] for place, fate in FATES.items()}
    assert differences(found, expected) == []
    checker.assert_kept(History(audit.changes(), lease=SETTINGS["LEASE"]))


@pytest.mark.chunks(large=100)
def test_each_kill_leaves_the_effects_of_an_atomic_job_once_where_it_is_completed_and_else_not_at_all(
    chunk: Chunk, workers: Workers, tmp_path: Path, audit: Audit
) -> None:
    found = run_all(chunk, workers, tmp_path, ATOMIC_FATES, ATOMIC_OUTCOMES)
    expected = {place: ATOMIC_EXPECTED[fate] for place, fate in ATOMIC_FATES.items()}
    assert differences(found, expected) == []
    checker.assert_kept(History(audit.changes(), lease=SETTINGS["LEASE"]))
