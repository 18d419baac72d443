"""A client in any language, which knows no more than a handful of classic statements, works beside us."""

import uuid
from datetime import timedelta

import pytest
from django.db import connection
from psycopg.sql import SQL, Identifier

from django_pgjobs import maintenance, store
from django_pgjobs.models import BackgroundJob
from django_pgjobs.testing import drain
from tests.factories import make_job
from tests.jobs import add
from tests.sessions import session

pytestmark = pytest.mark.django_db(transaction=True)

ENQUEUE = """
INSERT INTO background_jobs (queue_name, job_name, payload)
VALUES ('theirs', 'resize', '{"image": 7}')
RETURNING id
"""
CLAIM = """
UPDATE background_jobs
   SET status = 'processing', locked_at = NOW(), attempts = attempts + 1
 WHERE id = (SELECT id
               FROM background_jobs
              WHERE queue_name = 'theirs' AND status = 'queued' AND run_at <= NOW()
              ORDER BY run_at, id
                FOR UPDATE SKIP LOCKED
              LIMIT 1)
RETURNING id, payload, attempts
"""
COMPLETE = "UPDATE background_jobs SET status = 'completed', updated_at = NOW() WHERE id = %s"
FAIL = """
UPDATE background_jobs
   SET status = (CASE WHEN attempts >= max_attempts THEN 'failed' ELSE 'queued' END)::job_status,
       run_at = NOW() + INTERVAL '10 seconds' * POWER(2, attempts),
       last_error = %s, locked_at = NULL, updated_at = NOW()
 WHERE id = %s
"""
SWEEP = """
UPDATE background_jobs
   SET status = 'queued', locked_at = NULL, run_at = NOW() + INTERVAL '1 minute',
       last_error = 'Worker timeout detected', updated_at = NOW()
 WHERE status = 'processing' AND locked_at < NOW() - INTERVAL '10 minutes'
RETURNING id
"""


@pytest.fixture
def client():
    with session() as connection:
        yield connection


@pytest.fixture
def short_lease(settings):
    """The server has to be up for a lease before anything is swept."""
    settings.PGJOBS = {"LEASE": 0.1}


def theirs(client):
    (id,) = client.execute(ENQUEUE).fetchone()
    return BackgroundJob.objects.get(pk=id)


def age_claim(job, age):
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE background_jobs SET locked_at = statement_timestamp() - %s WHERE id = %s", [age, job.pk]
        )


def sweep(**options):
    with store.own_transaction("default") as cursor:
        return maintenance.sweep(cursor, **options).total


def test_what_it_leaves_out_has_a_default(client):
    job = theirs(client)

    assert (job.status, job.attempts, job.max_attempts, job.priority) == ("queued", 0, 3, 0)
    assert job.run_at == job.created_at == job.updated_at


def test_it_claims_completes_and_fails_its_own_jobs(client):
    first, second = theirs(client), theirs(client)

    assert client.execute(CLAIM).fetchone() == (first.pk, {"image": 7}, 1)
    assert client.execute(CLAIM).fetchone() == (second.pk, {"image": 7}, 1)
    assert client.execute(CLAIM).fetchone() is None
    client.execute(COMPLETE, [first.pk])
    client.execute(FAIL, ["no such image", second.pk])

    assert first.refresh().status == "completed"
    assert (second.refresh().status, second.last_error) == ("queued", "no such image")
    assert second.run_at - second.updated_at == timedelta(seconds=20)


def test_it_makes_dead_letters_that_a_person_can_retry(client):
    job = theirs(client)
    for attempt in (1, 2, 3):
        client.execute("UPDATE background_jobs SET run_at = NOW()")
        assert client.execute(CLAIM).fetchone() == (job.pk, {"image": 7}, attempt)
        client.execute(FAIL, ["no such image", job.pk])
    assert job.refresh().status == "failed"

    assert job.retry()
    assert client.execute(CLAIM).fetchone() == (job.pk, {"image": 7}, 1)


def test_its_jobs_and_ours_leave_each_other_alone(client):
    it = theirs(client)
    ours = add.using(queue="ours").enqueue(1, 2)

    assert client.execute(CLAIM).fetchone()[0] == it.pk
    assert client.execute(CLAIM).fetchone() is None
    assert drain(queue="ours").completed == 1
    assert (it.refresh().status, ours.refresh().result) == ("processing", 3)


