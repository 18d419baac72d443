"""The admin: jobs, dead letters, operations, schedules, queues and workers.

Everything is read only but what people may do to jobs, operations, schedules, queues and workers, each with a
permission of its own.
"""

from __future__ import annotations

from django.contrib import admin

from ..models import BackgroundSchedule, Overview
from . import jobs, letters, operations, queues, workers  # noqa: F401 - each registers its pages
from .overview import OverviewAdmin
from .schedules import BackgroundScheduleAdmin

admin.site.register(BackgroundSchedule, BackgroundScheduleAdmin)
admin.site.register(Overview, OverviewAdmin)
