"""The plug-in for pytest, in projects of its own. Here it is named with -p, since it may not be installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.test_docs import DOCS, blocks

ROOT = Path(__file__).parent.parent


LOCAL = {"CI": "", "BUILD_NUMBER": ""}  # else pytest says more


def run_pytest(folder: Path, text: str, *options: str, **environment: str) -> tuple[str, int]:
    """Run a file of tests by itself. Returns the output and the exit status."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-W", "error", "-m", "pytest", "-p", "pytest_pgjobs", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options, str(folder)],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environment} | LOCAL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr, done.returncode


def test_the_examples_of_the_guide_pass(tmp_path: Path, child_environment: dict[str, str]) -> None:
    (example,) = [
        block for block in blocks(DOCS / "how-to" / "test-jobs.md", "python") if "(pgjobs)" in block.text
    ]
    output, status = run_pytest(tmp_path, example.text, **child_environment | {"PYTHONPATH": str(ROOT)})
    assert status == 0, output
    assert f"{example.text.count('def test_')} passed" in output


# What a plug-in must not do to the projects of others that share an environment with it.
ELSEWHERE = """\
import sys

def test_nothing_is_imported_and_nothing_configured():
    assert "pytest_pgjobs" in sys.modules
    assert not {"django_pgjobs", "django", "psycopg", "asgiref"} & set(sys.modules)
"""


@pytest.mark.parametrize("options", [["-p", "no:django"], []], ids=["without pytest-django", "beside it"])
def test_a_project_without_django_does_not_notice_it(tmp_path: Path, options: list[str]) -> None:
    text = ELSEWHERE if options else "def test_nothing(): pass"
    output, status = run_pytest(tmp_path, text, *options)
    assert status == 0, output


WITHOUT_PYTEST_DJANGO = """\
import django

django.setup()

def test_the_fixture_is_the_module(pgjobs):
    from django_pgjobs import testing

    assert pgjobs is testing
"""


def test_it_works_without_pytest_django(tmp_path: Path) -> None:
    output, status = run_pytest(
        tmp_path,
        WITHOUT_PYTEST_DJANGO,
        "-p",
        "no:django",
        **os.environ | {"PYTHONPATH": str(ROOT), "DJANGO_SETTINGS_MODULE": "tests.settings"},
    )
    assert status == 0, output


FAILING = """\
from django.test import TestCase

from django_pgjobs import job
from django_pgjobs.testing import JobsTestMixin

@job(name="tests.fails")
def fails(number):
    raise ValueError("no good")

def test_drain(pgjobs):
    fails.enqueue(1)
    pgjobs.drain().check()

def test_asserting(pgjobs):
    fails.enqueue(1)
    pgjobs.assert_enqueued(fails, [2])

def test_running(pgjobs):
    pgjobs.run_job(fails.enqueue(1))

def test_capturing(pgjobs):
    with pgjobs.captured_jobs(execute=True):
        fails.enqueue(1)

class FailingTest(JobsTestMixin, TestCase):
    def test_draining(self):
        fails.enqueue(1)
        self.drainJobs().check()
"""


def test_failures_are_shown_where_the_test_asked(tmp_path: Path, child_environment: dict[str, str]) -> None:
    output, status = run_pytest(tmp_path, FAILING, **child_environment | {"PYTHONPATH": str(ROOT)})
    assert status == 1
    assert "5 failed" in output
    assert "django_pgjobs/testing.py:" not in output
    assert "E           args[0] is 1, not 2" in output
    assert output.count("tests.fails(1) raised ValueError: no good") == 3


def test_a_failure_of_unittest_is_shown_where_the_test_asked(child_environment: dict[str, str]) -> None:
    """Its runner shows whole tracebacks, less the frames of modules that ask for it."""
    import unittest

    from django_pgjobs import testing

    class Failing(unittest.TestCase):
        def test_it(self) -> None:
            testing.Drained([_Failed()]).check()  # type: ignore[list-item]

    class _Failed:
        problem = "it failed"

    result = unittest.TestResult()
    Failing("test_it").run(result)
    ((_, text),) = result.failures
    assert "testing.py" not in text
    assert text.endswith("AssertionError: 1 of 1 run failed.\n\nit failed\n")


def test_the_entry_point_leads_to_it() -> None:
    """Its name is that of the module, so that -p and the entry point are the same plug-in."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"pytest11": {"pytest_pgjobs": "pytest_pgjobs"}}
    assert (ROOT / "pytest_pgjobs.py").exists()
