"""What the server wrote into its log meanwhile, in a form that `checker.check_log` can read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from tests.faults.checker import PREFIX
from tests.workers import until


class ServerLog:
    """The part of a log that has been written since this was made; nothing where there is no such file.

    With `database`, without what sessions of others met: tests that run at the same time have their own.
    """

    def __init__(self, path: Path | None, database: str = "") -> None:
        self.path = path
        self.database = database
        self._start = path.stat().st_size if path is not None else 0

    def text(self) -> str:
        if self.path is None:
            return ""
        with self.path.open("rb") as file:
            file.seek(self._start)
            text = file.read().decode(errors="replace")
        if not self.database:
            return text
        lines = text.splitlines(keepends=True)
        return "".join(line for line in lines if " db=" not in line or f" db={self.database} " in line)


@contextmanager
def followed(connection: psycopg.Connection[Any]) -> Iterator[ServerLog]:
    """Have each line of our embedded server's log begin with who met which error, and follow it.

    On a server whose settings are not ours to change, or whose files are elsewhere, there is nothing to read.
    """
    path = embedded_log(connection)
    if path is None:
        yield ServerLog(None)
        return
    set_prefix(connection)
    yield ServerLog(path, connection.info.dbname)


def embedded_log(connection: psycopg.Connection[Any]) -> Path | None:
    try:
        (directory,) = connection.execute("SHOW data_directory").fetchone() or ("",)
    except psycopg.errors.InsufficientPrivilege:
        return None
    path = Path(directory).parent / "log"
    return path if path.is_file() else None


def set_prefix(connection: psycopg.Connection[Any]) -> None:
    """Set log_line_prefix on the whole server, which is this run's own; and wait until it is in force."""
    if connection.execute("SHOW log_line_prefix").fetchone() != (PREFIX,):
        connection.execute(f"ALTER SYSTEM SET log_line_prefix = '{PREFIX}'")
        connection.execute("SELECT pg_reload_conf()")
        until(lambda: connection.execute("SHOW log_line_prefix").fetchone() == (PREFIX,), what="a new prefix")
