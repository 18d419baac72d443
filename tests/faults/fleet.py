"""Several real worker hosts, the blows that fall on them, and the help that they get.

What is to be killed or paused, and when, is drawn from a seed before anything starts. Whom a blow hits
depends on who is there at that time.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from django_pgjobs import JobFunction
from tests.faults import bodies, ledger
from tests.faults.audit import Audit
from tests.faults.checker import Death, History, Hold
from tests.faults.ledger import Producer
from tests.workers import Worker, Workers, process_tree, until

FEED_BEFORE = 0.15  # seconds
PATIENCE = 180.0  # seconds until everything must have come to its end, however slow the machine

SETTINGS = {
    "LEASE": 2,
    "SWEEP_INTERVAL": 0.5,
    "LOST_DELAY": 0,
    "POLL_INTERVAL": 1,
    "MAX_CRASHES": 1000,
}


class Blow(NamedTuple):
    at: float  # seconds from the start of the storm
    what: str  # "kill host", "kill executor", "kill fork server", "pause host" or "pause executor"
    whom: float  # which of those that are there, from 0 to 1
    seconds: float = 0.0  # of a pause


def draw_blows(
    random: random.Random,
    count: int,
    kinds: dict[str, float],
    *,
    every: tuple[float, float] = (0.3, 1.0),
    seconds: tuple[float, float] = (0.0, 0.0),
) -> list[Blow]:
    """A plan of `count` blows of these kinds, given with their weights, a drawn time after each other."""
    at = 0.0
    blows = []
    for _ in range(count):
        at += random.uniform(*every)
        what = random.choices(list(kinds), list(kinds.values()))[0]
        blows.append(Blow(at, what, random.random(), random.uniform(*seconds)))
    return blows


class Dealt(NamedTuple):
    """A blow that has fallen."""

    blow: Blow
    host: Worker
    worker: str | None  # the id of that host, if it has claimed anything
    pid: int  # of the process that it hit
    at: float  # the machine's clock, just before


class Fleet:
    def __init__(
        self,
        directory: Path,
        environment: dict[str, str],
        audit: Audit,
        connection: psycopg.Connection[Any],
        module: str = bodies.__name__,
    ) -> None:
        self.ledger = directory / "ledger"
        own = {
            ledger.VARIABLE: str(self.ledger),
            "PGJOBS_TEST_IMPORT": module,
            bodies.PARENT: str(os.getpid()),
        }
        self.settings: dict[str, Any] = dict(SETTINGS)
        self.arguments: list[str] = []
        self.hosts: list[Worker] = []
        self.fallen: list[Worker] = []
        self.dealt: list[Dealt] = []
        self.spared = 0  # so many of the first hosts are never killed
        self._workers = Workers(directory, environment | own)
        self._audit = audit
        self._connection = connection
        self._paused: dict[int, float] = {}  # until when, by pid

    @property
    def lease(self) -> float:
        return float(self.settings["LEASE"])

    # ── Life ──────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, count: int, *arguments: str, **settings: Any) -> None:
        """Start hosts, and wait until they are ready."""
        self.arguments = list(arguments)
        self.settings |= settings
        for _ in range(count):
            self.hosts.append(self._start_host())
        until(lambda: len(self.ready_hosts()) == count, what="all hosts to be ready", deadline=PATIENCE)

    def _start_host(self) -> Worker:
        return self._workers.start(*self.arguments, settings=self.settings)

    def keep(self) -> None:
        """Let those go on whose pause is over, and start a new host for each that has ended."""
        for pid in [pid for pid, end in self._paused.items() if end <= time.monotonic()]:
            del self._paused[pid]
            send(pid, signal.SIGCONT)
        for place, host in enumerate(self.hosts):
            if host.process.poll() is not None:
                self.fallen.append(host)
                self.hosts[place] = self._start_host()

    def ready_hosts(self) -> list[Worker]:
        return [host for host in self.hosts if host.process.poll() is None and is_ready(host)]

    def stop(self) -> None:
        """Let all hosts end in peace, and see that they leave nothing behind."""
        for pid in self._paused:
            send(pid, signal.SIGCONT)
        self._paused.clear()
        # One that has only just been started does not catch the signal yet.
        until(lambda: len(self.ready_hosts()) == len(self.hosts), what="all to be ready", deadline=PATIENCE)
        for host in self.hosts:
            host.signal(signal.SIGTERM)
        for host in self.hosts:
            assert host.wait() == 0, host.log.read_text()
        until(lambda: not self._sessions(), what="the sessions of all hosts to end", deadline=PATIENCE)

    def _sessions(self) -> int:
        (count,) = self._connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'django_pgjobs %'"
        ).fetchone() or (0,)
        return int(count)

    def end(self) -> None:
        """Whatever happened: leave no process."""
        self._workers.end()

    # ── Blows ─────────────────────────────────────────────────────────────────────────────────────────────

    def storm(self, blows: Sequence[Blow], feed: Callable[[float], object]) -> None:
        """Deal the blows at their times, and replace what falls.

        Shortly before each of them, so that it hits what is at work, `feed` gets the share that is then over.
        """
        begun = time.monotonic()
        for place, blow in enumerate(blows, start=1):
            self._wait(begun + blow.at - FEED_BEFORE)
            feed(place / len(blows))
            self._wait(begun + blow.at)
            self.deal(blow)

    def _wait(self, end: float) -> None:
        while time.monotonic() < end:
            self.keep()
            time.sleep(0.02)

    def deal(self, blow: Blow) -> None:
        """Hit one of those whom this blow may hit, as soon as there is one."""
        host, pid = until(lambda: self._victim(blow), what=f"somebody to {blow.what}", deadline=PATIENCE)
        self.dealt.append(Dealt(blow, host, self._worker_of(host), pid, time.time()))
        if blow.what.startswith("pause"):
            self._paused[pid] = time.monotonic() + blow.seconds
            send(pid, signal.SIGSTOP)
        else:
            send(pid, signal.SIGKILL)
        if blow.what == "kill host":
            host.process.wait()

    def _worker_of(self, host: Worker) -> str | None:
        row = self._connection.execute(
            "SELECT id::text FROM background_workers WHERE pid = %s ORDER BY started_at DESC", [host.pid]
        ).fetchone()
        return None if row is None else str(row[0])

    def _victim(self, blow: Blow) -> tuple[Worker, int] | None:
        self.keep()
        pids = self._candidates(blow.what.split(maxsplit=1)[1])
        pids = [(host, pid) for host, pid in pids if pid not in self._paused]
        return pids[int(blow.whom * len(pids))] if pids else None

    def _candidates(self, kind: str) -> list[tuple[Worker, int]]:
        ready = self.ready_hosts()
        spared = self.hosts[: self.spared]
        if kind == "host":
            return [(host, host.pid) for host in ready if host not in spared]
        children = process_tree()
        servers = [
            (host, pid) for host in ready if host.pid not in self._paused for pid in children[host.pid]
        ]
        if kind == "fork server":
            return [(host, pid) for host, pid in servers if host not in spared]
        executors = [(host, pid) for host, server in servers for pid in children[server]]
        busy = self._busy()
        return [(host, pid) for host, pid in executors if pid in busy] or executors

    def _busy(self) -> set[int]:
        """The processes in which a body runs; among them some that have died in the middle of one."""
        running: dict[str, int] = {}
        for effect in ledger.read(self.ledger):
            if effect.what == "start":
                running[effect.run] = effect.pid
            else:
                running.pop(effect.run, None)
        return set(running.values())

    # ── What came of it ───────────────────────────────────────────────────────────────────────────────────

    def until_everything_ended(self) -> None:
        """Wait until no job waits or runs, while what ends is replaced."""
        self.until(self._everything_ended, what="all jobs to come to an end")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition, and go on to replace what ends and to let go on what is paused."""

        def holds() -> bool:
            self.keep()
            time.sleep(0.05)
            return condition()

        until(holds, what=what, deadline=PATIENCE)

    def _everything_ended(self) -> bool:
        row = self._connection.execute(
            "SELECT FROM background_jobs WHERE status IN ('queued', 'processing') LIMIT 1"
        ).fetchone()
        return row is None

    def history(self, producer: Producer | None = None) -> History:
        return History(
            self._audit.changes(), ledger.read(self.ledger), producer, self.lease,
            deletes_completed=self.settings.get("COMPLETED_RETENTION") == 0,
        )  # fmt: skip

    def deaths(self) -> list[Death]:
        """Whom the blows have killed."""
        deaths = []
        for dealt in self.dealt:
            if dealt.blow.what == "kill host":
                deaths.append(Death(dealt.at, worker=dealt.worker))
            elif dealt.blow.what == "kill executor":
                deaths.append(Death(dealt.at, executor=dealt.pid))
        return deaths

    def was_hit(self, hold: Hold) -> bool:
        """Whether something of the host that held a claim was hit meanwhile."""
        return any(
            dealt.worker == hold.claim.worker and hold.claim.at <= dealt.at <= hold.ended_at
            for dealt in self.dealt
        )

    def lost_by_the_living(self, history: History) -> list[Hold]:
        """Claims that were lost although nothing of their host was hit: the machine was too slow for it."""
        holds = (hold for job in history.jobs.values() for hold in job.holds if hold.how == "lost")
        return [hold for hold in holds if not self.was_hit(hold)]

    def logs(self) -> str:
        """What all hosts have said, those that have fallen first."""
        return "".join(host.log.read_text(errors="replace") for host in [*self.fallen, *self.hosts])


