"""Queues in the admin: who may pause and resume them, what is written down, and what workers make of it."""

from __future__ import annotations

import html
import re
from datetime import timedelta
from threading import Thread
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.admin.utils import quote
from django.db import connection, connections
from django.test import Client

from django_pgjobs import operations, store, testing
from django_pgjobs.admin import operations as operation_pages
from django_pgjobs.lifecycle import Status
from django_pgjobs.models import BackgroundOperation, BackgroundQueue
from django_pgjobs.operations import Person
from tests import tasks
from tests.factories import make_job, rows
from tests.sessions import session
from tests.test_admin import ADMIN, HOSTILE, act, assert_harmless, client_of, logged, said
from tests.test_admin_letters import text_of
from tests.workers import Workers, until

pytestmark = pytest.mark.django_db

QUEUES = f"{ADMIN}backgroundqueue/"
PAUSE = f"{QUEUES}pause/"
OVERVIEW = f"{ADMIN}overview/"
SEE = "view_backgroundqueue"


@pytest.fixture
def root(db: None) -> Client:
    return client_of("root", superuser=True)


def pause(client: Client, *names: str, reason: str = "The bank is down.") -> Any:
    return client.post(PAUSE, {"queues": names, "reason": reason})


def page_of(name: str) -> str:
    return f"{QUEUES}{quote(name)}/change/"


def resume_at(name: str) -> str:
    return f"{QUEUES}{quote(name)}/resume/"


def paused() -> dict[str, tuple[str, str]]:
    rows = BackgroundQueue.objects.filter(paused_at__isnull=False).order_by("name")
    return {row.name: (row.paused_by, row.reason) for row in rows}


def offered(client: Client, url: str = PAUSE) -> list[tuple[str, bool]]:
    """The queues that the page for pausing offers, and whether they are ticked."""
    page = client.get(url).content.decode()
    boxes = re.findall(r'<input type="checkbox" name="queues" value="([^"]*)"([^>]*)>', page)
    return [(name, "checked" in rest) for name, rest in boxes]


# Pausing and resuming


def test_a_queue_is_paused_for_a_reason_and_resumed(root: Client) -> None:
    make_job(queue_name="mail")
    make_job("failed", queue_name="bank")
    assert offered(root) == [("bank", False), ("mail", False)]
    assert offered(root, f"{PAUSE}?queue=mail") == [("bank", False), ("mail", True)]

    response = pause(root, "mail")
    assert response["Location"] == QUEUES
    assert said(response) == ["The queue 'mail' is paused."]
    assert paused() == {"mail": ("root", "The bank is down.")}
    assert offered(root) == [("bank", False)]
    page = text_of(root.get(page_of("mail")))
    assert "Workers claim nothing from it until somebody resumes it." in page
    assert "By root Reason The bank is down." in page

    root.post(resume_at("mail"), {"reason": "x" * 251})
    assert list(paused()) == ["mail"]
    response = root.post(resume_at("mail"), {"reason": "It is up."})
    assert response["Location"] == page_of("mail")
    assert said(response)[-1] == "The queue 'mail' is resumed."
    assert paused() == {}
    assert "It is not paused." in text_of(root.get(page_of("mail")))
    assert logged() == [
        ("root", "mail", "Paused. Before: not paused. After: paused. Reason: The bank is down."),
        ("root", "mail", "Resumed. Before: paused by root. After: not paused. Reason: It is up."),
    ]
    assert "Reason: The bank is down." in text_of(root.get(f"{QUEUES}mail/history/"))


def test_several_are_paused_and_resumed_by_actions(root: Client) -> None:
    for name in ("a & b", "c"):
        BackgroundQueue.objects.create(name=name)
    data = {"action": "pause_queues", "_selected_action": ["a & b", "c"], "index": "0"}
    address = root.post(QUEUES, data)["Location"]
    assert offered(root, address) == [("a &amp; b", True), ("c", True)]
    pause(root, "a & b", "c")
    assert list(paused()) == ["a & b", "c"]
    told = act(root, QUEUES, "resume_queues", ["a & b", "c"])
    assert told[-2:] == ["The queue 'a & b' is resumed.", "The queue 'c' is resumed."]
    assert paused() == {}


