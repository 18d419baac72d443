from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import Error

from django_pgjobs import doctor
from django_pgjobs.conf import config


class Command(BaseCommand):
    help = (
        "Tell what is wrong with the queue, its workers and its database, and what to do about it. Exits with"
        " 0 if nothing is, 1 for warnings, 2 for errors."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="One JSON object instead of sentences.")

    def handle(self, **options: Any) -> None:
        try:
            alias = config().DATABASE
            found = doctor.examine(alias)
        except ImproperlyConfigured as error:
            raise CommandError(str(error), returncode=2) from error
        except Error as error:
            raise CommandError(
                f"The queue's database {alias!r} could not be asked: {str(error).strip()}", returncode=2
            ) from error
        if options["json"]:
            self.stdout.write(json.dumps({"database": alias, "findings": [_as_object(one) for one in found]}))
        else:
            self._show(found)
        if found:
            sys.exit(max(finding.severity for finding in found))

    def _show(self, found: list[doctor.Finding]) -> None:
        for alike in doctor.grouped(found):
            for finding in alike:
                style = self.style.ERROR if finding.severity is doctor.Severity.ERROR else self.style.WARNING
                severity = style(finding.severity.name.lower())
                self.stdout.write(f"{severity}: {finding.problem} [{finding.name}]")
            self.stdout.write(f"    {alike[0].advice}")
        if not found:
            self.stdout.write("Nothing is wrong.")


def _as_object(finding: doctor.Finding) -> dict[str, str]:
    return finding._asdict() | {"severity": finding.severity.name.lower()}
