"""Unique jobs: what makes two jobs equal, for how long, and what becomes of the second one."""

from __future__ import annotations

import enum
import pickle
import re
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, OperationalError, connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext

from django_pgjobs import DuplicateJob, InvalidArguments, JobFunction, PGJobsError, job, jobs, store
from django_pgjobs.models import BackgroundJob
from django_pgjobs.testing import drain
from tests.factories import make_job, rows
from tests.sessions import session
from tests.workers import until

NAME = "tests.unique"
HOUR = timedelta(hours=1)

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def registry():
    before = dict(jobs.registry)
    yield
    jobs.registry.clear()
    jobs.registry.update(before)


def index(user_id: int, words: str | list[str] = "", *, force: bool = False) -> str:
    return f"{user_id} {words}"


def a_job(function: Callable[..., Any] = index, **options: Any) -> JobFunction[..., Any]:
    """A job function of the name NAME, in the place of the one before it."""
    jobs.registry.pop(options.setdefault("name", NAME), None)
    return job(**options)(function)


def key_of(function: JobFunction[..., Any], *args: Any, **kwargs: Any) -> str | None:
    handle = function.enqueue(*args, **kwargs)
    key = handle.unique_key
    set_row(handle.pk, status="cancelled")
    return key


def set_row(id: int, **columns: Any) -> None:
    """Change a row as it happens to one in the course of time, whoever does it."""
    assert BackgroundJob.objects.filter(pk=id).update(**columns) == 1


def statuses() -> list[str]:
    return [row["status"] for row in rows().values()]


# ── What makes jobs equal ─────────────────────────────────────────────────────────────────────────────────


def test_a_job_without_the_option_has_no_key_and_is_new_each_time():
    function = a_job()

    first, second = function.enqueue(1), function.enqueue(1)

    assert (first.is_new, second.is_new, first == second) == (True, True, False)
    assert [row["unique_key"] for row in rows().values()] == [None, None]


@pytest.mark.parametrize(
    "calls",
    [
        lambda f: [f.enqueue(1), f.enqueue(user_id=1), f.enqueue(1, ""), f.enqueue(1, words="", force=False)],
        lambda f: [f.enqueue(1, ["a", "b"]), f.enqueue(1, ("a", "b"))],
        lambda f: [
            f.enqueue(1, {"a": 1, "b": {"c": 2, "d": 3}}),
            f.enqueue(1, {"b": {"d": 3, "c": 2}, "a": 1}),
        ],
        lambda f: [f.enqueue(enum.IntEnum("Number", "ONE").ONE), f.enqueue(1)],
        lambda f: [f.enqueue(1, "ß…\u2028"), f.enqueue(1, "ß…\u2028")],
        lambda f: [f.enqueue(1, 1e22), f.enqueue(1, 10.0**22)],
    ],
    ids=["how it is passed", "a tuple is a list", "order of keys", "members of enums", "text", "floats"],
)
def test_calls_that_mean_the_same_are_equal(calls):
    first, *others = calls(a_job(unique=True))

    assert first.is_new
    for other in others:
        assert (other.pk, other.is_new) == (first.pk, False)
    assert len(rows()) == 1


@pytest.mark.parametrize(
    "calls",
    [
        lambda f: [f.enqueue(1), f.enqueue(2)],
        lambda f: [f.enqueue(1), f.enqueue(1, "a"), f.enqueue(1, force=True)],
        lambda f: [f.enqueue(1), f.enqueue("1"), f.enqueue(True), f.enqueue(1.0), f.enqueue(None)],
        lambda f: [f.enqueue(1, "x" * 300), f.enqueue(1, "x" * 301)],
    ],
    ids=["values", "optional ones", "types", "long ones"],
)
def test_calls_that_mean_something_else_are_not(calls):
    handles = calls(a_job(unique=True))

    assert all(handle.is_new for handle in handles)
    assert len(rows()) == len(handles)


def test_the_key_is_canonical_json_of_all_arguments_with_the_defaults():
    assert key_of(a_job(unique=True), 7, {"b": 1, "a": "ß"}) == (
        '{"force":false,"user_id":7,"words":{"a":"ß","b":1}}'
    )


def test_parameters_can_be_chosen():
    function = a_job(unique=("user_id", "force"))
    first = function.enqueue(1, "a")

    assert first.unique_key == '{"force":false,"user_id":1}'
    assert not function.enqueue(user_id=1, words="b").is_new
    assert function.enqueue(1, "a", force=True).is_new
    assert a_job(unique="user_id").uniqueness.by == ("user_id",)
    assert a_job(unique=["user_id", "user_id"]).uniqueness.by == ("user_id",)


def test_parameters_that_take_any_number_of_arguments_count_as_a_whole():
    def gather(first, *more, **named): ...

    assert key_of(a_job(gather, unique=True), 1) == '{"first":1,"more":[],"named":{}}'
    assert key_of(a_job(gather, unique=True), 1, 2, 3, b=1, a=2) == (
        '{"first":1,"more":[2,3],"named":{"a":2,"b":1}}'
    )
    assert key_of(a_job(gather, unique=("named",)), 1, b=1) == '{"named":{"b":1}}'


def test_a_function_without_parameters_has_one_job_at_a_time():
    function = a_job(lambda: None, unique=True)

    assert [function.enqueue().is_new for _ in range(3)] == [True, False, False]


def test_defaults_count_as_they_would_come_back():
    class Colour(enum.StrEnum):
        RED = "red"

    def paint(where, colours=(Colour.RED, "blue")): ...

    function = a_job(paint, unique=True)

    assert function.enqueue("a").pk == function.enqueue("a", ["red", "blue"]).pk


