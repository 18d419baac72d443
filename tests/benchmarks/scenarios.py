"""The scenarios, in the order in which they run. Each yields its figures, beside what sets its floor."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import floor
from .bench import Bench
from .clients import Clients
from .measure import Figure, Meter, percentile


def size(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": f"{help} Default: {default:,}."})


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured. Each field is an option of the command."""

    quick: bool = False
    jobs: int = size(50_000, "Jobs in a queue that is drained.")
    samples: int = size(300, "Jobs that are picked up from idle.")
    seconds: float = size(20.0, "Length of what takes as long as it is told to.")

    @classmethod
    def of_quick_leg(cls) -> Sizes:
        return cls(quick=True, jobs=10_000, samples=60, seconds=3.0)


class Scenario(NamedTuple):
    name: str
    title: str
    measure: Callable[[Bench, Sizes], Iterator[Figure]]
    legs: tuple[str, ...]


QUICK = ("quick", "default")
DEFAULT = ("default",)
LONG = ()  # only when it is named

WARM_UP = 5  # jobs that do not count, after a start

SCENARIOS: dict[str, Scenario] = {}

Measure = Callable[[Bench, Sizes], Iterator[Figure]]


def scenario(name: str, title: str, legs: tuple[str, ...] = DEFAULT) -> Callable[[Measure], Measure]:
    def register(measure: Measure) -> Measure:
        SCENARIOS[name] = Scenario(name, title, measure, legs)
        return measure

    return register


# ── Draining a full queue ─────────────────────────────────────────────────────────────────────────────────

BEST = ("bare, batches of 100", "bare, batches of 1,000")


@scenario("drain", "A full queue of no-op jobs, drained by one host", QUICK)
def drain(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    yield bare_drain(bench, "bare, batches of 100", sizes.jobs, 100)
    yield our_drain(bench, "ours, sync", sizes.jobs, "nothing", floor=BEST)
    yield bare_drain(bench, "bare, batches of 1,000", sizes.jobs, 1000)
    yield our_drain(bench, "ours, async", sizes.jobs, "nothing_async", floor=BEST)
    yield bare_drain(bench, "bare, one by one", sizes.jobs // 25, 1)


@scenario("two-hosts", "The same with two hosts, beside two connections")
def two_hosts(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    yield bare_drain(bench, "bare, batches of 100", sizes.jobs, 100, connections=2)
    yield our_drain(bench, "ours, sync", sizes.jobs, "nothing", floor=BEST, hosts=2)
    yield bare_drain(bench, "bare, batches of 1,000", sizes.jobs, 1000, connections=2)
    yield our_drain(bench, "ours, async", sizes.jobs, "nothing_async", floor=BEST, hosts=2)


def bare_drain(bench: Bench, name: str, jobs: int, batch: int, *, connections: int = 1) -> Figure:
    bench.clear()
    bench.fill(jobs)
    bench.settle_down()
    with Clients(connections, floor.drain, bench.url, batch) as clients:
        meter = Meter(bench.connection, clients.pids)
        done = clients.run()
        cost = meter.read()
    seconds = max(each.ended for each in done) - min(each.began for each in done)
    total = sum(each.jobs for each in done)
    if total != jobs:
        raise RuntimeError(f"Of {jobs:,} jobs, {total:,} were drained by bare statements.")
    return Figure(name, jobs / seconds, "jobs/s", details=cost.each(jobs))


def our_drain(
    bench: Bench, name: str, jobs: int, job: str, *, floor: tuple[str, ...] = (), hosts: int = 1
) -> Figure:
    bench.clear()
    bench.pause("default")
    bench.fill(jobs, job)
    bench.settle_down()
    with bench.hosts(hosts) as running:
        rate, cost = bench.drain(jobs, [host.pid for host in running])
    return Figure(name, rate, "jobs/s", floor, cost)


# ── Waiting for jobs ──────────────────────────────────────────────────────────────────────────────────────


@scenario("latency-idle", "Pickup of a single job: from its INSERT to its body, workers idle", QUICK)
def latency_idle(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    bare: list[float] = []
    ours: list[float] = []
    for _ in range(2):
        bench.clear()
        with Clients(1, floor.listen, bench.url) as listener:
            listener.go()
            sent = trickle(bench, sizes.samples // 2)
            bench.until_empty()
            bench.connection.execute("NOTIFY benchmark_stop")
            bare += pickups(sent, listener.results()[0])
        bench.clear()
        with bench.hosts():
            sent = trickle(bench, sizes.samples // 2)
            bench.until_empty()
            ours += pickups(sent, bench.moments())
    yield from percentiles("bare LISTEN and claim", bare)
    yield from percentiles("ours", ours, floor="bare LISTEN and claim")


def trickle(bench: Bench, samples: int) -> dict[int, float]:
    """Enqueue one job at a time, with pauses in which workers fall asleep. Returns when each was sent."""
    for _ in range(WARM_UP):
        floor.insert(bench.connection, "moment")
        time.sleep(0.1)
    sent = {}
    for _ in range(max(samples, 1)):
        time.sleep(random.uniform(0.05, 0.15))
        now = time.monotonic()
        sent[floor.insert(bench.connection, "moment")] = now
    return sent


@scenario("latency-busy", "Pickup of jobs that clients enqueue one by one, so many in a second", QUICK)
def latency_busy(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    for rate in (500,) if sizes.quick else (50, 500, 2000):
        bench.clear()
        with Clients(1, floor.listen, bench.url) as listener:
            listener.go()
            meter = Meter(bench.connection, listener.pids)
            sent = offer(bench, rate, sizes.seconds)
            cost = meter.read().each(len(sent)) | offered(sent)
            bench.connection.execute("NOTIFY benchmark_stop")
            bare = pickups(sent, listener.results()[0])
        yield from percentiles(f"bare, {rate:,} jobs/s", bare, details=cost)
        bench.clear()
        with bench.hosts() as running:
            meter = Meter(bench.connection, [host.pid for host in running])
            sent = offer(bench, rate, sizes.seconds)
            cost = meter.read().each(len(sent)) | offered(sent)
            ours = pickups(sent, bench.moments())
        yield from percentiles(f"ours, {rate:,} jobs/s", ours, floor=f"bare, {rate:,} jobs/s", details=cost)


def offer(bench: Bench, rate: float, seconds: float) -> dict[int, float]:
    """Let clients enqueue so many jobs in a second, and wait for their end. Returns when each was sent."""
    count = math.ceil(rate / 400)  # one client alone could not keep up
    with Clients(count, floor.offer, bench.url, "moment", rate / count, seconds) as clients:
        sent = {id: at for each in clients.run() for id, at in each.items()}
    bench.until_empty()
    return sent


def offered(sent: dict[int, float]) -> dict[str, float]:
    """How many jobs there really were in a second."""
    return {"jobs/s offered": len(sent) / (max(sent.values()) - min(sent.values()) or math.inf)}


def pickups(sent: dict[int, float], moments: dict[int, float]) -> list[float]:
    """Milliseconds from when each job was sent to when it was picked up."""
    return [(moments[id] - at) * 1000 for id, at in sent.items()]


def percentiles(
    name: str, values: list[float], *, floor: str = "", details: dict[str, float] | None = None
) -> Iterator[Figure]:
    for percent in (50, 99):
        beside = (f"{floor}, p{percent}",) if floor else ()
        value = percentile(values, percent)
        yield Figure(f"{name}, p{percent}", value, "ms", beside, details or {} if percent == 50 else {})
