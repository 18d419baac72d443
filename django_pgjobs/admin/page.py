"""What the page of a job shows, and how things look. Bounded and escaped, since anyone may write a row."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from django.template.defaultfilters import filesizeformat
from django.utils import dateformat, timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import mark_safe
from django.utils.timesince import timesince

from .. import jobs, store
from ..conf import config
from ..doctor import in_words as duration_in_words
from ..lifecycle import Status
from ..models import BackgroundJob, BackgroundWorker, Progress
from ..redaction import HIDDEN, MOST_READ, Redacted
from ..schedules import LONGEST_NAME

if TYPE_CHECKING:
    from django.utils.safestring import SafeString

MOST_TEXT = 20_000  # characters of a payload, a result, a traceback
MOST_ERRORS = 200_000  # characters of the history of errors, as JSON
MOST_NAME = 200  # characters of a name or of one thing that a context says
MOST_CONTEXT = 5  # things that a context says
MOST_RELATED = 6  # jobs of one kind
NEARBY = 10_000  # ids to each side among which other jobs of a schedule are looked for
PRETTY = 200_000  # characters of JSON that are still laid out


def badge(status: str) -> SafeString:
    return format_html('<span class="pgjobs-status pgjobs-{}">{}</span>', status, status)


def breakable(name: str) -> SafeString:
    """A dotted name that may be broken after its dots."""
    return format_html_join(mark_safe(".<wbr>"), "{}", ((part,) for part in name.split(".")))


def in_words(instant: datetime) -> str:
    """How far away an instant is: "5 minutes ago", "in 2 hours"."""
    now = timezone.now()
    distance = timesince(min(instant, now), max(instant, now), depth=1)
    if distance.startswith("0"):
        seconds = int(abs(now - instant).total_seconds())
        distance = f"{seconds}\xa0second{'' if seconds == 1 else 's'}"
    return f"in {distance}" if instant > now else f"{distance} ago"


def ago(instant: datetime | None) -> SafeString:
    if instant is None:
        return format_html("{}", "–")
    return format_html(
        '<time datetime="{}" title="{}">{}</time>', instant.isoformat(), exactly(instant), in_words(instant)
    )


def exactly(instant: datetime) -> str:
    shown = timezone.localtime(instant) if timezone.is_aware(instant) else instant
    return dateformat.format(shown, "Y-m-d H:i:s T").strip()


class Preview(NamedTuple):
    """A text for a page, and a note when it is not all of it."""

    text: str
    note: str = ""


class Attempt(NamedTuple):
    """A failed attempt, out of the history of errors."""

    number: str
    when: datetime | None
    summary: str
    traceback: str
    worker: str
    took: str = ""  # from the claim to the failure


class Entry(NamedTuple):
    """Something that has happened to a job, or will; a failed attempt among others."""

    css: str
    when: datetime | None
    what: SafeString | str
    attempt: Attempt | None = None


class JobPage:
    """What the page of a job shows, in the order in which a person asks."""

    def __init__(self, job: BackgroundJob) -> None:
        alias = config().DATABASE
        self.job = job
        self.texts = store.texts(job.pk, alias, most=MOST_READ, most_errors=MOST_ERRORS, pretty=0)
        payload = self.texts.get("payload")
        readable = payload is not None and not payload.cut
        self.redacted = Redacted(job.job_name, payload.shown if payload and readable else None)
        self.badge = badge(job.status)
        self.known = jobs.find(job.job_name) is not None
        self.payload = self._preview("payload")
        self.result = self._preview("result")
        self.metadata = None if self._shown("metadata") in ("", "{}") else self._preview("metadata")
        self.last_error = self._preview("last_error")
        self.worker = "" if job.worker_id is None else self._workers.get(str(job.worker_id), "")

    def _shown(self, name: str) -> str:
        return self.texts[name].shown if name in self.texts else ""

    def _preview(self, name: str) -> Preview | None:
        if name not in self.texts:
            return None
        text = self.texts[name]
        size = filesizeformat(text.size)
        if name == "last_error":
            is_cut = text.cut or len(text.shown) > MOST_TEXT
            shown = self.redacted.text(text.shown[:MOST_TEXT], is_cut=is_cut)
        elif (value := _read(text)) is None:
            if not self.redacted.hides_nothing and text.shown != "null":
                return Preview(HIDDEN, f"It has {size}, and could not be searched for secrets.")
            shown, is_cut = text.shown, text.cut
        else:
            shown = _laid_out(self.redacted.payload if name == "payload" else self.redacted.value(value))
            is_cut = len(shown) > MOST_TEXT
        return Preview(shown[:MOST_TEXT], f"Cut: all of it has {size}." if is_cut else "")

    @cached_property
    def story(self) -> list[SafeString]:
        """What is going on, in words."""
        job = self.job
        match Status(job.status):
            case Status.QUEUED if job.run_at > timezone.now():
                what = "Will be tried again" if job.attempts else "Scheduled: will run"
                return [format_html("{} {}.", what, ago(job.run_at))]
            case Status.QUEUED:
                return [format_html("Waits for a worker; it has been due since {}.", ago(job.run_at))]
            case Status.PROCESSING:
                story = [
                    format_html(
                        "Attempt {} of {} began {} on {}.",
                        job.attempts, job.max_attempts, ago(job.attempted_at), self.worker or "some worker",
                    ),
                    format_html("Its worker was last heard of {}.", ago(job.locked_at)),
                ]  # fmt: skip
                if job.stop_requested_at:
                    story.append(format_html("Somebody asked it to stop {}.", ago(job.stop_requested_at)))
                return story
            case Status.FAILED:
                return [
                    format_html(
                        "Failed for good {}, after {} of {} attempts. Nothing happens until somebody"
                        " retries or discards it.",
                        ago(job.updated_at), job.attempts, job.max_attempts,
                    )
                ]  # fmt: skip
            case Status.COMPLETED:
                return [format_html("Completed {}, in attempt {}.", ago(job.updated_at), job.attempts)]
            case Status.CANCELLED:
                return [format_html("Cancelled {}: it will not run.", ago(job.updated_at))]

    @cached_property
    def is_due_later(self) -> bool:
        return self.job.status == Status.QUEUED and self.job.run_at > timezone.now()

    @cached_property
    def timeline(self) -> list[Entry]:
        """What will happen, what happens and what has happened, the latest first."""
        latest = self._latest()
        return [*([latest] if latest else []), *map(self._failure, self.attempts), self._beginning()]

    def _latest(self) -> Entry | None:
        """What happens now or next, or has come last; None where that was a failed attempt."""
        job = self.job
        on = format_html(" on {}", self.worker) if self.worker else ""
        match Status(job.status):
            case Status.QUEUED:
                what = "Runs again" if job.attempts or self.attempts else "Runs"
                what += "" if self.is_due_later else " as soon as a worker takes it"
                return Entry("queued", job.run_at, f"{what}.")
            case Status.PROCESSING:
                what = format_html("Attempt {} began{}, and goes on.", job.attempts, on)
                return Entry("processing", job.attempted_at, what)
            case Status.COMPLETED:
                took = _between(job.attempted_at, job.updated_at)
                what = format_html(
                    "Attempt {} completed{}{}.", job.attempts, f" after {took}" if took else "", on
                )
                return Entry("completed", job.updated_at, what)
            case Status.CANCELLED:
                return Entry("cancelled", job.updated_at, "Cancelled.")
            case Status.FAILED:
                return None

    def _failure(self, attempt: Attempt) -> Entry:
        what = format_html("Attempt {} failed", attempt.number[:20]) if attempt.number else "Failed"
        took = f" after {attempt.took}" if attempt.took else ""
        on = f" on {self._workers.get(attempt.worker, 'a worker that is gone')}" if attempt.worker else ""
        return Entry("failed", attempt.when, format_html("{}{}{}.", what, took, on), attempt)

    def _beginning(self) -> Entry:
        """Who or what has enqueued the job, as far as its metadata tells."""
        known = self._known
        by = known.get("enqueued_by")
        parts = [f" by {by[:MOST_NAME]}"] if isinstance(by, str) and by else []
        if self.schedule:
            parts.append(f" by the schedule {self.schedule!r}")
            if isinstance(known.get("tick"), str):
                parts.append(f", for {known['tick'][:MOST_NAME]}")
        if self._original is not None:
            parts.append(f", as a copy of job {self._original}")
        context = known.get("context")
        if isinstance(context, dict):
            plain = [(name, value) for name, value in context.items() if isinstance(value, str | int | float)]
            told = ", ".join(f"{name} {value}"[:MOST_NAME] for name, value in plain[:MOST_CONTEXT])
            parts.append(f", with {told}" if told else "")
        return Entry("queued", self.job.created_at, f"Enqueued{''.join(parts)}.")

    @cached_property
    def _known(self) -> dict[str, Any]:
        """The metadata, without secrets, where it can be read."""
        metadata = self.redacted.value(_read(self.texts.get("metadata")))
        return metadata if isinstance(metadata, dict) else {}

    @property
    def schedule(self) -> str:
        """The name of the schedule that it is a job of, or nothing."""
        name = self._known.get("schedule")
        return name if isinstance(name, str) and len(name) <= LONGEST_NAME and name != HIDDEN else ""

    @property
    def _original(self) -> int | None:
        """The id of the job that it is a copy of."""
        id = self._known.get("copy_of")
        return id if isinstance(id, int) and 0 < id <= store.LARGEST_ID else None

    @cached_property
    def related(self) -> list[tuple[str, list[store.Related]]]:
        """Other jobs that have to do with it, each kind under a heading."""
        job, alias = self.job, config().DATABASE
        found: list[tuple[str, list[store.Related]]] = []
        if self._original is not None:
            with store.own_transaction(alias) as cursor:
                seen = store.seen(cursor, [self._original])
            found.append(
                ("It is a copy of", [store.Related(one.id, one.status, one.updated_at) for one in seen])
            )
        if job.unique_key is not None:
            alike = store.with_key(
                alias, id=job.pk, job_name=job.job_name, unique_key=job.unique_key, most=MOST_RELATED
            )
            found.append(("With its unique key", alike))
        if self.schedule:
            near = store.of_schedule(
                alias,
                id=job.pk,
                job_name=job.job_name,
                schedule=self.schedule,
                window=NEARBY,
                most=MOST_RELATED // 2,
            )
            found.append(("Before and after it, of its schedule", near))
        return [(heading, jobs) for heading, jobs in found if jobs]

    @cached_property
    def _workers(self) -> dict[str, str]:
        """The names of the worker hosts that have had to do with the job, by their ids as texts."""
        texts = {attempt.worker for attempt in self.attempts}
        if self.job.worker_id is not None:
            texts.add(str(self.job.worker_id))
        ids = {text: id for text in texts if (id := _uuid(text)) is not None}
        rows = BackgroundWorker.objects.using(config().DATABASE).only("hostname", "pid")
        names = {worker.pk: str(worker) for worker in rows.filter(pk__in=ids.values())} if ids else {}
        return {text: names.get(id, f"a worker that is gone ({text[:8]})") for text, id in ids.items()}

    @cached_property
    def facts(self) -> list[tuple[str, Any]]:
        job = self.job
        facts: list[tuple[str, Any]] = [
            ("Job", job.job_name),
            ("Queue", job.queue_name),
            ("Attempts", f"{job.attempts} of {job.max_attempts}"),
            ("Priority", job.priority),
            ("Enqueued", moment(job.created_at)),
            ("Run at", moment(job.run_at)),
        ]
        if job.started_at:
            facts.append(("First started", moment(job.started_at)))
        if job.attempted_at:
            facts.append(("Last started", moment(job.attempted_at)))
        facts.append((FINAL.get(job.status, "Updated"), moment(job.updated_at)))
        if self.worker:
            facts.append(("Worker", self.worker))
        if self.progress:
            facts.append(("Progress", self.progress))
        if isinstance(interruptions := self._known.get("interruptions"), int) and interruptions > 0:
            facts.append(("Interrupted", f"{interruptions} time{'' if interruptions == 1 else 's'}"))
        if job.crashes:
            facts.append(("Killed its executor", f"{job.crashes} time{'' if job.crashes == 1 else 's'}"))
        if job.unique_key is not None:
            facts.append(("Unique key", self.redacted.text(job.unique_key)))
        if not job.rerun_if_lost:
            facts.append(("If lost", "fails, and is not run again"))
        return facts

    @cached_property
    def attempts(self) -> list[Attempt]:
        """The failed attempts, newest first. Anyone may have written them, so anything may be in there."""
        text = self.texts.get("errors")
        entries = _read(text)
        if not isinstance(entries, list):
            return []
        newest_first = [entry for entry in reversed(entries) if isinstance(entry, dict)][:20]
        return [attempt_of(entry, self.redacted) for entry in newest_first]

    @cached_property
    def progress(self) -> Progress | None:
        return Progress.read(self._known.get("progress"))

    @cached_property
    def unread(self) -> Preview | None:
        """The history of errors as it stands, where it cannot be read."""
        text = self.texts.get("errors")
        if text is None or self.attempts or text.shown == "[]":
            return None
        note = f"The history of errors cannot be laid out; it has {filesizeformat(text.size)}."
        return Preview(self.redacted.text(text.shown[:MOST_TEXT], is_cut=True), note)


FINAL = {Status.FAILED: "Failed", Status.COMPLETED: "Completed", Status.CANCELLED: "Cancelled"}


def moment(instant: datetime) -> SafeString:
    return format_html('{} <span class="quiet">{}</span>', exactly(instant), in_words(instant))


def attempt_of(entry: dict[str, Any], redacted: Redacted) -> Attempt:
    def text(key: str) -> str:
        value = entry.get(key)
        return "" if value is None else str(value)[:MOST_TEXT]

    def about(key: str) -> str:
        return redacted.text(text(key), is_cut=len(text(key)) == MOST_TEXT)

    when, began = _instant(text("at")), _instant(text("began"))
    summary = f"{text('exception').rpartition('.')[2]}: {about('message')}".removeprefix(": ")
    return Attempt(text("attempt"), when, summary, about("traceback"), text("worker"), _between(began, when))


def _instant(text: str) -> datetime | None:
    """An instant out of a text, where it is one that can be shown."""
    try:
        instant = datetime.fromisoformat(text)
        moment(instant)
    except (ValueError, TypeError, OverflowError):
        return None
    return instant


def _between(began: datetime | None, ended: datetime | None) -> str:
    """The time between two instants, roughly; nothing where that makes no sense."""
    if began is None or ended is None or timezone.is_aware(began) != timezone.is_aware(ended):
        return ""
    seconds = (ended - began).total_seconds()
    return duration_in_words(seconds) if seconds >= 0 else ""


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _laid_out(value: Any) -> str:
    """JSON as people read it."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        return text if len(text) > PRETTY else json.dumps(value, ensure_ascii=False, indent=4)
    except RecursionError:  # in the encoder that lays out, which is the slower one
        return text


def _read(text: store.Text | None) -> Any:
    """What a JSON text says; None where it is not there, was cut, or is nested too deep."""
    if text is None or text.cut:
        return None
    try:
        return json.loads(text.shown)
    except (ValueError, RecursionError):
        return None
