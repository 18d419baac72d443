"""The admin, through the client: who may do what, what hostile rows do to it, and what its pages cost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.core.management import call_command
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext, override_settings

from django_pgjobs import operations
from django_pgjobs.admin import jobs as pages
from django_pgjobs.admin import letters, lists, readonly
from django_pgjobs.models import BackgroundJob, BackgroundQueue, BackgroundSchedule, BackgroundWorker
from django_pgjobs.testing import drain
from tests.factories import make_job, rows
from tests.jobs import boom
from tests.sessions import session

pytestmark = pytest.mark.django_db

ADMIN = "/admin/django_pgjobs/"
JOBS = f"{ADMIN}backgroundjob/"
DEAD = f"{ADMIN}deadletter/"
STATUSES = ("queued", "processing", "failed", "completed", "cancelled")
VIEW = ("view_backgroundjob", "view_deadletter", "view_backgroundqueue", "view_backgroundworker")


HOSTILE = (
    """</pre><script>alert(1)</script><img src=x onerror=alert(2)>" onmouseover='alert(3)' javascript:x"""
)


def client_of(name: str, *permissions: str, superuser: bool = False) -> Client:
    user = User.objects.create(username=name, is_staff=True, is_superuser=superuser)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def root(db: None) -> Client:
    return client_of("root", superuser=True)


def act(client: Client, url: str, action: str, ids: list[int], **more: str) -> list[str]:
    """Run an action on a list and return what the person is told."""
    data = {"action": action, "_selected_action": ids, "index": "0", "select_across": "0", **more}
    response = client.post(url, data)
    assert response.status_code == 302
    return said(response)


def ask(client: Client, url: str, name: str, query: dict[str, Any], **answers: Any) -> Any:
    """Go through the page of an act on many jobs: look at it, fill in the form, and send it."""
    address = f"{url}act/{name}/?{urlencode(query, doseq=True)}"
    page = client.get(address)
    assert page.status_code == 200
    initial = {field.name: field.value() for field in page.context["form"]}
    answers = {"reason": "Because.", **answers}
    return client.post(address, {n: v for n, v in (initial | answers).items() if v is not None})


def discard(client: Client, url: str, *ids: int) -> list[str]:
    return said(ask(client, url, "discard", {"ids": ",".join(map(str, ids))}))[-1:]


def said(response: Any) -> list[str]:
    return [str(message) for message in get_messages(response.wsgi_request)]


def status(job: BackgroundJob) -> str:
    return rows(job._state.db or "default")[job.pk]["status"]


def logged() -> list[tuple[str, str, str]]:
    entries = LogEntry.objects.select_related("user").order_by("id")
    return [(entry.user.username, entry.object_id or "", entry.change_message) for entry in entries]


# Looking


@pytest.mark.parametrize("each", STATUSES)
def test_a_job_of_every_status_has_a_page(root: Client, each: str) -> None:
    job = make_job(each)
    response = root.get(f"{JOBS}{job.pk}/change/")
    assert response.status_code == 200
    assert f'<span class="pgjobs-status pgjobs-{each}">{each}</span>' in response.content.decode()
    assert "tests.jobs.add" in response.content.decode()


def test_the_page_of_a_dead_letter_tells_what_happened(root: Client) -> None:
    job = make_job("failed", payload={"args": [4011], "kwargs": {"language": "de"}}, metadata={"by": "ada"})
    page = root.get(f"{DEAD}{job.pk}/change/").content.decode()
    assert page.count("/history/") == 1
    assert "Failed for good" in page
    assert "ValueError: boom" in page
    assert "Traceback (most recent call last):" in page
    assert "&quot;language&quot;: &quot;de&quot;" in page
    assert "&quot;by&quot;: &quot;ada&quot;" in page


def test_a_job_whose_function_is_gone_is_shown_and_can_be_retried(root: Client) -> None:
    job = make_job("failed", job_name="shop.gone")
    page = root.get(f"{DEAD}{job.pk}/change/").content.decode()
    assert "No job function of this name is known to this site." in page
    assert said(root.post(f"{DEAD}{job.pk}/retry/")) == ["1 job queued again."]


def test_the_timeline_of_a_job_that_will_be_tried_again(root: Client) -> None:
    common = {"processes": 1, "threads": 4, "async_slots": 0, "lease": timedelta(seconds=60), "version": "1"}
    worker = BackgroundWorker.objects.create(hostname="web-1", pid=7, **common)
    gone = "3f2a9c4e-0000-4000-8000-000000000000"
    error = {"exception": "builtins.ValueError", "traceback": "Traceback of it"}
    errors = [
        {"began": "2026-01-02T03:00:00+00:00", "at": "2026-01-02T03:04:05+00:00", "attempt": 1,
         "worker": gone, "message": "first", **error},
        {"began": "2026-01-02T04:00:00.5+00:00", "at": "2026-01-02T04:00:03+00:00", "attempt": 2,
         "worker": str(worker.pk), "message": "second", **error},
    ]  # fmt: skip
    metadata = {"schedule": "daily", "tick": "2026-01-02T03:00:00+00:00", "interruptions": 2}
    job = make_job(attempts=2, run_at=timedelta(hours=1), errors=errors, metadata=metadata)
    page = root.get(f"{JOBS}{job.pk}/change/")
    shown = [str(entry.what) for entry in page.context["page"].timeline]
    assert shown == [
        "Runs again.",
        "Attempt 2 failed after 2.5 s on web-1:7.",
        "Attempt 1 failed after 4 min on a worker that is gone (3f2a9c4e).",
        "Enqueued by the schedule 'daily', for 2026-01-02T03:00:00+00:00.",
    ]
    text = page.content.decode()
    assert text.count("Traceback of it") == 2
    assert "<dt>Interrupted</dt><dd>2 times</dd>" in text
    assert "schedule &#x27;daily&#x27;" in text


