"""Whatever people put into the queue costs one job at most: never a worker, nor a command, nor a page."""

from __future__ import annotations

import io
import json
import random
from typing import Any, NamedTuple

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connection, transaction
from django.test import Client

from django_pgjobs.exceptions import InvalidArguments
from django_pgjobs.lifecycle import Status
from tests.faults import fuzz_jobs, hostile
from tests.faults.conftest import Chunk
from tests.faults.odd_rows import ECHO, TOKENS, insert, odd_row
from tests.models import Effect
from tests.sessions import session
from tests.workers import Worker, Workers, until

pytestmark = pytest.mark.processes

# Lost claims are to be found soon, but a statement must have time on a busy machine: a quarter of the lease.
SETTINGS = {"LEASE": 8, "SWEEP_INTERVAL": 0.5, "LOST_DELAY": 0, "UNKNOWN_JOB_AFTER": 0, "POLL_INTERVAL": 1}
SAMPLE = 40  # rows whose pages are looked at

# What the log says when something other than a job has failed.
TROUBLE = [
    "The database does not answer",
    "Unexpected error",
    "A batch of outcomes could not be stored",
    "its outcome could not be stored",
    "failed; it is tried again",
    "the claim was lost",
    "A slot of this executor failed",
    "was disturbed",
    "ended the event loop",
    "executor died",
    "Executor ",
]


class Given(NamedTuple):
    """What was enqueued through the API, and what is to become of it."""

    id: int
    args: Any
    kwargs: Any
    echoed: bool  # by the job's result


@pytest.fixture
def child_environment(child_environment: dict[str, str]) -> dict[str, str]:
    return {**child_environment, "PGJOBS_TEST_IMPORT": "tests.faults.fuzz_jobs"}


