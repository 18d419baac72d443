"""Immediate mode: whoever enqueues a job runs it."""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, connections, transaction
from django.test import TestCase

from django_pgjobs import inplace, job, jobs
from django_pgjobs.models import BackgroundJob, BackgroundQueue
from django_pgjobs.testing import assert_enqueued, captured_jobs, drain, run_job
from tests.factories import rows
from tests.jobs import add, add_async, again, boom, give_up, snooze
from tests.models import Effect
from tests.sessions import session

HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def registry():
    before = dict(jobs.registry)
    yield jobs.registry
    jobs.registry.clear()
    jobs.registry.update(before)


@pytest.fixture(autouse=True)
def immediate(settings):
    settings.PGJOBS = {"IMMEDIATE": True}


@pytest.fixture
def ran():
    """Job functions leave their names here."""
    return []


@pytest.fixture
def note(ran):
    return job(name="tests.note")(ran.append)


def statuses() -> list[str]:
    return [row["status"] for row in rows().values()]


# ── One job ───────────────────────────────────────────────────────────────────────────────────────────────


def run_a_few() -> None:
    done = add.enqueue(1, 2)
    also_done = add_async.enqueue(3, 4)
    failed = boom.using(max_attempts=1).enqueue("a problem")

    assert (done.status, done.result, done.attempts, done.worker_id) == ("completed", 3, 1, uuid.UUID(int=0))
    assert (also_done.status, also_done.result) == ("completed", 7)
    assert (failed.status, failed.last_error) == ("failed", "ValueError: a problem")


def test_a_job_is_run_as_it_is_enqueued(db):
    run_a_few()


@pytest.mark.django_db(transaction=True)
def test_outside_of_transactions_too():
    run_a_few()
    assert not connection.in_atomic_block


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("notices", [True, False])
def test_a_job_that_loses_the_connection_is_settled_on_another(notices):
    def lose():
        with connection.cursor() as cursor, session() as other:
            cursor.execute("SELECT pg_backend_pid()")
            other.execute("SELECT pg_terminate_backend(%s, 10000)", cursor.fetchone())
            if notices:
                cursor.execute("SELECT 1")

    failed = job(name="tests.lose", max_attempts=1)(lose).enqueue()
    assert failed.status == ("failed" if notices else "completed")
    assert add.enqueue(1, 2).result == 3


@pytest.mark.django_db(transaction=True)
def test_in_a_transaction_too():
    with transaction.atomic():
        run_a_few()
        Effect.objects.create(what="fine")
    assert Effect.objects.count() == 1
    assert len(statuses()) == 3


@pytest.mark.django_db(transaction=True)
def test_where_autocommit_is_off_a_failing_statement_of_a_job_breaks_nothing():
    @job(name="tests.breaks", max_attempts=1)
    def breaks():
        Effect.objects.create(what="first")
        Effect.objects.create(what=None)

    transaction.set_autocommit(False)
    try:
        assert breaks.enqueue().status == "failed"
        assert Effect.objects.count() == 1
        transaction.commit()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert (statuses(), Effect.objects.count()) == (["failed"], 1)


def test_many_are_run_in_their_order(db, note, ran):
    ids = note.enqueue_many([((number,), {}) for number in range(3)])

    assert ran == [0, 1, 2]
    assert [rows()[id]["status"] for id in ids] == ["completed"] * 3


async def enqueue_in_async_code() -> None:
    done = await add.aenqueue(1, 2)
    also_done = await add_async.aenqueue(3, 4)
    assert (done.status, done.result) == ("completed", 3)
    assert (also_done.status, also_done.result) == ("completed", 7)


class InAnAsyncTest(TestCase):
    async def test_async_code_is_served_too(self):
        with self.settings(PGJOBS={"IMMEDIATE": True}):
            await enqueue_in_async_code()


