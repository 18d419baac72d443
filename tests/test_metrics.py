"""What Prometheus is told: by real workers over HTTP, and by the view."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.contrib.auth.middleware import LoginRequiredMiddleware
from django.contrib.auth.models import AnonymousUser, Permission, User
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from django.db.models import functions
from django.test import Client, RequestFactory, override_settings
from django.urls import resolve
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from django_pgjobs import conf, doctor, exposition, hostmetrics, metrics
from django_pgjobs.endpoint import Answer, Endpoint, Unavailable
from django_pgjobs.exposition import BOUNDS, MOST_QUEUES, OTHER, UNKNOWN, Distribution
from django_pgjobs.hostmetrics import VERDICTS, HostMetrics, Now
from django_pgjobs.lifecycle import Event
from django_pgjobs.management import arguments
from django_pgjobs.models import BackgroundQueue, BackgroundWorker
from django_pgjobs.store import Claim
from django_pgjobs.wakeup import Listener, Wakeup
from tests import tasks
from tests.factories import make_job
from tests.markdown import DOCS, REFERENCE, blocks, code, table
from tests.workers import Worker, Workers, until

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
PORT = ("--metrics-port", "127.0.0.1:0")
SHORT_LEASE = {"LEASE": 8, "SWEEP_INTERVAL": 0.3, "LOST_DELAY": 0}


class Figures:
    """The samples of an exposition, by name and labels."""

    def __init__(self, text: str, read: Callable[[str], Iterable[Any]] = read_text) -> None:
        self.kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in read(text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all labels that are not given."""
        return sum(
            value for (of, its), value in self.samples.items() if of == name and labels.items() <= set(its)
        )


def ask(port: int, path: str = "/metrics", accept: str = "") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"Accept": accept} if accept else {})
    return connection.getresponse()


def port_of(worker: Worker) -> int:
    worker.until_said("Metrics are told at port")
    (port,) = re.findall(r"Metrics are told at port (\d+)", worker.log.read_text())
    return int(port)


def scrape(worker: Worker) -> Figures:
    response = ask(port_of(worker))
    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return Figures(response.read().decode())


def finished(figures: Figures, job: str) -> dict[str, float]:
    """What has become of a job's claims, but for those that were handed back unstarted."""
    name = f"tests.tasks.{job}"
    counts = {
        event.value: figures("pgjobs_finished_total", queue="default", job_name=name, verdict=event)
        for event in VERDICTS
        if event is not Event.RELEASE
    }
    return {verdict: count for verdict, count in counts.items() if count}


def documented(heading: str) -> list[tuple[str, str, tuple[str, ...], str]]:
    """Name, type, labels and help of each metric, as the reference has them."""
    return [
        (code(row["metric"])[0], row["type"], tuple(code(row["labels"])), row["what it is"])
        for row in table(REFERENCE / "metrics.md", heading)
    ]


# ── A worker ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.processes
def test_a_worker_counts_what_becomes_of_jobs_in_all_its_executors(workers: Workers) -> None:
    worker = workers.start("--processes", "3", "--threads", "2", *PORT)
    for number in range(20):
        tasks.nothing.enqueue(number)
    tasks.anote.enqueue("async")
    tasks.fail_twice.enqueue("twice")
    tasks.overdue.enqueue("overdue", "patient")
    good = ["nothing", "anote", "fail_twice", "overdue"]
    expected = {
        "nothing": {"complete": 20},
        "anote": {"complete": 1},
        "fail_twice": {"fail": 2, "complete": 1},
        "overdue": {"bury": 1},
        "kill_executor": {"fail": 2, "bury": 1},
    }
    until(lambda: [finished(scrape(worker), job) for job in good] == [expected[job] for job in good])
    ended = scrape(worker)("pgjobs_executors_ended_total", how="died")

    tasks.kill_executor.enqueue()  # when it has no neighbours that it takes along
    until(lambda: finished(scrape(worker), "kill_executor") == expected["kill_executor"])
    figures = scrape(worker)
    assert {job: finished(figures, job) for job in expected} == expected
    assert finished(figures, "give_back") == {}
    assert figures("pgjobs_executors_ended_total", how="died") == ended + 3

    for job, verdicts in expected.items():
        labels = {"queue": "default", "job_name": f"tests.tasks.{job}"}
        started = sum(verdicts.values())
        assert figures("pgjobs_started_total", **labels) == started
        assert figures("pgjobs_duration_seconds_count", **labels) == started
        assert figures("pgjobs_duration_seconds_bucket", **labels, le="+Inf") == started
    assert figures("pgjobs_duration_seconds_sum", queue="default", job_name="tests.tasks.overdue") >= 0.3
    assert figures("pgjobs_pickup_seconds_count", queue="default") == figures.total("pgjobs_finished_total")
    assert figures("pgjobs_pickup_seconds_sum", queue="default") >= 0
    assert worker.stop() == 0


