"""Workers behind PgBouncer in transaction mode, where nothing of a session lasts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.faults import pooler
from tests.faults.conftest import Chunk
from tests.faults.pooler import Pooler
from tests.faults.servers import environment_for
from tests.faults.stage import SMALL_HOST, Stage, sleep, until_heard
from tests.workers import Worker

pytestmark = pytest.mark.processes
pytest_plugins = ["tests.faults.stage_fixtures"]

# Only a notification can make an idle worker look.
NO_POLLING = (*SMALL_HOST[:4], "--poll-interval", "3600")

# What a client leaves behind on a connection to the server, for the next one to stumble over.
LEFT_BEHIND = """
SELECT 'listens to ' || channel FROM pg_listening_channels() AS channel
 UNION ALL
SELECT 'has prepared ' || name FROM pg_prepared_statements
 UNION ALL
SELECT 'has set ' || left(name, 40) FROM pg_settings WHERE source = 'session' AND NOT name = ANY (%(known)s)
 UNION ALL
SELECT 'holds the lock ' || objid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()
"""

# What PgBouncer itself, and Django, set on each connection that they take into use.
KNOWN = ["application_name", "client_encoding", "DateStyle", "standard_conforming_strings", "TimeZone"]

Pool = Callable[..., Pooler]


@pytest.fixture
def pool(stage: Stage) -> Iterator[Pool]:
    """Start a pooler of a size before the test's server."""
    with ExitStack() as cleanup:

        def start(size: int, **options: Any) -> Pooler:
            pooler = Pooler(stage.cluster, size, **options)
            cleanup.callback(pooler.close)
            return pooler

        yield start


def start_behind(
    stage: Stage, pooler: Pooler, *arguments: str, settings: dict[str, Any] | None = None, **options: Any
) -> Worker:
    return stage.worker(
        *arguments,
        url=stage.url(pooler.port),
        settings=settings,
        DJANGO_SETTINGS_MODULE="tests.faults.settings",
        PGJOBS_TEST_DIRECT_URL=stage.url(),
        PGJOBS_TEST_OPTIONS=json.dumps(options),
    )


def left_behind(stage: Stage, pooler: Pooler) -> set[str]:
    """What is left on the connections of the pool: on each of them, taken all at once."""
    with ExitStack() as cleanup:
        found: set[str] = set()
        for _ in range(pooler.size):
            session = cleanup.enter_context(pooler.session(stage.database))
            session.execute("BEGIN")
            found.update(str(what) for (what,) in session.execute(LEFT_BEHIND, {"known": KNOWN}))
        return found


def note(stage: Stage, count: int) -> None:
    """Add jobs that use the ORM."""
    with stage.session() as session:
        for number in range(count):
            session.execute(
                "INSERT INTO background_jobs (job_name, payload) VALUES ('tests.tasks.note', %s)",
                [Jsonb({"args": [f"note {number}"], "kwargs": {}})],
            )


def notes(stage: Stage) -> int:
    return stage.execute("SELECT count(DISTINCT what) FROM tests_effect")[0][0]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("hosts", [1, 2])
def test_all_jobs_pass_by_polling(stage: Stage, pool: Pool, chunk: Chunk, size: int, hosts: int) -> None:
    pooler = pool(size)
    workers = [start_behind(stage, pooler) for _ in range(hosts)]
    stage.enqueue(100)
    note(stage, 50)
    for worker in workers:
        worker.until_said("Not listening for new jobs, so polling for them")
    for _ in range(5):
        stage.flows(20.0)
    stage.until_all_done()
    stage.assert_alive()
    assert stage.statuses() == {"completed": 155}
    assert notes(stage) == 50
    for worker in workers:
        assert worker.stop() == 0


@pytest.mark.parametrize("size", [1, 3])
def test_nothing_of_a_session_is_left_on_the_pool(stage: Stage, pool: Pool, chunk: Chunk, size: int) -> None:
    """Others who come by the same connections would stumble over it."""
    pooler = pool(size)
    worker = start_behind(stage, pooler)
    stage.enqueue(100)
    note(stage, 50)
    stage.until_all_done()
    worker.until_said("Not listening for new jobs, so polling for them")
    for _ in range(20):
        stage.flows(20.0)
    assert left_behind(stage, pooler) == set()
    assert worker.stop() == 0
    assert left_behind(stage, pooler) == set()


@pytest.mark.parametrize("server_side_binding", [False, True])
def test_jobs_may_bind_at_the_server(
    stage: Stage, pool: Pool, chunk: Chunk, server_side_binding: bool
) -> None:
    pooler = pool(2)
    start_behind(stage, pooler, server_side_binding=server_side_binding)
    note(stage, 100)
    stage.until_all_done()
    assert stage.statuses() == {"completed": 100}
    assert notes(stage) == 100
    assert stage.execute("SELECT max(attempts) FROM background_jobs") == [(1,)]