def test_only_this_job_is_run_and_only_when_it_is_due(db, settings, note, ran):
    settings.PGJOBS = {}
    note.enqueue("before")
    settings.PGJOBS = {"IMMEDIATE": True}
    later = note.using(run_at=HOUR).enqueue("later")
    note.enqueue("now")

    assert ran == ["now"]
    assert (later.status, later.attempts) == ("queued", 0)
    drain(until=HOUR)
    assert ran == ["now", "before", "later"]


def test_a_paused_queue_is_left_alone(db, note, ran):
    BackgroundQueue.objects.create(name="default", paused_at="2026-01-01T00:00:00Z")
    assert note.enqueue("paused").status == "queued"
    assert ran == []


@pytest.mark.parametrize(
    ("enqueue", "status", "attempts"),
    [
        (boom.enqueue, "queued", 1),
        (lambda: again.enqueue(0), "queued", 1),
        (lambda: snooze.enqueue(0), "queued", 0),
        (give_up.enqueue, "failed", 1),
    ],
    ids=["boom", "again", "snooze", "give_up"],
)
def test_what_fails_raises_nothing_and_is_not_tried_again(db, enqueue, status, attempts):
    handle = enqueue()
    assert (handle.status, handle.attempts) == (status, attempts)


def test_a_job_that_is_deleted_as_it_completes_has_completed(db, settings):
    settings.PGJOBS = {"IMMEDIATE": True, "COMPLETED_RETENTION": 0}
    handle = add.enqueue(1, 2)
    assert handle.status == "completed"
    assert statuses() == []


def test_of_equal_jobs_only_a_new_one_is_run(db, ran):
    unique = job(name="tests.unique", unique=True)(ran.append)
    later = unique.using(run_at=HOUR).enqueue(1)
    assert unique.enqueue(1).pk == later.pk
    assert unique.enqueue_many([((1,), {}), ((2,), {})])[0] == later.pk
    assert ran == [2]


@pytest.mark.django_db(transaction=True)
def test_what_is_rolled_back_leaves_nothing(note, ran):
    with pytest.raises(ZeroDivisionError), transaction.atomic():  # noqa: PT012
        note.enqueue("ran")
        add.enqueue(1, 2)
        raise ZeroDivisionError
    assert statuses() == []
    assert ran == ["ran"]


@pytest.mark.django_db(transaction=True)
def test_a_job_that_a_worker_was_faster_to_claim_is_its_own(note, ran):
    @job(name="tests.enqueues")
    def enqueues():
        handle = note.enqueue("taken")
        with session() as worker:
            worker.execute("UPDATE background_jobs SET status = 'processing' WHERE id = %s", [handle.pk])

    enqueues.enqueue()
    assert ran == []
    assert statuses() == ["completed", "processing"]


@pytest.mark.django_db(databases=["default", "other"], transaction=True)
def test_on_another_alias(settings):
    settings.PGJOBS = {"IMMEDIATE": True, "DATABASE": "other"}
    assert add.enqueue(1, 2).status == "completed"
    assert BackgroundJob.objects.using("other").count() == 1


@pytest.mark.django_db(transaction=True)
def test_an_atomic_job_commits_with_its_completion():
    @job(name="tests.atomic", atomic=True, max_attempts=1)
    def atomic(fails):
        Effect.objects.create(what="written")
        if fails:
            raise ValueError("boom")

    assert atomic.enqueue(False).status == "completed"
    assert atomic.enqueue(True).status == "failed"
    assert Effect.objects.count() == 1


# ── Jobs that enqueue jobs ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.django_db(transaction=True)
def test_jobs_that_a_job_enqueues_are_run_when_it_has_ended(note, ran):
    @job(name="tests.parent")
    def parent():
        child = note.enqueue("first child")
        assert child.status == "queued"
        note.enqueue_many([(("second child",), {})])
        ran.append("parent")

    handle = parent.enqueue()
    assert handle.status == "completed"
    assert ran == ["parent", "first child", "second child"]
    assert statuses() == ["completed"] * 3


