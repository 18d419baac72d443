"""Reading the documents: their fenced blocks, tables and headings."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
HOW_TO = DOCS / "how-to"


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    instruction: str  # the comment just before it, if there is one
    before: str  # the paragraph before it
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, language: str | None = None) -> list[Block]:
    found = []
    paragraph, last, instruction = "", "", ""
    lines = iter(enumerate(page.read_text().splitlines(), start=1))
    for number, line in lines:
        if line.startswith("```"):
            text = itertools.takewhile(lambda numbered: numbered[1] != "```", lines)
            code = "".join(f"{line}\n" for _, line in text)
            found.append(Block(page, number, line[3:], instruction, paragraph or last, code))
            paragraph, instruction = "", ""
        elif comment := re.fullmatch(r"<!-- (.*) -->", line):
            instruction = comment[1]
        elif line:
            paragraph += f"{line}\n"
        elif paragraph:
            paragraph, last = "", paragraph
    return [block for block in found if language in (None, block.language)]


def section(page: Path, heading: str) -> str:
    """The text below a heading, up to the next one of any level."""
    text = page.read_text()
    start = re.search(rf"^#+ {re.escape(heading)}$", text, re.M)
    assert start, f"{page} has no heading {heading!r}"
    body = text[start.end() :]
    end = re.search(r"^#+ ", body, re.M)
    return body[: end.start()] if end else body


def tables(text: str) -> list[list[dict[str, str]]]:
    """Each table as rows by the names of its columns."""
    found: list[list[dict[str, str]]] = []
    names: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            names = []
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not names:
            names = cells
            found.append([])
        elif not all(re.fullmatch(":?-+:?", cell) for cell in cells):
            assert len(cells) == len(names), line
            found[-1].append(dict(zip(names, cells, strict=True)))
    return found


def table(page: Path, heading: str) -> list[dict[str, str]]:
    (only,) = tables(section(page, heading))
    return only


def code(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def anchors(page: Path) -> set[str]:
    """The fragments under which headings can be reached, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
