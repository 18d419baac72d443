"""The table of transitions, the guard of a claim, and the order of claiming, against the database."""

import json
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import psycopg
import pytest
from django.db import IntegrityError, connection, transaction

from django_pgjobs import store
from django_pgjobs.lifecycle import TRANSITIONS, Event, JobError, Status, Verdict
from django_pgjobs.models import BackgroundJob, BackgroundQueue
from tests.factories import claim_of, make_job, rows
from tests.sessions import session, work
from tests.workers import until

pytestmark = pytest.mark.django_db

ERROR = JobError("shop.errors.CardDeclined", "no money", "Traceback: ...", "abc")

# A verdict for each event that a holder can bring about.
VERDICTS = {
    Event.COMPLETE: Verdict(Event.COMPLETE, result='{"total": 3}'),
    Event.FAIL: Verdict(Event.FAIL, 20.0, error=ERROR),
    Event.BURY: Verdict(Event.BURY, error=ERROR, crashed=True),
    Event.SNOOZE: Verdict(Event.SNOOZE, 30.0),
    Event.RELEASE: Verdict(Event.RELEASE),
    Event.INTERRUPT: Verdict(Event.INTERRUPT, note={"interruptions": 1}),
    Event.PARK: Verdict(Event.PARK, 5.0, note={"unknown_since": 17.5}),
    Event.STOP: Verdict(Event.STOP),
}
DECISIONS = {Event.CANCEL: store.cancel, Event.RETRY: store.retry, Event.DISCARD: store.discard}

# The columns that each event writes, apart from status and updated_at.
WRITES = {
    Event.CLAIM: {"attempts", "locked_at", "locked_by", "worker_id", "started_at", "attempted_at"},
    Event.COMPLETE: {"result"},
    Event.FAIL: {"run_at", "locked_at", "locked_by", "errors", "last_error", "error_fingerprint"},
    Event.BURY: {"errors", "last_error", "error_fingerprint", "crashes"},
    Event.SNOOZE: {"run_at", "attempts", "locked_at", "locked_by"},
    Event.RELEASE: {"attempts", "locked_at", "locked_by"},
    Event.INTERRUPT: {"attempts", "locked_at", "locked_by", "metadata"},
    Event.PARK: {"run_at", "attempts", "locked_at", "locked_by", "metadata"},
    Event.STOP: set(),
    Event.CANCEL: set(),
    Event.RETRY: {"run_at", "attempts", "locked_at", "locked_by"},
    Event.DISCARD: set(),
}


def claim(limit=10, cursor=None, **options):
    options = {"token": uuid.uuid4(), "worker_id": uuid.uuid4(), **options}
    if cursor is not None:
        return store.claim(cursor, limit=limit, **options)
    with connection.cursor() as cursor:
        return store.claim(cursor, limit=limit, **options)


def settle(*settlements):
    with connection.cursor() as cursor:
        return store.settle(cursor, settlements)


def renew(*claims):
    with connection.cursor() as cursor:
        return store.renew(cursor, claims)


def held(*claims):
    with connection.cursor() as cursor:
        return store.held(cursor, claims)[0]


def bring_about(event, job):
    """Try to make `event` happen to a job. Returns the ids that changed."""
    if event is Event.CLAIM:
        return {claim.id for claim in claim().claims}
    if event in DECISIONS:
        return DECISIONS[event]([job.pk])
    return settle((claim_of(job), VERDICTS[event]))


def changed_columns(before, after):
    return {name for name in before if before[name] != after[name]}


# ── The table ─────────────────────────────────────────────────────────────────────────────────────────────


def test_every_event_has_a_way_to_happen():
    assert {Event.CLAIM, *VERDICTS, *DECISIONS} == set(Event) == set(WRITES)


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("event", Event)
def test_an_event_changes_a_job_only_from_the_statuses_of_the_table(event, status):
    others = [make_job(other, run_at=timedelta(hours=1)) for other in Status]
    job = make_job(status)
    before = rows()

    changed = bring_about(event, job)

    after = rows()
    sources, target = TRANSITIONS[event]
    assert {other.pk: after[other.pk] for other in others} == {other.pk: before[other.pk] for other in others}
    if status in sources:
        assert changed == {job.pk}
        assert after[job.pk]["status"] == target
        written = changed_columns(before[job.pk], after[job.pk])
        assert written - {"status", "updated_at"} == WRITES[event] - unchanged_by_chance(event, status)
        assert {"status", "updated_at"} <= written
    else:
        assert changed == set()
        assert after[job.pk] == before[job.pk]


