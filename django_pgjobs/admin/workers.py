"""Workers: how each is, what it runs, in which processes; and to ask one to stop."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import django
from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.defaultfilters import filesizeformat
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils import timezone
from django.utils.html import format_html

from .. import operations, store
from ..conf import config
from ..doctor import in_words as duration_in_words
from ..models import BackgroundJob, BackgroundWorker
from ..operations import REASON_LIMIT, Person
from .lists import MOST_SUMMARY
from .page import ago, moment
from .readonly import ReadOnlyAdmin

if TYPE_CHECKING:
    from django.utils.safestring import SafeString

MOST_JOBS = 100  # that are shown of one worker
MOST_EXECUTORS = 200
REFRESH = 5  # seconds between two looks of the script
PATIENCE = timedelta(seconds=5)  # for a worker to heed what it was asked, beyond a quarter of its lease


class StopForm(forms.Form):
    """What is asked before a worker is asked to stop."""

    reason = forms.CharField(
        required=False,
        max_length=REASON_LIMIT // 4,
        widget=forms.TextInput({"size": 60}),
        help_text="Goes into the history of the worker, and into the log.",
    )


def health(worker: BackgroundWorker) -> tuple[str, str]:
    """The state of a worker in a word, and how that looks."""
    if timezone.now() - worker.last_seen_at > worker.lease:
        return "silent", "failed"
    return worker.state, "processing" if worker.state == "running" else "cancelled"


def badge(worker: BackgroundWorker) -> SafeString:
    state, css = health(worker)
    return format_html('<span class="pgjobs-status pgjobs-{}">{}</span>', css, state)


@dataclass(frozen=True, slots=True)
class Executor:
    """One of the processes of a worker, when it was last seen."""

    pid: str
    state: str
    jobs: str
    memory: str

    @classmethod
    def read(cls, stored: Any) -> Executor:
        """An executor out of a row, where anybody may have written anything."""
        known = stored if isinstance(stored, dict) else {}
        pid, jobs, memory = (_count(known.get(name)) for name in ("pid", "jobs", "memory"))
        state = known.get("state")
        return cls(
            str(pid) if pid else "–",
            state[:MOST_SUMMARY] if isinstance(state, str) else "unknown",
            f"{jobs:,}",
            filesizeformat(memory) if memory else "unknown",
        )


def _count(stored: Any) -> int:
    return stored if isinstance(stored, int) and 0 < stored < 2**60 else 0


class WorkerPage:
    """What the page of a worker shows. Anyone may have written the row, so anything may be in there."""

    def __init__(self, worker: BackgroundWorker) -> None:
        self.worker = worker
        self.badge = badge(worker)
        self.state, _ = health(worker)
        known = worker.executors if isinstance(worker.executors, list) else []
        self.executors = [Executor.read(each) for each in known[:MOST_EXECUTORS]]
        with store.own_transaction(config().DATABASE) as cursor:
            running = store.running(cursor, each=MOST_JOBS)
        self.jobs = [job for job in running if job.worker_id == worker.pk]

    @property
    def number_of_jobs(self) -> int:
        return self.jobs[0].of_worker if self.jobs else 0

    @cached_property
    def story(self) -> list[SafeString | str]:
        """What is going on, in words."""
        worker = self.worker
        story: list[SafeString | str] = [
            format_html("Started {}, last heard of {}.", ago(worker.started_at), ago(worker.last_seen_at))
        ]
        if self.state == "stopping":
            story.append("It claims no more jobs, and ends with those that it runs.")
        if worker.stop_requested_at is not None:
            by = worker.stop_requested_by or "Somebody"
            story.append(format_html("{} asked it to stop {}.", by, ago(worker.stop_requested_at)))
        return story

    @cached_property
    def warning(self) -> str:
        """What is wrong with it, if there is something to be seen."""
        worker = self.worker
        if self.state == "silent":
            return (
                "It has been silent for longer than its lease, so its jobs are queued again. It was killed,"
                " hangs, or has no way to the database. Its row goes after a day."
            )
        asked = worker.stop_requested_at
        if asked and self.state == "running" and timezone.now() - asked > worker.lease / 4 + PATIENCE:
            return (
                "It has not heeded what it was asked. A worker of an older version does not: send its process"
                " TERM."
            )
        return ""

    @cached_property
    def facts(self) -> list[tuple[str, Any]]:
        worker = self.worker
        slots = worker.processes * (worker.threads + worker.async_slots)
        return [
            ("Host", worker.hostname),
            ("Process", str(worker.pid)),
            ("Serves", serves(worker)),
            ("Executors", str(worker.processes)),
            ("Slots of each", f"{worker.threads} threads, {worker.async_slots} async: {slots} in all"),
            ("Lease", duration_in_words(worker.lease.total_seconds())),
            ("Version", worker.version),
            ("Started", moment(worker.started_at)),
            ("Last heard of", moment(worker.last_seen_at)),
        ]  # fmt: skip


def serves(worker: BackgroundWorker) -> str:
    if not isinstance(worker.queues, list):
        return "all queues"
    return ", ".join(map(str, worker.queues))[:MOST_SUMMARY]


@admin.register(BackgroundWorker)
class BackgroundWorkerAdmin(ReadOnlyAdmin):
    change_form_template = "admin/django_pgjobs/worker.html"
    list_display = ("worker", "health", "serves", "busy", "seen", "since", "version")
    ordering = ("hostname", "pid")
    sortable_by = ()
    fields = ()

    class Media:
        js = ["django_pgjobs/refresh.js"]

    def has_stop_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("django_pgjobs.stop_worker")

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_stop"
        stop = path("<str:object_id>/stop/", self.admin_site.admin_view(self.stop_view), name=name)
        return [stop, *super().get_urls()]

    def url(self, name: str, *args: Any) -> str:
        """The address of one of its pages."""
        full = f"admin:{self.opts.app_label}_{self.opts.model_name}_{name}"
        return reverse(full, args=args, current_app=self.admin_site.name)

    def stop_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Say what it means to stop a worker, ask why, and ask the worker."""
        if not (self.has_stop_permission(request) and self.has_view_permission(request)):
            raise PermissionDenied
        worker = self.get_object(request, object_id)
        if worker is None and request.method == "POST":
            self.message_user(request, "This worker has ended.", messages.WARNING)
            return HttpResponseRedirect(self.url("changelist"))
        if worker is None:
            raise Http404
        form = StopForm(request.POST if request.method == "POST" else None)
        if form.is_valid():
            if operations.stop_worker(worker, Person.of(request.user), form.cleaned_data["reason"]):
                self.message_user(request, f"The worker {worker} is asked to stop.", messages.SUCCESS)
            else:
                self.message_user(request, operations.why_not_stopped(worker), messages.WARNING)
            return HttpResponseRedirect(self.url("change", worker.pk))
        return self._patiently(request, partial(self._stop_page, request, worker, form))

    def _stop_page(self, request: HttpRequest, worker: BackgroundWorker, form: StopForm) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            "title": f"Stop the worker {worker}",
            "opts": self.opts,
            "list_url": self.url("changelist"),
            "list_name": str(self.opts.verbose_name_plural).capitalize(),
            "worker_url": self.url("change", worker.pk),
            "page": WorkerPage(worker),
            "form": form,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/django_pgjobs/stop_worker.html", context)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        return None if "\x00" in object_id else super().get_object(request, object_id, from_field)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Lead to the list where the worker has ended."""
        if self.has_view_permission(request) and self.get_object(request, object_id) is None:
            self.message_user(request, "This worker has ended.", messages.WARNING)
            return HttpResponseRedirect(self.url("changelist"))
        return super().change_view(request, object_id, form_url, extra_context)

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> HttpResponse:
        page = WorkerPage(obj)
        may_see = request.user.has_perm("django_pgjobs.view_backgroundjob")
        job_url = ""
        if may_see and self.admin_site.is_registered(BackgroundJob):
            job_url = "admin:django_pgjobs_backgroundjob_change"
        may_stop = self.has_stop_permission(request) and page.state == "running" and not obj.stop_requested_at
        context |= {
            "subtitle": None,
            "title": f"Worker {obj}",
            "page": page,
            "jobs": [
                {
                    "name": f"{job.job_name} #{job.id}",
                    "url": job_url and reverse(job_url, args=[job.id], current_app=self.admin_site.name),
                    "queue": job.queue_name,
                    "attempt": f"{job.attempts} of {job.max_attempts}",
                    "age": "" if job.running_for is None else duration_in_words(max(job.running_for, 0.0)),
                }
                for job in page.jobs
            ],
            "refresh": "" if page.state == "silent" else REFRESH,
            "stop_url": self.url("stop", obj.pk) if may_stop else "",
            "tools_in_content": django.VERSION < (6, 1),  # later ones show them outside of it
        }
        return super().render_change_form(request, context, add, change, form_url, obj)

    # Columns

    @admin.display(description="worker")
    def worker(self, worker: BackgroundWorker) -> str:
        return str(worker)

    @admin.display(description="status")
    def health(self, worker: BackgroundWorker) -> SafeString:
        return badge(worker)

    @admin.display(description="queues")
    def serves(self, worker: BackgroundWorker) -> str:
        return serves(worker)

    @admin.display(description="running jobs")
    def busy(self, worker: BackgroundWorker) -> str:
        return f"{worker.running} in {worker.processes * (worker.threads + worker.async_slots)} slots"

    @admin.display(description="last seen")
    def seen(self, worker: BackgroundWorker) -> SafeString:
        return ago(worker.last_seen_at)

    @admin.display(description="started")
    def since(self, worker: BackgroundWorker) -> SafeString:
        return ago(worker.started_at)
