from __future__ import annotations

import asyncio
import contextvars
import decimal
import json
import logging
import math
import queue
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.utils import timezone, translation
from django.utils.translation import gettext_lazy

from django_pgjobs import GiveUp, JobStopped, JobTimeout, Retry, Snooze, execution, job, jobs
from django_pgjobs.abort import TaskAbort, ThreadAbort
from django_pgjobs.executor import Assignment, _AsyncSlots, _Progress, _ThreadSlots
from django_pgjobs.lifecycle import (
    LONGEST_DELAY,
    NO_RESULT,
    Completed,
    Failed,
    JobError,
    Snoozed,
    Stopped,
    Unknown,
    from_plain,
    to_plain,
)
from django_pgjobs.marks import Marks, size
from django_pgjobs.store import Claim
from tests.models import Effect

NAME = "tests.body"


@pytest.fixture(autouse=True)
def registry():
    before = dict(jobs.registry)
    yield jobs.registry
    jobs.registry.clear()
    jobs.registry.update(before)


def claim(payload: str = "{}", name: str = NAME) -> Claim:
    return Claim(
        id=1, token=None, attempts=1, max_attempts=3, job_name=name, queue_name="default", payload=payload
    )


def run(body, payload: str = "{}", **options):
    """The outcome of a job with this body, plain or async."""
    jobs.registry.pop(NAME, None)
    job(name=NAME, **options)(body)
    return execution.run(claim(payload))


def raising(error):
    """A body that raises `error`, a class or an object."""

    def body():
        raise error

    return body


def araising(error):
    async def body():
        await asyncio.sleep(0)
        raise error

    return body


def both(error):
    """The outcomes of a plain and an async body that raise `error`, the latter also on a shared loop."""
    outcomes = [run(raising(error)), run(araising(error))]
    outcomes.append(async_to_sync(execution.arun)(claim()))
    return outcomes


# ── Returning ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        (None, Completed()),
        (5, Completed("5")),
        ({"a": (1, 2)}, Completed('{"a": [1, 2]}')),
        (
            {1},
            Completed(None, "The result could not be stored: result: set is not JSON; pass a sorted list."),
        ),
        (
            ["a\x00"],
            Completed(
                None,
                "The result could not be stored: result[0]: the string has a NUL character, which Postgres"
                " cannot store; remove it.",
            ),
        ),
    ],
)
def test_a_body_that_returns_completes_the_job(value, outcome):
    async def async_body():
        return value

    assert run(lambda: value) == outcome
    assert run(async_body) == outcome
    assert async_to_sync(execution.arun)(claim()) == outcome


def test_a_result_that_is_too_large_is_not_kept(settings):
    settings.PGJOBS = {"MAX_PAYLOAD_BYTES": 100}

    assert run(lambda: "x" * 99) == Completed(
        None, "The result could not be stored: it takes more than 100 bytes as JSON."
    )


def test_the_body_gets_the_arguments_of_the_payload():
    def body(self, x, *args, body, **kwargs):
        return [self, x, args, body, kwargs]

    payload = json.dumps({"args": [1, 2, 3], "kwargs": {"body": 4, "callable": 5, "claim": 6, "func": 7}})

    assert run(body, payload) == Completed('[1, 2, [3], 4, {"callable": 5, "claim": 6, "func": 7}]')


def test_parameters_of_async_bodies_may_have_any_names():
    async def body(self, awaitable, args):
        return [self, awaitable, args]

    assert run(body, '{"kwargs": {"self": 1, "awaitable": 2, "args": 3}}') == Completed("[1, 2, 3]")


class Async:
    async def __call__(self, x):
        return x


def test_an_async_call_of_an_object_is_awaited():
    assert run(Async(), '{"args": [5]}') == Completed("5")
    assert async_to_sync(execution.arun)(claim('{"args": [5]}')) == Completed("5")


def test_a_coroutine_that_nobody_awaited_is_a_failure_and_not_a_success():
    async def work():
        raise AssertionError("never run")

    outcome = run(lambda: work())

    assert outcome.give_up
    assert str(outcome.error) == (
        "TypeError: The function returned a coroutine that nobody awaited. Make it an async function."
    )


