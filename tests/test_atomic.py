"""Atomic jobs: their effects and their completion are committed together, or neither is."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import psycopg
import pytest
from django.db import DatabaseError, connection, transaction

from django_pgjobs import execution, job, jobs
from django_pgjobs.lifecycle import Completed, Event, Failed
from django_pgjobs.models import BackgroundJob
from django_pgjobs.testing import drain
from tests import tasks
from tests.factories import claim_of, make_job
from tests.models import Effect
from tests.workers import Workers, until

NAME = "tests.atomic.body"


@pytest.fixture(autouse=True)
def registry():
    before = dict(jobs.registry)
    yield
    jobs.registry.clear()
    jobs.registry.update(before)


def run(body):
    """Run a job with this body under a claim. Returns the outcome, and the job as it is now in the table."""
    job(name=NAME, atomic=True)(body)
    row = make_job("processing", job_name=NAME, payload={})
    outcome = execution.run(claim_of(row)._replace(token=row.locked_by))
    return outcome, BackgroundJob.objects.filter(pk=row.pk).first()


def effect():
    Effect.objects.create(what="effect")
    return {"total": 1}


@pytest.mark.django_db(transaction=True)
def test_the_effects_and_the_completion_are_committed_together():
    seen_inside = []

    def body():
        with psycopg.connect(**connection.get_connection_params() | {"cursor_factory": None}) as other:
            status = "SELECT status FROM background_jobs"
            Effect.objects.create(what="effect")
            seen_inside.append(other.execute(status).fetchone()[0])
            other.execute("UPDATE background_jobs SET locked_at = statement_timestamp()")  # as a renewal does
        return {"total": 1}

    outcome, row = run(body)
    assert outcome == Completed(recorded=True)
    assert (row.status, row.result, seen_inside) == ("completed", {"total": 1}, ["processing"])
    assert Effect.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_nothing_is_left_where_a_completed_job_is_deleted(settings):
    settings.PGJOBS = {"COMPLETED_RETENTION": 0}
    assert run(effect) == (Completed(recorded=True), None)
    assert Effect.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_a_body_that_raises_leaves_no_effects():
    def body():
        effect()
        raise ValueError("after the effect")

    outcome, row = run(body)
    assert outcome.error.message == "after the effect"
    assert (row.status, Effect.objects.count()) == ("processing", 0)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "steal",
    [
        "locked_by = gen_random_uuid()",
        "attempts = 2",
        "status = 'queued', locked_by = NULL, locked_at = NULL",
    ],
)
def test_a_claim_that_was_lost_takes_its_effects_along(steal):
    def body():
        effect()
        with psycopg.connect(**connection.get_connection_params() | {"cursor_factory": None}) as other:
            other.execute(f"UPDATE background_jobs SET {steal}")  # noqa: S608

    outcome, row = run(body)
    assert "since its claim was lost" in outcome.error.message
    assert row.status != "completed"
    assert Effect.objects.count() == 0


@pytest.mark.django_db(transaction=True)
def test_a_broken_transaction_that_the_body_hides_is_a_failure():
    def body():
        effect()
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1 / 0")
        except DatabaseError:
            pass

    outcome, row = run(body)
    assert isinstance(outcome, Failed)
    assert (row.status, Effect.objects.count()) == ("processing", 0)


@pytest.mark.django_db(transaction=True)
def test_a_body_that_ends_the_transaction_is_a_failure():
    def body():
        effect()
        connection.connection.execute("COMMIT")

    outcome, row = run(body)
    assert "since its body had ended the transaction" in outcome.error.message
    assert row.status == "processing"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("leave", [lambda: None, sys.exit])
def test_a_child_that_the_body_forks_does_not_touch_the_transaction(leave):
    def body():
        effect()
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
        else:
            leave()

    outcome, row = run(body)
    assert (outcome, row.status) == (Completed(recorded=True), "completed")
    assert Effect.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_what_was_not_committed_is_not_reported_as_completed():
    """With AUTOCOMMIT off, Django commits nothing by itself."""
    connection.set_autocommit(False)
    try:
        outcome, _ = run(effect)
        connection.rollback()
    finally:
        connection.set_autocommit(True)
    assert "nothing was committed" in outcome.error.message
    assert Effect.objects.count() == 0


@pytest.mark.django_db(transaction=True)
def test_an_error_at_the_commit_is_a_failure():
    with connection.cursor() as cursor:
        cursor.execute("""
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN RAISE integrity_constraint_violation USING MESSAGE = 'refused at commit'; END $$;
            CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON tests_effect
                DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()
        """)
    try:
        outcome, row = run(effect)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP FUNCTION refuse CASCADE")
    assert outcome.error.message.startswith("refused at commit")
    assert (row.status, Effect.objects.count()) == ("processing", 0)


@pytest.mark.django_db(transaction=True)
def test_what_goes_wrong_after_the_commit_does_not_undo_it(caplog):
    def fail():
        raise ValueError("too late")

    def body():
        effect()
        transaction.on_commit(fail)

    outcome, row = run(body)
    assert (outcome, row.status) == (Completed(recorded=True), "completed")
    assert "a callback of on_commit failed. The job is completed." in caplog.text


@pytest.mark.django_db(transaction=True)
def test_the_transaction_is_read_committed_whatever_the_project_sets():
    def level():
        with connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            return cursor.fetchone()[0]

    connection.ensure_connection()
    connection.connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    try:
        _, row = run(level)
    finally:
        connection.connection.isolation_level = None
    assert row.result == "read committed"


@pytest.mark.django_db(transaction=True)
def test_a_result_that_cannot_be_kept_is_said_so():
    _, row = run(lambda: object())
    assert row.status == "completed"
    assert "object" in row.metadata["result_problem"]


@pytest.mark.django_db(transaction=True)
def test_a_coroutine_that_nobody_awaits_is_a_failure_without_effects():
    def body():
        effect()
        return asyncio.sleep(0)

    outcome, row = run(body)
    assert outcome.give_up
    assert (row.status, Effect.objects.count()) == ("processing", 0)


def test_async_functions_cannot_be_atomic():
    async def body(): ...

    with pytest.raises(ValueError, match="atomic=True is for plain functions"):
        job(name=NAME, atomic=True)(body)


@pytest.mark.django_db
def test_an_atomic_job_is_drained_in_the_transaction_of_a_test():
    def body(text):
        Effect.objects.create(what=text)
        tasks.note.enqueue(f"from {text}")
        if text == "bad":
            raise ValueError(text)

    function = job(name=NAME, atomic=True, max_attempts=1)(body)
    good, bad = function.enqueue("good"), function.enqueue("bad")
    drained = drain()
    assert [run.event for run in drained.runs] == [Event.COMPLETE, Event.BURY, Event.COMPLETE]
    assert (good.refresh().status, bad.refresh().status) == ("completed", "failed")
    assert set(Effect.objects.values_list("what", flat=True)) == {"good", "from good"}


@pytest.mark.processes
def test_an_atomic_job_in_a_worker(workers: Workers, tmp_path: Path) -> None:
    """It runs for longer than the lease, so that its claim is renewed; and it is told of its completion."""
    worker = workers.start("--processes", "1", settings={"LEASE": 1, "SWEEP_INTERVAL": 0.2}).until_listening()
    row = tasks.effect_then_wait.enqueue(str(tmp_path / "go"), "atomic")
    until(lambda: row.refresh().status == "processing")
    first = row.locked_at
    until(lambda: (row.refresh().locked_at - first).total_seconds() > 1.2, what="renewals")
    assert Effect.objects.count() == 0
    (tmp_path / "go").touch()
    until(lambda: row.refresh().status == "completed")
    assert (row.attempts, row.result) == (1, "atomic")
    assert Effect.objects.get().what == "atomic"
    until(lambda: worker.said(f"job={row.pk}") and worker.said("completed"))
    assert worker.stop() == 0
    assert not worker.said("lost")


@pytest.mark.processes
def test_an_atomic_job_that_is_stopped_leaves_nothing(workers: Workers, tmp_path: Path) -> None:
    workers.start("--processes", "1").until_listening()
    row = tasks.effect_then_wait.enqueue(str(tmp_path / "go"), "never")
    until(lambda: row.refresh().status == "processing")
    row.cancel()
    until(lambda: row.refresh().status == "cancelled")
    assert Effect.objects.count() == 0
