"""The overview, through the client: who may see it, what it shows, and what it must not."""

from __future__ import annotations

import re
import uuid
from datetime import timedelta
from typing import Any

import django
import psycopg
import pytest
from django.contrib.auth.models import Permission, User
from django.db import OperationalError, connections, transaction
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext, override_settings

from django_pgjobs import doctor, store
from django_pgjobs.admin import overview
from django_pgjobs.models import BackgroundQueue, BackgroundWorker
from tests.factories import make_job
from tests.sessions import session

pytestmark = pytest.mark.django_db

PAGE = "/admin/django_pgjobs/overview/"
FRAGMENT = f"{PAGE}?fragment"
JOBS = "/admin/django_pgjobs/backgroundjob/"
DEAD = "/admin/django_pgjobs/deadletter/"
BY_ERROR = f"{DEAD}groups/"


def client_of(*permissions: str, superuser: bool = False) -> Client:
    user = User.objects.create(username=uuid.uuid4().hex, is_staff=True, is_superuser=superuser)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def root(db: None) -> Client:
    return client_of(superuser=True)


def make_worker(silent: timedelta = timedelta(0), **columns: Any) -> BackgroundWorker:
    values: dict[str, Any] = {
        "hostname": "box", "pid": 7, "processes": 2, "threads": 4, "async_slots": 0,
        "lease": timedelta(minutes=1), "version": "1", **columns,
    }  # fmt: skip
    worker = BackgroundWorker.objects.create(**values)
    BackgroundWorker.objects.filter(pk=worker.pk).update(last_seen_at=Now() - silent)
    return worker


def page_of(client: Client, url: str = PAGE) -> str:
    response = client.get(url)
    assert response.status_code == 200
    return str(response.content.decode())


