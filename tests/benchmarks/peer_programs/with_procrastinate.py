"""procrastinate, without Django, which is its faster way; with as many slots as ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import common
from procrastinate import App, PsycopgConnector

app = App(connector=PsycopgConnector(conninfo=common.URL, min_size=2, max_size=10))
jobs = {
    "nothing": app.task(name="nothing")(common.nothing),
    "nothing_async": app.task(name="nothing_async")(common.nothing_async),
    "moment": app.task(name="moment")(common.moment),
}


async def install() -> None:
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


async def work(job: str) -> None:
    slots = common.ASYNC_SLOTS if job == "nothing_async" else common.THREADS
    async with app.open_async():
        await app.run_worker_async(concurrency=slots)


@asynccontextmanager
async def client() -> AsyncIterator[tuple[common.One, common.Many]]:
    async def one(job: str, number: int) -> None:
        await jobs[job].defer_async(number=number)

    async def many(job: str, count: int) -> None:
        await jobs[job].batch_defer_async(*({"number": 1} for _ in range(count)))

    async with app.open_async():
        yield one, many


if __name__ == "__main__":
    common.main(lambda: asyncio.run(install()), lambda job: asyncio.run(work(job)), client)
