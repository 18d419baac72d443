"""Each check fires where it should, says what is wrong, and is listed in the reference."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.core.checks import CheckMessage
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import OperationalError, connection, connections, transaction
from django.test.utils import override_settings
from django.utils import timezone

from django_pgjobs import checks, database, store
from django_pgjobs.conf import default_processes
from django_pgjobs.models import BackgroundWorker
from tests.factories import make_job

ROOT = Path(__file__).parent.parent


def found(*messages: CheckMessage) -> list[tuple[str, str]]:
    return [((message.id or "").removeprefix("django_pgjobs."), message.msg) for message in messages]


def settings_found(given: Any) -> list[tuple[str, str]]:
    with override_settings(PGJOBS=given):
        problems = checks.check_settings()
    assert all(problem.hint for problem in problems)
    return found(*problems)


def test_good_settings_pass() -> None:
    assert settings_found({"LEASE": 30, "COMPLETED_RETENTION": None}) == []
    assert checks.check_alias() == []


def test_e001_settings_that_are_no_dictionary() -> None:
    assert settings_found(["LEASE"]) == [("E001", "PGJOBS must be a dictionary, not list.")]


def test_e002_every_unknown_setting_with_the_nearest_known_one() -> None:
    assert settings_found({"LEASES": 1, "lease": 2}) == [
        ("E002", "PGJOBS has no setting 'LEASES'. Did you mean 'LEASE'?"),
        ("E002", "PGJOBS has no setting 'lease'. Did you mean 'LEASE'?"),
    ]
    assert [id for id, _ in settings_found({7: 1})] == ["E002"]


def test_e003_values_of_a_wrong_kind() -> None:
    assert settings_found({"LEASE": "1 minute", "MAX_ATTEMPTS": True}) == [
        ("E003", "PGJOBS['LEASE'] must be a number of seconds or a timedelta, not '1 minute'."),
        ("E003", "PGJOBS['MAX_ATTEMPTS'] must be a whole number, not True."),
    ]


def test_e004_values_that_cannot_work_also_beside_others() -> None:
    problems = settings_found({"MAX_ATTEMPTS": 0, "LEASE": -1, "TYPO": 1, "DATABASE": "nope"})
    assert [id for id, _ in problems] == ["E002", "E005", "E004", "E004"]
    assert problems[2][1].startswith("PGJOBS: MAX_ATTEMPTS is 0; it must be ")
    assert problems[3][1].startswith("PGJOBS: LEASE is ")


def test_e013_a_context_hook_that_is_not_there() -> None:
    (problem,) = settings_found({"CONTEXT": "tests.nowhere"})
    assert problem[0] == "E013"
    assert problem[1].startswith("PGJOBS['CONTEXT'] is 'tests.nowhere', which cannot be imported: ")
    assert settings_found({"CONTEXT": "tests.context_hook"}) == []


def test_e014_what_is_to_be_called_and_is_not_there() -> None:
    (problem,) = settings_found({"ON_DEAD_LETTER": "tests.nowhere.note"})
    assert problem[0] == "E014"
    assert problem[1].startswith(
        "PGJOBS['ON_DEAD_LETTER'] is 'tests.nowhere.note', which cannot be imported: "
    )
    assert settings_found({"ON_DEAD_LETTER": "tests.alarms.not_callable"}) == [
        ("E014", "PGJOBS['ON_DEAD_LETTER'] is 'tests.alarms.not_callable', which cannot be called.")
    ]
    assert settings_found({"ON_DEAD_LETTER": "django_pgjobs.alerts.mail_admins"}) == []


def test_e015_traces_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "django_pgjobs.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    (problem,) = settings_found({"TRACING": True})
    assert problem[0] == "E015"
    assert problem[1].startswith("PGJOBS['TRACING'] is True, which needs the extra django-pgjobs[opentelem")
    assert settings_found({"TRACING": False}) == []


def test_e005_an_alias_that_does_not_exist() -> None:
    assert settings_found({"DATABASE": "nope"}) == [
        ("E005", "PGJOBS: DATABASE is 'nope', which is not an alias in DATABASES.")
    ]
    with override_settings(PGJOBS={"DATABASE": "nope"}):
        assert checks.check_alias() == []
        assert checks.check_database(databases=["default"]) == []


def test_e010_options_of_a_task_backend() -> None:
    assert found(*checks.check_task_backend("default", ["this cannot work."])) == [
        ("E010", "TASKS['default']: this cannot work.")
    ]
    assert checks.check_task_backend("default", []) == []


def test_e011_a_task_backend_without_the_app() -> None:
    with override_settings(INSTALLED_APPS=[]):
        assert found(*checks.check_task_backend("default", [])) == [
            ("E011", "TASKS['default'] uses the backend of django_pgjobs, which is not installed as an app.")
        ]


def test_w007_results_of_tasks_that_are_gone_at_once() -> None:
    with override_settings(PGJOBS={"COMPLETED_RETENTION": 0}):
        ((id, text),) = found(*checks.check_task_backend("default", []))
    assert id == "W007"
    assert text.startswith(
        "TASKS['default']: with PGJOBS['COMPLETED_RETENTION'] zero, the result of a task is"
    )
    with override_settings(PGJOBS={"NONSENSE": 0}):
        assert checks.check_task_backend("default", []) == []


def test_e006_an_engine_that_is_not_postgres(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections["default"], "vendor", "sqlite")
    ((id, text),) = found(*checks.check_alias())
    assert id == "E006"
    assert text.startswith("The queue's database 'default' is not PostgreSQL; its ENGINE is ")
    assert checks.check_database(databases=["default"]) == []


def test_e007_psycopg_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django.db.backends.postgresql.psycopg_any.is_psycopg3", False)
    assert found(*checks.check_alias()) == [
        ("E007", "Django reaches the queue's database 'default' through psycopg 2.")
    ]


class AwayRouter:
    """Keeps every table on `default`."""

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "default"

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return db == "default"


class BanishingRouter(AwayRouter):
    """Leads writes to `other`, where the tables may not be."""

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "other"


@override_settings(PGJOBS={"DATABASE": "other"})
def test_w001_another_database_without_a_router_that_keeps_the_tables_there() -> None:
    expected = [("W001", "The queue lives in 'other', but the routers lead its models to 'default'.")]
    assert found(*checks.check_alias()) == expected
    with override_settings(DATABASE_ROUTERS=[AwayRouter()]):
        assert found(*checks.check_alias()) == expected
    with override_settings(DATABASE_ROUTERS=[BanishingRouter()]):
        assert found(*checks.check_alias()) == [
            ("W001", "The queue lives in 'other', but the routers do not allow its tables there.")
        ]
    with override_settings(DATABASE_ROUTERS=["django_pgjobs.router.Router"]):
        assert checks.check_alias() == []


def test_w010_an_alias_without_autocommit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections["default"].settings_dict, "AUTOCOMMIT", False)
    ((id, text),) = found(*checks.check_alias())
    assert id == "W010"
    assert text.startswith("AUTOCOMMIT of the queue's database 'default' is off: atomic jobs never complete")


@override_settings(PGJOBS={"LISTEN_DATABASE": "other"})
def test_e012_listening_on_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections["other"], "vendor", "sqlite")
    assert found(*checks.check_alias()) == [
        ("E012", "PGJOBS['LISTEN_DATABASE'] is 'other', which is not PostgreSQL.")
    ]


@pytest.mark.parametrize("alias", ["nope", None, 7, ["other"]], ids=str)
def test_an_alias_to_listen_on_that_cannot_be_one_breaks_no_check(alias: Any) -> None:
    with override_settings(PGJOBS={"LISTEN_DATABASE": alias}):
        assert checks.check_alias() == []


# With a database


def database_found(*statements: str) -> list[tuple[str, str]]:
    """What the check says after `statements`, which are rolled back."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
        problems = checks.check_database(databases=["default"])
        transaction.set_rollback(True)
    assert all(problem.hint for problem in problems)
    return found(*problems)


