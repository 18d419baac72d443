"""Recover lost jobs, and delete old finished ones: in batches, safely at any time and on any number of hosts.

Both are called by worker hosts, and `sweep` by the command `sweepjobs` too; `prunejobs`, which may be given
other ages, prunes for itself. Each call is one transaction of its caller's, and one batch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import timedelta

from . import jobs, store
from .conf import config
from .lifecycle import Event, JobError, Lost, Status, decide
from .store import Cursor, Settlement

logger = logging.getLogger(__name__)

BATCH_SIZE = 1000

# The age at which claims without a token count as lost: the article's ten minutes.
BARE_TIMEOUT = timedelta(minutes=10)


@dataclass(slots=True)
class Swept:
    """What a sweep did. `why_not` says why it stopped, if something kept it from sweeping."""

    requeued: int = 0
    buried: int = 0
    why_not: str = ""
    settled: list[Settlement] = field(default_factory=list)  # to be announced once it is committed

    @property
    def total(self) -> int:
        return self.requeued + self.buried

    def __add__(self, other: Swept) -> Swept:
        return Swept(
            self.requeued + other.requeued,
            self.buried + other.buried,
            other.why_not,
            self.settled + other.settled,
        )

    def __str__(self) -> str:
        if self.why_not and not self.total:
            return self.why_not
        done = f"{self.requeued:,} lost jobs queued again, {self.buried:,} made dead letters."
        return f"{done} {self.why_not}".rstrip()


def sweep(
    cursor: Cursor,
    *,
    timeout: timedelta = BARE_TIMEOUT,
    limit: int = BATCH_SIZE,
    dry_run: bool = False,
) -> Swept:
    """Recover up to `limit` jobs whose holders have been silent for longer than the lease.

    Claims without a token, of clients that use bare SQL, are lost after `timeout`. Runs in the transaction
    of `cursor`, and only one sweep at a time does anything.
    """
    if not store.sweep_lock(cursor):
        return Swept(why_not="Another sweep is at work.")
    lease = config().LEASE
    longest, uptime = store.leases(cursor)
    if longest is not None and longest > lease:
        logger.warning(
            "A live worker goes by a lease of %s; sweeping by it, not by LEASE = %s.", longest, lease
        )
        lease = longest
    if uptime < lease:
        return Swept(
            why_not=f"The server has been up for less than a lease ({lease}); its workers renew first."
        )
    swept = Swept()
    settlements = []
    for claim in store.lost(cursor, lease=lease, timeout=timeout, limit=limit):
        outcome = Lost(JobError("", "Worker timeout detected"))
        settlements.append((claim, decide(outcome, claim, jobs.policy_of(claim.job_name))))
    if settlements:
        settled = {claim.id for claim, _ in settlements} if dry_run else store.settle(cursor, settlements)
        for claim, verdict in settlements:
            if claim.id not in settled:
                continue
            buried = verdict.event is Event.BURY
            swept.buried += buried
            swept.requeued += not buried
            if dry_run:
                continue
            swept.settled.append((claim, verdict))
            logger.warning("%s lost: %s", claim, "made a dead letter" if buried else "queued again")
    return swept


def retentions() -> dict[Status, timedelta]:
    """For how long jobs of each finished status are kept; without those that are kept for ever."""
    settings = config()
    retentions = {
        Status.COMPLETED: settings.COMPLETED_RETENTION,
        Status.FAILED: settings.FAILED_RETENTION,
        Status.CANCELLED: settings.CANCELLED_RETENTION,
    }
    return {status: age for status, age in retentions.items() if age is not None}


def prune(cursor: Cursor) -> bool:
    """Delete one batch of old jobs of each status, one of operations, and the rows of hosts that are gone.

    Returns whether there may be more.
    """
    store.prune_workers(cursor)
    counts = [store.prune(cursor, status, age=age, limit=BATCH_SIZE) for status, age in retentions().items()]
    if (age := config().OPERATIONS_RETENTION) is not None:
        counts.append(store.prune_operations(cursor, age=age, limit=BATCH_SIZE))
    return any(count >= BATCH_SIZE for count in counts)
