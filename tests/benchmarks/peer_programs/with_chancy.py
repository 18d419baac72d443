"""Chancy, with eager polling and more slots than ours, since it claims no more jobs than it has slots."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import common
from chancy import Chancy, Queue, Worker, job

SLOTS = 100
EXECUTORS = {
    "nothing": "chancy.executors.thread.ThreadedExecutor",
    "nothing_async": "chancy.executors.asyncex.AsyncExecutor",
    "moment": "chancy.executors.thread.ThreadedExecutor",
}


@job(queue="nothing")
def nothing(number: int) -> None:
    common.nothing(number)


@job(queue="nothing_async")
async def nothing_async(number: int) -> None:
    await common.nothing_async(number)


@job(queue="moment")
def moment(number: int) -> None:
    common.moment(number)


JOBS = {"nothing": nothing, "nothing_async": nothing_async, "moment": moment}


def chancy() -> Chancy:
    return Chancy(common.URL, log=logging.getLogger("chancy"))


async def install() -> None:
    async with chancy() as app:
        await app.migrate()
        for name, executor in EXECUTORS.items():
            await app.declare(Queue(name, concurrency=SLOTS, executor=executor, eager_polling=True))


async def work() -> None:
    async with chancy() as app, Worker(app) as worker:
        await worker.wait_for_shutdown()


@asynccontextmanager
async def client() -> AsyncIterator[tuple[common.One, common.Many]]:
    async with chancy() as app:

        async def one(name: str, number: int) -> None:
            await app.push(JOBS[name].job.with_kwargs(number=number))

        async def many(name: str, count: int) -> None:
            jobs = [JOBS[name].job.with_kwargs(number=1) for _ in range(count)]
            async for _ in app.push_many(jobs, batch_size=count):
                pass

        yield one, many


if __name__ == "__main__":
    common.main(lambda: asyncio.run(install()), lambda job: asyncio.run(work()), client)