@pytest.mark.django_db
def test_a_migrated_database_passes() -> None:
    assert database_found() == []


@pytest.mark.django_db
def test_e008_a_server_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(connections["default"]), "pg_version", 140011)
    assert database_found() == [
        ("E008", "The queue's database 'default' is PostgreSQL 14, which is too old.")
    ]


@pytest.mark.django_db
def test_e009_a_database_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(alias: str) -> None:
        raise OperationalError("connection refused\n")

    monkeypatch.setattr(store, "catalog", refuse)
    assert database_found() == [
        ("E009", "The queue's database 'default' could not be asked: connection refused")
    ]


@pytest.mark.django_db
def test_w002_no_table() -> None:
    assert database_found("DROP TABLE background_jobs") == [
        ("W002", "The table background_jobs is missing in the database 'default'.")
    ]


@pytest.mark.django_db
@pytest.mark.parametrize("statement", ["DROP TABLE background_jobs", "DROP INDEX idx_jobs_finished"])
def test_migrate_is_not_told_to_run_migrate(monkeypatch: pytest.MonkeyPatch, statement: str) -> None:
    monkeypatch.setattr(sys, "argv", ["manage.py", "migrate", "--verbosity", "0"])
    assert database_found(statement) == []


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("DISABLE TRIGGER background_jobs_inserted", "the trigger background_jobs_inserted is"),
        ("DISABLE TRIGGER USER", "the triggers background_jobs_inserted, background_jobs_requeued are"),
        ("ENABLE REPLICA TRIGGER background_jobs_requeued", "the trigger background_jobs_requeued is"),
    ],
)
def test_w003_triggers_missing_or_disabled(statement: str, what: str) -> None:
    text = f"In the database 'default', {what} of background_jobs missing or disabled"
    expected = [("W003", f"{text}: workers find jobs by polling only.")]
    assert database_found(f"ALTER TABLE background_jobs {statement}") == expected
    assert database_found("DROP TRIGGER background_jobs_inserted ON background_jobs")[0][0] == "W003"


