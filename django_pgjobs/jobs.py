"""Job functions: the `@job` decorator, the registry of their names, and how the modules are found.

A job function is called like any function, and enqueued with the same arguments. The row in the table names
it by its registered name, never by an import path that a row could choose.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.apps import apps
from django.db import connections
from django.db.transaction import TransactionManagementError
from django.utils.module_loading import autodiscover_modules

from . import context, signals, store
from .conf import LARGEST_PAYLOAD, config
from .exceptions import DuplicateJobName, InvalidArguments, Retry
from .lifecycle import LONGEST_DELAY, Backoff, Outcome, Policy, Status, in_seconds, is_delay
from .payload import encode_arguments
from .schedules import Schedule, name_problem
from .unique import OPTIONS as UNIQUE_OPTIONS
from .unique import Conflict, Unique, Uniqueness, Until, uniqueness

if TYPE_CHECKING:
    from .apps import PGJobsConfig
    from .models import BackgroundJob

P = ParamSpec("P")
R = TypeVar("R")

# (exception, claim) -> seconds, a timedelta, or None to give up
BackoffCallable = Callable[[BaseException, store.Claim], "float | timedelta | None"]

# (the arguments of a job) -> the values among them that people do not get to see
Redact = Callable[..., "Iterable[Any] | None"]

# What @job(schedule=...) takes, alone or several of them.
When = str | timedelta | Schedule

MODULES = ("jobs", "tasks")

# What tells others, `async_to_sync` for one, that a callable is as good as an async function.
_COROUTINE_MARK = vars(markcoroutinefunction(lambda: None))

# Every job function by its name, and by the former names that it still answers to.
registry: dict[str, JobFunction[..., Any]] = {}


@dataclass(frozen=True, eq=False, kw_only=True)
class JobFunction(Generic[P, R]):
    """A function that can be enqueued. Made by `@job`; immutable."""

    func: Callable[P, R]
    name: str
    aliases: tuple[str, ...] = ()
    queue: str = "default"
    priority: int = 0
    max_attempts: int | None = None  # None: PGJOBS["MAX_ATTEMPTS"]
    backoff: Backoff | BackoffCallable = None
    retry_on: tuple[type[BaseException], ...] = ()
    give_up_on: tuple[type[BaseException], ...] = ()
    rerun_if_lost: bool = True
    timeout: float | timedelta | None = None  # None: PGJOBS["TIMEOUT"]
    atomic: bool = False
    unique: Unique = False
    unique_until: Until | None = None
    on_conflict: Conflict | None = None
    debounce: float | timedelta | None = None
    max_wait: float | timedelta | None = None
    run_at: datetime | timedelta = timedelta(0)
    schedules: tuple[Schedule, ...] = ()
    redact: Redact | None = None
    is_async: bool = field(init=False, repr=False)
    signature: inspect.Signature = field(init=False, repr=False)
    uniqueness: Uniqueness | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        options = {option.name: getattr(self, option.name) for option in fields(self) if option.init}
        is_async = iscoroutinefunction(self.func) or iscoroutinefunction(type(self.func).__call__)
        if self.atomic and is_async:
            raise ValueError(
                f"@job {self.name!r}: atomic=True is for plain functions, since Django has no transactions in"
                " async code. Make it a plain function, or leave the option out."
            )
        # A frozen dataclass refuses assignments, its own included, but not what goes into its `__dict__`.
        self.__dict__.update(
            _checked(self.name, options),
            is_async=is_async,
            signature=self._signature(),
            __wrapped__=self.func,
            **_COROUTINE_MARK if is_async else {},
        )
        self.__dict__["uniqueness"] = self._uniqueness()
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(self.func, name):
                self.__dict__[name] = getattr(self.func, name)
        self.__dict__["schedules"] = tuple(self._named_schedules())

    def tick_key(self, args: Sequence[Any], kwargs: dict[str, Any], payload: str) -> str | None:
        """The unique key of a job that a schedule enqueues. Raises ValueError where only code knows it."""
        if self.uniqueness is not None and callable(self.uniqueness.by):
            raise ValueError(
                "its unique= is a function, which nobody calls for a schedule. Name the parameters that"
                " count instead."
            )
        return self.unique_key(args, kwargs, payload)

    def _named_schedules(self) -> Iterator[Schedule]:
        """Its schedules, each by a name of its own. Raises ValueError for one that cannot work."""
        names = set()
        for given in self.schedules:
            schedule = replace(given, name=self.name) if given.name is None else given
            problem = name_problem(schedule.name)
            if schedule.name in names:
                problem = (
                    f"it has several schedules named {schedule.name!r}. Give each a name of its own with"
                    " Schedule(..., name=...)."
                )
            names.add(schedule.name)
            try:
                payload = self.encode(schedule.args, dict(schedule.kwargs), LARGEST_PAYLOAD)
                self.tick_key(schedule.args, dict(schedule.kwargs), payload)
            except InvalidArguments as error:
                problem = f"the arguments of the schedule {schedule.name!r} do not fit. {error}"
            except ValueError as error:
                problem = f"it cannot have a schedule: {error}"
            if problem:
                raise ValueError(f"@job {self.name!r}: {problem}")
            yield schedule

    def _signature(self) -> inspect.Signature:
        """The signature of its `enqueue`."""
        return inspect.signature(self.func)

    @functools.cached_property
    def _accepts(self) -> Callable[..., Any]:
        """A function of this signature that does nothing. To call it takes a tenth of what `bind` takes."""
        none = inspect.Parameter.empty
        parameters = [
            parameter.replace(annotation=none, default=none if parameter.default is none else None)
            for parameter in self.signature.parameters.values()
        ]
        try:
            accepts: Callable[..., Any] = eval(f"lambda {str(inspect.Signature(parameters))[1:-1]}: None")
        except SyntaxError:  # a name that cannot be written down
            return self.signature.bind
        return accepts

    def _uniqueness(self) -> Uniqueness | None:
        try:
            return uniqueness(
                self.name, self.signature, **{name: getattr(self, name) for name in UNIQUE_OPTIONS}
            )
        except ValueError as error:
            raise ValueError(f"@job {self.name!r}: {error}") from None

    @property
    def policy(self) -> Policy:
        """The rules that its jobs go by, for those who must not call the function's own code."""
        return policy(None if callable(self.backoff) else self.backoff)

    def gives_up_on(self, class_: type[BaseException]) -> bool:
        """Whether, by `give_up_on` and `retry_on`, an exception of this class makes the job a dead letter."""
        if issubclass(class_, self.give_up_on):
            return True
        return bool(self.retry_on) and not issubclass(class_, (Retry, *self.retry_on))

    @property
    def time_limit(self) -> float | None:
        """For how many seconds a job of this function may run; None sets no limit."""
        limit = config().TIMEOUT if self.timeout is None else self.timeout
        return None if limit is None else in_seconds(limit)

    def call(self, claim: store.Claim, args: list[Any], kwargs: dict[str, Any]) -> Call:
        """The call of the function by which a worker runs a claimed job."""
        return Call(self, claim, args, kwargs)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here and now, with no queue involved."""
        return self.func(*args, **kwargs)

    def using(
        self,
        *,
        queue: str | None = None,
        priority: int | None = None,
        run_at: datetime | timedelta | None = None,
        max_attempts: int | None = None,
    ) -> JobFunction[P, R]:
        """A copy of this job function that enqueues with other options. None leaves an option as it is.

        `run_at` is an aware datetime, or a timedelta from the moment of enqueueing by the database's clock.
        Raises ValueError for a value that cannot work.
        """
        given = {"queue": queue, "priority": priority, "run_at": run_at, "max_attempts": max_attempts}
        changes = {name: value for name, value in given.items() if value is not None}
        if run_at is not None and self.debounce is not None:
            raise ValueError(f"@job {self.name!r}: run_at is {run_at}, but debounce says when its jobs run.")
        _ = self._accepts  # which the copy shares
        changed = copy.copy(self)
        changed.__dict__.update(_checked(self.name, changes))
        return changed

    def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> BackgroundJob:
        """Insert a job into the queue, in the current transaction of the queue's database.

        Returns its handle; where the job is unique and an equal one is there, the handle of that one, with
        `is_new` False. Raises InvalidArguments before any SQL when the arguments do not fit the function or
        are not JSON, and DuplicateJob where equal jobs are refused.
        """
        return self.submit(args, kwargs, Caller(sys._getframe(1)))

    @markcoroutinefunction
    def aenqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, BackgroundJob]:
        """`enqueue` from async code."""
        caller = Caller(sys._getframe(1))  # who calls; who awaits may be the event loop

        async def aenqueue() -> BackgroundJob:
            return await sync_to_async(self.submit)(args, kwargs, caller)

        return aenqueue()

    def enqueue_many(self, calls: Iterable[tuple[Sequence[Any], dict[str, Any]]]) -> list[int]:
        """Insert a job for each (args, kwargs) pair, all or none. Returns the ids in their order.

        One statement inserts them all; unique jobs may take a few more, and no pairs take none. Raises
        InvalidArguments, naming the pair, before any SQL.
        Pairs with equal unique keys get the same id: that of a job with the arguments of the first of them,
        or, where arguments are replaced, of the last. Where they are refused, it raises DuplicateJob.
        """
        payloads: list[str] = []
        keys: list[str | None] = []
        for position, call in enumerate(calls):
            try:
                args, kwargs = _pair(call)
                payloads.append(self.encode(args, kwargs))
                keys.append(self.unique_key(args, kwargs, payloads[-1]))
            except InvalidArguments as error:
                raise InvalidArguments(f"Call number {position}: {error}") from None
        if not payloads:
            return []
        alias = _queue_alias(self.name, Caller(sys._getframe(1)))
        if config().TRACING:
            from . import tracing

            with tracing.sending(self.name, self.queue, len(payloads)):
                ids, new_ids = self._insert_many(payloads, keys, alias)
        else:
            ids, new_ids = self._insert_many(payloads, keys, alias)
        run_if_immediate(new_ids)
        return ids

    def _insert_many(
        self, payloads: list[str], keys: list[str | None], alias: str
    ) -> tuple[list[int], list[int]]:
        """Insert jobs. Returns their ids, and those of them that are new."""
        new = self.new_job()
        if self.uniqueness is None:
            ids = new_ids = store.enqueue_many(new, payloads, alias)
        else:
            pairs = list(zip(keys, payloads, strict=True))
            ids, new_ids = self.uniqueness.enqueue_many(new, pairs, alias)
        self._tell(new_ids, new, alias)
        return ids, new_ids

    def submit(self, args: Sequence[Any], kwargs: dict[str, Any], caller: Caller) -> BackgroundJob:
        """`enqueue` on behalf of a caller, to whom warnings are shown."""
        handle = self.insert(args, kwargs, caller)
        if handle.is_new and run_if_immediate([handle.pk]):
            try:
                handle.refresh()
            except type(handle).DoesNotExist:
                handle.status = Status.COMPLETED.value  # and so deleted
        return handle

    def insert(self, args: Sequence[Any], kwargs: dict[str, Any], caller: Caller) -> BackgroundJob:
        """Insert a job without running it, even in immediate mode."""
        if not config().TRACING:
            return self._insert(args, kwargs, caller)
        from . import tracing

        with tracing.sending(self.name, self.queue) as span:
            handle = self._insert(args, kwargs, caller)
            tracing.sent(span, handle.pk, is_new=handle.is_new)
            return handle

    def _insert(self, args: Sequence[Any], kwargs: dict[str, Any], caller: Caller) -> BackgroundJob:
        payload = self.encode(args, kwargs)
        key = self.unique_key(args, kwargs, payload)
        alias = _queue_alias(self.name, caller)
        new = self.new_job()
        if self.uniqueness is None or key is None:
            id, run_at, created_at = store.enqueue(new, payload, alias)
            row = store.Enqueued(
                unique_key=None,
                is_new=True,
                id=id,
                queue_name=new.queue_name,
                status=Status.QUEUED.value,
                priority=new.priority,
                run_at=run_at,
                attempts=0,
                max_attempts=new.max_attempts,
                rerun_if_lost=new.rerun_if_lost,
                created_at=created_at,
            )
        else:
            row = self.uniqueness.enqueue(new, {key: payload}, alias)[key]
        if row.is_new:
            self._tell([row.id], new, alias)
        values = row._asdict() | {"job_name": self.name, "payload": json.loads(row.payload or payload)}
        model, known = _model_and_columns(*values)
        handle = model.from_db(alias, known, [values[name] for name in known])
        handle.is_new = row.is_new
        return handle

    def unique_key(self, args: Sequence[Any], kwargs: dict[str, Any], payload: str) -> str | None:
        """The unique key of a job with these arguments, which `payload` has as JSON; None if it needs none.

        Raises InvalidArguments, and whatever a function raises that is asked for it.
        """
        return None if self.uniqueness is None else self.uniqueness.key(args, kwargs, payload)

    def encode(self, args: Sequence[Any], kwargs: dict[str, Any], limit: int | None = None) -> str:
        """The payload of a call as JSON text, of at most `limit` bytes or as many as the project allows.

        Raises InvalidArguments when the arguments do not fit the function, or are not JSON.
        """
        try:
            self._accepts(*args, **kwargs)
        except TypeError as error:
            _, _, problem = str(error).partition("() ")  # the name of what has refused them
            try:
                self.signature.bind(*args, **kwargs)
            except TypeError as error_of_bind:
                problem = str(error_of_bind)  # which is easier to read
            raise InvalidArguments(f"{self.name}{self.signature}: {problem}.") from None
        return encode_arguments(args, kwargs, limit or config().MAX_PAYLOAD_BYTES)

    def new_job(self, metadata: str | None = None) -> store.NewJob:
        """Everything about a job but its payload. Captures the context of the caller, unless given one."""
        run_at, delay = None, timedelta(0)
        if self.uniqueness is not None and self.uniqueness.debounce is not None:
            delay = self.uniqueness.debounce
        elif isinstance(self.run_at, datetime):
            run_at = self.run_at
        else:
            delay = self.run_at
        return store.NewJob(
            queue_name=self.queue,
            job_name=self.name,
            priority=self.priority,
            run_at=run_at,
            delay=delay,
            max_attempts=self.max_attempts or config().MAX_ATTEMPTS,
            rerun_if_lost=self.rerun_if_lost,
            metadata=context.captured() if metadata is None else metadata,
        )

    def _tell(self, ids: list[int], new: store.NewJob, alias: str) -> None:
        if ids and signals.job_enqueued.receivers:
            signals.job_enqueued.send_robust(find(self.name), ids=ids, queue=new.queue_name, using=alias)


class Call:
    """One call of a job function by a worker."""

    __slots__ = ("args", "claim", "function", "kwargs")

    hears_its_end = False  # whether `ended` is worth a call

    def __init__(
        self, function: JobFunction[..., Any], claim: store.Claim, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        self.function = function
        self.claim = claim
        self.args = args
        self.kwargs = kwargs

    def body(self) -> Callable[[], Any]:
        """What does the work. Bound, since a job function may have parameters of any name."""
        return functools.partial(self.function.func, *self.args, **self.kwargs)

    def ended(self, outcome: Outcome) -> None:
        """Told what became of it, where it ran and while its exception is handled. Must not raise."""

    async def aended(self, outcome: Outcome) -> None:
        """The same on the event loop of an async job function."""


@overload
def job(func: Callable[P, R], /) -> JobFunction[P, R]: ...
@overload
def job(
    *,
    name: str | None = None,
    aliases: Sequence[str] = (),
    queue: str = "default",
    priority: int = 0,
    max_attempts: int | None = None,
    backoff: Backoff | BackoffCallable = None,
    retry_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    give_up_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    rerun_if_lost: bool = True,
    timeout: float | timedelta | None = None,
    atomic: bool = False,
    unique: Unique = False,
    unique_until: Until | None = None,
    on_conflict: Conflict | None = None,
    debounce: float | timedelta | None = None,
    max_wait: float | timedelta | None = None,
    schedule: When | Sequence[When] | None = None,
    timezone: str | None = None,
    redact: Redact | None = None,
) -> Callable[[Callable[P, R]], JobFunction[P, R]]: ...
def job(
    func: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    aliases: Sequence[str] = (),
    queue: str = "default",
    priority: int = 0,
    max_attempts: int | None = None,
    backoff: Backoff | BackoffCallable = None,
    retry_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    give_up_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    rerun_if_lost: bool = True,
    timeout: float | timedelta | None = None,
    atomic: bool = False,
    unique: Unique = False,
    unique_until: Until | None = None,
    on_conflict: Conflict | None = None,
    debounce: float | timedelta | None = None,
    max_wait: float | timedelta | None = None,
    schedule: When | Sequence[When] | None = None,
    timezone: str | None = None,
    redact: Redact | None = None,
) -> Any:
    """Make a function, plain or async, a job function.

    name           the name in the table; by default the dotted path. Fix it to move the function freely.
    aliases        former names, whose queued jobs this function runs
    queue          the queue that its jobs wait in
    priority       -100 to 100; higher goes first
    max_attempts   how often a job is started at most; by default PGJOBS["MAX_ATTEMPTS"]
    backoff        the wait after a failure: seconds, a timedelta, a sequence of these (the last one repeats),
                   or a callable (exception, claim) -> seconds | timedelta | None, where None gives up. By
                   default 10 s x 2^attempts, at most an hour
    retry_on       exception classes; any other makes the job a dead letter at once
    give_up_on     exception classes that make the job a dead letter at once
    timeout        seconds or a timedelta that a job may run; then JobTimeout is raised in it, and a worker
                   process that does not heed it is killed. By default PGJOBS["TIMEOUT"]
    rerun_if_lost  False: a job whose worker died or was stopped becomes a dead letter, never runs twice
    atomic         True: the body runs in a transaction on the queue's database, and the job's completion is
                   committed with it, or neither; so these effects happen exactly once. Plain functions only
    unique         True: one job at a time with these arguments. Or names of the parameters that count; or a
                   callable, called with the arguments, that returns a key, or None for a job that need not be
                   unique
    unique_until   "finished", the default: while a job waits or runs. "started": only while it waits. Seconds
                   or a timedelta: for that long from its enqueueing, too, whatever became of it
    on_conflict    what `enqueue` does about an equal job. "keep", the default: leaves it and returns it.
                   "replace": gives it the new arguments, while it waits. "raise": raises DuplicateJob
    debounce       seconds or a timedelta: a job runs that long after the last call, with its arguments
    max_wait       seconds or a timedelta: the longest that further calls can put a job off
    schedule       when it runs by itself: a cron text, an interval as a timedelta, a Schedule, which may have
                   arguments, or several of these
    timezone       of the cron texts, such as "Europe/Vienna"; by default settings.TIME_ZONE
    redact         a function, called with the arguments, that returns the values among them which people do
                   not get to see, besides those that PGJOBS["REDACT"] names

    Raises DuplicateJobName, or ValueError for an option that cannot work.
    """

    def decorate(func: Callable[..., Any]) -> JobFunction[..., Any]:
        if not callable(func):
            raise TypeError(f"@job decorates functions, not {func!r}.")
        own_name = _default_name(func) if name is None else name
        function = JobFunction(
            func=func,
            name=own_name,
            aliases=_as_tuple(aliases),
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            backoff=tuple(backoff) if isinstance(backoff, list) else backoff,
            retry_on=_as_tuple(retry_on),
            give_up_on=_as_tuple(give_up_on),
            rerun_if_lost=rerun_if_lost,
            timeout=timeout,
            atomic=atomic,
            unique=tuple(unique) if isinstance(unique, list) else unique,
            unique_until=unique_until,
            on_conflict=on_conflict,
            debounce=debounce,
            max_wait=max_wait,
            schedules=_schedules(own_name, schedule, timezone),
            redact=redact,
        )
        register(function)
        return function

    return decorate if func is None else decorate(func)


def find(name: str) -> JobFunction[..., Any] | None:
    """The job function that answers to `name`, or None."""
    return registry.get(name)


def any_async() -> bool:
    """Whether a worker needs slots for async jobs at all."""
    return any(function.is_async for function in registry.values())


def policy(backoff: Backoff = None) -> Policy:
    """The project's rules, for a job with this declared backoff."""
    rules = config().policy
    return rules if backoff is None else replace(rules, backoff=backoff)


