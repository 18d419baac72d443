"""How a supervisor and an executor talk: frames of plain data over a stream socket, and one clock.

A frame is a list of messages behind its length, in the interpreter's own format for plain values, which
cannot name a class: what an executor sends can mislead its supervisor, and not run code in it. The
executor's end blocks; the supervisor's end never does, and keeps what could not be sent yet.
"""

from __future__ import annotations

import marshal
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("!I")
_CHUNK = 1 << 18

Message = list[Any]

# Where the platform has it, a clock that goes on while the machine sleeps.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

NEVER = float("inf")  # as a time of this clock


def clock() -> float:
    """Seconds of a clock that all processes of a host share. For deadlines, never for the database."""
    return time.clock_gettime(_CLOCK)


class Channel:
    """One end of the conversation."""

    def __init__(self, sock: socket.socket, *, blocking: bool) -> None:
        sock.setblocking(blocking)
        self.sock = sock
        self.closed = False  # the other end is gone
        self.when_lost: Callable[[], None] = lambda: None  # called where a blocking end cannot send any more
        self._received = bytearray()
        self._unsent = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.closed = True
        self.sock.close()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, messages: list[Message]) -> None:
        """Send a frame, or as much of it as the socket takes. Silent when the other end is gone."""
        body = marshal.dumps(messages)
        with self._sending:
            if self._unsent or not self.sock.getblocking():
                self._unsent += _LENGTH.pack(len(body)) + body
                self._flush()
            else:
                try:
                    self.sock.sendall(_LENGTH.pack(len(body)) + body)
                except OSError:
                    self.closed = True
                    self.when_lost()

    def flush(self) -> None:
        """Send what could not be sent before."""
        with self._sending:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # nobody is there to read it; what was said last has still to be read

    def receive(self) -> list[Message]:
        """The messages that have arrived: of one read where the socket blocks, else of all there is.

        Sets `closed` when the other end is gone.
        """
        while not self.closed:
            try:
                data = self.sock.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            self._received += data
            if self.sock.getblocking():
                break
        try:
            return self._complete_frames()
        except (ValueError, TypeError, EOFError):
            self.closed = True  # it writes something else than frames: as good as gone
            return []

    def _complete_frames(self) -> list[Message]:
        messages: list[Message] = []
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            end = start + _LENGTH.size + length
            if len(self._received) < end:
                break
            messages += marshal.loads(self._received[start + _LENGTH.size : end])
            start = end
        del self._received[:start]
        return messages
