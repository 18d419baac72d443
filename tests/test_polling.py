"""When a host looks for jobs, and from where on: decisions without a database."""

from __future__ import annotations

from django_pgjobs.polling import LONGEST_AHEAD, RUSH_PAUSE, Frontier, Polling
from django_pgjobs.store import Claim, Claimed, Reached

HERE: Reached = {("default", 0): (100.0, 7)}
THERE: Reached = {("default", 0): (200.0, 9)}
ONE = Claim(7, None, 1, 3, "tests.any", "default", "{}")


def found(reached: Reached, count: int = 1) -> Claimed:
    return Claimed([ONE] * count, [0.0] * count, None, reached, tells_levels=True)


def test_as_long_as_claims_are_fast_each_starts_from_the_beginning() -> None:
    frontier = Frontier()
    frontier.learn(found(HERE), took=0.001, now=50)
    assert frontier.start(50) is None
    frontier.learn(found(HERE, count=1000), took=0.04, now=50)  # it has found much
    assert frontier.start(50) is None
    frontier.learn(found({}, count=0)._replace(tells_levels=False), took=1, now=50)  # there is nothing
    assert frontier.start(50) is None
    frontier.learn(found(HERE)._replace(tells_levels=False), took=1, now=50)  # it was the network
    assert frontier.start(50) is None


def test_after_a_slow_one_claims_go_on_for_twenty_times_as_long() -> None:
    frontier = Frontier()
    assert frontier.start(49.9) is None
    frontier.learn(found(HERE), took=0.1, now=50)
    assert frontier.start(50) == HERE
    frontier.learn(found(THERE), took=0.001, now=50.5)
    assert frontier.start(51.9) == THERE
    assert frontier.next_deadline == 52
    assert frontier.start(52) is None
    frontier.learn(found(THERE), took=0.001, now=52)
    assert frontier.next_deadline == float("inf")
    assert frontier.start(52) is None


def test_slow_claims_take_a_twentieth_of_the_time_unless_they_are_too_slow_for_that() -> None:
    frontier = Frontier()
    frontier.start(48)
    frontier.learn(found(HERE), took=2, now=50)
    assert frontier.next_deadline == 90
    assert frontier.start(90) is None
    frontier.learn(found(HERE), took=7, now=97)
    assert frontier.next_deadline == 97 + LONGEST_AHEAD


def test_where_the_others_find_nothing_slow_claims_may_take_a_fifth_of_the_time() -> None:
    frontier = Frontier()
    frontier.start(48)
    frontier.learn(found(HERE), took=2, now=50)
    assert frontier.start(51) == HERE
    frontier.learn(found(HERE, count=0), took=0.001, now=51)
    assert frontier.start(57.9) == HERE
    assert frontier.next_deadline == 58
    assert frontier.start(58) is None
    frontier.learn(found(HERE), took=0.01, now=60)  # somebody has held it up for a moment
    assert frontier.start(60) == HERE
    frontier.learn(found(HERE, count=0), took=0.001, now=60.1)
    assert frontier.start(60.1) is None


def test_claims_go_on_though_those_from_the_beginning_are_never_answered() -> None:
    frontier = Frontier()
    frontier.start(40)
    frontier.learn(found(HERE), took=7, now=47)
    assert frontier.start(47 + LONGEST_AHEAD) is None
    assert frontier.start(120) == HERE
    frontier.learn(found(THERE), took=0.001, now=120)
    assert frontier.start(121) == THERE
    assert frontier.next_deadline == 47 + 2 * LONGEST_AHEAD
    assert frontier.start(47 + 2 * LONGEST_AHEAD) is None


def test_in_a_rush_nobody_has_to_tell() -> None:
    polling = Polling(poll_interval=5)
    assert polling.wants_notifications
    for turn in range(100):
        polling.learn(found(HERE, count=3), limit=10, took=0.001, now=50 + turn * 0.002, hears=True)
    assert not polling.wants_notifications
    assert polling.next_look <= 50.2 + RUSH_PAUSE
    for turn in range(100):  # with a moment without any now and then
        polling.learn(found(HERE, count=turn % 5), limit=10, took=0.001, now=50.2 + turn * 0.0015, hears=True)
        assert not polling.wants_notifications
    polling.learn(found({}, count=0), limit=10, took=0.001, now=50.36, hears=True)
    polling.learn(found({}, count=0), limit=10, took=0.001, now=50.42, hears=True)
    assert polling.wants_notifications
    assert 50.42 + 4 <= polling.next_look <= 50.42 + 5


def test_where_more_wait_than_there_is_room_for_nobody_has_to_tell() -> None:
    """However few they are in a second. It may look again as soon as it has room."""
    polling = Polling(poll_interval=5)
    polling.learn(found(HERE, count=4), limit=4, took=0.001, now=50, hears=True)
    assert polling.wants_notifications  # these may have been all
    assert polling.next_look == 0
    polling.learn(found(HERE, count=1), limit=1, took=0.001, now=51, hears=True)
    assert not polling.wants_notifications
    assert polling.next_look == 0
    polling.learn(found(HERE, count=3), limit=4, took=0.001, now=52, hears=True)
    assert polling.wants_notifications


def test_when_it_is_time_to_look() -> None:
    polling = Polling(poll_interval=5)
    assert polling.next_look == 0
    polling.learn(Claimed([], [], 0.5, {}), limit=10, took=0.001, now=50, hears=True)
    assert (polling.next_look, polling.next_due, polling.found_nothing) == (50.5, 50.5, True)
    polling.learn(Claimed([], [], None, {}), limit=10, took=0.001, now=50, hears=False)
    assert 50.8 <= polling.next_look <= 51
    polling.start(49.7)
    polling.learn(found(HERE), limit=10, took=0.15, now=50, hears=True)
    assert (polling.next_look, polling.found_nothing) == (53, False)  # from the beginning again
    assert polling.start(51) == ("default", HERE)
    polling.learn(Claimed([], [], None, HERE), limit=10, took=0.001, now=51, hears=True)
    assert not polling.found_nothing  # where it looked
    assert polling.start(51) == ("default", None)
