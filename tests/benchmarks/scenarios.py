"""The scenarios, in the order in which they run. Each yields its figures, beside what sets its floor."""

from __future__ import annotations

import math
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from example_project import embedded_postgres

from . import clients, floor, measure, peers
from .bench import Bench
from .clients import Clients
from .measure import Cost, Figure, Meter, percentile
from .watch import TENTHS, Watch


def size(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": f"{help} Default: {default:,}."})


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured. Each field is an option of the command."""

    quick: bool = False
    jobs: int = size(50_000, "Jobs in a queue that is drained.")
    backlog: int = size(1_000_000, "Jobs that wait beside those of a drain.")
    history: int = size(2_000_000, "Finished jobs beside those of a drain.")
    minutes: float = size(10.0, "Length of `pinned`, twice; `soak` takes three times as long.")
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
PEERS = ("peers",)  # in the default leg, where there are any
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
    yield bare_drain(bench, "bare, batches of 100", sizes.jobs, batch=100)
    yield our_drain(bench, "ours, sync", sizes.jobs, "nothing", beside=BEST)
    yield bare_drain(bench, "bare, batches of 1,000", sizes.jobs, batch=1000)
    yield our_drain(bench, "ours, async", sizes.jobs, "nothing_async", beside=BEST)
    yield bare_drain(bench, "bare, one by one", sizes.jobs // 25, batch=1)


@scenario("two-hosts", "A full queue of no-op jobs, drained by two hosts, beside two connections")
def two_hosts(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    yield bare_drain(bench, "bare, batches of 100", sizes.jobs, batch=100, connections=2)
    yield our_drain(bench, "ours, sync", sizes.jobs, "nothing", beside=BEST, hosts=2)
    yield bare_drain(bench, "bare, batches of 1,000", sizes.jobs, batch=1000, connections=2)
    yield our_drain(bench, "ours, async", sizes.jobs, "nothing_async", beside=BEST, hosts=2)


@scenario(
    "orm", "Jobs with one read and one write by the ORM, beside as many connections as there are threads"
)
def orm(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    jobs = sizes.jobs // 10
    name = "bare, batches of 10"
    yield bare_drain(bench, name, jobs, floor.use_accounts, batch=10, connections=bench.threads)
    yield our_drain(bench, "ours", jobs, "account", beside=(name,))


@scenario("sleep", "Jobs that sleep, beside what as many slots could do at most")
def sleep(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    for milliseconds in (5, 50):
        for kind, slots in (("sync", bench.threads), ("async", bench.async_slots)):
            ideal = Figure(f"{slots} slots of {milliseconds} ms", slots * 1000 / milliseconds, "jobs/s")
            yield ideal
            jobs = max(round(ideal.value * sizes.seconds / 4), slots)
            job = f"sleep_{milliseconds}" + ("_async" if kind == "async" else "")
            yield our_drain(bench, f"ours, {milliseconds} ms, {kind}", jobs, job, beside=(ideal.name,))


def bare_drain(
    bench: Bench,
    name: str,
    jobs: int,
    work: clients.Work = floor.drain,
    *,
    batch: int,
    connections: int = 1,
    queues: tuple[str, ...] = ("default",),
    beside: tuple[str, ...] = (),
) -> Figure:
    bench.clear()
    bench.fill(jobs, queues=queues)
    bench.settle_down()
    with Clients(connections, work, bench.url, batch) as draining:
        meter = Meter(bench.connection, draining.pids)
        done = draining.run()
        cost = meter.read()
    seconds = max(each.ended for each in done) - min(each.began for each in done)
    total = sum(each.jobs for each in done)
    if total != jobs:
        raise RuntimeError(f"Of {jobs:,} jobs, {total:,} were drained by bare statements.")
    return Figure(name, jobs / seconds, "jobs/s", beside, cost.each(jobs))


def our_drain(
    bench: Bench,
    name: str,
    jobs: int,
    job: str = "nothing",
    *,
    beside: tuple[str, ...] = (),
    hosts: int = 1,
    around: Callable[[], None] = lambda: None,
    queues: tuple[str, ...] = ("default",),
) -> Figure:
    """Drain so many jobs; `around` puts in what else there is in the table, ahead of them."""
    bench.clear()
    bench.pause(*queues)
    around()
    bench.fill(jobs, job, queues=queues)
    bench.settle_down()
    with bench.hosts(hosts) as running:
        rate, cost = bench.drain(jobs, [host.pid for host in running])
    return Figure(name, rate, "jobs/s", beside, cost)


# ── What else is in the table ─────────────────────────────────────────────────────────────────────────────


def beside_empty(
    bench: Bench,
    sizes: Sizes,
    what: str,
    around: Callable[[], None] = lambda: None,
    queues: tuple[str, ...] = ("default",),
) -> Iterator[Figure]:
    """A drain with something around it, beside one with nothing."""
    yield bare_drain(bench, "bare, nothing else, batches of 1,000", sizes.jobs, batch=1000)
    yield our_drain(bench, "ours, nothing else", sizes.jobs, beside=("bare, nothing else, batches of 1,000",))
    yield our_drain(bench, what, sizes.jobs, beside=("ours, nothing else",), around=around, queues=queues)


@scenario("backlog", "A drain of the first jobs of many more")
def backlog(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    def around() -> None:
        bench.fill(sizes.backlog, delay=-1)

    yield from beside_empty(bench, sizes, f"ours, the first of {sizes.backlog:,} more", around)


@scenario("tomorrow", "A drain beside jobs that are due tomorrow and have a higher priority")
def tomorrow(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    def around() -> None:
        bench.fill(sizes.backlog, priority=10, delay=20 * 3600)

    yield from beside_empty(bench, sizes, f"ours, {sizes.backlog:,} are due tomorrow", around)


@scenario("queues", "A drain of 30 queues", QUICK)
def queues(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    names = tuple(f"queue-{number:02}" for number in range(30))
    yield from beside_empty(bench, sizes, "ours, 30 queues", queues=names)
    # Jobs of one queue that lie apart in the table cost bare statements more, too.
    yield bare_drain(
        bench,
        "bare, 30 queues, batches of 1,000",
        sizes.jobs,
        partial(floor.drain, queues=names),
        batch=1000,
        queues=names,
        beside=("bare, nothing else, batches of 1,000",),
    )


@scenario("unknown", "A drain behind jobs with names that no worker knows")
def unknown(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    count = min(30_000, sizes.backlog)

    def around() -> None:
        bench.fill(count, "unknown", delay=-1)

    yield from beside_empty(bench, sizes, f"ours, behind {count:,} unknown ones", around)


@scenario("history", "A drain beside many finished jobs", LONG)
def history(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    def around() -> None:
        bench.fill(sizes.history, status="completed")

    yield from beside_empty(bench, sizes, f"ours, {sizes.history:,} are finished", around)


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
    yield from percentiles("ours", ours, beside="bare LISTEN and claim")


def trickle(bench: Bench, samples: int) -> dict[int, float]:
    """Enqueue one job at a time, with pauses in which workers fall asleep. Returns when each was sent."""
    for _ in range(WARM_UP):
        floor.insert(bench.connection, "moment")
        time.sleep(0.05)
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
        yield from percentiles(f"ours, {rate:,} jobs/s", ours, beside=f"bare, {rate:,} jobs/s", details=cost)


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
    name: str, values: list[float], *, beside: str = "", details: dict[str, float] | None = None
) -> Iterator[Figure]:
    for percent in (50, 99):
        floors = (f"{beside}, p{percent}",) if beside else ()
        value = percentile(values, percent)
        yield Figure(f"{name}, p{percent}", value, "ms", floors, details or {} if percent == 50 else {})


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
    return shutil.which("pgbench") or str(embedded_postgres.find_programs() / "pgbench")


# ── As time goes by ───────────────────────────────────────────────────────────────────────────────────────

DEPTH = 60_000  # jobs that wait, where the queue never gets empty


@scenario("pinned", "A queue that never gets empty, while somebody holds an old snapshot", LONG)
def pinned(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    seconds = sizes.minutes * 60
    bench.clear()
    bench.fill(DEPTH)
    bench.settle_down()
    with bench.old_snapshot(), Clients(1, floor.drain_onwards, bench.url, 1000) as draining:
        draining.go()
        watch = keep_filled(bench, seconds)
        draining.results()
    bare = watch.rate("bare, from a low-water mark on, first tenth", 0, series=True)
    yield bare
    yield watch.rate("bare, from a low-water mark on, last tenth", TENTHS - 1, floor=(bare.name,))
    bench.clear()
    bench.fill(DEPTH)
    bench.settle_down()
    with bench.hosts() as running, bench.old_snapshot():
        meter = Meter(bench.connection, [host.pid for host in running])
        watch = keep_filled(bench, seconds)
        cost = meter.read().each(watch.completed)
    yield watch.rate("ours, first tenth", 0, floor=(bare.name,), series=True, details=cost)
    yield watch.rate("ours, last tenth", TENTHS - 1, floor=("ours, first tenth",))


def keep_filled(bench: Bench, seconds: float) -> Watch:
    """Watch the table for so long, and refill the queue whenever fewer jobs wait than at the beginning."""
    watch = Watch(bench.connection, seconds)
    added = 0
    while watch.goes_on():
        if added < watch.look():
            bench.fill(DEPTH // 3)
            added += DEPTH // 3
    return watch


@scenario("pinned-paced", "500 jobs/s, while somebody holds an old snapshot", LONG)
def pinned_paced(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    bench.clear()
    with bench.hosts() as running, bench.old_snapshot():
        watch, cost = paced(bench, sizes.minutes * 60, [host.pid for host in running])
    yield from watch.pickups("ours", cost)


@scenario("soak", "500 jobs/s for a long time, with what is completed pruned", LONG)
def soak(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    seconds = sizes.minutes * 60 * 3
    bench.clear()
    with bench.hosts(settings={"COMPLETED_RETENTION": max(seconds / TENTHS, 10)}) as running:
        watch, cost = paced(bench, seconds, [host.pid for host in running])
    yield from watch.pickups("ours", cost)
    yield from watch.sizes()


def paced(bench: Bench, seconds: float, pids: list[int]) -> tuple[Watch, dict[str, float]]:
    """Watch the table while clients enqueue 500 jobs in a second."""
    with Clients(2, floor.offer, bench.url, "moment", 250, seconds) as offering:
        meter = Meter(bench.connection, pids)
        offering.go()
        watch = Watch(bench.connection, seconds, lag=5.0)
        while watch.goes_on():
            watch.look()
        cost = meter.read()
        for sent in offering.results():
            watch.sent |= sent
        bench.until_empty()
        watch.finish()
    return watch, cost.each(watch.completed)


# ── One host by itself ────────────────────────────────────────────────────────────────────────────────────


@scenario("idle", "What a host does while there is nothing to do")
def idle(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    bench.clear()
    with bench.hosts() as running:
        time.sleep(min(sizes.seconds / 2, 5))
        meter = Meter(bench.connection, [host.pid for host in running])
        before = bench.value(TRANSACTIONS)
        time.sleep(sizes.seconds)
        transactions, cost = bench.value(TRANSACTIONS) - before - 1, meter.read()
    yield Figure("transactions", max(transactions, 0) / sizes.seconds, "in a second")
    yield Figure("processor time of the host", cost.worker / sizes.seconds * 100, "% of a core")
    yield Figure("processor time of the server", cost.server / sizes.seconds * 100, "% of a core")


# Of all sessions, the own one included; each reports them at most ten seconds late.
TRANSACTIONS = """
SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()
"""

BARE_DJANGO = """
import sys, time, django
django.setup()
from django.db import connection
connection.ensure_connection()
print(time.monotonic(), flush=True)
sys.stdin.read()
"""


@scenario("start", "From the start of a process to the first line of a job that waits")
def start(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    bare, ours = [], []
    for _ in range(max(sizes.samples // 60, 1)):
        with bare_django() as (_, seconds):
            bare.append(seconds)
        bench.clear()
        id, began = floor.insert(bench.connection, "moment"), time.monotonic()
        with bench.hosts():
            bench.until_empty()
            ours.append(bench.moments()[id] - began)
    yield Figure("bare Django process, until it is connected", statistics.median(bare), "s")
    yield Figure("ours", statistics.median(ours), "s", ("bare Django process, until it is connected",))


@scenario("memory", "Memory of a host")
def memory(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    with bare_django() as (pid, _):
        bare = measure.memory(pid)
    yield Figure("bare Django process", bare["rss"], "MB")
    bench.clear()
    with bench.hosts() as [host]:
        bench.pause("default")
        bench.fill(sizes.backlog // 10)
        bench.drain(sizes.backlog // 10, [host.pid])
        before = executors(host.pid)
        bench.pause("default")
        bench.fill(sizes.backlog)
        bench.drain(sizes.backlog, [host.pid])
        after = executors(host.pid)
        supervisor = measure.memory(host.pid)
    grown = [after[pid]["own"] - before[pid]["own"] for pid in before if pid in after]
    yield Figure("supervisor", supervisor["rss"], "MB", ("bare Django process",))
    yield Figure("supervisor, above a bare Django process", supervisor["rss"] - bare["rss"], "MB")
    yield Figure("largest child, not shared", max(each["own"] for each in after.values()), "MB")
    yield Figure(f"most that a child grew over {sizes.backlog:,} jobs", max(grown), "MB")


def executors(pid: int) -> dict[int, dict[str, float]]:
    """The memory of each process below a supervisor."""
    family = measure.below([pid], measure.processes())
    return {process.pid: measure.memory(process.pid) for process in family if process.pid != pid}


@contextmanager
def bare_django() -> Iterator[tuple[int, float]]:
    """Run a process that has set up Django and connected. Gives its pid, and how many seconds that took."""
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", BARE_DJANGO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.pid, float(process.stdout.readline()) - began


# ── Peers ─────────────────────────────────────────────────────────────────────────────────────────────────


@scenario("peers-drain", "A full queue of no-op jobs: other queues for Python", PEERS)
def peers_drain(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    yield bare_drain(bench, "bare, batches of 100", sizes.jobs, batch=100)
    yield bare_drain(bench, "bare, batches of 1,000", sizes.jobs, batch=1000)
    ours = [
        our_drain(bench, "ours, sync", sizes.jobs, "nothing", beside=BEST),
        our_drain(bench, "ours, async", sizes.jobs, "nothing_async", beside=BEST),
    ]
    yield from ours
    theirs = {}
    for name, python in bench.peers.items():
        peer = peers.PEERS[name]
        for job in peer.jobs:
            rate, cost = peers.Installed(bench, name, python).drain(max(sizes.jobs // peer.fewer, 2), job)
            kind = "async" if job == "nothing_async" else "sync"
            yield Figure(f"{name}, {kind}", rate, "jobs/s", BEST, cost)
            theirs[name] = max(rate, theirs.get(name, 0))
    best = max(figure.value for figure in ours)
    plain = max(theirs[name] for name, _ in as_they_come(bench))
    yield Figure("ours beside the best of them as they come", best / plain, "times")
    yield Figure("ours beside the best of them", best / max(theirs.values()), "times")


@scenario("peers-latency", "Pickup of a single job, workers idle: other queues for Python", PEERS)
def peers_latency(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    yield from latency_idle(bench, sizes)
    for name, python in as_they_come(bench):
        waits = peers.Installed(bench, name, python).pickups(max(sizes.samples // 3, 1))
        yield from percentiles(name, waits, beside="bare LISTEN and claim")


@scenario("peers-enqueue", "Enqueueing by one client: other queues for Python", PEERS)
def peers_enqueue(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    for figure in enqueue(bench, sizes):
        if not figure.name.startswith("ten in a transaction"):
            yield figure
    floors = {"one by one": clients.BARE, "a thousand at once": clients.UNNEST}
    for name, python in as_they_come(bench):
        for kind, rate in peers.Installed(bench, name, python).enqueue(sizes.seconds / 4).items():
            yield Figure(f"{kind}: {name}", rate, "jobs/s", (f"{kind}: {floors[kind]}",))


def as_they_come(bench: Bench) -> Iterator[tuple[str, Path]]:
    """The peers without those that are only told to claim larger batches."""
    return ((name, python) for name, python in bench.peers.items() if not peers.PEERS[name].batch)