def unchanged_by_chance(event, status):
    """A cancelled job that was never claimed has nothing that a retry could reset."""
    retried = event is Event.RETRY and status is Status.CANCELLED
    return {"attempts", "locked_at", "locked_by"} if retried else set()


def test_a_claim_counts_an_attempt_and_names_its_holder():
    job = make_job(stop_requested_at=timedelta(0), attempts=1, crashes=2, rerun_if_lost=False)
    token, worker = uuid.uuid4(), uuid.uuid4()

    (claimed,) = claim(token=token, worker_id=worker).claims

    job.refresh()
    assert claimed == (
        job.pk, token, 2, 3, "tests.jobs.add", "default", '{"args": [1, 2]}', 2, False, 0,
        claimed.claimed_at, None, None,
    )  # fmt: skip
    assert (job.locked_by, job.worker_id, job.attempts, job.stop_requested_at) == (token, worker, 2, None)
    assert job.locked_at == job.attempted_at == job.started_at == job.updated_at
    assert claimed.claimed_at == pytest.approx(job.locked_at.timestamp(), abs=1e-5)


def test_the_first_claim_stays_known_at_the_second():
    job = make_job(started_at=-timedelta(hours=1))
    started_at = job.started_at

    claim()

    assert job.refresh().started_at == started_at
    assert job.attempted_at > started_at


def test_a_job_that_cannot_count_further_does_not_block_the_queue():
    job = make_job(attempts=2_147_483_647, crashes=2_147_483_647)

    (claimed,) = claim().claims

    assert claimed.attempts == 2_147_483_647
    assert settle((claimed, VERDICTS[Event.BURY])) == {job.pk}
    assert job.refresh().status == "failed"


def test_an_unstarted_job_keeps_its_place_in_the_queue():
    first, second = make_job(run_at=-timedelta(seconds=2)), make_job(run_at=-timedelta(seconds=1))
    (claimed,) = claim(limit=1).claims
    settle((claimed, VERDICTS[Event.RELEASE]))

    assert [one.id for one in claim().claims] == [first.pk, second.pk]


@pytest.mark.parametrize("event", [Event.SNOOZE, Event.RELEASE, Event.INTERRUPT, Event.PARK])
def test_what_is_not_the_jobs_fault_does_not_cost_an_attempt(event):
    job = make_job("processing", attempts=3)

    settle((claim_of(job), VERDICTS[event]))

    assert job.refresh().attempts == 2


@pytest.mark.parametrize("event", [Event.FAIL, Event.BURY])
def test_a_failure_costs_an_attempt(event):
    job = make_job("processing", attempts=2)

    settle((claim_of(job), VERDICTS[event]))

    assert job.refresh().attempts == 2


@pytest.mark.parametrize("delay", [20.0, 20, 0.25])
def test_a_delay_counts_from_the_databases_clock(delay):
    job = make_job("processing", run_at=-timedelta(days=1))

    settle((claim_of(job), Verdict(Event.FAIL, delay, error=ERROR)))

    job.refresh()
    assert job.run_at - job.updated_at == timedelta(seconds=delay)


def test_delays_of_both_kinds_of_number_may_come_in_one_batch():
    jobs = [make_job("processing") for _ in range(3)]
    delays = [1, 2.5, None]

    settled = settle(
        *((claim_of(job), Verdict(Event.SNOOZE, delay)) for job, delay in zip(jobs, delays, strict=True))
    )

    assert settled == {job.pk for job in jobs}


# ── What a settled job keeps ──────────────────────────────────────────────────────────────────────────────


def test_a_failure_is_recorded_with_when_which_attempt_and_who():
    job = make_job("processing", attempts=2)

    settle((claim_of(job), VERDICTS[Event.FAIL]))

    job.refresh()
    (entry,) = job.errors
    assert datetime.fromisoformat(entry.pop("at")) == job.updated_at
    assert datetime.fromisoformat(entry.pop("began")) == job.attempted_at
    assert entry == {
        "attempt": 2,
        "worker": str(job.worker_id),
        "exception": "shop.errors.CardDeclined",
        "message": "no money",
        "traceback": "Traceback: ...",
    }
    assert (job.last_error, job.error_fingerprint) == ("CardDeclined: no money", "abc")