def test_a_function_can_tell_the_key():
    function = a_job(
        unique=lambda user_id, words="", **options: f"{user_id}:{len(words)}" if user_id else None
    )

    first = function.enqueue(1, "ab")
    assert (first.unique_key, first.is_new) == ("1:2", True)
    assert function.enqueue(1, "cd").pk == first.pk
    free = [function.enqueue(0) for _ in range(2)]
    assert [(handle.unique_key, handle.is_new) for handle in free] == [(None, True)] * 2


def test_a_key_may_be_a_member_of_an_enum_and_is_stored_as_text():
    class Kind(enum.StrEnum):
        A = "a"

    assert key_of(a_job(unique=lambda user_id: Kind.A), 1) == "a"


@pytest.mark.parametrize("length", [255, 256, 100_000])
def test_long_keys_are_hashed(length):
    key = key_of(a_job(unique=lambda user_id: "ß" * length), 1)

    assert re.fullmatch("ß{255}" if length == 255 else r"sha256:[0-9a-f]{64}", key)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (17, "has returned 17. It must return a text, or None for a job that is not unique."),
        (b"a", "has returned b'a'. It must return a text,"),
        (("a",), "has returned ('a',). It must return a text,"),
        (False, "has returned False. It must return a text,"),
        ("a\x00b", "which Postgres cannot store. Leave it out of the key."),
        ("\ud800", "which Postgres cannot store. Leave it out of the key."),
    ],
    ids=["int", "bytes", "tuple", "bool", "NUL", "surrogate"],
)
def test_what_is_no_key_is_refused_before_any_sql(returned, said, django_assert_num_queries):
    function = a_job(unique=lambda user_id: returned)

    with django_assert_num_queries(0), pytest.raises(InvalidArguments) as caught:
        function.enqueue(1)
    with django_assert_num_queries(0), pytest.raises(InvalidArguments, match="Call number 0: "):
        function.enqueue_many([((1,), {})])

    assert said in str(caught.value)
    assert NAME in str(caught.value)


def test_what_a_key_function_raises_reaches_the_caller_before_any_sql(django_assert_num_queries):
    function = a_job(unique=lambda user_id: 1 // user_id)

    with django_assert_num_queries(0), pytest.raises(ZeroDivisionError):
        function.enqueue(0)


def test_another_job_function_has_keys_of_its_own():
    one, other = a_job(unique=True), a_job(unique=True, name="tests.unique.other")

    assert one.enqueue(1).is_new
    assert other.enqueue(1).is_new


def test_using_changes_nothing_about_uniqueness():
    function = a_job(unique=True)
    first = function.using(queue="a", priority=3).enqueue(1)

    kept = function.using(queue="b", priority=5, run_at=HOUR, max_attempts=9).enqueue(1)

    assert (kept.pk, kept.is_new) == (first.pk, False)
    assert (kept.queue_name, kept.priority) == ("a", 3)


# ── Options ───────────────────────────────────────────────────────────────────────────────────────────────


async def akey() -> str:
    return ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"unique": ()},
            "unique is (); it must be True, names of parameters, or a function that returns a key.",
        ),
        ({"unique": ""}, "unique names '', which is not a parameter of the function."),
        ({"unique": None}, "unique is None; it must be True, names of parameters, or a function"),
        ({"unique": 1}, "unique is 1; it must be True,"),
        ({"unique": (1,)}, "unique is (1,); it must be True,"),
        (
            {"unique": ("user", "words")},
            "unique names 'user', which is not a parameter of the function. Known: 'user_id', 'words',",
        ),
        ({"unique": akey}, "the function unique= is async;"),
        ({"unique_until": "started"}, "unique_until is 'started', which needs unique= as well."),
        ({"on_conflict": "raise"}, "on_conflict is 'raise', which needs unique= as well."),
        ({"max_wait": 60}, "max_wait is 60, which needs debounce= as well."),
        ({"unique": True, "max_wait": 60}, "max_wait is 0:01:00, which needs debounce= as well."),
        (
            {"unique": True, "unique_until": "done"},
            "unique_until is 'done'; it must be 'finished', 'started',",
        ),
        ({"unique": True, "unique_until": 0}, "unique_until is 0; it must be seconds or a timedelta,"),
        ({"unique": True, "unique_until": True}, "unique_until is True; it must be 'finished',"),
        ({"unique": True, "unique_until": float("nan")}, "unique_until is nan; it must be 'finished',"),
        ({"unique": True, "unique_until": 1e30}, "unique_until is 1e+30; it must be seconds or a timedelta,"),
        ({"unique": True, "on_conflict": "ignore"}, "on_conflict is 'ignore'; it must be 'keep', 'replace'"),
        (
            {"unique": True, "on_conflict": "replace", "unique_until": "finished"},
            "so unique_until='finished' cannot be had with it. Leave that out, or make it 'started'.",
        ),
        ({"unique": True, "on_conflict": "replace", "unique_until": 60}, "so unique_until=60 cannot be had"),
        ({"debounce": 0}, "debounce is 0; it must be seconds or a timedelta,"),
        ({"debounce": -1}, "debounce is -1; it must be seconds or a timedelta,"),
        ({"debounce": "5"}, "debounce is '5'; it must be seconds or a timedelta,"),
        (
            {"debounce": 5, "max_wait": 4},
            "max_wait is 0:00:04; it must not be shorter than debounce, 0:00:05.",
        ),
        ({"debounce": 5, "max_wait": timedelta(0)}, "max_wait is datetime.timedelta(0); it must be seconds"),
        (
            {"debounce": 5, "on_conflict": "keep"},
            "so on_conflict='keep' cannot be had with it. Leave that out.",
        ),
        ({"debounce": 5, "on_conflict": "raise"}, "so on_conflict='raise' cannot be had with it."),
        ({"debounce": 5, "unique_until": "finished"}, "debounce changes a job that waits,"),
        ({"debounce": 5, "unique_until": HOUR}, "debounce changes a job that waits,"),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0][:60],
)
def test_options_that_cannot_work_are_refused_where_the_function_is_decorated(options, said):
    with pytest.raises(ValueError, match=r"^@job 'tests\.unique': ") as caught:
        a_job(**options)

    assert said in str(caught.value)
    assert NAME not in jobs.registry


