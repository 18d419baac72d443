"""What supervisor and executor say to each other arrives, whatever becomes of either."""

from __future__ import annotations

import socket

from django_pgjobs.channel import Channel


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