def policy_of(name: str) -> Policy:
    """The rules of the jobs of a name, whether or not it is known here."""
    function = find(name)
    return policy() if function is None else function.policy


def discover() -> None:
    """Import the `jobs` and `tasks` modules of all installed apps, which registers their job functions."""
    autodiscover_modules(*MODULES)


def register(function: JobFunction[..., Any]) -> None:
    """Make a job function answer to its names. Raises DuplicateJobName."""
    names = (function.name, *function.aliases)
    for name in names:
        known = registry.get(name)
        if known is not None and not _is_again(known, function):
            raise DuplicateJobName(
                f"Two job functions are named {name!r}: {_where(known)} and {_where(function)}."
                " Give one of them another name with @job(name=...)."
            )
    declared = declared_schedules()
    for schedule in function.schedules:
        other, _ = declared.get(schedule.name or "", (function, schedule))
        if other.name != function.name:
            raise ValueError(
                f"Two schedules are named {schedule.name!r}: of {_where(other)} and of {_where(function)}."
                " Give one of them another name with Schedule(..., name=...)."
            )
    registry.update(dict.fromkeys(names, function))


def declared_schedules() -> dict[str, tuple[JobFunction[..., Any], Schedule]]:
    """The schedules that the code declares, by their names, each with its job function."""
    return {
        schedule.name or function.name: (function, schedule)
        for name, function in registry.items()
        if name == function.name
        for schedule in function.schedules
    }


