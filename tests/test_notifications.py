"""What the triggers tell a session that listens, and what they do not."""

import threading
import uuid
from datetime import timedelta

import pytest

from django_pgjobs import sql, store, wakeup
from django_pgjobs.channel import NEVER, clock
from django_pgjobs.database import connect
from django_pgjobs.lifecycle import Event, JobError, Verdict
from django_pgjobs.wakeup import LOOKS, Listener, Wakeup
from tests.factories import claim_of, make_job, rows
from tests.sessions import session, work
from tests.workers import until

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


# Hosts that do not want to be notified


LOCKS_OF_OURS = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"


def test_where_a_host_is_and_none_wants_to_be_told_it_is_quiet(heard, other):
    failed = make_job("failed")
    with session() as one, session() as two:
        one.execute(sql.HEAR)
        two.execute(sql.HEAR)
        for host, announced in ((one, ["mail"]), (two, [])):
            host.execute(sql.WANT_NO_MORE)
            other.execute(INSERT)
            assert heard() == announced
        failed.retry()
        assert heard() == []
        two.execute(sql.WANT)
        other.execute(INSERT)
        assert heard() == ["mail"]
        two.execute(sql.WANT_NO_MORE)
        other.execute(INSERT_MANY)
        assert heard() == []
    until(lambda: not wants(other, 1))
    other.execute(INSERT)  # there is no host: who knows who listens
    assert heard() == ["mail"]


def test_to_find_out_leaves_no_lock(other):
    with session() as host:
        for statement in ("SELECT 1", sql.HEAR, sql.WANT_NO_MORE):
            host.execute(statement)
            with other.transaction():
                other.execute(INSERT)
                assert other.execute(LOCKS_OF_OURS).fetchone() == (0,)


INSERT_ONE_BY_ONE = """
DO $$ BEGIN
    FOR n IN 1..2500 LOOP
        INSERT INTO background_jobs (queue_name, job_name, payload)
        VALUES (pg_backend_pid() || '-' || n, 'x', '{}');
        COMMIT;
    END LOOP;
END $$
"""


def test_sessions_that_insert_at_the_same_time_do_not_take_each_other_for_hosts(heard):
    """Where no host is, all is announced: whoever listens may be a client of another kind."""

    def insert():
        with session() as connection:
            connection.execute(INSERT_ONE_BY_ONE)

    threads = [threading.Thread(target=insert) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(heard()) == 4 * 2500


@pytest.fixture
def listener():
    wakeup = Wakeup()
    listener = Listener(wakeup, f"probe_{uuid.uuid4().hex}", lambda: connect("default", 10, "listener"))
    with session() as speaker:

        def when(condition):
            """Go on as a host does until this holds."""

            def is_so():
                listener.keep()
                if clock() >= listener.next_probe:
                    listener.note_probe()
                    speaker.execute(f"NOTIFY {listener.probe_channel}")
                wakeup.wait(min(listener.next_deadline - clock(), 0.01))
                return condition()

            until(is_so)

        when(lambda: listener.hears)
        listener.notified = False
        yield listener, when
    listener.close()
    wakeup.close()


def wants(connection, number=2) -> bool:
    """Whether a host holds the lock that says so; or the one that says that it is there."""
    (count,) = connection.execute(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = %s"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        [number],
    ).fetchone()
    return count > 0


def test_what_was_created_while_nobody_wanted_to_know_is_looked_for(listener, other):
    """Its transaction may end long after the host wants to be told again, and then it tells nobody."""
    listener, when = listener
    assert wants(other)
    listener.want(False)
    when(lambda: not wants(other))
    with session() as late, late.transaction():
        late.execute(INSERT)
        listener.want(True)
        when(lambda: wants(other) and listener.notified)
    for _ in LOOKS:
        listener.notified = False
        when(lambda: listener.notified)
    assert listener.next_deadline == NEVER
    listener.notified = False
    other.execute(INSERT)
    when(lambda: listener.notified)


def test_a_host_may_change_its_mind_before_the_server_has_answered(listener, other):
    listener, when = listener
    for _ in range(20):
        listener.want(False)
        listener.want(True)
        listener.want(False)
    when(lambda: not wants(other))
    listener.want(True)
    listener.want(False)
    listener.want(True)
    when(lambda: wants(other) and listener.notified)


def test_a_host_that_listens_anew_wants_what_it_wanted(listener, other):
    listener, when = listener
    listener.want(False)
    when(lambda: not wants(other))
    end_listeners(other)
    when(lambda: not listener.hears)
    listener.try_now()
    when(lambda: listener.hears)
    when(lambda: not wants(other))


def test_what_was_created_before_a_host_listens_is_looked_for_when_it_is_committed(listener, other):
    """It may have told nobody, since the host that was there before did not want to be told."""
    listener, when = listener
    with session() as one_before, session() as late:
        one_before.execute(f"{sql.HEAR}; {sql.WANT_NO_MORE}")
        listener.want(False)
        when(lambda: not wants(other))
        with late.transaction():
            late.execute(INSERT)
            listener.want(True)
            end_listeners(other)
            when(lambda: not listener.hears)
            listener.try_now()
            when(lambda: listener.hears and listener.notified)
            listener.notified = False
        when(lambda: listener.notified)


def end_listeners(connection) -> None:
    connection.execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
        " WHERE application_name = 'django_pgjobs listener' AND datname = current_database()"
    )


@pytest.mark.processes
def test_in_a_rush_a_worker_does_without_and_then_finds_what_was_committed_late(workers, other):
    workers.start("--processes", "1", "--poll-interval", "2").until_listening()
    nothing = "INSERT INTO background_jobs (job_name, payload) SELECT 'tests.tasks.nothing', '{}'"
    unfinished = "SELECT FROM background_jobs WHERE status <> 'completed' LIMIT 1"
    with session() as late:
        for _ in range(3):
            other.execute(f"{nothing} FROM generate_series(1, 5000)")
            until(lambda: not wants(other))
            with late.transaction():
                late.execute(nothing)
                until(lambda: wants(other))
            until(lambda: other.execute(unfinished).fetchone() is None)


def test_a_deaf_listener_is_noticed_however_early_probes_are_sent(listener, monkeypatch):
    """They go along with polls, and so long before they are due."""
    listener, when = listener
    monkeypatch.setattr(wakeup, "PROBE_INTERVAL", 0.2)
    listener.note_probe()
    assert listener.next_probe < NEVER
    listener.note_probe()
    assert listener.next_probe == NEVER
    assert listener.next_deadline <= clock() + 0.2
    when(lambda: not listener.hears)


def test_a_probe_that_was_not_sent_is_sent_again_and_does_not_count(listener):
    listener, _ = listener
    for _ in range(5):
        listener.note_probe()
        listener.probe_again()
        assert listener.next_probe == 0.0
