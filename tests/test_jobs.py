from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import json
import linecache
import sys
import textwrap
import warnings
from datetime import UTC, datetime, timedelta, timezone

import psycopg
import pytest
from asgiref.sync import async_to_sync, iscoroutinefunction
from django.apps import AppConfig, apps
from django.db import connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.db.utils import IntegrityError
from django.http import HttpResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import path

from django_pgjobs import DuplicateJobName, InvalidArguments, JobFunction, job, jobs
from django_pgjobs.models import BackgroundJob
from tests.factories import rows
from tests.jobs import add, add_async
from tests.models import Effect


@pytest.fixture(autouse=True)
def registry():
    """Job functions that a test declares are forgotten after it."""
    before = dict(jobs.registry)
    yield jobs.registry
    jobs.registry.clear()
    jobs.registry.update(before)


def problem_of(error: type[Exception], function, /, *args, **kwargs) -> str:
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def a_job(function=lambda: None, **options):
    return job(name=options.pop("name", "tests.a_job"), **options)(function)


# ── @job ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_function_has_the_defaults_of_the_reference():
    function = a_job()

    assert isinstance(function, JobFunction)
    assert {field.name: getattr(function, field.name) for field in dataclasses.fields(function)} == {
        "func": function.func,
        "name": "tests.a_job",
        "aliases": (),
        "queue": "default",
        "priority": 0,
        "max_attempts": None,
        "backoff": None,
        "retry_on": (),
        "give_up_on": (),
        "rerun_if_lost": True,
        "timeout": None,
        "atomic": False,
        "unique": False,
        "unique_until": None,
        "on_conflict": None,
        "debounce": None,
        "max_wait": None,
        "run_at": timedelta(0),
        "schedules": (),
        "redact": None,
        "is_async": False,
        "signature": inspect.signature(function.func),
        "uniqueness": None,
    }


def test_a_job_function_is_named_by_its_dotted_path():
    assert add.name == "tests.jobs.add"
    assert jobs.find("tests.jobs.add") is add


def test_a_job_function_looks_like_the_function_that_it_wraps():
    assert (add.__name__, add.__qualname__, add.__module__) == ("add", "add", "tests.jobs")
    assert inspect.signature(add) == inspect.signature(add.func)
    assert inspect.unwrap(add) is add.func


def test_a_job_function_is_called_like_the_function_that_it_wraps(django_assert_num_queries, db):
    with django_assert_num_queries(0):
        assert add(1, y=2) == 3


def test_an_async_job_function_is_awaited_like_the_function_that_it_wraps():
    assert async_to_sync(add_async)(1, y=2) == 3
    assert add_async.is_async
    assert iscoroutinefunction(add_async)
    assert not add.is_async
    assert not iscoroutinefunction(add)


def test_a_job_function_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        add.queue = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        del add.name


def test_what_was_declared_with_a_list_does_not_change_with_the_list():
    backoff, aliases = [1, 2], ["tests.former"]
    function = a_job(backoff=backoff, aliases=aliases)
    backoff.append(3)
    aliases.append("other")

    assert (function.backoff, function.aliases) == ((1, 2), ("tests.former",))


def test_one_exception_class_or_alias_stands_for_itself():
    function = a_job(retry_on=OSError, give_up_on=[ValueError, KeyError], aliases="tests.former")

    assert function.retry_on == (OSError,)
    assert function.give_up_on == (ValueError, KeyError)
    assert function.aliases == ("tests.former",)


class Queue(enum.StrEnum):
    MAIL = "mail"


class Priority(enum.IntEnum):
    HIGH = 50


