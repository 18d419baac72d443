from __future__ import annotations

import logging
import os
import sys
from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import connections

from django_pgjobs import jobs, reload, supervisor
from django_pgjobs.conf import DEFAULT_THREADS, config, default_processes
from django_pgjobs.endpoint import Unavailable
from django_pgjobs.executor import flush_streams
from django_pgjobs.exposition import require_client
from django_pgjobs.management.arguments import (
    address,
    at_least,
    duration,
    file_path,
    local_address,
    queue_name,
    size,
    some_time,
)

PARENT = os.getppid()  # early, since it may end while we start


class Command(BaseCommand):
    help = "Run jobs from the queue until told to stop (SIGTERM or SIGINT; twice to stop at once)."

    def add_arguments(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--queue", action="append", type=queue_name, metavar="NAME", dest="queues",
            help="Serve this queue only. Repeat it for several; those listed first go first.")  # fmt: skip
        add("--processes", type=at_least(1), default=default_processes(), metavar="N",
            help="Executor processes, beside a warm spare (here by default: %(default)s).")  # fmt: skip
        add("--threads", type=at_least(1), default=DEFAULT_THREADS, metavar="T",
            help="Jobs that one process runs at once (default: %(default)s).")  # fmt: skip
        add("--async-slots", type=at_least(1), default=20, metavar="A",
            help="Async jobs that one process runs at once (default: %(default)s).")  # fmt: skip
        add("--poll-interval", type=some_time, metavar="SECONDS",
            help="How often to look for jobs without a notification (default: POLL_INTERVAL).")  # fmt: skip
        add("--grace", type=duration, default=timedelta(seconds=25), metavar="SECONDS",
            help="How long running jobs may go on after a signal to stop (default: 25).")  # fmt: skip
        add("--max-jobs-per-executor", type=at_least(1), metavar="N",
            help="Replace an executor process after this many jobs.")  # fmt: skip
        add("--max-memory-per-executor", type=size, metavar="SIZE",
            help="Replace an executor process that has grown larger than this (500M, 2G).")  # fmt: skip
        add("--health-file", type=file_path, metavar="PATH",
            help="Keep a file by which checkjobs tells that this worker is alive.")  # fmt: skip
        add("--health-port", type=address, metavar="[HOST:]PORT",
            help="Answer GET /livez and /readyz here.")  # fmt: skip
        add("--metrics-port", type=local_address, metavar="[HOST:]PORT",
            help="Answer GET /metrics here, for Prometheus; for this machine only, unless HOST says"
            " otherwise.")  # fmt: skip
        add("--stop-with-parent", action="store_true",
            help="Stop as if signalled when the process that started this one ends.")  # fmt: skip
        add(
            "--drain",
            action="store_true",
            help="Run what is due, then exit. Retries that wait for their turn stay.",
        )
        add("--inline", action="store_true",
            help="Run jobs in threads of this process, for debuggers.")  # fmt: skip
        add("--reload", action="store_true",
            help="Start again whenever the project's code changes. For development.")  # fmt: skip
        add("--no-maintenance", action="store_false", dest="maintenance",
            help="Neither sweep nor prune here, nor carry out schedules; run sweepjobs and prunejobs by"
            " cron.")  # fmt: skip

    def handle(self, **options: Any) -> None:
        if options["reload"]:
            sys.exit(reload.run_again_on_changes(PARENT if options["stop_with_parent"] else None))
        log_to_stderr(options["verbosity"])
        settings = config()
        queues = options["queues"]
        inline = options["inline"]
        host = supervisor.Options(
            queues=None if queues is None else list(dict.fromkeys(queues)),
            processes=1 if inline else options["processes"],
            threads=options["threads"],
            async_slots=options["async_slots"] if jobs.any_async() else 0,
            poll_interval=(options["poll_interval"] or settings.POLL_INTERVAL).total_seconds(),
            grace=options["grace"].total_seconds(),
            max_jobs_per_executor=options["max_jobs_per_executor"],
            max_memory_per_executor=options["max_memory_per_executor"],
            parent=PARENT if options["stop_with_parent"] else None,
            health_file=options["health_file"],
            health_address=options["health_port"],
            metrics_address=options["metrics_port"],
            drain=options["drain"],
            inline=inline,
            maintenance=options["maintenance"],
        )
        if options["metrics_port"] is not None:
            try:
                require_client()
            except ImproperlyConfigured as error:
                raise CommandError(str(error)) from error
        wrapper = connections[settings.DATABASE]
        if wrapper.vendor != "postgresql":
            raise CommandError(
                f"PGJOBS['DATABASE'] is {settings.DATABASE!r}, which is {wrapper.vendor}; the queue needs"
                " PostgreSQL."
            )
        logging.getLogger("django_pgjobs").info(describe(host))
        try:
            status = supervisor.start(host)
        except Unavailable as error:
            raise CommandError(str(error)) from error
        flush_streams()
        logging.shutdown()
        os._exit(status)  # nothing that job code or a hanging database holds may keep the process alive


def describe(host: supervisor.Options) -> str:
    """What this host serves, on what database, and with how many connections."""
    settings = config()
    database = connections[settings.DATABASE].settings_dict
    where = f"{database['HOST'] or database.get('OPTIONS', {}).get('host') or 'local'}/{database['NAME']}"
    queues = "all queues" if host.queues is None else "queues " + ", ".join(host.queues)
    each = host.threads + host.async_slots
    return (
        f"runjobs {os.getpid()}: serving {queues} of database {settings.DATABASE!r} ({where}) with"
        f" {host.processes} processes of {host.threads} threads and {host.async_slots} async slots; at most"
        f" {host.processes * each + 2} connections, and {each} more for each executor that is being replaced."
        " Send TERM to this process to stop it."
    )


def log_to_stderr(verbosity: int) -> None:
    """Show the package's log, unless the project has decided where it goes."""
    logger = logging.getLogger("django_pgjobs")
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG))
