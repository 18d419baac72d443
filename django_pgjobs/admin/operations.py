"""Operations: how far each has come, what it has done, and how to stop it or let it go on."""

from __future__ import annotations

import shlex
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import django
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import path, reverse
from django.utils import timezone
from django.utils.html import format_html
from django.views.decorators.http import require_POST

from .. import operations, store
from ..conf import config
from ..models import BackgroundOperation, BackgroundQueue
from ..operations import FINISHED, RUNNING, STOPPED, Filter, Manner, Person
from .lists import job_id
from .page import ago, moment
from .readonly import ReadOnlyAdmin

if TYPE_CHECKING:
    from django.utils.safestring import SafeString

FEW = 300  # jobs that are changed while somebody waits for the page
STUCK = 60.0  # seconds without a step after which it is offered to have a worker carry an operation on
MOST_REASON = 300  # characters of a reason in a list

_CSS = {RUNNING: "processing", STOPPED: "cancelled", FINISHED: "completed"}


def is_large(expected: int | None) -> bool:
    """Whether nobody is to wait until so many jobs are changed; None is more than were counted."""
    return expected is None or expected > FEW


def carry_out(
    model_admin: ReadOnlyAdmin, request: HttpRequest, operation: BackgroundOperation, back: str
) -> HttpResponse:
    """Do what an operation is to do, or have a worker do it where that is much or takes its time.

    Leads on to the operation, where it goes on and this person may see it; else `back`, and tells.
    """
    if is_large(operation.expected) or Manner.of_json(operation.manner).per_minute:
        operations.hand_over(operation)
    else:
        for _ in operations.steps(operation.pk):
            pass
        operation.refresh_from_db()
    is_finished = operation.state == FINISHED
    site = model_admin.admin_site
    may_see = request.user.has_perm("django_pgjobs.view_backgroundoperation")
    if is_finished or not (may_see and site.is_registered(BackgroundOperation)):
        told = operations.told(operation) if is_finished else f"{operation} goes on in the background."
        model_admin.message_user(request, told, messages.SUCCESS)
        return HttpResponseRedirect(back)
    url = "admin:django_pgjobs_backgroundoperation_change"
    return HttpResponseRedirect(reverse(url, args=[operation.pk], current_app=site.name))


def badge(operation: BackgroundOperation) -> SafeString:
    css = _CSS.get(operation.state, "cancelled")
    return format_html('<span class="pgjobs-status pgjobs-{}">{}</span>', css, operation.state)


class OperationPage:
    """What the page of an operation shows. Anyone may have written the row, so anything may be in there."""

    def __init__(self, operation: BackgroundOperation) -> None:
        self.operation = operation
        self.badge = badge(operation)
        self.is_running = operation.state == RUNNING
        self.waits = (operation.next_at - timezone.now()).total_seconds() if operation.next_at else 0.0
        self.problem = ""
        try:
            self.filter = Filter.of_json(operation.filter)
            self.manner = Manner.of_json(operation.manner)
            self.outcome = operations.told(operation)
            self.done = operations.gone_through(operation)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self.problem = f"This operation cannot be carried out: {type(error).__name__}: {error}"

    @property
    def name(self) -> str:
        if self.problem:
            return str(self.operation)
        noun = f"{self.filter.noun}s"
        return f"{self.operation.act.capitalize()} all {noun} {self.filter}".rstrip()

    @property
    def share(self) -> str:
        expected = self.operation.expected
        return f"{self.done:,}" if expected is None else f"{self.done:,} of {max(expected, self.done):,}"

    @property
    def most(self) -> int:
        """What the bar of its progress goes up to."""
        if self.operation.state == FINISHED:
            return max(self.done, 1)
        return max(self.operation.expected or 2 * self.done, self.done, 1)

    @cached_property
    def story(self) -> list[SafeString | str]:
        """What is going on, in words."""
        operation = self.operation
        if operation.state == FINISHED:
            return [format_html("Finished {}.", ago(operation.updated_at)), self.outcome]
        if operation.state == STOPPED:
            return [
                format_html("Stopped {}. Nothing more is changed until somebody resumes it.",
                            ago(operation.updated_at)),
                f"So far: {self.outcome}",
            ]  # fmt: skip
        if self.waits > 0:
            return [format_html("Goes on {}.", ago(operation.next_at)), f"So far: {self.outcome}"]
        return [format_html("Its last step was {}.", ago(operation.updated_at)), f"So far: {self.outcome}"]

    @cached_property
    def warning(self) -> str:
        """Why a running operation may not get on, if there is a reason to be seen."""
        if not self.is_running or not self.is_stuck:
            return ""
        queue = config().OPERATIONS_QUEUE
        alias = config().DATABASE
        if BackgroundQueue.objects.using(alias).filter(pk=queue, paused_at__isnull=False).exists():
            return f"The queue {queue!r}, in which operations are carried on, is paused. Resume it."
        with store.own_transaction(alias) as cursor:
            workers = [worker for worker in store.workers(cursor) if worker.is_alive]
        if not any(worker.queues is None or queue in worker.queues for worker in workers):
            return (
                f"No worker that serves the queue {queue!r} is alive. Start one with: manage.py runjobs"
                f" --queue {shlex.quote(queue)}"
            )
        return "It does not get on. Its process may have been killed: have a worker carry it on."

    @property
    def is_stuck(self) -> bool:
        """Whether nobody seems to carry it on."""
        still = (timezone.now() - self.operation.updated_at).total_seconds()
        return self.is_running and self.waits <= 0 and still > STUCK

    @cached_property
    def facts(self) -> list[tuple[str, Any]]:
        operation = self.operation
        facts: list[tuple[str, Any]] = [("Asked by", operation.asked_by or "somebody")]
        if operation.reason:
            facts.append(("Reason", operation.reason))
        if not self.problem:
            if operation.act == operations.RETRY.name:
                facts.append(("They run", str(self.manner)))
            for reason, count in operation.skipped.items():
                facts.append((f"Skipped: {_SKIPPED.get(reason, reason)}", f"{count:,}"))
        facts.append(("Changed", f"{operation.changed:,}"))
        if operation.failed:
            facts.append(("Failed", f"{operation.failed:,}"))
        facts += [("Begun", moment(operation.created_at)), ("Last step", moment(operation.updated_at))]
        return facts