@pytest.mark.parametrize(
    ("options", "until_", "period", "on_conflict"),
    [
        ({"unique": True}, "finished", None, "keep"),
        ({"unique": True, "unique_until": "finished", "on_conflict": "keep"}, "finished", None, "keep"),
        ({"unique": True, "unique_until": "started"}, "started", None, "keep"),
        ({"unique": True, "unique_until": 60}, "finished", timedelta(minutes=1), "keep"),
        ({"unique": True, "unique_until": HOUR, "on_conflict": "raise"}, "finished", HOUR, "raise"),
        ({"unique": True, "on_conflict": "replace"}, "started", None, "replace"),
        ({"unique": True, "on_conflict": "replace", "unique_until": "started"}, "started", None, "replace"),
        ({"debounce": 5}, "started", None, "replace"),
        ({"debounce": 5, "max_wait": 5, "unique": "user_id"}, "started", None, "replace"),
        ({"debounce": 5, "on_conflict": "replace", "unique_until": "started"}, "started", None, "replace"),
    ],
    ids=str,
)
def test_options_that_work_together(options, until_, period, on_conflict):
    uniqueness = a_job(**options).uniqueness

    assert (uniqueness.until, uniqueness.period, uniqueness.on_conflict) == (until_, period, on_conflict)


def test_a_default_that_is_not_json_cannot_be_part_of_a_key():
    def wipe(disk: int, since: object = timedelta(1)) -> None: ...

    with pytest.raises(ValueError, match="the default of 'since' cannot be part of a unique key: kwargs"):
        a_job(wipe, unique=True)
    assert a_job(wipe, unique=("disk",)).enqueue(1).unique_key == '{"disk":1}'


def test_debounce_decides_when_its_jobs_run():
    with pytest.raises(ValueError, match=r"run_at is 1:00:00, but debounce says when its jobs run\."):
        a_job(debounce=30).using(run_at=HOUR)


def test_an_unused_option_costs_nothing():
    plain, keyed = a_job(), a_job(unique=lambda user_id: None, name="tests.unique.other")

    for function in (plain, keyed):
        with CaptureQueriesContext(connection) as queries:
            function.enqueue(1)
            function.enqueue_many([((1,), {}), ((2,), {})])
        inserts = [query["sql"] for query in queries if "INSERT" in query["sql"]]
        assert len(inserts) == 2
        assert not any("unique_key" in insert for insert in inserts)
    assert len(queries) == 2 + 2  # a savepoint around the batch, which might have had keys


# ── For how long, and what then ───────────────────────────────────────────────────────────────────────────

SCOPES: dict[str, dict[str, Any]] = {
    "finished": {"unique": "user_id"},
    "started": {"unique": "user_id", "unique_until": "started"},
    "period": {"unique": "user_id", "unique_until": HOUR},
}
# Which statuses of a job stand in the way of an equal one.
BLOCKING = {
    "finished": {"queued", "processing"},
    "started": {"queued"},
    "period": {"queued", "processing", "completed", "failed"},
}
STATUSES = ("queued", "processing", "failed", "completed", "cancelled")


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("scope", SCOPES)
def test_an_equal_job_is_kept(scope, status, many):
    function = a_job(**SCOPES[scope])
    there = make_job(status, job_name=NAME, unique_key='{"user_id":1}', payload={"args": [1, "old"]})
    before = rows()[there.pk]

    if many:
        (id,) = function.enqueue_many([((1, "new"), {})])
        is_new = id != there.pk
    else:
        handle = function.enqueue(1, "new")
        id, is_new = handle.pk, handle.is_new
        columns = rows()[id]
        assert {
            name: getattr(handle, name) for name in columns if name not in handle.get_deferred_fields()
        } == {name: columns[name] for name in columns if name not in handle.get_deferred_fields()} | {
            "payload": {"args": [1, "old" if not is_new else "new"], **({"kwargs": {}} if is_new else {})}
        }

    assert is_new is (status not in BLOCKING[scope])
    assert (id == there.pk) is not is_new
    assert len(rows()) == 1 + is_new
    after = rows()[there.pk]
    if (scope, status) == ("started", "processing"):
        assert after.pop("unique_key") is None
        del before["unique_key"]
    assert after == before
    if is_new:
        assert rows()[id]["unique_key"] == '{"user_id":1}'


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("scope", SCOPES)
def test_an_equal_job_is_an_error(scope, status, many):
    function = a_job(**SCOPES[scope], on_conflict="raise")
    there = make_job(status, job_name=NAME, unique_key='{"user_id":1}')

    def enqueue():
        if many:
            return function.enqueue_many([((2,), {}), ((1,), {})])
        return function.enqueue(1)

    if status in BLOCKING[scope]:
        with pytest.raises(DuplicateJob) as caught:
            enqueue()
        assert len(rows()) == 1
        assert rows()[there.pk]["unique_key"] == '{"user_id":1}'
        error = pickle.loads(pickle.dumps(caught.value))
        assert (error.job_name, error.job_id, error.unique_key) == (NAME, there.pk, '{"user_id":1}')
        assert str(error) == ("Call number 1: " if many else "") + (
            f"Job {NAME!r} was not enqueued: job {there.pk}, which is {status}, has the same unique key."
        )
    else:
        enqueue()
        assert len(rows()) == 2 + many


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("debounce", [None, 60], ids=["replace", "debounce"])
def test_an_equal_job_gets_the_new_arguments_while_it_waits(debounce, status, many):
    function = a_job(unique="user_id", **({"debounce": debounce} if debounce else {"on_conflict": "replace"}))
    there = make_job(
        status,
        job_name=NAME,
        unique_key='{"user_id":1}',
        payload={"args": [1, "old"]},
        metadata={"a": 1},
        priority=3,
        queue_name="there",
        max_attempts=7,
        run_at=timedelta(seconds=5),
    )
    before = rows()[there.pk]

    if many:
        (id,) = function.enqueue_many([((1, "new"), {})])
    else:
        handle = function.enqueue(1, "new")
        id = handle.pk
        assert handle.is_new is (status != "queued")
        assert handle.payload == {"args": [1, "new"], "kwargs": {}}
        assert handle.run_at == rows()[id]["run_at"]
        assert handle.queue_name == ("there" if status == "queued" else "default")

    after = rows()[there.pk]
    if status == "queued":
        assert (id, len(rows())) == (there.pk, 1)
        assert BackgroundJob.objects.get(pk=id).payload == {"args": [1, "new"], "kwargs": {}}
        moved = after["run_at"] - before["run_at"]
        assert timedelta(seconds=54) < moved <= timedelta(seconds=60) if debounce else not moved
        changing = {"payload", "run_at"}
    else:
        assert id != there.pk
        assert len(rows()) == 2
        changing = {"unique_key"} if status == "processing" else set()
        assert (after["unique_key"] is None) is (status == "processing")
    assert {name for name in after if after[name] != before[name]} - {"run_at"} == changing - {"run_at"}


