"""The parent process of a worker host, and the only one that talks to the queue.

It claims jobs in batches, hands them to executors, renews what it holds, and settles what comes back. Its
loop runs neither SQL (the database thread does) nor code of the project (executors do), so that nothing but
itself can hold it up.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from . import __version__, execution, jobs, store, timeouts
from .channel import NEVER, clock
from .children import Child, Children, Held, News, Progressed, Started
from .conf import Config, config
from .database import Database, Outages, connect, is_outage
from .dispatch import BATCH, START_WITHIN, Dispatch
from .endpoint import Endpoint
from .exceptions import JobStopped, JobTimeout
from .executor import Finished
from .forkserver import Forkserver
from .health import Health
from .hostmetrics import HostMetrics, Now
from .housekeeping import Housekeeping
from .lifecycle import (
    NO_RESULT,
    Completed,
    Crashed,
    Event,
    Failed,
    Interrupted,
    JobError,
    Outcome,
    Stopped,
    Unstarted,
    Verdict,
    decide,
)
from .marks import Areas
from .polling import Polling
from .store import Cursor
from .timeouts import Timeouts
from .turns import Report, Turn, carry_out
from .wakeup import Listener, Wakeup

logger = logging.getLogger(__name__)

LOOK_AGAIN = 0.2  # seconds until a row that somebody had locked is settled
LOOK_PAUSE = 0.01  # seconds between two looks at what has started, which take their time
SINGLY = 50  # verdicts that are tried one by one in a transaction
BATCH_BYTES = 8 * 1024 * 1024  # of results after which a transaction takes no more; they are packed slowly
PROGRESS_PAUSE = 0.2  # seconds for which what jobs say of their progress is gathered
MOST_NEWS = 10_000  # ends of attempts that are kept for the receivers of `job_finished`
SUSPECT_PAUSE = 5.0  # seconds until a job that has waited in vain to run alone may be claimed again
PATIENCE = 5.0  # seconds without an executor, until a host no longer counts as ready


@dataclass(frozen=True, slots=True)
class Options:
    """How a worker host runs. Durations are in seconds."""

    queues: Sequence[str] | None = None
    processes: int = 1
    threads: int = 4
    async_slots: int = 0  # none where no job function is async
    poll_interval: float = 5.0
    grace: float = 25.0
    max_jobs_per_executor: int | None = None
    max_memory_per_executor: int | None = None  # bytes
    parent: int | None = None  # the process with which to end
    drain: bool = False
    inline: bool = False
    maintenance: bool = True
    health_file: Path | None = None
    health_address: tuple[str, int] | None = None  # host, "" for all; and port
    metrics_address: tuple[str, int] | None = None  # the same


class Supervisor:
    """One worker host. `run` returns when it was told to stop, or has drained the queue."""

    def __init__(self, options: Options, forkserver: Forkserver | None) -> None:
        settings = config()
        self.options = options
        self.lease = settings.LEASE.total_seconds()
        self.host = store.Host(
            id=uuid.uuid4(),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            queues=options.queues,
            processes=options.processes,
            threads=options.threads,
            async_slots=options.async_slots,
            lease=settings.LEASE,
            version=__version__,
        )
        self.health = Health(options.health_file, options.health_address)
        self.wakeup = Wakeup()
        self.database = Database(settings.DATABASE, settings.LEASE, self.wakeup.wake)
        self.listener = Listener(
            self.wakeup,
            f"pgjobs_{self.host.id.hex}",
            _how_to_listen(settings),
            patience=self.lease / 2,
            past_poolers=settings.LISTEN_DATABASE is not None,
        )
        self.children = Children(
            self.wakeup,
            forkserver,
            options.processes,
            options.threads,
            options.async_slots,
            max_jobs=options.max_jobs_per_executor,
            max_memory=options.max_memory_per_executor,
        )
        self.dispatch = Dispatch(
            options.threads, options.async_slots, self.lease, look_again=options.poll_interval
        )
        self.timeouts = Timeouts()

        self.held: dict[int, Held] = {}  # by job id
        self.last_ticket = 0
        self.unsettled: deque[tuple[Held, Verdict]] = deque()
        self.dead_sessions: list[str] = []  # of executors that we have killed
        self.progress: dict[Held, str] = {}  # JSON texts that are to be written
        self.next_progress = NEVER
        self.news: deque[Finished] = deque(maxlen=MOST_NEWS)

        # What the database thread is busy with, and what to do with its answer.
        self.pending: tuple[Future[Any], Callable[[Future[Any]], None]] | None = None
        self.vouched_at = NEVER  # when the last renewal that took effect was sent
        self.outages = Outages(self.lease)
        self.one_by_one = False  # a batch could not be stored, so its values are tried singly
        self.unanswered_claims: list[uuid.UUID] = []  # tokens

        self.polling = Polling(options.poll_interval)
        self.released_until = 0.0  # when all that was given back may be claimed again

        self.next_look = 0.0  # at what executors have started
        self.next_renewal = 0.0
        self.kept_house = False  # at the last opportunity
        self.housekeeping = Housekeeping(self._swept, takes_ticks=not options.drain)

        self.turns = 0  # of the loop
        self.metrics = HostMetrics(options.queues, self._now) if options.metrics_address else None
        self.had_executors_at = -NEVER
        self.signals: list[int] = []
        self.stopping = False
        self.stop_by = NEVER
        self.exit_status = 0

        self.endpoint: Endpoint | None = None
        if self.metrics is not None and options.metrics_address is not None:
            self.endpoint = Endpoint(options.metrics_address, {"/metrics": self.metrics.page})
            logger.info("Metrics are told at port %s, /metrics.", self.endpoint.port)

    # ── The loop ──────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> int:
        """Work until told to stop. Returns the exit status of the process."""
        self._catch_signals()
        try:
            while True:
                self.turns += 1
                self._obey_signals()
                self._hear_executors()
                self._settle_ended_executors()
                self.timeouts.enforce(self.children)
                self._release_unstarted()
                self._talk_to_database()
                self._announce()
                self._hand_out()
                self._keep_executors()
                self.health.beat(self._why_not_ready())
                if self._is_done():
                    return self.exit_status
                self.wakeup.wait(self._next_deadline() - clock())
        finally:
            self._close()

    def _next_deadline(self) -> float:
        """When the loop has something to do that nobody wakes it up for."""
        now = clock()
        deadlines = [
            self.listener.next_deadline,
            self.children.next_deadline,
            self.database.next_deadline,
            self.dispatch.next_deadline,
            self.timeouts.next_deadline(self.children),
            self.health.next_deadline,
            *(child.oldest_unstarted + START_WITHIN for child in self.children),
        ]
        if self.options.parent is not None and not self.stopping:
            deadlines.append(now + 1.0)
        if self.stopping:
            deadlines.append(self.stop_by if now < self.stop_by else self.stop_by + self.database.timeout)
        if self.pending is None:
            deadlines.append(max(self.outages.not_before, self._next_question()))
        return min(deadlines)

    def _next_question(self) -> float:
        """When the database is to be asked something again."""
        questions = [self.next_renewal, self.next_progress, self.listener.next_probe]
        if self.unsettled:
            questions.append(min(held.retry_at for held, _ in self.unsettled))
        if self.unanswered_claims:
            questions.append(0.0)
        if self._room():
            questions.append(self._next_claim())
        if self.options.maintenance and not self.stopping:
            questions.append(self.housekeeping.next_deadline)
        return min(questions)

    # ── Executors ─────────────────────────────────────────────────────────────────────────────────────────

    def _hear_executors(self) -> None:
        for child, event in self.children.events():
            self._take_note(child, event)
        if clock() >= min(self.next_look, self.timeouts.next_deadline(self.children)):
            self._look_at_executors()
        if self.children.working:
            if self.had_executors_at == -NEVER:
                logger.info("Ready to run jobs.")
            self.had_executors_at = clock()

    def _look_at_executors(self) -> None:
        self.next_look = clock() + LOOK_PAUSE
        for child, started in self.children.look():
            self._take_note(child, started)

    def _take_note(self, child: Child, event: News) -> None:
        held = event.held
        if isinstance(event, Started):
            self._count_start(held)
            self.timeouts.started(child, held, event.at)
            return
        if isinstance(event, Progressed):
            self.progress[held] = event.note
            self.next_progress = min(self.next_progress, clock() + PROGRESS_PAUSE)
            return
        outcome = event.outcome
        if held.started:
            if held.started_at == NEVER:
                self._count_start(held)
            self.dispatch.learn(held.claim.job_name, held.duration)
        elif held.abort_reason:
            outcome = Stopped()  # somebody asked while it waited
        self._decide(held, outcome)

    def _settle_ended_executors(self) -> None:
        for child in self.children.take_ended():
            for _, event in self.children.last_events(child):
                self._take_note(child, event)
            for started in child.look():  # for the last time
                self._count_start(started.held)
            how = str(child.exit) if child.exit else "died with its fork server"
            was_asked = child.stops or not child.ready  # of those that were never ready, `remove` tells
            if (child.jobs or not was_asked) and not child.killed_for and not self.stopping:
                logger.warning("Executor %s %s. Jobs that it had: %s.", child.pid, how, len(child.jobs))
            if child.killed_for:
                self.dead_sessions.append(child.name)
            for held in child.jobs.values():
                if held.started:
                    held.duration = clock() - held.started_at
                self._decide(held, self._fate_of(held, child, f"executor {how}"))
            self.children.remove(child)

    def _fate_of(self, held: Held, child: Child, how: str) -> Outcome:
        """What the end of its executor means for a job."""
        if held.completed:
            return NO_RESULT  # and there was no time to say so
        if held.abort_reason == "stop":
            return Stopped()
        if not held.started:
            return Unstarted()
        if held.abort_reason == "timeout":
            then = "It did not heed it, so its executor was killed."
            function = jobs.find(held.claim.job_name)
            give_up = function is not None and function.gives_up_on(JobTimeout)
            return Failed(timeouts.error(held.timeout, then), give_up=give_up)
        stopped_by_us = self.stopping and clock() >= self.stop_by and not self.children.crashed
        if child.killed_for or stopped_by_us:
            return Interrupted()
        return Crashed(JobError("", how))

    def _release_unstarted(self) -> None:
        """Give back what has waited for too long: another host may have a slot for it."""
        now = clock()
        for held in self.dispatch.take_overdue(now, everything=self.stopping):
            self._give_back(held)
        for child in self.children:
            if self.stopping or child.oldest_unstarted + START_WITHIN <= now:
                before = NEVER if self.stopping else now - START_WITHIN
                child.recall([held for held in child.unstarted.values() if held.handed_at < before])

    def _give_back(self, held: Held) -> None:
        """Release what found no slot. A suspect leaves the head of the queue to others for a while."""
        pauses = held.claim.crashes and not self.stopping
        self._decide(held, Unstarted(SUSPECT_PAUSE if pauses else None))

    def _hand_out(self) -> None:
        if self.stopping:
            self._release_unstarted()  # what has been claimed just before
        else:
            self.dispatch.hand_out(self.children.working, self.children.spares, self.children.leaving)

    def _keep_executors(self) -> None:
        if os.getpid() == 1:
            reap_orphans()
        self.children.keep()
        for child in self.children:
            may_stop = child.retiring or (self.stopping and not self._expects_news())
            if may_stop and not child.jobs and child.ready:
                child.stop()

    def _announce(self) -> None:
        """Let an executor tell the receivers of `job_finished` what has been settled."""
        if self.news and (children := self.children.working or self.children.spares):
            children[0].channel.send([["finished", [finished.to_plain() for finished in self.news]]])
            self.news.clear()

    def _expects_news(self) -> bool:
        """Whether something will be settled, or has been, that is to be announced."""
        waiting = self.unsettled or self.pending
        return bool(self.news or (waiting and execution.may_be_heard_of()))

    def _abort(self, held: Held) -> None:
        """End a job that somebody has asked to stop, or that may be running elsewhere."""
        if held.abort_reason:
            return
        if self.dispatch.withdraw(held):
            self._decide(held, Stopped())
            return
        self._look_at_executors()
        for child in self.children:
            if held.ticket in child.unstarted:
                held.abort_reason = "stop"
                child.recall([held])
            elif held.ticket in child.jobs:
                child.abort(held, "stop", JobStopped.message)

    # ── Deciding ──────────────────────────────────────────────────────────────────────────────────────────

    def _decide(self, held: Held, outcome: Outcome) -> None:
        verdict = decide(outcome, held.claim, jobs.policy_of(held.claim.job_name))
        if isinstance(outcome, Completed) and outcome.recorded:
            self._settled(held, verdict)
        else:
            self.unsettled.append((held, verdict))

    # ── The database ──────────────────────────────────────────────────────────────────────────────────────

    def _talk_to_database(self) -> None:
        """Take in the answer of the database thread, and give it the next piece of work."""
        self.listener.keep()
        if self.pending is not None:
            future, finish = self.pending
            if not future.done():
                self.database.enforce()
                return
            self.pending = None
            finish(future)
        now = clock()
        if now < self.outages.not_before:
            return
        if self._keeps_house(now):
            return
        turn, renewing, settling = self._next_turn(now)
        if turn:
            self._submit(
                lambda cursor: carry_out(cursor, turn),
                lambda future: self._finish_turn(turn, renewing, settling, future),
            )

    def _keeps_house(self, now: float) -> bool:
        """Tick, sweep or prune if it is time to: by turns with all else, and not before a renewal."""
        if self.kept_house or not self.options.maintenance or self.stopping or now >= self.next_renewal:
            self.kept_house = False
            return False
        may_sweep = self.outages.peers_have_renewed()
        task = self.housekeeping.tick_due() or self.housekeeping.due(may_sweep=may_sweep)
        if task is not None:
            self._submit(*task)
        self.kept_house = task is not None
        return self.kept_house

    def _submit(self, work: Callable[[Cursor], Any], finish: Callable[[Future[Any]], None]) -> None:
        self.pending = self.database.run(work), finish

    def _next_turn(self, now: float) -> tuple[Turn, list[Held], list[tuple[Held, Verdict]]]:
        """What to ask the database now; and the jobs whose claims it renews and settles."""
        turn = Turn(self.host, sent_at=now, one_by_one=self.one_by_one)
        turn.unanswered_claims = list(self.unanswered_claims)
        turn.dead_sessions = list(self.dead_sessions)
        settling = self._take_unsettled(now)
        # While results come in faster than they are written, jobs that would bring more stay where they are.
        room = 0 if _size(settling) >= BATCH_BYTES else self._room()
        will_claim = room > 0 and now >= self._next_claim()
        # What is due before the next poll goes along with this one: then an idle host asks half as often.
        soon = now + min(self.options.poll_interval, self.lease / 8) if will_claim else now
        if soon >= self.listener.next_probe:
            self.listener.note_probe()
            turn.probe = self.listener.probe_channel
        if self.listener.commanded:
            self.listener.commanded = False
            self.housekeeping.look_now()
            self.next_renewal = 0.0  # which tells what was asked of us
        renewing = []
        if soon >= self.next_renewal:
            self.next_renewal = now + self.lease / 4
            turn.announce = "stopping" if self.stopping else "running"
            turn.executors = self.children.told()
            renewing = [held for held in self.held.values() if not held.lost]
            turn.renewals = [held.claim for held in renewing]
        if settling or now >= self.next_progress:
            turn.progress = [(held.claim, note) for held, note in self.progress.items() if not held.lost]
            self.progress = {}
            self.next_progress = NEVER
        turn.settlements = [(held.claim, verdict) for held, verdict in settling]
        if will_claim:
            self.listener.notified = False
            turn.limit = room
            turn.token = uuid.uuid4()
            turn.after, turn.reached = self.polling.start(now)
        return turn, renewing, settling

    def _take_unsettled(self, now: float) -> list[tuple[Held, Verdict]]:
        """Up to a batch of verdicts to write now; fewer one by one, so that each attempt is sure to end."""
        settling: list[tuple[Held, Verdict]] = []
        size = 0
        for _ in range(min(len(self.unsettled), SINGLY if self.one_by_one else BATCH)):
            if size >= BATCH_BYTES:
                break
            held, verdict = self.unsettled.popleft()
            if held.lost:
                self._drop(held)
            elif held.retry_at > now:
                self.unsettled.append((held, verdict))
            else:
                settling.append((held, verdict))
                size += len(verdict.result or "")
        return settling

    def _room(self) -> int:
        """How many jobs to claim, if any are to be had."""
        if self.stopping or self.children.crashed:
            return 0
        return self.dispatch.room(self.children.working, self.children.leaving)

    def _next_claim(self) -> float:
        """When it is worth looking for jobs."""
        polling = self.polling
        drained = self.options.drain and not self.held and not (polling.found_nothing or polling.is_ahead)
        return 0.0 if self.listener.notified or drained else polling.next_look

    def _finish_turn(
        self, turn: Turn, renewing: list[Held], settling: list[tuple[Held, Verdict]], future: Future[Report]
    ) -> None:
        error = future.exception()
        if error is not None:
            self.unsettled.extendleft(reversed(settling))
            for held, _ in settling:
                held.may_be_settled |= turn.was_sent
            self._turn_failed(turn, error)
            return
        if self.outages.answered(turn.sent_at):
            self.listener.try_now()
        report = future.result()
        if turn.announce:
            self._vouched(turn.sent_at)
        if report.stop_asked_by is not None and not self.stopping:
            self._stop_because(f"Asked to by {store.in_one_line(report.stop_asked_by)}")
        self.one_by_one = False
        self.unanswered_claims = self.unanswered_claims[len(turn.unanswered_claims) :]
        self.dead_sessions = self.dead_sessions[len(turn.dead_sessions) :]
        self._take_renewals(turn, report, renewing)
        self._take_settlements(report, settling)
        for id, asked in report.renewed.items():
            if asked and id in self.held and not self.held[id].lost:
                self._abort(self.held[id])
        if report.claimed is not None:
            hears = self.listener.hears
            self.polling.learn(report.claimed, turn.limit, report.claim_took, clock(), hears=hears)
            self.listener.want(self.polling.wants_notifications)
            self._take_in(report.claimed, turn)

    def _take_renewals(self, turn: Turn, report: Report, renewing: list[Held]) -> None:
        known = report.settled | report.still_held | report.completed
        for held in renewing:
            if held.claim.id in report.renewed:
                held.valid_since = turn.sent_at
            elif held.claim.id not in known:
                if held.may_be_settled and not held.doubted:
                    held.doubted = True  # until the next renewal, if we do not hear of it before
                else:
                    self._lose(held)

    def _take_settlements(self, report: Report, settling: list[tuple[Held, Verdict]]) -> None:
        for held, verdict in settling:
            if held.claim.id in report.settled:
                self._settled(held, verdict)
            elif held.claim.id in report.still_held:
                held.retry_at = clock() + LOOK_AGAIN  # the others did not wait for it
                self.unsettled.append((held, verdict))
            elif held.claim.id in report.completed:
                self._settled(held, Verdict(Event.COMPLETE))
            else:
                self._drop(held)

    def _vouched(self, at: float) -> None:
        """Our claims were renewed. Silent for longer than the lease, we had lost those that others saw."""
        silent = at - self.vouched_at
        self.vouched_at = at
        if silent > self.lease:
            logger.warning(
                "This host was silent for %.1f s, longer than its lease of %g s.", silent, self.lease
            )

    def _take_in(self, claimed: store.Claimed, turn: Turn) -> None:
        if self.metrics is not None:
            self.metrics.claimed(claimed)
        for claim in claimed.claims:
            self.last_ticket += 1
            function = jobs.find(claim.job_name)
            held = Held(self.last_ticket, claim, function, turn.sent_at)
            if claim.id in self.held:
                self._lose(self.held[claim.id])  # swept while we were silent, and claimed by us again
            self.held[claim.id] = held
            if function is None:
                self._decide(held, execution.unknown(claim.job_name))
            elif claim.attempts > claim.max_attempts:
                text = f"Claimed {claim.attempts} times, although max_attempts is {claim.max_attempts}."
                self._decide(held, Failed(JobError("", text), give_up=True))
            elif not self.dispatch.add(held):
                self._give_back(held)

    def _settled(self, held: Held, verdict: Verdict) -> None:
        self._forget(held)
        if verdict.event is Event.RELEASE:
            self.released_until = max(self.released_until, clock() + (verdict.delay or 0.0))
        if self.metrics is not None:
            self.metrics.finished(held.claim, verdict.event, held.duration if held.started else None)
        if verdict.event not in (Event.RELEASE, Event.PARK):
            self._tell(held.claim, verdict, held.duration)
        level = _LEVELS.get(verdict.event, logging.INFO)
        if verdict.event is not Event.RELEASE and logger.isEnabledFor(level):
            error = f" error={verdict.error.exception or verdict.error.message}" if verdict.error else ""
            fields = {"job_event": verdict.event.value, "job_seconds": round(held.duration, 3)}
            text = "%s %s seconds=%.3f%s"
            logger.log(level, text, held.claim, _told(verdict), held.duration, error, extra=fields)

    def _swept(self, settled: list[store.Settlement]) -> None:
        if self.metrics is not None:
            self.metrics.swept(settled)
        for claim, verdict in settled:
            self._tell(claim, verdict, None)

    def _tell(self, claim: store.Claim, verdict: Verdict, duration: float | None) -> None:
        if execution.is_heard_of(verdict.event, duration, verdict.error):
            self.news.append(Finished(claim, verdict.event, duration, verdict.error))

    def _lose(self, held: Held) -> None:
        """The row is no longer ours: swept while we were silent, or changed by hand."""
        if held.lost:
            return
        held.lost = True
        self._count_loss(held)
        logger.warning("%s: the claim was lost. The job may be running elsewhere.", held.claim)
        if self.dispatch.withdraw(held):
            self._forget(held)
        else:
            self._abort(held)

    def _drop(self, held: Held) -> None:
        """Give up an outcome whose claim no longer holds, and say so."""
        if held.may_be_settled:
            what = "its outcome was stored, and the answer got lost; or its claim did"
        else:
            if not held.lost:
                self._count_loss(held)
            what = "the claim was lost, so its outcome is dropped"
        held.lost = True
        logger.warning("%s: %s.", held.claim, what)
        self._forget(held)

    def _forget(self, held: Held) -> None:
        self.polling.found_nothing = False  # it may have left something behind
        if self.held.get(held.claim.id) is held:
            del self.held[held.claim.id]

    def _turn_failed(self, turn: Turn, error: BaseException) -> None:
        if turn.token is not None:
            self.listener.notified = True
            if turn.was_sent:
                self.unanswered_claims.append(turn.token)  # the COMMIT may have reached the server
        if turn.probe:
            self.listener.probe_again()
        if turn.renewals or turn.announce:
            self.next_renewal = 0.0
        if is_outage(error):
            self._keep_progress(turn)
        if is_outage(error) or turn.one_by_one or not turn.settlements:
            if self.outages.failed(error, turn.sent_at) and not self.stopping:
                logger.error(
                    "The database has refused to work with this worker for three leases, so it ends."
                )
                self.exit_status = 1
                self._stop(grace=self.options.grace)
        else:
            problem = str(error).partition("\n")[0]  # the next line may have a row
            logger.warning("A batch of outcomes could not be stored (%s); trying them singly.", problem)
            self.one_by_one = True

    def _keep_progress(self, turn: Turn) -> None:
        """Write it the next time, unless there is something newer to tell."""
        for claim, note in turn.progress:
            held = self.held.get(claim.id)
            if held is not None and held.claim is claim:
                self.progress.setdefault(held, note)
                self.next_progress = 0.0

    # ── Counting ──────────────────────────────────────────────────────────────────────────────────────────

    def _count_start(self, held: Held) -> None:
        if self.metrics is not None:
            self.metrics.started(held.claim)

    def _count_loss(self, held: Held) -> None:
        if self.metrics is not None:
            self.metrics.lost(held.claim)

    def _now(self) -> Now:
        """What metrics tell besides what they have counted. Called in another thread, so it only reads."""
        now = clock()
        claimed_at = [held.claimed_at for held in list(self.held.values())]
        children = list(self.children)
        running = sum(len(child.jobs) for child in children)
        unsettled = len(self.unsettled)
        leaving = sum(child.retiring for child in children)
        ready = sum(child.ready and not child.retiring for child in children)
        each = self.options.threads + self.options.async_slots
        return Now(
            ready=not self.health.last_beat.why_not_ready(),
            listening=self.listener.hears,
            connections={"queue": self.database.is_connected, "listener": self.listener.is_connected},
            running=running,
            waiting=max(len(claimed_at) - running - unsettled, 0),
            unsettled=unsettled,
            oldest_claim=now - min(claimed_at, default=now),
            slots=self.options.processes * each,
            executors={"starting": len(children) - ready - leaving, "ready": ready, "leaving": leaving},
            executors_started=self.children.started,
            executors_ended=self.children.ended.copy(),
            memory=[child.resident_bytes() for child in children if child.pid is not None],
            turns=self.turns,
            database_failures=self.outages.total,
            missed_notifications=self.listener.missed,
        )

    # ── Starting and stopping ─────────────────────────────────────────────────────────────────────────────

    def _catch_signals(self) -> None:
        self.wakeup.catch_signals()
        # A terminal that is closed sends HUP: no reason to leave jobs to the sweep, unless nohup says stay.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self.signals.append(number))

    def _obey_signals(self) -> None:
        while self.signals:
            name = signal.Signals(self.signals.pop(0)).name
            self._look_at_executors()
            if not self.stopping:
                self._stop_because(name)
            else:
                logger.info("%s again: stopping at once.", name)
                self.stop_by = min(self.stop_by, clock())  # and no later, however often we are told
        if self.options.parent not in (None, os.getppid()) and not self.stopping:
            logger.info("The parent process has ended: stopping.")
            self._stop(grace=self.options.grace)
        if self.children.crashed and not self.stopping:
            self.exit_status = 1
            self._stop(grace=0.0)
        if self.stopping and clock() >= self.stop_by:
            for child in self.children:
                child.kill()

    def _why_not_ready(self) -> str:
        """What keeps this host from running jobs; nothing, if it is ready."""
        if self.stopping:
            return "The worker is stopping."
        if clock() - self.had_executors_at > PATIENCE:
            return "No executor is ready."
        if self.vouched_at == NEVER:
            return "The database has not answered yet."
        if (silent := clock() - self.vouched_at) > self.lease / 2:
            return f"The database has not answered for {silent:.0f} s."
        return ""

    def _stop_because(self, why: str) -> None:
        running = sum(held.started for held in self.held.values())
        logger.info("%s: stopping. %s running jobs have %g s to finish.", why, running, self.options.grace)
        self._stop(grace=self.options.grace)

    def _stop(self, grace: float) -> None:
        self.stopping = self.children.stopping = True
        self.stop_by = clock() + grace
        self.next_renewal = 0.0  # tell that we are stopping

    def _is_done(self) -> bool:
        if self.options.drain and not self.stopping and self._is_drained():
            self._stop(grace=self.options.grace)
        if not self.stopping:
            return False
        overdue = clock() >= self.stop_by + self.database.timeout
        executors_ended = self.children.have_ended or (self.children.inline and clock() >= self.stop_by)
        settled = not self.unsettled and not self.unanswered_claims and self.pending is None
        if overdue and not (executors_ended and settled):
            logger.error(
                "%s jobs could not be settled before the end; a sweep will find them.", len(self.held)
            )
            self.exit_status = 1
            return True
        return executors_ended and settled

    def _is_drained(self) -> bool:
        return (
            self.polling.found_nothing
            and not self.held
            and not self.listener.notified
            and self.pending is None
            and self.released_until <= clock() < self.polling.next_due
        )

    def _close(self) -> None:
        running = [held for child in self.children for held in child.jobs.values() if held.started]
        for held in running:
            logger.warning("%s was left running.", held.claim)
        self.database.run(lambda cursor: store.forget_worker(cursor, self.host.id))
        self.database.close()
        self.listener.close()
        self.children.close()
        self.wakeup.close()
        self.health.close()
        if self.endpoint is not None:
            self.endpoint.close()


def _how_to_listen(settings: Config) -> Callable[[], psycopg.Connection[Any]] | None:
    if not settings.LISTEN:
        logger.info("LISTEN is off, so polling for new jobs.")
        return None
    alias = settings.LISTEN_DATABASE or settings.DATABASE
    timeout = settings.LEASE.total_seconds() / 4
    return lambda: connect(alias, timeout, "listener")


def _size(settling: Sequence[tuple[Held, Verdict]]) -> int:
    """The bytes of results among these."""
    return sum(len(verdict.result or "") for _, verdict in settling)


_LEVELS = {Event.FAIL: logging.WARNING, Event.BURY: logging.ERROR, Event.PARK: logging.WARNING}

_VERBS = {
    Event.COMPLETE: "completed",
    Event.FAIL: "failed",
    Event.BURY: "dead-lettered",
    Event.SNOOZE: "snoozed",
    Event.RELEASE: "released",
    Event.INTERRUPT: "interrupted",
    Event.PARK: "parked",
    Event.STOP: "stopped",
}


def _told(verdict: Verdict) -> str:
    verb = _VERBS[verdict.event]
    return verb if verdict.delay is None else f"{verb} again_in={round(verdict.delay, 3):.15g}s"


def reap_orphans() -> None:
    """As the first process of a container: see off processes that jobs have left behind."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def start(options: Options) -> int:
    """Run a worker host in this process until it is told to stop. Returns the exit status."""
    forkserver = None
    if not options.inline:
        # Each slot's job may be the last one of an executor on its way out; twice that, since jobs that are
        # to end hold no slot. Memory that is never touched costs nothing.
        count = 2 * (options.processes * (1 + options.threads + options.async_slots) + 1)
        forkserver = Forkserver(Areas(count, options.threads, options.async_slots))
        # What is loaded now stays, and hardly anything that comes refers to itself: a tenth of this process's
        # time went into looking for it.
        gc.freeze()
        gc.set_threshold(50_000)
    return Supervisor(options, forkserver).run()
