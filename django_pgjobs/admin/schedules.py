"""Schedules: those of the code are enabled, disabled and run; those that people make are edited as well.

The job is picked by its registered name, never by an import path, and its arguments have to fit it: so who
may edit schedules can run what the project has declared as jobs, and nothing else.
"""

from __future__ import annotations

import json
import zoneinfo
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db import IntegrityError, router, transaction
from django.db.models import QuerySet, TextField
from django.db.models.functions import Cast, Left
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.timezone import get_default_timezone_name
from django.views.decorators.http import require_POST

from .. import jobs, store
from ..conf import config
from ..exceptions import InvalidArguments
from ..models import BackgroundSchedule
from ..redaction import Redacted
from ..schedules import MISSED, find_zone, name_problem
from ..ticking import job_of
from .arguments import parsed, restored
from .page import MOST_TEXT, ago, breakable, in_words, moment
from .readonly import NamedAdmin

if TYPE_CHECKING:
    from django.utils.safestring import SafeString

    ModelForm = forms.ModelForm[BackgroundSchedule]
else:
    ModelForm = forms.ModelForm

NEXT_TIMES = 5
MOST = 1_000  # schedules that one action goes through

_TIMES = {"cron", "interval", "timezone"}
_MISSED = {
    "once": "once: one job for all that was missed",
    "skip": "skip: no job for what was missed",
    "all": "all: one job for each tick that was missed",
}


# ── Acts ──────────────────────────────────────────────────────────────────────────────────────────────────


class Refused(Exception):
    """Something cannot be done with a schedule; the text says why, in a sentence."""


def enable(schedule: BackgroundSchedule, user: Any) -> str:
    """Let a schedule tick, from its next tick on. Returns what was done. Raises Refused."""
    try:
        next_tick_at = schedule.timing.next(store.now(config().DATABASE))
    except ValueError as error:
        raise Refused(str(error)) from None
    return _switch(schedule, user, enabled=True, next_tick_at=next_tick_at)


def disable(schedule: BackgroundSchedule, user: Any) -> str:
    """Let a schedule rest. Returns what was done. Raises Refused."""
    return _switch(schedule, user, enabled=False, next_tick_at=None)


def _switch(schedule: BackgroundSchedule, user: Any, *, enabled: bool, next_tick_at: datetime | None) -> str:
    changed = store.enable(
        schedule.name,
        enabled=enabled,
        next_tick_at=next_tick_at,
        changed_by=str(user)[:255],
        using=config().DATABASE,
    )
    done = "enabled" if enabled else "disabled"
    if not changed:
        raise Refused(f"It is {done} already, or no longer exists.")
    return done


def run_now(schedule: BackgroundSchedule, user: Any) -> str:
    """Enqueue a job of a schedule, whose ticks stay what they are. Returns what was done. Raises Refused."""
    name = schedule.name
    try:
        function, key = job_of(name, schedule.job_name, payload_text(schedule), schedule.overlap)
    except (ValueError, InvalidArguments) as error:
        raise Refused(str(error)) from None
    id = store.run_now(name, new=function.new_job(), unique_key=key, using=config().DATABASE)
    if id is None:
        raise Refused("An earlier job of it waits or runs.")
    return f"enqueued job {id}"


class Act(NamedTuple):
    """Something that people may do with a schedule. Its URL goes by its name."""

    name: str
    permission: str
    label: str
    perform: Callable[[BackgroundSchedule, Any], str]


ENABLE = Act("enable", "enable_schedule", "Enable", enable)
DISABLE = Act("disable", "enable_schedule", "Disable", disable)
RUN_NOW = Act("run", "run_schedule", "Run now", run_now)
ACTS = (ENABLE, DISABLE, RUN_NOW)