@pytest.mark.parametrize(
    ("each", "first"),
    [
        ("queued", "Runs as soon as a worker takes it."),
        ("processing", "Attempt 1 began on a worker that is gone (00000000), and goes on."),
        ("completed", "Attempt 1 completed after 2.0 s on a worker that is gone (00000000)."),
        ("cancelled", "Cancelled."),
        ("failed", "Attempt 3 failed on a worker that is gone ("),
    ],
)
def test_a_timeline_begins_with_what_was_last(root: Client, each: str, first: str) -> None:
    columns: dict[str, Any] = {"worker_id": "00000000-0000-4000-8000-000000000000"}
    if each == "completed":
        columns |= {"attempted_at": timedelta(seconds=-5), "updated_at": timedelta(seconds=-3)}
    job = make_job(each, **columns)
    timeline = root.get(f"{JOBS}{job.pk}/change/").context["page"].timeline
    assert str(timeline[0].what).startswith(first)
    assert timeline[-1].what == "Enqueued."


def test_a_worker_notes_when_a_failed_attempt_began(root: Client) -> None:
    job = boom.using(max_attempts=1).enqueue("it")
    drain()
    (attempt,) = root.get(f"{JOBS}{job.pk}/change/").context["page"].attempts
    assert attempt.took.endswith((" ms", " s"))


@pytest.mark.parametrize(
    "metadata",
    [
        [], 7, "text", {"schedule": 7, "tick": [], "copy_of": "x", "enqueued_by": {}, "context": [1]},
        {"schedule": HOSTILE, "tick": HOSTILE, "enqueued_by": HOSTILE, "context": {HOSTILE: HOSTILE}},
        {"copy_of": 10**30, "schedule": "x" * 300}, {"copy_of": -1, "interruptions": "many"},
        {"schedule": "a/b?c=d\n", "copy_of": 2**63 - 1, "interruptions": 10**30},
    ],
)  # fmt: skip
def test_anything_may_stand_in_the_metadata(root: Client, metadata: Any) -> None:
    job = make_job("failed", metadata=metadata, unique_key=HOSTILE)
    for url in (JOBS, DEAD):
        response = root.get(f"{url}{job.pk}/change/")
        assert response.status_code == 200
        assert_harmless(response.content.decode())
    assert said(root.post(f"{JOBS}{job.pk}/duplicate/"))[-1].endswith("is queued.")


def test_related_jobs_are_linked(root: Client) -> None:
    BackgroundSchedule.objects.create(name="daily", job_name="tests.jobs.add", cron="0 6 * * *")
    old = make_job("completed", unique_key="k", metadata={"schedule": "daily"})
    make_job("completed", unique_key="other")
    make_job("completed", unique_key="k", job_name="shop.other", metadata={"schedule": "daily"})
    job = make_job("failed", unique_key="k", metadata={"schedule": "daily"})
    new = make_job(metadata={"schedule": "daily"})
    response = root.get(f"{JOBS}{job.pk}/change/")
    related = {heading: [link["text"] for link in links] for heading, links in response.context["related"]}
    assert related == {
        "With its unique key": [f"Job {old.pk}"],
        "Before and after it, of its schedule": [f"Job {new.pk}", f"Job {old.pk}"],
        "The schedule": ["daily"],
        "Its error": ["All dead letters that failed alike"],
    }
    for _, links in response.context["related"]:
        for link in links:
            assert root.get(link["url"]).status_code == 200
    person = client_of("ada", "view_deadletter")
    assert [name for name, _ in person.get(f"{DEAD}{job.pk}/change/").context["related"]] == ["Its error"]


def test_pages_tell_which_worker_runs_a_job_and_which_is_silent(root: Client) -> None:
    common = {"processes": 2, "threads": 4, "async_slots": 0, "lease": timedelta(seconds=60), "version": "1"}
    worker = BackgroundWorker.objects.create(hostname="web-1", pid=7, running=3, **common)
    worker.refresh_from_db()
    BackgroundWorker.objects.create(
        hostname="web-2",
        pid=8,
        queues=["mail"],
        last_seen_at=worker.last_seen_at - timedelta(hours=1),
        **common,
    )
    BackgroundQueue.objects.create(name="mail", paused_at=worker.started_at, paused_by="ada", reason="<b>why")
    job = make_job("processing", worker_id=worker.pk)
    assert "web-1:7" in root.get(f"{JOBS}{job.pk}/change/").content.decode()
    listed = root.get(f"{ADMIN}backgroundworker/").content.decode()
    assert "3 in 8 slots" in listed
    assert listed.count(">silent<") == 1
    assert root.get(f"{ADMIN}backgroundworker/{worker.pk}/change/").status_code == 200
    queues = root.get(f"{ADMIN}backgroundqueue/").content.decode()
    assert "&lt;b&gt;why" in queues
    assert root.get(f"{ADMIN}backgroundqueue/mail/change/").status_code == 200


def test_dead_letters_come_newest_failure_first_and_alone(root: Client) -> None:
    old = make_job("failed", updated_at=-timedelta(days=2))
    new = make_job("failed", updated_at=-timedelta(hours=1))
    middle = make_job("failed", updated_at=-timedelta(days=1))
    make_job("completed")
    response = root.get(DEAD)
    assert [job.pk for job in response.context["cl"].result_list] == [new.pk, middle.pk, old.pk]
    response = root.get(f"{DEAD}?o=5")
    assert [job.pk for job in response.context["cl"].result_list] == [old.pk, middle.pk, new.pk]


def listed(response: Any) -> list[int]:
    assert response.status_code == 200
    return [job.pk for job in response.context["cl"].result_list]


def test_the_queues_to_choose_from(root: Client) -> None:
    for each in STATUSES:
        make_job(each, queue_name=f"of {each}")
    BackgroundQueue.objects.create(name="paused")
    (choices,) = [one for one in root.get(JOBS).context["cl"].filter_specs if one.title == "queue"]
    assert [name for name, _ in choices.lookup_choices] == sorted(
        [*(f"of {each}" for each in STATUSES), "paused"]
    )