@pytest.mark.parametrize("dirt", ["null", "7", "[]", '{"a": 1}'])
def test_whatever_the_metadata_is_a_job_gets_new_arguments(dirt):
    function = a_job(debounce=60)
    first = function.enqueue(1)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE background_jobs SET metadata = %s", [dirt])

    assert function.enqueue(1).pk == first.pk
    assert first.refresh().metadata == ({"a": 1} if dirt == '{"a": 1}' else {})


def test_a_period_begins_when_a_job_is_enqueued_and_ends_by_itself():
    function = a_job(unique=True, unique_until=HOUR)
    first = function.enqueue(1)
    assert drain().completed == 1

    assert function.enqueue(1).pk == first.pk
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE background_jobs SET created_at = created_at - interval '59 minutes 55 seconds'"
        )
    kept = function.enqueue(1)
    assert (kept.pk, kept.status, kept.is_new) == (first.pk, "completed", False)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE background_jobs SET created_at = created_at - interval '5 seconds'")
    assert function.enqueue(1).is_new


@pytest.mark.parametrize("status", ["queued", "processing"])
def test_a_job_that_outlasts_its_period_is_kept_until_it_has_finished(status):
    function = a_job(unique=True, unique_until=HOUR)
    old = function.enqueue(1)
    set_row(old.pk, status=status, created_at=old.created_at - 2 * HOUR)

    assert function.enqueue(1).pk == old.pk

    set_row(old.pk, status="completed")
    assert function.enqueue(1).is_new


def test_within_a_period_the_latest_job_is_returned():
    function = a_job(unique=True, unique_until=HOUR)
    first = function.enqueue(1)
    set_row(first.pk, status="completed", created_at=first.created_at - HOUR / 2)
    second = make_job("failed", job_name=NAME, unique_key=first.unique_key)
    third = make_job("cancelled", job_name=NAME, unique_key=first.unique_key)

    assert function.enqueue(1).pk == second.pk != third.pk


@pytest.mark.parametrize(
    "retention",
    [{"COMPLETED_RETENTION": 0}, {"COMPLETED_RETENTION": 3599}, {"FAILED_RETENTION": 60}],
    ids=["deleted at once", "too short", "failed ones too short"],
)
def test_a_period_needs_finished_jobs_to_be_kept_as_long(settings, retention, django_assert_num_queries):
    function = a_job(unique=True, unique_until=HOUR)
    settings.PGJOBS = retention
    (name,) = retention

    for enqueue in (lambda: function.enqueue(1), lambda: function.enqueue_many([((1,), {})])):
        with pytest.raises(ImproperlyConfigured) as caught:
            enqueue()
        assert f"Job {NAME!r} is unique for 1:00:00, but PGJOBS[{name!r}] is " in str(caught.value)

    settings.PGJOBS = {"COMPLETED_RETENTION": 3600, "FAILED_RETENTION": None}
    assert function.enqueue(1).is_new


def test_a_job_whose_completion_deletes_it_is_unique_until_then(settings):
    settings.PGJOBS = {"COMPLETED_RETENTION": 0}
    function = a_job(unique=True)
    first = function.enqueue(1)

    assert function.enqueue(1).pk == first.pk
    assert drain().completed == 1
    assert function.enqueue(1).is_new


def test_a_job_can_enqueue_itself_while_it_runs_if_it_is_unique_until_it_has_started():
    seen = []

    def again(times):
        if len(seen) < times:
            handle = function.enqueue(times)
            seen.append(handle.is_new)

    function = a_job(again, unique=True, unique_until="started")
    function.enqueue(3)
    assert drain().completed == 4
    assert seen == [True] * 3

    seen.clear()
    function = a_job(again, unique=True)
    function.enqueue(3)
    assert drain().completed == 1
    assert seen == [False]


@pytest.mark.parametrize("somebody_else", [False, True])
def test_a_claimed_job_that_is_given_back_has_its_key_unless_somebody_has_taken_it(somebody_else):
    function = a_job(unique=True, unique_until="started")
    first = function.enqueue(1)
    key = first.unique_key
    set_row(first.pk, status="processing")
    if somebody_else:
        second = function.enqueue(1)
        assert second.is_new

    set_row(first.pk, status="queued")

    assert function.enqueue(1).pk == (second if somebody_else else first).pk
    assert first.refresh().unique_key == (None if somebody_else else key)


