from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import Error

from django_pgjobs import deploy, health, store
from django_pgjobs.conf import config
from django_pgjobs.endpoint import Unavailable
from django_pgjobs.management.arguments import at_least, file_path


class Command(BaseCommand):
    help = (
        "Tell whether a worker on this machine is alive, by its health file; or, with --deploy, whether this"
        " code can run the jobs that are in the table. Exits with 1 if not."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument("--health-file", type=file_path, metavar="PATH", help="As given to runjobs.")
        add = parser.add_argument
        add("--ready", action="store_true",
            help="With --health-file: tell whether it is ready to run jobs, too.")  # fmt: skip
        what.add_argument("--deploy", action="store_true",
            help="Tell whether the functions of all jobs exist here and take their arguments.")  # fmt: skip
        add("--limit", type=at_least(1), default=deploy.LIMIT, metavar="N",
            help="With --deploy: how many jobs to look at, of those that come first and those that come last"
            " in each queue and priority (default: %(default)s).")  # fmt: skip
        add("--json", action="store_true", help="With --deploy: one JSON object instead of sentences.")

    def handle(self, *, health_file: Path | None, ready: bool, limit: int, **options: Any) -> None:
        if health_file is None:
            if ready:
                raise CommandError("--ready goes with --health-file.")
            self._check_deploy(limit, as_json=options["json"])
            return
        try:
            beat = health.read(health_file)
        except Unavailable as error:
            raise CommandError(str(error)) from error
        if why_not := beat.why_not_ready() if ready else beat.why_not_alive():
            raise CommandError(why_not)
        self.stdout.write(f"Worker {beat.pid} is {'ready' if ready else 'alive'}.")

    def _check_deploy(self, limit: int, *, as_json: bool) -> None:
        try:
            alias = config().DATABASE
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        try:
            if not store.catalog(alias).exists:
                self._show(alias, _NOTHING, _NOTHING, as_json=as_json, is_migrated=False)
                return
            with store.own_transaction(alias) as cursor:
                live = deploy.look(cursor, limit)
                dead = deploy.look_at_dead_letters(cursor, limit)
        except Error as error:
            raise CommandError(
                f"The queue's database {alias!r} could not be asked: {str(error).strip()}"
            ) from error
        self._show(alias, live, dead, as_json=as_json)
        if live.findings:
            sys.exit(1)

    def _show(
        self, alias: str, live: deploy.Report, dead: deploy.Report, *, as_json: bool, is_migrated: bool = True
    ) -> None:
        if as_json:
            shown = {
                "database": alias,
                "migrated": is_migrated,
                "live": _as_object(live),
                "dead_letters": _as_object(dead),
            }
            self.stdout.write(json.dumps(shown))
            return
        if not is_migrated:
            self.stdout.write(
                f"The table background_jobs is missing in the database {alias!r}, so there are no jobs yet."
                f" Run: manage.py migrate django_pgjobs --database {alias}"
            )
            return
        self._write("waiting or running", live)
        self._write("dead letter", dead)
        wrong = sum(finding.jobs for finding in live.findings)
        can = f"cannot run {wrong:,} of them" if wrong else "knows their names and takes their arguments"
        some = "" if live.is_complete else ", of more,"
        self.stdout.write(f"Looked at {live.looked_at:,} jobs{some} that wait or run: this code {can}.")

    def _write(self, what: str, report: deploy.Report) -> None:
        for finding in report.findings:
            self.stdout.write(f"{what}: {finding.subject}: {finding.problem}\n    {finding.advice}")


_NOTHING = deploy.Report(looked_at=0, is_complete=True, findings=[])


def _as_object(report: deploy.Report) -> dict[str, Any]:
    return report._asdict() | {"findings": [finding._asdict() for finding in report.findings]}