_SKIPPED = {
    "refused": "no longer in this status",
    "missing": "no longer there",
    "taken": "unique key taken",
    "busy": "locked by others",
}


@admin.register(BackgroundOperation)
class BackgroundOperationAdmin(ReadOnlyAdmin):
    change_form_template = "admin/django_pgjobs/operation.html"
    fields = ()
    list_display = ("id", "what", "status", "progress", "asked_by", "why", "begun")
    list_display_links = ("id", "what")
    ordering = ("-id",)
    sortable_by = ()

    class Media:
        js = ["django_pgjobs/refresh.js"]

    def may_steer(self, request: HttpRequest, operation: BackgroundOperation) -> bool:
        """Whether somebody may stop and resume an operation: who may do what it does."""
        act = operations.ACTS.get(operation.act)
        return act is not None and request.user.has_perm(f"django_pgjobs.{act.permission}")

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        return [
            path(
                f"<str:object_id>/{verb}/",
                self.admin_site.admin_view(require_POST(partial(self.steer_view, verb=verb))),
                name=f"{name}_{verb}",
            )
            for verb in ("stop", "resume")
        ] + super().get_urls()

    def steer_view(self, request: HttpRequest, object_id: str, *, verb: str) -> HttpResponse:
        operation = self.get_object(request, object_id) if job_id(object_id) is not None else None
        if operation is None:
            raise Http404
        if not (self.has_view_permission(request) and self.may_steer(request, operation)):
            raise PermissionDenied
        by = Person.of(request.user)
        if verb == "stop":
            done = operations.stop(operation, by)
            told = f"{operation} is stopped." if done else f"{operation} was not running."
        else:
            done = operations.resume(operation, by) or OperationPage(operation).is_stuck
            if done:
                operations.hand_over(operation)
            told = f"{operation} goes on." if done else f"{operation} was not stopped."
        self.message_user(request, told, messages.SUCCESS if done else messages.WARNING)
        url = f"admin:{self.opts.app_label}_{self.opts.model_name}_change"
        return HttpResponseRedirect(reverse(url, args=[operation.pk], current_app=self.admin_site.name))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        return None if job_id(object_id) is None else super().get_object(request, object_id, from_field)

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> HttpResponse:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}"
        page = OperationPage(obj)
        verbs = {}
        if self.may_steer(request, obj) and not page.problem:
            if obj.state == STOPPED or page.is_stuck:
                verbs["resume"] = "Resume" if obj.state == STOPPED else "Carry on"
            if obj.state == RUNNING:
                verbs["stop"] = "Stop"
        context |= {
            "subtitle": None,
            "title": str(obj),
            "page": page,
            "tools_in_content": django.VERSION < (6, 1),  # later ones show them outside of it
            "verbs": [
                {
                    "label": label,
                    "css": f"pgjobs-{verb}",
                    "url": reverse(f"{name}_{verb}", args=[obj.pk], current_app=self.admin_site.name),
                }
                for verb, label in verbs.items()
            ],
        }
        return super().render_change_form(request, context, add, change, form_url, obj)

    # Columns

    @admin.display(description="operation")
    def what(self, operation: BackgroundOperation) -> str:
        return OperationPage(operation).name[:MOST_REASON]

    @admin.display(description="state")
    def status(self, operation: BackgroundOperation) -> SafeString:
        return badge(operation)

    @admin.display(description="jobs")
    def progress(self, operation: BackgroundOperation) -> str:
        page = OperationPage(operation)
        return "" if page.problem else page.share

    @admin.display(description="reason")
    def why(self, operation: BackgroundOperation) -> str:
        return operation.reason[:MOST_REASON]

    @admin.display(description="begun")
    def begun(self, operation: BackgroundOperation) -> SafeString:
        return ago(operation.created_at)
