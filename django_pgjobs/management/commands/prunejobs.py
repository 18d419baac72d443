from __future__ import annotations

from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand

from django_pgjobs import maintenance, store
from django_pgjobs.conf import config
from django_pgjobs.lifecycle import Status
from django_pgjobs.management.arguments import as_duration, at_least, duration
from django_pgjobs.management.stopping import told_to_stop

STATUSES = (Status.COMPLETED, Status.FAILED, Status.CANCELLED)
OPERATIONS = "operations"


class Command(BaseCommand):
    help = (
        "Delete finished jobs that are older than a limit: by default by COMPLETED_RETENTION (3 days),"
        " FAILED_RETENTION and CANCELLED_RETENTION (kept). And what people did to many jobs at once, by"
        " OPERATIONS_RETENTION (90 days). Each batch is its own transaction; stop it at any time."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        for status in STATUSES:
            parser.add_argument(
                f"--{status}",
                type=duration,
                metavar="AGE",
                help=f"Delete jobs that have been {status} for longer than this: 90s, 15m, 12h, 3d, 2w.",
            )
        parser.add_argument(
            "--operations",
            type=duration,
            metavar="AGE",
            help="Delete operations that have been finished for longer than this.",
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
        ages: dict[str, timedelta] = dict(maintenance.retentions().items())
        if (age_of_operations := config().OPERATIONS_RETENTION) is not None:
            ages[OPERATIONS] = age_of_operations
        ages |= {what: options[what] for what in (*STATUSES, OPERATIONS) if options[what] is not None}
        counts = dict.fromkeys(ages, 0)
        with told_to_stop() as stop:
            for what, age in ages.items():
                while not stop.is_set():
                    with store.own_transaction(config().DATABASE) as cursor:
                        if dry_run:
                            counts[what] = _prunable(cursor, what, age)
                            break
                        deleted = _prune(cursor, what, age, batch_size)
                    counts[what] += deleted
                    if deleted:
                        self._show(counts)
                    if deleted < batch_size:
                        break
        self._summarise(ages, counts, dry_run=dry_run, stopped=stop.is_set())

    def _show(self, counts: dict[str, int]) -> None:
        if self.stdout.isatty():
            self.stdout.write(f"\r{sum(counts.values()):,} deleted", ending="")
            self.stdout.flush()

    def _summarise(
        self, ages: dict[str, timedelta], counts: dict[str, int], *, dry_run: bool, stopped: bool
    ) -> None:
        parts = [
            f"{counts[what]:,} {what} (older than {as_duration(ages[what])})"
            if what in ages
            else f"{what} kept"
            for what in (*STATUSES, OPERATIONS)
        ]
        if self.stdout.isatty() and not dry_run:
            self.stdout.write("\r", ending="")
        verb = "Would delete" if dry_run else "Deleted"
        self.stdout.write(f"{verb}: {', '.join(parts)}.{' Stopped before the end.' if stopped else ''}")


def _prune(cursor: store.Cursor, what: str, age: timedelta, limit: int) -> int:
    if what == OPERATIONS:
        return store.prune_operations(cursor, age=age, limit=limit)
    return store.prune(cursor, Status(what), age=age, limit=limit)


def _prunable(cursor: store.Cursor, what: str, age: timedelta) -> int:
    if what == OPERATIONS:
        return store.prunable_operations(cursor, age=age)
    return store.prunable(cursor, Status(what), age=age)
