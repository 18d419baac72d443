"""Values, exceptions and texts on which careless code fails, and a way to draw endlessly many of them.

A worker draws the same ones as the test that enqueued the job, since both begin with the same seed.
"""

from __future__ import annotations

import asyncio
import decimal
import enum
import random
import threading
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any

from django.utils.functional import SimpleLazyObject
from django.utils.translation import gettext_lazy

from django_pgjobs import GiveUp, Retry, Snooze
from django_pgjobs.exceptions import JobStopped, JobTimeout

# ── Texts ─────────────────────────────────────────────────────────────────────────────────────────────────

TEXTS = [
    "",
    " ",
    "\t\r\n",
    "\\",
    "\\u0000",
    "\\ud800",
    '"',
    "'; DROP TABLE background_jobs; --",
    "%s %(x)s {0} {} $1 $$",
    "<script>alert(1)</script>",
    "\x7f\x80\x9b[2J",
    "\u2028\u2029\ufeff\u202e",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff",
    "e\u0301" * 200,
    "null",
    "NaN",
    "\ufffe\uffff",
]
IMPOSSIBLE_TEXTS = ["\x00", "a\x00b", "\ud800", "x\udfffy", "\ud83d"]


def text(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(TEXTS)
    return "".join(chr(_character(rng)) for _ in range(rng.choice([1, 3, 20, 300])))


def _character(rng: random.Random) -> int:
    number = rng.choice([rng.randrange(1, 128), rng.randrange(128, 0x3000), rng.randrange(0x10000, 0x110000)])
    return number if not 0xD800 <= number < 0xE000 else 0x20


# ── Values ────────────────────────────────────────────────────────────────────────────────────────────────


class Text(str):
    """A string that shows itself as another."""

    __slots__ = ()

    def __str__(self) -> str:
        return "another"

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def encode(self, *args: Any) -> bytes:
        raise RuntimeError("no bytes")


class Number(enum.IntEnum):
    ONE = 1


class Letter(enum.StrEnum):
    A = "a"


class Colour(enum.Enum):
    RED = "red"


class Integer(int):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


class Float(float):
    def __repr__(self) -> str:
        return "no number"


class Unprintable:
    def __repr__(self) -> str:
        raise KeyError("no repr")


class Liar:
    """Says that it is a dictionary."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return dict


class Classless:
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError("no class")

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no attributes")


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def circular() -> Any:
    value: list[Any] = []
    value.append({"again": value})
    return value


def doubled(times: int) -> Any:
    value: list[Any] = ["x"]
    for _ in range(times):
        value = [value, value]
    return value


def _coroutine() -> Any:
    async def never() -> None: ...

    return never()


def _lazy_failure() -> Any:
    def fail() -> Any:
        raise RuntimeError("too lazy")

    return SimpleLazyObject(fail)


VALUES: dict[str, Callable[[], Any]] = {
    "nan": lambda: float("nan"),
    "infinity": lambda: float("-inf"),
    "negative zero": lambda: -0.0,
    "smallest": lambda: 5e-324,
    "largest": lambda: 1.7976931348623157e308,
    "1e16": lambda: 1e16,
    "big integer": lambda: 2**8000,
    "too big integer": lambda: -(2**9000),
    "true": lambda: True,
    "nul": lambda: "a\x00b",
    "surrogate": lambda: {"x": ["\ud800"]},
    "surrogate key": lambda: {"\udfff": 1},
    "nul key": lambda: {"\x00": 1},
    "int key": lambda: {1: 2},
    "none key": lambda: {None: 2},
    "unprintable key": lambda: {Unprintable(): 2},
    "huge int key": lambda: {10**5000: 2},
    "tuple": lambda: (1, (2, ())),
    "set": lambda: {1},
    "bytes": lambda: b"\xff",
    "memoryview": lambda: memoryview(b"x"),
    "decimal": lambda: decimal.Decimal("1.0"),
    "uuid": lambda: uuid.UUID(int=1),
    "date": lambda: date(2026, 1, 1),
    "datetime": lambda: datetime(1, 1, 1, tzinfo=UTC),
    "timedelta": lambda: timedelta(1),
    "complex": lambda: 1j,
    "ellipsis": lambda: ...,
    "class": lambda: Unprintable,
    "function": lambda: deep,
    "generator": lambda: (x for x in [1]),
    "lock": threading.Lock,
    "deque": lambda: deque([1]),
    "ordered": lambda: OrderedDict(b=1, a=2),
    "text": lambda: Text("text"),
    "text key": lambda: {Text("key"): Text("value")},
    "int enum": lambda: Number.ONE,
    "str enum": lambda: {Letter.A: Letter.A},
    "enum": lambda: Colour.RED,
    "integer": lambda: Integer(7),
    "float": lambda: Float(1.5),
    "lazy text": lambda: gettext_lazy("yes"),
    "lazy failure": _lazy_failure,
    "unprintable": Unprintable,
    "liar": Liar,
    "classless": Classless,
    "exception": lambda: ValueError("a value"),
    "deep": lambda: deep(190),
    "too deep": lambda: deep(500),
    "far too deep": lambda: deep(50_000),
    "circular": circular,
    "doubled": lambda: doubled(30),
    "long": lambda: "ä" * 150_000,
    "too long": lambda: "x" * 2_000_000,
    "many": lambda: list(range(50_000)),
    "too many": lambda: [0] * 1_000_000,
}
# Values that raise whatever is asked of them.
UNTOUCHABLE = ("classless", "lazy failure")
# As an argument, a coroutine would warn that nobody awaits it.
RESULTS = VALUES | {"coroutine": _coroutine, "none": lambda: None}


def value(rng: random.Random, depth: int = 0) -> Any:
    """A value that is JSON, or holds something that is not."""
    kind = rng.random()
    if kind < 0.12:
        return VALUES[rng.choice(sorted(VALUES))]()
    if kind < 0.14:
        return rng.choice(IMPOSSIBLE_TEXTS)
    if depth < 5 and kind < 0.35:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if depth < 5 and kind < 0.5:
        return {text(rng): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return scalar(rng)


def scalar(rng: random.Random) -> Any:
    draw: Callable[[], Any] = rng.choice(
        [
            lambda: text(rng),
            lambda: rng.choice([None, True, False, 0, -1]),
            lambda: rng.randrange(-(2 ** rng.choice([8, 64, 2000])), 2**64),
            lambda: rng.uniform(-1, 1) * 10.0 ** rng.randrange(-300, 300),
        ]
    )
    return draw()


def plain(value: Any) -> Any:
    """What a value that is accepted comes back as: the plain JSON types that its own types are made of."""
    kind = type(value)
    if issubclass(kind, dict):
        return {str.__str__(key): plain(item) for key, item in value.items()}
    if issubclass(kind, list | tuple):
        return [plain(item) for item in value]
    if issubclass(kind, str):
        return str.__str__(value)
    if kind is bool or value is None:
        return value
    if issubclass(kind, int):
        return int(value)
    if issubclass(kind, float):
        return float.__add__(value, 0.0)
    return value


def same(one: Any, other: Any) -> bool:
    """Equality that tells 1 from 1.0 and from True."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# ── Exceptions ────────────────────────────────────────────────────────────────────────────────────────────


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NoTextAtAll(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class ControlC(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class WrongText(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


class SlipperyText(Exception):
    def __str__(self) -> str:
        return Text("slippery")


class EndlessText(Exception):
    def __str__(self) -> str:
        return str(self)


class Recursive(Exception):
    def __getattribute__(self, name: str) -> Any:
        return getattr(self, name)


class Attributeless(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise ValueError(name)


class ClassOfItsOwn(Exception):
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return Snooze


class NoClass(Exception):
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise ZeroDivisionError


class NoCause(Exception):
    @property
    def __cause__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no cause")


class CauseIsText(Exception):
    __cause__ = "text"  # type: ignore[assignment]
    __context__ = 5  # type: ignore[assignment]
    __suppress_context__ = None  # type: ignore[assignment]


class NoTraceback(Exception):
    @property
    def __traceback__(self) -> Any:  # type: ignore[override]
        raise OSError("no traceback")


class TracebackIsText(Exception):
    __traceback__ = "text"  # type: ignore[assignment]


class NotesAreANumber(Exception):
    __notes__ = 5  # type: ignore[assignment]


class NotesFail(Exception):
    def __init__(self) -> None:
        self.__notes__ = [Unprintable(), NoText(), "\ud800", None] * 10  # type: ignore[list-item]


class NoComparison(Exception):
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


class CannotBePickled(Exception):
    def __init__(self) -> None:
        super().__init__("a lock")
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        raise TypeError("no pickle")


class TakesThree(Exception):
    def __init__(self, one: int, two: int, three: int) -> None:
        super().__init__(one)


class FailingRetry(Retry):
    def __init__(self) -> None:
        self.delay = "soon"  # type: ignore[assignment]
        self.reason = 5  # type: ignore[assignment]


class FailingSnooze(Snooze):
    def __init__(self) -> None:
        pass

    @property
    def delay(self) -> Any:
        raise SystemExit(9)


class FailingGroup(ExceptionGroup):  # type: ignore[type-arg]
    @property
    def exceptions(self) -> Any:
        raise RuntimeError("no exceptions")


class DoesNotLeave(Exception):
    def __del__(self) -> None:
        self.args = ()


def _named(module: Any, name: str) -> BaseException:
    class_ = type(name, (Exception,), {"__module__": module})
    error: BaseException = class_("named oddly")
    return error


def _chain(length: int) -> BaseException:
    error: BaseException = ValueError("the first")
    for number in range(length):
        later = RuntimeError(f"number {number}")
        later.__cause__ = error
        error = later
    return error


def _cycle() -> BaseException:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    one.__context__, two.__context__ = two, one
    return one


def _group(depth: int, width: int) -> BaseException:
    error: BaseException = ValueError("innermost")
    for _ in range(depth):
        error = BaseExceptionGroup("a group", [error] * width)
    return error


def _with_notes(error: BaseException, *notes: str) -> BaseException:
    for note in notes:
        error.add_note(note)
    return error


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "value": lambda: ValueError("a plain one"),
    "empty": Exception,
    "many arguments": lambda: Exception(*range(10_000)),
    "huge": lambda: ValueError("x" * 5_000_000),
    "huge controls": lambda: ValueError("\x01" * 300_000),
    "nul": lambda: ValueError("a\x00b"),
    "surrogate": lambda: ValueError("a\ud800b"),
    "bytes": lambda: ValueError(b"\xff\x00"),
    "lines": lambda: ValueError("one\r\ntwo\x85three\u2028four"),
    "log forging": lambda: ValueError("\n[INFO] job=1 completed"),
    "format": lambda: ValueError("%s %d {} {x}"),
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff" * 5000, 0, 1, "bad"),
    "key": lambda: KeyError("\n\x00"),
    "os": lambda: OSError(5, "\udcff", "/tmp/\udcff"),
    "syntax": lambda: SyntaxError("bad", ("\x00file", -5, -7, "\ud800", 0, 0)),
    "import": lambda: ImportError("gone", name="\x00", path="\ud800"),
    "system exit": lambda: SystemExit(3),
    "system exit 0": SystemExit,
    "system exit text": lambda: SystemExit("text\x00"),
    "keyboard interrupt": KeyboardInterrupt,
    "generator exit": GeneratorExit,
    "stop iteration": lambda: StopIteration(5),
    "stop async iteration": StopAsyncIteration,
    "cancelled": lambda: asyncio.CancelledError("cancelled by itself"),
    "invalid state": asyncio.InvalidStateError,
    "memory": MemoryError,
    "recursion": RecursionError,
    "base": lambda: BaseException("base"),
    "timeout": TimeoutError,
    "our timeout": JobTimeout,
    "our stop": JobStopped,
    "give up": lambda: GiveUp("\x00\ud800"),
    "give up number": lambda: GiveUp(5),  # type: ignore[arg-type]
    "retry": lambda: Retry(0, "\ud800"),
    "retry never": lambda: Retry(float("inf")),
    "retry past": lambda: Retry(-5),
    "retry nan": lambda: Retry(float("nan")),
    "retry huge": lambda: Retry(10**400),
    "snooze long": lambda: Snooze(timedelta.max),
    "snooze text": lambda: Snooze("tomorrow"),  # type: ignore[arg-type]
    "failing retry": FailingRetry,
    "failing snooze": FailingSnooze,
    "no text": NoText,
    "no text at all": NoTextAtAll,
    "control c": ControlC,
    "wrong text": WrongText,
    "slippery text": SlipperyText,
    "endless text": EndlessText,
    "recursive": Recursive,
    "attributeless": Attributeless,
    "class of its own": ClassOfItsOwn,
    "no class": NoClass,
    "no cause": NoCause,
    "cause is text": CauseIsText,
    "no traceback": NoTraceback,
    "traceback is text": TracebackIsText,
    "notes are a number": NotesAreANumber,
    "notes fail": NotesFail,
    "no comparison": NoComparison,
    "cannot be pickled": CannotBePickled,
    "takes three": lambda: TakesThree(1, 2, 3),
    "does not leave": DoesNotLeave,
    "no module": lambda: _named(None, "Odd"),
    "module is a number": lambda: _named(5, "Odd"),
    "long name": lambda: _named("m" * 5000, "n" * 100_000),
    "odd name": lambda: _named("\ud800", "<b>\n"),
    "chain": lambda: _chain(500),
    "cycle": _cycle,
    "group": lambda: _group(2, 3),
    "wide group": lambda: _group(1, 10_000),
    "deep group": lambda: _group(800, 1),
    "full group": lambda: _group(5, 8),
    "failing group": lambda: FailingGroup("no group", [ValueError()]),
    "control group": lambda: BaseExceptionGroup("stop", [KeyboardInterrupt(), SystemExit(1), Snooze(1)]),
    "notes": lambda: _with_notes(ValueError("noted"), "\x00", "\ud800", "n" * 100_000, *map(str, range(100))),
}


def exception(rng: random.Random) -> BaseException:
    """One of these, led to by others, with notes, or in a group."""
    error = EXCEPTIONS[rng.choice(sorted(EXCEPTIONS))]()
    for _ in range(rng.randrange(3)):
        other = EXCEPTIONS[rng.choice(sorted(EXCEPTIONS))]()
        try:
            match rng.randrange(4):
                case 0:
                    error.__cause__ = other
                case 1:
                    error.__context__ = other
                case 2:
                    error.add_note(text(rng))
                case 3:
                    error = BaseExceptionGroup(text(rng), [error, other])
        except Exception:
            pass  # this one does not let itself be changed
    return error
