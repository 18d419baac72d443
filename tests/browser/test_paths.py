"""What people do in the admin, click by click, while a real worker runs the jobs."""

from __future__ import annotations

import re
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry

from django_pgjobs.models import BackgroundJob, BackgroundOperation
from tests.browser.conftest import Visit
from tests.browser.visitors import MISSING, PATIENCE, SEE, Visitor
from tests.factories import make_job
from tests.workers import Workers, until

expect = pytest.importorskip("playwright.sync_api", reason=f"Playwright {MISSING}").expect

ADMIN = "/admin/django_pgjobs/"
DEAD = f"{ADMIN}deadletter/"
TIMEOUT = "TimeoutError: the bank has not answered for 30 s"


def dead(count: int, **columns: Any) -> list[int]:
    """Dead letters that will complete when they are retried."""
    example = make_job("failed", **({"last_error": TIMEOUT, "error_fingerprint": "bank"} | columns))
    ids = [example.pk]
    if count > 1:
        fields = {
            field.attname: getattr(example, field.attname)
            for field in BackgroundJob._meta.concrete_fields
            if field.attname != "id"
        }
        others = BackgroundJob.objects.bulk_create(BackgroundJob(**fields) for _ in range(count - 1))
        ids += [other.pk for other in others]
    return ids


def statuses(ids: list[int]) -> Counter[str]:
    return Counter(BackgroundJob.objects.filter(pk__in=ids).values_list("status", flat=True))


def until_all(ids: list[int], status: str) -> None:
    until(lambda: statuses(ids) == {status: len(ids)}, what=f"all jobs to be {status}", deadline=PATIENCE)


def told(visitor: Visitor) -> Any:
    """What the site says to somebody after an act."""
    return visitor.page.locator(".messagelist")


def test_somebody_finds_out_what_is_wrong_and_puts_it_right(root: Visitor, workers: Workers) -> None:
    timeouts, others = dead(400), dead(3, last_error="KeyError: 'iban'", error_fingerprint="iban")
    workers.start().until_listening()
    page = root.go("/admin/")
    page.get_by_role("link", name="Overview", exact=True).first.click()
    wrong = page.get_by_role("region", name="What is wrong")
    expect(wrong).to_contain_text("dead letters")
    wrong.get_by_role("link", name="Show: Dead letters are rising").click()

    group = page.get_by_role("row").filter(has_text="the bank has not answered")
    expect(group).to_contain_text("400")
    group.get_by_role("link", name="the bank has not answered").click()
    page.get_by_text("Traceback of one of them").click()
    expect(page.get_by_text("Traceback (most recent call last)")).to_be_visible()
    page.get_by_role("button", name="Retry all that match …").click()

    expect(page.get_by_role("heading", name="Retry 400 dead letters")).to_be_visible()
    assert statuses(timeouts) == {"failed": 400}
    page.get_by_label("Reason").fill("The bank is back.")
    page.get_by_role("button", name="Retry 400 dead letters").click()

    # The operation, which shows by itself how far it is.
    expect(page).to_have_url(re.compile("/backgroundoperation/[0-9]+/change/"))
    expect(page.get_by_text("400 jobs queued again.")).to_be_visible()
    expect(page.locator(".pgjobs-head").get_by_text("finished")).to_be_visible()
    expect(page.get_by_text("The bank is back.")).to_be_visible()
    until_all(timeouts, "completed")
    assert statuses(others) == {"failed": 3}

    root.go(DEAD + "groups/")
    expect(page.get_by_text("3 dead letters, with 1 different error.")).to_be_visible()
    root.go(f"{ADMIN}backgroundjob/{timeouts[0]}/history/")
    expect(page.locator("#change-history")).to_contain_text("Reason: The bank is back.")


def test_a_slow_retry_shows_its_progress_and_can_be_stopped(root: Visitor, workers: Workers) -> None:
    ids = dead(301)
    workers.start().until_listening()
    page = root.go(f"{DEAD}act/retry/")
    page.get_by_label("At most so many a minute").fill("1")
    page.get_by_role("button", name="Retry 301 dead letters").click()
    expect(page.locator(".pgjobs-progress")).to_contain_text(re.compile(r"^\s*[1-9] of 301"))
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Nothing more is changed until somebody resumes it.")).to_be_visible()
    assert BackgroundOperation.objects.get().state == "stopped"
    assert statuses(ids)["failed"] > 290
    page.get_by_role("button", name="Resume").click()
    expect(told(root)).to_contain_text("goes on")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    assert BackgroundOperation.objects.get().state == "running"


