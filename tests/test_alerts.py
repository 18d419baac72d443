"""Alerts: who is told of dead letters, how often, and by whom."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import django
import pytest
from django.core import mail
from django.db.models import F
from django.db.models.functions import Now

from django_pgjobs import alerts, signals
from django_pgjobs.models import BackgroundJob
from django_pgjobs.testing import drain
from tests import jobs
from tests.models import Effect
from tests.workers import Workers, until

ALERT = "django_pgjobs.alerts.tell"


@pytest.fixture
def connected(db: None, settings: Any) -> Iterator[None]:
    settings.PGJOBS = {"ON_DEAD_LETTER": "tests.alarms.note", "MAX_ATTEMPTS": 1}
    alerts.connect()
    yield
    signals.job_buried.disconnect(dispatch_uid="django_pgjobs.alerts")


def told() -> list[str]:
    return list(Effect.objects.filter(what="alert").order_by("pk").values_list("detail", flat=True))


def an_interval_later() -> None:
    """As if all that there is had been an hour before; a signal that is still on its way included."""
    hour = timedelta(hours=1)
    BackgroundJob.objects.filter(status="failed").update(updated_at=F("updated_at") - hour)
    for alert in BackgroundJob.objects.filter(job_name=ALERT, status="queued"):
        told_until = datetime.fromisoformat(alert.metadata["told_until"]) - hour
        BackgroundJob.objects.filter(pk=alert.pk).update(
            run_at=Now(), metadata={**alert.metadata, "told_until": told_until.isoformat()}
        )


@pytest.mark.usefixtures("connected")
def test_the_first_of_a_kind_is_told_at_once_and_all_others_together_later() -> None:
    jobs.boom.enqueue("disk 1 is full")
    drain()
    assert told() == ["1 ValueError: disk 1 is full"]
    for number in range(2, 5):
        jobs.boom.enqueue(f"disk {number} is full")
    jobs.boom.enqueue("out of paper")
    drain()
    assert told()[1:] == ["1 ValueError: out of paper"]
    an_interval_later()
    drain()
    assert told()[2:] == ["3 ValueError: disk 4 is full"]
    an_interval_later()
    drain()
    assert len(told()) == 3
    assert set(BackgroundJob.objects.filter(job_name=ALERT).values_list("status", flat=True)) <= {
        "queued",
        "completed",
    }
    an_interval_later()
    drain()
    assert not BackgroundJob.objects.filter(job_name=ALERT, status="queued").exists()
    BackgroundJob.objects.filter(status="failed").update(updated_at=Now() - timedelta(hours=3))
    jobs.boom.enqueue("disk 5 is full")
    drain()
    assert told()[3:] == ["1 ValueError: disk 5 is full"]


@pytest.mark.usefixtures("connected")
def test_a_dead_letter_that_comes_after_the_last_look_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds a job that is about to end, and so has none of its own."""
    find = alerts._find
    late = ["disk 2 is full"]

    def find_too_early(*kind: Any) -> alerts.Alert | None:
        found = find(*kind)
        if found is None and late:
            jobs.boom.enqueue(late.pop())
            drain()
        return found

    jobs.boom.enqueue("disk 1 is full")
    drain()
    an_interval_later()
    monkeypatch.setattr(alerts, "_find", find_too_early)
    drain()
    assert told()[1:] == ["1 ValueError: disk 2 is full"]


@pytest.mark.usefixtures("connected")
def test_what_is_tried_again_alarms_nobody(settings: Any) -> None:
    settings.PGJOBS |= {"MAX_ATTEMPTS": 2}
    jobs.boom.enqueue()
    drain()
    assert told() == []


@pytest.mark.usefixtures("connected")
def test_an_alert_that_fails_is_tried_again_and_alarms_nobody(settings: Any) -> None:
    settings.PGJOBS |= {"ON_DEAD_LETTER": "tests.alarms.not_callable"}
    jobs.boom.enqueue()
    drain()
    (alert,) = BackgroundJob.objects.filter(job_name=ALERT)
    assert (alert.status, alert.attempts) == ("queued", 1)
    BackgroundJob.objects.filter(pk=alert.pk).update(run_at=Now(), attempts=alert.max_attempts - 1)
    drain()
    alert.refresh()
    assert alert.status == "failed"
    assert BackgroundJob.objects.filter(job_name=ALERT).count() == 1


@pytest.mark.usefixtures("connected")
def test_admins_get_a_mail_without_secrets(settings: Any) -> None:
    settings.PGJOBS |= {"ON_DEAD_LETTER": "django_pgjobs.alerts.mail_admins"}
    settings.ADMINS = ["ada@example.com"] if django.VERSION >= (6, 0) else [("Ada", "ada@example.com")]
    if hasattr(mail, "mailers"):
        settings.MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}
    jobs.sign_in.enqueue("ada", "sEcReT-4711")
    drain()
    (message,) = mail.outbox
    assert message.to == ["ada@example.com"]
    assert message.subject.startswith(
        "[Django] A dead letter of tests.jobs.sign_in: ValueError: ada could not sign in: '[hidden]'"
    )
    dead = BackgroundJob.objects.get(job_name="tests.jobs.sign_in")
    assert "Traceback (most recent call last)" in message.body
    assert f"retryjobs --job tests.jobs.sign_in --fingerprint {dead.error_fingerprint}" in message.body
    assert message.body.endswith("You will hear of further ones in 60 minutes at the earliest.\n")
    assert "sEcReT" not in message.subject + str(message.body)


@pytest.mark.processes
def test_two_hosts_tell_together_once_and_lose_nothing(workers: Workers) -> None:
    settings = {"ON_DEAD_LETTER": "tests.alarms.note"}
    hosts = [workers.start("--processes", "1", settings=settings).until_listening() for _ in range(2)]
    jobs.kill_self.using(max_attempts=1).enqueue(9)  # alone: it takes along what its executor has to tell
    until(lambda: len(told()) == 1)
    failing = jobs.boom.using(max_attempts=1)
    failing.enqueue("disk 0 is full")
    until(lambda: len(told()) == 2)
    failing.enqueue_many([((f"disk {number} is full",), {}) for number in range(1, 60)])
    until(lambda: BackgroundJob.objects.filter(job_name="tests.jobs.boom", status="failed").count() == 60)
    alert_jobs = BackgroundJob.objects.filter(job_name=ALERT)
    later = Now() + timedelta(minutes=50)
    until(
        lambda: alert_jobs.filter(status="queued", run_at__gt=later).count() == 2
    )  # each kind has one job, which waits for more
    assert alert_jobs.count() == 2
    an_interval_later()
    until(lambda: not alert_jobs.filter(status="queued", run_at__lte=Now()).exists())
    until(lambda: not alert_jobs.filter(status="processing").exists())
    disks = [line for line in told() if "is full" in line]
    assert sum(int(line.partition(" ")[0]) for line in disks) == 60
    assert len(disks) <= 2
    assert any("executor died with signal 9" in line for line in told())
    pids = set(Effect.objects.filter(what="alert").values_list("pid", flat=True))
    assert pids.isdisjoint({host.pid for host in hosts})  # no supervisor runs code of the project
