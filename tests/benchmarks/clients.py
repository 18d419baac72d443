"""Processes that use the database at the same time: each runs one function, and all of them start together.

Such a function is a generator. It prepares itself, yields once, goes on when all are ready, and returns what
it has found.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

Work = Callable[..., Generator[None, None, Any]]


class Clients:
    """Runs a function in processes of their own. On entering, all of them are ready to go."""

    def __init__(self, count: int, work: Work, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(theirs, work, args), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Clients:
        self.results()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()  # by which they end
        for process in self._processes:
            if error is not None:
                process.terminate()
            process.join()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def go(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)

    def results(self) -> list[Any]:
        """What the functions returned, once all have. Raises RuntimeError where one has failed."""
        results = []
        for pipe in self._pipes:
            try:
                failure, result = pipe.recv()
            except EOFError:
                raise RuntimeError("A client process ended without a word.") from None
            if failure:
                raise RuntimeError(f"A client process failed:\n{failure}")
            results.append(result)
        return results

    def run(self) -> list[Any]:
        self.go()
        return self.results()


def _run(pipe: Connection, work: Work, args: tuple[Any, ...]) -> None:
    try:
        steps = work(*args)
        next(steps)
        pipe.send(("", None))
        pipe.recv()
        try:
            next(steps)
        except StopIteration as end:
            pipe.send(("", end.value))
        pipe.recv()  # it stays until its processor time has been read
    except EOFError:
        pass
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    os._exit(0)
