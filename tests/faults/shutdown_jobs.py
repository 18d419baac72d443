"""Job functions for test_shutdown. To workers that do not import this, they are the new code of a deploy."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import termios
import time

from django_pgjobs import job
from tests.models import Effect

TERMINAL = "PGJOBS_TEST_TERMINAL"  # the environment variable that names the terminal of a worker's session


@job(backoff=0)
def nap(what: str, seconds: float) -> None:
    Effect.objects.create(what=what, pid=os.getpid())
    time.sleep(seconds)


@job(backoff=0)
def ignore_everything(what: str) -> None:
    """Block each signal that can be blocked, and run for years without a look at anything else."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    Effect.objects.create(what=f"{what} started", pid=os.getpid())
    while True:
        try:
            re.match(r"(a+)+$", "a" * 60 + "b")
        except BaseException:
            pass


if terminal := os.environ.get(TERMINAL):
    fcntl.ioctl(os.open(terminal, os.O_RDWR), termios.TIOCSCTTY, 0)
