"""Arguments, results and texts, on their way into the database and back.

What `jsonb` would refuse or change is refused here, in the caller's frame and before any SQL, with the path
to the offending value. What comes out of the database may have been written by anyone, so decoding expects
everything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any

from .exceptions import InvalidArguments

MAX_DEPTH = 200  # Postgres gives up between 7,000 and 20,000, Python's own reader near 1,000
MAX_INTEGER_BITS = 8192  # Python refuses to read integers of more than 4,300 digits

_ADVICE = {
    "datetime": "pass an ISO string",
    "date": "pass an ISO string",
    "time": "pass an ISO string",
    "timedelta": "pass a number of seconds",
    "Decimal": "pass a string",
    "UUID": "pass a string",
    "bytes": "pass a base64 string",
    "bytearray": "pass a base64 string",
    "memoryview": "pass a base64 string",
    "set": "pass a sorted list",
    "frozenset": "pass a sorted list",
    "__proxy__": "pass str(...) of the lazy text",
    "QuerySet": "pass a list of primary keys",
    "Enum": "pass its value",
}


class NotJSON(ValueError):
    """A value cannot be stored as JSON; the text says where it is and what to do."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = ""  # grows from the inside out, so that only failures pay for it

    def __str__(self) -> str:
        if not self.path:
            return self.reason
        return f"{self.path if len(self.path) < 200 else self.path[:200] + '…'}: {self.reason}"


class _TooLarge(Exception):
    pass


def encode_arguments(args: Sequence[Any], kwargs: dict[str, Any], limit: int) -> str:
    """The payload of a job as JSON text of at most `limit` bytes. Raises InvalidArguments."""
    try:
        text = f'{{"args": {_named("args", list(args), limit)}, "kwargs": {_named("kwargs", kwargs, limit)}}}'
        if len(text) <= limit:  # the text is ASCII, so characters are bytes
            return text
    except NotJSON as error:
        raise InvalidArguments(str(error)) from None
    except _TooLarge:
        pass
    raise InvalidArguments(
        f"The arguments take more than {limit:,} bytes as JSON, which is what PGJOBS['MAX_PAYLOAD_BYTES']"
        " allows. Store the data elsewhere and pass a reference to it."
    )


def encode_result(value: object, limit: int) -> tuple[str | None, str]:
    """A job's result as JSON text, and the reason where it cannot be stored ("" otherwise). Never raises.

    None, which is what most job functions return, is stored as no result at all.
    """
    if value is None:
        return None, ""
    try:
        text = _named("result", value, limit)
        if len(text) <= limit:
            return text, ""
    except _TooLarge:
        pass
    except Exception as error:  # NotJSON; or another thread is still changing the value
        return None, clean_text(f"The result could not be stored: {error}", 1000)
    return None, f"The result could not be stored: it takes more than {limit:,} bytes as JSON."


def encode_object(value: object, limit: int) -> str:
    """A dictionary as JSON text of at most `limit` bytes. Raises NotJSON."""
    if not isinstance(value, dict):
        raise NotJSON(f"a dictionary is needed, not {_repr(value)}")
    try:
        text = _write(value, 0, limit)
        if len(text) <= limit:
            return text
    except _TooLarge:
        pass
    raise NotJSON(f"it takes more than {limit:,} bytes as JSON")


