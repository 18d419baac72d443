"""What the triggers tell a session that listens, and what they do not."""

import uuid
from datetime import timedelta

import pytest

from django_pgjobs import store
from django_pgjobs.lifecycle import Event, JobError, Verdict
from tests.factories import claim_of, make_job, rows
from tests.sessions import session, work

pytestmark = pytest.mark.django_db(transaction=True)

INSERT = "INSERT INTO background_jobs (queue_name, job_name, payload) VALUES ('mail', 'x', '{}')"
INSERT_MANY = """
INSERT INTO background_jobs (queue_name, job_name, payload)
SELECT 'queue-' || n % 3, 'x', '{}' FROM generate_series(1, 1000) AS n
"""


@pytest.fixture
def heard():
    """A function that returns what has been heard so far: everything that was committed before."""
    with session() as listener, session() as speaker:
        listener.execute("LISTEN job_created")

        def heard():
            end = uuid.uuid4().hex
            speaker.execute("SELECT pg_notify('job_created', %s)", [end])
            queues = []
            for notification in listener.notifies(timeout=30):
                if notification.payload == end:
                    return queues
                queues.append(notification.payload)
            raise AssertionError("The listener is deaf.")

        yield heard


@pytest.fixture
def other():
    with session() as connection:
        yield connection


def test_one_notification_for_each_queue_however_many_rows(heard, other):
    other.execute(INSERT_MANY)

    assert sorted(heard()) == ["queue-0", "queue-1", "queue-2"]


def test_one_notification_for_each_transaction(heard, other):
    with other.transaction():
        for _ in range(5):
            other.execute(INSERT)
        assert heard() == []

    assert heard() == ["mail"]


def test_silence_when_the_transaction_is_rolled_back(heard, other):
    with other.transaction(force_rollback=True):
        other.execute(INSERT)

    assert heard() == []


def test_what_is_due_soon_is_announced_and_what_is_due_later_is_not(heard):
    make_job(queue_name="soon", run_at=timedelta(seconds=9))
    make_job(queue_name="later", run_at=timedelta(seconds=60))

    assert heard() == ["soon"]


@pytest.mark.parametrize("run_at", ["9999-12-30 00:00Z", "0001-01-02 00:00Z"])
def test_no_instant_makes_the_trigger_fail(heard, other, run_at):
    other.execute(
        "INSERT INTO background_jobs (queue_name, job_name, payload, run_at) VALUES ('q', 'x', '{}', %s)",
        [run_at],
    )

    assert heard() == (["q"] if run_at < "2" else [])


@pytest.mark.parametrize("status", ["processing", "failed", "completed", "cancelled"])
def test_what_does_not_wait_is_not_announced(heard, status):
    make_job(status)

    assert heard() == []


@pytest.mark.parametrize(
    ("command", "silent"),
    [("SET LOCAL pgjobs.notify = 'off'", True), ("SET LOCAL pgjobs.notify = ''", False)],
)
def test_a_transaction_can_be_silent(heard, other, command, silent):
    job = make_job("failed", queue_name="failed")
    with other.transaction():
        other.execute(command)
        other.execute(INSERT)
        other.execute("UPDATE background_jobs SET status = 'queued', run_at = now() WHERE id = %s", [job.pk])
    assert sorted(heard()) == ([] if silent else ["failed", "mail"])

    other.execute(INSERT)
    assert heard() == ["mail"]


def test_a_retried_job_is_announced(heard):
    make_job("failed", queue_name="mail").retry()

    assert heard() == ["mail"]


@pytest.mark.parametrize(
    ("verdict", "announced"),
    [
        (Verdict(Event.COMPLETE), []),
        (Verdict(Event.COMPLETE, note={"a": 1}), []),
        (Verdict(Event.BURY, error=JobError("", "no")), []),
        (Verdict(Event.FAIL, 5.0, error=JobError("", "no")), ["mail"]),
        (Verdict(Event.FAIL, 60.0, error=JobError("", "no")), []),
        (Verdict(Event.SNOOZE, 60.0), []),
        (Verdict(Event.RELEASE), ["mail"]),
        (Verdict(Event.INTERRUPT), ["mail"]),
    ],
)
def test_a_settled_job_is_announced_when_it_is_due_again_soon(heard, other, verdict, announced):
    job = make_job("processing", queue_name="mail")
    with work(other) as cursor:
        store.settle(cursor, [(claim_of(job), verdict)])

    assert heard() == announced


def test_claiming_renewing_and_looking_are_silent(heard, other):
    make_job()
    assert heard() == ["default"]

    with work(other) as cursor:
        (claim,) = store.claim(cursor, token=uuid.uuid4(), worker_id=uuid.uuid4(), limit=1).claims
    with work(other) as cursor:
        assert set(store.renew(cursor, [claim])) == store.held(cursor, [claim])[0] == {claim.id}
    assert heard() == []


def test_a_waiting_job_is_announced_when_it_is_brought_forward_and_not_when_it_is_put_off(heard, other):
    job = make_job(queue_name="mail", run_at=timedelta(hours=1))
    statement = "UPDATE background_jobs SET run_at = now() + %s::interval WHERE id = %s"

    other.execute(statement, ["1 s", job.pk])
    assert heard() == ["mail"]
    other.execute(statement, ["5 s", job.pk])
    assert heard() == []


def test_the_longest_name_of_a_queue_breaks_no_insert(heard):
    name = "\N{PILE OF POO}" * 255  # 1,020 bytes
    make_job(queue_name=name)

    assert heard() == [name]


def test_a_session_that_knows_no_schema_at_all_can_insert(heard):
    with session(options="-c search_path=''") as bare:
        bare.execute("INSERT INTO public.background_jobs (job_name, payload) VALUES ('x', '{}')")
        bare.execute("UPDATE public.background_jobs SET status = 'failed'")
        bare.execute("UPDATE public.background_jobs SET status = 'queued'")

    assert heard() == ["default", "default"]
    assert [row["status"] for row in rows().values()] == ["queued"]
