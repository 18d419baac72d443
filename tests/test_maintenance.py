"""Sweeping what is lost, and pruning what is old: alone, at once, and beside workers."""

import logging
import uuid
from concurrent.futures import Future
from datetime import timedelta

import pytest
from django.db import connection, transaction

from django_pgjobs import housekeeping, maintenance, store
from django_pgjobs.lifecycle import Event, Status, Verdict
from django_pgjobs.models import BackgroundOperation, BackgroundWorker
from tests.factories import claim_of, make_job, rows
from tests.sessions import session, work

pytestmark = pytest.mark.django_db

LEASE = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def short_lease(settings):
    """The server has to be up for a lease before anything is swept, and a test's server is young."""
    settings.PGJOBS = {"LEASE": 0.1}


def sweep(**options):
    with store.own_transaction("default") as cursor:
        return maintenance.sweep(cursor, **options)


def prune(status, age, limit=1000):
    with store.own_transaction("default") as cursor:
        return store.prune(cursor, status, age=age, limit=limit)


def lost_job(age=timedelta(hours=1), **columns):
    return make_job("processing", locked_at=-age, **columns)


def make_worker(**columns):
    return BackgroundWorker.objects.create(
        **{"hostname": "box", "pid": 1, "processes": 1, "threads": 1, "async_slots": 0, "version": "1"}
        | columns
    )


# ── Sweeping ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("took", "shortest", "longest"), [(0.1, 12, 15), (1, 20, 20), (30, *[housekeeping.LONGEST_PAUSE] * 2)]
)
def test_slow_sweeps_take_a_twentieth_of_the_time(monkeypatch, took, shortest, longest):
    """Where somebody holds an old snapshot, each steps over all that has run since."""
    now = 1000.0
    monkeypatch.setattr(housekeeping, "clock", lambda: now)
    keeping = housekeeping.Housekeeping(lambda settled: None)
    now += 15
    work, finish = keeping.due(may_sweep=True)
    now += took
    swept = Future()
    swept.set_result(maintenance.Swept())
    finish(swept)
    keeping._next_prune = now + 1000
    now += shortest - took - 0.01
    assert keeping.due(may_sweep=True) is None
    now += longest - shortest + took + 0.02
    assert keeping.due(may_sweep=True)[0] is work


def test_a_lost_job_is_queued_again_with_its_attempt_counted(caplog):
    job = lost_job(queue_name="mail", attempts=2)

    with caplog.at_level(logging.WARNING, "django_pgjobs"):
        assert str(sweep()) == "1 lost jobs queued again, 0 made dead letters."

    job.refresh()
    assert (job.status, job.attempts, job.locked_at, job.locked_by) == ("queued", 2, None, None)
    assert job.run_at - job.updated_at == timedelta(seconds=60)
    assert job.last_error == "Worker timeout detected"
    assert caplog.messages == [f"job={job.pk} name=tests.jobs.add queue=mail attempt=2 lost: queued again"]


def test_the_delay_of_a_lost_job_is_a_setting(settings):
    settings.PGJOBS = {"LEASE": 0.1, "LOST_DELAY": 0}
    job = lost_job()

    sweep()

    job.refresh()
    assert job.run_at == job.updated_at


def test_a_lost_job_without_attempts_left_becomes_a_dead_letter():
    job = lost_job(attempts=3)

    assert str(sweep()) == "0 lost jobs queued again, 1 made dead letters."
    assert (job.refresh().status, job.last_error) == ("failed", "Worker timeout detected")


def test_a_lost_job_that_may_run_only_once_becomes_a_dead_letter():
    job = lost_job(rerun_if_lost=False)

    assert sweep().buried == 1
    assert (job.refresh().status, job.last_error) == (
        "failed",
        "Worker timeout detected. It may have run, and is declared with rerun_if_lost=False.",
    )


@pytest.mark.parametrize("status", set(Status) - {Status.PROCESSING})
def test_only_what_is_processing_can_be_lost(status):
    make_job(status, locked_at=-timedelta(days=1), locked_by=uuid.uuid4())
    before = rows()

    assert sweep().total == 0
    assert rows() == before


def test_a_claim_is_lost_when_it_is_older_than_the_lease(settings):
    settings.PGJOBS = {"LEASE": 1}
    held, silent = make_job("processing", locked_at=timedelta(seconds=0.5)), lost_job(timedelta(seconds=2))

    assert sweep().total == 1
    assert (held.refresh().status, silent.refresh().status) == ("processing", "queued")


def test_a_claim_without_a_token_is_lost_after_the_timeout_whatever_the_lease():
    job = lost_job(timedelta(minutes=5), locked_by=None)

    assert sweep().total == 0
    assert sweep(timeout=timedelta(minutes=4)).total == 1
    assert job.refresh().status == "queued"