def test_filters_and_search(root: Client) -> None:
    jobs = {each: make_job(each, queue_name=f"{each} & <co>") for each in STATUSES}
    other = make_job(job_name="shop.other")
    for each, job in jobs.items():
        found = listed(root.get(JOBS, {"status": each}))
        assert found == ([other.pk, job.pk] if each == "queued" else [job.pk])
        assert listed(root.get(JOBS, {"queue": f"{each} & <co>"})) == [job.pk]
        assert listed(root.get(JOBS, {"queue": f"{each} & <co>", "status": each})) == [job.pk]
        assert listed(root.get(JOBS, {"q": f" {job.pk} "})) == [job.pk]
    assert listed(root.get(JOBS, {"q": "shop.other"})) == [other.pk]
    assert listed(root.get(JOBS, {"q": "shop"})) == []
    assert listed(root.get(JOBS, {"q": "9" * 30})) == []
    assert listed(root.get(JOBS, {"status": "failed", "q": "shop.other"})) == []
    page = root.get(JOBS).content.decode()
    assert "failed &amp; &lt;co&gt;" in page
    assert "<co>" not in page


@pytest.mark.parametrize(
    "query",
    [
        "status=nope", "status=", "status=FAILED", "status__exact=nope", "status__exact=failed",
        "payload__contains=x", "job_name__startswith=t", "id__gt=x", "queue=%00", "q=%00", "o=99", "o=-1.2",
        "o=x", "o=%C2%B2", "p=0", "p=-1", "p=9999", "p=x", "all=", "e=1", "_facets=1", "_popup=1",
        "_to_field=payload", "queue=a&queue=b", "status=failed&status=queued",
        f"q={'9' * 500}", "q=%F0%9F%92%A5",
    ],
)  # fmt: skip
def test_nothing_in_the_address_is_a_server_error(root: Client, query: str) -> None:
    make_job("failed")
    for url in (JOBS, DEAD):
        assert root.get(f"{url}?{query}").status_code in (200, 302, 400)


@pytest.mark.parametrize("id", ["0", "x", "9" * 25, "-1", "%00", "1_5F"])
def test_ids_of_no_job_lead_away(root: Client, id: str) -> None:
    for url in (JOBS, DEAD):
        assert root.get(f"{url}{id}/change/").status_code in (302, 404)
        assert root.post(f"{url}{id}/retry/").status_code in (302, 403, 404)
        assert root.get(f"{url}{id}/history/").status_code in (302, 404)


def test_only_indexed_columns_can_be_sorted_by(root: Client) -> None:
    make_job("failed")
    for query, sortable in (
        ("", ["id"]),
        ("?status=processing", ["id"]),
        ("?status=queued", []),
        ("?status=failed", ["updated"]),
        ("?status=completed&queue=default", ["id"]),
    ):
        changes = root.get(JOBS + query).context["cl"]
        assert list(changes.sortable_by) == sortable
        for column in range(9):
            again = root.get(JOBS + (query + "&" if query else "?") + f"o={column}").context["cl"]
            fields = [field.removeprefix("-") for field in again.queryset.query.order_by]
            assert fields == [field.removeprefix("-") for field in changes.queryset.query.order_by]


# Who may do what


def test_nothing_can_be_added_changed_or_deleted(root: Client) -> None:
    job = make_job("failed")
    before = rows()
    for model in ("backgroundjob", "deadletter", "backgroundqueue", "backgroundworker"):
        assert root.get(f"{ADMIN}{model}/add/").status_code == 403
        assert root.post(f"{ADMIN}{model}/add/", {"job_name": "os.system"}).status_code == 403
    for url in (JOBS, DEAD):
        assert root.post(f"{url}{job.pk}/change/", {"status": "completed"}).status_code == 403
        assert root.get(f"{url}{job.pk}/delete/").status_code == 403
        assert root.post(f"{url}{job.pk}/delete/", {"post": "yes"}).status_code == 403
        assert act(root, url, "delete_selected", [job.pk]) == ["No action selected."]
        data = {"form-TOTAL_FORMS": "1", "form-INITIAL_FORMS": "1", "form-0-id": job.pk, "_save": "Save"}
        assert root.post(url, data).status_code in (200, 302)
    assert rows() == before


def test_staff_without_permissions_and_strangers_see_nothing() -> None:
    job = make_job("failed")
    staff = client_of("staff", "retry_job", "discard_job")
    for url in (JOBS, DEAD):
        assert staff.get(url).status_code == 403
        assert staff.get(f"{url}{job.pk}/change/").status_code == 403
        assert staff.post(url, {"action": "retry_jobs", "_selected_action": [job.pk]}).status_code == 403
        assert staff.post(f"{url}{job.pk}/retry/").status_code == 403
        assert "/login/" in Client().get(url).headers["Location"]
        assert "/login/" in Client().post(f"{url}{job.pk}/retry/").headers["Location"]
    assert status(job) == "failed"
    assert logged() == []


def test_viewers_see_everything_and_change_nothing() -> None:
    job = make_job("failed")
    viewer = client_of("viewer", *VIEW)
    before = rows()
    for url in (JOBS, DEAD):
        assert listed(viewer.get(url)) == [job.pk]
        page = viewer.get(f"{url}{job.pk}/change/").content.decode()
        assert "/retry/" not in page
        assert "/discard/" not in page
        for action in ("retry_jobs", "discard_jobs"):
            assert "_selected_action" not in viewer.get(url).content.decode()
            data = {"action": action, "_selected_action": [job.pk], "index": "0", "select_across": "1"}
            assert viewer.post(url, data).status_code in (200, 302, 403)
        assert viewer.post(f"{url}{job.pk}/retry/").status_code == 403
        for name in ("retry", "discard"):
            assert viewer.get(f"{url}act/{name}/").status_code == 403
            assert viewer.post(f"{url}act/{name}/", {"reason": "x"}).status_code == 403
    assert rows() == before
    assert logged() == []


