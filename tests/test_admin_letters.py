"""Dead letters and operations in the admin: what is found, what is asked first, and what becomes of it."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlencode

import pytest
from django.db import connection
from django.test import Client

from django_pgjobs import job, operations
from django_pgjobs.admin import letters
from django_pgjobs.admin import operations as operation_pages
from django_pgjobs.jobs import registry
from django_pgjobs.models import BackgroundJob, BackgroundOperation, BackgroundQueue, BackgroundWorker
from django_pgjobs.operations import DISCARD, RETRY, Filter, Manner, Person
from django_pgjobs.testing import drain
from tests.factories import make_job, rows
from tests.test_admin import (
    ADMIN,
    DEAD,
    HOSTILE,
    JOBS,
    VIEW,
    ask,
    assert_harmless,
    client_of,
    listed,
    logged,
    said,
)
from tests.test_operations import MATCHES

pytestmark = pytest.mark.django_db

OPERATIONS = f"{ADMIN}backgroundoperation/"
GROUPS = f"{DEAD}groups/"
SEE = (*VIEW, "view_backgroundoperation")


@pytest.fixture
def root(db: None) -> Client:
    return client_of("root", superuser=True)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than two jobs are many."""
    monkeypatch.setattr(operation_pages, "FEW", 2)
    monkeypatch.setattr(operations, "BATCH", 2)


def dead(count: int, **columns: Any) -> list[int]:
    return [make_job("failed", **columns).pk for _ in range(count)]


def statuses(ids: list[int] | None = None) -> Counter[str]:
    return Counter(row["status"] for id, row in rows().items() if ids is None or id in ids)


def text_of(response: Any) -> str:
    """What a page says, without tags and in one line."""
    body = response.content.decode().partition('id="content"')[2]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).replace("\xa0", " ").split())


# ── The list ──────────────────────────────────────────────────────────────────────────────────────────────

BY_ADDRESS = [case for case in MATCHES if "unique_key" not in case[0]]


@pytest.mark.parametrize(("criteria", "found", "not_found"), BY_ADDRESS, ids=str)
def test_the_list_finds_what_an_operation_finds(
    root: Client, criteria: dict[str, Any], found: dict[str, Any], not_found: dict[str, Any]
) -> None:
    (wanted,), _ = dead(1, **found), dead(1, **not_found)
    query = {"q" if name == "text" else name: value for name, value in criteria.items()}
    assert listed(root.get(DEAD, query)) == [wanted]
    told = ask(root, DEAD, "retry", query)
    assert said(told)[-1] == "1 job queued again."
    assert {id for id, row in rows().items() if row["status"] == "queued"} == {wanted}


def test_one_box_searches_for_ids_keys_jobs_and_errors(root: Client) -> None:
    key = make_job("failed", unique_key="order-17")
    job = make_job("failed", job_name="shop.send")
    error = make_job("failed", last_error="SMTPError: no such mailbox <4711>")
    assert listed(root.get(DEAD, {"q": f" {key.pk} "})) == [key.pk]
    assert listed(root.get(DEAD, {"q": "order-17"})) == [key.pk]
    assert listed(root.get(DEAD, {"q": "order-1"})) == []
    assert listed(root.get(DEAD, {"q": "shop.send"})) == [job.pk]
    assert listed(root.get(DEAD, {"q": "No Such MAILBOX"})) == [error.pk]
    assert listed(root.get(DEAD, {"q": "4711"})) == [error.pk]  # no id of a dead letter
    assert listed(root.get(DEAD, {"q": "<4711>", "queue": "other"})) == []


def test_the_list_is_narrowed_down_by_when_a_job_failed(root: Client) -> None:
    new, old = (make_job("failed", updated_at=-timedelta(hours=hours)) for hours in (0.5, 30))
    assert listed(root.get(DEAD, {"since": "1h"})) == [new.pk]
    assert listed(root.get(DEAD, {"since": "24h"})) == [new.pk]
    assert listed(root.get(DEAD, {"since": "7d"})) == [new.pk, old.pk]
    assert listed(root.get(DEAD, {"until": old.updated_at.isoformat()})) == [old.pk]
    assert listed(root.get(DEAD, {"since": old.updated_at.isoformat(), "attempts_to": 2})) == []


