"""What makes a job equal to another one, and what becomes of an enqueuer that meets an equal one.

A job function that is unique has a `Uniqueness`, made of its options. It computes the key of a job from the
arguments, and inserts jobs with their keys. Who has a key is decided by an index, for as long as the job
waits or runs; so enqueuers of equal keys wait for each other's commit.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any, Literal

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError

from . import store
from .conf import SETTING, config
from .exceptions import DuplicateJob, InvalidArguments, PGJobsError
from .lifecycle import LONGEST_DELAY, is_delay
from .payload import encode_arguments

# What @job(unique=...) takes: all arguments, some of them by name, or (arguments of the job) -> key or None.
Unique = bool | str | Sequence[str] | Callable[..., "str | None"]
Until = Literal["started", "finished"] | float | timedelta
Conflict = Literal["keep", "replace", "raise"]

OPTIONS = ("unique", "unique_until", "on_conflict", "debounce", "max_wait")

MAX_KEY = 255  # characters; longer keys are hashed

# How often an enqueuer looks for the job that has its key before it complains that there always is one, and
# always another one. Each time, a job has to end between two of its statements.
TRIES = 20


@dataclass(frozen=True, slots=True)
class Uniqueness:
    """When two jobs of a function are equal, for how long, and what an enqueuer does about it."""

    job_name: str
    by: tuple[str, ...] | Callable[..., str | None]  # parameters, or what computes the key
    until: Literal["started", "finished"]
    period: timedelta | None  # for this long from its creation at least, even if it has finished
    on_conflict: Conflict
    debounce: timedelta | None
    max_wait: timedelta | None
    signature: inspect.Signature
    defaults: Mapping[str, Any]  # those of the parameters in `by`, as they come back from JSON

    # ── Keys ──────────────────────────────────────────────────────────────────────────────────────────────

    def key(self, args: Sequence[Any], kwargs: Mapping[str, Any], payload: str) -> str | None:
        """The unique key of a job with these arguments, which `payload` has as JSON; None if it needs none.

        Raises InvalidArguments where the function that is asked for it returns something else, and whatever
        that function raises.
        """
        if callable(self.by):
            key = self._own_key(self.by(*args, **kwargs))
        else:
            stored = json.loads(payload)
            bound = self.signature.bind(*stored["args"], **stored["kwargs"])
            arguments = {**self.defaults, **bound.arguments}
            key = _canonical({name: arguments[name] for name in self.by})
        if key is None or len(key) <= MAX_KEY:
            return key
        return f"sha256:{sha256(key.encode()).hexdigest()}"

    def _own_key(self, key: object) -> str | None:
        if key is None:
            return None
        if not isinstance(key, str):
            raise InvalidArguments(
                f"The function unique= of job {self.job_name!r} has returned {key!r:.100}. It must return a"
                " text, or None for a job that is not unique."
            )
        try:
            key.encode()
        except UnicodeEncodeError:
            key = "\x00"
        if "\x00" in key:
            raise InvalidArguments(
                f"The function unique= of job {self.job_name!r} has returned a text with a NUL character or a"
                " lone surrogate, which Postgres cannot store. Leave it out of the key."
            )
        return str.__str__(key)

    # ── Enqueueing ────────────────────────────────────────────────────────────────────────────────────────

    def enqueue(
        self, new: store.NewJob, payloads: Mapping[str, str], using: str
    ) -> dict[str, store.Enqueued]:
        """Insert a job for each key of `payloads`, or do what is to be done about one that is there.

        Returns the job of each key. Raises DuplicateJob, in which case nothing is inserted; and PGJobsError
        when it cannot be said who has a key, since its jobs come and go too fast.
        """
        self._check_retention()
        payloads = dict(sorted(payloads.items()))  # so that two enqueuers wait in one order
        for _ in range(TRIES):
            try:
                with self._transaction(using, len(payloads)) as cursor:
                    found = self._enqueue(cursor, new, payloads)
                    if self.on_conflict == "raise":
                        self._refuse(found)
                    return found
            except _Again:
                pass
        raise PGJobsError(
            f"Job {self.job_name!r} could not be enqueued: in {TRIES} attempts, the job that had its unique"
            " key was gone before it could be read, and then the key was taken again. Try it once more."
        )

    def enqueue_many(
        self, new: store.NewJob, calls: Sequence[tuple[str | None, str]], using: str
    ) -> tuple[list[int], list[int]]:
        """Insert a job for each (key, payload), all or none.

        Returns the ids in their order, and those of the jobs that are new.
        """
        payloads: dict[str, str] = {}
        positions: dict[str, int] = {}
        for position, (key, payload) in enumerate(calls):
            if key is None:
                continue
            if key in positions and self.on_conflict == "raise":
                raise DuplicateJob(
                    f"Calls number {positions[key]} and {position} of job {self.job_name!r} have the same"
                    " unique key; no job was enqueued.",
                    job_name=self.job_name,
                    unique_key=key,
                )
            if key not in positions or self.on_conflict == "replace":
                payloads[key] = payload
                positions[key] = position
        others = [payload for key, payload in calls if key is None]
        with transaction.atomic(using=using):
            try:
                found = self.enqueue(new, payloads, using) if payloads else {}
            except DuplicateJob as error:
                error.args = (f"Call number {positions[error.unique_key]}: {error}",)
                raise
            other_ids = store.enqueue_many(new, others, using) if others else []
        next_id = iter(other_ids)
        ids = [next(next_id) if key is None else found[key].id for key, _ in calls]
        return ids, other_ids + [row.id for row in found.values() if row.is_new]

    @contextmanager
    def _transaction(self, using: str, keys: int) -> Iterator[store.Cursor]:
        """Where what was inserted can be undone. A single job is inserted with one statement, or not."""
        if keys == 1 and self.until == "finished" and self.period is None:
            with connections[using].cursor() as cursor:
                yield cursor
            return
        with store.own_transaction(using) as cursor:
            if self.period is not None:
                self._check_isolation(store.isolation(cursor))
            yield cursor

    def _enqueue(
        self, cursor: store.Cursor, new: store.NewJob, payloads: Mapping[str, str]
    ) -> dict[str, store.Enqueued]:
        """The job of each key. Raises _Again where there was one, and is no more."""
        if self.on_conflict == "replace":
            return _repeated(
                payloads,
                lambda missing: store.enqueue_or_replace(
                    cursor, new, missing, debounce=self.debounce, max_wait=self.max_wait
                ),
            )
        if self.until == "started":
            found = _repeated(payloads, lambda missing: store.enqueue_or_free(cursor, new, missing))
            return found | self._living(cursor, payloads.keys() - found.keys())
        found = self._recent(cursor, payloads)
        free = {key: payload for key, payload in payloads.items() if key not in found}
        inserted = _by_key(store.enqueue_or_keep(cursor, new, free)) if free else {}
        if self._recent(cursor, inserted, but=[row.id for row in inserted.values()]):
            raise _Again  # it has ended since the first look; nobody else can while the key is ours
        return found | inserted | self._living(cursor, free.keys() - inserted.keys())

    def _recent(
        self, cursor: store.Cursor, keys: Iterable[str], but: Sequence[int] = ()
    ) -> dict[str, store.Enqueued]:
        keys = list(keys)
        if self.period is None or not keys:
            return {}
        return _by_key(store.recent(cursor, self.job_name, keys, period=self.period, but=but))

    def _living(self, cursor: store.Cursor, keys: Iterable[str]) -> dict[str, store.Enqueued]:
        keys = sorted(keys)
        found = _by_key(store.live(cursor, self.job_name, keys)) if keys else {}
        if len(found) < len(keys):
            raise _Again
        return found

    def _refuse(self, found: Mapping[str, store.Enqueued]) -> None:
        for key, row in found.items():
            if not row.is_new:
                raise DuplicateJob(
                    f"Job {self.job_name!r} was not enqueued: job {row.id}, which is {row.status}, has the"
                    " same unique key.",
                    job_name=self.job_name,
                    job_id=row.id,
                    unique_key=key,
                )

    def _check_retention(self) -> None:
        """A job that is deleted cannot be found, so a period needs that finished jobs are kept as long."""
        for name in ("COMPLETED_RETENTION", "FAILED_RETENTION"):
            retention: timedelta | None = getattr(config(), name)
            if self.period is not None and retention is not None and retention < self.period:
                raise ImproperlyConfigured(
                    f"Job {self.job_name!r} is unique for {self.period}, but {SETTING}[{name!r}] is"
                    f" {retention}: a job would be deleted, and enqueued again, before that. Make the period"
                    " shorter or the retention longer."
                )

    def _check_isolation(self, level: str) -> None:
        """Jobs that have ended since a snapshot was taken are not in it, and no index tells of them."""
        if level not in ("read committed", "read uncommitted"):
            raise TransactionManagementError(
                f"Job {self.job_name!r} is unique for a period, which cannot be made sure of in a transaction"
                f" that is {level.upper()}: it does not see what has ended meanwhile. Enqueue it with"
                " transaction.on_commit."
            )


class _Again(Exception):
    """The job that had a key has ended before it could be read. Everything has to be undone and repeated."""


def _repeated(
    payloads: Mapping[str, str], enqueue: Callable[[Mapping[str, str]], list[store.Enqueued]]
) -> dict[str, store.Enqueued]:
    """What `enqueue` returns by key; once more for what is left if it has freed keys, which are now ours."""
    rows = enqueue(payloads)
    found = _by_key(rows)
    if len(found) < len(rows):
        rows = enqueue({key: payload for key, payload in payloads.items() if key not in found})
        found |= _by_key(rows)
    return found


def _by_key(rows: Iterable[store.Enqueued]) -> dict[str, store.Enqueued]:
    return {row.unique_key: row for row in rows if row.unique_key is not None}


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


# ── Options ───────────────────────────────────────────────────────────────────────────────────────────────


def uniqueness(
    job_name: str,
    signature: inspect.Signature,
    *,
    unique: Unique = False,
    unique_until: Until | None = None,
    on_conflict: Conflict | None = None,
    debounce: float | timedelta | None = None,
    max_wait: float | timedelta | None = None,
) -> Uniqueness | None:
    """The Uniqueness of a job function with these options; None for one that is not unique.

    Raises ValueError, with a sentence, for options that cannot work by themselves or together.
    """
    if unique is False and debounce is None:
        for name, value in (("unique_until", unique_until), ("on_conflict", on_conflict)):
            if value is not None:
                raise ValueError(f"{name} is {value!r}, which needs unique= as well.")
        if max_wait is not None:
            raise ValueError(f"max_wait is {max_wait!r}, which needs debounce= as well.")
        return None
    by = _by(True if unique is False else unique, signature)
    debounce, max_wait = _duration("debounce", debounce), _duration("max_wait", max_wait)
    until, period = _until(unique_until)
    if on_conflict not in (None, "keep", "replace", "raise"):
        raise ValueError(f"on_conflict is {on_conflict!r}; it must be 'keep', 'replace' or 'raise'.")
    if debounce is None and max_wait is not None:
        raise ValueError(f"max_wait is {max_wait}, which needs debounce= as well.")
    if debounce is not None:
        if on_conflict not in (None, "replace"):
            raise ValueError(
                f"debounce gives a job that waits the latest arguments, so on_conflict={on_conflict!r} cannot"
                " be had with it. Leave that out."
            )
        if max_wait is not None and max_wait < debounce:
            raise ValueError(f"max_wait is {max_wait}; it must not be shorter than debounce, {debounce}.")
        on_conflict = "replace"
    if on_conflict == "replace" and unique_until not in (None, "started"):
        what = "debounce" if debounce is not None else "on_conflict='replace'"
        raise ValueError(
            f"{what} changes a job that waits, which is not possible once it has started, so"
            f" unique_until={unique_until!r} cannot be had with it. Leave that out, or make it 'started'."
        )
    return Uniqueness(
        job_name=job_name,
        by=by,
        until="started" if on_conflict == "replace" else until,
        period=period,
        on_conflict=on_conflict or "keep",
        debounce=debounce,
        max_wait=max_wait,
        signature=signature,
        defaults={} if callable(by) else _defaults(by, signature),
    )


def _by(unique: object, signature: inspect.Signature) -> tuple[str, ...] | Callable[..., str | None]:
    if unique is True:
        return tuple(signature.parameters)
    if callable(unique):
        if inspect.iscoroutinefunction(unique) or inspect.iscoroutinefunction(type(unique).__call__):
            raise ValueError(
                "the function unique= is async; it is called by enqueue, so it must be a plain one."
            )
        return unique
    names = (unique,) if isinstance(unique, str) else unique
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"unique is {unique!r}; it must be True, names of parameters, or a function that returns a key."
        )
    for name in names:
        if name not in signature.parameters:
            known = ", ".join(map(repr, signature.parameters)) or "none"
            raise ValueError(
                f"unique names {name!r}, which is not a parameter of the function. Known: {known}."
            )
    return tuple(dict.fromkeys(names))


def _defaults(names: Sequence[str], signature: inspect.Signature) -> dict[str, Any]:
    """The defaults of these parameters, as they would come back if they had been passed."""
    defaults: dict[str, Any] = {}
    for name in names:
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            defaults[name] = []
        elif parameter.kind is parameter.VAR_KEYWORD:
            defaults[name] = {}
        elif parameter.default is not parameter.empty:
            try:
                text = encode_arguments([], {name: parameter.default}, 2**20)
            except InvalidArguments as error:
                raise ValueError(
                    f"the default of {name!r} cannot be part of a unique key: {error} Use another default, or"
                    " unique=(...) without this parameter."
                ) from None
            defaults[name] = json.loads(text)["kwargs"][name]
    return defaults


def _until(unique_until: object) -> tuple[Literal["started", "finished"], timedelta | None]:
    if unique_until is None or unique_until == "finished":
        return "finished", None
    if unique_until == "started":
        return "started", None
    if not is_delay(unique_until):
        raise ValueError(
            f"unique_until is {unique_until!r}; it must be 'finished', 'started', seconds or a timedelta."
        )
    return "finished", _duration("unique_until", unique_until)


def _duration(name: str, value: object) -> timedelta | None:
    if value is None:
        return None
    if is_delay(value):
        seconds = value.total_seconds() if isinstance(value, timedelta) else value
        if 0 < seconds <= LONGEST_DELAY:
            return timedelta(seconds=seconds)
    raise ValueError(
        f"{name} is {value!r}; it must be seconds or a timedelta, above zero, at most ten years."
    )
