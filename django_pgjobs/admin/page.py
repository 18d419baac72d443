"""What the page of a job shows, and how things look. Bounded and escaped, since anyone may write a row."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from django.template.defaultfilters import filesizeformat
from django.utils import dateformat, timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import mark_safe
from django.utils.timesince import timesince

from .. import jobs, redaction, store
from ..conf import config
from ..lifecycle import Status
from ..models import BackgroundJob, BackgroundWorker, Progress
from ..redaction import HIDDEN, MOST_READ, Redacted

if TYPE_CHECKING:
    from django.utils.safestring import SafeString

MOST_TEXT = 20_000  # characters of a payload, a result, a traceback
MOST_ERRORS = 200_000  # characters of the history of errors, as JSON
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
        worker = None
        if job.worker_id is not None:
            worker = BackgroundWorker.objects.using(alias).filter(pk=job.worker_id).first()
        self.worker = "" if job.worker_id is None else str(worker or job.worker_id)

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
            if redaction.is_on() and text.shown != "null":
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
        metadata = self.redacted.value(_read(self.texts.get("metadata")))
        return Progress.read(metadata.get("progress")) if isinstance(metadata, dict) else None

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

    try:
        when = datetime.fromisoformat(text("at"))
        moment(when)
    except (ValueError, TypeError, OverflowError):
        when = None
    summary = f"{text('exception').rpartition('.')[2]}: {about('message')}".removeprefix(": ")
    return Attempt(text("attempt"), when, summary, about("traceback"), text("worker"))


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
