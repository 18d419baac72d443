"""The tables as Django sees them: for reading, for the admin, and as the handle of an enqueued job.

The columns say what a job is; `lifecycle` says what may happen to it; `store` is the only writer of its
status. So a job can be inserted and read here, and not saved.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, NamedTuple, NoReturn, Self

from django.db import DEFAULT_DB_ALIAS, connections, models
from django.db.models import Q
from django.db.models.functions import Now
from django.db.transaction import TransactionManagementError

from . import store
from .lifecycle import FINISHED, Status
from .schedules import LONGEST, LONGEST_NAME, MISSED, SHORTEST, Timing

# The advice given wherever somebody tries to write a job through the ORM.
_READ_ONLY = (
    "A job is not saved or deleted through its model: workers write to its row at the same time."
    " Use job.retry(), job.discard() or job.cancel(), or manage.py prunejobs."
)


class Progress(NamedTuple):
    """How far a job has come, in its own words."""

    done: float
    total: float | None
    message: str

    @classmethod
    def read(cls, stored: object) -> Progress | None:
        """A progress out of a job's metadata, where anybody may have written anything."""
        if not isinstance(stored, dict):
            return None
        done, total, message = stored.get("done"), stored.get("total"), stored.get("message")
        if not isinstance(done, int | float) or not isinstance(total, int | float | None):
            return None
        return cls(done, total, message if isinstance(message, str) else "")

    def __str__(self) -> str:
        share = f"{self.done:,}" if self.total is None else f"{self.done:,} of {self.total:,}"
        return f"{share}: {self.message}" if self.message else share


class StatusField(models.CharField):  # type: ignore[type-arg]
    """A CharField over the enum type `job_status`. Values outside of it are refused with a ValueError.

    Choices and length stay out of migrations: the enum in the database has both.
    """

    description = "The status of a job"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["choices"] = [(status.value, status.value) for status in Status]
        kwargs["max_length"] = 10
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        name, path, args, kwargs = super().deconstruct()
        del kwargs["choices"], kwargs["max_length"]
        return name, path, args, kwargs

    def db_type(self, connection: Any) -> str:
        return "job_status"

    def cast_db_type(self, connection: Any) -> str:
        return "job_status"

    def db_parameters(self, connection: Any) -> Any:
        return {"type": "job_status", "check": None}

    def get_prep_value(self, value: Any) -> Any:
        value = super().get_prep_value(value)
        if value is None or hasattr(value, "resolve_expression"):
            return value
        try:
            return Status(value).value
        except ValueError:
            raise ValueError(
                f"{value!r} is not a status of a job. The statuses are {', '.join(Status)}."
            ) from None


class JSONField(models.JSONField):
    """A JSONField that can be read whatever Postgres keeps in it.

    Where Python refuses, which are integers of more than 4,300 digits and arrays thousands of levels deep,
    the value is its text. Migrations do not tell it from Django's own.
    """

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.JSONField", args, kwargs

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        try:
            return super().from_db_value(value, expression, connection)
        except (ValueError, RecursionError):
            return value


# What Postgres takes, and Python cannot read, would break every page and query with it. A day short of both
# ends of Python's calendar, since any time zone has to have a name for it.
FIRST_DAY, LAST_DAY = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)
_ARE_DATES = Q(
    run_at__range=(FIRST_DAY, LAST_DAY),
    locked_at__range=(FIRST_DAY, LAST_DAY),
    stop_requested_at__range=(FIRST_DAY, LAST_DAY),
    started_at__range=(FIRST_DAY, LAST_DAY),
    attempted_at__range=(FIRST_DAY, LAST_DAY),
    created_at__range=(FIRST_DAY, LAST_DAY),
    updated_at__range=(FIRST_DAY, LAST_DAY),
)


