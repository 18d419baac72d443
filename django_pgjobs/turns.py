"""What a worker host asks of the database: the pieces of work that its database thread carries out.

The supervisor writes down what a turn has to do, the thread does it in one transaction, and the supervisor
reads what came of it. Nothing here touches the supervisor, so nothing has to be locked.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from . import jobs, store
from .channel import clock
from .database import is_outage
from .lifecycle import Completed, Event, JobError, Verdict, decide
from .store import Claim, Cursor, Settlement

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Turn:
    """What one transaction has to do: renew, settle what has finished, claim what can start."""

    host: store.Host
    sent_at: float  # by `clock`, just before
    announce: str = ""  # the state to tell of this host
    executors: list[dict[str, Any]] = field(default_factory=list)  # as they are told along with it
    probe: str = ""
    renewals: list[Claim] = field(default_factory=list)
    progress: list[tuple[Claim, str]] = field(default_factory=list)
    dead_sessions: list[str] = field(default_factory=list)  # application names of killed executors
    settlements: list[Settlement] = field(default_factory=list)
    one_by_one: bool = False
    unanswered_claims: list[uuid.UUID] = field(default_factory=list)  # their tokens
    token: uuid.UUID | None = None
    limit: int = 0
    after: str = ""  # the queue whose turn it was
    reached: store.Reached | None = None  # where to start; None for the beginning
    was_sent: bool = False  # but for the COMMIT, whose answer tells whether it took effect

    def __bool__(self) -> bool:
        return bool(
            self.limit
            or self.settlements
            or self.renewals
            or self.progress
            or self.unanswered_claims
            or self.announce
            or self.probe
            or self.dead_sessions
        )


@dataclass(slots=True)
class Report:
    """What came of a turn."""

    renewed: dict[int, bool] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    still_held: set[int] = field(default_factory=set)
    completed: set[int] = field(default_factory=set)  # before, without our having heard of it
    claimed: store.Claimed | None = None
    claim_took: float = 0.0  # seconds
    stop_asked_by: str | None = None  # who wants this host to stop, if somebody does


def carry_out(cursor: Cursor, turn: Turn) -> Report:
    """Run a turn's statements, in the transaction of `cursor`."""
    report = Report()
    if turn.announce:
        report.stop_asked_by = store.announce_worker(
            cursor,
            turn.host,
            state=turn.announce,
            running=len(turn.renewals),
            executors=turn.executors,
        )
    if turn.probe:
        store.probe(cursor, turn.probe)
    if turn.renewals:
        report.renewed = store.renew(cursor, turn.renewals)
    if turn.progress:
        store.progress(cursor, turn.progress)
    if turn.dead_sessions:
        store.end_sessions(cursor, turn.dead_sessions)
    if turn.settlements:
        settle = settle_one_by_one if turn.one_by_one else store.settle
        report.settled = settle(cursor, turn.settlements)
    doubtful = [claim for claim in turn.renewals if claim.id not in report.renewed]
    doubtful += [claim for claim, _ in turn.settlements if claim.id not in report.settled]
    if doubtful:
        report.still_held, report.completed = store.held(cursor, doubtful)
    for token in turn.unanswered_claims:
        release_unanswered(cursor, token)
    if turn.token is not None:
        began = clock()
        report.claimed = store.claim(
            cursor,
            token=turn.token,
            worker_id=turn.host.id,
            limit=turn.limit,
            queues=turn.host.queues,
            after=turn.after,
            reached=turn.reached,
        )
        report.claim_took = clock() - began
    turn.was_sent = True
    return report


def settle_one_by_one(cursor: Cursor, settlements: Sequence[Settlement]) -> set[int]:
    """Settle each verdict by itself; replace one that cannot be stored by one that can."""
    settled: set[int] = set()
    for claim, verdict in settlements:
        cursor.execute("SAVEPOINT one", ())
        try:
            settled |= store.settle(cursor, [(claim, verdict)])
        except psycopg.Error as error:
            if is_outage(error):
                raise
            problem = str(error).partition("\n")[0]  # the next line may have the row
            logger.error("%s: its outcome could not be stored (%s); a fixed text is.", claim, problem)
            cursor.execute("ROLLBACK TO SAVEPOINT one", ())
            settled |= store.settle(cursor, [(claim, _storable(claim, verdict))])
    return settled


def _storable(claim: Claim, verdict: Verdict) -> Verdict:
    text = "The outcome could not be stored; the worker's log has the reason."
    if verdict.event is Event.COMPLETE:
        return decide(Completed(None, text), claim, jobs.policy())
    error = JobError("", text) if verdict.error else None
    return Verdict(verdict.event, verdict.delay, error=error, crashed=verdict.crashed)


def release_unanswered(cursor: Cursor, token: uuid.UUID) -> None:
    """Hand back what a claim took whose answer never arrived."""
    claims = [Claim(id, token, attempts, 0, "", "", "") for id, attempts in store.claimed_by(cursor, token)]
    if claims:
        store.settle(cursor, [(claim, Verdict(Event.RELEASE)) for claim in claims])