@pytest.mark.processes
def test_a_worker_tells_how_it_is(workers: Workers, tmp_path: Path) -> None:
    worker = workers.start("--processes", "2", "--threads", "3", "--async-slots", "5", *PORT)
    until(lambda: scrape(worker)("pgjobs_ready") == 1)
    until(lambda: scrape(worker)("pgjobs_listening") == 1)
    until(lambda: scrape(worker)("pgjobs_executors", state="ready") == 3)  # a spare among them
    tasks.wait_for_file.enqueue(str(tmp_path / "go"))
    until(lambda: scrape(worker)("pgjobs_running") == 1)
    first = scrape(worker)
    assert first("pgjobs_slots") == 2 * (3 + 5)
    assert first("pgjobs_waiting") == first("pgjobs_unsettled") == 0
    assert first("pgjobs_connections", purpose="queue") == 1
    assert first("pgjobs_connections", purpose="listener") == 1
    assert first("pgjobs_executors_started_total") == 3
    assert first("pgjobs_executors_memory_bytes") > first("pgjobs_executor_memory_max_bytes") > 2**20
    assert first.kinds == {name: kind for name, kind, *_ in documented("A worker")}
    (line,) = re.findall(r"^\* `purpose` is.*?\.$", (REFERENCE / "metrics.md").read_text(), re.M | re.S)
    explained = {"purpose", "state", "how"}
    values = {value for _, labels in first.samples for label, value in labels if label in explained}
    assert set(code(line)) == explained | values
    second = until(lambda: later(scrape(worker), first, "pgjobs_oldest_claim_age_seconds"))
    (tmp_path / "go").touch()
    last = until(lambda: later(scrape(worker), second, "pgjobs_loop_turns_total"))
    assert last("pgjobs_executors_started_total") == 3
    until(lambda: scrape(worker)("pgjobs_oldest_claim_age_seconds") == 0)


def later(now: Figures, before: Figures, name: str) -> Figures | None:
    return now if now.total(name) > before.total(name) else None


@pytest.mark.processes
def test_claims_that_are_lost_and_swept_are_counted(workers: Workers, tmp_path: Path) -> None:
    worker = workers.start(*PORT, settings=SHORT_LEASE)
    lost = tasks.wait_for_file.enqueue(str(tmp_path / "go"))
    until(lambda: lost.refresh().status == "processing")
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM background_jobs WHERE id = %s", [lost.pk])
    until(lambda: scrape(worker).total("pgjobs_lost_claims_total") == 1)
    assert finished(scrape(worker), "wait_for_file") == {}

    make_job("processing", job_name="tests.tasks.nothing", payload={}, locked_at=-timedelta(hours=1))
    until(lambda: finished(scrape(worker), "nothing") == {"fail": 1, "complete": 1})
    figures = scrape(worker)
    assert figures("pgjobs_swept_total", verdict="fail") == 1
    assert figures("pgjobs_swept_total", verdict="bury") == 0
    assert figures("pgjobs_started_total", queue="default", job_name="tests.tasks.nothing") == 1


@pytest.mark.processes
def test_scrapes_and_the_loop_do_not_disturb_each_other(workers: Workers) -> None:
    worker = workers.start("--processes", "2", *PORT)
    labels = {"queue": "default", "job_name": "tests.tasks.nothing", "verdict": "complete"}
    port = port_of(worker)
    seen: list[list[float]] = [[], []]
    done = threading.Event()

    def watch(counts: list[float]) -> None:
        while not done.is_set():
            text = ask(port, accept=OPENMETRICS).read().decode()
            counts.append(Figures(text, read_openmetrics)("pgjobs_finished_total", **labels))

    watching = [threading.Thread(target=watch, args=[counts]) for counts in seen]
    for thread in watching:
        thread.start()
    try:
        tasks.nothing.enqueue_many([((), {})] * 3000)
        until(lambda: scrape(worker)("pgjobs_finished_total", **labels) == 3000)
        until(lambda: min(map(len, seen)) > 1)
    finally:
        done.set()
        for thread in watching:
            thread.join()
    for counts in seen:
        assert counts == sorted(counts)


