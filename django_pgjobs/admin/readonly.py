"""What all pages have in common: they show what is in the queue's database, and change nothing.

No statement of a page takes longer than `PATIENCE`, whatever somebody looks for.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db import OperationalError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse

from .. import store
from ..conf import config
from .lists import BoundedPaginator

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

PATIENCE = timedelta(seconds=5)  # for one statement of a page
PER_PAGE = 100


class ReadOnlyAdmin(ModelAdmin):
    """Shows what is in the queue's database, without a way to change it."""

    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_per_page = PER_PAGE
    list_max_show_all = PER_PAGE
    paginator = BoundedPaginator

    class Media:
        css = {"all": ["django_pgjobs/admin.css"]}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).using(config().DATABASE)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest | None = None) -> bool:
        return lookup in ("status", "queue")  # and no column by way of the address

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        title = str(self.opts.verbose_name_plural).capitalize()
        extra_context = {"title": title, **(extra_context or {})}
        if request.method not in ("GET", "HEAD"):
            return super().changelist_view(request, extra_context)
        return self._patiently(request, partial(super().changelist_view, request, extra_context))

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        return self._patiently(
            request, partial(super().change_view, request, object_id, form_url, extra_context)
        )

    def _patiently(self, request: HttpRequest, view: Callable[[], HttpResponse]) -> HttpResponse:
        try:
            with store.looking(config().DATABASE, PATIENCE):
                return view()
        except OperationalError as error:
            if not isinstance(error.__cause__, psycopg.errors.QueryCanceled):
                raise
        context = {
            **self.admin_site.each_context(request),
            "title": "This takes too long",
            "opts": self.opts,
            "seconds": int(PATIENCE.total_seconds()),
        }
        return TemplateResponse(request, "admin/django_pgjobs/too_slow.html", context, status=503)


class NamedAdmin(ReadOnlyAdmin):
    """The same of rows whose key is a name. A text that Postgres cannot store is none."""

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        return None if "\x00" in object_id else super().get_object(request, object_id, from_field)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        if any("\x00" in name for name in request.POST.getlist(ACTION_CHECKBOX_NAME)):
            told = f"The selection has something that is no {self.opts.verbose_name}."
            self.message_user(request, told, messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())
        return super().changelist_view(request, extra_context)
