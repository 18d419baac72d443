"""What the hand-written statements read: the plan and the pages of each, in every situation that once hurt.

A statement is run as a worker host runs it, in a transaction that begins with `sql.BEGIN`. Each situation is
made in two sizes: what a statement reads must not depend on the size of the table. And the planner is met in
each of its moods: with no statistics and with fresh ones, with a plan for these parameters and with a
generic one, and with a plan that was made while the tables were empty and has been kept since. The figures
are printed: pytest -rP shows them.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL, Identifier, Literal

from django_pgjobs import sql
from example_project import embedded_postgres
from tests.database import choose
from tests.scratch import scratch_database

pytestmark = pytest.mark.django_db

SIZES = (2_000, 20_000)
LIMIT = 20

CLAIM_INDEX = "idx_jobs_queued_run_at"
PROCESSING_INDEX = "idx_jobs_processing"
FINISHED_INDEX = "idx_jobs_finished"
PRIMARY_KEY = "background_jobs_pkey"
UNIQUE_INDEX = "uq_jobs_unique_key"

TOKEN = uuid.UUID(int=7)

# The types that psycopg gives to parameters which the statement does not cast itself.
TYPES = {
    "limit": "bigint",
    "most": "bigint",
    "spans": "integer",
    "token": "uuid",
    "worker_id": "uuid",
    "after": "text",
}


@dataclass
class Run:
    """What one execution of a statement did."""

    plan: dict[str, Any]

    @property
    def nodes(self) -> list[dict[str, Any]]:
        def walk(node):
            yield node
            for child in node.get("Plans", ()):
                yield from walk(child)

        return list(walk(self.plan))

    @property
    def indexes(self) -> set[str]:
        """The indexes by which the table of jobs was read. Any other way of reading it is named instead."""
        return {
            node.get("Index Name", node["Node Type"])
            for node in self.nodes
            if node.get("Relation Name") == "background_jobs" and node["Node Type"] != "ModifyTable"
        }

    @property
    def returned(self) -> int:
        return round(self.plan["Actual Rows"] * self.plan["Actual Loops"])

    @property
    def locked(self) -> int:
        return sum(
            round(node["Actual Rows"] * node["Actual Loops"])
            for node in self.nodes
            if node["Node Type"] == "LockRows"
        )

    @property
    def discarded(self) -> int:
        """Rows that were looked at and thrown away by a filter or a join."""
        return sum(
            round(value * node["Actual Loops"])
            for node in self.nodes
            for key, value in node.items()
            if key.startswith("Rows Removed by")
        )

    @property
    def read(self) -> int:
        """Rows that came out of the table of jobs or of its indexes, whatever became of them."""
        return sum(
            round((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"])
            for node in self.nodes
            if node.get("Relation Name") == "background_jobs" and node["Node Type"] != "ModifyTable"
        )

    @property
    def pages(self) -> int:
        return self.plan["Shared Hit Blocks"] + self.plan["Shared Read Blocks"]


class Planner:
    """A session that runs prepared statements, in one of the planner's moods."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        self.names: dict[str, str] = {}
        self.mood = "auto"

    def set_mood(self, plan: str) -> None:
        """Forget all plans, and make new ones in this mood: force_custom_plan or force_generic_plan."""
        self.connection.execute("DEALLOCATE ALL")
        self.mood = plan
        self.names.clear()

    def run(self, statement: str, parameters: dict[str, Any]) -> Run:
        """Execute and roll back. Twice, since the first time reads some of the catalog as well."""
        with self.transaction() as cursor:
            self._execute(cursor, statement, parameters)
        with self.transaction() as cursor:
            return self._execute(cursor, statement, parameters)

    @contextmanager
    def transaction(self):
        with self.connection.cursor() as cursor:
            cursor.execute(sql.BEGIN.format(statement=0, lock=0, idle=0), prepare=False)
            cursor.execute(SQL("SET LOCAL plan_cache_mode = {}").format(SQL(self.mood)))
            yield cursor
            cursor.execute("ROLLBACK")

    def _execute(self, cursor: Any, statement: str, parameters: dict[str, Any]) -> Run:
        names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", statement)))
        if statement not in self.names:
            self.names[statement] = f"statement_{len(self.names)}"
            numbered = re.sub(r"%\((\w+)\)s", lambda match: f"${names.index(match[1]) + 1}", statement)
            types = f"({', '.join(TYPES.get(name, 'unknown') for name in names)})" if names else ""
            cursor.execute(f"PREPARE {self.names[statement]} {types} AS {numbered}")
        values = psycopg.ClientCursor(self.connection).mogrify(
            ", ".join(["%s"] * len(names)), [parameters[name] for name in names]
        )
        arguments = f"({values})" if names else ""
        cursor.execute(
            f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE {self.names[statement]}{arguments}"
        )
        return Run(cursor.fetchone()[0][0]["Plan"])


