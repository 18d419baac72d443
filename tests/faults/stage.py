"""What the harnesses about a server's faults stand on: a server, workers, producers, and what became of it.

Chores are numbered. What producers were told, what bodies noted in the ledger, and what the audit saw of
every row are compared in the end, whatever the server went through.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from tests.faults import bodies, ledger
from tests.faults.audit import Audit
from tests.faults.checker import History, assert_kept, check_log, repeats
from tests.faults.ledger import Producer
from tests.faults.proxy import Proxy
from tests.faults.serverlog import ServerLog
from tests.faults.servers import Cluster, environment_for
from tests.workers import Worker, Workers, until

LEASE = 4.0
SETTINGS = {"LEASE": LEASE, "SWEEP_INTERVAL": 0.5, "LOST_DELAY": 0}
SMALL_HOST = ("--processes", "1", "--threads", "4", "--poll-interval", "1")
ALL_DONE = 60.0  # seconds; only ever reached by a test that fails

INSERT = """
INSERT INTO background_jobs (job_name, payload, max_attempts) VALUES ('tests.faults.bodies.chore', %s, 50)
"""


class Stage:
    """A database on a server, its workers, and the chores that they have to do."""

    def __init__(self, cluster: Cluster, directory: Path, cleanup: ExitStack) -> None:
        self.cluster = cluster
        self.directory = directory
        self.ledger = directory / "ledger"
        self.database = cluster.new_database(
            f"stage_{uuid.uuid4().hex[:8]}", lambda name: environment_for(cluster.url(name), name)
        )
        self.producer = Producer()
        self.first_log = ServerLog(cluster.log)
        self.workers = Workers(directory, {})
        self._cleanup = cleanup
        cleanup.callback(self.workers.end)
        with self.session() as session:
            Audit(session).install()

    # ── Workers ───────────────────────────────────────────────────────────────────────────────────────────

    def proxy(self) -> Proxy:
        proxy = Proxy(self.cluster.socket)
        self._cleanup.callback(proxy.close)
        return proxy

    def url(self, port: int | None = None, user: str = "postgres") -> str:
        """The database, by the server's own socket or by a TCP port of loopback."""
        if port is None:
            return self.cluster.url(self.database).replace("postgres@", f"{user}@", 1)
        return f"postgres://{user}@127.0.0.1:{port}/{self.database}"

    def worker(
        self,
        *arguments: str,
        url: str = "",
        probe_interval: float = 1.0,
        settings: dict[str, Any] | None = None,
        **environment: str,
    ) -> Worker:
        """Start a worker, with few slots and a short lease unless told otherwise."""
        own = {
            "PGJOBS_TEST_IMPORT": bodies.__name__,
            ledger.VARIABLE: str(self.ledger),
            bodies.PARENT: str(os.getpid()),
            bodies.PROBE_INTERVAL: str(probe_interval),
        }
        return self.workers.start(
            *(arguments or SMALL_HOST),
            settings=SETTINGS | (settings or {}),
            environment=environment_for(url or self.url(), self.database, **own, **environment),
        )

    def start(self, count: int) -> list[Worker]:
        """Start workers, one after the other, each when the one before listens."""
        return [self.worker().until_listening() for _ in range(count)]

    def assert_alive(self) -> None:
        for worker in self.workers:
            assert worker.process.poll() is None, worker.log.read_text()[-3000:]

    def backend(self, purpose: str, *, timeout: float = 30.0) -> int:
        """The server process of a worker's connection."""
        statement = "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND datname = %s"
        name = f"django_pgjobs {purpose}"
        rows = until(
            lambda: self.cluster.execute(statement, name, self.database),
            what=f"a connection of the {purpose}",
            deadline=timeout,
        )
        return int(rows[0][0])

    # ── Chores ────────────────────────────────────────────────────────────────────────────────────────────

    def session(self, **parameters: Any) -> psycopg.Connection[Any]:
        return self.cluster.session(self.database, **parameters)

    def execute(self, statement: str, *parameters: Any) -> list[Any]:
        return self.cluster.execute(statement, *parameters, database=self.database)

    def new_role(self, name: str) -> None:
        """A role with all rights, and no settings."""
        self.execute(f"DROP ROLE IF EXISTS {name}")
        self.execute(f"CREATE ROLE {name} SUPERUSER LOGIN")

    def enqueue(self, count: int = 1, *, seconds: float = 0.0, wait_for: str = "") -> list[int]:
        """Add chores that take so long, or wait for a file. Returns their numbers."""
        with self.session() as session:
            return self.enqueue_with(session, count, seconds=seconds, wait_for=wait_for)

    def enqueue_running(self, count: int) -> tuple[list[int], Path]:
        """Have so many chores in slots. Returns their numbers, and the file that they wait for."""
        go = self.directory / "go"
        numbers = self.enqueue(count, wait_for=str(go))
        self.until_started(numbers)
        return numbers, go

    def enqueue_with(
        self, session: psycopg.Connection[Any], count: int = 1, *, seconds: float = 0.0, wait_for: str = ""
    ) -> list[int]:
        """The same on a given session, in one transaction."""
        kwargs = {"seconds": seconds, "until": wait_for}

        def insert(numbers: list[int]) -> None:
            payloads = [(Jsonb({"args": [number], "kwargs": kwargs}),) for number in numbers]
            with session.transaction(), session.cursor() as cursor:
                cursor.executemany(INSERT, payloads)

        return self.producer.enqueue(insert, count)

    def is_completed(self, session: psycopg.Connection[Any], number: int) -> bool:
        """Whether a chore is completed that was the last to be enqueued."""
        statement = (
            "SELECT status = 'completed' FROM background_jobs"
            " WHERE id = (SELECT max(id) FROM background_jobs) AND payload #>> '{args,0}' = %s"
        )
        row = session.execute(statement, [str(number)]).fetchone()
        return row is not None and bool(row[0])

    @contextmanager
    def producing(self, random: Any, pause: float = 0.01, longest: float = 0.1) -> Iterator[None]:
        """Meanwhile, add one chore after another, whatever the server does."""
        stopped = threading.Event()
        seed = random.random()

        def produce() -> None:
            dice = type(random)(seed)
            session: psycopg.Connection[Any] | None = None
            while not stopped.is_set():
                try:
                    if session is None or session.closed:
                        session = self.session()
                    self.enqueue_with(session, seconds=dice.uniform(0.0, longest))
                except psycopg.Error:
                    pass  # no connection is to be had
                stopped.wait(pause)
            if session is not None:
                session.close()

        thread = threading.Thread(target=produce, name="producer", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()

    def _noted(self, what: str) -> Counter[int]:
        return Counter(effect.number for effect in ledger.read(self.ledger) if effect.what == what)

    def started(self) -> Counter[int]:
        """How often each chore has started."""
        return self._noted("start")

    def ended(self) -> Counter[int]:
        return self._noted("end")

    def until_started(self, numbers: Iterable[int]) -> None:
        wanted = set(numbers)
        until(lambda: wanted <= self.started().keys(), what="the chores to start")

    def until_ended(self, numbers: Iterable[int], deadline: float = 30.0) -> None:
        wanted = set(numbers)
        until(lambda: wanted <= self.ended().keys(), what="the chores to end", deadline=deadline)

    def flows(self, deadline: float) -> float:
        """Wait until a new chore is run. Returns the seconds that it took from now."""
        began = time.monotonic()
        numbers = self.enqueue()
        self.until_ended(numbers, deadline)
        return time.monotonic() - began

    def statuses(self) -> Counter[str]:
        return Counter(status for (status,) in self.execute("SELECT status::text FROM background_jobs"))

    def until_all_done(self, deadline: float = ALL_DONE) -> None:
        """Wait until no job is queued or being processed."""
        statement = "SELECT 1 FROM background_jobs WHERE status IN ('queued', 'processing') LIMIT 1"
        until(lambda: not self.execute(statement), what="all jobs to be done", deadline=deadline)

    def assert_kept(self, *, may_lose_claims: bool = False, **figures: float) -> dict[str, float]:
        """Once all is done, no rule is broken, and each chore was run once. Returns figures to record.

        With `may_lose_claims`, chores may have been run again where their claims were lost.
        """
        self.until_all_done()
        with self.session() as session:
            changes = Audit(session).changes()
        history = History(changes, ledger.read(self.ledger), self.producer, LEASE)
        assert_kept(history, faultless=not may_lose_claims)
        lost = [hold for job in history.jobs.values() for hold in job.holds if hold.how == "lost"]
        assert may_lose_claims or not lost, str(lost[0].end)
        assert self.statuses().keys() <= {"completed"}
        log = self.first_log.text()
        assert check_log(log, applications="none of ours: no error but a deadlock counts") == []
        return figures | {
            "jobs": len(self.producer.acknowledged),
            "unknown_commits": len(self.producer.unknown),
            "lost_claims": len(lost),
            "repeats": repeats(history),
        }


def until_heard(worker: Worker, times: int, deadline: float = 30.0) -> float:
    """Wait until a worker has said so many times that it listens. Returns the seconds that it took."""
    began = time.monotonic()
    listening = "Listening for new jobs."
    until(lambda: worker.log.read_text().count(listening) >= times, what="the listener", deadline=deadline)
    return time.monotonic() - began


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Hold a process up with SIGSTOP."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def sleep(seconds: float) -> None:
    """Let a fault last for so long. What is expected of it is waited for, not slept for."""
    time.sleep(seconds)
