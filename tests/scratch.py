"""Databases of a test's own, for what must not happen to the one that all tests share."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from django.db import connections
from psycopg.sql import SQL, Identifier

from example_project.embedded_postgres import Server
from tests.database import INHERITED, embedded_choice
from tests.sessions import session


@dataclass
class Scratch:
    """A database, and the environment in which a child process has it as `default`."""

    name: str
    server: Server | None = None  # where it is not that of all tests
    environment: dict[str, str] = field(default_factory=dict)

    def session(self, **overrides: Any) -> Any:
        return session_on(self.server, dbname=self.name, **overrides)

    def python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=os.environ
            | {"DJANGO_SETTINGS_MODULE": "tests.settings", "PGJOBS_TEST_DATABASE_NAME": self.name}
            | ({} if self.server is None else {INHERITED: "\n".join(embedded_choice(self.server))})
            | self.environment
            | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def manage(self, *arguments: str, **environment: str) -> str:
        """Run a management command, and return what it wrote. It has to succeed."""
        done = self.python("-m", "django", *arguments, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, code: str, **environment: str) -> str:
        """Run code in a process in which Django is set up, and return what it printed."""
        done = self.python("-c", f"import django; django.setup()\n{code}", **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def copy(self) -> Iterator[Scratch]:
        with scratch_database(self.name, self.server) as copied:
            yield copied


@contextmanager
def scratch_database(template: str = "template0", server: Server | None = None) -> Iterator[Scratch]:
    """A new database that lives as long as the context."""
    scratch = Scratch(f"{connections['default'].settings_dict['NAME']}_{uuid.uuid4().hex[:8]}", server)
    with session_on(server, dbname="postgres") as connection:
        connection.execute(
            SQL("CREATE DATABASE {} TEMPLATE {}").format(Identifier(scratch.name), Identifier(template))
        )
    try:
        yield scratch
    finally:
        with session_on(server, dbname="postgres") as connection:
            connection.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(scratch.name)))


def session_on(server: Server | None, **overrides: Any) -> Any:
    return session(**({} if server is None else {"host": str(server.directory)}), **overrides)