def decode_arguments(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments out of a stored payload. Raises ValueError, saying what is wrong."""
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The payload cannot be read: {error}.") from None
    if not isinstance(payload, dict):
        raise ValueError(f"The payload must be an object, not {type(payload).__name__}.")
    if unknown := payload.keys() - {"args", "kwargs"}:
        raise ValueError(f"The payload may have the keys 'args' and 'kwargs', not {sorted(unknown)}.")
    args, kwargs = payload.get("args", []), payload.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ValueError("In the payload, 'args' must be an array and 'kwargs' an object.")
    return args, kwargs


def clean_text(text: str, limit: int) -> str:
    """`text` as Postgres can store it, in at most `limit` bytes of JSON: head and tail with a mark between.

    Control characters other than tab and newline, and lone surrogates, appear as escapes.
    """
    whole = len(text)
    kept = min(whole, limit)
    while True:
        mark = f" … [{whole - kept} characters cut] … " if kept < whole else ""
        head = kept // 2
        cut = _printable(text[:head] + mark + text[whole - (kept - head) :])
        size = len(encode_basestring(cut).encode()) - 2
        if size <= limit or not kept:
            return cut
        kept = min(kept - 1, (kept * limit) // size, kept - (size - limit) // 8)


_CONTROLS = {
    number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160)) if chr(number) not in "\t\n"
}


def _printable(text: str) -> str:
    return text.replace("\r\n", "\n").translate(_CONTROLS).encode("utf-8", "backslashreplace").decode("utf-8")


# ── Writing JSON ──────────────────────────────────────────────────────────────────────────────────────────
#
# The standard encoder is fast, but it cannot say where a value is, turns keys into strings, and writes floats
# that jsonb changes. So it is left to what holds none of that. A value is what its type is: lazy objects have
# a `__class__` that lies.


def _named(name: str, value: object, room: int) -> str:
    try:
        return _write(value, 0, room)
    except NotJSON as error:
        error.path = name + error.path
        raise


def _write(value: Any, depth: int, room: int) -> str:
    """The JSON text of `value`. Raises NotJSON with the path below it, or _TooLarge.

    Each container takes what it writes out of the `room` that it was given. So the work is bounded, even for
    a small value that refers to one list a billion times.
    """
    kind = type(value)
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    if issubclass(kind, _CONTAINERS):
        if depth == 1 and _is_plain(value, MAX_DEPTH - depth, room):
            text = _encode(value)
            if "\\u0000" not in text and "\\ud" not in text:  # perhaps a NUL or a surrogate
                return text
        if depth >= MAX_DEPTH:
            raise NotJSON(f"the value is nested more than {MAX_DEPTH} levels deep; flatten it.")
        write = _object if issubclass(kind, dict) else _array
        return write(value, depth + 1, room)
    for basic, scalar in _SCALARS.items():
        if issubclass(kind, basic):
            return scalar(value)
    raise _refusal(value)


_encode = json.JSONEncoder(check_circular=False).encode


def _is_plain(value: Any, levels: int, room: int) -> bool:
    """Whether the standard encoder writes a container as `_write` would, and not much longer than `room`."""
    containers = [value]
    while containers and levels:
        levels -= 1
        inner: list[Any] = []
        for container in containers:
            items = container
            if type(container) is dict:
                for key in container:
                    if type(key) is not str:
                        return False
                    room -= len(key)
                items = container.values()
            elif type(container) is not list and type(container) is not tuple:
                return False
            room -= len(container)
            if room < 0:
                return False
            for item in items:
                kind = type(item)
                if kind is str:
                    room -= len(item)
                elif kind is int or kind is float:
                    if not -1e16 < item < 1e16:
                        return False
                elif kind is not bool and item is not None:
                    inner.append(item)
        containers = inner
    return not containers and room >= 0


def _array(items: Sequence[Any], depth: int, room: int) -> str:
    parts: list[str] = []
    try:
        for item in items:
            scalar = _SCALARS.get(type(item))
            part = scalar(item) if scalar else _write(item, depth, room)
            room -= len(part) + 2
            if room < 0:
                raise _TooLarge
            parts.append(part)
    except NotJSON as error:
        error.path = f"[{len(parts)}]{error.path}"
        raise
    return f"[{', '.join(parts)}]"


def _object(items: dict[str, Any], depth: int, room: int) -> str:
    parts: list[str] = []
    key: Any = None
    try:
        for key, item in items.items():
            scalar = _SCALARS.get(type(item))
            part = f"{_key(key)}: {scalar(item) if scalar else _write(item, depth, room)}"
            room -= len(part) + 2
            if room < 0:
                raise _TooLarge
            parts.append(part)
    except NotJSON as error:
        if isinstance(key, str):
            error.path = f"[{str.__repr__(key)}]{error.path}"
        raise
    return f"{{{', '.join(parts)}}}"


def _key(key: Any) -> str:
    if not issubclass(type(key), str):
        raise NotJSON(f"the key {_repr(key)} is {_type_name(key)}, but JSON has only string keys.")
    return _string(key)


def _string(value: str) -> str:
    text = encode_basestring_ascii(value)
    if len(text) > len(value) + 2:  # something is escaped
        if "\x00" in value:
            raise NotJSON("the string has a NUL character, which Postgres cannot store; remove it.")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise NotJSON("the string has a lone surrogate, which is not text; remove it.") from None
    return text


def _integer(value: int) -> str:
    if value.bit_length() > MAX_INTEGER_BITS:
        raise NotJSON("the integer has too many digits; pass a string.")
    return int.__repr__(value)  # members of an enum have another


def _float(value: float) -> str:
    if not math.isfinite(value):
        raise NotJSON(f"{float.__repr__(value)} is not JSON; pass None or a string.")
    # jsonb keeps numbers as decimals and writes 1e+308 as an integer, which would come back as another
    # number. All digits and a decimal point bring back the same float.
    return float.__repr__(value) if abs(value) < 1e16 else float.__format__(value, ".1f")


_SCALARS: dict[type, Callable[[Any], str]] = {
    str: _string,
    bool: {True: "true", False: "false"}.__getitem__,
    int: _integer,
    float: _float,
    type(None): lambda none: "null",
}
_CONTAINERS = (dict, list, tuple)


def _refusal(value: object) -> NotJSON:
    name = _type_name(value)
    if hasattr(type(value), "_meta"):
        return NotJSON(f"{name} is a model instance, not JSON; pass its primary key.")
    for class_ in type(value).__mro__:  # by name, so that nothing has to be imported
        if advice := _ADVICE.get(class_.__name__):
            return NotJSON(f"{name} is not JSON; {advice}.")
    return NotJSON(f"{name} is not JSON; pass strings, numbers, booleans, None, lists and dicts of these.")


def _type_name(value: object) -> str:
    return clean_text(type(value).__name__, 100)


def _repr(value: object) -> str:
    try:
        return clean_text(repr(value), 100)
    except Exception:  # Python refuses to print integers of many digits
        return f"<{_type_name(value)} that cannot be printed>"
