"""A job exists exactly when the transaction that enqueued it has committed: no sooner, no less, no twice."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from django.db import DataError, InterfaceError, OperationalError, connection, connections, transaction

from django_pgjobs.exceptions import InvalidArguments
from django_pgjobs.models import BackgroundJob
from tests import tasks
from tests.faults.conftest import Chunk
from tests.faults.proxy import Proxy
from tests.models import Effect
from tests.sessions import session
from tests.workers import until

CLIENTS = 4

# The second name is that of Django before 6.1.
create_savepoint = getattr(transaction, "savepoint_create", None) or transaction.savepoint


# ── Blocks ────────────────────────────────────────────────────────────────────────────────────────────────


class Abandoned(Exception):
    """Raised by a scope that does not want its work to be kept."""


@dataclass
class Scope:
    """Steps that are kept or given up together, and how that comes about."""

    how: str  # atomic, request, durable, manual, none; inside of others also savepoint and raw
    end: str  # keep, or one of several ways of giving up
    steps: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def is_kept(self) -> bool:
        return self.end == "keep" or self.how == "none"

    def jobs(self) -> set[str]:
        """The jobs that come to be with the commit."""
        kept: set[str] = set()
        for kind, what in self.steps if self.is_kept else []:
            match kind:
                case "scope":
                    kept |= what.jobs()
                case "enqueue" | "insert":
                    kept.add(what)
                case "enqueue many":
                    kept.update(what)
        return kept

    def later(self) -> set[str]:
        """The jobs that come to be just after the commit."""
        kept: set[str] = set()
        for kind, what in self.steps if self.is_kept else []:
            if kind == "scope":
                kept |= what.later()
            elif kind == "enqueue on commit":
                kept.add(what)
        return kept


class Blocks:
    """Draws scopes in scopes, in which each job has a name of its own."""

    def __init__(self, rng: random.Random, name: str) -> None:
        self.rng = rng
        self.name = name
        self.last = 0

    def outermost(self) -> Scope:
        how = self.rng.choice(["atomic"] * 4 + ["request", "durable", "manual", "none"])
        end = self.rng.choice(
            ["keep"] * 3 + ["raise", "error"] + ([] if how == "manual" else ["set rollback"])
        )
        scope = Scope(how, "keep" if how == "none" else end)
        self._fill(scope, depth=0, may_defer=how != "manual")
        return scope

    def _fill(self, scope: Scope, depth: int, may_defer: bool) -> None:
        for _ in range(self.rng.randrange(1, 6)):
            kind = self.rng.choice(
                ["enqueue", "enqueue", "enqueue many", "insert", "refusal", "pause", "error"]
                + ["scope"] * (3 if depth < 4 else 0)
                + ["enqueue on commit"] * may_defer
            )
            what: Any = None
            if kind == "scope":
                what = self._inner(scope, depth, may_defer)
            elif kind == "enqueue many":
                what = [self._marker() for _ in range(self.rng.randrange(1, 4))]
            elif kind in ("enqueue", "insert", "enqueue on commit"):
                what = self._marker()
            scope.steps.append((kind, what))

    def _inner(self, outer: Scope, depth: int, may_defer: bool) -> Scope:
        hows = ["atomic"] if outer.how == "none" else ["atomic", "atomic", "savepoint", "raw"]
        how = self.rng.choice(hows)
        end = self.rng.choice(["keep", "keep", "raise"] + ["error", "set rollback"] * (how == "atomic"))
        inner = Scope(how, end)
        # Django forgets what is to be done on commit when a block is rolled back, not when a savepoint is.
        self._fill(inner, depth + 1, may_defer and how == "atomic")
        return inner

    def _marker(self) -> str:
        self.last += 1
        return f"{self.name}.{self.last}"


class Client:
    """Carries out blocks."""

    def __init__(self, block: str, closing: Callable[[], None]) -> None:
        self.note = tasks.note.using(queue=block)
        self.block = block
        self.closing = closing  # called just before the commit

    def carry_out(self, scope: Scope) -> None:
        """An outermost scope."""
        try:
            match scope.how:
                case "none":
                    self.closing()
                    self._take_steps(scope)
                case "manual":
                    self._in_manual_transaction(scope)
                case "request":
                    with transaction.atomic(), transaction.atomic():
                        self._take_steps(scope)
                        self.closing()
                        self._finish(scope)
                case _:
                    with transaction.atomic(durable=scope.how == "durable"):
                        self._take_steps(scope)
                        self.closing()
                        self._finish(scope)
        except (Abandoned, DataError):
            assert not scope.is_kept

    def _in_manual_transaction(self, scope: Scope) -> None:
        transaction.set_autocommit(False)
        try:
            self._take_steps(scope)
            self.closing()
            self._finish(scope)
            transaction.commit()
        except BaseException:
            transaction.rollback()
            raise
        finally:
            transaction.set_autocommit(True)

    def _inside(self, scope: Scope) -> None:
        """A scope within another."""
        match scope.how:
            case "atomic":
                try:
                    with transaction.atomic():
                        self._take_steps(scope)
                        self._finish(scope)
                except (Abandoned, DataError):
                    assert not scope.is_kept
            case "savepoint":
                savepoint = create_savepoint()
                self._take_steps(scope)
                if scope.is_kept:
                    transaction.savepoint_commit(savepoint)
                else:
                    transaction.savepoint_rollback(savepoint)
            case "raw":
                execute("SAVEPOINT by_hand")
                self._take_steps(scope)
                if not scope.is_kept:
                    execute("ROLLBACK TO by_hand")
                execute("RELEASE by_hand")  # so that the name means the scope around this one again

    def _finish(self, scope: Scope) -> None:
        match scope.end:
            case "raise":
                raise Abandoned
            case "error":
                execute("SELECT 1 / 0")
            case "set rollback":
                transaction.set_rollback(True)

    def _take_steps(self, scope: Scope) -> None:
        for kind, what in scope.steps:
            match kind:
                case "scope":
                    self._inside(what)
                case "enqueue":
                    self._write(what)
                    assert self.note.enqueue(what).payload["args"] == [what]
                case "enqueue many":
                    for marker in what:
                        self._write(marker)
                    self.note.enqueue_many([((marker,), {}) for marker in what])
                case "insert":
                    self._write(what)
                    execute(
                        "INSERT INTO background_jobs (queue_name, job_name, payload)"
                        " VALUES (%s, 'tests.tasks.note', jsonb_build_object('args', jsonb_build_array(%s)))",
                        self.block,
                        what,
                    )
                case "enqueue on commit":
                    transaction.on_commit(lambda marker=what: self._both(marker))
                case "refusal":
                    with pytest.raises(InvalidArguments):
                        self.note.enqueue(object())
                case "error":
                    with pytest.raises(DataError), transaction.atomic():
                        execute("SELECT 1 / 0")
                case "pause":
                    execute("SELECT pg_sleep(0.003)")

    def _both(self, marker: str) -> None:
        self._write(marker)
        self.note.enqueue(marker)

    def _write(self, marker: str) -> None:
        """What the project writes beside the job, which shares its fate."""
        Effect.objects.create(what=marker, detail=self.block)


def execute(statement: str, *parameters: Any) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []


# ── Somebody who looks on ─────────────────────────────────────────────────────────────────────────────────


class Observer:
    """Looks at the table all the time, and notes every job that must not be there yet, or ever."""

    def __init__(self) -> None:
        self.blocks: dict[str, Scope] = {}  # those to look at
        self.open: set[str] = set()  # those that have not begun to commit
        self.violations: list[str] = []
        self.looks = 0
        self.looks_at_open_blocks = 0
        self._ended = threading.Event()

    def watch(self) -> None:
        with session() as own:
            while not self._ended.is_set():
                self._look(own)

    def end(self) -> None:
        self._ended.set()

    def begin(self, block: str, scope: Scope) -> None:
        self.open.add(block)
        self.blocks[block] = scope

    def forget(self, block: str) -> None:
        self.open.discard(block)
        self.blocks.pop(block, None)

    def _look(self, own: Any) -> None:
        watched = dict(self.blocks)
        self.looks += 1
        self.looks_at_open_blocks += bool(self.open)
        found: dict[str, set[str]] = {}
        for block, marker in own.execute(
            "SELECT queue_name, payload -> 'args' ->> 0 FROM background_jobs WHERE queue_name = ANY (%s)",
            [list(watched)],
        ):
            found.setdefault(block, set()).add(marker)
        for block, markers in found.items():
            self._judge(block, watched[block], markers)

    def _judge(self, block: str, scope: Scope, found: set[str]) -> None:
        jobs = scope.jobs()
        if block in self.open:
            self.violations.append(f"{block} is open, and shows {found}.")
        if undue := found - jobs - scope.later():
            self.violations.append(f"{block} shows {undue}, which were given up.")
        if scope.how != "none" and found and not jobs <= found:
            self.violations.append(f"{block} shows {found & jobs} and not yet {jobs - found}.")


# ── The tests ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.chunks(large=20)
def test_jobs_share_the_fate_of_their_transaction(chunk: Chunk, transactional_db: None) -> None:
    observer = Observer()
    seeds = [chunk.random.random() for _ in range(CLIENTS)]
    each = chunk.size(small=300, large=1000) // CLIENTS
    with ThreadPoolExecutor(CLIENTS + 1) as threads:
        watching = threads.submit(observer.watch)
        try:
            clients = [
                threads.submit(carry_out_blocks, random.Random(seed), f"{number}", each, observer)
                for number, seed in enumerate(seeds)
            ]
            kept = [marker for client in clients for marker in client.result()]
        finally:
            observer.end()
        watching.result()

    assert observer.violations == []
    assert observer.looks_at_open_blocks
    jobs = [args[0] for args in BackgroundJob.objects.values_list("payload__args", flat=True)]
    assert Counter(jobs) == Counter(kept)
    assert Counter(Effect.objects.values_list("what", flat=True)) == Counter(kept)
    chunk.record(
        blocks=each * CLIENTS,
        jobs=len(jobs),
        looks=observer.looks,
        looks_at_open_blocks=observer.looks_at_open_blocks,
    )


def carry_out_blocks(rng: random.Random, name: str, count: int, observer: Observer) -> list[str]:
    """Carry out blocks in this thread. Returns the names of the jobs that are to remain."""
    kept: list[str] = []
    names: list[str] = []
    try:
        for number in range(count):
            block = f"{name}.{number}"
            scope = Blocks(rng, block).outermost()
            observer.begin(block, scope)
            client = Client(block, closing=lambda block=block: observer.open.discard(block))
            client.carry_out(scope)
            kept += scope.jobs() | scope.later()
            names.append(block)
            if number >= 5:
                observer.forget(names[number - 5])  # it has been looked at for a while after its end
        return kept
    finally:
        connections.close_all()


# ── Commits whose answer never came ───────────────────────────────────────────────────────────────────────

NAME = "pgjobs test producer"

# A transaction that wrote an Effect whose name begins with "slow" takes its time to commit.
SLOW_COMMIT = """
CREATE FUNCTION pg_temp_slow_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_sleep(60);
    RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER slow_commit AFTER INSERT ON tests_effect DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.what LIKE 'slow%') EXECUTE FUNCTION pg_temp_slow_commit();