class BackgroundJob(models.Model):
    """One row, one piece of work. Also the handle that enqueueing returns."""

    # Whether this is the handle of a job that `enqueue` has just inserted: not of one that was there and has
    # its unique key, nor of a job that was read from the table.
    is_new = False

    id = models.BigAutoField(primary_key=True)
    queue_name = models.CharField(max_length=255, db_default="default")
    job_name = models.CharField(max_length=255, help_text="The registered name of the job function.")
    payload = JSONField(help_text='{"args": [...], "kwargs": {...}}; absent keys mean empty.')
    status = StatusField(db_default=Status.QUEUED.value)
    priority = models.SmallIntegerField(db_default=0, help_text="-100 to 100; higher goes first.")
    run_at = models.DateTimeField(db_default=Now())
    attempts = models.IntegerField(db_default=0, help_text="Claims that were not refunded.")
    max_attempts = models.IntegerField(db_default=3)
    locked_at = models.DateTimeField(null=True, help_text="When it was claimed, or the claim last renewed.")
    locked_by = models.UUIDField(null=True, help_text="The token of the claim.")
    worker_id = models.UUIDField(null=True, help_text="The worker host that holds or last held it.")
    last_error = models.TextField(null=True)  # noqa: DJ001 - null means that nothing has failed yet
    errors = JSONField(
        db_default=models.Value([], models.JSONField()),
        help_text="One entry for each failed attempt, newest last.",
    )
    error_fingerprint = models.TextField(null=True)  # noqa: DJ001
    crashes = models.IntegerField(db_default=0, help_text="Executors that died while running it.")
    rerun_if_lost = models.BooleanField(db_default=True)
    unique_key = models.CharField(max_length=255, null=True)  # noqa: DJ001
    stop_requested_at = models.DateTimeField(null=True)
    result = JSONField(null=True)
    metadata = JSONField(db_default=models.Value({}, models.JSONField()))
    started_at = models.DateTimeField(null=True, help_text="The first claim.")
    attempted_at = models.DateTimeField(null=True, help_text="The latest claim.")
    created_at = models.DateTimeField(db_default=Now())
    updated_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "background_jobs"
        verbose_name = "job"
        default_permissions = ("view",)
        permissions = [
            ("retry_job", "Can retry failed and cancelled jobs"),
            ("discard_job", "Can discard dead letters"),
            ("edit_job", "Can retry jobs with edited arguments"),
            ("duplicate_job", "Can enqueue copies of jobs"),
            ("run_job", "Can run queued jobs now that are due later"),
            ("cancel_job", "Can cancel queued jobs"),
            ("stop_job", "Can stop running jobs"),
            ("export_job", "Can export jobs, without secrets"),
        ]
        indexes = [
            # The claim: one range per queue and priority, in order.
            models.Index(
                "queue_name",
                models.F("priority").desc(),
                "run_at",
                "id",
                condition=Q(status=Status.QUEUED.value),
                name="idx_jobs_queued_run_at",
            ),
            # Sweeping. No column that a renewal writes, so that renewals stay HOT updates.
            models.Index("id", condition=Q(status=Status.PROCESSING.value), name="idx_jobs_processing"),
            # Pruning, dead letters by age, and what finished in the last minutes.
            models.Index(
                "status",
                "updated_at",
                condition=Q(status__in=sorted(status.value for status in FINISHED)),
                name="idx_jobs_finished",
            ),
            # What has been enqueued with a key lately, whatever became of it: for uniqueness over a period.
            models.Index(
                "job_name",
                "unique_key",
                "created_at",
                condition=Q(unique_key__isnull=False),
                name="idx_jobs_unique_key",
            ),
        ]
        # Only rules which clients with a few statements of bare SQL keep as well.
        constraints = [
            models.UniqueConstraint(
                fields=["job_name", "unique_key"],
                condition=Q(
                    unique_key__isnull=False,
                    status__in=[Status.QUEUED.value, Status.PROCESSING.value],
                ),
                name="uq_jobs_unique_key",
            ),
            models.CheckConstraint(
                condition=Q(priority__gte=-100, priority__lte=100), name="ck_jobs_priority"
            ),
            models.CheckConstraint(
                condition=Q(attempts__gte=0, max_attempts__gte=0, crashes__gte=0), name="ck_jobs_counts"
            ),
            models.CheckConstraint(condition=_ARE_DATES, name="ck_jobs_dates"),
        ]

    def __str__(self) -> str:
        return f"{self.job_name} #{self.pk}"

    def refresh(self) -> Self:
        """Read all of the row again and return self. Raises BackgroundJob.DoesNotExist once it is pruned."""
        self.refresh_from_db(fields=[field.attname for field in self._meta.concrete_fields])
        return self

    def retry(self) -> bool:
        """Queue a failed or cancelled job again, with fresh attempts.

        False if it was neither, or if another job with its unique key waits or runs.
        """
        return bool(store.retry([self.pk], using=self._state.db))

    def discard(self) -> bool:
        """Decide against a dead letter: it becomes cancelled. False if it was not failed."""
        return bool(store.discard([self.pk], using=self._state.db))

    def cancel(self) -> bool:
        """Cancel a queued job, or ask the worker that runs it to stop it. False if it was neither.

        A running job ends within a second or so, with JobStopped raised in its body; `refresh()` tells when
        it is cancelled. It may also finish first.
        """
        ids = [self.pk]
        using = self._state.db
        return bool(store.cancel(ids, using=using) or store.request_stop(ids, using=using))

    def wait(self, timeout: float | timedelta) -> Self:
        """Wait until the job is finished, and return self, refreshed. For the rare caller that cannot go on.

        `timeout` in seconds, or a timedelta. Raises TimeoutError when it has passed, ValueError where it is
        no number, DoesNotExist once the row is deleted, and TransactionManagementError inside a transaction:
        what it enqueued, no worker sees.
        """
        using = self._state.db or DEFAULT_DB_ALIAS
        if connections[using].in_atomic_block:
            raise TransactionManagementError(
                f"{self} cannot be waited for inside a transaction on {using!r}: nobody sees what it has"
                " enqueued until it is committed. Wait after it, or run the job with"
                " django_pgjobs.testing.drain() in a test."
            )
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if math.isnan(seconds):
            raise ValueError(f"timeout has to be seconds or a timedelta, not {timeout!r}.")
        end = time.monotonic() + seconds
        pause = 0.01
        while self.refresh().status not in FINISHED:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self} is still {self.status} after {seconds:g} s.")
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, 0.5)
        return self

    @property
    def progress(self) -> Progress | None:
        """What the job last said with `current_job().set_progress()`; None if it did not."""
        return Progress.read(self.metadata.get("progress") if isinstance(self.metadata, dict) else None)

    def save(self, *args: Any, **kwargs: Any) -> None:
        if not self._state.adding:
            raise TypeError(_READ_ONLY)
        super().save(*args, **(kwargs | {"force_insert": True}))

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(_READ_ONLY)


