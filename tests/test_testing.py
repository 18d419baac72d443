from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction
from django.db.utils import DataError, IntegrityError
from django.test import TestCase, TransactionTestCase
from django.test.utils import CaptureQueriesContext

from django_pgjobs import GiveUp, InvalidArguments, Snooze, inplace, job, jobs, store
from django_pgjobs.lifecycle import Event, Status
from django_pgjobs.models import FIRST_DAY, LAST_DAY, BackgroundJob, BackgroundQueue
from django_pgjobs.testing import JobsTestMixin, assert_enqueued, captured_jobs, drain, run_job
from tests.factories import make_job, rows
from tests.jobs import add, add_async, again, boom, boom_async, give_up, snooze
from tests.models import Effect
from tests.sessions import session


@pytest.fixture(autouse=True)
def registry():
    before = dict(jobs.registry)
    yield jobs.registry
    jobs.registry.clear()
    jobs.registry.update(before)


def statuses() -> list[str]:
    return [row["status"] for row in rows().values()]


# ── In every kind of test ─────────────────────────────────────────────────────────────────────────────────


def run_a_few() -> None:
    done = add.enqueue(1, 2)
    also_done = add_async.enqueue(3, 4)
    failed = boom.using(max_attempts=1).enqueue("a problem")
    drained = drain()

    assert (len(drained), drained.completed, drained.failed) == (3, 2, 1)
    assert (done.refresh().status, done.result) == ("completed", 3)
    assert (also_done.refresh().status, also_done.result) == ("completed", 7)
    assert (failed.refresh().status, failed.last_error) == ("failed", "ValueError: a problem")


class InATestCase(TestCase):
    @classmethod
    def setUpTestData(cls):
        add.enqueue(5, 6)
        assert drain().completed == 1

    def test_jobs_run_in_the_tests_transaction(self):
        run_a_few()

    def test_what_set_up_test_data_ran_is_there(self):
        assert statuses() == ["completed"]

    async def test_jobs_run_from_an_async_test(self):
        await add.aenqueue(1, 2)
        await add_async.aenqueue(1, 2)
        drained = await sync_to_async(drain)()

        assert (drained.completed, drained.failed) == (2, 0)

    def test_jobs_enqueued_on_commit_run_once_their_callbacks_were(self):
        with self.captureOnCommitCallbacks(execute=True):
            transaction.on_commit(lambda: add.enqueue(1, 2))
        assert drain().completed == 1


class InATransactionTestCase(TransactionTestCase):
    def test_jobs_run_outside_of_transactions(self):
        run_a_few()

    async def test_jobs_run_from_an_async_test(self):
        await add.aenqueue(1, 2)
        await add_async.aenqueue(1, 2)
        drained = await sync_to_async(drain)()

        assert (drained.completed, drained.failed) == (2, 0)
        await sync_to_async(connections.close_all)()


@pytest.mark.django_db(transaction=True)
def test_nothing_is_left_running():
    threads = set(threading.enumerate())
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        before = cursor.fetchone()
        run_a_few()
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        after = cursor.fetchone()

    assert set(threading.enumerate()) <= threads  # one of an earlier test may end just now
    assert after == before
    assert not connection.in_atomic_block


# ── What drain() runs ─────────────────────────────────────────────────────────────────────────────────────


def test_nothing_due_is_nothing_run(db):
    make_job(Status.FAILED)
    add.using(run_at=timedelta(hours=1)).enqueue(1, 2)
    drained = drain()

    assert (len(drained), drained.completed, drained.failed, drained.errors) == (0, 0, 0, [])
    assert statuses() == ["failed", "queued"]


def test_jobs_that_jobs_enqueue_are_run_too(db):
    @job(name="tests.chain")
    def chain(left: int) -> None:
        if left:
            chain.enqueue(left - 1)

    chain.enqueue(5)

    assert drain().completed == 6
    assert statuses() == ["completed"] * 6


def test_a_limit_names_the_jobs_that_keep_coming_back(db):
    @job(name="tests.loop")
    def loop():
        loop.enqueue()

    loop.enqueue()
    with pytest.raises(AssertionError) as caught:
        drain(limit=25)

    assert str(caught.value) == (
        "drain() has run 25 jobs and more are due. The last 20 were tests.loop (20): do they enqueue each"
        " other, or come back?"
    )
    assert statuses() == ["completed"] * 25 + ["queued"]
    assert rows().popitem()[1]["attempts"] == 0


def test_as_many_jobs_as_the_limit_are_no_loop(db):
    add.enqueue_many([((1, 2), {})] * 5)

    assert drain(limit=5).completed == 5


def test_a_queue_may_be_drained_alone(db):
    add.using(queue="mail").enqueue(1, 2)
    add.enqueue(1, 2)

    assert drain(queue="mail").completed == 1
    assert statuses() == ["completed", "queued"]
    assert drain(queue="nobody's").completed == 0


def test_a_paused_queue_is_left_alone(db):
    BackgroundQueue.objects.create(name="default", paused_at="2026-01-01T00:00:00Z")
    add.enqueue(1, 2)

    assert len(drain()) == 0


