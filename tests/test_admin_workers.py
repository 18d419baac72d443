"""Workers in the admin: what their pages tell, who may ask one to stop, and what it makes of that."""

from __future__ import annotations

import re
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test import Client

from django_pgjobs import store
from django_pgjobs.models import BackgroundWorker
from tests import tasks
from tests.factories import make_job
from tests.sessions import session
from tests.test_admin import ADMIN, HOSTILE, assert_harmless, client_of, logged, said
from tests.test_admin_letters import text_of
from tests.workers import Workers, until

pytestmark = pytest.mark.django_db

WORKERS = f"{ADMIN}backgroundworker/"
SEE = "view_backgroundworker"


@pytest.fixture
def root(db: None) -> Client:
    return client_of("root", superuser=True)


def make_worker(silent_for: timedelta = timedelta(0), **columns: Any) -> BackgroundWorker:
    values = {
        "hostname": "web-1", "pid": 7, "processes": 2, "threads": 4, "async_slots": 3,
        "lease": timedelta(seconds=60), "version": "1.0", **columns,
    }  # fmt: skip
    worker = BackgroundWorker.objects.create(**values)
    worker.refresh_from_db()
    if silent_for:
        worker.last_seen_at -= silent_for
        worker.save()
    return worker


def page_of(worker: BackgroundWorker) -> str:
    return f"{WORKERS}{worker.pk}/change/"


def stop_at(worker: BackgroundWorker) -> str:
    return f"{WORKERS}{worker.pk}/stop/"


def asked(worker: BackgroundWorker) -> str:
    """Who has asked a worker to stop, if somebody has."""
    worker.refresh_from_db()
    return worker.stop_requested_by if worker.stop_requested_at else ""


# Looking


def test_the_page_of_a_worker_tells_what_it_runs_and_in_which_processes(root: Client) -> None:
    executors = [
        {"pid": 4711, "state": "working", "jobs": 2, "memory": 60 * 2**20},
        {"pid": 4712, "state": "spare", "jobs": 0, "memory": 0},
    ]
    worker = make_worker(queues=["mail", "bank"], executors=executors)
    old = make_job("processing", worker_id=worker.pk, attempted_at=timedelta(hours=-10))
    new = make_job("processing", worker_id=worker.pk, attempted_at=timedelta(hours=-5))
    make_job("processing")
    response = root.get(page_of(worker))
    assert [(job["name"], job["age"]) for job in response.context["jobs"]] == [
        (f"tests.jobs.add #{old.pk}", "10 h"),
        (f"tests.jobs.add #{new.pk}", "5 h"),
    ]
    text = text_of(response)
    assert "4711 working 2 60.0 MB" in text
    assert "4712 spare 0 unknown" in text
    assert "4 threads, 3 async: 14 in all" in text
    assert "mail, bank" in text
    assert f'href="{ADMIN}backgroundjob/{old.pk}/change/"' in response.content.decode()
    page = client_of("ada", SEE).get(page_of(worker)).content.decode()
    assert f"tests.jobs.add #{old.pk}" in page
    assert "backgroundjob" not in page


def test_a_silent_worker_is_told_of(root: Client) -> None:
    worker = make_worker(timedelta(minutes=2))
    response = root.get(page_of(worker))
    assert "It has been silent for longer than its lease" in text_of(response)
    assert "/stop/" not in response.content.decode()
    assert "data-pgjobs-refresh" not in response.content.decode()


def test_one_that_does_not_heed_what_it_was_asked_is_told_of(root: Client) -> None:
    worker = make_worker(lease=timedelta(hours=1))
    worker.stop_requested_by = "ada"
    for minutes, heeds in ((0, True), (30, False)):
        worker.stop_requested_at = worker.last_seen_at - timedelta(minutes=minutes)
        worker.save()
        text = text_of(root.get(page_of(worker)))
        assert "ada asked it to stop" in text
        assert ("It has not heeded what it was asked." in text) != heeds


