"""PgQueuer with asyncpg, its fastest driver; with its own size of batches, or a larger one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import common
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries


async def install() -> None:
    connection = await asyncpg.connect(common.URL)
    await Queries(AsyncpgDriver(connection)).install()
    await connection.close()


async def work() -> None:
    queue = PgQueuer.from_asyncpg_connection(await asyncpg.connect(common.URL))

    # It has no plain functions as jobs; this is what its documentation says to do with them.
    @queue.entrypoint("nothing")
    async def nothing(job: Job) -> None:
        await asyncio.to_thread(common.nothing, int(job.payload or b""))

    @queue.entrypoint("nothing_async")
    async def nothing_async(job: Job) -> None:
        await common.nothing_async(int(job.payload or b""))

    @queue.entrypoint("moment")
    async def moment(job: Job) -> None:
        common.moment(int(job.payload or b""))

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, queue.shutdown.set)
    await (queue.run(batch_size=common.BATCH) if common.BATCH else queue.run())


@asynccontextmanager
async def client() -> AsyncIterator[tuple[common.One, common.Many]]:
    connection = await asyncpg.connect(common.URL)
    queries = Queries(AsyncpgDriver(connection))

    async def one(job: str, number: int) -> None:
        await queries.enqueue(job, str(number).encode())

    async def many(job: str, count: int) -> None:
        await queries.enqueue([job] * count, [b"1"] * count, [0] * count)

    yield one, many
    await connection.close()


if __name__ == "__main__":
    common.main(lambda: asyncio.run(install()), lambda job: asyncio.run(work()), client)