class Feeder:
    """For `Fleet.storm`: enqueues jobs of drawn lengths, as large a share of all as it is given."""

    def __init__(
        self,
        random: random.Random,
        producer: Producer,
        body: JobFunction[[int, float], None],
        jobs: int,
        longest: float = 0.2,
    ) -> None:
        self._producer = producer
        self._body = body
        self._lengths = [random.uniform(0, longest) for _ in range(jobs)]
        self._fed = 0

    def __call__(self, share: float) -> None:
        wanted = int(share * len(self._lengths))
        if wanted > self._fed:
            enqueue(self._producer, self._body, self._lengths[self._fed : wanted])
            self._fed = wanted


def enqueue(producer: Producer, body: JobFunction[[int, float], None], lengths: Sequence[float]) -> list[int]:
    """Enqueue jobs of these lengths with one statement. Returns their numbers."""

    def insert(numbers: list[int]) -> None:
        body.enqueue_many([(arguments, {}) for arguments in zip(numbers, lengths, strict=True)])

    return producer.enqueue(insert, len(lengths))


def is_ready(host: Worker) -> bool:
    """Whether a host runs jobs; it hears itself once it has talked to the database, and so has its row."""
    said = host.log.read_text(errors="replace")
    return "Ready to run jobs." in said and "Listening for new jobs." in said


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
