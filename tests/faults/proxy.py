"""A proxy between workers and a server, that can do what networks do.

It listens on a TCP port of loopback, and reaches the server by its Unix socket. A client's purpose is known
by the application name in its startup packet, so that a fault may be for listeners alone, say.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_PARAMETER = b"application_name\0"


class Link:
    """One client's connection, with one of its own to the server."""

    def __init__(self, writer: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = writer
        self.server = server
        self.name = ""  # the client's application name, once it has told it
        self.swallow_to_server = False
        self.swallow_to_client = False
        self.stays_silent = False  # to its client, for ever
        self.cut_at: int | None = None  # as a count of bytes to the server
        self.bytes_to_server = 0
        self.drops_answer_to_commit = False

    def reset(self) -> None:
        """Break both ends, as a network does: the client's with RST."""
        with suppress(OSError):
            linger = struct.pack("ii", 1, 0)
            self.client.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.client.transport.abort()
        self.server.transport.abort()


class Proxy:
    """Runs in a thread of its own. Its methods may be called from the test's."""

    def __init__(self, target: str) -> None:
        self.port = 0
        self.accepted = 0  # connections, refused ones included
        self.dropped_commits = 0
        self.held_answers = 0
        self._target = target
        self._delay = 0.0
        self._refuses = False
        self._holds_new = False  # accepts, and never answers
        self._cut_after: tuple[str, int] | None = None
        self._commits_to_drop: dict[str, int] = {}
        self._unanswered = b""
        self._links: set[Link] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._call(self._listen())

    # ── What the test asks for ────────────────────────────────────────────────────────────────────────────

    def switch(self, target: str) -> None:
        """Send new connections to another server; those that exist stay where they are."""
        self._target = target

    def pass_all(self) -> None:
        """New connections, and those that were not broken, work again."""
        self._refuses = self._holds_new = False
        self._delay = 0.0
        self._cut_after = None
        self._commits_to_drop = {}
        self._unanswered = b""
        for link in self._chosen(""):
            link.swallow_to_server = link.swallow_to_client = False

    def refuse(self) -> None:
        """Break every new connection at once."""
        self._refuses = True

    def hold_new(self) -> None:
        """Accept new connections, and never say a word."""
        self._holds_new = True

    def delay(self, seconds: float) -> None:
        """Keep every chunk back for so long, both ways."""
        self._delay = seconds

    def reset(self, purpose: str = "") -> int:
        """Break the connections of a purpose, or all. Returns how many there were."""
        return self._soon(lambda: [link.reset() for link in self._chosen(purpose)])

    def black_hole(self, purpose: str = "", *, to_server: bool = True, to_client: bool = True) -> int:
        """Let what comes vanish, and keep the connections open. Returns how many there were."""

        def swallow() -> list[None]:
            links = self._chosen(purpose)
            for link in links:
                link.swallow_to_server |= to_server
                link.swallow_to_client |= to_client
            return [None for _ in links]

        return self._soon(swallow)

    def cut_after(self, count: int, purpose: str = "") -> None:
        """Break each connection of a purpose once it has sent so many more bytes to the server."""

        def mark() -> list[None]:
            self._cut_after = purpose, count
            for link in self._chosen(purpose):
                link.cut_at = link.bytes_to_server + count
            return []

        self._soon(mark)

    def drop_answers_to_commit(self, purpose: str, count: int) -> None:
        """Let COMMIT through, and break the connection in place of its answer, so many times."""
        self._commits_to_drop[purpose] = count

    def hold_answers_to(self, words: str) -> None:
        """Keep a connection open and say nothing on it any more, once such a statement was sent on it."""
        self._unanswered = words.encode()

    def count(self, purpose: str = "") -> int:
        """How many connections of a purpose there are."""
        return self._soon(lambda: [None for _ in self._chosen(purpose)])

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            # Not cancelled: what reads from a connection that is broken ends by itself, and tidies up.
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for writer in list(self._writers):
                    writer.transport.abort()
                await asyncio.wait(tasks, timeout=0.1)
            await asyncio.sleep(0)  # for what transports have still to do

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def _soon(self, function: Callable[[], list[Any]]) -> int:
        async def call() -> int:
            return len(function())

        return self._call(call())

    def _chosen(self, purpose: str) -> list[Link]:
        return [link for link in self._links if purpose in link.name]

    # ── What it does ──────────────────────────────────────────────────────────────────────────────────────

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.add(writer)
        try:
            await self._connect(reader, writer)
        finally:
            await self._close(writer)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._holds_new:
            while self._holds_new and await reader.read(1 << 16):
                pass
            writer.transport.abort()
            return
        if self._refuses:
            writer.transport.abort()
            return
        try:
            from_server, to_server = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.transport.abort()  # the server is not there
            return
        self._writers.add(to_server)
        link = Link(writer, to_server)
        self._links.add(link)
        pumps = [
            asyncio.ensure_future(self._to_server(link, reader)),
            asyncio.ensure_future(self._to_client(link, from_server)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._links.discard(link)
            await self._close(to_server)

    async def _close(self, writer: asyncio.StreamWriter) -> None:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        self._writers.discard(writer)

    async def _to_server(self, link: Link, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(1 << 16):
            if not link.name:
                link.name = _application_name(data)
                if self._cut_after is not None and self._cut_after[0] in link.name:
                    link.cut_at = self._cut_after[1]
            if self._delay:
                await asyncio.sleep(self._delay)
            if link.swallow_to_server:
                continue
            link.bytes_to_server += len(data)
            if link.cut_at is not None and link.bytes_to_server > link.cut_at:
                data = data[: len(data) - (link.bytes_to_server - link.cut_at)]
                link.server.write(data)
                await link.server.drain()
                link.reset()
                return
            if self._unanswered and self._unanswered in data:
                self.held_answers += 1
                link.stays_silent = True
            if b"COMMIT\0" in data:
                link.drops_answer_to_commit = self._takes_commit(link.name)
            link.server.write(data)
            await link.server.drain()

    async def _to_client(self, link: Link, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(1 << 16):
            if self._delay:
                await asyncio.sleep(self._delay)
            if link.swallow_to_client or link.stays_silent:
                continue
            if link.drops_answer_to_commit:
                self.dropped_commits += 1
                link.reset()
                return
            link.client.write(data)
            await link.client.drain()

    def _takes_commit(self, name: str) -> bool:
        for purpose, count in self._commits_to_drop.items():
            if purpose in name and count > 0:
                self._commits_to_drop[purpose] = count - 1
                return True
        return False


def _application_name(startup: bytes) -> str:
    """The application name in a startup packet; nothing in what goes before that, like SSLRequest."""
    _, found, rest = startup.partition(_PARAMETER)
    return rest.partition(b"\0")[0].decode() if found else ""