def test_jobs_run_in_the_order_of_their_priority(db):
    order = []
    note = job(name="tests.note")(order.append)
    for priority in (0, 5, -5):
        note.using(priority=priority).enqueue(priority)
    drain()

    assert order == [5, 0, -5]


def test_each_run_is_told_with_its_verdict(db):
    boom.enqueue("a problem")
    snooze.enqueue(3600)
    again.enqueue(3600)
    give_up.enqueue("no use")
    make_job(job_name="tests.unheard")
    drained = drain()

    assert [run.event for run in drained.runs] == [
        Event.FAIL, Event.SNOOZE, Event.FAIL, Event.BURY, Event.PARK,
    ]  # fmt: skip
    assert (drained.completed, drained.failed, drained.count(Event.SNOOZE)) == (0, 3, 1)
    assert [run.job_name.rpartition(".")[2] for run in drained.runs] == [
        "boom", "snooze", "again", "give_up", "unheard",
    ]  # fmt: skip
    assert [run.after for run in drained.runs] == [timedelta(0)] * 5
    assert [text.splitlines()[0] for text in drained.errors] == [
        "tests.jobs.boom('a problem') raised ValueError: a problem",
        "tests.jobs.again(3600) raised Retry: The job asked to be retried.",
        "tests.jobs.give_up('no use') raised GiveUp: no use",
        "No job function is named 'tests.unheard' here: tests.unheard(1, 2)",
    ]


def test_a_job_that_retries_at_once_runs_until_its_attempts_are_used_up(db):
    again.enqueue(0)

    assert drain().failed == 3
    assert statuses() == ["failed"]


def test_a_row_that_anybody_wrote_is_a_failure_of_its_own(db):
    make_job(payload=[1])
    add.enqueue(1, 2)
    drained = drain()

    assert (drained.completed, drained.failed) == (1, 1)
    assert "The payload must be an object, not list." in drained.errors[0]


# ── What becomes of the body's work ───────────────────────────────────────────────────────────────────────


def write_and_raise():
    Effect.objects.create(what="first")
    raise ValueError("boom")


def write_and_break():
    Effect.objects.create(what="first")
    Effect.objects.create(what=None)


def write_and_break_otherwise():
    Effect.objects.create(what="first")
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1/0")


def break_catch_and_write():
    try:
        Effect.objects.create(what=None)
    except IntegrityError:
        Effect.objects.create(what="first")


def break_catch_and_write_in_a_block():
    try:
        Effect.objects.create(what=None)
    except IntegrityError:
        with transaction.atomic():
            Effect.objects.create(what="first")


def break_a_block():
    Effect.objects.create(what="first")
    with transaction.atomic():
        Effect.objects.create(what="second")
        Effect.objects.create(what=None)


def break_an_inner_block():
    with transaction.atomic():
        Effect.objects.create(what="first")
        try:
            with transaction.atomic():
                Effect.objects.create(what="second")
                Effect.objects.create(what=None)
        except IntegrityError:
            pass


def break_an_inner_block_for_good():
    Effect.objects.create(what="first")
    with transaction.atomic():
        Effect.objects.create(what="second")
        try:
            Effect.objects.create(what=None)
        except IntegrityError:
            pass
        Effect.objects.create(what="third")


def raise_in_a_block():
    Effect.objects.create(what="first")
    with transaction.atomic():
        Effect.objects.create(what="second")
        raise ValueError("boom")


def write_in_blocks():
    with transaction.atomic(), transaction.atomic():
        Effect.objects.create(what="first")


def write_in_a_durable_block():
    with transaction.atomic(durable=True):
        Effect.objects.create(what="first")


def read_in_chunks():
    Effect.objects.create(what="first")
    assert [effect.what for effect in Effect.objects.iterator(chunk_size=1)] == ["first"]


async def write_and_break_async():
    await Effect.objects.acreate(what="first")
    await Effect.objects.acreate(what=None)


BODIES = [
    (write_and_raise, "failed"),
    (write_and_break, "failed"),
    (write_and_break_otherwise, "failed"),
    (break_catch_and_write, "completed"),
    (break_catch_and_write_in_a_block, "completed"),
    (break_a_block, "failed"),
    (break_an_inner_block, "completed"),
    (break_an_inner_block_for_good, "failed"),
    (raise_in_a_block, "failed"),
    (write_in_blocks, "completed"),
    (write_in_a_durable_block, "completed"),
    (read_in_chunks, "completed"),
    (write_and_break_async, "failed"),
]


def check_a_body(body, status):
    Effect.objects.create(what="before")
    Effect.objects.filter(what="before").update(what="changed")
    job(name="tests.body", max_attempts=1)(body).enqueue()
    Effect.objects.filter(what="changed").delete()
    drain()

    assert statuses() == [status]
    assert [effect.what for effect in Effect.objects.all()] == ["first"]


@pytest.mark.parametrize(("body", "status"), BODIES)
def test_in_a_tests_transaction_a_bodys_work_stands_or_falls_as_in_a_worker(db, body, status):
    check_a_body(body, status)
    assert not connection.needs_rollback


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("body", "status"), BODIES)
def test_without_one_it_does_the_same(body, status):
    check_a_body(body, status)