def test_what_there_is_to_choose_from(root: Client) -> None:
    dead(1, job_name="shop.a", last_error="KeyError: 'x'")
    dead(1, job_name="shop.b", last_error="no class: of an exception")
    dead(1, job_name="shop.b", last_error=None)
    page = root.get(DEAD, {"fingerprint": "abc", "attempts_from": "1"})
    choices = {
        spec.title: [value for value, _ in spec.lookup_choices] for spec in page.context["cl"].filter_specs
    }
    assert choices == {
        "queue": ["default"],
        "job": ["shop.a", "shop.b"],
        "exception": ["KeyError"],
        "time of failure": ["1h", "24h", "7d"],
        "fingerprint": ["abc"],
        "attempts, at least": ["1"],
    }


def test_the_list_says_when_it_has_not_looked_at_all(root: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "WINDOW", 3)
    ids = [make_job("failed", updated_at=-timedelta(hours=hours)).pk for hours in range(5)]
    note = "Only the latest 3 dead letters were searched."
    assert listed(root.get(DEAD, {"job": "tests.jobs.add"})) == ids[:4]  # the last of them is the edge
    assert root.get(DEAD, {"job": "tests.jobs.add"}).context["cl"].notes == [note]
    assert listed(root.get(DEAD)) == ids
    assert root.get(DEAD).context["cl"].notes == []
    assert "Only the latest 3 dead letters were looked at." in text_of(root.get(GROUPS))


BAD = [
    "since=yesterday", "since=0001-01-01", "until=9999-12-31T23:59:59", "until=1", "attempts_from=x",
    "attempts_from=-1", f"attempts_to={'9' * 18}", "job=%00", "exception=%00", "fingerprint=%00", "q=%00",
    "since=%00", "ids=x", "ids=", "ids=1,,x", f"ids={'9' * 30}", "since=2026-01-01T00:00:00%2B14:00",
    "fingerprint=", "exception=a.b.C", "payload__contains=x", "status=queued", "since=2026-13-01",
]  # fmt: skip


@pytest.mark.parametrize("query", BAD)
def test_nothing_in_the_address_is_a_server_error(root: Client, query: str) -> None:
    make_job("failed")
    for url in (DEAD, GROUPS, f"{DEAD}act/retry/", f"{DEAD}act/discard/", f"{JOBS}act/retry/"):
        assert root.get(f"{url}?{query}").status_code in (200, 302, 400), url
    assert statuses() == {"failed": 1}


# ── Groups ────────────────────────────────────────────────────────────────────────────────────────────────


def test_dead_letters_are_grouped_by_what_failed(root: Client) -> None:
    dead(2, job_name="shop.a", error_fingerprint="one", last_error="KeyError: 'x'\nmore")
    dead(3, job_name="shop.b", error_fingerprint="one", last_error="Timeout: 30 s")
    dead(1, job_name="shop.b", error_fingerprint=None, last_error="<b>bare")
    make_job("completed", error_fingerprint="one")
    page = root.get(GROUPS)
    assert "6 dead letters, with 3 different errors." in text_of(page)
    assert [(*one.group[:3], one.error) for one in page.context["groups"]] == [
        ("shop.b", "one", 3, "Timeout: 30 s"),
        ("shop.a", "one", 2, "KeyError: 'x'"),
        ("shop.b", "", 1, "<b>bare"),
    ]
    assert "<b>bare" not in page.content.decode()
    for one in page.context["groups"]:
        before = statuses()["queued"]
        assert len(listed(root.get(f"{DEAD}?{one.query}"))) == one.group.jobs
        ask(root, DEAD, "retry", dict(parse_qsl(one.query, keep_blank_values=True)))
        assert statuses()["queued"] == before + one.group.jobs
    dead(2, job_name="shop.a")
    some = text_of(root.get(f"{GROUPS}?job=shop.a"))
    assert "2 dead letters of the job 'shop.a', with 1 different error." in some
    assert "Nothing waits for you here." in text_of(root.get(f"{GROUPS}?job=nope"))


def test_a_group_says_when_it_began_and_shows_a_traceback(root: Client) -> None:
    for hours in (1, 3, 5):
        make_job("failed", updated_at=-timedelta(hours=hours), error_fingerprint="f")
    (group,) = root.get(GROUPS).context["groups"]
    ages = group.group.last_at - group.group.first_at
    assert timedelta(hours=3, minutes=59) < ages <= timedelta(hours=4)
    page = root.get(f"{DEAD}?{group.query}")
    assert "3 dead letters of tests. jobs. add, the first 5 hours ago , the last 1 hour ago ." in text_of(
        page
    )
    assert "Traceback (most recent call last):" in text_of(page)
    assert page.context["cl"].alike is not None
    assert root.get(f"{DEAD}?job=tests.jobs.add").context["cl"].alike is None


