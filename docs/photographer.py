"""Takes the pictures of the admin that are in the documentation. Run by ./docs/screenshots.

A shop at night: a partner's server does not answer webhooks, and somebody has paused the imports. Nothing of
it runs. The rows are put there, on a Postgres of the script's own, so that the pictures show the same each
time, but for what time it is.
"""

from __future__ import annotations

import os
import random
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
ADMIN = "/admin/django_pgjobs/"
WIDE, NARROW = {"width": 1180, "height": 860}, {"width": 390, "height": 844}
MARGIN = 20  # pixels below what there is on a page
BOTTOM = "Math.ceil(document.querySelector('#content-main').getBoundingClientRect().bottom)"
COLOURS = 256  # of a picture, so that it is small

if TYPE_CHECKING:
    from django_pgjobs.models import BackgroundWorker


class Shot(NamedTuple):
    """A picture: of what page, with what done to it first."""

    name: str
    path: str
    scheme: str = "light"
    viewport: dict[str, int] = WIDE
    fill: dict[str, str] = {}
    press: str = ""
    whole: bool = False  # not only what is seen without scrolling


# ── The shop ──────────────────────────────────────────────────────────────────────────────────────────────

TIMEOUT = "ConnectTimeout: parcels.example did not answer within 10 s (shipment {})"
REFUSED = "HTTPStatusError: 422 Unprocessable Entity from crm.example: no contact {}"
BROKEN = "KeyError: 'ean'"
TRACEBACK = """Traceback (most recent call last):
  File "/srv/shop/shop/jobs.py", line {line}, in {function}
    {code}
  File "/srv/shop/shop/partners.py", line 31, in send
    response = client.post(url, json=body, timeout=10)
{error}"""


def declare_jobs() -> None:
    """What the shop's code would have, so that arguments can be checked."""
    from django_pgjobs import job

    @job(name="shop.jobs.notify_partner", queue="webhooks")
    def notify_partner(url: str, shipment: int, *, api_key: str, retries: int = 3) -> None: ...

    @job(name="shop.jobs.update_contact", queue="webhooks")
    def update_contact(customer: int) -> None: ...

    @job(name="shop.jobs.import_prices", queue="imports")
    def import_prices(supplier: str, file: str) -> None: ...

    @job(name="shop.jobs.monthly_report", queue="reports")
    def monthly_report(month: str) -> None: ...


