"""The deploy guard: what this code cannot run of what is in the table."""

from __future__ import annotations

import json
from datetime import timedelta
from importlib.util import find_spec
from io import StringIO
from typing import Any

import django
import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection, transaction

from django_pgjobs import deploy, job, jobs, store
from tests.factories import make_job

pytestmark = pytest.mark.django_db


def look(limit: int = deploy.LIMIT) -> deploy.Report:
    with store.own_transaction("default") as cursor:
        return deploy.look(cursor, limit)


def checkjobs(*options: str) -> tuple[int, str]:
    """The exit status of `checkjobs --deploy`, and what it says."""
    out = StringIO()
    try:
        call_command("checkjobs", "--deploy", *options, stdout=out)
    except SystemExit as exit_:
        return int(exit_.code or 0), out.getvalue()
    return 0, out.getvalue()


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "registry", dict(jobs.registry))


# ── What fits ─────────────────────────────────────────────────────────────────────────────────────────────


def test_an_empty_table_fits() -> None:
    assert look() == deploy.Report(0, True, [])
    assert checkjobs() == (
        0,
        "Looked at 0 jobs that wait or run: this code knows their names and takes their arguments.\n",
    )


@pytest.mark.parametrize(
    "payload",
    [
        {"args": [1, 2]},
        {"args": [1], "kwargs": {"y": 2}},
        {"kwargs": {"x": None, "y": [{}]}},
        {"args": [[1, 2], {"x": 1}], "kwargs": {}},
    ],
    ids=["positional", "mixed", "keywords", "containers"],
)
@pytest.mark.parametrize("status", ["queued", "processing"])
def test_calls_that_fit_their_function(payload: Any, status: str) -> None:
    make_job(status, payload=payload)
    make_job(status, payload=payload, run_at=timedelta(days=30), priority=-5, queue_name="later")
    assert look() == deploy.Report(2, True, [])


def test_what_has_ended_is_nobodys_concern() -> None:
    for status in ("completed", "cancelled"):
        make_job(status, job_name="gone")
    assert checkjobs()[0] == 0


@pytest.mark.usefixtures("own_registry")
def test_former_names_and_arguments_of_any_number_and_name_fit() -> None:
    job(name="new", aliases=["old"])(lambda *args, **kwargs: None)
    for name in ("new", "old"):
        make_job(job_name=name, payload={"args": [1] * 500, "kwargs": {f"k{n}": n for n in range(400)}})
    assert look().findings == []


@pytest.mark.skipif(
    django.VERSION < (6, 0) and not find_spec("django_tasks"), reason="There is no django.tasks here."
)
def test_a_task_is_known_by_its_module_path_and_gets_its_context_itself() -> None:
    from tests import core_tasks

    task = core_tasks.check_context
    make_job(job_name=task.module_path, payload={"args": [1]})
    make_job(job_name=task.module_path, payload={"args": [1, 2, 3, 4, 5, 6, 7, 8]})
    (finding,) = look().findings
    assert (finding.job_name, finding.jobs, finding.is_known) == (task.module_path, 1, True)
    assert "too many positional arguments" in finding.problem


# ── What does not ─────────────────────────────────────────────────────────────────────────────────────────


ADVICE = (
    "Let the function that runs them answer to it, with aliases=['tests.jobs.ad']; or keep the old one until"
    " they are done."
)


def test_a_name_that_is_gone() -> None:
    make_job(job_name="tests.jobs.ad")
    latest = make_job("processing", job_name="tests.jobs.ad")
    assert look() == deploy.Report(
        2,
        True,
        [
            deploy.Finding(
                "tests.jobs.ad",
                2,
                latest.pk,
                False,
                "no job function has this name. Was it renamed to 'tests.jobs.add'?",
                ADVICE,
            )
        ],
    )
    status, said = checkjobs()
    assert status == 1
    assert said == (
        f"waiting or running: 'tests.jobs.ad', 2 jobs, for example {latest.pk}: no job function has this"
        f" name. Was it renamed to 'tests.jobs.add'?\n    {ADVICE}\n"
        "Looked at 2 jobs that wait or run: this code cannot run 2 of them.\n"
    )


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        ({"args": [1]}, "missing a required argument: 'y'"),
        ({"args": [1, 2, 3]}, "too many positional arguments"),
        ({"args": [1], "kwargs": {"z": 2}}, "missing a required argument: 'y'"),
        ({"args": [1, 2], "kwargs": {"z": 2}}, "got an unexpected keyword argument 'z'"),
        ({"args": [1, 2], "kwargs": {"x": 2}}, "multiple values for argument 'x'"),
        ({}, "missing a required argument: 'x'"),
    ],
    ids=["too few", "too many", "renamed", "unknown", "twice", "none"],
)
def test_arguments_that_no_longer_fit(payload: Any, problem: str) -> None:
    one = make_job(payload=payload)
    (finding,) = look().findings
    assert finding.problem == (
        f"the arguments do not fit tests.jobs.add(x: 'int', y: 'int') -> 'int': {problem}."
    )
    assert finding.advice == "Give new parameters a default, and keep the old ones until these jobs are done."
    assert (finding.jobs, finding.example, finding.is_known) == (1, one.pk, True)
    assert checkjobs()[0] == 1


