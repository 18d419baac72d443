from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from django_pgjobs import operations, store
from django_pgjobs.conf import config
from django_pgjobs.management.acting import add_person, person_of
from django_pgjobs.management.arguments import queue_name

MOST_NAMES = 200


class Command(BaseCommand):
    help = "Let workers claim nothing from a queue any more. What runs goes on."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", type=queue_name, metavar="NAME", help="The name of the queue.")
        add_person(parser, needs_reason=True)

    def handle(self, *, name: str, reason: str, **options: Any) -> None:
        known = store.queue_names(config().DATABASE, MOST_NAMES)
        paused = operations.pause_queue(name, person_of(options), reason)
        self.stdout.write(f"The queue {name!r} {'is paused' if paused else 'was paused before'}.")
        if name not in known:
            names = ", ".join(map(repr, known)) or "none"
            self.stderr.write(f"No job has been in a queue of this name lately. Those known: {names}.")
