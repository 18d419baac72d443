"""Run one claimed job and say what became of it. Writes nothing but the completion of an atomic job.

Everything that belongs to the job runs here, in the place where the job runs: its function, its backoff, its
exceptions' own methods. What comes out is plain data, an `Outcome`, whatever the job did.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import hashlib
import inspect
import logging
import os
import re
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import asgiref
import psycopg
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections, transaction

from . import jobs, signals, store
from .abort import TaskAbort, ThreadAbort
from .conf import config
from .context import CurrentJob, Report, Running
from .exceptions import GiveUp, JobStopped, JobTimeout, Retry, Snooze
from .lifecycle import (
    NO_RESULT,
    Completed,
    Crashed,
    Event,
    Failed,
    Interrupted,
    JobError,
    Outcome,
    Snoozed,
    Stopped,
    Unknown,
    decide,
    in_seconds,
    is_delay,
)
from .payload import clean_text, decode_arguments, encode_result
from .redaction import Redacted
from .store import Claim

logger = logging.getLogger(__name__)

MESSAGE_LIMIT = 1500  # bytes; an entry of a job's error history stays below 8 kB
TRACEBACK_LIMIT = 5500
FRAME_LIMIT = 25
CHAIN_LIMIT = 5  # exceptions that led to each other
GROUP_LIMIT = 3  # exceptions of one group, and groups in groups


def run(claim: Claim, abort: ThreadAbort | None = None, report: Report | None = None) -> Outcome:
    """Run a job in this thread, an async one on a loop of its own. Never raises for what the job does.

    The body sees a context of its own: language, time zone and context variables are back at their defaults.
    Another thread may use `abort` to stop it. What the job says of its progress goes to `report`.
    """
    prepared = _prepare(claim)
    if not isinstance(prepared, jobs.Call):
        return prepared
    body = prepared.body()
    if prepared.function.is_async:
        body = async_to_sync(functools.partial(_awaited, body))
    abort = abort or ThreadAbort()
    run = _run_atomically if prepared.function.atomic else _run_plainly
    running = Running(claim, report)
    context = contextvars.Context()
    try:
        outcome = context.run(run, body, abort, running, claim)
    except BaseException as error:
        abort.close()  # again: the exception may have arrived while it was being closed
        if type(error) is KeyboardInterrupt and threading.current_thread() is threading.main_thread():
            raise  # somebody pressed Ctrl-C in a test or a debugger
        error = _meant(error, abort)
        outcome = _outcome_of(error, abort, claim, prepared.function)
        _ended(running, outcome, claim)
        if signals.job_raised.receivers and isinstance(outcome, Failed):
            context.run(_tell, claim, _failure(running, error, outcome, claim))
        if prepared.hears_its_end:
            contextvars.Context().run(prepared.ended, outcome)
        return outcome
    _ended(running, outcome, claim)
    if prepared.hears_its_end:
        contextvars.Context().run(prepared.ended, outcome)
    return outcome


def _run_plainly(body: Callable[[], Any], abort: ThreadAbort, running: Running, claim: Claim) -> Outcome:
    return _outcome_of_result(_run_body(body, abort, running), claim)


def _run_body(body: Callable[[], Any], abort: ThreadAbort, running: Running) -> Any:
    with abort, running as job:
        if signals.job_started.receivers:
            signals.job_started.send_robust(jobs.find(job.name), job=job)
        return body()


def _run_atomically(body: Callable[[], Any], abort: ThreadAbort, running: Running, claim: Claim) -> Outcome:
    """Commit the effects of a body and its completion together, or neither.

    The completion comes last, and waits for nobody but a renewal. From then until the end of the transaction
    the row is locked: so whoever wants to know what became of a COMMIT that was never answered has only to
    settle the job, which fails while that is undecided, and is refused once it took effect.
    """
    alias = config().DATABASE
    connection = connections[alias]
    outermost = not connection.in_atomic_block  # it is not in the TestCase of somebody who drains the queue
    committed = []
    try:
        with transaction.atomic(using=alias):
            transaction.on_commit(lambda: committed.append(True), using=alias)  # the first one to be called
            with connection.cursor() as cursor:
                if outermost:
                    cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                outcome = _outcome_of_result(_run_body(body, abort, running), claim)
                if not isinstance(outcome, Completed):
                    raise _RolledBack(outcome)
                if outermost and not _in_transaction(connection):
                    raise _RolledBack(_rolled_back("its body had ended the transaction", claim))
                verdict = decide(outcome, claim, jobs.policy_of(claim.job_name))
                if not store.complete_own(cursor, claim, verdict):
                    raise _RolledBack(_rolled_back("its claim was lost", claim))
    except _RolledBack as instead:
        return instead.outcome
    except BaseException as error:
        if not committed or isinstance(error, KeyboardInterrupt):
            raise
        logger.exception("%s: a callback of on_commit failed. The job is completed.", claim)
    if outermost and not committed:
        return _rolled_back("nothing was committed: is AUTOCOMMIT off, or was its connection replaced", claim)
    return Completed(recorded=True)


class _RolledBack(Exception):
    """Leaves the transaction of an atomic job."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