def test_members_of_enums_are_taken_for_what_they_stand_for(db):
    function = a_job(queue=Queue.MAIL, priority=Priority.HIGH)
    function.enqueue()

    assert (type(function.queue), type(function.priority)) == (str, int)
    (row,) = rows().values()
    assert (row["queue_name"], row["priority"]) == ("mail", 50)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"name": ""}, "the name '' must be a text of 1 to 255 characters, without NUL."),
        ({"name": "a\x00"}, "the name 'a\\x00' must be a text of 1 to 255 characters, without NUL."),
        ({"name": "\ud800"}, "the name '\\ud800' must be a text of 1 to 255 characters, without NUL."),
        ({"name": 5}, "the name 5 must be a text of 1 to 255 characters, without NUL."),
        (
            {"queue": "q" * 256},
            f"the queue {'q' * 256!r} must be a text of 1 to 255 characters, without NUL.",
        ),
        ({"queue": None}, "the queue None must be a text of 1 to 255 characters, without NUL."),
        ({"aliases": ["a", ""]}, "the alias '' must be a text of 1 to 255 characters, without NUL."),
        ({"aliases": None}, "the alias None must be a text of 1 to 255 characters, without NUL."),
        ({"priority": 101}, "the priority 101 must be a whole number from -100 to 100."),
        ({"priority": -101}, "the priority -101 must be a whole number from -100 to 100."),
        ({"priority": 1.5}, "the priority 1.5 must be a whole number from -100 to 100."),
        ({"priority": True}, "the priority True must be a whole number from -100 to 100."),
        ({"max_attempts": 0}, "max_attempts is 0; it must be a whole number from 1 to 1,000,000."),
        (
            {"max_attempts": 1_000_001},
            "max_attempts is 1000001; it must be a whole number from 1 to 1,000,000.",
        ),
        ({"max_attempts": "3"}, "max_attempts is '3'; it must be a whole number from 1 to 1,000,000."),
        ({"max_attempts": True}, "max_attempts is True; it must be a whole number from 1 to 1,000,000."),
        *(
            (
                {"backoff": backoff},
                (
                    f"the backoff {tuple(backoff) if isinstance(backoff, list) else backoff!r} must be"
                    " seconds or a timedelta, not below zero, a sequence of these, or a callable."
                ),
            )
            for backoff in (
                -1, timedelta(-1), float("nan"), "5", b"5", True, [], [1, -1], [1, None], [True], [[1]],
            )
        ),
        *(
            (
                {"timeout": timeout},
                f"the timeout {timeout!r} must be seconds or a timedelta, above zero.",
            )
            for timeout in (0, -1, timedelta(0), float("nan"), "5", True)
        ),
        ({"retry_on": "OSError"}, "retry_on must hold exception classes, not 'OSError'."),
        ({"retry_on": (OSError, int)}, "retry_on must hold exception classes, not <class 'int'>."),
        ({"give_up_on": 5}, "give_up_on must hold exception classes, not 5."),
        ({"give_up_on": OSError()}, "give_up_on must hold exception classes, not OSError()."),
    ],
)  # fmt: skip
def test_an_option_that_cannot_work_is_refused_at_import(options, problem):
    name = options.get("name", "tests.a_job")

    assert problem_of(ValueError, a_job, **options) == f"@job {name!r}: {problem}"
    assert "tests.a_job" not in jobs.registry


def test_an_unknown_option_is_refused_at_import():
    hint = ". Did you mean 'queue'?" if sys.version_info >= (3, 13) else ""
    assert problem_of(TypeError, job, qeue="mail") == (
        f"job() got an unexpected keyword argument 'qeue'{hint}"
    )


@pytest.mark.parametrize(
    "backoff", [0, 1.5, 10**400, float("inf"), timedelta(0), [0], (1, timedelta(1)), range(3), print, None]
)
def test_backoff_takes_seconds_timedeltas_sequences_and_callables(backoff):
    assert a_job(backoff=backoff).backoff == (tuple(backoff) if isinstance(backoff, list) else backoff)


@pytest.mark.parametrize(
    ("declared", "project", "limit"),
    [
        (None, None, None),
        (None, 60, 60.0),
        (5, 60, 5.0),
        (0.5, None, 0.5),
        (timedelta(minutes=2), timedelta(1), 120.0),
    ],
)
def test_the_time_limit_is_the_functions_or_the_projects(settings, declared, project, limit):
    settings.PGJOBS = {"TIMEOUT": project}

    assert a_job(timeout=declared).time_limit == limit


# ── What may be a job function ────────────────────────────────────────────────────────────────────────────


class Shop:
    def method(self, x):
        return x

    @classmethod
    def of_the_class(cls, x):
        return x

    @staticmethod
    def static(x):
        return x

    def __call__(self, x):
        return x


class AsyncShop:
    async def __call__(self, x):
        return x


def generator():
    yield 1


async def async_generator():
    yield 1


@pytest.mark.parametrize(
    ("decorated", "what"),
    [
        (lambda: None, "<function <lambda> at 0x"),
        (functools.partial(print), "functools.partial(<built-in function print>)"),
        (Shop(), "<tests.test_jobs.Shop object at 0x"),
    ],
)
def test_what_other_processes_may_not_find_needs_a_name(decorated, what):
    problem = problem_of(ValueError, job, decorated)

    assert problem.startswith(f"@job: {what}")
    assert problem.endswith(
        " is not a function that a module defines at its top level, so other processes may not know it."
        " Define it there, or give it a name with @job(name=...)."
    )