# ── Raising ───────────────────────────────────────────────────────────────────────────────────────────────


class Plain(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("boom"), "ValueError: boom"),
        (ValueError, "ValueError: "),
        (Plain("a", 1), "Plain: ('a', 1)"),
        (BaseException("boom"), "BaseException: boom"),
        (SystemExit(0), "SystemExit: 0"),
        (SystemExit("message"), "SystemExit: message"),
        (GeneratorExit(), "GeneratorExit: "),
        (asyncio.CancelledError("by whom"), "CancelledError: by whom"),
        (StopAsyncIteration(), "StopAsyncIteration: "),
        (KeyError("k"), "KeyError: 'k'"),
        (MemoryError(), "MemoryError: "),
        (ExceptionGroup("several", [ValueError(1)]), "ExceptionGroup: several (1 sub-exception)"),
        (ValidationError({"name": ["wrong"]}), "ValidationError: {'name': ['wrong']}"),
        (ValueError(gettext_lazy("Yes")), "ValueError: Yes"),
        (ValueError(b"\xff"), "ValueError: b'\\xff'"),
        (ValueError("a\x00b\ud800c\x1b"), "ValueError: a\\x00b\\ud800c\\x1b"),
    ],
)
def test_whatever_a_body_raises_is_a_failed_attempt(error, text):
    for outcome in both(error):
        assert isinstance(outcome, Failed)
        assert (str(outcome.error), outcome.retry_in, outcome.give_up) == (text, None, False)


def test_stop_iteration_is_a_failed_attempt():
    assert str(run(raising(StopIteration(5))).error) == "StopIteration: 5"
    assert str(run(araising(StopIteration(5))).error) == "RuntimeError: coroutine raised StopIteration"


def test_a_keyboard_interrupt_in_a_slot_is_a_failed_attempt():
    job(name=NAME)(raising(KeyboardInterrupt))
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(execution.run(claim())))
    thread.start()
    thread.join()

    assert [str(outcome.error) for outcome in outcomes] == ["KeyboardInterrupt: "]


def test_a_keyboard_interrupt_in_the_main_thread_is_somebody_who_pressed_ctrl_c():
    with pytest.raises(KeyboardInterrupt):
        run(raising(KeyboardInterrupt))


def test_endless_recursion_is_a_failed_attempt():
    def body():
        body()

    outcome = run(body)

    assert str(outcome.error).startswith("RecursionError: maximum recursion depth exceeded")
    assert "[Previous line repeated" in outcome.error.traceback


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ("{}", "missing 1 required positional argument: 'x'"),
        ('{"args": [1, 2]}', "takes 1 positional argument but 2 were given"),
        ('{"args": [1], "kwargs": {"y": 2}}', "got an unexpected keyword argument 'y'"),
    ],
)
def test_arguments_that_fit_no_longer_are_a_failed_attempt(payload, text):
    def body(x): ...

    async def abody(x): ...

    for outcome in run(body, payload), run(abody, payload):
        assert outcome.error.message.endswith(text)
        assert not outcome.give_up
        assert outcome.error.traceback == f"TypeError: {outcome.error.message}\n"


# ── Wishes ────────────────────────────────────────────────────────────────────────────────────────────────

DELAYS = [
    (0, 0.0),
    (5, 5.0),
    (0.5, 0.5),
    (timedelta(minutes=1), 60.0),
    (-5, 0.0),
    (timedelta(-1), 0.0),
    (math.inf, LONGEST_DELAY),
    (10**400, LONGEST_DELAY),
    (timedelta.max, LONGEST_DELAY),
]


@pytest.mark.parametrize(("delay", "seconds"), DELAYS)
def test_retry_and_snooze_take_seconds_or_a_timedelta(delay, seconds):
    for outcome in both(Retry(delay)):
        assert (outcome.retry_in, outcome.give_up) == (seconds, False)
        assert str(outcome.error) == "Retry: The job asked to be retried."
    assert both(Snooze(delay)) == [Snoozed(seconds)] * 3


