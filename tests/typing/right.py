"""What people write. Both type checkers accept all of it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

from django_pgjobs import DuplicateJob, GiveUp, JobFunction, Retry, Snooze, job
from django_pgjobs.models import BackgroundJob
from django_pgjobs.store import Claim
from django_pgjobs.testing import assert_enqueued, drain


@job
def send(order: int, *, subject: str = "") -> str:
    return subject


def wait(error: BaseException, claim: Claim) -> timedelta | None:
    return None if claim.attempts > 3 else timedelta(seconds=claim.attempts)


@job(
    name="shop.collect",
    aliases=["shop.gather"],
    queue="mail",
    priority=5,
    max_attempts=3,
    backoff=[1, timedelta(minutes=1)],
    retry_on=(OSError, TimeoutError),
    give_up_on=ValueError,
    rerun_if_lost=False,
)
async def collect(*amounts: float) -> float:
    return sum(amounts)


def by_order(order: int) -> str | None:
    return str(order) if order else None


@job(unique=True, unique_until="started", on_conflict="keep")
def index(order: int) -> None: ...


@job(unique=("order",), debounce=timedelta(seconds=30), max_wait=300)
def publish(order: int) -> None: ...


@job(redact=lambda order, note: [note])
def remind(order: int, note: str) -> None: ...


@job(unique=by_order, unique_until=timedelta(hours=1), on_conflict="raise")
def refuse(order: int) -> None: ...


@job(backoff=wait)
def awkward(queue: str, self: int, run_at: float) -> None:
    raise Retry(timedelta(minutes=1))
    raise Retry(1.5, "later")
    raise Snooze(60)
    raise GiveUp("never")


assert_type(send(1, subject="a"), str)
assert_type(send.enqueue(1), BackgroundJob)
assert_type(send.enqueue(order=1, subject="a"), BackgroundJob)
assert_type(send.using(queue="mail", priority=1, max_attempts=3).enqueue(1, subject="a"), BackgroundJob)
assert_type(send.using(run_at=timedelta(hours=1)).enqueue(1).refresh(), BackgroundJob)
assert_type(send.using(run_at=datetime.now(UTC)).using(priority=1)(1), str)
assert_type(send.enqueue_many([((1,), {}), ((2,), {"subject": "a"})]), list[int])
identity: int = send.enqueue(1).id
assert_type(index.enqueue(1).is_new, bool)
assert_type(publish.enqueue(order=1), BackgroundJob)

try:
    refuse.enqueue(1)
except DuplicateJob as error:
    assert_type(error.job_id, int | None)
assert_type(awkward.enqueue("mail", self=1, run_at=2), BackgroundJob)

takes: Callable[[int], str] = send
any_job: JobFunction[..., Any] = send
enqueues: Callable[[int], BackgroundJob] = send.enqueue


async def from_async_code() -> None:
    assert_type(await send.aenqueue(1, subject="a"), BackgroundJob)
    assert_type(await send.using(queue="mail").aenqueue(order=1), BackgroundJob)
    assert_type(await collect.aenqueue(1, 2.5), BackgroundJob)
    assert_type(await collect(1, 2.5), float)
    unawaited: Coroutine[Any, Any, float] = collect(1)
    await unawaited


def in_tests() -> None:
    assert_type(drain().completed, int)
    assert_type(assert_enqueued(send, [1], queue="mail", count=1), list[BackgroundJob])
