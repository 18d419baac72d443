"""Types of command-line arguments, so that a bad value reads like any other error of argparse."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from django.utils.dateparse import parse_datetime
from django.utils.timezone import is_naive, make_aware

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def at_least(minimum: int) -> Callable[[str], int]:
    """A whole number, not below `minimum`."""

    def whole_number(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < minimum:
            raise ArgumentTypeError(f"{text!r} must be a whole number, at least {minimum}.")
        return int(text)

    return whole_number


def row_id(text: str) -> int:
    """The id of a row."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} must be an id, which is a whole number from 1.")
    return int(text)


def duration(text: str) -> timedelta:
    """A span of time: a number of seconds, or a number with a unit (90s, 15m, 12h, 3d, 2w)."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhdw]?)", text)
    if match is None or float(match[1]) * _UNITS[match[2]] > 100 * 365 * 86_400:
        raise ArgumentTypeError(
            f"{text!r} must be a number of seconds, or a number with a unit: 90s, 15m, 12h, 3d, 2w."
        )
    return timedelta(seconds=float(match[1]) * _UNITS[match[2]])


def as_duration(span: timedelta) -> str:
    """The text that `duration` reads as this span: 3d, 90m."""
    seconds = span.total_seconds()
    for unit in "dhm":
        if seconds and not seconds % _UNITS[unit]:
            return f"{seconds / _UNITS[unit]:.0f}{unit}"
    return f"{seconds:.15g}s"


def instant(text: str) -> datetime | timedelta:
    """A date and time, in the project's time zone unless it has one of its own; or how long ago that was."""
    try:
        parsed = parse_datetime(text)
        if parsed is not None and 1 < parsed.year < 9999:
            return make_aware(parsed) if is_naive(parsed) else parsed
        return duration(text)
    except (ValueError, ArgumentTypeError):
        raise ArgumentTypeError(
            f"{text!r} must be a date and time, such as 2026-01-31T12:00, or how long ago: 90s, 15m, 12h, 3d."
        ) from None


def queue_name(text: str) -> str:
    """The name of a queue."""
    if not 0 < len(text) <= 255 or not text.isprintable():
        raise ArgumentTypeError(f"{text!r} must be the name of a queue, of 1 to 255 characters.")
    return text


_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def size(text: str) -> int:
    """A number of bytes, or a number with a unit (500M, 2G)."""
    match = re.fullmatch(r"([1-9][0-9]{0,11})([KMG]?)", text.upper())
    if match is None:
        raise ArgumentTypeError(f"{text!r} must be a number of bytes, or a number with a unit: 500M, 2G.")
    return int(match[1]) * _SIZES[match[2]]


def address(text: str) -> tuple[str, int]:
    """A port on all addresses of this machine, or HOST:PORT; a host that has colons, in brackets."""
    match = re.fullmatch(r"(?:([^:\[\]]+|\[[0-9a-fA-F:.%\w]+\]):)?([0-9]{1,5})", text)
    if match is None or int(match[2]) > 65535:
        example = "a port, such as 8080, or HOST:PORT, such as 127.0.0.1:8080"
        raise ArgumentTypeError(f"{text!r} must be {example}.")
    return (match[1] or "").strip("[]"), int(match[2])


def local_address(text: str) -> tuple[str, int]:
    """A port on this machine's loopback address, or HOST:PORT."""
    host, port = address(text)
    return host or "127.0.0.1", port


def file_path(text: str) -> Path:
    """The path of a file, which need not be there."""
    path = Path(text)
    if not path.name or path.is_dir():
        raise ArgumentTypeError(f"{text!r} must be the path of a file.")
    return path


def some_time(text: str) -> timedelta:
    """A duration that is longer than zero."""
    value = duration(text)
    if not value:
        raise ArgumentTypeError(f"{text!r} must be longer than zero.")
    return value