@pytest.mark.parametrize("dirt", ["null", "7", '"text"', "[1]"])
def test_one_dirty_row_does_not_keep_the_others_lost(dirt):
    jobs = [lost_job(attempts=attempts) for attempts in (0, 1, 2_147_483_647)]
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE background_jobs SET metadata = %s, errors = %s, payload = %s", [dirt, dirt, dirt]
        )

    assert sweep().total == 3
    assert [job.refresh().status for job in jobs] == ["queued", "queued", "failed"]


def test_a_dry_run_counts_and_changes_nothing(caplog):
    lost_job()
    lost_job(attempts=3)
    before = rows()

    with caplog.at_level(logging.WARNING, "django_pgjobs"):
        assert str(sweep(dry_run=True)) == "1 lost jobs queued again, 1 made dead letters."
    assert rows() == before
    assert caplog.messages == []


def test_a_sweep_takes_no_more_than_its_limit():
    for _ in range(5):
        lost_job()

    assert [sweep(limit=2).total for _ in range(4)] == [2, 2, 1, 0]


@pytest.mark.django_db(transaction=True)
def test_only_one_sweep_is_at_work_at_a_time():
    job = lost_job()
    with session() as other:
        with work(other) as cursor:
            assert store.sweep_lock(cursor)
            assert str(sweep()) == "Another sweep is at work."
            assert job.refresh().status == "processing"
        assert sweep().requeued == 1


def test_a_sweep_that_another_one_interrupts_still_says_what_it_did():
    total = maintenance.Swept(1000, 1) + maintenance.Swept(why_not="Another sweep is at work.")

    assert str(total) == "1,000 lost jobs queued again, 1 made dead letters. Another sweep is at work."


@pytest.mark.django_db(transaction=True)
def test_a_sweep_passes_over_what_is_just_being_settled():
    settling, lost = lost_job(), lost_job()
    with session() as other:
        with work(other) as cursor:
            claim = claim_of(settling)
            assert store.settle(cursor, [(claim, Verdict(Event.COMPLETE))]) == {settling.pk}
            assert sweep().total == 1
        assert (settling.refresh().status, lost.refresh().status) == ("completed", "queued")


@pytest.mark.django_db(transaction=True)
def test_a_late_holder_of_a_swept_job_is_refused():
    job = lost_job()
    claim = claim_of(job)
    sweep()

    with session() as late, work(late) as cursor:
        assert store.renew(cursor, [claim]) == {}
        assert store.settle(cursor, [(claim, Verdict(Event.COMPLETE))]) == set()
    assert job.refresh().status == "queued"


def test_the_longest_lease_of_a_live_worker_goes(caplog):
    job = lost_job(timedelta(minutes=30))
    worker = make_worker(lease=timedelta(hours=1))
    make_worker(lease=timedelta(minutes=5))

    with caplog.at_level(logging.WARNING, "django_pgjobs"):
        assert sweep().total == 0
    assert job.refresh().status == "processing"
    assert caplog.messages == [
        "A live worker goes by a lease of 1:00:00; sweeping by it, not by LEASE = 0:00:00.100000."
    ]

    BackgroundWorker.objects.filter(pk=worker.pk).update(lease=timedelta(seconds=0.2))
    BackgroundWorker.objects.exclude(pk=worker.pk).delete()
    assert sweep().requeued == 1


def test_the_lease_of_a_dead_worker_counts_for_nothing():
    lost_job(timedelta(minutes=30))
    worker = make_worker(lease=timedelta(hours=1))
    BackgroundWorker.objects.filter(pk=worker.pk).update(last_seen_at=worker.started_at - timedelta(hours=2))

    assert sweep().requeued == 1


def test_nothing_is_swept_before_the_server_has_been_up_for_a_lease():
    make_worker(lease=timedelta(days=3650))
    job = make_job("processing", locked_at=-timedelta(days=4000))

    assert str(sweep()) == (
        "The server has been up for less than a lease (3650 days, 0:00:00); its workers renew first."
    )
    assert job.refresh().status == "processing"


# ── Pruning ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
def test_pruning_deletes_what_finished_with_a_status_long_ago_and_nothing_else(status):
    for other in Status:
        make_job(other)
        if other != status:
            make_job(other, updated_at=-timedelta(days=10))
    kept = rows()
    make_job(status, updated_at=-timedelta(days=10))

    assert prune(Status(status), timedelta(days=3)) == 1
    assert rows() == kept


def test_pruning_takes_the_oldest_first_and_no_more_than_its_limit():
    jobs = [make_job("completed", updated_at=-timedelta(days=days)) for days in (5, 9, 7)]

    assert prune(Status.COMPLETED, timedelta(days=3), limit=2) == 2
    assert set(rows()) == {jobs[0].pk}
    assert prune(Status.COMPLETED, timedelta(days=3), limit=2) == 1


@pytest.mark.django_db(transaction=True)
def test_two_prunes_at_once_share_the_work():
    for _ in range(6):
        make_job("completed", updated_at=-timedelta(days=10))
    with session() as other:
        with work(other) as cursor:
            assert store.prune(cursor, Status.COMPLETED, age=timedelta(days=3), limit=2) == 2
            assert prune(Status.COMPLETED, timedelta(days=3)) == 4
        assert rows() == {}


