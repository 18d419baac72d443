"""Sessions of the tests' own, for what takes two of them or must not be the one that Django uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from django.db import connections

from django_pgjobs import sql


@contextmanager
def session(alias: str = "default", **overrides: Any) -> Iterator[psycopg.Connection[Any]]:
    """A session on the test database, in autocommit mode."""
    parameters = connections[alias].get_connection_params()
    for ours in ("context", "cursor_factory"):
        parameters.pop(ours, None)
    with psycopg.connect(**(parameters | overrides), autocommit=True) as connection:
        yield connection


@contextmanager
def work(connection: psycopg.Connection[Any]) -> Iterator[psycopg.Cursor[Any]]:
    """A transaction as a worker host begins it."""
    with connection.cursor() as cursor:
        cursor.execute(sql.BEGIN.format(statement=60_000, lock=60_000, idle=60_000), prepare=False)
        try:
            yield cursor
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