class DeadLetterManager(models.Manager["DeadLetter"]):
    def get_queryset(self) -> models.QuerySet[DeadLetter]:
        return super().get_queryset().filter(status=Status.FAILED.value)


class DeadLetter(BackgroundJob):
    """A job that has failed for good and waits for a person."""

    objects: ClassVar = DeadLetterManager()

    class Meta:
        proxy = True
        verbose_name = "dead letter"
        default_permissions = ("view",)


class Overview(BackgroundJob):
    """No rows of its own: what gives the overview its place in the admin."""

    class Meta:
        proxy = True
        verbose_name = "overview"
        verbose_name_plural = "overview"
        default_permissions = ()


class BackgroundQueue(models.Model):
    """What people have decided about a queue. A queue without a row is simply not paused."""

    name = models.CharField(max_length=255, primary_key=True)
    paused_at = models.DateTimeField(null=True)
    paused_by = models.CharField(max_length=255, db_default="")
    reason = models.TextField(db_default="")

    class Meta:
        db_table = "background_queues"
        verbose_name = "queue"
        default_permissions = ("view",)
        permissions = [
            ("pause_queue", "Can pause and resume queues"),
            ("purge_queue", "Can cancel all jobs that wait in a queue"),
        ]

    def __str__(self) -> str:
        return self.name


class BackgroundOperation(models.Model):
    """Something that a person wants done to all jobs that a filter finds; how far that has come; and by whom.

    It is carried on from where it is by `operations`, a transaction at a time.
    """

    id = models.BigAutoField(primary_key=True)
    act = models.CharField(max_length=20, help_text="retry, discard or purge")
    filter = models.JSONField(help_text="Which jobs it is about.")
    manner = models.JSONField(
        db_default=models.Value({}, models.JSONField()),
        help_text="How jobs are retried, where that is not at once and in their own queues.",
    )
    reason = models.TextField(db_default="")
    asked_by = models.CharField(max_length=255, db_default="", help_text="Who wanted it.")
    user_key = models.CharField(
        max_length=255, db_default="", help_text="The primary key of that user; empty for a shell's."
    )
    state = models.CharField(max_length=10, db_default="running", help_text="running, stopped or finished")
    expected = models.BigIntegerField(null=True, help_text="How many jobs matched; null: more than counted.")
    changed = models.BigIntegerField(db_default=0)
    skipped = models.JSONField(
        db_default=models.Value({}, models.JSONField()), help_text="How many jobs were, by the reason."
    )
    failed = models.BigIntegerField(db_default=0, help_text="Jobs that the database refused to change.")
    problem = models.TextField(db_default="", help_text="What it said, the last time.")
    cursor_priority = models.SmallIntegerField(null=True, help_text="The priority of the last job that was")
    cursor_at = models.DateTimeField(null=True, help_text="gone through, where these are queued; its time,")
    cursor_id = models.BigIntegerField(null=True, help_text="and its id.")
    next_at = models.DateTimeField(null=True, help_text="When a paced one goes on.")
    created_at = models.DateTimeField(db_default=Now(), help_text="Jobs that came later are left alone.")
    updated_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "background_operations"
        verbose_name = "operation"
        default_permissions = ("view",)
        constraints = [
            models.CheckConstraint(
                condition=Q(state__in=["running", "stopped", "finished"]), name="ck_operations_state"
            ),
        ]

    def __str__(self) -> str:
        return f"Operation {self.pk}"


