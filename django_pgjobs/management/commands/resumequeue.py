from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from django_pgjobs import operations
from django_pgjobs.management.acting import add_person, person_of
from django_pgjobs.management.arguments import queue_name


class Command(BaseCommand):
    help = "Let workers claim from a paused queue again."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", type=queue_name, metavar="NAME", help="The name of the queue.")
        add_person(parser)

    def handle(self, *, name: str, reason: str | None, **options: Any) -> None:
        pause = operations.resume_queue(name, person_of(options), reason or "")
        if pause is None:
            self.stdout.write(f"The queue {name!r} was not paused.")
            return
        why = f": {pause.reason}" if pause.reason else "."
        who = pause.by or "somebody"
        self.stdout.write(
            f"The queue {name!r} is served again. It had been paused since {pause.since:%Y-%m-%d %H:%M %Z} by"
            f" {who}{why}"
        )
