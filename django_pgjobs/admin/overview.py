"""The overview: on one page, what waits, runs and fails in each queue, who works, and what is wrong.

What is wrong is found by `doctor`, which reads no more than people can. The page shows neither arguments nor
errors. A small script loads the figures again every few seconds; without it there is a link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode
from uuid import UUID

from django.contrib.admin.utils import quote
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils import dateformat, timezone
from django.views.decorators.http import require_safe

from .. import doctor, store
from ..conf import config
from ..doctor import Facts, Finding, in_words
from ..models import BackgroundJob, BackgroundQueue, BackgroundWorker, DeadLetter
from .page import breakable
from .queues import BackgroundQueueAdmin
from .readonly import ReadOnlyAdmin

if TYPE_CHECKING:
    from django.utils.safestring import SafeString

REFRESH = 10  # seconds between two looks of the script
MOST_QUEUES = 200  # that are shown, by name
MOST_WORKERS = 50


class OverviewAdmin(ReadOnlyAdmin):
    """One page, in place of a list. Whoever may view jobs may view it."""

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm("django_pgjobs.view_backgroundjob")

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_changelist"
        return [path("", self.admin_site.admin_view(require_safe(self.changelist_view)), name=name)]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        return self._patiently(request, partial(self._overview, request))

    def _overview(self, request: HttpRequest) -> HttpResponse:
        facts, findings = doctor.glance(config().DATABASE)
        links = self._links(request)
        context: dict[str, Any] = {
            "refresh": str(REFRESH),
            "as_of": _clock(timezone.now(), "H:i:s"),
            "complaints": _complaints(findings, links),
            "page": None if facts is None else Overview(facts, links),
        }
        if "fragment" in request.GET:
            return TemplateResponse(request, "admin/django_pgjobs/overview_figures.html", context)
        context = {**self.admin_site.each_context(request), "title": "Overview", "opts": self.opts, **context}
        return TemplateResponse(request, "admin/django_pgjobs/overview.html", context)

    def _links(self, request: HttpRequest) -> Links:
        def may(model: Any) -> bool:
            return self.admin_site.is_registered(model) and self.admin_site.get_model_admin(
                model
            ).has_view_permission(request)

        def page(model: Any, what: str, *args: Any) -> str:
            name = f"admin:{self.opts.app_label}_{model._meta.model_name}_{what}"
            return reverse(name, args=args, current_app=self.admin_site.name)

        def no_page(*args: Any, **kwargs: Any) -> str:
            return ""

        def jobs(model: Any, what: str = "changelist") -> Callable[..., str]:
            return lambda **query: f"{page(model, what)}?{urlencode(query)}".rstrip("?")

        def may_pause() -> bool:
            if not may(BackgroundQueue):
                return False
            queues = self.admin_site.get_model_admin(BackgroundQueue)
            return isinstance(queues, BackgroundQueueAdmin) and queues.has_pause_permission(request)

        def queue(name: str) -> str:
            return page(BackgroundQueue, "change", quote(name)) if name else ""

        return Links(
            jobs=jobs(BackgroundJob) if may(BackgroundJob) else no_page,
            job=partial(page, BackgroundJob, "change") if may(BackgroundJob) else no_page,
            dead_letters=jobs(DeadLetter, "groups") if may(DeadLetter) else no_page,
            worker=partial(page, BackgroundWorker, "change") if may(BackgroundWorker) else no_page,
            queue=queue if may(BackgroundQueue) else no_page,
            pause=page(BackgroundQueue, "pause") if may_pause() else "",
        )


class Links(NamedTuple):
    """Where the pages are that this user may see; an empty text where there is none."""

    jobs: Callable[..., str]
    job: Callable[[int], str]
    dead_letters: Callable[..., str]
    worker: Callable[[UUID], str]
    queue: Callable[[str], str]  # that is paused, or has been
    pause: str

    def of(self, finding: Finding) -> str:
        """Where the jobs are that a finding is about, or what has to be put right."""
        match finding.name, finding.subject:
            case "paused-queue", queue if queue:
                return self.queue(queue) or self.jobs(queue=queue, status="queued")
            case "unserved-queue" | "slow-pickup", queue if queue:
                return self.jobs(queue=queue, status="queued")
            case "failing-queue", queue if queue:
                return self.dead_letters(queue=queue)
            case "rising-dead-letters", _:
                return self.dead_letters()
            case "lost-jobs", _:
                return self.jobs(status="processing")
            case "long-running", id if id:
                return self.job(int(id))
        return ""


class Complaint(NamedTuple):
    """Findings about which the same is to be done."""

    severity: str
    advice: str
    problems: list[tuple[str, str]]  # each with a link


def _complaints(findings: Iterable[Finding], links: Links) -> list[Complaint]:
    return [
        Complaint(
            alike[0].severity.name.lower(),
            alike[0].advice,
            [(finding.problem, links.of(finding)) for finding in alike],
        )
        for alike in doctor.grouped(findings)
    ]


class Figure(NamedTuple):
    """A figure with its label, a remark, and where there is more to see."""

    label: str
    text: str
    remark: str = ""
    url: str = ""
    css: str = ""

    @classmethod
    def cell(cls, label: str, text: str, url: str = "", *, bad: bool = False) -> Figure:
        """One of a table, in which what is nothing stays in the background."""
        if text in ("0", "–"):
            return cls(label, text, css="pgjobs-bad" if bad else "quiet")
        return cls(label, text, url=url, css="pgjobs-bad" if bad else "")


class Queue(NamedTuple):
    name: str
    url: str
    paused: str
    paused_url: str
    why: str  # it is paused
    figures: list[Figure]


class RunningJob(NamedTuple):
    name: SafeString
    url: str
    id: int
    remark: str


class Worker(NamedTuple):
    name: str
    url: str
    state: str
    css: str  # of the badge
    remarks: list[str]
    jobs: list[RunningJob]
    more: str


class Overview:
    """What the page shows, as texts: a template would put separators into numbers that are coordinates."""

    def __init__(self, facts: Facts, links: Links) -> None:
        self.facts = facts
        self.links = links
        self.figures = self._figures()
        self.charts = [
            Chart("Last hour", "1 min", facts.hour),
            Chart("Last day", "15 min", facts.day),
        ]
        self.queues = [self._queue(queue) for queue in facts.queues[:MOST_QUEUES]]
        self.lately = f"last {_period(facts.period)}"
        self.workers = [self._worker(worker) for worker in facts.workers[:MOST_WORKERS]]
        self.elsewhere = self._elsewhere()
        self.notes = list(self._notes())

    def _figures(self) -> list[Figure]:
        """The queues taken together."""
        facts = self.facts
        queues = facts.queues

        def total(figure: str) -> str:
            more = any(figure in queue.at_least for queue in queues)
            return store.in_figures(sum(getattr(queue, figure) for queue in queues), more=more)

        ages = [queue.oldest_due_age for queue in queues if queue.oldest_due_age is not None]
        slots = sum(worker.slots for worker in facts.alive)
        taken = sum(worker.running for worker in facts.alive)
        silent = len(facts.workers) - len(facts.alive)
        return [
            Figure("Due", total("due"), f"the oldest for {in_words(max(ages))}" if ages else ""),
            Figure("Queued", total("queued"), "due later included", self.links.jobs(status="queued")),
            Figure(
                "Processing", total("processing"), "held by workers", self.links.jobs(status="processing")
            ),
            Figure("Dead letters", total("failed"), "wait for a person", self.links.dead_letters()),
            Figure(
                "Workers",
                f"{len(facts.alive):,}",
                f"{taken:,} of {slots:,} slots taken" + (f", {silent:,} silent" if silent else ""),
                css="" if facts.alive else "pgjobs-bad",
            ),
        ]

    def _queue(self, queue: store.QueueStats) -> Queue:
        name, links = queue.queue_name, self.links
        finished = queue.completed_lately + queue.failed_lately
        failing = queue.failed_lately * 100 / finished if finished else 0
        serving = len(self.facts.serving(name))
        late = (queue.oldest_due_age or 0) > doctor.TOO_LONG_DUE and not queue.paused
        by = f"by {queue.paused_by}" if queue.paused_by else ""
        pickup = "–"
        if queue.pickup_median is not None and queue.pickup_p95 is not None:
            pickup = f"{in_words(queue.pickup_median)} / {in_words(queue.pickup_p95)}"
        return Queue(
            name,
            links.jobs(queue=name),
            f"paused {in_words(queue.paused_for or 0)} ago" if queue.paused else "",
            links.queue(name) if queue.paused else "",
            ": ".join(filter(None, (by, queue.paused_reason))),
            [
                Figure.cell("queued", queue.shown("queued"), links.jobs(queue=name, status="queued")),
                Figure.cell("due", queue.shown("due")),
                Figure.cell("oldest due", _age(queue.oldest_due_age), bad=late),
                Figure.cell(
                    "processing", queue.shown("processing"), links.jobs(queue=name, status="processing")
                ),
                Figure.cell("dead letters", queue.shown("failed"), links.dead_letters(queue=name)),
                Figure.cell("completed", f"{queue.completed_lately:,}"),
                Figure.cell("failed", f"{failing:.1f} %" if failing else "–", bad=failing > 50),
                Figure.cell("pickup", pickup),
                Figure.cell(
                    "workers", f"{serving:,}", bad=bool(queue.queued and not serving and not queue.paused)
                ),
            ],
        )

    def _worker(self, worker: store.Worker) -> Worker:
        state, css = worker.state, "processing" if worker.state == "running" else "cancelled"
        heard = f"heard of {in_words(worker.silent_for)} ago"
        if not worker.is_alive:
            state, css, heard = "silent", "failed", f"silent for {in_words(worker.silent_for)}"
        jobs, more = self._jobs(job for job in self.facts.running if job.worker_id == worker.id)
        return Worker(
            worker.name,
            self.links.worker(worker.id),
            state,
            css,
            [
                f"serves {worker.serves}"[:300],
                f"{worker.running:,} of {worker.slots:,} slots taken",
                f"up for {in_words(worker.up_for)}",
                heard,
            ],
            jobs,
            more,
        )

    def _elsewhere(self) -> Worker | None:
        """Those that run jobs and are not in the table of workers."""
        known = {worker.id for worker in self.facts.workers}
        held = [job for job in self.facts.running if job.worker_id not in known]
        jobs, more = self._jobs(held[: doctor.EACH])
        remark = "clients with statements of their own, and workers that are gone"
        return Worker("Others", "", "unknown", "cancelled", [remark], jobs, more) if held else None

    def _jobs(self, running: Iterable[store.Running]) -> tuple[list[RunningJob], str]:
        held = list(running)
        shown = [
            RunningJob(
                breakable(job.job_name),
                self.links.job(job.id),
                job.id,
                ", ".join(
                    [
                        f"in {job.queue_name}",
                        *([f"for {in_words(job.running_for)}"] if job.running_for is not None else []),
                        *([f"attempt {job.attempts} of {job.max_attempts}"] if job.attempts > 1 else []),
                    ]
                ),
            )
            for job in held
        ]
        total = sum({job.worker_id: job.of_worker for job in held}.values())
        return shown, f"and {total - len(held):,} more" if total > len(held) else ""

    def _notes(self) -> Iterable[str]:
        """What the page leaves out, in whole sentences."""
        facts = self.facts
        if any(queue.at_least for queue in facts.queues):
            yield "A plus sign says that there are more, which were not counted."
        if facts.period < doctor.WINDOW.total_seconds():
            yield (
                f"So much has finished lately that the figures of the queues look back {self.lately[5:]}, not"
                " an hour."
            )
        if len(facts.queues) > MOST_QUEUES:
            yield f"Of {len(facts.queues):,} queues, the first {MOST_QUEUES:,} are shown."
        if len(facts.workers) > MOST_WORKERS:
            yield f"Of {len(facts.workers):,} workers, the first {MOST_WORKERS:,} are shown."


# ── Charts ────────────────────────────────────────────────────────────────────────────────────────────────

STEP, HEIGHT = 10, 100  # the width of a bar with its gap, and the height of a chart, in its own units


class Bar(NamedTuple):
    x: str
    y: str
    height: str
    more: bool  # not counted to the end
    text: str


class Series(NamedTuple):
    """The bars of one kind, and the same in words."""

    name: str
    total: str
    peak: str
    text: str
    bars: list[Bar]


class Row(NamedTuple):
    time: str
    completed: str
    failed: str


class Chart:
    """What finished in each span of a stretch of time: a row of bars for each kind, and a table."""

    def __init__(self, title: str, unit: str, spans: Sequence[store.Span]) -> None:
        self.title = title
        self.id = title.lower().replace(" ", "-")
        self.view_box = f"0 0 {STEP * len(spans)} {HEIGHT}"
        self.width = str(STEP - 2)
        self.series = [_series(name, title, unit, spans) for name in ("completed", "failed")]
        begins = [span.start for span in spans]
        self.ends = [_clock(begins[0]), _clock(begins[len(begins) // 2]), "now"]
        self.unit = unit
        self.rows = [
            Row(_clock(span.start), span.shown("completed"), span.shown("failed"))
            for span in reversed(spans)
            if span.completed or span.failed
        ]


def _series(name: str, title: str, unit: str, spans: Sequence[store.Span]) -> Series:
    counts = [getattr(span, name) for span in spans]
    highest = max(counts)
    total = store.in_figures(sum(counts), more=any(name in span.at_least for span in spans))
    peak = text = ""
    if highest:
        top = spans[counts.index(highest)]
        peak = f"at most {top.shown(name)} in {unit}"
        text = f", {peak}, the one from {_clock(top.start)} on"
    bars = []
    for place, (span, count) in enumerate(zip(spans, counts, strict=True)):
        if count:
            height = max(round(HEIGHT * count / highest), 2)  # so that one is seen beside thousands
            told = f"{_clock(span.start)}: {span.shown(name)} {name}"
            bars.append(
                Bar(str(STEP * place + 1), str(HEIGHT - height), str(height), name in span.at_least, told)
            )
    return Series(name, total, peak, f"{title}: {total} {name}{text}.", bars)


def _clock(instant: datetime, form: str = "H:i") -> str:
    return dateformat.format(timezone.localtime(instant), form)


def _age(seconds: float | None) -> str:
    return "–" if seconds is None else in_words(seconds)


def _period(seconds: float) -> str:
    return "hour" if seconds >= timedelta(hours=1).total_seconds() else in_words(seconds)
