"""The ground on which all scenarios stand: the database, what is in its queue, and real worker hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, LiteralString
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
from psycopg import sql

from tests.workers import Worker, until

from .measure import Meter

ASYNC_SLOTS = 20  # of each executor process

PATIENCE = 60.0  # seconds in which at least one job is completed

FILL = """
INSERT INTO background_jobs (queue_name, job_name, payload, priority, run_at, status, updated_at)
SELECT (%(queues)s::text[])[1 + number %% cardinality(%(queues)s::text[])], %(job)s,
       jsonb_build_object('args', jsonb_build_array(number), 'kwargs', '{}'::jsonb), %(priority)s,
       statement_timestamp() + %(delay)s * interval '1 second', %(status)s::job_status,
       statement_timestamp()
  FROM generate_series(1, %(count)s) AS number
"""

# How many jobs have been completed at their first attempt since then.
COMPLETED = """
SELECT count(*)
  FROM background_jobs
 WHERE status = 'completed'
   AND updated_at >= %(since)s
   AND attempts = 1
"""

# Seconds from the first claim of any job until so many of them were completed.
STRETCH = """
SELECT EXTRACT(EPOCH FROM max(done.updated_at) - (SELECT min(started_at)
                                                 FROM background_jobs
                                                WHERE started_at >= %(since)s))::float8
  FROM (SELECT updated_at
          FROM background_jobs
         WHERE status = 'completed'
           AND updated_at >= %(since)s
           AND attempts = 1
         ORDER BY updated_at
         LIMIT %(jobs)s) AS done
"""

LISTENERS = """
SELECT count(*)
  FROM pg_stat_activity
 WHERE datname = current_database()
   AND query LIKE 'LISTEN%%'
"""

EMPTY = """
SELECT NOT EXISTS (SELECT FROM background_jobs WHERE status = 'queued')
   AND NOT EXISTS (SELECT FROM background_jobs WHERE status = 'processing')