def _rolled_back(why: str, claim: Claim) -> Failed:
    text = f"The atomic job was not completed, since {why}; what was left of it is rolled back."
    return Failed(_report("", text, claim.job_name))


def _in_transaction(connection: Any) -> bool:
    status = connection.connection.info.transaction_status
    return bool(status != psycopg.pq.TransactionStatus.IDLE)


async def arun(claim: Claim, abort: TaskAbort | None = None, report: Report | None = None) -> Outcome:
    """Run an async job on the running loop. Give it a context and a thread for sync code of its own."""
    prepared = _prepare(claim)
    if not isinstance(prepared, jobs.Call):
        return prepared
    abort = abort or TaskAbort()
    running = Running(claim, report)
    try:
        with abort, running as job:
            if signals.job_started.receivers:
                # Not `asend_robust`, of Django 5.2: the body is to see what receivers set in its context.
                await sync_to_async(signals.job_started.send_robust)(jobs.find(job.name), job=job)
            result = await prepared.body()()
        outcome = _outcome_of_result(result, claim)
    except BaseException as error:
        error = _meant(error, abort)
        outcome = _outcome_of(error, abort, claim, prepared.function)
        _ended(running, outcome, claim)
        if signals.job_raised.receivers and isinstance(outcome, Failed):
            await signals.job_raised.asend_robust(**_failure(running, error, outcome, claim))
        await prepared.aended(outcome)
        return outcome
    _ended(running, outcome, claim)
    await prepared.aended(outcome)
    return outcome


def _failure(running: Running, error: BaseException, outcome: Failed, claim: Claim) -> dict[str, Any]:
    """What the receivers of `job_raised` are told."""
    event = decide(outcome, claim, jobs.policy_of(claim.job_name)).event
    return {"sender": jobs.find(claim.job_name), "job": running.job, "exception": error, "event": event}


def _tell(claim: Claim, failure: dict[str, Any]) -> None:
    try:
        signals.job_raised.send_robust(**failure)
    except BaseException:  # SystemExit, say, which would end this slot
        logger.exception("%s: a receiver of job_raised failed.", claim)


async def _awaited(body: Callable[[], Any]) -> Any:
    return await body()


def announce(claim: Claim, event: Event, duration: float | None, error: JobError | None) -> None:
    """Tell the receivers of signals, once it is committed, what became of an attempt.

    Where attempts are traced, one that could not end its span itself gets one here.
    """
    if _lacks_its_span(event, duration, error):
        from . import tracing

        began = claim.claimed_at if duration is None else time.time() - duration
        outcome = Interrupted() if error is None else Crashed(error)
        span = tracing.ProcessSpan(CurrentJob(claim), began)
        span.end(outcome, Redacted(claim.job_name, claim.payload).text)
    for signal in (signals.job_finished, *([signals.job_buried] if event is Event.BURY else [])):
        signal.send_robust(
            jobs.find(claim.job_name), job=CurrentJob(claim), event=event, duration=duration, error=error
        )


def is_heard_of(event: Event, duration: float | None, error: JobError | None) -> bool:
    """Whether an end of an attempt is to be announced."""
    return bool(
        signals.job_finished.receivers
        or (event is Event.BURY and signals.job_buried.receivers)
        or _lacks_its_span(event, duration, error)
    )


