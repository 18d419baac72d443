"""Background jobs for Django in the Postgres that the project already has."""

from .context import CurrentJob, current_job
from .exceptions import (
    DuplicateJob,
    DuplicateJobName,
    GiveUp,
    InvalidArguments,
    JobStopped,
    JobTimeout,
    PGJobsError,
    Retry,
    Snooze,
)
from .jobs import JobFunction, job
from .schedules import Schedule

__version__ = "0.1.0"

__all__ = [
    "CurrentJob",
    "DuplicateJob",
    "DuplicateJobName",
    "GiveUp",
    "InvalidArguments",
    "JobFunction",
    "JobStopped",
    "JobTimeout",
    "PGJobsError",
    "Retry",
    "Schedule",
    "Snooze",
    "current_job",
    "job",
]
