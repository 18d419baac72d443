"""The benchmarks run, and what they print has all figures. What these are is nobody's business here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest

from tests.benchmarks.scenarios import SCENARIOS
from tests.database import choose

pytestmark = pytest.mark.processes

TINY = ["--jobs=100", "--samples=4", "--seconds=0.2", "--backlog=200", "--history=200", "--minutes=0.02"]


def benchmarks(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the benchmarks at tiny sizes on the server of the tests."""
    server = urlsplit(choose().url)._replace(path="/postgres").geturl()
    return subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", *TINY, *arguments],
        env={**os.environ, "DATABASE_URL": server},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The results of the quick leg: as a file, and as text."""
    file = tmp_path_factory.mktemp("benchmarks") / "results.json"
    ran = benchmarks("--quick", "--json", file)
    assert ran.returncode == 0, ran.stderr
    return file, ran.stdout


def test_the_quick_leg_measures_its_scenarios(quick: tuple[Path, str]) -> None:
    measured = json.loads(quick[0].read_text())["scenarios"]

    assert list(measured) == [name for name, each in SCENARIOS.items() if "quick" in each.legs]
    for scenario in measured.values():
        [figures] = scenario["runs"]
        assert figures
        assert all(figure["value"] > 0 for figure in figures)
        names = {figure["name"] for figure in figures}
        assert any(figure["floor"] for figure in figures)
        assert all(names.issuperset(figure["floor"]) for figure in figures)


def test_the_report_has_all_figures(quick: tuple[Path, str]) -> None:
    measured = json.loads(quick[0].read_text())["scenarios"]

    for scenario in measured.values():
        assert f"### {scenario['title']}\n" in quick[1]
        for figure in scenario["runs"][0]:
            rows = [row for row in quick[1].splitlines() if row.startswith(f"| {figure['name']} |")]
            assert any(figure["unit"] in row for row in rows)


def test_what_takes_long_is_measured_when_it_is_named_and_drawn(tmp_path: Path) -> None:
    names = ["pinned-paced", "memory"]

    ran = benchmarks("--runs", "1", "--plots", tmp_path, "--only", *names)

    assert ran.returncode == 0, ran.stderr
    assert re.findall("^### (.*)$", ran.stdout, re.MULTILINE) == [SCENARIOS[name].title for name in names]
    plots = {path.name: ElementTree.parse(path).getroot() for path in tmp_path.iterdir()}
    assert set(plots) == {"memory.svg", "pinned-paced.svg", "pinned-paced-over-time.svg"}
    assert plots["memory.svg"].findall("{*}rect")
    assert plots["pinned-paced-over-time.svg"].findall("{*}polyline")


def test_what_a_file_has_is_not_measured_again(quick: tuple[Path, str]) -> None:
    before = quick[0].read_text()

    again = benchmarks("--quick", "--json", quick[0])

    assert again.returncode == 0
    assert "Run" not in again.stderr
    assert again.stdout == quick[1]
    assert quick[0].read_text() == before


def test_other_sizes_are_not_mixed_into_a_file(quick: tuple[Path, str]) -> None:
    before = quick[0].read_text()

    refused = benchmarks("--json", quick[0], "--only", "drain", "--jobs", "200")

    assert refused.returncode == 2
    assert "Name another file." in refused.stderr
    assert quick[0].read_text() == before
