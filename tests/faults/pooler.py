"""A PgBouncer in front of a server of a test's own."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess

import psycopg
import pytest

from example_project import embedded_postgres
from tests.faults.servers import Cluster
from tests.workers import until

SETTINGS = """
[databases]
* = host={host} port=5432

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {users}
pool_mode = {mode}
default_pool_size = {size}
ignore_startup_parameters = extra_float_digits,options
server_reset_query_always = 0
"""

# It ends with the test, because its standard input does.
UNTIL_CLOSED = '"$0" "$1" & read -r line; kill $!; wait'


class Pooler:
    """It shares `size` connections to each database among all clients."""

    def __init__(self, cluster: Cluster, size: int, mode: str = "transaction") -> None:
        program = find()
        self.size = size
        self.port = free_port()
        directory = cluster.home / f"pooler-{self.port}"
        directory.mkdir(mode=0o700)
        users, settings, self.log = (directory / name for name in ("users", "settings", "log"))
        users.write_text('"postgres" ""\n')
        settings.write_text(
            SETTINGS.format(host=cluster.pg, port=self.port, users=users, mode=mode, size=size)
        )
        for path in (directory, users, settings):
            embedded_postgres.give_to_server(path)
        user = embedded_postgres.server_user()
        with self.log.open("wb") as stream:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", UNTIL_CLOSED, program, settings],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                cwd="/",
                user=user and user.pw_uid,
                group=user and user.pw_gid,
                extra_groups=user and [],
            )
        until(self._answers, what="the pooler")

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        try:
            self.session("postgres").close()
        except psycopg.OperationalError:
            return False
        return True

    def session(self, database: str) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user="postgres", dbname=database,
            autocommit=True, prepare_threshold=None,
        )  # fmt: skip

    def close(self) -> None:
        self._process.communicate()  # which closes its standard input


def find() -> str:
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip("There is no PgBouncer on this machine.")
    return program


def version() -> tuple[int, int]:
    told = subprocess.run([find(), "--version"], capture_output=True, text=True, check=True).stdout
    major, minor = re.findall(r"\d+", told)[:2]
    return int(major), int(minor)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
