"""The admin: what waits, runs and failed, and three acts of people: retry, discard and cancel.

Everything is read only but these acts, which go through `store`, and the schedules in `schedules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import django
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.db.models.functions import Left
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import path, reverse
from django.utils import timezone
from django.utils.html import format_html
from django.views.decorators.http import require_POST

from ..conf import config
from ..lifecycle import Status
from ..models import (
    BackgroundJob,
    BackgroundQueue,
    BackgroundSchedule,
    BackgroundWorker,
    DeadLetter,
    Overview,
)
from ..operations import CANCEL, DISCARD, RETRY, Act, Person, perform
from .lists import MOST, WINDOW, JobList, Narrowing, QueueFilter, StatusFilter, job_id
from .overview import OverviewAdmin
from .page import JobPage, ago, badge, breakable
from .readonly import ReadOnlyAdmin
from .schedules import BackgroundScheduleAdmin

if TYPE_CHECKING:
    from django.utils.safestring import SafeString

    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

MOST_SUMMARY = 300  # characters of an error in a list


@admin.action(permissions=["retry"], description="Retry: queue again, due now")
def retry_jobs(model_admin: JobAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> None:
    model_admin.act_on_selection(RETRY, request, queryset)


@admin.action(permissions=["discard"], description="Discard: do not run again")
def discard_jobs(model_admin: JobAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> None:
    model_admin.act_on_selection(DISCARD, request, queryset)


@admin.action(permissions=["cancel"], description="Cancel: do not run, or stop running")
def cancel_jobs(model_admin: JobAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> None:
    model_admin.act_on_selection(CANCEL, request, queryset)


class JobAdmin(ReadOnlyAdmin):
    """What jobs and dead letters have in common."""

    change_list_template = "admin/django_pgjobs/jobs.html"
    change_form_template = "admin/django_pgjobs/job.html"
    fields = ()
    search_fields = ("id", "job_name")  # shows the box; get_search_results does the searching
    search_help_text = "An id, or the whole name of a job function."
    actions: Sequence[Any] = (retry_jobs, discard_jobs)
    acts: Sequence[Act] = (RETRY, DISCARD)
    only_status: Status | None = None

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        large = ("payload", "result", "errors", "metadata", "last_error")
        return super().get_queryset(request).defer(*large)

    def narrowing(self, request: HttpRequest) -> Narrowing:
        return Narrowing.of(request, self.only_status)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return JobList

    def get_sortable_by(self, request: HttpRequest) -> list[Any]:
        names = {"id": "id", "updated_at": "updated"}
        sortable = self.narrowing(request).sortable
        return [names[sortable]] if sortable else []

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        narrowing = self.narrowing(request)
        if narrowing.id is not None:
            queryset = queryset.filter(pk=narrowing.id)
        elif narrowing.search:
            queryset = queryset.filter(job_name=narrowing.search)
        if narrowing.needs_window:
            newest = BackgroundJob.objects.using(config().DATABASE).order_by("-id").values_list("id").first()
            queryset = queryset.filter(pk__gt=(newest[0] if newest else 0) - WINDOW)
        return queryset, False

    # Permissions

    def has_retry_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("django_pgjobs.retry_job")

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("django_pgjobs.discard_job")

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("django_pgjobs.cancel_job")

    def may(self, act: Act, request: HttpRequest) -> bool:
        return bool(getattr(self, f"has_{act.name}_permission")(request))

    # Acts

    def act_on_selection(self, act: Act, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Act on what is selected, at most on the first `MOST`, and say what became of it."""
        if request.POST.get("select_across", "0") == "0":
            # What somebody else has changed meanwhile may not be in this list any more.
            ids = sorted(filter(None, map(job_id, request.POST.getlist(ACTION_CHECKBOX_NAME))))
        else:
            ids = list(queryset.values_list("pk", flat=True)[:MOST])
        self.act_on(act, request, ids)

    def act_on(self, act: Act, request: HttpRequest, ids: Sequence[int]) -> None:
        """Act on jobs, and say what became of them."""
        only = None if self.only_status is None else {self.only_status}
        done = perform(act, ids, Person.of(request.user), statuses=only)
        refused = "" if only is None else f"no longer {self.only_status}"
        level = messages.SUCCESS if done.is_all else messages.WARNING
        self.message_user(request, done.told(act, refused), level)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        selected = request.POST.getlist(ACTION_CHECKBOX_NAME)
        if any(job_id(id) is None for id in selected):
            self.message_user(request, "The selection has something that is no id of a job.", messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())
        return super().changelist_view(request, extra_context)

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        return [
            path(
                f"<str:object_id>/{act.name}/",
                self.admin_site.admin_view(require_POST(partial(self.act_view, act=act))),
                name=f"{name}_{act.name}",
            )
            for act in self.acts
        ] + super().get_urls()

    def act_view(self, request: HttpRequest, object_id: str, *, act: Act) -> HttpResponse:
        """Act on one job, by a button on its page."""
        if not (self.may(act, request) and self.has_view_permission(request)):
            raise PermissionDenied
        id = job_id(object_id)
        if id is None:
            raise Http404
        self.act_on(act, request, [id])
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}"
        remains = self.get_object(request, object_id) is not None
        if remains:
            return HttpResponseRedirect(
                reverse(f"{name}_change", args=[id], current_app=self.admin_site.name)
            )
        return HttpResponseRedirect(reverse(f"{name}_changelist", current_app=self.admin_site.name))

    # The page of a job

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> HttpResponse:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        status = Status(obj.status)
        context |= {
            "subtitle": None,
            "title": f"{str(self.opts.verbose_name).capitalize()} {obj.pk}",
            "page": JobPage(obj),
            "tools_in_content": django.VERSION < (6, 1),  # later ones show them outside of it
            "acts": [
                {
                    "label": act.name.capitalize(),
                    "url": reverse(
                        f"admin:{name}_{act.name}", args=[obj.pk], current_app=self.admin_site.name
                    ),
                    "css": f"pgjobs-{act.name}",
                }
                for act in self.acts
                if status in act.statuses and self.may(act, request)
            ],
        }
        return super().render_change_form(request, context, add, change, form_url, obj)

    # Columns

    @admin.display(description="job", ordering="job_name")
    def name(self, job: BackgroundJob) -> SafeString:
        return breakable(job.job_name)

    @admin.display(description="queue")
    def queue(self, job: BackgroundJob) -> str:
        return job.queue_name

    @admin.display(description="status")
    def status_badge(self, job: BackgroundJob) -> SafeString:
        return badge(job.status)

    @admin.display(description="attempts")
    def attempts_made(self, job: BackgroundJob) -> str:
        return f"{job.attempts} of {job.max_attempts}"

    @admin.display(description="run at")
    def due(self, job: BackgroundJob) -> SafeString:
        return ago(job.run_at)

    @admin.display(description="updated", ordering="updated_at")
    def updated(self, job: BackgroundJob) -> SafeString:
        return ago(job.updated_at)