def test_the_page_of_a_dead_letter_leads_to_those_that_failed_alike(root: Client) -> None:
    first, *others = dead(3, error_fingerprint="f")
    dead(1, error_fingerprint=None)
    for url in (DEAD, JOBS):
        page = root.get(f"{url}{first}/change/").content.decode()
        (address,) = re.findall(r'href="([^"]+)">All dead letters that failed alike', page)
        assert listed(root.get(html.unescape(address))) == [*reversed(others), first]
    jobs_only = client_of("ada", "view_backgroundjob")
    for client, id in ((jobs_only, first), (root, make_job("completed").pk)):
        assert "failed alike" not in client.get(f"{JOBS}{id}/change/").content.decode()


def test_only_so_many_groups_are_shown(root: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "MOST_GROUPS", 2)
    for each in range(4):
        dead(each + 1, error_fingerprint=str(each))
    page = root.get(GROUPS)
    assert [one.group.jobs for one in page.context["groups"]] == [4, 3]
    assert "10 dead letters, with 4 different errors." in text_of(page)
    assert "These are the 2 that most of them have." in text_of(page)


def test_hostile_texts_are_escaped_on_these_pages_too(root: Client) -> None:
    error = dict.fromkeys(("at", "attempt", "worker", "exception", "message", "traceback"), HOSTILE)
    dead(
        1, job_name=HOSTILE, queue_name=HOSTILE, errors=[error], last_error=HOSTILE, unique_key=HOSTILE,
        error_fingerprint=HOSTILE,
    )  # fmt: skip
    operation = operations.begin(
        RETRY, Filter(text=HOSTILE), Person(HOSTILE), reason=HOSTILE, manner=Manner(queue=HOSTILE)
    )
    query = urlencode({"job": HOSTILE, "fingerprint": HOSTILE, "exception": HOSTILE, "q": HOSTILE})
    group = urlencode({"job": HOSTILE, "fingerprint": HOSTILE})
    urls = [f"{url}?{each}" for url in (DEAD, GROUPS, f"{DEAD}act/retry/") for each in (query, group)]
    for url in [*urls, OPERATIONS, f"{OPERATIONS}{operation.pk}/change/"]:
        response = root.get(url)
        assert response.status_code == 200
        assert_harmless(response.content.decode())
    assert listed(root.get(f"{DEAD}?{group}")) != []


def test_no_page_has_an_inline_script_or_style(root: Client) -> None:
    dead(1)
    operation = operations.begin(RETRY, Filter(), Person("ada"))
    for url in (GROUPS, f"{DEAD}act/retry/", f"{DEAD}act/discard/", f"{OPERATIONS}{operation.pk}/change/"):
        page = root.get(url).content.decode()
        assert "django_pgjobs/admin.css" in page
        assert not re.search(r"\sstyle=|\son[a-z]+=|<style", page)
        assert all('src="' in tag for tag in re.findall(r"<script[^>]*>", page))


# ── Asking first ──────────────────────────────────────────────────────────────────────────────────────────


def test_an_act_on_all_says_first_what_it_is_about_and_does_that(root: Client) -> None:
    mail, _ = dead(3, queue_name="mail", last_error="Timeout: 30 s"), dead(1)
    across = {"action": "retry_jobs", "_selected_action": mail[:1], "index": "0", "select_across": "1"}
    address = root.post(f"{DEAD}?queue=mail&p=1&o=5", across).headers["Location"]
    assert address == f"{DEAD}act/retry/?queue=mail"
    page = root.get(address)
    assert "Retry 3 dead letters" in text_of(page)
    assert "3 dead letters in the queue 'mail'." in text_of(page)
    assert "Timeout: 30 s" in text_of(page)
    assert statuses() == {"failed": 4}

    told = ask(root, DEAD, "retry", {"queue": "mail"}, reason="It is up.")
    assert said(told)[-1] == "3 jobs queued again."
    assert told.headers["Location"] == DEAD
    assert statuses(mail) == {"queued": 3}
    (operation,) = BackgroundOperation.objects.all()
    assert (operation.state, operation.asked_by, operation.reason) == ("finished", "root", "It is up.")
    assert {who for who, _, _ in logged()} == {"root"}
    assert all("Reason: It is up." in message for _, _, message in logged())
    assert "None matches any more." in text_of(root.get(address))