@pytest.mark.chunks(large=10)
def test_no_input_stops_a_worker_or_a_command(chunk: Chunk, workers: Workers) -> None:
    rng = chunk.random
    count = chunk.size(small=600, large=1000)
    worker = workers.start("--processes", "2", "--threads", "4", settings=SETTINGS).until_listening()
    processes = until(lambda: len(found := worker.descendants()) >= 4 and found, what="all processes")

    given, refused = enqueue_all(rng, count // 2)
    rows, refused_rows = insert_all(rng, count - count // 2)
    until_quiet(worker)
    call_command("sweepjobs", "--timeout", "1s", stdout=io.StringIO())
    until_quiet(worker)

    assert trouble_of(worker) == []
    assert worker.process.poll() is None
    assert set(processes) <= set(worker.descendants()), "an executor has ended"
    for one in given:
        assert_came_back(one)
    assert raised_and_completed(given) == []
    assert [job for job in unfinished_or_unexplained() if not explains(rows.get(job[0], {}), job)] == []
    statuses = dict(execute("SELECT status::text, count(*) FROM background_jobs GROUP BY 1"))
    use_commands(rng)
    assert worker.stop() == 0
    chunk.record(inputs=count, refused_by_api=refused, refused_by_postgres=refused_rows, **statuses)


@pytest.mark.chunks(large=5)
def test_no_row_breaks_a_page(chunk: Chunk, workers: Workers) -> None:
    count = chunk.size(small=150, large=500)
    enqueue_all(chunk.random, count)
    insert_all(chunk.random, count)
    assert workers.start("--drain", settings=SETTINGS).wait() == 0
    pages = look_at_pages(chunk.random)
    chunk.record(rows=execute("SELECT count(*) FROM background_jobs")[0][0], pages=pages)


@pytest.mark.parametrize("give", [fuzz_jobs.give, fuzz_jobs.give_async])
@pytest.mark.parametrize("kind", hostile.UNTOUCHABLE)
def test_a_result_that_cannot_be_touched_costs_its_own_job_only(
    workers: Workers, give: Any, kind: str
) -> None:
    job = give.using(max_attempts=2).enqueue(kind)
    worker = workers.start(settings=SETTINGS).until_listening()
    until(lambda: job.refresh().status in FINISHED, deadline=10)
    assert job.crashes == 0
    assert trouble_of(worker) == []


def test_a_job_that_bare_sql_has_claimed_has_a_page(transactional_db: None) -> None:
    row = {"job_name": ECHO, "payload": "{}", "status": "processing", "locked_at": "now", "attempts": 1}
    with session() as own:
        id = insert(own, row)
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    assert client.get(f"/admin/django_pgjobs/backgroundjob/{id}/change/").status_code == 200


def test_a_claim_stamped_in_the_future_comes_to_an_end(workers: Workers) -> None:
    row = {"job_name": ECHO, "payload": "{}", "status": "processing", "locked_by": TOKENS[0]}
    with session() as own:
        insert(own, row | {"locked_at": "9999-12-30 00:00Z"})
    worker = workers.start(settings=SETTINGS | {"LEASE": 2}).until_listening()
    until(lambda: worker.said("Ready to run jobs."))
    until(lambda: not busy(), deadline=10)


FINISHED = ("completed", "failed", "cancelled")


# ── Putting it in ─────────────────────────────────────────────────────────────────────────────────────────


def enqueue_all(rng: random.Random, count: int) -> tuple[list[Given], int]:
    """Enqueue through the API. Returns what was taken in, and how many were refused."""
    calls = [
        (fail, (kind,)) for kind in hostile.EXCEPTIONS for fail in (fuzz_jobs.fail, fuzz_jobs.fail_async)
    ]
    results = hostile.RESULTS.keys() - set(hostile.UNTOUCHABLE)
    calls += [(give, (kind,)) for kind in sorted(results) for give in (fuzz_jobs.give, fuzz_jobs.give_async)]
    calls += [(rule, (kind,)) for rule in fuzz_jobs.RULES for kind in ("value", "no text at all")]
    rng.shuffle(calls)
    given, refused = [], 0
    for number in range(count):
        kwargs: dict[str, Any] = {}
        match rng.randrange(8):
            case 0 | 1 if calls:
                function, args = calls.pop()
            case 2:
                function = rng.choice([fuzz_jobs.fail, fuzz_jobs.fail_async])
                args = (rng.randrange(2**32),)
            case 3:
                function = fuzz_jobs.fail_while_failing
                args = (rng.randrange(2**32), rng.randrange(2**32))
            case 4:
                function, args = rng.choice(fuzz_jobs.NAMED), (hostile.scalar(rng),)
            case _:
                function = rng.choice([fuzz_jobs.echo, fuzz_jobs.echo_async])
                args = tuple(hostile.value(rng) for _ in range(rng.randrange(3)))
                kwargs = {hostile.text(rng): hostile.value(rng) for _ in range(rng.randrange(2))}
        if number < len(hostile.VALUES):
            function, args, kwargs = fuzz_jobs.echo, (list(hostile.VALUES.values())[number](),), {}
        if rng.random() < 0.2:
            function = in_odd_queue(function, rng)
        id = enqueue(function, args, kwargs, many=rng.random() < 0.1)
        if id is None:
            refused += 1
        else:
            echoed = function.func in (fuzz_jobs.echo.func, fuzz_jobs.echo_async.func)
            given.append(Given(id, hostile.plain(args), hostile.plain(kwargs), echoed))
    assert Effect.objects.filter(what="beside").count() == count
    return given, refused


def in_odd_queue(function: Any, rng: random.Random) -> Any:
    """The function with a queue of an odd name, where that is possible."""
    name = rng.choice([hostile.text(rng), rng.choice(hostile.IMPOSSIBLE_TEXTS), "q" * 255, "q" * 256])
    try:
        return function.using(queue=name)
    except ValueError:
        return function


def enqueue(function: Any, args: Any, kwargs: Any, *, many: bool) -> int | None:
    """The id, or None where the arguments are refused; the transaction commits in both cases."""
    id: int | None = None
    with transaction.atomic():
        try:
            if many:
                [id] = function.enqueue_many([(args, kwargs)])
            else:
                id = function.enqueue(*args, **kwargs).pk
        except InvalidArguments:
            pass
        Effect.objects.create(what="beside")
    return id


def insert_all(rng: random.Random, count: int) -> tuple[dict[int, dict[str, Any]], int]:
    """Insert with bare SQL. Returns the rows by id, and how many were refused."""
    rows: dict[int, dict[str, Any]] = {}
    refused = 0
    with session() as own:
        for _ in range(count):
            row = odd_row(rng)
            id = insert(own, row)
            if id is None:
                refused += 1
            else:
                rows[id] = row
    return rows, refused


# ── Looking at what became of it ──────────────────────────────────────────────────────────────────────────


def execute(statement: str, *parameters: Any) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return cursor.fetchall()


def until_quiet(worker: Worker) -> None:
    """Wait until no job is due or running, claims of clients that use bare SQL aside."""
    try:
        until(lambda: not busy(), deadline=60)
    except AssertionError:
        log = worker.log.read_text()[-5000:]
        raise AssertionError(f"These jobs do not come to an end: {busy()}\n{log}") from None


def busy() -> list[Any]:
    return execute(
        "SELECT id, status, left(job_name, 100), left(queue_name, 100), run_at::text, attempts, max_attempts,"
        "       locked_at::text, locked_by, left(last_error, 200)"
        "  FROM background_jobs"
        " WHERE status = 'queued' AND run_at <= statement_timestamp()"
        "    OR status = 'processing' AND locked_by IS NOT NULL"
        " LIMIT 10"
    )


def trouble_of(worker: Worker) -> list[str]:
    lines = worker.log.read_text().splitlines()
    return [line for line in lines if any(sentence in line for sentence in TROUBLE)]


def unfinished_or_unexplained() -> list[Any]:
    """Jobs that are neither finished with a reason nor to be run in the future."""
    return execute(
        "SELECT id, status, job_name, run_at::text, attempts, locked_at::text, left(last_error, 200)"
        "  FROM background_jobs"
        " WHERE NOT (status = 'completed'"
        "            OR status = 'failed' AND last_error <> ''"
        "            OR status = 'cancelled' AND job_name LIKE '%%fail%%'"  # JobStopped, raised by itself
        "            OR status = 'queued' AND run_at > statement_timestamp())"
    )


def explains(row: dict[str, Any], job: Any) -> bool:
    """Whether a row was written so that the job may end like this: finished, or claimed and to be stopped."""
    was_stopped = row.get("status") == "processing" and "stop_requested_at" in row
    return row.get("status") in FINISHED or (was_stopped and job[1] == "cancelled")


def raised_and_completed(given: list[Given]) -> list[Any]:
    """Jobs whose body has raised something, whatever it was, and that are completed all the same."""
    return execute(
        "SELECT id, job_name, payload FROM background_jobs"
        " WHERE id = ANY (%s) AND status = 'completed' AND starts_with(job_name, %s)",
        [one.id for one in given],
        f"{fuzz_jobs.__name__}.fail",
    )


def assert_came_back(given: Given) -> None:
    payload, result, status, problem = execute(
        "SELECT payload::text, result::text, status::text, metadata ->> 'result_problem'"
        "  FROM background_jobs WHERE id = %s",
        given.id,
    )[0]
    expected = {"args": given.args, "kwargs": given.kwargs}
    assert hostile.same(json.loads(payload), expected), given.id
    if given.echoed:
        assert status == "completed", given.id
        assert problem is not None or hostile.same(json.loads(result), expected), given.id


# ── Pages and commands ────────────────────────────────────────────────────────────────────────────────────


def look_at_pages(rng: random.Random) -> int:
    """Ask for lists and for a sample of the pages of jobs. Returns how many pages there were."""
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    jobs, dead = "/admin/django_pgjobs/backgroundjob/", "/admin/django_pgjobs/deadletter/"
    ids = [id for (id,) in execute("SELECT id FROM background_jobs ORDER BY id")]
    failed = [id for (id,) in execute("SELECT id FROM background_jobs WHERE status = 'failed' ORDER BY id")]
    pages = [f"{jobs}?status={status}" for status in Status]
    pages += [f"{url}?p={page}" for url in (jobs, dead) for page in (1, 2)]
    pages += [jobs, dead, *(f"/admin/django_pgjobs/{one}/" for one in ("overview", "backgroundqueue"))]
    pages += ["/admin/django_pgjobs/backgroundworker/"]
    pages += [f"{jobs}{id}/change/" for id in {ids[0], ids[-1], *rng.sample(ids, min(SAMPLE, len(ids)))}]
    pages += [f"{dead}{id}/change/" for id in rng.sample(failed, min(SAMPLE, len(failed)))]
    for page in pages:
        assert client.get(page).status_code == 200, page
    return len(pages)


def use_commands(rng: random.Random) -> None:
    out = io.StringIO()
    call_command("jobstats", stdout=out)
    call_command("jobstats", "--json", stdout=out)
    with pytest.raises(SystemExit):  # something is wrong, and that is all
        call_command("jobsdoctor", stdout=out)
    call_command("sweepjobs", "--dry-run", stdout=out)
    call_command("prunejobs", "--completed", "0", "--failed", "0", "--dry-run", stdout=out)
    waiting = [id for (id,) in execute("SELECT id FROM background_jobs WHERE status = 'queued' AND id > 0")]
    for id in waiting:
        if id < 10**9:  # the command does not take more digits
            call_command("canceljobs", str(id), stdout=out)
    ages = [part for status in FINISHED for part in (f"--{status}", "0")]
    call_command("prunejobs", *ages, "--batch-size", str(rng.randrange(1, 500)), stdout=out)
    left = execute(
        "SELECT id, status FROM background_jobs"
        " WHERE updated_at < statement_timestamp() - interval '1 minute'"
        "   AND id BETWEEN 1 AND 999999999 AND status <> 'processing'"
    )
    assert left == []
