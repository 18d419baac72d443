"""The server crashes, hangs, refuses, turns read-only; workers stay, and no job is lost or run twice."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, closing

import psycopg
import pytest

from tests.faults.conftest import Chunk
from tests.faults.stage import LEASE, SMALL_HOST, Stage, sleep, stopped
from tests.workers import until

pytestmark = pytest.mark.processes
pytest_plugins = ["tests.faults.stage_fixtures"]

FLOWS_WITHIN = 5.0  # seconds after the server is ready, in the large size
PATIENTLY = 20.0  # in the small one, on a machine that is busy


def patience(chunk: Chunk) -> float:
    return FLOWS_WITHIN if chunk.large else PATIENTLY


@pytest.mark.chunks(large=5)
def test_jobs_flow_again_after_the_server_has_crashed(stage: Stage, chunk: Chunk) -> None:
    stage.start(2)
    crashes = chunk.size(small=3, large=10)
    slowest = 0.0
    with stage.producing(chunk.random):
        for _ in range(crashes):
            sleep(chunk.random.uniform(0.2, 1.5))
            stage.cluster.restart("immediate")
            slowest = max(slowest, stage.flows(patience(chunk)))
            stage.assert_alive()
    chunk.record(**stage.assert_kept(crashes=crashes, max_seconds_to_flow=slowest))


@pytest.mark.parametrize("leases", [0.5, 1.5])
def test_running_jobs_outlive_an_outage_and_are_settled_once(
    stage: Stage, chunk: Chunk, leases: float
) -> None:
    stage.start(2)
    running, go = stage.enqueue_running(6)
    stage.enqueue(30)
    stage.cluster.stop("immediate")
    sleep(leases * LEASE)
    go.touch()
    stage.until_ended(running)
    stage.cluster.start()
    seconds = stage.flows(patience(chunk))
    stage.assert_alive()
    chunk.record(**stage.assert_kept(outages=1, max_seconds_to_flow=seconds))


def test_jobs_that_go_on_after_an_outage_keep_their_claims(stage: Stage, chunk: Chunk) -> None:
    """Other hosts must not take them before their holder could renew."""
    stage.start(2)
    _, go = stage.enqueue_running(6)
    stage.cluster.stop("immediate")
    sleep(1.5 * LEASE)
    stage.cluster.start()
    stage.flows(patience(chunk))
    sleep(1.5 * LEASE)
    go.touch()
    stage.assert_kept()


@pytest.mark.chunks(large=5)
def test_a_killed_backend_takes_the_whole_server_down_and_nothing_is_lost(stage: Stage, chunk: Chunk) -> None:
    stage.start(2)
    kills = chunk.size(small=2, large=10)
    slowest = 0.0
    with stage.producing(chunk.random):
        for _ in range(kills):
            sleep(chunk.random.uniform(0.2, 1.5))
            crash_by_killing(stage, stage.backend("worker"))
            slowest = max(slowest, stage.flows(patience(chunk)))
    stage.assert_alive()
    chunk.record(**stage.assert_kept(kills=kills, max_seconds_to_flow=slowest))


def crash_by_killing(stage: Stage, backend: int) -> None:
    """Kill a process of the server, which makes the postmaster start all of them again."""
    with closing(stage.session()) as witness:
        os.kill(backend, signal.SIGKILL)
        with pytest.raises(psycopg.Error):
            witness.execute("SELECT pg_sleep(30)")
    until(lambda: answers(stage), what="the server to answer again")


def answers(stage: Stage) -> bool:
    try:
        return bool(stage.execute("SELECT 1"))
    except psycopg.Error:
        return False


@pytest.mark.chunks(large=5)
def test_what_a_lost_answer_to_a_commit_did_is_found_out(stage: Stage, chunk: Chunk) -> None:
    """Claims that nobody heard of are released; outcomes that nobody confirmed are settled once."""
    proxy = stage.proxy()
    worker = stage.worker(url=stage.url(proxy.port)).until_listening()
    drops = chunk.size(small=10, large=60)
    with stage.producing(chunk.random):
        for number in range(1, drops + 1):
            proxy.drop_answers_to_commit("worker", 1)
            until(lambda number=number: proxy.dropped_commits == number, what="a commit to be dropped")
            stage.flows(patience(chunk))
    stage.assert_alive()
    assert not worker.said("the claim was lost")
    chunk.record(**stage.assert_kept(drops=drops))


def test_outcomes_are_kept_while_the_server_is_read_only(stage: Stage, chunk: Chunk) -> None:
    worker = stage.worker().until_listening()
    running, go = stage.enqueue_running(4)
    stage.cluster.alter_system(default_transaction_read_only="on")
    go.touch()
    stage.until_ended(running)
    worker.until_said("The database does not answer as it should")
    sleep(5.0)
    with stage.session(options="-c default_transaction_read_only=off") as session:
        session.execute("ALTER SYSTEM SET default_transaction_read_only = off")
        session.execute("SELECT pg_reload_conf()")
    stage.flows(patience(chunk))
    stage.assert_kept()
    stage.assert_alive()


TIMEOUTS = {
    "statement_timeout": 0,
    "lock_timeout": 0,
    "idle_in_transaction_session_timeout": 0,
    "idle_session_timeout": 140000,
    "transaction_timeout": 170000,
}


@pytest.mark.parametrize("setting", TIMEOUTS)
def test_a_worker_works_under_a_short_timeout_of_its_role(stage: Stage, chunk: Chunk, setting: str) -> None:
    if stage.cluster.version < TIMEOUTS[setting]:
        pytest.skip("This version of Postgres does not know it.")
    stage.new_role("hurried")
    stage.execute(f"ALTER ROLE hurried SET {setting} = '100ms'")
    stage.worker(url=stage.url(user="hurried"))
    for _ in range(20):
        stage.flows(PATIENTLY)
    stage.enqueue(500)
    stage.assert_kept()
    stage.assert_alive()


def test_outcomes_are_written_when_a_lock_on_the_table_is_gone(stage: Stage, chunk: Chunk) -> None:
    stage.start(2)
    running, go = stage.enqueue_running(6)
    with stage.session() as session, session.transaction():
        session.execute("LOCK TABLE background_jobs IN ACCESS EXCLUSIVE MODE")
        sleep(LEASE / 2)
        go.touch()
        stage.until_ended(running)
        sleep(LEASE)
    seconds = stage.flows(patience(chunk))
    stage.assert_alive()
    chunk.record(**stage.assert_kept(locks=1, max_seconds_to_flow=seconds))


def test_outcomes_of_locked_rows_are_written_later(stage: Stage, chunk: Chunk) -> None:
    """Those of others are not held up by them."""
    stage.start(2)
    running, go = stage.enqueue_running(6)
    with stage.session() as session, session.transaction():
        session.execute("SELECT FROM background_jobs WHERE status = 'processing' ORDER BY id FOR UPDATE")
        go.touch()
        stage.until_ended(running)
        for _ in range(2):
            stage.flows(PATIENTLY)
    chunk.record(**stage.assert_kept())


def test_jobs_that_run_under_a_lock_on_the_table_keep_their_claims(stage: Stage, chunk: Chunk) -> None:
    stage.start(2)
    _, go = stage.enqueue_running(6)
    with stage.session() as session, session.transaction():
        session.execute("LOCK TABLE background_jobs IN ACCESS EXCLUSIVE MODE")
        sleep(1.5 * LEASE)
    stage.flows(patience(chunk))
    sleep(1.5 * LEASE)
    go.touch()
    stage.assert_kept()


def test_a_backend_that_hangs_for_less_than_the_lease_costs_nothing(stage: Stage, chunk: Chunk) -> None:
    stage.worker().until_listening()
    running, go = stage.enqueue_running(4)
    with stopped(stage.backend("worker")):
        go.touch()
        stage.until_ended(running)
        sleep(LEASE / 2)
    stage.flows(patience(chunk))
    stage.assert_kept()


def test_a_worker_whose_backend_hangs_for_ever_goes_on_with_another(stage: Stage, chunk: Chunk) -> None:
    stage.worker().until_listening()
    with stopped(stage.backend("worker")):
        seconds = stage.flows(3 * LEASE if chunk.large else PATIENTLY)
    stage.assert_alive()
    chunk.record(**stage.assert_kept(max_seconds_to_flow=seconds))


@pytest.mark.parametrize("direction", ["both", "to the server", "to the client"])
def test_a_worker_whose_connection_is_a_black_hole_makes_another(
    stage: Stage, chunk: Chunk, direction: str
) -> None:
    proxy = stage.proxy()
    stage.worker(url=stage.url(proxy.port)).until_listening()
    _, go = stage.enqueue_running(3)
    assert proxy.black_hole(
        "worker", to_server=direction != "to the client", to_client=direction != "to the server"
    )
    seconds = stage.flows(3 * LEASE if chunk.large else PATIENTLY)
    go.touch()
    stage.assert_alive()
    chunk.record(**stage.assert_kept(max_seconds_to_flow=seconds))


@pytest.mark.chunks(large=5)
def test_connections_that_are_cut_anywhere_cost_nothing(stage: Stage, chunk: Chunk) -> None:
    """Also in the middle of a statement, or of COMMIT."""
    proxy = stage.proxy()
    stage.worker(url=stage.url(proxy.port)).until_listening()
    cuts = chunk.size(small=10, large=60)
    with stage.producing(chunk.random):
        for _ in range(cuts):
            accepted = proxy.accepted
            proxy.cut_after(chunk.random.randrange(8000))
            until(lambda accepted=accepted: proxy.accepted > accepted, what="another connection")
            proxy.pass_all()
            stage.flows(patience(chunk))
    stage.assert_alive()
    chunk.record(**stage.assert_kept(cuts=cuts))


def test_a_slow_network_costs_time_only(stage: Stage, chunk: Chunk) -> None:
    proxy = stage.proxy()
    stage.worker(url=stage.url(proxy.port)).until_listening()
    proxy.delay(chunk.random.uniform(0.02, 0.05))
    with stage.producing(chunk.random):
        for _ in range(3):
            stage.flows(PATIENTLY)
    stage.assert_alive()
    chunk.record(**stage.assert_kept())


# ── No connection to be had ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def few_connections(stage: Stage) -> Stage:
    stage.cluster.configure(max_connections="20")
    stage.cluster.restart("fast")
    yield stage
    stage.cluster.configure(max_connections="60")
    stage.cluster.restart("fast")


def take_all_connections(stage: Stage, cleanup: ExitStack) -> None:
    while True:
        try:
            cleanup.enter_context(stage.session())
        except psycopg.OperationalError:
            return


def test_a_worker_waits_for_a_connection_when_it_starts(few_connections: Stage, chunk: Chunk) -> None:
    stage = few_connections
    numbers = stage.enqueue(10)
    with ExitStack() as cleanup:
        take_all_connections(stage, cleanup)
        worker = stage.worker()
        worker.until_said("too many clients")
        sleep(2.0)
        stage.assert_alive()
    stage.until_ended(numbers, PATIENTLY)
    stage.assert_kept()


def test_a_worker_that_has_lost_its_connection_waits_for_another(
    few_connections: Stage, chunk: Chunk
) -> None:
    stage = few_connections
    proxy = stage.proxy()
    worker = stage.worker(url=stage.url(proxy.port)).until_listening()
    numbers = stage.enqueue(10, seconds=0.5)
    stage.until_started(numbers[:4])
    with ExitStack() as cleanup:
        proxy.refuse()
        proxy.reset()
        take_all_connections(stage, cleanup)
        proxy.pass_all()
        accepted = proxy.accepted
        until(lambda: proxy.accepted > accepted + 3, what="attempts to connect")
        worker.until_said("The database does not answer as it should")
    stage.flows(patience(chunk))
    stage.assert_alive()
    stage.assert_kept()


def test_a_refused_password_is_told_and_tried_again(stage: Stage, chunk: Chunk) -> None:
    stage.new_role("careful")
    stage.execute("ALTER ROLE careful PASSWORD 'right'")
    hba = stage.cluster.data / "pg_hba.conf"
    before = hba.read_text()
    hba.write_text(f"local all careful scram-sha-256\n{before}")
    try:
        stage.execute("SELECT pg_reload_conf()")
        numbers = stage.enqueue(3)
        worker = stage.worker(url=stage.url(user="careful:wrong"))
        worker.until_said('password authentication failed for user "careful"')
        sleep(2.0)
        stage.assert_alive()
        stage.execute("ALTER ROLE careful PASSWORD 'wrong'")
        stage.until_ended(numbers, PATIENTLY)
    finally:
        hba.write_text(before)
        stage.execute("SELECT pg_reload_conf()")


def test_a_refused_port_is_told_and_tried_again(stage: Stage, chunk: Chunk) -> None:
    numbers = stage.enqueue(3)
    proxy = stage.proxy()
    proxy.refuse()
    worker = stage.worker(url=stage.url(proxy.port))
    worker.until_said("The database does not answer")
    sleep(2.0)
    stage.assert_alive()
    proxy.pass_all()
    stage.until_ended(numbers, PATIENTLY)


def test_a_port_that_never_answers_is_told_and_tried_again(stage: Stage, chunk: Chunk) -> None:
    numbers = stage.enqueue(3)
    proxy = stage.proxy()
    proxy.hold_new()
    worker = stage.worker(url=stage.url(proxy.port))
    worker.until_said("The database does not answer")
    proxy.pass_all()
    stage.until_ended(numbers, PATIENTLY)


def test_a_database_without_a_server_does_not_end_a_worker(stage: Stage, chunk: Chunk) -> None:
    stage.cluster.stop("fast")
    worker = stage.worker(*SMALL_HOST)
    worker.until_said("The database does not answer")
    stage.cluster.start()
    stage.flows(PATIENTLY)
    assert worker.stop() == 0