def test_a_nested_function_needs_a_name():
    def nested(x: int) -> int:
        return x

    assert "give it a name with @job(name=...)" in problem_of(ValueError, job, nested)
    assert job(name="tests.nested")(nested)(5) == 5


@pytest.mark.parametrize(
    ("decorated", "is_async"),
    [
        (lambda x: x, False),
        (functools.partial(lambda y, x: x, 1), False),
        (Shop(), False),
        (Shop().method, False),
        (Shop.of_the_class, False),
        (Shop.static, False),
        (AsyncShop(), True),
        (functools.partial(add_async.func, 1), True),
        (AsyncShop, False),
    ],
)
def test_any_callable_may_be_a_job_function_under_a_name(db, decorated, is_async):
    function = a_job(decorated)

    assert function.is_async is is_async
    assert inspect.signature(function) == inspect.signature(decorated)


def test_a_static_method_may_be_a_job_function(db):
    class Shop:
        @job(name="tests.below")
        @staticmethod
        def below(x):
            return x

        @staticmethod
        @job(name="tests.above")
        def above(x):
            return x

    assert (Shop.below(1), Shop().below(2), Shop.above(3), Shop().above(4)) == (1, 2, 3, 4)
    assert Shop().below.enqueue(1).payload == Shop.above.enqueue(1).payload == {"args": [1], "kwargs": {}}


@pytest.mark.parametrize(
    ("decorated", "problem"),
    [
        (generator, "it is a generator function; a call of it would run nothing."),
        (async_generator, "it is a generator function; a call of it would run nothing."),
        (
            Shop.method,
            (
                "it is a method, and a worker has no object to call it on. Make it a function of the module,"
                " or a static method."
            ),
        ),
        (type, "<class 'type'> does not tell its parameters; wrap it in a function that does."),
    ],
)
def test_a_function_that_cannot_do_the_work_of_a_job_is_refused(decorated, problem):
    assert problem_of(ValueError, a_job, decorated) == f"@job 'tests.a_job': {problem}"


@pytest.mark.parametrize("decorated", ["tests.a_job", 5, Shop.__dict__["of_the_class"]])
def test_what_cannot_be_called_is_refused(decorated):
    assert problem_of(TypeError, job, decorated) == f"@job decorates functions, not {decorated!r}."


# ── Names ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_function_answers_to_its_aliases():
    function = a_job(aliases=["tests.former", "tests.first"])

    assert jobs.find("tests.former") is jobs.find("tests.first") is jobs.find("tests.a_job") is function
    assert jobs.find("tests.unheard") is None


def test_an_alias_may_repeat_the_name():
    assert a_job(aliases=["tests.a_job", "tests.a_job"]).name == "tests.a_job"


def line_of(function: JobFunction) -> str:
    code = function.func.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


@pytest.mark.parametrize(
    "options", [{"name": "tests.a_job"}, {"name": "tests.x", "aliases": ["tests.a_job"]}]
)
def test_two_functions_of_one_name_are_an_error_at_import(options):
    first = a_job(lambda x: x)

    with pytest.raises(DuplicateJobName) as caught:

        @job(**options)
        def second():
            pass

    assert str(caught.value) == (
        f"Two job functions are named 'tests.a_job': {line_of(first)} and"
        f" {__file__}:{second_line()}. Give one of them another name with @job(name=...)."
    )
    assert jobs.find("tests.a_job") is first
    assert jobs.find("tests.x") is None


def second_line() -> int:
    lines, start = inspect.getsourcelines(test_two_functions_of_one_name_are_an_error_at_import)
    return start + next(number for number, line in enumerate(lines) if "@job(**options)" in line)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module that can be imported, and forget it in the end."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    names = []

    def write(name: str, source: str) -> None:
        target = tmp_path / f"{name.replace('.', '/')}.py"
        target.parent.mkdir(exist_ok=True)
        if target.parent != tmp_path:
            (target.parent / "__init__.py").touch()
        target.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        linecache.checkcache()
        names.append(name)

    yield write
    for name in names:
        sys.modules.pop(name, None)
        sys.modules.pop(name.partition(".")[0], None)


