"""A small process that forks executors: it has Django and the job modules loaded, and nothing open.

The supervisor has threads and connections, so it must not fork. It starts this process first, while it has
neither, and asks it for executors from then on. As their parent, the fork server hears from the kernel how
each of them ended, and passes it on. It runs no code of the project, and ends when the supervisor does.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import struct
import sys
import uuid
from typing import NamedTuple

from django.db import connections

from . import executor
from .marks import Areas

_REQUEST = struct.Struct("!IIII")  # serial, area, threads, async slots; with one end of a socket pair
_REPORT = struct.Struct("!BIi")  # what, serial or pid, pid or wait status
_SPAWNED, _EXITED = 1, 2


class Spawned(NamedTuple):
    serial: int
    pid: int  # below zero: there was no process to be had, and this is the error's number


class Exited(NamedTuple):
    pid: int
    status: int

    def __str__(self) -> str:
        code = os.waitstatus_to_exitcode(self.status)
        if code >= 0:
            return f"exited with status {code}"
        return f"died with signal {-code}" + ("; possibly out of memory" if -code == signal.SIGKILL else "")


class Forkserver:
    """The supervisor's handle on the fork server. Start it before any thread or connection."""

    def __init__(self, areas: Areas) -> None:
        self.areas = areas
        close_connections()
        executor.flush_streams()
        ours, theirs = socket.socketpair()
        self._name = f"django_pgjobs executor {uuid.uuid4().hex[:12]}"
        self.pid = os.fork()
        if self.pid == 0:
            try:
                ours.close()
                _serve(theirs, self._name, areas)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        theirs.close()
        ours.setblocking(False)
        self.sock = ours
        self.gone = False
        self._received = b""

    def name_of(self, serial: int) -> str:
        """The name of an executor's database sessions, by which they can be ended once it was killed."""
        return _name_of(self._name, serial)

    def spawn(self, serial: int, area: int, threads: int, async_slots: int) -> socket.socket:
        """Ask for an executor that leaves its marks in an area.

        Returns our end of its socket; a Spawned report with its pid follows.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                request = _REQUEST.pack(serial, area, threads, async_slots)
                socket.send_fds(self.sock, [request], [theirs.fileno()])
            except OSError:
                self.gone = True
        return ours

    def reports(self) -> list[Spawned | Exited]:
        """What has been reported since the last call. Sets `gone` when the fork server is."""
        try:
            while data := self.sock.recv(4096):
                self._received += data
            self.gone = True
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True
        whole = len(self._received) // _REPORT.size * _REPORT.size
        records, self._received = self._received[:whole], self._received[whole:]
        return [
            Spawned(first, second) if what == _SPAWNED else Exited(first, second)
            for what, first, second in _REPORT.iter_unpack(records)
        ]

    def close(self) -> None:
        """Let the fork server end, and see it off."""
        self.sock.close()
        try:
            os.kill(self.pid, signal.SIGKILL)  # it may be stopped, and has nothing left to do
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def close_connections() -> None:
    """Leave nothing open that two processes would share: connections, nor the pools that keep them open."""
    connections.close_all()
    for connection in connections.all(initialized_only=True):
        if hasattr(connection, "close_pool"):
            connection.close_pool()


def _serve(sock: socket.socket, name: str, areas: Areas) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.freeze()  # what is loaded now is shared with the executors, and stays so
    server = os.getpid()
    watched: list[socket.socket | int] = [sock, woken]
    while True:
        readable, _, _ = select.select(watched, [], [])
        if woken in readable:
            os.read(woken, 4096)
            _report_exits(sock)
        if sock not in readable:
            continue
        try:
            data, fds, _, _ = socket.recv_fds(sock, _REQUEST.size, 1)
        except OSError:
            data, fds = b"", []
        if len(data) < _REQUEST.size or not fds:
            os._exit(0)  # the supervisor is gone, and its executors see that, too
        serial, area, threads, async_slots = _REQUEST.unpack(data)
        try:
            pid = os.fork()
        except OSError as error:  # no memory or no process to be had just now
            os.close(fds[0])
            _report(sock, _SPAWNED, serial, -(error.errno or 1))
            continue
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(woken)
                os.close(waker)
                sock.close()
                _die_with(server)
                sock = socket.socket(fileno=fds[0])
                executor.main(sock, threads, async_slots, areas.marks(area), _name_of(name, serial))
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        os.close(fds[0])
        _report(sock, _SPAWNED, serial, pid)


def _name_of(host: str, serial: int) -> str:
    return f"{host}-{serial}"


def _report_exits(sock: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _report(sock, _EXITED, pid, status)


def _report(sock: socket.socket, what: int, first: int, second: int) -> None:
    try:
        sock.sendall(_REPORT.pack(what, first, second))
    except OSError:
        os._exit(0)  # the supervisor is gone


def _die_with(parent: int) -> None:
    """On Linux, have the kernel kill this process when its parent ends, even while it holds the GIL."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
