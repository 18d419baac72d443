"""Postgres servers of a test's own, that may be stopped, broken, replicated and promoted.

They are made, run and in the end removed by the means of the example project's embedded Postgres: whatever
happens to the test, no server outlives it. Clients come in by a Unix socket, in a directory that only we can
enter.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL, Identifier

from example_project import embedded_postgres
from example_project.embedded_postgres import locked
from tests.faults.checker import PREFIX
from tests.workers import until

MIGRATED = "migrated"  # the database that others are copied from

# A commit that was answered survives the server's processes; the machine does not go down in tests.
SETTINGS = {
    "synchronous_commit": "on",
    "fsync": "off",
    "max_connections": "60",
    "shared_buffers": "32MB",
    "max_wal_senders": "4",
    "wal_level": "replica",
    "autovacuum_naptime": "60s",
    "log_line_prefix": PREFIX,
}

_numbers = itertools.count()


class Cluster:
    """A Postgres server. It runs until it is stopped, or until this process ends."""

    def __init__(self, **settings: str) -> None:
        try:
            self.programs = embedded_postgres.find_programs()
        except RuntimeError as error:
            pytest.skip(str(error))
        base = embedded_postgres.private_base()
        self.home = base / f"faults-{os.getpid()}-{next(_numbers)}"
        self._users: int | None = embedded_postgres.join(self.home)
        self.pg = self.home / "pg"
        self.data = self.pg / "data"
        self.log = self.pg / "log"
        self._settings = SETTINGS | settings
        with locked(self.home / "start.lock"):
            embedded_postgres.ensure_keeper(self.home)
            with locked(self.home / "server.lock") as lock:
                assert lock is not None
                self._make(lock)
        self.programs = embedded_postgres.own_programs(self.pg) or self.programs

    def _make(self, lock: int) -> None:
        embedded_postgres.make_cluster(self.home, self.programs, False, lock)
        self.configure(**self._settings)

    def configure(self, **settings: str) -> None:
        """Add to the settings that hold from the next start. ALTER SYSTEM would go before them."""
        path = self.data / "postgresql.conf"
        own = {"listen_addresses": "", "unix_socket_directories": str(self.pg)}
        with path.open("a") as file:
            for name, value in (own | settings).items():
                file.write(f"{name} = '{value}'\n")

    # ── Running ───────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> Cluster:
        """Start the server, and return when it lets clients in."""
        with locked(self.home / "start.lock"), locked(self.home / "server.lock") as lock:
            assert lock is not None
            # Nobody else has the lock, so these were left by a dead server.
            (self.data / "postmaster.pid").unlink(missing_ok=True)
            (self.pg / ".s.PGSQL.5432.lock").unlink(missing_ok=True)
            started = self._run(lock, "pg_ctl", "start", "-D", self.data, "-l", self.log, "-w", "-t", "60")
        assert started.returncode == 0, started.stdout + self.log.read_text()[-2000:]
        return self

    def stop(self, mode: str = "immediate") -> None:
        """Stop the server: `immediate` is a crash, `fast` ends all sessions and writes everything down."""
        how = {"immediate": signal.SIGQUIT, "fast": signal.SIGINT}[mode]
        pid = self.postmaster
        os.kill(pid, how)
        self._until_gone()

    def kill(self) -> None:
        """End the postmaster by SIGKILL; its backends end when they notice."""
        os.kill(self.postmaster, signal.SIGKILL)
        self._until_gone()

    def restart(self, mode: str = "immediate") -> None:
        self.stop(mode)
        self.start()

    @property
    def postmaster(self) -> int:
        return int((self.data / "postmaster.pid").read_text().split()[0])

    @property
    def is_running(self) -> bool:
        """Whether any process of the server is left."""
        with locked(self.home / "server.lock", wait=False) as lock:
            return lock is None

    def _until_gone(self) -> None:
        until(lambda: not self.is_running, what="the server to end")

    def close(self) -> None:
        """End the server and delete it, as its keeper does too when this process ends."""
        if self._users is not None:
            fcntl.flock(self._users, fcntl.LOCK_UN)
            os.close(self._users)
            self._users = None

    def _run(self, lock: int, program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return embedded_postgres.run(self.programs / program, *arguments, pg=self.pg, lock=lock)

    # ── Speaking with it ──────────────────────────────────────────────────────────────────────────────────

    @property
    def socket(self) -> str:
        return str(self.pg / ".s.PGSQL.5432")

    def url(self, database: str) -> str:
        return f"postgres://postgres@/{database}?host={self.pg}&port=5432"

    def session(self, database: str = "postgres", **parameters: Any) -> psycopg.Connection[Any]:
        """A session of the test's own, in autocommit mode."""
        given = {"host": str(self.pg), "port": 5432, "user": "postgres", "dbname": database, **parameters}
        return psycopg.connect(**given, autocommit=True)

    def execute(self, statement: str, *parameters: Any, database: str = "postgres") -> list[Any]:
        with self.session(database) as session:
            cursor = session.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []

    @property
    def version(self) -> int:
        with self.session() as session:
            return session.info.server_version

    def alter_system(self, **settings: str) -> None:
        """Change settings of the running server that need no restart."""
        for name, value in settings.items():
            self.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        self.execute("SELECT pg_reload_conf()")
        for name, value in settings.items():
            until(lambda name=name, value=value: self._shows(name, value), what=f"{name} = {value}")

    def reset_system(self) -> None:
        self.execute("ALTER SYSTEM RESET ALL")
        self.execute("SELECT pg_reload_conf()")

    def _shows(self, name: str, value: str) -> bool:
        return self.execute(f"SHOW {name}") == [(value,)]

    def new_database(self, name: str, environment: Callable[[str], dict[str, str]]) -> str:
        """Make a database with the tables of the tests' project."""
        with self.session() as session:
            known = session.execute("SELECT FROM pg_database WHERE datname = %s", [MIGRATED]).fetchone()
            if known is None:
                session.execute(SQL("CREATE DATABASE {}").format(Identifier(MIGRATED)))
                migrate(environment(MIGRATED))
            names = Identifier(name), Identifier(MIGRATED)
            session.execute(SQL("CREATE DATABASE {} TEMPLATE {}").format(*names))
        return name

    # ── Replication ───────────────────────────────────────────────────────────────────────────────────────

    def standby(self) -> Standby:
        return Standby(self)

    def promote(self) -> None:
        assert self.execute("SELECT pg_promote(true, 60)") == [(True,)]


