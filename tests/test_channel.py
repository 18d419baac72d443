"""What supervisor and executor say to each other arrives, whatever becomes of either."""

from __future__ import annotations

import socket
import uuid
from typing import Any

import pytest

from django_pgjobs.channel import Channel, clock
from django_pgjobs.children import Child, Ended, Held, News
from django_pgjobs.lifecycle import NO_RESULT
from django_pgjobs.marks import Marks
from django_pgjobs.store import Claim


def test_what_an_executor_said_last_is_read_though_nothing_can_be_sent_to_it_any_more() -> None:
    ours, theirs = socket.socketpair()
    channel, executor = Channel(ours, blocking=False), Channel(theirs, blocking=True)
    channel.send([["run", [1]]])
    executor.send([["done", 1]])
    executor.close()  # with a message that it has not read
    channel.send([["run", [2]]])
    assert not channel.has_unsent
    assert channel.receive() == [["done", 1]]
    assert channel.closed
    channel.send([["run", [3]]])
    assert channel.receive() == []
    channel.close()


@pytest.mark.parametrize(
    "message",
    [
        ["returned", [1, 0.5, 3, 0.5]],
        ["returned", [1, 0.5, 1, 0.5]],
        ["returned", [1, 0.5, 2]],
        ["returned", [1, "x"]],
        ["returned", [1, 10**400]],
        ["returned", 1],
        ["returned"],
        ["done", 1, 0.5, []],
        ["done", 1, 0.5, ["Exited"]],
        ["done", 1, None, ["Stopped"]],
        ["done", 3, 0.5, ["Stopped"]],
        ["recalled", [3]],
        ["progress", 1, 5],
        ["hello"],
        [],
        [[]],
    ],
    ids=str,
)
def test_what_makes_no_sense_loses_no_job(message: list[Any]) -> None:
    """Each has ended, and somebody was told; or is still that of the executor, whose end settles it."""
    ours, theirs = socket.socketpair()
    child = Child(1, ours, "an executor", Marks.private(1, 0))
    claims = [Claim(id, uuid.uuid4(), 1, 3, "tests.tasks.nothing", "default", "{}") for id in (1, 2)]
    child.assign([Held(claim.id, claim, None, clock()) for claim in claims], half_lease=30)
    told: list[News] = []
    with pytest.raises((KeyError, TypeError, ValueError, OverflowError)):
        told.extend(child.read(message))
    assert all(isinstance(event, Ended) and event.outcome is NO_RESULT for event in told)
    assert sorted([*(event.held.ticket for event in told), *child.jobs]) == [1, 2]
    child.channel.close()
    theirs.close()
