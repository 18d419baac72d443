"""The checker finds what is wrong with a history, and finds nothing where nothing is."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import transaction

from django_pgjobs import maintenance, store
from django_pgjobs.lifecycle import TRANSITIONS, Event, JobError, Status, Verdict
from tests.factories import make_job
from tests.faults import bodies, ledger
from tests.faults.audit import Audit, Change
from tests.faults.checker import (
    ALLOWED,
    LOST,
    WORKER,
    Death,
    History,
    Recoveries,
    assert_kept,
    check,
    check_log,
    recoveries,
    repeats,
    spread,
)
from tests.faults.ledger import Effect, Producer
from tests.faults.serverlog import ServerLog
from tests.sessions import session
from tests.workers import until

QUEUED, PROCESSING, FAILED, COMPLETED, CANCELLED = Status


class Story:
    """A history of one job, written by hand: each call is a change, one second after the one before."""

    def __init__(self, **facts: Any) -> None:
        self.changes: list[Change] = []
        self.effects: list[Effect] = []
        self.producer = Producer()
        self.now = 1000.0
        self._row: dict[str, Any] = {}
        self._facts = {"job": 1, "job_name": "tests.faults.bodies.work", "rerun_if_lost": True} | facts
        self.write(
            QUEUED, application="", attempts=0, crashes=0, run_at=1000.0, token=None, locked_at=None,
            interruptions=None, max_attempts=3, worker=None, stop_requested=False, unknown_since=None,
            last_error=None, number="1",
        )  # fmt: skip

    def write(
        self, status: Status | None, *, application: str = WORKER, backend: int = 10, **columns: Any
    ) -> Story:
        old = self._row
        self._row = old | {"status": status} | columns
        self.now += 1.0
        values: dict[str, Any] = {
            "sequence": len(self.changes) + 1, "at": self.now, "transaction": 1, "backend": backend,
            "application": application, "number": None, "old_status": old.get("status"),
            **{f"old_{name}": old.get(name) for name in
               ("token", "attempts", "crashes", "run_at", "locked_at", "interruptions")},
            **self._facts, **self._row,
        }  # fmt: skip
        if status not in (QUEUED, FAILED):
            values["last_error"] = None
        self._row["number"] = None
        self.changes.append(Change(**values))
        return self

    @property
    def attempts(self) -> int:
        return int(self._row["attempts"])

    # What the protocol does.

    def claim(self, token: str = "", **columns: Any) -> Story:
        columns = {
            "token": token or f"token {len(self.changes)}", "attempts": self.attempts + 1, "worker": "host A",
            "locked_at": self.now + 1, "stop_requested": False,
        } | columns  # fmt: skip
        return self.write(PROCESSING, **columns)

    def renew(self, **columns: Any) -> Story:
        return self.write(PROCESSING, **({"locked_at": self.now + 1} | columns))

    def complete(self, **columns: Any) -> Story:
        return self.write(COMPLETED, **columns)

    def requeue(self, **columns: Any) -> Story:
        return self.write(QUEUED, **({"token": None, "locked_at": None} | columns))

    def fail(self, **columns: Any) -> Story:
        return self.requeue(**({"run_at": self.now + 1, "last_error": "ValueError: boom"} | columns))

    def bury(self, **columns: Any) -> Story:
        return self.write(FAILED, **({"last_error": "ValueError: boom"} | columns))

    def pause(self) -> Story:
        self.now += 60.0
        return self

    def lose(self, **columns: Any) -> Story:
        return self.pause().fail(**({"last_error": LOST, "backend": 99} | columns))

    def release(self, **columns: Any) -> Story:
        return self.requeue(attempts=self.attempts - 1, **columns)

    def interrupt(self) -> Story:
        return self.release(interruptions="1")

    def snooze(self) -> Story:
        return self.release(run_at=self.now + 1)

    def park(self) -> Story:
        return self.release(run_at=self.now + 1, unknown_since="1000.0")

    def stop(self) -> Story:
        return self.write(CANCELLED, stop_requested=False)

    def retry(self, **columns: Any) -> Story:
        return self.requeue(
            **({"application": "", "attempts": 0, "crashes": 0, "run_at": self.now + 1} | columns)
        )

    def prune(self) -> Story:
        return self.write(None)

    # What the body does.

    def start(self, run: str = "run 1", pid: int = 77) -> Story:
        self.effects.append(Effect("start", 1, run, pid, self.now + 0.1))
        return self

    def end(self, run: str = "run 1") -> Story:
        self.effects.append(Effect("end", 1, run, 77, self.now + 0.2))
        return self

    def run(self, run: str = "run 1") -> Story:
        return self.start(run).end(run)

    def history(self, **facts: Any) -> History:
        return History(self.changes, self.effects, self.producer, **({"lease": 60.0} | facts))

    def check(self, **options: Any) -> list[str]:
        return check(self.history(), **options)


def once(**facts: Any) -> Story:
    return Story(job_name="tests.faults.bodies.work_once", rerun_if_lost=False, **facts)


# ── Good histories ────────────────────────────────────────────────────────────────────────────────────────

GOOD: dict[str, Callable[[], Story]] = {
    "completed": lambda: Story().claim().run().complete(),
    "renewed": lambda: Story().claim().start().renew().renew().end().complete(),
    "failed, then completed": lambda: Story().claim().start().fail().claim().run("2").complete(),
    "buried": lambda: Story().claim().start().fail().claim().start("2").bury(),
    "crashed": lambda: Story().claim().start().fail(crashes=1).claim().run("2").complete(),
    "released": lambda: Story().claim().release().claim().run().complete(),
    "interrupted": lambda: Story().claim().start().interrupt().claim().run("2").complete(),
    "snoozed": lambda: Story().claim().start().snooze().claim().run("2").complete(),
    "parked": lambda: Story().claim().park().claim().run().complete(),
    "lost": lambda: Story().claim().start().lose().claim().run("2").complete(),
    "lost and still running": lambda: Story().claim().start().lose().claim().run("2").end().complete(),
    "lost before it started": lambda: Story().claim().lose().claim().run().complete(),
    "retried by a person": lambda: Story().claim().start().bury().retry().claim().run("2").complete(),
    "cancelled": lambda: Story().write(CANCELLED, application=""),
    "cancelled, then retried": lambda: (
        Story().write(CANCELLED, application="").retry().claim().run().complete()
    ),
    "discarded": lambda: Story().claim().start().bury().write(CANCELLED, application=""),
    "stopped": lambda: (
        Story()
        .claim()
        .start()
        .renew(stop_requested=True, application="")
        .write(CANCELLED, stop_requested=False)
    ),
    "pruned": lambda: Story().claim().run().complete().prune(),
    "at most once, and completed": lambda: once().claim().run().complete(),
    "at most once, and lost": lambda: once().claim().start().pause().bury(last_error=LOST, backend=99),
    "at most once, and failing by itself": lambda: once().claim().start().fail().claim().run("2").complete(),
    "at most once, and retried": lambda: once().claim().start().bury().retry().claim().run("2").complete(),
}


@pytest.mark.parametrize("name", GOOD)
def test_nothing_is_wrong_with(name: str) -> None:
    assert GOOD[name]().check() == []


# ── Bad ones ──────────────────────────────────────────────────────────────────────────────────────────────

BAD: dict[str, tuple[str, Callable[[], Story]]] = {
    "is left waiting": ("K1: .* did not come to an end", lambda: Story()),
    "is left running": ("K1: .* did not come to an end", lambda: Story().claim().start()),
    "leaves completion": (
        "K2: .* went from completed to queued",
        lambda: Story().claim().run().complete().requeue().claim().run("2").complete(),
    ),
    "is completed twice": (
        "K2: .* went from completed to completed",
        lambda: Story().claim().run().complete().complete(),
    ),
    "is completed without a claim": ("K2: .* went from queued to completed", lambda: Story().complete()),
    "is claimed as a dead letter": (
        "K2: .* went from failed to processing",
        lambda: Story().claim().start().bury().claim().run("2").complete(),
    ),
    "is deleted while it waits": ("K2: .* went from queued to nothing", lambda: Story().prune()),
    "is deleted while it runs": (
        "K2: .* went from processing to nothing",
        lambda: Story().claim().run().prune(),
    ),
    "is changed behind the audit's back": (
        "K2: .* changed without a change that was seen",
        lambda: _without(Story().claim().lose().claim().run().complete(), 2),
    ),
    "gets a second token": (
        "K3: .* got another token while its claim was valid",
        lambda: Story().claim().run().renew(token="stolen").complete(),
    ),
    "is claimed twice with one token": (
        "K3: .* a token that it has had before",
        lambda: Story().claim("same").start().fail().claim("same").run("2").complete(),
    ),
    "keeps its token while it waits": (
        "K3: .* waits with a token",
        lambda: Story().claim().start().fail(token="kept").claim().run("2").complete(),
    ),
    "is completed with another token": (
        "K3: .* got another token",
        lambda: Story().claim().run().complete(token="other"),
    ),
    "is swept while it is renewed": (
        "K3: .* had been silent for 59.000 s",
        lambda: _hurried(Story().claim().start().lose().claim().run("2").complete(), 2, 2.0),
    ),
    "is locked for an earlier time": (
        "K3: .* locked for an earlier time",
        lambda: Story().claim().run().renew(locked_at=900.0).complete(),
    ),
    "inherits a wish to stop": (
        "K3: .* the wish to stop",
        lambda: Story().claim(stop_requested=True).run().complete(),
    ),
    "is completed by another host": (
        "K4: .* by a host that did not hold its claim",
        lambda: _seen(Story(), "host B", 20).claim().run().complete(backend=20),
    ),
    "is renewed by another host": (
        "K4: .* by a host that did not hold its claim",
        lambda: _seen(Story(), "host B", 20).claim().run().renew(backend=20).complete(),
    ),
    "is retried by a host": (
        "K4: .* by a host although nobody held it",
        lambda: Story().claim().start().bury().retry(application=WORKER).claim().run("2").complete(),
    ),
    "is cancelled by a host": (
        "K4: .* by a host although nobody held it",
        lambda: Story().write(CANCELLED),
    ),
    "is touched by a host after its end": (
        "K4: .* by a host although nobody held it",
        lambda: Story().claim().start().bury().bury(),
    ),
    "is claimed without being counted": (
        "K5: .* without its attempts being raised",
        lambda: Story().claim(attempts=0).run().complete(),
    ),
    "is counted twice": (
        "K5: .* without its attempts being raised",
        lambda: Story().claim(attempts=2).run().complete(),
    ),
    "is counted when renewed": (
        "K5: .* other attempts without a claim",
        lambda: Story().claim().run().renew(attempts=2).complete(),
    ),
    "is counted while it waits": (
        "K5: .* other attempts without a claim",
        lambda: Story().write(QUEUED, application="", attempts=1).claim().run().complete(),
    ),
    "is refunded when completed": (
        "K5: .* its attempts fell by 1",
        lambda: Story().claim().run().complete(attempts=0),
    ),
    "is refunded twice": (
        "K5: .* its attempts fell by 2",
        lambda: (
            Story().claim().start().fail().claim().start("2").fail(attempts=0).claim().run("3").complete()
        ),
    ),
    "is retried without fresh attempts": (
        "K5: .* without fresh attempts",
        lambda: Story().claim().start().bury().retry(attempts=1).claim().run("2").complete(),
    ),
    "is claimed too often": (
        "K5: .* beyond its 3 attempts",
        lambda: Story().claim(attempts=4).bury(),
    ),
    "counts two crashes at once": (
        "K5: .* other crashes than one more",
        lambda: Story().claim().start().fail(crashes=2).claim().run("2").complete(),
    ),
    "starts twice under one claim": (
        "K5: .* had started 2 times .* more than claimed",
        lambda: Story().claim().run().run("2").complete(),
    ),
    "starts before its claim": (
        "K5: .* had started 1 times .* more than claimed",
        lambda: Story().run().claim().run("2").complete(),
    ),
    "was released after it had started": (
        "K6: .* started 2 times, of which 1 are accounted for",
        lambda: Story().claim().start().release().claim().run("2").complete(),
    ),
    "was parked after it had started": (
        "K6: .* started 2 times, of which 1 are accounted for",
        lambda: Story().claim().start().park().claim().run("2").complete(),
    ),
    "runs again after its last attempt": (
        "K6: .* is to run again after its 3 attempts",
        lambda: Story().claim(attempts=3).start().fail().claim(attempts=3).run("2").complete(),
    ),
    "fails without a reason": (
        "K6: .* was failed without a reason",
        lambda: Story().claim().start().fail(last_error=None).claim().run("2").complete(),
    ),
    "is buried without a reason": (
        "K6: .* was buried without a reason",
        lambda: Story().claim().start().bury(last_error=None),
    ),
    "is claimed before it is due": (
        "K7: .* was claimed before it was due",
        lambda: Story().claim().start().fail(run_at=9000.0).claim().run("2").complete(),
    ),
    "ends what never started": (
        "K7: .* ended a run, .* that never started",
        lambda: Story().claim().run().end("ghost").complete(),
    ),
    "is completed before its body ended": (
        "K7: .* was completed without the end of a run under this claim",
        lambda: Story().claim().start().complete().end(),
    ),
    "is completed by the end of a lost run": (
        "K7: .* was completed without the end of a run under this claim",
        lambda: Story().claim().start().lose().claim().start("2").end("run 1").complete(),
    ),
    "is completed without having run": (
        "K8: .* was completed and its body never started",
        lambda: Story().claim().complete(),
    ),
    "is queued when lost, though at most once": (
        "K8: .* is to run at most once, was lost, and is queued",
        lambda: once().claim().start().lose().write(CANCELLED, application=""),
    ),
    "is queued when interrupted, though at most once": (
        "K8: .* is to run at most once, was interrupted, and is queued",
        lambda: once().claim().start().interrupt().write(CANCELLED, application=""),
    ),
    "is queued after a crash, though at most once": (
        "K8: .* is to run at most once, was failed, and is queued",
        lambda: once().claim().start().fail(crashes=1).write(CANCELLED, application=""),
    ),
    "starts twice, though at most once": (
        "K8: .* is to run at most once and started 2 times",
        lambda: once().claim().start().lose().claim().run("2").complete(),
    ),
}


def _without(story: Story, place: int) -> Story:
    del story.changes[place]
    return story


def _hurried(story: Story, place: int, seconds: float) -> Story:
    """Let a change have happened earlier."""
    story.changes[place] = story.changes[place]._replace(at=story.changes[place].at - seconds)
    return story


def _seen(story: Story, worker: str, backend: int) -> Story:
    """Let another host have held the job before, and so be known by its connection."""
    return story.claim(worker=worker, backend=backend).release(backend=backend)


@pytest.mark.parametrize("name", BAD)
def test_it_is_found_when_a_job(name: str) -> None:
    expected, story = BAD[name]
    violations = story().check()
    assert any(re.match(expected, violation) for violation in violations), violations


def test_each_violation_names_the_job_and_the_changes() -> None:
    (violation,) = Story().claim("abc").run().renew(locked_at=900.0).complete().check()
    assert violation.startswith("K3: job 1 (tests.faults.bodies.work) was locked for an earlier time")
    assert "[2: queued → processing at 1002.000, abc, attempts 1, by django_pgjobs worker (10)]" in violation
    assert "[3: processing → processing at 1003.000" in violation


def test_what_is_not_at_its_end_may_still_get_there() -> None:
    assert Story().check(everything_ended=False) == []
    assert Story().claim().start().check(everything_ended=False) == []


def test_nothing_is_repeated_without_faults() -> None:
    story = GOOD["lost"]()
    assert story.check() == []
    (violation,) = story.check(faultless=True)
    assert violation.startswith("K6: job 1 (tests.faults.bodies.work) started 2 times although")
    assert repeats(story.history()) == 1


def test_completion_may_delete() -> None:
    story = Story().claim().run().prune()
    assert check(story.history(deletes_completed=True)) == []
    unseen = Story().claim().prune()
    (violation,) = check(unseen.history(deletes_completed=True))
    assert violation.startswith("K8")


def test_nothing_is_said_about_bodies_that_leave_nothing() -> None:
    assert check(History(Story().claim().complete().changes)) == []
    assert check(Story(job_name="tests.jobs.add").claim().complete().history()) == []


def test_what_producers_were_told() -> None:
    story = Story().claim().run().complete()
    story.producer.acknowledged = {1}
    story.producer.unknown = {2}
    assert story.check() == []
    story.producer.acknowledged.add(3)
    assert story.check() == ["K1: job number 3 was acknowledged and is there 0 times."]
    story.producer.acknowledged = set()
    story.producer.rolled_back = {1}
    assert story.check() == ["K1: job number 1 was rolled back and is there."]
    story.producer.rolled_back = set()
    story.producer.unknown = {1}
    again = Story(job=2).claim().complete()
    story.changes += again.changes
    assert "K1: job number 1, which may be there once, is there 2 times." in story.check()


def test_a_bad_history_fails_a_test() -> None:
    assert_kept(Story().claim().run().complete().history())
    with pytest.raises(AssertionError, match="1 violations, of which the first are:\nK1: job 1"):
        assert_kept(Story().history())


def test_all_transitions_of_the_lifecycle_are_allowed_and_no_others() -> None:
    assert {(old, new) for olds, new in TRANSITIONS.values() for old in olds} == ALLOWED
    assert not any(old is COMPLETED for old, _ in ALLOWED)
    assert (PROCESSING, COMPLETED) in ALLOWED
    assert TRANSITIONS[Event.RETRY][1] is QUEUED


# ── Figures ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_time_from_the_death_of_a_host() -> None:
    story = Story().claim().start()
    died_at = story.now + 0.5
    story.lose().claim().run("2").complete()
    found = recoveries(story.history(), [Death(died_at, worker="host A")])
    assert found.hosts == pytest.approx([60.5])
    assert found.hosts_reclaimed == pytest.approx([61.5])
    assert (found.executors, found.executors_reclaimed) == ([], [])
    for death in (Death(died_at, worker="host B"), Death(story.now + 1, worker="host A")):
        assert recoveries(story.history(), [death]) == Recoveries()


def test_the_time_from_the_death_of_an_executor() -> None:
    story = Story().claim().start(pid=5)
    died_at = story.now + 0.5
    story.fail(crashes=1).claim().run("2").complete()
    found = recoveries(story.history(), [Death(died_at, executor=5)])
    assert found.executors == pytest.approx([0.5])
    assert found.executors_reclaimed == pytest.approx([1.5])
    assert found.figures() == {
        "max_executor_recovery_median": pytest.approx(0.5), "max_executor_recovery": pytest.approx(0.5),
        "max_executor_reclaim_median": pytest.approx(1.5), "max_executor_reclaim": pytest.approx(1.5),
    }  # fmt: skip
    for death in (Death(died_at, executor=6), Death(story.now, executor=77)):
        assert recoveries(story.history(), [death]) == Recoveries()


def test_the_spread_of_durations() -> None:
    assert spread("wait", [1.0, 5.0, 2.0]) == {"max_wait_median": 2.0, "max_wait": 5.0}
    assert spread("wait", []) == {}


# ── The server's log ──────────────────────────────────────────────────────────────────────────────────────


def line(application: str, state: str, text: str, level: str = "ERROR") -> str:
    return f"2026-01-02 03:04:05.678 UTC [123] db=test app={application} state={state} {level}:  {text}\n"


def test_deadlocks_and_errors_of_ours_are_found_in_a_log() -> None:
    log = (
        line("somebody", "40P01", "deadlock detected")
        + line("somebody", "42601", "syntax error")
        + line("django_pgjobs worker", "57014", "canceling statement")
        + line("django_pgjobs worker", "23505", "duplicate key")
        + line("django_pgjobs worker", "00000", "duration: 3 ms", level="LOG")
        + "\tand a line that belongs to it\n"
    )
    assert check_log(log, allowed={"57014"}) == [
        "K10: somebody met 40P01, 'deadlock detected'.",
        "K10: django_pgjobs worker met 23505, 'duplicate key'.",
    ]


def test_the_log_of_the_server_is_read(observer: psycopg.Connection[Any], server_log: ServerLog) -> None:
    if server_log.path is None:
        pytest.skip("The server's log cannot be read here.")
    with session(application_name="django_pgjobs worker") as worker:
        with pytest.raises(psycopg.errors.DivisionByZero):
            worker.execute("SELECT 1/0")
        with pytest.raises(psycopg.errors.UndefinedTable):
            worker.execute("SELECT FROM nowhere")
    with pytest.raises(psycopg.errors.UndefinedColumn):
        observer.execute("SELECT nothing")
    (violation,) = until(lambda: check_log(server_log.text(), allowed={"42P01"}), what="the log")
    assert violation == "K10: django_pgjobs worker met 22012, 'division by zero'."


# ── The records ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_audit_sees_every_change(audit: Audit, observer: psycopg.Connection[Any]) -> None:
    before = time.time()
    handle = bodies.work.enqueue(7)
    with transaction.atomic():
        bodies.work.enqueue(8)
        transaction.set_rollback(True)
    observer.execute("UPDATE background_jobs SET status = 'cancelled'")
    store.retry([handle.id])
    observer.execute("UPDATE background_jobs SET status = 'processing', locked_at = statement_timestamp()")
    observer.execute("DELETE FROM background_jobs")
    changes = audit.changes()
    assert [(change.old_status, change.status) for change in changes] == [
        (None, QUEUED), (QUEUED, CANCELLED), (CANCELLED, QUEUED), (QUEUED, PROCESSING), (PROCESSING, None),
    ]  # fmt: skip
    assert [change.number for change in changes] == ["7", None, None, None, None]
    assert {change.job for change in changes} == {handle.id}
    assert changes[0].job_name == "tests.faults.bodies.work"
    assert changes[1].application == "observer"
    assert before <= changes[0].at <= changes[-1].at <= time.time()
    assert changes[3].run_at <= changes[3].at
    assert changes[4].old_locked_at == changes[3].locked_at
    assert len(check(History(changes), everything_ended=False)) == 2  # not counted, and deleted


ENDS = {
    "completed": Verdict(Event.COMPLETE),
    "failed": Verdict(Event.FAIL, 0.0, error=JobError("builtins.ValueError", "boom")),
    "buried": Verdict(Event.BURY, error=JobError("builtins.ValueError", "boom")),
    "snoozed": Verdict(Event.SNOOZE, 5.0),
    "released": Verdict(Event.RELEASE),
    "interrupted": Verdict(Event.INTERRUPT, note={"interruptions": 1}),
    "parked": Verdict(Event.PARK, 5.0, note={"unknown_since": 17.5}),
    "stopped": Verdict(Event.STOP),
    "lost": Verdict(Event.FAIL, 0.0, error=JobError("", LOST)),
}


@pytest.mark.parametrize("how", ENDS)
def test_what_a_change_meant_is_read_from_the_row(how: str, audit: Audit) -> None:
    bodies.work.enqueue(1)
    with store.own_transaction("default") as cursor:
        (claim,) = store.claim(cursor, token=uuid.uuid4(), worker_id=uuid.uuid4(), limit=1).claims
    with store.own_transaction("default") as cursor:
        store.renew(cursor, [claim])
        store.settle(cursor, [(claim, ENDS[how])])
    history = History(audit.changes())
    assert [hold.how for hold in history.jobs[claim.id].holds] == [how]
    assert check(history, everything_ended=False) == []


def test_sweeps_look_like_what_they_are(audit: Audit, settings: Any) -> None:
    settings.PGJOBS = {"LEASE": 0.1}  # a server that has just been started is not swept
    make_job(PROCESSING, locked_at=-timedelta(hours=1), payload={"args": [1]})
    with store.own_transaction("default") as cursor:
        assert maintenance.sweep(cursor, limit=10).total == 1
    last = audit.changes()[-1]
    assert (last.status, last.last_error) == (QUEUED, LOST)


def test_the_ledger_keeps_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger"
    assert ledger.read(path) == []
    monkeypatch.setenv(ledger.VARIABLE, str(path))
    with ledger.entry(1):
        ledger.start(2)
    with pytest.raises(ValueError, match="boom"), ledger.entry(3):
        raise ValueError("boom")
    effects = ledger.read(path)
    assert [(effect.what, effect.number) for effect in effects] == [
        ("start", 1), ("start", 2), ("end", 1), ("start", 3),
    ]  # fmt: skip
    assert effects[0].run == effects[2].run != effects[1].run


@pytest.mark.django_db(transaction=True)
def test_a_producer_keeps_what_it_was_told() -> None:
    producer = Producer()

    def lose(numbers: list[int]) -> None:
        raise psycopg.OperationalError("server closed the connection")

    assert producer.enqueue(lambda numbers: None, 2) == [1, 2]
    assert producer.enqueue(lose) == [3]
    with pytest.raises(ValueError, match="4"):
        producer.enqueue(lambda numbers: int(f"x{numbers}"))
    assert (producer.acknowledged, producer.unknown, producer.rolled_back) == ({1, 2}, {3}, {4})