# ── Debounce ──────────────────────────────────────────────────────────────────────────────────────────────


def test_each_call_pushes_a_debounced_job_back_up_to_its_longest_wait():
    function = a_job(unique="user_id", debounce=30, max_wait=timedelta(seconds=100))
    first = function.enqueue(1, "a")
    assert first.run_at - first.created_at == timedelta(seconds=30)

    waits = []
    for age in (0, 20, 40, 69, 71, 95, 99, 130):
        set_row(first.pk, run_at=first.run_at, created_at=first.created_at)  # and then, as if time went by
        with connection.cursor() as cursor:
            cursor.execute(
                "UPDATE background_jobs SET created_at = statement_timestamp() - %s::interval,"
                " run_at = statement_timestamp() - %s::interval + interval '30 seconds'",
                [timedelta(seconds=age)] * 2,
            )
        pushed = function.enqueue(1, age)
        assert (pushed.pk, pushed.is_new) == (first.pk, False)
        waits.append(round((pushed.run_at - pushed.created_at).total_seconds()))
        assert rows()[first.pk]["run_at"] == pushed.run_at
    assert waits == [30, 50, 70, 99, 100, 100, 100, 100]
    assert BackgroundJob.objects.get().payload == {"args": [1, 130], "kwargs": {}}


def test_without_a_longest_wait_there_is_none():
    function = a_job(debounce=30)
    first = function.enqueue(1)
    set_row(first.pk, created_at=first.created_at - timedelta(days=300))

    assert function.enqueue(1).run_at > first.run_at


def test_a_push_never_moves_a_job_forward():
    function = a_job(debounce=30, max_wait=60)
    first = function.enqueue(1)
    in_backoff = first.created_at + HOUR
    set_row(first.pk, run_at=in_backoff, attempts=1)

    assert function.enqueue(1).run_at == in_backoff


def test_a_debounced_job_runs_once_with_the_latest_arguments():
    function = a_job(unique="user_id", debounce=30)
    for words in "abc":
        function.enqueue(1, words)
    assert len(drain()) == 0
    set_row(BackgroundJob.objects.get().pk, run_at="2020-01-01T00:00Z")

    assert drain().completed == 1
    assert BackgroundJob.objects.get().result == "1 c"
    assert function.enqueue(1, "d").is_new


@pytest.mark.django_db(transaction=True)
def test_a_new_job_wakes_a_worker_and_a_push_back_does_not():
    function = a_job(unique="user_id", debounce=5)  # soon enough to be worth a notification
    with session() as listener:
        listener.execute("LISTEN job_created")

        function.using(queue="a").enqueue(1)
        function.using(queue="b").enqueue(1)
        function.using(queue="b").enqueue_many([((1,), {})])
        function.using(queue="c").enqueue(2)

        heard = [one.payload for one in listener.notifies(timeout=10, stop_after=2)]
        heard += [one.payload for one in listener.notifies(timeout=0.1)]
    assert heard == ["a", "c"]


# ── Many at once ──────────────────────────────────────────────────────────────────────────────────────────


def calls(*numbers: int, words: str = "") -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [((number, f"{words}{position}"), {}) for position, number in enumerate(numbers)]


def words_of(id: int) -> str:
    return BackgroundJob.objects.get(pk=id).payload["args"][1]


@pytest.mark.parametrize("scope", SCOPES)
def test_of_equal_calls_in_a_batch_the_first_is_kept(scope):
    ids = a_job(**SCOPES[scope]).enqueue_many(calls(3, 1, 3, 2, 1))

    assert ids == [ids[0], ids[1], ids[0], ids[3], ids[1]]
    assert [words_of(id) for id in ids] == ["0", "1", "0", "3", "1"]
    assert len(rows()) == 3


@pytest.mark.parametrize("options", [{"on_conflict": "replace"}, {"debounce": 9}], ids=str)
def test_of_equal_calls_in_a_batch_the_last_replaces_the_others(options):
    ids = a_job(unique="user_id", **options).enqueue_many(calls(3, 1, 3, 2, 1))

    assert ids == [ids[0], ids[1], ids[0], ids[3], ids[1]]
    assert [words_of(id) for id in ids] == ["2", "4", "2", "3", "4"]
    assert len(rows()) == 3


def test_equal_calls_in_a_batch_are_an_error_where_they_are_refused(django_assert_num_queries):
    function = a_job(unique="user_id", on_conflict="raise")

    with django_assert_num_queries(0), pytest.raises(DuplicateJob) as caught:
        function.enqueue_many(calls(3, 1, 3, 2, 1))

    assert str(caught.value) == (
        f"Calls number 0 and 2 of job {NAME!r} have the same unique key; no job was enqueued."
    )
    assert (caught.value.job_id, caught.value.unique_key) == (None, '{"user_id":3}')
    assert function.enqueue_many(calls(3, 1, 2)) == sorted(
        rows(), key=lambda id: [3, 1, 2].index(number_of(id))
    )


def number_of(id: int) -> int:
    return BackgroundJob.objects.get(pk=id).payload["args"][0]


@pytest.mark.parametrize("scope", SCOPES)
def test_a_batch_finds_what_is_there_and_adds_the_rest(scope):
    function = a_job(**SCOPES[scope])
    queued, processing = function.enqueue(2, "queued"), function.enqueue(4, "processing")
    set_row(processing.pk, status="processing")

    ids = function.enqueue_many(calls(5, 4, 3, 2, 1))

    assert ids[3] == queued.pk
    assert (ids[1] == processing.pk) is (scope != "started")
    assert [number_of(id) for id in ids] == [5, 4, 3, 2, 1]
    assert len(rows()) == (6 if scope == "started" else 5)


