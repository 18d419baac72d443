"""What the reference says of permissions: Django's, and those of the database's roles."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import StringIO
from itertools import product
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.core.management import CommandError, call_command
from django.db import Error, connection, transaction

from django_pgjobs import job, operations
from django_pgjobs.models import BackgroundJob, BackgroundSchedule, BackgroundWorker
from tests.factories import make_job
from tests.jobs import add
from tests.markdown import REFERENCE, blocks, code, section, table, tables
from tests.sessions import session
from tests.workers import Workers, until

PAGE = REFERENCE / "permissions.md"
PRIVILEGES = ("SELECT", "INSERT", "UPDATE", "DELETE")

Grants = set[tuple[str, str]]  # (privilege, table)


@pytest.mark.django_db
def test_the_permissions_are_those_of_the_admin() -> None:
    there = Permission.objects.filter(content_type__app_label="django_pgjobs")
    documented = [code(row["permission"])[0] for row in table(PAGE, "In the admin")]
    assert sorted(documented) == sorted(there.values_list("codename", flat=True))


# ── Roles of the database ─────────────────────────────────────────────────────────────────────────────────


@job(name="permissions.unique", unique=True)
def unique(x: int) -> None: ...


@job(name="permissions.started", unique=True, unique_until="started")
def until_started(x: int) -> None: ...


@job(name="permissions.replaced", unique=("x",), on_conflict="replace")
def replaced(x: int, y: int) -> None: ...


@job(name="permissions.debounced", debounce=5)
def debounced(x: int) -> None: ...


def enqueue() -> None:
    add.enqueue(1, 2)
    add.enqueue_many([((1, 2), {}), ((3, 4), {})])
    for _ in range(2):
        unique.enqueue(1)


def enqueue_what_is_there() -> None:
    for y in range(2):
        until_started.enqueue(1)
        replaced.enqueue(1, y)
        debounced.enqueue(1)


def act_on_jobs() -> None:
    one, another = BackgroundJob.objects.filter(status="failed")
    assert one.retry()
    assert another.discard()
    assert BackgroundJob.objects.filter(status="queued")[0].cancel()
    command("canceljobs", BackgroundJob.objects.get(status="processing").pk)


def act_on_dead_letters() -> None:
    letter = BackgroundJob.objects.filter(status="failed").earliest("pk")
    command("retryjobs", letter.pk)
    command("discardjobs", "--all", reason="Nobody wants them.")


def pause() -> None:
    command("pausequeue", "mail", reason="The server is down.")
    command("resumequeue", "mail")


def purge() -> None:
    command("purgequeue", "default", reason="Nobody wants them.")
    assert not BackgroundJob.objects.filter(status="queued").exists()


def stop_a_worker() -> None:
    worker = BackgroundWorker.objects.get()
    assert operations.stop_worker(worker, operations.Person("ada"))


def act_on_schedules() -> None:
    schedule = BackgroundSchedule.objects.create(name="daily", job_name="tests.jobs.add", cron="0 6 * * *")
    schedule.enabled = False
    schedule.save()
    schedule.delete()


def command(name: str, *arguments: Any, **options: Any) -> str:
    out = StringIO()
    try:
        call_command(name, *map(str, arguments), stdout=out, stderr=out, **options)
    except SystemExit:
        pass  # which is an answer, too
    return out.getvalue()


def check() -> None:
    if "W014" in command("check", databases=["default"]):
        raise CommandError("The check was refused.")


ACTS: dict[str, Callable[[], object]] = {  # by what the reference says of them
    "`enqueue`, `enqueue_many`": enqueue,
    'the same with `unique_until="started"`, `on_conflict="replace"` or `debounce=`':
        enqueue_what_is_there,
    "`retry()`, `discard()`, `cancel()`, `canceljobs`": act_on_jobs,
    "`retryjobs`, `discardjobs`": act_on_dead_letters,
    "`pausequeue`, `resumequeue`": pause,
    "`purgequeue`": purge,
    "schedules in the admin": act_on_schedules,
    "asking a worker to stop": stop_a_worker,
    "`sweepjobs`": lambda: command("sweepjobs"),
    "`prunejobs`": lambda: command("prunejobs"),
    "`checkjobs --deploy`": lambda: command("checkjobs", "--deploy"),
    "`check --database`": check,
    "`jobstats`": lambda: command("jobstats"),
    "`jobsdoctor`, which claims a job, and takes that back": lambda: command("jobsdoctor"),
}  # fmt: skip


@pytest.fixture
def some_jobs(db: None, settings: Any) -> None:
    settings.PGJOBS = {"LEASE": 0.001}  # so that a server that was just started may be swept
    for status in ("queued", "processing", "completed", "cancelled", "failed", "failed"):
        make_job(status, **{} if status == "queued" else {"updated_at": timedelta(days=-100)})
    counts = {"pid": 7, "processes": 1, "threads": 4, "async_slots": 0}
    lease = timedelta(milliseconds=1)  # as well, since a sweep goes by the longest one
    BackgroundWorker.objects.create(hostname="web-1", lease=lease, version="1", **counts)


@pytest.fixture
def role(db: None) -> str:
    """One that is gone with the transaction of the test."""
    name = f"pgjobs_{uuid.uuid4().hex[:8]}"
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {name}")
    return name


class TakeBack(Exception):
    pass


def can(role: str, act: Callable[[], object], granted: Grants) -> bool:
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            for privilege, name in granted:
                cursor.execute(f"GRANT {privilege} ON {name} TO {role}")
            cursor.execute(f"SET LOCAL ROLE {role}")
            act()
            raise TakeBack
    except TakeBack:
        return True
    except (Error, CommandError):  # what is allowed shows that there is nothing else to complain about
        return False


def rows() -> Iterator[tuple[str, Grants]]:
    *_, needed = tables(section(PAGE, "In the database"))
    for row in needed:
        granted: Grants = set()
        for part in row["privileges"].split(";"):
            *privileges, name = code(part)
            granted |= set(product(privileges, [name]))
        yield row["for"], granted


ROWS = list(rows())


@pytest.mark.parametrize(("what", "needed"), ROWS, ids=[what.replace("`", "") for what, _ in ROWS])
def test_a_role_needs_exactly_what_is_documented(
    role: str, some_jobs: None, what: str, needed: Grants
) -> None:
    act = ACTS[what]
    assert can(role, act, needed)
    for one in needed:
        assert not can(role, act, needed - {one}), one


def granted_to(role: str) -> Grants:
    (block,) = blocks(PAGE, "sql")
    granted: Grants = set()
    for privileges, names, to in re.findall(r"GRANT ([A-Z, ]+)\s+ON ([\w, ]+?)\s+TO (\w+);", block.text):
        if to == role:
            granted |= set(product(privileges.split(", "), names.split(", ")))
    return granted


def test_what_is_granted_is_enough_for_what_each_role_does() -> None:
    for what, needed in ROWS:
        if what.startswith(("`check", "`jobs")):
            assert needed <= granted_to("shop_watch")
        elif what.startswith(("`sweepjobs", "`prunejobs")):
            assert needed <= granted_to("shop_workers")
        else:
            assert needed <= granted_to("shop_site")


@pytest.mark.processes
def test_a_worker_works_with_what_it_is_granted(workers: Workers) -> None:
    role = f"pgjobs_{uuid.uuid4().hex[:8]}"
    with session() as owner:
        owner.execute(f"CREATE ROLE {role}")  # type: ignore[call-overload]
        try:
            for privilege, name in granted_to("shop_workers"):
                owner.execute(f"GRANT {privilege} ON {name} TO {role}")  # type: ignore[call-overload]
            BackgroundSchedule.objects.create(
                name="often",
                job_name="tests.jobs.add",
                payload={"args": [1, 2]},
                interval=timedelta(seconds=1),
            )
            lost = make_job("processing", locked_at=timedelta(days=-1))
            worker = workers.start(
                settings={"LEASE": 1, "SWEEP_INTERVAL": 0.2, "LOST_DELAY": 0, "COMPLETED_RETENTION": 0},
                environment={"PGOPTIONS": f"-c role={role}"},
            ).until_listening()
            enqueued = add.enqueue(1, 2)
            until(lambda: not BackgroundJob.objects.filter(pk__in=[enqueued.pk, lost.pk]).exists())
            until(lambda: BackgroundSchedule.objects.get().last_tick)
            assert worker.stop() == 0
            assert not worker.said("permission denied")
        finally:
            owner.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")  # type: ignore[call-overload]
