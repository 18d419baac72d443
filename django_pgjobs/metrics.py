"""What Prometheus is told of the queue as a whole: `view`, to be put into a project's urls.

The figures are those of the overview, from the same statements: what they cost does not grow with the table.
What each worker counts is told by itself, with `runjobs --metrics-port`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta

from django.contrib.auth.decorators import login_not_required
from django.db import Error, transaction
from django.http import HttpRequest, HttpResponse
from django.utils.crypto import constant_time_compare
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from . import doctor, store
from .conf import config
from .doctor import Facts, Finding
from .exposition import MOST_QUEUES, OTHER, Family, counter, exposition, gauge, require_client
from .store import QueueStats

logger = logging.getLogger(__name__)

PATIENCE = timedelta(seconds=5)  # for each of the statements
PERMISSION = "django_pgjobs.view_backgroundjob"
COUNTED = "Counted to 10,000 or a little more."


@login_not_required  # in the sense of LoginRequiredMiddleware: Prometheus has a token
@transaction.non_atomic_requests  # so that the patience of a statement can be set
@never_cache
@require_safe
def view(request: HttpRequest) -> HttpResponse:
    """The figures, for whoever has the token or may view jobs.

    Raises ImproperlyConfigured where prometheus_client is not installed.
    """
    if not _may_see(request):
        told = f"Send the token of PGJOBS['METRICS_TOKEN'], or log in with the permission {PERMISSION}.\n"
        return HttpResponse(
            told, status=401, content_type="text/plain", headers={"WWW-Authenticate": "Bearer"}
        )
    require_client()
    alias = config().DATABASE
    try:
        with store.looking(alias, PATIENCE):
            facts, findings = doctor.glance(alias)
            enqueued = None if facts is None else store.enqueued(alias)
    except Error as error:
        logger.warning("Metrics could not be read from the database: %s", str(error).strip())
        return HttpResponse("The site's log has the reason.\n", status=503, content_type="text/plain")
    text, content_type = exposition(families(facts, findings, enqueued), request.headers.get("Accept", ""))
    return HttpResponse(text, content_type=content_type)


def _may_see(request: HttpRequest) -> bool:
    token = config().METRICS_TOKEN
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if token is not None and scheme.lower() == "bearer" and constant_time_compare(given.strip(), token):
        return True
    user = getattr(request, "user", None)
    return user is not None and user.has_perm(PERMISSION)


def families(facts: Facts | None, findings: Iterable[Finding], enqueued: int | None) -> Iterator[Family]:
    """The figures by the facts, if there are any, and what is wrong by them."""
    if enqueued is not None:
        yield counter(
            "pgjobs_enqueued_total",
            "Ids that were drawn for new jobs, those of transactions that were rolled back included.",
            enqueued,
        )
    if facts is not None:
        yield from _of_queues(facts)
        yield from _of_workers(facts)
        yield gauge("pgjobs_unswept", "Jobs of dead workers that nobody has swept. " + COUNTED, facts.unswept)
        yield gauge("pgjobs_late_schedules", "Schedules whose tick is late.", len(facts.late_schedules))
        limits = (facts.connections.server, facts.connections.role, facts.connections.database)
        yield gauge(
            "pgjobs_database_connections",
            "Open connections to the server, of anyone.",
            facts.connections.open,
        )
        yield gauge(
            "pgjobs_database_connections_limit",
            "Connections that the server, the role or the database allows.",
            min(limit for limit in limits if limit is not None),
        )
    yield Family(
        "pgjobs_findings",
        "gauge",
        "What is wrong, as jobsdoctor and the overview say it.",
        ("finding", "severity"),
        Counter((finding.name, finding.severity.name.lower()) for finding in findings),
    )


def _of_queues(facts: Facts) -> Iterator[Family]:
    def family(
        name: str,
        help: str,
        figure: Callable[[QueueStats], float],
        together: Callable[[Iterable[float]], float] = sum,
    ) -> Family:
        samples: dict[tuple[str, ...], float] = {
            (queue.queue_name,): figure(queue) for queue in facts.queues[:MOST_QUEUES]
        }
        if others := facts.queues[MOST_QUEUES:]:
            samples[(OTHER,)] = together(map(figure, others))
        return Family(f"pgjobs_queue_{name}", "gauge", help, ("queue",), samples)

    yield family(
        "queued", "Jobs that wait, those that are due later included. " + COUNTED, lambda queue: queue.queued
    )
    yield family("due", "Jobs that are due and wait for a worker. " + COUNTED, lambda queue: queue.due)
    yield family(
        "oldest_due_age_seconds",
        "For how long the oldest due job has been due; zero where none is.",
        lambda queue: queue.oldest_due_age or 0.0,
        max,
    )
    yield family("processing", "Jobs that are held by workers. " + COUNTED, lambda queue: queue.processing)
    yield family("dead_letters", "Jobs that wait for a person. " + COUNTED, lambda queue: queue.failed)
    yield family("paused", "Whether workers claim nothing from it.", lambda queue: queue.paused)
    yield family(
        "workers",
        "Live workers that claim from it.",
        lambda queue: len(facts.serving(queue.queue_name)),
        max,
    )


def _of_workers(facts: Facts) -> Iterator[Family]:
    states = Counter(worker.state if worker.is_alive else "silent" for worker in facts.workers)
    yield Family(
        "pgjobs_workers",
        "gauge",
        "Workers by what they said last; silent where that was longer ago than their lease.",
        ("state",),
        {(state,): states[state] for state in ("running", "stopping", "silent")},
    )
    yield gauge(
        "pgjobs_workers_slots", "Jobs that live workers may run.", sum(one.slots for one in facts.alive)
    )
    yield gauge(
        "pgjobs_workers_jobs", "Jobs that live workers hold.", sum(one.running for one in facts.alive)
    )
