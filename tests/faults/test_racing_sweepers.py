"""Sweepers, pruners, workers and people at the same rows, some of which somebody else has always just locked.

Claims expire and completed jobs grow old all through the run, at times that are known beforehand. So for each
of them the audit must show one change, not before its time, whoever made it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from django.db import connection, connections

from django_pgjobs import store
from django_pgjobs.lifecycle import FINISHED, Event, Status, Verdict
from django_pgjobs.models import BackgroundJob
from django_pgjobs.store import Claim
from tests.faults import checker
from tests.faults.audit import Audit, Change
from tests.faults.checker import History
from tests.faults.conftest import Chunk
from tests.faults.serverlog import ServerLog
from tests.sessions import session, work
from tests.workers import Workers, until

pytestmark = pytest.mark.processes

LEASE = 10.0  # seconds
BARE = 600.0  # seconds after which claims without a token are lost
RETENTION = 3600.0  # seconds for which completed jobs are kept

SETTINGS = {"LEASE": LEASE, "SWEEP_INTERVAL": 0.3, "LOST_DELAY": 0}
ONE_PROCESS = ("--processes", "1", "--threads", "4")

# ── Rows ──────────────────────────────────────────────────────────────────────────────────────────────────

# How many of a hundred rows are of which kind.
SHARES = {
    "expiring": 28,  # claims of hosts that have died, or die in the course of the run
    "expiring bare": 4,  # the same of clients that use bare SQL
    "live": 8,  # held by somebody who renews them, and completes them in the end
    "live bare": 4,
    "growing old": 20,  # completed, and to be pruned at some time in the run
    "recent": 10,  # completed, and not to be pruned
    "failed": 13,
    "queued": 13,
}

PLANT = """
INSERT INTO background_jobs (job_name, payload, status, attempts, max_attempts, rerun_if_lost,
                             locked_at, locked_by, worker_id, updated_at)
SELECT given.job_name, given.payload::jsonb, given.status::job_status, given.attempts, given.max_attempts,
       given.rerun_if_lost, clock_timestamp() + given.locked * interval '1 second', given.token::uuid,
       gen_random_uuid(), clock_timestamp() + COALESCE(given.updated, 0) * interval '1 second'
  FROM jsonb_to_recordset(%s::jsonb)
       AS given (job_name text, payload text, status text, attempts integer, max_attempts integer,
                 rerun_if_lost boolean, locked float8, token text, updated float8)
RETURNING id, locked_by, EXTRACT(EPOCH FROM locked_at)::float8, EXTRACT(EPOCH FROM updated_at)::float8
"""


def row_of(kind: str, random: Random, seconds: float) -> dict[str, Any]:
    """A row of a kind, in a run of so many seconds. Its times are seconds from now."""
    nap = {"args": [random.uniform(0, 0.01)]}
    row = {"job_name": "tests.jobs.slow", "payload": json.dumps(nap), "attempts": 1, "max_attempts": 100}
    row |= {"rerun_if_lost": True, "status": "processing", "token": str(uuid4())}
    soon = random.uniform(-5, seconds - 5)
    match kind:
        case "expiring":
            # What was locked at a time that is more than a lease away would be lost at once.
            row |= {"locked": min(soon, random.uniform(0, 1.5 * LEASE)) - LEASE}
            # Some have no attempt left, and some may not run again.
            row |= {"max_attempts": random.choice([1, 100, 100, 100])}
            row |= {"rerun_if_lost": random.random() < 0.9}
        case "expiring bare":
            row |= {"locked": soon - BARE, "token": None}
        case "live":
            row |= {"locked": 0.0}
        case "live bare":
            row |= {"locked": -BARE / 2, "token": None}
        case "growing old":
            row |= {"locked": -RETENTION, "status": "completed", "updated": soon - RETENTION}
        case "recent":
            row |= {"locked": -RETENTION, "status": "completed", "updated": -RETENTION / 2}
        case "failed":
            row |= {"status": "failed", "job_name": "tests.jobs.boom", "payload": "{}", "max_attempts": 1}
        case "queued":
            row |= {"status": "queued", "attempts": 0, "token": None}
    return row


class Rows:
    """What has been planted: the ids of each kind, the tokens, and the times at which things are due."""

    def __init__(self, random: Random, count: int, seconds: float) -> None:
        kinds = random.choices(list(SHARES), list(SHARES.values()), k=count)
        planted = [row_of(kind, random, seconds) for kind in kinds]
        with connection.cursor() as cursor:
            cursor.execute(PLANT, [json.dumps(planted)])
            found = cursor.fetchall()
        self.ids: dict[str, list[int]] = {kind: [] for kind in SHARES}
        self.tokens: dict[int, UUID | None] = {}
        self.due: dict[int, float] = {}  # when it may be swept or pruned, by the database's clock
        for kind, (id, token, locked_at, updated_at) in zip(kinds, found, strict=True):
            self.ids[kind].append(id)
            self.tokens[id] = token
            match kind:
                case "expiring":
                    self.due[id] = locked_at + LEASE
                case "expiring bare":
                    self.due[id] = locked_at + BARE
                case "growing old":
                    self.due[id] = updated_at + RETENTION

    @property
    def all(self) -> list[int]:
        return [id for ids in self.ids.values() for id in ids]

    @property
    def expiring(self) -> list[int]:
        return self.ids["expiring"] + self.ids["expiring bare"]

    def are_done(self) -> bool:
        live = BackgroundJob.objects.filter(status__in=[Status.QUEUED, Status.PROCESSING])
        old = BackgroundJob.objects.filter(pk__in=self.ids["growing old"])
        return not live.exclude(pk__in=self.ids["live bare"]).exists() and not old.exists()


# ── Who is at them ────────────────────────────────────────────────────────────────────────────────────────


class Crowd:
    """Threads that act until they are told to stop. What one of them raises comes out at the end."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def add(self, act: Callable[[Random], object], seed: float, longest_pause: float = 0.2) -> None:
        thread = threading.Thread(target=self._run, args=(act, Random(seed), longest_pause), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, act: Callable[[Random], object], random: Random, longest_pause: float) -> None:
        try:
            while not self._stopped.wait(random.uniform(0, longest_pause)):
                act(random)
        except BaseException as error:
            self._errors.append(error)
        finally:
            connections.close_all()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "Somebody waits for a row for ever."
        if self._errors:
            raise self._errors[0]