def test_calls_that_need_not_be_unique_are_all_inserted_and_their_ids_are_in_order():
    function = a_job(unique=lambda user_id, words: str(user_id) if user_id else None)

    ids = function.enqueue_many(calls(0, 7, 0, 0, 7, 8, 0))

    assert ids[1] == ids[4]
    assert [words_of(id) for id in ids] == ["0", "1", "2", "3", "1", "5", "6"]
    assert len(rows()) == 6
    assert function.enqueue_many(calls(0, 0)) == sorted(rows())[-2:]
    assert function.enqueue_many([]) == []


def test_a_refused_batch_inserts_nothing_and_leaves_the_transaction_usable():
    function = a_job(unique=lambda user_id, words: str(user_id) if user_id else None, on_conflict="raise")
    first = function.enqueue(5, "")

    with transaction.atomic():
        with pytest.raises(DuplicateJob, match=f"Call number 2: .* job {first.pk}, which is queued"):
            function.enqueue_many(calls(0, 6, 5))
        assert list(rows()) == [first.pk]
        function.enqueue(6, "")
    assert len(rows()) == 2


def test_rows_are_inserted_in_the_order_of_their_keys():
    numbers = [5, 11, 3, 1, 20, 2]
    a_job(unique="user_id").enqueue_many(calls(*numbers))

    assert [number_of(id) for id in sorted(rows())] == sorted(numbers, key=lambda n: f'{{"user_id":{n}}}')


# ── Transactions ──────────────────────────────────────────────────────────────────────────────────────────

ALL = {
    **{f"{scope} keep": options for scope, options in SCOPES.items()},
    **{f"{scope} raise": options | {"on_conflict": "raise"} for scope, options in SCOPES.items()},
    "replace": {"unique": "user_id", "on_conflict": "replace"},
    "debounce": {"unique": "user_id", "debounce": 30},
}


class Undo(Exception):
    pass


@pytest.mark.parametrize("name", ALL)
def test_a_rollback_leaves_neither_the_job_nor_its_key(name):
    function = a_job(**ALL[name])
    for enqueue in (lambda: function.enqueue(1), lambda: function.enqueue_many(calls(1, 2))):
        with pytest.raises(Undo), transaction.atomic():  # noqa: PT012
            enqueue()
            raise Undo
        assert rows() == {}
    assert function.enqueue(1).is_new


@pytest.mark.parametrize("name", ALL)
def test_a_rollback_gives_a_job_back_what_was_taken_from_it(name):
    function = a_job(**ALL[name])
    queued, processing = function.enqueue(1, "old"), function.enqueue(2, "old")
    set_row(processing.pk, status="processing")
    before = rows()

    with pytest.raises((Undo, DuplicateJob)), transaction.atomic():  # noqa: PT012
        function.enqueue_many(calls(1, 2, words="new"))
        raise Undo

    assert rows() == before
    assert queued.refresh().status == "queued"


def test_a_refused_job_leaves_the_transaction_usable_without_a_savepoint():
    function = a_job(unique=True, on_conflict="raise")

    with transaction.atomic():
        function.enqueue(1)
        with pytest.raises(DuplicateJob):
            function.enqueue(1)
        assert function.enqueue(2).is_new
    assert len(rows()) == 2


def test_it_works_inside_savepoints():
    function = a_job(unique=True)
    with transaction.atomic():
        with pytest.raises(Undo), transaction.atomic():  # noqa: PT012
            assert function.enqueue(1).is_new
            assert not function.enqueue(1).is_new
            raise Undo
        assert function.enqueue(1).is_new


@pytest.mark.django_db(transaction=True)
def test_without_a_transaction_each_call_stands_by_itself():
    for name, options in ALL.items():
        function = a_job(**options)
        connection.cursor().execute("TRUNCATE background_jobs")
        function.enqueue(1)
        try:
            function.enqueue_many(calls(1, 2))
        except DuplicateJob:
            assert "raise" in name
        with session() as other:
            ((count,),) = other.execute("SELECT count(*) FROM background_jobs").fetchall()
        assert count == (1 if "raise" in name else 2)
        assert not connection.in_atomic_block


# ── Several sessions ──────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def threads(count: int = 8):
    """Threads with connections of their own, which they have closed in the end."""
    with ThreadPoolExecutor(count) as pool:

        def submit(function: Callable[..., Any], *args: Any) -> Future[Any]:
            def run() -> Any:
                try:
                    return function(*args)
                finally:
                    connections.close_all()

            return pool.submit(run)

        yield submit


