"""Whether a worker host is alive and ready, for whoever asks: by a file, or over HTTP.

The loop says at each of its turns that it goes on, and what keeps it from working, if anything does. It is
alive while it has said so lately; that has nothing to do with the database, since starting again would not
bring it back. All processes of a host share the clock that this goes by.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .channel import NEVER, clock
from .endpoint import Answer, Endpoint, Page, Unavailable

logger = logging.getLogger(__name__)

BEAT_INTERVAL = 5.0  # seconds between two signs of life at most
SILENT_FOR = 30.0  # seconds without one after which a host is not alive


class Beat(NamedTuple):
    """A sign of life. `why_not` says why the host is not ready; it is empty when it is."""

    pid: int
    at: float
    why_not: str = ""

    def why_not_alive(self) -> str:
        silent = clock() - self.at
        if 0 <= silent <= SILENT_FOR:  # a time to come is of a clock before this machine was started
            return ""
        return f"Worker {self.pid} has given no sign of life for {abs(silent):.0f} s."

    def why_not_ready(self) -> str:
        return self.why_not_alive() or self.why_not


class Health:
    """Tells of the loop's beats. Raises Unavailable where it cannot."""

    def __init__(self, path: Path | None = None, address: tuple[str, int] | None = None) -> None:
        self.last_beat = Beat(os.getpid(), clock(), "The worker is starting.")
        self._path = path
        self._complained = False
        self.endpoint: Endpoint | None = None
        if path is not None:
            try:
                self._write()
            except OSError as error:
                raise Unavailable(f"The health file {path} cannot be written: {error.strerror}.") from error
        if address is not None:
            self.endpoint = Endpoint(
                address,
                {
                    "/livez": self._page(Beat.why_not_alive),
                    "/readyz": self._page(Beat.why_not_ready),
                },
            )
            logger.info("Health is told at port %s, /livez and /readyz.", self.endpoint.port)

    def beat(self, why_not: str) -> None:
        """Say that the loop goes on, and why it is of no use just now; nothing, if it is."""
        before, self.last_beat = self.last_beat, Beat(self.last_beat.pid, clock(), why_not)
        if self._path is None:
            return
        if before.why_not == why_not and int(before.at) == int(self.last_beat.at):
            return  # once a second is enough
        try:
            self._write()
            self._complained = False
        except OSError as error:
            if not self._complained:
                logger.error("The health file %s cannot be written: %s.", self._path, error.strerror)
            self._complained = True

    @property
    def next_deadline(self) -> float:
        """When the next beat is due."""
        return NEVER if self._path is None and self.endpoint is None else self.last_beat.at + BEAT_INTERVAL

    def close(self) -> None:
        if self.endpoint is not None:
            self.endpoint.close()
        try:
            if self._path is not None and read(self._path).pid == os.getpid():  # and not our successor's
                self._path.unlink()
        except (OSError, Unavailable) as error:
            logger.warning("The health file %s is left as it is: %s", self._path, error)

    def _page(self, why_not: Callable[[Beat], str]) -> Page:
        def page(accept: str) -> Answer:
            said = why_not(self.last_beat)
            return Answer(f"{said or 'ok'}\n".encode(), status=503 if said else 200)

        return page

    def _write(self) -> None:
        assert self._path is not None
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            new.write_text(json.dumps(self.last_beat._asdict()))
            new.replace(self._path)  # so that nobody reads half of it
        finally:
            new.unlink(missing_ok=True)


def read(path: Path) -> Beat:
    """The last beat that was written to a file. Raises Unavailable when there is none."""
    try:
        match json.loads(path.read_text()):
            case {"pid": int(pid), "at": float(at), "why_not": str(why_not)}:
                return Beat(pid, at, why_not)
        raise ValueError
    except OSError as error:
        raise Unavailable(f"The health file {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise Unavailable(f"{path} is not the health file of a worker.") from error
