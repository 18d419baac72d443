"""What surrounds a job while it runs: itself, its progress, and what it brings from where it was enqueued."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from .conf import SETTING, config
from .exceptions import InvalidArguments
from .payload import NotJSON, clean_text, encode_object
from .store import Claim

if TYPE_CHECKING:
    from .tracing import ProcessSpan

PROGRESS_INTERVAL = 1.0  # seconds between two reports of one job, at least
MESSAGE_LIMIT = 500  # bytes
CONTEXT_LIMIT = 16 * 1024  # bytes of JSON text

# What takes a job's progress to the database: a JSON text, to be merged into its metadata.
Report = Callable[[str], None]

_current: ContextVar[CurrentJob | None] = ContextVar("pgjobs_current_job", default=None)


class CurrentJob:
    """The job that is running, as its own code sees it. Made by a worker for each attempt."""

    __slots__ = (
        "_next_report", "_report", "_unreported", "attempt", "context", "id", "max_attempts", "name", "queue"
    )  # fmt: skip

    def __init__(self, claim: Claim, report: Report | None = None) -> None:
        self.id = claim.id
        self.name = claim.job_name
        self.queue = claim.queue_name
        self.attempt = claim.attempts  # 1 for the first
        self.max_attempts = claim.max_attempts
        self.context = _decoded(claim.context)  # what `capture` returned where the job was enqueued
        self._report = report
        self._next_report = 0.0
        self._unreported: str | None = None

    def __repr__(self) -> str:
        return f"<CurrentJob {self.name} #{self.id}, attempt {self.attempt} of {self.max_attempts}>"

    def set_progress(self, done: float, total: float | None = None, message: str = "") -> None:
        """Tell how far the job has come: `done` of `total` in any unit, with a few words.

        Cheap, so it can be called in a loop: at most one report a second is written, and the last one when
        the body ends. It shows in the admin and as `job.progress`. Raises ValueError for numbers below zero
        or not finite, and TypeError for what is no number.
        """
        for number in (done, 0 if total is None else total):
            if not 0 <= number <= sys.float_info.max:  # which NaN is not, either
                raise ValueError(f"A progress of {done!r} of {total!r} makes no sense; count from zero.")
        progress = {"done": done, "total": total, "message": clean_text(str(message), MESSAGE_LIMIT)}
        self._unreported = json.dumps({"progress": progress})
        if time.monotonic() >= self._next_report:
            self.flush()

    def flush(self) -> None:
        """Report what has not been reported. Called once the body has ended."""
        if self._unreported is not None and self._report is not None:
            self._next_report = time.monotonic() + PROGRESS_INTERVAL
            text, self._unreported = self._unreported, None
            self._report(text)


def current_job() -> CurrentJob | None:
    """The job whose body this code is called from, however deep; None outside of any."""
    return _current.get()


class Running:
    """As a context manager around a body: `current_job()`, its span, the project's own context restored."""

    __slots__ = ("_pid", "_restored", "_token", "job", "span")

    def __init__(self, claim: Claim, report: Report | None = None) -> None:
        self.job = CurrentJob(claim, report)
        self.span: ProcessSpan | None = None  # where jobs are traced
        if config().TRACING:
            from . import tracing

            self.span = tracing.ProcessSpan(self.job)

    def __enter__(self) -> CurrentJob:
        self._pid = os.getpid()
        self._token: Token[CurrentJob | None] = _current.set(self.job)
        if self.span is not None:
            self.span.enter()
        self._restored = _restore(self.job.context)
        self._restored.__enter__()
        return self.job

    def __exit__(self, *exception: Any) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # a child that the body has forked must not touch what is shared
        try:
            self._restored.__exit__(*exception)
        finally:
            if self.span is not None:
                self.span.leave()
            _current.reset(self._token)


# ── The project's own context ─────────────────────────────────────────────────────────────────────────────


class Hook(Protocol):
    """What `PGJOBS["CONTEXT"]` names: a module, or any object, with these two functions."""

    def capture(self) -> dict[str, Any]:
        """What a job that is enqueued here and now should bring along, as JSON."""

    def restore(self, context: dict[str, Any]) -> AbstractContextManager[Any]:
        """A context manager in which the job runs, for what `capture` returned ({} if nothing was)."""


def captured() -> str:
    """The metadata of a job that is enqueued now, as JSON text: what the hook has captured, and the trace.

    Raises InvalidArguments if that is no dictionary, not JSON or too large; and whatever the hook raises.
    """
    path, tracing_is_on = config().CONTEXT, config().TRACING
    if path is None and not tracing_is_on:
        return "{}"
    context = {} if path is None else load_hook(path).capture()
    if tracing_is_on and isinstance(context, dict):
        from . import tracing

        context = tracing.carry(context)
    try:
        return f'{{"context": {encode_object(context, CONTEXT_LIMIT)}}}'
    except NotJSON as error:
        raise InvalidArguments(f"What {path}.capture() returned cannot be stored: {error}.") from None


def _restore(context: dict[str, Any]) -> AbstractContextManager[Any]:
    path = config().CONTEXT
    if path is None:
        return _NOTHING
    restored: Any = load_hook(path).restore(context)
    if not isinstance(restored, AbstractContextManager):
        raise TypeError(f"{path}.restore() has to return a context manager, not {restored!r}.")
    return restored


_NOTHING = nullcontext()


@cache
def load_hook(path: str) -> Hook:
    """The hook of a dotted path. Raises ImproperlyConfigured, saying what is wrong."""
    hook: Any
    try:
        try:
            hook = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{path}.".startswith(f"{error.name}."):
                raise  # it is there, and needs something that is not
            hook = import_string(path)
    except ImportError as error:
        text = f"{SETTING}['CONTEXT'] is {path!r}, which cannot be imported: {error}."
        raise ImproperlyConfigured(text) from error
    for name in ("capture", "restore"):
        if not callable(getattr(hook, name, None)):
            raise ImproperlyConfigured(f"{SETTING}['CONTEXT'] is {path!r}, which has no function {name}().")
    found: Hook = hook
    return found


def _decoded(text: str | None) -> dict[str, Any]:
    """The context out of a row, which anybody may have written."""
    if text is None:
        return {}
    try:
        context = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return context if isinstance(context, dict) else {}