def waiting() -> int:
    """How many sessions wait for this one."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_locks"
            " WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))"
        )
        return cursor.fetchone()[0]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
@pytest.mark.parametrize("name", ALL)
def test_an_enqueuer_waits_for_the_commit_of_an_equal_one(name, commits):
    function = a_job(**ALL[name])
    with threads(1) as submit:
        try:
            with transaction.atomic():
                first = function.enqueue(1, "first")
                other = submit(function.enqueue, 1, "second")
                until(waiting, what="the other session to wait")
                assert not other.done()
                if not commits:
                    raise Undo
        except Undo:
            pass
        if "raise" in name and commits:
            with pytest.raises(DuplicateJob):
                other.result(10)
            return
        second = other.result(10)
    assert (second.pk == first.pk, second.is_new) == (commits, not commits)
    assert len(rows()) == 1
    if "keep" not in name:
        assert words_of(second.pk) == "second"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("scope", ["started", "replace", "debounce"])
def test_a_job_that_is_unique_until_it_has_started_cannot_start_before_the_commit(scope):
    """So it sees what the transaction has written, also where nothing was new about it."""
    function = a_job(**(SCOPES | ALL)[scope])
    first = function.enqueue(1)
    set_row(first.pk, run_at="2020-01-01T00:00Z")

    with threads(1) as submit:
        with transaction.atomic():
            assert function.enqueue(1).pk == first.pk
            assert len(submit(drain).result(10)) == 0
        set_row(first.pk, run_at="2020-01-01T00:00Z")
        assert submit(drain).result(10).completed == 1


@pytest.mark.django_db(transaction=True)
def test_a_job_whose_key_was_taken_is_settled_after_the_commit_and_nobody_hangs():
    function = a_job(unique=True, unique_until="started")
    first = function.enqueue(1)
    with store.own_transaction("default") as cursor:
        (claim,) = store.claim(cursor, token=uuid.uuid4(), worker_id=uuid.uuid4(), limit=1).claims

    def renewed() -> bool:
        with store.own_transaction("default") as cursor:
            return first.pk in store.renew(cursor, [claim])

    def held() -> set[int]:
        with store.own_transaction("default") as cursor:
            return store.held(cursor, [claim])[0]

    with threads(1) as submit:
        with transaction.atomic():
            second = function.enqueue(1)
            assert second.is_new
            assert submit(renewed).result(10) is False  # locked by the enqueuer, and not waited for
            assert submit(held).result(10) == {first.pk}  # so it is tried again
        assert submit(renewed).result(10) is True
    assert first.refresh().unique_key is None


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", ALL)
def test_of_sixteen_threads_with_one_key_one_inserts_the_job(name):
    function = a_job(**ALL[name])
    barrier = threading.Barrier(16)

    def enqueue(number: int) -> tuple[int | None, bool]:
        barrier.wait(30)
        try:
            handle = function.enqueue(1, str(number))
        except DuplicateJob as error:
            return error.job_id, False
        return handle.pk, handle.is_new

    with threads(16) as submit:
        for _ in range(3):
            connection.cursor().execute("TRUNCATE background_jobs")
            answers = [one.result(30) for one in [submit(enqueue, number) for number in range(16)]]
            assert sum(is_new for _, is_new in answers) == 1
            assert len({id for id, _ in answers}) == 1
            assert len(rows()) == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", ALL)
def test_two_bulk_enqueuers_with_the_same_keys_in_reverse_order_never_deadlock(name):
    """While workers claim and complete, so that keys come and go in the middle of it."""
    function = a_job(**ALL[name])
    numbers = list(range(40))
    ended = threading.Event()

    def enqueue(order: list[int]) -> int:
        done = 0
        for number in range(25):
            try:
                with transaction.atomic():
                    ids = function.enqueue_many(calls(*order, words=f"{number} "))
                    assert len(set(ids)) == len(order)
                done += 1
            except DuplicateJob:
                pass
            if "period" in name:
                age()
        return done

    def age() -> None:
        with connection.cursor() as cursor:  # what has finished is long ago
            cursor.execute(
                """
                UPDATE background_jobs SET created_at = created_at - interval '1 day'
                 WHERE id = ANY (ARRAY(SELECT id FROM background_jobs
                                        WHERE status = 'completed' AND created_at > now() - interval '1 hour'
                                        ORDER BY id LIMIT 20 FOR UPDATE SKIP LOCKED))
                """
            )

    def work() -> None:
        with session() as worker:
            while not ended.is_set():
                for before, after in (("queued", "processing"), ("processing", "completed")):
                    worker.execute(
                        """
                        UPDATE background_jobs SET status = %s
                         WHERE id = ANY (ARRAY(SELECT id FROM background_jobs WHERE status = %s
                                                ORDER BY random() LIMIT 9 FOR UPDATE SKIP LOCKED))
                        """,
                        [after, before],
                    )

    with threads(4) as submit:
        worker = submit(work)
        try:
            enqueuers = [submit(enqueue, order) for order in (numbers, numbers[::-1], numbers[::-1])]
            done = [one.result(120) for one in enqueuers]
        finally:
            ended.set()
        worker.result(10)
    if "raise" not in name:
        assert done == [25, 25, 25]
    live = [
        (row["job_name"], row["unique_key"])
        for row in rows().values()
        if row["status"] in ("queued", "processing") and row["unique_key"]
    ]
    assert len(live) == len(set(live))


@pytest.mark.django_db(transaction=True)
def test_a_job_that_ends_while_it_is_looked_for_is_followed_by_a_new_one(monkeypatch):
    function = a_job(unique=True)
    first = function.enqueue(1)
    live = store.live

    def ends_first(cursor, name, keys):
        with session() as worker:
            worker.execute("UPDATE background_jobs SET status = 'completed'")
        return live(cursor, name, keys)

    monkeypatch.setattr(store, "live", ends_first)

    assert function.enqueue(1).is_new
    assert first.refresh().status == "completed"


@pytest.mark.django_db(transaction=True)
def test_a_job_that_ends_within_its_period_while_it_is_looked_for_is_found(monkeypatch):
    function = a_job(unique=True, unique_until=HOUR)
    recent, looks = store.recent, []

    def appears_late(cursor, name, keys, **given):
        looks.append(keys)
        if len(looks) == 1:
            found = recent(cursor, name, keys, **given)
            with session() as other:
                other.execute(
                    "INSERT INTO background_jobs (job_name, payload, status, unique_key)"
                    " VALUES (%s, '{}', 'completed', %s)",
                    [name, keys[0]],
                )
            return found
        return recent(cursor, name, keys, **given)

    monkeypatch.setattr(store, "recent", appears_late)

    handle = function.enqueue(1)

    assert (handle.is_new, handle.status) == (False, "completed")
    assert len(rows()) == 1
    assert len(looks) == 3


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
def test_keys_that_come_and_go_for_ever_are_a_clear_error(monkeypatch, many):
    function = a_job(unique=True)
    function.enqueue(1)
    monkeypatch.setattr(store, "live", lambda cursor, name, keys: [])

    def enqueue():
        return function.enqueue_many([((2,), {}), ((1,), {})]) if many else function.enqueue(1)

    with pytest.raises(PGJobsError, match=f"{NAME!r} could not be enqueued: in 20 attempts, the job that"):
        enqueue()
    assert len(rows()) == 1


# ── Other isolation levels ────────────────────────────────────────────────────────────────────────────────


@contextmanager
def isolated(level: str):
    """A transaction of this level, which has taken its snapshot."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        cursor.execute("SELECT count(*) FROM background_jobs")
        yield


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("name", [name for name in ALL if "period" not in name])
def test_a_job_that_a_snapshot_does_not_have_is_a_serialization_error(name, level):
    function = a_job(**ALL[name])
    serialization = pytest.raises(OperationalError, match="could not serialize access")
    with threads(1) as submit, serialization, isolated(level):
        submit(function.enqueue, 1).result(10)
        function.enqueue(1)
    assert len(rows()) == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("name", [name for name in ALL if "period" not in name])
