"""A few pages over HTTP, for programs that ask how a worker host is: probes, and Prometheus."""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

CLIENTS = 8  # that are served at a time
CLIENT_TIMEOUT = 5.0  # seconds until they are hung up on


class Unavailable(Exception):
    """Nobody can be told about the host in the way that was asked for. The message says why."""


class Answer(NamedTuple):
    body: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


Page = Callable[[str], Answer]
"""What is answered to a request with this Accept header. It is called in a thread of its own."""


class Endpoint:
    """Serves pages, each at its path, until it is closed. Raises Unavailable where nothing can listen."""

    def __init__(self, address: tuple[str, int], pages: Mapping[str, Page]) -> None:
        try:
            self._server = _Server(address, pages)
        except OSError as error:
            where = f"{address[0] or '*'}:{address[1]}"
            raise Unavailable(f"Nothing can listen on {where}: {error.strerror}.") from error
        threading.Thread(target=self._server.serve_forever, name="pgjobs-endpoint", daemon=True).start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Serves a few clients at a time, each for a few seconds: nobody may use up this process's threads."""

    daemon_threads = True
    allow_reuse_port = False

    def __init__(self, address: tuple[str, int], pages: Mapping[str, Page]) -> None:
        self.pages = pages
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
        path = self.path.partition("?")[0]
        page = self.server.pages.get(path)
        if page is None:
            self.send_error(404, f"Ask for {' or '.join(self.server.pages)}.")
            return
        try:
            answer = page(self.headers.get("Accept", ""))
        except Exception:
            logger.exception("%s could not be answered.", path)
            answer = Answer(b"The worker's log has the reason.\n", status=500)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(answer.body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Questions are not news."""