class Standby(Cluster):
    """A copy of a running server that follows it by streaming, under the name `standby`."""

    def __init__(self, primary: Cluster) -> None:
        self._primary = primary
        super().__init__()

    def _make(self, lock: int) -> None:
        partial = self.home / "pg.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        embedded_postgres.give_to_server(partial)
        programs = self._primary.programs
        source = ["-h", str(self._primary.pg), "-U", "postgres"]
        made = embedded_postgres.run(
            programs / "pg_basebackup", *source, "-D", partial / "data", "-c", "fast", "-X", "stream",
            pg=partial, lock=lock,
        )  # fmt: skip
        assert made.returncode == 0, made.stdout
        partial.rename(self.pg)
        self.programs = programs
        (self.data / "standby.signal").touch()
        embedded_postgres.give_to_server(self.data / "standby.signal")
        self.configure(
            primary_conninfo=f"host={self._primary.pg} user=postgres application_name=standby",
            synchronous_standby_names="",
        )


def environment_for(url: str, database: str, **more: str) -> dict[str, str]:
    """The environment in which a child process has a database of a server as `default`."""
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "PGJOBS_TEST_CHOICE": f"url\n{url}\na server of the test's own",
        "PGJOBS_TEST_DATABASE_NAME": database,
        "PGJOBS_TEST_OTHER_DATABASE_NAME": database,
        **more,
    }


def migrate(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
