from __future__ import annotations

from django_pgjobs import job


@job
def nothing(number: int) -> None:
    pass


@job
async def nothing_async(number: int) -> None:
    pass
