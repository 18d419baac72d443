"""The demo as a person runs it, but for the installation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest
from django.db import connections
from psycopg import sql

from example_project.backstage.processes import processes
from tests.database import choose

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.processes

DEMO = Path(__file__).resolve().parent.parent / "example_project" / "demo.py"


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Let the demo start a server of its own; where the tests were given one, give it a database there."""
    clean = {key: value for key, value in os.environ.items() if key != "DATABASE_URL"}
    clean["TMPDIR"] = str(tmp_path)
    if choose().way == "embedded":
        yield clean
        return
    name = f"demo_{uuid4().hex}"
    parameters = connections["default"].get_connection_params() | {"dbname": "postgres"}
    with psycopg.connect(**parameters, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        yield clean | {"DATABASE_URL": urlsplit(choose().url)._replace(path=f"/{name}").geturl()}
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@contextmanager
def running_demo(environment: dict[str, str], directory: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-u", DEMO, "--once"],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        try:
            yield demo
        finally:
            demo.kill()


def belonging_to(demo: int) -> set[tuple[int, str]]:
    """Return pid and command line of all that the demo has started, directly or not, and of itself."""
    everybody = processes()
    family = {demo} | {each.pid for each in everybody if re.search(rf"/demo-{demo}\b", each.command)}
    while children := {each.pid for each in everybody if each.parent in family} - family:
        family |= children
    return {(each.pid, each.command) for each in everybody if each.pid in family}


def test_the_demo_shows_that_every_job_arrives(environment, tmp_path):
    with running_demo(environment, tmp_path) as demo:
        output = demo.communicate(timeout=300)[0]

    assert demo.returncode == 0, output
    checks = [line for line in output.splitlines() if line.startswith("  ok ")]
    assert "FAIL" not in output
    for text in (
        "40 mails for 40 orders were received",
        "2 orders were refused by the database, and left no job behind",
        "flaky is completed after 3 attempts",
        "always_fails is failed after 3 attempts: a dead letter",
        "the admin lists it among the dead letters",
        "kill_itself is completed, and 1 executor died of it",
        "rows of the time zone table were imported",
        "0 jobs are left in the queue",
        "exit status 0",
    ):
        assert any(text in check for check in checks), output
    assert re.search(r"^send_receipt +40 +40 +\d+ +0 ", output, re.MULTILINE), output
    assert not list(tmp_path.iterdir())


def test_nothing_outlives_a_demo_that_is_killed(environment, tmp_path):
    with running_demo(environment, tmp_path) as demo:
        said = ""
        for line in demo.stdout:
            said += line
            if line.startswith("3. "):
                break
        family = belonging_to(demo.pid)
    started = " ".join(command for _, command in family)
    for name in ("mailbox.py", "runjobs", "runserver"):
        assert name in started, said

    deadline = time.monotonic() + 60
    while left := family & {(each.pid, each.command) for each in processes()}:
        assert time.monotonic() < deadline, f"These still run: {sorted(left)}"
        time.sleep(0.05)
