"""What has been measured: kept in a file run by run, and shown."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .measure import COSTS, Figure, Summary, summary

HIGHER_IS_BETTER = {"jobs/s", "commits/s"}


class Results:
    """The figures of all runs of all scenarios. With a path, they are written there as they come in.

    What the file has already is not measured again. Raises ValueError when it was measured with other sizes.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._content: dict[str, Any] = {"about": {}, "scenarios": {}}
        if path is not None and path.exists():
            self._content = json.loads(path.read_text())

    @property
    def about(self) -> dict[str, str]:
        """What was measured where; the last run counts."""
        about: dict[str, str] = self._content["about"]
        return about

    @about.setter
    def about(self, about: dict[str, str]) -> None:
        self._content["about"] = about

    @property
    def scenarios(self) -> list[str]:
        return list(self._content["scenarios"])

    def title(self, scenario: str) -> str:
        return str(self._content["scenarios"][scenario]["title"])

    def runs(self, scenario: str) -> list[list[Figure]]:
        """The figures of each run."""
        runs = self._content["scenarios"].get(scenario, {"runs": []})["runs"]
        return [[Figure.from_plain(plain) for plain in run] for run in runs]

    def check(self, scenario: str, sizes: dict[str, Any]) -> None:
        """Raises ValueError when a scenario has been measured with other sizes, which must not be mixed."""
        before = self._content["scenarios"].get(scenario, {"sizes": sizes})["sizes"]
        if before != sizes:
            raise ValueError(
                f"{self._path} has {scenario!r} with other sizes ({before}) than are asked for ({sizes})."
                " Name another file."
            )

    def add(self, scenario: str, title: str, sizes: dict[str, Any], figures: Sequence[Figure]) -> None:
        """Add a run."""
        entry = self._content["scenarios"].setdefault(scenario, {"title": title, "sizes": sizes, "runs": []})
        entry["runs"].append([figure.to_plain() for figure in figures])
        if self._path is not None:
            partial = self._path.with_name(f"{self._path.name}.partial")
            partial.write_text(json.dumps(self._content, indent=1))
            os.replace(partial, self._path)


def values(runs: Iterable[Sequence[Figure]], name: str) -> list[float]:
    """The values of a figure, of each run that has it."""
    return [figure.value for run in runs for figure in run if figure.name == name]


def ratios(runs: Iterable[Sequence[Figure]], figure: Figure) -> list[float]:
    """The figure divided by its floor, of each run that has both."""
    found = []
    for run in runs:
        known = {each.name: each.value for each in run}
        floors = [known[name] for name in figure.floor if name in known]
        if figure.name in known and floors:
            best = max(floors) if figure.unit in HIGHER_IS_BETTER else min(floors)
            found.append(known[figure.name] / best)
    return found


# ── Text ──────────────────────────────────────────────────────────────────────────────────────────────────


def markdown(results: Results) -> str:
    """All of it as tables."""
    lines = [f"* {name}: {value}" for name, value in results.about.items()]
    for scenario in results.scenarios:
        lines += ["", f"### {results.title(scenario)}", "", *table(results.runs(scenario))]
    return "\n".join(lines) + "\n"


def table(runs: list[list[Figure]]) -> Iterator[str]:
    """One row for each figure, with those columns that any of them has."""
    last = {figure.name: figure for run in runs for figure in run}
    details = list(dict.fromkeys([*COSTS, *(name for figure in last.values() for name in figure.details)]))
    details = [name for name in details if any(name in figure.details for figure in last.values())]
    compared = any(figure.floor for figure in last.values())
    several = len(runs) > 1
    header = ["", f"median of {len(runs)}" if several else "once"]
    header += ["lowest to highest"] * several + ["of the floor"] * compared + details
    yield row(header)
    yield row(["---"] + ["---:"] * (len(header) - 1))
    for name, figure in last.items():
        found = summary(values(runs, name))
        cells = [name, f"{number(found.median)} {figure.unit}"]
        if several:
            cells.append(f"{number(found.lowest)} to {number(found.highest)}")
        if compared:
            beside = ratios(runs, figure)
            cells.append(ratio(summary(beside), several) if beside else "")
        for detail in details:
            costs = [
                each.details[detail]
                for run in runs
                for each in run
                if each.name == name and detail in each.details
            ]
            cells.append(number(summary(costs).median) if costs else "")
        yield row(cells)


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def ratio(found: Summary, several: bool) -> str:
    median, lowest, highest = (f"{value:.2f}" if value >= 0.1 else f"{value:.1g}" for value in found)
    return f"{median} ({lowest} to {highest})" if several else median


def number(value: float) -> str:
    """Three digits that count, or all that stand before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