class BackgroundSchedule(models.Model):
    """When a job function runs by itself: declared by code, or made by people.

    Worker hosts go by this row, and write `last_tick` and `next_tick_at`.
    """

    name = models.CharField(max_length=LONGEST_NAME, primary_key=True)
    job_name = models.CharField(max_length=255, help_text="The registered name of the job function.")
    payload = models.JSONField(
        db_default=models.Value({}, models.JSONField()),
        help_text='The arguments of its jobs: {"args": [...], "kwargs": {...}}.',
    )
    cron = models.CharField(max_length=255, db_default="", help_text="Empty where there is an interval.")
    interval = models.DurationField(null=True)
    timezone = models.CharField(max_length=255, db_default="", help_text="Of the cron text.")
    missed = models.CharField(max_length=10, db_default="once", help_text=f"One of {', '.join(MISSED)}.")
    overlap = models.BooleanField(db_default=True)
    enabled = models.BooleanField(db_default=True)
    declared = models.BooleanField(db_default=False, help_text="By code, which then says what it is like.")
    last_tick = models.DateTimeField(null=True, help_text="The last one that was taken.")
    next_tick_at = models.DateTimeField(null=True, help_text="Null until a worker host has seen the row.")
    created_at = models.DateTimeField(db_default=Now())
    updated_at = models.DateTimeField(db_default=Now())
    changed_by = models.CharField(max_length=255, db_default="", help_text="Who did; empty for the code.")

    class Meta:
        db_table = "background_schedules"
        verbose_name = "schedule"
        permissions = [
            ("enable_schedule", "Can enable and disable schedules"),
            ("run_schedule", "Can run the jobs of schedules now"),
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(interval__isnull=True) & ~Q(cron="")
                | Q(interval__isnull=False, interval__range=(SHORTEST, LONGEST), cron=""),
                name="ck_schedules_timing",
            ),
            models.CheckConstraint(condition=Q(missed__in=MISSED), name="ck_schedules_missed"),
            models.CheckConstraint(
                condition=Q(
                    last_tick__range=(FIRST_DAY, LAST_DAY),
                    next_tick_at__range=(FIRST_DAY, LAST_DAY),
                    created_at__range=(FIRST_DAY, LAST_DAY),
                    updated_at__range=(FIRST_DAY, LAST_DAY),
                ),
                name="ck_schedules_dates",
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def timing(self) -> Timing:
        """When its ticks are. Raises ValueError, in a sentence, for a row that cannot work."""
        return Timing(self.cron, self.interval, self.timezone)

    def save(self, *args: Any, update_fields: Iterable[str] | None = None, **kwargs: Any) -> None:
        """Write the row; of one that exists, nothing that worker hosts write, unless it is named."""
        if update_fields is None and not self._state.adding:
            theirs = ("name", "last_tick", "next_tick_at")
            update_fields = [field.name for field in self._meta.fields if field.name not in theirs]
        super().save(*args, update_fields=update_fields, **kwargs)


class BackgroundWorker(models.Model):
    """A worker host, for people to see. Recovering jobs never depends on this table."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    hostname = models.TextField()
    pid = models.IntegerField()
    queues = models.JSONField(null=True, help_text="Null when it serves every queue.")
    processes = models.IntegerField()
    threads = models.IntegerField()
    async_slots = models.IntegerField()
    lease = models.DurationField(help_text="For how long its jobs stay its own when it is silent.")
    version = models.TextField()
    state = models.TextField(db_default="running", help_text="running or stopping")
    running = models.IntegerField(db_default=0, help_text="Jobs in its slots when last seen.")
    started_at = models.DateTimeField(db_default=Now())
    last_seen_at = models.DateTimeField(db_default=Now())
    executors = models.JSONField(
        db_default=models.Value([], models.JSONField()),
        help_text="Its processes when last seen: pid, state, jobs, and memory in bytes.",
    )
    stop_requested_at = models.DateTimeField(null=True)
    stop_requested_by = models.CharField(max_length=255, db_default="")

    class Meta:
        db_table = "background_workers"
        verbose_name = "worker"
        default_permissions = ("view",)
        permissions = [("stop_worker", "Can ask workers to stop")]

    def __str__(self) -> str:
        return f"{self.hostname}:{self.pid}"
