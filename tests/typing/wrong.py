"""What people mistype. A type checker that finds nothing to ignore complains: so each line is an error."""

from __future__ import annotations

from datetime import timedelta

from django_pgjobs import Retry, Snooze, job
from tests.typing.right import collect, send

send("a")  # type: ignore[arg-type]
send()  # type: ignore[call-arg]
send(1, subjekt="a")  # type: ignore[call-arg]

send.enqueue("a")  # type: ignore[arg-type]
send.enqueue()  # type: ignore[call-arg]
send.enqueue(1, 2, 3)  # type: ignore[call-arg, arg-type]
send.enqueue(1, subjekt="a")  # type: ignore[call-arg]
send.enqueue(1, subject=None)  # type: ignore[arg-type]
send.enqueue(1, queue="mail")  # type: ignore[call-arg]
found = send.enqueue(1).no_such_attribute  # type: ignore[attr-defined]

send.using(queue="mail").enqueue("a")  # type: ignore[arg-type]
send.using(queue="mail").enqueue()  # type: ignore[call-arg]
send.using(queue="mail").enqueue(1, subjekt="a")  # type: ignore[call-arg]
send.using(qeue="mail")  # type: ignore[call-arg]
send.using(run_at=60)  # type: ignore[arg-type]
send.using("mail")  # type: ignore[call-arg]
send.using(priority="high")  # type: ignore[arg-type]

send.enqueue_many([1, 2])  # type: ignore[list-item]
send.enqueue_many([(1, 2)])  # type: ignore[list-item]


async def from_async_code() -> None:
    await send.aenqueue("a")  # type: ignore[arg-type]
    await send.aenqueue()  # type: ignore[call-arg]
    await send.aenqueue(1, subjekt="a")  # type: ignore[call-arg]
    await send.using(priority=1).aenqueue("a")  # type: ignore[arg-type]
    await collect.aenqueue("a")  # type: ignore[arg-type]
    await send.aenqueue(1).id  # type: ignore[attr-defined]


@job(qeue="mail")  # type: ignore[call-overload, untyped-decorator]
def misspelt() -> None: ...


@job("mail")  # type: ignore[call-overload, untyped-decorator]
def positional() -> None: ...


@job(backoff="soon")  # type: ignore[arg-type]
def never() -> None: ...


@job(backoff=lambda error: 1)  # type: ignore[misc, arg-type]
def lonely() -> None: ...


@job(retry_on=int)  # type: ignore[arg-type]
def oddly() -> None: ...


@job(max_attempts=timedelta(1))  # type: ignore[call-overload, untyped-decorator]
def endlessly() -> None: ...


def number(order: int) -> int:
    return order


@job(unique=number)  # type: ignore[arg-type]
def numbered(order: int) -> None: ...


@job(unique=True, unique_until="later")  # type: ignore[call-overload, untyped-decorator]
def later(order: int) -> None: ...


@job(unique=True, on_conflict="ignore")  # type: ignore[call-overload, untyped-decorator]
def ignored(order: int) -> None: ...


@job(debounce="soon")  # type: ignore[call-overload, untyped-decorator]
def pushed(order: int) -> None: ...


Retry("soon")  # type: ignore[arg-type]
Snooze()  # type: ignore[call-arg]

send.queue = "mail"  # type: ignore[misc]
