"""Tasks of `django.tasks`, for tests of the backend and for the workers that they start."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

import django

from django_pgjobs import GiveUp, Snooze
from django_pgjobs.backends import TaskContext, signals
from django_pgjobs.backends import task as task_with_options
from tests.models import Effect

if django.VERSION >= (6, 0):
    from django.tasks import task
else:
    from django_tasks import task


@task()
def noop(*args: Any, **kwargs: Any) -> None:
    return None


@task
def noop_bare(*args: Any, **kwargs: Any) -> None:
    return None


@task()
async def noop_async(*args: Any, **kwargs: Any) -> None:
    return None


@task()
def meaning_of_life() -> int:
    return 42


@task()
async def meaning_of_life_async() -> int:
    return 42


@task()
def value_error() -> None:
    raise ValueError("This task failed due to ValueError")


@task()
async def value_error_async() -> None:
    raise ValueError("This task failed due to ValueError")


@task()
def system_exit() -> None:
    raise SystemExit("This task failed due to SystemExit")


@task()
def keyboard_interrupt() -> None:
    raise KeyboardInterrupt("This task failed due to KeyboardInterrupt")


@task()
def complex_exception() -> None:
    raise ValueError(ValueError("This task failed"))


@task()
def unstorable() -> Any:
    return lambda: True


@task()
def give_back(value: Any) -> Any:
    return value


@task()
def bytes_and_ranges() -> Any:
    return {"text": "é".encode(), "numbers": range(3), "pair": (1, 2)}


@task()
def give_up() -> None:
    raise GiveUp("enough")


@task()
def snooze() -> None:
    raise Snooze(60)


@task(takes_context=True)
def own_id(context: Any) -> str:
    return context.task_result.id


@task(takes_context=True)
async def own_id_async(context: Any) -> str:
    return context.task_result.id


@task(takes_context=True)
def check_context(context: Any, attempt: int, *, word: str = "") -> list[Any]:
    assert isinstance(context, TaskContext)
    assert context.attempt == attempt
    result = context.task_result
    assert result.started_at is not None
    assert result.enqueued_at <= result.started_at <= result.last_attempted_at
    return [result.status, len(result.worker_ids), result.worker_ids[-1] != "", word]


@task_with_options(backoff=0, max_attempts=2, takes_context=True)
def succeed_at_second(context: Any) -> int:
    if context.attempt < 2:
        raise RuntimeError("not yet")
    return len(context.task_result.errors)


@task_with_options(
    max_attempts=9,
    backoff=[1, 2],
    timeout=30,
    give_up_on=KeyError,
    retry_on=(OSError, RuntimeError),
    rerun_if_lost=False,
    aliases=("tests.old_tasks.with_options",),
)
def with_options(kind: str = "") -> None:
    if kind:
        raise {"key": KeyError, "os": OSError, "value": ValueError}[kind](kind)


@task_with_options(atomic=True)
def atomic_effect(what: str, fail: bool = False) -> str:
    Effect.objects.create(what=what)
    if fail:
        raise RuntimeError("undone")
    return what


@task_with_options(atomic=True)
def atomic_unstorable(what: str) -> Any:
    Effect.objects.create(what=what)
    return object()


@task_with_options(backend="second", queue_name="second")
def of_second() -> str:
    return "second"


@task_with_options(backoff=0)
async def wait_async(file: str) -> str:
    while not os.path.exists(file):
        await asyncio.sleep(0.01)
    return "waited"


@task_with_options(backoff=0)
def wait(file: str) -> str:
    while not os.path.exists(file):
        time.sleep(0.01)
    return "waited"


@task_with_options(timeout=0.2, max_attempts=1)
def overdue() -> None:
    while True:
        time.sleep(0.01)


@task()
async def cancel_itself() -> str:
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    return "done"


@task()
def kill_executor() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def note(sender: Any, task_result: Any, **kwargs: Any) -> None:
    """A receiver that tells what a worker has sent."""
    Effect.objects.create(what=f"{task_result.status} {task_result.task.name}", pid=os.getpid())


if os.environ.get("PGJOBS_TEST_NOTE_SIGNALS"):
    signals.task_started.connect(note)
    signals.task_finished.connect(note)
