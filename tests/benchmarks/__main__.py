"""How fast a queue of no-op jobs is drained, beside the same statements without a worker around them."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

# Where no server is given: one of our own that keeps its promises about the disk.
if "DATABASE_URL" not in os.environ:
    from example_project import embedded_postgres

    os.environ["DATABASE_URL"] = embedded_postgres.start("benchmarks", durable=True).url("postgres")
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.benchmarks.settings"

import django

django.setup()

from django.core.management import call_command  # noqa: E402 - only after the setup
from django.db import connection  # noqa: E402

from tests.benchmarks import jobs  # noqa: E402

CLAIM = """
WITH due AS MATERIALIZED (
    SELECT id
      FROM background_jobs
     WHERE status = 'queued'
       AND queue_name = 'default'
       AND priority = 0
       AND run_at <= statement_timestamp()
     ORDER BY run_at, id
     LIMIT %s
       FOR UPDATE SKIP LOCKED
)
UPDATE background_jobs AS job
   SET status = 'processing',
       locked_at = statement_timestamp(),
       attempts = job.attempts + 1
  FROM due
 WHERE job.id = due.id
RETURNING job.id, job.job_name, job.payload
"""
COMPLETE = "UPDATE background_jobs SET status = 'completed', updated_at = now() WHERE id = ANY (%s)"


def bare(batch: int) -> float:
    """Seconds that claiming and completing every job takes with two statements for each batch."""
    began = time.perf_counter()
    with connection.cursor() as cursor:
        while True:
            cursor.execute(CLAIM, [batch])
            ids = [row[0] for row in cursor.fetchall()]
            if not ids:
                return time.perf_counter() - began
            cursor.execute(COMPLETE, [ids])


def ours(options: list[str]) -> float:
    """Seconds from the first claim to the last completion of a worker that drains the queue."""
    worker = [sys.executable, "-m", "django", "runjobs", "--drain", "--verbosity", "0", *options]
    subprocess.run(worker, check=True, env=os.environ)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXTRACT(EPOCH FROM max(updated_at) - min(started_at))::float8, count(*),"
            "       count(*) FILTER (WHERE status = 'completed' AND attempts = 1) FROM background_jobs"
        )
        seconds, total, completed = cursor.fetchone()
    assert completed == total, f"{total - completed} of {total} jobs did not complete at the first attempt"
    return float(seconds)


def fill(job: Any, count: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE background_jobs")
    job.enqueue_many(((number,), {}) for number in range(count))
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE background_jobs")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--jobs", type=int, default=20_000, help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=3, help="medians of this many; default: %(default)s")
    parser.add_argument("--batches", type=int, nargs="+", default=[100, 500, 1000])
    parser.add_argument("--processes", default="2")
    parser.add_argument("--threads", default="4")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    call_command("migrate", verbosity=0)

    options = ["--processes", arguments.processes, "--threads", arguments.threads]
    scenarios = {f"bare, batches of {batch}": (jobs.nothing, bare, batch) for batch in arguments.batches}
    scenarios |= {
        "ours, sync": (jobs.nothing, ours, options),
        "ours, async": (jobs.nothing_async, ours, options),
    }
    rates: dict[str, list[float]] = {name: [] for name in scenarios}
    for _ in range(arguments.runs):  # interleaved, so that a busy minute hits all of them
        for name, (job, measure, how) in scenarios.items():
            fill(job, arguments.jobs)
            rates[name].append(arguments.jobs / measure(how))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    floor = max(rate for name, rate in medians.items() if name.startswith("bare"))
    if arguments.json:
        sys.stdout.write(json.dumps({"rates": rates, "medians": medians, "floor": floor}) + "\n")
        return
    for name, rate in medians.items():
        spread = f"{min(rates[name]):,.0f} to {max(rates[name]):,.0f}"
        sys.stdout.write(f"{name:24} {rate:8,.0f} jobs/s ({spread}), {rate / floor:.2f} of the floor\n")


if __name__ == "__main__":
    main()