def test_two_definitions_of_one_name_in_a_module_are_an_error_at_import(module):
    module(
        "twice",
        """
        from django_pgjobs import job

        @job
        def send(x): ...

        @job
        def send(x): ...
        """,
    )
    with pytest.raises(DuplicateJobName, match=r"Two job functions are named 'twice\.send'"):
        importlib.import_module("twice")


def test_functions_of_one_name_that_a_function_makes_are_an_error():
    def make():
        @job(name="tests.made")
        def made(): ...

    make()

    assert problem_of(DuplicateJobName, make).startswith("Two job functions are named 'tests.made': ")


def test_a_module_may_be_reloaded(module):
    module("again", "from django_pgjobs import job\n@job\ndef send(x): return 1\n")
    imported = importlib.import_module("again")
    first = imported.send
    module("again", "from django_pgjobs import job\n\n\n@job\ndef send(x): return 'other'\n")
    importlib.reload(imported)

    assert jobs.find("again.send") is imported.send is not first
    assert imported.send(0) == "other"


def test_an_import_that_failed_half_way_may_be_tried_again(module):
    module("broken", "from django_pgjobs import job\n@job\ndef send(x): ...\nimport nothing_of_this_name\n")

    for _ in range(2):
        assert problem_of(ModuleNotFoundError, importlib.import_module, "broken") == (
            "No module named 'nothing_of_this_name'"
        )


# ── Discovery ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def app(module, monkeypatch):
    """Write a module of an app that is installed."""

    def install(name: str, source: str) -> None:
        module(name, source)
        label = name.partition(".")[0]
        config = AppConfig(label, importlib.import_module(label))
        monkeypatch.setitem(apps.app_configs, label, config)

    return install


@pytest.mark.parametrize("name", ["jobs", "tasks"])
def test_the_jobs_and_tasks_modules_of_apps_are_found(app, name):
    app(f"shop_{name}.{name}", "from django_pgjobs import job\n@job\ndef send(x): ...\n")
    jobs.discover()

    assert jobs.find(f"shop_{name}.{name}.send") is not None


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("from django_pgjobs import nothing", "cannot import name 'nothing' from 'django_pgjobs'"),
        ("1 / 0", "division by zero"),
    ],
)
def test_an_error_in_a_job_module_surfaces(app, source, error):
    app("shop_broken.jobs", source)

    with pytest.raises((ImportError, ZeroDivisionError)) as caught:
        jobs.discover()
    assert str(caught.value).startswith(error)


# ── Enqueueing ────────────────────────────────────────────────────────────────────────────────────────────


def test_enqueue_inserts_a_row_and_returns_its_handle(db):
    handle = add.enqueue(1, y=2)

    ((id, row),) = rows().items()
    assert handle.pk == handle.id == id
    assert {name: value for name, value in row.items() if name in handle.__dict__ and name != "payload"} == {
        name: value for name, value in handle.__dict__.items() if name in row and name != "payload"
    }
    assert handle.payload == {"args": [1], "kwargs": {"y": 2}}
    assert (row["status"], row["queue_name"], row["job_name"]) == ("queued", "default", "tests.jobs.add")
    assert (row["priority"], row["attempts"], row["max_attempts"]) == (0, 0, 3)
    assert row["run_at"] == row["created_at"] == row["updated_at"]


def test_options_of_the_declaration_go_into_the_row(db):
    a_job(queue="mail", priority=5, max_attempts=9, rerun_if_lost=False).enqueue()

    (row,) = rows().values()
    assert (row["queue_name"], row["priority"], row["max_attempts"], row["rerun_if_lost"]) == (
        "mail", 5, 9, False,
    )  # fmt: skip


def test_the_projects_max_attempts_is_the_default(db, settings):
    settings.PGJOBS = {"MAX_ATTEMPTS": 7}

    assert add.enqueue(1, 2).max_attempts == 7
    assert add.using(max_attempts=2).enqueue(1, 2).max_attempts == 2


def test_a_handle_is_fresh_and_its_other_columns_are_read_when_asked_for(db, django_assert_num_queries):
    handle = add.enqueue(1, 2)

    with django_assert_num_queries(0):
        assert (handle.id, handle.status, str(handle)) == (
            handle.pk, "queued", f"tests.jobs.add #{handle.pk}",
        )  # fmt: skip
        assert handle.get_deferred_fields() >= {"result", "errors", "last_error", "locked_by"}
    with django_assert_num_queries(1):
        assert handle.result is None
    with django_assert_num_queries(1):
        assert handle.last_error is None