class Shop:
    """Puts the rows there."""

    def __init__(self) -> None:
        from django.utils import timezone

        self.now: datetime = timezone.now()
        self.random = random.Random(3)
        self.jobs: list[Any] = []
        self.workers = [self._worker(f"shop-worker-{n}", 4100 + n) for n in (1, 2)]

    def _worker(self, hostname: str, pid: int) -> BackgroundWorker:
        from django_pgjobs.models import BackgroundWorker

        executors = [
            {"pid": pid + place, "state": "running", "jobs": place % 2, "memory": (81 + 7 * place) * 2**20}
            for place in range(1, 3)
        ]
        return BackgroundWorker.objects.create(
            id=uuid.UUID(int=pid), hostname=hostname, pid=pid, processes=2, threads=4, async_slots=0,
            version="0.1.0", lease=timedelta(seconds=60), running=2, executors=executors,
            started_at=self.ago(hours=31, minutes=pid % 7),
        )  # fmt: skip

    def ago(self, **lapse: float) -> datetime:
        return self.now - timedelta(**lapse)

    def add(self, job_name: str, queue: str, status: str, at: datetime, **columns: Any) -> None:
        from django_pgjobs.models import BackgroundJob

        worker = self.random.choice(self.workers)
        values: dict[str, Any] = {
            "job_name": f"shop.jobs.{job_name}", "queue_name": queue, "status": status, "run_at": at,
            "created_at": at, "updated_at": at, "payload": {"args": []},
        }  # fmt: skip
        if status != "queued":
            values |= {
                "attempts": 1,
                "started_at": at,
                "attempted_at": at,
                "locked_at": at,
                "worker_id": worker.pk,
            }
        self.jobs.append(BackgroundJob(**(values | columns)))

    def completed(self, job_name: str, queue: str, count: int, took: float) -> None:
        """Jobs that completed over the last day, more of them in the evening than at night."""
        for _ in range(count):
            at = self.ago(hours=24 * self.random.betavariate(1.2, 1.6))
            pickup = timedelta(seconds=self.random.expovariate(1 / 0.02))
            end = at + pickup + timedelta(seconds=self.random.expovariate(1 / took))
            self.add(
                job_name, queue, "completed", at, attempted_at=at + pickup, updated_at=min(end, self.now)
            )

    def failed(
        self, job_name: str, queue: str, at: datetime, error: str, fingerprint: str, **columns: Any
    ) -> None:
        """A dead letter of three attempts."""
        exception, _, message = error.partition(": ")
        traceback = TRACEBACK.format(
            line=88, function=job_name, code="partners.send(url, body, api_key=api_key)", error=error
        )
        errors = [
            {
                "at": (at - timedelta(seconds=each)).isoformat(), "attempt": attempt,
                "began": (at - timedelta(seconds=each + 10.2)).isoformat(), "exception": exception,
                "message": message, "traceback": traceback, "worker": str(self.workers[attempt % 2].pk),
            }
            for attempt, each in ((1, 110), (2, 70), (3, 0))
        ]  # fmt: skip
        begin = at - timedelta(seconds=120)
        columns = {
            "attempts": 3, "created_at": begin, "run_at": begin, "started_at": begin,
            "attempted_at": at - timedelta(seconds=10), "last_error": error, "errors": errors,
            "error_fingerprint": fingerprint,
            "metadata": {"enqueued_by": "POST /orders/", "context": {"request_id": "f3b1c9"}},
        } | columns  # fmt: skip
        self.add(job_name, queue, "failed", at, **columns)

    def furnish(self) -> None:
        from django_pgjobs.models import BackgroundJob, BackgroundQueue

        self.completed("send_receipt", "emails", 5200, 0.3)
        self.completed("notify_partner", "webhooks", 1900, 0.2)
        self.completed("import_prices", "imports", 260, 4)
        for number in range(1284):
            at = self.ago(minutes=38 * self.random.random())
            shipment = 70_000 + number
            call = {
                "args": ["https://parcels.example/hooks/shop", shipment],
                "kwargs": {"api_key": "k-4711", "retries": 3},
            }
            self.failed(
                "notify_partner", "webhooks", at, TIMEOUT.format(shipment), "7b445d4d2ef2ca02", payload=call,
            )  # fmt: skip
        for number in range(17):
            at = self.ago(hours=1 + 20 * self.random.random())
            self.failed(
                "update_contact",
                "webhooks",
                at,
                REFUSED.format(2200 + number),
                "refused",
                payload={"args": [2200 + number]},
            )
        for number in range(3):
            at = self.ago(hours=2, minutes=5 + number)
            call = {"args": ["nordwind", f"prices-{number}.csv"]}
            self.failed("import_prices", "imports", at, BROKEN, "ean", payload=call)
        for number in range(214):
            at = self.ago(minutes=118 * self.random.random())
            self.add(
                "import_prices",
                "imports",
                "queued",
                at,
                payload={"args": ["nordwind", f"prices-{number}.csv"]},
            )
        for _ in range(31):
            self.add(
                "send_receipt", "emails", "queued", self.now + timedelta(minutes=60 * self.random.random())
            )
        running = [
            ("send_receipt", "emails", 1), ("monthly_report", "reports", 512),
            ("notify_partner", "webhooks", 8), ("notify_partner", "webhooks", 4),
        ]  # fmt: skip
        for place, (name, queue, seconds) in enumerate(running):
            at = self.ago(seconds=seconds)
            self.add(name, queue, "processing", at, locked_at=self.now, worker_id=self.workers[place % 2].pk)
        self.jobs.sort(key=lambda job: job.created_at)
        BackgroundJob.objects.bulk_create(self.jobs, batch_size=2000)
        BackgroundQueue.objects.create(
            name="imports",
            paused_at=self.ago(hours=2),
            paused_by="grace",
            reason="The supplier sends broken files, ticket 512.",
        )

    def stay_alive(self) -> None:
        """The workers have been heard of just now, and what is done in the background goes on."""
        from django.utils import timezone

        from django_pgjobs.models import BackgroundOperation, BackgroundWorker

        just_now = timezone.now() - timedelta(seconds=4)
        BackgroundWorker.objects.update(last_seen_at=just_now)
        BackgroundOperation.objects.update(updated_at=just_now)


# ── The pictures ──────────────────────────────────────────────────────────────────────────────────────────


