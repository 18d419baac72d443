"""Tell people of dead letters: of the first of a kind at once, of all further ones once an interval at most.

A kind is a job function and the fingerprint of an error. Each has a job of its own, which calls what
`PGJOBS["ON_DEAD_LETTER"]` names and then waits for more, under a unique key: so Postgres sees to it that all
hosts together tell it once. When an interval has brought none, the job is done.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.core import mail
from django.utils.module_loading import import_string

from . import signals, store
from .conf import config
from .context import CurrentJob, current_job
from .exceptions import Snooze
from .jobs import job
from .lifecycle import JobError, Status
from .models import BackgroundJob
from .operations import Filter
from .redaction import Redacted

MOST_COUNTED = 10_000  # dead letters, the latest ones, among which those of a kind are counted
MOST_READ = 100_000  # characters of a payload or an error that are read


class Alert(NamedTuple):
    """Dead letters of one kind that nobody has been told of."""

    job_name: str
    fingerprint: str
    number: int  # of jobs
    first_at: datetime
    last_at: datetime
    example: int  # the id of one of them
    error: str  # the first line of its error, without secrets
    traceback: str  # the same


def connect() -> None:
    """Have alerts made in this process."""
    signals.job_buried.connect(_note, dispatch_uid="django_pgjobs.alerts")


def _note(job: CurrentJob, error: JobError | None, **kwargs: Any) -> None:
    if job.name != tell.name:  # which would go on for ever
        _have_told(job.name, error.fingerprint if error else "")


def _have_told(job_name: str, fingerprint: str) -> None:
    tell.using(queue=config().OPERATIONS_QUEUE).enqueue(job_name, fingerprint)


@job(name="django_pgjobs.alerts.tell", max_attempts=10, timeout=300, unique=True)
def tell(job_name: str, fingerprint: str) -> None:
    """Tell of the dead letters of one kind that are new, and wait for more. Ends when there were none."""
    path, running = config().ON_DEAD_LETTER, current_job()
    if path is None or running is None:
        return
    row = BackgroundJob.objects.using(config().DATABASE).filter(pk=running.id)
    own = row.only("created_at", "metadata").get()
    alert = _find(job_name, fingerprint, _told_until(own))
    if alert is None:
        row.update(unique_key=None)  # a dead letter that comes from now on has a job of its own
        if _find(job_name, fingerprint, _told_until(own)):
            _have_told(job_name, fingerprint)  # this one came just before
        return
    import_string(path)(alert)
    row.update(metadata={**own.metadata, "told_until": alert.last_at.isoformat()})
    raise Snooze(config().ALERT_INTERVAL)


def _told_until(own: BackgroundJob) -> datetime:
    """When the last dead letter came that was told of: by this job or, an interval ago, by another."""
    told_until = own.metadata.get("told_until")
    return datetime.fromisoformat(told_until) if told_until else own.created_at - config().ALERT_INTERVAL


def _find(job_name: str, fingerprint: str, told_until: datetime) -> Alert | None:
    alias = config().DATABASE
    since = told_until + timedelta(microseconds=1)
    filter = Filter(job=job_name, fingerprint=fingerprint, since=since)
    with store.own_transaction(alias) as cursor:
        groups = store.groups(cursor, Status.FAILED, filter.criteria(), limit=MOST_COUNTED, most=1)
    if not groups:
        return None
    group = groups[0]
    texts = store.texts(group.example, alias, most=MOST_READ, most_errors=0, pretty=0)
    payload, error = texts.get("payload"), texts.get("last_error")
    redacted = Redacted(job_name, payload.shown if payload and not payload.cut else None)
    latest = BackgroundJob.objects.using(alias).filter(pk=group.example).values_list("errors__-1", flat=True)
    entry = latest.first()
    traceback = str(entry.get("traceback") or "") if isinstance(entry, dict) else ""
    line = (error.shown.strip().splitlines() or [""])[0] if error else ""
    return Alert(
        job_name,
        fingerprint,
        group.jobs,
        group.first_at,
        group.last_at,
        group.example,
        redacted.summary(line)[:300],
        redacted.text(traceback[:MOST_READ]),
    )


def mail_admins(alert: Alert) -> None:
    """Mail the ADMINS of the project what has failed, how often, and what can be done."""
    number = "A dead letter" if alert.number == 1 else f"{alert.number:,} dead letters"
    first, last = (f"{instant:%Y-%m-%d %H:%M:%S} UTC" for instant in (alert.first_at, alert.last_at))
    when = f"at {last}" if alert.number == 1 else f"from {first} to {last}"
    which = f"--job {alert.job_name}"
    if alert.fingerprint:
        which += f" --fingerprint {alert.fingerprint}"
    minutes = config().ALERT_INTERVAL.total_seconds() / 60
    mail.mail_admins(
        f"{number} of {alert.job_name}: {alert.error}"[:200],
        f"{number} of {alert.job_name}, {when}.\n\n{alert.error}\n\n{alert.traceback}\n\n"
        f"One of them is job {alert.example}; see the dead letters in the admin. When the cause is gone:\n\n"
        f"    python manage.py retryjobs {which}\n\n"
        f"You will hear of further ones in {round(minutes, 1):,g} minutes at the earliest.\n",
    )