def test_the_twenty_newest_errors_are_kept_the_newest_last():
    job = make_job("processing", errors=[{"number": number} for number in range(1, 26)])

    settle((claim_of(job), VERDICTS[Event.FAIL]))

    errors = job.refresh().errors
    assert [entry["number"] for entry in errors[:-1]] == list(range(7, 26))
    assert errors[-1]["message"] == "no money"


@pytest.mark.parametrize("event", VERDICTS)
@pytest.mark.parametrize("dirt", ["null", "7", '"text"', "[]", '["unknown_since"]', "{}", '{"a": 1}'])
def test_whatever_the_metadata_and_the_errors_are_a_job_can_be_settled(dirt, event):
    job = make_job("processing")
    with connection.cursor() as cursor:
        cursor.execute("UPDATE background_jobs SET metadata = %s, errors = %s", [dirt, dirt])

    assert settle((claim_of(job), VERDICTS[event])) == {job.pk}

    job.refresh()
    note, error = VERDICTS[event].note, VERDICTS[event].error
    if note:
        assert job.metadata == {**({"a": 1} if dirt == '{"a": 1}' else {}), **note}
    elif dirt == '{"a": 1}':
        assert job.metadata == {"a": 1}
    if error:
        assert job.errors[-1]["message"] == "no money"


@pytest.mark.parametrize("dirt", ["null", "7", '"text"', "[]", "{}"])
def test_whatever_the_metadata_is_a_job_can_be_claimed_and_retried(dirt):
    queued, failed = make_job(), make_job("failed")
    with connection.cursor() as cursor:
        cursor.execute("UPDATE background_jobs SET metadata = %s, errors = %s", [dirt, dirt])

    (claimed,) = claim().claims

    assert (claimed.id, claimed.interruptions, claimed.unknown_since) == (queued.pk, 0, None)
    assert store.retry([failed.pk]) == {failed.pk}


@pytest.mark.parametrize(
    ("interruptions", "unknown_since", "read"),
    [
        (2, 17.5, (2, 17.5)),
        ("2", "17.5", (2, 17.5)),
        ("many", {}, (0, None)),
        ("NaN", "Infinity", (0, None)),
        (None, True, (0, None)),
        ([1], "1e999", (0, None)),
    ],
)
def test_numbers_in_the_metadata_are_read_with_care(interruptions, unknown_since, read):
    make_job(metadata={"interruptions": interruptions, "unknown_since": unknown_since})

    (claimed,) = claim().claims

    assert (claimed.interruptions, claimed.unknown_since) == read


def test_a_note_is_merged_into_the_metadata():
    job = make_job("processing", metadata={"trace": "00-ab", "interruptions": 1})

    settle((claim_of(job), Verdict(Event.INTERRUPT, note={"interruptions": 2})))

    assert job.refresh().metadata == {"trace": "00-ab", "interruptions": 2}


@pytest.mark.parametrize("event", set(VERDICTS) - {Event.COMPLETE, Event.PARK})
def test_a_job_whose_name_is_known_again_has_not_been_unknown(event):
    job = make_job("processing", metadata={"unknown_since": 1.0})

    settle((claim_of(job), VERDICTS[event]))

    assert "unknown_since" not in job.refresh().metadata


def test_a_retried_job_has_not_been_unknown_and_has_killed_nobody():
    job = make_job("failed", crashes=3, metadata={"unknown_since": 1.0, "trace": "00-ab"})

    assert job.retry()

    job.refresh()
    assert (job.attempts, job.crashes, job.metadata) == (0, 0, {"trace": "00-ab"})
    assert len(job.errors) == 1


