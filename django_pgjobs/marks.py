"""Which jobs an executor has started, in memory that it shares with its supervisor.

A mark is made before a body is entered, and cleared once the job's outcome has been sent. It costs two
stores, where a message would cost a system call for each job, at which all threads of the process change
places. And it outlives the process: so whatever kills an executor, the supervisor knows what it took along.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import NamedTuple, Self

from .channel import clock

RING = 32  # jobs of one thread that have been started, and whose outcomes have not all been sent

_COMPLETED = 1 << 63  # set beside the ticket of a job that has returned nothing
_TICKET = _COMPLETED - 1

_CELL = 16  # bytes: a ticket, and when it was started


class Mark(NamedTuple):
    ticket: int
    completed: bool  # it has returned nothing; else it still runs, or its outcome is not known here
    started_at: float  # by `clock`


class Marks:
    """The cells of one executor: a ring for each of its threads, and one cell for each async slot."""

    def __init__(self, memory: memoryview, threads: int, async_slots: int) -> None:
        half = len(memory) // 2
        self._tickets = memory[:half].cast("Q")
        self._times = memory[half:].cast("d")
        self.rings = [range(first, first + RING) for first in range(0, threads * RING, RING)]
        self.singles = range(threads * RING, threads * RING + async_slots)

    @classmethod
    def private(cls, threads: int, async_slots: int) -> Self:
        """Marks that nobody shares but the threads of this process."""
        return cls(memoryview(bytearray(size(threads, async_slots))), threads, async_slots)

    def start(self, cell: int, ticket: int) -> None:
        self._times[cell] = clock()
        self._tickets[cell] = ticket  # last: what reads a ticket finds its time

    def complete(self, cell: int) -> None:
        self._tickets[cell] |= _COMPLETED

    def clear(self, cells: Iterable[int]) -> None:
        for cell in cells:
            self._tickets[cell] = 0

    def read(self) -> list[Mark]:
        """The jobs that have been started, and whose outcomes may still be on their way."""
        return [
            Mark(value & _TICKET, value >= _COMPLETED, self._times[cell])
            for cell, value in enumerate(self._tickets.tolist())
            if value
        ]

    def forget(self) -> None:
        """Make room for another executor."""
        self.clear(range(len(self._tickets)))


def size(threads: int, async_slots: int) -> int:
    """The bytes of memory that the marks of one executor need."""
    return (threads * RING + async_slots) * _CELL


class Areas:
    """Memory for the marks of all executors of a host. Made before the fork server, which inherits it."""

    def __init__(self, count: int, threads: int, async_slots: int) -> None:
        self._threads, self._async_slots = threads, async_slots
        self._size = size(threads, async_slots)
        self._memory = memoryview(mmap.mmap(-1, count * self._size))
        self._free = list(range(count))

    def take(self) -> int | None:
        """The number of an area that nobody uses; None where there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, number: int) -> None:
        """Let another executor use an area, once the one that wrote into it is dead."""
        self.marks(number).forget()
        self._free.append(number)

    def marks(self, number: int) -> Marks:
        start = number * self._size
        return Marks(self._memory[start : start + self._size], self._threads, self._async_slots)
