"""Child processes that never outlive the one who started them, however that one ends.

Between the owner and the child stands a small process: this file, run as a script. It holds the reading end
of a pipe of which only the owner has the writing end. When the owner closes that, or dies, of whatever it may
be, the reading end sees the end of the file. Then the child gets SIGTERM and, if that is not enough, its
process group gets SIGKILL. This needs nothing that only Linux or only macOS has.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Leashed:
    """A running command, with everything it prints in a log file."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str], grace: float
    ) -> None:
        self.name = name
        self.log = log
        self.grace = grace
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-S", __file__, str(grace), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                # Ctrl-C reaches the owner only, which then lets go in the right order.
                start_new_session=True,
            )

    def wait_for(self, pattern: str, timeout: float = 60) -> re.Match[str]:
        """Wait until the command has printed the pattern. Raises RuntimeError when it does not."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self.process.poll() is not None
            if match := re.search(pattern, self.log.read_text(errors="replace")):
                return match
            if ended or time.monotonic() > deadline:
                what = "ended" if ended else "is silent"
                raise RuntimeError(f"The {self.name} {what} before it was ready. It said:\n{self.tail()}")
            time.sleep(0.02)

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def end(self) -> int:
        """Let go of the command, wait for its end, and return its exit status."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait(self.grace + 10)


def main(grace: float, command: Sequence[str]) -> int:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: child.terminate())
    threading.Thread(target=end_when_let_go, args=(child, grace), daemon=True).start()
    status = child.wait()
    return status if status >= 0 else 128 - status


def end_when_let_go(child: subprocess.Popen[bytes], grace: float) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    child.terminate()
    try:
        child.wait(grace)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