def _is_again(known: JobFunction[..., Any], function: JobFunction[..., Any]) -> bool:
    """Whether a function takes the place of a former one, because its module is imported once more."""
    old, new = known.func, function.func
    if not _origin(old) or _origin(old) != _origin(new):
        return False
    # An import that failed half-way is repeated in a new namespace; a reload happens in the old one, where
    # only importlib's own list tells it from a second definition of the same name.
    if getattr(old, "__globals__", None) is not getattr(new, "__globals__", None):
        return True
    return new.__module__ in getattr(importlib, "_RELOADING", ())


def _origin(func: Callable[..., Any]) -> str:
    """The dotted path of a function; "" for callables that have none, such as a functools.partial."""
    module, qualname = getattr(func, "__module__", None), getattr(func, "__qualname__", None)
    return f"{module}.{qualname}" if module and qualname else ""


def _default_name(func: Callable[..., Any]) -> str:
    """The dotted path, under which any process that imports the module finds the function."""
    origin = _origin(func)
    if not origin or "<" in origin:
        raise ValueError(
            f"@job: {func!r} is not a function that a module defines at its top level, so other processes may"
            " not know it. Define it there, or give it a name with @job(name=...)."
        )
    return origin


def _schedules(name: str, given: Any, timezone: str | None) -> tuple[Schedule, ...]:
    """What `schedule=` and `timezone=` stand for. Raises ValueError for what cannot work."""
    schedules = []
    used = timezone is None
    try:
        for one in given if isinstance(given, list | tuple) else () if given is None else (given,):
            schedule = one if isinstance(one, Schedule) else Schedule(one)
            if timezone is not None and schedule.timezone is None and isinstance(schedule.when, str):
                schedule = replace(schedule, timezone=timezone)
                used = True
            schedules.append(schedule)
    except ValueError as error:
        raise ValueError(f"@job {name!r}: {error}") from None
    if not used:
        raise ValueError(
            f"@job {name!r}: there is no cron text that goes by the timezone {timezone!r}. Leave it out, or"
            " give schedule= a cron text without a time zone of its own."
        )
    return tuple(schedules)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """One thing or several of them, as a tuple."""
    return tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)


