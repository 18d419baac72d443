"""`runjobs --reload`: run the same command without the option, and start it again when code changes.

The worker is stopped like by a deploy, so a running job is finished or handed back, never cut off.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from django.utils import autoreload

INTERVAL = 1.0  # seconds between looks at the files


def run_again_on_changes(parent: int | None = None) -> int:
    """Keep a worker running until we are told to stop, or `parent` has ended. Returns its exit status."""
    told = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: told.set())
    command = [part for part in autoreload.get_child_arguments() if part != "--reload"]
    seen = _modified()
    worker = subprocess.Popen(command, start_new_session=True)
    while not told.wait(INTERVAL) and parent in (None, os.getppid()):
        now = _modified()
        if now == seen:
            continue
        seen = now
        sys.stderr.write("Code has changed; starting again.\n")
        _stop(worker)
        worker = subprocess.Popen(command, start_new_session=True)
    return _stop(worker)


def _stop(worker: subprocess.Popen[bytes]) -> int:
    if worker.poll() is None:
        worker.terminate()
    return worker.wait()


def _modified() -> dict[Path, float]:
    """When each module's file was last changed."""
    times = {}
    for path in autoreload.iter_all_python_module_files():
        try:
            times[path] = path.stat().st_mtime
        except OSError:
            continue  # it is being replaced just now
    return times
