"""django-tasks-db and django-ox, whichever is installed; with connections that stay open."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from urllib.parse import parse_qs, urlsplit

import common
import django
from django.conf import settings

IS_OX = find_spec("django_ox") is not None

url = urlsplit(common.URL)
query = {name: values[0] for name, values in parse_qs(url.query).items()}
settings.configure(
    INSTALLED_APPS=["django.contrib.contenttypes", "django_ox" if IS_OX else "django_tasks_db"],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": url.path[1:],
            "USER": url.username or "",
            "PASSWORD": url.password or "",
            "HOST": url.hostname or query.get("host", ""),
            "PORT": url.port or query.get("port", ""),
            "CONN_MAX_AGE": None,
        }
    },
    TASKS={
        "default": {"BACKEND": "django_ox.backend.OxBackend" if IS_OX else "django_tasks_db.DatabaseBackend"}
    },
    USE_TZ=True,
)
django.setup()

# The tasks are found by the path of a module that workers can import: this one, under its own name.
if __name__ == "__main__":
    sys.modules["with_django"] = sys.modules["__main__"]

from django.core.management import call_command  # noqa: E402 - only after the setup
from django.tasks import task  # noqa: E402


def nothing(number: int) -> None:
    common.nothing(number)


def moment(number: int) -> None:
    common.moment(number)


for function in (nothing, moment):
    function.__module__ = "with_django"
JOBS = {"nothing": task(nothing), "moment": task(moment)}
nothing, moment = JOBS["nothing"], JOBS["moment"]  # type: ignore[assignment]


def install() -> None:
    call_command("migrate", verbosity=0)


def work(job: str) -> None:
    if IS_OX:
        call_command("ox_worker", concurrency=common.THREADS)
    else:
        call_command("db_worker", startup_delay=False)  # runs one task at a time


@contextmanager
def client() -> Iterator[tuple[common.One, common.Many]]:
    from django.db import transaction

    def one(job: str, number: int) -> None:
        JOBS[job].enqueue(number)

    def many(job: str, count: int) -> None:
        if IS_OX:
            from django_ox.bulk import enqueue_many

            enqueue_many(JOBS[job], [((1,), {}) for _ in range(count)])
        else:
            with transaction.atomic():
                for _ in range(count):
                    JOBS[job].enqueue(1)

    yield one, many


if __name__ == "__main__":
    common.main(install, work, client)