def test_a_handle_is_refreshed(db):
    handle = add.enqueue(1, 2)
    handle.cancel()

    assert handle.status == "queued"
    assert handle.refresh() is handle
    assert handle.status == "cancelled"


def test_a_handle_holds_what_the_table_holds(db):
    items = [(1, 2)]
    handle = a_job(lambda items: None).enqueue(items)
    items.append("later")

    assert handle.payload == handle.refresh().payload == {"args": [[[1, 2]]], "kwargs": {}}


def test_a_handle_equals_the_row_that_is_read(db):
    assert add.enqueue(1, 2) == BackgroundJob.objects.get()


def test_enqueue_is_one_statement(db, django_assert_num_queries):
    with django_assert_num_queries(1):
        add.enqueue(1, 2)
    with django_assert_num_queries(1):
        add.using(run_at=timedelta(hours=1), priority=1, queue="mail").enqueue(1, 2)


def test_enqueue_many_is_one_statement(db, django_assert_num_queries):
    with django_assert_num_queries(1):
        ids = add.using(queue="many", priority=-1).enqueue_many([((n,), {"y": n}) for n in range(5000)])

    table = rows()
    assert ids == list(table)
    assert [row["payload"] for row in table.values()] == [
        f'{{"args": [{n}], "kwargs": {{"y": {n}}}}}' for n in range(5000)
    ]
    assert {(row["queue_name"], row["priority"], row["status"]) for row in table.values()} == {
        ("many", -1, "queued")
    }


def test_enqueue_many_of_nothing_is_no_statement(db, django_assert_num_queries):
    with django_assert_num_queries(0):
        assert add.enqueue_many([]) == []


def test_enqueue_many_takes_an_iterator(db):
    assert len(add.enqueue_many((args, {}) for args in [(1, 2), [3, 4]])) == 2


def test_enqueue_many_keeps_each_line_break_and_what_else_might_divide(db):
    texts = ["\n", "\r\n", "a\nb", "\u2028\u2029\x0b\x1e\x85", "\\n", "", '"\n"', "%s {}", {"\n": "\n\n"}]

    ids = add.enqueue_many([((text, [text]), {}) for text in texts])

    found = BackgroundJob.objects.in_bulk(ids)
    assert [found[id].payload["args"] for id in ids] == [[text, [text]] for text in texts]


@pytest.mark.parametrize(
    ("calls", "problem"),
    [
        (
            [((1, 2), {}), ((1,), {})],
            "Call number 1: tests.jobs.add(x: 'int', y: 'int') -> 'int': missing a required argument: 'y'.",
        ),
        (
            [((1, {2}), {})],
            "Call number 0: args[1]: set is not JSON; pass a sorted list.",
        ),
        (
            [(1, 2)],
            "Call number 0: a pair (args, kwargs), such as ((1, 2), {}), is needed, not (1, 2).",
        ),
        (
            [("ab", {})],
            "Call number 0: a pair (args, kwargs), such as ((1, 2), {}), is needed, not ('ab', {}).",
        ),
        (
            [((1, 2),)],
            "Call number 0: a pair (args, kwargs), such as ((1, 2), {}), is needed, not ((1, 2),).",
        ),
        (
            [((), {1: 2})],
            "Call number 0: tests.jobs.add(x: 'int', y: 'int') -> 'int': keywords must be strings.",
        ),
    ],
)  # fmt: skip
def test_enqueue_many_names_the_call_that_is_refused_and_inserts_nothing(
    db, django_assert_num_queries, calls, problem
):
    with django_assert_num_queries(0):
        assert problem_of(InvalidArguments, add.enqueue_many, calls) == problem


@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        ((1,), {}, "missing a required argument: 'y'"),
        ((1, 2, 3), {}, "too many positional arguments"),
        ((1,), {"yy": 2}, "missing a required argument: 'y'"),
        ((1, 2), {"z": 3}, "got an unexpected keyword argument 'z'"),
        ((1, 2), {"x": 3}, "multiple values for argument 'x'"),
    ],
)
def test_wrong_arguments_are_refused_with_the_signature(db, django_assert_num_queries, args, kwargs, problem):
    text = f"tests.jobs.add(x: 'int', y: 'int') -> 'int': {problem}."

    with django_assert_num_queries(0):
        assert problem_of(InvalidArguments, add.enqueue, *args, **kwargs) == text
        assert problem_of(TypeError, add.using(priority=1).enqueue, *args, **kwargs) == text