def test_a_block_that_breaks_the_tests_transaction_takes_the_bodys_work_along(db):
    @job(name="tests.body")
    def body():
        Effect.objects.create(what="first")
        with transaction.atomic(savepoint=False):
            Effect.objects.create(what="x" * 1000)

    Effect.objects.create(what="before")
    body.enqueue()

    assert f"{DataError.__name__}: value too long" in drain().errors[0]
    assert [effect.what for effect in Effect.objects.all()] == ["before"]


def test_statements_of_drain_are_few_and_those_of_the_body_are_counted_once(db):
    @job(name="tests.body")
    def body():
        Effect.objects.create(what="first")

    body.enqueue()
    with CaptureQueriesContext(connection) as queries:
        drain()

    assert sum('INSERT INTO "tests_effect"' in query["sql"] for query in queries) == 1
    assert not [query["sql"] for query in queries if "pgjobs_inplace" in query["sql"]]


@pytest.mark.django_db(databases=["default", "other"], transaction=True)
def test_the_queue_is_drained_where_it_lives(settings):
    settings.PGJOBS = {"DATABASE": "other"}
    handle = add.enqueue(1, 2)

    assert drain().completed == 1
    assert handle.refresh().status == "completed"
    assert assert_enqueued(add, count=0) == []


# ── What a failure says ───────────────────────────────────────────────────────────────────────────────────


def test_all_is_well_where_nothing_failed(db):
    add.enqueue(1, 2)
    snooze.enqueue(3600)
    drained = drain()

    assert drained.check() is drained
    assert drained.errors == []


def test_a_check_says_which_job_failed_with_what_and_what_happens_next(db):
    add.enqueue(1, 2)
    failed = boom.using(queue="mail").enqueue("a problem")
    with pytest.raises(AssertionError) as caught:
        drain().check()

    text = str(caught.value)
    line = boom.func.__code__.co_firstlineno + 2
    assert text == (
        "1 of 2 runs failed.\n"
        "\n"
        "tests.jobs.boom('a problem') raised ValueError: a problem\n"
        f"  job #{failed.pk} in queue 'mail', attempt 1 of 3: it is tried again in 20 s\n"
        "    Traceback (most recent call last):\n"
        f'      File "{boom.func.__code__.co_filename}", line {line}, in boom\n'
        "        raise ValueError(text)\n"
        "    ValueError: a problem"
    )


@pytest.mark.parametrize(
    ("enqueue", "second_line"),
    [
        (boom.using(max_attempts=1).enqueue, "attempt 1 of 1: no attempt is left, so it is a dead letter"),
        (lambda: give_up.enqueue(), "attempt 1 of 3: it is a dead letter, whatever attempts are left"),
        (lambda: again.enqueue(5400), "attempt 1 of 3: it is tried again in 1:30:00"),
        (lambda: make_job(job_name="tests.gone"), "attempt 1 of 3: it waits for a worker that knows it"),
    ],
    ids=["last", "given up", "again", "unknown"],
)  # fmt: skip
def test_what_happens_next(db, enqueue, second_line):
    enqueue()
    (text,) = drain().errors

    assert text.splitlines()[1].partition("', ")[2] == second_line


def test_later_failures_say_when_they_were(db):
    boom.enqueue()
    drained = drain(until=timedelta(minutes=5))

    assert [text.splitlines()[1].partition(", ")[2] for text in drained.errors] == [
        "attempt 1 of 3: it is tried again in 20 s",
        "attempt 2 of 3, 0:00:20 after the start: it is tried again in 40 s",
        "attempt 3 of 3, 0:01:00 after the start: no attempt is left, so it is a dead letter",
    ]


def test_long_arguments_and_many_failures_are_cut(db):
    boom.enqueue_many([(("x" * 1000,), {})] * 12)
    with pytest.raises(AssertionError) as caught:
        drain().check()

    text = str(caught.value)
    assert text.startswith("12 of 12 runs failed.")
    assert text.endswith("\n\nand 2 more")
    assert "tests.jobs.boom('" + "x" * 96 + "...) raised" in text


# ── Time ──────────────────────────────────────────────────────────────────────────────────────────────────

HOUR = timedelta(hours=1)


def run_at_of(handle):
    return handle.refresh().run_at - store.now("default")


def about(duration):
    return pytest.approx(duration.total_seconds(), abs=2)


@pytest.fixture
def ran():
    """Job functions leave their names here."""
    return []


@pytest.fixture
def note(ran):
    return job(name="tests.note")(ran.append)


def test_jobs_due_meanwhile_are_run_in_the_order_in_which_they_are_due(db, note, ran):
    for hours in (3, 1, 2, 0):
        note.using(run_at=hours * HOUR).enqueue(hours)
    drained = drain(until=3 * HOUR)

    assert ran == [0, 1, 2, 3]
    assert [run.after for run in drained.runs] == [0 * HOUR, HOUR, 2 * HOUR, 3 * HOUR]