def words(html: str) -> str:
    """What a page says, without its tags."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


def queue_rows(page: str) -> dict[str, list[str]]:
    """The cells of the table of queues, by the name of the queue."""
    (table,) = re.findall(r'<table class="pgjobs-queues">(.*?)</table>', page, re.S)
    (body,) = re.findall(r"<tbody>(.*?)</tbody>", table, re.S)
    rows = {}
    for row in re.findall(r"<tr>(.*?)</tr>", body, re.S):
        (head,) = re.findall(r"<th[^>]*>(.*?)</th>", row, re.S)
        rows[words(head).strip()] = [words(cell).strip() for cell in re.findall(r"<td.*?</td>", row, re.S)]
    return rows


# Who may see it


def test_only_who_may_view_jobs_sees_the_overview(db: None) -> None:
    assert Client().get(PAGE).headers["Location"].startswith("/admin/login/")
    for permissions in ((), ("view_deadletter", "view_backgroundworker", "retry_job")):
        client = client_of(*permissions)
        assert client.get(PAGE).status_code == 403
        assert client.get(FRAGMENT).status_code == 403
        assert PAGE not in client.get("/admin/").content.decode()
    client = client_of("view_backgroundjob")
    assert client.get(PAGE).status_code == 200
    assert f'<a href="{PAGE}"' in client.get("/admin/").content.decode()


def test_nothing_can_be_done_there(root: Client) -> None:
    assert root.post(PAGE).status_code == 405
    for url in ("add/", "1/", "1/change/", "1/delete/", "1/history/"):
        assert root.get(PAGE + url).status_code == 404


def test_it_links_to_what_the_user_may_see(root: Client) -> None:
    worker = make_worker()
    job = make_job("processing", queue_name="a & b", worker_id=worker.pk)
    make_job("failed", queue_name="a & b")
    links = [f"{JOBS}?queue=a+%26+b", f"{JOBS}{job.pk}/change/"]
    others = [f"{DEAD}groups/?queue=a+%26+b", f"/admin/django_pgjobs/backgroundworker/{worker.pk}/change/"]
    page = page_of(root)
    for link in links + others:
        assert f'href="{link}"' in page
        assert root.get(link).status_code == 200
    page = page_of(client_of("view_backgroundjob"))
    assert all(f'href="{link}"' in page for link in links)
    assert not any(link in page for link in others)
    assert DEAD not in page


# What it shows


def test_the_figures_of_a_queue(root: Client) -> None:
    make_worker(queues=["mail"])
    make_worker(queues=["other"], hostname="other")
    for minutes in (5, 2):
        make_job(queue_name="mail", run_at=-timedelta(minutes=minutes))
    make_job(queue_name="mail", run_at=timedelta(hours=1))
    make_job("processing", queue_name="mail")
    for seconds in (1, 2, 3):
        make_job(
            "completed", queue_name="mail",
            created_at=-timedelta(minutes=9, seconds=seconds), run_at=-timedelta(minutes=9, seconds=seconds),
            attempted_at=-timedelta(minutes=9), updated_at=-timedelta(minutes=8),
        )  # fmt: skip
    make_job("failed", queue_name="mail", updated_at=-timedelta(minutes=8))
    make_job("failed", queue_name="mail", updated_at=-timedelta(days=8))
    BackgroundQueue.objects.create(name="paused", paused_at=Now() - timedelta(hours=3))

    rows = queue_rows(page_of(root))
    assert rows["mail"] == ["3", "2", "5 min", "1", "2", "3", "25.0 %", "2.0 s / 2.9 s", "1"]
    assert rows["paused paused 3 h ago"] == ["0", "0", "–", "0", "0", "0", "–", "–", "0"]


def test_the_workers_and_what_they_run(root: Client) -> None:
    busy = make_worker(running=7, queues=["mail"])
    make_worker(timedelta(minutes=12), hostname="gone", pid=9)
    for minutes in range(1, 8):
        make_job("processing", worker_id=busy.pk, attempted_at=-timedelta(minutes=minutes), attempts=2)
    make_job("processing", worker_id=None, locked_by=None, attempted_at=None, job_name="of.client")
    text = words(page_of(root))
    assert "box:7 running serves mail, 7 of 8 slots taken, up for" in text
    assert "gone:9 silent serves all queues, 0 of 8 slots taken" in text
    assert "silent for 12 min" in text
    assert re.search(r"tests\. ?jobs\. ?add #\d+ in default, for 7 min, attempt 2 of 3", text)
    assert "for 3 min" in text
    assert "for 2 min" not in text
    assert "and 2 more" in text
    assert "Others unknown clients with statements of their own, and workers that are gone" in text


def test_what_is_wrong_is_said_with_what_to_do(root: Client) -> None:
    assert "No worker is alive." in words(page_of(root))
    make_job(queue_name="mail", run_at=-timedelta(minutes=5))
    for pid in range(3):
        make_worker(timedelta(minutes=5), pid=pid)
    page = page_of(root)
    assert "Error. No worker is alive, and 1 job is due. Start one with: manage.py runjobs." in words(page)
    assert words(page).count("has been silent for 5 min") == 3
    assert words(page).count("It may have been killed") == 1
    make_worker(queues=["other"])
    page = page_of(root)
    assert f'<a href="{JOBS}?queue=mail&amp;status=queued" aria-label="Show: ' in page
    assert "Nothing, as far as this page can tell." not in page


def test_a_finding_leads_to_its_jobs(root: Client) -> None:
    worker = make_worker()
    job = make_job("processing", worker_id=worker.pk, attempted_at=-timedelta(hours=5))
    lost = make_job("processing", locked_at=-timedelta(hours=1))
    for _ in range(10):
        make_job("failed", queue_name="bad")
    page = page_of(root)
    for link in (f"{JOBS}{job.pk}/change/", f"{JOBS}?status=processing", BY_ERROR, f"{BY_ERROR}?queue=bad"):
        assert f'<a href="{link}" aria-label="Show: ' in page
    assert lost.pk != job.pk
    assert "Show</a>" in page_of(client_of("view_backgroundjob"))


def test_where_nothing_is(root: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "findings", lambda facts: [])
    text = words(page_of(root))
    assert "Nothing, as far as this page can tell." in text
    assert "In no queue anything waits, runs, has failed, or completed in the last hour." in text
    assert "There is no worker." in text
    assert "Last hour: 0 completed." in page_of(root)
    assert "Nothing finished." in text


def test_without_a_table_it_says_so(root: Client) -> None:
    with transaction.atomic():
        with connections["default"].cursor() as cursor:
            cursor.execute("DROP TABLE background_jobs")
        assert "Run: manage.py migrate django_pgjobs" in page_of(root)
        transaction.set_rollback(True)


@pytest.mark.parametrize("language", ["en", "de"])
def test_the_charts_and_what_they_say_in_words(root: Client, settings: Any, language: str) -> None:
    settings.LANGUAGE_CODE = language
    settings.USE_THOUSAND_SEPARATOR = True
    settings.TIME_ZONE = "Asia/Kathmandu"
    for minutes in (3, 3, 3, 3, 30):
        make_job("completed", updated_at=-timedelta(minutes=minutes))
    make_job("failed", updated_at=-timedelta(hours=5))
    page = page_of(root)
    charts = re.findall(r"<svg class=\"pgjobs-chart .*?</svg>", page, re.S)
    assert len(charts) == 4
    hour, no_failures, day, failures = charts
    assert 'viewBox="0 0 600 100"' in hour
    assert 'viewBox="0 0 960 100"' in day
    bars = [
        (int(x), int(y), int(height))
        for x, y, height in re.findall(r'<rect x="(\d+)" y="(\d+)" width="8" height="(\d+)"', hour)
    ]
    (early, late) = bars
    assert early[1:] == (75, 25)
    assert late[1:] == (0, 100)
    assert late[0] - early[0] == 27 * 10
    assert late[0] in (561, 571)  # as the minute may have ended meanwhile
    assert "<rect" not in no_failures
    assert failures.count("<rect") == 1
    assert re.search(
        r'aria-label="Last hour: 5 completed, at most 4 in 1 min, the one from \d\d:\d\d on\."', hour
    )
    assert 'aria-label="Last hour: 0 failed."' in no_failures
    assert re.search(r"<title>\d\d:\d\d: 4 completed</title>", hour)
    (span,) = [span for span in doctor.look("default").hour if span.completed == 4]
    assert f"<title>{overview._clock(span.start)}: 4 completed</title>" in hour


def test_what_is_not_counted_to_the_end_is_marked(root: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    look = doctor.look

    def short_sighted(alias: str) -> doctor.Facts:
        with store.own_transaction(alias) as cursor:
            period, queues = store.queue_stats(cursor, doctor.WINDOW, most=2)
            hour = store.history(cursor, width=timedelta(minutes=1), spans=60, most=2)
        return look(alias)._replace(period=period, queues=queues, hour=hour)

    for minutes in (2, 3, 4, 20):
        make_job("completed", updated_at=-timedelta(minutes=minutes))
    for _ in range(3):
        make_job(run_at=timedelta(hours=1))
        make_job("failed", updated_at=-timedelta(minutes=12))
    assert "A plus sign" not in page_of(root)
    monkeypatch.setattr(doctor, "look", short_sighted)
    page = page_of(root)
    assert queue_rows(page)["default"][:6] == ["2+", "0", "–", "0", "3+", "2"]
    text = words(page)
    assert "A plus sign says that there are more, which were not counted." in text
    assert "So much has finished lately that the figures of the queues look back 4 min, not an hour." in text
    assert "Completed, last 4 min" in text
    assert re.search(r'<rect [^>]*class="pgjobs-more"><title>\d\d:\d\d: 2\+ failed</title>', page)


def test_of_many_queues_and_workers_some_are_shown(root: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "MOST_QUEUES", 2)
    monkeypatch.setattr(overview, "MOST_WORKERS", 1)
    for n in range(3):
        make_job(queue_name=f"queue {n}")
        make_worker(pid=n)
    page = page_of(root)
    assert list(queue_rows(page)) == ["queue 0", "queue 1"]
    assert page.count("<article") == 1
    assert "Of 3 queues, the first 2 are shown." in words(page)
    assert "Of 3 workers, the first 1 are shown." in words(page)


# What it must not show or do


def test_neither_arguments_nor_errors_are_shown(root: Client) -> None:
    secret = "hunter2"
    worker = make_worker()
    for status in ("queued", "processing", "failed", "completed", "cancelled"):
        make_job(
            status, payload={"kwargs": {"password": secret}}, result=secret, metadata={"note": secret},
            last_error=secret, unique_key=f"{secret} {status}", worker_id=worker.pk,
        )  # fmt: skip
    assert secret not in page_of(root)
    assert secret not in page_of(root, FRAGMENT)


def test_hostile_names_are_escaped(root: Client) -> None:
    hostile = (
        """</p><script>alert(1)</script><img src=x onerror=alert(2)>" onmouseover='alert(3)' javascript:x"""
    )
    worker = make_worker(hostname=hostile, queues=[hostile], running=9)
    make_worker(hostname="odd", queues={"a": 1}, state=hostile)
    BackgroundQueue.objects.create(name=hostile, paused_at=Now(), paused_by=hostile, reason=hostile)
    for status in ("queued", "failed", "completed"):
        make_job(status, queue_name=hostile, job_name=hostile)
    make_job(
        "processing", queue_name=hostile, job_name=hostile, worker_id=worker.pk,
        attempted_at=-timedelta(hours=9),
    )  # fmt: skip
    for url in (PAGE, FRAGMENT):
        page = page_of(root, url)
        for tag in ("<script>alert", "<img src=x", "onmouseover='alert", "</p><script"):
            assert tag not in page
        assert not re.search(r"(?:href|src)=[\"']?javascript:", page)


