"""The backend for `django.tasks`: what Django and the reference backend assert of theirs, and more."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import pickle
import subprocess
import sys
import types
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import django
import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.test import override_settings
from django.utils import timezone
from django.utils.module_loading import import_string

from django_pgjobs import DuplicateJobName, InvalidArguments, JobStopped, JobTimeout, PGJobsError, jobs
from django_pgjobs.lifecycle import Event
from django_pgjobs.models import BackgroundJob
from django_pgjobs.testing import assert_enqueued, captured_jobs, drain, run_job
from tests import jobs as plain_jobs
from tests.factories import make_job
from tests.models import Effect
from tests.workers import until

if django.VERSION < (6, 0):
    pytest.importorskip("django_tasks", reason="Django 5.2 has no tasks without the backport django-tasks.")

from django_pgjobs import backends
from django_pgjobs.backends import (
    InvalidTask,
    PostgresBackend,
    PostgresTask,
    Task,
    TaskError,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    UnstorableResult,
    signals,
    task_backends,
)
from tests import core_tasks as tasks

if django.VERSION >= (6, 0):
    from django.tasks import default_task_backend
    from django.tasks.exceptions import InvalidTaskBackend, TaskResultMismatch

    FRAMEWORK = "django.tasks"
else:
    from django_tasks import default_task_backend
    from django_tasks.exceptions import InvalidTaskBackendError as InvalidTaskBackend
    from django_tasks.exceptions import TaskResultMismatch

    FRAMEWORK = "django_tasks"

READY, RUNNING = TaskResultStatus.READY, TaskResultStatus.RUNNING
SUCCESSFUL, FAILED = TaskResultStatus.SUCCESSFUL, TaskResultStatus.FAILED
POSTGRES = "django_pgjobs.backends.PostgresBackend"
DUMMY = f"{FRAMEWORK}.backends.dummy.DummyBackend"
NO_FORWARDING = pytest.mark.skipif(
    (6, 0) <= django.VERSION < (6, 1), reason="The @task of Django 6.0 takes no options of a task_class."
)
NO_PICKLING = pytest.mark.skipif(django.VERSION < (6, 1), reason="Tasks can be pickled from Django 6.1 on.")

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "registry", dict(jobs.registry))


class Received(list[tuple[str, Any, Any]]):
    """The signals that were sent: name, sender, and the result as it was then."""

    def connect(self, name: str) -> Any:
        def receiver(sender: Any, task_result: Any, **kwargs: Any) -> None:
            self.append((name, sender, copy.deepcopy(task_result)))
            self.errors_handled.append(sys.exc_info()[0])

        return receiver

    errors_handled: list[Any]

    def names(self) -> list[str]:
        return [name for name, _, _ in self]


@pytest.fixture
def received() -> Iterator[Received]:
    received = Received()
    received.errors_handled = []
    connected = []
    for name in ("task_enqueued", "task_started", "task_finished"):
        receiver = received.connect(name)
        getattr(signals, name).connect(receiver, weak=False)
        connected.append((name, receiver))
    yield received
    for name, receiver in connected:
        getattr(signals, name).disconnect(receiver)


def tasks_setting(*, queues: Any = None, options: dict[str, Any] | None = None, **more: Any) -> Any:
    default: dict[str, Any] = {"BACKEND": POSTGRES}
    if queues is not None:
        default["QUEUES"] = queues
    if options is not None:
        default["OPTIONS"] = options
    return override_settings(TASKS={"default": default, **more})


def last_attempt(task: Any, *args: Any, **kwargs: Any) -> Any:
    """Enqueue a task with one attempt, run it, and return its result."""
    result = task.using(max_attempts=1).enqueue(*args, **kwargs)
    assert len(drain()) == 1
    result.refresh()
    return result


def assert_ready(result: Any, task: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    assert result.status == READY
    assert result.is_finished is False
    assert result.enqueued_at is not None
    assert result.started_at is None
    assert result.last_attempted_at is None
    assert result.finished_at is None
    with pytest.raises(ValueError, match="Task has not finished yet"):
        _ = result.return_value
    assert result.task == task
    assert (result.args, result.kwargs) == (args, kwargs)
    assert result.attempts == 0
    assert result.errors == []


def assert_ended(result: Any, status: Any) -> None:
    assert result.status == status
    assert result.is_finished is True
    assert result.enqueued_at <= result.started_at <= result.last_attempted_at <= result.finished_at
    assert result.attempts == 1
    if status == FAILED:
        with pytest.raises(ValueError, match="Task failed"):
            _ = result.return_value
        assert result._return_value is None


# ── The backend and its tasks ─────────────────────────────────────────────────────────────────────────────


def test_the_backend_is_ours() -> None:
    assert default_task_backend == task_backends["default"]
    assert isinstance(task_backends["default"], PostgresBackend)
    assert default_task_backend.alias == "default"
    assert default_task_backend.options == {}
    assert task_backends["second"].options == {"max_attempts": 7}


def test_it_can_do_everything() -> None:
    assert PostgresBackend.supports_defer
    assert PostgresBackend.supports_async_task
    assert PostgresBackend.supports_get_result
    assert PostgresBackend.supports_priority


@pytest.mark.parametrize("name", ["noop", "noop_bare", "noop_async"])
def test_the_decorator_makes_our_tasks(name: str) -> None:
    task = getattr(tasks, name)

    assert isinstance(task, Task)
    assert isinstance(task, PostgresTask)
    assert task.name == name
    assert task.module_path == f"tests.core_tasks.{name}"
    assert import_string(task.module_path) is task
    assert isinstance(task.get_backend(), PostgresBackend)


def test_using_changes_a_copy() -> None:
    run_after = timezone.now()

    changed = tasks.noop.using(priority=1).using(queue_name="queue-1").using(run_after=run_after)

    assert (changed.priority, changed.queue_name, changed.run_after) == (1, "queue-1", run_after)
    assert (tasks.noop.priority, tasks.noop.queue_name, tasks.noop.run_after) == (0, "default", None)
    assert changed.using(run_after=None).run_after == run_after  # None leaves an option as it is
    assert tasks.noop.using() == tasks.noop
    assert tasks.noop.using() is not tasks.noop


def test_using_another_backend() -> None:
    changed = tasks.noop.using(backend="second", queue_name="second")

    assert changed.backend == "second"
    assert changed.get_backend() is task_backends["second"]
    with pytest.raises(InvalidTaskBackend, match="The connection 'unknown' doesn't exist"):
        tasks.noop.using(backend="unknown")


def test_using_a_backend_that_cannot_be_imported() -> None:
    with (
        tasks_setting(missing={"BACKEND": "does.not.exist"}),
        pytest.raises(
            InvalidTaskBackend, match=r"Could not find backend 'does\.not\.exist': No module named"
        ),
    ):
        tasks.noop.using(backend="missing")


def test_without_any_backend_nothing_can_be_enqueued() -> None:
    with override_settings(TASKS={}), pytest.raises(InvalidTaskBackend):
        tasks.noop.enqueue()


@pytest.mark.parametrize("priority", [-100, 0, 100, 1.0])
def test_priorities_are_from_minus_100_to_100(priority: Any) -> None:
    result = tasks.noop.using(priority=priority).enqueue()

    assert BackgroundJob.objects.get(pk=result.id).priority == priority
    assert default_task_backend.get_result(result.id) == result


@pytest.mark.parametrize("priority", [-101, 101, 3.1])
def test_other_priorities_are_refused(priority: Any) -> None:
    with pytest.raises(InvalidTask, match="priority must be a whole number between -100 and 100"):
        tasks.noop.using(priority=priority)


def test_naive_times_are_refused() -> None:
    with pytest.raises(InvalidTask, match="run_after must be an aware datetime"):
        tasks.noop.using(run_after=datetime.now())


def test_times_that_no_database_has_are_refused() -> None:
    with pytest.raises(InvalidTask, match="it must be in the years 2 to 9998"):
        tasks.noop.using(run_after=datetime.max.replace(tzinfo=timezone.get_current_timezone()))


def test_queues_are_those_of_the_backend() -> None:
    with pytest.raises(InvalidTask, match="Queue 'queue-2' is not valid for backend"):
        tasks.noop.using(queue_name="queue-2")
    with tasks_setting(queues=[]):
        assert tasks.noop.using(queue_name="queue-2").queue_name == "queue-2"


def test_without_QUEUES_there_is_the_default_queue() -> None:
    with tasks_setting():
        tasks.noop.enqueue()
        with pytest.raises(InvalidTask, match="Queue 'queue-1' is not valid for backend"):
            tasks.noop.using(queue_name="queue-1")


def test_queue_names_that_no_row_can_have_are_refused() -> None:
    with tasks_setting(queues=[]), pytest.raises(InvalidTask, match="must be a text of 1 to 255 characters"):
        tasks.noop.using(queue_name="x" * 256)


@pytest.mark.parametrize("method", ["enqueue", "aenqueue"])
def test_a_task_is_validated_again_at_enqueue(method: str) -> None:
    with tasks_setting(queues=["unknown"]):
        task = tasks.noop.using(queue_name="unknown")
    enqueue = getattr(task, method)

    with pytest.raises(InvalidTask, match="Queue 'unknown' is not valid for backend"):
        (async_to_sync(enqueue) if method == "aenqueue" else enqueue)()

    assert not BackgroundJob.objects.exists()


@pytest.mark.parametrize("function", [any, lambda: None, Received().names])
def test_only_functions_of_modules_are_tasks(function: Any) -> None:
    with pytest.raises(InvalidTask, match="Task function must be defined at a module level"):
        tasks.task()(function)


def test_methods_are_refused() -> None:
    with pytest.raises(InvalidTask, match="it is a method"):
        tasks.task()(Received.names)


def test_a_context_needs_a_parameter_of_that_name() -> None:
    with pytest.raises(InvalidTask, match="does not have a first argument of 'context'"):
        tasks.task(takes_context=True)(tasks.meaning_of_life.func)


def test_calling_a_task_runs_its_function() -> None:
    assert tasks.meaning_of_life.call() == 42
    assert tasks.meaning_of_life_async.call() == 42
    assert async_to_sync(tasks.meaning_of_life.acall)() == 42
    assert async_to_sync(tasks.meaning_of_life_async.acall)() == 42


@NO_PICKLING
def test_tasks_and_results_can_be_pickled() -> None:
    result = tasks.with_options.enqueue()

    assert pickle.loads(pickle.dumps(tasks.noop)) == tasks.noop
    assert pickle.loads(pickle.dumps(result)) == result


@NO_PICKLING
@pytest.mark.parametrize("path", ["does.not.exist.fake_task", "builtins.any"])
def test_only_tasks_are_unpickled(path: str) -> None:
    with pytest.raises(ValueError, match=f"Expected '{path}' to point to a Task instance"):
        PostgresTask._reconstruct({"func": path})


def test_run_after_is_no_option_of_the_decorators() -> None:
    with pytest.raises(TypeError, match="run_after"):
        tasks.task(run_after=timezone.now())(tasks.noop.func)
    with pytest.raises(TypeError, match="run_after"):
        backends.task(run_after=timezone.now())


# ── Names ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_task_is_a_job_function_under_its_module_path() -> None:
    function = jobs.find("tests.core_tasks.noop")

    assert function is not None
    assert function.func is tasks.noop.func
    assert jobs.find("tests.core_tasks.noop_async").is_async


def test_a_function_that_is_decorated_again_is_the_same_task() -> None:
    again = tasks.task()(tasks.noop.func)

    assert again == tasks.noop
    assert jobs.find("tests.core_tasks.noop").task is tasks.noop


def test_two_functions_of_one_name_are_refused() -> None:
    other = types.FunctionType(tasks.noop.func.__code__, tasks.noop.func.__globals__, "noop")
    other.__qualname__ = "noop"

    with pytest.raises(DuplicateJobName, match=r"Two job functions are named 'tests\.core_tasks\.noop'"):
        tasks.task()(other)


def test_a_function_cannot_be_a_task_and_a_job() -> None:
    with pytest.raises(DuplicateJobName):
        tasks.task()(plain_jobs.add.func)


def test_one_function_cannot_be_run_by_two_rules() -> None:
    with pytest.raises(DuplicateJobName):
        backends.task(timeout=5)(tasks.noop.func)


def test_a_task_of_another_backend_is_made_known_when_it_comes_to_ours() -> None:
    with override_settings(TASKS={"default": {"BACKEND": DUMMY}, "ours": {"BACKEND": POSTGRES}}):
        source = types.FunctionType((lambda: 7).__code__, globals(), "seven")
        source.__qualname__ = "seven"
        foreign = tasks.task()(source)
        assert not isinstance(foreign, PostgresTask)
        assert jobs.find(foreign.module_path) is None

        result = foreign.using(backend="ours").enqueue()
        assert drain().errors == []

        result.refresh()
        assert result.return_value == 7
        assert result.backend == "ours"


def test_a_former_name_still_finds_the_task() -> None:
    job = make_job(job_name="tests.old_tasks.with_options", payload={})

    assert tasks.with_options.get_result(str(job.pk)).task.func is tasks.with_options.func
    assert drain().completed == 1


# ── Enqueueing ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("task", [tasks.noop, tasks.noop_async], ids=lambda task: task.name)
def test_enqueue(
    task: Any, received: Received, django_assert_num_queries: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with django_assert_num_queries(1), caplog.at_level("DEBUG", logger=FRAMEWORK):
        result = task.enqueue(1, two=3)

    assert_ready(result, task, [1], {"two": 3})
    assert type(result) is TaskResult
    assert type(result.id) is str
    assert len(result.id) < 64
    assert received == [("task_enqueued", PostgresBackend, result)]
    (record,) = caplog.records
    assert "enqueued" in record.getMessage()
    assert f"id={result.id}" in record.getMessage()
    job = BackgroundJob.objects.get(pk=result.id)
    assert (job.job_name, job.queue_name, job.max_attempts) == (task.module_path, "default", 3)
    assert job.payload == {"args": [1], "kwargs": {"two": 3}}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("task", [tasks.noop, tasks.noop_async], ids=lambda task: task.name)
def test_aenqueue(task: Any, received: Received) -> None:
    result = async_to_sync(task.aenqueue)()

    assert_ready(result, task, [], {})
    assert received == [("task_enqueued", PostgresBackend, result)]


def test_the_backend_enqueues_by_itself() -> None:
    result = default_task_backend.enqueue(tasks.meaning_of_life, [], {})

    assert_ready(result, tasks.meaning_of_life, [], {})


def test_enqueue_does_not_wait_for_the_commit_and_joins_the_transaction(transactional_db: None) -> None:
    def seen_by_others() -> int:
        other = connections.create_connection("default")
        try:
            with other.cursor() as cursor:
                cursor.execute("SELECT count(*) FROM background_jobs")
                return cursor.fetchone()[0]
        finally:
            other.close()

    with transaction.atomic():
        result = tasks.noop.enqueue()
        assert result.enqueued_at is not None
        assert BackgroundJob.objects.count() == 1
        assert seen_by_others() == 0
    assert seen_by_others() == 1

    with transaction.atomic():
        tasks.noop.enqueue()
        transaction.set_rollback(True)
    assert seen_by_others() == 1


def test_a_receiver_that_raises_is_heard_by_who_enqueues() -> None:
    def refuse(**kwargs: Any) -> None:
        raise RuntimeError("no")

    signals.task_enqueued.connect(refuse)
    try:
        with pytest.raises(RuntimeError, match="no"), transaction.atomic():
            tasks.noop.enqueue()
    finally:
        signals.task_enqueued.disconnect(refuse)

    assert not BackgroundJob.objects.exists()


@pytest.mark.parametrize(
    "value",
    [datetime(2026, 1, 2), {1, 2}, object(), float("nan"), "\x00", "\ud800", {1: 2}, {(1,): 2}, b"\xff"],
    ids=lambda value: type(value).__name__,
)
def test_arguments_that_are_not_json_are_refused(value: Any, django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(0), pytest.raises(TypeError, match=r"args\[0\]") as raised:
        tasks.noop.enqueue(value)

    assert raised.type is InvalidArguments
    with pytest.raises(InvalidArguments, match=r"kwargs\['value'\]"):
        async_to_sync(tasks.noop.aenqueue)(value=value)


def test_arguments_are_normalized_as_by_django() -> None:
    result = tasks.noop.enqueue((1, 2), range(2), b"text", {"a": (3,)}, key=types.MappingProxyType({"b": 1}))

    assert result.args == [[1, 2], [0, 1], "text", {"a": [3]}]
    assert result.kwargs == {"key": {"b": 1}}
    assert default_task_backend.get_result(result.id) == result


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidArguments, match=r"tests\.core_tasks\.check_context"):
        tasks.check_context.enqueue()
    with pytest.raises(InvalidArguments, match="unexpected keyword"):
        tasks.meaning_of_life.enqueue(x=1)

    tasks.check_context.enqueue(1)  # the context is not an argument


def test_run_after_queue_and_priority_are_in_the_row() -> None:
    run_after = timezone.now() + timedelta(hours=1)

    result = tasks.noop.using(run_after=run_after, queue_name="queue-1", priority=5).enqueue()

    job = BackgroundJob.objects.get(pk=result.id)
    assert (job.run_at, job.queue_name, job.priority) == (run_after, "queue-1", 5)
    assert default_task_backend.get_result(result.id) == result
    assert len(drain()) == 0
    assert result.task.run_after == run_after


def test_a_time_that_is_past_is_accepted() -> None:
    result = tasks.noop.using(run_after=timezone.now() - timedelta(days=1)).enqueue()

    assert default_task_backend.get_result(result.id) == result
    assert drain().completed == 1


@override_settings(USE_TZ=False)
def test_without_time_zones_times_are_naive() -> None:
    run_after = datetime.now() + timedelta(hours=1)

    soon, later = tasks.noop.enqueue(), tasks.noop.using(run_after=run_after).enqueue()

    assert default_task_backend.get_result(soon.id).task.run_after is None
    assert default_task_backend.get_result(later.id).task.run_after == run_after
    assert soon.enqueued_at.tzinfo is None


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_transaction_on_another_database_is_warned_about() -> None:
    with transaction.atomic(using="other"):
        with pytest.warns(RuntimeWarning, match="while a transaction is open on 'other'") as warned:
            tasks.noop.enqueue()
        assert warned[0].filename == __file__


# ── Results ───────────────────────────────────────────────────────────────────────────────────────────────


def test_get_result(django_assert_num_queries: Any) -> None:
    result = default_task_backend.enqueue(tasks.noop, (), {})

    with django_assert_num_queries(1):
        assert default_task_backend.get_result(result.id) == result
    assert tasks.noop.get_result(result.id) == result


@pytest.mark.django_db(transaction=True)
def test_aget_result() -> None:
    result = async_to_sync(default_task_backend.aenqueue)(tasks.noop, (), {})

    assert async_to_sync(default_task_backend.aget_result)(result.id) == result
    assert async_to_sync(tasks.noop.aget_result)(result.id) == result


def test_refreshing_changes_nothing_while_nothing_happens() -> None:
    result = tasks.noop.enqueue()
    before = dataclasses.asdict(result)

    result.refresh()
    assert dataclasses.asdict(result) == before
    async_to_sync(result.arefresh)()
    assert dataclasses.asdict(result) == before


@pytest.mark.parametrize("method", ["refresh", "arefresh"])
def test_refresh(method: str, django_assert_num_queries: Any) -> None:
    result = tasks.meaning_of_life.enqueue()
    assert drain().completed == 1
    assert_ready(result, tasks.meaning_of_life, [], {})

    with django_assert_num_queries(1):
        (result.refresh if method == "refresh" else async_to_sync(result.arefresh))()

    assert_ended(result, SUCCESSFUL)
    assert result.return_value == 42
    assert result.worker_ids == [str(uuid.UUID(int=0))]  # of drain()
    assert result.errors == []


@pytest.mark.parametrize(
    "id",
    [
        *("123456", "0", "-1", "007", "1.0", "", " 1", "1 ", "١", "abc", "9" * 30, str(2**63), "\x00"),
        *(str(uuid.UUID(int=5)), None, True, 1.5, uuid.UUID(int=7), 10**40),
    ],
    ids=repr,
)
def test_an_id_that_is_none_does_not_exist(id: Any) -> None:
    for backend_or_task in (default_task_backend, tasks.noop):
        with pytest.raises(TaskResultDoesNotExist):
            backend_or_task.get_result(id)
    with pytest.raises(TaskResultDoesNotExist):
        async_to_sync(default_task_backend.aget_result)(id)


def test_a_result_of_another_task_is_a_mismatch() -> None:
    result = tasks.noop_async.enqueue()

    with pytest.raises(TaskResultMismatch, match="Task does not match"):
        tasks.noop.get_result(result.id)
    with pytest.raises(TaskResultMismatch, match="Task does not match"):
        async_to_sync(tasks.noop.aget_result)(result.id)


def test_a_pruned_result_does_not_exist() -> None:
    result = last_attempt(tasks.noop)
    BackgroundJob.objects.filter(pk=result.id).update(updated_at=timezone.now() - timedelta(days=9))

    call_command("prunejobs", verbosity=0)

    with pytest.raises(TaskResultDoesNotExist):
        result.refresh()


def test_without_retention_a_success_leaves_no_result(settings: Any) -> None:
    settings.PGJOBS = {"COMPLETED_RETENTION": 0}
    success, failure = tasks.noop.enqueue(), tasks.give_up.enqueue()
    assert len(drain()) == 2

    with pytest.raises(TaskResultDoesNotExist):
        success.refresh()
    failure.refresh()
    assert failure.status == FAILED


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("queued", READY),
        ("processing", RUNNING),
        ("completed", SUCCESSFUL),
        ("failed", FAILED),
        ("cancelled", FAILED),
    ],
)
def test_every_status_has_a_counterpart(status: str, expected: Any) -> None:
    job = make_job(status, job_name="tests.core_tasks.noop")

    result = default_task_backend.get_result(str(job.pk))

    assert result.status == expected
    assert result.is_finished is (expected in (SUCCESSFUL, FAILED))
    assert (result.finished_at is not None) is result.is_finished
    assert (result.started_at is not None) is (status in ("processing", "completed", "failed"))


def test_a_cancelled_task_has_failed_and_says_why() -> None:
    result = tasks.noop.enqueue()
    assert BackgroundJob.objects.get(pk=result.id).cancel()

    result.refresh()

    assert result.status == FAILED
    assert [(one.exception_class, one.traceback) for one in result.errors] == [
        (JobStopped, "The job was cancelled.\n")
    ]
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value


def test_a_task_that_a_person_retries_starts_anew_and_keeps_its_errors() -> None:
    result = last_attempt(tasks.value_error)
    assert BackgroundJob.objects.get(pk=result.id).retry()

    result.refresh()

    assert (result.status, result.attempts, result.finished_at) == (READY, 0, None)
    assert len(result.errors) == 1
    assert len(drain()) == 1
    result.refresh()
    assert (result.status, result.attempts, len(result.errors)) == (FAILED, 1, 2)


def test_each_failed_attempt_is_an_error_and_each_attempt_has_a_worker() -> None:
    first, second = str(uuid.uuid4()), uuid.uuid4()
    job = make_job(
        "processing",
        job_name="tests.core_tasks.noop",
        attempts=4,
        worker_id=second,
        errors=[
            {"attempt": 1, "worker": first, "exception": "builtins.ValueError", "traceback": "tb\n"},
            {"attempt": 3, "worker": None, "exception": "", "message": "The worker died.", "traceback": ""},
        ],
    )

    result = default_task_backend.get_result(str(job.pk))

    assert result.attempts == 4
    assert result.worker_ids == [first, "", "", str(second)]
    assert [(one.exception_class, one.traceback) for one in result.errors] == [
        (ValueError, "tb\n"),
        (PGJobsError, "The worker died.\n"),
    ]


def test_the_class_of_an_error_must_be_an_exception() -> None:
    with pytest.raises(ValueError, match="does not reference a valid exception"):
        _ = TaskError(exception_class_path="subprocess.run", traceback="").exception_class
    with pytest.raises(ImportError):
        _ = TaskError(exception_class_path="does.not.exist", traceback="").exception_class


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("subprocess.check_output", "check_output"),
        ("missing.func", "func"),
        ("tests.core_tasks.not_found", "not_found"),
        ("tests.core_tasks.missing.not_found", "not_found"),
        ("tests.scratch.scratch_database", "scratch_database"),
        ("unexpected", "unexpected"),
    ],
)
def test_code_that_is_gone_has_a_result_and_is_never_imported(name: str, expected: str) -> None:
    job = make_job("failed", job_name=name, payload={"args": [["exit", "1"]], "kwargs": {"a": 1}})

    result = default_task_backend.get_result(str(job.pk))

    assert (result.task.name, result.task.module_path) == (expected, name)
    assert (result.args, result.kwargs) == ([["exit", "1"]], {"a": 1})
    assert result.status == FAILED
    assert result.errors[0].exception_class is ValueError
    result.refresh()
    for use in (result.task.enqueue, result.task.call):
        with pytest.raises(InvalidTask):
            use()
    with pytest.raises(TaskResultMismatch):
        tasks.noop.get_result(result.id)


def test_a_row_that_nobody_could_have_enqueued_has_a_result() -> None:
    with tasks_setting(queues=[]):
        job = make_job(job_name="tests.core_tasks.noop", queue_name="")

        result = default_task_backend.get_result(str(job.pk))

        assert (result.status, result.task.module_path) == (READY, "tests.core_tasks.noop")
        assert tasks.noop.get_result(result.id).task.func is tasks.noop.func


def test_what_a_row_names_is_not_imported() -> None:
    make_job(job_name="this")  # which prints a poem when it is imported

    ran = drain()

    assert ran.count(Event.PARK) == 1
    assert "this" not in sys.modules


def test_jobs_can_be_read_like_tasks() -> None:
    job = plain_jobs.add.enqueue(1, y=2)
    drain()

    result = default_task_backend.get_result(str(job.pk))

    assert_ended(result, SUCCESSFUL)
    assert result.return_value == 3
    assert (result.args, result.kwargs) == ([1], {"y": 2})
    assert result.task.module_path == "tests.jobs.add"
    assert result.task.func is plain_jobs.add.func
    with pytest.raises(InvalidTask, match="can only be read"):
        result.task.enqueue(1, 2)


@pytest.mark.parametrize(
    "columns",
    [
        {"payload": 5},
        {"payload": {"args": {}, "kwargs": []}},
        {"payload": {"args": ["\ud83d\ude00"]}, "errors": {"a": 1}, "metadata": []},
        {"errors": [1, None, {"exception": 5, "attempt": [], "worker": {}}]},
        {"attempts": 2_000_000_000, "max_attempts": 2_000_000_000},
    ],
    ids=repr,
)
def test_rows_that_anybody_may_have_written_can_be_read(columns: dict[str, Any]) -> None:
    job = make_job("failed", job_name="tests.core_tasks.noop", **columns)

    result = default_task_backend.get_result(str(job.pk))

    assert isinstance(result.args, list)
    assert isinstance(result.kwargs, dict)


# ── Running ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("task", [tasks.noop, tasks.noop_async], ids=lambda task: task.name)
def test_a_task_that_runs(task: Any, received: Received, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger=FRAMEWORK):
        result = last_attempt(task, 1, two=3)

    assert_ended(result, SUCCESSFUL)
    assert result.return_value is None
    assert result.task.func is task.func
    assert (result.args, result.kwargs) == ([1], {"two": 3})
    assert received.names() == ["task_enqueued", "task_started", "task_finished"]
    assert {sender for _, sender, _ in received} == {PostgresBackend}
    started, finished = received[1][2], received[2][2]
    assert (started.id, started.status, started.attempts, started.backend) == (
        result.id,
        RUNNING,
        1,
        "default",
    )
    assert started.enqueued_at == result.enqueued_at
    assert started.started_at == started.last_attempted_at == result.started_at
    assert started.worker_ids == result.worker_ids
    assert started.finished_at is None
    assert (finished.id, finished.status) == (result.id, SUCCESSFUL)
    assert finished.finished_at is not None
    lines = [record.getMessage() for record in caplog.records if record.name == FRAMEWORK]
    assert len(lines) == 3
    assert all(f"id={result.id} path={task.module_path}" in line for line in lines)
    assert "state=RUNNING" in lines[1]
    assert "state=SUCCESSFUL" in lines[2]
    assert "None" not in "".join(lines)
    assert [record.levelname for record in caplog.records if record.name == FRAMEWORK][1:] == ["INFO"] * 2


@pytest.mark.parametrize(
    ("task", "exception", "message"),
    [
        (tasks.value_error, ValueError, "This task failed due to ValueError"),
        (tasks.value_error_async, ValueError, "This task failed due to ValueError"),
        (tasks.system_exit, SystemExit, "This task failed due to SystemExit"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_task_that_raises(
    task: Any, exception: Any, message: str, received: Received, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", logger=FRAMEWORK):
        result = last_attempt(task)

    assert_ended(result, FAILED)
    (error,) = result.errors
    assert error.exception_class is exception
    assert error.traceback.startswith("Traceback (most recent call last):\n")
    assert error.traceback.endswith(f"{exception.__name__}: {message}\n")
    assert "backends.py" not in error.traceback
    assert received.names() == ["task_enqueued", "task_started", "task_finished"]
    finished = received[2][2]
    assert finished.status == FAILED
    assert finished.errors == result.errors
    assert received.errors_handled[2] is exception
    record = next(record for record in caplog.records if "state=FAILED" in record.getMessage())
    assert record.levelname == "ERROR"
    assert record.exc_info is not None
    assert record.exc_info[0] is exception
    assert message in str(record.exc_info[1])


def test_ctrl_c_ends_who_runs_it_and_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    tasks.keyboard_interrupt.enqueue()

    with pytest.raises(KeyboardInterrupt), caplog.at_level("ERROR", logger=FRAMEWORK):
        drain()

    assert not caplog.records


def test_an_exception_of_an_exception() -> None:
    result = last_attempt(tasks.complex_exception)

    assert_ended(result, FAILED)
    assert result.errors[0].exception_class is ValueError
    assert 'ValueError(ValueError("This task failed"))' in result.errors[0].traceback


def test_a_result_that_is_not_json_makes_the_task_fail_at_once(received: Received) -> None:
    result = tasks.unstorable.enqueue()
    assert drain().count(Event.BURY) == 1

    result.refresh()

    assert_ended(result, FAILED)
    assert result.errors[0].exception_class is UnstorableResult
    assert issubclass(UnstorableResult, TypeError)
    assert "function is not JSON" in result.errors[0].traceback
    assert received[-1][2].status == FAILED


def test_results_are_normalized_as_by_django(received: Received) -> None:
    result = last_attempt(tasks.bytes_and_ranges)

    assert result.return_value == {"text": "é", "numbers": [0, 1, 2], "pair": [1, 2]}
    assert received[-1][2]._return_value == result.return_value


def test_a_task_that_is_retried_is_ready_again_and_has_not_finished(received: Received) -> None:
    result = tasks.value_error.enqueue()
    assert drain().count(Event.FAIL) == 1

    result.refresh()

    assert result.status == READY
    assert result.attempts == 1
    assert len(result.errors) == 1
    assert result.started_at is not None
    assert result.finished_at is None
    assert default_task_backend.get_result(result.id).task.run_after > timezone.now()
    assert received.names() == ["task_enqueued", "task_started"]


def test_retries_until_it_succeeds(received: Received) -> None:
    result = tasks.succeed_at_second.enqueue()
    assert drain().errors[0].startswith("tests.core_tasks.succeed_at_second")

    result.refresh()

    assert result.status == SUCCESSFUL
    assert result.return_value == 1  # the errors that the second attempt saw
    assert result.attempts == 2
    assert len(result.errors) == 1
    assert received.names() == ["task_enqueued", "task_started", "task_started", "task_finished"]
    assert [one.attempts for _, _, one in received] == [0, 1, 2, 2]


def test_wishes_are_granted_to_tasks() -> None:
    snoozed, given_up = tasks.snooze.enqueue(), tasks.give_up.enqueue()
    drain()

    snoozed.refresh()
    given_up.refresh()

    assert (snoozed.status, snoozed.attempts) == (READY, 0)
    assert (given_up.status, given_up.attempts) == (FAILED, 1)
    assert given_up.errors[0].traceback.endswith("enough\n")


@pytest.mark.parametrize("task", [tasks.own_id, tasks.own_id_async], ids=lambda task: task.name)
def test_the_context_has_the_result(task: Any) -> None:
    result = last_attempt(task)

    assert result.return_value == result.id


def test_the_context_tells_the_attempt() -> None:
    result = last_attempt(tasks.check_context, 1, word="hello")

    assert result.return_value == [RUNNING, 1, True, "hello"]


def test_receivers_that_raise_do_not_harm_a_run(caplog: pytest.LogCaptureFixture) -> None:
    def fail(**kwargs: Any) -> None:
        raise RuntimeError("receiver")

    def leave(**kwargs: Any) -> None:
        raise SystemExit("receiver")

    for signal in (signals.task_started, signals.task_finished):
        signal.connect(fail)
    signals.task_finished.connect(leave)
    try:
        results = [last_attempt(tasks.meaning_of_life)]
        results += [last_attempt(tasks.meaning_of_life_async)]
    finally:
        for signal in (signals.task_started, signals.task_finished):
            signal.disconnect(fail)
        signals.task_finished.disconnect(leave)

    assert [result.return_value for result in results] == [42, 42]
    assert len([record for record in caplog.records if record.name == "django.dispatch"]) == 4
    assert caplog.text.count("its end was not signalled to all") == 2


def test_a_task_costs_no_query_more_than_a_job(django_assert_num_queries: Any) -> None:
    def queries(enqueue: Any) -> int:
        enqueue()
        with connection.execute_wrapper(count):
            seen.clear()
            assert drain().completed == 1
        return len(seen)

    seen: list[str] = []

    def count(execute: Any, sql: Any, *args: Any) -> Any:
        seen.append(str(sql))
        return execute(sql, *args)

    assert queries(tasks.noop.enqueue) == queries(lambda: plain_jobs.add.enqueue(1, 2))
    assert queries(tasks.own_id.enqueue) == queries(tasks.noop.enqueue) + 1


def test_tasks_that_are_not_for_a_queue_wait() -> None:
    result = tasks.noop.using(queue_name="queue-1").enqueue()

    assert len(drain(queue="default")) == 0
    assert drain(queue="queue-1").completed == 1
    result.refresh()
    assert result.status == SUCCESSFUL


def test_a_higher_priority_goes_first_and_what_is_not_due_waits() -> None:
    later = tasks.noop.using(priority=100, run_after=timezone.now() + timedelta(hours=1)).enqueue()
    low, high = tasks.noop.using(priority=-5).enqueue(), tasks.noop.using(priority=5).enqueue()

    ran = drain()

    assert [str(run.claim.id) for run in ran.runs] == [high.id, low.id]
    later.refresh()
    assert later.status == READY


# ── Options of jobs ───────────────────────────────────────────────────────────────────────────────────────


def test_the_options_of_a_task_are_those_of_its_job_function() -> None:
    function = jobs.find("tests.core_tasks.with_options")

    assert function.backoff == (1, 2)
    assert function.timeout == 30
    assert function.give_up_on == (KeyError,)
    assert function.retry_on == (OSError, RuntimeError)
    assert function.rerun_if_lost is False
    assert function.aliases == ("tests.old_tasks.with_options",)
    job = BackgroundJob.objects.get(pk=tasks.with_options.enqueue().id)
    assert (job.max_attempts, job.rerun_if_lost) == (9, False)


def test_OPTIONS_are_for_tasks_that_do_not_say_it() -> None:
    source = types.FunctionType((lambda: 7).__code__, globals(), "seven")
    source.__qualname__ = "seven"
    with tasks_setting(options={"timeout": 60, "backoff": [1, 2], "max_attempts": 9, "give_up_on": OSError}):
        seven = backends.task(backoff=5)(source)
        function = jobs.find(seven.module_path)
        job = BackgroundJob.objects.get(pk=seven.enqueue().id)

    assert (function.timeout, function.backoff, function.give_up_on) == (60, 5, (OSError,))
    assert job.max_attempts == 9


def renamed(function: Any, name: str) -> Any:
    """The function under a name of its own, as if the module had it."""
    again = types.FunctionType(function.__code__, globals(), name)
    again.__qualname__ = name
    return again


def test_a_unique_task_returns_the_result_of_the_job_that_is_there(
    received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    unique = backends.task(unique=["x"], takes_context=True)(renamed(lambda context, x, y: x, "unique"))
    monkeypatch.setattr(sys.modules[__name__], "unique", unique, raising=False)  # so that it can be copied

    first, second = unique.enqueue(1, 2), unique.enqueue(y=3, x=1)

    assert (second.id, second.status, second.args) == (first.id, READY, [1, 2])
    assert received.names() == ["task_enqueued"]
    make_processing = BackgroundJob.objects.filter(pk=first.id).update(status="processing")
    assert (make_processing, unique.enqueue(1, 2).status) == (1, RUNNING)
    assert async_to_sync(unique.aenqueue)(1, 2).id == first.id
    assert unique.enqueue(2, 2).id != first.id
    assert received.names() == ["task_enqueued"] * 2


def test_a_task_is_debounced_and_then_takes_no_run_after() -> None:
    pushed = backends.task(unique=("x",), debounce=30, max_wait=60)(renamed(lambda x, y: x, "pushed"))

    first, second = pushed.enqueue(1, 2), pushed.enqueue(1, 3)

    assert (second.id, second.args) == (first.id, [1, 3])
    assert second.task.run_after > first.enqueued_at
    with pytest.raises(InvalidTask, match="but debounce says when its jobs run"):
        pushed.using(run_after=timezone.now()).enqueue(1, 2)


def test_what_cannot_work_about_a_unique_task_is_refused() -> None:
    with pytest.raises(InvalidTask, match="unique names 'context', which is not a parameter"):
        backends.task(unique="context", takes_context=True)(renamed(lambda context: 1, "wrong"))
    with pytest.raises(InvalidTask, match="max_wait is 5, which needs debounce= as well"):
        backends.task(max_wait=5)(renamed(lambda: 1, "wrong"))


def test_tasks_with_options_can_be_hashed_and_compared() -> None:
    again = backends.task(
        backoff=(1, 2), timeout=30, give_up_on=[KeyError], retry_on=[OSError, RuntimeError],
        rerun_if_lost=False, aliases="tests.old_tasks.with_options",
    )(tasks.with_options.func)  # fmt: skip

    assert again != tasks.with_options  # which has more attempts
    assert again.using(max_attempts=9) == tasks.with_options
    assert hash(again.using(max_attempts=9)) == hash(tasks.with_options)


@pytest.mark.parametrize(("kind", "event"), [("key", Event.BURY), ("os", Event.FAIL), ("value", Event.BURY)])
def test_exceptions_decide_as_in_jobs(kind: str, event: Event) -> None:
    tasks.with_options.enqueue(kind)

    assert drain().count(event) == 1


def test_attempts_can_be_set_for_one_call() -> None:
    result = tasks.with_options.using(max_attempts=2, priority=3).enqueue()

    job = BackgroundJob.objects.get(pk=result.id)
    assert (job.max_attempts, job.priority) == (2, 3)
    assert tasks.with_options.using(priority=3).max_attempts == 9


@NO_FORWARDING
def test_the_decorator_of_django_takes_the_options_of_jobs() -> None:
    task = tasks.task(max_attempts=4)(tasks.noop.func)

    assert task.max_attempts == 4
    with pytest.raises(TypeError, match="unknown_option"):
        tasks.task(unknown_option=1)(tasks.noop.func)


def test_our_decorator_refuses_what_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="@task has no option 'unknown'"):
        backends.task(unknown=1)


def test_our_decorator_leaves_options_out_for_other_backends() -> None:
    with override_settings(TASKS={"default": {"BACKEND": DUMMY}}):
        task = backends.task(max_attempts=4)(tasks.noop.func)

    assert type(task) is Task


@pytest.mark.parametrize(
    ("option", "value"), [("max_attempts", 0), ("timeout", -1), ("backoff", "soon"), ("give_up_on", 5)]
)
def test_options_that_cannot_work_are_refused(option: str, value: Any) -> None:
    source = types.FunctionType((lambda: 7).__code__, globals(), "seven")
    source.__qualname__ = "seven"

    with pytest.raises(InvalidTask):
        backends.task(**{option: value})(source)


def test_atomic_tasks(received: Received) -> None:
    done, undone = tasks.atomic_effect.enqueue("kept"), tasks.atomic_effect.enqueue("lost", fail=True)
    unstorable = tasks.atomic_unstorable.enqueue("lost, too")
    drain()

    assert [effect.what for effect in Effect.objects.all()] == ["kept"]
    for result in (done, undone, unstorable):
        result.refresh()
    assert (done.status, done.return_value) == (SUCCESSFUL, "kept")
    assert (undone.status, unstorable.status) == (READY, FAILED)
    finished = [one for name, _, one in received if name == "task_finished"]
    assert [(one.id, one.status, one._return_value) for one in finished] == [
        (done.id, SUCCESSFUL, "kept"),
        (unstorable.id, FAILED, None),
    ]


# ── Two backends ──────────────────────────────────────────────────────────────────────────────────────────


def test_backends_share_the_table_and_not_their_results(received: Received) -> None:
    first, second = tasks.noop.enqueue(), tasks.of_second.enqueue()
    assert drain().completed == 2

    assert task_backends["second"].get_result(second.id).return_value == "second"
    assert task_backends["second"].get_result(second.id).backend == "second"
    for backend, other in ((task_backends["second"], first), (default_task_backend, second)):
        with pytest.raises(TaskResultDoesNotExist):
            backend.get_result(other.id)
    ended = {one.id: one.backend for name, _, one in received if name == "task_finished"}
    assert ended == {first.id: "default", second.id: "second"}


def test_a_task_that_is_lent_to_another_backend_belongs_to_it(received: Received) -> None:
    result = tasks.own_id.using(backend="second", queue_name="second").enqueue()
    assert drain().completed == 1

    result.refresh()
    assert result.return_value == result.id
    assert tasks.own_id.using(backend="second", queue_name="second").get_result(result.id) == result
    assert {one.backend for _, _, one in received} == {"second"}
    assert BackgroundJob.objects.get(pk=result.id).max_attempts == 7  # the OPTIONS of its backend
    with pytest.raises(TaskResultDoesNotExist):
        tasks.own_id.get_result(result.id)


def test_a_broken_backend_beside_ours_harms_no_run(received: Received) -> None:
    result = tasks.meaning_of_life.using(queue_name="queue-1").enqueue()
    with tasks_setting(queues=["default"], broken={}, missing={"BACKEND": "does.not.exist"}):
        assert drain().completed == 1

    result.refresh()
    assert result.return_value == 42


def test_a_second_database_is_refused() -> None:
    with tasks_setting(options={"database": "other"}):
        expected = r"TASKS\['default'\]: OPTIONS\['database'\] is 'other', but the queue lives in 'default'"
        with pytest.raises(ImproperlyConfigured, match=expected):
            tasks.noop.enqueue()
        with pytest.raises(ImproperlyConfigured, match=expected):
            default_task_backend.get_result("1")
        (report,) = default_task_backend.check()
    assert report.id == "django_pgjobs.E010"
    with tasks_setting(options={"database": "default"}):
        tasks.noop.enqueue()


# ── Checks ────────────────────────────────────────────────────────────────────────────────────────────────


def reports() -> list[tuple[str, str]]:
    return [(report.id, report.msg) for report in default_task_backend.check()]


def test_a_sound_backend_has_nothing_to_report() -> None:
    assert reports() == []
    with tasks_setting(options={"max_attempts": 5, "backoff": [1, 60], "timeout": timedelta(minutes=1)}):
        assert reports() == []


def test_options_are_checked() -> None:
    with tasks_setting(
        options={"max_attemps": 5, "id_function": "uuid.uuid4", "timeout": -1, "retry_on": "x"}
    ):
        found = reports()

    assert [id for id, _ in found] == ["django_pgjobs.E010"] * 4
    assert found[0][1] == "TASKS['default']: OPTIONS has no 'max_attemps'. Did you mean 'max_attempts'?"
    assert "OPTIONS has no 'id_function'. Known: max_attempts, " in found[1][1]
    assert "OPTIONS['timeout'] is -1." in found[2][1]
    assert "retry_on must hold exception classes" in found[3][1]


def test_a_missing_app_is_reported() -> None:
    with override_settings(INSTALLED_APPS=[]):
        (report,) = default_task_backend.check()

    assert report.id == "django_pgjobs.E011"
    assert "django_pgjobs" in report.hint


def test_zero_retention_is_reported(settings: Any) -> None:
    settings.PGJOBS = {"COMPLETED_RETENTION": 0}

    ((id, message),) = reports()

    assert id == "django_pgjobs.W007"
    assert "the result of a task is gone as soon as it has succeeded" in message


def test_settings_that_cannot_be_read_are_the_matter_of_other_checks(settings: Any) -> None:
    settings.PGJOBS = {"NONSENSE": 0}

    assert reports() == []


def test_manage_py_check_asks_the_backends(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import django; from django.conf import settings; from django.core.management import call_command;"
        f"settings.TASKS = {{'default': {{'BACKEND': {POSTGRES!r}, 'OPTIONS': {{'nonsense': 1}}}}}};"
        "django.setup(); call_command('check')"
    )
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )

    assert ended.returncode == 1, ended.stderr
    assert "(django_pgjobs.E010) TASKS['default']: OPTIONS has no 'nonsense'." in ended.stderr


def test_tasks_can_be_made_before_the_apps_are_ready() -> None:
    code = (
        "from django_pgjobs.backends import task\n"
        "@task(max_attempts=2)\n"
        "def early(): pass\n"
        "import django; django.setup()\n"
        "from django_pgjobs import jobs; assert jobs.find('__main__.early').func is early.func\n"
    )
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_everything_else_works_without_any_framework_for_tasks() -> None:
    code = (
        "import sys; sys.modules['django.tasks'] = sys.modules['django_tasks'] = None;"
        "from django.conf import settings; settings.INSTALLED_APPS = ['django_pgjobs'];"
        "import django, django_pgjobs; django.setup();"
        "from django_pgjobs import testing, supervisor; from django_pgjobs.management.commands import runjobs"
    )
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_the_assertions_for_projects_know_tasks() -> None:
    tasks.give_back.enqueue((1, 2))

    (job,) = assert_enqueued(tasks.give_back, args=[[1, 2]], count=1)
    assert job.job_name == "tests.core_tasks.give_back"
    assert_enqueued(tasks.noop, count=0)


# ── Workers ───────────────────────────────────────────────────────────────────────────────────────────────

IMPORTS = {"PGJOBS_TEST_IMPORT": "tests.core_tasks"}


def ended(*results: Any) -> bool:
    for result in results:
        result.refresh()
    return all(result.is_finished for result in results)


@pytest.mark.processes
def test_one_worker_runs_tasks_and_jobs(workers: Any) -> None:
    workers.start("--processes", "1", "--threads", "2", environment=IMPORTS)
    answer, answer_async = tasks.meaning_of_life.enqueue(), tasks.meaning_of_life_async.enqueue()
    context, second = tasks.check_context.enqueue(1), tasks.of_second.enqueue()
    failure = tasks.value_error.using(max_attempts=1).enqueue()
    retried = tasks.succeed_at_second.enqueue()
    job = plain_jobs.add.enqueue(1, 2)

    until(lambda: ended(answer, answer_async, context, second, failure, retried))
    until(lambda: job.refresh().status == "completed")

    assert_ended(answer, SUCCESSFUL)
    assert (answer.return_value, answer_async.return_value, second.return_value) == (42, 42, "second")
    assert context.return_value == ["RUNNING", 1, True, ""]
    assert_ended(failure, FAILED)
    assert failure.errors[0].exception_class is ValueError
    assert failure.errors[0].traceback.endswith("ValueError: This task failed due to ValueError\n")
    assert (retried.status, retried.attempts, len(retried.errors)) == (SUCCESSFUL, 2, 1)
    uuid.UUID(answer.worker_ids[0])


@pytest.mark.processes
def test_workers_send_the_signals_where_the_task_runs(workers: Any) -> None:
    workers.start("--processes", "1", environment={**IMPORTS, "PGJOBS_TEST_NOTE_SIGNALS": "1"})
    results = [
        task.using(max_attempts=1).enqueue()
        for task in (tasks.noop, tasks.noop_async, tasks.value_error, tasks.value_error_async)
    ]

    until(lambda: ended(*results))
    until(lambda: Effect.objects.count() == 8)

    assert sorted(Effect.objects.values_list("what", flat=True)) == sorted(
        f"{status} {name}"
        for name, last in (
            ("noop", "SUCCESSFUL"),
            ("noop_async", "SUCCESSFUL"),
            ("value_error", "FAILED"),
            ("value_error_async", "FAILED"),
        )
        for status in ("RUNNING", last)
    )
    assert os.getpid() not in Effect.objects.values_list("pid", flat=True)


@pytest.mark.processes
def test_a_running_task_can_be_cancelled_and_an_overdue_one_ends(workers: Any, tmp_path: Any) -> None:
    workers.start("--processes", "1", environment={**IMPORTS, "PGJOBS_TEST_NOTE_SIGNALS": "1"})
    never = str(tmp_path / "never")
    waiting = [task.enqueue(never) for task in (tasks.wait, tasks.wait_async)]
    overdue = tasks.overdue.enqueue()
    until(lambda: Effect.objects.count() >= 3)
    for result in waiting:
        result.refresh()
        assert (result.status, result.attempts) == (RUNNING, 1)
        assert BackgroundJob.objects.get(pk=result.id).cancel()

    until(lambda: ended(overdue, *waiting))
    until(lambda: Effect.objects.count() == 6)

    assert overdue.errors[0].exception_class is JobTimeout
    for result in waiting:
        assert_ended(result, FAILED)
        assert [one.exception_class for one in result.errors] == [JobStopped]
    assert Effect.objects.filter(what__startswith="FAILED").count() == 3


@pytest.mark.processes
def test_a_cancellation_that_comes_too_late_changes_nothing(workers: Any) -> None:
    workers.start("--processes", "1", environment={**IMPORTS, "PGJOBS_TEST_NOTE_SIGNALS": "1"})
    result = tasks.cancel_itself.enqueue()

    until(lambda: ended(result))

    assert result.return_value == "done"


@pytest.mark.processes
def test_a_task_that_kills_its_process_has_failed(workers: Any) -> None:
    workers.start("--processes", "1", environment=IMPORTS)
    result = tasks.kill_executor.using(max_attempts=1).enqueue()

    until(lambda: ended(result))

    assert_ended(result, FAILED)
    assert result.errors[0].exception_class is PGJobsError
    assert "signal 9" in result.errors[0].traceback


def test_loggers_of_the_framework_are_not_silenced() -> None:
    assert logging.getLogger(FRAMEWORK).isEnabledFor(logging.ERROR)


def test_captured_jobs_and_single_runs_know_tasks() -> None:
    with captured_jobs(execute=True) as captured:
        result = tasks.give_back.enqueue(1)
    assert [str(job.pk) for job in captured] == [result.id]
    result.refresh()
    assert (result.status, result.return_value) == (SUCCESSFUL, 1)
    assert run_job(tasks.give_back.enqueue([2])) == [2]


def test_in_immediate_mode_a_task_is_run_once_it_is_signalled(settings: Any, received: Received) -> None:
    settings.PGJOBS = {"IMMEDIATE": True}
    result = tasks.give_back.enqueue(1)
    assert (result.status, result.return_value) == (SUCCESSFUL, 1)
    assert received.names() == ["task_enqueued", "task_started", "task_finished"]
    assert received[0][2].status == READY

    result = async_to_sync(tasks.give_back.aenqueue)(2)
    assert (result.status, result.return_value) == (SUCCESSFUL, 2)


def test_in_immediate_mode_a_task_that_is_deleted_as_it_completes_is_as_it_was(settings: Any) -> None:
    settings.PGJOBS = {"IMMEDIATE": True, "COMPLETED_RETENTION": 0}
    assert tasks.give_back.enqueue(1).status == READY
    assert BackgroundJob.objects.count() == 0