def test_two_people_retry_the_same_jobs(visit: Visit, workers: Workers) -> None:
    ids = dead(3)
    ada, bob = visit("ada", superuser=True), visit("bob", superuser=True)
    for visitor in (ada, bob):  # both have decided before either of them acts
        visitor.go(f"{DEAD}act/retry/?job=tests.jobs.add")
        expect(visitor.page.get_by_role("button", name="Retry 3 dead letters")).to_be_visible()
    one, other = visit("cy", superuser=True), visit("di", superuser=True)
    for visitor in (one, other):
        visitor.go(f"{DEAD}{ids[0]}/change/")
    ada.page.get_by_role("button", name="Retry 3 dead letters").click()
    expect(told(ada)).to_contain_text("3 jobs queued again.")
    bob.page.get_by_role("button", name="Retry 3 dead letters").click()
    expect(told(bob)).to_contain_text("No job was queued again")
    for visitor in (one, other):
        visitor.page.get_by_role("button", name="Retry", exact=True).click()
        expect(told(visitor)).to_contain_text("1 was skipped because it is no longer failed")
    workers.start("--drain").wait()
    assert set(BackgroundJob.objects.values_list("status", "attempts")) == {("completed", 1)}
    assert Counter(LogEntry.objects.values_list("user__username", flat=True)) == {"ada": 3}


def test_jobs_that_a_worker_fails_again_are_retried_once(root: Visitor, workers: Workers) -> None:
    ids = dead(400, job_name="tests.jobs.boom", payload={"args": ["again"]}, max_attempts=1, attempts=1)
    workers.start("--threads", "2").until_listening()
    page = root.go(f"{DEAD}act/retry/?job=tests.jobs.boom")
    page.get_by_role("button", name="Retry 400 dead letters").click()
    expect(page.get_by_text("400 jobs queued again.")).to_be_visible()
    until(
        lambda: BackgroundJob.objects.filter(pk__in=ids, last_error="ValueError: again").count() == 400,
        what="all jobs to fail again",
        deadline=PATIENCE,
    )
    assert statuses(ids) == {"failed": 400}
    assert LogEntry.objects.count() == 400
    root.go(f"{DEAD}groups/")
    expect(page.get_by_role("row").filter(has_text="ValueError: again")).to_contain_text("400")


def test_thousands_of_dead_letters_while_workers_run(root: Visitor, workers: Workers) -> None:
    ids = dead(5000)
    made = BackgroundJob.objects.bulk_create(
        BackgroundJob(job_name="tests.jobs.slow", payload={"args": [0.01]}) for _ in range(2000)
    )
    workers.start("--processes", "2", "--threads", "4").until_listening()
    page = root.go(f"{DEAD}groups/")
    page.get_by_role("link", name=re.compile("^Retry all 5,?000 of")).click()
    page.get_by_role("button", name="Retry 5,000 dead letters").click()
    expect(page.get_by_text("5,000 jobs queued again.")).to_be_visible()
    until_all(ids, "completed")
    until_all([one.pk for one in made], "completed")
    assert LogEntry.objects.count() == 5000


def test_a_queue_is_paused_and_resumed(root: Visitor, workers: Workers) -> None:
    workers.start().until_listening()
    make_job(queue_name="mail", run_at=timedelta(hours=1))
    page = root.go(f"{ADMIN}overview/")
    page.get_by_role("link", name="Pause queues …").click()
    page.get_by_label("mail").check()
    page.get_by_label("Reason").fill("The mail server moves.")
    page.get_by_role("button", name="Pause").click()
    expect(told(root)).to_contain_text("The queue 'mail' is paused.")
    job = make_job(queue_name="mail")

    root.go(f"{ADMIN}overview/")
    row = page.get_by_role("region", name="Table of queues").get_by_role("row").filter(has_text="mail")
    expect(row).to_contain_text("by root: The mail server moves.")
    row.get_by_role("link", name=re.compile("paused")).click()
    page.get_by_label("Reason").fill("It has moved.")
    assert job.refresh().status == "queued"
    page.get_by_role("button", name="Resume").click()
    expect(told(root)).to_contain_text("The queue 'mail' is resumed.")
    until_all([job.pk], "completed")
    page.get_by_role("link", name="History").click()
    expect(page.locator("#change-history")).to_contain_text("It has moved.")


