"""Traces by OpenTelemetry, where `PGJOBS["TRACING"]` asks for them; nothing is imported from here otherwise.

To enqueue is a span, `send <queue>`, whose context goes along in the job's own. Each attempt is a span,
`process <queue>`, and a child of that one, so that a job with all its attempts is in the trace of the request
that enqueued it. Names and attributes are those of OpenTelemetry's conventions for messaging. Where spans go
is the project's to say, by its tracer provider; when that fails, it is logged, and harms no job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured

from .conf import SETTING
from .lifecycle import Crashed, Failed, Outcome
from .signals import executor_stopping

try:
    from opentelemetry import context as contexts
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImproperlyConfigured(
        f"{SETTING}['TRACING'] is True, which needs the extra django-pgjobs[opentelemetry]: {error}."
    ) from error

if TYPE_CHECKING:
    from .context import CurrentJob

logger = logging.getLogger(__name__)

SYSTEM = "django_pgjobs"
LONGEST = 512  # characters of a header that goes along; what is longer is dropped, as W3C's standard allows

_tracer = trace.get_tracer("django_pgjobs")
_propagator = TraceContextTextMapPropagator()


def connect() -> None:
    """Have executors export what they have gathered before they end."""
    executor_stopping.connect(flush, dispatch_uid="django_pgjobs.tracing")


def flush(**kwargs: Any) -> None:
    """Export the spans that wait in this process. Returns when that is done, or was given up."""
    force_flush = getattr(trace.get_tracer_provider(), "force_flush", None)
    if force_flush is not None:
        force_flush()


# ── Where jobs are enqueued ───────────────────────────────────────────────────────────────────────────────


@contextmanager
def sending(job_name: str, queue: str, count: int | None = None) -> Iterator[trace.Span]:
    """The span of an enqueueing, which is the current one inside. With `count`, one span for so many jobs."""
    attributes = _attributes("send", job_name, queue)
    if count is not None:
        attributes["messaging.batch.message_count"] = count
    span: trace.Span = trace.INVALID_SPAN
    with _harmless():
        span = _tracer.start_span(f"send {queue}", kind=trace.SpanKind.PRODUCER, attributes=attributes)
    token = contexts.attach(trace.set_span_in_context(span))
    try:
        yield span
    except BaseException as error:  # its message may have arguments, so it stays out
        _fail(span, f"{type(error).__module__}.{type(error).__qualname__}")
        raise
    finally:
        contexts.detach(token)
        with _harmless():
            span.end()


def sent(span: trace.Span, id: int, *, is_new: bool) -> None:
    """Add to a span which job was enqueued, or was there and is equal."""
    span.set_attribute("messaging.message.id", str(id))
    if not is_new:
        span.set_attribute(f"messaging.{SYSTEM}.is_new", False)


def carry(context: dict[str, Any]) -> dict[str, Any]:
    """A job's context with that of the current span, unless it brings one of its own."""
    if "traceparent" in context:
        return context
    headers: dict[str, str] = {}
    _propagator.inject(headers)
    return {name: value for name, value in headers.items() if len(value) <= LONGEST} | context


# ── Where jobs run ────────────────────────────────────────────────────────────────────────────────────────


class ProcessSpan:
    """The span of one attempt. It is the current one from `enter` to `leave`.

    It begins as it is made, or has begun at a time in seconds of the epoch.
    """

    __slots__ = ("_span", "_token")

    def __init__(self, job: CurrentJob, began: float | None = None) -> None:
        self._span: trace.Span = trace.INVALID_SPAN
        self._token: Any = None
        attributes = _attributes("process", job.name, job.queue) | {
            "messaging.message.id": str(job.id),
            f"messaging.{SYSTEM}.attempt": job.attempt,
            f"messaging.{SYSTEM}.max_attempts": job.max_attempts,
        }
        with _harmless():
            parent = _propagator.extract(_headers(job.context), contexts.Context())
            creation = trace.get_current_span(parent).get_span_context()
            self._span = _tracer.start_span(
                f"process {job.queue}",
                parent,
                trace.SpanKind.CONSUMER,
                attributes,
                links=[trace.Link(creation)] if creation.is_valid else [],
                start_time=None if began is None else int(began * 1e9),
            )

    def enter(self) -> None:
        self._token = contexts.attach(trace.set_span_in_context(self._span))

    def leave(self) -> None:
        contexts.detach(self._token)

    def end(self, outcome: Outcome, shown: Callable[[str], str]) -> None:
        """End it with what became of the attempt. `shown` makes a text about the job free of secrets."""
        if not self._span.is_recording():
            return
        with _harmless():
            self._span.set_attribute(f"messaging.{SYSTEM}.outcome", type(outcome).__name__.lower())
            if isinstance(outcome, Failed | Crashed):
                class_, message = outcome.error.exception, shown(outcome.error.message)
                event = {"exception.type": _without_builtins(class_), "exception.message": message}
                if outcome.error.traceback:
                    event["exception.stacktrace"] = shown(outcome.error.traceback)
                self._span.add_event("exception", event)
                _fail(self._span, class_, message)
        with _harmless():
            self._span.end()


def _headers(context: dict[str, Any]) -> dict[str, str]:
    """The headers out of a row, which anybody may have written."""
    found = {name: context.get(name) for name in ("traceparent", "tracestate")}
    return {name: text for name, text in found.items() if isinstance(text, str) and len(text) <= LONGEST}


# ── Both ──────────────────────────────────────────────────────────────────────────────────────────────────


def _attributes(operation: str, job_name: str, queue: str) -> dict[str, Any]:
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.type": operation,
        "messaging.operation.name": operation,
        "messaging.destination.name": queue,
        f"messaging.{SYSTEM}.job_name": job_name,
    }


def _fail(span: trace.Span, class_: str, message: str = "") -> None:
    name = _without_builtins(class_)
    span.set_attribute("error.type", name or "_OTHER")
    text = f"{name}: {message}" if name and message else name or message
    span.set_status(trace.StatusCode.ERROR, text)


def _without_builtins(class_: str) -> str:
    return class_.removeprefix("builtins.")


@contextmanager
def _harmless() -> Iterator[None]:
    """Log what the project's tracer provider raises, and go on."""
    try:
        yield
    except Exception:
        logger.exception("A span was lost, since the tracer provider failed.")
