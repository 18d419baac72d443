"""Dead letters: as a list that can be narrowed down, and in groups of those that failed alike.

The parameters of an address are what a filter is made of, so that a list, a group and an act on all that
match are about the same jobs.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.db.models.functions import Left
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.timezone import is_naive, make_aware

from .. import store
from ..conf import config
from ..lifecycle import Status
from ..models import BackgroundJob, DeadLetter
from ..operations import Filter
from ..redaction import Redacted
from .jobs import JobAdmin, ids_of
from .lists import MOST_SEARCHED, JobList, QueueFilter, find_groups, job_id, small_payload, summary
from .page import MOST_TEXT, ago, attempt_of, breakable

if TYPE_CHECKING:
    from django.utils.safestring import SafeString

    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

WINDOW = 100_000  # dead letters, the latest ones, among which those that match are looked for
MOST_GROUPS = 100
MOST_NAMES = 2_000  # dead letters, the latest ones, whose names there are to choose from

_AGES = {"1h": timedelta(hours=1), "24h": timedelta(days=1), "7d": timedelta(days=7)}


def filter_of(request: HttpRequest) -> Filter:
    """The filter that an address stands for. Raises ValueError, in a sentence, for what it cannot be."""
    given = request.GET
    if "ids" in given:
        return Filter(ids=ids_of(request) or (0,))
    text = given.get(SEARCH_VAR, "").strip()
    id = job_id(text)
    if id is not None and not DeadLetter.objects.using(config().DATABASE).filter(pk=id).exists():
        id = None  # but it may be somewhere in an error
    return Filter(
        ids=() if id is None else (id,),
        text=text if text and id is None else None,
        queue=given.get("queue") or None,
        job=given.get("job") or None,
        fingerprint=given.get("fingerprint"),
        exception=given.get("exception") or None,
        since=_instant(given.get("since")),
        until=_instant(given.get("until")),
        attempts_from=_number(given.get("attempts_from")),
        attempts_to=_number(given.get("attempts_to")),
    )


def _instant(text: str | None) -> datetime | None:
    if not text:
        return None
    if text in _AGES:
        return store.now(config().DATABASE) - _AGES[text]
    instant = datetime.fromisoformat(text)
    if not 1 < instant.year < 9999:
        raise ValueError(f"{text} is too far away.")
    return make_aware(instant) if is_naive(instant) else instant


def _number(text: str | None) -> int | None:
    if not text:
        return None
    number = job_id(text)
    if number is None or number > 2**31 - 1:
        raise ValueError(f"{text!r} is no number of attempts.")
    return number


def matching(dead_letters: QuerySet[Any], filter: Filter) -> QuerySet[Any]:
    """Those that match, as `sql.LOOK` has it, among the latest `WINDOW`."""
    if filter.ids:
        dead_letters = dead_letters.filter(pk__in=filter.ids)
    if filter.queue is not None:
        dead_letters = dead_letters.filter(queue_name=filter.queue)
    if filter.job is not None:
        dead_letters = dead_letters.filter(job_name=filter.job)
    if filter.fingerprint:
        dead_letters = dead_letters.filter(error_fingerprint=filter.fingerprint)
    elif filter.fingerprint is not None:
        dead_letters = dead_letters.filter(Q(error_fingerprint="") | Q(error_fingerprint__isnull=True))
    if filter.exception is not None:
        name = filter.exception.rpartition(".")[2]
        dead_letters = dead_letters.filter(last_error__startswith=f"{name}:")
    if filter.text is not None:
        exactly = Q(unique_key=filter.text) | Q(job_name=filter.text)
        dead_letters = dead_letters.filter(exactly | Q(last_error__icontains=filter.text))
    if filter.attempts_from is not None:
        dead_letters = dead_letters.filter(attempts__gte=filter.attempts_from)
    if filter.attempts_to is not None:
        dead_letters = dead_letters.filter(attempts__lte=filter.attempts_to)
    if filter.until is not None:
        dead_letters = dead_letters.filter(updated_at__lte=filter.until)
    since = filter.since
    if not filter.is_open and not filter.ids and (edge := find_edge()):
        since = max(since or edge, edge)
    return dead_letters if since is None else dead_letters.filter(updated_at__gte=since)


def find_edge() -> datetime | None:
    """From when on the latest `WINDOW` dead letters are; None where there are not so many."""
    with store.own_transaction(config().DATABASE) as cursor:
        return store.edge(cursor, WINDOW)


# ── What there is to choose from ──────────────────────────────────────────────────────────────────────────


class Choice(admin.SimpleListFilter):
    """A part of the filter. The list is narrowed down by all of them at once, in `matching`."""

    def names(self) -> list[str]:
        return []

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        names = {*self.names(), request.GET.get(str(self.parameter_name), "")}
        return [(name, name) for name in sorted(names) if name]

    def has_output(self) -> bool:
        return True  # also when there is one name only, so that the page is always the same

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset


def _dead_names() -> tuple[list[str], list[str]]:
    with store.own_transaction(config().DATABASE) as cursor:
        return store.dead_names(cursor, MOST_NAMES)


class JobChoice(Choice):
    title = "job"
    parameter_name = "job"

    def names(self) -> list[str]:
        return _dead_names()[0]


class ExceptionChoice(Choice):
    title = "exception"
    parameter_name = "exception"

    def names(self) -> list[str]:
        return _dead_names()[1]


class SinceChoice(Choice):
    title = "time of failure"
    parameter_name = "since"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("1h", "in the last hour"), ("24h", "in the last 24 hours"), ("7d", "in the last 7 days")]


class Given(Choice):
    """A part of the filter that comes with a link: there is nothing to choose but to be without it."""

    def has_output(self) -> bool:
        return bool(self.lookup_choices)


class FingerprintGiven(Given):
    title = "fingerprint"
    parameter_name = "fingerprint"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        value = request.GET.get("fingerprint")
        return [] if value is None else [(value, value or "none")]


class UntilGiven(Given):
    title = "failed until"
    parameter_name = "until"


class AttemptsFromGiven(Given):
    title = "attempts, at least"
    parameter_name = "attempts_from"


class AttemptsToGiven(Given):
    title = "attempts, at most"
    parameter_name = "attempts_to"


CHOICES = (
    QueueFilter, JobChoice, ExceptionChoice, SinceChoice, FingerprintGiven, UntilGiven, AttemptsFromGiven,
    AttemptsToGiven,
)  # fmt: skip
PARAMETERS = {str(choice.parameter_name) for choice in CHOICES}


# ── The pages ─────────────────────────────────────────────────────────────────────────────────────────────


class LetterList(JobList):
    """The list of dead letters, and what there is to say of those that failed alike."""

    filter: Filter

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[Any]:
        try:
            self.filter = filter_of(request)
        except ValueError as error:
            raise IncorrectLookupParameters(str(error)) from None
        return super().get_queryset(request, exclude_parameters)

    @property
    def notes(self) -> list[str]:
        notes = super().notes
        if not self.filter.is_open and not self.filter.ids and find_edge() is not None:
            notes.append(f"Only the latest {WINDOW:,} dead letters were searched.")
        return notes

    @cached_property
    def alike(self) -> Alike | None:
        """Those of one group, where the list is of these and nothing else."""
        if self.filter.job is None or self.filter.fingerprint is None:
            return None
        groups = find_groups(self.filter, among=WINDOW, most=1)
        return Alike(groups[0]) if groups else None


class Alike:
    """A group of dead letters, with the traceback of one of them."""

    def __init__(self, group: store.Group) -> None:
        self.group = group
        self.error = group.error
        self.first, self.last = ago(group.first_at), ago(group.last_at)
        self.name = breakable(group.job_name)

    @property
    def query(self) -> str:
        return urlencode({"job": self.group.job_name, "fingerprint": self.group.fingerprint})

    @cached_property
    def traceback(self) -> str:
        rows = BackgroundJob.objects.using(config().DATABASE).filter(pk=self.group.example)
        latest, payload = rows.values_list("errors__-1", small_payload()).first() or (None, None)
        redacted = Redacted(self.group.job_name, payload)
        return attempt_of(latest, redacted).traceback[:MOST_TEXT] if isinstance(latest, dict) else ""


@admin.register(DeadLetter)
class DeadLetterAdmin(JobAdmin):
    change_list_template = "admin/django_pgjobs/letters.html"
    only_status = Status.FAILED
    search_help_text = "An id, a unique key, the whole name of a job function, or a part of an error."
    list_display = ("id", "name", "error", "queue", "updated")
    list_display_links = ("id", "name")
    list_filter = CHOICES

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest | None = None) -> bool:
        return lookup in PARAMETERS

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        failed: QuerySet[Any] = (
            super()
            .get_queryset(request)
            .annotate(beginning=Left("last_error", MOST_SEARCHED), small_payload=small_payload())
        )
        return failed

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return LetterList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        try:
            return matching(queryset, filter_of(request)), False
        except ValueError as error:
            raise IncorrectLookupParameters(str(error)) from None

    def filter_of(self, request: HttpRequest) -> Filter:
        return filter_of(request)

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_groups"
        return [
            path("groups/", self.admin_site.admin_view(self.groups_view), name=name),
            *super().get_urls(),
        ]

    def groups_view(self, request: HttpRequest) -> HttpResponse:
        """The dead letters in groups of those that failed alike, the largest group first."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        try:
            filter = filter_of(request)
        except ValueError as error:
            self.message_user(request, str(error), messages.ERROR)
            return HttpResponseRedirect(self.url("groups"))
        return self._patiently(request, partial(self._groups_page, request, filter))

    def _groups_page(self, request: HttpRequest, filter: Filter) -> HttpResponse:
        groups = find_groups(filter, among=WINDOW, most=MOST_GROUPS)
        context = {
            **self.admin_site.each_context(request),
            "title": "Dead letters by error",
            "opts": self.opts,
            "groups": [Alike(group) for group in groups],
            "number": groups[0].groups if groups else 0,
            "total": groups[0].total if groups else 0,
            "number_of_jobs": f"{groups[0].total:,}" if groups else "0",
            "words": str(filter),
            "is_cut": find_edge() is not None,
            "window": f"{WINDOW:,}",
            "may": {act.name: self.may(act, request) for act in self.acts_on_all},
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/django_pgjobs/groups.html", context)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        may = {act.name: self.may(act, request) for act in self.acts_on_all}
        return super().changelist_view(request, {"may": may, **(extra_context or {})})

    @admin.display(description="last error")
    def error(self, job: Any) -> SafeString:
        line = summary(job.job_name, job.small_payload, job.beginning)
        return format_html('<span class="pgjobs-error">{}</span>', line)

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
