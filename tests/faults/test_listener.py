"""A listener that has gone deaf is replaced, in whatever way it went deaf; polling goes on meanwhile."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.faults.conftest import Chunk
from tests.faults.stage import SMALL_HOST, Stage, sleep, until_heard
from tests.workers import cpu_seconds, until

pytestmark = pytest.mark.processes
pytest_plugins = ["tests.faults.stage_fixtures"]

PROBE = 1.0  # seconds between probes of a listener in these tests
POLL = 3600.0  # seconds: only a notification can make an idle worker look
NO_POLLING = (*SMALL_HOST[:4], "--poll-interval", str(POLL))
PATIENTLY = 20.0  # seconds, on a machine that is busy
TWO_PROBES = 2 * PROBE
RECONNECTED_WITHIN = 3.0  # seconds after two probes, in the large size


CUTS = ["terminated", "reset", "black hole", "black hole to the client", "stopped"]


@pytest.mark.chunks(large=5)
def test_a_deaf_listener_is_replaced(stage: Stage, chunk: Chunk) -> None:
    """Also when its connection looks fine. No job waits for the next poll, before or after."""
    proxy = stage.proxy()
    worker = stage.worker(*NO_POLLING, url=stage.url(proxy.port), probe_interval=PROBE).until_listening()
    cuts = [*CUTS, *chunk.random.choices(CUTS, k=15)] if chunk.large else chunk.random.sample(CUTS, 5)
    slowest = 0.0
    for number, cut in enumerate(cuts, start=2):
        sleep(chunk.random.uniform(0.0, 1.5))
        backend = stage.backend("listener")
        try:
            if cut == "terminated":
                stage.execute("SELECT pg_terminate_backend(%s)", backend)
            elif cut == "reset":
                assert proxy.reset("listener") == 1
            elif cut == "stopped":
                os.kill(backend, signal.SIGSTOP)
            else:
                assert proxy.black_hole("listener", to_server=cut == "black hole") == 1
            while_deaf = stage.enqueue()
            deadline = TWO_PROBES + RECONNECTED_WITHIN if chunk.large else PATIENTLY
            slowest = max(slowest, until_heard(worker, number, deadline))
            stage.until_ended(while_deaf, PATIENTLY)
            stage.flows(PATIENTLY)
        finally:
            if cut == "stopped":
                os.kill(backend, signal.SIGCONT)
    stage.assert_alive()
    chunk.record(**stage.assert_kept(cuts=len(cuts), max_seconds_deaf=slowest))


@pytest.mark.parametrize("cut", ["terminated", "black hole"])
def test_a_deaf_worker_polls(stage: Stage, chunk: Chunk, cut: str) -> None:
    """Where no listener can be had, jobs are found no later than at the next poll."""
    proxy = stage.proxy()
    worker = stage.worker(url=stage.url(proxy.port), probe_interval=PROBE).until_listening()
    proxy.hold_new()
    if cut == "terminated":
        stage.execute("SELECT pg_terminate_backend(%s)", stage.backend("listener"))
    else:
        proxy.black_hole("listener")
    for _ in range(5):
        stage.flows(PATIENTLY)
    worker.until_said("Not listening for new jobs, so polling for them")
    for _ in range(5):
        stage.flows(PATIENTLY)
    proxy.pass_all()
    until_heard(worker, 2, PATIENTLY)


def test_a_listener_that_hangs_while_it_connects_is_given_up(stage: Stage, chunk: Chunk) -> None:
    """The server lets it in, and is never heard of again: before LISTEN has taken effect."""
    proxy = stage.proxy()
    worker = stage.worker(*NO_POLLING, url=stage.url(proxy.port), probe_interval=PROBE).until_listening()
    proxy.hold_answers_to("LISTEN")
    proxy.reset("listener")
    until(lambda: proxy.held_answers, what="a LISTEN without an answer")
    proxy.pass_all()
    until_heard(worker, 2, PATIENTLY)
    stage.flows(PATIENTLY)


def test_a_server_that_refuses_costs_little_processor_time(stage: Stage, chunk: Chunk) -> None:
    proxy = stage.proxy()
    worker = stage.worker(url=stage.url(proxy.port), probe_interval=PROBE).until_listening()
    proxy.refuse()
    proxy.reset()
    sleep(1.0)  # of the first attempts, which follow each other more closely
    accepted, used = proxy.accepted, cpu_seconds_exactly(worker.pid)
    seconds = chunk.size(small=5, large=20)
    sleep(seconds)
    accepted, used = proxy.accepted - accepted, cpu_seconds_exactly(worker.pid) - used
    stage.assert_alive()
    assert used < 0.05 * seconds
    assert accepted < 4 * seconds
    proxy.pass_all()
    until_heard(worker, 2, PATIENTLY)
    chunk.record(max_share_of_a_core=used / seconds)


def cpu_seconds_exactly(pid: int) -> float:
    """As `cpu_seconds`, and to the hundredth where the platform tells."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            user, system = file.read().rpartition(")")[2].split()[11:13]
    except OSError:
        return cpu_seconds(pid)
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.chunks(large=10)
def test_no_wake_up_is_lost(stage: Stage, chunk: Chunk) -> None:
    """One job after another, each at a time when the last has just been done, or is about to be."""
    stage.worker(*NO_POLLING, probe_interval=3600.0).until_listening()
    count = chunk.size(small=300, large=1000)
    slowest = 0.0
    with stage.session() as session:
        for _ in range(count):
            [number] = stage.enqueue_with(session)
            began = time.monotonic()
            if chunk.random.random() < 0.8:
                until(lambda number=number: stage.is_completed(session, number), what=f"number {number}")
                slowest = max(slowest, time.monotonic() - began)
            else:
                sleep(chunk.random.uniform(0.0, 0.01))
    chunk.record(**stage.assert_kept(max_seconds=slowest))


def test_a_job_created_while_the_listener_connects_is_found(stage: Stage, chunk: Chunk) -> None:
    """What is committed before LISTEN has taken effect was never heard."""
    proxy = stage.proxy()
    worker = stage.worker(*NO_POLLING, url=stage.url(proxy.port), probe_interval=PROBE).until_listening()
    for number in range(2, 2 + chunk.size(small=5, large=30)):
        proxy.reset("listener")
        numbers = []
        while worker.log.read_text().count("Listening for new jobs.") < number:
            numbers += stage.enqueue()
            sleep(0.02)
        stage.until_ended(numbers, PATIENTLY)
    stage.assert_kept()


def test_a_listener_in_a_crashed_server_hears_again(stage: Stage, chunk: Chunk) -> None:
    worker = stage.worker(*NO_POLLING, probe_interval=PROBE).until_listening()
    for number in range(2, 2 + chunk.size(small=2, large=10)):
        stage.cluster.restart("immediate")
        until_heard(worker, number, PATIENTLY)
        stage.flows(PATIENTLY)
