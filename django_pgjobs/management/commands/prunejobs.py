from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from django_pgjobs import maintenance, store
from django_pgjobs.conf import config
from django_pgjobs.lifecycle import Status
from django_pgjobs.management.arguments import as_duration, at_least, duration
from django_pgjobs.management.stopping import told_to_stop

PRUNABLE = (Status.COMPLETED, Status.FAILED, Status.CANCELLED)


class Command(BaseCommand):
    help = (
        "Delete finished jobs that are older than a limit: by default by COMPLETED_RETENTION (3 days),"
        " FAILED_RETENTION and CANCELLED_RETENTION (kept). Each batch is its own transaction; stop it at any"
        " time."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        for status in PRUNABLE:
            parser.add_argument(
                f"--{status}",
                type=duration,
                metavar="AGE",
                help=f"Delete jobs that have been {status} for longer than this: 90s, 15m, 12h, 3d, 2w.",
            )
        parser.add_argument(
            "--batch-size",
            type=at_least(1),
            default=maintenance.BATCH_SIZE,
            metavar="N",
            help="Rows for each transaction (default: %(default)s).",
        )
        parser.add_argument("--dry-run", action="store_true", help="Count what would be deleted.")

    def handle(self, *, batch_size: int, dry_run: bool, **options: Any) -> None:
        ages = maintenance.retentions()
        ages |= {status: options[status] for status in PRUNABLE if options[status] is not None}
        counts = dict.fromkeys(ages, 0)
        with told_to_stop() as stop:
            for status, age in ages.items():
                while not stop.is_set():
                    with store.own_transaction(config().DATABASE) as cursor:
                        if dry_run:
                            counts[status] = store.prunable(cursor, status, age=age)
                            break
                        deleted = store.prune(cursor, status, age=age, limit=batch_size)
                    counts[status] += deleted
                    self._show(counts)
                    if deleted < batch_size:
                        break
        self._summarise(ages, counts, dry_run=dry_run, stopped=stop.is_set())

    def _show(self, counts: dict[Status, int]) -> None:
        if self.stdout.isatty():
            self.stdout.write(f"\r{sum(counts.values()):,} deleted", ending="")
            self.stdout.flush()

    def _summarise(
        self, ages: dict[Status, Any], counts: dict[Status, int], *, dry_run: bool, stopped: bool
    ) -> None:
        parts = [
            f"{counts[status]:,} {status} (older than {as_duration(ages[status])})"
            if status in ages
            else f"{status} kept"
            for status in PRUNABLE
        ]
        if self.stdout.isatty() and not dry_run:
            self.stdout.write("\r", ending="")
        verb = "Would delete" if dry_run else "Deleted"
        self.stdout.write(f"{verb}: {', '.join(parts)}.{' Stopped before the end.' if stopped else ''}")
