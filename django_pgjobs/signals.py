"""What receivers can be told of. All are sent robustly: a receiver that raises is logged, and harms nobody.

The sender is the job function (None where nobody here knows the name), so that a receiver can be connected to
one. What must not be missed is itself a job: a signal is lost with the process that would have sent it.
"""

from __future__ import annotations

from django.dispatch import Signal

# Jobs were inserted, in a transaction that may still be rolled back. Sent in the caller's process.
# ids: list[int]; queue: str; using: str, the alias of the database.
job_enqueued = Signal()

# A body is about to run. Sent where it runs, with `current_job()` and the job's context in place.
# job: CurrentJob.
job_started = Signal()

# What became of an attempt is committed. Sent by an executor of the host that ran it, or by whoever swept.
# job: CurrentJob; event: Event; duration: float, in seconds, or None if not known; error: JobError or None.
job_finished = Signal()

# A job has become a dead letter. Sent where and when `job_finished` is, with the same arguments.
job_buried = Signal()