def test_what_is_due_later_stays_and_has_come_nearer(db, note, ran):
    note.using(run_at=HOUR).enqueue("near")
    far = note.using(run_at=3 * HOUR).enqueue("far")

    assert len(drain(until=2 * HOUR)) == 1
    assert run_at_of(far).total_seconds() == about(HOUR)
    assert len(drain(until=timedelta(minutes=59))) == 0
    assert len(drain(until=timedelta(minutes=1))) == 1
    assert ran == ["near", "far"]


def test_without_time_nothing_comes_nearer(db, note):
    later = note.using(run_at=HOUR).enqueue("later")
    before = later.run_at
    drain()
    drain(until=timedelta(0))

    assert later.refresh().run_at == before


def test_retries_and_snoozed_jobs_are_run_when_they_are_due(db):
    boom.enqueue()
    drained = drain(until=HOUR)

    assert [(run.event, run.after.total_seconds()) for run in drained.runs] == [
        (Event.FAIL, 0), (Event.FAIL, 20), (Event.BURY, 60),
    ]  # fmt: skip

    snooze.enqueue(600)
    drained = drain(until=HOUR)
    assert [run.after for run in drained.runs] == [minutes * timedelta(minutes=10) for minutes in range(7)]
    assert [run.claim.attempts for run in drained.runs] == [1] * 7


def test_jobs_that_jobs_enqueue_for_later_are_run_in_their_turn(db, ran):
    @job(name="tests.remind")
    def remind(days):
        ran.append(days)
        remind.using(run_at=timedelta(days=1)).enqueue(days + 1)

    remind.enqueue(0)
    drained = drain(until=timedelta(days=3))

    assert ran == [0, 1, 2, 3]
    assert [run.after.days for run in drained.runs] == [0, 1, 2, 3]


def test_what_comes_due_within_the_same_second_goes_by_priority(db, note, ran):
    note.using(run_at=HOUR).enqueue("low")
    note.using(run_at=HOUR, priority=5).enqueue("high")
    note.using(run_at=HOUR + timedelta(seconds=2), priority=9).enqueue("later")
    drain(until=2 * HOUR)

    assert ran == ["high", "low", "later"]


def test_the_same_second_does_not_reach_beyond_the_time(db, note, ran):
    for milliseconds in (0, 500):
        note.using(run_at=HOUR + timedelta(milliseconds=milliseconds)).enqueue(milliseconds)
    drain(until=HOUR)

    assert ran == [0]


def test_time_passes_for_other_queues_too(db, note, ran):
    other = note.using(queue="mail", run_at=2 * HOUR).enqueue("mail")
    due = note.using(queue="mail", run_at=timedelta(minutes=5)).enqueue("mail, soon")
    note.using(run_at=HOUR).enqueue("mine")

    assert len(drain(queue="default", until=HOUR)) == 1
    assert ran == ["mine"]
    assert run_at_of(other).total_seconds() == about(HOUR)
    assert run_at_of(due) < timedelta(0)


def test_a_paused_queue_neither_runs_nor_holds_anybody_up(db, note, ran):
    BackgroundQueue.objects.create(name="mail", paused_at="2026-01-01T00:00:00Z")
    note.using(queue="mail").enqueue("paused")
    note.using(queue="mail", run_at=HOUR).enqueue("paused, too")
    note.using(run_at=2 * HOUR).enqueue("mine")
    drain(until=3 * HOUR)

    assert ran == ["mine"]


def test_a_time_of_less_than_a_second_passes_too(db, note, ran):
    note.using(run_at=timedelta(milliseconds=1400)).enqueue("a")
    stretches = []
    drain(until=timedelta(milliseconds=1500), tick=stretches.append)

    assert ran == ["a"]
    assert sum(stretches, timedelta(0)) == timedelta(milliseconds=1500)


def test_a_loop_in_time_is_named_with_the_time_that_it_took(db):
    snooze.enqueue(60)
    with pytest.raises(AssertionError) as caught:
        drain(limit=25, until=timedelta(days=1))

    assert str(caught.value) == (
        "drain() has run 25 jobs and more are due after 0:25:00. The last 20 were tests.jobs.snooze (20): do"
        " they enqueue each other, or come back?"
    )


def test_clocks_of_a_test_are_told_of_each_stretch_of_time(db, note, ran):
    stretches = []
    note.using(run_at=HOUR).enqueue("a")
    note.using(run_at=3 * HOUR).enqueue("b")
    drain(until=4 * HOUR, tick=lambda stretch: (stretches.append(stretch), ran.append("tick")))

    assert ran == ["tick", "a", "tick", "b", "tick"]
    assert stretches == [HOUR, 2 * HOUR, HOUR]


def test_rows_with_the_first_and_the_last_day_harm_nobody(db, note, ran):
    make_job(run_at=FIRST_DAY)
    make_job(run_at=LAST_DAY)
    drained = drain(until=timedelta(days=3650))

    assert drained.completed == 1
    assert statuses() == ["completed", "queued"]


