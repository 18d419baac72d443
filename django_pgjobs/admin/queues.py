"""Queues: which are paused, by whom and why; and to pause, resume and purge them.

The list has the queues that somebody has paused or purged at some time. The pages for that offer all that
have jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import django
from django import forms
from django.contrib import admin, messages
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html
from django.views.decorators.http import require_POST

from .. import operations, store
from ..conf import config
from ..lifecycle import Status
from ..models import BackgroundQueue
from ..operations import PURGE, REASON_LIMIT, Filter, Person
from .lists import MOST_QUEUES, MOST_SUMMARY
from .operations import carry_out, is_large
from .page import MOST_TEXT, ago, moment
from .readonly import NamedAdmin

if TYPE_CHECKING:
    from django.utils.safestring import SafeString


@admin.action(permissions=["pause"], description="Pause …")
def pause_queues(
    model_admin: BackgroundQueueAdmin, request: HttpRequest, queryset: QuerySet[Any]
) -> HttpResponse:
    return HttpResponseRedirect(model_admin.pause_url(queryset.values_list("pk", flat=True)[:MOST_QUEUES]))


@admin.action(permissions=["pause"], description="Resume")
def resume_queues(model_admin: BackgroundQueueAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> None:
    for name in queryset.values_list("pk", flat=True):
        model_admin.resume(request, name)


def can_be_name(text: str) -> bool:
    return 0 < len(text) <= 255 and "\x00" not in text


class QueuesField(forms.MultipleChoiceField):
    """Offers queues that are known. Any other can be paused as well: its jobs may have just ended."""

    widget = forms.CheckboxSelectMultiple

    def valid_value(self, value: str) -> bool:
        return can_be_name(value)


def reason_field(**options: Any) -> forms.CharField:
    return forms.CharField(max_length=REASON_LIMIT // 4, widget=forms.TextInput({"size": 60}), **options)


class PauseForm(forms.Form):
    """What is asked before queues are paused."""

    queues = QueuesField(error_messages={"required": "Choose a queue."})
    reason = reason_field(
        help_text="For whoever wonders why nothing runs. It goes into the history of each queue."
    )


class ResumeForm(forms.Form):
    """What is asked before a queue is resumed."""

    reason = reason_field(required=False, help_text="Goes into the history of the queue. May be empty.")


class PurgeForm(forms.Form):
    """What is asked before the jobs that wait in a queue are cancelled."""

    name = forms.CharField(
        label="Its name, once more",
        strip=False,
        widget=forms.TextInput({"size": 60, "autocomplete": "off"}),
        help_text="Type the name of the queue, so that it is the one that you mean.",
    )
    reason = reason_field(help_text="Goes into the history of the queue, and of each job.")
    until = forms.DateTimeField(widget=forms.HiddenInput)  # when they were counted

    def __init__(self, queue: str, *args: Any, **kwargs: Any) -> None:
        self.queue = queue
        super().__init__(*args, **kwargs)

    def clean_name(self) -> str:
        if self.cleaned_data["name"] != self.queue:
            raise forms.ValidationError("This is not the name of the queue.")
        return self.queue


@admin.register(BackgroundQueue)
class BackgroundQueueAdmin(NamedAdmin):
    change_list_template = "admin/django_pgjobs/queues.html"
    change_form_template = "admin/django_pgjobs/queue.html"
    list_display = ("name", "status", "paused_by", "why")
    ordering = ("name",)
    sortable_by = ()
    fields = ()
    actions: Sequence[Any] = (pause_queues, resume_queues)

    def has_pause_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("django_pgjobs.pause_queue")

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        view = self.admin_site.admin_view
        return [
            path("pause/", view(self.pause_view), name=f"{name}_pause"),
            path("purge/", view(self.purge_view), name=f"{name}_purge"),
            path("<str:object_id>/resume/", view(require_POST(self.resume_view)), name=f"{name}_resume"),
            *super().get_urls(),
        ]

    def url(self, name: str, *args: str) -> str:
        """The address of one of its pages."""
        full = f"admin:{self.opts.app_label}_{self.opts.model_name}_{name}"
        return reverse(full, args=list(map(quote, args)), current_app=self.admin_site.name)

    def pause_url(self, names: Iterable[str]) -> str:
        """Where these queues can be paused."""
        return f"{self.url('pause')}?{urlencode({'queue': list(names)}, doseq=True)}"

    def has_purge_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(f"django_pgjobs.{PURGE.permission}")

    def purge_url(self, name: str) -> str:
        """Where the jobs that wait in this queue can be cancelled."""
        return f"{self.url('purge')}?{urlencode({'queue': name})}"

    # Pausing and resuming

    def pause_view(self, request: HttpRequest) -> HttpResponse:
        """Ask which queues are to be paused, and why, and do it."""
        if not (self.has_pause_permission(request) and self.has_view_permission(request)):
            raise PermissionDenied
        chosen = [name for name in request.GET.getlist("queue") if can_be_name(name)]
        form = PauseForm(request.POST if request.method == "POST" else None, initial={"queues": chosen})
        if form.is_valid():
            for name in form.cleaned_data["queues"]:
                self.pause(request, name, form.cleaned_data["reason"])
            return HttpResponseRedirect(self.url("changelist"))
        return self._patiently(request, partial(self._pause_page, request, form, chosen))

    def _pause_page(self, request: HttpRequest, form: PauseForm, chosen: list[str]) -> HttpResponse:
        alias = config().DATABASE
        rows = BackgroundQueue.objects.using(alias)
        paused = rows.filter(paused_at__isnull=False).values_list("pk", flat=True)
        names = sorted({*store.queue_names(alias, MOST_QUEUES), *chosen}.difference(paused))
        form.fields["queues"].choices = [(name, name) for name in names]  # type: ignore[attr-defined]
        context = {
            **self.admin_site.each_context(request),
            "title": "Pause queues",
            "opts": self.opts,
            "list_url": self.url("changelist"),
            "list_name": str(self.opts.verbose_name_plural).capitalize(),
            "names": names,
            "form": form,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/django_pgjobs/pause.html", context)

    def pause(self, request: HttpRequest, name: str, reason: str) -> None:
        """Pause a queue, and say what became of it."""
        done = operations.pause_queue(name, Person.of(request.user), reason)
        told = f"The queue {name!r} {'is paused' if done else 'was paused before'}."
        self.message_user(request, told, messages.SUCCESS if done else messages.WARNING)

    def resume(self, request: HttpRequest, name: str, reason: str = "") -> None:
        """Resume a queue, and say what became of it."""
        done = operations.resume_queue(name, Person.of(request.user), reason) is not None
        told = f"The queue {name!r} {'is resumed' if done else 'was not paused'}."
        self.message_user(request, told, messages.SUCCESS if done else messages.WARNING)

    def resume_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Resume one queue, by the form on its page."""
        if not (self.has_pause_permission(request) and self.has_view_permission(request)):
            raise PermissionDenied
        queue = self.get_object(request, unquote(object_id))
        if queue is None:
            raise Http404
        form = ResumeForm(request.POST)
        if form.is_valid():
            self.resume(request, queue.pk, form.cleaned_data["reason"])
        else:
            self.message_user(request, str(form.errors["reason"][0]), messages.ERROR)
        return HttpResponseRedirect(self.url("change", queue.pk))

    # Purging

    def purge_view(self, request: HttpRequest) -> HttpResponse:
        """Say how many jobs wait in a queue, ask for its name and why, and have them cancelled."""
        if not (self.has_purge_permission(request) and self.has_view_permission(request)):
            raise PermissionDenied
        queue = request.GET.get("queue", "")
        try:
            filter = Filter(status=Status.QUEUED, queue=queue if can_be_name(queue) else None)
        except ValueError:
            return self._patiently(request, partial(self._purge_page, request, None, None))
        if request.method == "POST":
            form = PurgeForm(queue, request.POST)
            if form.is_valid():
                operation = operations.begin(
                    PURGE,
                    filter,
                    Person.of(request.user),
                    reason=form.cleaned_data["reason"],
                    at=form.cleaned_data["until"],
                )
                return carry_out(self, request, operation, back=self.url("change", queue))
        else:
            form = PurgeForm(queue, initial={"until": store.now(config().DATABASE).isoformat()})
        return self._patiently(request, partial(self._purge_page, request, filter, form))

    def _purge_page(
        self, request: HttpRequest, filter: Filter | None, form: PurgeForm | None
    ) -> HttpResponse:
        """Ask about one queue; without, let one be chosen."""
        alias = config().DATABASE
        context = {
            **self.admin_site.each_context(request),
            "title": "Purge a queue",
            "opts": self.opts,
            "list_url": self.url("changelist"),
            "list_name": str(self.opts.verbose_name_plural).capitalize(),
        }
        if filter is None:
            names = store.queue_names(alias, MOST_QUEUES)
            context["choices"] = [(name, self.purge_url(name)) for name in names]
        else:
            assert filter.queue is not None
            found = operations.preview(filter)
            rows = BackgroundQueue.objects.using(alias)
            context |= {
                "title": f"Purge the queue {filter.queue}",
                "queue": filter.queue,
                "found": found,
                "in_background": is_large(found.expected),
                "is_paused": rows.filter(pk=filter.queue, paused_at__isnull=False).exists(),
                "pause_url": self.pause_url([filter.queue]) if self.has_pause_permission(request) else "",
                "form": form,
            }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/django_pgjobs/purge.html", context)

    # The page of a queue

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> HttpResponse:
        facts: list[tuple[str, Any]] = []
        if obj.paused_at:
            facts = [("Paused", moment(obj.paused_at)), ("By", obj.paused_by or "somebody")]
            if obj.reason:
                facts.append(("Reason", obj.reason[:MOST_TEXT]))
        context |= {
            "subtitle": None,
            "title": f"Queue {obj.name}",
            "queue": obj,
            "facts": facts,
            "tools_in_content": django.VERSION < (6, 1),  # later ones show them outside of it
            "may_pause": self.has_pause_permission(request),
            "pause_url": self.pause_url([obj.pk]),
            "purge_url": self.purge_url(obj.pk) if self.has_purge_permission(request) else "",
            "resume_url": self.url("resume", obj.pk),
            "form": ResumeForm(),
        }
        return super().render_change_form(request, context, add, change, form_url, obj)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        may = {
            "may_pause": self.has_pause_permission(request),
            "may_purge": self.has_purge_permission(request),
        }
        return super().changelist_view(request, {**may, **(extra_context or {})})

    # Columns

    @admin.display(description="status")
    def status(self, queue: BackgroundQueue) -> SafeString | str:
        return format_html("paused {}", ago(queue.paused_at)) if queue.paused_at else "not paused"

    @admin.display(description="reason")
    def why(self, queue: BackgroundQueue) -> str:
        return queue.reason[:MOST_SUMMARY]