@pytest.mark.parametrize("each", STATUSES)
def test_the_page_of_a_job_offers_what_its_status_allows(root: Client, each: str) -> None:
    job = make_job(each, run_at=timedelta(hours=1))
    page = root.get(f"{JOBS}{job.pk}/change/").content.decode()
    offered = set(re.findall(r"/(retry|discard|run|cancel|stop|duplicate|edit)/[\"?]", page))
    assert (
        offered
        == {
            "queued": {"run", "cancel", "duplicate"},
            "processing": {"stop", "duplicate"},
            "failed": {"retry", "discard", "edit", "duplicate"},
            "completed": {"duplicate"},
            "cancelled": {"retry", "edit", "duplicate"},
        }[each]
    )


@pytest.mark.parametrize("name", ["run", "cancel", "stop", "duplicate"])
def test_what_is_done_by_a_button_has_its_own_permission(name: str) -> None:
    jobs = {
        "run": make_job(run_at=timedelta(hours=1)),
        "cancel": make_job(),
        "stop": make_job("processing"),
        "duplicate": make_job("completed"),
    }
    before = rows()
    others = client_of("others", *VIEW, *(f"{other}_job" for other in (*jobs, "retry") if other != name))
    url = f"{JOBS}{jobs[name].pk}/{name}/"
    assert f"/{name}/" not in others.get(f"{JOBS}{jobs[name].pk}/change/").content.decode()
    assert others.post(url).status_code == 403
    assert act(others, JOBS, f"{name}_jobs", [jobs[name].pk]) == ["No action selected."]
    assert client_of("blind", f"{name}_job").post(url).status_code == 403
    assert rows() == before
    assert logged() == []
    ada = client_of("ada", *VIEW, f"{name}_job")
    assert ada.get(url).status_code == 405
    for other, job in jobs.items():
        page = ada.get(f"{JOBS}{job.pk}/change/").content.decode()
        assert (f"/{name}/" in page) == (name in (other, "duplicate") or (name, other) == ("cancel", "run"))
    assert ada.post(url, {"reason": "x" * 251}).status_code == 302
    assert rows() == before
    assert ada.post(url, {"reason": "Ada said so."}).status_code == 302
    assert rows() != before


def test_what_was_done_by_a_button_is_told_and_logged(root: Client) -> None:
    later, waits, runs = make_job(run_at=timedelta(hours=1)), make_job(), make_job("processing")
    assert said(root.post(f"{JOBS}{later.pk}/run/", {"reason": "Now."}))[-1] == "1 job due now."
    assert said(root.post(f"{JOBS}{waits.pk}/cancel/", {"reason": "No."}))[-1] == "1 job cancelled."
    assert said(root.post(f"{JOBS}{runs.pk}/stop/"))[-1] == "1 job asked to stop."
    assert root.get(f"{JOBS}{later.pk}/change/").content.decode().count("/run/") == 0
    assert status(waits) == "cancelled"
    assert rows()[runs.pk]["stop_requested_at"] is not None
    queued = "Before: queued, 0 of 3 attempts, queue default."
    processing = "Before: processing, 1 of 3 attempts, queue default."
    assert logged() == [
        ("root", str(later.pk), f"Due now. {queued} After: queued, due now. Reason: Now."),
        ("root", str(waits.pk), f"Cancelled. {queued} After: cancelled. Reason: No."),
        ("root", str(runs.pk), f"Asked to stop. {processing} After: processing, asked to stop."),
    ]


@pytest.mark.parametrize(
    ("name", "became", "told"),
    [
        ("run", "processing", "No job was due now; 1 was skipped because it is not queued."),
        ("run", "queued", "No job was due now; 1 was skipped because it is due already."),
        ("cancel", "processing", "No job was cancelled; 1 was skipped because it is not queued."),
        ("cancel", "cancelled", "No job was cancelled; 1 was skipped because it is not queued."),
        ("stop", "completed", "No job was asked to stop; 1 was skipped because it is not processing."),
        (
            "retry", "queued",
            "No job was queued again; 1 was skipped because it is neither failed nor cancelled.",
        ),
    ],
)  # fmt: skip
def test_a_button_that_comes_too_late_says_so(root: Client, name: str, became: str, told: str) -> None:
    job = make_job(became)
    before = rows()
    assert said(root.post(f"{JOBS}{job.pk}/{name}/"))[-1] == told
    gone = said(root.post(f"{JOBS}{job.pk + 1}/{name}/"))[-1]
    assert gone.endswith("1 was skipped because it no longer exists.")
    assert rows() == before
    assert logged() == []


def test_a_copy_of_a_job_is_enqueued(root: Client) -> None:
    metadata = {"context": {"request": "r-1"}, "schedule": "daily", "interruptions": 2}
    columns = {"queue_name": "mail", "priority": 7, "max_attempts": 9, "rerun_if_lost": False}
    job = make_job("failed", payload={"args": [7, 8]}, metadata=metadata, unique_key="k", **columns)
    before = rows()[job.pk]
    response = root.post(f"{JOBS}{job.pk}/duplicate/", {"reason": "Once more."})
    copy = BackgroundJob.objects.latest("id")
    assert response["Location"] == f"{JOBS}{copy.pk}/change/"
    assert said(response) == [f"Job {copy.pk}, a copy of job {job.pk}, is queued."]
    assert rows()[job.pk] == before
    after = rows()[copy.pk]
    same = ("queue_name", "job_name", "payload", "priority", "max_attempts", "rerun_if_lost", "unique_key")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert (copy.status, copy.attempts, copy.errors) == ("queued", 0, [])
    assert copy.metadata == {"context": {"request": "r-1"}, "copy_of": job.pk, "enqueued_by": "root"}
    before_and_after = (
        "Before: failed, 3 of 9 attempts, queue mail. After: the same, and job"
        f" {copy.pk} is queued. Reason: Once more."
    )
    origin = f"Enqueued as a copy of job {job.pk}. Before: none. After: queued, due now. Reason: Once more."
    assert logged() == [
        ("root", str(job.pk), f"Duplicated. {before_and_after}"),
        ("root", str(copy.pk), origin),
    ]
    page = root.get(f"{JOBS}{copy.pk}/change/").content.decode()
    assert f"Enqueued by root, as a copy of job {job.pk}, with request r-1." in page
    assert f'<a href="{JOBS}{job.pk}/change/">Job {job.pk}</a> <span class="quiet">failed</span>' in page


