"""System checks. A number is never given to another check; docs/reference/checks.md lists them all.

Without `--database` nothing here talks to a database. With it, what the database lacks is only warned about.
`migrate` runs these checks first; it is told nothing of what it may be about to put right.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, Error, connections, router
from django.utils.module_loading import import_string

from . import deploy, jobs, store
from .conf import DEFAULT_THREADS, SETTING, Config, config, default_processes, read
from .context import load_hook
from .lifecycle import Status

POSTGRES = 150000  # the oldest server that will do
TRIGGERS = {"background_jobs_inserted", "background_jobs_requeued"}
STORAGE = {"fillfactor", "autovacuum_vacuum_scale_factor", "autovacuum_vacuum_threshold"}
MOST_FINDINGS = 20  # about jobs that this code cannot run
FROM_EACH_END = 1000  # jobs of each queue and priority that are looked at, since migrate asks as well


def register() -> None:
    """Called once, by the app."""
    checks.register(check_settings, "django_pgjobs")
    checks.register(check_alias, "django_pgjobs")
    checks.register(check_database, checks.Tags.database)
    checks.register(check_immediate, "django_pgjobs", deploy=True)
    with suppress(ImportError):  # of Django 5.2
        import_module("django.tasks")  # which then has the backends in TASKS checked


def check_settings(**kwargs: Any) -> list[CheckMessage]:
    """PGJOBS can be read, and its values can work."""
    given = getattr(settings, SETTING, {})
    try:
        read({} if isinstance(given, dict) else given)
    except ImproperlyConfigured as error:
        return [_error(1, str(error), f"Make it a dictionary, {SETTING} = {{}}, or leave it out.")]
    problems: list[CheckMessage] = []
    readable = {}
    known = [field.name for field in dataclasses.fields(Config)]
    for name, value in given.items():
        try:
            read({name: value})
        except ImproperlyConfigured as error:
            if name in known:
                problems.append(_error(3, str(error), "Give it a value of this kind, or leave it out."))
            else:
                problems.append(_error(2, str(error), f"Correct the name, or remove it from {SETTING}."))
        else:
            readable[name] = value
    for name, problem in read(readable).problems():
        text = f"{SETTING}: {problem}"
        if name == "DATABASE":
            aliases = ", ".join(map(repr, settings.DATABASES))
            problems.append(_error(5, text, f"Name one of {aliases}, or define this one in DATABASES."))
        else:
            problems.append(_error(4, text, "Correct the value, or leave it out to get its default."))
    if (path := readable.get("CONTEXT")) is not None:
        try:
            load_hook(path)
        except ImproperlyConfigured as error:
            problems.append(_error(13, str(error), "Name a module or object with capture() and restore()."))
    if (path := readable.get("ON_DEAD_LETTER")) is not None:
        try:
            found = import_string(path)
        except ImportError as error:
            found, why = None, f"cannot be imported: {error}"
        else:
            why = "cannot be called"
        if not callable(found):
            text = f"{SETTING}['ON_DEAD_LETTER'] is {path!r}, which {why}."
            problems.append(_error(14, text, "Name a function, such as 'django_pgjobs.alerts.mail_admins'."))
    if readable.get("TRACING"):
        try:
            import_module(f"{__package__}.tracing")
        except ImproperlyConfigured as error:
            problems.append(_error(15, str(error), "Install it, or leave TRACING out."))
    return problems


def check_alias(**kwargs: Any) -> list[CheckMessage]:
    """The queue lives in Postgres, reached through psycopg 3; and its models are kept there."""
    alias = _alias()
    if alias is None:
        return []  # check_settings has said so
    engine = settings.DATABASES[alias].get("ENGINE", "")
    if connections[alias].vendor != "postgresql":
        return [
            _error(
                6,
                f"The queue's database {alias!r} is not PostgreSQL; its ENGINE is {engine!r}.",
                f"Use 'django.db.backends.postgresql', or name an alias that does in {SETTING}['DATABASE'].",
            )
        ]
    from django.db.backends.postgresql.psycopg_any import is_psycopg3

    problems: list[CheckMessage] = []
    if not is_psycopg3:
        problems.append(
            _error(
                7,
                f"Django reaches the queue's database {alias!r} through psycopg 2.",
                "Install psycopg 3, for example with: pip install 'psycopg[binary]'.",
            )
        )
    from .models import BackgroundJob

    written = router.db_for_write(BackgroundJob)
    if written != alias:
        problems.append(
            _warning(
                1,
                f"The queue lives in {alias!r}, but the routers lead its models to {written!r}.",
                "Put 'django_pgjobs.router.Router' first in DATABASE_ROUTERS.",
            )
        )
    elif not router.allow_migrate_model(alias, BackgroundJob):
        problems.append(
            _warning(
                1,
                f"The queue lives in {alias!r}, but the routers do not allow its tables there.",
                "Put 'django_pgjobs.router.Router' first in DATABASE_ROUTERS.",
            )
        )
    if not connections[alias].settings_dict["AUTOCOMMIT"]:
        problems.append(
            _warning(
                10,
                f"AUTOCOMMIT of the queue's database {alias!r} is off: atomic jobs never complete, and what"
                " sweepjobs, prunejobs and canceljobs do is not committed.",
                f"Remove AUTOCOMMIT from DATABASES[{alias!r}], and open transactions with atomic().",
            )
        )
    listening = _setting("LISTEN_DATABASE")
    if listening in settings.DATABASES and connections[listening].vendor != "postgresql":
        problems.append(
            _error(
                12,
                f"{SETTING}['LISTEN_DATABASE'] is {listening!r}, which is not PostgreSQL.",
                f"Name an alias that connects to the database of {alias!r}, without a pooler in between.",
            )
        )
    return problems


def check_database(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """The server is recent enough, the table is as the migrations leave it, and workers can do what waits."""
    alias = _alias()
    if alias is None or alias not in (databases or ()) or connections[alias].vendor != "postgresql":
        return []
    try:
        version = connections[alias].pg_version  # type: ignore[attr-defined]
        catalog = store.catalog(alias)
    except DatabaseError as error:
        return [
            _error(
                9,
                f"The queue's database {alias!r} could not be asked: {str(error).strip()}",
                f"See that the server runs, and that DATABASES[{alias!r}] is right.",
            )
        ]
    if version < POSTGRES:
        return [
            _error(
                8,
                f"The queue's database {alias!r} is PostgreSQL {version // 10000}, which is too old.",
                "Upgrade the server to PostgreSQL 15 or newer.",
            )
        ]
    is_migrating = sys.argv[1:2] == ["migrate"]
    problems = [] if is_migrating else list(drift(catalog, alias))
    if not catalog.exists:
        return problems
    try:
        problems += [*_ways_to(alias), *_work_left(alias)]
    except Error as error:
        problems.append(
            _warning(
                14,
                f"The queue's database {alias!r} did not tell of its connections and jobs:"
                f" {str(error).strip()}",
                "See that the role may read the tables of django_pgjobs, and that statements have the time.",
            )
        )
    return problems


def check_immediate(**kwargs: Any) -> list[CheckMessage]:
    """Jobs are left to workers where it matters."""
    if settings.DEBUG or _setting("IMMEDIATE") is not True:
        return []
    return [
        _warning(
            15,
            f"{SETTING}['IMMEDIATE'] is on: jobs are run by whoever enqueues them, and not by workers.",
            "Switch it on in the settings of tests and of development only.",
        )
    ]


def check_task_backend(alias: str, problems: Iterable[str]) -> list[CheckMessage]:
    """What a backend of TASKS has to report, with the problems that it has found in its OPTIONS."""
    reports: list[CheckMessage] = [
        _error(10, f"TASKS[{alias!r}]: {problem}", "Correct it, or remove it from OPTIONS.")
        for problem in problems
    ]
    if not apps.is_installed("django_pgjobs"):
        reports.append(
            _error(
                11,
                f"TASKS[{alias!r}] uses the backend of django_pgjobs, which is not installed as an app.",
                "Add 'django_pgjobs' to INSTALLED_APPS.",
            )
        )
    try:
        deletes_completed = config().deletes_completed
    except ImproperlyConfigured:
        return reports  # check_settings has said so
    if deletes_completed:
        reports.append(
            _warning(
                7,
                f"TASKS[{alias!r}]: with {SETTING}['COMPLETED_RETENTION'] zero, the result of a task is gone"
                " as soon as it has succeeded.",
                "Keep completed jobs for a while, or never ask for the result of a task that succeeds.",
            )
        )
    return reports


def drift(catalog: store.Catalog, alias: str) -> Iterable[CheckMessage]:
    """What the table lacks of what the migrations give it, as the catalog tells."""
    from .models import BackgroundJob

    migrate = f"Run: manage.py migrate django_pgjobs --database {alias}"
    if not catalog.exists:
        yield _warning(2, f"The table background_jobs is missing in the database {alias!r}.", migrate)
        return
    silent = sorted(TRIGGERS.difference(catalog.triggers))
    if silent:
        yield _warning(
            3,
            f"In the database {alias!r}, {_listed('trigger', silent)} of background_jobs missing or disabled:"
            " workers find jobs by polling only.",
            f"{migrate}. If it has been run: ALTER TABLE background_jobs ENABLE TRIGGER {silent[0]}.",
        )
    expected = [status.value for status in Status]
    if catalog.statuses != expected:
        yield _warning(
            4,
            f"In the database {alias!r}, the statuses are {', '.join(catalog.statuses) or 'none at all'};"
            f" they should be {', '.join(expected)}.",
            f"{migrate}. Values may have been changed by hand, or by a newer version of django_pgjobs.",
        )
    meta = BackgroundJob._meta
    indexes = {index.name for index in (*meta.indexes, *meta.constraints) if index.name[:3] != "ck_"}
    unusable = sorted(indexes.difference(catalog.indexes))
    if unusable:
        yield _warning(
            5,
            f"In the database {alias!r}, {_listed('index', unusable)} of background_jobs missing or invalid:"
            " claiming and sweeping read the whole table.",
            f"{migrate}. If it has been run: REINDEX INDEX CONCURRENTLY {unusable[0]}, or create it again.",
        )
    lacking = sorted(STORAGE.difference(option.partition("=")[0] for option in catalog.storage or ()))
    if lacking:
        yield _warning(
            6,
            f"In the database {alias!r}, background_jobs lacks the storage settings {', '.join(lacking)}:"
            " dead rows will slow its workers down.",
            "Set them as the migration 0001_initial does (SET_STORAGE), with ALTER TABLE ... SET.",
        )


def _ways_to(alias: str) -> Iterable[CheckMessage]:
    """What stands between workers and the database: a pooler, or a limit of connections."""
    pooled = _is_pooled(alias)
    listening = _setting("LISTEN_DATABASE")
    if pooled and listening is None and _setting("LISTEN"):
        yield _warning(
            9,
            f"The queue's database {alias!r} is reached through a pooler: workers poll each second instead of"
            " listening, unless it keeps sessions.",
            f"Let {SETTING}['LISTEN_DATABASE'] name an alias that goes past the pooler; or {alias!r} itself,"
            f" if the pooler keeps sessions. {SETTING}['LISTEN'] = False says that polling is meant.",
        )
    if listening in settings.DATABASES and listening != alias and _setting("LISTEN"):
        yield from _listening(listening, alias)
    if not pooled:
        yield from _budget(alias)


def _listening(listening: str, alias: str) -> Iterable[CheckMessage]:
    import psycopg

    from .database import connect, is_pooled

    if connections[listening].vendor != "postgresql":
        return  # check_alias has said so
    try:
        with connect(listening, timeout=5, purpose="check") as connection:
            pooled = is_pooled(connection)
            there = store.place(connection.cursor())
    except psycopg.Error as error:
        yield _warning(
            11,
            f"{SETTING}['LISTEN_DATABASE'] is {listening!r}, which could not be asked: {str(error).strip()}",
            f"See that DATABASES[{listening!r}] is right. Until then, workers poll each second.",
        )
        return
    with connections[alias].cursor() as cursor:
        here = store.place(cursor)
    if here != there:
        yield _warning(
            11,
            f"{SETTING}['LISTEN_DATABASE'] is {listening!r}, which leads to another database than {alias!r}:"
            " workers hear nothing there.",
            f"Name an alias that connects to the database of {alias!r}, without a pooler in between.",
        )
    elif pooled:
        yield _warning(
            9,
            f"{SETTING}['LISTEN_DATABASE'] is {listening!r}, which is reached through a pooler as well:"
            " workers hear nothing there, unless it keeps sessions.",
            "Name an alias that goes past the pooler.",
        )


def _is_pooled(alias: str) -> bool:
    from .database import is_pooled

    wrapper: Any = connections[alias]
    wrapper.ensure_connection()
    with wrapper.wrap_database_errors:
        return is_pooled(wrapper.connection)


def _budget(alias: str) -> Iterable[CheckMessage]:
    with connections[alias].cursor() as cursor:
        found = store.connections_of(cursor)
    limits = {
        "its max_connections, less those that are reserved": found.server,
        "the CONNECTION LIMIT of the role": found.role,
        "the CONNECTION LIMIT of the database": found.database,
    }
    what, least = min(
        ((what, limit) for what, limit in limits.items() if limit is not None), key=lambda pair: pair[1]
    )
    needed, who = found.needed, "the worker host that is alive"
    if found.hosts > 1:
        who = f"the {found.hosts} worker hosts that are alive"
    elif not found.hosts:
        # As runjobs starts one here, with nothing said: one connection is for all async jobs of a process.
        needed, who = default_processes() * (DEFAULT_THREADS + jobs.any_async()) + 2, "a worker host"
    if needed > least:
        yield _warning(
            8,
            f"The server of the queue's database {alias!r} takes {least} connections ({what}), but {who} may"
            f" need {needed}.",
            "Start workers with fewer --processes or --threads, or raise the limit. Web processes need"
            " connections, too.",
        )


def _work_left(alias: str) -> Iterable[CheckMessage]:
    """What this code cannot run of the jobs that are in the table."""
    with store.own_transaction(alias) as cursor:
        findings = deploy.look(cursor, FROM_EACH_END).findings
    hint = "See manage.py checkjobs --deploy."
    for finding in findings[:MOST_FINDINGS]:
        text = f"In the database {alias!r}, {finding.subject}: {finding.problem}"
        if finding.is_known:
            yield _warning(13, text, f"{finding.advice} {hint}")
        else:
            yield _warning(12, text, f"{finding.advice} {hint}")


def _setting(name: str) -> Any:
    """A setting, as far as it can be read; else its default."""
    try:
        return getattr(read({name: getattr(settings, SETTING)[name]}), name)
    except (AttributeError, TypeError, LookupError, ImproperlyConfigured):
        return getattr(Config(), name)


def _alias() -> str | None:
    """The queue's database, where that much can be read."""
    given = getattr(settings, SETTING, {})
    alias = given.get("DATABASE", Config().DATABASE) if isinstance(given, dict) else None
    return alias if isinstance(alias, str) and alias in settings.DATABASES else None


def _listed(what: str, names: Sequence[str]) -> str:
    plural = {"trigger": "triggers", "index": "indexes"}[what]
    return f"the {what} {names[0]} is" if len(names) == 1 else f"the {plural} {', '.join(names)} are"


def _error(number: int, message: str, hint: str) -> CheckMessage:
    return checks.Error(message, hint=hint, id=f"django_pgjobs.E{number:03}")


def _warning(number: int, message: str, hint: str) -> CheckMessage:
    return checks.Warning(message, hint=hint, id=f"django_pgjobs.W{number:03}")
