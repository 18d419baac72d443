"""Whether a worker host is alive and ready, for whoever asks: by a file, or over HTTP.

The loop says at each of its turns that it goes on, and what keeps it from working, if anything does. It is
alive while it has said so lately; that has nothing to do with the database, since starting again would not
bring it back. All processes of a host share the clock that this goes by.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from .channel import NEVER, clock

logger = logging.getLogger(__name__)

BEAT_INTERVAL = 5.0  # seconds between two signs of life at most
SILENT_FOR = 30.0  # seconds without one after which a host is not alive
CLIENTS = 8  # that are served at a time
CLIENT_TIMEOUT = 5.0  # seconds until they are hung up on


class Unavailable(Exception):
    """Nobody can be told about the host's health in the way that was asked for. The message says why."""


class Beat(NamedTuple):
    """A sign of life. `why_not` says why the host is not ready; it is empty when it is."""

    pid: int
    at: float
    why_not: str = ""

    def why_not_alive(self) -> str:
        silent = clock() - self.at
        if 0 <= silent <= SILENT_FOR:  # a time to come is of a clock before this machine was started
            return ""
        return f"Worker {self.pid} has given no sign of life for {abs(silent):.0f} s."

    def why_not_ready(self) -> str:
        return self.why_not_alive() or self.why_not


class Health:
    """Tells of the loop's beats. Raises Unavailable where it cannot."""

    def __init__(self, path: Path | None = None, address: tuple[str, int] | None = None) -> None:
        self.last_beat = Beat(os.getpid(), clock(), "The worker is starting.")
        self._path = path
        self._complained = False
        self._server: ThreadingHTTPServer | None = None
        if path is not None:
            try:
                self._write()
            except OSError as error:
                raise Unavailable(f"The health file {path} cannot be written: {error.strerror}.") from error
        if address is not None:
            try:
                self._server = _Server(address, self)
            except OSError as error:
                where = f"{address[0] or '*'}:{address[1]}"
                raise Unavailable(f"Nothing can listen on {where}: {error.strerror}.") from error
            threading.Thread(target=self._server.serve_forever, name="pgjobs-health", daemon=True).start()
            logger.info("Health is told at port %s, /livez and /readyz.", self._server.server_port)

    def beat(self, why_not: str) -> None:
        """Say that the loop goes on, and why it is of no use just now; nothing, if it is."""
        before, self.last_beat = self.last_beat, Beat(self.last_beat.pid, clock(), why_not)
        if self._path is None:
            return
        if before.why_not == why_not and int(before.at) == int(self.last_beat.at):
            return  # once a second is enough
        try:
            self._write()
            self._complained = False
        except OSError as error:
            if not self._complained:
                logger.error("The health file %s cannot be written: %s.", self._path, error.strerror)
            self._complained = True

    @property
    def next_deadline(self) -> float:
        """When the next beat is due."""
        return NEVER if self._path is None and self._server is None else self.last_beat.at + BEAT_INTERVAL

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        try:
            if self._path is not None and read(self._path).pid == os.getpid():  # and not our successor's
                self._path.unlink()
        except (OSError, Unavailable) as error:
            logger.warning("The health file %s is left as it is: %s", self._path, error)

    def _write(self) -> None:
        assert self._path is not None
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            new.write_text(json.dumps(self.last_beat._asdict()))
            new.replace(self._path)  # so that nobody reads half of it
        finally:
            new.unlink(missing_ok=True)


def read(path: Path) -> Beat:
    """The last beat that was written to a file. Raises Unavailable when there is none."""
    try:
        match json.loads(path.read_text()):
            case {"pid": int(pid), "at": float(at), "why_not": str(why_not)}:
                return Beat(pid, at, why_not)
        raise ValueError
    except OSError as error:
        raise Unavailable(f"The health file {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise Unavailable(f"{path} is not the health file of a worker.") from error


class _Server(ThreadingHTTPServer):
    """Serves a few clients at a time, each for a few seconds: nobody may use up this process's threads."""

    daemon_threads = True
    allow_reuse_port = False

    def __init__(self, address: tuple[str, int], health: Health) -> None:
        self.health = health
        self._free = threading.BoundedSemaphore(CLIENTS)
        host, port = address
        if not host and socket.has_dualstack_ipv6():
            self.address_family, where = socket.AF_INET6, ("::", port)
        else:
            flags = socket.AI_PASSIVE
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
            self.address_family, where = found[0][0], found[0][4]  # type: ignore[assignment]
        super().__init__(where, _Handler)

    def server_bind(self) -> None:
        if self.server_address[0] == "::":
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)  # without asking for our name, which may take its time
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.1)  # out of descriptors; without a pause we would try without end
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        too_slow = threading.Timer(CLIENT_TIMEOUT, _hang_up, [request])
        too_slow.daemon = True
        try:
            too_slow.start()
            super().process_request_thread(request, client_address)
        finally:
            too_slow.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are not news."""


def _hang_up(request: socket.socket) -> None:
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended just now


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        beat = self.server.health.last_beat
        match self.path.partition("?")[0]:
            case "/livez":
                self._answer(beat.why_not_alive())
            case "/readyz":
                self._answer(beat.why_not_ready())
            case _:
                self.send_error(404, "Ask for /livez or /readyz.")

    do_HEAD = do_GET

    def _answer(self, why_not: str) -> None:
        body = f"{why_not or 'ok'}\n".encode()
        self.send_response(503 if why_not else 200)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Probes are not news."""