@pytest.fixture(scope="module")
def server():
    """A server of our own, if one is to be had.

    The oldest transaction of any database keeps what was rolled back after it from being pruned. Then a page
    may have no room for what a statement writes, which goes to another page and into every index.
    """
    if choose().way != "embedded":
        yield None
        return
    server = embedded_postgres.start(f"plans-{os.getpid()}")
    yield server
    server.release()


@pytest.fixture(scope="module")
def template(server, django_db_setup, django_db_blocker):
    """A database with our tables, empty, never analysed, and left alone by autovacuum."""
    with django_db_blocker.unblock(), scratch_database(server=server) as database:
        database.manage("migrate", "django_pgjobs")
        with database.session() as connection:
            connection.execute("ALTER TABLE background_jobs SET (autovacuum_enabled = off)")
        yield database


def in_every_mood(template, fill, statements):
    """Run each of `statements` after `fill`. Yields (name, mood, {size: Run})."""
    runs: dict[tuple[str, str], dict[int, Run]] = {}
    for size in SIZES:

        def run_all(mood, planner, size=size):
            for name, (statement, parameters) in statements.items():
                runs.setdefault((name, mood), {})[size] = planner.run(statement, parameters(size))

        with template.copy() as database, database.session() as session, database.session() as other:
            planner = Planner(session)
            planner.set_mood("force_generic_plan")
            run_all("planned while new", planner)
            fill(other, size)
            run_all("planned while new", planner)
            for plan in ("custom", "generic"):
                planner.set_mood(f"force_{plan}_plan")
                run_all(f"{plan}, never analysed", planner)

        with template.copy() as database, database.session() as session, database.session() as other:
            planner = Planner(session)
            # Vacuum marks a page as visible to all only when what inserted its rows has been flushed.
            other.execute("SET synchronous_commit = on")
            other.execute("VACUUM ANALYZE")
            planner.set_mood("force_generic_plan")
            run_all("planned while known to be empty", planner)
            fill(other, size)
            run_all("planned while known to be empty", planner)
            planner.set_mood("force_custom_plan")
            run_all("custom, thought to be empty", planner)
            other.execute("VACUUM ANALYZE")
            for plan in ("custom", "generic"):
                planner.set_mood(f"force_{plan}_plan")
                run_all(f"{plan}, analysed", planner)
    for (name, mood), by_size in runs.items():
        yield name, mood, by_size


def show(what, runs):
    print(what, {size: f"{run.pages} pages, {run.discarded} rows discarded" for size, run in runs.items()})


# ── Claiming ──────────────────────────────────────────────────────────────────────────────────────────────


def insert(connection, count, queue="default", due="-1 hour", status="queued", queues=1, **columns):
    """Insert jobs, all alike but for run_at; with `queues`, in that many queues in turn."""
    columns = {"job_name": "tests.jobs.add", "payload": "{}", "status": status, **columns}
    connection.execute(
        SQL(
            """
            INSERT INTO background_jobs (queue_name, run_at, {names})
            SELECT CASE {queues} WHEN 1 THEN {queue} ELSE concat({queue}, n % {queues}) END,
                   statement_timestamp() + {due}::interval + n * interval '1 microsecond', {values}
              FROM generate_series(1, {count}) AS n
            """
        ).format(
            names=SQL(", ").join(map(Identifier, columns)),
            values=SQL(", ").join(v if isinstance(v, SQL) else Literal(v) for v in columns.values()),
            queue=Literal(queue),
            queues=Literal(queues),
            due=Literal(due),
            count=Literal(count),
        )
    )


