"""Traces by OpenTelemetry: the spans of enqueueing and of attempts, and how they belong together."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import django
import pytest
from asgiref.sync import async_to_sync
from django.db.models.functions import Now
from django.test import override_settings

from django_pgjobs import GiveUp, InvalidArguments, Retry, Snooze, current_job, execution, job, store
from django_pgjobs.checks import check_settings
from django_pgjobs.lifecycle import Event, JobError
from django_pgjobs.models import BackgroundJob, BackgroundSchedule
from django_pgjobs.store import Claim
from django_pgjobs.testing import drain
from django_pgjobs.ticking import Ticker
from tests import tasks
from tests.factories import make_job
from tests.markdown import HOW_TO, ROOT, blocks, code, tables
from tests.models import Effect
from tests.workers import Workers, until

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id


class Failing(SpanProcessor):
    """What a project's own processor may do."""

    fails = False

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if self.fails:
            raise RuntimeError("a processor that fails")

    def on_end(self, span: ReadableSpan) -> None:
        if self.fails:
            raise RuntimeError("a processor that fails")


failing = Failing()
exporter = InMemorySpanExporter()
provider = TracerProvider()  # the first one of a process stays
provider.add_span_processor(failing)
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("tests")

seen: list[str] = []


def see() -> None:
    """Note down the span that is the current one."""
    seen.append(format_span_id(trace.get_current_span().get_span_context().span_id))


@job(name="tracing.look")
def look(number: int = 0) -> None:
    see()


@job(name="tracing.look_atomically", atomic=True)
def look_atomically() -> None:
    see()


@job(name="tracing.alook")
async def alook() -> None:
    see()
    with tracer.start_as_current_span("inside"):
        pass


@job(name="tracing.log_in", backoff=0, max_attempts=2)
def log_in(user: str, password: str) -> None:
    raise ValueError(f"{user} has no password {password}")


@job(name="tracing.enqueue_another")
def enqueue_another() -> None:
    look.enqueue()


@job(name="tracing.say", max_attempts=1)
def say(what: str) -> Any:
    running = current_job()
    assert running is not None
    match what:
        case "snooze":
            raise Snooze(timedelta(hours=1))
        case "retry":
            raise Retry(3600, "not yet")
        case "give up":
            raise GiveUp("never")
        case "return a coroutine":
            return alook()
    return what


@job(name="tracing.one_at_a_time", unique=True)
def one_at_a_time(number: int) -> None:
    pass


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    yield
    seen.clear()
    exporter.clear()
    failing.fails = False


@pytest.fixture
def tracing(settings: Any) -> None:
    settings.PGJOBS = {"TRACING": True}


def spans(name: str = "") -> list[ReadableSpan]:
    """The spans that have ended, in that order."""
    return [span for span in exporter.get_finished_spans() if span.name.startswith(name)]


def only(name: str) -> ReadableSpan:
    (span,) = spans(name)
    return span


def id_of(span: Any) -> int:
    return int(span.get_span_context().span_id)


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def trace_of(span: Any) -> int:
    return int(span.get_span_context().trace_id)