@pytest.mark.parametrize("delay", ["soon", b"", True, math.nan, [5], object])
@pytest.mark.parametrize("wish", [Retry, Snooze])
def test_a_delay_that_is_none_is_a_failed_attempt(wish, delay):
    def body():
        raise wish(delay)

    async def abody():
        raise wish(delay)

    for outcome in run(body), run(abody):
        assert str(outcome.error) == (
            f"TypeError: {wish.__name__} takes a delay in seconds or a timedelta, not {delay!r}."
        )
        assert (outcome.retry_in, outcome.give_up) == (None, False)


@pytest.mark.parametrize("delay", ["soon", math.nan, None, object(), [5]])
@pytest.mark.parametrize("wish", [Retry(1), Snooze(1)])
def test_a_delay_that_was_spoiled_afterwards_is_a_failed_attempt(wish, delay):
    wish.delay = delay

    for outcome in both(wish):
        assert isinstance(outcome, Failed)
        assert (outcome.retry_in, outcome.give_up) == (None, False)


def test_retry_without_a_delay_goes_by_the_jobs_backoff():
    assert run(raising(Retry())).retry_in is None
    assert run(raising(Retry), backoff=lambda error, claim: 7).retry_in == 7


def test_a_snooze_needs_a_delay():
    assert str(run(raising(Snooze)).error).startswith("TypeError: Snooze.__init__() missing 1 required")


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        (Retry(5, "not yet"), "Retry: not yet"),
        (Retry(reason="not yet"), "Retry: not yet"),
        (GiveUp("no such order"), "GiveUp: no such order"),
        (GiveUp(), "GiveUp: The job gave up."),
        (GiveUp, "GiveUp: The job gave up."),
    ],
)
def test_the_reason_of_a_wish_is_recorded(wish, text):
    for outcome in both(wish):
        assert str(outcome.error) == text
        assert outcome.give_up == text.startswith("GiveUp")


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        (Snooze(5), "The job asked to be run again after 5 s."),
        (Snooze(timedelta(minutes=1)), "The job asked to be run again after 0:01:00."),
        (Retry(), "The job asked to be retried."),
    ],
)
def test_a_wish_reads_as_a_sentence(wish, text):
    assert str(wish) == text


@pytest.mark.parametrize("wish", [Retry(5, "why"), Retry(), Snooze(timedelta(1)), GiveUp("why")])
def test_a_wish_survives_being_copied(wish):
    import pickle

    copy = pickle.loads(pickle.dumps(wish))

    assert (type(copy), vars(copy), str(copy)) == (type(wish), vars(wish), str(wish))


class Sooner(Retry):
    def __init__(self):
        super().__init__(1, "sooner")


def test_wishes_may_be_subclassed():
    assert run(raising(Sooner)).retry_in == 1


# ── retry_on, give_up_on, backoff ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "error", "gives_up"),
    [
        ({"retry_on": OSError}, OSError(), False),
        ({"retry_on": OSError}, ConnectionError(), False),
        ({"retry_on": OSError}, ValueError(), True),
        ({"retry_on": (OSError, ValueError)}, ValueError(), False),
        ({"retry_on": [OSError]}, ValueError(), True),
        ({"retry_on": OSError}, SystemExit(), True),
        ({"retry_on": OSError}, Retry(), False),
        ({"give_up_on": OSError}, ConnectionError(), True),
        ({"give_up_on": [OSError]}, ValueError(), False),
        ({"give_up_on": ConnectionError, "retry_on": OSError}, ConnectionError(), True),
        ({"give_up_on": ConnectionError, "retry_on": OSError}, OSError(), False),
        ({"retry_on": GiveUp}, GiveUp(), True),
        ({}, JobTimeout(), False),
        ({"retry_on": OSError}, JobTimeout(), True),
        ({"retry_on": (OSError, JobTimeout)}, JobTimeout(), False),
        ({"give_up_on": JobTimeout}, JobTimeout(), True),
        ({"give_up_on": Exception}, JobTimeout(), False),
    ],
)
def test_exception_classes_say_what_is_worth_a_retry(options, error, gives_up):
    assert run(raising(error), **options).give_up is gives_up


