"""Real worker processes for tests, and waiting for conditions instead of for time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

DEADLINE = 30.0  # seconds; only ever reached by a test that fails


def until(condition: Callable[[], Any], *, what: str = "", deadline: float = DEADLINE) -> Any:
    """Wait until the condition holds, and return what it returned. Fails after the deadline."""
    end = time.monotonic() + deadline
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"Waited for {deadline:g} s in vain{f' for {what}' if what else ''}.")
        time.sleep(0.01)
    return value


class Worker:
    """A `runjobs` process with a log that can be read."""

    def __init__(
        self, log: Path, environment: dict[str, str], arguments: list[str], *, below: Sequence[str] = ()
    ) -> None:
        self.log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [*below, sys.executable, "-m", "django", "runjobs", *arguments],
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def said(self, text: str) -> bool:
        return text in self.log.read_text()

    def until_said(self, text: str) -> None:
        until(lambda: self.said(text) or self.process.poll() is not None, what=f"the log to say {text!r}")
        assert self.said(text), f"The worker ended without saying {text!r}:\n{self.log.read_text()}"

    def until_listening(self) -> Worker:
        self.until_said("Listening for new jobs.")
        return self

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit status, once the worker has ended."""
        try:
            return self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"The worker did not end:\n{self.log.read_text()}") from None

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()

    def descendants(self) -> list[int]:
        return descendants(self.pid)

    def kill(self) -> None:
        """End the worker and everything below it, whatever state it is in."""
        if self.process.poll() is not None:
            return  # its pid may be another's by now
        for pid in [*self.descendants(), self.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


def descendants(pid: int) -> list[int]:
    """The processes below a process."""
    children = process_tree()
    found: list[int] = []
    unseen = [pid]
    while unseen:
        for child in children[unseen.pop()]:
            found.append(child)
            unseen.append(child)
    return found


def process_tree() -> dict[int, list[int]]:
    """The children of each process, in the order of their pids; without zombies."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid=,stat="], capture_output=True, text=True, check=True)
    children: dict[int, list[int]] = defaultdict(list)
    for line in table.stdout.splitlines():
        child, parent, state = line.split()
        if not state.startswith("Z"):
            children[int(parent)].append(int(child))
    return children


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(state.stdout.strip()) and not state.stdout.strip().startswith("Z")


def cpu_seconds(pid: int) -> float:
    """The processor time that a process has used; in whole seconds where there is no /proc."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        user, system = stat.read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    time_ = subprocess.run(
        ["ps", "-o", "cputimes=", "-p", str(pid)], capture_output=True, text=True, check=True
    )
    return float(time_.stdout)


class Workers:
    """Starts workers of this test, and ends what is left of them."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._directory = directory
        self._environment = environment
        self._started: list[Worker] = []

    def start(
        self,
        *arguments: str,
        settings: dict[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        below: Sequence[str] = (),
    ) -> Worker:
        """Start a worker, with more in its environment than the others have.

        With `below`, it is started by a program, which then is the process of what is returned.
        """
        own = {"PGJOBS_TEST_SETTINGS": json.dumps(settings or {})}
        inherited = {**self._environment, **(environment or {}), **own}
        log = self._directory / f"worker-{len(self._started)}.log"
        worker = Worker(log, inherited, list(arguments), below=below)
        self._started.append(worker)
        return worker

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._started)

    def end(self) -> None:
        for worker in self._started:
            worker.kill()
