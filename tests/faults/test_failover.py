"""The primary dies or is demoted, and a synchronous standby takes over: workers follow without any help."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.conftest import Chunk
from tests.faults.servers import Cluster
from tests.faults.stage import LEASE, Stage, sleep, until_heard
from tests.workers import until

pytestmark = pytest.mark.processes
pytest_plugins = ["tests.faults.stage_fixtures"]

FLOWS_WITHIN = 10.0  # seconds after the promotion, in the large size
PATIENTLY = 30.0  # in the small one, on a machine that is busy

OF_WORKERS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'django_pgjobs%'"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """The first primary. It is of no use after a failover, so each test has one of its own."""
    cluster = Cluster()
    yield cluster.start()
    cluster.close()


@pytest.fixture
def standby(stage: Stage) -> Iterator[Cluster]:
    """A standby without which the primary answers no commit."""
    standby = stage.cluster.standby()
    standby.start()
    stage.cluster.alter_system(synchronous_standby_names="standby")
    until(lambda: is_synchronous(stage.cluster), what="the standby to follow")
    yield standby
    standby.close()


def is_synchronous(primary: Cluster) -> bool:
    return primary.execute("SELECT sync_state FROM pg_stat_replication") == [("sync",)]


def patience(chunk: Chunk) -> float:
    return FLOWS_WITHIN if chunk.large else PATIENTLY


@pytest.mark.chunks(large=10)
@pytest.mark.parametrize("meets_recovery", [True, False], ids=["meets recovery", "refused"])
def test_workers_follow_when_a_dead_primary_is_replaced(
    stage: Stage, standby: Cluster, chunk: Chunk, meets_recovery: bool
) -> None:
    """Nothing that was acknowledged is lost, and nobody has to do anything about the workers."""
    primary = stage.cluster
    proxy = stage.proxy()
    workers = [stage.worker(url=stage.url(proxy.port)).until_listening() for _ in range(2)]
    _, go = stage.enqueue_running(4)
    with stage.producing(chunk.random):
        sleep(chunk.random.uniform(0.5, 1.5))
        primary.stop("immediate")
        stage.cluster = standby
        if meets_recovery:
            proxy.switch(standby.socket)
        sleep(chunk.random.uniform(0.5, 3.0))
        standby.promote()
        proxy.switch(standby.socket)
        seconds = stage.flows(patience(chunk))
        go.touch()
        sleep(0.5)
    stage.assert_alive()
    figures = stage.assert_kept(failovers=1, max_seconds_to_flow=seconds)
    for worker in workers:
        until_heard(worker, 2)
    chunk.record(**figures)


@pytest.mark.chunks(large=10)
def test_workers_leave_a_demoted_primary_that_stays_reachable(
    stage: Stage, standby: Cluster, chunk: Chunk
) -> None:
    """Their old connections still work, and are read-only; what listens there hears nothing."""
    primary = stage.cluster
    proxy = stage.proxy()
    worker = stage.worker(url=stage.url(proxy.port)).until_listening()
    _, go = stage.enqueue_running(3)
    with stage.producing(chunk.random):
        sleep(chunk.random.uniform(0.5, 1.5))
        primary.alter_system(default_transaction_read_only="on")
        until(lambda: standby_has_all(primary, standby), what="the standby to have all that was written")
        sleep(chunk.random.uniform(0.0, LEASE / 2))
        stage.cluster = standby
        standby.promote()
        proxy.switch(standby.socket)
        seconds = stage.flows(patience(chunk))
        go.touch()
    stage.assert_alive()
    assert not worker.said("was lost")
    until_heard(worker, 2)
    until(lambda: primary.execute(OF_WORKERS) == [(0,)], what="the workers to leave")
    chunk.record(**stage.assert_kept(demotions=1, max_seconds_to_flow=seconds))


def standby_has_all(primary: Cluster, standby: Cluster) -> bool:
    writing = primary.execute("SELECT count(*) FROM pg_stat_activity WHERE backend_xid IS NOT NULL")
    written = primary.execute("SELECT pg_current_wal_lsn()::text")[0][0]
    return writing == [(0,)] and standby.execute(
        "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", written
    ) == [(True,)]
