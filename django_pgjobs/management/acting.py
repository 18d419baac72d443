"""What `retryjobs` and `discardjobs` have in common: the filter, who wants it and why, and how it is told."""

from __future__ import annotations

import getpass
import sys
from argparse import ArgumentParser
from datetime import datetime, timedelta
from typing import Any

from django.apps import apps
from django.core.management.base import BaseCommand, CommandError

from django_pgjobs import operations, store
from django_pgjobs.conf import config
from django_pgjobs.lifecycle import Status
from django_pgjobs.management.arguments import at_least, instant, row_id
from django_pgjobs.management.stopping import told_to_stop
from django_pgjobs.models import BackgroundOperation
from django_pgjobs.operations import AT_ONCE, Act, Filter, Manner, Person


def add_filter(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("ids", nargs="*", type=row_id, metavar="ID", help="The id of a job. Repeat it for several.")
    add("--queue", metavar="NAME", help="Jobs of this queue.")
    add("--job", metavar="NAME", help="Jobs of this job function, by its registered name.")
    add("--fingerprint", metavar="TEXT", help="Jobs whose error has this fingerprint.")
    add("--exception", metavar="CLASS", help="Jobs that failed with an exception of this class.")
    add(
        "--text", metavar="TEXT", help="Jobs with this somewhere in their last error, or as their unique key."
    )
    add("--unique-key", metavar="KEY", help="Jobs with this unique key.")
    add(
        "--since",
        type=instant,
        metavar="TIME",
        help="Jobs that have failed since then: 2026-01-31T12:00, or how long ago: 90s, 15m, 12h, 3d.",
    )
    add("--until", type=instant, metavar="TIME", help="Jobs that had failed by then.")
    add("--attempts-from", type=at_least(0), metavar="N", help="Jobs that made at least this many attempts.")
    add("--attempts-to", type=at_least(0), metavar="N", help="Jobs that made at most this many attempts.")
    add("--all", action="store_true", help="All of them: needed where nothing else is given.")


def add_the_rest(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_person(parser)
    add("--dry-run", action="store_true", help="Say how many match, and change none.")
    add("--background", action="store_true", help="Have a worker do it.")
    add(
        "--resume",
        type=at_least(1),
        metavar="OPERATION",
        help="Go on with what was stopped or has broken off.",
    )


def add_person(parser: ArgumentParser, *, needs_reason: bool = False) -> None:
    parser.add_argument(
        "--reason", required=needs_reason, metavar="TEXT", help="Why, for those who ask later."
    )
    parser.add_argument(
        "--user",
        metavar="NAME",
        help="The user of the site in whose name the history of each job is written. Without, there is none.",
    )


def person_of(options: dict[str, Any]) -> Person:
    """Who wants it: a user of the site, or whoever is at this shell. Raises CommandError."""
    name = options["user"]
    if name is None:
        return Person(f"{_shell_user()} (shell)")
    if not apps.is_installed("django.contrib.auth"):
        raise CommandError("--user is for projects with django.contrib.auth.")
    from django.contrib.auth import get_user_model

    model = get_user_model()
    try:
        return Person.of(model._default_manager.get_by_natural_key(name))
    except model.DoesNotExist:
        raise CommandError(f"There is no user {name!r}.") from None


def _shell_user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # of a container, say, whose user has no name
        return "somebody"


def filter_of(options: dict[str, Any], status: Status = Status.FAILED) -> Filter:
    """Raises CommandError where there is none, and --all was not given."""
    filter = _checked_filter(
        status=status,
        ids=tuple(options["ids"]),
        queue=options["queue"],
        job=options["job"],
        fingerprint=options["fingerprint"],
        exception=options["exception"],
        text=options["text"],
        unique_key=options["unique_key"],
        since=_instant_of(options["since"]),
        until=_instant_of(options["until"]),
        attempts_from=options["attempts_from"],
        attempts_to=options["attempts_to"],
    )
    if filter.is_open != options["all"]:
        if filter.is_open:
            raise CommandError(f"Say which: give a filter, or --all for every {filter.noun}.")
        raise CommandError("--all goes with no filter.")
    return filter


def _checked_filter(**criteria: Any) -> Filter:
    try:
        return Filter(**criteria)
    except ValueError as error:
        raise CommandError(str(error)) from None


def _instant_of(given: datetime | timedelta | None) -> datetime | None:
    if isinstance(given, timedelta):
        return store.now(config().DATABASE) - given
    return given


def carry_out(
    command: BaseCommand, act: Act, filter: Filter, options: dict[str, Any], manner: Manner = AT_ONCE
) -> None:
    """Do it, have it done, or say what would be done."""
    found = operations.preview(filter, exactly=True)
    if found.is_nothing:
        command.stdout.write(f"No {filter.noun} matches.")
        return
    if options["dry_run"]:
        command.stdout.write(f"{found} {filter}".rstrip() + f" would be {act.done}.")
        return
    reason = options["reason"] or ""
    operation = operations.begin(act, filter, person_of(options), reason=reason, manner=manner, found=found)
    command.stdout.write(f"{operation}: {found} match{'es' if found.number == 1 else ''}.")
    _go_on(command, operation, options)


def resume(command: BaseCommand, act: Act, options: dict[str, Any]) -> None:
    """Go on with an operation. Raises CommandError where there is nothing to go on with."""
    number = options["resume"]
    operation = BackgroundOperation.objects.using(config().DATABASE).filter(pk=number, act=act.name).first()
    if operation is None:
        raise CommandError(f"There is no operation {number} of this kind.")
    if operation.state == operations.FINISHED:
        raise CommandError(f"{operation} is finished: {operations.told(operation)}")
    operations.resume(operation, person_of(options))
    _go_on(command, operation, options)


def _go_on(command: BaseCommand, operation: BackgroundOperation, options: dict[str, Any]) -> None:
    if options["background"] or Manner.of_json(operation.manner).per_minute is not None:
        operations.hand_over(operation)
        queue = config().OPERATIONS_QUEUE
        command.stdout.write(f"A worker that serves the queue {queue!r} carries it on.")
        return
    with told_to_stop() as stop:
        for _ in operations.steps(operation.pk):
            operation.refresh_from_db()
            if command.stdout.isatty():
                command.stdout.write(f"\r{operations.gone_through(operation):,} done", ending="")
                command.stdout.flush()
            if stop.is_set():
                operations.stop(operation, person_of(options))
    operation.refresh_from_db()
    if command.stdout.isatty():
        command.stdout.write("\r", ending="")
    command.stdout.write(f"{operation} {_STATES[operation.state]}: {operations.told(operation)}")
    if operation.state == operations.STOPPED:
        command.stdout.write(f"Go on with: --resume {operation.pk}")
    if operation.failed:
        sys.exit(1)


_STATES = {
    operations.RUNNING: "is carried on by somebody else",
    operations.STOPPED: "was stopped",
    operations.FINISHED: "is finished",
}
