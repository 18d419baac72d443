"""What all harnesses share: their size, their seed, and a record of what they saw.

A harness runs in chunks, each with a seed of its own: one small chunk by default, many with `--large`. With
`--figures FILE` a chunk leaves a line of JSON there when it has passed, and is skipped when its line is there
already; so a long run that was cut short goes on where it was. The sums are printed at the end.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.faults import serverlog
from tests.faults.audit import Audit
from tests.faults.fleet import Fleet
from tests.faults.ledger import Producer
from tests.faults.serverlog import ServerLog
from tests.sessions import session

FIGURES = pytest.StashKey[list[tuple[str, dict[str, Any]]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption("--large", action="store_true", help="Run the harnesses in their large size.")
    group.addoption("--seed", type=int, default=1, help="The seed of the first chunk (default: 1).")
    group.addoption("--figures", type=Path, help="A file to add each chunk's figures to, and to resume from.")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = []
    config.addinivalue_line("markers", "chunks(large): with --large, run in so many chunks.")


def pytest_report_header(config: pytest.Config) -> str:
    size = "large" if is_large(config) else "small"
    return f"faults: {size}, repeat with --seed {config.getoption('seed', 1)}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "chunk" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("chunks")
        count = marker.kwargs["large"] if marker and is_large(metafunc.config) else 1
        first = metafunc.config.getoption("seed", 1)
        metafunc.parametrize(
            "chunk", range(first, first + count), ids=lambda seed: f"seed{seed}", indirect=True
        )


class Chunk:
    """One run of a harness: its seed, its size, and what it has to tell."""

    def __init__(self, seed: int, large: bool, name: str) -> None:
        self.seed = seed
        self.large = large
        self.random = random.Random(f"{name} {seed}")
        self.figures: dict[str, float] = {}

    def size(self, *, small: int, large: int) -> int:
        return large if self.large else small

    def record(self, **figures: float) -> None:
        """Note figures for the report. Those whose name begins with `max_` are not added up over chunks."""
        self.figures |= figures


@pytest.fixture
def chunk(request: pytest.FixtureRequest) -> Iterator[Chunk]:
    config, name = request.config, request.node.nodeid
    path = config.getoption("figures", None)
    if path is not None and name in already_run(path):
        pytest.skip("its figures are there already")
    chunk = Chunk(request.param, is_large(config), request.node.originalname)
    failed_before = request.session.testsfailed
    yield chunk
    if request.session.testsfailed == failed_before and chunk.figures:
        config.stash[FIGURES].append((request.node.originalname, chunk.figures))
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps({"chunk": name, **chunk.figures}) + "\n")


@pytest.fixture
def observer(transactional_db: None) -> Iterator[psycopg.Connection[Any]]:
    """A session of the test's own, in autocommit mode."""
    with session(application_name="observer") as connection:
        yield connection


@pytest.fixture
def audit(observer: psycopg.Connection[Any]) -> Iterator[Audit]:
    """Write down every change of every job on the test database while the test runs."""
    audit = Audit(observer)
    audit.install()
    yield audit
    audit.remove()


@pytest.fixture
def server_log(observer: psycopg.Connection[Any]) -> Iterator[ServerLog]:
    """What the server of the tests logs while the test runs."""
    with serverlog.followed(observer) as log:
        yield log


@pytest.fixture
def producer() -> Producer:
    return Producer()


@pytest.fixture
def fleet(
    tmp_path: Path, child_environment: dict[str, str], audit: Audit, observer: psycopg.Connection[Any]
) -> Iterator[Fleet]:
    """Worker hosts that can be hit, under the eyes of the audit; none outlives the test."""
    fleet = Fleet(tmp_path, child_environment, audit, observer)
    yield fleet
    fleet.end()


def is_large(config: pytest.Config) -> bool:
    return bool(config.getoption("large", False))


def already_run(path: Path) -> set[str]:
    return {json.loads(line)["chunk"] for line in path.read_text().splitlines()} if path.exists() else set()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    sums: dict[str, dict[str, float]] = {}
    for name, figures in config.stash[FIGURES]:
        total = sums.setdefault(name, {"chunks": 0})
        total["chunks"] += 1
        for key, value in figures.items():
            known = total.get(key, 0)
            total[key] = max(known, value) if key.startswith("max_") else known + value
    if sums:
        terminalreporter.section("figures")
        for name, total in sums.items():
            text = ", ".join(f"{key} {value:,.4g}".replace(",", "") for key, value in total.items())
            terminalreporter.line(f"{name}: {text}")
