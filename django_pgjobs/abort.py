"""Stop the body of a job from outside of it, and nothing but the body.

A thread is aborted by an exception that Python raises in it as soon as it executes Python code again; a
coroutine by cancelling its task. Code that blocks in C, or swallows everything, is not impressed by either:
for that there is the supervisor, which ends the whole process.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from typing import Any, Self


class ThreadAbort:
    """Entered around a body by the thread that runs it; used by another thread to abort it.

    Who aborts before it is entered aborts what is about to start: entering it raises the error.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None  # what the body was aborted with, if so
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._closed = False

    def __enter__(self) -> Self:
        with self._lock:
            self._thread = threading.get_ident()
            if self.error is not None:
                raise self.error
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let nothing be raised from now on. Idempotent, since what was raised may arrive in here."""
        with self._lock:
            self._closed = True
        if self.error is not None:
            _raise_in(threading.get_ident(), None)  # take back what has not arrived yet

    def abort(self, error: BaseException) -> None:
        """Raise an exception of this class in the body, unless it has ended."""
        with self._lock:
            if not self._closed and self.error is None:
                self.error = error
                if self._thread is not None:
                    _raise_in(self._thread, type(error))


class TaskAbort:
    """The same for a body that is a task on an event loop, all of it in the loop's thread."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._task: asyncio.Task[Any] | None = None
        self._closed = False

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        if self.error is not None:
            raise self.error
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closed = True

    def abort(self, error: BaseException) -> None:
        if not self._closed and self.error is None:
            self.error = error
            if self._task is not None:  # one that is cancelled before its first step would never take it
                self._task.cancel()


def _raise_in(thread: int, class_: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if class_ is None else ctypes.py_object(class_)
    )
