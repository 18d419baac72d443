"""Job functions that enter each of their runs into the ledger. The first argument is the job's number.

Workers import this module, and the environment tells them whose they are, and how often to probe.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from django_pgjobs import job, wakeup
from tests.faults import ledger

PARENT = "PGJOBS_TEST_PARENT"  # the environment variables: the pid of the test
PROBE_INTERVAL = "PGJOBS_TEST_PROBE_INTERVAL"  # seconds between probes of a listener


@job(backoff=0, max_attempts=1000)
def work(number: int, seconds: float = 0.0) -> None:
    with ledger.entry(number):
        time.sleep(seconds)


@job(backoff=0, max_attempts=1000, rerun_if_lost=False)
def work_once(number: int, seconds: float = 0.0) -> None:
    with ledger.entry(number):
        time.sleep(seconds)


@job(backoff=0, max_attempts=1000)
def chore(number: int, seconds: float = 0.0, until: str = "") -> None:
    """Take some time, or wait for a file."""
    with ledger.entry(number):
        time.sleep(seconds)
        while until and not Path(until).exists():
            time.sleep(0.01)


@job(backoff=0, max_attempts=1000)
def die(number: int, way: str) -> str:
    ledger.start(number)
    WAYS_TO_DIE[way][0]()
    return way  # which nobody hears


def _be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # until it has taken effect


def _follow_null() -> None:
    ctypes.string_at(0)


def _recurse_in_c() -> None:
    """Let the C library parse an expression that nests more deeply than its stack."""
    expression = b"(" * 500_000 + b")" * 500_000
    ctypes.CDLL(None).regcomp(ctypes.create_string_buffer(4096), expression, 1)


def _run_out_of_memory() -> None:
    """Take all memory that there is, and be killed for it, as the kernel would."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (256 * 1024 * 1024, most))
    taken = []
    try:
        while True:
            taken.append(bytearray(16 * 1024 * 1024))
    except MemoryError:
        _be_killed()


def _close_all_files() -> None:
    os.closerange(3, 1024)


# What each does, and what is then said of the executor.
WAYS_TO_DIE: dict[str, tuple[Callable[[], object], str]] = {
    "be killed": (_be_killed, "died with signal 9"),
    "run out of memory": (_run_out_of_memory, "died with signal 9"),
    "follow a null pointer": (_follow_null, "died with signal 11"),
    "recurse in C": (_recurse_in_c, "died with signal 11"),
    "abort": (os.abort, "died with signal 6"),
    "exit": (lambda: os._exit(3), "exited with status 3"),
    "exit as if all was well": (lambda: os._exit(0), "exited with status 0"),
    "close all files": (_close_all_files, "exited with status 1"),
}

if seconds := os.environ.get(PROBE_INTERVAL):
    wakeup.PROBE_INTERVAL = float(seconds)

# On Linux, the kernel ends a worker when the test is killed that started it.
if sys.platform == "linux" and "runjobs" in sys.argv and PARENT in os.environ:
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if str(os.getppid()) != os.environ[PARENT]:
        os._exit(1)  # it was killed before