def test_a_day_is_a_day_where_the_clocks_are_changed(db, note):
    """A zone that changes its clocks now: so an interval of a day is not one of 24 hours there."""
    due = note.using(run_at=timedelta(days=300)).enqueue("far")
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL timezone = 'America/New_York'")
    for _ in range(10):
        drain(until=timedelta(days=29))

    assert run_at_of(due).total_seconds() == about(timedelta(days=10))


@pytest.mark.parametrize(
    ("until", "error", "text"),
    [
        (60, TypeError, "until is 60; it must be a timedelta."),
        ("1h", TypeError, "until is '1h'; it must be a timedelta."),
        (-HOUR, ValueError, "until is -1 day, 23:00:00; it must not be below zero."),
    ],
    ids=str,
)
def test_a_time_that_cannot_pass(db, until, error, text):
    with pytest.raises(error) as caught:
        drain(until=until)
    assert str(caught.value) == text


@pytest.mark.django_db(transaction=True)
def test_a_row_that_another_session_has_locked_is_left_alone(note, ran):
    locked = note.using(run_at=HOUR).enqueue("locked")
    note.using(run_at=2 * HOUR).enqueue("free")
    with session() as other, other.transaction():
        other.execute("SELECT FROM background_jobs WHERE id = %s FOR UPDATE", [locked.pk])
        assert len(drain(until=3 * HOUR)) == 1
    assert ran == ["free"]
    assert run_at_of(locked).total_seconds() == about(HOUR)


# ── on_commit ─────────────────────────────────────────────────────────────────────────────────────────────


def on_commit_outside_of_blocks():
    transaction.on_commit(lambda: Effect.objects.create(what="first"))


def on_commit_in_a_block():
    with transaction.atomic():
        transaction.on_commit(lambda: Effect.objects.create(what="first"))


def on_commit_and_fail():
    on_commit_in_a_block()
    raise ValueError("boom")


def on_commit_of_what_is_rolled_back():
    Effect.objects.create(what="first")
    try:
        with transaction.atomic():
            transaction.on_commit(lambda: Effect.objects.create(what="never"))
            raise ValueError("boom")
    except ValueError:
        pass


def on_commit_in_turn():
    with transaction.atomic():
        transaction.on_commit(lambda: transaction.on_commit(lambda: Effect.objects.create(what="first")))


def on_commit_that_fails():
    with transaction.atomic():
        Effect.objects.create(what="first")
        transaction.on_commit(lambda: 1 / 0)


def on_commit_that_may_fail():
    with transaction.atomic():
        Effect.objects.create(what="first")
        transaction.on_commit(lambda: 1 / 0, robust=True)


CALLBACKS = [
    (on_commit_outside_of_blocks, "completed"),
    (on_commit_in_a_block, "completed"),
    (on_commit_and_fail, "failed"),
    (on_commit_of_what_is_rolled_back, "completed"),
    (on_commit_in_turn, "completed"),
    (on_commit_that_fails, "failed"),
    (on_commit_that_may_fail, "completed"),
]


@pytest.mark.parametrize(("body", "status"), CALLBACKS)
def test_in_a_tests_transaction_a_bodys_callbacks_are_called_as_in_a_worker(db, body, status):
    check_a_body(body, status)
    assert not connection.run_on_commit


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("body", "status"), CALLBACKS)
def test_without_one_they_are_called_as_well(body, status):
    check_a_body(body, status)


@pytest.mark.parametrize("fails", [False, True], ids=["completed", "failed"])
def test_callbacks_of_an_atomic_job_are_called_if_it_is_completed(db, fails):
    @job(name="tests.body", atomic=True, max_attempts=1)
    def body():
        transaction.on_commit(lambda: Effect.objects.create(what="first"))
        if fails:
            raise ValueError("boom")

    body.enqueue()
    drain()
    assert statuses() == ["failed" if fails else "completed"]
    assert Effect.objects.count() == (0 if fails else 1)


def test_callbacks_of_the_test_are_left_to_the_test(db, django_capture_on_commit_callbacks):
    with django_capture_on_commit_callbacks() as callbacks:
        transaction.on_commit(lambda: Effect.objects.create(what="never"))
        job(name="tests.body")(on_commit_in_a_block).enqueue()
        drain()
    assert len(callbacks) == 1
    assert [effect.what for effect in Effect.objects.all()] == ["first"]


# ── run_job() ─────────────────────────────────────────────────────────────────────────────────────────────


def test_one_job_is_run_and_gives_its_result(db):
    wanted = add.using(run_at=HOUR).enqueue(1, 2)
    also = add_async.enqueue(3, 4)
    add.enqueue(5, 6)

    assert (run_job(wanted), run_job(also)) == (3, 7)
    assert statuses() == ["completed", "completed", "queued"]
    assert wanted.refresh().result == 3


def test_the_result_is_as_it_is_stored(db):
    pair = job(name="tests.pair")(lambda: (1, None))
    atomic = job(name="tests.atomic", atomic=True)(lambda: (1, 2))

    assert run_job(pair.enqueue()) == [1, None]
    assert run_job(atomic.enqueue()) == [1, 2]
    assert run_job(job(name="tests.none")(lambda: None).enqueue()) is None