def may_be_heard_of() -> bool:
    """Whether there are ends of attempts that are to be announced."""
    return bool(signals.job_finished.receivers or signals.job_buried.receivers or config().TRACING)


def _lacks_its_span(event: Event, duration: float | None, error: JobError | None) -> bool:
    """Whether an attempt is traced, and the process that ran it has died with it.

    Such an error has no fingerprint, since no executor has described it. What never started took no time.
    """
    if not config().TRACING or duration == 0.0:
        return False
    is_failure = event in (Event.FAIL, Event.BURY)
    return event is Event.INTERRUPT or (is_failure and error is not None and not error.fingerprint)


def _prepare(claim: Claim) -> jobs.Call | Outcome:
    function = jobs.find(claim.job_name)
    if function is None:
        return unknown(claim.job_name)
    try:
        return function.call(claim, *decode_arguments(claim.payload))
    except ValueError as error:
        report = _report("builtins.ValueError", str(error), claim.job_name)
        outcome = Failed(report, give_up=True)  # now as ever
        _ended(Running(claim), outcome, claim)
        return outcome


def _ended(running: Running, outcome: Outcome, claim: Claim) -> None:
    """Say what is left to say of an attempt, where it ran."""
    running.job.flush()
    if running.span is not None:
        running.span.end(outcome, lambda text: Redacted(claim.job_name, claim.payload).text(text))


def unknown(name: str) -> Unknown:
    """The outcome of a job whose name nobody here knows."""
    return Unknown(
        JobError(
            "",
            f"No job function is named {name!r} here. Was it renamed? Keep the old name with"
            " @job(aliases=[...]).",
        )
    )


def _outcome_of_result(result: object, claim: Claim) -> Outcome:
    if result is None:
        return NO_RESULT
    if inspect.iscoroutine(result):
        result.close()
        text = "The function returned a coroutine that nobody awaited. Make it an async function."
        return Failed(_report("builtins.TypeError", text, claim.job_name), give_up=True)
    return Completed(*encode_result(result, config().MAX_PAYLOAD_BYTES))


def _meant(error: BaseException, abort: ThreadAbort | TaskAbort) -> BaseException:
    """An exception out of the body, or what it was aborted with, if that is what came out."""
    if abort.error is not None and type(error) in (asyncio.CancelledError, JobTimeout):
        return abort.error.with_traceback(error.__traceback__)
    return error


def _outcome_of(
    error: BaseException,
    abort: ThreadAbort | TaskAbort,
    claim: Claim,
    function: jobs.JobFunction[..., Any],
) -> Outcome:
    """What an exception out of the body means."""
    if isinstance(abort.error, JobStopped):
        return Stopped()  # whatever its clean-up raised
    report = describe(error, claim.job_name)
    try:
        return _by_the_rules(error, report, claim, function)
    except BaseException as broken:
        # Described, since the log would ask for more attributes of exceptions that are not its own.
        problem = Redacted(claim.job_name, claim.payload).text(describe(broken, claim.job_name).traceback)
        logger.error("%s: its rules failed; the default applies.\n%s", claim, problem)
        return Failed(report)


def _by_the_rules(
    error: BaseException, report: JobError, claim: Claim, function: jobs.JobFunction[..., Any]
) -> Outcome:
    """What an exception means by the job's own rules, which are its code and may raise anything."""
    if isinstance(error, JobStopped):
        return Stopped()
    if isinstance(error, Snooze) and is_delay(error.delay):
        return Snoozed(in_seconds(error.delay))
    if isinstance(error, GiveUp) or function.gives_up_on(type(error)):
        return Failed(report, give_up=True)
    if isinstance(error, Retry) and is_delay(error.delay):
        return Failed(report, retry_in=in_seconds(error.delay))
    if not callable(function.backoff):
        return Failed(report)
    wait = function.backoff(error, claim)
    if wait is None:
        return Failed(report, give_up=True)
    if is_delay(wait):
        return Failed(report, retry_in=in_seconds(wait))
    raise TypeError(f"A backoff returns seconds, a timedelta or None, not {wait!r}.")


