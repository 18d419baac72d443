"""Job functions for real workers to run. They leave Effects behind, and wait for what the tests do."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from asgiref.sync import sync_to_async
from django.db import connection, transaction
from django.utils import translation

from django_pgjobs import current_job, job
from django_pgjobs.exceptions import JobStopped, JobTimeout
from tests.models import Effect

if os.environ.get("PGJOBS_TEST_RECEIVERS"):
    importlib.import_module("tests.receivers")
if os.environ.get("PGJOBS_TEST_SPANS"):
    importlib.import_module("tests.telemetry")


@job(backoff=0)
def note(what: str) -> str:
    Effect.objects.create(what=what, pid=os.getpid(), detail=translation.get_language())
    return what


@job
async def anote(what: str) -> str:
    await Effect.objects.acreate(what=what, pid=os.getpid())
    return what


@job
def nothing(number: int = 0) -> None:
    pass


@job(backoff=0.3)
def fail_twice(what: str) -> None:
    Effect.objects.create(what=what, pid=os.getpid())
    if Effect.objects.filter(what=what).count() < 3:
        raise RuntimeError(f"{what} is not ready")


@job(backoff=0)
def kill_executor(signal_number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), signal_number)
    threading.Event().wait()  # until the signal has reached the process


@job(backoff=0)
def exit_process(status: int) -> None:
    os._exit(status)


@job(backoff=0)
def wait_for_file(path: str, what: str = "waited") -> str:
    """Start, leave an Effect, and end when the file exists."""
    Effect.objects.create(what=f"{what} started", pid=os.getpid())
    try:
        while not Path(path).exists():
            time.sleep(0.01)
    except JobStopped:
        Effect.objects.create(what=f"{what} stopped", pid=os.getpid())
        raise
    Effect.objects.create(what=f"{what} ended", pid=os.getpid())
    return what


KEPT: list[bytes] = []


@job(backoff=0)
def keep_in_memory(size: int) -> None:
    KEPT.append(b"x" * size)


@job(backoff=0, rerun_if_lost=False)
def wait_once(path: str, what: str = "once") -> str:
    return wait_for_file(path, what)


@job(backoff=0)
async def await_file(path: str, what: str = "awaited") -> str:
    await Effect.objects.acreate(what=f"{what} started", pid=os.getpid())
    while not Path(path).exists():
        await asyncio.sleep(0.01)
    return what


@job(backoff=0, atomic=True)
def effect_then_wait(path: str, what: str) -> str:
    Effect.objects.create(what=what, pid=os.getpid())
    while not Path(path).exists():
        time.sleep(0.01)
    return what


@job(timeout=0.3, max_attempts=1)
def overdue(what: str, how: str) -> str:
    """Run for longer than allowed: `patient`, `greedy` with the GIL, `deaf` in C, or `stubborn`."""
    Effect.objects.create(what=f"{what} started", pid=os.getpid())
    if how == "greedy":
        re.match(r"(a+)+$", "a" * 60 + "b")  # years, without a look at anything else
    elif how == "deaf":
        time.sleep(3600)
    while True:
        try:
            time.sleep(0.01)
        except JobTimeout:
            Effect.objects.create(what=f"{what} heeded", pid=os.getpid())
            if how != "stubborn":
                raise
        except Exception:
            pass


@job(timeout=0.3, max_attempts=1)
def overdue_in_a_transaction() -> None:
    with transaction.atomic():
        Effect.objects.create(what="never committed")
        while True:
            time.sleep(0.01)


@job(timeout=0.3, max_attempts=5, give_up_on=JobTimeout)
def never_again() -> None:
    time.sleep(3600)


@job(timeout=0.3, max_attempts=1)
def sleep_in_the_database() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(3600)")


@job(timeout=0.3, max_attempts=1)
async def overdue_async(what: str, how: str) -> None:
    await Effect.objects.acreate(what=f"{what} started", pid=os.getpid())
    if how == "deaf":
        time.sleep(3600)
    await asyncio.sleep(3600)


@job
def fork_and_exit() -> int:
    """Do what careless code does: the child comes back into the executor as SystemExit."""
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    return os.waitpid(pid, 0)[1]


@job(max_attempts=1)
async def fork_and_wait(path: str) -> None:
    """The child comes back as if the job were done; the parent goes on until the file exists."""
    pid = os.fork()
    if pid == 0:
        return
    os.waitpid(pid, 0)
    await Effect.objects.acreate(what="forked", pid=os.getpid())
    while not Path(path).exists():
        await asyncio.sleep(0.01)


@job
def leave_an_orphan(path: str) -> None:
    """Start a process that ends when the file exists, and whose parent has ended long before."""
    wait = f"while ! [ -e '{path}' ]; do sleep 0.05; done"
    code = f"import os; os.fork() or os.execlp('sh', 'sh', '-c', {wait!r})"
    subprocess.run([sys.executable, "-c", code], check=True)


@job
async def cancel_itself() -> str:
    await Effect.objects.acreate(what="cancelled itself")
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    return "done"


@job
async def cancel_the_others() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


@job
def close_everything_and_tell() -> str:
    os.closerange(3, 1024)
    return "nobody hears"


@job
async def exit_in_a_task() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    await asyncio.wait([asyncio.ensure_future(leave())])


@job
def leave_a_mess() -> None:
    """Change the language, and leave a transaction open."""
    translation.activate("de")
    transaction.set_autocommit(False)
    Effect.objects.create(what="never committed")


@job
def lose_connection() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        Effect.objects.create(what="backend", detail=str(cursor.fetchone()[0]))


@job
def give_back(value: object) -> object:
    return value


@job
def fan_out(count: int) -> None:
    note.enqueue_many([((f"child {number}",), {}) for number in range(count)])


# Some tests have the workers that they start import a module of theirs.
if module := os.environ.get("PGJOBS_TEST_IMPORT"):
    importlib.import_module(module)


@job(backoff=0)
def tell_progress(path: str) -> None:
    running = current_job()
    assert running is not None
    for done in range(1000):
        running.set_progress(done, 1000, "on the way")
    note_seen("progress told")
    wait_for_file(path)
    running.set_progress(1000, 1000, "there")


@job
def tell_progress_between(first: str, second: str) -> None:
    running = current_job()
    assert running is not None
    wait_for_file(first)
    running.set_progress(1, 2)
    note_seen("progress told")
    wait_for_file(second)


@job
async def atell_progress() -> str:
    running = current_job()
    assert running is not None
    await sync_to_async(running.set_progress)(0.5)
    await asyncio.sleep(0)
    running.set_progress(1)
    return await sync_to_async(lambda: str(current_job()))()


def note_seen(what: str, detail: str = "") -> None:
    Effect.objects.create(what=what, pid=os.getpid(), detail=detail)


@job
def talk_for_ever() -> None:
    running = current_job()
    assert running is not None
    while True:
        running.set_progress(1)
        running._next_report = 0.0  # as often as can be