@pytest.mark.django_db
def test_w004_other_statuses() -> None:
    ((id, text),) = database_found("ALTER TYPE job_status ADD VALUE 'resting' AFTER 'queued'")
    assert id == "W004"
    assert text == (
        "In the database 'default', the statuses are queued, resting, processing, failed, completed,"
        " cancelled; they should be queued, processing, failed, completed, cancelled."
    )


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("DROP INDEX idx_jobs_finished", "the index idx_jobs_finished is"),
        (
            "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'idx_jobs_queued_run_at'::regclass",
            "the index idx_jobs_queued_run_at is",
        ),
        (
            "DROP INDEX uq_jobs_unique_key, idx_jobs_processing",
            "the indexes idx_jobs_processing, uq_jobs_unique_key are",
        ),
    ],
)
def test_w005_indexes_missing_or_invalid(statement: str, what: str) -> None:
    text = f"In the database 'default', {what} of background_jobs missing or invalid"
    assert database_found(statement) == [("W005", f"{text}: claiming and sweeping read the whole table.")]


@pytest.mark.django_db
def test_w006_storage_settings_missing() -> None:
    reset = "ALTER TABLE background_jobs RESET (fillfactor, autovacuum_vacuum_scale_factor)"
    ((id, text),) = database_found(reset)
    assert id == "W006"
    assert text == (
        "In the database 'default', background_jobs lacks the storage settings"
        " autovacuum_vacuum_scale_factor, fillfactor: dead rows will slow its workers down."
    )


def make_host(processes: int, threads: int, async_slots: int = 0, silent: int = 0) -> None:
    BackgroundWorker.objects.create(
        hostname="web-1",
        pid=1,
        processes=processes,
        threads=threads,
        async_slots=async_slots,
        lease=timedelta(seconds=60),
        version="1",
        last_seen_at=timezone.now() - timedelta(seconds=silent),
    )


LARGEST = 2**31 - 1


def allowed() -> int:
    """How many connections the server takes."""
    names = ["max_connections", "superuser_reserved_connections", "reserved_connections"]
    with connection.cursor() as cursor:
        cursor.execute("SELECT name, setting::integer FROM pg_settings WHERE name = ANY (%s)", [names])
        found = dict(cursor.fetchall())
    return int(found.pop("max_connections") - sum(found.values()))


@pytest.mark.django_db
def test_w008_live_hosts_that_may_need_more_connections_than_there_are() -> None:
    most = allowed()
    make_host(1, most - 3, async_slots=20)  # one for all its async jobs, and two of the host
    make_host(100, 100, silent=3600)
    assert database_found() == []
    make_host(1, 1)
    ((id, text),) = database_found()
    assert id == "W008"
    assert text == (
        f"The server of the queue's database 'default' takes {most} connections (its max_connections, less"
        f" those that are reserved), but the 2 worker hosts that are alive may need {most + 3}."
    )
    make_host(LARGEST, LARGEST, LARGEST)
    assert str(LARGEST * (LARGEST + 1) + 2 + most + 3) in database_found()[0][1]