@pytest.mark.parametrize(
    ("options", "class_", "gives_up"),
    [
        ({}, JobTimeout, False),
        ({"give_up_on": JobTimeout}, JobTimeout, True),
        ({"retry_on": OSError}, JobTimeout, True),
        ({"retry_on": OSError}, ConnectionError, False),
        ({"retry_on": OSError}, Retry, False),
    ],
)
def test_a_job_function_tells_which_classes_end_a_job(options, class_, gives_up):
    assert job(name=NAME, **options)(print).gives_up_on(class_) is gives_up


@pytest.mark.parametrize("raised", [None, ValueError("in clean-up"), Snooze(5), GiveUp()])
def test_a_stopped_job_is_stopped_whatever_its_clean_up_raises(raised):
    abort = ThreadAbort()

    @job(name=NAME)
    def body():
        try:
            abort.abort(JobStopped("now"))
            while True:
                pass
        finally:
            if raised:
                raise raised

    assert execution.run(claim(), abort) == Stopped()


def test_an_overdue_job_fails_with_what_its_clean_up_raises():
    abort = ThreadAbort()

    @job(name=NAME)
    def body():
        try:
            abort.abort(JobTimeout("now"))
            while True:
                pass
        finally:
            raise ValueError("in clean-up")

    assert str(execution.run(claim(), abort).error) == "ValueError: in clean-up"


def test_a_job_that_is_aborted_before_its_body_is_entered_never_enters_it():
    """An abort may overtake the start that it belongs to."""
    plain, async_ = ThreadAbort(), TaskAbort()
    plain.abort(JobStopped("now"))
    async_.abort(JobTimeout("too late"))
    entered = []

    async def body():
        entered.append("async")

    job(name=NAME)(lambda: entered.append("plain"))
    assert execution.run(claim(), plain) == Stopped()
    jobs.registry.pop(NAME)
    job(name=NAME)(body)
    outcome = async_to_sync(execution.arun)(claim(), async_)
    assert (outcome.error.message, entered) == ("too late", [])


