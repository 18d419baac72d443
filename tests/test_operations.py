"""Acts on all that a filter finds: what is found, what becomes of it, and who is beside it meanwhile."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import connection

from django_pgjobs import operations
from django_pgjobs.lifecycle import Event, Status
from django_pgjobs.models import BackgroundJob, BackgroundOperation, BackgroundQueue
from django_pgjobs.operations import DISCARD, RETRY, Filter, Manner, Person
from django_pgjobs.testing import drain
from tests import jobs
from tests.factories import make_job, rows
from tests.sessions import session
from tests.workers import Workers, until

pytestmark = pytest.mark.django_db

SHELL = Person("ada (shell)")


@pytest.fixture
def ada(db: None) -> Person:
    return Person.of(User.objects.create(username="ada"))


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "BATCH", 3)
    monkeypatch.setattr(operations, "LOOK", 4)


def dead(count: int, **columns: Any) -> list[int]:
    return [make_job("failed", **columns).pk for _ in range(count)]


def statuses() -> Counter[str]:
    return Counter(row["status"] for row in rows().values())


def carried_out(operation: BackgroundOperation) -> BackgroundOperation:
    for wait in operations.steps(operation.pk):
        assert not wait
    operation.refresh_from_db()
    return operation


def history() -> list[tuple[str, str, str]]:
    entries = LogEntry.objects.select_related("user").order_by("id")
    return [(one.user.username, one.object_id or "", one.change_message) for one in entries]


def run(*arguments: str, **options: Any) -> str:
    out = StringIO()
    call_command(*arguments, stdout=out, **options)
    return out.getvalue()


# ── What a filter finds ───────────────────────────────────────────────────────────────────────────────────

MATCHES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # a filter, columns of a job that it finds, columns of one that it does not find
    ({"queue": "mail"}, {"queue_name": "mail"}, {"queue_name": "mails"}),
    ({"job": "shop.send"}, {"job_name": "shop.send"}, {"job_name": "shop.sender"}),
    ({"fingerprint": "abc"}, {"error_fingerprint": "abc"}, {"error_fingerprint": "abcd"}),
    ({"fingerprint": ""}, {"error_fingerprint": None}, {"error_fingerprint": "abc"}),
    ({"unique_key": "k"}, {"unique_key": "k"}, {"unique_key": None}),
    ({"exception": "Timeout"}, {"last_error": "Timeout: x"}, {"last_error": "ReadTimeout: Timeout: x"}),
    ({"exception": "requests.Timeout"}, {"last_error": "Timeout: "}, {"last_error": "Timeouts: "}),
    ({"exception": "Timeout"}, {"last_error": "Timeout: "}, {"last_error": None}),
    ({"text": "100%_ OFF"}, {"last_error": "Sale: 100%_ off!"}, {"last_error": "Sale: 100xy off"}),
    ({"attempts_from": 3}, {"attempts": 3}, {"attempts": 2}),
    ({"attempts_to": 3}, {"attempts": 3}, {"attempts": 4}),
    ({"queue": "a", "job": "b"}, {"queue_name": "a", "job_name": "b"}, {"queue_name": "a"}),
]


@pytest.mark.parametrize(("criteria", "found", "not_found"), MATCHES, ids=lambda each: str(each))
def test_a_filter_finds_what_it_says(
    criteria: dict[str, Any], found: dict[str, Any], not_found: dict[str, Any]
) -> None:
    (wanted,), _ = dead(1, **found), dead(1, **not_found)
    filter = Filter(**criteria)
    assert operations.preview(filter) == (1, True, "dead letter")
    assert operations.preview(Filter(ids=(wanted, wanted + 1), **criteria)).number == 1
    assert Filter.of_json(filter.as_json()) == filter

    done = carried_out(operations.begin(RETRY, filter, SHELL))

    assert operations.told(done) == "1 job queued again."
    assert {id for id, row in rows().items() if row["status"] == "queued"} == {wanted}


def test_a_filter_by_time_goes_by_when_the_job_failed() -> None:
    old, middle, new = (make_job("failed", updated_at=-timedelta(hours=hours)) for hours in (3, 2, 1))
    filter = Filter(since=middle.updated_at, until=middle.updated_at)
    assert Filter.of_json(filter.as_json()) == filter
    carried_out(operations.begin(DISCARD, filter, SHELL))
    assert [job.refresh().status for job in (old, middle, new)] == ["failed", "cancelled", "failed"]


def test_other_statuses_are_never_found() -> None:
    for status in Status:
        make_job(status)
    assert operations.preview(Filter()).number == 1
    assert operations.preview(Filter(status=Status.CANCELLED)).number == 1
    assert operations.preview(Filter(ids=tuple(rows()))).number == 1
    carried_out(operations.begin(RETRY, Filter(status=Status.CANCELLED), SHELL))
    assert statuses() == {"queued": 2, "processing": 1, "failed": 1, "completed": 1}


@pytest.mark.parametrize("more", [{}, {"queue": "mail", "ids": (1,)}])
def test_queued_jobs_are_looked_for_in_one_queue(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="by the queue that they wait in"):
        Filter(status=Status.QUEUED, **more)


@pytest.mark.parametrize("text", ["a\x00b", "a\udcffb"])
def test_what_cannot_be_in_the_table_cannot_be_looked_for(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be looked for"):
        Filter(text=text)


def test_a_preview_looks_no_further_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MOST_COUNTED", 4)
    dead(2, queue_name="mail")
    assert str(operations.preview(Filter())) == "2 dead letters"
    dead(3)
    assert str(operations.preview(Filter(queue="mail"))) == "at least 1 dead letters"
    assert operations.preview(Filter(queue="mail"), exactly=True) == (2, True, "dead letter")
    assert operations.begin(RETRY, Filter(queue="mail"), SHELL).expected is None
    dead(4)
    assert str(operations.preview(Filter(queue="mail"))) == "perhaps older dead letters"
    assert run("retryjobs", "--queue", "mail", "--dry-run") == (
        "2 dead letters in the queue 'mail' would be queued again.\n"
    )


# ── What becomes of it ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("count", [0, 1, 3, 4, 8, 11])
@pytest.mark.parametrize("at_once", [True, False], ids=["failed at one instant", "failed one by one"])
def test_an_operation_goes_through_all_that_matches_and_nothing_else(count: int, at_once: bool) -> None:
    for each in range(count):
        age = timedelta(days=1, minutes=0 if at_once else each)
        make_job("failed", queue_name="mail", updated_at=-age)
        make_job("failed", queue_name="other", updated_at=-age)
    with connection.cursor() as cursor:
        if at_once:
            cursor.execute("UPDATE background_jobs SET updated_at = '2026-01-01'")

    done = carried_out(operations.begin(RETRY, Filter(queue="mail"), SHELL))

    assert (done.state, done.expected, done.changed) == ("finished", count, count)
    assert {(row["queue_name"], row["status"]) for row in rows().values()} == (
        {("mail", "queued"), ("other", "failed")} if count else set()
    )


def test_the_history_of_each_job_has_before_and_after_and_the_reason(ada: Person) -> None:
    one = make_job("failed", queue_name="mail", attempts=2, max_attempts=5)
    two = make_job("failed", queue_name="mail")
    manner = Manner(delay=timedelta(minutes=10), queue="slow")

    done = carried_out(operations.begin(RETRY, Filter(), ada, reason="The bank is back.", manner=manner))
    carried_out(
        operations.begin(DISCARD, Filter(ids=(make_job("failed").pk,)), Person("bob"), reason="No user.")
    )

    after = "After: queued, due in 0:10:00, in the queue 'slow'. Reason: The bank is back. (Operation"
    assert history() == [
        (
            "ada",
            str(one.pk),
            f"Queued again. Before: failed, 2 of 5 attempts, queue mail. {after} {done.pk})",
        ),
        (
            "ada",
            str(two.pk),
            f"Queued again. Before: failed, 3 of 3 attempts, queue mail. {after} {done.pk})",
        ),
    ]
    assert one.refresh().queue_name == "slow"
    assert one.run_at - one.updated_at == timedelta(minutes=10)


def test_jobs_are_skipped_for_reasons_that_are_told() -> None:
    first, second, free = (make_job("failed", unique_key=key) for key in ("k", "k", None))

    done = carried_out(operations.begin(RETRY, Filter(), SHELL))

    assert operations.told(done) == (
        "2 jobs queued again; 1 was skipped because a job with its unique key waits or runs."
    )
    assert [job.refresh().status for job in (first, second, free)] == ["queued", "failed", "queued"]


def test_what_the_database_refuses_is_counted_and_the_rest_is_done() -> None:
    bad = dead(5)[0]
    with connection.cursor() as cursor:
        cursor.execute(
            f"""CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;
                CREATE TRIGGER refuse BEFORE UPDATE ON background_jobs
                FOR EACH ROW WHEN (NEW.id = {bad}) EXECUTE FUNCTION refuse()"""
        )

    done = carried_out(operations.begin(DISCARD, Filter(), SHELL))

    assert (done.state, done.changed, done.failed) == ("finished", 4, 1)
    assert operations.told(done).startswith("4 jobs discarded; 1 could not be changed: not this one")
    assert {id for id, row in rows().items() if row["status"] == "failed"} == {bad}


def test_who_is_deleted_meanwhile_does_not_stop_it(ada: Person) -> None:
    dead(2)
    operation = operations.begin(RETRY, Filter(), ada)
    User.objects.all().delete()
    assert carried_out(operation).changed == 2
    assert (operation.asked_by, history()) == ("ada", [])


# ── Who is beside it ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("small_steps")
def test_two_operations_on_the_same_jobs_change_each_of_them_once(ada: Person) -> None:
    ids = dead(11)
    both = [operations.begin(RETRY, Filter(), person) for person in (ada, ada)]
    runs = [operations.steps(operation.pk) for operation in both]
    while runs:
        runs = [run for run in runs if next(run, None) is not None]

    for operation in both:
        operation.refresh_from_db()
    assert [operation.state for operation in both] == ["finished", "finished"]
    assert sum(operation.changed for operation in both) == len(ids)
    assert sorted(int(id) for _, id, _ in history()) == ids


@pytest.mark.usefixtures("small_steps")
def test_a_job_that_fails_again_meanwhile_is_not_retried_again() -> None:
    for _ in range(7):
        jobs.boom.using(max_attempts=1).enqueue()
    drain()
    operation = operations.begin(RETRY, Filter(), SHELL)
    for _ in operations.steps(operation.pk):
        drain()

    operation.refresh_from_db()
    assert (operation.state, operation.changed) == ("finished", 7)
    assert statuses() == {"failed": 7}
    assert {len(each.errors) for each in BackgroundJob.objects.all()} == {2}


def test_jobs_that_fail_after_the_operation_was_asked_for_are_left_alone() -> None:
    dead(1)
    operation = operations.begin(RETRY, Filter(), SHELL)
    later = make_job("failed", updated_at=timedelta(minutes=1))
    carried_out(operation)
    assert later.refresh().status == "failed"


@pytest.mark.django_db(transaction=True)
def test_a_job_that_somebody_has_locked_is_skipped_and_nobody_waits() -> None:
    locked, _ = dead(2)
    with session() as other, other.transaction():
        other.execute("SELECT FROM background_jobs WHERE id = %s FOR UPDATE", [locked])
        done = carried_out(operations.begin(RETRY, Filter(), SHELL))
    assert operations.told(done) == (
        "1 job queued again; 1 was skipped because somebody else is changing it just now."
    )


@pytest.mark.usefixtures("small_steps")
def test_an_operation_that_is_stopped_rests_and_goes_on_from_there(ada: Person) -> None:
    dead(8)
    operation = operations.begin(RETRY, Filter(), ada)
    steps = operations.steps(operation.pk)
    next(steps)
    assert operations.stop(operation, ada)
    assert list(steps) == []
    assert statuses() == {"queued": 3, "failed": 5}
    assert not operations.stop(operation, ada)
    assert list(operations.steps(operation.pk)) == []

    assert operations.resume(operation, ada)
    assert carried_out(operation).changed == 8
    assert statuses() == {"queued": 8}
    assert not operations.resume(operation, ada)
    entries = LogEntry.objects.filter(content_type__model="backgroundoperation").order_by("id")
    assert list(entries.values_list("change_message", flat=True)) == [
        "Stopped. Before: running. After: stopped.",
        "Resumed. Before: stopped. After: running.",
    ]


@pytest.mark.usefixtures("small_steps")
def test_of_two_that_carry_on_the_same_operation_one_gives_way() -> None:
    dead(12)
    operation = operations.begin(RETRY, Filter(), SHELL)
    first, second = operations.steps(operation.pk), operations.steps(operation.pk)
    next(first)
    next(second)  # from where the first one was
    next(second)
    assert list(first) == []
    for _ in second:
        pass
    operation.refresh_from_db()
    assert (operation.state, operation.changed, operation.skipped) == ("finished", 12, {})


@pytest.mark.usefixtures("small_steps")
def test_what_breaks_off_within_a_transaction_is_done_once(
    ada: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = dead(8)
    operation = operations.begin(RETRY, Filter(), ada)
    steps = operations.steps(operation.pk)
    next(steps)

    def break_off(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(BackgroundOperation, "save", break_off)
        with pytest.raises(KeyboardInterrupt):
            next(steps)
    assert statuses() == {"queued": 3, "failed": 5}

    assert carried_out(operation).changed == 8
    assert sorted(int(id) for _, id, _ in history()) == ids


# ── By a worker ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("small_steps")
def test_a_worker_carries_an_operation_on_and_shows_how_far_it_is() -> None:
    dead(8, queue_name="mail")
    operations.hand_over(operations.begin(DISCARD, Filter(queue="mail"), SHELL))
    drain()
    (job,) = BackgroundJob.objects.filter(job_name="django_pgjobs.operations.carry_on")
    assert (job.status, job.result) == ("completed", "8 jobs discarded.")
    assert str(job.progress) == "8 of 8"


@pytest.mark.usefixtures("small_steps")
def test_a_worker_gives_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "TURN", 0.0)
    dead(8)
    operation = operations.begin(DISCARD, Filter(), SHELL)
    operations.hand_over(operation)
    assert drain().count(Event.SNOOZE) == 3
    operation.refresh_from_db()
    assert (operation.state, operation.changed) == ("finished", 8)
    (job,) = BackgroundJob.objects.filter(job_name="django_pgjobs.operations.carry_on")
    assert (job.attempts, job.errors) == (1, [])


def test_a_paced_retry_queues_so_many_a_minute() -> None:
    dead(9)
    operation = operations.begin(RETRY, Filter(), SHELL, manner=Manner(per_minute=4))
    steps = operations.steps(operation.pk)
    assert next(steps) == 60.0
    queued = sorted(row["run_at"] for row in rows().values() if row["status"] == "queued")
    assert [(at - queued[0]).total_seconds() for at in queued] == [0, 15, 30, 45]

    operation.refresh_from_db()
    assert 0 < next(operations.steps(operation.pk)) <= 60.0  # whoever comes now has to wait
    assert statuses()["queued"] == 4

    BackgroundOperation.objects.update(next_at=operation.created_at)
    assert next(operations.steps(operation.pk)) == 60.0
    BackgroundOperation.objects.update(next_at=operation.created_at)
    assert list(operations.steps(operation.pk)) == [0.0]
    operation.refresh_from_db()
    assert (operation.state, operation.changed, operation.next_at) == ("finished", 9, None)


def test_a_worker_waits_for_the_next_minute_of_a_paced_retry() -> None:
    dead(5)
    operations.hand_over(operations.begin(RETRY, Filter(), SHELL, manner=Manner(per_minute=4)))
    assert drain().count(Event.SNOOZE) == 1
    (job,) = BackgroundJob.objects.filter(job_name="django_pgjobs.operations.carry_on")
    assert timedelta(seconds=55) < job.run_at - job.updated_at <= timedelta(seconds=60)


@pytest.mark.parametrize(
    "manner",
    [
        {"delay": timedelta(-1)}, {"delay": timedelta(4000)}, {"per_minute": 0}, {"queue": ""},
        {"queue": "\x00"},
    ],
)  # fmt: skip
def test_a_manner_that_cannot_work_is_refused(manner: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Manner(**manner)


@pytest.mark.processes
@pytest.mark.django_db(transaction=True)
def test_a_worker_that_is_killed_in_the_middle_is_followed_by_another(workers: Workers) -> None:
    """It is killed while it waits to write the history, after it has changed jobs and before its commit."""
    ada = Person.of(User.objects.create(username="ada"))
    ids = dead(20)
    operation = operations.begin(RETRY, Filter(), ada)
    quick = {"LEASE": 2, "SWEEP_INTERVAL": 0.2, "LOST_DELAY": 0}
    operations.hand_over(operation)
    with session() as other, other.transaction():
        other.execute("LOCK TABLE django_admin_log IN SHARE MODE")
        waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'django_admin_log'::regclass"
        first = workers.start("--processes", "1", settings=quick)
        with session() as looking:
            until(lambda: looking.execute(waits).fetchone(), what="the worker to be in the middle")
        first.kill()
        assert {rows()[id]["status"] for id in ids} == {"failed"}
    second = workers.start("--processes", "1", settings=quick)

    until(lambda: statuses() == {"completed": 21}, what="all jobs to be completed")
    second.stop()
    operation.refresh_from_db()
    assert (operation.state, operation.changed) == ("finished", len(ids))
    assert sorted(int(id) for _, id, _ in history()) == ids
    assert {rows()[id]["attempts"] for id in ids} == {1}


# ── The commands ──────────────────────────────────────────────────────────────────────────────────────────


def test_retryjobs_says_what_it_found_and_did() -> None:
    dead(2, queue_name="mail")
    dead(1)
    assert run("retryjobs", "--queue", "mail", "--dry-run") == (
        "2 dead letters in the queue 'mail' would be queued again.\n"
    )
    assert statuses() == {"failed": 3}
    first, second = run("retryjobs", "--queue", "mail", "--reason", "It is back.").splitlines()
    operation = BackgroundOperation.objects.get()
    assert first == f"Operation {operation.pk}: 2 dead letters match."
    assert second == f"Operation {operation.pk} is finished: 2 jobs queued again."
    assert (operation.reason, operation.asked_by.endswith(" (shell)")) == ("It is back.", True)
    assert run("retryjobs", "--queue", "mail") == "No dead letter matches.\n"
    assert statuses() == {"failed": 1, "queued": 2}


def test_the_commands_take_ids_and_times_and_a_manner() -> None:
    old, new, other = (make_job("failed", updated_at=-timedelta(hours=hours)) for hours in (5, 1, 1))
    run("retryjobs", str(old.pk), str(new.pk), "--since", "2h", "--after", "10m", "--to-queue", "slow")
    assert [job.refresh().status for job in (old, new, other)] == ["failed", "queued", "failed"]
    assert new.queue_name == "slow"
    assert new.run_at - new.updated_at == timedelta(minutes=10)
    run("discardjobs", "--until", "3h", "--reason", "Too old.")
    assert [job.refresh().status for job in (old, new, other)] == ["cancelled", "queued", "failed"]
    run("retryjobs", "--cancelled", "--all")
    assert old.refresh().status == "queued"


def test_a_user_can_be_held_to_account(ada: Person) -> None:
    (job,) = dead(1)
    run("discardjobs", "--all", "--reason", "Test orders.", "--user", "ada")
    ((who, id, message),) = history()
    assert (who, id) == ("ada", str(job))
    assert message.startswith("Discarded. Before: failed, 3 of 3 attempts, queue default. After: cancelled.")
    with pytest.raises(CommandError, match=r"There is no user 'eve'\."):
        run("retryjobs", "--cancelled", "--all", "--user", "eve")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["retryjobs"], "Say which: give a filter, or --all for every dead letter."),
        (["retryjobs", "--cancelled"], "Say which: give a filter, or --all for every cancelled job."),
        (["retryjobs", "--all", "--queue", "mail"], "--all goes with no filter."),
        (["discardjobs", "--all"], "Say why, with --reason: somebody will ask."),
        (["retryjobs", "--all", "--per-minute", "1000001"], "1000001 jobs a minute must be"),
        (["retryjobs", "--all", "--after", "4000d"], "must be between zero and ten years"),
        (["retryjobs", "--since", "yesterday"], "'yesterday' must be a date and time"),
        (["retryjobs", "--resume", "7"], "There is no operation 7 of this kind."),
        (["purgequeue", "mail"], "Say why, with --reason"),
        (["purgequeue", "--reason", "x"], "Say which queue."),
        (["purgequeue", "--resume", "7"], "There is no operation 7 of this kind."),
        (["pausequeue", "mail"], "the following arguments are required: --reason"),
        (["pausequeue", "", "--reason", "x"], "must be the name of a queue"),
    ],
)  # fmt: skip
def test_the_commands_refuse_what_they_cannot_do(arguments: list[str], error: str) -> None:
    dead(1)
    with pytest.raises(CommandError, match=error):
        run(*arguments)
    assert statuses() == {"failed": 1}
    assert not BackgroundOperation.objects.exists()


# ── Purging ───────────────────────────────────────────────────────────────────────────────────────────────

MAIL = Filter(status=Status.QUEUED, queue="mail")


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("count", [0, 1, 3, 4, 7, 13])
def test_a_purge_cancels_what_waits_in_a_queue_and_nothing_else(ada: Person, count: int) -> None:
    queued = [
        make_job(queue_name="mail", priority=-n % 3, run_at=timedelta(hours=n % 2)).pk for n in range(count)
    ]
    others = [make_job(each, queue_name="mail").pk for each in Status if each is not Status.QUEUED]
    others.append(make_job(queue_name="bank").pk)
    carrier = make_job(queue_name="mail", job_name="django_pgjobs.operations.carry_on").pk
    before = rows()
    assert operations.preview(MAIL) == (count, True, "queued job")
    operation = operations.begin(operations.PURGE, MAIL, ada, reason="Sent twice.")
    later = make_job(queue_name="mail", priority=100, updated_at=timedelta(minutes=1)).pk
    done = carried_out(operation)
    after = rows()
    assert {id for id, row in after.items() if row["status"] == "cancelled"} - set(others) == set(queued)
    assert {id: after[id] for id in (*others, carrier)} == {id: before[id] for id in (*others, carrier)}
    assert after[later]["status"] == "queued"
    assert (done.state, done.changed, done.expected) == ("finished", count, count)
    entries = history()
    found = f"{count} queued job{'' if count == 1 else 's'}"
    text = f"Purged. Before: {found}. After: those are being cancelled ({done}). Reason: Sent twice."
    assert entries[0] == ("ada", "mail", text)
    before_it = "queued, 0 of 3 attempts, queue mail"
    text = f"Cancelled. Before: {before_it}. After: cancelled. Reason: Sent twice. ({done})"
    assert {entry[1:] for entry in entries[1:]} == {(str(id), text) for id in queued}
    told = run("retryjobs", "--cancelled", "--queue", "mail", "--dry-run")
    assert told.startswith(f"{count + 1} cancelled")


@pytest.mark.usefixtures("small_steps")
def test_a_purge_that_has_broken_off_goes_on_from_there() -> None:
    for n in range(8):
        make_job(queue_name="mail", priority=n % 2)
    operation = operations.begin(operations.PURGE, MAIL, SHELL)
    next(operations.steps(operation.pk))
    operation.refresh_from_db()
    assert (operation.cursor_priority, operation.changed) == (1, 3)
    assert operations.stop(operation, SHELL)
    assert list(operations.steps(operation.pk)) == []
    told = run("purgequeue", "--resume", str(operation.pk))
    assert told == f"{operation} is finished: 8 jobs cancelled.\n"
    assert statuses() == {"cancelled": 8}


@pytest.mark.django_db(transaction=True)
def test_a_purge_leaves_what_a_worker_is_just_claiming() -> None:
    claimed, _ = make_job(queue_name="mail").pk, make_job(queue_name="mail")
    operation = operations.begin(operations.PURGE, MAIL, SHELL)
    with session() as other, other.transaction():
        other.execute("UPDATE background_jobs SET status = 'processing' WHERE id = %s", [claimed])
        done = carried_out(operation)
    assert operations.told(done) == (
        "1 job cancelled; 1 was skipped because somebody else is changing it just now."
    )
    assert statuses() == {"processing": 1, "cancelled": 1}


def test_purgequeue_says_what_it_found_and_did(ada: Person) -> None:
    assert run("purgequeue", "mail", "--reason", "x") == "No queued job matches.\n"
    for _ in range(2):
        make_job(queue_name="mail")
    told = run("purgequeue", "mail", "--dry-run")
    assert told == "2 queued jobs in the queue 'mail' would be cancelled.\n"
    told = run("purgequeue", "mail", "--reason", "Sent twice.", "--user", "ada")
    number = BackgroundOperation.objects.get().pk
    assert told == (
        f"Operation {number}: 2 queued jobs match.\nOperation {number} is finished: 2 jobs cancelled.\n"
    )
    assert len(history()) == 3


def test_a_worker_purges_the_queue_that_it_purges_from(settings: Any) -> None:
    for _ in range(3):
        make_job()
    run("purgequeue", "default", "--background", reason="Why.")
    drain()
    assert statuses() == {"cancelled": 3, "completed": 1}


@pytest.mark.usefixtures("small_steps")
def test_a_command_goes_on_with_what_has_broken_off() -> None:
    dead(8)
    operation = operations.begin(RETRY, Filter(), SHELL)
    next(operations.steps(operation.pk))
    with pytest.raises(CommandError, match="There is no operation"):
        run("discardjobs", "--resume", str(operation.pk))
    assert run("retryjobs", "--resume", str(operation.pk)) == (
        f"Operation {operation.pk} is finished: 8 jobs queued again.\n"
    )
    with pytest.raises(CommandError, match=r"is finished: 8 jobs queued again\."):
        run("retryjobs", "--resume", str(operation.pk))


@pytest.mark.parametrize("how", [["--background"], ["--per-minute", "600"]])
def test_a_worker_carries_on_what_a_command_has_handed_over(how: list[str], settings: Any) -> None:
    settings.PGJOBS = {"OPERATIONS_QUEUE": "people"}
    ids = dead(2)
    assert "A worker that serves the queue 'people' carries it on." in run("retryjobs", "--all", *how)
    assert statuses() == {"failed": 2, "queued": 1}
    drain(queue="people", limit=1)
    assert {rows()[id]["status"] for id in ids} == {"queued"}


def test_what_could_not_be_changed_is_an_exit_status() -> None:
    dead(1)
    with connection.cursor() as cursor:
        cursor.execute(
            """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
               $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;
               CREATE TRIGGER refuse BEFORE UPDATE ON background_jobs
               FOR EACH ROW EXECUTE FUNCTION refuse()"""
        )
    with pytest.raises(SystemExit) as exit:
        run("retryjobs", "--all")
    assert exit.value.code == 1


# ── Queues ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_queue_is_paused_and_resumed_by_somebody_for_a_reason(ada: Person) -> None:
    job = make_job(queue_name="mail")
    why = ("--reason", "The server is down.", "--user", "ada")
    assert run("pausequeue", "mail", *why) == "The queue 'mail' is paused.\n"
    assert run("pausequeue", "mail", *why) == "The queue 'mail' was paused before.\n"
    queue = BackgroundQueue.objects.get()
    assert (queue.paused_by, queue.reason, queue.paused_at is None) == ("ada", "The server is down.", False)
    assert drain().completed == 0

    told = run("resumequeue", "mail", "--reason", "It is up.", "--user", "ada")
    assert told.startswith("The queue 'mail' is served again. It had been paused since ")
    assert told.endswith(" by ada: The server is down.\n")
    assert run("resumequeue", "mail") == "The queue 'mail' was not paused.\n"
    assert drain().completed == 1
    assert job.refresh().status == "completed"
    assert history() == [
        ("ada", "mail", "Paused. Before: not paused. After: paused. Reason: The server is down."),
        ("ada", "mail", "Resumed. Before: paused by ada. After: not paused. Reason: It is up."),
    ]


def test_a_queue_that_nobody_knows_is_paused_and_told_of() -> None:
    make_job(queue_name="mail")
    err = StringIO()
    run("pausequeue", "mial", "--reason", "x", stderr=err)
    assert "No job has been in a queue of this name lately. Those known: 'mail'." in err.getvalue()
    assert BackgroundQueue.objects.get().name == "mial"


@pytest.mark.django_db(transaction=True)
def test_workers_are_woken_up_when_a_queue_is_resumed() -> None:
    make_job(queue_name="mail")
    operations.pause_queue("mail", SHELL, "")
    with session() as listening:
        listening.execute("LISTEN job_created")
        operations.resume_queue("mail", SHELL)
        (notification,) = listening.notifies(timeout=10, stop_after=1)
    assert notification.payload == "mail"
