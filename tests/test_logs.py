"""Which job a line of the log is about."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from asgiref.sync import sync_to_async

from django_pgjobs import job
from django_pgjobs.logs import JobFilter
from django_pgjobs.store import Claim
from django_pgjobs.testing import drain

logger = logging.getLogger("tests.logs")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What is logged, through a handler that has the filter."""
    job_filter = JobFilter()
    caplog.handler.addFilter(job_filter)
    caplog.set_level(logging.INFO)
    yield caplog
    caplog.handler.removeFilter(job_filter)


def told(record: logging.LogRecord) -> tuple[object, ...]:
    return record.job_id, record.job_name, record.job_queue, record.job_attempt  # type: ignore[attr-defined]


@job(name="logs.plain", queue="mail", max_attempts=2, backoff=0)
def plain() -> None:
    deeper()
    raise ValueError("as ever")


@job(name="logs.async", queue="mail")
async def asynchronous() -> None:
    deeper()
    await sync_to_async(deeper)()


def deeper() -> None:
    logger.info("at work")


@pytest.mark.django_db
def test_each_line_in_a_job_has_what_tells_it_from_others(log: pytest.LogCaptureFixture) -> None:
    first, second = plain.enqueue(), asynchronous.enqueue()
    logger.info("enqueued")
    drain()
    logger.info("drained")

    outside = (None, None, None, None)
    assert [told(record) for record in log.records] == [
        outside,
        (first.pk, "logs.plain", "mail", 1),
        (second.pk, "logs.async", "mail", 1),
        (second.pk, "logs.async", "mail", 1),
        (first.pk, "logs.plain", "mail", 2),
        outside,
    ]


@pytest.mark.parametrize("arguments", [[], [1], [{"a": 1}]], ids=["none", "one", "a mapping"])
def test_a_line_that_is_about_no_job_says_so(log: pytest.LogCaptureFixture, arguments: list[object]) -> None:
    logger.info("%s" if arguments else "%", *arguments)
    assert [told(record) for record in log.records] == [(None, None, None, None)]


def test_a_line_about_a_job_has_the_fields_of_that_job(log: pytest.LogCaptureFixture) -> None:
    logger.info("%s lost: %s", Claim(17, None, 2, 3, "shop.jobs.add", "mail", "{}"), "queued again")
    assert [told(record) for record in log.records] == [(17, "shop.jobs.add", "mail", 2)]
    assert log.records[0].getMessage() == "job=17 name=shop.jobs.add queue=mail attempt=2 lost: queued again"