class Relay(Marks):
    """A channel, and marks whose other side aborts each job as soon as it sees that it starts."""

    def __init__(self):
        super().__init__(memoryview(bytearray(size(1, 1))), 1, 1)
        self.abort = None
        self.done = queue.SimpleQueue()
        self.sent = 0  # outcomes

    def start(self, cell, ticket):
        super().start(cell, ticket)
        self.abort(ticket, JobStopped("at once"))

    def send(self, messages):
        for kind, *rest in messages:
            outcomes = [NO_RESULT] * (len(rest[0]) // 2) if kind == "returned" else [from_plain(rest[-1])]
            self.sent += len(outcomes)
            for outcome in outcomes:
                self.done.put(outcome)


@pytest.mark.parametrize("slots_class", [_ThreadSlots, _AsyncSlots])
def test_an_abort_right_after_the_start_was_marked_is_not_lost(slots_class):
    entered = []

    async def abody():
        entered.append("async")

    job(name=NAME)(abody if slots_class is _AsyncSlots else lambda: entered.append("plain"))
    relay = Relay()
    limit = [1] if slots_class is _AsyncSlots else []
    slots = slots_class(relay, *limit, relay, _Progress(relay))
    relay.abort = slots.abort
    slots.accept([Assignment(1, float("inf"), claim())])
    outcome = relay.done.get(timeout=30)
    slots.stop()
    assert (outcome, entered) == (Stopped(), [])


@pytest.mark.parametrize("slots_class", [_ThreadSlots, _AsyncSlots])
def test_a_result_is_sent_before_the_next_job_starts(slots_class):
    """It would be lost with the process. That a job returned nothing is told by its mark, and may wait."""
    relay = Relay()
    relay.abort = lambda ticket, error: None
    sent = []

    def body(number):
        sent.append(relay.sent)
        return number

    async def abody(number):
        await asyncio.sleep(0)  # each is started along with the end of the one before
        return body(number)

    job(name=NAME)(abody if slots_class is _AsyncSlots else body)
    limit = [1] if slots_class is _AsyncSlots else []
    slots = slots_class(relay, *limit, relay, _Progress(relay))
    claims = [claim(payload=f'{{"args": [{number}]}}') for number in range(3)]
    slots.accept([Assignment(ticket, float("inf"), one) for ticket, one in enumerate(claims, 1)])
    assert [relay.done.get(timeout=30).result for _ in range(3)] == ["0", "1", "2"]
    slots.stop()
    assert sent == [0, 1, 2]


@pytest.mark.django_db(transaction=True)
def test_nothing_is_left_of_a_job_when_its_end_is_told():
    class Witness(Relay):
        def send(self, messages):
            super().send(messages)
            is_open.append(connection.connection is not None)

    def body():
        transaction.set_autocommit(False)
        return Effect.objects.count()

    is_open = []
    job(name=NAME)(body)
    relay = Witness()
    relay.abort = lambda ticket, error: None
    slots = _ThreadSlots(relay, relay, _Progress(relay))
    slots.accept([Assignment(1, float("inf"), claim())])
    assert relay.done.get(timeout=30) == Completed("0")
    slots.stop()
    assert is_open == [False]


@pytest.mark.parametrize(("delay", "seconds"), DELAYS)
def test_a_backoff_callable_gives_the_wait(delay, seconds):
    calls = []

    def backoff(error, claim):
        calls.append((error, claim))
        return delay

    error = ValueError("boom")
    outcome = run(raising(error), backoff=backoff)

    assert calls == [(error, claim())]
    assert (outcome.retry_in, outcome.give_up) == (seconds, False)


def test_a_backoff_callable_that_returns_none_gives_up():
    assert run(raising(ValueError), backoff=lambda error, claim: None).give_up


class NoDelay:
    def __repr__(self):
        raise RuntimeError("no text")

    __float__ = __eq__ = __repr__


def exits(error, claim):
    raise SystemExit


@pytest.mark.parametrize(
    "backoff",
    [
        lambda error, claim: 1 / 0,
        exits,
        lambda: 5,
        lambda error, claim: "soon",
        lambda error, claim: math.nan,
        lambda error, claim: True,
        lambda error, claim: NoDelay(),
    ],
)
def test_the_default_applies_when_a_backoff_callable_fails(caplog, backoff):
    outcome = run(raising(ValueError("boom")), backoff=backoff)

    assert (str(outcome.error), outcome.retry_in, outcome.give_up) == ("ValueError: boom", None, False)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith(
        "job=1 name=tests.body queue=default attempt=1: its rules failed; the default applies.\n"
        "Traceback (most recent call last):\n"
    )


# ── Exceptions that fight back ────────────────────────────────────────────────────────────────────────────


class NoText(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class ExitingText(Exception):
    def __str__(self):
        raise SystemExit(1)


class WrongText(Exception):
    def __str__(self):
        return 5


class NoAttributes(Exception):
    @property
    def __cause__(self):
        raise RuntimeError("no attributes")

    __context__ = __suppress_context__ = __traceback__ = __notes__ = __dict__ = args = __cause__


class OddAttributes(Exception):
    __cause__ = __context__ = __traceback__ = __notes__ = "odd"


class NoClass(Exception):
    @property
    def __class__(self):
        raise RuntimeError("no class")


class Liar(Exception):
    __class__ = Snooze


class Meta(type):
    @property
    def __name__(cls):
        raise RuntimeError("no name")

    __module__ = __mro__ = __name__

    def __instancecheck__(cls, other):
        raise RuntimeError("no answer")


class NoName(Exception, metaclass=Meta):
    pass


class NoModule(Exception):
    pass


NoModule.__module__ = None


class TextOfItsOwn(str):
    __slots__ = ()

    def replace(self, *args):
        return 5

    __len__ = __getitem__ = translate = encode = replace


class OddText(Exception):
    def __str__(self):
        return TextOfItsOwn("odd")


FAILS = "cannot be described, since its own methods fail."

FIGHTING = {
    NoText: "NoText: <exception str() failed>",
    WrongText: "WrongText: <exception str() failed>",
    OddText: "OddText: <exception str() failed>",
    NoModule: "NoModule: boom",
    Liar: "Liar: boom",
    ExitingText: FAILS,
    NoAttributes: FAILS,
    OddAttributes: FAILS,
    NoClass: FAILS,
    NoName: FAILS,
}


@pytest.mark.parametrize("options", [{}, {"give_up_on": KeyError, "retry_on": (NoClass, NoName)}])
@pytest.mark.parametrize("class_", FIGHTING, ids=lambda class_: type.__dict__["__name__"].__get__(class_))
def test_an_exception_whose_own_methods_fail_is_a_failed_attempt(class_, options):
    def body():
        raise class_("boom")

    outcome = run(body, **options)
    text = str(outcome.error)

    assert isinstance(outcome, Failed)
    assert text == FIGHTING[class_] or (text.startswith("<tests.test_execution.") and text.endswith(FAILS))
    assert {type(value) for value in to_plain(outcome)[1]} == {str}


def test_an_exception_with_required_keywords_is_a_failed_attempt():
    class Demanding(Exception):
        def __init__(self, *, order):
            self.order = order

    assert run(raising(Demanding(order=5))).error.exception == (
        "tests.test_execution.test_an_exception_with_required_keywords_is_a_failed_attempt.<locals>.Demanding"
    )


# ── What is kept of an exception ──────────────────────────────────────────────────────────────────────────


def entry_size(error: JobError) -> int:
    """The bytes of the entry in the job's history."""
    entry = {
        "at": "2026-01-02T03:04:05.678901+00:00",
        "attempt": 2**31 - 1,
        "worker": "00000000-0000-0000-0000-000000000000",
        "exception": error.exception,
        "message": error.message,
        "traceback": error.traceback,
    }
    return len(json.dumps(entry, ensure_ascii=False).encode())


def chain(length: int, link: str) -> Exception:
    error = ValueError("number 0")
    for number in range(1, length):
        outer = ValueError(f"number {number}")
        setattr(outer, link, error)
        error = outer
    return error


def cycle() -> Exception:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one


def deep_group() -> Exception:
    error = ValueError("innermost")
    for number in range(500):
        error = ExceptionGroup(f"level {number}", [error] * 3)
    return error


def long_name() -> Exception:
    return type("N" * 100_000, (Exception,), {})("boom")


def noted() -> Exception:
    error = ValueError("boom")
    for number in range(10_000):
        error.add_note(f"note {number} " + "x" * 10_000)
    return error


@pytest.mark.parametrize(
    "make",
    [
        lambda: ValueError("x" * 50_000_000),
        lambda: ValueError("\U0001f600" * 10_000),
        lambda: ValueError('"\\' * 10_000),
        lambda: ValueError("\x00" * 10_000),
        lambda: ValueError("\ud800" * 10_000),
        lambda: chain(1000, "__cause__"),
        lambda: chain(1000, "__context__"),
        cycle,
        lambda: ExceptionGroup("many", [ValueError(str(number)) for number in range(10_000)]),
        deep_group,
        long_name,
        noted,
    ],
)
def test_what_is_kept_is_bounded(make):
    error = make()

    assert entry_size(run(raising(error)).error) < 8 * 1024


def without_carets(text: str) -> str:
    """A traceback without the marks below its lines, which differ from one Python to the next."""
    return "".join(line for line in text.splitlines(keepends=True) if line.strip(" ~^\n") or line == "\n")


def test_the_whole_chain_and_the_place_are_kept():
    def parse():
        return int("five")

    def body():
        try:
            parse()
        except ValueError as error:
            raise LookupError("no order") from error

    error = run(body).error
    first = body.__code__.co_firstlineno

    assert replace(error, traceback=without_carets(error.traceback)) == JobError(
        exception="builtins.LookupError",
        message="no order",
        traceback=f"""\
Traceback (most recent call last):
  File "{__file__}", line {first + 2}, in body
    parse()
  File "{__file__}", line {first - 2}, in parse
    return int("five")
ValueError: invalid literal for int() with base 10: 'five'

The above exception was the direct cause of the following one:

Traceback (most recent call last):
  File "{__file__}", line {first + 4}, in body
    raise LookupError("no order") from error
LookupError: no order
""",
        fingerprint=error.fingerprint,
    )
    assert len(error.fingerprint) == 16


def test_an_exception_while_handling_another_is_kept_with_it():
    def body():
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904

    def quiet():
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second") from None

    assert "KeyError: 'first'\n\nWhile handling the above exception, the following one occurred:\n\n" in (
        run(body).error.traceback
    )
    assert "first" not in run(quiet).error.traceback.replace('raise KeyError("first")', "")


def test_of_a_long_chain_the_newest_are_kept():
    text = run(raising(chain(1000, "__cause__"))).error.traceback

    assert text.startswith("Earlier exceptions are not shown.\n")
    assert [number for number in range(1000) if f"number {number}\n" in text] == [995, 996, 997, 998, 999]


def test_of_a_group_the_first_exceptions_are_shown():
    group = ExceptionGroup("several", [ValueError(f"number {number}") for number in range(10_000)])

    assert run(raising(group)).error.traceback.endswith(
        """\
ExceptionGroup: several (10000 sub-exceptions)
    Exception 1 of 10000 in the group:
    ValueError: number 0
    Exception 2 of 10000 in the group:
    ValueError: number 1
    Exception 3 of 10000 in the group:
    ValueError: number 2
"""
    )


def test_the_exceptions_of_a_task_group_show_where_they_were_raised():
    async def part():
        raise ValueError("boom")

    async def body():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(part())

    text = run(body).error.traceback

    assert "    Exception 1 of 1 in the group:\n    Traceback (most recent call last):\n" in text
    assert 'in part\n        raise ValueError("boom")\n    ValueError: boom\n' in text


def test_notes_are_kept():
    error = ValueError("boom")
    error.add_note("order 5")

    assert run(raising(error)).error.traceback.endswith("ValueError: boom\norder 5\n")


def test_of_a_deep_stack_the_newest_frames_are_kept():
    def one(depth):
        return another(depth)

    def another(depth):
        if not depth:
            raise ValueError("boom")
        return one(depth - 1)

    text = run(lambda: one(200)).error.traceback

    assert text.count("  File ") <= execution.FRAME_LIMIT
    assert text.endswith('raise ValueError("boom")\nValueError: boom\n')


def test_a_traceback_starts_at_the_users_frame():
    def body():
        raise ValueError("boom")

    async def abody():
        raise ValueError("boom")

    outcomes = {run(body): body, run(abody): abody, async_to_sync(execution.arun)(claim()): abody}

    for outcome, function in outcomes.items():
        assert outcome.error.traceback == (
            f'Traceback (most recent call last):\n  File "{__file__}", line'
            f" {function.__code__.co_firstlineno + 1}, in {function.__name__}\n"
            '    raise ValueError("boom")\nValueError: boom\n'
        )


def test_local_variables_are_not_kept():
    def body():
        password = "hunter" + str(2)
        raise ValueError(f"{len(password)} characters")

    assert "hunter2" not in json.dumps(to_plain(run(body)))


def test_an_exception_of_python_itself_is_named_as_python_names_it():
    error = run(raising(NoText())).error
    group = run(raising(ExceptionGroup("several", [KeyError("k")]))).error

    for text in (error.message, error.traceback, group.message, group.traceback):
        assert "builtins." not in text
    assert group.exception == "builtins.ExceptionGroup"


# ── Fingerprints ──────────────────────────────────────────────────────────────────────────────────────────


def test_failures_that_differ_only_in_numbers_and_quoted_values_are_alike():
    def body(text):
        raise ValueError(text)

    def fingerprint(text):
        return run(body, json.dumps({"args": [text]})).error.fingerprint

    alike = {
        fingerprint(text)
        for text in (
            "order 1 of 'a' at 0x7f00 is \"x\" for 00000000-0000-0000-0000-000000000001",
            "order 23 of 'bcd' at 0xffff12 is \"\" for 5f3759df-0000-4000-8000-00000000000a",
        )
    }

    assert len(alike) == 1
    assert fingerprint("another text") not in alike


def test_failures_at_different_places_of_different_jobs_and_of_different_classes_are_not_alike():
    def body(where):
        if where == "here":
            raise ValueError("boom")
        if where == "there":
            raise ValueError("boom")
        raise LookupError("boom")

    prints = {run(body, json.dumps({"args": [where]})).error.fingerprint for where in ("here", "there", "")}
    job(name="tests.other")(body)
    prints.add(execution.run(claim('{"args": ["here"]}', "tests.other")).error.fingerprint)

    assert len(prints) == 4


def test_a_cut_message_has_the_fingerprint_of_its_like():
    def body(size):
        raise ValueError("x" * size)

    assert (
        run(body, '{"args": [2000]}').error.fingerprint == run(body, '{"args": [2000000]}').error.fingerprint
    )


# ── Payloads and names that nobody expects ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ("[]", "The payload must be an object, not list."),
        ("5", "The payload must be an object, not int."),
        ('{"args": [], "other": 1}', "The payload may have the keys 'args' and 'kwargs', not ['other']."),
        ('{"args": 5}', "In the payload, 'args' must be an array and 'kwargs' an object."),
        ("nonsense", "The payload cannot be read: Expecting value: line 1 column 1 (char 0)."),
    ],
)
def test_a_payload_that_cannot_be_read_is_a_final_failure(payload, text):
    def body():
        raise AssertionError("never run")

    outcome = run(body, payload)

    assert outcome == Failed(
        JobError("builtins.ValueError", text, "", outcome.error.fingerprint), give_up=True
    )
    assert len(outcome.error.fingerprint) == 16