@pytest.mark.django_db
@pytest.mark.parametrize("limited", ["role", "database"])
def test_w008_a_limit_of_the_role_or_the_database_with_no_host_alive(limited: str) -> None:
    name = connection.settings_dict["NAME"]
    what = {"role": "ROLE tests_limited", "database": f'DATABASE "{name}"'}[limited]
    ((id, text),) = database_found(
        "CREATE ROLE tests_limited",
        "GRANT SELECT ON ALL TABLES IN SCHEMA public TO tests_limited",
        f"ALTER {what} CONNECTION LIMIT 5",
        "SET LOCAL SESSION AUTHORIZATION tests_limited",
    )
    assert id == "W008"
    assert text == (
        f"The server of the queue's database 'default' takes 5 connections (the CONNECTION LIMIT of the"
        f" {limited}), but a worker host may need {5 * default_processes() + 2}."
    )


@pytest.mark.django_db
def test_limits_of_the_role_and_the_database_do_not_bind_a_superuser() -> None:
    name = connection.settings_dict["NAME"]
    assert database_found(f'ALTER DATABASE "{name}" CONNECTION LIMIT 5') == []


@pytest.mark.django_db
def test_w009_a_pooler_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "is_pooled", lambda connection: True)
    make_host(100, 100)  # the pooler has limits of its own
    ((id, text),) = database_found()
    assert id == "W009"
    assert text.startswith("The queue's database 'default' is reached through a pooler: workers poll each ")
    for vouched in ({"LISTEN": False}, {"LISTEN_DATABASE": "default"}):
        with override_settings(PGJOBS=vouched):
            assert database_found() == []


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch, settings: Any, db: None) -> dict[str, Any]:
    """An alias that listening is done on: the parameters of the queue's database, to be changed."""
    parameters = connections["default"].get_connection_params()
    monkeypatch.setattr(connections["other"], "get_connection_params", lambda: dict(parameters))
    settings.PGJOBS = {"LISTEN_DATABASE": "other"}
    return parameters


