"""The guide "Report errors to Sentry", with Sentry's own SDK in real workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.factories import make_job
from tests.markdown import HOW_TO, ROOT, blocks
from tests.workers import Workers

pytest.importorskip("sentry_sdk")

GUIDE = HOW_TO / "report-errors-to-sentry.md"

# Nothing leaves the process but to a file.
BEFORE = """
from functools import partial

import sentry_sdk

from tests.envelopes import Gathering
from tests.settings import *

sentry_sdk.init = partial(sentry_sdk.init, transport=Gathering)
"""

JOBS = """
import logging
import os
import signal
import threading

from django_pgjobs import job


@job(name="shop.charge", backoff=0)
def charge(card: str, password: str) -> None:
    raise ValueError("declined")


@job(name="shop.acharge", backoff=0)
async def acharge(card: str, password: str) -> None:
    raise ValueError("declined")


@job(name="shop.complain")
def complain() -> None:
    logging.getLogger("shop").error("The disk is full.")


@job(name="shop.die")
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()
"""

SECRETS = {"kwargs": {"card": "4111 1111", "password": "hunter22"}}


@pytest.fixture
def report(workers: Workers, tmp_path: Path) -> Any:
    """Run what waits in a worker with these settings, and return the events that it sends."""

    def run(settings: str, at_once: str = "") -> list[dict[str, Any]]:
        (tmp_path / "reporting_settings.py").write_text(BEFORE + settings)
        events = tmp_path / "events"
        environment = {
            "DJANGO_SETTINGS_MODULE": "reporting_settings",
            "PGJOBS_TEST_EVENTS": str(events),
            "PGJOBS_TEST_EVENTS_AT_ONCE": at_once,
            "PYTHONPATH": f"{tmp_path}:{ROOT}",
            "SENTRY_DSN": "https://key@sentry.invalid/1",
        }
        worker = workers.start("--drain", "--processes", "1", environment=environment)
        assert worker.wait() == 0, worker.log.read_text()
        assert "hunter22" not in events.read_text()
        return [json.loads(line) for line in events.read_text().splitlines()]

    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "jobs.py").write_text(JOBS)
    return run


@pytest.fixture
def guide(tmp_path: Path, report: Any) -> str:
    """Write the modules of the guide. Returns the settings."""
    settings, reporting, apps = (block.text for block in blocks(GUIDE, "python"))
    (tmp_path / "shop" / "reporting.py").write_text(reporting)
    (tmp_path / "shop" / "apps.py").write_text(apps)
    return f'{settings}\nINSTALLED_APPS = [*INSTALLED_APPS, "shop.apps.ShopConfig"]\n'


@pytest.mark.processes
@pytest.mark.parametrize("name", ["shop.charge", "shop.acharge"])
def test_a_dead_letter_is_reported_once_with_its_exception(report: Any, guide: str, name: str) -> None:
    failing = make_job(job_name=name, payload=SECRETS, max_attempts=2)
    (event,) = report(guide)
    (exception,) = event["exception"]["values"]
    assert (exception["type"], exception["value"]) == ("ValueError", "declined")
    assert exception["stacktrace"]["frames"][-1]["function"] == name.removeprefix("shop.")
    assert event["tags"] == {"job.name": name, "job.id": str(failing.pk), "job.attempt": "2"}


@pytest.mark.processes
def test_what_a_job_logs_has_its_tags(report: Any, guide: str) -> None:
    complaining = make_job(job_name="shop.complain", payload={})
    (event,) = report(guide)
    assert event["logentry"]["formatted"] == "The disk is full."
    assert event["tags"] == {"job.name": "shop.complain", "job.id": str(complaining.pk), "job.attempt": "1"}


@pytest.mark.processes
def test_a_job_whose_process_died_is_reported(report: Any, guide: str) -> None:
    killer = make_job(job_name="shop.die", payload={}, max_attempts=1)
    (event,) = report(guide)
    text = "shop.die: executor died with signal 9; possibly out of memory"
    assert (event["message"], event["level"]) == (text, "error")
    assert event["tags"] == {"job.name": "shop.die", "job.id": str(killer.pk), "job.attempt": "1"}


@pytest.mark.processes
def test_out_of_the_box_the_line_of_a_dead_letter_is_reported_without_arguments(report: Any) -> None:
    failing = make_job(job_name="shop.charge", payload=SECRETS, max_attempts=2)
    settings = """
sentry_sdk.init(dsn="https://key@sentry.invalid/1")
INSTALLED_APPS = [*INSTALLED_APPS, "shop"]
"""
    (event,) = report(settings, at_once="1")
    assert event["logger"] == "django_pgjobs.supervisor"
    assert event["logentry"]["formatted"].startswith(f"job={failing.pk} name=shop.charge queue=default")
    assert "dead-lettered" in event["logentry"]["formatted"]