class Holder:
    """A host, as it were, that holds the live claims."""

    def __init__(self, rows: Rows, seed: float) -> None:
        self._random = Random(seed)
        self._claims = {
            id: Claim(id, rows.tokens[id], 1, 100, "tests.jobs.slow", "default", "{}")
            for id in rows.ids["live"]
        }

    def act(self, connection: psycopg.Connection[Any], share: float) -> None:
        """Renew all claims, and complete a share of them. What is locked just now waits for the next time."""
        claims = list(self._claims.values())
        some = self._random.sample(claims, round(len(claims) * share))
        with work(connection) as cursor:
            store.renew(cursor, claims)
            settled = store.settle(cursor, [(claim, Verdict(Event.COMPLETE)) for claim in some])
            held, _ = store.held(cursor, claims)
        self._claims = {id: claim for id, claim in self._claims.items() if id in held and id not in settled}

    def finish(self, connection: psycopg.Connection[Any]) -> None:
        while self._claims:
            self.act(connection, 1.0)


def decide_something(ids: list[int], random: Random) -> None:
    """What people do in the admin with many jobs at once."""
    decision = random.choice([store.retry, store.retry, store.cancel, store.request_stop, store.discard])
    decision(random.sample(ids, random.randint(1, len(ids) // 4)))


def lock_something(connection: psycopg.Connection[Any], ids: list[int], random: Random) -> None:
    """Lock rows for a moment, in no order, without waiting for any."""
    with connection.transaction():
        for id in random.sample(ids, random.randint(1, 50)):
            connection.execute("SELECT FROM background_jobs WHERE id = %s FOR UPDATE SKIP LOCKED", [id])
        time.sleep(random.uniform(0, 0.2))


@contextmanager
def repeating(
    environment: dict[str, str], directory: Path, count: int, command: str, *arguments: str
) -> Iterator[None]:
    """Processes that run a command again and again, each with a log."""
    module = [sys.executable, "-m", "tests.faults.repeat", "0.2", command, *arguments]
    own = {"PGJOBS_TEST_SETTINGS": json.dumps(SETTINGS), "PGAPPNAME": f"django_pgjobs {command}"}
    logs = [directory / f"{command}-{number}.log" for number in range(count)]
    processes = []
    try:
        for log in logs:
            with log.open("wb") as stream:
                processes.append(
                    subprocess.Popen(
                        module, env=environment | own, stdin=subprocess.PIPE, stdout=stream,
                        stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        until(lambda: all("ready" in log.read_text() for log in logs), what=f"{command} to start")
        yield
        for process, log in zip(processes, logs, strict=True):
            process.communicate(timeout=60)
            assert process.returncode == 0, log.read_text()
    finally:
        for process in processes:
            with process:  # closes what we write to it
                process.kill()


# ── The test ──────────────────────────────────────────────────────────────────────────────────────────────


def deadlocks(observer: psycopg.Connection[Any]) -> int:
    """How many deadlocks there have been in the test database. Its sessions tell when they end."""
    query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    (count,) = observer.execute(query).fetchone() or (0,)
    return int(count)


@pytest.mark.chunks(large=10)
def test_each_claim_is_swept_and_each_job_pruned_once_and_not_before_its_time(
    chunk: Chunk,
    workers: Workers,
    child_environment: dict[str, str],
    tmp_path: Path,
    audit: Audit,
    observer: psycopg.Connection[Any],
    server_log: ServerLog,
) -> None:
    seconds = chunk.size(small=8, large=60)
    deadlocks_before = deadlocks(observer)
    hosts = [workers.start(*ONE_PROCESS, settings=SETTINGS).until_listening() for _ in range(2)]
    sweeping = repeating(child_environment, tmp_path, chunk.random.randint(2, 4), "sweepjobs")
    age = ("--completed", f"{RETENTION:g}", "--batch-size", "50")
    pruning = repeating(child_environment, tmp_path, 2, "prunejobs", *age)
    with session() as holding, session() as locking, sweeping, pruning:
        rows = Rows(chunk.random, chunk.size(small=1200, large=20_000), seconds)
        holder = Holder(rows, chunk.random.random())
        crowd = Crowd()
        crowd.add(lambda _: holder.act(holding, 0.02), chunk.random.random(), longest_pause=0.5)
        for _ in range(4):
            crowd.add(lambda random: decide_something(rows.all, random), chunk.random.random())
        crowd.add(lambda random: lock_something(locking, rows.all, random), chunk.random.random())
        time.sleep(seconds)
        crowd.stop()
        holder.finish(holding)
        until(rows.are_done, what="everything to be swept, run and pruned", deadline=120)
    assert [host.stop() for host in hosts] == [0, 0]

    # Without what was planted: nobody may insert such rows.
    changes = [change for change in audit.changes() if change.old_status is not None]
    history = History(changes, lease=LEASE)
    swept, pruned = assert_once_and_in_time(history, rows)
    assert deadlocks(observer) == deadlocks_before
    assert checker.check_log(server_log.text()) == []
    logs = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
    assert [name for name, text in logs.items() if "Traceback" in text or "failed;" in text] == []
    by_commands = sum(text.count(" lost: ") for name, text in logs.items() if name.startswith("sweepjobs"))
    chunk.record(
        rows=len(rows.all),
        swept=swept,
        told_by_commands=by_commands,
        told_by_hosts=sum(host.log.read_text().count(" lost: ") for host in hosts),
        pruned=pruned,
        changes=len(history.changes),
        runs=sum(len(job.holds) for job in history.jobs.values()),
        retries=sum(by_people(change) for change in history.changes),
    )


def assert_once_and_in_time(history: History, rows: Rows) -> tuple[int, int]:
    """Check each planted row by what the audit saw of it. Returns how many were swept, and pruned."""
    # A sweep cancels a lost job that somebody has asked to stop, and the checker takes it for the holder's.
    violations = [one for one in checker.check(history) if "processing → cancelled" not in one]
    assert violations == []

    changes: dict[int, list[Change]] = {id: [] for id in rows.all}
    for change in history.changes:
        changes[change.job].append(change)
    for id in rows.ids["live bare"] + rows.ids["recent"]:
        assert changes[id] == [], "Nobody has any business with it."
    for id in rows.ids["growing old"]:
        assert [change.status for change in changes[id]] == [None]
        assert changes[id][0].at >= rows.due[id]
    for id in rows.expiring:
        ends = [change for change in changes[id] if ends_claim(change, rows.tokens[id])]
        assert len(ends) == 1, ends
        assert ends[0].at >= rows.due[id]
        assert ends[0].status is not Status.COMPLETED
    return len(rows.expiring), len(rows.ids["growing old"])


def ends_claim(change: Change, token: UUID | None) -> bool:
    left = change.old_status is Status.PROCESSING and change.status is not Status.PROCESSING
    return left and change.old_token == (None if token is None else str(token))


def by_people(change: Change) -> bool:
    return change.old_status in FINISHED and change.status is Status.QUEUED