@admin.register(BackgroundJob)
class BackgroundJobAdmin(JobAdmin):
    list_display = ("id", "name", "queue", "status_badge", "attempts_made", "due", "updated")
    list_display_links = ("id", "name")
    list_filter = (StatusFilter, QueueFilter)
    actions = (retry_jobs, discard_jobs, cancel_jobs)
    acts = (RETRY, DISCARD, CANCEL)


@admin.register(DeadLetter)
class DeadLetterAdmin(JobAdmin):
    only_status = Status.FAILED
    list_display = ("id", "name", "error", "queue", "updated")
    list_display_links = ("id", "name")
    list_filter = (QueueFilter,)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        failed: QuerySet[Any] = (
            super().get_queryset(request).annotate(summary=Left("last_error", MOST_SUMMARY))
        )
        return failed

    @admin.display(description="last error")
    def error(self, job: Any) -> SafeString:
        lines = (job.summary or "").strip().splitlines() or ["no text"]
        return format_html('<span class="pgjobs-error">{}</span>', lines[0])

    @admin.display(description="failed", ordering="updated_at")
    def updated(self, job: BackgroundJob) -> SafeString:
        return ago(job.updated_at)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Lead on to the job where it is no dead letter any more."""
        jobs_admin = self._jobs_admin(request)
        if (
            jobs_admin is not None
            and job_id(object_id) is not None
            and self.get_object(request, object_id) is None
            and (job := jobs_admin.get_object(request, object_id)) is not None
        ):
            self.message_user(request, f"This job is no longer failed; it is {job.status}.", messages.INFO)
            url = reverse(
                "admin:django_pgjobs_backgroundjob_change", args=[job.pk], current_app=self.admin_site.name
            )
            return HttpResponseRedirect(url)
        return super().change_view(request, object_id, form_url, extra_context)

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """The history of the job, under which all acts are logged."""
        if jobs_admin := self._jobs_admin(request):
            return jobs_admin.history_view(request, object_id, extra_context)
        return super().history_view(request, object_id, extra_context)

    def _jobs_admin(self, request: HttpRequest) -> ModelAdmin | None:
        """The page of all jobs, where this site has one and this user may see it."""
        if not self.admin_site.is_registered(BackgroundJob):
            return None
        jobs_admin = self.admin_site.get_model_admin(BackgroundJob)
        return jobs_admin if jobs_admin.has_view_permission(request) else None


admin.site.register(BackgroundSchedule, BackgroundScheduleAdmin)
admin.site.register(Overview, OverviewAdmin)


@admin.register(BackgroundQueue)
class BackgroundQueueAdmin(ReadOnlyAdmin):
    list_display = ("name", "status", "paused_by", "why")
    ordering = ("name",)
    sortable_by = ()
    fields = ("name", "status", "paused_by", "reason")
    readonly_fields = ("status",)

    @admin.display(description="status")
    def status(self, queue: BackgroundQueue) -> SafeString | str:
        return format_html("paused {}", ago(queue.paused_at)) if queue.paused_at else "not paused"

    @admin.display(description="reason")
    def why(self, queue: BackgroundQueue) -> str:
        return queue.reason[:MOST_SUMMARY]


@admin.register(BackgroundWorker)
class BackgroundWorkerAdmin(ReadOnlyAdmin):
    list_display = ("worker", "health", "serves", "busy", "seen", "since", "version")
    ordering = ("hostname", "pid")
    sortable_by = ()
    fields = (
        "worker", "health", "serves", "busy", "processes", "threads", "async_slots", "lease", "seen", "since",
        "version", "id",
    )  # fmt: skip
    readonly_fields = ("worker", "health", "serves", "busy", "seen", "since")

    @admin.display(description="worker")
    def worker(self, worker: BackgroundWorker) -> str:
        return str(worker)

    @admin.display(description="status")
    def health(self, worker: BackgroundWorker) -> SafeString:
        if timezone.now() - worker.last_seen_at > worker.lease:
            return format_html('<span class="pgjobs-status pgjobs-{}">{}</span>', "failed", "silent")
        css = "processing" if worker.state == "running" else "cancelled"
        return format_html('<span class="pgjobs-status pgjobs-{}">{}</span>', css, worker.state)

    @admin.display(description="queues")
    def serves(self, worker: BackgroundWorker) -> str:
        if not isinstance(worker.queues, list):
            return "all"
        return ", ".join(map(str, worker.queues))[:MOST_SUMMARY]

    @admin.display(description="running jobs")
    def busy(self, worker: BackgroundWorker) -> str:
        return f"{worker.running} in {worker.processes * (worker.threads + worker.async_slots)} slots"

    @admin.display(description="last seen")
    def seen(self, worker: BackgroundWorker) -> SafeString:
        return ago(worker.last_seen_at)

    @admin.display(description="started")
    def since(self, worker: BackgroundWorker) -> SafeString:
        return ago(worker.started_at)
