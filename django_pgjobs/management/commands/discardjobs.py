from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from django_pgjobs.management import acting
from django_pgjobs.operations import DISCARD


class Command(BaseCommand):
    help = (
        "Decide against dead letters, all that match: they become cancelled. Done in small transactions; stop"
        " it at any time."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        acting.add_filter(parser)
        acting.add_the_rest(parser)

    def handle(self, **options: Any) -> None:
        if options["resume"] is not None:
            acting.resume(self, DISCARD, options)
            return
        if not (options["reason"] or "").strip() and not options["dry_run"]:
            raise CommandError("Say why, with --reason: somebody will ask.")
        acting.carry_out(self, DISCARD, acting.filter_of(options), options)