"""

# What jobs that return when they started have returned.
MOMENTS = "SELECT id, result::float8 FROM background_jobs WHERE status = 'completed'"


class Bench:
    """A database of its own on the given server, whose owner may make databases. Closing drops it."""

    def __init__(
        self, server: str, directory: Path, peers: dict[str, Path], *, processes: int, threads: int
    ) -> None:
        self.directory = directory
        self.peers = peers  # the interpreter of each
        # Of each worker host.
        self.processes = processes
        self.threads = processes * threads
        self.async_slots = processes * ASYNC_SLOTS
        self.options = [f"--processes={processes}", f"--threads={threads}", f"--async-slots={ASYNC_SLOTS}"]
        self.databases: list[str] = []
        self.at_end = ExitStack()  # what else has to be ended
        self._server = server
        self.url = self.make_database("pgjobs")
        # For all child processes.
        os.environ["DATABASE_URL"] = self.url
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.benchmarks.settings"
        django("migrate", "--run-syncdb", "--skip-checks")
        self.connection: psycopg.Connection[Any] = psycopg.connect(self.url, autocommit=True)
        self.connection.execute("SET enable_seqscan = off")  # whoever looks must not slow what is measured
        self.connection.execute("INSERT INTO benchmarks_account SELECT n, 0 FROM generate_series(1, 1000) n")

    def make_database(self, purpose: str) -> str:
        """Make a database, and return its URL."""
        name = f"benchmark_{purpose}_{uuid4().hex[:8]}"
        with psycopg.connect(self._server, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        self.databases.append(name)
        return urlsplit(self._server)._replace(path=f"/{name}").geturl()

    def value(self, query: LiteralString, **parameters: Any) -> Any:
        """The only value that a query returns; None where it returns no row."""
        row = self.connection.execute(query, parameters).fetchone()
        return row and row[0]

    def close(self) -> None:
        self.at_end.close()
        self.connection.close()
        with psycopg.connect(self._server, autocommit=True) as connection:
            for name in self.databases:
                connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    # ── The queue ─────────────────────────────────────────────────────────────────────────────────────────

    def clear(self) -> None:
        self.connection.execute("TRUNCATE background_jobs, background_queues, background_workers")

    def fill(
        self,
        count: int,
        job: str = "nothing",
        *,
        queues: Sequence[str] = ("default",),
        priority: int = 0,
        delay: float = 0.0,
        status: str = "queued",
    ) -> None:
        """Insert jobs without telling anybody."""
        values = {
            "count": count,
            "job": f"tests.benchmarks.jobs.{job}",
            "queues": list(queues),
            "priority": priority,
            "delay": delay,
        }
        with self.connection.transaction():
            self.connection.execute("SET LOCAL pgjobs.notify = 'off'")
            self.connection.execute(FILL, {**values, "status": status})

    def settle_down(self) -> None:
        """Let the server do now what it would otherwise do while we measure."""
        self.connection.execute("VACUUM (ANALYZE) background_jobs")
        with suppress(psycopg.errors.InsufficientPrivilege):
            self.connection.execute("CHECKPOINT")

    def pause(self, *queues: str) -> None:
        for queue in queues:
            self.connection.execute("INSERT INTO background_queues VALUES (%s, now(), '', '')", (queue,))

    def resume(self) -> None:
        with self.connection.transaction():
            self.connection.execute("DELETE FROM background_queues")
            self.connection.execute("NOTIFY job_created")

    def until_empty(self) -> None:
        """Wait until no job waits or runs."""
        until(lambda: self.value(EMPTY), what="the queue to be empty", deadline=PATIENCE)

    def moments(self) -> dict[int, float]:
        """When each job that was completed has started, as far as it has returned that."""
        return dict(self.connection.execute(MOMENTS).fetchall())

    @contextmanager
    def without_triggers(self) -> Iterator[None]:
        self.connection.execute("ALTER TABLE background_jobs DISABLE TRIGGER USER")
        try:
            yield
        finally:
            self.connection.execute("ALTER TABLE background_jobs ENABLE TRIGGER USER")

    @contextmanager
    def old_snapshot(self) -> Iterator[None]:
        """Hold a snapshot, as a long report or a forgotten session does: no dead row can be removed."""
        with psycopg.connect(self.url) as connection:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.execute("SELECT FROM background_jobs LIMIT 1")
            yield

    # ── Workers ───────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def hosts(
        self, count: int = 1, *options: str, settings: dict[str, Any] | None = None
    ) -> Iterator[list[Worker]]:
        """Run worker hosts, and give them once all are ready and listen. They end with this process."""
        hosts = [self._start(number, [*self.options, *options], settings or {}) for number in range(count)]
        try:
            for number, host in enumerate(hosts):
                until(lambda: self._is_ready(number, host), what="a worker host to be ready")  # noqa: B023
            until(lambda: self.value(LISTENERS) >= count, what="the worker hosts to listen")
            yield hosts
            for host in hosts:
                host.stop()
                warnings = host.log.read_text().splitlines(keepends=True)
                sys.stderr.writelines(warnings[-3:])
        finally:
            for host in hosts:
                host.kill()

    def _start(self, number: int, options: Sequence[str], settings: dict[str, Any]) -> Worker:
        health = self.directory / f"health-{number}"
        health.unlink(missing_ok=True)
        return Worker(
            self.directory / f"host-{number}.log",
            {**os.environ, "PGJOBS_BENCHMARK_SETTINGS": json.dumps(settings)},
            ["--verbosity", "0", "--stop-with-parent", "--health-file", str(health), *options],
        )

    def _is_ready(self, number: int, host: Worker) -> bool:
        if host.process.poll() is not None:
            raise RuntimeError(f"A worker host ended while it started:\n{host.log.read_text()}")
        try:
            return not json.loads((self.directory / f"health-{number}").read_text())["why_not"]
        except FileNotFoundError:
            return False

    def drain(self, jobs: int, pids: Sequence[int]) -> tuple[float, dict[str, float]]:
        """Resume the queues, and wait until so many jobs have been completed.

        Returns how many there were in a second, and what a thousand of them cost.
        """
        since = self.value("SELECT statement_timestamp()")
        meter, began = Meter(self.connection, pids), time.monotonic()
        completed, progressed = 0, began
        self.resume()
        while completed < jobs:
            time.sleep(
                max((time.monotonic() - began) / 20, 0.02)
            )  # a count costs the more, the more there are
            before, completed = completed, self.value(COMPLETED, since=since)
            progressed = time.monotonic() if completed > before else progressed
            if time.monotonic() - progressed > PATIENCE:
                raise RuntimeError(f"Only {completed:,} of {jobs:,} jobs were completed, and then no more.")
        cost = meter.read()
        seconds = self.value(STRETCH, jobs=jobs, since=since)
        return jobs / max(seconds, 1e-6), cost.each(completed)


def django(*arguments: str) -> None:
    """Run a management command without its output."""
    subprocess.run([sys.executable, "-m", "django", *arguments], check=True, stdout=subprocess.DEVNULL)
