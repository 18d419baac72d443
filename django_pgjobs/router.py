"""Keeps the package's tables on the database that `PGJOBS["DATABASE"]` names.

For projects with several databases: put "django_pgjobs.router.Router" first in DATABASE_ROUTERS.
"""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured

from .conf import Config, config

APP_LABEL = "django_pgjobs"


def queue_alias() -> str:
    """Where the queue lives; while PGJOBS is broken, the default, so that the checks get to say why."""
    try:
        return config().DATABASE
    except ImproperlyConfigured:
        return Config().DATABASE


class Router:
    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return queue_alias() if model._meta.app_label == APP_LABEL else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return db == queue_alias() if app_label == APP_LABEL else None