def test_a_job_of_a_paused_queue_is_run(db):
    BackgroundQueue.objects.create(name="default", paused_at="2026-01-01T00:00:00Z")
    assert run_job(add.enqueue(1, 2)) == 3


@pytest.mark.parametrize(
    ("function", "status", "raised"),
    [(boom, "queued", ValueError), (boom_async, "queued", ValueError), (give_up, "failed", GiveUp)],
    ids=["boom", "boom_async", "give_up"],
)
def test_what_the_job_raised_is_raised_once_it_is_recorded(db, function, status, raised):
    handle = function.enqueue("a problem")
    with pytest.raises(raised, match="a problem") as caught:
        run_job(handle)

    assert handle.refresh().status == status
    assert handle.last_error.endswith(": a problem")
    assert caught.traceback[-1].name == function.func.__name__ or raised is GiveUp


def test_a_snooze_is_raised_too(db):
    handle = snooze.enqueue(60)
    with pytest.raises(Snooze):
        run_job(handle)
    assert (handle.refresh().status, handle.attempts) == ("queued", 0)


def test_a_job_that_is_not_queued_is_not_run(db):
    done = make_job(Status.COMPLETED)
    with pytest.raises(AssertionError) as caught:
        run_job(done)
    assert str(caught.value) == f"Job #{done.pk} cannot be run, since it is completed."
    with pytest.raises(AssertionError, match="since it does not exist"):
        run_job(BackgroundJob(pk=2**62))


def test_a_job_that_cannot_be_called_says_why(db):
    with pytest.raises(
        AssertionError, match=r"^tests.jobs.add\(\) raised ValueError: The payload must be an obj"
    ):
        run_job(make_job(payload=[1]))
    with pytest.raises(AssertionError, match=r"^No job function is named 'tests\.gone' here"):
        run_job(make_job(job_name="tests.gone"))


def test_only_what_was_enqueued_can_be_run(db):
    with pytest.raises(TypeError, match="A function can just be called"):
        run_job(add)


# ── captured_jobs() ───────────────────────────────────────────────────────────────────────────────────────


def test_what_is_enqueued_within_is_captured_in_order(db):
    add.enqueue(0, 0)
    with captured_jobs() as captured:
        first = add.enqueue(1, 2)
        second, third = boom.enqueue_many([((), {})] * 2)
        assert captured == []
    add.enqueue(3, 4)

    assert [handle.pk for handle in captured] == [first.pk, second, third]
    assert captured[0].payload == {"args": [1, 2]} or captured[0].payload["args"] == [1, 2]
    assert captured[0].status == "queued"


def test_nothing_enqueued_is_nothing_captured(db):
    with captured_jobs() as captured:
        pass
    assert captured == []


def test_captures_may_be_nested(db):
    with captured_jobs() as outer:
        first = add.enqueue(1, 2)
        with captured_jobs() as inner:
            second = add.enqueue(3, 4)
        third = add.enqueue(5, 6)

    assert inner == [second]
    assert outer == [first, second, third]


def test_what_was_rolled_back_is_not_captured(db):
    with captured_jobs() as captured:
        kept = add.enqueue(1, 2)
        with pytest.raises(ZeroDivisionError), transaction.atomic():  # noqa: PT012
            add.enqueue(3, 4)
            raise ZeroDivisionError

    assert captured == [kept]


@pytest.mark.django_db(transaction=True)
def test_outside_of_transactions_too(db):
    with captured_jobs() as captured:
        kept = add.enqueue(1, 2)
        with transaction.atomic():
            also = add.enqueue(3, 4)
    assert captured == [kept, also]


@pytest.mark.django_db(transaction=True)
def test_after_an_exception_there_is_what_was_enqueued_before_it():
    with pytest.raises(ZeroDivisionError), captured_jobs() as captured:  # noqa: PT012
        kept = add.enqueue(1, 2)
        raise ZeroDivisionError
    assert captured == [kept]

    with pytest.raises(IntegrityError), transaction.atomic(), captured_jobs() as captured:  # noqa: PT012
        add.enqueue(1, 2)
        Effect.objects.create(what=None)
    assert captured == []


def test_captured_jobs_are_executed_with_what_they_enqueue(db, ran):
    @job(name="tests.chain")
    def chain(left):
        ran.append(left)
        if left:
            chain.enqueue(left - 1)

    chain.enqueue(100)
    with captured_jobs(execute=True) as captured:
        chain.enqueue(2)
        chain.using(run_at=HOUR).enqueue(50)
        assert ran == []

    assert ran == [2, 1, 0]
    assert [handle.status for handle in captured] == ["completed", "queued", "completed", "completed"]


def test_a_captured_job_that_fails_is_a_failure(db):
    def enqueue():
        again.enqueue(0)
        add.enqueue(1, 2)

    with pytest.raises(AssertionError, match=r"^1 of 2 runs failed"), captured_jobs(execute=True) as captured:
        enqueue()
    assert [handle.status for handle in captured] == ["queued", "completed"]


