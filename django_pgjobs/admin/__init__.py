"""The admin: jobs, dead letters, operations, schedules, queues and workers.

Everything is read only but what people may do to jobs, operations, schedules and queues, each with a
permission of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin
from django.utils import timezone
from django.utils.html import format_html

from ..models import BackgroundSchedule, BackgroundWorker, Overview
from . import jobs, letters, operations, queues  # noqa: F401 - each registers its pages
from .lists import MOST_SUMMARY
from .overview import OverviewAdmin
from .page import ago
from .readonly import ReadOnlyAdmin
from .schedules import BackgroundScheduleAdmin

if TYPE_CHECKING:
    from django.utils.safestring import SafeString

admin.site.register(BackgroundSchedule, BackgroundScheduleAdmin)
admin.site.register(Overview, OverviewAdmin)


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
