from __future__ import annotations

import json
import time
from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand

from django_pgjobs import store
from django_pgjobs.conf import config

WINDOW = timedelta(minutes=5)
INTERVAL = 2.0  # seconds between two looks with --watch

_COLUMNS = ("queue", "queued", "due", "oldest due", "processing", "failed", "done/min", "failed/min", "")


class Command(BaseCommand):
    help = "Show what waits, runs and fails in each queue, and which workers are alive."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="One JSON object instead of a table.")
        parser.add_argument("--watch", action="store_true", help="Look again every two seconds.")

    def handle(self, *, watch: bool, **options: Any) -> None:
        try:
            while True:
                self._show(as_json=options["json"], clear=watch and self.stdout.isatty())
                if not watch:
                    return
                time.sleep(INTERVAL)
        except KeyboardInterrupt:
            pass

    def _show(self, *, as_json: bool, clear: bool) -> None:
        with store.own_transaction(config().DATABASE) as cursor:
            period, queues = store.queue_stats(cursor, WINDOW)
            workers = [worker for worker in store.workers(cursor) if worker.is_alive]
        if as_json:
            self.stdout.write(
                json.dumps(
                    {
                        "window_seconds": round(period, 3),
                        "queues": [queue._asdict() for queue in queues],
                        "workers": [worker._asdict() | {"id": str(worker.id)} for worker in workers],
                    }
                )
            )
            return
        if clear:
            self.stdout.write("\x1b[2J\x1b[H", ending="")
        self._write_table([_COLUMNS, *(_row(queue, period / 60) for queue in queues)])
        for worker in workers:
            self.stdout.write(
                f"worker {worker.name} {worker.state}, {worker.running} jobs for {worker.slots} slots,"
                f" serves {worker.serves}, seen {worker.silent_for:.0f} s ago"
            )
        if not workers:
            self.stdout.write("No worker is alive. Start one with: manage.py runjobs")

    def _write_table(self, rows: list[tuple[str, ...]]) -> None:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, *figures in rows:
            cells = [name.ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(figures, widths[1:], strict=True)]
            self.stdout.write("  ".join(cells).rstrip())


def _row(queue: store.QueueStats, minutes: float) -> tuple[str, ...]:
    return (
        queue.queue_name,
        queue.shown("queued"),
        queue.shown("due"),
        "" if queue.oldest_due_age is None else f"{queue.oldest_due_age:.0f} s",
        queue.shown("processing"),
        queue.shown("failed"),
        f"{queue.completed_lately / minutes:.1f}",
        f"{queue.failed_lately / minutes:.1f}",
        "paused" if queue.paused else "",
    )