# ── Describing exceptions: bounded in time and size ───────────────────────────────────────────────────────


def describe(error: BaseException, job_name: str) -> JobError:
    """An exception as text that Postgres can store, without local variables."""
    try:
        exception = _class_path(error)
        message = _message(error)
        return JobError(
            exception=exception,
            message=message,
            traceback=clean_text(_traceback(error), TRACEBACK_LIMIT),
            fingerprint=_fingerprint(exception, job_name, message, error.__traceback__),
        )
    except BaseException:  # what is asked of an exception here, its class may have replaced
        text = f"{object.__repr__(error)} cannot be described, since its own methods fail."
        return _report("", text, job_name)


def _report(exception: str, message: str, job_name: str) -> JobError:
    """The description of a failure of which there is no more than a message."""
    message = clean_text(message, MESSAGE_LIMIT)
    return JobError(exception, message, fingerprint=_fingerprint(exception, job_name, message, None))


def _class_path(error: BaseException) -> str:
    return clean_text(f"{type(error).__module__}.{type(error).__qualname__}", 255)


def _message(error: BaseException) -> str:
    try:
        return clean_text(str(error), MESSAGE_LIMIT)
    except Exception:
        return "<exception str() failed>"  # as Python prints it


def _traceback(error: BaseException) -> str:
    """The exception and what led to it, oldest first, as Python prints them."""
    chain: list[str] = []
    seen: set[int] = set()
    link = ""
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if len(chain) == CHAIN_LIMIT:
            chain.append(f"Earlier exceptions are not shown.\n{link}")
            break
        seen.add(id(current))
        chain.append(_one_traceback(current) + link)
        if current.__cause__ is not None:
            link = "\nThe above exception was the direct cause of the following one:\n\n"
            current = current.__cause__
        else:
            link = "\nWhile handling the above exception, the following one occurred:\n\n"
            current = None if current.__suppress_context__ else current.__context__
    return "".join(reversed(chain))


def _one_traceback(error: BaseException, depth: int = 0) -> str:
    frames = traceback.extract_tb(_users_frames(error.__traceback__), limit=-FRAME_LIMIT)
    stack = "".join(traceback.format_list(frames))
    heading = "Traceback (most recent call last):\n" if stack else ""
    name, message = _class_path(error).removeprefix("builtins."), _message(error)
    text = f"{heading}{stack}{name}: {message}\n" if message else f"{heading}{stack}{name}\n"
    for note in getattr(error, "__notes__", [])[:GROUP_LIMIT]:
        text += f"{clean_text(str(note), 500)}\n"
    if isinstance(error, BaseExceptionGroup) and depth < GROUP_LIMIT:
        text += _group(error.exceptions, depth + 1)
    return text


def _group(errors: tuple[BaseException, ...], depth: int) -> str:
    """The first exceptions of a group, indented."""
    parts = []
    for number, error in enumerate(errors[:GROUP_LIMIT], start=1):
        parts.append(f"Exception {number} of {len(errors)} in the group:\n{_one_traceback(error, depth)}")
    return textwrap.indent("".join(parts), "    ")


# Between our call of a job function and its first line there is much that is not the user's.
_NOT_THE_USERS = tuple(
    os.path.join(path, "")
    for path in (
        os.path.dirname(__file__),
        *(path for module in (asgiref, asyncio, concurrent.futures) for path in module.__path__),
    )
)


def _users_frames(tb: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames at its top that are not the job's own."""
    while tb is not None:
        if not tb.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            break
        tb = tb.tb_next
    return tb


_VARIABLE = re.compile(
    r"0x[0-9a-f]+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d+|'[^']*'|\"[^\"]*\"", re.I
)


def _fingerprint(exception: str, job_name: str, message: str, tb: TracebackType | None) -> str:
    """Equal for failures of one job at one place whose messages are alike, numbers and quotations aside."""
    place = ""
    while tb is not None:
        place = f"{tb.tb_frame.f_code.co_qualname}:{tb.tb_lineno}"
        tb = tb.tb_next
    text = "\n".join((exception, job_name, _VARIABLE.sub("*", message[:500]), place))
    return hashlib.sha1(text.encode(errors="replace"), usedforsecurity=False).hexdigest()[:16]
