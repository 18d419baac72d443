from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from django_pgjobs import execution, maintenance, store
from django_pgjobs.conf import config
from django_pgjobs.management.arguments import duration


class Command(BaseCommand):
    help = (
        "Queue lost jobs again: those whose worker has been silent for longer than the lease. Safe at any"
        " time, beside workers, and twice at once."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--timeout",
            type=duration,
            default=maintenance.BARE_TIMEOUT,
            metavar="SECONDS",
            help="The age at which claims without a token are lost, those of clients that use bare SQL"
            " (default: 10m). Claims of workers go by LEASE.",
        )
        parser.add_argument("--dry-run", action="store_true", help="Say what would be done.")

    def handle(self, *, timeout: Any, dry_run: bool, **options: Any) -> None:
        total = maintenance.Swept()
        while True:
            with store.own_transaction(config().DATABASE) as cursor:
                swept = maintenance.sweep(cursor, timeout=timeout, dry_run=dry_run)
            for claim, verdict in swept.settled:
                execution.announce(claim, verdict.event, None, verdict.error)
            total += swept
            if dry_run or swept.total < maintenance.BATCH_SIZE:
                break
        self.stdout.write(f"{'Would be done: ' if dry_run else ''}{total}")
