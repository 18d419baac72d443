"""Type checkers know the signatures of job functions. Needs the tools of the extra [lint]."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TYPING = Path("tests/typing")
# Each of these marks a line of wrong.py as an error. An unneeded one is an error, too, with both tools.
MARK = "  # type: ignore["

HOVER = """\
from tests.typing.right import collect, send

reveal_type(send)
reveal_type(send.__call__)
reveal_type(send.enqueue)
reveal_type(send.using(queue="mail").enqueue)
reveal_type(send.aenqueue)
reveal_type(collect.enqueue)
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def mypy():
    for module in ("mypy", "mypy_django_plugin"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed; it comes with the extra [lint]")

    def check(*paths: str) -> subprocess.CompletedProcess[str]:
        return run("mypy", "--no-pretty", *paths)

    return check


@pytest.fixture(scope="module")
def pyright():
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed; it comes with the extra [lint]")
    started = run("pyright", "--version")  # the package fetches the program when it is first used
    if started.returncode:
        pytest.skip(f"pyright is installed and cannot be started: {started.stderr.strip()[-300:]}")

    def check(*paths: str) -> subprocess.CompletedProcess[str]:
        return run("pyright", "--pythonpath", sys.executable, *paths)

    return check


@pytest.fixture
def unmarked(tmp_path):
    """A copy of wrong.py without the marks."""
    path = tmp_path / "unmarked.py"
    path.write_text(re.sub(rf"{re.escape(MARK)}.*\]", "", (ROOT / TYPING / "wrong.py").read_text()))
    return str(path)


@pytest.fixture
def hover(tmp_path):
    path = tmp_path / "hover.py"
    path.write_text(HOVER)
    return str(path)


def marked_lines() -> set[int]:
    lines = (ROOT / TYPING / "wrong.py").read_text().splitlines()
    return {number for number, line in enumerate(lines, start=1) if MARK in line}


def test_mypy_accepts_what_is_right_and_no_mistake(mypy):
    checked = mypy(str(TYPING / "right.py"), str(TYPING / "wrong.py"))

    assert "tests/typing" not in checked.stdout, checked.stdout
    assert checked.stderr == ""


def test_pyright_accepts_what_is_right_and_no_mistake(pyright):
    checked = pyright(str(TYPING / "right.py"), str(TYPING / "wrong.py"))

    assert checked.stdout.strip().endswith("0 errors, 0 warnings, 0 informations"), checked.stdout
    assert checked.returncode == 0


def test_without_the_marks_mypy_complains_about_each_mistake(mypy, unmarked):
    errors = re.findall(r"unmarked\.py:(\d+): error: ", mypy(unmarked).stdout)

    assert {int(line) for line in errors} == marked_lines()


def test_without_the_marks_pyright_complains_about_each_mistake(pyright, unmarked):
    errors = re.findall(r"unmarked\.py:(\d+):\d+ - error: ", pyright(unmarked).stdout)

    assert {int(line) for line in errors} == marked_lines()


def test_mypy_shows_the_signature(mypy, hover):
    shown = re.findall(r'Revealed type is "(.*)"$', mypy(hover).stdout, re.M)

    assert [text.replace("builtins.", "").replace("?", "") for text in shown] == [
        "django_pgjobs.jobs.JobFunction[[order: int, *, subject: str =], str]",
        "def (order: int, *, subject: str =) -> str",
        "def (order: int, *, subject: str =) -> django_pgjobs.models.BackgroundJob",
        "def (order: int, *, subject: str =) -> django_pgjobs.models.BackgroundJob",
        (
            "def (order: int, *, subject: str =) ->"
            " typing.Coroutine[Any, Any, django_pgjobs.models.BackgroundJob]"
        ),
        "def (*amounts: float) -> django_pgjobs.models.BackgroundJob",
    ]


def test_pyright_shows_the_signature(pyright, hover):
    shown = re.findall(r'information: Type of ".*" is "(.*)"$', pyright(hover).stdout, re.M)

    assert shown == [
        'JobFunction[(order: int, *, subject: str = ""), str]',
        '(order: int, *, subject: str = "") -> str',
        '(order: int, *, subject: str = "") -> BackgroundJob',
        '(order: int, *, subject: str = "") -> BackgroundJob',
        '(order: int, *, subject: str = "") -> Coroutine[Any, Any, BackgroundJob]',
        "(*amounts: float) -> BackgroundJob",
    ]