def test_what_is_too_old_to_be_counted_is_acted_on_all_the_same(
    root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "MOST_COUNTED", 3)
    (old,) = dead(1, queue_name="mail", updated_at=-timedelta(days=1))
    dead(4)
    page = text_of(root.get(f"{DEAD}act/discard/?queue=mail"))
    assert "This is about perhaps older dead letters in the queue 'mail'." in page
    ask(root, DEAD, "discard", {"queue": "mail"})
    drain()
    assert rows()[old]["status"] == "cancelled"


def test_what_fails_while_somebody_reads_the_page_is_not_part_of_it(root: Client) -> None:
    (before,) = dead(1)
    address = f"{DEAD}act/discard/"
    until = root.get(address).context["form"]["until"].value()
    (after,) = dead(1)
    root.post(address, {"reason": "Old.", "until": until})
    assert (rows()[before]["status"], rows()[after]["status"]) == ("cancelled", "failed")


def test_a_discard_needs_a_reason(root: Client) -> None:
    (id,) = dead(1)
    response = ask(root, DEAD, "discard", {"ids": id}, reason=" ")
    assert response.status_code == 200
    assert "This field is required." in text_of(response)
    assert statuses() == {"failed": 1}


@pytest.mark.parametrize(
    "answers",
    [
        {"per_minute": "0"}, {"per_minute": "x"}, {"delay": "7"}, {"queue": "\x00"}, {"queue": "q" * 256},
        {"until": "x"}, {"until": ""}, {"reason": "r" * 1001}, {"reason": "\x00"},
    ],
    ids=str,
)  # fmt: skip
def test_answers_that_cannot_be_are_told_of(root: Client, answers: dict[str, str]) -> None:
    dead(1)
    assert ask(root, DEAD, "retry", {}, **answers).status_code == 200
    assert statuses() == {"failed": 1}
    assert not BackgroundOperation.objects.exists()


def test_what_is_selected_can_be_retried_later_slowly_and_elsewhere(root: Client) -> None:
    ids = dead(3)
    response = root.post(DEAD, {"action": "retry_jobs_otherwise", "_selected_action": ids[:2], "index": "0"})
    assert response.headers["Location"] == f"{DEAD}act/retry/?ids={ids[0]}%2C{ids[1]}"
    query = {"ids": f"{ids[0]},{ids[1]}"}
    told = ask(root, DEAD, "retry", query, delay="3600", per_minute="2", queue="slow")
    assert said(told)[-1] == "2 jobs queued again."
    first, second = (BackgroundJob.objects.get(pk=id) for id in ids[:2])
    assert first.run_at - first.updated_at == timedelta(hours=1)
    assert second.run_at - first.run_at == timedelta(seconds=30)
    assert (first.queue_name, rows()[ids[2]]["status"]) == ("slow", "failed")


def test_cancelled_jobs_are_retried_from_the_list_of_jobs(root: Client) -> None:
    cancelled, failed = make_job("cancelled"), make_job("failed")
    across = {"action": "retry_jobs", "_selected_action": [cancelled.pk], "index": "0", "select_across": "1"}
    address = root.post(f"{JOBS}?status=cancelled", across).headers["Location"]
    assert address == f"{JOBS}act/retry/?status=cancelled"
    assert "1 cancelled job" in text_of(root.get(address))
    assert said(ask(root, JOBS, "retry", {"status": "cancelled"}))[-1] == "1 job queued again."
    assert (cancelled.refresh().status, failed.refresh().status) == ("queued", "failed")


def test_the_page_of_a_job_leads_to_these_questions(root: Client) -> None:
    failed, cancelled = make_job("failed"), make_job("cancelled")
    page = root.get(f"{DEAD}{failed.pk}/change/").content.decode()
    assert f'href="{DEAD}act/discard/?ids={failed.pk}&amp;status=failed"' in page
    page = root.get(f"{JOBS}{cancelled.pk}/change/").content.decode()
    assert f'href="{JOBS}act/retry/?ids={cancelled.pk}&amp;status=cancelled"' in page
    assert "/act/discard/" not in page
    told = ask(root, JOBS, "retry", {"ids": cancelled.pk, "status": "cancelled"}, delay="300")
    assert said(told)[-1] == "1 job queued again."