def test_a_job_that_cannot_be_duplicated_is_told_of(root: Client) -> None:
    job = make_job("failed", unique_key="k")
    make_job("processing", unique_key="k")
    told = said(root.post(f"{JOBS}{job.pk}/duplicate/"))[-1]
    assert told == f"Job {job.pk} was not duplicated, because a job with its unique key waits or runs."
    for url, reason in (
        (f"{JOBS}{job.pk + 9}", "it no longer exists."),
        (f"{DEAD}{job.pk + 1}", "it is no longer a dead letter."),
    ):
        assert said(root.post(f"{url}/duplicate/"))[-1].endswith(f"was not duplicated, because {reason}")
    assert len(rows()) == 2
    assert logged() == []


def test_a_copy_of_a_dead_letter_leads_back_who_sees_no_other_job() -> None:
    job = make_job("failed")
    person = client_of("ada", "view_deadletter", "duplicate_job")
    response = person.post(f"{DEAD}{job.pk}/duplicate/")
    assert response["Location"] == f"{DEAD}{job.pk}/change/"
    assert len(rows()) == 2


@pytest.mark.parametrize("url", [JOBS, DEAD])
@pytest.mark.parametrize(
    ("permission", "may", "may_not", "becomes"),
    [("retry_job", "retry", "discard", "queued"), ("discard_job", "discard", "retry", "cancelled")],
)
def test_each_act_has_its_own_permission(
    url: str, permission: str, may: str, may_not: str, becomes: str
) -> None:
    one, two = make_job("failed"), make_job("failed")
    person = client_of("ada", *VIEW, permission)
    page = person.get(f"{url}{one.pk}/change/").content.decode()
    assert f"/{may}/" in page
    assert f"/{may_not}/" not in page
    assert person.post(f"{url}act/{may_not}/?ids={one.pk}", {"reason": "x"}).status_code == 403
    assert person.post(f"{url}{one.pk}/{may_not}/").status_code in (302, 403)
    assert act(person, url, f"{may_not}_jobs", [one.pk]) == ["No action selected."]
    assert status(one) == "failed"
    if may == "retry":
        act(person, url, "retry_jobs", [one.pk])
        person.post(f"{url}{two.pk}/retry/")
    else:
        discard(person, url, one.pk, two.pk)
    assert (status(one), status(two)) == (becomes, becomes)
    before = "Before: failed, 3 of 3 attempts, queue default."
    message = {
        "retry": f"Queued again. {before} After: queued, due now.",
        "discard": f"Discarded. {before} After: cancelled. Reason: Because.",
    }[may]
    assert logged() == [("ada", str(one.pk), message), ("ada", str(two.pk), message)]


def test_who_sees_dead_letters_only_sees_no_other_job() -> None:
    person = client_of("ada", "view_deadletter", "retry_job")
    done, dead = make_job("completed"), make_job("failed")
    assert person.get(JOBS).status_code == 403
    assert person.get(f"{DEAD}{done.pk}/change/").status_code == 302
    assert person.get(f"{DEAD}{dead.pk}/history/").status_code == 200
    assert said(person.post(f"{DEAD}{dead.pk}/retry/")) == ["1 job queued again."]


def test_acts_need_a_post_and_a_token() -> None:
    job = make_job("failed")
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create(username="root", is_staff=True, is_superuser=True))
    for url in (JOBS, DEAD):
        assert client.get(f"{url}{job.pk}/retry/").status_code == 405
        assert client.get(url, {"action": "retry_jobs", "_selected_action": job.pk}).status_code in (302, 400)
        assert client.post(f"{url}{job.pk}/retry/").status_code == 403
        data = {"action": "retry_jobs", "_selected_action": [job.pk], "index": "0"}
        assert client.post(url, data).status_code == 403
    assert status(job) == "failed"
    page = client.get(f"{DEAD}{job.pk}/change/").content.decode()
    token = re.search(r'class="pgjobs-acting">\s*<input[^>]+value="([^"]+)"', page)
    assert token is not None
    assert client.post(f"{DEAD}{job.pk}/retry/", {"csrfmiddlewaretoken": token[1]}).status_code == 302
    assert status(job) == "queued"


# Acting


def test_retrying_on_the_list_of_jobs_changes_failed_and_cancelled_ones_only(root: Client) -> None:
    jobs = {each: make_job(each) for each in STATUSES}
    before = rows()
    told = act(root, JOBS, "retry_jobs", [job.pk for job in jobs.values()])
    assert told == ["2 jobs queued again; 3 were skipped because they are neither failed nor cancelled."]
    after = rows()
    for each, job in jobs.items():
        if each in ("failed", "cancelled"):
            assert (after[job.pk]["status"], after[job.pk]["attempts"]) == ("queued", 0)
            assert after[job.pk]["errors"] == before[job.pk]["errors"]
        else:
            assert after[job.pk] == before[job.pk]
    assert {id for _, id, _ in logged()} == {str(jobs["failed"].pk), str(jobs["cancelled"].pk)}


def test_discarding_changes_failed_ones_only(root: Client) -> None:
    jobs = {each: make_job(each) for each in STATUSES}
    told = discard(root, JOBS, *(job.pk for job in jobs.values()))
    assert told == ["1 job discarded; 4 were skipped because they are not failed."]
    assert status(jobs["failed"]) == "cancelled"