@pytest.mark.processes
def test_a_worker_that_cannot_tell_says_why(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError('It is hidden.')")
    hidden = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    worker = workers.start(*PORT, environment=hidden)
    assert worker.wait() == 1
    assert worker.said(
        "CommandError: Metrics need the package prometheus_client, which is not installed. Install it with:"
        " pip install 'django-pgjobs[prometheus]'."
    )
    assert not worker.said("Traceback")
    assert workers.start("--drain", environment=hidden).wait() == 0

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        worker = workers.start("--metrics-port", str(taken.getsockname()[1]))
        assert worker.wait() == 1
    assert worker.said("CommandError: Nothing can listen on 127.0.0.1:")


def test_without_a_host_only_this_machine_is_told() -> None:
    assert arguments.local_address("9187") == ("127.0.0.1", 9187)
    assert arguments.local_address("0.0.0.0:9187") == ("0.0.0.0", 9187)


def test_a_page_that_fails_is_an_error_for_who_asks(caplog: pytest.LogCaptureFixture) -> None:
    def fail(accept: str) -> Answer:
        raise ValueError("no figures")

    endpoint = Endpoint(("127.0.0.1", 0), {"/metrics": fail})
    try:
        response = ask(endpoint.port)
        assert (response.status, response.read()) == (500, b"The worker's log has the reason.\n")
        assert "/metrics could not be answered." in caplog.text
        assert ask(endpoint.port, "/").status == 404
        with pytest.raises(Unavailable, match="Nothing can listen"):
            Endpoint(("127.0.0.1", endpoint.port), {})
    finally:
        endpoint.close()


# ── The view ──────────────────────────────────────────────────────────────────────────────────────────────

TOKEN = "a-token-of-the-tests"


def look(client: Client, token: str = TOKEN, accept: str = "") -> Any:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return client.get("/metrics/jobs", headers=headers | ({"Accept": accept} if accept else {}))


def figures_of(client: Client) -> Figures:
    response = look(client)
    assert response.status_code == 200, response.content
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return Figures(response.content.decode())


def make_worker(*, silent: timedelta = timedelta(0), **columns: Any) -> None:
    values = {"processes": 2, "threads": 4, "async_slots": 0, "lease": timedelta(minutes=1), **columns}
    worker = BackgroundWorker.objects.create(hostname="box", pid=7, version="1", **values)
    BackgroundWorker.objects.filter(pk=worker.pk).update(last_seen_at=functions.Now() - silent)


@pytest.fixture
def with_token(settings: Any) -> None:
    settings.PGJOBS = {"METRICS_TOKEN": TOKEN}


@pytest.mark.usefixtures("db", "with_token")
def test_the_view_has_the_figures_of_the_queues(client: Client) -> None:
    before = figures_of(client)("pgjobs_enqueued_total")
    make_job(queue_name="emails", run_at=-timedelta(minutes=5))
    make_job(queue_name="emails", run_at=timedelta(hours=1))
    make_job("processing", queue_name="emails")
    for _ in range(3):
        make_job("failed", queue_name="reports")
    make_job("completed", queue_name="reports")
    make_job(queue_name="paused")
    BackgroundQueue.objects.create(name="paused", paused_at=functions.Now())
    make_worker(queues=["emails"])
    make_worker(state="stopping")
    make_worker(silent=timedelta(hours=1))

    figures = figures_of(client)
    assert figures("pgjobs_enqueued_total") == before + 8
    for name, emails, reports, paused in [
        ("queued", 2, 0, 1),
        ("due", 1, 0, 1),
        ("processing", 1, 0, 0),
        ("dead_letters", 0, 3, 0),
        ("paused", 0, 0, 1),
        ("workers", 1, 0, 0),
    ]:
        found = [figures(f"pgjobs_queue_{name}", queue=queue) for queue in ("emails", "reports", "paused")]
        assert found == [emails, reports, paused], name
    assert 300 <= figures("pgjobs_queue_oldest_due_age_seconds", queue="emails") < 3600
    assert figures("pgjobs_queue_oldest_due_age_seconds", queue="reports") == 0
    for state in ("running", "stopping", "silent"):
        assert figures("pgjobs_workers", state=state) == 1
    assert figures("pgjobs_workers_slots") == 16
    assert figures("pgjobs_workers_jobs") == 0
    assert figures("pgjobs_unswept") == figures("pgjobs_late_schedules") == 0
    assert figures("pgjobs_findings", finding="paused-queue", severity="warning") == 1
    assert figures.kinds == {name: kind for name, kind, *_ in documented("The queue")}
    assert figures("pgjobs_database_connections") >= 1
    assert figures("pgjobs_database_connections_limit") >= 1


@pytest.mark.usefixtures("db", "with_token")
def test_queues_beyond_a_number_are_told_of_together(client: Client) -> None:
    for number in range(MOST_QUEUES):
        make_job(queue_name=f"a {number:04}")
    make_job(queue_name="z 1")
    make_job(queue_name="z 2", run_at=-timedelta(hours=1))
    figures = figures_of(client)
    assert figures("pgjobs_queue_due", queue="a 0000") == 1
    assert figures("pgjobs_queue_due", queue=OTHER) == 2
    assert 3600 <= figures("pgjobs_queue_oldest_due_age_seconds", queue=OTHER) < 7200
    assert figures.total("pgjobs_queue_due") == MOST_QUEUES + 2


@pytest.mark.usefixtures("db", "with_token")
def test_names_that_need_it_are_escaped_in_both_formats(client: Client) -> None:
    name = 'a "queue"\\with\na line, and an ü'
    make_job(queue_name=name)
    assert figures_of(client)("pgjobs_queue_queued", queue=name) == 1
    response = look(client, accept=OPENMETRICS)
    assert response.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert Figures(response.content.decode(), read_openmetrics)("pgjobs_queue_queued", queue=name) == 1


@pytest.mark.django_db
def test_the_view_wants_the_token_or_a_permission(client: Client, settings: Any) -> None:
    assert look(client, "").status_code == look(client, "None").status_code == 401
    settings.PGJOBS = {"METRICS_TOKEN": TOKEN}
    refused = look(client, "")
    assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert b"pgjobs_" not in refused.content
    for wrong in (TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "ü"):
        assert look(client, wrong).status_code == 401
    assert client.get("/metrics/jobs", headers={"Authorization": f"Basic {TOKEN}"}).status_code == 401
    assert look(client).status_code == 200
    assert client.head("/metrics/jobs", headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200
    assert client.post("/metrics/jobs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 405

    user = User.objects.create_user("watcher")
    client.force_login(user)
    assert look(client, "").status_code == 401
    user.user_permissions.add(Permission.objects.get(codename="view_backgroundjob"))
    assert look(client, "").status_code == 200
    del settings.PGJOBS
    assert look(client, "").status_code == 200


@pytest.mark.usefixtures("db", "with_token")
@override_settings(MIDDLEWARE=["django.contrib.auth.middleware.LoginRequiredMiddleware"])
def test_the_token_is_enough_where_all_else_wants_a_login() -> None:
    request = RequestFactory().get("/metrics/jobs", headers={"Authorization": f"Bearer {TOKEN}"})
    request.user = AnonymousUser()
    middleware = LoginRequiredMiddleware(metrics.view)
    assert middleware.process_view(request, metrics.view, (), {}) is None
    assert metrics.view(request).status_code == 200


@pytest.mark.usefixtures("with_token")
def test_the_view_says_when_the_package_is_missing(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.exposition", None)
    assert look(client, "somebody").status_code == 401
    with pytest.raises(ImproperlyConfigured, match="pip install 'django-pgjobs"):
        look(client)


@pytest.mark.usefixtures("with_token")
@pytest.mark.django_db(transaction=True)
def test_a_database_that_does_not_answer_is_no_error_of_the_site(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE background_workers RENAME TO elsewhere")
    try:
        response = look(client)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE elsewhere RENAME TO background_workers")
    assert (response.status_code, response.content) == (503, b"The site's log has the reason.\n")
    assert "Metrics could not be read from the database: " in caplog.text


@pytest.mark.parametrize("token", ["", "short", "x" * 201, "with spaces in between", "ä" * 20])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(token: str) -> None:
    ((name, problem),) = conf.read({"METRICS_TOKEN": token}).problems()
    assert name == "METRICS_TOKEN"
    assert not token or token not in problem


def test_a_token_of_another_kind_is_not_shown() -> None:
    with pytest.raises(ImproperlyConfigured, match="must be a string, or None, not bytes"):
        conf.read({"METRICS_TOKEN": b"bytes from a file"})


# ── What it counts with ───────────────────────────────────────────────────────────────────────────────────


def claim(queue: str, job: str) -> Claim:
    return Claim(1, None, 1, 3, job, queue, "{}")


def counted(metrics: HostMetrics) -> Mapping[str, Any]:
    """The families that it has counted, by name."""
    families = metrics.families()
    return {family.name: family for family in islice(families, 6)}


def test_names_that_anyone_may_invent_do_not_all_become_labels() -> None:
    metrics = HostMetrics(["emails"], lambda: pytest.fail("is not asked"))
    for number in range(3 * MOST_QUEUES):
        metrics.started(claim(f"queue {number}", "tests.tasks.nothing"))
        metrics.finished(claim("emails", f"job {number}"), Event.PARK, None)
    metrics.started(claim("emails", "tests.tasks.nothing"))
    families = counted(metrics)
    started = families["pgjobs_started_total"].samples
    assert len({queue for queue, _ in started}) == MOST_QUEUES + 1
    assert started[OTHER, "tests.tasks.nothing"] == 2 * MOST_QUEUES + 1
    assert started["emails", "tests.tasks.nothing"] == 1
    assert families["pgjobs_finished_total"].samples["emails", UNKNOWN, Event.PARK] == 3 * MOST_QUEUES
    assert {job for _, job in started} == {"tests.tasks.nothing", UNKNOWN}


def test_pairs_of_a_queue_and_a_job_are_not_told_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostmetrics, "MOST_PAIRS", 3)
    counting = HostMetrics([], lambda: pytest.fail("is not asked"))
    for queue, job in product("abc", ["tests.tasks.nothing", "tests.tasks.note"]):
        counting.started(claim(queue, job))
        counting.started(claim(queue, job))
    assert counted(counting)["pgjobs_started_total"].samples == {
        ("a", "tests.tasks.nothing"): 2,
        ("a", "tests.tasks.note"): 2,
        ("b", "tests.tasks.nothing"): 2,
        (OTHER, "tests.tasks.note"): 4,
        (OTHER, "tests.tasks.nothing"): 2,
    }


def test_registered_jobs_are_there_from_the_start() -> None:
    started = counted(HostMetrics(None, lambda: pytest.fail("is not asked")))["pgjobs_started_total"].samples
    assert started["default", "tests.tasks.nothing"] == 0
    assert not counted(HostMetrics(["none"], lambda: pytest.fail("is not asked")))[
        "pgjobs_started_total"
    ].samples


@pytest.mark.parametrize(
    ("seconds", "le"), [(0.0, 0.005), (0.005, 0.005), (0.0051, 0.01), (3600, 3600), (1e6, float("inf"))]
)
def test_a_span_of_time_is_counted_under_the_first_bound_that_is_not_below_it(
    seconds: float, le: float
) -> None:
    distribution = Distribution()
    distribution.add(seconds)
    buckets = {float(more["le"]): value for suffix, more, value in distribution.samples() if more}
    assert buckets == {bound: float(bound >= le) for bound in (*BOUNDS, float("inf"))}


def test_a_probe_that_is_not_heard_until_the_next_one_was_missed() -> None:
    wakeup = Wakeup()
    listener = Listener(wakeup, "probe", None)
    listener.note_probe()
    assert listener.missed == 0
    listener.note_probe()
    assert listener.missed == 1
    wakeup.close()


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.exposition", None)
    with pytest.raises(ImproperlyConfigured, match="pip install 'django-pgjobs"):
        exposition.exposition([], "")


# ── The reference ─────────────────────────────────────────────────────────────────────────────────────────

NOW = Now(
    ready=True, listening=True, connections={}, running=0, waiting=0, unsettled=0, oldest_claim=0.0, slots=1,
    executors={}, executors_started=0, executors_ended={}, memory=[], turns=0, database_failures=0,
    missed_notifications=0,
)  # fmt: skip


@pytest.mark.django_db
def test_the_reference_has_each_metric_with_its_labels_and_help() -> None:
    facts, findings = doctor.glance("default")
    told = {
        "A worker": HostMetrics(None, lambda: NOW).families(),
        "The queue": metrics.families(facts, findings, 0),
    }
    for heading, families in told.items():
        expected = [(family.name, family.kind, family.labels, family.help) for family in families]
        assert documented(heading) == expected


def test_the_reference_has_the_values_of_labels_and_the_bounds() -> None:
    text = (REFERENCE / "metrics.md").read_text()
    (line,) = re.findall(r"^\* `verdict` is(.*?)\. What people", text, re.M | re.S)
    assert code(line) == [event.value for event in VERDICTS]
    assert f"At most {MOST_QUEUES} queues are named, and {hostmetrics.MOST_PAIRS:,} pairs" in text
    assert {OTHER, UNKNOWN} <= set(code(text))
    bounds = "5, 10, 25, 50, 100, 250 and 500 ms, 1, 2.5, 5, 10, 30 and 60 s, 5 and 15 minutes, and an hour"
    assert bounds in " ".join(text.split())
    assert [bound * 1000 for bound in BOUNDS[:7]] == [5, 10, 25, 50, 100, 250, 500]
    assert BOUNDS[7:] == (1, 2.5, 5, 10, 30, 60, 5 * 60, 15 * 60, 3600)


# ── Dashboard and alerts ──────────────────────────────────────────────────────────────────────────────────

GUIDE = DOCS / "how-to" / "watch-the-queue.md"
MONITORING = DOCS / "monitoring"
OF_TARGETS = {"instance", "le"}  # labels that Prometheus adds, and that of a bucket

Labels = dict[str, set[str]]  # the values of each label


@pytest.fixture
def told(workers: Workers, client: Client, with_token: None) -> dict[str, Labels]:
    """The labels of each sample that a worker and the view have told of."""
    job = tasks.nothing.enqueue()
    of_queue = figures_of(client)  # while no worker is alive
    worker = workers.start("--processes", "2", *PORT)
    until(lambda: job.refresh().status == "completed")
    of_worker = until(lambda: later(scrape(worker), of_queue, "pgjobs_duration_seconds_count"))
    names: dict[str, Labels] = {}
    for name, labels in [*of_queue.samples, *of_worker.samples]:
        values = names.setdefault(name, {})
        for label, value in labels:
            values.setdefault(label, set()).add(value)
    return names


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return found


@pytest.mark.processes
def test_dashboard_and_alerts_ask_for_what_is_told(told: dict[str, Labels]) -> None:
    queries = [rule["expr"] for rule in alerts()]
    queries += [target["expr"] for panel in panels() for target in panel.get("targets", [])]
    queries += [query for block in blocks(GUIDE, "promql") for query in block.text.splitlines()]
    assert len(queries) > 40
    for query in queries:
        labels = set(OF_TARGETS)
        for name, matchers in re.findall(r"(pgjobs_\w+)(?:{([^}]*)})?", query):
            assert name in told, query
            labels |= told[name].keys()
            for label, values in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
                assert label == "queue" or set(values.split("|")) <= told[name][label], query
        for listed in re.findall(r"by \(([^)]*)\)", query):
            assert set(listed.split(", ")) <= labels, query

    for path in [*MONITORING.iterdir(), GUIDE]:
        named = set(re.findall(r"\bpgjobs_\w+", path.read_text()))
        assert named <= told.keys(), path


def test_what_an_alert_says_is_there_to_be_said() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    for rule in alerts():
        assert rule["labels"]["severity"] in ("page", "ticket")
        said = " ".join(rule["annotations"][key] for key in ("summary", "description"))
        kept = re.findall(r"by \(([^)]*)\)", rule["expr"])
        labels = set(kept[0].split(", ")) if kept else {"instance"}
        assert set(re.findall(r"\$labels\.(\w+)", said)) <= labels, rule["alert"]


def test_the_dashboard_is_one_for_any_data_source() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    for panel in panels():
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert label == "instance" or label in target["expr"], panel["title"]
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = set(
            product(
                range(place["x"], place["x"] + place["w"]),
                range(place["y"], place["y"] + place["h"]),
            )
        )
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_guide_tells_prometheus_where_the_view_is() -> None:
    (block,) = blocks(GUIDE, "yaml")
    of_workers, of_queue = yaml.safe_load(block.text)["scrape_configs"]
    assert all(target.endswith(":9187") for target in of_workers["static_configs"][0]["targets"])
    assert resolve(of_queue["metrics_path"]).func is metrics.view
    assert f'path("{of_queue["metrics_path"][1:]}", metrics.view)' in (REFERENCE / "metrics.md").read_text()
