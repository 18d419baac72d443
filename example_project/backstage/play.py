"""What happens in the demo, in three acts, and what must be true afterwards."""

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from django.db.models import QuerySet
from django.urls import reverse
from shop import jobs, timezones
from shop.models import Order, Place, Product

from django_pgjobs.models import BackgroundJob

from .customer import Customer
from .scoreboard import Scoreboard
from .stage import Stage

PATIENCE = 120  # seconds that an act may take; each normally takes less than ten


class Play:
    def __init__(self, stage: Stage, orders: int, admin_password: str) -> None:
        self.stage = stage
        self.order_count = orders
        self.admin_password = admin_password
        self.board = Scoreboard()
        self.key = secrets.token_hex(4)
        last = Order.objects.first()
        self.orders = Order.objects.filter(pk__gt=last.pk if last else 0)
        self.refusals = 0

    def run(self) -> None:
        self.board.say(f"1. {self.order_count} orders, and two for more clocks than the shop has")
        self.place_orders()
        self.finish()

        self.board.say("2. Jobs that fail: twice, for ever, and by killing the process that runs them")
        jobs.flaky.enqueue(self.key)
        jobs.always_fails.enqueue()
        jobs.sales_summary.enqueue()
        self.finish()
        jobs.kill_itself.enqueue(self.key)
        self.finish()

        self.board.say("3. An import, with a job for each place; on the way, the executors are killed")
        jobs.import_places.enqueue()
        self.kill_executors()
        self.finish()

    def finish(self) -> None:
        self.board.watch(lambda: self.board.settled() or self.stage.broken(), PATIENCE)

    def place_orders(self) -> None:
        """Four customers order at the same time, then somebody who wants too much."""
        *products, clock = Product.objects.order_by("pk")
        numbers = iter(range(self.order_count))

        def go_shopping() -> None:
            customer = Customer(self.stage.address)
            for number in numbers:
                product = products[number % len(products)]
                customer.order(product.pk, 1 + number % 3, f"customer{number}@shop.example")

        with ThreadPoolExecutor(4) as pool:
            shoppers = [pool.submit(go_shopping) for _ in range(4)]
            self.board.watch(lambda: all(shopper.done() for shopper in shoppers), PATIENCE)
        for shopper in shoppers:
            shopper.result()

        collector = Customer(self.stage.address)
        for _ in range(2):
            self.refusals += not collector.order(clock.pk, clock.stock + 1, "collector@shop.example")

    def kill_executors(self) -> None:
        """Kill the executors, as soon as the import is on its way, until one was in the middle of a job."""
        places = self.jobs("import_place")

        def is_over() -> bool:
            return places.filter(crashes__gt=0).exists() or self.board.settled()

        give_up_at = time.monotonic() + PATIENCE
        while not (places.filter(status="completed").exists() or self.stage.broken()):
            if time.monotonic() > give_up_at:
                return  # the checks will say what is missing
            time.sleep(0.01)
        while not is_over() and not self.stage.broken():
            for pid in self.stage.executor_pids():  # the one that only stands ready as well
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.board.say(f"   Killed executor {pid} with SIGKILL.")
            self.board.watch(is_over, 1)

    def jobs(self, function: str) -> QuerySet[BackgroundJob]:
        return self.board.jobs.filter(job_name=f"shop.jobs.{function}")

    def dead_letters(self) -> str:
        """Log in to the admin, and return its page of dead letters."""
        page = reverse("admin:django_pgjobs_deadletter_changelist")
        login = {"username": "admin", "password": self.admin_password, "next": page}
        return Customer(self.stage.address).post(reverse("admin:login"), **login)[1]

    def checks(self) -> Iterator[tuple[bool, str]]:
        """Yield what must hold, and whether it does."""
        receipts = self.jobs("send_receipt")
        orders, mails = self.orders.count(), len(self.stage.received())
        yield orders == self.order_count, f"{orders} of {self.order_count} orders are stored"
        yield mails == orders, f"{mails} mails for {orders} orders were received"
        yield (
            self.refusals == 2 and receipts.count() == orders,
            f"{self.refusals} orders were refused by the database, and left no job behind",
        )

        flaky = self.jobs("flaky").get()
        yield (
            (flaky.status, flaky.attempts, len(flaky.errors)) == ("completed", 3, 2),
            f"flaky is {flaky.status} after {flaky.attempts} attempts, {len(flaky.errors)} of them in vain",
        )
        dead = self.jobs("always_fails").get()
        yield (
            (dead.status, dead.attempts) == ("failed", dead.max_attempts),
            f"always_fails is {dead.status} after {dead.attempts} attempts: a dead letter",
        )
        yield f"/deadletter/{dead.pk}/" in self.dead_letters(), "the admin lists it among the dead letters"
        revived = self.jobs("kill_itself").get()
        yield (
            (revived.status, revived.crashes) == ("completed", 1),
            f"kill_itself is {revived.status}, and {revived.crashes} executor died of it",
        )
        summary = self.jobs("sales_summary").get()
        yield (
            summary.status == "completed" and summary.result["orders"] >= orders,
            f"sales_summary, a coroutine, returned {summary.result}",
        )

        rows = len(timezones.table())
        imported = self.jobs("import_place").filter(status="completed").count()
        places = Place.objects.count()
        yield (
            places == imported == rows,
            f"{imported} of the {rows} rows of the time zone table were imported, as {places} places",
        )
        hit = self.jobs("import_place").filter(crashes__gt=0)
        finished = hit.filter(status="completed").count()
        yield (
            hit.count() == finished > 0,
            f"{finished} of the {hit.count()} jobs that a killed executor was running are completed",
        )
        left = self.board.jobs.filter(status__in=("queued", "processing")).count()
        yield left == 0, f"{left} jobs are left in the queue"
