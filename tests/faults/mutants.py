"""Plants bugs, and sees whether the harnesses find them.

    python -m tests.faults.mutants [NAME ...] [--jobs N]

Each bug of `planted` goes into a copy of the working tree, in which the tests that claim its kind are run.
These must have passed in a copy without it. The exit status is 0 if all were found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

from tests.faults.planted import MUTANTS, Misplaced, Mutant
from tests.workers import descendants

ROOT = Path(__file__).parents[2]
PACKAGE = "django_pgjobs"
TESTS = "tests/faults"

LONGEST = 600.0  # seconds, of a run; the deadlines of the harnesses themselves are shorter
TO_CLEAN_UP = 30.0

# Mistakes of a planted text itself: whoever makes them finds them, so they say nothing about a harness.
MISTAKES = re.compile(
    r"(?:psycopg\.errors\.(?:SyntaxError|Undefined\w+|AmbiguousColumn|IndeterminateDatatype|DatatypeMismatch)"
    r"|^E? *(?:NameError|ImportError|ModuleNotFoundError|IndentationError)): .*",
    re.MULTILINE,
)

FOUND, NOT_FOUND, BROKEN, SKIPPED = "found", "NOT FOUND", "broken", "skipped"


class Run(NamedTuple):
    """What came of running a selection of tests."""

    passed: bool
    failed: bool
    output: str
    seconds: float

    @property
    def skipped(self) -> bool:
        return self.passed and not re.search(r"\d+ passed", self.output)

    @property
    def reason(self) -> str:
        """What the first failure said, or else the end of the output."""
        lines = [line for line in self.output.splitlines() if line.strip()] or ["no output"]
        told = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
        return (told or lines[-1:])[0].replace(f"{TESTS}/", "")[:200]


class Result(NamedTuple):
    name: str
    how: str
    seconds: float
    why: str

    def __str__(self) -> str:
        return f"{self.how:9}  {self.seconds:5.0f} s  {self.name}: {self.why}"


# ── Copies of the working tree ────────────────────────────────────────────────────────────────────────────


def copy_tree(target: Path) -> None:
    """Copy the files of the working tree that Git knows or would add, as they are now."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def plant(mutant: Mutant, tree: Path) -> None:
    """Change the package in a copy. Raises Misplaced or SyntaxError."""
    for change in mutant.changes:
        change.apply(tree / PACKAGE)
    for file in {change.file for change in mutant.changes}:
        compile((tree / PACKAGE / file).read_text(), file, "exec")


# ── Running tests in a copy ───────────────────────────────────────────────────────────────────────────────


def environment(tree: Path) -> dict[str, str]:
    """Without the choices of a test run that we may be part of; with a database of the copy's own."""
    own = {"COLUMNS": "400"}  # for the reasons of failures
    own |= {name: value for name, value in os.environ.items() if not name.startswith(("PGJOBS_", "PYTEST_"))}
    if wish := os.environ.get("PGJOBS_TEST_DB"):
        own["PGJOBS_TEST_DB"] = wish
    if url := own.get("DATABASE_URL"):
        parts = urlsplit(url)
        own["DATABASE_URL"] = urlunsplit(parts._replace(path=f"{parts.path}_{tree.name}"))
    return own


def run_tests(selection: str, tree: Path) -> Run:
    """Run tests in a copy, until the first one fails."""
    command = [sys.executable, "-m", "pytest", f"{TESTS}/{selection}", "-q", "-x", "-rfEs", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist"]
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=tree, env=environment(tree), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        output = f"{end(process)}\nIt had to be ended after {LONGEST:g} s."
        return Run(False, False, output, time.monotonic() - began)
    status = process.returncode
    return Run(status == 0, status == 1, output, time.monotonic() - began)


def end(process: subprocess.Popen[str]) -> str:
    """End a test run, if possible in a way that lets it clean up. Returns its output."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=TO_CLEAN_UP)[0]
    except subprocess.TimeoutExpired:
        for pid in [process.pid, *descendants(process.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return process.communicate()[0]


# ── Verdicts ──────────────────────────────────────────────────────────────────────────────────────────────


class Workshop:
    """A directory with the sound tree, and room for copies with a bug in it."""

    def __init__(self, directory: Path, case: str = "") -> None:
        self.directory = directory
        self.case = case  # of parametrized tests, to run no other
        self.sound = directory / "sound"
        copy_tree(self.sound)

    def try_all(self, names: Iterable[str], jobs: int) -> list[Result]:
        """Try bugs, in so many selections of tests at a time, and tell of each as soon as it is tried."""
        by_finder: dict[str, list[str]] = {}
        for name in names:
            by_finder.setdefault(MUTANTS[name].finder, []).append(name)
        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(self._try_some, *item) for item in by_finder.items()]
        return [result for future in futures for result in future.result()]

    def _try_some(self, finder: str, names: list[str]) -> list[Result]:
        """Try the bugs that one selection of tests has to find, once it has passed without any."""
        run = run_tests(finder + self.case, self._copy(names[0], "sound"))
        results = []
        for name in names:
            if run.skipped:
                result = Result(name, SKIPPED, run.seconds, run.reason)
            elif not run.passed:
                result = Result(name, BROKEN, run.seconds, f"It fails without the bug: {run.reason}")
            else:
                result = self._try(name)
            print(result, flush=True)
            results.append(result)
        return results

    def _try(self, name: str) -> Result:
        mutant = MUTANTS[name]
        tree = self._copy(name, "mutant")
        try:
            plant(mutant, tree)
        except (Misplaced, SyntaxError) as error:
            return Result(name, BROKEN, 0.0, str(error))
        run = run_tests(mutant.finder + self.case, tree)
        if run.passed or "It had to be ended" in run.output:
            return Result(name, NOT_FOUND, run.seconds, run.reason)
        if mistake := MISTAKES.search(run.output):
            return Result(name, BROKEN, run.seconds, mistake.group())
        return Result(name, FOUND if run.failed else BROKEN, run.seconds, run.reason)

    def _copy(self, name: str, kind: str) -> Path:
        tree = self.directory / f"{kind}_{list(MUTANTS).index(name)}"
        shutil.copytree(self.sound, tree)
        return tree


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a planted bug; all, if none is given")
    parser.add_argument("--jobs", type=int, default=1, help="test runs at a time (default: 1)")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - MUTANTS.keys():
        parser.error(f"There is no bug named {' or '.join(sorted(unknown))}.")
    with tempfile.TemporaryDirectory(prefix="pgjobs-mutants-") as directory:
        results = Workshop(Path(directory)).try_all(options.names or MUTANTS, options.jobs)
    counts = {how: sum(result.how == how for result in results) for how in (FOUND, SKIPPED)}
    skipped = f", {counts[SKIPPED]} skipped" if counts[SKIPPED] else ""
    print(f"found {counts[FOUND]} of {len(results)}{skipped}")
    return 0 if counts[FOUND] + counts[SKIPPED] == len(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
