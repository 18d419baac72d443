"""Job functions with schedules, for hosts that are killed while they take ticks."""

from __future__ import annotations

from datetime import timedelta

from django_pgjobs import Schedule, job

SECOND = timedelta(seconds=1)


@job(name="ticks.all", schedule=Schedule(SECOND, missed="all"))
def all_ticks() -> None: ...


@job(name="ticks.once", schedule=Schedule(SECOND, missed="once"))
def one_for_all() -> None: ...


@job(name="ticks.skip", schedule=Schedule(SECOND, missed="skip"))
def fresh_ticks() -> None: ...


@job(name="ticks.alone", schedule=Schedule(SECOND, missed="all", overlap=False))
def alone() -> None: ...