def test_async_jobs_enqueue_too(db, note, ran):
    @job(name="tests.parent")
    async def parent():
        await note.aenqueue("child")
        ran.append("parent")

    parent.enqueue()
    assert ran == ["parent", "child"]
    async_to_sync(parent.aenqueue)()
    assert ran == ["parent", "child"] * 2


@pytest.mark.django_db(transaction=True)
def test_what_a_job_enqueues_and_rolls_back_never_runs(note, ran):
    @job(name="tests.parent")
    def parent():
        try:
            with transaction.atomic():
                note.enqueue("never")
                raise ZeroDivisionError
        except ZeroDivisionError:
            note.enqueue("instead")

    parent.enqueue()
    assert ran == ["instead"]


def test_long_chains_need_no_deep_stack(db, ran):
    @job(name="tests.chain")
    def chain(left):
        ran.append(left)
        if left:
            chain.enqueue(left - 1)

    chain.enqueue(150)
    assert ran == list(range(150, -1, -1))


def test_a_loop_is_named(db, monkeypatch):
    monkeypatch.setattr(inplace, "LIMIT", 30)

    @job(name="tests.loop")
    def loop():
        loop.enqueue()

    with pytest.raises(RuntimeError) as caught:
        loop.enqueue()
    assert str(caught.value) == (
        "Immediate mode has run 30 jobs that enqueued each other, and more wait. The last 20 were tests.loop"
        " (20): do they enqueue each other, or come back?"
    )
    assert statuses() == ["completed"] * 30 + ["queued"]
    assert add.enqueue(1, 2).status == "completed"


def test_drain_runs_what_its_jobs_enqueue(db, settings, note, ran):
    parent = job(name="tests.parent")(lambda: [note.enqueue("child"), ran.append("parent")][1])
    settings.PGJOBS = {}
    parent.using(queue="mine").enqueue()
    parent.using(queue="mine").enqueue()
    settings.PGJOBS = {"IMMEDIATE": True}

    assert drain(queue="mine").completed == 2
    assert ran == ["parent", "parent", "child", "child"]
    assert statuses() == ["completed"] * 4


def test_the_other_helpers_see_what_ran(db, note, ran):
    with captured_jobs() as captured:
        add.enqueue(1, 2)
    assert [handle.status for handle in captured] == ["completed"]
    with pytest.raises(
        AssertionError, match=r"Not queued any more:\n  tests\.jobs\.add\(1, 2\) is completed"
    ):
        assert_enqueued(add)
    assert run_job(add.using(run_at=HOUR).enqueue(3, 4)) == 7


def test_after_an_interruption_nothing_is_left_in_line(db, note, ran):
    @job(name="tests.interrupted")
    def interrupted():
        note.enqueue("never")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted.enqueue()
    assert note.enqueue("next").status == "completed"
    assert ran == ["next"]


# ── Nothing is left behind ────────────────────────────────────────────────────────────────────────────────


def sessions() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname IN (%s, %s)", names())
        count: int = cursor.fetchone()[0]
        return count


def names() -> list[Any]:
    return [connections[alias].settings_dict["NAME"] for alias in ("default", "other")]


@pytest.mark.django_db(databases=["default", "other"], transaction=True)
def test_neither_threads_nor_connections_are_left(settings):
    @job(name="tests.elsewhere")
    def elsewhere():
        Effect.objects.using("other").create(what="elsewhere")

    @job(name="tests.elsewhere_async")
    async def elsewhere_async():
        await Effect.objects.using("other").acreate(what="elsewhere")
        await Effect.objects.acreate(what="here")

    Effect.objects.using("other").count()  # the test itself has both connections
    threads = set(threading.enumerate())
    before = sessions()
    for _ in range(3):
        for function in (elsewhere, elsewhere_async):
            assert function.enqueue().status == "completed"
    settings.PGJOBS = {}
    for _ in range(3):
        elsewhere.enqueue()
        elsewhere_async.enqueue()
    assert drain(until=HOUR).check().completed == 6
    with captured_jobs(execute=True):
        elsewhere_async.enqueue()

    assert set(threading.enumerate()) <= threads
    assert sessions() == before