def test_running_now_cancelling_and_stopping_change_what_they_are_for(root: Client) -> None:
    jobs = {each: make_job(each, run_at=timedelta(hours=1)) for each in STATUSES}
    due, deaf = make_job().pk, make_job("processing", locked_by=None).pk
    ids = [due, deaf, *(job.pk for job in jobs.values())]
    before = rows()
    assert act(root, JOBS, "run_jobs", ids) == [
        "1 job due now; 5 were skipped because they are not queued; 1 was skipped because it is due already."
    ]
    assert rows()[jobs["queued"].pk]["run_at"] < before[jobs["queued"].pk]["run_at"]
    assert act(root, JOBS, "stop_jobs", ids)[-1] == (
        "1 job asked to stop; 5 were skipped because they are not processing; 1 was skipped because a client"
        " runs it that cannot be asked."
    )
    assert act(root, JOBS, "cancel_jobs", ids)[-1] == (
        "2 jobs cancelled; 5 were skipped because they are not queued."
    )
    after = rows()
    assert (status(jobs["queued"]), after[due]["status"]) == ("cancelled", "cancelled")
    assert after[jobs["processing"].pk]["stop_requested_at"] is not None
    for id in (deaf, *(jobs[each].pk for each in ("failed", "completed", "cancelled"))):
        assert after[id] == before[id]


def test_retrying_leaves_a_job_whose_unique_key_is_taken(root: Client) -> None:
    first, second = (make_job("failed", unique_key="key") for _ in range(2))
    free = make_job("failed", unique_key="other")
    assert act(root, DEAD, "retry_jobs", [second.pk, first.pk, free.pk]) == [
        "2 jobs queued again; 1 was skipped because a job with its unique key waits or runs."
    ]
    assert [status(job) for job in (first, second, free)] == ["queued", "failed", "queued"]


def test_two_people_retry_the_same_jobs(root: Client) -> None:
    other = client_of("ada", *VIEW, "retry_job")
    ids = [make_job("failed").pk for _ in range(4)]
    assert act(root, DEAD, "retry_jobs", ids[:3]) == ["3 jobs queued again."]
    assert act(other, DEAD, "retry_jobs", ids) == [
        "1 job queued again; 3 were skipped because they are no longer failed."
    ]
    told = said(other.post(f"{DEAD}{ids[0]}/retry/"))[-1]
    assert told == "No job was queued again; 1 was skipped because it is no longer failed."
    response = other.get(f"{DEAD}{ids[0]}/change/")
    assert response.headers["Location"] == f"{JOBS}{ids[0]}/change/"
    assert said(response)[-1] == "This job is no longer failed; it is queued."
    assert [(who, id) for who, id, _ in logged()] == [
        *(("root", str(id)) for id in ids[:3]), ("ada", str(ids[3]))
    ]  # fmt: skip


def test_jobs_that_are_gone_are_told_of(root: Client) -> None:
    job = make_job("failed")
    assert act(root, DEAD, "retry_jobs", [job.pk, job.pk + 1]) == [
        "1 job queued again; 1 was skipped because it no longer exists."
    ]


@pytest.mark.parametrize("id", ["x", "-1", "", "9" * 30, "1; DROP TABLE background_jobs"])
def test_a_selection_of_what_is_no_id_changes_nothing(root: Client, id: str) -> None:
    job = make_job("failed")
    response = root.post(DEAD, {"action": "retry_jobs", "_selected_action": [job.pk, id], "index": "0"})
    assert response.status_code == 302
    assert said(response) == ["The selection has something that is no id of a job."]
    assert status(job) == "failed"


def test_cancelling_all_acts_in_batches_up_to_a_limit(root: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "BATCH", 3)
    monkeypatch.setattr(lists, "MOST", 8)
    monkeypatch.setattr(pages, "MOST", 8)
    mail = [make_job(queue_name="mail", run_at=timedelta(hours=n)).pk for n in range(10)]
    other = make_job(queue_name="other")
    waiting = f"{JOBS}?queue=mail&status=queued"
    page = root.get(waiting)
    assert page.context["cl"].notes == [
        "There are more than 8 jobs here. This list goes through the first 8 of them."
    ]
    told = act(root, waiting, "cancel_jobs", mail[:1], select_across="1")
    assert told == ["8 jobs cancelled."]
    assert [rows()[id]["status"] for id in mail] == ["cancelled"] * 8 + ["queued"] * 2
    assert status(other) == "queued"
    assert len(logged()) == 8


def test_what_cannot_be_logged_does_not_happen(root: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job("failed")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no log")

    monkeypatch.setattr(type(LogEntry.objects), "log_actions", fail)
    with pytest.raises(RuntimeError, match="no log"):
        root.post(f"{DEAD}{job.pk}/retry/")
    assert status(job) == "failed"


def test_the_history_of_a_job_holds_what_was_done_to_the_dead_letter(root: Client) -> None:
    job = make_job("failed", job_name="<i>name")
    discard(root, DEAD, job.pk)
    history = root.get(f"{JOBS}{job.pk}/history/").content.decode()
    assert "Discarded." in history
    assert "<i>name" not in history


@pytest.mark.django_db(transaction=True)
def test_a_locked_job_is_skipped_and_nobody_waits() -> None:
    root = client_of("root", superuser=True)
    job, free = make_job("failed"), make_job("failed")
    with session() as other, other.transaction():
        other.execute("SET LOCAL idle_in_transaction_session_timeout = 30000")
        other.execute("SELECT FROM background_jobs WHERE id = %s FOR UPDATE", [job.pk])
        with connections["default"].cursor() as cursor:
            cursor.execute("SET lock_timeout = 5000")  # an error rather than a test that hangs
        skipped = "1 was skipped because somebody else is changing it just now."
        assert act(root, DEAD, "retry_jobs", [job.pk, free.pk]) == [f"1 job queued again; {skipped}"]
        assert said(root.post(f"{DEAD}{job.pk}/retry/"))[-1] == f"No job was queued again; {skipped}"
        assert status(job) == "failed"
    connections["default"].close()


@pytest.mark.django_db(transaction=True)
def test_nobody_waits_for_long_to_have_a_locked_job_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "PATIENCE", timedelta(milliseconds=50))
    root = client_of("root", superuser=True)
    job = make_job("processing")
    with session() as other, other.transaction():
        other.execute("SELECT FROM background_jobs WHERE id = %s FOR UPDATE", [job.pk])
        told = said(root.post(f"{JOBS}{job.pk}/stop/"))[-1]
    assert told == ("No job was asked to stop; 1 was skipped because somebody else is changing it just now.")
    assert rows()[job.pk]["stop_requested_at"] is None
    assert logged() == []
    assert said(root.post(f"{JOBS}{job.pk}/stop/"))[-1] == "1 job asked to stop."