@pytest.mark.parametrize("holder", ["queued", "processing"])
def test_a_retry_leaves_a_job_whose_unique_key_is_taken(holder):
    make_job(holder, unique_key="taken")
    taken, free, other = (
        make_job("failed", unique_key="taken"),
        make_job("cancelled", unique_key="free"),
        make_job("failed", unique_key="taken", job_name="tests.jobs.boom"),
    )
    before = rows()

    assert store.retry([taken.pk, free.pk, other.pk]) == {free.pk, other.pk}
    assert rows()[taken.pk] == before[taken.pk]


def test_of_several_jobs_with_one_unique_key_a_retry_takes_the_first():
    make_job("completed", unique_key="a")
    first, second, third = (make_job(status, unique_key="a") for status in ("failed", "cancelled", "failed"))
    without = [make_job("failed").pk for _ in range(2)]

    assert store.retry([third.pk, second.pk, *without, first.pk]) == {first.pk, *without}
    assert [rows()[job.pk]["status"] for job in (second, third)] == ["cancelled", "failed"]


def test_a_result_that_could_not_be_kept_is_noted():
    job = make_job("processing")

    settle((claim_of(job), Verdict(Event.COMPLETE, note={"result_problem": "too large"})))

    job.refresh()
    assert (job.status, job.result, job.metadata) == ("completed", None, {"result_problem": "too large"})


def test_a_wish_to_stop_ends_with_the_claim():
    asked = {"stop_requested_at": timedelta(0)}
    jobs = [make_job("processing", **asked) for _ in VERDICTS]

    settle(*((claim_of(job), verdict) for job, verdict in zip(jobs, VERDICTS.values(), strict=True)))

    assert [job.refresh().stop_requested_at for job in jobs] == [None] * len(VERDICTS)


@pytest.mark.parametrize("status", Status)
def test_only_a_job_that_a_worker_runs_can_be_asked_to_stop(status):
    job = make_job(status)
    before = rows()

    asked = store.request_stop([job.pk])

    assert asked == ({job.pk} if status is Status.PROCESSING else set())
    written = changed_columns(before[job.pk], rows()[job.pk])
    assert written == ({"stop_requested_at"} if asked else set())
    assert renew(claim_of(job)) == ({job.pk: True} if asked else {})


@pytest.mark.django_db(transaction=True)
def test_a_job_that_is_being_claimed_can_be_cancelled():
    job = make_job()
    with session() as claiming, ThreadPoolExecutor(1) as elsewhere:
        with work(claiming) as cursor:
            [claimed] = claim(1, cursor).claims
            answer = elsewhere.submit(_cancel, job)
            until(lambda: is_waited_for(claiming))
        assert answer.result(timeout=30)
    assert (claimed.id, job.refresh().status) == (job.pk, "processing")
    assert job.stop_requested_at is not None


def _cancel(job):
    try:
        return job.cancel()
    finally:
        connection.close()


def is_waited_for(session):
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))", [session.info.backend_pid]
        )
        return bool(cursor.fetchall())


def test_a_client_of_bare_sql_is_not_asked_to_stop():
    make_job("processing", locked_by=None)
    before = rows()

    assert store.request_stop(before) == set()
    assert rows() == before


@pytest.mark.parametrize("note", [{}, {"result_problem": "too large"}])
def test_with_no_retention_completion_is_deletion(settings, note):
    settings.PGJOBS = {"COMPLETED_RETENTION": 0}
    job, other = make_job("processing"), make_job("processing")

    assert settle((claim_of(job), Verdict(Event.COMPLETE, result="1", note=note))) == {job.pk}
    assert set(rows()) == {other.pk}


# ── The guard ─────────────────────────────────────────────────────────────────────────────────────────────

WRONG = {
    "token": lambda claim: claim._replace(token=uuid.uuid4()),
    "attempts": lambda claim: claim._replace(attempts=claim.attempts + 1),
    "job": lambda claim: claim._replace(id=claim.id + 1_000_000),
    "no token": lambda claim: claim._replace(token=None),
}
WAYS = {"renew": lambda claim: set(renew(claim)), "held": lambda claim: held(claim)} | {
    event.value: lambda claim, event=event: settle((claim, VERDICTS[event])) for event in VERDICTS
}


@pytest.mark.parametrize("retention", [0, 60])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_stale_claim_changes_nothing(settings, wrong, way, retention):
    settings.PGJOBS = {"COMPLETED_RETENTION": retention}
    job = make_job("processing")
    before = rows()

    assert WAYS[way](WRONG[wrong](claim_of(job))) == set()
    assert rows() == before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("status", set(Status) - {Status.PROCESSING})
