"""Plots of what has been measured, as SVG: bars with their spread, and lines over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from .measure import Figure, Summary, summary
from .report import Results, number, values

WIDTH, MARGIN = 760, 16
ROW = 24  # the height of a bar and its distance to the next one
NAMES = 320  # the width of what stands before the bars
HEIGHT = 260  # of lines
OURS, OTHERS, SPREAD = "#1f6f8b", "#b8c4cc", "#333333"
LINES = ("#1f6f8b", "#d1495b", "#edae49", "#66a182")


def write(results: Results, directory: Path) -> None:
    """Write a plot of each scenario, and one of what it has seen over time, if it has."""
    directory.mkdir(parents=True, exist_ok=True)
    for scenario in results.scenarios:
        runs = results.runs(scenario)
        last = {figure.name: figure for run in runs for figure in run}
        bars = {name: (summary(values(runs, name)), figure.unit) for name, figure in last.items()}
        title = results.title(scenario)
        (directory / f"{scenario}.svg").write_text(bar_chart(title, bars))
        lines = [figure for figure in last.values() if figure.series]
        if lines:
            (directory / f"{scenario}-over-time.svg").write_text(line_charts(title, lines))


def bar_chart(title: str, bars: dict[str, tuple[Summary, str]]) -> str:
    """A bar for the median of each figure, and a thin line from the lowest to the highest run.

    Each unit has a scale of its own, which begins at zero.
    """
    parts, y = [heading(title)], MARGIN + 2 * ROW
    for unit in dict.fromkeys(unit for _, unit in bars.values()):
        rows = {name: found for name, (found, its_unit) in bars.items() if its_unit == unit}
        largest = max(found.highest for found in rows.values()) or 1
        scale = (WIDTH - NAMES - 2 * MARGIN - 120) / largest
        for name, found in rows.items():
            parts += bar(name, found, unit, y, scale)
            y += ROW
        y += ROW // 2
    return document(y, parts)


def bar(name: str, found: Summary, unit: str, y: int, scale: float) -> Iterator[str]:
    x = MARGIN + NAMES
    length, low, high = (max(value * scale, 0) for value in found)
    colour = OURS if "ours" in name else OTHERS
    yield text(x - 8, y + 12, name, "end")
    yield f'<rect x="{x}" y="{y}" width="{length:.1f}" height="{ROW - 8}" fill="{colour}"/>'
    yield f'<path d="M{x + low:.1f} {y + 8} H{x + high:.1f}" stroke="{SPREAD}"/>'
    yield text(x + max(length, high) + 6, y + 12, f"{number(found.median)} {unit}")


def line_charts(title: str, figures: Sequence[Figure]) -> str:
    """The series of each unit in a frame of its own, above each other."""
    parts, y = [heading(title)], MARGIN + 2 * ROW
    series = [
        (figure.name.removesuffix(", first tenth").removesuffix(", at the end"), unit, figure)
        for figure in figures
        for unit in figure.series
        if unit != "seconds"
    ]
    for unit in dict.fromkeys(unit for _, unit, _ in series):
        lines = {
            name: (figure.series["seconds"], figure.series[unit])
            for name, its_unit, figure in series
            if its_unit == unit
        }
        parts += line_chart(unit, lines, y)
        y += HEIGHT + 3 * ROW
    return document(y, parts)


def line_chart(unit: str, lines: dict[str, tuple[list[float], list[float]]], y: int) -> Iterator[str]:
    left, right, bottom = MARGIN + 70, WIDTH - MARGIN, y + HEIGHT
    latest = max(seconds[-1] for seconds, _ in lines.values())
    largest = max(max(heights) for _, heights in lines.values()) or 1
    yield f'<path d="M{left} {y} V{bottom} H{right}" fill="none" stroke="{SPREAD}"/>'
    for share in (0, 0.5, 1):
        yield text(left - 6, bottom - share * HEIGHT + 4, number(largest * share), "end")
        yield text(left + share * (right - left), bottom + 16, f"{latest * share:.0f} s", "middle")
    for (name, (seconds, heights)), colour, place in zip(lines.items(), LINES, range(9), strict=False):
        points = " ".join(
            f"{left + at / latest * (right - left):.1f},{bottom - height / largest * HEIGHT:.1f}"
            for at, height in zip(seconds, heights, strict=True)
        )
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        yield text(
            left + 10, y + 12 + place * 16, name if name.endswith(unit) else f"{name}, {unit}", colour=colour
        )


def heading(title: str) -> str:
    return text(MARGIN, MARGIN + 12, title, weight="bold")


def text(
    x: float, y: float, content: str, anchor: str = "start", *, colour: str = SPREAD, weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}">'
        f"{escape(content)}</text>"
    )


def document(height: int, parts: Sequence[str]) -> str:
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([begin, background, *parts, "</svg>"]) + "\n"