def test_jobs_may_prepare_statements(stage: Stage, pool: Pool, chunk: Chunk) -> None:
    if pooler.version() < (1, 21):
        pytest.skip("This PgBouncer does not track prepared statements.")
    start_behind(stage, pool(2), prepare_threshold=0)
    note(stage, 100)
    stage.until_all_done()
    assert stage.statuses() == {"completed": 100}
    assert stage.execute("SELECT max(attempts) FROM background_jobs") == [(1,)]


def test_behind_session_pooling_a_worker_listens_where_it_is_told_to(
    stage: Stage, pool: Pool, chunk: Chunk
) -> None:
    """A worker cannot tell the modes of a pooler from each other, and so would only poll."""
    pooler = pool(10, mode="session")
    worker = start_behind(stage, pooler, *NO_POLLING, settings={"LISTEN_DATABASE": "default"})
    worker.until_listening()
    for _ in range(5):
        stage.flows(20.0)
    stage.assert_kept()
    assert worker.stop() == 0


def test_a_listener_that_is_wrongly_told_to_listen_there_leaves_little_behind(
    stage: Stage, pool: Pool, chunk: Chunk
) -> None:
    """Only its own channel, on which nobody else says anything."""
    pooler = pool(1)
    worker = start_behind(stage, pooler, settings={"LISTEN_DATABASE": "default"})
    worker.until_said("Not listening for new jobs, so polling for them: two probes")
    for _ in range(5):
        stage.flows(20.0)
    stage.assert_kept()
    assert all(what.startswith("listens to pgjobs_") for what in left_behind(stage, pooler))
    assert worker.stop() == 0


def test_a_pooler_without_a_free_connection_is_waited_for(stage: Stage, pool: Pool, chunk: Chunk) -> None:
    pooler = pool(1)
    worker = start_behind(stage, pooler)
    stage.flows(20.0)
    with pooler.session(stage.database) as session:
        session.execute("BEGIN")
        numbers = stage.enqueue(10)
        sleep(6.0)
        session.execute("ROLLBACK")
    stage.until_ended(numbers, 20.0)
    stage.assert_kept()
    assert worker.stop() == 0


# ── Settings ──────────────────────────────────────────────────────────────────────────────────────────────

LISTENERS = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'django_pgjobs listener%'"


@pytest.mark.parametrize("behind", [True, False], ids=["behind a pooler", "directly"])
def test_without_listen_there_is_no_listener(stage: Stage, pool: Pool, chunk: Chunk, behind: bool) -> None:
    settings = {"LISTEN": False}
    pooler = pool(2)
    worker = start_behind(stage, pooler, settings=settings) if behind else stage.worker(settings=settings)
    stage.enqueue(100)
    for _ in range(5):
        stage.flows(20.0)
        assert stage.execute(LISTENERS) == []
    stage.assert_kept()
    assert worker.log.read_text().count("LISTEN is off, so polling for new jobs") == 1
    assert not worker.said("Not listening")
    assert not worker.said("Listening for new jobs")
    if behind:
        assert left_behind(stage, pooler) == set()
    assert worker.stop() == 0


def test_a_listener_may_go_past_the_pooler(stage: Stage, pool: Pool, chunk: Chunk) -> None:
    pooler = pool(2)
    settings = {"LISTEN_DATABASE": "direct"}
    worker = start_behind(stage, pooler, *NO_POLLING, settings=settings).until_listening()
    for _ in range(10):
        stage.flows(20.0)
    stage.assert_kept()
    assert left_behind(stage, pooler) == set()
    stage.execute("SELECT pg_terminate_backend(%s)", stage.backend("listener"))
    until_heard(worker, 2)
    stage.flows(20.0)
    assert worker.stop() == 0


def test_the_pool_is_what_these_tests_believe(stage: Stage, pool: Pool, chunk: Chunk) -> None:
    """A LISTEN behind the pooler is never heard, and stays behind."""
    pooler = pool(1)
    with pooler.session(stage.database) as session, pooler.session(stage.database) as other:
        session.execute("LISTEN here")
        other.execute("NOTIFY here")
        assert list(session.notifies(timeout=0.5)) == []
        assert left_behind(stage, pooler) == {"listens to here"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["W009"]),
        ({"LISTEN": False}, []),
        ({"LISTEN_DATABASE": "default"}, []),
        ({"LISTEN_DATABASE": "direct"}, []),
    ],
    ids=["nothing said", "polling", "keeps sessions", "past it"],
)
def test_the_checks_tell_of_a_pooler(
    stage: Stage, pool: Pool, settings: dict[str, Any], expected: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "django", "check", "--database", "default"],
        env=environment_for(
            stage.url(pool(1).port),
            stage.database,
            DJANGO_SETTINGS_MODULE="tests.faults.settings",
            PGJOBS_TEST_DIRECT_URL=stage.url(),
            PGJOBS_TEST_SETTINGS=json.dumps(settings),
        ),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert re.findall(r"django_pgjobs\.(\w+)", done.stderr) == expected
