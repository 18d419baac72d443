"""The backend for `django.tasks`: its words on one side, ours on the other, and nothing else.

A Task is a job function under its module path, so that `runjobs` runs tasks and jobs alike. On Django 5.2 the
framework is the backport `django-tasks`; where neither exists, this module cannot be imported.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import django
from asgiref.sync import sync_to_async
from django.apps import apps
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.dispatch import Signal
from django.utils import timezone

from . import checks, jobs
from .conf import config
from .exceptions import GiveUp, JobStopped, PGJobsError
from .jobs import BackoffCallable, Call, Caller, JobFunction
from .lifecycle import FINISHED, Backoff, Event, Outcome, Status, decide
from .payload import encode_result
from .store import Claim
from .unique import OPTIONS as UNIQUE_OPTIONS
from .unique import Conflict, Unique, Until

if TYPE_CHECKING or django.VERSION >= (6, 0):
    from django.tasks import signals, task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import (
        DEFAULT_TASK_BACKEND_ALIAS,
        DEFAULT_TASK_PRIORITY,
        DEFAULT_TASK_QUEUE_NAME,
        Task,
        TaskContext,
        TaskError,
        TaskResult,
        TaskResultStatus,
    )
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.utils.json import normalize_json
else:
    from django_tasks import signals, task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import (
        DEFAULT_TASK_BACKEND_ALIAS,
        DEFAULT_TASK_PRIORITY,
        DEFAULT_TASK_QUEUE_NAME,
        Task,
        TaskContext,
        TaskError,
        TaskResult,
        TaskResultStatus,
    )
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.utils import normalize_json

if TYPE_CHECKING:
    from .models import BackgroundJob

__all__ = ["PostgresBackend", "PostgresTask", "UnstorableResult", "task"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

STATUSES = {
    Status.QUEUED: TaskResultStatus.READY,
    Status.PROCESSING: TaskResultStatus.RUNNING,
    Status.COMPLETED: TaskResultStatus.SUCCESSFUL,
    Status.FAILED: TaskResultStatus.FAILED,
    Status.CANCELLED: TaskResultStatus.FAILED,
}

# What a task may say about its jobs, and OPTIONS about all tasks of a backend that do not say it.
JOB_OPTIONS = ("max_attempts", "backoff", "retry_on", "give_up_on", "rerun_if_lost", "timeout", "atomic")
# What only a task may say about its own jobs.
TASK_OPTIONS = ("aliases", *JOB_OPTIONS, *UNIQUE_OPTIONS)

MOST_WORKER_IDS = 1_000_000  # as many attempts as a job may have; a row may have any number


class UnstorableResult(GiveUp, TypeError):
    """A task has returned what is not JSON: it has failed, as in `django.tasks`, and is not run again."""


# ── The task ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresTask(Task):  # type: ignore[type-arg] # it is generic in the stubs and the backport only
    """A Task that may have the options of a job. None leaves one to OPTIONS, and then to `@job`'s default."""

    aliases: str | tuple[str, ...] = ()  # former module paths, whose queued jobs this task runs
    max_attempts: int | None = None
    backoff: Backoff | BackoffCallable = None
    retry_on: type[BaseException] | tuple[type[BaseException], ...] | None = None
    give_up_on: type[BaseException] | tuple[type[BaseException], ...] | None = None
    rerun_if_lost: bool | None = None
    timeout: float | timedelta | None = None
    atomic: bool | None = None
    unique: Unique | None = None
    unique_until: Until | None = None
    on_conflict: Conflict | None = None
    debounce: float | timedelta | None = None
    max_wait: float | timedelta | None = None

    def __post_init__(self) -> None:
        for name in TASK_OPTIONS:  # so that it can be hashed, and compared with another
            object.__setattr__(self, name, _as_job_option(name, getattr(self, name)))
        Task.__post_init__(self)  # super() would not know this class, which its slots have made anew

    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: datetime | None = None,
        backend: str | None = None,
        max_attempts: int | None = None,
    ) -> PostgresTask:
        """A copy of this task with other options. None leaves an option as it is."""
        given = {
            "priority": priority,
            "queue_name": queue_name,
            "run_after": run_after,
            "backend": backend,
            "max_attempts": max_attempts,
        }
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOnlyTask(Task):  # type: ignore[type-arg]
    """In results, it stands for what is no task that is known here: a `@job`, or code that is gone."""

    job_name: str

    def __post_init__(self) -> None:
        pass  # there is nothing to validate, since it cannot be enqueued

    @property
    def name(self) -> str:
        return self.job_name.rpartition(".")[2]

    @property
    def module_path(self) -> str:
        return self.job_name