def shots() -> list[Shot]:
    from django_pgjobs import operations
    from django_pgjobs.models import BackgroundOperation, DeadLetter

    letter = DeadLetter.objects.filter(error_fingerprint="7b445d4d2ef2ca02").latest("updated_at").pk
    broken = DeadLetter.objects.filter(error_fingerprint="ean").latest("updated_at").pk
    filter = operations.Filter(job="shop.jobs.notify_partner", fingerprint="7b445d4d2ef2ca02")
    operation = operations.begin(
        operations.RETRY, filter, operations.Person("ada"), reason="parcels.example is back.",
        manner=operations.Manner(per_minute=600),
    )  # fmt: skip
    BackgroundOperation.objects.filter(pk=operation.pk).update(changed=410)
    group = "?job=shop.jobs.notify_partner&fingerprint=7b445d4d2ef2ca02"
    edited = '[\n  "nordwind",\n  "prices-2-fixed.csv"\n]'
    return [
        Shot("overview-light", "overview/", whole=True),
        Shot("overview-dark", "overview/", "dark", whole=True),
        Shot("overview-phone", "overview/", viewport=NARROW),
        Shot("by-error", "deadletter/groups/"),
        Shot("alike", f"deadletter/{group}"),
        Shot(
            "preview", f"deadletter/act/retry/{group}",
            fill={"At most so many a minute": "600", "Reason": "parcels.example is back."},
        ),
        Shot("operation", f"backgroundoperation/{operation.pk}/change/"),
        Shot("dead-letter-light", f"deadletter/{letter}/change/"),
        Shot("dead-letter-dark", f"deadletter/{letter}/change/", "dark"),
        Shot(
            "difference", f"deadletter/{broken}/edit/",
            fill={"Arguments:": edited, "Reason": "The supplier has sent another file."},
            press="Show what changes",
        ),
        Shot("worker", "backgroundworker/00000000-0000-0000-0000-000000001005/change/"),
        Shot("pause", "backgroundqueue/pause/?queue=webhooks", fill={"Reason": "parcels.example is down."}),
    ]  # fmt: skip


def take(wanted: list[str]) -> None:
    from django.conf import settings
    from django.contrib.auth import get_user_model
    from django.test import Client
    from playwright.sync_api import sync_playwright

    from tests.browser.visitors import open_browser

    shop = Shop()
    shop.furnish()
    client = Client()
    client.force_login(
        get_user_model().objects.create(username="ada", first_name="Ada", is_staff=True, is_superuser=True)
    )
    session = client.cookies[settings.SESSION_COOKIE_NAME].value
    pictures = [shot for shot in shots() if not wanted or shot.name in wanted]
    PICTURES.mkdir(exist_ok=True)
    with site() as address, sync_playwright() as playwright, open_browser(playwright) as browser:
        os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"  # Playwright has an event loop in this thread
        for shot in pictures:
            shop.stay_alive()
            context = browser.new_context(
                base_url=address, viewport=shot.viewport, color_scheme=shot.scheme, reduced_motion="reduce"
            )
            context.add_cookies([{"name": settings.SESSION_COOKIE_NAME, "value": session, "url": address}])
            context.add_init_script("localStorage.setItem('django.admin.navSidebarIsOpen', 'false')")
            page = context.new_page()
            page.goto(ADMIN + shot.path)
            for label, text in shot.fill.items():
                page.get_by_label(label, exact=label.endswith(":")).fill(text)
            if shot.press:
                page.get_by_role("button", name=shot.press).click()
                page.wait_for_load_state()
            page.evaluate("document.activeElement.blur()")
            bottom = page.evaluate(BOTTOM) + MARGIN
            height = bottom if shot.whole else min(bottom, shot.viewport["height"])
            clip = {"x": 0, "y": 0, "width": shot.viewport["width"], "height": height}
            target = PICTURES / f"{shot.name}.png"
            target.write_bytes(small(page.screenshot(full_page=True, clip=clip)))
            print(f"{target.relative_to(ROOT)}: {target.stat().st_size:,} bytes")
            context.close()


def small(png: bytes) -> bytes:
    """A picture in few colours."""
    from PIL import Image

    out = BytesIO()
    Image.open(BytesIO(png)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
        out, "PNG", optimize=True
    )
    return out.getvalue()


@contextmanager
def site() -> Iterator[str]:
    """The address of a site that runs in this process."""
    from django.contrib.staticfiles.handlers import StaticFilesHandler
    from django.test.testcases import LiveServerThread

    thread = LiveServerThread("127.0.0.1", StaticFilesHandler)
    thread.daemon = True
    thread.start()
    thread.is_ready.wait()
    if thread.error:
        raise thread.error
    yield f"http://127.0.0.1:{thread.port}"
    thread.terminate()


def main() -> None:
    sys.path.insert(0, str(ROOT / "example_project"))
    os.environ.pop("DATABASE_URL", None)  # these rows are for nobody else
    from demo import our_database

    with our_database():
        from django.core.management import call_command
        from django.db import connection

        call_command("migrate", verbosity=0)
        with connection.cursor() as cursor:
            cursor.execute(
                "ALTER SYSTEM SET autovacuum = on"
            )  # as on any server but those of tests and demos
            cursor.execute("SELECT pg_reload_conf()")
        declare_jobs()
        take(sys.argv[1:])


if __name__ == "__main__":
    main()