def of_all_kinds(a, b=(), /, c: object = object(), *rest, d, e=None, **others) -> NotImplemented:
    """Parameters of every kind, with defaults and annotations that nobody can write down again."""


@pytest.mark.parametrize("function", [of_all_kinds, lambda: None, lambda *, d: None, lambda *a, **k: None])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((1,), {}),
        ((), {"d": 2}),
        ((1,), {"d": 2}),
        ((), {"a": 1, "d": 2}),
        ((1, 2, 3), {"c": 3, "d": 4}),
        ((1,), {"a": 1, "b": 2, "d": 3}),
        ((1,), {"c": 1, "d": 2, "rest": 3}),
        ((1, 2, 3, 4, 5), {"d": 2, "e": 3, "f": 4}),
    ],
)
def test_arguments_are_refused_where_a_call_refuses_them(registry, function, args, kwargs):
    named = job(name="tests.kinds")(function)
    try:
        function(*args, **kwargs)
    except TypeError:
        with pytest.raises(InvalidArguments, match=r"^tests\.kinds\("):
            named.encode(args, kwargs)
    else:
        assert json.loads(named.encode(args, kwargs)) == {"args": list(args), "kwargs": kwargs}


def test_a_refused_enqueue_leaves_the_transaction_usable(db):
    with transaction.atomic():
        Effect.objects.create(what="before")
        for bad in ("\x00", float("nan"), {1}, "x" * 2**20, 10**5000):
            with pytest.raises(InvalidArguments):
                add.enqueue(1, bad)
        with pytest.raises(InvalidArguments):
            add.enqueue(1)
        add.enqueue(1, 2)

    assert (Effect.objects.count(), len(rows())) == (1, 1)


def test_parameters_may_have_any_names(db):
    @job(name="tests.named")
    def named(self, queue, args, kwargs, func, name, run_at=None, **others):
        return [self, queue, args, kwargs, func, name, run_at, others]

    call = {
        "self": 1, "queue": 2, "args": 3, "kwargs": 4, "func": 5, "name": 6, "calls": 7, "caller": 8,
    }  # fmt: skip
    handle = named.using(queue="mail").enqueue(**call)

    assert handle.payload == {"args": [], "kwargs": call}
    assert handle.queue_name == "mail"

    async def aenqueue():
        return await named.aenqueue(**call)

    assert async_to_sync(aenqueue)().payload == handle.payload
    assert named.enqueue_many([((), call)]) == [handle.pk + 2]
    assert named(**call) == [1, 2, 3, 4, 5, 6, None, {"calls": 7, "caller": 8}]


# ── using() ───────────────────────────────────────────────────────────────────────────────────────────────


def test_using_makes_a_copy_with_other_options(registry):
    changed = add.using(queue="mail", priority=3, max_attempts=5, run_at=timedelta(hours=1))

    assert changed is not add
    assert (changed.queue, changed.priority, changed.max_attempts, changed.run_at) == (
        "mail", 3, 5, timedelta(hours=1),
    )  # fmt: skip
    assert (add.queue, add.priority, add.max_attempts, add.run_at) == ("default", 0, None, timedelta(0))
    assert (changed.name, changed.func, changed(1, 2)) == (add.name, add.func, 3)
    assert registry["tests.jobs.add"] is add


def test_using_takes_members_of_enums_too():
    changed = add.using(queue=Queue.MAIL, priority=Priority.HIGH)

    assert (type(changed.queue), type(changed.priority)) == (str, int)
    assert (changed.signature, changed.is_async) == (add.signature, False)


def test_using_keeps_what_it_is_not_told(registry):
    changed = add.using(queue="mail", priority=3).using(priority=0)

    assert (changed.queue, changed.priority) == ("mail", 0)