@pytest.mark.parametrize(
    "payload",
    ['{"args": [' + "9" * 5000 + "]}", '{"args": ' + "[" * 100_000 + "]" * 100_000 + "}"],
    ids=["too many digits", "too deep"],
)
def test_a_payload_beyond_python_is_a_final_failure(payload):
    outcome = run(lambda *args: None, payload)

    assert outcome.give_up
    assert outcome.error.message.startswith("The payload cannot be read: ")


def test_the_report_on_a_payload_is_bounded():
    payload = json.dumps({"k" * 1000 + str(number) + "\x00": 1 for number in range(1000)})

    assert entry_size(run(lambda: None, payload).error) < 8 * 1024


@pytest.mark.parametrize("name", ["tests.unheard", "", "os.system"])
def test_a_name_that_is_unknown_here_is_no_failure(name):
    expected = Unknown(
        JobError(
            "",
            f"No job function is named {name!r} here. Was it renamed? Keep the old name with"
            " @job(aliases=[...]).",
        )
    )

    assert execution.run(claim(name=name)) == expected
    assert async_to_sync(execution.arun)(claim(name=name)) == expected


def test_a_job_of_a_former_name_is_run():
    job(name=NAME, aliases=["tests.former"])(lambda: 5)

    assert execution.run(claim(name="tests.former")) == Completed("5")