def test_it_has_no_inline_script_or_style(root: Client) -> None:
    make_job("completed")
    page = page_of(root)
    assert "django_pgjobs/admin.css" in page
    assert "django_pgjobs/overview.js" in page
    assert not re.search(r"\sstyle=|\son[a-z]+=|<style|http-equiv", page)
    assert all('src="' in tag for tag in re.findall(r"<script[^>]*>", page))


@pytest.mark.skipif(django.VERSION < (6, 1), reason="The admin has nonces from Django 6.1 on.")
def test_with_a_nonce_everything_that_is_loaded_has_it(root: Client, settings: Any) -> None:
    settings.MIDDLEWARE = ["django.middleware.csp.ContentSecurityPolicyMiddleware", *settings.MIDDLEWARE]
    settings.SECURE_CSP = {"script-src": ["<CSP_NONCE_SENTINEL>"]}
    (engine,) = settings.TEMPLATES
    processors = [*engine["OPTIONS"]["context_processors"], "django.template.context_processors.csp"]
    settings.TEMPLATES = [{**engine, "OPTIONS": {"context_processors": processors}}]
    page = page_of(root)
    tags = re.findall(r"<script[^>]*>|<link[^>]*stylesheet[^>]*>", page)
    assert len(tags) > 3
    nonces = {re.findall(r' nonce="([^"]+)"', tag)[0] for tag in tags}
    assert len(nonces) == 1