def perform(act: Act, schedule: BackgroundSchedule, user: Any) -> str:
    """Do something with a schedule, and log it by the user's name. Returns what was done. Raises Refused.

    The log may live in another database. There it is committed first: what cannot be logged does not happen.
    """
    with store.own_transaction(config().DATABASE):
        done = act.perform(schedule, user)
        with transaction.atomic(using=router.db_for_write(LogEntry)):
            LogEntry.objects.log_actions(user.pk, [schedule], CHANGE, f"{done.capitalize()}.")
    return done


@admin.action(permissions=["enable"], description="Enable: take ticks again, from the next one on")
def enable_schedules(model_admin: BackgroundScheduleAdmin, request: HttpRequest, queryset: Any) -> None:
    model_admin.act_on(ENABLE, request, queryset[:MOST])


@admin.action(permissions=["enable"], description="Disable: take no ticks")
def disable_schedules(model_admin: BackgroundScheduleAdmin, request: HttpRequest, queryset: Any) -> None:
    model_admin.act_on(DISABLE, request, queryset[:MOST])


@admin.action(permissions=["run"], description="Run now: enqueue a job of each")
def run_schedules(model_admin: BackgroundScheduleAdmin, request: HttpRequest, queryset: Any) -> None:
    model_admin.act_on(RUN_NOW, request, queryset[:MOST])


# ── What a page shows ─────────────────────────────────────────────────────────────────────────────────────


def payload_text(schedule: BackgroundSchedule) -> str | None:
    """The arguments of a schedule as JSON text; None if they are larger than a job's may be."""
    most = config().MAX_PAYLOAD_BYTES
    rows = BackgroundSchedule.objects.using(config().DATABASE).filter(pk=schedule.pk)
    text = rows.values_list(Left(Cast("payload", TextField()), most + 1), flat=True).first() or "{}"
    return text if len(text) <= most else None


def is_at_rest(schedule: BackgroundSchedule) -> bool:
    """Whether a schedule was declared by code which, as far as this site knows it, no longer does."""
    return schedule.declared and schedule.name not in jobs.declared_schedules()


def status_of(schedule: BackgroundSchedule) -> SafeString:
    css, text = "completed", "enabled"
    if not schedule.enabled:
        css, text = "cancelled", "disabled"
    elif is_at_rest(schedule):
        css, text = "cancelled", "not in the code"
    elif jobs.find(schedule.job_name) is None:
        css, text = "failed", "unknown job"
    return format_html('<span class="pgjobs-status pgjobs-{}">{}</span>', css, text)


class SchedulePage:
    """What the page of a schedule shows. Bounded and escaped, since anyone may write a row."""

    def __init__(self, schedule: BackgroundSchedule) -> None:
        self.schedule = schedule
        self.status = status_of(schedule)
        self.payload = payload_text(schedule)
        self.is_at_rest = is_at_rest(schedule)

    @cached_property
    def problem(self) -> str:
        """Why workers cannot carry it out, in a sentence; "" if they can, as far as this site knows."""
        schedule = self.schedule
        try:
            schedule.timing  # noqa: B018 - which is what raises
            job_of(schedule.name, schedule.job_name, self.payload, schedule.overlap)
        except (ValueError, InvalidArguments) as error:
            return str(error)
        return ""

    @cached_property
    def next_times(self) -> list[tuple[str, str]]:
        """The next times at which it is due, by the clock of its zone, and how far away they are."""
        try:
            timing = self.schedule.timing
        except ValueError:
            return []
        zone = find_zone(timing.zone_name)
        now = store.now(config().DATABASE)
        begin = max(now, self.schedule.last_tick or now)
        return [
            (f"{tick.astimezone(zone):%a %Y-%m-%d %H:%M:%S %Z}", in_words(tick))
            for tick in islice(timing.ticks(begin), NEXT_TIMES)
        ]

    @cached_property
    def arguments(self) -> str:
        if self.payload is None:
            return "They are too large to be shown."
        redacted = Redacted(self.schedule.job_name, self.payload)
        return json.dumps(redacted.payload, indent=2, ensure_ascii=False)[:MOST_TEXT]

    @cached_property
    def facts(self) -> list[tuple[str, Any]]:
        schedule = self.schedule
        facts: list[tuple[str, Any]] = [
            ("Job", schedule.job_name),
            ("When", when(schedule)),
            ("Missed ticks", _MISSED.get(schedule.missed, schedule.missed)),
            ("Overlap", "allowed" if schedule.overlap else "skips a tick while an earlier job waits or runs"),
            ("Made by", "the code" if schedule.declared else schedule.changed_by or "somebody"),
        ]
        if schedule.declared and schedule.changed_by:
            facts.append(("Switched by", schedule.changed_by))
        if schedule.last_tick:
            facts.append(("Last tick", moment(schedule.last_tick)))
        if schedule.enabled and schedule.next_tick_at:
            facts.append(("Next tick", moment(schedule.next_tick_at)))
        facts += [("Created", moment(schedule.created_at)), ("Changed", moment(schedule.updated_at))]
        return facts