def test_a_claim_on_a_job_that_is_not_processing_changes_nothing(status, way):
    job = make_job(status, attempts=1, locked_by=uuid.uuid4())
    before = rows()

    assert WAYS[way](claim_of(job)) == set()
    assert rows() == before


def test_a_stale_holder_of_many_changes_only_what_is_still_its_own():
    jobs = [make_job("processing") for _ in range(4)]
    claims = [claim_of(job) for job in jobs]
    stale = [claims[0], claims[1]._replace(attempts=9), claims[2], claims[3]._replace(token=uuid.uuid4())]
    own = {jobs[0].pk, jobs[2].pk}

    assert held(*stale) == set(renew(*stale)) == own
    assert settle(*((claim, VERDICTS[Event.FAIL]) for claim in stale)) == own


def test_a_renewal_writes_nothing_but_locked_at_and_tells_of_a_wish_to_stop():
    calm = make_job("processing", locked_at=-timedelta(seconds=50))
    asked = make_job("processing", locked_at=-timedelta(seconds=50), stop_requested_at=timedelta(0))
    before = rows()

    assert renew(claim_of(calm), claim_of(asked)) == {calm.pk: False, asked.pk: True}

    after = rows()
    for job in (calm, asked):
        assert changed_columns(before[job.pk], after[job.pk]) == {"locked_at"}
        assert after[job.pk]["locked_at"] > before[job.pk]["locked_at"]


def test_a_renewal_touches_no_index():
    job = make_job("processing")
    with connection.cursor() as cursor:
        count = "SELECT pg_stat_get_xact_tuples_hot_updated('background_jobs'::regclass)"
        cursor.execute(count)
        (before,) = cursor.fetchone()
        renew(claim_of(job))
        cursor.execute(count)
        assert cursor.fetchone() == (before + 1,)


def test_a_claim_without_a_token_can_only_be_settled_with_a_verdict():
    job = make_job("processing", locked_by=None)

    assert set(renew(claim_of(job))) == held(claim_of(job)) == set()
    assert settle((claim_of(job), VERDICTS[Event.FAIL])) == {job.pk}


def test_nothing_given_is_nothing_done():
    make_job("processing")
    before = rows()

    assert (settle(), renew(), held(), store.retry([]), claim(queues=[]).claims) == (
        set(), {}, set(), set(), [],
    )  # fmt: skip
    assert rows() == before


def test_a_host_finds_what_a_claim_took_whose_answer_it_never_received():
    token = uuid.uuid4()
    jobs = [make_job(), make_job()]
    make_job("processing")
    claim(token=token)

    with connection.cursor() as cursor:
        found = store.claimed_by(cursor, token)
    assert sorted(found) == [(job.pk, 1) for job in jobs]


# ── Locked rows and races ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def locked_job(transactional_db):
    """A processing job whose row somebody else has locked, with two neighbours."""
    jobs = [make_job("processing") for _ in range(3)]
    with session() as other, other.transaction():
        other.execute("SELECT FROM background_jobs WHERE id = %s FOR UPDATE", [jobs[1].pk])
        yield jobs[1], [jobs[0], jobs[2]]


def in_worker_transaction(function, argument):
    with session() as mine, work(mine) as cursor:
        cursor.execute("SET LOCAL lock_timeout = '1ms'")  # whoever waits for a lock, fails
        result = function(cursor, argument)
        cursor.execute("SET LOCAL lock_timeout = 0")  # but for the COMMIT: notifications wait for each other
        return result


@pytest.mark.parametrize("retention", [0, 60])
@pytest.mark.parametrize("event", VERDICTS)
def test_settling_a_batch_passes_over_a_locked_row(settings, locked_job, event, retention):
    settings.PGJOBS = {"COMPLETED_RETENTION": retention}
    locked, free = locked_job
    batch = [(claim_of(job), VERDICTS[event]) for job in [locked, *free]]

    assert in_worker_transaction(store.settle, batch) == {job.pk for job in free}
    assert in_worker_transaction(store.held, [claim for claim, _ in batch])[0] == {locked.pk}


