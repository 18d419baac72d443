"""What an executor leaves in shared memory outlives it."""

from __future__ import annotations

import os
import signal

import pytest

from django_pgjobs.channel import clock
from django_pgjobs.marks import RING, Areas, Marks


def test_marks_are_read_until_they_are_cleared() -> None:
    marks = Marks.private(threads=2, async_slots=1)
    began = clock()
    first, second = marks.rings
    marks.start(first[0], 1)
    marks.start(first[1], 2)
    marks.start(second[0], 3)
    marks.start(marks.singles[0], 4)
    marks.complete(first[0])
    assert [(mark.ticket, mark.completed) for mark in marks.read()] == [
        (1, True),
        (2, False),
        (3, False),
        (4, False),
    ]
    assert all(began <= mark.started_at <= clock() for mark in marks.read())
    marks.clear([first[0], second[0]])
    assert [mark.ticket for mark in marks.read()] == [2, 4]
    marks.start(first[0], 5)
    assert [(mark.ticket, mark.completed) for mark in marks.read()] == [(5, False), (2, False), (4, False)]


def test_every_slot_has_cells_of_its_own() -> None:
    marks = Marks.private(threads=3, async_slots=5)
    cells = [cell for ring in marks.rings for cell in ring] + list(marks.singles)
    assert cells == list(range(3 * RING + 5))
    for cell in cells:
        marks.start(cell, cell + 1)
    assert [mark.ticket for mark in marks.read()] == [cell + 1 for cell in cells]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_a_process_has_marked_is_seen_after_it_was_killed() -> None:
    areas = Areas(2, threads=1, async_slots=0)
    area = areas.take()
    assert area is not None
    pid = os.fork()
    if not pid:
        marks = areas.marks(area)
        marks.start(0, 7)
        marks.start(1, 8)
        marks.complete(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert [(mark.ticket, mark.completed) for mark in areas.marks(area).read()] == [(7, True), (8, False)]


def test_an_area_is_given_back_empty() -> None:
    areas = Areas(2, threads=1, async_slots=1)
    one, other = areas.take(), areas.take()
    assert one is not None
    assert areas.take() is None
    areas.marks(one).start(0, 1)
    areas.give_back(one)
    assert areas.take() == one
    assert areas.marks(one).read() == []
    assert other != one
