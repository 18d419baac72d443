"""Celery with a Redis that flushes its log to the disk once a second, and without results.

Its pool of threads is faster here than one of processes, which is the default. A message is acknowledged
before its task runs, as by default, so a worker that dies loses what it has begun.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import common
from celery import Celery, group

PREFETCH = 128  # messages for each thread; its documentation advises 64 or 128 for short tasks

OPTIONS = [
    "--loglevel=ERROR", "--pool=threads", f"--concurrency={common.THREADS}",
    "--without-gossip", "--without-mingle", "--without-heartbeat",
]  # fmt: skip

app = Celery(broker=f"redis+socket://{os.environ['BENCHMARK_REDIS']}")
app.conf.update(task_ignore_result=True, worker_prefetch_multiplier=PREFETCH)

jobs = {
    "nothing": app.task(name="nothing")(common.nothing),
    "moment": app.task(name="moment")(common.moment),
}


def work(job: str) -> None:
    app.worker_main(["worker", *OPTIONS])


@contextmanager
def client() -> Iterator[tuple[common.One, common.Many]]:
    def one(job: str, number: int) -> None:
        jobs[job].delay(number)

    def many(job: str, count: int) -> None:
        group(jobs[job].s(1) for _ in range(count)).apply_async()

    yield one, many


if __name__ == "__main__":
    common.main(lambda: None, work, client)