def test_renewing_a_batch_passes_over_a_locked_row(locked_job):
    locked, free = locked_job
    claims = [claim_of(job) for job in [locked, *free]]

    assert set(in_worker_transaction(store.renew, claims)) == {job.pk for job in free}
    assert in_worker_transaction(store.held, claims)[0] == {job.pk for job in [locked, *free]}


@pytest.mark.parametrize(
    ("decide", "status"), [(store.cancel, "queued"), (store.retry, "failed"), (store.discard, "failed")]
)
@pytest.mark.django_db(transaction=True)
def test_a_decision_passes_over_a_locked_row(decide, status):
    locked, free = make_job(status), make_job(status)
    with session() as other, other.transaction():
        other.execute("SELECT FROM background_jobs WHERE id = %s FOR UPDATE", [locked.pk])

        assert decide([locked.pk, free.pk]) == {free.pk}


@pytest.mark.django_db(transaction=True)
def test_a_claim_passes_over_a_locked_row():
    locked, free = make_job(), make_job()
    with session() as other, other.transaction():
        other.execute("SELECT FROM background_jobs WHERE id = %s FOR UPDATE", [locked.pk])

        assert [one.id for one in claim().claims] == [free.pk]


@pytest.mark.django_db(transaction=True)
def test_two_sessions_that_race_never_share_a_job_nor_exceed_the_limit():
    rounds, limit, due = 50, 5, 7
    barrier = threading.Barrier(2, timeout=30)
    taken = [[], []]

    def race(number):
        with session() as mine, session() as inserting:
            for _ in range(rounds):
                if number == 0:
                    inserting.execute(
                        "INSERT INTO background_jobs (job_name, payload, queue_name, priority)"
                        " SELECT 'tests.jobs.add', '{}', 'queue-' || n %% 2, n %% 3"
                        " FROM generate_series(1, %s) AS n",
                        [due],
                    )
                barrier.wait()
                with work(mine) as cursor:
                    claims = claim(limit, cursor).claims
                taken[number].append([one.id for one in claims])
                barrier.wait()

    racers = [threading.Thread(target=race, args=[number]) for number in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()

    assert len(taken[0]) == len(taken[1]) == rounds
    for ours, theirs in zip(*taken, strict=True):
        assert len(ours) <= limit
        assert len(theirs) <= limit
        assert set(ours).isdisjoint(theirs)
        assert len(ours) + len(theirs) == due
    assert all(row["attempts"] == 1 for row in rows().values())


@pytest.mark.django_db(transaction=True)
def test_a_job_that_was_claimed_and_released_under_a_claims_eyes_is_claimed_once():
    """The claim's snapshot is older than the row it locks: it must read the row anew."""
    job = make_job()
    with session() as one, session() as two:
        with work(one) as cursor:
            (first,) = claim(cursor=cursor).claims
        with work(one) as cursor:
            store.settle(cursor, [(first, VERDICTS[Event.RELEASE])])
        with work(two) as cursor:
            (second,) = claim(cursor=cursor).claims
        with work(one) as cursor:
            assert store.settle(cursor, [(first, VERDICTS[Event.COMPLETE])]) == set()
    assert (second.id, second.attempts) == (job.pk, first.attempts)
    assert second.token != first.token
    assert job.refresh().status == "processing"


# ── The order of claiming ─────────────────────────────────────────────────────────────────────────────────


def labels(claimed):
    return [json.loads(one.payload)["args"][0] for one in claimed.claims]


def labelled(label, **columns):
    return make_job(payload={"args": [label]}, **columns)


def test_claims_go_by_priority_then_by_time_then_by_id():
    noon, eleven = -timedelta(hours=1), -timedelta(hours=2)
    run_at = labelled("third", run_at=noon).run_at
    labelled("fourth", run_at=run_at)
    labelled("second", run_at=eleven)
    labelled("first", priority=7, run_at=noon)
    labelled("fifth", priority=-7, run_at=eleven)
    labelled("not yet", priority=100, run_at=timedelta(hours=1))

    assert labels(claim(limit=2)) == ["first", "second"]
    assert labels(claim(limit=9)) == ["third", "fourth", "fifth"]


def test_without_listed_queues_priority_goes_before_the_queue():
    labelled("second", queue_name="a")
    labelled("first", queue_name="b", priority=1)

    assert labels(claim()) == ["first", "second"]


def test_listed_queues_go_in_their_order_whatever_the_priority():
    labelled("a", queue_name="a", priority=100)
    labelled("b", queue_name="b")
    labelled("b, urgent", queue_name="b", priority=1)
    labelled("c", queue_name="c", priority=100)

    assert labels(claim(queues=["b", "nothing here", "a"])) == ["b, urgent", "b", "a"]


def test_a_queue_that_is_listed_twice_hides_no_other():
    for _ in range(4):
        labelled("a", queue_name="a")
        labelled("b", queue_name="b")

    assert labels(claim(limit=5, queues=["a", "a", "b"])) == ["a"] * 4 + ["b"]


def test_queues_of_equal_priority_take_turns():
    for queue in ["a", "b", "c"]:
        labelled(queue, queue_name=queue)

    def first_after(queue):
        claimed = claim(limit=1, after=queue)
        settle((claimed.claims[0], VERDICTS[Event.RELEASE]))
        return labels(claimed)

    assert [first_after(queue) for queue in ["", "a", "b", "c", "aa"]] == [["a"], ["b"], ["c"], ["a"], ["b"]]


def test_urgent_jobs_do_not_wait_for_their_queues_turn():
    labelled("a", queue_name="a")
    labelled("b", queue_name="b", priority=1)

    assert labels(claim(after="b")) == ["b", "a"]


def test_a_paused_queue_gives_nothing():
    BackgroundQueue.objects.create(name="paused", paused_at=make_job("completed").created_at)
    BackgroundQueue.objects.create(name="resumed", paused_at=None)
    labelled("paused", queue_name="paused", priority=9)
    labelled("paused, later", queue_name="paused", run_at=timedelta(seconds=30))
    labelled("resumed", queue_name="resumed")

    claimed = claim()
    assert labels(claimed) == ["resumed"]
    assert claimed.next_due is None
    assert labels(claim(queues=["paused"])) == []


@pytest.mark.parametrize("run_at", ["9999-12-30 00:00Z", "0001-01-02 00:00Z"])
def test_a_job_may_be_due_at_any_instant_that_python_knows(run_at):
    job = make_job()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE background_jobs SET run_at = %s", [run_at])

    claimed = claim()

    assert [one.id for one in claimed.claims] == ([job.pk] if run_at < "2" else [])
    assert claimed.next_due is None


@pytest.mark.parametrize("instant", ["-infinity", "infinity", "294276-12-31", "4713-01-01 BC"])
@pytest.mark.parametrize(
    "column", [field.name for field in BackgroundJob._meta.fields if field.name.endswith("_at")]
)
def test_an_instant_that_python_cannot_read_is_refused(column, instant):
    """One such row would break every query and page that it is in."""
    job = make_job()
    with pytest.raises(IntegrityError, match="ck_jobs_dates"), connection.cursor() as cursor:
        cursor.execute(f"UPDATE background_jobs SET {column} = %s WHERE id = %s", [instant, job.pk])  # noqa: S608


def test_a_claim_that_comes_back_short_tells_when_the_next_job_is_due():
    make_job()
    make_job(queue_name="other", run_at=timedelta(seconds=40))
    make_job(priority=5, run_at=timedelta(seconds=20))
    make_job(priority=-5, run_at=timedelta(seconds=30))

    assert claim(limit=1).next_due is None  # there may be more
    assert claim(limit=1).next_due == pytest.approx(20, abs=5)
    assert claim(limit=1, queues=["other"]).next_due == pytest.approx(40, abs=5)
    assert claim(limit=1, queues=["empty"]).next_due is None


def test_a_job_that_is_due_tomorrow_ends_no_wait():
    make_job(run_at=timedelta(hours=25))

    assert claim().next_due is None


@pytest.mark.parametrize("limit", [1, 10, 999])
@pytest.mark.django_db(transaction=True)
def test_the_limit_is_exact_whatever_the_planner_believes(limit):
    with session() as mine:
        mine.execute("TRUNCATE background_jobs")  # forgets every statistic
        mine.execute(
            "INSERT INTO background_jobs (job_name, payload, queue_name, priority)"
            " SELECT 'tests.jobs.add', '{}', 'queue-' || n % 3, n % 5 FROM generate_series(1, 2000) AS n"
        )
        for mode in ("force_custom_plan", "force_generic_plan"):
            mine.execute(psycopg.sql.SQL("SET plan_cache_mode = {}").format(mode))
            with work(mine) as cursor:
                assert len(claim(limit, cursor).claims) == limit
                count = cursor.execute(
                    "SELECT count(*) FROM background_jobs WHERE status = 'processing' AND attempts = 1"
                )
                assert count.fetchone() == (limit,)
                cursor.execute("UPDATE background_jobs SET status = 'queued', attempts = 0")


def test_a_claim_may_go_on_where_another_came_to():
    """At each level for itself; jobs that were created earlier, or of another level, are left alone."""
    late, early = -timedelta(seconds=1), -timedelta(seconds=9)
    (first,) = [make_job(queue_name="a", run_at=early).pk]
    begun = claim()
    assert list(begun.reached) == [("a", 0)]
    make_job(queue_name="a", run_at=early - timedelta(seconds=1))
    make_job(queue_name="a", run_at=early, priority=1)
    make_job(queue_name="b", run_at=late)
    same_time = make_job(queue_name="a", run_at=BackgroundJob.objects.get(pk=first).run_at)
    later = make_job(queue_name="a", run_at=late)
    make_job(queue_name="a", run_at=timedelta(hours=1))

    more = claim(reached=begun.reached)
    assert [one.id for one in more.claims] == [same_time.pk, later.pk]
    assert more.reached["a", 0][1] == later.pk
    assert 3595 < more.next_due < 3601
    assert claim(reached=more.reached).claims == []
    assert claim(reached=more.reached).reached == more.reached
    assert len(claim().claims) == 3


SLOW = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.01); RETURN new; END';
CREATE TRIGGER slow BEFORE UPDATE ON background_jobs FOR EACH ROW EXECUTE FUNCTION slow();
"""


def test_a_slow_claim_tells_where_every_level_begins():
    """Those that go on from there leave nobody out that waited by then, at whatever level."""
    levels = {("a", 9), ("a", 0), ("b", 9), ("b", 0), ("paused", 0), ("tomorrow", 0)}
    jobs = {level: [make_job(queue_name=level[0], priority=level[1]).pk for _ in "xy"] for level in levels}
    waiting = [id for (queue, _), ids in jobs.items() if queue in ("a", "b", "paused") for id in ids]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("UPDATE background_jobs SET run_at = current_date + 2 WHERE queue_name = 'tomorrow'")
        cursor.execute("INSERT INTO background_queues VALUES ('paused', now(), '', '')")
        cursor.execute(SLOW)
        begun = claim(1, cursor)
        cursor.execute("DELETE FROM background_queues")
        waiting.append(make_job(queue_name="tomorrow").pk)  # ahead of those that are due later
        cursor.execute(
            "UPDATE background_jobs SET run_at = statement_timestamp() WHERE id = %s", waiting[-1:]
        )
        more = claim(50, cursor, reached=begun.reached)
        transaction.set_rollback(True)
    assert begun.tells_levels
    assert begun.reached.keys() == levels
    assert len(begun.claims) == 1
    assert sorted(one.id for one in begun.claims + more.claims) == sorted(waiting)


def test_a_batch_may_hold_claims_of_different_turns():
    """Each claim statement has its own token, and one settling statement writes them all."""
    make_job()
    (one,) = claim().claims
    make_job()
    (two,) = claim().claims
    assert one.token != two.token

    assert settle((one, VERDICTS[Event.SNOOZE]), (two, VERDICTS[Event.BURY])) == {one.id, two.id}


def test_what_a_holder_has_completed_is_told_from_what_was_lost(db):
    completed, lost, still_held = (make_job("processing") for _ in range(3))
    claims = [claim_of(job) for job in (completed, lost, still_held)]
    settle((claims[0], Verdict(Event.COMPLETE)))
    settle((claims[1], Verdict(Event.BURY, error=JobError("", "Worker timeout detected"))))

    with store.own_transaction("default") as cursor:
        assert store.held(cursor, claims) == ({still_held.pk}, {completed.pk})
