from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from django_pgjobs.lifecycle import Status
from django_pgjobs.management import acting
from django_pgjobs.management.arguments import queue_name
from django_pgjobs.operations import PURGE, Filter


class Command(BaseCommand):
    help = (
        "Cancel all jobs that wait in a queue, those that are due later included. Done in small transactions;"
        " stop it at any time."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", nargs="?", type=queue_name, metavar="NAME", help="The name of the queue.")
        acting.add_the_rest(parser)

    def handle(self, *, name: str | None, **options: Any) -> None:
        if options["resume"] is not None:
            acting.resume(self, PURGE, options)
            return
        if name is None:
            raise CommandError("Say which queue.")
        if not (options["reason"] or "").strip() and not options["dry_run"]:
            raise CommandError("Say why, with --reason: somebody will ask.")
        acting.carry_out(self, PURGE, Filter(status=Status.QUEUED, queue=name), options)