@pytest.mark.parametrize(
    "payload",
    [
        [], [1, 2], "text", 7, True, {"args": {}}, {"args": None}, {"kwargs": []}, {"kwargs": "x"},
        {"args": [1, 2], "more": 1}, {"": 0}, {"args": 1, "kwargs": 2},
    ],
    ids=lambda payload: json.dumps(payload),
)  # fmt: skip
def test_payloads_that_are_no_calls_are_told_and_break_nothing(payload: Any) -> None:
    make_job(payload=payload)
    make_job()
    report = look()
    assert report.looked_at == 2
    assert [(finding.jobs, finding.problem) for finding in report.findings] == [
        (1, "the payload is not a call.")
    ]


def test_a_json_null_is_no_call() -> None:
    one = make_job()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE background_jobs SET payload = 'null'")
    assert [(finding.example, finding.problem) for finding in look().findings] == [
        (one.pk, "the payload is not a call.")
    ]


def test_jobs_with_the_same_problem_are_one_finding_whatever_their_form() -> None:
    ids = [make_job(payload={"args": [0] * count}).pk for count in (3, 4, 5)]
    make_job(payload={"args": [1]})
    findings = {finding.problem[-33:]: finding for finding in look().findings}
    assert [(one.jobs, one.example) for one in findings.values()] == [(1, ids[-1] + 1), (3, ids[-1])]


def test_names_that_anyone_may_have_written_are_shown_as_text() -> None:
    make_job(job_name="evil\nname\x1b[31m")
    _, said = checkjobs()
    assert r"'evil\nname\x1b[31m', job" in said
    assert "\x1b" not in said


def test_dead_letters_are_reported_and_leave_the_exit_status() -> None:
    letter = make_job("failed", job_name="gone")
    status, said = checkjobs()
    assert status == 0
    assert said.startswith(f"dead letter: 'gone', job {letter.pk}: no job function has this name.")
    assert said.endswith("this code knows their names and takes their arguments.\n")


# ── How much is looked at ─────────────────────────────────────────────────────────────────────────────────


def test_of_many_jobs_the_first_and_the_last_are_looked_at() -> None:
    names = ["first", "second", "third", "fourth", "fifth"]
    for number, name in enumerate(names):
        make_job(job_name=name, run_at=timedelta(minutes=number))
        make_job(job_name=name, run_at=timedelta(minutes=number), queue_name="b", priority=number)
    report = look(limit=2)
    found = {finding.job_name: finding.jobs for finding in report.findings}
    assert found == {"first": 2, "second": 2, "third": 1, "fourth": 2, "fifth": 2}
    assert (report.looked_at, report.is_complete) == (9, False)
    assert checkjobs("--limit", "2")[1].endswith(
        "Looked at 9 jobs, of more, that wait or run: this code cannot run 9 of them.\n"
    )
    report = look(limit=3)
    assert (report.looked_at, report.is_complete) == (10, True)


def test_a_thousand_queues_are_looked_at() -> None:
    with connection.cursor() as cursor:
        for count, complete in ((1000, True), (1, False)):
            cursor.execute(
                """INSERT INTO background_jobs (queue_name, job_name, payload)
                   SELECT concat(%s::text, n), 'gone', '{}' FROM generate_series(1, %s) AS n""",
                [str(count), count],
            )
            report = look()
            assert (report.looked_at, report.is_complete) == (1000, complete)


# ── As people run it ──────────────────────────────────────────────────────────────────────────────────────


def test_json_has_the_same() -> None:
    one = make_job(job_name="gone")
    make_job("failed", payload=[])
    status, said = checkjobs("--json")
    assert status == 1
    shown = json.loads(said)
    assert (shown["database"], shown["migrated"]) == ("default", True)
    assert (shown["live"]["looked_at"], shown["live"]["is_complete"]) == (1, True)
    (finding,) = shown["live"]["findings"]
    assert (finding["job_name"], finding["example"], finding["is_known"]) == ("gone", one.pk, False)
    assert [one["problem"] for one in shown["dead_letters"]["findings"]] == ["the payload is not a call."]


def test_before_the_migration_there_are_no_jobs() -> None:
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE background_jobs")
        status, said = checkjobs()
        assert status == 0
        assert said == (
            "The table background_jobs is missing in the database 'default', so there are no jobs yet."
            " Run: manage.py migrate django_pgjobs --database default\n"
        )
        assert json.loads(checkjobs("--json")[1])["migrated"] is False
        transaction.set_rollback(True)


def test_a_database_that_cannot_be_asked_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(alias: str) -> None:
        raise OperationalError("connection refused\n")

    monkeypatch.setattr(store, "catalog", refuse)
    with pytest.raises(CommandError, match=r"^The queue's database 'default' could not be asked: conn"):
        checkjobs()


def test_settings_that_cannot_be_read_are_an_error(settings: Any) -> None:
    settings.PGJOBS = {"LEASES": 1}
    with pytest.raises(CommandError, match=r"^PGJOBS has no setting 'LEASES'\."):
        checkjobs()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([], "one of the arguments --health-file --deploy is required"),
        (["--deploy", "--health-file", "x"], "not allowed with argument"),
        (["--deploy", "--limit", "0"], "at least 1"),
        (["--deploy", "--ready"], "--ready goes with --health-file."),
    ],
    ids=["neither", "both", "no limit", "ready"],
)
def test_options_that_do_not_go_together(options: list[str], complaint: str) -> None:
    with pytest.raises(CommandError, match=complaint):
        call_command("checkjobs", *options)
