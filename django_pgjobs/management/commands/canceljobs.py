from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from django_pgjobs import store
from django_pgjobs.management.arguments import row_id


class Command(BaseCommand):
    help = "Cancel queued jobs, and ask workers to stop running ones."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("ids", nargs="+", type=row_id, metavar="ID", help="The id of a job.")

    def handle(self, *, ids: list[int], **options: Any) -> None:
        wanted = set(ids)
        cancelled = store.cancel(wanted)
        asked = store.request_stop(wanted - cancelled)
        self.stdout.write(
            f"{len(cancelled)} cancelled, {len(asked)} asked to stop,"
            f" {len(wanted) - len(cancelled) - len(asked)} left as they are."
        )