# Hostile rows


def assert_harmless(page: str) -> None:
    for tag in ("<script>alert", "<img src=x", "</pre><script", "onmouseover='alert"):
        assert tag not in page
    assert not re.search(r"(?:href|src|action)=[\"']?javascript:", page)


@pytest.mark.parametrize("each", STATUSES)
def test_hostile_texts_are_escaped_everywhere(root: Client, each: str) -> None:
    error = dict.fromkeys(("at", "attempt", "worker", "exception", "message", "traceback"), HOSTILE)
    job = make_job(
        each,
        job_name=HOSTILE, queue_name=HOSTILE, payload={"args": [HOSTILE], HOSTILE: 1},
        result={HOSTILE: HOSTILE}, metadata={HOSTILE: HOSTILE}, errors=[error], last_error=HOSTILE,
        unique_key=HOSTILE,
    )  # fmt: skip
    BackgroundQueue.objects.create(name=HOSTILE, reason=HOSTILE, paused_by=HOSTILE)
    urls = [
        JOBS,
        f"{JOBS}?queue={HOSTILE}",
        f"{JOBS}?q={HOSTILE}",
        f"{JOBS}{job.pk}/change/",
        DEAD,
        "/admin/",
    ]
    urls += [f"{JOBS}{job.pk}/history/", f"{ADMIN}backgroundqueue/"]
    for url in urls:
        response = root.get(url, follow=True)
        assert response.status_code == 200
        assert_harmless(response.content.decode())
    if each == "failed":
        assert_harmless(root.get(f"{DEAD}{job.pk}/change/").content.decode())
        assert_harmless(root.post(f"{DEAD}{job.pk}/retry/", follow=True).content.decode())


@pytest.mark.parametrize(
    "errors",
    [
        "null", "{}", "7", '"text"', "[7, null, []]", '[{"at": "yesterday", "message": {"a": [1]}}]',
        '[{"at": "0001-01-01T00:00:00+14:00", "message": "old"}]', '[{"at": "9999-12-31T23:59:59-12:00"}]',
        "[" * 900 + "]" * 900, f"[{{\"message\": {'9' * 5000}}}]", '[{"at": "2026-01-01"}]',
    ],
)  # fmt: skip
def test_anything_may_stand_in_the_history_of_errors(root: Client, errors: str) -> None:
    job = make_job("failed")
    with connections["default"].cursor() as cursor:
        cursor.execute("UPDATE background_jobs SET errors = %s::jsonb WHERE id = %s", [errors, job.pk])
    for url in (JOBS, DEAD):
        assert root.get(url).status_code == 200
        assert root.get(f"{url}{job.pk}/change/").status_code == 200


@pytest.mark.parametrize("redact", [["*password*"], []])
def test_large_rows_give_small_pages(root: Client, settings: Any, redact: list[str]) -> None:
    settings.PGJOBS = {"REDACT": redact}
    million = "<" * 1_000_000
    job = make_job(
        "failed",
        payload={"args": [million] * 5}, result=[million], metadata={"m": million}, last_error=million,
        errors=[{"message": million, "traceback": million, "exception": million}],
    )  # fmt: skip
    page = root.get(f"{DEAD}{job.pk}/change/").content
    assert len(page) < 600_000
    note = "It has {}, and could not be searched for secrets." if redact else "Cut: all of it has {}."
    assert note.format("4.8\N{NO-BREAK SPACE}MB") in page.decode()
    for _ in range(20):
        make_job("failed", payload={"args": [million]}, last_error=million)
    assert len(root.get(DEAD).content) < 300_000
    assert len(root.get(JOBS).content) < 200_000
    deep = make_job("failed", payload={"args": json.loads("[" * 500 + "]" * 500)})
    assert root.get(f"{DEAD}{deep.pk}/change/").status_code == 200


def test_no_page_has_an_inline_script_or_style(root: Client) -> None:
    job = make_job("failed")
    for url in (
        JOBS,
        DEAD,
        f"{JOBS}{job.pk}/change/",
        f"{DEAD}{job.pk}/change/",
        f"{ADMIN}backgroundworker/",
    ):
        page = root.get(url).content.decode()
        assert "django_pgjobs/admin.css" in page
        assert not re.search(r"\sstyle=|\son[a-z]+=", page)
        assert all('src="' in tag for tag in re.findall(r"<script[^>]*>", page))


# What pages cost


def queries_of(client: Client, url: str) -> list[str]:
    client.get(url)  # the first visit of all looks up the content types, which are then kept
    with CaptureQueriesContext(connections["default"]) as captured:
        assert client.get(url).status_code == 200
    return [query["sql"] for query in captured]


def test_queries_do_not_grow_with_the_rows(root: Client) -> None:
    job = make_job("failed")
    urls = [JOBS, f"{JOBS}?status=failed", f"{JOBS}?queue=default", DEAD, f"{DEAD}{job.pk}/change/"]
    before = [len(queries_of(root, url)) for url in urls]
    assert max(before) <= 16
    for _ in range(30):
        make_job("failed")
    assert [len(queries_of(root, url)) for url in urls] == before


