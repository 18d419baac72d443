"""What surrounds a job: current_job(), progress, the project's own context, signals, and waiting for it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from django.db.transaction import TransactionManagementError
from django.utils import translation

from django_pgjobs import InvalidArguments, JobTimeout, Snooze, current_job, execution, job
from django_pgjobs.abort import TaskAbort, ThreadAbort
from django_pgjobs.context import CurrentJob
from django_pgjobs.lifecycle import Event, Failed, Outcome
from django_pgjobs.models import BackgroundJob, Progress
from django_pgjobs.signals import job_enqueued, job_finished, job_raised, job_started
from django_pgjobs.store import Claim
from django_pgjobs.testing import drain
from tests import context_hook, tasks
from tests.factories import make_job
from tests.models import Effect
from tests.sessions import session
from tests.workers import Workers, until

seen: list[object] = []


@pytest.fixture(autouse=True)
def nothing_seen():
    seen.clear()


@job(name="context.look")
def look(number: int = 0) -> str:
    return deeper()


@job(name="context.alook")
async def alook() -> list[str]:
    return [deeper(), await sync_to_async(deeper)()]


@job(name="context.atomic", atomic=True)
def look_atomically() -> str:
    running = current_job()
    assert running is not None
    running.set_progress(1, 2, "atomic")
    return deeper()


@job(name="context.nested")
def enqueue_another() -> None:
    look.enqueue()


@job(name="context.fails", backoff=0, max_attempts=2)
def fail() -> None:
    raise ValueError("as ever")


@job(name="context.snoozes")
def snooze() -> None:
    raise Snooze(3600)


mood: ContextVar[str] = ContextVar("mood", default="good")
aborts: list[Any] = []


@job(name="context.times_out")
def time_out(own_mood: str | None = "bad") -> None:
    if own_mood is not None:
        mood.set(own_mood)
    threading.Thread(target=aborts[-1].abort, args=[JobTimeout("too long")]).start()
    while True:
        time.sleep(0.001)


@job(name="context.atimes_out")
async def atime_out(own_mood: str | None = "bad") -> None:
    if own_mood is not None:
        mood.set(own_mood)
    asyncio.get_running_loop().call_soon(aborts[-1].abort, JobTimeout("too long"))
    await asyncio.sleep(3600)


def deeper() -> str:
    running = current_job()
    seen.append(running)
    tenant, language = context_hook.tenant.get(), translation.get_language()
    return f"{running} {tenant} {language}"


# ── current_job() ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.django_db
@pytest.mark.parametrize("function", [look, alook, look_atomically], ids=lambda function: function.name)
def test_a_job_knows_itself_however_deep(function):
    enqueued = function.enqueue()
    assert drain().completed == 1
    for running in seen:
        assert isinstance(running, CurrentJob)
        assert (running.id, running.name, running.queue) == (enqueued.pk, function.name, "default")
        assert (running.attempt, running.max_attempts) == (1, 3)
    assert len(seen) == (2 if function is alook else 1)
    assert current_job() is None


def test_outside_of_a_job_there_is_none():
    assert look() == "None nobody en-us"


@pytest.mark.django_db
def test_a_job_that_is_called_by_another_sees_that_one():
    @job(name="context.outer")
    def outer() -> None:
        look()

    outer.enqueue()
    drain()
    assert [running.name for running in seen] == ["context.outer"]


# ── Progress ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def reports():
    return []


@pytest.fixture
def running(reports):
    return CurrentJob(Claim(1, None, 1, 3, "any", "default", "{}"), reports.append)


def test_a_loop_reports_once_a_second_and_at_the_end(running, reports):
    for done in range(1000):
        running.set_progress(done, 1000)
    assert reports == ['{"progress": {"done": 0, "total": 1000, "message": ""}}']
    running.flush()
    assert reports[1:] == ['{"progress": {"done": 999, "total": 1000, "message": ""}}']
    running.flush()
    assert len(reports) == 2


@pytest.mark.parametrize(
    ("done", "total"),
    [(-1, None), (1, -1), (float("nan"), 1), (1, float("inf")), (10**400, 1)],
    ids=lambda n: f"{n!s:.10}",
)
def test_what_is_no_progress_is_refused(running, reports, done, total):
    with pytest.raises(ValueError, match="makes no sense; count from zero"):
        running.set_progress(done, total)
    assert reports == []


def test_a_progress_that_is_no_number_is_refused(running):
    with pytest.raises(TypeError):
        running.set_progress("half")


@pytest.mark.django_db
def test_any_message_can_be_stored():
    @job(name="context.odd")
    def odd() -> None:
        running = current_job()
        assert running is not None
        running.set_progress(1, message="\x00\ud800" + "x" * 10_000)

    enqueued = odd.enqueue()
    assert drain().completed == 1
    progress = enqueued.refresh().progress
    assert progress is not None
    assert progress.message.startswith("\\x00\\ud800x")
    assert len(progress.message) <= 500


@pytest.mark.django_db
@pytest.mark.parametrize("metadata", [[], None, 5, {"progress": 5}, {"progress": {"done": "x"}}], ids=str)
def test_a_progress_that_somebody_has_written_by_hand_is_none(metadata):
    assert BackgroundJob(metadata=metadata).progress is None


def test_a_progress_in_words():
    assert str(Progress(1000, 20_000, "rows")) == "1,000 of 20,000: rows"
    assert str(Progress(5, None, "")) == "5"


@pytest.mark.django_db
def test_the_progress_of_an_atomic_job_is_kept():
    enqueued = look_atomically.enqueue()
    drain()
    assert enqueued.refresh().progress == Progress(1, 2, "atomic")


@pytest.mark.processes
def test_progress_shows_while_a_job_runs_and_after(workers: Workers, tmp_path: Path):
    workers.start("--processes", "1").until_listening()
    enqueued = tasks.tell_progress.enqueue(str(tmp_path / "go"))
    progress = until(lambda: enqueued.refresh().progress)
    assert (progress, enqueued.status) == (Progress(0, 1000, "on the way"), "processing")
    (tmp_path / "go").touch()
    until(lambda: enqueued.refresh().status == "completed")
    assert enqueued.progress == Progress(1000, 1000, "there")


@pytest.mark.processes
def test_progress_whose_connection_was_lost_is_told_again(workers: Workers, tmp_path: Path):
    workers.start("--processes", "1", "--poll-interval", "3600", "--no-maintenance").until_listening()
    first, second = tmp_path / "first", tmp_path / "second"
    enqueued = tasks.tell_progress_between.enqueue(str(first), str(second))
    until(lambda: Effect.objects.filter(what="waited started"))
    with session() as blocker, blocker.transaction(), session() as other:
        blocker.execute("LOCK TABLE background_jobs")
        first.touch()
        until(lambda: Effect.objects.filter(what="progress told"))
        ended = set()

        def three_are_ended() -> bool:  # the first may have been sent before there was progress to tell
            ended.update(
                other.execute(
                    "SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND wait_event_type = 'Lock'"
                ).fetchall()
            )
            return len(ended) >= 3

        until(three_are_ended)
    assert until(lambda: enqueued.refresh().progress) == Progress(1, 2, "")
    assert enqueued.status == "processing"
    second.touch()
    until(lambda: enqueued.refresh().status == "completed")


@pytest.mark.processes
def test_the_progress_of_an_async_job_in_a_worker(workers: Workers):
    enqueued = tasks.atell_progress.enqueue()
    assert workers.start("--processes", "1", "--drain").wait() == 0
    enqueued.refresh()
    assert enqueued.progress == Progress(1, None, "")
    assert enqueued.result == f"<CurrentJob tests.tasks.atell_progress #{enqueued.pk}, attempt 1 of 3>"


@pytest.mark.processes
def test_a_job_that_is_stopped_in_the_middle_of_telling_leaves_its_worker_well(workers: Workers):
    workers.start("--processes", "1", "--threads", "2").until_listening()
    talking = [tasks.talk_for_ever.enqueue() for _ in range(2)]
    until(lambda: all(one.refresh().progress for one in talking))
    for one in talking:
        assert one.cancel()
    until(lambda: all(one.refresh().status == "cancelled" for one in talking))
    after = tasks.note.enqueue("after")
    until(lambda: after.refresh().status == "completed")


# ── The project's own context ─────────────────────────────────────────────────────────────────────────────


@contextmanager
def tenant(name):
    token = context_hook.tenant.set(name)
    try:
        yield
    finally:
        context_hook.tenant.reset(token)


@pytest.fixture
def hook(settings):
    settings.PGJOBS = {"CONTEXT": "tests.context_hook"}


@pytest.mark.django_db
@pytest.mark.parametrize("function", [look, alook, look_atomically], ids=lambda function: function.name)
def test_what_was_captured_is_restored_where_the_job_runs(hook, function):
    with tenant("acme"), translation.override("de"):
        enqueued = function.enqueue()
    assert enqueued.refresh().metadata == {"context": {"tenant": "acme", "language": "de"}}
    drain()
    text = f"<CurrentJob {function.name} #{enqueued.pk}, attempt 1 of 3> acme de"
    assert enqueued.refresh().result == ([text, text] if function is alook else text)
    assert (context_hook.tenant.get(), translation.get_language()) == ("nobody", "en-us")


@pytest.mark.django_db
def test_what_a_job_enqueues_inherits_its_context(hook):
    with tenant("acme"):
        enqueue_another.enqueue()
    drain()
    assert [running.context["tenant"] for running in seen] == ["acme"]


@pytest.mark.django_db
def test_many_jobs_bring_one_context(hook):
    with tenant("acme"):
        ids = look.enqueue_many([((1,), {}), ((2,), {})])
    contexts = BackgroundJob.objects.filter(pk__in=ids).values_list("metadata__context__tenant", flat=True)
    assert list(contexts) == ["acme", "acme"]


@pytest.mark.django_db
@pytest.mark.parametrize("context", [[], None, "text", {}, 5], ids=str)
def test_a_job_without_a_context_runs_with_an_empty_one(hook, context):
    enqueued = make_job(job_name="context.look", payload={}, metadata={"context": context})
    drain()
    assert [running.context for running in seen] == [{}]
    assert enqueued.refresh().status == "completed"


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Wrong", r"Wrong.capture\(\) returned cannot be stored: \['when'\]"),
        (
            "no_dictionary",
            r"no_dictionary.capture\(\) returned cannot be stored: a dictionary is needed, not \[1\]\.",
        ),
    ],
)
def test_a_context_that_is_not_json_is_refused_before_any_sql(
    settings, django_assert_num_queries, name, message
):
    settings.PGJOBS = {"CONTEXT": f"tests.context_hook.{name}"}
    with django_assert_num_queries(0), pytest.raises(InvalidArguments, match=message):
        look.enqueue()


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("hook", "error"),
    [
        ("not_restored", "RuntimeError: nothing to restore"),
        (
            "no_manager",
            "TypeError: tests.context_hook.no_manager.restore() has to return a context manager, not None.",
        ),
    ],
)
def test_a_context_that_cannot_be_restored_fails_the_attempt(settings, hook, error):
    settings.PGJOBS = {"CONTEXT": f"tests.context_hook.{hook}"}
    enqueued = look.enqueue()
    assert drain().failed == 1
    assert enqueued.refresh().last_error == error
    assert seen == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tests.no_such_module", "cannot be imported"),
        ("tests.context_hook.nothing_there", "cannot be imported"),
        ("no dots", "cannot be imported"),
        ("tests.context_hook.not_a_hook", r"has no function capture\(\)"),
        ("tests.tasks", r"has no function capture\(\)"),
    ],
)
def test_a_hook_that_is_not_there_is_named(settings, path, message):
    settings.PGJOBS = {"CONTEXT": path}
    with pytest.raises(ImproperlyConfigured, match=message):
        look.enqueue()


# ── Signals ───────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def connected(signal, receiver, sender=None):
    signal.connect(receiver, sender=sender)
    try:
        yield
    finally:
        signal.disconnect(receiver, sender=sender)


@pytest.mark.django_db
def test_enqueueing_is_told_with_the_ids():
    told = []

    def receive(sender, ids, queue, using, **kwargs):
        told.append((sender, ids, queue, using))
        raise RuntimeError("a receiver that fails")

    with connected(job_enqueued, receive):
        one = look.using(queue="mail").enqueue()
        many = look.enqueue_many([((1,), {}), ((2,), {})])
        look.enqueue_many([])
        other = async_to_sync(look.aenqueue)()
    assert told == [
        (look, [one.pk], "mail", "default"),
        (look, many, "default", "default"),
        (look, [other.pk], "default", "default"),
    ]


@pytest.mark.django_db
def test_a_receiver_can_ask_for_one_job_function_only():
    told = []

    def receive(job, **kwargs):
        told.append(job.name)

    with connected(job_started, receive, sender=alook), connected(job_finished, receive, sender=alook):
        look.enqueue()
        alook.enqueue()
        drain()
    assert told == ["context.alook", "context.alook"]


@pytest.mark.django_db
def test_every_attempt_is_told_with_its_verdict():
    told = []

    def receive(sender, job, event, duration, error, **kwargs):
        told.append((sender, job.attempt, event, str(error)))
        assert duration >= 0

    with connected(job_finished, receive):
        fail.enqueue()
        drain()
    text = "ValueError: as ever"
    assert told == [(fail, 1, Event.FAIL, text), (fail, 2, Event.BURY, text)]


def run(claim: Claim) -> Outcome:
    """Run a job like an executor does, on an event loop if it is async. Its body may abort it."""
    if claim.job_name == "context.times_out":
        aborts.append(ThreadAbort())
        return execution.run(claim, aborts[-1])
    aborts.append(TaskAbort())
    return async_to_sync(execution.arun)(claim, aborts[-1])


@pytest.mark.parametrize("function", [time_out, atime_out], ids=lambda function: function.name)
def test_a_body_sees_what_a_receiver_sets_in_its_context(function):
    def receive(**kwargs):
        mood.set("as received")

    told = []

    def hear(**kwargs):
        told.append(mood.get())

    claim = Claim(1, None, 1, 1, function.name, "default", json.dumps({"args": [None]}))
    with connected(job_started, receive), connected(job_raised, hear):
        run(claim)
    assert told == ["as received"]


@pytest.mark.django_db
def test_an_exception_is_told_with_what_becomes_of_the_job():
    told = []

    def receive(sender, job, exception, event, **kwargs):
        told.append((sender, job.attempt, repr(exception), event))
        raise SystemExit("a receiver that would end its thread")

    with connected(job_raised, receive):
        enqueued = fail.enqueue()
        drain()
    error = "ValueError('as ever')"
    assert told == [(fail, 1, error, Event.FAIL), (fail, 2, error, Event.BURY)]
    assert enqueued.refresh().status == "failed"


@pytest.mark.django_db
def test_what_is_no_failure_is_not_told_as_one():
    told = []

    def receive(exception, **kwargs):
        told.append(exception)

    with connected(job_raised, receive):
        snooze.enqueue()
        look.enqueue()
        drain()
    assert told == []


@pytest.mark.parametrize("function", [time_out, atime_out], ids=lambda function: function.name)
def test_a_timeout_is_told_as_such_and_in_the_context_of_the_body(function):
    told = []

    def receive(exception, event, **kwargs):
        told.append((str(exception), event, mood.get()))

    claim = Claim(1, None, 1, 1, function.name, "default", "{}")
    with connected(job_raised, receive):
        assert isinstance(run(claim), Failed)
    assert told == [("too long", Event.BURY, "bad")]


@pytest.mark.processes
def test_workers_tell_what_they_have_settled(workers: Workers, tmp_path: Path):
    receivers = {"PGJOBS_TEST_RECEIVERS": "1"}
    worker = workers.start("--processes", "1", environment=receivers).until_listening()
    plain, async_ = tasks.note.enqueue("plain"), tasks.anote.enqueue("async")
    until(lambda: told(plain) and told(async_))
    assert told(plain) == told(async_) == ["complete completed 1"]
    killer = tasks.kill_executor.using(max_attempts=1).enqueue()
    until(lambda: told(killer))
    assert told(killer) == ["bury failed 1 executor died with signal 9; possibly out of memory"]
    assert Effect.objects.get(what=f"started {plain.pk}").detail == "tests.tasks.note"
    last = tasks.wait_for_file.enqueue(str(tmp_path / "go"), "last")
    until(lambda: Effect.objects.filter(what="last started").exists())
    worker.signal(15)
    worker.until_said("stopping")
    (tmp_path / "go").touch()
    assert worker.wait() == 0
    assert told(last) == ["complete completed 1"]


@pytest.mark.processes
def test_a_lost_job_is_told_by_the_host_that_sweeps(workers: Workers, tmp_path: Path):
    settings = {"LEASE": 2, "SWEEP_INTERVAL": 0.3, "LOST_DELAY": 3600}
    dying = workers.start("--processes", "1", settings=settings).until_listening()
    lost = tasks.wait_for_file.enqueue(str(tmp_path / "never"), "lost")
    until(lambda: Effect.objects.filter(what="lost started").exists())
    dying.kill()
    workers.start("--processes", "1", settings=settings, environment={"PGJOBS_TEST_RECEIVERS": "1"})
    until(lambda: told(lost))
    assert told(lost) == ["fail queued 1 Worker timeout detected"]


def told(enqueued: BackgroundJob) -> list[str | None]:
    return list(Effect.objects.filter(what=f"finished {enqueued.pk}").values_list("detail", flat=True))


# ── Waiting ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.django_db(transaction=True)
def test_waiting_ends_when_the_job_does():
    enqueued = look.enqueue()
    asked = threading.Event()

    def finish():
        asked.wait(30)
        try:
            drain()
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as elsewhere:
        finished = elsewhere.submit(finish)
        with pytest.raises(TimeoutError, match=r"context.look #\d+ is still queued after 0.05 s"):
            enqueued.wait(timeout=0.05)
        asked.set()
        assert enqueued.wait(timedelta(seconds=30)) is enqueued
        finished.result()
    assert enqueued.status == "completed"
    assert enqueued.wait(0).result == enqueued.result


@pytest.mark.django_db(transaction=True)
def test_nobody_waits_for_a_time_that_is_none():
    with pytest.raises(ValueError, match="timeout has to be seconds or a timedelta, not nan"):
        look.enqueue().wait(float("nan"))


@pytest.mark.django_db(transaction=True)
def test_a_job_that_is_gone_is_not_waited_for(settings):
    settings.PGJOBS = {"COMPLETED_RETENTION": 0}
    enqueued = look.enqueue()
    drain()
    with pytest.raises(BackgroundJob.DoesNotExist):
        enqueued.wait(30)


@pytest.mark.django_db
def test_waiting_inside_a_transaction_is_refused():
    enqueued = look.enqueue()
    with transaction.atomic(), pytest.raises(TransactionManagementError, match="cannot be waited for inside"):
        enqueued.wait(30)
