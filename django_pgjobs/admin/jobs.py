"""Jobs: what waits, runs and has ended, and what people do to one of them or to several.

Everything is read only but these acts. Those on one job, and retries of what is selected, are done at once.
What needs a reason, or is about all that match, has a page of its own, which says first how many that are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import django
from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.core.handlers.asgi import ASGIRequest
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.views.decorators.http import require_POST

from .. import operations, store
from ..conf import config
from ..exceptions import InvalidArguments
from ..export import FORMS, from_async, in_chunks, jobs_of
from ..jobs import find
from ..lifecycle import Status
from ..models import BackgroundJob, BackgroundSchedule, DeadLetter
from ..operations import (
    CANCEL,
    DISCARD,
    REASON_LIMIT,
    RETRY,
    RUN,
    STOP,
    Act,
    Filter,
    Manner,
    Person,
    note_export,
    perform,
)
from ..redaction import Redacted
from .arguments import (
    EditForm,
    Line,
    Uneditable,
    arguments_of,
    as_texts,
    difference,
)
from .lists import MOST, WINDOW, JobList, Narrowing, QueueFilter, StatusFilter, find_groups, job_id
from .operations import carry_out, is_large
from .page import JobPage, ago, badge, breakable
from .readonly import ReadOnlyAdmin

if TYPE_CHECKING:
    from django.utils.safestring import SafeString

SHOWN_GROUPS = 5  # of what an act is about

_LABELS = {"run": "Run now"}
_QUESTIONS = {"retry": "Retry later or elsewhere …", "discard": "Discard …"}

_DELAYS = {
    "0": "now",
    "300": "in 5 minutes",
    "1800": "in 30 minutes",
    "3600": "in an hour",
    "21600": "in 6 hours",
    "86400": "in a day",
}


@admin.action(permissions=["retry"], description="Retry: queue again, due now")
def retry_jobs(model_admin: JobAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
    if _is_across(request):
        return model_admin.ask(RETRY, request)
    model_admin.act_on(RETRY, request, _selected(request))
    return None


@admin.action(permissions=["retry"], description="Retry later, slowly or elsewhere …")
def retry_jobs_otherwise(model_admin: JobAdmin, request: HttpRequest, queryset: Any) -> HttpResponse:
    return model_admin.ask(RETRY, request)


@admin.action(permissions=["discard"], description="Discard: do not run again …")
def discard_jobs(model_admin: JobAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
    return model_admin.ask(DISCARD, request)


@admin.action(permissions=["run"], description="Run now what is due later")
def run_jobs(model_admin: JobAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> None:
    model_admin.act_on(RUN, request, _chosen(request, queryset))


@admin.action(permissions=["cancel"], description="Cancel: do not run what is queued")
def cancel_jobs(model_admin: JobAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> None:
    model_admin.act_on(CANCEL, request, _chosen(request, queryset))


@admin.action(permissions=["stop"], description="Stop what is running")
def stop_jobs(model_admin: JobAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> None:
    model_admin.act_on(STOP, request, _chosen(request, queryset))


@admin.action(permissions=["export"], description="Export as CSV")
def export_csv(model_admin: JobAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponseBase:
    return model_admin.export("csv", request, queryset)


@admin.action(permissions=["export"], description="Export as JSON lines")
def export_json_lines(
    model_admin: JobAdmin, request: HttpRequest, queryset: QuerySet[Any]
) -> HttpResponseBase:
    return model_admin.export("jsonl", request, queryset)


def _is_across(request: HttpRequest) -> bool:
    """Whether an action is about all that match, on whatever page of the list they are."""
    return request.POST.get("select_across", "0") != "0"


def _selected(request: HttpRequest) -> list[int]:
    """The ids that are selected: also those that somebody has changed meanwhile, so that it can be told."""
    return sorted(filter(None, map(job_id, request.POST.getlist(ACTION_CHECKBOX_NAME))))


def _chosen(request: HttpRequest, queryset: QuerySet[Any]) -> list[int]:
    """The ids that are selected, or the first of all that match."""
    if _is_across(request):
        return list(queryset.values_list("pk", flat=True)[:MOST])
    return _selected(request)


def ids_of(request: HttpRequest) -> tuple[int, ...]:
    """The ids of jobs in an address."""
    return tuple(filter(None, map(job_id, request.GET["ids"].split(",")[:MOST])))


class ReasonForm(forms.Form):
    """What may be said about an act that is done at once."""

    reason = forms.CharField(
        required=False,
        max_length=REASON_LIMIT // 4,
        widget=forms.TextInput({"size": 40, "placeholder": "may be empty", "id": "pgjobs-reason"}),
    )


class ActForm(forms.Form):
    """What is asked before an act on many jobs."""

    reason = forms.CharField(max_length=REASON_LIMIT // 4, widget=forms.TextInput({"size": 60}))
    until = forms.DateTimeField(widget=forms.HiddenInput)  # when they were counted

    def __init__(self, act: Act, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["reason"].required = act is DISCARD
        self.fields["reason"].help_text = "Goes into the history of each job."

    @property
    def manner(self) -> Manner:
        return Manner()


class RetryForm(ActForm):
    delay = forms.ChoiceField(choices=_DELAYS.items(), initial="0", label="They run")
    per_minute = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=1_000_000,
        label="At most so many a minute",
        help_text="So that what has just recovered is not flattened. Empty: all at once.",
    )
    queue = forms.CharField(
        required=False, max_length=255, label="In the queue", help_text="Empty: in the one that they are in."
    )
    field_order = ("delay", "per_minute", "queue", "reason")

    @property
    def manner(self) -> Manner:
        given = self.cleaned_data
        return Manner.of_json(
            {
                "delay": int(given["delay"]),
                "per_minute": given["per_minute"],
                "queue": given["queue"] or None,
            }
        )


class JobAdmin(ReadOnlyAdmin):
    """What jobs and dead letters have in common."""

    change_list_template = "admin/django_pgjobs/jobs.html"
    change_form_template = "admin/django_pgjobs/job.html"
    fields = ()
    search_fields = ("id", "job_name")  # shows the box; get_search_results does the searching
    search_help_text = "An id, or the whole name of a job function."
    actions: Sequence[Any] = (
        retry_jobs, retry_jobs_otherwise, discard_jobs, export_csv, export_json_lines
    )  # fmt: skip
    acts: Sequence[Act] = (RETRY,)  # that are done at once, by a button on the page of a job
    acts_on_all: Sequence[Act] = (RETRY, DISCARD)  # that have a page of their own
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

    def may(self, act: Act, request: HttpRequest) -> bool:
        return request.user.has_perm(f"django_pgjobs.{act.permission}")

    def has_retry_permission(self, request: HttpRequest) -> bool:
        return self.may(RETRY, request)

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return self.may(DISCARD, request)

    def has_run_permission(self, request: HttpRequest) -> bool:
        return self.may(RUN, request)

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return self.may(CANCEL, request)

    def has_stop_permission(self, request: HttpRequest) -> bool:
        return self.may(STOP, request)

    def has_duplicate_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("django_pgjobs.duplicate_job")

    def has_export_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("django_pgjobs.export_job")

    # Acts

    def act_on(self, act: Act, request: HttpRequest, ids: Sequence[int], reason: str = "") -> None:
        """Act on jobs, and say what became of them."""
        only = None if self.only_status is None else {self.only_status}
        done = perform(act, ids, Person.of(request.user), reason=reason, statuses=only)
        self.tell(request, act, done)

    def tell(self, request: HttpRequest, act: Act, done: operations.Done) -> None:
        refused = "" if self.only_status is None else f"no longer {self.only_status}"
        level = messages.SUCCESS if done.is_all else messages.WARNING
        self.message_user(request, done.told(act, refused), level)

    def export(self, form: str, request: HttpRequest, jobs: QuerySet[Any]) -> HttpResponseBase:
        """Hand out jobs as a file, and write down who has taken which."""
        write, content_type = FORMS[form]
        if _is_across(request):
            what = f"all {self.opts.verbose_name_plural}"
            if query := request.GET.urlencode():
                what += f" that match {query}"
        else:
            ids = _selected(request)
            what = f"{len(ids)} of them: {', '.join(map(str, ids))}"
        note_export(Person.of(request.user), f"as {form}: {what}")
        chunks = in_chunks(write(jobs_of(jobs)))
        content = from_async(chunks) if isinstance(request, ASGIRequest) else chunks
        response = StreamingHttpResponse(content, content_type=content_type)
        response["Content-Disposition"] = f'attachment; filename="jobs.{form}"'
        response["X-Accel-Buffering"] = "no"
        return response

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        selected = request.POST.getlist(ACTION_CHECKBOX_NAME)
        if any(job_id(id) is None for id in selected):
            self.message_user(request, "The selection has something that is no id of a job.", messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())
        return super().changelist_view(request, extra_context)

    def url(self, name: str, *args: Any) -> str:
        """The address of one of its pages."""
        full = f"admin:{self.opts.app_label}_{self.opts.model_name}_{name}"
        return reverse(full, args=args, current_app=self.admin_site.name)

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        on_all = [
            path(
                f"act/{act.name}/",
                self.admin_site.admin_view(partial(self.act_on_all_view, act=act)),
                name=f"{name}_act_{act.name}",
            )
            for act in self.acts_on_all
        ]
        edit = path("<str:object_id>/edit/", self.admin_site.admin_view(self.edit_view), name=f"{name}_edit")
        on_one = [
            path(
                f"<str:object_id>/{act.name}/",
                self.admin_site.admin_view(require_POST(partial(self.act_view, act=act))),
                name=f"{name}_{act.name}",
            )
            for act in self.acts
        ]
        duplicate = path(
            "<str:object_id>/duplicate/",
            self.admin_site.admin_view(require_POST(self.duplicate_view)),
            name=f"{name}_duplicate",
        )
        return [*on_all, edit, *on_one, duplicate, *super().get_urls()]

    def act_view(self, request: HttpRequest, object_id: str, *, act: Act) -> HttpResponse:
        """Act on one job, by a button on its page."""
        if not (self.may(act, request) and self.has_view_permission(request)):
            raise PermissionDenied
        id = job_id(object_id)
        if id is None:
            raise Http404
        if (reason := self._reason(request)) is not None:
            self.act_on(act, request, [id], reason)
        return self._back_to(request, id)

    def duplicate_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Enqueue a copy of one job, by a button on its page."""
        if not (self.has_duplicate_permission(request) and self.has_view_permission(request)):
            raise PermissionDenied
        id = job_id(object_id)
        if id is None:
            raise Http404
        reason = self._reason(request)
        if reason is None:
            return self._back_to(request, id)
        nothing = f"Job {id} was not duplicated, because"
        if self.get_object(request, str(id)) is None:
            kind = f"is no longer a {self.opts.verbose_name}" if self.only_status else "no longer exists"
            self.message_user(request, f"{nothing} it {kind}.", messages.WARNING)
            return self._back_to(request, id)
        try:
            copy = operations.duplicate(id, Person.of(request.user), reason=reason)
        except operations.Gone:
            self.message_user(request, f"{nothing} it no longer exists.", messages.WARNING)
            return self._back_to(request, id)
        if copy is None:
            told = f"{nothing} a job with its unique key waits or runs."
            self.message_user(request, told, messages.WARNING)
            return self._back_to(request, id)
        self.message_user(request, f"Job {copy}, a copy of job {id}, is queued.", messages.SUCCESS)
        url = self._job_url(request, copy)
        return HttpResponseRedirect(url) if url else self._back_to(request, id)

    def _reason(self, request: HttpRequest) -> str | None:
        """The reason that came with a button; None, and it is said why, where it cannot be one."""
        form = ReasonForm(request.POST)
        if form.is_valid():
            return str(form.cleaned_data["reason"])
        self.message_user(request, f"Nothing was done. {form.errors['reason'][0]}", messages.ERROR)
        return None

    def _job_url(self, request: HttpRequest, id: int) -> str:
        """The page of a job; empty where this site has none, or this person may not see it."""
        may_see = request.user.has_perm("django_pgjobs.view_backgroundjob")
        if not (may_see and self.admin_site.is_registered(BackgroundJob)):
            return ""
        url = "admin:django_pgjobs_backgroundjob_change"
        return reverse(url, args=[id], current_app=self.admin_site.name)

    def _back_to(self, request: HttpRequest, id: int) -> HttpResponse:
        """Lead back to a job or, where it is not in this list any more, to the list."""
        if self.get_object(request, str(id)) is not None:
            return HttpResponseRedirect(self.url("change", id))
        return HttpResponseRedirect(self.url("changelist"))

    # Acts on all that match

    def filter_of(self, request: HttpRequest) -> Filter:
        """What an act on all that match is about: what is selected, or what the list is narrowed down to.

        Raises ValueError for what cannot be looked for.
        """
        narrowing = self.narrowing(request)
        status = Status.CANCELLED if narrowing.status is Status.CANCELLED else Status.FAILED
        if "ids" in request.GET:
            return Filter(status=status, ids=ids_of(request) or (0,))
        return Filter(
            status=status,
            queue=narrowing.queue or None,
            ids=() if narrowing.id is None else (narrowing.id,),
            job=narrowing.search if narrowing.search and narrowing.id is None else None,
        )

    def ask(self, act: Act, request: HttpRequest) -> HttpResponse:
        """Lead on to the page of an act on what is selected, or on all that match."""
        given = {name: request.GET.getlist(name) for name in request.GET if name not in ("p", "o", "e")}
        if not _is_across(request):
            given["ids"] = [",".join(map(str, _selected(request)))]
        query = urlencode(given, doseq=True)
        return HttpResponseRedirect(f"{self.url(f'act_{act.name}')}?{query}")

    def act_on_all_view(self, request: HttpRequest, *, act: Act) -> HttpResponse:
        """Say what an act is about, ask how and why, and do it."""
        if not (self.may(act, request) and self.has_view_permission(request)):
            raise PermissionDenied
        try:
            filter = self.filter_of(request)
        except ValueError as error:
            self.message_user(request, str(error), messages.ERROR)
            return HttpResponseRedirect(self.url("changelist"))
        form_class = RetryForm if act is RETRY else ActForm
        if request.method == "POST":
            form = form_class(act, request.POST)
            if form.is_valid():
                return self._act_on_all(request, act, filter, form)
        else:
            form = form_class(act, initial={"until": store.now(config().DATABASE).isoformat()})
        return self._patiently(request, partial(self._act_page, request, act, filter, form))

    def _act_page(self, request: HttpRequest, act: Act, filter: Filter, form: ActForm) -> HttpResponse:
        found = operations.preview(filter)
        groups = find_groups(filter, among=operations.MOST_COUNTED, most=SHOWN_GROUPS)
        context = {
            **self.admin_site.each_context(request),
            "title": f"{act.name.capitalize()} {found}",
            "opts": self.opts,
            "list_url": self.url("changelist"),
            "list_name": str(self.opts.verbose_name_plural).capitalize(),
            "act": act.name.capitalize(),
            "found": found,
            "most_counted": f"{operations.MOST_COUNTED:,}",
            "words": str(filter),
            "groups": groups,
            "more_groups": groups[0].groups - len(groups) if groups else 0,
            "in_background": is_large(found.expected),
            "form": form,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/django_pgjobs/act.html", context)

    def _act_on_all(self, request: HttpRequest, act: Act, filter: Filter, form: ActForm) -> HttpResponse:
        person, reason, manner = Person.of(request.user), form.cleaned_data["reason"], form.manner
        until = form.cleaned_data["until"]
        if filter.ids:
            done = perform(
                act,
                filter.ids,
                person,
                reason=reason,
                manner=manner,
                statuses={filter.status},
                until=until,
            )
            self.tell(request, act, done)
            return HttpResponseRedirect(self.url("changelist"))
        operation = operations.begin(act, filter, person, reason=reason, manner=manner, at=until)
        return carry_out(self, request, operation, back=self.url("changelist"))

    # Retrying with other arguments

    def has_edit_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("django_pgjobs.edit_job")

    def edit_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Edit the arguments of a job, look at the difference, and queue it again."""
        if not (self.has_edit_permission(request) and self.has_view_permission(request)):
            raise PermissionDenied
        id = job_id(object_id)
        job = None if id is None else self.get_object(request, object_id)
        if job is None:
            raise Http404
        statuses = RETRY.statuses if self.only_status is None else {self.only_status}
        try:
            if Status(job.status) not in statuses:
                raise Uneditable(f"This job is {job.status}: it cannot be retried.")
            before = arguments_of(job)
        except Uneditable as error:
            self.message_user(request, str(error), messages.WARNING)
            return HttpResponseRedirect(self.url("change", job.pk))
        if request.method == "POST":
            form = EditForm(before, request.POST)
            if form.is_valid() and (response := self._edited(request, job, before, form)):
                return response
        else:
            form = EditForm(before, initial=as_texts(before) | {"seen_at": job.updated_at.isoformat()})
        return self._edit_page(request, job, form)

    def _edited(
        self, request: HttpRequest, job: BackgroundJob, before: Redacted, form: EditForm
    ) -> HttpResponse | None:
        """Show what differs, and when that has been seen, do it. None where the form has an error."""
        args, kwargs = form.cleaned_data["args"], form.cleaned_data["kwargs"]
        try:
            payload = operations.check_arguments(job.job_name, args, kwargs)
            lines = difference(before, Redacted(job.job_name, payload))
            if "confirmed" not in request.POST:
                if lines:
                    return self._edit_page(request, job, form, lines)
                form.add_error(None, "The arguments are what they were. To retry the job so, go back.")
                return None
            done = operations.retry_edited(
                job.pk,
                args,
                kwargs,
                Person.of(request.user),
                reason=form.cleaned_data["reason"],
                statuses=RETRY.statuses if self.only_status is None else {self.only_status},
                seen_at=form.cleaned_data["seen_at"],
            )
        except (InvalidArguments, operations.UnknownName) as error:
            form.add_error(None, str(error))
            return None
        except operations.Stale:
            form.add_error(None, "Somebody has changed this job meanwhile. Go back, and look at it again.")
            return None
        self.tell(request, RETRY, done)
        return self._back_to(request, job.pk)

    def _edit_page(
        self, request: HttpRequest, job: BackgroundJob, form: EditForm, lines: Sequence[Line] = ()
    ) -> HttpResponse:
        function = find(job.job_name)
        context = {
            **self.admin_site.each_context(request),
            "title": f"Edit and retry job {job.pk}",
            "opts": self.opts,
            "list_url": self.url("changelist"),
            "list_name": str(self.opts.verbose_name_plural).capitalize(),
            "job_url": self.url("change", job.pk),
            "job": job,
            "parameters": [] if function is None else function.signature.parameters.values(),
            "form": form,
            "lines": lines,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/django_pgjobs/edit.html", context)

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
        status = Status(obj.status)
        page = JobPage(obj)
        names = [
            act.name
            for act in self.acts
            if status in act.statuses and (act is not RUN or page.is_due_later) and self.may(act, request)
        ]
        if self.has_duplicate_permission(request):
            names.append("duplicate")
        context |= {
            "subtitle": None,
            "title": f"{str(self.opts.verbose_name).capitalize()} {obj.pk}",
            "page": page,
            "related": self._related(request, page),
            "tools_in_content": django.VERSION < (6, 1),  # later ones show them outside of it
            "form": ReasonForm(),
            "acts": [
                {
                    "label": _LABELS.get(name, name.capitalize()),
                    "url": self.url(name, obj.pk),
                    "css": f"pgjobs-{name}",
                }
                for name in names
            ],
            "questions": [
                {
                    "label": _QUESTIONS[act.name],
                    "url": f"{self.url(f'act_{act.name}')}?{urlencode({'ids': obj.pk, 'status': status})}",
                }
                for act in self.acts_on_all
                if status in act.statuses and self.may(act, request)
            ],
        }
        if status in RETRY.statuses and self.has_edit_permission(request):
            edit = {"label": "Edit and retry …", "url": self.url("edit", obj.pk)}
            context["questions"].insert(0, edit)
        return super().render_change_form(request, context, add, change, form_url, obj)

    def _related(self, request: HttpRequest, page: JobPage) -> list[tuple[str, list[dict[str, Any]]]]:
        """What else there is to look at: headings, each with links, as far as this person may see them."""
        found: list[tuple[str, list[dict[str, Any]]]] = []
        if self._job_url(request, page.job.pk):
            for heading, jobs in page.related:
                links = [
                    {"url": self._job_url(request, job.id), "text": f"Job {job.id}", "job": job}
                    for job in jobs
                ]
                found.append((heading, links))
        schedule = page.schedule
        may_see = request.user.has_perm("django_pgjobs.view_backgroundschedule")
        if schedule and may_see and self.admin_site.is_registered(BackgroundSchedule):
            url = "admin:django_pgjobs_backgroundschedule_change"
            link = reverse(url, args=[quote(schedule)], current_app=self.admin_site.name)
            found.append(("The schedule", [{"url": link, "text": schedule}]))
        if url := self._alike_url(request, page.job):
            found.append(("Its error", [{"url": url, "text": "All dead letters that failed alike"}]))
        return found

    def _alike_url(self, request: HttpRequest, job: BackgroundJob) -> str:
        """Where those are that failed like this job; empty if it has not failed, or nobody may see."""
        has_failed = job.status == Status.FAILED or job.error_fingerprint
        if not has_failed or not self.admin_site.is_registered(DeadLetter):
            return ""
        letters = self.admin_site.get_model_admin(DeadLetter)
        if not (isinstance(letters, JobAdmin) and letters.has_view_permission(request)):
            return ""
        query = {"job": job.job_name, "fingerprint": job.error_fingerprint or ""}
        return f"{letters.url('changelist')}?{urlencode(query)}"

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
    actions = (
        retry_jobs, retry_jobs_otherwise, discard_jobs, run_jobs, cancel_jobs, stop_jobs, export_csv,
        export_json_lines,
    )  # fmt: skip
    acts = (RETRY, RUN, CANCEL, STOP)