def when(schedule: BackgroundSchedule) -> str:
    if schedule.interval is not None:
        return f"every {schedule.interval}"
    return f"{schedule.cron} {schedule.timezone}".rstrip()


# ── The form ──────────────────────────────────────────────────────────────────────────────────────────────


class ScheduleForm(ModelForm):
    """Checks all that a worker will check, since it is people who can put it right."""

    job_name = forms.ChoiceField(label="Job")
    cron = forms.CharField(
        label="Cron text",
        required=False,
        max_length=255,
        help_text="Minute, hour, day of the month, month, day of the week: */15 * * * * or 0 6 * * 1-5.",
    )
    interval = forms.DurationField(
        required=False,
        help_text="Instead of a cron text: seconds, or hours:minutes:seconds; 7 00:00:00 is a week.",
    )
    timezone = forms.ChoiceField(label="Time zone", required=False, help_text="Of the cron text.")
    args = forms.CharField(
        label="Arguments",
        required=False,
        widget=forms.Textarea({"rows": 3, "cols": 60}),
        help_text='A JSON array: ["north", 7]',
    )
    kwargs = forms.CharField(
        label="Keyword arguments",
        required=False,
        widget=forms.Textarea({"rows": 3, "cols": 60}),
        help_text='A JSON object: {"days": 7}',
    )
    missed = forms.ChoiceField(
        label="Missed ticks",
        choices=[(name, _MISSED[name]) for name in MISSED],
        initial="once",
        help_text="What is done about ticks that no worker was there for.",
    )
    overlap = forms.BooleanField(
        required=False,
        initial=True,
        help_text="If not, a tick is skipped while the job of an earlier one waits or runs.",
    )

    class Meta:
        model = BackgroundSchedule
        fields = ("name", "job_name", "cron", "interval", "timezone", "missed", "overlap")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = sorted({function.name for function in jobs.registry.values()})
        known = self.instance.job_name
        if known and known not in names and jobs.find(known) is not None:
            names.append(known)  # a former name
        self.fields["job_name"].choices = [(name, name) for name in names]  # type: ignore[attr-defined]
        zones = sorted(zoneinfo.available_timezones())
        self.fields["timezone"].choices = [("", "(of the settings)")] + [(z, z) for z in zones]  # type: ignore[attr-defined]
        if "name" in self.fields:
            self.fields["name"].required = False
            self.fields["name"].help_text = "By default, the name of the job."
        self.redacted: Redacted | None = None
        if self.instance._state.adding:
            self.initial.setdefault("timezone", get_default_timezone_name())
        else:
            self.initial.update(self._stored_arguments())

    def _stored_arguments(self) -> dict[str, str]:
        self.redacted = Redacted(self.instance.job_name, payload_text(self.instance))
        if not isinstance(self.redacted.payload, dict):
            return {}
        shown = {name: self.redacted.payload.get(name) for name in ("args", "kwargs")}
        return {name: json.dumps(value, ensure_ascii=False) for name, value in shown.items() if value}

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or {}
        if "name" in self.fields and "name" in cleaned:
            cleaned["name"] = self._checked_name(cleaned["name"] or cleaned.get("job_name", ""))
        if not self.errors:
            self._check_timing(cleaned)
        if not self.errors:
            self._check_arguments(cleaned)
        return cleaned

    def _checked_name(self, name: str) -> str:
        rows = BackgroundSchedule.objects.using(config().DATABASE)
        if problem := name_problem(name):
            self.add_error("name", problem)
        elif name in jobs.declared_schedules() or rows.filter(pk=name).exists():
            self.add_error("name", f"There is a schedule named {name!r} already. Give this one another name.")
        return name

    def _check_timing(self, cleaned: dict[str, Any]) -> None:
        if bool(cleaned["cron"]) == (cleaned["interval"] is not None):
            self.add_error("cron", "Give either a cron text or an interval.")
            return
        cleaned["cron"] = " ".join(cleaned["cron"].split())
        if cleaned["interval"] is not None:
            cleaned["timezone"] = ""
        row = BackgroundSchedule(**{column: cleaned[column] for column in _TIMES})
        try:
            row.timing  # noqa: B018 - which is what raises
        except ValueError as error:
            self.add_error("cron" if cleaned["cron"] else "interval", str(error))

    def _check_arguments(self, cleaned: dict[str, Any]) -> None:
        known = None if "job_name" in self.changed_data else self.redacted  # another job gets no secrets
        if known is not None and not isinstance(known.payload, dict):
            self.add_error("args", "Nobody can tell which of the stored arguments are secret.")
            return
        args = restored(self, "args", parsed(self, "args", cleaned["args"], []), known)
        kwargs = restored(self, "kwargs", parsed(self, "kwargs", cleaned["kwargs"], {}), known)
        if self.errors:
            return
        function = jobs.find(cleaned["job_name"])
        assert function is not None  # or it could not have been chosen
        try:
            payload = function.encode(args, kwargs)
            function.tick_key(args, kwargs, payload)
        except InvalidArguments as error:
            self.add_error("args", str(error))
        except ValueError as error:
            self.add_error("job_name", f"This job cannot have a schedule: {error}")
        else:
            self.instance.payload = json.loads(payload)

    def validate_unique(self) -> None:
        """`clean` has seen to it, in the queue's database."""

    def validate_constraints(self) -> None:
        """`clean` says it better."""


