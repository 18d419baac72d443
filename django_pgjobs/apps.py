"""The app: finds the job functions of the project, and connects what Django calls by itself."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from django.apps import AppConfig
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.db.migrations.loader import MigrationLoader
from django.db.models.signals import pre_migrate

from . import checks, jobs, mail  # noqa: F401 - mail is a job function, too
from .conf import config
from .lifecycle import Status


class PGJobsConfig(AppConfig):
    name = "django_pgjobs"
    verbose_name = "Background jobs"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import alerts, operations  # noqa: F401 - both have a job function, and need the models

        checks.register()
        jobs.discover()
        with suppress(ImproperlyConfigured):  # which is for the system checks to report
            if config().ON_DEAD_LETTER is not None:
                alerts.connect()
            if config().TRACING:
                from . import tracing

                tracing.connect()
        pre_migrate.connect(create_status_type, sender=self, dispatch_uid="django_pgjobs.status")

    def run_now(self, ids: Iterable[int]) -> None:
        """Run jobs in this thread; see `inplace.run_now`, which only immediate mode has to import."""
        from . import inplace

        inplace.run_now(ids)


def create_status_type(app_config: AppConfig, using: str, **kwargs: Any) -> None:
    """Create the enum type where tables are made without migrations, as test suites do."""
    module, _ = MigrationLoader.migrations_module(app_config.label)
    connection = connections[using]
    if (
        module is not None
        or connection.vendor != "postgresql"
        or not router.allow_migrate(using, app_config.label)
    ):
        return
    values = ", ".join(f"'{status}'" for status in Status)
    with connection.cursor() as cursor:
        cursor.execute(
            f"""DO $$ BEGIN
                    CREATE TYPE job_status AS ENUM ({values});
                EXCEPTION WHEN duplicate_object THEN NULL;
                END $$"""
        )