def _where(function: JobFunction[..., Any]) -> str:
    code = getattr(inspect.unwrap(function.func), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function.func)


def _checked(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options as they go into the table. Raises ValueError for one that cannot work."""
    for option, value in options.items():
        for problem in _problems(option, value):
            raise ValueError(f"@job {name!r}: {problem}")
        # Members of enums are welcome, and taken for what they stand for.
        if isinstance(value, str):
            options[option] = str.__str__(value)
        elif _is_integer(value):
            options[option] = int(value)
    return options


def _problems(option: str, value: Any) -> Iterator[str]:
    """Yield a sentence for what cannot work about the value of an option."""
    match option:
        case "func":
            yield from _function_problems(value)
        case "name" | "queue":
            yield from _text_problems(option, value)
        case "aliases":
            for alias in value:
                yield from _text_problems("alias", alias)
        case "priority":
            if not _is_integer(value) or not -100 <= value <= 100:
                yield f"the priority {value!r} must be a whole number from -100 to 100."
        case "max_attempts":
            if value is not None and (not _is_integer(value) or not 1 <= value <= 1_000_000):
                yield f"max_attempts is {value!r}; it must be a whole number from 1 to 1,000,000."
        case "backoff":
            if not _is_backoff(value):
                yield (
                    f"the backoff {value!r} must be seconds or a timedelta, not below zero, a sequence of"
                    " these, or a callable."
                )
        case "timeout":
            if value is not None and not (is_delay(value) and in_seconds(value) > 0):
                yield f"the timeout {value!r} must be seconds or a timedelta, above zero."
        case "retry_on" | "give_up_on":
            for class_ in value:
                if not isinstance(class_, type) or not issubclass(class_, BaseException):
                    yield f"{option} must hold exception classes, not {class_!r}."
        case "redact":
            if value is not None and (not callable(value) or iscoroutinefunction(value)):
                yield f"redact is {value!r}; it must be a plain function of the job's arguments."
        case "run_at":
            yield from _run_at_problems(value)


def _text_problems(what: str, text: Any) -> Iterator[str]:
    if not isinstance(text, str) or not 0 < len(text) <= 255 or "\x00" in text or not _is_text(text):
        yield f"the {what} {text!r} must be a text of 1 to 255 characters, without NUL."


def _run_at_problems(run_at: Any) -> Iterator[str]:
    if isinstance(run_at, timedelta):
        if not 0 <= run_at.total_seconds() <= LONGEST_DELAY:
            yield f"run_at is {run_at} from now; it must be between zero and ten years."
    elif not isinstance(run_at, datetime):
        yield f"run_at is {run_at!r}; it must be an aware datetime or a timedelta."
    elif run_at.utcoffset() is None:
        yield f"run_at is {run_at}, a naive datetime; make it aware, or pass a timedelta."
    elif not 1 < run_at.year < 9999:  # in another time zone it might be no date at all
        yield f"run_at is {run_at}; it must be in the years 2 to 9998."


def _function_problems(func: Callable[..., Any]) -> Iterator[str]:
    """Yield a sentence if calling the function could not do the work of a job."""
    if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        yield "it is a generator function; a call of it would run nothing."
    try:
        signature = inspect.signature(func)
    except ValueError:
        yield f"{func!r} does not tell its parameters; wrap it in a function that does."
        return
    owner, _, _ = getattr(func, "__qualname__", "").rpartition(".")
    first = next(iter(signature.parameters), None)
    if owner and not owner.endswith("<locals>") and first in ("self", "cls"):
        yield (
            "it is a method, and a worker has no object to call it on. Make it a function of the module, or a"
            " static method."
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_backoff(backoff: object) -> bool:
    if backoff is None or callable(backoff):
        return True
    delays: list[Any] = [backoff]
    if isinstance(backoff, Sequence) and not isinstance(backoff, str | bytes):
        delays = list(backoff)
    return bool(delays) and all(map(_is_wait, delays))


def _is_wait(delay: object) -> bool:
    if not is_delay(delay):
        return False
    return delay >= timedelta(0) if isinstance(delay, timedelta) else delay >= 0


def run_if_immediate(ids: Sequence[int]) -> bool:
    """In immediate mode, run these jobs, which were just enqueued; those that are due. Returns whether it is.

    What runs jobs is above this module and asks it for the functions, so the app is asked for it.
    """
    if not config().IMMEDIATE:
        return False
    app: PGJobsConfig = apps.get_app_config("django_pgjobs")  # type: ignore[assignment]
    app.run_now(ids)
    return True


def _pair(call: object) -> tuple[Sequence[Any], dict[str, Any]]:
    """What enqueue_many is given, checked: ("ab", {}) would be taken for two arguments."""
    match call:
        case [list() | tuple() as args, dict() as kwargs]:
            return args, kwargs
    raise InvalidArguments(f"a pair (args, kwargs), such as ((1, 2), {{}}), is needed, not {call!r:.100}.")


@functools.cache
def _model_and_columns(*known: str) -> tuple[type[BackgroundJob], dict[str, None]]:
    """The model of jobs, and which of its columns are known, in their order and quickly found."""
    model: type[BackgroundJob] = apps.get_model("django_pgjobs", "BackgroundJob")
    names = (field.attname for field in model._meta.concrete_fields)
    return model, dict.fromkeys(name for name in names if name in known)


class Caller:
    """The place in the caller's code that a warning is about."""

    __slots__ = ("filename", "globals", "line")

    def __init__(self, frame: FrameType) -> None:
        self.filename = frame.f_code.co_filename
        self.line = frame.f_lineno
        self.globals = frame.f_globals

    def warn(self, message: str) -> None:
        registry = self.globals.setdefault("__warningregistry__", {})
        module = self.globals.get("__name__")
        warnings.warn_explicit(message, RuntimeWarning, self.filename, self.line, module, registry)


def _queue_alias(name: str, caller: Caller) -> str:
    """The alias that the queue lives on; complain when the caller's transaction is on another one."""
    settings = config()
    if not connections[settings.DATABASE].in_atomic_block:
        for other in connections.all(initialized_only=True):
            if other.in_atomic_block:
                message = (
                    f"Job {name!r} is enqueued on {settings.DATABASE!r} while a transaction is open on"
                    f" {other.alias!r}: it will exist even if that transaction is rolled back. Enqueue it"
                    f" with transaction.on_commit(..., using={other.alias!r})."
                )
                if settings.STRICT_ALIAS:
                    raise TransactionManagementError(message)
                caller.warn(message)
                break
    return settings.DATABASE