# ── The pages ─────────────────────────────────────────────────────────────────────────────────────────────


class BackgroundScheduleAdmin(NamedAdmin):
    change_form_template = "admin/django_pgjobs/schedule.html"
    form = ScheduleForm
    list_display = ("breakable_name", "job", "times", "status", "last", "next", "origin")
    list_display_links = ("breakable_name",)
    ordering = ("name",)
    sortable_by = ()
    actions: Sequence[Any] = (enable_schedules, disable_schedules, run_schedules)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).defer("payload")

    def get_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        if obj is not None and not self.has_change_permission(request, obj):
            return ()
        return ("name", "job_name", "cron", "interval", "timezone", "args", "kwargs", "missed", "overlap")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        return ("name",) if obj is not None else ()

    # Permissions

    def has_add_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("django_pgjobs.add_backgroundschedule")

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        if obj is not None and obj.declared:
            return False
        return request.user.has_perm("django_pgjobs.change_backgroundschedule")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        if obj is not None and obj.declared and not is_at_rest(obj):
            return False
        return request.user.has_perm("django_pgjobs.delete_backgroundschedule")

    def has_enable_permission(self, request: HttpRequest) -> bool:
        return self._may(ENABLE, request)

    def has_run_permission(self, request: HttpRequest) -> bool:
        return self._may(RUN_NOW, request)

    def _may(self, act: Act, request: HttpRequest) -> bool:
        return request.user.has_perm(f"django_pgjobs.{act.permission}")

    # Changes

    def add_view(self, request: HttpRequest, form_url: str = "", extra_context: Any = None) -> HttpResponse:
        try:
            return super().add_view(request, form_url, extra_context)
        except IntegrityError:  # somebody has added one of this name just now, so this time the form says so
            return super().add_view(request, form_url, extra_context)

    def save_model(self, request: HttpRequest, obj: BackgroundSchedule, form: Any, change: bool) -> None:
        alias = config().DATABASE
        obj.changed_by = str(request.user)[:255]
        obj.updated_at = store.now(alias)
        columns = {"job_name", "payload", "missed", "overlap", "changed_by", "updated_at", *_TIMES}
        if not change or _TIMES.intersection(form.changed_data):
            obj.next_tick_at = obj.timing.next(obj.updated_at)
            columns.add("next_tick_at")
        if change:
            obj.save(using=alias, update_fields=columns)
        else:
            obj.save(using=alias, force_insert=True)
        store.announce_schedules(alias)

    def act_on(self, act: Act, request: HttpRequest, schedules: QuerySet[Any]) -> None:
        """Do something with each of the schedules, and say what became of them."""
        for schedule in schedules:
            try:
                done = perform(act, schedule, request.user)
            except Refused as error:
                text = f"{schedule.name}: not {_PAST[act.name]}. {error}"
                self.message_user(request, text, messages.WARNING)
            else:
                self.message_user(request, f"{schedule.name}: {done}.", messages.SUCCESS)

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        return [
            path(
                f"<str:object_id>/{act.name}/",
                self.admin_site.admin_view(require_POST(partial(self.act_view, act=act))),
                name=f"{name}_{act.name}",
            )
            for act in ACTS
        ] + super().get_urls()

    def act_view(self, request: HttpRequest, object_id: str, *, act: Act) -> HttpResponse:
        """Do something with one schedule, by a button on its page."""
        if not (self._may(act, request) and self.has_view_permission(request)):
            raise PermissionDenied
        schedule = self.get_object(request, unquote(object_id))
        if schedule is None:
            raise Http404
        self.act_on(act, request, self.get_queryset(request).filter(pk=schedule.pk))
        url = reverse(
            f"admin:{self.opts.app_label}_{self.opts.model_name}_change",
            args=[quote(schedule.pk)],
            current_app=self.admin_site.name,
        )
        return HttpResponseRedirect(url)

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> HttpResponse:
        if obj is not None:
            name = f"admin:{self.opts.app_label}_{self.opts.model_name}"
            acts = (DISABLE if obj.enabled else ENABLE, RUN_NOW)
            context |= {
                "subtitle": None,
                "title": f"Schedule {obj.name}",
                "page": SchedulePage(obj),
                "acts": [
                    {
                        "label": act.label,
                        "url": reverse(
                            f"{name}_{act.name}", args=[quote(obj.pk)], current_app=self.admin_site.name
                        ),
                        "css": f"pgjobs-{act.name}",
                    }
                    for act in acts
                    if self._may(act, request)
                ],
            }
        return super().render_change_form(request, context, add, change, form_url, obj)

    # Columns

    @admin.display(description="schedule")
    def breakable_name(self, schedule: BackgroundSchedule) -> SafeString:
        return breakable(schedule.name)

    @admin.display(description="job")
    def job(self, schedule: BackgroundSchedule) -> SafeString:
        return breakable(schedule.job_name)

    @admin.display(description="when")
    def times(self, schedule: BackgroundSchedule) -> str:
        return when(schedule)

    @admin.display(description="status")
    def status(self, schedule: BackgroundSchedule) -> SafeString:
        return status_of(schedule)

    @admin.display(description="last tick")
    def last(self, schedule: BackgroundSchedule) -> SafeString:
        return ago(schedule.last_tick)

    @admin.display(description="next tick")
    def next(self, schedule: BackgroundSchedule) -> SafeString:
        return ago(schedule.next_tick_at if schedule.enabled and not is_at_rest(schedule) else None)

    @admin.display(description="made by")
    def origin(self, schedule: BackgroundSchedule) -> str:
        return "code" if schedule.declared else "people"


_PAST = {"enable": "enabled", "disable": "disabled", "run": "run"}
