"""What people are offered who may see everything, and do nothing or one thing."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User

from django_pgjobs import operations
from django_pgjobs.models import BackgroundQueue, BackgroundSchedule, BackgroundWorker
from django_pgjobs.operations import RETRY, Filter, Person
from tests.browser.conftest import Visit
from tests.browser.visitors import MISSING, SEE, Visitor
from tests.factories import make_job, rows

pytest.importorskip("playwright.sync_api", reason=f"Playwright {MISSING}")

# The controls of a page that change something or lead to where something is changed.
OFFERS = """() => [...document.querySelectorAll(`#content :is(
  form[method=post] button:not([name=index], [hidden]), input[type=submit]:not([value=Search]), a.button,
  .pgjobs-acts a, .pgjobs-question, .addlink, a[href*="/pause/"], [name=action] option:not([value=""])
)`)].map((one) => one.localName == "input" ? one.value : one.textContent.trim())"""

OFFERED = {
    "retry_job": {
        "deadletter/?queue=default": {
            "Retry all that match …", "Retry: queue again, due now", "Retry later, slowly or elsewhere …"
        },
        "deadletter/groups/": {"Retry …"},
        "deadletter/LETTER/change/": {"Retry", "Retry later or elsewhere …"},
        "backgroundjob/LETTER/change/": {"Retry", "Retry later or elsewhere …"},
        "backgroundoperation/OPERATION/change/": {"Stop"},
    },
    "discard_job": {
        "deadletter/?queue=default": {"Discard all that match …", "Discard: do not run again …"},
        "deadletter/groups/": {"Discard …"},
        "deadletter/LETTER/change/": {"Discard …"},
    },
    "cancel_job": {
        "backgroundjob/": {"Cancel: do not run what is queued"},
        "backgroundjob/QUEUED/change/": {"Cancel"},
    },
    "stop_job": {
        "backgroundjob/": {"Stop what is running"},
        "backgroundjob/RUNNING/change/": {"Stop"},
    },
    "run_job": {"backgroundjob/QUEUED/change/": {"Run now"}},
    "duplicate_job": {"backgroundjob/DONE/change/": {"Duplicate"}},
    "edit_job": {"deadletter/LETTER/change/": {"Edit and retry …"}},
    "export_job": {
        "deadletter/": {"Export as CSV", "Export as JSON lines"},
        "backgroundjob/": {"Export as CSV", "Export as JSON lines"},
    },
    "pause_queue": {
        "overview/": {"Pause queues …"},
        "backgroundqueue/": {"Pause queues …", "Pause …", "Resume"},
        "backgroundqueue/mail/change/": {"Resume"},
        "backgroundqueue/web/change/": {"Pause …"},
    },
    "purge_queue": {
        "backgroundqueue/": {"Purge a queue …"},
        "backgroundqueue/mail/change/": {"Purge …"},
        "backgroundqueue/web/change/": {"Purge …"},
    },
    "stop_worker": {"backgroundworker/WORKER/change/": {"Ask to stop …"}},
    "enable_schedule": {
        "backgroundschedule/": {
            "Enable: take ticks again, from the next one on", "Disable: take no ticks"
        },
        "backgroundschedule/daily/change/": {"Disable"},
    },
    "run_schedule": {
        "backgroundschedule/": {"Run now: enqueue a job of each"},
        "backgroundschedule/daily/change/": {"Run now"},
    },
    "add_backgroundschedule": {"backgroundschedule/": {"Add schedule"}},
    "change_backgroundschedule": {
        "backgroundschedule/daily/change/": {"Save", "Save and continue editing"}
    },
    "delete_backgroundschedule": {"backgroundschedule/": {"Delete selected schedules"}},
}  # fmt: skip
PAGES = [*dict.fromkeys(path for pages in OFFERED.values() for path in pages), "backgroundworker/"]


@pytest.fixture
def ids() -> dict[str, object]:
    """Something on every page to which anything can be done, and what it goes by in the paths above."""
    letter, queued = make_job("failed"), make_job(queue_name="mail", run_at=timedelta(hours=1))
    running, done = make_job("processing"), make_job("completed")
    BackgroundQueue.objects.create(name="mail", paused_at=done.created_at, paused_by="ada")
    BackgroundQueue.objects.create(name="web")
    BackgroundSchedule.objects.create(name="daily", job_name="tests.jobs.snooze", cron="0 6 * * *")
    operation = operations.begin(RETRY, Filter(), Person("ada"))
    worker = BackgroundWorker.objects.create(
        hostname="web-1", pid=7, processes=1, threads=1, async_slots=0, lease=timedelta(days=1), version="1"
    )
    there = {
        "WORKER": worker,
        "LETTER": letter,
        "QUEUED": queued,
        "RUNNING": running,
        "DONE": done,
        "OPERATION": operation,
    }
    return {name: one.pk for name, one in there.items()}


def address(path: str, ids: dict[str, object]) -> str:
    for name, id in ids.items():
        path = path.replace(name, str(id))
    return f"/admin/django_pgjobs/{path}"


def offers(visitor: Visitor, path: str, ids: dict[str, object]) -> set[str]:
    return set(visitor.go(address(path, ids)).evaluate(OFFERS))


def test_who_may_only_look_is_offered_nothing_and_can_do_nothing(
    visit: Visit, ids: dict[str, object]
) -> None:
    looker = visit("looker", *SEE)
    for path in PAGES:
        assert offers(looker, path, ids) == set(), path
    before = rows()
    for path in (
        "deadletter/LETTER/retry/", "backgroundjob/LETTER/retry/", "deadletter/act/retry/",
        "deadletter/act/discard/", "backgroundjob/act/retry/", "deadletter/LETTER/edit/",
        "backgroundjob/QUEUED/cancel/", "backgroundjob/QUEUED/run/", "backgroundjob/RUNNING/stop/",
        "backgroundjob/DONE/duplicate/", "backgroundqueue/pause/", "backgroundqueue/mail/resume/",
        "backgroundqueue/purge/?queue=mail",
        "backgroundoperation/OPERATION/stop/", "backgroundoperation/OPERATION/resume/",
        "backgroundschedule/daily/disable/", "backgroundschedule/daily/run/",
        "backgroundschedule/daily/delete/", "backgroundschedule/add/", "deadletter/LETTER/delete/",
        "backgroundjob/LETTER/delete/", "deadletter/add/", "deadletter/LETTER/change/",
        "backgroundqueue/web/delete/", "backgroundworker/add/",
        "backgroundworker/WORKER/stop/",
    ):  # fmt: skip
        assert looker.post(address(path, ids), reason="Because.", queues="web", post="yes") == 403, path
    selected = {"index": "0", "select_across": "1", "_selected_action": str(ids["LETTER"])}
    for action in ("retry_jobs", "retry_jobs_otherwise", "discard_jobs", "cancel_jobs", "export_csv"):
        for path in ("deadletter/", "backgroundjob/"):
            looker.post(address(path, ids), action=action, **selected)
    assert rows() == before
    assert not LogEntry.objects.exists()


def test_each_permission_offers_its_own_acts(visit: Visit, ids: dict[str, object]) -> None:
    visitor = visit("ada", *SEE)
    user = User.objects.get(username="ada")
    for name, expected in OFFERED.items():
        user.user_permissions.set(Permission.objects.filter(codename__in=[*SEE, name]))
        assert {path: offers(visitor, path, ids) for path in expected} == expected, name
