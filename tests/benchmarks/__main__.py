"""Measure the queue beside what Postgres itself allows, and beside other queues, in one run."""

from __future__ import annotations

import argparse
import atexit
import os
import platform
import signal
import sys
import tempfile
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from django_pgjobs.conf import DEFAULT_THREADS, default_processes
from example_project import embedded_postgres

from . import peers, plots, report
from .bench import Bench
from .measure import Figure
from .report import Results
from .scenarios import SCENARIOS, Sizes


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing that was started stays behind
    installed = {} if arguments.no_peers else peers.found(arguments.peers)
    legs = {"quick"} if arguments.quick else {"default", "peers"} if installed else {"default"}
    names = arguments.only or [name for name, each in SCENARIOS.items() if legs & set(each.legs)]
    if not installed and any("peers" in SCENARIOS[name].legs for name in names):
        fail(f"{arguments.peers} has no environment of another queue. The README says how to make them.")
    results = Results(arguments.json)
    try:
        for name in names:
            results.check(name, arguments.conditions)
    except ValueError as error:
        fail(str(error))
    missing = [
        (run, name) for run in range(arguments.runs) for name in names if len(results.runs(name)) <= run
    ]
    if missing:
        # Run by run, so that a busy minute of the machine does not hit all runs of one scenario.
        with tempfile.TemporaryDirectory() as directory:
            bench = Bench(
                server_url(),
                Path(directory),
                installed,
                processes=arguments.processes,
                threads=arguments.threads,
            )
            try:
                results.about = about(bench)
                for run, name in missing:
                    say(f"Run {run + 1} of {arguments.runs}: {name}")
                    measure(bench, results, name, arguments)
            finally:
                bench.close()
    if arguments.plots:
        plots.write(results, arguments.plots)
    sys.stdout.write(report.markdown(results))


def measure(bench: Bench, results: Results, name: str, arguments: argparse.Namespace) -> None:
    """Measure one run of a scenario."""
    scenario = SCENARIOS[name]
    figures: list[Figure] = []
    for figure in scenario.measure(bench, arguments.sizes):
        say(f"    {figure.name}: {report.number(figure.value)} {figure.unit}")
        figures.append(figure)
    results.add(name, scenario.title, arguments.conditions, figures)


def server_url() -> str:
    """The server that DATABASE_URL names, or one of our own that keeps its promises about the disk."""
    if given := os.environ.get("DATABASE_URL"):
        return given
    server = embedded_postgres.start(f"benchmarks-{os.getpid()}", durable=True)
    atexit.register(server.release)
    return server.url()


def about(bench: Bench) -> dict[str, str]:
    """What was measured where."""
    names = ("server_version", "fsync", "synchronous_commit", "shared_buffers", "autovacuum")
    settings = {name: bench.value("SELECT current_setting(%(name)s)", name=name) for name in names}
    packages = {name: version(name) for name in ("django-pgjobs", "Django", "psycopg")}
    return {
        "Machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}",
        "Postgres": ", ".join(f"{name} {value}" for name, value in settings.items()),
        "Python": ", ".join([platform.python_version(), *(" ".join(each) for each in packages.items())]),
        "Worker hosts": "runjobs " + " ".join(bench.options),
        "Peers": ", ".join(peers.versions(bench.peers)) or "none",
    }


def fail(why: str) -> NoReturn:
    say(why)
    sys.exit(2)


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description=__doc__,
        epilog="Scenarios: "
        + "; ".join(
            f"{each.name} ({', '.join(each.legs) or 'only when named'})" for each in SCENARIOS.values()
        ),
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="Less of everything, in less than two minutes.")
    add("--only", nargs="+", choices=SCENARIOS, metavar="SCENARIO", help="Measure only these.")
    add("--runs", type=int, metavar="N", help="Runs of each scenario (default: 3, or 1 with --quick).")
    add("--json", type=Path, metavar="FILE",
        help="Write what has been measured there. What it has already is not measured again.")  # fmt: skip
    add("--plots", type=Path, metavar="DIRECTORY", help="Draw what has been measured there, as SVG.")
    add("--processes", type=int, default=default_processes(), metavar="N",
        help="Executor processes of each worker host (here by default: %(default)s).")  # fmt: skip
    add("--threads", type=int, default=DEFAULT_THREADS, metavar="T",
        help="Threads of each of them (default: %(default)s).")  # fmt: skip
    add("--peers", type=Path, default=Path(".venv-peers"), metavar="DIRECTORY",
        help="Where other queues have a virtual environment each, named like them: "
        f"{', '.join(peers.PEERS)}. Default: %(default)s.")  # fmt: skip
    add("--no-peers", action="store_true", help="Leave other queues out.")
    sizes = parser.add_argument_group("sizes", "By default those of the leg.")
    options = [size for size in fields(Sizes) if size.metadata]
    for size in options:
        sizes.add_argument(f"--{size.name}", type=type(size.default), metavar="N", help=size.metadata["help"])
    arguments = parser.parse_args()
    given = {size.name: vars(arguments)[size.name] for size in options}
    leg = Sizes.of_quick_leg() if arguments.quick else Sizes()
    arguments.sizes = replace(leg, **{name: value for name, value in given.items() if value is not None})
    arguments.runs = arguments.runs or (1 if arguments.quick else 3)
    # Figures are only comparable where all of these are equal.
    workers = {"processes": arguments.processes, "threads": arguments.threads}
    arguments.conditions = asdict(arguments.sizes) | workers
    return arguments


if __name__ == "__main__":
    main()
