from __future__ import annotations

from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from django_pgjobs.lifecycle import Status
from django_pgjobs.management import acting
from django_pgjobs.management.arguments import at_least, duration, queue_name
from django_pgjobs.operations import RETRY, Manner


class Command(BaseCommand):
    help = (
        "Queue dead letters again, all that match, with fresh attempts. Done in small transactions; stop it"
        " at any time."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        acting.add_filter(parser)
        add = parser.add_argument
        add(
            "--cancelled",
            action="store_true",
            help="Queue cancelled jobs again, discarded ones among them, instead of dead letters.",
        )
        add("--after", type=duration, metavar="DURATION", help="Let them run in so long, and not now.")
        add("--per-minute", type=at_least(1), metavar="N",
            help="Have a worker queue no more than this many a minute.")  # fmt: skip
        add("--to-queue", type=queue_name, metavar="NAME", help="Put them into this queue.")
        acting.add_the_rest(parser)

    def handle(self, **options: Any) -> None:
        if options["resume"] is not None:
            acting.resume(self, RETRY, options)
            return
        try:
            manner = Manner(
                delay=options["after"] or timedelta(0),
                per_minute=options["per_minute"],
                queue=options["to_queue"],
            )
        except ValueError as error:
            raise CommandError(str(error)) from None
        status = Status.CANCELLED if options["cancelled"] else Status.FAILED
        acting.carry_out(self, RETRY, acting.filter_of(options, status), options, manner)
