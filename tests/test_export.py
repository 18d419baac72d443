"""Jobs that people take along: which, as what, without secrets, a few at a time."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection, connections
from django.test import AsyncClient, Client
from django.test.utils import CaptureQueriesContext

from django_pgjobs import export
from django_pgjobs.models import BackgroundJob
from tests.factories import make_job

pytestmark = pytest.mark.django_db

ADMIN = "/admin/django_pgjobs/"
SECRET = "sEcReT-4711"


def client_of(*permissions: str) -> Client:
    user = User.objects.create(username="ada", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def ada(db: None) -> Client:
    return client_of("view_backgroundjob", "view_deadletter", "export_job")


def taken(client: Client, url: str, form: str, ids: list[int], *, across: bool = False) -> Any:
    selected = ids or [BackgroundJob.objects.order_by("-pk").values_list("pk", flat=True)[0]]
    data = {"action": f"export_{form}", "_selected_action": selected, "index": "0"}
    return client.post(url, data | {"select_across": str(int(across))})


def text_of(response: Any) -> str:
    assert response.status_code == 200
    return b"".join(response.streaming_content).decode()


def test_what_is_selected_comes_as_json_lines(ada: Client) -> None:
    first, second, _ = (make_job("failed", payload={"args": [1], "kwargs": {"n": n}}) for n in range(3))
    response = taken(ada, f"{ADMIN}deadletter/", "json_lines", [first.pk, second.pk])
    assert response["Content-Disposition"] == 'attachment; filename="jobs.jsonl"'
    lines = [json.loads(line) for line in text_of(response).splitlines()]
    assert {line["id"] for line in lines} == {first.pk, second.pk}
    (line,) = (line for line in lines if line["id"] == second.pk)
    assert tuple(line) == export.COLUMNS
    assert line["payload"] == {"args": [1], "kwargs": {"n": 1}}
    assert line["last_error"] == "ValueError: boom"
    assert line["errors"][0]["message"] == "boom"
    assert line["created_at"] == second.created_at.isoformat()
    assert line["result"] is None


def test_all_that_a_filter_finds_comes_as_csv(ada: Client) -> None:
    for number in range(130):
        make_job("failed", queue_name="mail" if number % 10 else "other")
    make_job("queued", queue_name="mail")
    url = f"{ADMIN}backgroundjob/?status=failed&queue=mail"
    rows = list(csv.DictReader(io.StringIO(text_of(taken(ada, url, "csv", [], across=True)))))
    assert len(rows) == 117
    assert {(row["status"], row["queue_name"]) for row in rows} == {("failed", "mail")}
    assert json.loads(rows[0]["payload"]) == {"args": [1, 2]}
    (entry,) = LogEntry.objects.all()
    assert entry.change_message == "Exported as csv: all jobs that match status=failed&queue=mail."
    assert entry.user.username == "ada"


def test_a_csv_without_jobs_has_its_names() -> None:
    assert "".join(export.as_csv([])) == ",".join(export.COLUMNS) + "\r\n"


def test_no_cell_is_a_formula(ada: Client) -> None:
    job = make_job("failed", job_name="=HYPERLINK(1)", queue_name="+1", last_error="@SUM(1)", unique_key="-2")
    (row,) = csv.DictReader(io.StringIO(text_of(taken(ada, f"{ADMIN}deadletter/", "csv", [job.pk]))))
    found = [row[name] for name in ("job_name", "queue_name", "last_error", "unique_key")]
    assert found == ["'=HYPERLINK(1)", "'+1", "'@SUM(1)", "'-2"]


@pytest.mark.parametrize("form", ["csv", "json_lines"])
def test_secrets_stay(ada: Client, form: str) -> None:
    job = make_job(
        "failed", job_name="tests.jobs.sign_in", payload={"args": ["ada", SECRET]}, last_error=f"X: {SECRET}",
        errors=[{"message": SECRET, "traceback": f"no {SECRET}"}], result=[SECRET], metadata={"by": SECRET},
        unique_key=f"key {SECRET}",
    )  # fmt: skip
    text = text_of(taken(ada, f"{ADMIN}deadletter/", form, [job.pk]))
    assert "ada" in text
    assert "[hidden]" in text
    assert SECRET not in text


def test_hostile_rows_are_exported_as_well(ada: Client) -> None:
    large = "x" * 2_100_000
    jobs = [
        make_job("failed", payload=large, result=large, errors=large, metadata=large, last_error=large),
        make_job("failed", payload=[], result=0, errors={"a": 1}, metadata=7, last_error=None),
    ]
    text = text_of(taken(ada, f"{ADMIN}deadletter/", "json_lines", [job.pk for job in jobs]))
    assert len(text) < 10_000
    lines = {line["id"]: line for line in map(json.loads, text.splitlines())}
    assert lines[jobs[0].pk]["result"] == lines[jobs[0].pk]["payload"] == "[hidden]"


def test_it_needs_a_permission_of_its_own() -> None:
    job = make_job("failed")
    client = client_of("view_deadletter", "retry_job", "discard_job", "edit_job", "cancel_job")
    assert b"Export as" not in client.get(f"{ADMIN}deadletter/").content
    response = taken(client, f"{ADMIN}deadletter/", "csv", [job.pk])
    assert response.status_code == 302  # no such action
    assert not LogEntry.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_jobs_are_read_a_few_at_a_time() -> None:
    for _ in range(export.BATCH * 2 + 1):
        make_job("failed")
    stream = export.as_json_lines(export.jobs_of(BackgroundJob.objects.order_by("-pk")))
    with CaptureQueriesContext(connections["default"]) as captured:
        next(stream)
        rows = [query["sql"] for query in captured if '"payload"' in query["sql"]]
        assert len(rows) == 1
        assert len(list(stream)) == export.BATCH * 2
    assert len([query for query in captured if '"payload"' in query["sql"]]) == 3
    assert not connection.in_atomic_block


@pytest.mark.django_db(transaction=True)
def test_under_asgi_what_is_read_is_sent_before_more_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "CHUNK_SIZE", 1)
    for _ in range(export.BATCH * 2 + 1):
        make_job("failed")
    selected = BackgroundJob.objects.latest("pk").pk
    user = User.objects.create(username="root", is_staff=True, is_superuser=True)

    async def take(captured: CaptureQueriesContext) -> list[bytes]:
        client = AsyncClient()
        await client.aforce_login(user)
        data = {"action": "export_json_lines", "_selected_action": [selected], "index": "0"}
        response = await client.post(f"{ADMIN}deadletter/", data | {"select_across": "1"})
        assert response.is_async
        pieces = aiter(response.streaming_content)
        first = await anext(pieces)
        assert len([query for query in captured if '"payload"' in query["sql"]]) == 1
        return [first, *[piece async for piece in pieces]]

    with CaptureQueriesContext(connections["default"]) as captured:
        pieces = async_to_sync(take)(captured)
    assert len(b"".join(pieces).splitlines()) == export.BATCH * 2 + 1
    assert len([query for query in captured if '"payload"' in query["sql"]]) == 3


def test_small_lines_are_sent_together() -> None:
    assert list(export.in_chunks(["a" * 40_000, "b" * 40_000, "c"])) == ["a" * 40_000 + "b" * 40_000, "c"]
    assert list(export.in_chunks([])) == []