def test_the_fragment_is_what_the_page_shows(root: Client) -> None:
    make_job(queue_name="mail")
    fragment = page_of(root, FRAGMENT)
    assert "<html" not in fragment
    assert "<script" not in fragment
    without_clock = re.compile(r"As of [\d:]+|\d+ m?s\b")
    assert without_clock.sub("", fragment).strip() in without_clock.sub("", page_of(root))


# What it costs


def test_its_queries_do_not_grow_and_read_by_index(root: Client) -> None:
    def queries() -> list[str]:
        with CaptureQueriesContext(connections["default"]) as captured:
            page_of(root)
        return [query["sql"] for query in captured]

    before = len(queries())
    for n in range(10):
        for status in ("queued", "processing", "failed", "completed"):
            make_job(status, queue_name=f"queue {n}")
        make_worker(pid=n)
    after = queries()
    assert len(after) == before <= 32
    looked = [sql for sql in after if "FROM background_jobs" in sql or "background_jobs AS job" in sql]
    assert len(looked) >= 6
    with connections["default"].cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        for sql in looked:
            cursor.execute(f"EXPLAIN {sql}")
            plan = "\n".join(line for (line,) in cursor.fetchall())
            assert "Seq Scan on background_jobs" not in plan
        cursor.execute("SET LOCAL enable_seqscan = on")


@pytest.mark.django_db(transaction=True)
def test_it_neither_waits_for_locks_nor_takes_any() -> None:
    root = client_of(superuser=True)
    job = make_job(run_at=-timedelta(minutes=5))
    with session() as other, other.transaction():
        other.execute("SELECT FROM background_jobs WHERE id = %s FOR UPDATE", [job.pk])
        with connections["default"].cursor() as cursor:
            cursor.execute("SET lock_timeout = 5000")  # an error rather than a test that hangs
        assert "oldest for 5 min" in page_of(root)
    connections["default"].close()
    with CaptureQueriesContext(connections["default"]) as captured:
        page_of(root)
    assert not [query for query in captured if re.search(r"FOR (UPDATE|SHARE)|LOCK TABLE", query["sql"])]


@pytest.mark.django_db(transaction=True)
def test_where_it_takes_too_long_it_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(alias: str) -> None:
        error = OperationalError("canceling statement due to statement timeout")
        raise error from psycopg.errors.QueryCanceled()

    monkeypatch.setattr(doctor, "look", slow)
    response = client_of(superuser=True).get(FRAGMENT)
    assert response.status_code == 503
    assert "was told to stop" in response.content.decode()


@pytest.mark.django_db(databases=["default", "other"])
def test_a_queue_on_another_database(root: Client) -> None:
    make_job(queue_name="wrong", using="default")
    make_job(queue_name="right", using="other")
    with override_settings(PGJOBS={"DATABASE": "other"}):
        assert list(queue_rows(page_of(root))) == ["right"]