@pytest.mark.django_db(transaction=True)
def test_a_retried_job_survives_a_prune_that_runs_at_the_same_time():
    job = make_job("failed", updated_at=-timedelta(days=10))
    with transaction.atomic():
        assert job.retry()
        with session() as other, work(other) as cursor:
            assert store.prune(cursor, Status.FAILED, age=timedelta(days=3), limit=10) == 0
    assert prune(Status.FAILED, timedelta(days=3)) == 0
    assert job.refresh().status == "queued"


@pytest.mark.django_db(transaction=True)
def test_a_job_that_is_being_pruned_is_not_retried():
    job = make_job("failed", updated_at=-timedelta(days=10))
    with session() as other, work(other) as cursor:
        assert store.prune(cursor, Status.FAILED, age=timedelta(days=3), limit=10) == 1
        assert job.retry() is False


def test_what_is_kept_for_ever_is_not_among_the_retentions(settings):
    assert maintenance.retentions() == {Status.COMPLETED: timedelta(days=3)}

    settings.PGJOBS = {"COMPLETED_RETENTION": None, "FAILED_RETENTION": 60, "CANCELLED_RETENTION": 0}
    assert maintenance.retentions() == {
        Status.FAILED: timedelta(minutes=1),
        Status.CANCELLED: timedelta(0),
    }


def test_a_workers_prune_goes_by_the_retentions_in_batches(settings, monkeypatch):
    monkeypatch.setattr(maintenance, "BATCH_SIZE", 2)
    settings.PGJOBS = {"CANCELLED_RETENTION": 60}
    for status in Status:
        for _ in range(3):
            make_job(status, updated_at=-timedelta(days=10))
    worker = make_worker(lease=timedelta(minutes=1))
    BackgroundWorker.objects.filter(pk=worker.pk).update(last_seen_at=worker.started_at - timedelta(days=2))
    for age in (91, 89):
        operation = BackgroundOperation.objects.create(act="retry", filter={}, state="finished")
        updated_at = worker.started_at - timedelta(days=age)
        BackgroundOperation.objects.filter(pk=operation.pk).update(updated_at=updated_at)

    with store.own_transaction("default") as cursor:
        assert [maintenance.prune(cursor) for _ in range(2)] == [True, False]
    assert {row["status"] for row in rows().values()} == {"queued", "processing", "failed"}
    assert not BackgroundWorker.objects.exists()
    assert BackgroundOperation.objects.get() == operation


# ── Worker hosts ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_host_is_announced_once_and_forgotten():
    host = store.Host(uuid.uuid4(), "box", 7, ["mail"], 2, 4, 10, LEASE, "1.0")
    with connection.cursor() as cursor:
        assert store.announce_worker(cursor, host, state="running", running=0) is None
        first = BackgroundWorker.objects.get()
        assert store.ask_worker_to_stop(cursor, host.id, by="ada")
        assert not store.ask_worker_to_stop(cursor, host.id, by="bob")
        executors = [{"pid": 7}]
        by = store.announce_worker(cursor, host, state="stopping", running=3, executors=executors)
        second = BackgroundWorker.objects.get()

        assert (by, first.executors, second.executors) == ("ada", [], executors)
        assert (first.queues, first.lease, first.state, first.running) == (["mail"], LEASE, "running", 0)
        assert (second.state, second.running, second.started_at) == ("stopping", 3, first.started_at)
        assert second.last_seen_at > first.last_seen_at
        (live,) = store.workers(cursor)
        assert live[:-3] == (host.id, "box", 7, ["mail"], "stopping", 3, 28)
        assert live.is_alive
        store.forget_worker(cursor, host.id)
    assert not BackgroundWorker.objects.exists()


def test_hosts_that_ended_without_a_word_are_forgotten_a_day_later():
    silent, live = make_worker(lease=LEASE), make_worker(lease=LEASE)
    BackgroundWorker.objects.filter(pk=silent.pk).update(
        last_seen_at=silent.started_at - timedelta(days=1, seconds=1)
    )

    with connection.cursor() as cursor:
        assert store.prune_workers(cursor) == 1
    assert list(BackgroundWorker.objects.all()) == [live]


@pytest.mark.django_db(transaction=True)
def test_nobody_waits_for_rows_of_workers_that_somebody_has_locked():
    silent, live = make_worker(lease=LEASE), make_worker(lease=LEASE)
    BackgroundWorker.objects.filter(pk=silent.pk).update(last_seen_at=silent.started_at - timedelta(days=2))
    host = store.Host(live.pk, "box", 7, ["mail"], 2, 4, 10, LEASE, "1.0")
    with session() as other, other.transaction():
        other.execute("SELECT FROM background_workers FOR UPDATE")
        with session(options="-c lock_timeout=1000") as own:
            assert store.prune_workers(own.cursor()) == 0
            assert store.announce_worker(own.cursor(), host, state="stopping", running=0) is None
    assert BackgroundWorker.objects.filter(state="running").count() == 2