def test_a_reason_and_a_queue_are_asked_for(root: Client) -> None:
    make_job(queue_name="mail")
    assert "This field is required." in text_of(pause(root, "mail", reason=" "))
    assert "This field is required." in text_of(root.post(PAUSE, {}))
    assert "Choose a queue." in text_of(pause(root))
    for impossible in ("x" * 256, "a\x00b"):
        assert "is not one of the available choices." in text_of(pause(root, impossible))
    assert paused() == {}
    assert logged() == []


def test_a_queue_whose_jobs_have_just_ended_can_be_paused(root: Client) -> None:
    assert "No queue is known that is not paused already." in text_of(root.get(PAUSE))
    pause(root, "mail")
    assert list(paused()) == ["mail"]


def test_one_that_was_paused_before_keeps_its_reason(root: Client) -> None:
    pause(client_of("ada", SEE, "pause_queue"), "mail", reason="The first.")
    assert said(pause(root, "mail", reason="The second.")) == ["The queue 'mail' was paused before."]
    assert paused() == {"mail": ("ada", "The first.")}
    root.post(resume_at("mail"))
    assert said(root.post(resume_at("mail")))[-1] == "The queue 'mail' was not paused."
    assert len(logged()) == 2


@pytest.mark.django_db(transaction=True)
def test_two_people_pause_a_queue_at_once() -> None:
    ada = client_of("ada", SEE, "pause_queue")
    told: list[str] = []

    def pause_too() -> None:
        told.extend(said(pause(ada, "mail", reason="The second.")))
        connections.close_all()

    with session() as other, other.transaction():
        with other.cursor() as cursor:
            assert store.pause(cursor, "mail", by="root", reason="The first.")
        thread = Thread(target=pause_too)
        thread.start()
        until(lambda: waiting_for(other.info.backend_pid), what="the second to wait for the first")
    thread.join()
    assert told == ["The queue 'mail' was paused before."]
    assert paused() == {"mail": ("root", "The first.")}
    assert logged() == []


def waiting_for(pid: int) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))", [pid])
        return bool(cursor.fetchone()[0])


def test_workers_leave_a_paused_queue_alone_and_go_on_when_it_is_resumed(workers: Workers) -> None:
    root = client_of("root", superuser=True)
    workers.start("--processes", "1", "--threads", "1", "--poll-interval", "3600").until_listening()
    pause(root, "mail")
    held = tasks.note.using(queue="mail", priority=100).enqueue("held")
    other = tasks.note.enqueue("other")
    until(lambda: other.refresh().status == Status.COMPLETED)
    assert held.refresh().status == Status.QUEUED
    root.post(resume_at("mail"))
    until(lambda: held.refresh().status == Status.COMPLETED)


# Purging

PURGE = f"{QUEUES}purge/"


def purge(client: Client, queue: str, **answers: Any) -> Any:
    """Look at the page, fill in the form, and send it."""
    address = f"{PURGE}?{urlencode({'queue': queue})}"
    form = client.get(address).context["form"]
    given = {field.name: field.value() for field in form} | {"name": queue, "reason": "Sent twice."}
    return client.post(address, given | answers)


def test_a_queue_is_purged_by_its_name_and_for_a_reason(root: Client) -> None:
    ids = [make_job(queue_name="mail").pk for _ in range(2)]
    bank = make_job(queue_name="bank").pk
    page = root.get(PURGE).content.decode()
    assert f'<a href="{PURGE}?queue=mail">mail</a>' in page
    page = text_of(root.get(f"{PURGE}?queue=mail"))
    assert "This is about 2 queued jobs in the queue mail" in page
    assert "The queue is not paused" in page
    for wrong in ("Mail", " mail", "bank", "mail "):
        assert "This is not the name of the queue." in text_of(purge(root, "mail", name=wrong))
    for missing in ("name", "reason"):
        assert "This field is required." in text_of(purge(root, "mail", **{missing: ""}))
    assert {row["status"] for row in rows().values()} == {"queued"}
    assert logged() == []

    response = purge(root, "mail")
    assert response["Location"] == page_of("mail")
    assert said(response) == ["2 jobs cancelled."]
    assert {id: row["status"] for id, row in rows().items()} == {
        **dict.fromkeys(ids, "cancelled"), bank: "queued"
    }  # fmt: skip
    assert [(who, what) for who, what, _ in logged()] == [
        ("root", "mail"),
        *(("root", str(id)) for id in ids),
    ]
    assert "Purged. Before: 2 queued jobs." in text_of(root.get(f"{QUEUES}mail/history/"))
    assert f'href="{PURGE}?queue=mail"' in root.get(page_of("mail")).content.decode()
    assert "No job waits in the queue mail." in text_of(root.get(f"{PURGE}?queue=mail"))