def test_arguments_are_edited_and_the_difference_is_shown(root: Visitor, workers: Workers) -> None:
    (id,) = dead(1, payload={"args": ["north", 7]})
    page = root.go(f"{DEAD}{id}/change/")
    page.get_by_role("link", name="Edit and retry …").click()
    page.get_by_label("Arguments:", exact=True).fill("[1, 7, 8]")
    page.get_by_label("Reason").fill("A typing error.")
    page.get_by_role("button", name="Show what changes").click()
    expect(page.locator(".errorlist")).to_contain_text("too many positional arguments")
    page.get_by_label("Arguments:", exact=True).fill("[1, 7]")
    page.get_by_role("button", name="Show what changes").click()
    expect(page.get_by_role("heading", name="This is what changes")).to_be_visible()
    expect(page.locator("del")).to_contain_text('"north"')
    expect(page.locator("ins")).to_contain_text("1")
    assert BackgroundJob.objects.get(pk=id).payload == {"args": ["north", 7]}
    page.get_by_role("button", name="Retry with these arguments").click()
    expect(told(root)).to_contain_text("1 job queued again.")
    workers.start("--drain").wait()
    assert BackgroundJob.objects.get(pk=id).result == 8


def test_a_discard_needs_a_reason(root: Visitor) -> None:
    ids = dead(2)
    page = root.go(f"{DEAD}groups/")
    page.get_by_role("link", name="Discard all 2 of").click()
    reason = page.get_by_label("Reason")
    page.get_by_role("button", name="Discard 2 dead letters").click()
    assert reason.evaluate("field => field.validity.valueMissing")  # and so the browser has not sent it
    assert statuses(ids) == {"failed": 2}
    reason.fill("Nobody wants last week's reminders.")
    page.get_by_role("button", name="Discard 2 dead letters").click()
    expect(told(root)).to_contain_text("2 jobs discarded.")
    assert statuses(ids) == {"cancelled": 2}
    assert all("last week's" in entry.change_message for entry in LogEntry.objects.all())


def test_what_waits_in_a_queue_is_purged_once_its_name_is_typed(root: Visitor) -> None:
    ids = [make_job(queue_name="mail").pk for _ in range(3)]
    other = make_job()
    page = root.go(f"{ADMIN}backgroundqueue/")
    page.get_by_role("button", name="Purge a queue …").click()
    page.get_by_role("link", name="mail", exact=True).click()
    expect(page.get_by_text("3 queued jobs in the queue mail")).to_be_visible()
    page.get_by_label("Its name, once more").fill("mial")
    page.get_by_label("Reason").fill("A loop has enqueued them.")
    page.get_by_role("button", name="Cancel 3 queued jobs").click()
    expect(page.locator(".errorlist")).to_be_visible()
    assert statuses(ids) == {"queued": 3}
    page.get_by_label("Its name, once more").fill("mail")
    page.get_by_role("button", name="Cancel 3 queued jobs").click()
    expect(told(root)).to_contain_text("3 jobs cancelled.")
    assert statuses([*ids, other.pk]) == {"cancelled": 3, "queued": 1}


def test_a_worker_is_asked_to_stop(root: Visitor, visit: Visit, workers: Workers) -> None:
    worker = workers.start().until_listening()
    bob = visit("bob", *SEE)
    bob.go(f"{ADMIN}backgroundworker/").get_by_role("link", name=re.compile(f":{worker.pid}$")).click()
    expect(bob.page.locator("#pgjobs-worker")).to_contain_text("running")
    page = root.go(f"{ADMIN}backgroundworker/")
    page.get_by_role("link", name=re.compile(f":{worker.pid}$")).click()
    expect(page.locator("#pgjobs-worker")).to_contain_text("running")
    page.get_by_role("link", name="Ask to stop …").click()
    page.get_by_label("Reason").fill("It is to have more memory.")
    page.get_by_role("button", name="Ask it to stop").click()
    expect(told(root)).to_contain_text("is asked to stop.")
    assert worker.wait() == 0
    entry = LogEntry.objects.get()
    assert "It is to have more memory." in entry.change_message
    expect(told(bob)).to_contain_text("This worker has ended.")  # without doing anything
    expect(bob.page.get_by_role("heading", name="Workers", exact=True)).to_be_visible()