AWARE_EXTREMES = [
    datetime.min.replace(tzinfo=UTC),
    datetime.max.replace(tzinfo=UTC),
    datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))),
]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"queue": ""}, "the queue '' must be a text of 1 to 255 characters, without NUL."),
        ({"priority": 1000}, "the priority 1000 must be a whole number from -100 to 100."),
        ({"max_attempts": 0}, "max_attempts is 0; it must be a whole number from 1 to 1,000,000."),
        (
            {"run_at": datetime(2026, 3, 29, 2, 30)},
            "run_at is 2026-03-29 02:30:00, a naive datetime; make it aware, or pass a timedelta.",
        ),
        ({"run_at": 60}, "run_at is 60; it must be an aware datetime or a timedelta."),
        (
            {"run_at": "2026-01-01T00:00:00Z"},
            "run_at is '2026-01-01T00:00:00Z'; it must be an aware datetime or a timedelta.",
        ),
        (
            {"run_at": timedelta(seconds=-1)},
            "run_at is -1 day, 23:59:59 from now; it must be between zero and ten years.",
        ),
        (
            {"run_at": timedelta(days=3651)},
            "run_at is 3651 days, 0:00:00 from now; it must be between zero and ten years.",
        ),
        *(
            ({"run_at": run_at}, f"run_at is {run_at}; it must be in the years 2 to 9998.")
            for run_at in AWARE_EXTREMES
        ),
    ],
)
def test_using_refuses_what_cannot_work(options, problem):
    assert problem_of(ValueError, add.using, **options) == f"@job 'tests.jobs.add': {problem}"


@pytest.mark.parametrize(
    "run_at",
    [
        datetime(2, 1, 1, tzinfo=timezone(timedelta(hours=14))),
        datetime(9998, 12, 31, 23, 59, 59, 999999, tzinfo=timezone(timedelta(hours=-12))),
        datetime(2026, 10, 25, 2, 30, tzinfo=timezone(timedelta(hours=2)), fold=1),
    ],
)
def test_an_aware_run_at_keeps_its_instant(db, run_at):
    handle = add.using(run_at=run_at).enqueue(1, 2)

    assert handle.run_at == handle.refresh().run_at == run_at


def database_clock() -> datetime:
    with connection.cursor() as cursor:
        cursor.execute("SELECT statement_timestamp()")
        return cursor.fetchone()[0]


@pytest.mark.parametrize("delay", [timedelta(0), timedelta(hours=1)])
def test_a_delay_counts_from_the_database_s_clock_in_a_long_transaction_too(db, delay):
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT now()")
            (began,) = cursor.fetchone()
        before = database_clock()
        one = add.using(run_at=delay).enqueue(1, 2)
        add.using(run_at=delay).enqueue_many([((1, 2), {})])
        after = database_clock()

    assert began < before <= one.run_at - delay <= after
    assert all(before <= row["run_at"] - delay <= after for row in rows().values())
    assert one.created_at == one.run_at - delay


# ── Transactions ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def onlooker(transactional_db):
    """How many jobs somebody else sees."""
    params = connection.get_connection_params()
    with psycopg.connect(host=params.get("host"), port=params.get("port"), user=params.get("user"),
                         password=params.get("password"), dbname=params["dbname"],
                         autocommit=True) as other:  # fmt: skip
        yield lambda: other.execute("SELECT count(*) FROM background_jobs").fetchone()[0]


def test_a_job_is_visible_with_the_commit_and_not_before(onlooker):
    with transaction.atomic():
        handle = add.enqueue(1, 2)
        add.enqueue_many([((1, 2), {})])
        assert handle.id > 0
        assert onlooker() == 0
    assert onlooker() == 2


def test_without_a_transaction_a_job_is_visible_at_once(onlooker):
    add.enqueue(1, 2)

    assert onlooker() == 1


def test_a_rollback_leaves_no_job(onlooker):
    with pytest.raises(ZeroDivisionError), transaction.atomic():  # noqa: PT012
        handle = add.enqueue(1, 2)
        add.enqueue_many([((1, 2), {})])
        raise ZeroDivisionError

    assert onlooker() == 0
    with pytest.raises(BackgroundJob.DoesNotExist):
        handle.refresh()


def test_a_rolled_back_savepoint_leaves_no_job(onlooker):
    with transaction.atomic():
        kept = add.enqueue(1, 2)
        with pytest.raises(ZeroDivisionError), transaction.atomic():  # noqa: PT012
            add.enqueue(3, 4)
            raise ZeroDivisionError
        with pytest.raises(IntegrityError), transaction.atomic():  # noqa: PT012
            add.enqueue(5, 6)
            Effect.objects.create(what=None)

    assert list(rows()) == [kept.pk]
    assert onlooker() == 1


def fails(request):
    with transaction.atomic():
        Effect.objects.create(what="order")
    add.enqueue(1, 2)
    if "fail" in request.GET:
        raise ZeroDivisionError
    return HttpResponse("ok")