def test_two_people_discard_the_same_jobs(root: Client) -> None:
    other = client_of("ada", *SEE, "discard_job")
    ids = dead(2)
    query = {"ids": ",".join(map(str, ids))}
    address = f"{DEAD}act/discard/?{urlencode(query)}"
    until = other.get(address).context["form"]["until"].value()
    assert said(ask(root, DEAD, "discard", query))[-1] == "2 jobs discarded."
    told = other.post(address, {"reason": "I, too.", "until": until})
    assert said(told)[-1] == "No job was discarded; 2 were skipped because they are no longer failed."
    assert {who for who, _, _ in logged()} == {"root"}


# ── In the background ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("few")
def test_an_act_on_many_jobs_is_done_by_a_worker_and_watched(root: Client) -> None:
    ids = dead(5, queue_name="mail")
    assert "A worker does it in the background" in text_of(root.get(f"{DEAD}act/discard/?queue=mail"))
    response = ask(root, DEAD, "discard", {"queue": "mail"}, reason="Too late.")
    operation = BackgroundOperation.objects.get()
    url = f"{OPERATIONS}{operation.pk}/change/"
    assert response.headers["Location"] == url
    assert statuses(ids) == {"failed": 5}
    page = root.get(url)
    for text in ("running", "Discard all dead letters in the queue 'mail'", "0 of 5", "Too late.", "root"):
        assert text in text_of(page)
    assert "data-pgjobs-refresh" in page.content.decode()

    assert drain().completed == 1
    page = root.get(url)
    assert "5 of 5" in text_of(page)
    assert "5 jobs discarded." in text_of(page)
    assert "data-pgjobs-refresh" not in page.content.decode()
    assert statuses(ids) == {"cancelled": 5}
    assert len(logged()) == 5
    shown = text_of(root.get(OPERATIONS))
    assert "Discard all dead letters in the queue 'mail' finished 5 of 5 root Too late." in shown


def test_a_paced_retry_is_always_done_by_a_worker(root: Client) -> None:
    ids = dead(2)
    ask(root, DEAD, "retry", {}, per_minute="1")
    assert statuses(ids) == {"failed": 2}
    drain()
    assert statuses(ids) == {"completed": 1, "failed": 1}
    page = text_of(root.get(f"{OPERATIONS}{BackgroundOperation.objects.get().pk}/change/"))
    assert "at most 1 a minute" in page
    assert re.search(r"Goes on in \d+ seconds . So far: 1 job queued again", page)


@pytest.mark.usefixtures("few")
def test_an_operation_is_stopped_and_resumed(root: Client) -> None:
    ids = dead(5)
    operation = operations.begin(DISCARD, Filter(), Person("ada"))
    url = f"{OPERATIONS}{operation.pk}/"
    next(operations.steps(operation.pk))
    assert said(root.post(f"{url}stop/")) == [f"{operation} is stopped."]
    page = text_of(root.get(f"{url}change/"))
    assert "Nothing more is changed until somebody resumes it. So far: 2 jobs discarded." in page
    assert said(root.post(f"{url}stop/"))[-1] == f"{operation} was not running."
    assert list(operations.steps(operation.pk)) == []
    assert said(root.post(f"{url}resume/"))[-1] == f"{operation} goes on."
    drain()
    assert statuses(ids) == {"cancelled": 5}
    assert said(root.post(f"{url}resume/"))[-1] == f"{operation} was not stopped."
    assert "Stopped." in text_of(root.get(f"{url}history/"))


def test_one_that_does_not_get_on_says_why_and_can_be_carried_on(root: Client) -> None:
    dead(2)
    operation = operations.begin(DISCARD, Filter(), Person("ada"))
    url = f"{OPERATIONS}{operation.pk}/"
    assert "pgjobs-warning" not in root.get(f"{url}change/").content.decode()
    old = operation.updated_at - timedelta(minutes=5)
    BackgroundOperation.objects.update(updated_at=old)
    assert "No worker that serves the queue 'default' is alive." in text_of(root.get(f"{url}change/"))
    common = {"processes": 1, "threads": 1, "async_slots": 0, "lease": timedelta(seconds=60), "version": "1"}
    BackgroundWorker.objects.create(hostname="web-1", pid=7, queues=["mail"], **common)
    assert "No worker that serves the queue 'default' is alive." in text_of(root.get(f"{url}change/"))
    BackgroundWorker.objects.create(hostname="web-2", pid=8, **common)
    assert "It does not get on." in text_of(root.get(f"{url}change/"))
    BackgroundQueue.objects.create(name="default", paused_at=old)
    assert "is paused. Resume it." in text_of(root.get(f"{url}change/"))
    BackgroundQueue.objects.all().delete()
    assert said(root.post(f"{url}resume/")) == [f"{operation} goes on."]
    drain()
    operation.refresh_from_db()
    assert operation.state == "finished"