def test_w009_a_pooler_where_listening_is_done(
    direct: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert database_found() == []
    project = connection.connection.info.backend_pid
    monkeypatch.setattr(database, "is_pooled", lambda one: one.info.backend_pid == project)
    assert database_found() == []
    monkeypatch.setattr(database, "is_pooled", lambda one: True)
    ((id, text),) = database_found()
    assert id == "W009"
    assert text.startswith("PGJOBS['LISTEN_DATABASE'] is 'other', which is reached through a pooler as well:")


@pytest.mark.django_db(databases=["default", "other"])
@override_settings(PGJOBS={"LISTEN_DATABASE": "other"})
def test_w011_listening_on_another_database() -> None:
    text = "PGJOBS['LISTEN_DATABASE'] is 'other', which leads to another database than 'default'"
    assert database_found() == [("W011", f"{text}: workers hear nothing there.")]
    with override_settings(PGJOBS={"LISTEN_DATABASE": "other", "LISTEN": False}):
        assert database_found() == []


def test_w011_listening_on_a_database_that_does_not_exist(direct: dict[str, Any]) -> None:
    direct["dbname"] = "nowhere"
    ((id, text),) = database_found()
    assert id == "W011"
    assert text.startswith("PGJOBS['LISTEN_DATABASE'] is 'other', which could not be asked: connection")
    assert 'database "nowhere" does not exist' in text


@pytest.mark.django_db
def test_w012_jobs_whose_function_is_gone() -> None:
    latest = [make_job(job_name="gone") for _ in range(2)][-1]
    make_job("failed", job_name="long gone")
    expected = f"In the database 'default', 'gone', 2 jobs, for example {latest.pk}: no job function has this"
    assert database_found() == [("W012", f"{expected} name.")]


@pytest.mark.django_db
def test_w013_jobs_whose_arguments_no_longer_fit() -> None:
    one = make_job(payload={"args": [1]})
    text = f"In the database 'default', 'tests.jobs.add', job {one.pk}: the arguments do not fit"
    signature = "tests.jobs.add(x: 'int', y: 'int') -> 'int'"
    assert database_found() == [("W013", f"{text} {signature}: missing a required argument: 'y'.")]


@pytest.mark.django_db
def test_at_most_twenty_names_are_reported() -> None:
    for number in range(25):
        make_job(job_name=f"gone {number}")
    assert [id for id, _ in database_found()] == ["W012"] * 20


@pytest.mark.django_db
def test_w014_a_role_that_may_not_read_the_tables() -> None:
    text = "The queue's database 'default' did not tell of its connections and jobs: permission denied for"
    statements = ("CREATE ROLE tests_limited", "SET LOCAL SESSION AUTHORIZATION tests_limited")
    assert database_found(*statements) == [("W014", f"{text} table background_workers")]


@pytest.mark.django_db
def test_w014_a_connection_that_breaks_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(connection: Any) -> bool:
        raise psycopg.InterfaceError("the connection is lost")

    monkeypatch.setattr(database, "is_pooled", broken)
    text = "The queue's database 'default' did not tell of its connections and jobs: the connection is lost"
    assert database_found() == [("W014", text)]


# As people run it


@contextmanager
def no_queries() -> Iterator[None]:
    def refuse(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        raise AssertionError(f"check asked the database: {sql}")

    with connections["default"].execute_wrapper(refuse), connections["other"].execute_wrapper(refuse):
        yield


def test_check_without_a_database_never_asks_one() -> None:
    with no_queries():
        call_command("check", stdout=StringIO())
    assert checks.check_database(databases=None) == []
    assert checks.check_database(databases=["other"]) == []


@pytest.mark.django_db
def test_check_with_a_database_reports_what_it_lacks() -> None:
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("DROP INDEX idx_jobs_finished")
        with pytest.raises(SystemCheckError, match=r"django_pgjobs\.W005"):
            call_command("check", databases=["default"], fail_level="WARNING", stdout=StringIO())
        call_command("check", databases=["default"], stdout=StringIO(), stderr=StringIO())
        transaction.set_rollback(True)


@pytest.mark.parametrize("arguments", [[], ["--database", "default"]])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("{'LEASES': 1}", "django_pgjobs.E002"),
        ("{'LEASE': None}", "django_pgjobs.E003"),
        ("[]", "django_pgjobs.E001"),
        ("{'DATABASE': 'nope'}", "django_pgjobs.E005"),
    ],
)
def test_broken_settings_are_reported_and_crash_nothing(
    given: str, expected: str, arguments: list[str], tmp_path: Path, child_environment: dict[str, str]
) -> None:
    (tmp_path / "broken_settings.py").write_text(
        "from tests.settings import *\n"
        "DATABASE_ROUTERS = ['django_pgjobs.router.Router']\n"
        f"PGJOBS = {given}\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "django", "check", *arguments],
        cwd=ROOT,
        env={
            **child_environment,
            "DJANGO_SETTINGS_MODULE": "broken_settings",
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_the_reference_lists_every_check() -> None:
    source = Path(checks.__file__).read_text()
    numbers = re.findall(r"_(error|warning)\(\s*(\d+),", source)
    ids = {f"django_pgjobs.{'E' if kind == 'error' else 'W'}{int(number):03}" for kind, number in numbers}
    reference = (ROOT / "docs" / "reference" / "checks.md").read_text()
    assert ids == set(re.findall(r"django_pgjobs\.[EW]\d{3}", reference))
    assert len(ids) == 30
    tests = Path(__file__).read_text()
    assert all(f"def test_{id.rpartition('.')[2].lower()}_" in tests for id in ids)


@pytest.mark.parametrize(
    ("given", "debug", "expected"),
    [({"IMMEDIATE": True}, False, True), ({"IMMEDIATE": True}, True, False), ({}, False, False)],
    ids=["on", "in development", "off"],
)
def test_w015_immediate_mode_in_production(given: Any, debug: bool, expected: bool) -> None:
    with override_settings(PGJOBS=given, DEBUG=debug):
        problems = checks.check_immediate()
    text = "PGJOBS['IMMEDIATE'] is on: jobs are run by whoever enqueues them, and not by workers."
    assert found(*problems) == ([("W015", text)] if expected else [])


@pytest.mark.parametrize("options", [[], ["--deploy"]], ids=["check", "check --deploy"])
def test_only_a_check_of_the_deployment_looks_for_immediate_mode(options: list[str]) -> None:
    errors = StringIO()
    with override_settings(PGJOBS={"IMMEDIATE": True}):
        call_command("check", *options, tag=["django_pgjobs"], stdout=StringIO(), stderr=errors)
    assert ("W015" in errors.getvalue()) is bool(options)
