"""Everything the shop does outside of a request.

A job function is a function with `@job`. Calling it runs it here and now; `.enqueue(...)` stores a row, and a
worker (`manage.py runjobs`) runs it. `django_pgjobs` finds this module by its name.

Every job may run more than once: a worker can die after the work and before it could say so. So each function
here either can be repeated without harm or notices that it has been here before.
"""

import os
import signal

from django.core.mail import EmailMessage
from django.db.models import Count, Sum
from django.db.models.functions import Now
from django.template.loader import render_to_string

from django_pgjobs import job

from . import timezones
from .models import Order, Place, Tally


@job(queue="emails", priority=10, max_attempts=5, backoff=[0.5, 1, 5, 60], give_up_on=(Order.DoesNotExist,))
def send_receipt(order_id: int) -> None:
    """Mail the receipt. When the mail server is busy or gone, the exception has it tried again."""
    order = Order.objects.select_related("product").get(pk=order_id)
    if order.receipt_sent_at:
        return
    EmailMessage(
        subject=f"Your order {order.pk}",
        body=render_to_string("shop/receipt.txt", {"order": order}),
        to=[order.email],
        # The same on every attempt, so that mail systems recognise a repeat.
        headers={"Message-ID": f"<order-{order.pk}@shop.example>"},
    ).send()
    Order.objects.filter(pk=order.pk).update(receipt_sent_at=Now())


@job
def import_places() -> int:
    """Enqueue one job for each row of the time zone table, with one INSERT, and return how many."""
    return len(import_place.enqueue_many([((), row) for row in timezones.table()]))


@job(max_attempts=5, backoff=0.5)
def import_place(zone: str, countries: str, coordinates: str, comments: str) -> None:
    Place.objects.update_or_create(
        zone=zone,
        defaults={
            "countries": countries,
            "coordinates": coordinates,
            "comments": comments,
            "next_clock_change": timezones.next_clock_change(zone),
        },
    )


@job
async def sales_summary() -> dict[str, str | int]:
    """A coroutine: runs on the worker's event loop. What it returns is kept in the job's row."""
    sales = await Order.objects.aaggregate(orders=Count("pk"), revenue=Sum("total", default=0))
    return {"orders": sales["orders"], "revenue": str(sales["revenue"])}


@job(max_attempts=3, backoff=0.3)
def flaky(key: str) -> str:
    """Fails twice, then succeeds."""
    count = Tally.bump(f"flaky {key}")
    if count < 3:
        raise ConnectionError(f"The warehouse did not answer (call {count}).")
    return f"The warehouse answered on call {count}."


@job(max_attempts=3, backoff=0.3)
def always_fails() -> None:
    """Becomes a dead letter: a person looks at it in the admin and retries or discards it."""
    raise ValueError("This order form is torn in half.")


@job(max_attempts=3, backoff=0.3)
def kill_itself(key: str) -> str:
    """Takes its own process away the first time, as running out of memory would."""
    if Tally.bump(f"kill_itself {key}") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "Back from the dead."