def test_its_sweep_takes_what_is_old_and_our_stale_claim_is_refused(client):
    job = make_job("processing", locked_at=-timedelta(minutes=11))
    stale = store.Claim(job.pk, job.locked_by, 1, 3, job.job_name, job.queue_name, "{}")

    assert client.execute(SWEEP).fetchall() == [(job.pk,)]
    with store.own_transaction("default") as cursor:
        assert store.renew(cursor, [stale]) == {}
    assert job.refresh().status == "queued"


def test_our_worker_claims_anew_what_its_sweep_has_put_back(client):
    """Its sweep leaves our old token on the row, which must not count once the row is claimed again."""
    job = make_job("processing", locked_at=-timedelta(minutes=11), queue_name="ours")
    old = job.locked_by
    client.execute(SWEEP)
    client.execute("UPDATE background_jobs SET run_at = NOW()")

    with store.own_transaction("default") as cursor:
        (claim,) = store.claim(cursor, token=uuid.uuid4(), worker_id=uuid.uuid4(), limit=1).claims
        assert store.held(cursor, [claim._replace(token=old)]) == (set(), set())
        assert store.held(cursor, [claim]) == ({job.pk}, set())


def test_our_sweep_takes_its_claims_only_after_the_timeout(client, short_lease):
    job = theirs(client)
    client.execute(CLAIM)

    age_claim(job, timedelta(minutes=9, seconds=30))
    assert sweep() == 0
    age_claim(job, timedelta(minutes=10, seconds=1))
    assert sweep(timeout=timedelta(minutes=11)) == 0
    assert sweep() == 1

    job.refresh()
    assert (job.status, job.attempts, job.last_error) == ("queued", 1, "Worker timeout detected")
    assert job.run_at - job.updated_at == timedelta(minutes=1)


def test_our_sweep_ends_what_its_sweep_would_repeat_for_ever(client, short_lease):
    job = theirs(client)
    for _ in range(3):
        client.execute("UPDATE background_jobs SET run_at = NOW()")
        client.execute(CLAIM)
        age_claim(job, timedelta(minutes=11))
        sweep()

    assert (job.refresh().status, len(job.errors)) == ("failed", 3)
    assert job.errors[-1]["message"] == "Worker timeout detected"


def test_a_claim_that_a_client_forgot_to_date_is_lost(client, short_lease):
    job = make_job("processing", locked_by=None, locked_at=None)

    assert sweep() == 1
    assert job.refresh().status == "queued"


def test_two_of_its_claims_never_share_a_job_with_one_of_ours(client):
    jobs = {theirs(client).pk for _ in range(3)}

    with client.transaction(), session() as second:
        first = client.execute(CLAIM).fetchone()[0]
        other = second.execute(CLAIM).fetchone()[0]
        with store.own_transaction("default") as cursor:
            claimed = store.claim(
                cursor, token=uuid.uuid4(), worker_id=uuid.uuid4(), limit=9, queues=["theirs"]
            ).claims

    assert {first, other, *(claim.id for claim in claimed)} == jobs
    assert len(claimed) == 1


@pytest.mark.parametrize(
    "value", ["9" * 5000, "1e5000", "[" * 3000 + "]" * 3000], ids=["digits", "exponent", "depth"]
)
@pytest.mark.parametrize("column", ["payload", "result", "errors", "metadata"])
def test_what_python_cannot_read_breaks_no_query(client, column, value):
    """It is read as its text. (How deep is too deep depends on the version of Python.)"""
    job = make_job("completed", job_name="theirs", payload={})
    stored = {"payload": f'{{"args": [{value}]}}', "errors": f"[{value}]", "metadata": f'{{"a": {value}}}'}
    update = SQL("UPDATE background_jobs SET {} = %s WHERE id = %s").format(Identifier(column))
    client.execute(update, [stored.get(column, value), job.pk])

    (row,) = BackgroundJob.objects.all()
    assert isinstance(getattr(row, column), str) or value.startswith("[")
    assert job.refresh().progress is None