def test_a_large_purge_is_done_by_a_worker(root: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_pages, "FEW", 1)
    monkeypatch.setattr(operations, "BATCH", 2)
    for _ in range(5):
        make_job(queue_name="mail")
    response = purge(root, "mail")
    operation = BackgroundOperation.objects.get()
    assert response["Location"] == f"{ADMIN}backgroundoperation/{operation.pk}/change/"
    assert operation.changed == 0
    page = text_of(root.get(response["Location"]))
    assert "Purge all queued jobs in the queue 'mail'" in page
    root.post(f"{ADMIN}backgroundoperation/{operation.pk}/stop/")
    testing.drain(queue="default")
    assert {row["status"] for row in rows().values() if row["queue_name"] == "mail"} == {"queued"}
    root.post(f"{ADMIN}backgroundoperation/{operation.pk}/resume/")
    testing.drain(queue="default")
    assert {row["status"] for row in rows().values() if row["queue_name"] == "mail"} == {"cancelled"}


def test_of_many_jobs_that_wait_only_some_are_counted(root: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MOST_WAITING", 2)
    for _ in range(3):
        make_job(queue_name="mail")
    page = text_of(root.get(f"{PURGE}?queue=mail"))
    assert "This is about at least 2 queued jobs in the queue mail" in page
    assert "A worker does it in the background" in page
    purge(root, "mail")
    testing.drain(queue="default")
    assert [row["status"] for row in rows().values() if row["queue_name"] == "mail"] == ["cancelled"] * 3


def test_what_is_enqueued_after_the_page_was_shown_is_left_alone(root: Client) -> None:
    make_job(queue_name="mail", updated_at=-timedelta(minutes=1))
    later = make_job(queue_name="mail", updated_at=timedelta(minutes=1))
    assert said(purge(root, "mail")) == ["1 job cancelled."]
    assert rows()[later.pk]["status"] == "queued"


def test_to_purge_has_a_permission_of_its_own() -> None:
    make_job(queue_name="mail")
    BackgroundQueue.objects.create(name="mail")
    others = client_of("others", SEE, "pause_queue", "cancel_job", "view_backgroundoperation")
    for url in (QUEUES, page_of("mail")):
        assert "/purge/" not in others.get(url).content.decode()
    for client in (others, client_of("blind", "purge_queue")):
        assert client.get(PURGE).status_code == 403
        assert client.post(f"{PURGE}?queue=mail", {"name": "mail", "reason": "x"}).status_code == 403
    assert {row["status"] for row in rows().values()} == {"queued"}
    ada = client_of("ada", SEE, "purge_queue")
    assert "/purge/" in ada.get(QUEUES).content.decode()
    assert said(purge(ada, "mail")) == ["1 job cancelled."]


# Who may


def test_to_view_is_not_to_pause() -> None:
    operations.pause_queue("mail", Person("ada"), "Why.")
    viewer = client_of("viewer", SEE, "view_backgroundjob")
    for url in (QUEUES, page_of("mail"), OVERVIEW):
        page = viewer.get(url)
        assert page.status_code == 200
        assert "Why." in page.content.decode()
        assert "/pause/" not in page.content.decode()
        assert "/resume/" not in page.content.decode()
    assert viewer.get(PAUSE).status_code == 403
    assert pause(viewer, "bank").status_code == 403
    assert viewer.post(resume_at("mail")).status_code == 403
    viewer.post(QUEUES, {"action": "resume_queues", "_selected_action": ["mail"], "index": "0"})
    assert list(paused()) == ["mail"]
    assert logged() == []


def test_to_pause_needs_to_view() -> None:
    blind = client_of("blind", "pause_queue")
    assert blind.get(QUEUES).status_code == 403
    assert blind.get(PAUSE).status_code == 403
    assert pause(blind, "mail").status_code == 403
    assert blind.post(resume_at("mail")).status_code == 403
    assert paused() == {}


def test_nobody_else_gets_in(root: Client) -> None:
    for response in (pause(Client(), "mail"), Client().post(resume_at("mail"))):
        assert response["Location"].startswith("/admin/login/")
    careful = Client(enforce_csrf_checks=True)
    careful.cookies = root.cookies
    assert pause(careful, "mail").status_code == 403
    assert root.get(resume_at("mail")).status_code == 405
    assert root.post(resume_at("nope")).status_code == 404
    assert paused() == {}


# What anyone may have written


@pytest.mark.parametrize(
    "name", [HOSTILE, "a/b", "_5F", "pause", "new\nline", "ünï", " ", "'quoted'", "x" * 255]
)
def test_any_name_can_be_paused_and_resumed(root: Client, name: str) -> None:
    make_job(queue_name=name)
    for url in (PAUSE, f"{PAUSE}?queue=%00&queue="):
        assert_harmless(root.get(url).content.decode())
    assert_harmless(root.post(PAUSE, {"queues": name, "reason": HOSTILE}, follow=True).content.decode())
    assert list(paused()) == [name]
    assert_harmless(root.get(PURGE).content.decode())
    assert_harmless(purge(root, name, name="another").content.decode())
    assert_harmless(root.get(purge(root, name)["Location"]).content.decode())
    for url in (QUEUES, page_of(name), OVERVIEW, f"{QUEUES}{quote(name)}/history/"):
        response = root.get(url)
        assert response.status_code == 200
        assert_harmless(response.content.decode())
    (action,) = re.findall(r'action="([^"]*/resume/)"', root.get(page_of(name)).content.decode())
    assert_harmless(root.post(html.unescape(action), follow=True).content.decode())
    assert paused() == {}


def test_what_is_no_name_is_no_server_error(root: Client) -> None:
    for url in (f"{QUEUES}%00/change/", f"{QUEUES}%00/history/"):
        assert root.get(url).status_code == 302
    assert root.post(f"{QUEUES}%00/resume/").status_code == 404
    told = act(root, QUEUES, "resume_queues", ["\x00"])
    assert told[-1] == "The selection has something that is no queue."
    for query in ("queue=%00", "queue=", f"queue={'x' * 256}"):
        assert "choices" in root.get(f"{PURGE}?{query}").context
        assert root.post(f"{PURGE}?{query}", {"name": "", "reason": "x"}).status_code == 200
    BackgroundQueue.objects.create(name="", paused_at="2026-01-01T00:00Z")
    for url in (QUEUES, PAUSE, OVERVIEW):
        assert root.get(url).status_code == 200


# The pages


def test_the_overview_says_who_has_paused_a_queue_and_why(root: Client) -> None:
    make_job(queue_name="mail")
    pause(root, "mail")
    response = root.get(OVERVIEW)
    assert re.search(r"mail paused [\d.]+ \w+ ago by root: The bank is down\.", text_of(response))
    page = response.content.decode()
    assert f'<a href="{page_of("mail")}" class="pgjobs-status pgjobs-cancelled">paused' in page
    assert f'<a href="{page_of("mail")}" aria-label="Show: ' in page
    assert f'<a href="{PAUSE}">Pause queues …</a>' in page
    page = client_of("viewer", "view_backgroundjob").get(OVERVIEW).content.decode()
    assert QUEUES not in page


def test_no_page_has_an_inline_script_or_style(root: Client) -> None:
    make_job(queue_name="mail")
    pause(root, "mail")
    make_job(queue_name="bank")
    for url in (QUEUES, PAUSE, PURGE, f"{PURGE}?queue=bank", page_of("mail")):
        page = root.get(url).content.decode()
        assert "django_pgjobs/admin.css" in page
        assert not re.search(r"\sstyle=|\son[a-z]+=|<style", page)
        assert all('src="' in tag for tag in re.findall(r"<script[^>]*>", page))
