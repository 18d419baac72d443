"""The scenarios, in the order in which they run. Each yields its figures, beside what sets its floor."""

from __future__ import annotations

import math
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from example_project import embedded_postgres

from . import clients, floor
from .bench import Bench
from .clients import Clients
from .measure import Cost, Figure, Meter, percentile


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
    with Clients(connections, floor.drain, bench.url, batch) as draining:
        meter = Meter(bench.connection, draining.pids)
        done = draining.run()
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
    with Clients(count, floor.offer, bench.url, "moment", rate / count, seconds) as offering:
        sent = {id: at for each in offering.run() for id, at in each.items()}
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


# ── Enqueueing ────────────────────────────────────────────────────────────────────────────────────────────


@scenario("enqueue", "Enqueueing by one client, without workers", QUICK)
def enqueue(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    for kind in clients.WAYS:
        bench.clear()
        with Clients(1, clients.enqueue, bench.url, kind, sizes.seconds / 4) as client:
            [ways] = client.run()
        for name, way in ways.items():
            beside = tuple(f"{kind}: {each}" for each in ways if each == clients.BESIDE.get((kind, name)))
            yield Figure(f"{kind}: {name}", way.jobs / way.seconds, "jobs/s", beside, way.details)


@scenario("clients", "Commits of one INSERT each, by several clients, with the trigger and without", QUICK)
def committing_clients(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    """Who waits for whom: a commit with a notification takes a lock that the whole server has only once."""
    for workers in ("busy",) if sizes.quick else ("none", "idle", "busy"):
        bench.clear()
        if workers == "busy":
            bench.fill(100_000, "sleep_50")
        bench.settle_down()
        with bench.hosts(0 if workers == "none" else 1) as running:
            pids = [host.pid for host in running]
            for count in (16,) if sizes.quick else (1, 4, 16):
                name = f"{count} clients, workers {workers}" if count > 1 else f"1 client, workers {workers}"
                yield from with_and_without_trigger(bench, name, count, sizes.seconds, pids)


def with_and_without_trigger(
    bench: Bench, name: str, count: int, seconds: float, pids: list[int]
) -> Iterator[Figure]:
    seconds_each = max(round(seconds / 4), 1)  # pgbench counts in whole seconds
    rates: dict[bool, list[float]] = {False: [], True: []}
    costs = {False: Cost(0, 0, 0), True: Cost(0, 0, 0)}
    for trigger in (False, True, True, False):
        with nullcontext() if trigger else bench.without_triggers():
            meter = Meter(bench.connection, pids)
            rates[trigger].append(commits(bench, count, seconds_each))
            costs[trigger] += meter.read()
    for trigger, beside in ((False, ()), (True, (f"{name}: no trigger",))):
        rate = sum(rates[trigger]) / 2
        details = costs[trigger].each(round(rate * 2 * seconds_each))
        yield Figure(f"{name}: {'trigger' if trigger else 'no trigger'}", rate, "commits/s", beside, details)


ONE_INSERT = """
INSERT INTO background_jobs (queue_name, job_name, payload)
VALUES ('default', 'tests.benchmarks.jobs.nothing', '{"args": [1], "kwargs": {}}');
"""


def commits(bench: Bench, count: int, seconds: int) -> float:
    """How many single jobs so many clients commit in a second: by pgbench, which takes little itself."""
    script = bench.directory / "insert.sql"
    script.write_text(ONE_INSERT)
    options = ["--no-vacuum", "--protocol=prepared", f"--client={count}", f"--time={seconds}"]
    ran = subprocess.run(
        [pgbench(), *options, f"--file={script}", bench.url], capture_output=True, text=True, check=True
    )
    found = re.search(r"^tps = ([0-9.]+)", ran.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"What pgbench says has no rate:\n{ran.stdout}")
    return float(found[1])


def pgbench() -> str:
    """The path of pgbench, which comes with Postgres. Raises RuntimeError where there is none."""
    beside = embedded_postgres.find_programs() / "pgbench"
    path = str(beside) if beside.exists() else shutil.which("pgbench")
    if path is None:
        raise RuntimeError("The scenario `clients` needs pgbench, which is not in the PATH.")
    return path
