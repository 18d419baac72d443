"""What people do to jobs: in batches, logged for each job, and told in whole sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from django.contrib.admin.models import CHANGE, LogEntry
from django.db import router, transaction
from django.db.models import Exists, OuterRef

from .. import store
from ..conf import config
from ..lifecycle import FINISHED, Status
from ..models import BackgroundJob

BATCH = 1_000  # jobs that are changed in one transaction


class Step(NamedTuple):
    """A statement of an act, and what is said of the jobs that it has changed."""

    change: Callable[[Iterable[int], str], set[int]]
    done: str
    log: str


class Act(NamedTuple):
    """Something that people may do to jobs. Permission and URL go by its name."""

    name: str
    statuses: frozenset[Status]  # in which a job can be changed so
    steps: tuple[Step, ...]  # each for what the ones before it have left
    refused: str


RETRY = Act(
    "retry",
    frozenset({Status.FAILED, Status.CANCELLED}),
    (Step(store.retry, "queued again", "Queued again."),),
    refused="neither failed nor cancelled",
)
DISCARD = Act(
    "discard",
    frozenset({Status.FAILED}),
    (Step(store.discard, "discarded", "Discarded."),),
    refused="not failed",
)
CANCEL = Act(
    "cancel",
    frozenset({Status.QUEUED, Status.PROCESSING}),
    (
        Step(store.cancel, "cancelled", "Cancelled."),
        Step(store.request_stop, "asked to stop", "Asked to stop."),
    ),
    refused="neither queued nor processing",
)


def perform(act: Act, ids: Sequence[int], user: Any) -> dict[str, set[int]]:
    """Change jobs, in batches, and log each that changed by the user's name.

    Returns the ids that changed, by what was done to them. The log may live in another database. There it is
    committed first: what cannot be logged does not happen.
    """
    alias = config().DATABASE
    done: dict[str, set[int]] = {step.done: set() for step in act.steps}
    for start in range(0, len(ids), BATCH):
        left = set(ids[start : start + BATCH])
        with store.own_transaction(alias):
            for step in act.steps:
                changed = step.change(left, alias)
                if changed:
                    touched = BackgroundJob.objects.using(alias).only("job_name").filter(pk__in=changed)
                    with transaction.atomic(using=router.db_for_write(LogEntry)):
                        LogEntry.objects.log_actions(user.pk, touched.order_by("id"), CHANGE, step.log)
                done[step.done] |= changed
                left -= changed
    return done


def outcome(act: Act, done: Mapping[str, set[int]], skipped: Sequence[int], gone: str = "") -> str:
    """What became of the jobs, as a sentence."""
    changed: list[str] = []
    for what, ids in done.items():
        noun = "" if changed else " job" if len(ids) == 1 else " jobs"
        changed += [f"{len(ids):,}{noun} {what}"] if ids else []
    parts = [", ".join(changed) or f"No job was {' or '.join(done)}"]
    refused = gone or act.refused
    reasons = _reasons(act, skipped)
    for reason, one, several in (
        ("refused", f"it is {refused}", f"they are {refused}"),
        ("missing", "it no longer exists", "they no longer exist"),
        ("taken", "a job with its unique key waits or runs", "jobs with their unique keys wait or run"),
        ("deaf", "a client runs it that cannot be asked", "clients run them that cannot be asked"),
        ("busy", "somebody else is changing it just now", "somebody else is changing them just now"),
    ):
        if count := reasons[reason]:
            was, why = ("was", one) if count == 1 else ("were", several)
            parts.append(f"{count:,} {was} skipped because {why}")
    return "; ".join(parts) + "."


def _reasons(act: Act, skipped: Sequence[int]) -> Counter[str]:
    """How many jobs were skipped for which reason."""
    if not skipped:
        return Counter()
    jobs = BackgroundJob.objects.using(config().DATABASE)
    live = jobs.filter(job_name=OuterRef("job_name"), unique_key=OuterRef("unique_key"))
    live = live.filter(status__in=set(Status) - FINISHED)
    rows = jobs.filter(pk__in=skipped).annotate(is_taken=Exists(live))
    reasons = Counter({"missing": len(skipped)})
    for status, holder, is_taken in rows.values_list("status", "locked_by", "is_taken"):
        reasons["missing"] -= 1
        if status not in act.statuses:
            reasons["refused"] += 1
        elif status in FINISHED:
            reasons["taken" if is_taken else "busy"] += 1
        else:
            reasons["deaf" if status == Status.PROCESSING and holder is None else "busy"] += 1
    return reasons
