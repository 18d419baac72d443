"""Where claims start: decisions without a database."""

from __future__ import annotations

from django_pgjobs.store import Claim, Claimed, Reached
from django_pgjobs.turns import Frontier

HERE: Reached = {("default", 0): (100.0, 7)}
THERE: Reached = {("default", 0): (200.0, 9)}
ONE = Claim(7, None, 1, 3, "tests.any", "default", "{}")


def found(reached: Reached, count: int = 1) -> Claimed:
    return Claimed([ONE] * count, None, reached)


def test_as_long_as_claims_are_fast_each_starts_from_the_beginning() -> None:
    frontier = Frontier(poll_interval=5)
    frontier.learn(found(HERE), took=0.001, now=50)
    assert frontier.start(50) is None
    frontier.learn(found(HERE, count=1000), took=0.04, now=50)  # it has found much
    assert frontier.start(50) is None
    frontier.learn(found({}, count=0), took=1, now=50)  # there is nothing to go on from
    assert frontier.start(50) is None


def test_after_a_slow_one_claims_go_on_for_ten_times_as_long() -> None:
    frontier = Frontier(poll_interval=5)
    assert frontier.start(50) is None
    frontier.learn(found(HERE), took=0.1, now=50)
    assert frontier.start(50) == HERE
    frontier.learn(found(THERE), took=0.001, now=50.5)
    assert frontier.start(50.9) == THERE
    assert frontier.next_deadline == 51
    assert frontier.start(51) is None
    assert frontier.next_deadline == float("inf")
    frontier.learn(found(THERE), took=0.001, now=51)
    assert frontier.start(51) is None


def test_a_polling_interval_is_the_longest() -> None:
    frontier = Frontier(poll_interval=5)
    frontier.learn(found(HERE), took=2, now=50)
    assert frontier.next_deadline == 55


def test_where_the_others_find_nothing_the_next_one_starts_from_the_beginning_at_once() -> None:
    frontier = Frontier(poll_interval=5)
    frontier.learn(found(HERE), took=0.4, now=50)
    assert frontier.start(51) == HERE
    frontier.learn(found(HERE, count=0), took=0.001, now=51)
    assert frontier.next_deadline <= 51
    assert frontier.start(51) is None