def gone(*args: Any, **kwargs: Any) -> None:
    """The function of tasks that nobody here knows."""
    raise InvalidTask("The function of this task is not known here.")


@overload
def task(function: Callable[P, R], /) -> Task[P, R]: ...
@overload
def task(
    *,
    priority: int = ...,
    queue_name: str = ...,
    backend: str = ...,
    takes_context: bool = ...,
    **options: Any,
) -> Callable[[Callable[..., R]], Task[..., R]]: ...
def task(
    function: Callable[..., Any] | None = None,
    /,
    *,
    priority: int = DEFAULT_TASK_PRIORITY,
    queue_name: str = DEFAULT_TASK_QUEUE_NAME,
    backend: str = DEFAULT_TASK_BACKEND_ALIAS,
    takes_context: bool = False,
    **options: Any,
) -> Any:
    """The `@task` of `django.tasks`, with the options of jobs on every version of Django.

    Where another backend is configured, such as one for tests, it leaves them out.
    """
    unknown = sorted(options.keys() - set(TASK_OPTIONS))
    if unknown:
        raise TypeError(f"@task has no option {unknown[0]!r}.")

    def decorate(func: Callable[..., Any]) -> Any:
        task_class = task_backends[backend].task_class
        return task_class(
            func=func,
            priority=priority,
            queue_name=queue_name,
            backend=backend,
            takes_context=takes_context,
            run_after=None,
            **options if issubclass(task_class, PostgresTask) else {},
        )

    return decorate if function is None else decorate(function)


# ── Running it ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False, kw_only=True)
class TaskFunction(JobFunction[..., Any]):
    """The job function of a task."""

    task: Task[..., Any]  # as it was when it was first seen

    def _signature(self) -> inspect.Signature:
        signature = super()._signature()
        if self.task.takes_context:
            _, *parameters = signature.parameters.values()
            return signature.replace(parameters=parameters)
        return signature

    def call(self, claim: Claim, args: list[Any], kwargs: dict[str, Any]) -> Call:
        return TaskCall(self, claim, args, kwargs)


class TaskCall(Call):
    """One attempt at a task: with its context if it takes one, and between the signals."""

    __slots__ = ("backend", "is_heard", "result", "task", "value")

    hears_its_end = True

    def __init__(self, function: TaskFunction, claim: Claim, args: list[Any], kwargs: dict[str, Any]) -> None:
        super().__init__(function, claim, args, kwargs)
        self.task = function.task
        self.backend = _backend_of(function.task, claim.queue_name)
        self.is_heard = _is_heard(signals.task_started, signals.log_task_started) or _is_heard(
            signals.task_finished, signals.log_task_finished
        )
        self.result: TaskResult[..., Any] | None = None  # once it has started
        self.value: Any = None

    def body(self) -> Callable[[], Any]:
        return self._arun if self.function.is_async else self._run

    def _run(self) -> Any:
        self.result = self._read() if self._reads else self._known()
        self._send(signals.task_started)
        return self._returned(self.function.func(*self._context(), *self.args, **self.kwargs))

    async def _arun(self) -> Any:
        self.result = await sync_to_async(self._read)() if self._reads else self._known()
        await self._asend(signals.task_started)
        return self._returned(await self.function.func(*self._context(), *self.args, **self.kwargs))

    def ended(self, outcome: Outcome) -> None:
        with _harmless(self.claim):
            if self._has_finished(outcome):
                self._send(signals.task_finished)

    async def aended(self, outcome: Outcome) -> None:
        with _harmless(self.claim):
            if self._has_finished(outcome):
                await self._asend(signals.task_finished)

    def _send(self, signal: Signal) -> None:
        signal.send_robust(type(self.backend), task_result=self.result)

    async def _asend(self, signal: Signal) -> None:
        # Logging can be done on the event loop; anything else may block, and gets a thread.
        if self.is_heard:
            await signal.asend_robust(type(self.backend), task_result=self.result)
        else:
            self._send(signal)

    @property
    def _reads(self) -> bool:
        """Whether anybody looks at the result closely enough to be worth a query."""
        return self.is_heard or self.task.takes_context

    def _read(self) -> TaskResult[..., Any]:
        row = self.backend.row(self.claim.id)
        return self._known() if row is None else self.backend.result_of(row)

    def _known(self) -> TaskResult[..., Any]:
        """As much of the result as the claim tells."""
        claimed_at = datetime.fromtimestamp(self.claim.claimed_at, UTC)
        return TaskResult(
            task=self.task,
            id=str(self.claim.id),
            status=TaskResultStatus.RUNNING,
            enqueued_at=None,
            started_at=None,
            last_attempted_at=claimed_at,
            finished_at=None,
            args=self.args,
            kwargs=self.kwargs,
            backend=self.backend.alias,
            errors=[],
            worker_ids=[""] * min(self.claim.attempts, MOST_WORKER_IDS),
        )

    def _context(self) -> tuple[TaskContext[..., Any], ...]:
        assert self.result is not None
        return (TaskContext(task_result=self.result),) if self.task.takes_context else ()

    def _returned(self, value: Any) -> Any:
        if inspect.iscoroutine(value):
            return value  # which is refused as in any job
        value = _normalized(value)
        _, problem = encode_result(value, config().MAX_PAYLOAD_BYTES)
        if problem:
            raise UnstorableResult(problem)
        self.value = value
        return value

    def _has_finished(self, outcome: Outcome) -> bool:
        """Whether nothing more is to come; then the result says how it ended."""
        verdict = decide(outcome, self.claim, self.function.policy)
        if self.result is None or verdict.status not in FINISHED:
            return False
        _set(self.result, finished_at=timezone.now(), status=STATUSES[verdict.status])
        if verdict.event is Event.COMPLETE:
            _set(self.result, _return_value=self.value)
        elif verdict.error is None:
            self.result.errors.append(_cancelled())
        else:
            error = verdict.error
            self.result.errors.append(_task_error(error.exception, error.message, error.traceback))
        return True


