"""The settings of the project: one dictionary, `PGJOBS`, read through one frozen dataclass.

The class is the documentation: each field has its type, unit and default. Durations may be given as seconds
or as a timedelta. Everyone asks `config()`; nobody else reads `django.conf.settings`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property
from typing import Any, get_type_hints

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from .lifecycle import LONGEST_DELAY, Policy

SETTING = "PGJOBS"
OWN_EMAIL_BACKEND = "django_pgjobs.mail.EmailBackend"

DEFAULT_THREADS = 4  # of each executor process of a worker host


def default_processes() -> int:
    """The processors that this process may use, at most four: as many executors as a host has by default."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, 4)


# Attempts and crashes are columns of four bytes. A jsonb value has at most 256 MiB, and takes up to four
# times as many bytes as its text.
LARGEST_PAYLOAD = 64 * 1024 * 1024
_LARGEST = {"MAX_ATTEMPTS": 1_000_000, "MAX_CRASHES": 1_000_000, "MAX_PAYLOAD_BYTES": LARGEST_PAYLOAD}
_LONGEST = timedelta(seconds=LONGEST_DELAY)  # ten years
MOST_PATTERNS, LONGEST_PATTERN, MOST_STARS = 100, 100, 4


@dataclass(frozen=True)
class Config:
    # The alias of the database in which the queue lives.
    DATABASE: str = "default"

    # How often a job is started at most, unless @job or using() says otherwise.
    MAX_ATTEMPTS: int = 3
    # For how long a job may run, unless @job says otherwise; None sets no limit.
    TIMEOUT: timedelta | None = None
    # How many executors a job may kill before it becomes a dead letter, whatever its attempts.
    MAX_CRASHES: int = 3
    # The largest payload and the largest result, in bytes of JSON text.
    MAX_PAYLOAD_BYTES: int = 1024 * 1024

    # For how long a silent worker keeps its jobs. Claims are renewed every quarter of it.
    LEASE: timedelta = timedelta(seconds=60)
    # How often a worker host looks for lost jobs.
    SWEEP_INTERVAL: timedelta = timedelta(seconds=15)
    # How long a lost job waits before it may be claimed again.
    LOST_DELAY: timedelta = timedelta(seconds=60)
    # How often a worker host looks for due jobs when nothing wakes it up.
    POLL_INTERVAL: timedelta = timedelta(seconds=5)
    # Whether worker hosts listen for new jobs. False, they only poll, each second.
    LISTEN: bool = True
    # The alias whose parameters connect to the same database without a pooler in between, to listen there.
    LISTEN_DATABASE: str | None = None
    # For how long a job waits for a worker that knows its name before it becomes a dead letter.
    UNKNOWN_JOB_AFTER: timedelta = timedelta(hours=24)

    # For how long finished jobs are kept. Zero deletes a job as it completes; None keeps for ever.
    COMPLETED_RETENTION: timedelta | None = timedelta(days=3)
    FAILED_RETENTION: timedelta | None = None
    CANCELLED_RETENTION: timedelta | None = None
    # For how long it is kept what people did to many jobs at once, after it is finished; None keeps for ever.
    OPERATIONS_RETENTION: timedelta | None = timedelta(days=90)

    # The dotted path of a module or object whose capture() and restore() carry the project's own context, a
    # request's id say, from where a job is enqueued to where it runs.
    CONTEXT: str | None = None
    # Whether OpenTelemetry is given a span for each enqueueing and for each attempt.
    TRACING: bool = False

    # For how long an executor keeps the database connections that job code has opened.
    JOB_CONN_MAX_AGE: timedelta = timedelta(seconds=60)
    # What sends the messages that `django_pgjobs.mail.EmailBackend` has enqueued. With MAILERS, their OPTIONS
    # name it instead.
    EMAIL_BACKEND: str = "django.core.mail.backends.smtp.EmailBackend"
    # The queue in which such messages wait.
    EMAIL_QUEUE: str = "default"
    # The queue in which large operations of people, such as a retry of all dead letters, are carried on.
    OPERATIONS_QUEUE: str = "default"
    # The dotted path of what is called with an `alerts.Alert` when jobs have become dead letters.
    ON_DEAD_LETTER: str | None = None
    # For how long nobody is told of further dead letters that have failed alike.
    ALERT_INTERVAL: timedelta = timedelta(hours=1)
    # What Prometheus sends to see `django_pgjobs.metrics.view`. None leaves that to those who may view jobs.
    METRICS_TOKEN: str | None = None
    # Whether enqueueing is refused, rather than warned about, while another database is in a transaction
    # and the queue's is not.
    STRICT_ALIAS: bool = False

    # The names, and patterns of names, of arguments whose values people do not get to see. Case, hyphens and
    # underscores do not count.
    REDACT: tuple[str, ...] = (
        "*password*", "*passwd*", "*passphrase*", "*secret*", "*token*", "*credential*", "*api_key*",
        "*access_key*", "*private_key*", "authorization", "cookie",
    )  # fmt: skip

    # Whether a job is run by whoever enqueues it, there and then. For tests, and for development without a
    # worker.
    IMMEDIATE: bool = False

    @cached_property
    def policy(self) -> Policy:
        """What the settings say of the fate of jobs."""
        return Policy(
            max_crashes=self.MAX_CRASHES,
            lost_delay=self.LOST_DELAY.total_seconds(),
            unknown_job_after=self.UNKNOWN_JOB_AFTER.total_seconds(),
        )

    @property
    def deletes_completed(self) -> bool:
        """Whether completing a job means deleting it."""
        return self.COMPLETED_RETENTION is not None and not self.COMPLETED_RETENTION

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each setting whose value cannot work, with a sentence that says why."""
        if self.DATABASE not in settings.DATABASES:
            yield "DATABASE", f"DATABASE is {self.DATABASE!r}, which is not an alias in DATABASES."
        alias = self.LISTEN_DATABASE
        if alias is not None and alias not in settings.DATABASES:
            yield "LISTEN_DATABASE", f"LISTEN_DATABASE is {alias!r}, which is not an alias in DATABASES."
        if self.EMAIL_BACKEND == OWN_EMAIL_BACKEND:
            yield "EMAIL_BACKEND", "EMAIL_BACKEND would enqueue messages again; name the backend that sends."
        for name in ("EMAIL_QUEUE", "OPERATIONS_QUEUE"):
            queue = getattr(self, name)
            if not 0 < len(queue) <= 255 or "\x00" in queue:
                yield name, f"{name} is {queue!r}; it must be 1 to 255 characters."
        if self.METRICS_TOKEN is not None and not re.fullmatch(r"[!-~]{16,200}", self.METRICS_TOKEN):
            yield (
                "METRICS_TOKEN",
                "METRICS_TOKEN must be 16 to 200 printable ASCII characters, without spaces.",
            )
        yield from self._bad_patterns()
        for name, most in _LARGEST.items():
            number = getattr(self, name)
            if not 1 <= number <= most:
                yield name, f"{name} is {number}; it must be from 1 to {most:,}."
        for name in ("LEASE", "SWEEP_INTERVAL", "POLL_INTERVAL", "ALERT_INTERVAL"):
            duration = getattr(self, name)
            if not timedelta(0) < duration <= timedelta(days=1):
                yield name, f"{name} is {duration}; it must be longer than zero and at most a day."
        limit = self.TIMEOUT
        if limit is not None and not timedelta(0) < limit <= _LONGEST:
            range_ = "longer than zero and at most ten years, or None"
            yield "TIMEOUT", f"TIMEOUT is {limit}; it must be {range_}."
        for name in ("LOST_DELAY", "UNKNOWN_JOB_AFTER", "JOB_CONN_MAX_AGE"):
            duration = getattr(self, name)
            if not timedelta(0) <= duration <= _LONGEST:
                yield name, f"{name} is {duration}; it must be from zero to ten years."
        for name in (
            "COMPLETED_RETENTION", "FAILED_RETENTION", "CANCELLED_RETENTION", "OPERATIONS_RETENTION",
        ):  # fmt: skip
            duration = getattr(self, name)
            if duration is not None and not timedelta(0) <= duration <= _LONGEST:
                yield name, f"{name} is {duration}; it must be from zero to ten years, or None."

    def _bad_patterns(self) -> Iterator[tuple[str, str]]:
        if len(self.REDACT) > MOST_PATTERNS:
            yield "REDACT", f"REDACT has {len(self.REDACT)} patterns; it may have {MOST_PATTERNS}."
        for pattern in self.REDACT:
            if not folded(pattern) or len(pattern) > LONGEST_PATTERN or pattern.count("*") > MOST_STARS:
                must = (
                    f"have 1 to {LONGEST_PATTERN} characters besides - and _, and at most {MOST_STARS} stars"
                )
                yield "REDACT", f"REDACT has the pattern {pattern!r:.120}; it must {must}."


_NOT_COUNTED = dict.fromkeys(map(ord, "-_ "))


def folded(name: str) -> str:
    """A name, or a pattern of names, so that `apiKey`, `API-Key` and `api_key` are the same."""
    return name.lower().translate(_NOT_COUNTED)


def read(given: Any) -> Config:
    """Make a Config of a PGJOBS dictionary. Raises ImproperlyConfigured, naming what is wrong."""
    if not isinstance(given, dict):
        raise ImproperlyConfigured(f"{SETTING} must be a dictionary, not {type(given).__name__}.")
    kinds = get_type_hints(Config)
    values = {}
    for name, value in given.items():
        if name not in kinds:
            nearest = difflib.get_close_matches(str(name).upper(), kinds, n=1, cutoff=0.5)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else f" Known: {', '.join(kinds)}."
            raise ImproperlyConfigured(f"{SETTING} has no setting {name!r}.{hint}")
        values[name] = _coerced(name, value, kinds[name])
    return Config(**values)


_EXPECTED: dict[Any, str] = {
    str: "a string",
    str | None: "a string, or None",
    int: "a whole number",
    bool: "True or False",
    timedelta: "a number of seconds or a timedelta",
    timedelta | None: "a number of seconds or a timedelta, or None",
    tuple[str, ...]: "a list of strings",
}


def _coerced(name: str, value: Any, kind: Any) -> Any:
    if kind == tuple[str, ...]:
        if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            return tuple(value)
    else:
        is_bool = isinstance(value, bool)
        if isinstance(value, int | float) and not is_bool and issubclass(timedelta, kind):
            with suppress(OverflowError, ValueError):  # NaN or more days than a timedelta can hold
                value = timedelta(seconds=value)
        if isinstance(value, kind) and is_bool == (kind is bool):
            return value
    shown = type(value).__name__ if name.endswith("_TOKEN") else repr(value)
    raise ImproperlyConfigured(f"{SETTING}[{name!r}] must be {_EXPECTED[kind]}, not {shown}.")


@cache
def config() -> Config:
    """The project's settings. Raises ImproperlyConfigured when they cannot be read or cannot work."""
    read_config = read(getattr(settings, SETTING, {}))
    for _, problem in read_config.problems():
        raise ImproperlyConfigured(f"{SETTING}: {problem}")
    return read_config


def _reset(*, setting: str, **kwargs: Any) -> None:
    if setting in (SETTING, "DATABASES"):
        config.cache_clear()


setting_changed.connect(_reset, dispatch_uid="django_pgjobs.conf")
