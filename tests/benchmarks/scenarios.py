"""The scenarios, in the order in which they run. Each yields its figures, beside what sets its floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import floor
from .bench import Bench
from .clients import Clients
from .measure import Figure, Meter


def size(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": f"{help} Default: {default:,}."})


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured. Each field is an option of the command."""

    jobs: int = size(50_000, "Jobs in a queue that is drained.")

    @classmethod
    def quick(cls) -> Sizes:
        return cls(jobs=10_000)


class Scenario(NamedTuple):
    name: str
    title: str
    measure: Callable[[Bench, Sizes], Iterator[Figure]]
    legs: tuple[str, ...]


QUICK = ("quick", "default")
DEFAULT = ("default",)
LONG = ()  # only when it is named

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