"""
FAST_COMMIT = """
DROP TRIGGER slow_commit ON tests_effect;
DROP FUNCTION pg_temp_slow_commit();
"""


@pytest.fixture
def slow_commits(transactional_db: None) -> Iterator[None]:
    with session() as own:
        own.execute(SLOW_COMMIT)
        yield
        own.execute(FAST_COMMIT)


@pytest.fixture
def proxy(transactional_db: None) -> Iterator[Proxy]:
    parameters = connections["default"].get_connection_params()
    socket = Path(parameters.get("host") or "/nowhere", f".s.PGSQL.{parameters.get('port') or 5432}")
    if not socket.is_socket():
        pytest.skip("The server has no Unix socket for the proxy to reach it by.")
    with closing(Proxy(str(socket))) as proxy:
        yield proxy


@contextmanager
def producer(proxy: Proxy) -> Iterator[ThreadPoolExecutor]:
    """A thread whose connection goes through the proxy."""

    def connect_through_proxy() -> None:
        wrapper = connections.create_connection("default")
        options = {key: value for key, value in wrapper.settings_dict["OPTIONS"].items() if key != "host"}
        through = {"HOST": "127.0.0.1", "PORT": proxy.port}
        off = {"sslmode": "disable", "gssencmode": "disable", "application_name": NAME}
        wrapper.settings_dict = {**wrapper.settings_dict, **through, "OPTIONS": {**options, **off}}
        connections["default"] = wrapper

    with ThreadPoolExecutor(1) as thread:
        thread.submit(connect_through_proxy).result()
        yield thread
        thread.submit(connections.close_all).result()


def produce(what: str) -> bool:
    """Write an Effect and a job in one transaction. False if nobody knows whether it has committed."""
    try:
        with transaction.atomic():
            Effect.objects.create(what=what)
            tasks.note.enqueue(what)
        return True
    except (OperationalError, InterfaceError):
        connection.close()
        return False


def produce_if_absent(what: str) -> None:
    """What a producer does that does not know: it looks."""
    if not exists(what):
        assert produce(what)


def exists(what: str) -> bool:
    return BackgroundJob.objects.filter(payload={"args": [what], "kwargs": {}}).exists()


@pytest.mark.chunks(large=10)
def test_a_commit_without_an_answer_leaves_a_job_in_or_out(
    chunk: Chunk, proxy: Proxy, slow_commits: None
) -> None:
    figures = Counter({"acknowledged": 0, "unknown_in": 0, "unknown_out": 0})
    with producer(proxy) as thread:
        for number in range(chunk.size(small=60, large=200)):
            how = chunk.random.choice(["no answer", "killed in commit", "cut anywhere", "cut anywhere"])
            what = f"{'slow' if how == 'killed in commit' else 'fast'} {number}"
            thread.submit(connection_works).result()
            if how == "no answer":
                proxy.drop_answers_to_commit(NAME, 1)
            elif how == "cut anywhere":
                proxy.cut_after(chunk.random.randrange(1200), NAME)
            answer = thread.submit(produce, what)
            if how == "killed in commit":
                end_sleeping_commit()
            acknowledged = answer.result()
            if not acknowledged:
                until(lambda: not sessions_of_producer(), what="the server to notice")
            counts = Effect.objects.filter(what=what).count(), int(exists(what))
            assert counts in ((0, 0), (1, 1)), (what, how)
            if acknowledged or how == "no answer":
                assert counts == (1, 1), (what, how)
            if how == "killed in commit":
                assert counts == (0, 0), (what, how)
            figures["acknowledged" if acknowledged else f"unknown_{'in' if counts[0] else 'out'}"] += 1
            proxy.pass_all()
            thread.submit(connections.close_all).result()
            thread.submit(produce_if_absent, what.replace("slow", "fast")).result()
            thread.submit(connections.close_all).result()
    jobs = Counter(args[0] for args in BackgroundJob.objects.values_list("payload__args", flat=True))
    assert set(jobs.values()) == {1}
    assert len(jobs) == sum(figures.values())
    assert all(figures.values()), figures
    chunk.record(**figures)


def connection_works() -> None:
    execute("SELECT 1")


def sessions_of_producer() -> list[Any]:
    return execute("SELECT pid FROM pg_stat_activity WHERE application_name = %s", NAME)


def end_sleeping_commit() -> None:
    """Terminate the producer's session once it is in the middle of its COMMIT."""
    until(
        lambda: execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = %s AND query = 'COMMIT' AND wait_event = 'PgSleep'",
            NAME,
        ),
        what="the commit to sleep",
    )
