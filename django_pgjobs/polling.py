"""When a host looks for jobs, from where on, and whether it has to be told of new ones.

It looks when it was notified, when a job comes due, at once where the last look found all that it asked for,
and in any case after a polling interval. Nothing here knows of executors, or talks to the database.
"""

from __future__ import annotations

import random

from . import store
from .channel import NEVER

DEAF_POLL = 1.0  # seconds between polls while the listener does not hear

USUAL = 0.00005  # seconds that a claim takes for each job that it finds
SLOW = 0.005  # seconds beyond that
LONGEST_AHEAD = 120.0  # seconds without a claim from the beginning

# Jobs a second beyond which notifications are more a burden than a help. Commits that carry one wait for each
# other: with 16 clients, about 2,000 a second are possible, and four times as many without.
RUSH = 1000
RUSH_WINDOW = 0.05  # seconds over which they are counted
RUSH_PAUSE = 0.002  # seconds between two looks in a rush

CROWD = 2  # claims in a row that have found all that they asked for, so that more are likely to wait


class Polling:
    """What a host has learnt from its claims about the next one. Times are those of `clock`."""

    def __init__(self, poll_interval: float) -> None:
        self.found_nothing = False  # by the last claim, and nothing has been settled since
        self.next_due = NEVER  # when the next job that waits is due
        self._poll_interval = poll_interval  # seconds
        self._next_poll = 0.0
        self._found_all = 0  # claims in a row that found all that they asked for
        self._last_queue = ""
        self._frontier = Frontier()
        self._rush = Rush()

    @property
    def wants_notifications(self) -> bool:
        """Whether new jobs have to be announced for this host to find them at once.

        Not in a rush, and not where more wait than it has room for: then it looks whenever it has room again.
        """
        return not self._rush.is_on and self._found_all < CROWD

    @property
    def is_ahead(self) -> bool:
        """Whether the last claim did not start from the beginning, so that it may have left jobs out."""
        return self._frontier.is_ahead

    @property
    def next_look(self) -> float:
        """When it is worth looking for jobs, if nobody has said so before."""
        return 0.0 if self._found_all else min(self._next_poll, self.next_due, self._frontier.next_deadline)

    def start(self, now: float) -> tuple[str, store.Reached | None]:
        """The queue whose turn it was, and how far claims have come: where this one starts."""
        return self._last_queue, self._frontier.start(now)

    def learn(self, claimed: store.Claimed, limit: int, took: float, now: float, *, hears: bool) -> None:
        """Take note of a claim of up to `limit` jobs, which took so many seconds."""
        self.found_nothing = not claimed.claims and not self.is_ahead
        self._found_all = self._found_all + 1 if len(claimed.claims) >= limit else 0
        self._frontier.learn(claimed, took, now)
        self._rush.learn(len(claimed.claims), now)
        interval = self._poll_interval if hears else min(self._poll_interval, DEAF_POLL)
        self._next_poll = now + (RUSH_PAUSE if self._rush.is_on else interval * random.uniform(0.8, 1.0))
        self.next_due = NEVER if claimed.next_due is None else now + max(claimed.next_due, 0.0)
        if claimed.claims:
            self._last_queue = claimed.claims[0].queue_name


class Frontier:
    """Where claims start, so that they need not step over what was claimed before.

    To step over such a job costs a quarter of a microsecond or more, and a snapshot that somebody holds for
    ten minutes may keep millions of them in the index. So once a claim from the beginning was slow, the next
    ones go on where it came to, so that such claims take a twentieth of the time; a fifth, once the others
    find nothing. What has come in late, at a new level, or back is found from the beginning only.

    A claim from the beginning may be so slow that it is never answered. Then the next ones go on as before.
    """

    def __init__(self) -> None:
        self._reached: store.Reached | None = None
        self._from_beginning = True  # the claim that was sent last
        self._since = 0.0  # when one was last sent from there
        self._took = 0.0  # seconds, as far as we know
        self._until = NEVER

    @property
    def is_ahead(self) -> bool:
        """Whether the last claim did not start from the beginning."""
        return not self._from_beginning

    @property
    def next_deadline(self) -> float:
        """When to claim from the beginning, whatever else there is to do."""
        return self._until

    def start(self, now: float) -> store.Reached | None:
        """Where a claim at this time has to start; None for the beginning."""
        self._from_beginning = self._reached is None or now >= self._until
        if not self._from_beginning:
            return self._reached
        self._since, self._took = now, LONGEST_AHEAD
        self._until = NEVER if self._reached is None else now + LONGEST_AHEAD
        return None

    def learn(self, claimed: store.Claimed, took: float, now: float) -> None:
        """Take note of a claim from where `start` has said, and of the seconds that it took."""
        if not self._from_beginning:
            self._reached = claimed.reached
            if not claimed.claims:
                self._until = min(self._until, self._since + 5 * self._took)
        elif claimed.tells_levels and took - USUAL * len(claimed.claims) > SLOW:
            self._reached, self._took = claimed.reached, took
            self._until = now + min(20 * took, LONGEST_AHEAD)
        else:
            self._reached, self._until = None, NEVER


class Rush:
    """Whether so many jobs come in that looking all the time finds them as soon as being notified does."""

    def __init__(self) -> None:
        self.is_on = False
        self._since = 0.0
        self._found = 0

    def learn(self, found: int, now: float) -> None:
        """Take note of a claim that found so many jobs."""
        self._found += found
        passed = now - self._since
        if passed >= RUSH_WINDOW:
            self.is_on = self._found >= RUSH * passed
            self._since, self._found = now, 0