# ── One trace from the request to the job ─────────────────────────────────────────────────────────────────


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("function", [look, look_atomically, alook], ids=lambda function: function.name)
def test_a_job_is_in_the_trace_of_the_request_that_enqueued_it(function: Any) -> None:
    with tracer.start_as_current_span("request") as request:
        enqueued = function.using(queue="mail").enqueue()
    drain(queue="mail")
    send, process = only("send"), only("process")
    assert (send.name, process.name) == ("send mail", "process mail")
    assert (send.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert trace_of(send) == trace_of(process) == trace_of(request)
    assert (parent_of(send), parent_of(process)) == (id_of(request), id_of(send))
    assert [link.context.span_id for link in process.links] == [id_of(send)]
    assert seen == [format_span_id(id_of(process))]
    assert send.status.status_code == process.status.status_code == StatusCode.UNSET
    both = {
        "messaging.system": "django_pgjobs",
        "messaging.destination.name": "mail",
        "messaging.message.id": str(enqueued.pk),
        "messaging.django_pgjobs.job_name": function.name,
    }
    assert attributes_of(send) == both | {
        "messaging.operation.type": "send",
        "messaging.operation.name": "send",
    }
    assert attributes_of(process) == both | {
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.django_pgjobs.attempt": 1,
        "messaging.django_pgjobs.max_attempts": 3,
        "messaging.django_pgjobs.outcome": "completed",
    }


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
def test_spans_inside_of_a_job_are_its_children() -> None:
    alook.enqueue()
    drain()
    inside = only("inside")
    assert parent_of(inside) == id_of(only("process"))


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
def test_what_a_job_enqueues_is_in_its_trace() -> None:
    enqueue_another.enqueue()
    drain()
    assert len({trace_of(span) for span in spans()}) == 1
    assert [span.name for span in spans()] == [
        "send default", "send default", "process default", "process default"
    ]  # fmt: skip
    inner = spans("send")[1]
    assert parent_of(inner) == id_of(spans("process")[0])


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
def test_the_trace_goes_along_from_async_code() -> None:
    with tracer.start_as_current_span("request") as request:
        async_to_sync(look.aenqueue)()
    send = only("send")
    assert parent_of(send) == id_of(request)


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
def test_many_jobs_at_once_are_one_span() -> None:
    look.enqueue_many([((number,), {}) for number in range(3)])
    drain()
    send = only("send")
    assert attributes_of(send)["messaging.batch.message_count"] == 3
    assert "messaging.message.id" not in attributes_of(send)
    assert [parent_of(span) for span in spans("process")] == [id_of(send)] * 3


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
def test_an_equal_job_that_is_there_is_named() -> None:
    first = one_at_a_time.enqueue(1)
    one_at_a_time.enqueue(1)
    new, kept = (attributes_of(span) for span in spans("send"))
    assert new["messaging.message.id"] == kept["messaging.message.id"] == str(first.pk)
    assert "messaging.django_pgjobs.is_new" not in new
    assert kept["messaging.django_pgjobs.is_new"] is False


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
def test_arguments_that_are_refused_fail_the_span_and_are_not_in_it() -> None:
    with suppress(InvalidArguments):
        log_in.enqueue("ann", {1, "hunter22"})
    send = only("send")
    assert send.status.status_code == StatusCode.ERROR
    assert attributes_of(send)["error.type"] == "django_pgjobs.exceptions.InvalidArguments"
    assert "hunter22" not in send.to_json()


@pytest.mark.django_db
def test_immediate_mode_traces_like_a_worker(settings: Any) -> None:
    settings.PGJOBS = {"TRACING": True, "IMMEDIATE": True}
    with tracer.start_as_current_span("request") as request:
        look.enqueue()
        see()
    send, process = only("send"), only("process")
    assert parent_of(process) == id_of(send)
    assert seen == [format_span_id(id_of(process)), format_span_id(id_of(request))]


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
def test_a_task_of_django_tasks_is_traced_like_a_job() -> None:
    if django.VERSION < (6, 0):
        pytest.importorskip("django_tasks")
    from tests.core_tasks import noop

    with tracer.start_as_current_span("request") as request:
        result = noop.enqueue()
    drain()
    assert trace_of(only("process")) == trace_of(request)
    assert attributes_of(only("send"))["messaging.message.id"] == result.id


@pytest.mark.django_db
def test_the_projects_own_context_goes_along_with_the_trace(settings: Any) -> None:
    settings.PGJOBS = {"TRACING": True, "CONTEXT": "tests.context_hook"}
    context = look.enqueue().refresh().metadata["context"]
    header = f"00-{format_trace_id(trace_of(only('send')))}-{format_span_id(id_of(only('send')))}-"
    assert context.pop("traceparent").startswith(header)
    assert context == {"tenant": "nobody", "language": "en-us"}


@pytest.mark.django_db
def test_a_trace_that_the_projects_own_hook_has_chosen_stays(settings: Any) -> None:
    settings.PGJOBS = {"TRACING": True, "CONTEXT": f"{__name__}.Chosen"}
    look.enqueue()
    drain()
    assert format_trace_id(trace_of(only("process"))) == "ab" * 16


class Chosen:
    capture = staticmethod(lambda: {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
    restore = staticmethod(lambda context: nullcontext())


# ── Attempts ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
def test_each_attempt_has_a_span_in_the_same_trace() -> None:
    log_in.enqueue("ann", password="hunter22")
    drain()
    first, second = spans("process")
    for attempt, span in enumerate((first, second), start=1):
        attributes = attributes_of(span)
        assert attributes["messaging.django_pgjobs.attempt"] == attempt
        assert attributes["messaging.django_pgjobs.outcome"] == "failed"
        assert attributes["error.type"] == "ValueError"
        assert span.status.status_code == StatusCode.ERROR
        assert span.status.description == "ValueError: ann has no password [hidden]"
        (event,) = span.events
        assert event.name == "exception"
        shown = attributes_of(event)
        assert shown["exception.type"] == "ValueError"
        assert shown["exception.message"] == "ann has no password [hidden]"
        assert "in log_in" in str(shown["exception.stacktrace"])
        assert "hunter22" not in span.to_json()
    assert trace_of(first) == trace_of(second) == trace_of(only("send"))
    assert id_of(first) != id_of(second)


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize(
    ("what", "outcome", "error"),
    [
        ("nothing", "completed", None),
        ("snooze", "snoozed", None),
        ("retry", "failed", "django_pgjobs.exceptions.Retry: not yet"),
        ("give up", "failed", "django_pgjobs.exceptions.GiveUp: never"),
        (
            "return a coroutine",
            "failed",
            "TypeError: The function returned a coroutine that nobody awaited. Make it an async function.",
        ),
    ],
)
def test_a_span_has_what_became_of_the_attempt(what: str, outcome: str, error: str | None) -> None:
    say.enqueue(what)
    drain()
    span = only("process")
    assert attributes_of(span)["messaging.django_pgjobs.outcome"] == outcome
    assert (span.status.status_code is StatusCode.ERROR, span.status.description) == (bool(error), error)
    assert ("error.type" in attributes_of(span)) is bool(error)


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
def test_arguments_that_nobody_can_read_fail_the_span() -> None:
    make_job(job_name="tracing.look", payload={"what": "hunter22"})
    drain()
    span = only("process")
    assert span.status.status_code == StatusCode.ERROR
    assert "hunter22" not in span.to_json()


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
def test_a_job_of_a_schedule_starts_a_trace() -> None:
    due = Now() - timedelta(hours=1)
    BackgroundSchedule.objects.create(
        name="tracing", job_name="tracing.look", interval=timedelta(minutes=1), next_tick_at=due
    )
    with tracer.start_as_current_span("whoever ticks"), store.own_transaction("default") as cursor:
        Ticker().tick(cursor)
    drain()
    assert only("process").parent is None
    assert spans("send") == []


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize(
    ("event", "duration", "error", "outcome"),
    [
        (Event.FAIL, 2.0, JobError("", "executor died with signal 9"), "crashed"),
        (Event.BURY, None, JobError("", "Worker timeout detected"), "crashed"),
        (Event.INTERRUPT, 2.0, None, "interrupted"),
        (Event.FAIL, 2.0, JobError("builtins.ValueError", "as ever", fingerprint="abc"), None),
        (Event.BURY, 0.0, JobError("", "It never started."), None),
        (Event.COMPLETE, 2.0, None, None),
    ],
)
def test_an_attempt_that_ends_with_its_process_has_a_span_from_elsewhere(
    event: Event, duration: float | None, error: JobError | None, outcome: str | None
) -> None:
    context = json.dumps({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
    claim = Claim(7, None, 2, 3, "tracing.look", "default", "{}", claimed_at=1e9, context=context)
    assert execution.is_heard_of(event, duration, error) is (outcome is not None)
    execution.announce(claim, event, duration, error)
    if outcome is None:
        assert spans() == []
        return
    span = only("process")
    assert (format_trace_id(trace_of(span)), parent_of(span)) == ("ab" * 16, int("cd" * 8, 16))
    assert attributes_of(span)["messaging.django_pgjobs.outcome"] == outcome
    assert attributes_of(span)["messaging.django_pgjobs.attempt"] == 2
    assert attributes_of(span).get("error.type") == (error and "_OTHER")
    assert span.status.description == (error and error.message)
    assert span.start_time is not None
    if duration is None:
        assert span.start_time == int(1e18)
    else:
        assert span.end_time is not None
        assert span.end_time - span.start_time >= duration * 1e9


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
def test_a_job_that_nobody_knows_has_no_span() -> None:
    make_job(job_name="nobody.knows", payload={})
    drain()
    assert spans() == []


# ── What stands in rows that others have written ──────────────────────────────────────────────────────────

ODD: list[Any] = [
    None, 5, True, [], [5], ["00-ab"], {}, "", "00-ab", "\n", "x" * 100_000,
    f"00-{'0' * 32}-{'0' * 16}-01", f"ff-{'ab' * 16}-{'cd' * 8}-01", f"00-{'ab' * 16}-{'cd' * 8}-01-more",
]  # fmt: skip


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: ascii(odd)[:30])
def test_a_malformed_context_harms_no_job_and_starts_a_new_trace(odd: Any) -> None:
    made = make_job(job_name="tracing.look", payload={}, metadata={"context": {"traceparent": odd}})
    other = make_job(job_name="tracing.look", payload={}, metadata={"context": odd})
    drain()
    assert made.refresh().status == other.refresh().status == "completed"
    for span in spans("process"):
        assert span.parent is None
        assert span.links == ()


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: ascii(odd)[:30])
def test_a_malformed_state_is_left_out(odd: Any) -> None:
    context = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": odd}
    made = make_job(job_name="tracing.look", payload={}, metadata={"context": context})
    drain()
    assert made.refresh().status == "completed"
    assert format_trace_id(trace_of(only("process"))) == "ab" * 16
    assert not only("process").get_span_context().trace_state


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
def test_the_state_of_others_goes_along() -> None:
    parent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "vendor=1"}
    make_job(job_name="tracing.enqueue_another", payload={}, metadata={"context": parent})
    drain()
    inner = BackgroundJob.objects.get(job_name="tracing.look").metadata["context"]
    assert inner["tracestate"] == "vendor=1"


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
def test_what_the_caller_does_not_sample_is_not_sampled() -> None:
    context = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-00"}
    made = make_job(job_name="tracing.look", payload={}, metadata={"context": context})
    drain()
    assert made.refresh().status == "completed"
    assert spans() == []


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
def test_a_tracer_provider_that_fails_harms_no_job(caplog: pytest.LogCaptureFixture) -> None:
    failing.fails = True
    enqueued = look.enqueue()
    drain()
    failing.fails = False
    assert enqueued.refresh().status == "completed"
    assert "the tracer provider failed" in caplog.text


# ── On and off ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.django_db
def test_without_the_setting_nothing_is_traced_or_carried() -> None:
    with tracer.start_as_current_span("request"):
        enqueued = look.enqueue()
        look.enqueue_many([((1,), {})])
    drain()
    assert [span.name for span in spans()] == ["request"]
    assert enqueued.refresh().metadata == {}
    assert seen == ["0" * 16] * 2


PROGRAM = """
import sys, django
django.setup()
from django_pgjobs.testing import drain
from tests import tasks
tasks.nothing.enqueue()
tasks.nothing.enqueue_many([((1,), {})])
assert drain().completed == 2
print([name for name in sys.modules if name.partition(".")[0] == "opentelemetry"])
"""


@pytest.mark.django_db(transaction=True)
def test_without_the_setting_nothing_of_opentelemetry_is_imported(child_environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=child_environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_where_opentelemetry_is_installed_the_checks_are_silent() -> None:
    with override_settings(PGJOBS={"TRACING": True}):
        assert check_settings() == []


# ── In workers ────────────────────────────────────────────────────────────────────────────────────────────

ON = {"TRACING": True}


def exported(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The spans in a file that executors have written, by job and attempt."""
    whole, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
    found = [json.loads(line) for line in whole.splitlines()]
    processed = [span for span in found if span["name"].startswith("process")]
    return {
        (
            span["attributes"]["messaging.message.id"],
            span["attributes"]["messaging.django_pgjobs.attempt"],
        ): span
        for span in processed
    }


@pytest.mark.processes
@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("before_fork", ["", "1"], ids=["after the fork", "before the fork"])
def test_executors_export_their_spans_before_they_end(
    workers: Workers, tmp_path: Path, before_fork: str
) -> None:
    path = tmp_path / "spans"
    environment = {"PGJOBS_TEST_SPANS": str(path), "PGJOBS_TEST_SPANS_BEFORE_FORK": before_fork}
    options = ["--processes", "1", "--max-jobs-per-executor", "2"]
    worker = workers.start(*options, settings=ON, environment=environment).until_listening()
    with tracer.start_as_current_span("request") as request:
        plain, async_ = tasks.note.enqueue("plain"), tasks.anote.enqueue("async")
        # These two were all that the first executor was to run.
        until(lambda: len(exported(path)) == 2, what="the spans of an executor that is replaced")
        failing_twice = tasks.fail_twice.enqueue("at last")
    until(lambda: failing_twice.refresh().status == "completed")
    assert worker.stop() == 0
    sent = {attributes_of(span)["messaging.message.id"]: span for span in spans("send")}
    processed = exported(path)
    assert processed.keys() == {
        (str(plain.pk), 1),
        (str(async_.pk), 1),
        *((str(failing_twice.pk), attempt) for attempt in (1, 2, 3)),
    }
    for (id, attempt), span in processed.items():
        assert span["context"]["trace_id"] == f"0x{format_trace_id(trace_of(request))}"
        assert span["parent_id"] == f"0x{format_span_id(id_of(sent[id]))}"
        fails = id == str(failing_twice.pk) and attempt < 3
        assert span["status"]["status_code"] == ("ERROR" if fails else "UNSET")
    ran_in = {span["resource"]["attributes"]["process.pid"] for span in processed.values()}
    assert bool(before_fork) is (ran_in != set(Effect.objects.values_list("pid", flat=True)))


@pytest.mark.processes
@pytest.mark.usefixtures("tracing")
def test_an_attempt_that_kills_its_executor_is_in_the_trace(workers: Workers, tmp_path: Path) -> None:
    path = tmp_path / "spans"
    killer = tasks.kill_executor.using(max_attempts=1).enqueue()
    options = ["--processes", "1", "--drain"]
    worker = workers.start(*options, settings=ON, environment={"PGJOBS_TEST_SPANS": str(path)})
    assert worker.wait() == 0, worker.log.read_text()
    ((key, span),) = exported(path).items()
    assert key == (str(killer.pk), 1)
    assert span["parent_id"] == f"0x{format_span_id(id_of(only('send')))}"
    assert span["status"]["status_code"] == "ERROR"
    assert span["status"]["description"].startswith("executor died with signal 9")


# ── The guide ─────────────────────────────────────────────────────────────────────────────────────────────

GUIDE = HOW_TO / "trace-jobs.md"


@pytest.mark.processes
def test_with_the_code_of_the_guide_a_worker_shows_spans(workers: Workers, tmp_path: Path) -> None:
    setting, telemetry, app = (block.text for block in blocks(GUIDE, "python"))
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "telemetry.py").write_text(telemetry)
    (tmp_path / "shop" / "apps.py").write_text(app)
    apps = 'INSTALLED_APPS = [*INSTALLED_APPS, "shop.apps.ShopConfig"]'
    (tmp_path / "traced_settings.py").write_text(f"from tests.settings import *\n{apps}\n{setting}")
    tasks.note.enqueue("traced")
    environment = {"DJANGO_SETTINGS_MODULE": "traced_settings", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    worker = workers.start("--drain", "--processes", "1", environment=environment)
    assert worker.wait() == 0, worker.log.read_text()
    assert worker.said('"name": "process default"')


@pytest.mark.django_db
@pytest.mark.usefixtures("tracing")
def test_the_guide_lists_the_spans_and_their_attributes() -> None:
    first, second = tables(GUIDE.read_text())
    assert [code(row["span"])[0] for row in first] == ["send <queue>", "process <queue>"]
    documented: dict[str, set[str]] = {"send": set(), "process": set()}
    for row in second:
        for operation in documented if row["on"] == "both" else code(row["on"]):
            documented[operation].update(code(row["attribute"]))
    one_at_a_time.enqueue(1)
    one_at_a_time.enqueue(1)
    look.enqueue_many([((1,), {})])
    log_in.enqueue("ann", "hunter22")
    with suppress(InvalidArguments):
        look.enqueue(object())
    drain()
    for operation, attributes in documented.items():
        assert attributes == {name for span in spans(operation) for name in attributes_of(span)}