@pytest.mark.parametrize(
    "columns",
    [
        {"act": "nope"}, {"filter": []}, {"filter": {"since": "x"}}, {"filter": {"status": "x"}},
        {"filter": {"ids": 7}}, {"manner": {"delay": "x"}}, {"manner": []}, {"skipped": []},
        {"skipped": {"x": "y"}}, {"filter": {"text": "\x07"}}, {"changed": -5}, {"expected": -5},
    ],
    ids=str,
)  # fmt: skip
def test_anything_may_stand_in_the_row_of_an_operation(root: Client, columns: dict[str, Any]) -> None:
    operation = operations.begin(DISCARD, Filter(), Person("ada"))
    BackgroundOperation.objects.update(**columns)
    for url in (OPERATIONS, f"{OPERATIONS}{operation.pk}/change/"):
        assert root.get(url).status_code == 200
    for verb in ("stop", "resume"):
        assert root.post(f"{OPERATIONS}{operation.pk}/{verb}/").status_code in (302, 403)


@pytest.mark.parametrize("id", ["0", "x", "9" * 25, "-1", "%00"])
def test_ids_of_no_operation_lead_away(root: Client, id: str) -> None:
    assert root.get(f"{OPERATIONS}{id}/change/").status_code in (302, 404)
    assert root.post(f"{OPERATIONS}{id}/stop/").status_code == 404


# ── With other arguments ──────────────────────────────────────────────────────────────────────────────────


def edit(client: Client, url: str, id: int, args: str, kwargs: str = "", *, confirm: bool = True) -> Any:
    """Go through the pages on which the arguments of a job are edited."""
    address = f"{url}{id}/edit/"
    page = client.get(address)
    assert page.status_code == 200
    seen_at = page.context["form"]["seen_at"].value()
    answers = {"args": args, "kwargs": kwargs, "reason": "A typo.", "seen_at": seen_at}
    response = client.post(address, answers)
    if confirm and response.status_code == 200 and response.context["lines"]:
        shown = response.content.decode()
        again = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', shown))
        return client.post(address, {name: html.unescape(value) for name, value in again.items()})
    return response


@pytest.mark.parametrize("url", [DEAD, JOBS])
def test_a_job_is_retried_with_other_arguments_once_they_have_been_seen(root: Client, url: str) -> None:
    job = make_job("failed", payload={"args": [1], "kwargs": {"y": "zwei"}})
    page = root.get(f"{url}{job.pk}/edit/")
    assert page.context["form"]["args"].value() == "[\n  1\n]"
    assert page.context["form"]["kwargs"].value() == '{\n  "y": "zwei"\n}'
    assert "tests.jobs.add(x, y)" in text_of(page)
    shown = edit(root, url, job.pk, "[1]", '{"y": 2}', confirm=False)
    assert '- "y": "zwei"' in text_of(shown)
    assert '+ "y": 2' in text_of(shown)
    assert job.refresh().status == "failed"

    response = edit(root, url, job.pk, "[1]", '{"y": 2}')
    assert said(response)[-1] == "1 job queued again."
    assert response.headers["Location"] == (DEAD if url == DEAD else f"{JOBS}{job.pk}/change/")
    assert job.refresh().payload == {"args": [1], "kwargs": {"y": 2}}
    drain()
    assert (job.refresh().status, job.result) == ("completed", 3)
    before, after = '{"args": [1], "kwargs": {"y": "zwei"}}', '{"args": [1], "kwargs": {"y": 2}}'
    retried, changed = (message for _, _, message in logged())
    assert retried.startswith("Queued again. Before: failed")
    assert retried.endswith("Reason: A typo.")
    assert changed == f"Arguments changed. Before: {before}. After: {after}."


def test_a_difference_has_an_ellipsis_where_something_is_left_out(root: Client) -> None:
    job = make_job("failed", payload={"args": ["zwei"], "kwargs": {"y": "drei"}})
    for args, kwargs, signs in (("[2]", '{"y": "drei"}', "  -+   "), ('["zwei"]', '{"y": 3}', "@   -+  ")):
        shown = edit(root, DEAD, job.pk, args, kwargs, confirm=False)
        assert "".join(line.sign for line in shown.context["lines"]) == signs


