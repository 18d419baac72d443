"""Which job a line of the log is about, where LOGGING asks for it. Nothing else imports this."""

from __future__ import annotations

import logging

from .context import current_job
from .store import Claim


class JobFilter(logging.Filter):
    """Gives each record `job_id`, `job_name`, `job_queue` and `job_attempt`, and lets all pass.

    They are those of the job in whose body the line is written. A line of this package that is about a
    claimed job has those of that job. On any other line they are None.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        about = record.args[0] if isinstance(record.args, tuple) and record.args else None
        job: tuple[object, ...] = (None, None, None, None)
        if isinstance(about, Claim):
            job = (about.id, about.job_name, about.queue_name, about.attempts)
        elif running := current_job():
            job = (running.id, running.name, running.queue, running.attempt)
        record.job_id, record.job_name, record.job_queue, record.job_attempt = job
        return True