@contextmanager
def _harmless(claim: Claim) -> Iterator[None]:
    """What is done here cannot change an outcome, not even by SystemExit or by a cancellation that is due."""
    try:
        yield
    except BaseException:
        logger.exception("%s: its end was not signalled to all.", claim)


def _backend_of(task: Task[..., Any], queue_name: str) -> PostgresBackend:
    """The backend that a job of a task belongs to: the task's own, unless that does not serve the queue."""
    for alias in (task.backend, *task_backends):
        try:
            backend = task_backends[alias]
        except Exception:  # a neighbour that cannot be made is no matter of this job
            continue
        if isinstance(backend, PostgresBackend) and backend.serves(queue_name):
            return backend
    return PostgresBackend(task.backend, {})


def _is_heard(signal: Signal, own: Callable[..., None]) -> bool:
    """Whether a signal has receivers other than the one that logs it."""
    return any(key[0] != id(own) for key, *_ in signal.receivers)


def _set(result: TaskResult[..., Any], **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(result, name, value)


# ── The backend ───────────────────────────────────────────────────────────────────────────────────────────


class PostgresBackend(BaseTaskBackend):
    """Enqueues tasks as jobs, and reads jobs as results of tasks."""

    task_class = PostgresTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def validate_task(self, task: Task[..., Any]) -> None:
        """Refuse a task that cannot be run, and make any other known to this process, as `@job` does.

        Raises InvalidTask, or DuplicateJobName.
        """
        if isinstance(task, ReadOnlyTask):
            raise InvalidTask(f"{task.module_path!r} is not a task that is known here; it can only be read.")
        super().validate_task(task)
        if "<" in task.module_path:
            raise InvalidTask("Task function must be defined at a module level, under a name of its own.")
        self._job_function(task)

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Insert a job in the current transaction of the queue's database."""
        result, is_new = self._insert(task, args, kwargs, _caller())
        if is_new:
            signals.task_enqueued.send(type(self), task_result=result)
            self._run_if_immediate(result)
        return result

    async def aenqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        result, is_new = await sync_to_async(self._insert)(task, args, kwargs, _caller())
        if is_new:
            await signals.task_enqueued.asend(type(self), task_result=result)
            if config().IMMEDIATE:
                await sync_to_async(self._run_if_immediate)(result)
        return result

    def get_result(self, result_id: Any) -> TaskResult[..., Any]:
        """The result of any job in a queue of this backend. Raises TaskResultDoesNotExist."""
        id = str(result_id)
        is_id = re.fullmatch(r"[1-9][0-9]{0,18}", id, re.ASCII) and int(id) < 2**63
        row = self.row(int(id)) if is_id else None
        if row is None or not self.serves(row.queue_name):
            raise TaskResultDoesNotExist(result_id)
        return self.result_of(row)

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        return checks.check_task_backend(self.alias, self._problems())

    def serves(self, queue_name: str) -> bool:
        """Whether jobs of a queue are this backend's."""
        return not self.queues or queue_name in self.queues

    def row(self, id: int) -> BackgroundJob | None:
        model: type[BackgroundJob] = apps.get_model("django_pgjobs", "BackgroundJob")
        return model._default_manager.using(self._database()).filter(pk=id).first()

    def result_of(self, row: BackgroundJob) -> TaskResult[..., Any]:
        """A row, whoever has written it, in the words of `django.tasks`."""
        status = Status(row.status)
        payload = row.payload if isinstance(row.payload, dict) else {}
        args, kwargs = payload.get("args"), payload.get("kwargs")
        errors = [error for error in _list(row.errors) if isinstance(error, dict)]
        result = TaskResult(
            task=self._task_of(row),
            id=str(row.pk),
            status=STATUSES[status],
            enqueued_at=row.created_at,
            started_at=row.started_at,
            last_attempted_at=row.attempted_at,
            finished_at=row.updated_at if status in FINISHED else None,
            args=_list(args),
            kwargs=kwargs if isinstance(kwargs, dict) else {},
            backend=self.alias,
            errors=[
                _task_error(*(str(error.get(key) or "") for key in ("exception", "message", "traceback")))
                for error in errors
            ],
            worker_ids=_worker_ids(row, errors),
        )
        if status is Status.CANCELLED:
            result.errors.append(_cancelled())
        if status is Status.COMPLETED:
            _set(result, _return_value=row.result)
        return result

    def _insert(
        self, task: Task[..., Any], args: Any, kwargs: Any, caller: Caller
    ) -> tuple[TaskResult[..., Any], bool]:
        """Insert a job. Returns its result, and whether it is new: an equal one may have been there."""
        self.validate_task(task)
        self._database()
        arguments = [_normalized(arg) for arg in args]
        keywords = {name: _normalized(value) for name, value in kwargs.items()}
        job = self._job_function(task).insert(arguments, keywords, caller)
        there = None if job.is_new else self.row(job.pk)
        if there is not None:
            return self.result_of(there), False
        result = TaskResult(
            task=task,
            id=str(job.pk),
            status=TaskResultStatus.READY,
            enqueued_at=job.created_at,
            started_at=None,
            last_attempted_at=None,
            finished_at=None,
            args=job.payload["args"],
            kwargs=job.payload["kwargs"],
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        return result, job.is_new

    def _run_if_immediate(self, result: TaskResult[..., Any]) -> None:
        if jobs.run_if_immediate([int(result.id)]):
            with suppress(TaskResultDoesNotExist):  # it may be deleted as it completes
                result.refresh()

    def _job_function(self, task: Task[..., Any]) -> JobFunction[..., Any]:
        """The registered job function of a task, as this task wants to be enqueued. Raises InvalidTask."""
        run_after = task.run_after
        if run_after is not None and timezone.is_naive(run_after):
            run_after = timezone.make_aware(run_after)  # which is the meaning that it has without USE_TZ
        try:
            return self._registered(task).using(
                queue=task.queue_name,
                priority=int(task.priority),
                run_at=run_after,
                max_attempts=self._options_of(task).get("max_attempts"),
            )
        except ValueError as error:
            raise InvalidTask(str(error)) from None

    def _registered(self, task: Task[..., Any]) -> TaskFunction:
        known = jobs.find(task.module_path)
        if isinstance(known, TaskFunction) and known.func is task.func and _agree(known.task, task):
            return known
        function = self._function(task, **self._options_of(task))
        jobs.register(function)
        return function

    def _function(self, task: Task[..., Any], **options: Any) -> TaskFunction:
        return TaskFunction(
            func=task.func,
            name=task.module_path,
            aliases=getattr(task, "aliases", ()),
            task=task,
            **{name: _as_job_option(name, value) for name, value in options.items()},
        )

    def _options_of(self, task: Task[..., Any]) -> dict[str, Any]:
        """What a task, or else OPTIONS, says about its jobs."""
        options = {}
        for name in JOB_OPTIONS:
            value = getattr(task, name, None)
            value = self.options.get(name) if value is None else value
            if value is not None:
                options[name] = value
        for name in UNIQUE_OPTIONS:
            if getattr(task, name, None) is not None:
                options[name] = getattr(task, name)
        return options

    def _task_of(self, row: BackgroundJob) -> Task[..., Any]:
        """The task of a job. What the row names is looked up, never imported."""
        function = jobs.find(row.job_name)
        values: dict[str, Any] = {
            "priority": row.priority,
            "queue_name": row.queue_name,
            "run_after": None if row.run_at == row.created_at else row.run_at,
            "backend": self.alias,
        }
        if isinstance(function, TaskFunction):
            with suppress(InvalidTask):  # nobody could enqueue it with what the row says
                return replace(function.task, **values)
        func = gone if function is None else function.func
        return ReadOnlyTask(func=func, job_name=row.job_name, takes_context=False, **values)

    def _database(self) -> str:
        for problem in self._database_problems():
            raise ImproperlyConfigured(f"TASKS[{self.alias!r}]: {problem}")
        return config().DATABASE

    def _database_problems(self) -> Iterator[str]:
        alias = config().DATABASE
        given = self.options.get("database", alias)
        if given != alias:
            yield (
                f"OPTIONS['database'] is {given!r}, but the queue lives in {alias!r}, which"
                " PGJOBS['DATABASE'] names. There is one queue in a project."
            )

    def _problems(self) -> Iterator[str]:
        """Yield a sentence for each thing in OPTIONS that cannot work."""
        known = (*JOB_OPTIONS, "database")
        for name, value in self.options.items():
            if name not in known:
                nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
                hint = f"Did you mean {nearest[0]!r}?" if nearest else f"Known: {', '.join(known)}."
                yield f"OPTIONS has no {name!r}. {hint}"
            elif name in JOB_OPTIONS and value is not None:
                try:
                    JobFunction(func=gone, name="OPTIONS", **{name: _as_job_option(name, value)})
                except (TypeError, ValueError) as error:
                    yield f"OPTIONS[{name!r}] is {value!r}. {error}"
        with suppress(ImproperlyConfigured):  # of PGJOBS, which has checks of its own
            yield from self._database_problems()


def _caller() -> Caller:
    """Who called `enqueue`, of a task or of its backend."""
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__") == Task.__module__ and frame.f_back is not None:
        frame = frame.f_back
    return Caller(frame)


def _agree(known: Task[..., Any], task: Task[..., Any]) -> bool:
    """Whether two tasks of one function want its jobs run alike; the number of attempts is in each row."""
    if known is task:
        return True
    if not isinstance(known, PostgresTask) or not isinstance(task, PostgresTask):
        return known.takes_context == task.takes_context
    names = ("takes_context", *(name for name in TASK_OPTIONS if name != "max_attempts"))
    return all(getattr(known, name) == getattr(task, name) for name in names)


def _as_job_option(name: str, value: Any) -> Any:
    """The value of an option in the form that a JobFunction has it in. None is none."""
    if name in ("aliases", "retry_on", "give_up_on") and value is not None:
        return tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)
    return tuple(value) if isinstance(value, list) else value


def _normalized(value: Any) -> Any:
    """A value as `django.tasks` stores it: mappings are dicts there, sequences lists, bytes text.

    What it would refuse is left as it is, for encoding refuses it with a better reason.
    """
    try:
        return normalize_json(value)
    except (TypeError, ValueError, RecursionError):
        return value


def _worker_ids(row: BackgroundJob, errors: list[dict[str, Any]]) -> list[str]:
    """The worker of each attempt; "" for one that nobody remembers. As long as there were attempts."""
    workers = {
        error["attempt"]: str(error.get("worker") or "")
        for error in errors
        if isinstance(error.get("attempt"), int)
    }
    if row.worker_id is not None:
        workers[row.attempts] = str(row.worker_id)
    return [workers.get(attempt, "") for attempt in range(1, min(row.attempts, MOST_WORKER_IDS) + 1)]


def _task_error(exception: str, message: str, traceback: str) -> TaskError:
    """A failed attempt. Where nothing was raised, as when a worker died, the class is our base class."""
    return TaskError(
        exception_class_path=exception or f"{PGJobsError.__module__}.{PGJobsError.__qualname__}",
        traceback=traceback or f"{message}\n",
    )


def _cancelled() -> TaskError:
    path = f"{JobStopped.__module__}.{JobStopped.__qualname__}"
    return TaskError(exception_class_path=path, traceback="The job was cancelled.\n")


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