@pytest.mark.parametrize(
    ("args", "kwargs", "error"),
    [
        ("[1, 2", "", "This is not JSON"),
        ('{"x": 1}', "", "This must be a JSON array, such as [1, 2]."),
        ("[1]", "[2]", 'This must be a JSON object, such as {"days": 7}.'),
        ("[1]", "", "missing a required argument: 'y'"),
        ("[1, 2, 3]", "", "too many positional arguments"),
        ("[1, NaN]", "", "jsonb"),
        ("[1, 2]", "", "The arguments are what they were."),
        ("[" * 2000 + "]" * 2000, "", ""),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_are_told_of(root: Client, args: str, kwargs: str, error: str) -> None:
    job = make_job("failed", payload={"args": [1, 2]})
    response = edit(root, DEAD, job.pk, args, kwargs)
    assert response.status_code == 200
    assert error in text_of(response) or error == "jsonb"
    assert response.context["form"].errors
    assert (job.refresh().status, job.payload) == ("failed", {"args": [1, 2]})


def test_a_job_that_was_changed_meanwhile_is_not_overwritten(root: Client) -> None:
    job = make_job("failed")
    address = f"{DEAD}{job.pk}/edit/"
    seen_at = root.get(address).context["form"]["seen_at"].value()
    BackgroundJob.objects.filter(pk=job.pk).update(updated_at=job.updated_at + timedelta(seconds=1))
    answers = {"args": "[3, 4]", "reason": "x", "seen_at": seen_at, "confirmed": "yes"}
    assert "Somebody has changed this job meanwhile." in text_of(root.post(address, answers))
    assert (job.refresh().status, job.payload) == ("failed", {"args": [1, 2]})
    assert root.post(address, answers | {"seen_at": "x"}).status_code == 200
    job.retry()
    assert root.post(address, answers).status_code == 404
    response = root.post(f"{JOBS}{job.pk}/edit/", answers)
    assert said(response)[-1] == "This job is queued: it cannot be retried."


def test_a_job_gets_the_unique_key_of_its_arguments(root: Client) -> None:
    function = job(name="tests.letters.unique", unique=["x"])(lambda x: None)
    try:
        failed = function.enqueue(1)
        BackgroundJob.objects.filter(pk=failed.pk).update(status="failed")
        taken, key = function.enqueue(2), failed.refresh().unique_key
        told = said(edit(root, DEAD, failed.pk, "[2]"))[-1]
        assert (
            told == "No job was queued again; 1 was skipped because a job with its unique key waits or runs."
        )
        assert (failed.refresh().status, failed.payload["args"], failed.unique_key) == ("failed", [1], key)
        assert said(edit(root, DEAD, failed.pk, "[3]"))[-1] == "1 job queued again."
        assert failed.refresh().unique_key not in (None, key, taken.unique_key)
    finally:
        del registry["tests.letters.unique"]


def test_what_nobody_can_check_is_not_edited(root: Client) -> None:
    for columns, why in (
        ({"job_name": "shop.gone"}, "nobody can check them"),
        ({"payload": {"x": 1}}, "The payload may have the keys"),
        ({"payload": {"args": ["x" * 60_000]}}, "too large"),
    ):
        job = make_job("failed", **columns)
        assert why in said(root.get(f"{DEAD}{job.pk}/edit/"))[-1]
        assert root.post(f"{DEAD}{job.pk}/edit/", {"args": "[]"}).status_code == 302
        assert job.refresh().status == "failed"


def test_editing_has_its_own_permission(root: Client) -> None:
    job = make_job("failed")
    others = client_of("others", *SEE, "retry_job", "discard_job", "cancel_job")
    editor = client_of("editor", *SEE, "edit_job")
    for url in (DEAD, JOBS):
        assert "/edit/" not in others.get(f"{url}{job.pk}/change/").content.decode()
        assert others.get(f"{url}{job.pk}/edit/").status_code == 403
        assert others.post(f"{url}{job.pk}/edit/", {"args": "[3, 4]"}).status_code == 403
        assert "/edit/" in editor.get(f"{url}{job.pk}/change/").content.decode()
    assert client_of("blind", "edit_job").get(f"{DEAD}{job.pk}/edit/").status_code == 403
    assert said(edit(editor, DEAD, job.pk, "[3, 4]"))[-1] == "1 job queued again."
    for id in ("0", "x", "9" * 25):
        assert root.get(f"{DEAD}{id}/edit/").status_code == 404


def test_hostile_arguments_are_escaped_where_they_are_edited(root: Client) -> None:
    job = make_job("failed", payload={"args": [HOSTILE, HOSTILE]})
    assert_harmless(root.get(f"{DEAD}{job.pk}/edit/").content.decode())
    page = edit(root, DEAD, job.pk, json.dumps([HOSTILE, 1]), confirm=False).content.decode()
    assert "alert(1)" in page
    assert_harmless(page)


# ── Who may do what ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("name", "other"), [("retry", "discard"), ("discard", "retry")])
def test_each_act_on_all_has_its_own_permission(name: str, other: str) -> None:
    ids = dead(4, error_fingerprint="f")
    person = client_of("ada", *VIEW, f"{name}_job")
    for url in (GROUPS, f"{DEAD}?job=tests.jobs.add&fingerprint=f"):
        page = person.get(url).content.decode()
        assert f"act/{name}/" in page
        assert f"act/{other}/" not in page
    assert person.get(f"{DEAD}act/{other}/").status_code == 403
    assert person.post(f"{DEAD}act/{other}/", {"reason": "x"}).status_code == 403
    assert statuses(ids) == {"failed": 4}
    response = ask(person, DEAD, name, {})
    operation = BackgroundOperation.objects.get()
    assert said(response) == [f"{operation} goes on in the background."]
    assert response.headers["Location"] == DEAD
    for url in (OPERATIONS, f"{OPERATIONS}{operation.pk}/change/"):
        assert person.get(url).status_code == 403
    assert person.post(f"{OPERATIONS}{operation.pk}/stop/").status_code == 403


def test_who_may_view_sees_operations_and_steers_none() -> None:
    operation = operations.begin(DISCARD, Filter(), Person("ada"))
    url = f"{OPERATIONS}{operation.pk}/"
    for person in (client_of("viewer", *SEE), client_of("other", *SEE, "retry_job")):
        page = person.get(f"{url}change/").content.decode()
        assert "/stop/" not in page
        assert person.post(f"{url}stop/").status_code == 403
        assert person.get(f"{url}stop/").status_code == 405
    discarder = client_of("discarder", *SEE, "discard_job")
    assert "/stop/" in discarder.get(f"{url}change/").content.decode()
    assert said(discarder.post(f"{url}stop/")) == [f"{operation} is stopped."]


def test_nothing_about_operations_can_be_added_changed_or_deleted(root: Client) -> None:
    operation = operations.begin(DISCARD, Filter(), Person("ada"))
    url = f"{OPERATIONS}{operation.pk}/"
    assert root.get(f"{OPERATIONS}add/").status_code == 403
    assert root.post(f"{url}change/", {"state": "finished"}).status_code == 403
    assert root.post(f"{url}delete/", {"post": "yes"}).status_code == 403
    data = {"action": "delete_selected", "_selected_action": [operation.pk], "index": "0"}
    assert root.post(OPERATIONS, data).status_code in (200, 302, 403)
    operation.refresh_from_db()
    assert operation.state == "running"


def test_strangers_see_none_of_these_pages() -> None:
    operation = operations.begin(DISCARD, Filter(), Person("ada"))
    staff = client_of("staff", "retry_job", "discard_job")
    for url in (GROUPS, f"{DEAD}act/retry/", f"{JOBS}act/discard/", f"{OPERATIONS}{operation.pk}/change/"):
        assert staff.get(url).status_code == 403
        assert "/login/" in Client().get(url).headers["Location"]


# ── What pages cost ───────────────────────────────────────────────────────────────────────────────────────


def test_queries_do_not_grow_with_the_rows(root: Client) -> None:
    def count(url: str) -> int:
        from django.test.utils import CaptureQueriesContext

        root.get(url)
        with CaptureQueriesContext(connection) as captured:
            assert root.get(url).status_code == 200
        return len(captured)

    dead(2, error_fingerprint="f")
    operations.begin(DISCARD, Filter(), Person("ada"))
    urls = [GROUPS, f"{DEAD}?job=tests.jobs.add&fingerprint=f", f"{DEAD}act/retry/", OPERATIONS]
    before = [count(url) for url in urls]
    for n in range(20):
        dead(1, error_fingerprint=str(n), job_name="tests.jobs.add")
        operations.begin(DISCARD, Filter(), Person("ada"))
    assert [count(url) for url in urls] == before