def test_a_job_that_a_snapshot_has_is_treated_as_ever(name, level):
    function = a_job(**ALL[name])
    first = function.enqueue(1)
    with isolated(level):
        if "raise" in name:
            with pytest.raises(DuplicateJob):
                function.enqueue(1)
        else:
            assert function.enqueue(1).pk == first.pk
        assert function.enqueue(2).is_new
        assert len(function.enqueue_many(calls(3, 4))) == 2
    assert len(rows()) == 4


@pytest.mark.django_db(transaction=True)
def test_a_job_that_has_ended_since_the_snapshot_is_not_in_the_way():
    function = a_job(unique=True)
    first = function.enqueue(1)
    with isolated("REPEATABLE READ"):
        with session() as worker:
            worker.execute("UPDATE background_jobs SET status = 'completed'")
        assert function.enqueue(1).is_new
    assert first.refresh().status == "completed"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_period_cannot_be_made_sure_of_with_an_old_snapshot(level):
    function = a_job(unique=True, unique_until=HOUR)
    with isolated(level):
        with pytest.raises(TransactionManagementError) as caught:
            function.enqueue(1)
        assert f"in a transaction that is {level}: " in str(caught.value)
        assert rows() == {}  # and the transaction is usable
    assert function.enqueue(1).is_new


# ── Retrying ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("level", [None, "REPEATABLE READ"], ids=["default", "REPEATABLE READ"])
def test_a_retry_skips_a_job_whose_key_is_taken_at_this_very_moment(level):
    function = a_job(unique=True)
    dead = [make_job("failed", job_name=NAME, unique_key=key) for key in ("a", "b", "c", "d")]
    handles = dict(zip("abcd", dead, strict=True))

    def retry() -> set[int]:
        if level is None:
            return store.retry([one.pk for one in dead])
        with isolated(level):
            return store.retry([one.pk for one in dead])

    with threads(1) as submit:
        with transaction.atomic():
            make_job(job_name=NAME, unique_key="b")
            retried = submit(retry)
            until(waiting, what="the retry to wait")
        assert retried.result(10) == {handles[key].pk for key in "acd"}
    assert handles["b"].refresh().status == "failed"
    assert not handles["b"].retry()
    assert function.name == NAME


def test_a_violation_of_something_else_is_an_error(monkeypatch):
    def other(*args):
        raise IntegrityError("another one")

    monkeypatch.setattr(store, "_change", other)
    with pytest.raises(IntegrityError, match="another one"):
        store.retry([1])


def test_a_dead_letter_whose_key_is_live_stays_one():
    function = a_job(unique=True)
    dead = function.enqueue(1)
    set_row(dead.pk, status="failed")
    assert function.enqueue(1).is_new

    assert not dead.retry()
    assert dead.refresh().status == "failed"


# ── Async code, handles ───────────────────────────────────────────────────────────────────────────────────


def test_aenqueue_keeps_replaces_and_refuses():
    async def call_twice(function: JobFunction[..., Any]) -> list[BackgroundJob]:
        return [await function.aenqueue(1, words) for words in "ab"]

    twice = async_to_sync(call_twice)
    first, second = twice(a_job(unique="user_id"))
    assert (first.is_new, second.is_new, first.pk) == (True, False, second.pk)
    with pytest.raises(DuplicateJob):
        twice(a_job(unique="user_id", on_conflict="raise"))
    replaced, _ = twice(a_job(unique="user_id", on_conflict="replace"))
    assert words_of(replaced.pk) == "b"


def test_a_handle_that_was_read_is_not_new():
    handle = a_job(unique=True).enqueue(1)

    assert handle.is_new
    assert handle.refresh().is_new
    assert not BackgroundJob.objects.get(pk=handle.pk).is_new


@pytest.mark.django_db(databases=["default", "other"])
def test_the_queue_may_live_in_another_database(settings):
    settings.PGJOBS = {"DATABASE": "other"}
    for options in ALL.values():
        connections["other"].cursor().execute("DELETE FROM background_jobs")
        function = a_job(**options)
        with CaptureQueriesContext(connection) as queries:
            assert function.enqueue(1)._state.db == "other"
            try:
                function.enqueue_many(calls(1, 2))
            except DuplicateJob:
                pass
        assert len(queries) == 0
        assert rows("default") == {}


def test_a_key_of_any_text_is_bound_and_not_run():
    hostile = "'); DELETE FROM background_jobs; -- %s %(keys)s {} \\ \" \n"
    function = a_job(unique=lambda user_id: hostile)

    first = function.enqueue(1)
    assert first.unique_key == hostile
    assert function.enqueue(2).pk == first.pk
    assert function.enqueue_many([((3,), {}), ((4,), {})]) == [first.pk] * 2