def an_empty_queue_beside_a_full_one(connection, size):
    insert(connection, size, "full")


def a_backlog(connection, size):
    insert(connection, size)


def many_due_tomorrow_at_a_higher_priority(connection, size):
    insert(connection, size, due="1 day", priority=10)
    insert(connection, LIMIT)


def many_queues(connection, size):
    insert(connection, size, queues=30)


def many_finished(connection, size):
    insert(connection, size // 2, status="completed")
    insert(connection, size // 2, status="failed")
    insert(connection, LIMIT)


def unknown_names_at_the_head(connection, size):
    """Once claimed and parked, they wait in front of all that is due later."""
    insert(connection, size, due="5 minutes", metadata='{"unknown_since": 1}')
    insert(connection, LIMIT)


def a_paused_queue(connection, size):
    insert(connection, size, "a", priority=10)
    connection.execute("INSERT INTO background_queues (name, paused_at) VALUES ('a', now())")
    insert(connection, LIMIT)


def many_held_by_others(connection, size):
    insert(connection, size, status="processing", attempts=1)
    insert(connection, LIMIT)


CLAIM_SITUATIONS = {
    # situation: (which queues are listed, how many are claimed, how many levels there are)
    an_empty_queue_beside_a_full_one: (["empty"], 0, 0),
    a_backlog: (None, LIMIT, 1),
    many_due_tomorrow_at_a_higher_priority: (None, LIMIT, 2),
    many_queues: (None, LIMIT, 30),
    many_finished: (None, LIMIT, 1),
    unknown_names_at_the_head: (["default"], LIMIT, 1),
    a_paused_queue: (None, LIMIT, 2),
    many_held_by_others: (None, LIMIT, 1),
}


@pytest.mark.parametrize("situation", CLAIM_SITUATIONS)
def test_a_claim_reads_what_it_returns_and_little_else(template, situation):
    queues, claimed, levels = CLAIM_SITUATIONS[situation]
    parameters = {
        "token": TOKEN, "worker_id": TOKEN, "limit": LIMIT, "queues": queues, "after": "",
        "reached_queues": None, "reached_priorities": None, "reached_times": None, "reached_ids": None,
    }  # fmt: skip

    for _, mood, runs in in_every_mood(template, situation, {"": (sql.CLAIM, lambda size: parameters)}):
        show(mood, runs)
        for run in runs.values():
            assert run.indexes == {CLAIM_INDEX, PRIMARY_KEY}, mood
            assert run.discarded <= LIMIT, mood
            assert run.locked == claimed, mood
            assert run.returned == claimed + (claimed < LIMIT), mood
            assert run.pages <= 15 + 9 * levels + 20 * claimed, mood
        few, many = (runs[size].pages for size in SIZES)
        # Ten times the rows: a tree may be a level higher, and a page here and there be visited again.
        assert many <= 1.5 * few + 10, mood


def a_backlog_behind_what_is_dead(connection, size):
    """Claimed once, and still in the index: its pages are kept by a snapshot, or not yet vacuumed."""
    insert(connection, size)
    connection.execute("UPDATE background_jobs SET status = 'processing', attempts = 1")
    insert(connection, LIMIT, due="-1 minute")


def test_a_claim_that_goes_on_steps_over_nothing(template):
    def parameters(size):
        return {
            "token": TOKEN, "worker_id": TOKEN, "limit": LIMIT, "queues": None, "after": "",
            "reached_queues": ["default"], "reached_priorities": [0],
            "reached_times": [time.time() - 1800], "reached_ids": [size],
        }  # fmt: skip

    statement = {"CLAIM": (sql.CLAIM, parameters)}
    for _, mood, runs in in_every_mood(template, a_backlog_behind_what_is_dead, statement):
        show(mood, runs)
        for run in runs.values():
            assert run.indexes == {CLAIM_INDEX, PRIMARY_KEY}, mood
            assert run.returned == run.locked == LIMIT, mood
            assert run.pages <= 15 + 9 + 20 * LIMIT, mood
        few, many = (runs[size].pages for size in SIZES)
        assert many <= 1.5 * few + 10, mood


# ── Holding, settling, deciding: by id ────────────────────────────────────────────────────────────────────

BATCH = 50


def a_busy_table(connection, size):
    """By id: jobs that the test holds, dead letters, jobs that wait; then each status in plenty.

    Half of the dead letters have a unique key, and so have many jobs that wait. Every page has room for what
    all the statements write: a row that finds none costs more, and that says nothing about the plan.
    """
    connection.execute("ALTER TABLE background_jobs SET (fillfactor = 10)")
    insert(connection, 10 * BATCH, status="processing", attempts=1, locked_by=str(TOKEN))
    key = SQL("CASE n % 2 WHEN 0 THEN concat('dead ', n) END")
    insert(connection, 10 * BATCH, status="failed", attempts=3, unique_key=key)
    insert(connection, 10 * BATCH, due="1 hour")
    for status in ("queued", "completed", "failed", "processing"):
        key = SQL("concat('waits ', n)") if status == "queued" else SQL("NULL")
        insert(connection, size // 4, status=status, unique_key=key)


def ids(first, count=BATCH):
    return [first + 7 * n % (10 * BATCH) for n in range(count)]


def guards(count=BATCH):
    given = ids(1, count)
    return {
        "ids": "{" + ",".join(map(str, given)) + "}",
        "tokens": "{" + ",".join([str(TOKEN)] * count) + "}",
        "attempts": "{" + ",".join(["1"] * count) + "}",
    }


def results(count=BATCH):
    return guards(count) | {"results": ["1"] * count}


def verdicts(count=BATCH):
    return guards(count) | {
        "statuses": ["queued"] * count,
        "delays": [20.0] * count,
        "refunds": [0] * count,
        "crashes": [0] * count,
        "errors": ['{"message": "boom"}'] * count,
        "last_errors": ["boom"] * count,
        "fingerprints": ["abc"] * count,
        "results": [None] * count,
        "notes": ["{}"] * count,
    }


BY_ID = {
    "RENEW": (sql.RENEW, guards),
    "PROGRESS": (sql.PROGRESS, lambda count=BATCH: guards(count) | {"notes": ['{"progress": {}}'] * count}),
    "HELD": (sql.HELD, guards),
    "COMPLETE": (sql.COMPLETE, results),
    "COMPLETE_AND_DELETE": (sql.COMPLETE_AND_DELETE, guards),
    "SETTLE": (sql.SETTLE, verdicts),
    "CANCEL": (sql.CANCEL, lambda count=BATCH: {"ids": ids(20 * BATCH + 1, count)}),
    "BRING_FORWARD": (sql.BRING_FORWARD, lambda count=BATCH: {"ids": ids(20 * BATCH + 1, count)}),
    "REQUEST_STOP": (sql.REQUEST_STOP, lambda count=BATCH: {"ids": ids(1, count)}),
    "RETRY": (
        sql.RETRY,
        lambda count=BATCH: {
            "ids": ids(10 * BATCH + 1, count),
            "delay": "1 hour",
            "spread": "1 second",
            "queue_name": None,
        },
    ),
    "HOLD": (sql.HOLD, lambda count=BATCH: {"ids": ids(10 * BATCH + 1, count)}),
    "SEEN": (sql.SEEN, lambda count=BATCH: {"ids": ids(10 * BATCH + 1, count)}),
    "DISCARD": (sql.DISCARD, lambda count=BATCH: {"ids": ids(10 * BATCH + 1, count)}),
}


HOT = ("RENEW", "PROGRESS", "REQUEST_STOP")


def test_what_is_written_by_id_reads_these_rows_and_no_others(template):
    statements = {
        (name, count): (statement, lambda size, parameters=parameters, count=count: parameters(count))
        for name, (statement, parameters) in BY_ID.items()
        for count in (BATCH, 10 * BATCH)
    }
    for (name, count), mood, runs in in_every_mood(template, a_busy_table, statements):
        show(f"{name} of {count}, {mood}", runs)
        for run in runs.values():
            what = (name, count, mood)
            assert run.indexes <= {PRIMARY_KEY, UNIQUE_INDEX if name == "RETRY" else PROCESSING_INDEX}, what
            assert run.discarded == 0, what
            assert run.returned == count, what
            assert run.locked == (0 if name in ("HELD", "SEEN") else count), what
            assert run.pages <= 20 + 18 * count, what
        few, many = (runs[size].pages for size in SIZES)
        assert many <= few + 10 + 3 * count, what


def test_one_job_is_edited_or_duplicated_by_its_id(template):
    parameters = {"id": 10 * BATCH + 1, "payload": "{}", "unique_key": None, "by": "ada"}
    statements = {
        "EDIT": (sql.EDIT, lambda size: parameters),
        "DUPLICATE": (sql.DUPLICATE, lambda size: parameters),
    }
    for name, mood, runs in in_every_mood(template, a_busy_table, statements):
        for run in runs.values():
            assert run.indexes == {PRIMARY_KEY}, (name, mood)
            assert run.returned == 1, (name, mood)
            assert run.pages <= 60, (name, mood)


def test_what_jobs_say_of_themselves_is_a_hot_update(template):
    """Renewals and progress go into no index, as long as there is room on the page."""
    statements = {name: (BY_ID[name][0], lambda size, name=name: BY_ID[name][1]()) for name in HOT}
    for name, mood, runs in in_every_mood(template, a_busy_table, statements):
        for run in runs.values():
            assert run.pages <= 20 + 8 * BATCH, (name, mood)


# ── Unique keys ───────────────────────────────────────────────────────────────────────────────────────────

RECENT_INDEX = "idx_jobs_unique_key"


def many_have_keys(connection, size):
    """Half of the keys that a batch asks for are there, among many that it does not ask for."""
    for status in ("queued", "processing", "completed"):
        key = SQL(f"concat('{status} ', n)")
        insert(connection, size // 3, due="1 hour", status=status, unique_key=key)
    insert(connection, size, due="1 hour")


def keyed(size, half=BATCH // 2):
    keys = sorted([f"queued {n + 1}" for n in range(half)] + [f"new {n}" for n in range(half)])
    return {
        "queue_name": "default", "job_name": "tests.jobs.add", "priority": 0, "run_at": None, "delay": "0",
        "max_attempts": 3, "rerun_if_lost": True, "metadata": "{}", "keys": keys,
        "payloads": ["{}"] * len(keys), "debounce": "30 seconds", "max_wait": "1 hour",
        "period": "1 hour", "but": [1, 2, 3],
    }  # fmt: skip


UNIQUE = {
    # name: (the statement, by which indexes it reads, how many rows it returns)
    "ENQUEUE_OR_KEEP": (sql.ENQUEUE_OR_KEEP, set(), BATCH // 2),
    "ENQUEUE_OR_FREE": (sql.ENQUEUE_OR_FREE, set(), BATCH // 2),
    "ENQUEUE_OR_REPLACE": (sql.ENQUEUE_OR_REPLACE, set(), BATCH),
    "LIVE": (sql.LIVE, {UNIQUE_INDEX}, BATCH // 2),
    "RECENT": (sql.RECENT, {RECENT_INDEX}, BATCH // 2),
}


def test_a_unique_key_is_looked_up_and_nothing_else_is_read(template):
    statements = {name: (statement, keyed) for name, (statement, _, _) in UNIQUE.items()}
    for name, mood, runs in in_every_mood(template, many_have_keys, statements):
        show(f"{name}, {mood}", runs)
        for run in runs.values():
            assert run.indexes == UNIQUE[name][1], (name, mood)
            assert run.returned == UNIQUE[name][2], (name, mood)
            assert run.pages <= 20 + 30 * BATCH, (name, mood)
        few, many = (runs[size].pages for size in SIZES)
        assert many <= 1.5 * few + 20, (name, mood)


# ── What a filter finds ───────────────────────────────────────────────────────────────────────────────────

STEP = 200


def many_are_dead(connection, size):
    """Many dead letters, of which a filter finds one in a hundred, among as many that are something else."""
    queue = SQL("CASE n % 100 WHEN 0 THEN 'rare' ELSE 'common' END")
    error = SQL("repeat('It failed. ', 50)")
    for status in ("completed", "failed", "queued", "cancelled"):
        insert(connection, size, status=status, job_name=queue, last_error=error, updated_at=LATER)


LATER = SQL("'2026-01-01'::timestamptz + n * interval '1 second'")


def found(size, **criteria):
    nothing = dict.fromkeys(
        ("queue", "job", "fingerprint", "unique_key", "exception", "text", "attempts_from", "attempts_to")
    )
    bounds = {"since": "2000-01-01", "until": "9999-01-01", "ids": []}
    return nothing | bounds | {"job": "rare"} | criteria


def from_the_middle(size, **criteria):
    position = {"after_priority": 0, "after": "2026-01-01 00:10:00+0", "after_id": 5, "limit": STEP}
    return found(size, **criteria) | position


def latest(size, **criteria):
    return found(size, **criteria) | {"limit": STEP}


def grouped(size, **criteria):
    return latest(size, **criteria) | {"most": 10}


def test_a_filter_is_held_against_so_many_jobs_and_no_more(template):
    statements = {
        "LOOK": (sql.LOOK["failed"], from_the_middle),
        "COUNT": (sql.COUNT["failed"], latest),
        "LOOK_AMONG": (sql.LOOK_AMONG["failed"], lambda size: from_the_middle(size, ids=ids(size + 600))),
        "GROUPS": (sql.GROUPS["failed"], grouped),
        "EDGE": (sql.EDGE, latest),
        "DEAD_NAMES": (sql.DEAD_NAMES, latest),
        "COUNT_AMONG": (sql.COUNT_AMONG["failed"], lambda size: latest(size, ids=ids(size + 600))),
    }
    for name, mood, runs in in_every_mood(template, many_are_dead, statements):
        show(f"{name}, {mood}", runs)
        for run in runs.values():
            assert run.indexes == {
                *([] if name.endswith("AMONG") else [FINISHED_INDEX]),
                *([PRIMARY_KEY] if name.endswith("AMONG") or name == "GROUPS" else []),
            }, (name, mood)
            assert run.pages <= 20 + 3 * STEP, (name, mood)
            assert run.discarded <= STEP, (name, mood)
        few, many = (runs[size].pages for size in SIZES)
        assert many <= 1.5 * few + 20, (name, mood)


def many_wait_at_two_priorities(connection, size):
    """In the queue that is looked at, a few of the higher priority are behind where it has come to."""
    insert(connection, size, "mail", priority=10)
    insert(connection, size, "mail", due="1 day")
    insert(connection, size, "other")
    insert(connection, size, "mail", status="completed")


def test_a_purge_goes_through_so_many_jobs_of_its_queue_and_no_more(template):
    def waiting(size, **place):
        place = {"after_priority": 101, "after": "2000-01-01", "after_id": 0, "limit": STEP} | place
        return found(size, queue="mail", job=None) | place

    later = {"after_priority": 10, "after": "2200-01-01"}
    statements = {
        "LOOK from the start": (sql.LOOK["queued"], waiting),
        "LOOK beyond a priority": (sql.LOOK["queued"], lambda size: waiting(size, **later)),
        "COUNT": (sql.COUNT["queued"], waiting),
    }
    for name, mood, runs in in_every_mood(template, many_wait_at_two_priorities, statements):
        show(f"{name}, {mood}", runs)
        for run in runs.values():
            assert run.indexes == {CLAIM_INDEX}, (name, mood)
            assert run.read <= 2 * STEP, (name, mood)
            assert run.discarded == 0, (name, mood)
            assert run.pages <= 20 + 3 * STEP, (name, mood)
        few, many = (runs[size].pages for size in SIZES)
        assert many <= 1.5 * few + 20, (name, mood)


# ── Maintenance ───────────────────────────────────────────────────────────────────────────────────────────


def few_are_lost(connection, size):
    """Half of what is held is held by a host that went silent, the rest by live ones."""
    insert(connection, size, status="completed", updated_at="2000-01-01")
    insert(connection, size, status="queued")
    held = {"status": "processing", "attempts": 1, "locked_by": str(TOKEN)}
    insert(connection, 200, locked_at="2000-01-01", **held)
    insert(connection, 200, locked_at="now", **held)


def test_a_sweep_reads_only_what_is_processing(template):
    parameters = {"lease": "60 s", "timeout": "10 min", "limit": 100}

    statement = {"LOST": (sql.LOST, lambda size: parameters)}
    for _, mood, runs in in_every_mood(template, few_are_lost, statement):
        show(mood, runs)
        for run in runs.values():
            assert run.indexes == {PROCESSING_INDEX}, mood
            assert run.locked == run.returned == 100, mood
            assert run.pages <= 500, mood


def test_a_lost_answer_is_looked_up_among_what_is_processing(template):
    statement = {"CLAIMED_BY": (sql.CLAIMED_BY, lambda size: {"token": TOKEN})}
    for _, mood, runs in in_every_mood(template, few_are_lost, statement):
        show(mood, runs)
        for run in runs.values():
            assert run.indexes == {PROCESSING_INDEX}, mood
            assert run.returned == 400, mood
            assert run.pages <= 500, mood


def much_is_old_and_much_is_new(connection, size):
    for status in ("completed", "failed", "cancelled"):
        insert(connection, size // 3, status=status, updated_at="2000-01-01")
        insert(connection, size // 3, status=status)


def few_are_old(connection, size):
    for status in ("completed", "failed", "cancelled"):
        insert(connection, 100, status=status, updated_at="2000-01-01")
        insert(connection, size // 3, status=status)


def test_pruning_reads_what_it_deletes(template):
    statements = {
        status: (statement, lambda size: {"age": "3 days", "limit": 50})
        for status, statement in sql.PRUNE.items()
    }
    for status, mood, runs in in_every_mood(template, much_is_old_and_much_is_new, statements):
        show(f"PRUNE {status}, {mood}", runs)
        for run in runs.values():
            assert run.indexes == {FINISHED_INDEX, PRIMARY_KEY}, (status, mood)
            assert run.locked == 50, (status, mood)
            assert run.pages <= 20 + 6 * 50, (status, mood)


def test_counting_what_is_prunable_reads_nothing_else(template):
    statements = {
        status: (statement, lambda size: {"age": "3 days"}) for status, statement in sql.PRUNABLE.items()
    }
    for status, mood, runs in in_every_mood(template, few_are_old, statements):
        show(f"PRUNABLE {status}, {mood}", runs)
        for run in runs.values():
            assert run.indexes == {FINISHED_INDEX}, (status, mood)
            assert run.pages <= 50, (status, mood)


# ── Looking ───────────────────────────────────────────────────────────────────────────────────────────────


MOST = 500


def much_of_everything(connection, size):
    insert(connection, size, queues=5)
    insert(connection, size, queues=5, due="1 day", priority=10)
    insert(connection, size, queues=5, status="processing")
    insert(connection, size, queues=5, status="failed")
    insert(connection, size, queues=5, status="completed")
    insert(connection, size, queues=5, status="completed", updated_at="2000-01-01")


def test_neither_backlog_nor_history_costs_jobstats_more_than_a_bounded_number_of_rows(template):
    parameters = {"window": "5 minutes", "most": MOST}
    statement = {"QUEUE_STATS": (sql.QUEUE_STATS, lambda size: parameters)}

    for _, mood, runs in in_every_mood(template, much_of_everything, statement):
        show(mood, runs)
        for run in runs.values():
            assert run.indexes == {CLAIM_INDEX, PROCESSING_INDEX, FINISHED_INDEX}, mood
            assert run.returned == 5, mood
            counted = 2 * 5 * MOST + 3 * MOST  # in each queue and priority, and what else there is
            assert run.discarded <= MOST + 1, mood
            assert run.read <= counted + 100, mood
            assert run.pages <= 2 * counted, mood


LOOKS = {
    # name: (the statement, its parameters, the index by which it reads, how many rows at most)
    "RUNNING": (sql.RUNNING, {"each": 5, "most": MOST}, PROCESSING_INDEX, MOST),
    "UNSWEPT": (
        sql.UNSWEPT, {"lease": "60 s", "timeout": "10 min", "most": MOST}, PROCESSING_INDEX, MOST,
    ),
    "HISTORY": (
        sql.HISTORY, {"width": "1 minute", "spans": 10, "most": MOST}, FINISHED_INDEX, 2 * MOST,
    ),
    **{f"OLDEST {status}": (statement, {}, FINISHED_INDEX, 1) for status, statement in sql.OLDEST.items()},
}  # fmt: skip


def test_a_glance_reads_a_bounded_number_of_rows(template):
    statements = {
        name: (statement, lambda size, parameters=parameters: parameters)
        for name, (statement, parameters, _, _) in LOOKS.items()
    }
    for name, mood, runs in in_every_mood(template, much_of_everything, statements):
        show(f"{name}, {mood}", runs)
        _, _, index, most = LOOKS[name]
        for run in runs.values():
            assert run.indexes == {index}, (name, mood)
            assert run.read <= most, (name, mood)
            assert run.pages <= 100 + most, (name, mood)


def many_of_one_key_and_one_schedule(connection, size):
    """A job in the middle, among many with its key, and many of its name that are of another schedule."""
    insert(connection, size, status="completed", metadata='{"schedule": "other"}')
    columns = {"unique_key": "k", "metadata": '{"schedule": "daily"}'}
    insert(connection, size, status="completed", **columns)


def test_what_is_related_to_a_job_is_found_near_it_or_by_its_key(template):
    window, most = 500, 3

    def near(size):
        nearby = {"id": size, "first": size - window, "last": size + window}
        return nearby | {"job_name": "tests.jobs.add", "schedule": "daily", "unique_key": "k", "most": most}

    statements = {"WITH_KEY": (sql.WITH_KEY, near), "OF_SCHEDULE": (sql.OF_SCHEDULE, near)}
    for name, mood, runs in in_every_mood(template, many_of_one_key_and_one_schedule, statements):
        show(f"{name}, {mood}", runs)
        for run in runs.values():
            expected = RECENT_INDEX if name == "WITH_KEY" else PRIMARY_KEY
            assert run.indexes == {expected}, (name, mood)
            assert run.returned == most, (name, mood)
            assert run.read <= window + most + 1, (name, mood)
            assert run.pages <= window + 20, (name, mood)


def many_wait_and_many_are_dead(connection, size):
    insert(connection, size, queues=3)
    insert(connection, size, queues=3, due="1 day", priority=10)
    insert(connection, size, status="completed")
    insert(connection, size, status="failed")
    insert(connection, 40, status="processing", attempts=1)


def test_the_deploy_guard_reads_what_it_looks_at(template):
    statements = {
        name: (statement, lambda size: {"limit": 20})
        for name, statement in {"LIVE_CALLS": sql.LIVE_CALLS, "DEAD_CALLS": sql.DEAD_CALLS}.items()
    }
    levels = 6
    for name, mood, runs in in_every_mood(template, many_wait_and_many_are_dead, statements):
        show(f"{name}, {mood}", runs)
        for run in runs.values():
            expected = {CLAIM_INDEX, PROCESSING_INDEX} if name == "LIVE_CALLS" else {FINISHED_INDEX}
            assert run.indexes == {PRIMARY_KEY, *expected}, (name, mood)
            assert run.discarded == 0, (name, mood)
            assert run.returned == 1, (name, mood)
            looked_at = 40 * (levels + 1) if name == "LIVE_CALLS" else 40
            assert run.pages <= 15 + 9 * levels + 5 * looked_at, (name, mood)
        few, many = (runs[size].pages for size in SIZES)
        assert many <= 1.5 * few + 10, (name, mood)
