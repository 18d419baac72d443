"""What the package raises, and what a job function may raise to steer its own future.

The first group are errors: one class for each thing a caller would handle differently. The second group
(``Retry``, ``Snooze``, ``GiveUp``) are wishes, raised inside the body of a job function. The third
(``JobTimeout``, ``JobStopped``) are raised in a body by its worker.
"""

from __future__ import annotations

from datetime import timedelta

from .lifecycle import is_delay

__all__ = [
    "DuplicateJob",
    "DuplicateJobName",
    "GiveUp",
    "InvalidArguments",
    "JobStopped",
    "JobTimeout",
    "PGJobsError",
    "Retry",
    "Snooze",
]


class PGJobsError(Exception):
    """The base of all errors of this package."""


class DuplicateJobName(PGJobsError):
    """Two job functions claim the same name."""


class DuplicateJob(PGJobsError):
    """A job was not enqueued, since another one has its unique key. The caller's transaction stays usable.

    `job_name`, `unique_key`, and `job_id`: the id of the other job, None where that is one of the same call.
    """

    def __init__(
        self, message: str = "", job_name: str = "", job_id: int | None = None, unique_key: str = ""
    ) -> None:
        super().__init__(message)
        self.job_name = job_name
        self.job_id = job_id
        self.unique_key = unique_key


class InvalidArguments(PGJobsError, TypeError):
    """The arguments of a job do not fit its function, are not JSON, or are too large.

    Raised at enqueue, before any SQL, so that the caller's transaction stays usable.
    """


class _Wish(Exception):
    """Raised by a job function to say what should become of the job."""


class Retry(_Wish):
    """Record this attempt as failed and run the job again after `delay` (seconds or a timedelta).

    Without a delay the job's own backoff decides. When no attempts are left, the job becomes a dead letter.
    `reason` is recorded as the text of the failure. Raises TypeError for a delay that is none, NaN included.
    """

    def __init__(self, delay: float | timedelta | None = None, reason: str = "") -> None:
        super().__init__(delay, reason)
        self.delay = None if delay is None else _checked(self, delay)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason or "The job asked to be retried."


class Snooze(_Wish):
    """Run the job again after `delay` (seconds or a timedelta); this attempt does not count.

    Raises TypeError for a delay that is none, NaN included.
    """

    def __init__(self, delay: float | timedelta) -> None:
        super().__init__(delay)
        self.delay = _checked(self, delay)

    def __str__(self) -> str:
        unit = "" if isinstance(self.delay, timedelta) else " s"
        return f"The job asked to be run again after {self.delay}{unit}."


class GiveUp(_Wish):
    """Make the job a dead letter now, whatever attempts are left. `reason` is recorded."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason or "The job gave up."


class _Abort(BaseException):
    """Raised in a body from outside. No `Exception`, so that `except Exception` does not swallow it."""

    message = ""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else self.message


class JobTimeout(_Abort):
    """Raised in the body of a job that runs for longer than its timeout. Clean up, and let it pass."""

    message = "The job ran for longer than its timeout."


class JobStopped(_Abort):
    """Raised in the body of a running job that somebody has cancelled. Clean up, and let it pass."""

    message = "The job was stopped."


def _checked(wish: _Wish, delay: float | timedelta) -> float | timedelta:
    if is_delay(delay):
        return delay
    raise TypeError(f"{type(wish).__name__} takes a delay in seconds or a timedelta, not {delay!r}.")