# ── Context ───────────────────────────────────────────────────────────────────────────────────────────────

tenant = contextvars.ContextVar("tenant", default="nobody")


def surroundings():
    return [
        translation.get_language(),
        timezone.get_current_timezone_name(),
        tenant.get(),
        decimal.getcontext().prec,
    ]


def disturb():
    translation.activate("de")
    timezone.activate("Asia/Tokyo")
    tenant.set("somebody")
    decimal.getcontext().prec = 3
    return surroundings()


async def adisturb():
    return disturb()


async def asurroundings():
    return surroundings()


DEFAULT = Completed('["en-us", "America/Chicago", "nobody", 28]')
DISTURBED = Completed('["de", "Asia/Tokyo", "somebody", 3]')


@pytest.mark.parametrize("body", [disturb, adisturb])
def test_a_job_leaves_no_context_to_the_next_one_or_to_the_caller(body):
    before = surroundings()

    assert run(body) == DISTURBED
    assert run(surroundings) == DEFAULT
    assert run(asurroundings) == DEFAULT
    assert surroundings() == before


def test_a_job_does_not_see_the_context_of_the_caller():
    with translation.override("fr"), timezone.override("Asia/Tokyo"), decimal.localcontext(prec=5):
        token = tenant.set("the caller")
        assert run(surroundings) == DEFAULT
        assert run(asurroundings) == DEFAULT
        tenant.reset(token)
