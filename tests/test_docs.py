"""The documents say what the code does: lists, tables, links and examples are held against it.

A comment before a fenced block says what is done with it where the language alone does not:
`<!-- compiled only -->` before Python that needs something which is not here, and in the tutorial the
instructions that `Reader` follows.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.cookiejar
import inspect
import itertools
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import types
import unittest
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.core.management import load_command_class
from django.core.management.base import BaseCommand
from django.db import connection, connections

import django_pgjobs
from django_pgjobs import checks, conf, doctor, exceptions, jobs, payload, sql, store, supervisor, testing
from django_pgjobs.lifecycle import REFUNDED, TRANSITIONS, Event, Status, default_backoff
from django_pgjobs.models import (
    BackgroundJob,
    BackgroundOperation,
    BackgroundQueue,
    BackgroundSchedule,
    BackgroundWorker,
)
from django_pgjobs.testing import drain
from tests.jobs import say
from tests.markdown import DOCS, REFERENCE, ROOT, Block, anchors, blocks, code, section, table, tables
from tests.scratch import scratch_database
from tests.workers import DEADLINE, Workers, descendants, until

TUTORIAL = DOCS / "tutorial" / "first-job.md"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]


# ── The reference ─────────────────────────────────────────────────────────────────────────────────────────


def default_of(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if isinstance(value, timedelta):
        return f"`{value.total_seconds():.0f}` s"
    if isinstance(value, tuple):
        return ", ".join(f"`{json.dumps(each)}`" for each in value)
    return f"`{json.dumps(value)}`" if isinstance(value, str) else f"`{value!r}`"


def kind_of(field: dataclasses.Field[Any]) -> str:
    if field.name.endswith("_BYTES"):
        return "bytes"
    texts = {"DATABASE": "alias", "QUEUE": "queue", "TOKEN": "text"}
    text = texts.get(field.name.rpartition("_")[2], "dotted path")
    kinds = {"str": text, "int": "number", "bool": "bool", "timedelta": "duration", "tuple[str, ...]": "list"}
    optional = " or `None`" if "None" in str(field.type) else ""
    return kinds[str(field.type).removesuffix(" | None")] + optional


def test_settings_lists_every_setting_with_its_default_in_the_order_of_the_code() -> None:
    (rows,) = tables((REFERENCE / "settings.md").read_text())
    expected = [(f"`{one.name}`", kind_of(one), default_of(one)) for one in dataclasses.fields(conf.Config)]
    assert [(row["key"], row["type"], row["default"]) for row in rows] == expected


def test_settings_gives_the_ranges_that_are_enforced(settings: Any) -> None:
    (rows,) = tables((REFERENCE / "settings.md").read_text())
    for row in rows:
        if limits := re.search(r"From ([\d,]+) to ([\d,]+)", row["meaning"]):
            (name,) = code(row["key"])
            least, most = (int(number.replace(",", "")) for number in limits.groups())
            assert not list(conf.read({name: least}).problems()) + list(conf.read({name: most}).problems())
            assert list(conf.read({name: least - 1}).problems()), name
            assert list(conf.read({name: most + 1}).problems()), name


COMMANDS_PAGE = REFERENCE / "commands.md"
COMMANDS = [
    "runjobs", "sweepjobs", "prunejobs", "checkjobs", "canceljobs", "retryjobs", "discardjobs", "pausequeue",
    "resumequeue", "purgequeue", "jobstats", "jobsdoctor",
]  # fmt: skip


def own_options(name: str) -> dict[str, argparse.Action]:
    """The options of a command that are not those of every command, as `--help` shows them."""
    parser = load_command_class("django_pgjobs", name).create_parser("manage.py", name)
    everywhere = {action.dest for action in BaseCommand().create_parser("manage.py", "any")._actions}
    return {
        " ".join([*action.option_strings[-1:], action.metavar or ""]).strip(): action
        for action in parser._actions
        if action.dest not in everywhere
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_lists_every_option_in_the_order_of_help(name: str) -> None:
    rows = tables(section(COMMANDS_PAGE, name))[0]
    assert [code(row["option"])[0] for row in rows] == list(own_options(name))


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_gives_the_defaults_of_the_parser(name: str) -> None:
    defaults = {code(row["option"])[0]: row["default"] for row in tables(section(COMMANDS_PAGE, name))[0]}
    for option, action in own_options(name).items():
        shown = defaults[option]
        if action.nargs == 0:
            assert shown == "off", option
        elif option == "--processes N":
            assert shown == "the processors, at most 4"
            assert action.default == conf.default_processes()
        elif isinstance(action.default, timedelta | int):
            assert action.type is not None
            assert action.type(shown.strip("`")) == action.default, option  # type: ignore[operator]
        elif shown == "required":
            assert action.required
        elif shown in ("all queues", "no limit", "none"):
            assert action.default is None
        else:  # a setting
            assert action.default is None
            assert shown.strip("`") in {field.name for field in dataclasses.fields(conf.Config)}, option


def test_commands_covers_every_command() -> None:
    found = {path.stem for path in (ROOT / "django_pgjobs/management/commands").glob("[!_]*.py")}
    assert found == set(COMMANDS)
    assert [row["command"] for row in table(COMMANDS_PAGE, "Commands")] == [
        f"[{name}](#{name})" for name in COMMANDS
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_says_what_the_help_says(name: str) -> None:
    (row,) = [row for row in table(COMMANDS_PAGE, "Commands") if row["command"].startswith(f"[{name}]")]
    parser = load_command_class("django_pgjobs", name).create_parser("manage.py", name)
    for part in row["what it is for"].rstrip(".").split("; or "):
        assert part in (parser.description or "")
    help_ = parser.format_help()
    for option in own_options(name):
        assert option in help_
    assert all(action.help for action in own_options(name).values()), f"{name} has options without help"


def test_commands_names_the_options_of_every_command() -> None:
    intro = section(COMMANDS_PAGE, "Commands").partition("Beside their own options")[2]
    actions = BaseCommand().create_parser("manage.py", "any")._actions
    names = {name for action in actions for name in action.option_strings if name.startswith("--")}
    assert set(code(intro.partition("\n\n")[0])) == names


@pytest.mark.parametrize(("name", "kind"), [("queues", store.QueueStats), ("workers", store.Worker)])
def test_commands_lists_the_keys_of_jobstats(name: str, kind: Any) -> None:
    column = f"key of `{name}`"
    (rows,) = [rows for rows in tables(section(COMMANDS_PAGE, "jobstats")) if column in rows[0]]
    assert sorted(key for row in rows for key in code(row[column])) == sorted(kind._fields)


def test_statuses_lists_the_statuses_in_order() -> None:
    rows = tables((REFERENCE / "statuses.md").read_text())[0]
    assert [code(row["status"])[0] for row in rows] == [status.value for status in Status]


def test_the_table_of_events_is_that_of_the_code() -> None:
    documented = {
        code(row["event"])[0]: (set(code(row["from"])), code(row["to"])[0])
        for row in table(REFERENCE / "statuses.md", "Events")
    }
    assert documented == {
        event.value: ({status.value for status in before}, after.value)
        for event, (before, after) in TRANSITIONS.items()
    }
    assert list(documented) == [event.value for event in TRANSITIONS]


def test_the_diagram_has_exactly_the_transitions() -> None:
    (diagram,) = blocks(REFERENCE / "statuses.md", "mermaid")
    arrows = re.findall(r"(\S+) --> (\S+): (.+)", diagram.text)
    drawn = {(before, event, after) for before, after, events in arrows for event in events.split(", ")}
    expected = {
        (status.value, event.value, after.value)
        for event, (before, after) in TRANSITIONS.items()
        for status in before
    }
    assert drawn == expected | {("[*]", "enqueue", "queued")}


def test_the_drawing_for_the_site_is_that_of_the_diagram() -> None:
    (diagram,) = blocks(REFERENCE / "statuses.md", "mermaid")
    drawing = (REFERENCE / "statuses.svg").read_text()
    arrows = re.findall(r"(\S+ --> \S+): (.+)", diagram.text)
    assert re.findall(r'<path data-arrow="([^"]+)"', drawing) == [arrow for arrow, _ in arrows]
    assert re.findall(r'<text data-arrow="([^"]+)".*>(.+)</text>', drawing) == arrows
    assert set(re.findall(r"<text x.*>(.+)</text>", drawing)) == {status.value for status in Status}


def test_statuses_says_which_attempts_are_refunded() -> None:
    rows = table(REFERENCE / "statuses.md", "Events")
    assert {code(row["event"])[0] for row in rows if row["the attempt"] == "is refunded"} == REFUNDED


def test_the_table_of_waits_is_the_default_backoff() -> None:
    rows = table(REFERENCE / "statuses.md", "Backoff")
    assert [float(row["seconds"]) for row in rows] == [
        default_backoff(int(row["after attempt"])) for row in rows
    ]
    assert default_backoff(len(rows) + 1) == default_backoff(len(rows))


def test_decorator_lists_the_options_of_job_with_their_defaults() -> None:
    rows = table(REFERENCE / "decorator.md", "Options")
    options = [
        (f"`{parameter.name}`", parameter.default)
        for parameter in inspect.signature(django_pgjobs.job).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    expected = [
        (name, "the dotted path" if name == "`name`" else f"`{default!r}`".replace("'", '"'))
        for name, default in options
    ]
    assert [(row["option"], row["default"]) for row in rows] == expected


def test_decorator_lists_the_options_of_using() -> None:
    (row,) = [
        row
        for row in tables(section(REFERENCE / "decorator.md", "JobFunction"))[0]
        if "f.using" in row["member"]
    ]
    parameters = list(inspect.signature(django_pgjobs.JobFunction.using).parameters)[1:]
    assert code(row["does"])[:-1] == parameters


def test_decorator_gives_the_advice_that_the_error_gives() -> None:
    _, refused = tables(section(REFERENCE / "decorator.md", "Arguments"))
    documented = {}
    for row in refused:
        for name in code(row["refused"]):
            documented[name] = row["advice"]
        if "plain `Enum`" in row["refused"]:
            documented["Enum"] = row["advice"]
    documented["__proxy__"] = documented.pop("gettext_lazy")
    del documented["MAX_PAYLOAD_BYTES"]
    assert documented == payload._ADVICE


def test_errors_lists_what_is_exported() -> None:
    errors, interruptions, wishes = tables((REFERENCE / "errors.md").read_text())
    documented = [code(row["exception"])[0] for row in errors + interruptions + wishes]
    assert sorted(documented) == sorted(exceptions.__all__)
    for row in errors:
        class_ = getattr(exceptions, code(row["exception"])[0])
        assert [base.__name__ for base in class_.__bases__] == code(row["base"])
    assert set(documented) <= set(django_pgjobs.__all__)


@pytest.mark.parametrize("function", ["drain", "run_job", "captured_jobs", "assert_enqueued"])
def test_testing_shows_the_signatures(function: str) -> None:
    lines = section(REFERENCE / "testing.md", function).splitlines()
    (shown,) = [line for line in lines if line.startswith(f"`{function}(")]
    documented = re.findall(r"(?<=, )(\w+)=", shown)
    parameters = inspect.signature(getattr(testing, function)).parameters.values()
    assert documented == [one.name for one in parameters if one.default is not one.empty]


@pytest.mark.parametrize("class_", [testing.Drained, testing.Run], ids=["Drained", "Run"])
def test_testing_lists_the_members(class_: type) -> None:
    (rows,) = [
        rows
        for rows in tables(section(REFERENCE / "testing.md", "What drain returns"))
        if f"member of `{class_.__name__}`" in rows[0]
    ]
    documented = {code(row[f"member of `{class_.__name__}`"])[0].partition("(")[0] for row in rows} - {"len"}
    assert documented == {name for name in vars(class_) if not name.startswith("_")}


def test_testing_lists_the_methods_of_the_mixin() -> None:
    (rows,) = tables(section(REFERENCE / "testing.md", "JobsTestMixin"))
    methods = {code(row["method"])[0]: code(row["function"])[0] for row in rows}
    assert methods == {
        name: function.__name__
        for name, function in inspect.getmembers(testing.JobsTestMixin, inspect.isfunction)
    }


def test_every_check_is_documented() -> None:
    source = Path(inspect.getsourcefile(checks) or "").read_text()
    used = {
        f"{kind[0].upper()}{int(number):03}"
        for kind, number in re.findall(r"_(error|warning)\(\s*(\d+)", source)
    }
    assert used == set(re.findall(r"`django_pgjobs\.([EW]\d{3})`", (REFERENCE / "checks.md").read_text()))


def test_every_finding_is_documented_with_its_severities() -> None:
    used: dict[str, set[str]] = {}
    for name, severities in re.findall(
        r'Finding\(\s*"([a-z-]+)",\s*(Severity\.[^,]+),', inspect.getsource(doctor)
    ):
        used[name] = {severity.lower() for severity in re.findall(r"Severity\.(\w+)", severities)}
    (rows,) = tables((REFERENCE / "findings.md").read_text())
    assert used == {code(row["finding"])[0]: set(row["severity"].split(", ")) for row in rows}


# ── Logs ──────────────────────────────────────────────────────────────────────────────────────────────────

LOGS = REFERENCE / "logs.md"


def log_of_a_job(workers: Workers, folder: Path, settings: Block) -> list[str]:
    """What a worker writes that runs a job which logs "Sent.", with documented settings."""
    for block in blocks(LOGS, "python"):
        if block.instruction == "shop/json_log.py":
            (folder / "shop").mkdir()
            (folder / "shop" / "json_log.py").write_text(block.text)
    (folder / "logging_settings.py").write_text(f"from tests.settings import *\n{settings.text}")
    say.enqueue("Sent.")
    worker = workers.start(
        "--drain",
        environment={"DJANGO_SETTINGS_MODULE": "logging_settings", "PYTHONPATH": f"{folder}:{ROOT}"},
    )
    assert worker.wait() == 0, worker.log.read_text()
    return worker.log.read_text().splitlines()


@pytest.mark.processes
def test_logs_has_the_job_on_each_line_inside_it(workers: Workers, tmp_path: Path) -> None:
    in_lines, _, _ = blocks(LOGS, "python")
    (line,) = [line for line in log_of_a_job(workers, tmp_path, in_lines) if line.endswith("Sent.")]
    job = BackgroundJob.objects.get()
    assert re.search(rf" INFO \[{job.pk}\] tests\.jobs: Sent\.$", line)


@pytest.mark.processes
def test_logs_as_json_are_as_shown(workers: Workers, tmp_path: Path) -> None:
    _, _, in_json = blocks(LOGS, "python")
    *_, shown = blocks(LOGS, "text")
    lines = [json.loads(line) for line in log_of_a_job(workers, tmp_path, in_json)]
    inside, settled = [line for line in lines if "job_id" in line]
    assert [[*line] for line in (inside, settled)] == [
        [*json.loads(line)] for line in shown.text.splitlines()
    ]
    job = BackgroundJob.objects.get()
    for line in (inside, settled):
        assert (line["job_id"], line["job_name"]) == (job.pk, "tests.jobs.say")
        assert (line["job_queue"], line["job_attempt"]) == ("default", 1)
    assert (inside["logger"], inside["message"]) == ("tests.jobs", "Sent.")
    assert settled["job_event"] == "complete"
    fields = {code(row["field"])[0] for row in table(LOGS, "Fields")}
    assert fields == {name for name in settled if name.startswith("job_")}


def test_logs_lists_what_is_written_of_each_event() -> None:
    documented = {
        code(row["event"])[0]: (code(row["says"])[0], row["level"])
        for row in table(LOGS, "Lines about a job")
    }
    assert documented == {
        event.value: (verb, logging.getLevelName(supervisor._LEVELS.get(event, logging.INFO)))
        for event, verb in supervisor._VERBS.items()
        if event is not Event.RELEASE
    }


# ── The schema ────────────────────────────────────────────────────────────────────────────────────────────

MODELS = {
    model._meta.db_table: model
    for model in (BackgroundJob, BackgroundQueue, BackgroundOperation, BackgroundSchedule, BackgroundWorker)
}


def query(statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return cursor.fetchall()


def shown_default(default: str | None, identity: str) -> str:
    if identity:
        return "identity"
    if default is None:
        return ""
    if "statement_timestamp" in default.lower():
        return "now"
    plain = re.sub(r"::[\w ]+(\(\d+\))?", "", default).strip("()'").strip("'")
    return f"`{plain}`" if plain else "empty"


@pytest.mark.django_db
@pytest.mark.parametrize("name", MODELS)
def test_schema_has_the_columns_of_the_database_and_of_the_model(name: str) -> None:
    heading = "Columns" if name == "background_jobs" else name
    rows = table(REFERENCE / "schema.md", heading)
    columns = query(
        """SELECT attname, format_type(atttypid, atttypmod), attnotnull, pg_get_expr(adbin, adrelid),
                  attidentity
             FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
            WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum""",
        name,
    )
    documented = [(row["column"], row["type"], row["null"], row["default"]) for row in rows]
    assert documented == [
        (f"`{column}`", type_, "no" if not_null else "yes", shown_default(default, identity))
        for column, type_, not_null, default, identity in columns
    ]
    assert [code(row["column"])[0] for row in rows] == [field.column for field in MODELS[name]._meta.fields]


@pytest.mark.django_db
def test_schema_has_the_indexes_and_constraints_of_the_database() -> None:
    rows = table(REFERENCE / "schema.md", "Indexes and constraints")
    indexes = dict(query("SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'background_jobs'"))
    others = query(
        "SELECT conname FROM pg_constraint WHERE conrelid = 'background_jobs'::regclass AND contype = 'c'"
    )
    documented = {code(row["name"])[0]: code(row["on"])[0] for row in rows}
    assert set(documented) == set(indexes) | {name for (name,) in others}
    for name, definition in indexes.items():
        assert f"({documented[name]})" in definition


@pytest.mark.django_db
def test_schema_has_the_triggers_and_the_storage_settings() -> None:
    triggers = query(
        "SELECT tgname FROM pg_trigger WHERE tgrelid = 'background_jobs'::regclass AND NOT tgisinternal"
    )
    rows = table(REFERENCE / "schema.md", "Triggers and notifications")
    assert sorted(code(row["trigger"])[0] for row in rows) == sorted(name for (name,) in triggers)
    ((options,),) = query("SELECT reloptions FROM pg_class WHERE oid = 'background_jobs'::regclass")
    settings = table(REFERENCE / "schema.md", "Storage settings")
    assert [f"{code(row['setting'])[0]}={code(row['value'])[0]}" for row in settings] == options


@pytest.fixture
def statements() -> dict[str, str]:
    """The statements for clients in other languages, by the word with which each is introduced."""
    found = {}
    for block in blocks(REFERENCE / "schema.md", "sql"):
        found[block.before.splitlines()[-1]] = block.text
    return found


@pytest.fixture
def bare(statements: dict[str, str], db: None) -> Any:
    """Run a documented statement as a client would that has nothing but SQL."""

    def run(word: str, *parameters: Any) -> tuple[int, list[tuple[Any, ...]]]:
        (statement,) = [text for before, text in statements.items() if word in before]
        cursor = psycopg.RawCursor(connection.connection)
        cursor.execute(statement, parameters)
        return cursor.rowcount, cursor.fetchall() if cursor.description else []

    connection.ensure_connection()
    return run


def test_a_client_works_with_the_documented_statements_alone(bare: Any) -> None:
    bare("speaks SQL")
    job = BackgroundJob.objects.get()
    assert (job.queue_name, job.payload, job.max_attempts) == ("default", {"args": [17]}, 3)

    for attempt in (1, 2, 3):
        _, ((id, name, args, attempts, most),) = bare("Claim", "default", 10)
        assert (id, name, args, attempts, most) == (job.pk, job.job_name, '{"args": [17]}', attempt, 3)
        assert bare("Claim", "default", 10) == (0, [])
        assert bare("Renew", id, attempts)[0] == 1
        assert bare("Complete", id, attempts + 1)[0] == 0
        assert bare("Fail", id, attempts, "it broke")[0] == 1
        job.refresh()
        assert job.status == ("failed" if attempt == 3 else "queued")
        assert job.last_error == "it broke"
        wait = query("SELECT extract(epoch FROM run_at - updated_at) FROM background_jobs")
        assert float(wait[0][0]) == default_backoff(attempt)
        query("UPDATE background_jobs SET run_at = statement_timestamp() RETURNING 1")

    assert job.retry()
    _, ((id, _, _, attempts, _),) = bare("Claim", "default", 10)
    assert bare("Complete", id, attempts)[0] == 1
    assert job.refresh().status == "completed"


def test_a_client_sweeps_with_the_documented_statement(bare: Any) -> None:
    bare("speaks SQL")
    bare("Claim", "default", 1)
    assert bare("sweeps by itself")[0] == 0
    query("UPDATE background_jobs SET locked_at = locked_at - interval '11 minutes' RETURNING 1")
    assert bare("sweeps by itself")[0] == 1
    job = BackgroundJob.objects.get()
    assert (job.status, job.last_error, job.attempts) == ("queued", "Worker timeout detected", 1)


def test_the_documented_claim_reads_the_index_in_its_order(statements: dict[str, str], db: None) -> None:
    (claim,) = [text for before, text in statements.items() if before.startswith("Claim")]
    with connection.cursor() as cursor:
        for line in sql.BEGIN.splitlines():
            if "enable_" in line:
                cursor.execute(line.rstrip(";"))
        cursor.execute("EXPLAIN " + claim.replace("$1", "'x'").replace("$2", "10"))
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "idx_jobs_queued_run_at" in plan
    assert "Sort" not in plan


def test_pausing_and_resuming_a_queue(bare: Any) -> None:
    bare("To pause one")
    assert BackgroundQueue.objects.get(name="emails").paused_at is not None
    bare("which workers notice")
    assert BackgroundQueue.objects.get(name="emails").paused_at is None


# ── Pages ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


def test_the_example_of_the_readme_has_at_most_fifteen_lines_of_code() -> None:
    (example,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in example.text.splitlines() if line.strip()]) <= 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if fragment:
            assert fragment in anchors(linked), target


def test_every_picture_is_shown_described_and_small() -> None:
    shown = {
        picture: " ".join(words.split())
        for page in PAGES
        for words, picture in re.findall(
            r"!\[([^!]+?)\]\((?:docs|\.\.)/pictures/(\S+?)\)", page.read_text(), flags=re.S
        )
    }
    pictures = {path.name: path.stat().st_size for path in DOCS.glob("pictures/*")}
    assert set(shown) == set(pictures)
    assert {picture: words for picture, words in shown.items() if len(words) < 20} == {}
    assert {picture: size for picture, size in pictures.items() if size > 100_000} == {}
    assert sum(pictures.values()) < 600_000


def test_every_page_can_be_reached_from_the_index() -> None:
    linked = set(re.findall(r"\]\(([\w/-]+\.md)\)", (DOCS / "index.md").read_text()))
    assert linked == {str(page.relative_to(DOCS)) for page in DOCS.glob("*/*.md")}


def test_each_guarantee_names_tests_that_exist() -> None:
    _, *clauses = (DOCS / "explanation" / "guarantees.md").read_text().split("\n## ")
    for clause in clauses:
        named = re.findall(r"`(tests/\S+\.py)::(\w+)`", clause)
        assert named, f"Nothing shows: {clause.splitlines()[0]}"
        for path, name in named:
            assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{path} has no {name}."


def test_what_the_comparison_says_of_this_package_is_shown_elsewhere() -> None:
    page = DOCS / "explanation" / "comparison.md"
    *compared, lacking = tables(page.read_text())
    for row in itertools.chain(*compared):
        assert {*row.values()} - {row[""]} <= {"yes", "partly", "no", "–"}
        assert row["here"] == "yes"
        assert re.fullmatch(r"\[.+\]\(.+\.md\S*\)", row[""])
    assert {row["here"] for row in lacking} == {"no"}


def test_the_changelog_has_its_headings() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])


# ── Python examples ───────────────────────────────────────────────────────────────────────────────────────

PYTHON = [block for page in PAGES for block in blocks(page, "python")]


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "registry", dict(jobs.registry))


# The tutorial's are executed where the tutorial says. Django 6.1 warns of settings that older ones need.
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.django_db(databases=["default", "other"])
@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    "block",
    [one for one in PYTHON if one.page != TUTORIAL and one.instruction != "compiled only"],
    ids=str,
)
def test_python_runs(block: Block, settings: Any) -> None:
    module = types.ModuleType(f"docs_{block.page.stem.replace('-', '_')}_{block.line}")
    exec(compile(block.text, str(block), "exec"), module.__dict__)
    if "PGJOBS" in vars(module):
        given = conf.read(vars(module)["PGJOBS"])
        assert not [name for name, _ in given.problems() if not name.endswith("DATABASE")]
    for test_case in list(vars(module).values()):
        if (
            isinstance(test_case, type)
            and test_case.__module__ == module.__name__
            and issubclass(test_case, unittest.TestCase)
        ):
            suite = unittest.defaultTestLoader.loadTestsFromTestCase(test_case)
            result = unittest.TestResult()
            suite.run(result)
            assert result.testsRun
            assert not [text for _, text in result.failures + result.errors]


# ── Moving in ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.django_db
def test_tasks_of_django_tasks_db_move_along_once() -> None:
    (move,) = blocks(DOCS / "how-to" / "move-from-django-tasks-db.md", "sql")
    with connection.cursor() as cursor:
        cursor.execute(
            """CREATE TEMPORARY TABLE django_tasks_database_dbtaskresult (
                   status varchar(10), args_kwargs jsonb, priority integer, task_path text,
                   queue_name varchar(32), enqueued_at timestamptz, run_after timestamptz)"""
        )
        cursor.execute(
            """INSERT INTO django_tasks_database_dbtaskresult
               VALUES ('READY', '{"args": [1], "kwargs": {"y": 2}}', 5, 'tests.jobs.add', 'mail',
                       '2026-01-01Z', '9999-01-01Z'),
                      ('READY', '{"args": [3, 4], "kwargs": {}}', 0, 'tests.jobs.add', 'default',
                       '2026-01-01Z', '2026-02-01Z'),
                      ('RUNNING', '{}', 0, 'tests.jobs.add', 'default', '2026-01-01Z', '2026-02-01Z'),
                      ('SUCCESSFUL', '{}', 0, 'tests.jobs.add', 'default', '2026-01-01Z', '2026-02-01Z')"""
        )
        for _ in range(2):
            cursor.execute(move.text)
    one, two = BackgroundJob.objects.order_by("-priority")
    assert (one.queue_name, one.priority, one.run_at.month, one.max_attempts) == ("mail", 5, 1, 1)
    assert (two.queue_name, two.priority, two.run_at.month) == ("default", 0, 2)
    assert drain().completed == 2
    assert [job.refresh().result for job in (one, two)] == [3, 7]
    assert query("SELECT count(*) FROM django_tasks_database_dbtaskresult") == [(2,)]


# ── The tutorial ──────────────────────────────────────────────────────────────────────────────────────────


class Background:
    """A command in a terminal of its own."""

    def __init__(self, command: str, log: Path, folder: Path, environment: dict[str, str]) -> None:
        self.log = log
        with log.open("wb") as stream:
            # The shell becomes the command, so that Ctrl-C reaches the command, as in a terminal.
            self.process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def end(self) -> None:
        for pid in [*descendants(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


def shows(output: str, expected: str) -> bool:
    """Whether all expected lines are in the output, in order. Dots stand for anything within a line."""
    lines = iter(output.splitlines())
    return all(
        any(re.fullmatch(re.escape(wanted).replace(r"\.\.\.", ".*"), line.rstrip()) for line in lines)
        for wanted in expected.splitlines()
    )


class Reader:
    """Does what the tutorial says, block by block. An instruction it does not know is an error."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self.output = ""
        self.worker: Background | None = None
        self.background: list[Background] = []
        self.site = f"http://127.0.0.1:{free_port()}"

    def follow(self, block: Block) -> None:
        match block.instruction.partition(":")[0], block.language:
            case "run", "bash":
                self.output = self.run(block.text)
            case "run in the background", "bash":
                self.start(block.text.strip())
            case "write" | "append" as how, "python":
                (name, *_) = [name for name in code(block.before) if name.endswith(".py")]
                with (self.folder / name).open("w" if how == "write" else "a") as file:
                    file.write(self.adapted(block.text))
            case "output", "text":
                if self.worker is not None and "INFO" in block.text:
                    self.expect_of_worker(block)
                else:
                    assert shows(self.output, block.text), f"{block}: {self.output}"
            case "output of the worker", "text":
                self.expect_of_worker(block)
            case "retry in the admin", "text":
                self.retry_in_the_admin()
                self.expect_of_worker(block)
            case "output of the worker, after Ctrl-C", "text":
                assert self.worker is not None
                self.worker.process.send_signal(signal.SIGINT)
                assert self.worker.process.wait(DEADLINE) == 0
                self.expect_of_worker(block)
            case "not run", "bash":
                pass
            case other:
                raise AssertionError(f"{block}: what is to be done with {other}?")

    def adapted(self, text: str) -> str:
        """The one thing that differs: the name of the database, which is this test's own."""
        return text.replace('"NAME": "mysite"', f'"NAME": "{self.environment["PGDATABASE"]}"')

    def run(self, commands: str) -> str:
        """Run commands in the terminal, whose folder and variables stay for the next ones."""
        state = self.folder / ".terminal"
        script = f"set -euo pipefail\n{commands}\npwd >{state}\nenv -0 >>{state}\n"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}"
        folder, _, variables = state.read_text().partition("\n")
        state.unlink()
        self.folder = Path(folder)
        self.environment = dict(one.split("=", 1) for one in variables.split("\0") if "=" in one)
        assert "WARNINGS:" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    def start(self, command: str) -> None:
        if command.endswith("runserver"):
            command += f" --noreload {self.site.removeprefix('http://')}"
        log = self.folder / f"terminal-{len(self.background)}.log"
        terminal = Background(command, log, self.folder, self.environment)
        self.background.append(terminal)
        if command.endswith("runjobs"):
            self.worker = terminal

    def expect_of_worker(self, block: Block) -> None:
        worker = self.worker
        assert worker is not None
        until(lambda: shows(worker.output, block.text) or worker.process.poll() is not None, what=str(block))
        assert shows(worker.output, block.text), worker.output

    def retry_in_the_admin(self) -> None:
        browser = urllib.request.build_opener(
            urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()),
            urllib.request.ProxyHandler({}),
        )

        def get(path: str) -> str:
            with browser.open(self.site + path, timeout=DEADLINE) as response:
                return str(response.read().decode())

        def post(path: str, page: str, **fields: str) -> str:
            (token, *_) = re.findall(r'name="csrfmiddlewaretoken" value="([^"]+)"', page)
            fields["csrfmiddlewaretoken"] = token
            with browser.open(self.site + path, urllib.parse.urlencode(fields).encode()) as response:
                return str(response.read().decode())

        def answers() -> bool:
            try:
                return bool(get("/admin/login/"))
            except urllib.error.URLError:
                return False

        until(answers, what="the site")
        home = post(
            "/admin/login/", get("/admin/login/"), username="admin", password="tutorial", next="/admin/"
        )
        (letters,) = set(re.findall(r'href="([^"]+)"[^>]*>\s*Dead letters', home))
        (path, *_) = re.findall(r'href="([^"]+/deadletter/\d+/change/[^"]*)"', get(letters))
        page = get(path)
        assert "RuntimeError: The printer is off." in page
        assert page.count("Traceback (most recent call last)") == 2
        (retry,) = re.findall(r'action="([^"]+/retry/)"', page)
        assert "queued again" in post(retry, page)

    def end(self) -> None:
        for terminal in self.background:
            terminal.end()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def reader(tmp_path: Path, django_db_setup: None, django_db_blocker: Any) -> Iterator[Reader]:
    """Someone with an empty folder, the package, and a server with an empty database."""
    ours = ("DJANGO_", "PG", "DATABASE_URL", "PYTEST_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    # The package is in this environment or, where it is not installed, in the checkout.
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    with django_db_blocker.unblock(), scratch_database() as scratch:
        parameters = connections["default"].get_connection_params()
        for name in ("host", "port", "user", "password"):
            if parameters.get(name):
                environment[f"PG{name.upper()}"] = str(parameters[name])
        environment["PGDATABASE"] = scratch.name
        reader = Reader(tmp_path, environment)
        try:
            yield reader
        finally:
            reader.end()


@pytest.mark.processes
def test_the_tutorial_works_as_it_is_written(reader: Reader) -> None:
    for block in blocks(TUTORIAL):
        reader.follow(block)
    job = reader.run(
        "python manage.py shell -c '"
        'from django_pgjobs.models import BackgroundJob; job = BackgroundJob.objects.latest("id");'
        "print(job.status, job.result, len(job.errors))'"
    )
    assert "completed Label for order 17 2" in job
