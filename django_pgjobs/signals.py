"""What receivers can be told of. All are sent robustly: a receiver that raises is logged, and harms nobody.

The sender is the job function, so that a receiver can be connected to one; None where nobody here knows the
name, or no job is meant. What must not be missed is itself a job: a signal is lost with the process that
would have sent it.
"""

from __future__ import annotations

from django.dispatch import Signal

# An executor has been forked, and no job has run in it: the time for what a fork must not share, such as
# threads. Sent in each of them.
executor_started = Signal()

# An executor has run its last job, and ends: the time to send what it has gathered. One that is killed, or
# whose supervisor is gone, does not get here.
executor_stopping = Signal()

# Jobs were inserted, in a transaction that may still be rolled back. Sent in the caller's process.
# ids: list[int]; queue: str; using: str, the alias of the database.
job_enqueued = Signal()

# A body is about to run. Sent where it runs, with `current_job()` and the job's context in place.
# job: CurrentJob.
job_started = Signal()

# A body has raised, and its attempt has failed. Sent where it ran, in its context, before that is recorded.
# job: CurrentJob; exception: BaseException; event: Event.BURY if the job becomes a dead letter, or FAIL.
job_raised = Signal()

# What became of an attempt is committed. Sent by an executor of the host that ran it, or by whoever swept.
# job: CurrentJob; event: Event; duration: float, in seconds, or None if not known; error: JobError or None.
job_finished = Signal()

# A job has become a dead letter. Sent where and when `job_finished` is, with the same arguments.
job_buried = Signal()
