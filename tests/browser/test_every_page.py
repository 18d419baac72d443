"""What holds for every page of the admin to which links lead, whoever looks at it, and how."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urljoin, urlsplit

import pytest
from django.test import Client
from django.urls import resolve

from django_pgjobs import operations
from django_pgjobs.models import BackgroundJob, BackgroundQueue, BackgroundSchedule
from django_pgjobs.operations import RETRY, Filter, Manner, Person
from tests.browser.conftest import Visit
from tests.browser.visitors import MISSING, PHONE
from tests.factories import make_job
from tests.jobs import sign_in
from tests.test_admin import client_of
from tests.workers import Workers, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

Axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason=f"axe {MISSING}").Axe

SECRET = "correct-horse-battery-staple"
ALIKE = 2  # addresses that differ in nothing but the values of their parameters, and are looked at

SEVERE = ("serious", "critical")
NOT_OURS = (
    ("label-title-only", "#searchbar"),  # the label that Django gives it is a picture
    ("link-in-text-block", ".breadcrumbs > "),  # before Django 6.1
)
# Colours fade from one into another.
SETTLED = "Promise.all(document.getAnimations().map((animation) => animation.finished.catch(() => {})))"


@pytest.fixture
def site(workers: Workers) -> Client:
    """Something of everything on every page; among it a secret, wherever a job can have one."""
    given = {
        "user": "ada",
        "password": SECRET,
        "servers": [{"api_key": SECRET, "url": f"https://x:{SECRET}@y"}],
    }
    failing = [sign_in.using(max_attempts=1).enqueue(**given).pk for _ in range(2)]
    sign_in.using(run_at=timedelta(hours=1)).enqueue("ada", SECRET)
    make_job(
        "completed", job_name=sign_in.name, payload={"kwargs": given}, result={"token": SECRET, "is": SECRET}
    )
    make_job("cancelled", job_name=sign_in.name, payload={"kwargs": given}, metadata={"cookie": SECRET})
    make_job("processing", job_name=sign_in.name, payload={"kwargs": given}, unique_key=f"ada:{SECRET}")
    for each in range(3):
        make_job("failed", queue_name="mail", last_error=f"Timeout: {'m' * 200}", error_fingerprint=str(each))
    BackgroundQueue.objects.create(
        name="mail", paused_at=make_job().created_at, paused_by="ada", reason="x" * 200
    )
    BackgroundSchedule.objects.create(
        name="a.schedule.with.a.long.name", job_name=sign_in.name, payload={"kwargs": given}, cron="0 6 * * *"
    )
    worker = workers.start("--queue", "default").until_listening()
    until(lambda: not BackgroundJob.objects.filter(pk__in=failing).exclude(status="failed").exists())
    worker.stop()
    workers.start("--queue", "nothing").until_listening()
    operations.begin(
        RETRY, Filter(queue="mail"), Person("ada"), reason="It is up.", manner=Manner(per_minute=1)
    )
    root = client_of("crawler", superuser=True)
    edited = {"args": "[]", "kwargs": '{"user": "bob", "password": "[hidden]"}', "reason": "It was bob."}
    page = root.get(f"/admin/django_pgjobs/deadletter/{failing[0]}/edit/")
    edited["seen_at"] = page.context["form"]["seen_at"].value()
    assert root.post(page.request["PATH_INFO"], {**edited, "confirmed": "yes"}).status_code == 302
    return root


def find_pages(client: Client) -> list[str]:
    """The addresses that links lead to, from one to the next. None of them shows a secret."""
    found = ["/admin/"]
    kinds: Counter[object] = Counter()
    for address in found:
        response = client.get(address)
        assert response.status_code == 200, address
        assert SECRET not in response.content.decode(), address
        for link in re.findall(r'href="([^"#]+)', response.content.decode()):
            other = urlsplit(urljoin(address, html.unescape(link)))
            kind = (resolve(other.path).view_name if other.path.startswith("/admin/") else "", *sorted(
                name for name, _ in parse_qsl(other.query, keep_blank_values=True)
            ))  # fmt: skip
            new = other._replace(fragment="").geturl()
            if other.path.startswith("/admin/django_pgjobs/") and new not in found and kinds[kind] < ALIKE:
                kinds[kind] += 1
                found.append(new)
    return found


def kinds_of(pages: list[str]) -> Iterator[str]:
    """The first page of each kind."""
    seen = set()
    for address in pages:
        view = resolve(urlsplit(address).path).view_name
        if view not in seen:
            seen.add(view)
            yield address


def complaints(page: Page, **options: Any) -> Iterator[str]:
    """What axe finds on a page that keeps people from using it."""
    for violation in (
        Axe().run(page, options={"resultTypes": ["violations"], **options}).response["violations"]
    ):
        for node in violation["nodes"]:
            if violation["impact"] in SEVERE and not _is_django(violation["id"], node["target"][0]):
                why = [check["message"] for check in (*node["any"], *node["all"], *node["none"])]
                yield f"{violation['help']}: {node['html'][:200]} ({violation['id']} {node['target']} {why})"


def _is_django(rule: str, target: str) -> bool:
    return any(rule == name and target.startswith(place) for name, place in NOT_OURS)


def test_every_page_is_for_everybody(site: Client, visit: Visit) -> None:
    """Whoever reads it aloud, in the dark or on a phone, sees all that there is to see, and no secret."""
    walker = visit("walker", superuser=True, viewport=PHONE, is_mobile=True, has_touch=True)
    reader = visit("reader", superuser=True, bypass_csp=True)  # axe brings inline styles of its own
    problems = []
    for address in kinds_of(find_pages(site)):
        page = walker.go(address)
        found = ["It shows a secret."] if SECRET in page.content() else []
        if excess := page.evaluate("document.documentElement.scrollWidth - screen.width"):
            found.append(f"On a phone, it is {excess} pixels too wide.")
        page = reader.go(address)
        found += complaints(page)
        page.emulate_media(color_scheme="dark")
        page.evaluate(SETTLED)
        found += [f"In the dark: {each}" for each in complaints(page, runOnly=["color-contrast"])]
        page.emulate_media(color_scheme="light")
        problems += [f"{address}: {each}" for each in found]
    assert not problems, "\n".join(problems)