def test_a_loop_of_captured_jobs_is_named(db, monkeypatch):
    monkeypatch.setattr(inplace, "LIMIT", 5)

    @job(name="tests.loop")
    def loop():
        loop.enqueue()

    with (
        pytest.raises(
            AssertionError, match=r"^captured_jobs\(\) has run 5 jobs .* were tests.loop \(5\): do they"
        ),
        captured_jobs(execute=True),
    ):
        loop.enqueue()


# ── The methods of a test case ────────────────────────────────────────────────────────────────────────────


class WithTheMixin(JobsTestMixin, TestCase):
    def test_the_functions_are_methods(self):
        with self.captureJobs() as captured:
            handle = add.enqueue(1, 2)
        assert captured == [handle]
        assert self.assertEnqueued(add, [1, 2], count=1) == [handle]
        assert self.runJob(handle) == 3
        assert len(self.drainJobs(until=HOUR).check()) == 0


class WithoutTheQueuesDatabase(TestCase):
    databases = {"default"}

    def test_the_database_that_is_missing_is_named(self):
        with self.settings(PGJOBS={"DATABASE": "other"}):
            for use in (drain, captured_jobs().__enter__, lambda: assert_enqueued(add)):
                with self.assertRaisesMessage(AssertionError, "Add 'other' to"):
                    use()


# ── assert_enqueued() ─────────────────────────────────────────────────────────────────────────────────────


def failure(*args: object, **kwargs: object) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_enqueued(*args, **kwargs)
    return str(caught.value)


def test_jobs_that_match_are_returned_in_order(db):
    first = add.enqueue(1, y=2)
    boom.enqueue()
    second = add.using(queue="mail").enqueue(3, y=4)

    assert assert_enqueued(add) == [first, second]
    assert assert_enqueued(add, count=2) == [first, second]
    assert assert_enqueued(add, [1]) == [first]
    assert assert_enqueued(add, (1,), {"y": 2}) == [first]
    assert assert_enqueued(add, kwargs={"y": 4}) == [second]
    assert assert_enqueued(add, queue="mail", count=1) == [second]
    assert assert_enqueued(add, [5], count=0) == []
    assert all(isinstance(found, BackgroundJob) for found in assert_enqueued(add))


def test_arguments_are_compared_as_the_table_holds_them(db):
    give_back = job(name="tests.give_back")(lambda value: value)
    handle = give_back.enqueue([(1, 2), {"a": ()}])

    assert assert_enqueued(give_back, ([(1, 2), {"a": ()}],)) == [handle]
    with pytest.raises(InvalidArguments):
        assert_enqueued(give_back, [{1}])


def test_only_what_is_queued_counts(db):
    make_job(Status.COMPLETED)
    make_job(Status.PROCESSING, payload={"args": [5, 6]})

    assert failure(add, [1, 2]) == (
        "Expected a job tests.jobs.add with (1, 2) to be queued; none matches.\n"
        "Not queued any more:\n"
        "  tests.jobs.add(1, 2) is completed"
    )


def test_nothing_may_be_queued(db):
    assert failure(add) == "Expected a job tests.jobs.add to be queued; none matches.\nNothing is queued."


@pytest.mark.parametrize(
    ("wanted", "beginning"),
    [
        ({}, "a job tests.jobs.boom"),
        ({"count": 1}, "one job tests.jobs.boom"),
        ({"count": 3}, "3 jobs tests.jobs.boom"),
        ({"args": [1, "a"]}, "a job tests.jobs.boom with (1, 'a')"),
        (
            {"args": [1], "kwargs": {"text": None}, "queue": "mail", "priority": 3},
            "a job tests.jobs.boom with (1, text=None) in queue 'mail' with priority 3",
        ),
        ({"kwargs": {}}, "a job tests.jobs.boom with ()"),
        ({"run_at": HOUR}, "a job tests.jobs.boom due in 1:00:00 (within 5 s)"),
        (
            {"run_at": datetime(2026, 5, 4, tzinfo=UTC), "within": HOUR},
            "a job tests.jobs.boom due at 2026-05-04 00:00:00+00:00 (within 1:00:00)",
        ),
        ({"run_at": timedelta(0)}, "a job tests.jobs.boom due now (within 5 s)"),
    ],
    ids=["any", "one", "three", "args", "everything", "kwargs", "in an hour", "at a time", "now"],
)
def test_a_failure_says_what_was_wanted_and_what_is_queued(db, wanted, beginning):
    add.enqueue(1, y=2)
    add.using(queue="mail", priority=-5, run_at=2 * HOUR).enqueue(3, 4)

    assert failure(boom, **wanted) == (
        f"Expected {beginning} to be queued; none matches.\n"
        "Other jobs:\n"
        "  tests.jobs.add(1, y=2) in queue 'default'\n"
        "  tests.jobs.add(3, 4) in queue 'mail' with priority -5, due in 2:00:00"
    )