urlpatterns = [path("order", fails)]


@pytest.mark.urls(__name__)
@pytest.mark.parametrize(("query", "status", "count"), [("", 200, 1), ("?fail", 500, 0)])
def test_in_a_view_with_atomic_requests_a_job_shares_the_requests_fate(
    onlooker, monkeypatch, query, status, count
):
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    response = Client(raise_request_exception=False).get(f"/order{query}")

    assert response.status_code == status
    assert (Effect.objects.count(), onlooker()) == (count, count)


# ── From async code ───────────────────────────────────────────────────────────────────────────────────────


async def aenqueued():
    return await add.aenqueue(1, y=2)


def test_aenqueue_does_what_enqueue_does(db):
    handle = async_to_sync(aenqueued)()

    assert handle.payload == {"args": [1], "kwargs": {"y": 2}}
    assert list(rows()) == [handle.pk]


def test_aenqueue_refuses_what_enqueue_refuses(db):
    async def enqueue():
        await add.aenqueue(1)

    assert problem_of(InvalidArguments, async_to_sync(enqueue)) == (
        "tests.jobs.add(x: 'int', y: 'int') -> 'int': missing a required argument: 'y'."
    )


def test_aenqueue_takes_part_in_the_transaction_of_sync_code_around_it(db):
    with pytest.raises(ZeroDivisionError), transaction.atomic():  # noqa: PT012
        async_to_sync(aenqueued)()
        raise ZeroDivisionError

    assert rows() == {}


def test_enqueue_in_a_coroutine_is_djangos_error_for_sync_code(transactional_db):
    async def enqueue():
        add.enqueue(1, 2)

    with pytest.raises(Exception, match="You cannot call this from an async context"):
        async_to_sync(enqueue)()


# ── The queue on another database ─────────────────────────────────────────────────────────────────────────

ELSEWHERE = (
    "Job 'tests.jobs.add' is enqueued on 'default' while a transaction is open on 'other': it will exist even"
    " if that transaction is rolled back. Enqueue it with transaction.on_commit(..., using='other')."
)


def enqueue() -> None:
    add.enqueue(1, 2)


def enqueue_many() -> None:
    add.enqueue_many([((1, 2), {})])


def aenqueue() -> None:
    async def aenqueue() -> None:
        await add.aenqueue(1, 2)  # the call

    async_to_sync(aenqueue)()


def aenqueue_in_a_task() -> None:
    import asyncio

    async def aenqueue() -> None:
        await asyncio.gather(add.aenqueue(1, 2))  # the call

    async_to_sync(aenqueue)()


def enqueue_with_options() -> None:
    add.using(queue="mail").enqueue(1, 2)


CALLS = [enqueue, enqueue_many, aenqueue, aenqueue_in_a_task, enqueue_with_options]


def call_site(function) -> int:
    lines, start = inspect.getsourcelines(function)
    marked = [number for number, line in enumerate(lines) if "# the call" in line]
    return start + (marked[0] if marked else 1)


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.parametrize("call", CALLS)
def test_enqueueing_beside_another_databases_transaction_warns_at_the_call(call):
    with warnings.catch_warnings(record=True) as caught, transaction.atomic(using="other"):
        warnings.simplefilter("always")
        call()

    (warning,) = caught
    assert (str(warning.message), warning.category) == (ELSEWHERE, RuntimeWarning)
    assert (warning.filename, warning.lineno) == (__file__, call_site(call))
    assert len(rows()) == 1


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.parametrize("call", CALLS)
def test_with_strict_alias_it_is_refused(settings, call):
    settings.PGJOBS = {"STRICT_ALIAS": True}

    with transaction.atomic(using="other"):
        assert problem_of(TransactionManagementError, call) == ELSEWHERE
    assert rows() == {}


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_inside_transactions_of_both_nobody_complains():
    with transaction.atomic(using="other"), transaction.atomic():
        add.enqueue(1, 2)
    with transaction.atomic():
        add.enqueue(1, 2)
    assert len(rows()) == 2


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_the_queue_lives_where_the_settings_say(settings):
    settings.PGJOBS = {"DATABASE": "other"}

    with CaptureQueriesContext(connections["default"]) as queries:
        handle = add.enqueue(1, 2)
        add.enqueue_many([((1, 2), {})])
    assert len(queries) == 0
    assert len(rows("other")) == 2
    assert handle.refresh()._state.db == "other"
    assert handle.cancel()
