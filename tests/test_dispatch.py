"""How many jobs a host claims, and which executor gets them: decisions without a database."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from django_pgjobs.channel import Channel, clock
from django_pgjobs.children import Child, Children, Held
from django_pgjobs.dispatch import BATCH, MOST_SUSPECTS, START_WITHIN, Dispatch
from django_pgjobs.marks import Areas, Marks
from django_pgjobs.store import Claim
from django_pgjobs.wakeup import Wakeup

THREADS = 4


@pytest.fixture
def children() -> Iterator[list[Child]]:
    """Two working executors and a spare."""
    pairs = [socket.socketpair() for _ in range(3)]
    yield [
        Child(serial, ours, f"executor {serial}", Marks.private(THREADS, 0))
        for serial, (ours, _) in enumerate(pairs)
    ]
    for pair in pairs:
        for end in pair:
            end.close()


@pytest.fixture
def dispatch() -> Dispatch:
    return Dispatch(threads=THREADS, async_slots=0, lease=60, look_again=5)


def held(ticket: int, *, crashes: int = 0, payload: str = "{}", age: float = 0.0) -> Held:
    claim = Claim(ticket, None, 1, 3, "tests.any", "default", payload, crashes)
    return Held(ticket, claim, None, clock() - age)


def test_what_still_runs_in_an_executor_on_its_way_out_keeps_its_slot(
    dispatch: Dispatch, children: list[Child]
) -> None:
    """Else a host that replaces executors by size would run ever more of them."""
    *working, leaving = children
    leaving.retiring = True
    leaving.assign([held(100), held(101), held(102)], half_lease=30)
    leaving.jobs[102].abort_reason = "timeout"  # nobody knows whether it will end
    for ticket in range(2 * THREADS):
        dispatch.add(held(ticket))
    dispatch.hand_out(working, [], [leaving])
    assert sum(len(child.jobs) for child in working) == 2 * THREADS - 2


@pytest.mark.parametrize("left", [0, 1, 2, THREADS, THREADS + 3])
def test_an_executor_gets_its_share_of_jobs_and_no_more(
    dispatch: Dispatch, children: list[Child], left: int
) -> None:
    """However short they are, so that many would be handed over ahead of free slots."""
    child, *_ = children
    child.most, child.taken = 100, 100 - left
    for _ in range(100):
        dispatch.learn("tests.any", 0.0001)
    for ticket in range(50):
        dispatch.add(held(ticket))
    dispatch.hand_out([child], [])
    assert len(child.jobs) == left
    dispatch.add(held(50, crashes=1))
    dispatch.hand_out([child], [])
    assert len(child.jobs) == left


def test_a_host_looks_again_when_a_kind_is_no_longer_crowded(
    dispatch: Dispatch, children: list[Child]
) -> None:
    """While there is no room for it, nothing else may wake the host up."""
    dispatch.add(held(1, age=START_WITHIN))
    dispatch.take_overdue(clock(), everything=False)
    assert dispatch.room(children[:1]) == THREADS
    for ticket in range(THREADS):
        children[0].assign([held(ticket)], half_lease=30)
    assert dispatch.room(children[:1]) == 0
    assert clock() + 4 < dispatch.next_deadline <= clock() + 5


class Exhausted:
    """A fork server for whose children there are no descriptors."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.areas = Areas(3, 1, 0)

    def spawn(self, *arguments: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")


def test_where_no_executor_can_be_started_memory_for_its_marks_is_kept() -> None:
    ours, theirs = socket.socketpair()
    wakeup = Wakeup()
    with ours, theirs:
        forkserver = Exhausted(ours)
        children = Children(wakeup, forkserver, 1, 1, 0)  # type: ignore[arg-type]
        for _ in range(5):
            children._next_spawn = 0.0
            children.keep()
        assert not list(children)
        assert [forkserver.areas.take() is not None for _ in range(4)] == [True, True, True, False]
        wakeup.close()


def test_a_job_that_is_overdue_before_it_starts_is_looked_at_now_and_then(children: list[Child]) -> None:
    """And not all the time: it may wait behind one that takes long."""
    late = held(1, age=10)
    late.timeout = 0.001
    children[0].assign([late], half_lease=30)
    late.assigned_at -= 10
    children[0].look()
    assert children[0].look_by > clock()


def test_jobs_go_to_the_executor_with_the_most_free_slots(dispatch: Dispatch, children: list[Child]) -> None:
    *working, spare = children
    for ticket in range(4):
        dispatch.add(held(ticket))
    dispatch.hand_out(working, [spare])
    assert [len(child.jobs) for child in children] == [2, 2, 0]


def test_long_jobs_are_not_claimed_ahead_and_short_ones_are(
    dispatch: Dispatch, children: list[Child]
) -> None:
    working = children[:2]
    for _ in range(200):
        dispatch.learn("tests.any", 10.0)
    assert dispatch.room(working) == 2 * THREADS
    for _ in range(500):
        dispatch.learn("tests.any", 0.0001)
    assert dispatch.room(working) == BATCH


def test_large_payloads_are_not_claimed_far_ahead(dispatch: Dispatch, children: list[Child]) -> None:
    for _ in range(500):
        dispatch.learn("tests.any", 0.0001)
    large = [held(ticket, payload="x" * 1_000_000) for ticket in range(200)]
    for one in large:
        dispatch.add(one)
    for one in large:
        assert dispatch.withdraw(one)
    assert dispatch.room(children[:2]) < 40


def test_without_a_free_slot_for_jobs_that_waited_in_vain_no_more_are_claimed(
    dispatch: Dispatch, children: list[Child]
) -> None:
    working = children[:2]
    for ticket in range(2 * THREADS):
        dispatch.add(held(ticket))
    dispatch.hand_out(working, [])
    late = held(99, age=START_WITHIN)
    dispatch.add(late)
    assert dispatch.take_overdue(clock(), everything=False) == [late]
    assert dispatch.room(working) == 0


def test_a_suspect_runs_alone_in_the_spare(dispatch: Dispatch, children: list[Child]) -> None:
    *working, spare = children
    for ticket in range(3):
        dispatch.add(held(ticket))
    for ticket in (10, 11):
        dispatch.add(held(ticket, crashes=1))
    dispatch.hand_out(working, [spare])
    assert list(spare.jobs) == [10]  # the other one waits for its turn
    assert sum(len(child.jobs) for child in working) == 3


def test_a_suspect_waits_for_an_executor_with_nothing_else_to_do(
    dispatch: Dispatch, children: list[Child]
) -> None:
    working = children[:1]
    dispatch.add(held(1))
    dispatch.hand_out(working, [])
    dispatch.add(held(2, crashes=1))
    dispatch.add(held(3))
    dispatch.hand_out(working, [])
    assert list(working[0].jobs) == [1, 3]
    for ticket in (1, 3):
        list(working[0].read(["returned", [ticket, 0.1]]))
    dispatch.add(held(4))
    dispatch.hand_out(working, [])
    assert list(working[0].jobs) == [2]  # and 4 waits


def test_suspects_take_no_room_and_not_all_of_them_are_let_in(
    dispatch: Dispatch, children: list[Child]
) -> None:
    *working, spare = children
    room = dispatch.room(working)
    suspects = [held(ticket, crashes=1) for ticket in range(MOST_SUSPECTS + 2)]
    assert [dispatch.add(suspect) for suspect in suspects] == [True] * MOST_SUSPECTS + [False] * 2
    dispatch.hand_out(working, [spare])
    assert dispatch.room(working) == room
    assert dispatch.add(suspects[-1])  # now that the first one runs


class Sockets:
    """In the place of a fork server: the far ends of the channels, and no processes."""

    def __init__(self) -> None:
        self.sock, self._server = socket.socketpair()
        self.theirs: list[Channel] = []
        self.areas = Areas(2, THREADS, 0)

    def spawn(self, serial: int, area: int, threads: int, async_slots: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        self.theirs.append(Channel(theirs, blocking=True))
        return ours

    def name_of(self, serial: int) -> str:
        return f"executor {serial}"

    def close(self) -> None:
        for end in [*self.theirs, self.sock, self._server]:
            end.close()


@pytest.fixture
def sockets() -> Sockets:
    return Sockets()


@pytest.fixture
def host(sockets: Sockets) -> Iterator[Children]:
    """One executor and a spare, as a host sees them that has just started them."""
    wakeup = Wakeup()
    host = Children(wakeup, sockets, 1, THREADS, 0)  # type: ignore[arg-type]
    host.keep()
    yield host
    for child in host:
        child.channel.close()
    sockets.close()
    wakeup.close()


def becomes_ready(host: Children, sockets: Sockets, number: int) -> None:
    sockets.theirs[number].send([["ready"]])
    assert list(host.events()) == []


def test_the_executor_that_is_ready_first_goes_on_working(host: Children, sockets: Sockets) -> None:
    first, second = host
    becomes_ready(host, sockets, 1)
    assert host.working == [second]
    becomes_ready(host, sockets, 0)
    assert (host.working, host.spares) == ([second], [first])


def test_while_a_suspect_runs_the_other_executor_works(
    dispatch: Dispatch, host: Children, sockets: Sockets
) -> None:
    """Also when the spare was not there in time, so that the suspect went to the executor that works."""
    first, second = host
    becomes_ready(host, sockets, 0)
    dispatch.add(held(1, crashes=1))
    dispatch.hand_out(host.working, host.spares)
    assert list(first.jobs) == [1]
    becomes_ready(host, sockets, 1)
    assert (host.working, host.spares) == ([second], [first])
    dispatch.add(held(2))
    dispatch.hand_out(host.working, host.spares)
    assert list(second.jobs) == [2]
