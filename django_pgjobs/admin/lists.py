"""Lists of jobs, for tables of millions of rows: in the order of an index, counted no further than shown."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ORDER_VAR, SEARCH_VAR, ChangeList
from django.core.paginator import Paginator
from django.db.models import Case, Func, IntegerField, QuerySet, TextField, When
from django.db.models.functions import Cast, Length
from django.db.models.lookups import LessThan
from django.http import HttpRequest

from .. import store
from ..conf import config
from ..lifecycle import Status
from ..models import BackgroundJob
from ..operations import Filter
from ..redaction import Redacted

MOST = 10_000  # jobs that a list goes through
WINDOW = 50_000  # ids among which jobs are looked for where no index helps
MOST_QUEUES = 200
MOST_SUMMARY = 300  # characters of an error in a list
MOST_SEARCHED = 2_000  # characters of an error that are searched for secrets
SMALL = 2000  # bytes of a payload as it is stored, beside its row
LONGEST = 10_000  # characters of the same


def small_payload() -> Case:
    """The payload of a job as JSON text, so that a list can find its secrets; null where it is large."""
    size = Func("payload", function="pg_column_size", output_field=IntegerField())
    text = Cast("payload", TextField())
    return Case(When(LessThan(size, SMALL) & LessThan(Length(text), LONGEST), then=text))


def summary(job_name: str, payload: str | None, error: str | None) -> str:
    """The first line of a job's error, as it may be shown in a list."""
    line = ((error or "").strip().splitlines() or ["no text"])[0]
    return Redacted(job_name, payload).summary(line)[:MOST_SUMMARY]


def find_groups(filter: Filter, *, among: int, most: int) -> list[store.Group]:
    """The largest groups of jobs that failed alike, each with what may be shown of its error."""
    with store.own_transaction(config().DATABASE) as cursor:
        groups = store.groups(cursor, filter.status, filter.criteria(), limit=among, most=most)
    rows = BackgroundJob.objects.using(config().DATABASE).filter(pk__in=[each.example for each in groups])
    payloads = dict(rows.values_list("pk", small_payload()))
    return [
        each._replace(error=summary(each.job_name, payloads.get(each.example), each.error)) for each in groups
    ]


def job_id(text: str) -> int | None:
    """The id of a job that a text is, if it is one."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


class Narrowing(NamedTuple):
    """What a list is narrowed down to. Decides in which order it is read, and how far."""

    status: Status | None
    queue: str
    search: str

    @classmethod
    def of(cls, request: HttpRequest, status: Status | None = None) -> Narrowing:
        given = request.GET.get("status")
        if status is None and given is not None and given in set(Status):
            status = Status(given)
        search = request.GET.get(SEARCH_VAR, "").strip()
        if "\x00" in search:
            search = ""  # the list's own form refuses it, and says so
        return cls(status, request.GET.get("queue", ""), search)

    @property
    def id(self) -> int | None:
        return job_id(self.search)

    @property
    def is_open(self) -> bool:
        return not (self.status or self.queue or self.search)

    @property
    def needs_window(self) -> bool:
        """Whether rows are picked that no index brings together, out of as many as there may be."""
        return self.status in (None, Status.COMPLETED) and self.id is None and bool(self.queue or self.search)

    @property
    def order(self) -> list[str]:
        """The order of an index."""
        if self.status is None or self.status is Status.PROCESSING or self.needs_window:
            return ["-id"]
        if self.status is Status.QUEUED:
            return ["queue_name", "-priority", "run_at", "id"]
        return ["-updated_at", "-id"]

    @property
    def sortable(self) -> str | None:
        """The column by which the index can be read in both directions."""
        column = self.order[0].removeprefix("-")
        return None if column == "queue_name" else column


class StatusFilter(admin.SimpleListFilter):
    title = "status"
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(status.value, status.value) for status in Status]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        if value is None:
            return queryset
        if value not in set(Status):
            raise IncorrectLookupParameters(f"{value!r} is not a status.")
        return queryset.filter(status=value)


class QueueFilter(admin.SimpleListFilter):
    title = "queue"
    parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        names = set(store.queue_names(config().DATABASE, MOST_QUEUES))
        names.add(request.GET.get(self.parameter_name, ""))
        return [(name, name) for name in sorted(names) if name]

    def has_output(self) -> bool:
        return True  # also when there is one queue only, so that the page is always the same

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        if not value:
            return queryset
        if "\x00" in value:
            raise IncorrectLookupParameters("The name of a queue has no NUL.")
        return queryset.filter(queue_name=value)


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts no further than `MOST`, and has no pages beyond."""

    @cached_property
    def bounded_count(self) -> int:
        queryset: Any = self.object_list
        return int(queryset.order_by().values("pk")[: MOST + 1].count())

    @cached_property
    def count(self) -> int:
        return min(self.bounded_count, MOST)


class JobList(ChangeList):
    """A list in the order of an index, of at most a page of rows, that says what it leaves out."""

    model_admin: Any
    narrowing: Narrowing

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[Any]:
        self.narrowing = self.model_admin.narrowing(request)
        return super().get_queryset(request, exclude_parameters)

    def _get_default_ordering(self) -> list[str]:
        return self.narrowing.order

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        order = self.narrowing.order
        wish = self.params.get(ORDER_VAR, "")
        number = wish.removeprefix("-")
        if number.isascii() and number.isdigit() and int(number[:4]) < len(self.list_display):
            column = self.get_ordering_field(self.list_display[int(number)])
            if column is not None and column == self.narrowing.sortable:
                sign = "-" if wish.startswith("-") else ""
                return [sign + name.removeprefix("-") for name in order]
        return order

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        if not (self.has_active_filters or self.query):
            self.full_result_count = self.result_count  # so that nobody is asked to show the rest
        if not self.multi_page:  # or what has come in since the count would be on the page as well
            self.result_list = self.result_list[: self.list_per_page]

    @property
    def notes(self) -> list[str]:
        """What the list leaves out, in whole sentences."""
        notes = []
        if self.narrowing.needs_window:
            notes.append(
                f"Only the newest {WINDOW:,} jobs were searched. For older ones choose a status other than"
                " completed, or search for an id."
            )
        paginator = self.paginator
        if isinstance(paginator, BoundedPaginator) and paginator.bounded_count > MOST:
            total = f"more than {MOST:,}"
            if self.narrowing.is_open:
                estimate = store.estimate(config().DATABASE)
                total = f"about {estimate:,}" if estimate > MOST else total
            notes.append(f"There are {total} jobs here. This list goes through the first {MOST:,} of them.")
        return notes