def test_lists_leave_the_large_columns_alone(root: Client) -> None:
    make_job("failed")
    for url in (JOBS, DEAD):
        for sql in queries_of(root, url):
            if 'FROM "background_jobs"' in sql and "COUNT(" not in sql:
                for column in ("payload", "result", "errors", "metadata"):
                    assert f'"{column}"' not in sql or column == "payload"
                assert '"payload"' not in sql or 'pg_column_size("background_jobs"."payload") < 2000' in sql
                assert '"last_error"' not in sql or 'LEFT("background_jobs"."last_error"' in sql


@pytest.fixture
def many(transactional_db: None) -> Client:
    """Tens of thousands of rows: most are completed, dead letters are few and old, one queue is rare."""
    with connections["default"].cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO background_jobs (queue_name, job_name, payload, status, updated_at, run_at, priority)
            SELECT CASE WHEN n % 20000 = 7 THEN 'rare' ELSE 'queue ' || n % 3 END,
                   'job ' || n % 10, '{}',
                   (CASE WHEN n < 300 THEN 'failed' WHEN n < 400 THEN 'cancelled'
                         WHEN n < 420 THEN 'processing' WHEN n > 39000 THEN 'queued'
                         ELSE 'completed' END)::job_status,
                   statement_timestamp() - (40000 - n) * interval '1 s',
                   statement_timestamp() + (n % 7) * interval '1 h', n % 3
              FROM generate_series(1, 40000) AS n
            """
        )
        cursor.execute("VACUUM ANALYZE background_jobs")
    return client_of("root", superuser=True)


def scans(node: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The scans of background_jobs in a plan, each with the rows that it went through."""
    if node.get("Relation Name") == "background_jobs" or "idx_jobs" in node.get("Index Name", ""):
        seen = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
        yield node["Node Type"], seen * node["Actual Loops"]
    for child in node.get("Plans", ()):
        yield from scans(child)


def test_no_page_reads_the_whole_table(many: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    most, window = 1_500, 3_000
    for module in (lists, pages):
        monkeypatch.setattr(module, "MOST", most)
        monkeypatch.setattr(module, "WINDOW", window)
    monkeypatch.setattr(letters, "WINDOW", window)
    failed = BackgroundJob.objects.filter(status="failed").first()
    assert failed is not None
    filters = [f"status={each}" for each in STATUSES] + ["queue=rare", "queue=queue 1", "queue=nope"]
    filters += [f"status={each}&queue={queue}" for each in STATUSES for queue in ("rare", "queue 1", "nope")]
    filters += [f"{each}q=job 3" for each in ("", *(f"status={each}&" for each in STATUSES))]
    filters += [f"q={failed.pk}", "q=nothing", "p=2", "p=15", "o=1", "o=-1", "o=5", "status=completed&o=7"]
    urls = [JOBS, DEAD, f"{DEAD}?queue=rare", f"{JOBS}{failed.pk}/change/", f"{DEAD}{failed.pk}/change/"]
    explained = 0
    for url in urls + [f"{JOBS}?{each}" for each in filters]:
        queries = [sql for sql in queries_of(many, url) if "background_jobs" in sql]
        with connections["default"].cursor() as cursor:
            cursor.execute("SET enable_seqscan = off; SET jit = off")
            for sql in queries:
                cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}")
                (((plan,),),) = [cursor.fetchone()]
                for kind, seen in scans(plan["Plan"]):
                    explained += 1
                    assert kind != "Seq Scan", (url, sql)
                    assert seen <= window + most, (url, sql, seen)
            cursor.execute("RESET enable_seqscan; RESET jit")
    assert explained > 100


def test_the_size_of_a_large_table_is_an_estimate(many: Client) -> None:
    changes = many.get(JOBS).context["cl"]
    assert changes.notes == [
        "There are about 40,000 jobs here. This list goes through the first 10,000 of them."
    ]
    assert changes.result_count == 10_000
    assert len(changes.result_list) == 100
    assert many.get(f"{JOBS}?p=100").status_code == 200
    assert many.get(f"{JOBS}?p=101").status_code == 302
    found = many.get(f"{JOBS}?queue=rare").context["cl"]
    (note,) = found.notes
    assert note == (
        "Only the newest 50,000 jobs were searched. For older ones choose a status other than completed, or"
        " search for an id."
    )


def test_a_page_that_takes_too_long_gives_up_and_says_so(
    many: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readonly, "PATIENCE", timedelta(milliseconds=100))

    def slow(alias: str, limit: int) -> list[str]:
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT pg_sleep(20)")
        return []

    monkeypatch.setattr("django_pgjobs.store.queue_names", slow)
    response = many.get(JOBS)
    assert response.status_code == 503
    assert "was told to stop" in response.content.decode()
    with connections["default"].cursor() as cursor:
        cursor.execute("SHOW statement_timeout")
        assert cursor.fetchone() == ("0",)
        cursor.execute("SHOW enable_seqscan")
        assert cursor.fetchone() == ("on",)


# A queue on another database


@pytest.mark.django_db(databases=["default", "other"])
@pytest.mark.parametrize("routers", [[], ["django_pgjobs.router.Router"]])
def test_a_queue_on_another_database_is_read_and_written_there(routers: list[str]) -> None:
    root = client_of("root", superuser=True)
    make_job("failed", queue_name="wrong", using="default")
    with override_settings(PGJOBS={"DATABASE": "other"}, DATABASE_ROUTERS=routers):
        job, second = make_job("failed", using="other"), make_job("failed", using="other")
        assert listed(root.get(DEAD)) == [second.pk, job.pk]
        assert "wrong" not in root.get(JOBS).content.decode()
        assert root.get(f"{JOBS}{job.pk}/change/").status_code == 200
        assert act(root, DEAD, "retry_jobs", [job.pk]) == ["1 job queued again."]
        assert discard(root, DEAD, second.pk) == ["1 job discarded."]
        assert (status(job), status(second)) == ("queued", "cancelled")
        assert LogEntry.objects.using("default").count() == 2
        assert root.get(f"{JOBS}{job.pk}/history/").status_code == 200


def test_migrations_are_complete() -> None:
    call_command("makemigrations", "--check", "--dry-run", "django_pgjobs", verbosity=0)