def test_only_so_many_jobs_are_shown(root: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_pgjobs.admin.workers.MOST_JOBS", 2)
    worker = make_worker()
    for _ in range(3):
        make_job("processing", worker_id=worker.pk)
    assert "These are 2 of 3." in text_of(root.get(page_of(worker)))


# Asking one to stop


def test_a_worker_is_asked_to_stop_for_a_reason(root: Client) -> None:
    worker = make_worker()
    make_job("processing", worker_id=worker.pk)
    page = text_of(root.get(stop_at(worker)))
    assert "The worker web-1:7 holds 1 job." in page
    assert "may start another in its place" in page
    assert asked(worker) == ""
    response = root.post(stop_at(worker), {"reason": "x" * 251})
    assert (response.status_code, asked(worker)) == (200, "")

    response = root.post(stop_at(worker), {"reason": "It leaks."})
    assert response["Location"] == page_of(worker)
    assert said(response) == ["The worker web-1:7 is asked to stop."]
    assert asked(worker) == "root"
    sentence = "Asked to stop. Before: running. After: asked to stop. Reason: It leaks."
    assert logged() == [("root", str(worker.pk), sentence)]
    assert "root asked it to stop" in text_of(root.get(page_of(worker)))
    assert "It leaks." in text_of(root.get(f"{WORKERS}{worker.pk}/history/"))


def test_one_that_was_asked_or_is_stopping_or_has_ended_is_told_of(root: Client) -> None:
    worker, stopping = make_worker(), make_worker(state="stopping", pid=8)
    client_of("ada", SEE, "stop_worker").post(stop_at(worker))
    told = said(root.post(stop_at(worker)))[-1]
    assert told == "The worker web-1:7 was asked before, by ada."
    assert said(root.post(stop_at(stopping)))[-1] == "The worker web-1:8 is stopping already."
    BackgroundWorker.objects.filter(pk=stopping.pk).delete()
    assert said(root.post(stop_at(stopping)))[-1] == "This worker has ended."
    assert root.get(stop_at(stopping)).status_code == 404
    assert asked(worker) == "ada"
    assert [who for who, _, _ in logged()] == ["ada"]


@pytest.mark.django_db(transaction=True)
def test_nobody_waits_for_a_worker_that_has_locked_its_row() -> None:
    root = client_of("root", superuser=True)
    worker = make_worker()
    with session() as other, other.transaction():
        other.execute("SELECT FROM background_workers WHERE id = %s FOR UPDATE", [worker.pk])
        told = said(root.post(stop_at(worker)))[-1]
    assert told == "The worker web-1:7 is just saying how it is. Ask it again."
    assert asked(worker) == ""
    assert logged() == []


def test_to_stop_has_a_permission_of_its_own() -> None:
    worker = make_worker()
    viewer = client_of("viewer", SEE, "stop_job", "view_backgroundjob")
    assert "/stop/" not in viewer.get(page_of(worker)).content.decode()
    for client in (viewer, client_of("blind", "stop_worker")):
        assert client.get(stop_at(worker)).status_code == 403
        assert client.post(stop_at(worker), {"reason": "x"}).status_code == 403
    assert "/login/" in Client().post(stop_at(worker))["Location"]
    assert asked(worker) == ""
    ada = client_of("ada", SEE, "stop_worker")
    assert stop_at(worker) in ada.get(page_of(worker)).content.decode()
    ada.post(stop_at(worker))
    assert asked(worker) == "ada"


# What anyone may have written


@pytest.mark.parametrize(
    "executors",
    [
        [], {}, 7, "text", [7, None, []], [{"pid": -1, "state": [], "jobs": "x", "memory": 10**30}],
        [{"pid": HOSTILE, "state": HOSTILE, "jobs": HOSTILE, "memory": HOSTILE}], [{}] * 1000,
    ],
)  # fmt: skip
def test_anything_may_stand_in_the_row(root: Client, executors: Any) -> None:
    worker = make_worker(
        hostname=HOSTILE, queues=[HOSTILE], executors=executors, version=HOSTILE, stop_requested_by=HOSTILE
    )
    make_job("processing", worker_id=worker.pk, job_name=HOSTILE, queue_name=HOSTILE)
    for url in (WORKERS, page_of(worker), stop_at(worker)):
        response = root.get(url)
        assert response.status_code == 200
        assert_harmless(response.content.decode())
    assert_harmless(root.post(stop_at(worker), {"reason": HOSTILE}, follow=True).content.decode())


@pytest.mark.parametrize("id", ["x", "%00", "0", str(uuid.UUID(int=0))])
def test_what_is_no_worker_is_no_server_error(root: Client, id: str) -> None:
    assert root.get(f"{WORKERS}{id}/change/").status_code == 302
    assert root.get(f"{WORKERS}{id}/stop/").status_code == 404
    assert root.post(f"{WORKERS}{id}/stop/").status_code == 302


def test_no_page_has_an_inline_script_or_style(root: Client) -> None:
    worker = make_worker(executors=[{"pid": 1, "state": "working", "jobs": 0, "memory": 5}])
    for url in (WORKERS, page_of(worker), stop_at(worker)):
        page = root.get(url).content.decode()
        assert "django_pgjobs/admin.css" in page
        assert not re.search(r"\sstyle=|\son[a-z]+=|<style", page)
        assert all('src="' in tag for tag in re.findall(r"<script[^>]*>", page))


# What workers make of it


def test_a_worker_that_is_asked_ends_as_with_a_signal(workers: Workers, tmp_path: Path) -> None:
    root = client_of("root", superuser=True)
    process = workers.start("--processes", "1", "--threads", "1", "--poll-interval", "3600").until_listening()
    running = tasks.wait_for_file.enqueue(str(tmp_path / "go"))
    until(lambda: running.refresh().status == "processing")
    worker = BackgroundWorker.objects.get()
    root.post(stop_at(worker))
    process.until_said("Asked to by root: stopping.")
    late = tasks.note.enqueue("late")
    (tmp_path / "go").touch()
    assert process.wait() == 0
    assert running.refresh().status == "completed"
    assert late.refresh().status == "queued"
    assert not BackgroundWorker.objects.exists()


def test_a_worker_that_hears_nothing_is_stopped_at_its_next_renewal(workers: Workers) -> None:
    process = workers.start("--processes", "1", settings={"LISTEN": False, "LEASE": 2})
    worker = until(lambda: BackgroundWorker.objects.first())
    client_of("root", superuser=True).post(stop_at(worker))
    assert process.wait() == 0


def test_a_worker_tells_of_its_executors(workers: Workers) -> None:
    workers.start("--processes", "2", settings={"LEASE": 2}).until_listening()

    def executors() -> list[dict[str, Any]]:
        worker = BackgroundWorker.objects.first()
        told = worker.executors if worker else []
        return told if sorted(each["state"] for each in told) == ["spare", "working", "working"] else []

    for each in until(executors):
        assert each["memory"] > 2**20
        assert each["pid"] > 0
        assert each["jobs"] == 0


# The statement by which the first version says that a host is alive.
OLD_ANNOUNCEMENT = """
INSERT INTO background_workers AS worker
       (id, hostname, pid, queues, processes, threads, async_slots, lease, version, state, running)
VALUES (%(id)s, %(hostname)s, %(pid)s, %(queues)s::jsonb, %(processes)s, %(threads)s, %(async_slots)s,
        %(lease)s, %(version)s, %(state)s, %(running)s)
    ON CONFLICT (id) DO UPDATE
   SET state = excluded.state,
       running = excluded.running,
       last_seen_at = statement_timestamp()
"""


def test_a_worker_of_an_older_version_goes_on_beside_new_ones(root: Client) -> None:
    host = store.Host(uuid.uuid4(), "web-1", 7, None, 1, 4, 0, timedelta(seconds=60), "0.1")
    with connection.cursor() as cursor:
        given = host._asdict() | {"state": "running", "running": 1}
        cursor.execute(OLD_ANNOUNCEMENT, given)
        worker = BackgroundWorker.objects.get()
        root.post(stop_at(worker))
        cursor.execute(OLD_ANNOUNCEMENT, given)
    assert asked(worker) == "root"
    assert "It has not told of any." in text_of(root.get(page_of(worker)))