def test_the_nearest_jobs_come_first_with_what_is_different(db):
    boom.enqueue()
    add.using(queue="mail", run_at=HOUR).enqueue(1, y=6)
    add.enqueue(1, y=5)

    assert failure(add, [1], {"y": 6}, queue="default", priority=0, run_at=timedelta(0)) == (
        "Expected a job tests.jobs.add with (1, y=6) in queue 'default' with priority 0 due now (within 5 s)"
        " to be queued; none matches.\n"
        "Nearest:\n"
        "  tests.jobs.add(1, y=5) in queue 'default'\n"
        "    kwargs['y'] is 5, not 6\n"
        "  tests.jobs.add(1, y=6) in queue 'mail', due in 1:00:00\n"
        "    queue is 'mail', not 'default'; it is due in 1:00:00, not now\n"
        "Other jobs:\n"
        "  tests.jobs.boom() in queue 'default'"
    )


@pytest.mark.parametrize(
    ("found", "wanted", "difference"),
    [
        ([1], [2], "args[0] is 1, not 2"),
        ([1, 2], [1], "args has 2 values, not 1"),
        ([], [1], "args has 0 values, not 1"),
        ([{"a": [1]}], [{"a": [2]}], "args[0]['a'][0] is 1, not 2"),
        ([{"a": 1}], [{"b": 1}], "args[0] lacks 'b'; args[0] has 'a' as well"),
        ([[1]], [1], "args[0] is [1], not 1"),
        ([None], [0], "args[0] is None, not 0"),
        (["x" * 500], ["y"], f"args[0] is '{'x' * 96}..., not 'y'"),
        ([0] * 9, [1] * 9, "; ".join(f"args[{position}] is 0, not 1" for position in range(5))),
    ],
    ids=["value", "more", "fewer", "deep", "keys", "kind", "none", "long", "many"],
)
def test_arguments_that_are_different_are_told_apart(db, found, wanted, difference):
    take = job(name="tests.take")(lambda *values: None)
    take.enqueue(*found)

    assert failure(take, wanted).splitlines()[3] == f"    {difference}"


def test_the_time_may_be_given_by_the_clock(db):
    at = store.now("default") + HOUR
    handle = add.using(run_at=at).enqueue(1, 2)

    assert assert_enqueued(add, run_at=at, within=timedelta(0)) == [handle]
    assert assert_enqueued(add, run_at=at + timedelta(seconds=4)) == [handle]
    assert assert_enqueued(add, run_at=HOUR) == [handle]
    assert assert_enqueued(add, run_at=2 * HOUR, count=0) == []
    text = failure(add, run_at=at + timedelta(seconds=6))
    assert text.splitlines()[3] == f"    run_at is {handle.run_at}, not {at + timedelta(seconds=6)}"
    assert failure(add, run_at=timedelta(minutes=30)).splitlines()[3] == (
        "    it is due in 1:00:00, not in 0:30:00"
    )


def test_a_retry_is_queued_for_later(db):
    handle = boom.enqueue()
    drain()
    assert assert_enqueued(boom, run_at=timedelta(seconds=20)) == [handle]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"run_at": 5}, TypeError, "run_at is 5; it must be an aware datetime or a timedelta."),
        (
            {"run_at": datetime(2026, 5, 4)},
            ValueError,
            "run_at is 2026-05-04 00:00:00, a naive datetime; make it aware, or pass a timedelta.",
        ),
        ({"within": 5}, TypeError, "within is 5; it must be a timedelta."),
    ],
    ids=["number", "naive", "within"],
)
def test_a_time_that_nothing_could_be_compared_with(db, options, error, text):
    with pytest.raises(error) as caught:
        assert_enqueued(add, **options)
    assert str(caught.value) == text


def test_none_may_be_wanted(db):
    add.enqueue(1, 2)

    assert failure(add, count=0) == (
        "Expected no job tests.jobs.add to be queued; one matches.\n"
        "Matching:\n"
        "  tests.jobs.add(1, 2) in queue 'default'"
    )


def test_of_too_many_the_nearest_are_listed_too(db):
    add.enqueue_many([((1, 2), {})] * 2)
    add.enqueue(1, 3)

    assert failure(add, [1, 2], count=1) == (
        "Expected one job tests.jobs.add with (1, 2) to be queued; 2 match.\n"
        "Matching:\n"
        "  tests.jobs.add(1, 2) in queue 'default'\n"
        "  tests.jobs.add(1, 2) in queue 'default'\n"
        "Nearest:\n"
        "  tests.jobs.add(1, 3) in queue 'default'\n"
        "    args[1] is 3, not 2"
    )


@pytest.mark.parametrize("function", [add, boom], ids=["near", "other"])
def test_of_many_jobs_the_first_are_listed(db, function):
    add.enqueue_many([((number, 0), {}) for number in range(50)])
    text = failure(function, ["x"])

    assert text.count("tests.jobs.add(") == 20
    assert "  tests.jobs.add(19, 0) in queue 'default'" in text
    assert text.endswith("\n  and 30 more")


def test_rows_that_anybody_wrote_match_nothing_and_are_listed(db):
    make_job(payload=[1])
    make_job(payload={"args": 5, "kwargs": None})

    assert (
        failure(add, [1]).count("\n  tests.jobs.add() in queue 'default'\n    args has 0 values, not 1") == 2
    )
