"""The statements of several actors in every order: each comes out as foretold, and by the rule of its story.

The rules are the promises, in a line each: they would notice if what is foretold were as wrong as what comes.
What one session does to a row that another has locked is in `test_transitions` too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import pytest

from django_pgjobs import sql, store
from django_pgjobs.lifecycle import Event, JobError, Status, Verdict
from django_pgjobs.models import BackgroundJob
from tests.factories import make_job, rows
from tests.faults import interleavings
from tests.faults.interleavings import (
    COMMIT,
    GONE,
    Actor,
    Order,
    Played,
    Row,
    Scripts,
    Stage,
    Statement,
    foretell,
    orders,
)

pytestmark = pytest.mark.django_db(transaction=True)

QUEUED = Row()
HELD = Row(Status.PROCESSING, "holder", attempts=1)
LOST = HELD._replace(is_expired=True)
DEAD = Row(Status.FAILED, "gone", attempts=3, is_old=True)


def once(statement: str) -> tuple[str, str]:
    return statement, COMMIT


@dataclass(frozen=True)
class Story:
    """Who does what to which row; and the rule that every order keeps."""

    row: Row
    scripts: Scripts
    rule: Callable[[Played], bool]
    deletes_completed: bool = False


def exactly_one(played: Played) -> bool:
    """Of all who tried, one was told to have done it."""
    return sum(played.told(actor) for actor in played.answers) == 1


def stays_completed(*actors: str) -> Callable[[Played], bool]:
    """If one of these was told that its completion is recorded, the job is completed (or deleted)."""

    def rule(played: Played) -> bool:
        done = any(played.told(actor) for actor in actors)
        return not done or played.row.status in (Status.COMPLETED, None)

    return rule


def refuses_the_stale(played: Played) -> bool:
    return not any(played.answers["stale"])


def both(*rules: Callable[[Played], bool]) -> Callable[[Played], bool]:
    return lambda played: all(rule(played) for rule in rules)


def one_owner(played: Played) -> bool:
    """Once somebody else has claimed the job, its former holder is refused."""
    return not (played.told("holder") and played.told("fresh"))


def keeps_its_claim(played: Played) -> bool:
    """Nobody else ends the claim of "fresh"."""
    return not played.answers["fresh"][0] or played.row.holder == "fresh"


STORIES = {
    "claim, claim": Story(QUEUED, {"one": once("claim"), "two": once("claim")}, exactly_one),
    "claim, claim, claim": Story(
        QUEUED, {name: once("claim") for name in ("one", "two", "three")}, exactly_one
    ),
    "claim, sweep": Story(
        LOST,
        {"fresh": once("claim"), "sweeper": once("sweep")},
        lambda played: played.told("sweeper") and keeps_its_claim(played),
    ),
    "claim, claim, sweep": Story(
        LOST,
        {"fresh": once("claim"), "other": once("claim"), "sweeper": once("sweep")},
        lambda played: played.told("sweeper") and not (played.told("fresh") and played.told("other")),
    ),
    "claim, cancel": Story(QUEUED, {"fresh": once("claim"), "person": once("cancel")}, exactly_one),
    "claim, cancel, claim": Story(
        QUEUED, {"fresh": once("claim"), "person": once("cancel"), "other": once("claim")}, exactly_one
    ),
    "claim and complete, cancel": Story(
        QUEUED,
        {"fresh": (*once("claim"), *once("complete")), "person": once("cancel")},
        stays_completed("fresh"),
    ),
    "claim and complete, claim and complete": Story(
        QUEUED,
        {"fresh": (*once("claim"), *once("complete")), "other": (*once("claim"), *once("complete"))},
        both(exactly_one, stays_completed("fresh", "other")),
    ),
    "complete, sweep": Story(
        LOST,
        {"holder": once("complete"), "sweeper": once("sweep")},
        both(exactly_one, stays_completed("holder")),
    ),
    "complete by deletion, sweep": Story(
        LOST,
        {"holder": once("complete"), "sweeper": once("sweep")},
        both(exactly_one, stays_completed("holder")),
        deletes_completed=True,
    ),
    "complete own, sweep": Story(
        LOST,
        {"holder": once("complete own"), "sweeper": once("sweep")},
        both(exactly_one, stays_completed("holder")),
    ),
    "complete own, sweep, claim": Story(
        LOST,
        {"holder": once("complete own"), "sweeper": once("sweep"), "fresh": once("claim")},
        both(stays_completed("holder"), one_owner, keeps_its_claim),
    ),
    "complete own by deletion, sweep, claim": Story(
        LOST,
        {"holder": once("complete own"), "sweeper": once("sweep"), "fresh": once("claim")},
        both(stays_completed("holder"), one_owner, keeps_its_claim),
        deletes_completed=True,
    ),
    "complete own, renew": Story(
        LOST,
        {"holder": once("complete own"), "stale": once("renew")},
        both(refuses_the_stale, stays_completed("holder")),
    ),
    "complete, complete by a stale holder": Story(
        HELD,
        {"holder": once("complete"), "stale": once("complete")},
        both(refuses_the_stale, stays_completed("holder")),
    ),
    "complete own, complete own by a stale holder": Story(
        HELD,
        {"holder": once("complete own"), "stale": once("complete own")},
        both(refuses_the_stale, stays_completed("holder")),
    ),
    "fail by a stale holder, claim and complete": Story(
        QUEUED,
        {"stale": once("fail"), "fresh": (*once("claim"), *once("complete"))},
        both(refuses_the_stale, stays_completed("fresh")),
    ),
    # The counter-example to a guard by status alone.
    "complete, sweep, claim": Story(
        LOST,
        {"holder": once("complete"), "sweeper": once("sweep"), "fresh": once("claim")},
        both(stays_completed("holder"), one_owner, keeps_its_claim),
    ),
    "renew, sweep, claim": Story(
        LOST,
        {"holder": once("renew"), "sweeper": once("sweep"), "fresh": once("claim")},
        lambda played: played.told("holder") != played.told("sweeper"),
    ),
    # The counter-example to no guard at all.
    "stale completion, claim and fail for good": Story(
        QUEUED._replace(attempts=2),
        {"stale": once("complete"), "fresh": (*once("claim"), *once("fail"))},
        both(refuses_the_stale, lambda played: played.row.status is Status.FAILED),
    ),
    "complete, reclaim": Story(
        HELD,
        {"holder": once("release"), "stale": once("complete"), "fresh": once("claim")},
        both(refuses_the_stale, keeps_its_claim),
    ),
    "fail, claim": Story(HELD, {"holder": once("fail"), "fresh": once("claim")}, keeps_its_claim),
    "fail, retry": Story(
        HELD._replace(attempts=3),
        {"holder": once("fail"), "person": once("retry")},
        lambda played: played.row.status is (Status.QUEUED if played.told("person") else Status.FAILED),
    ),
    "fail, retry, claim": Story(
        HELD._replace(attempts=3),
        {"holder": once("fail"), "person": once("retry"), "fresh": once("claim")},
        lambda played: played.row.attempts == (3 if not played.told("person") else played.told("fresh")),
    ),
    "prune, retry": Story(DEAD, {"pruner": once("prune"), "person": once("retry")}, exactly_one),
    "prune, retry, claim": Story(
        DEAD,
        {"pruner": once("prune"), "person": once("retry"), "fresh": once("claim")},
        lambda played: (played.row == GONE) == played.told("pruner") != played.told("person"),
    ),
    "prune, discard": Story(
        DEAD,
        {"pruner": once("prune"), "person": once("discard")},
        lambda played: (played.row == GONE) == played.told("pruner"),
    ),
    "retry, discard": Story(
        DEAD,
        {"person": once("retry"), "other": once("discard")},
        lambda played: played.told("person") or played.told("other"),
    ),
    "retry, retry": Story(DEAD, {"person": once("retry"), "other": once("retry")}, exactly_one),
    "renew, sweep": Story(LOST, {"holder": once("renew"), "sweeper": once("sweep")}, exactly_one),
    "renew and complete, sweep": Story(
        LOST,
        {"holder": ("renew", "complete", COMMIT), "sweeper": once("sweep")},
        both(exactly_one, stays_completed("holder")),
    ),
    "sweep, sweep": Story(LOST, {"sweeper": once("sweep"), "other": once("sweep")}, exactly_one),
    "sweep, sweep, claim": Story(
        LOST,
        {"sweeper": once("sweep"), "other": once("sweep"), "fresh": once("claim")},
        lambda played: played.told("sweeper") != played.told("other") and keeps_its_claim(played),
    ),
    "renew, request stop": Story(
        HELD,
        {"holder": once("renew"), "person": once("request stop")},
        lambda played: played.told("person") and played.row.stop_requested,
    ),
    "renew, renew, request stop": Story(
        HELD,
        {"holder": (*once("renew"), *once("renew")), "person": once("request stop")},
        lambda played: played.told("person") and played.row.stop_requested,
    ),
    "complete, request stop": Story(
        HELD,
        {"holder": once("complete"), "person": once("request stop")},
        lambda played: not played.row.stop_requested or played.row.status is Status.PROCESSING,
    ),
    "complete own, request stop": Story(
        HELD,
        {"holder": once("complete own"), "person": once("request stop")},
        both(stays_completed("holder"), lambda played: played.told("holder")),
    ),
    "release, request stop": Story(
        HELD,
        {"holder": once("release"), "person": once("request stop")},
        lambda played: not (played.told("person") and played.row.status is Status.QUEUED),
    ),
    "fail, request stop, claim": Story(
        HELD,
        {"holder": once("fail"), "person": once("request stop"), "fresh": once("claim")},
        lambda played: not (played.told("person") and played.row.status is Status.QUEUED),
    ),
    "sweep, request stop": Story(
        LOST,
        {"sweeper": once("sweep"), "person": once("request stop")},
        lambda played: not (played.told("person") and played.row.status is Status.QUEUED),
    ),
    "stop, sweep": Story(
        LOST._replace(stop_requested=True),
        {"holder": once("stop"), "sweeper": once("sweep")},
        lambda played: played.row.status is Status.CANCELLED,
    ),
    # The counter-example to attempts that are counted at a failure.
    "claim and go silent and sweep, claim": Story(
        Row(max_attempts=1),
        {"fresh": ("claim", "expire", COMMIT, "sweep", COMMIT), "other": once("claim")},
        lambda played: not (played.answers["fresh"][0] and played.told("other")),
    ),
    "delete, complete": Story(
        HELD,
        {"person": once("delete"), "holder": once("complete")},
        lambda played: played.row == GONE,
    ),
    "delete, complete own": Story(
        HELD,
        {"person": once("delete"), "holder": once("complete own")},
        lambda played: played.row == GONE,
    ),
    "delete, complete by deletion": Story(
        HELD,
        {"person": once("delete"), "holder": once("complete")},
        exactly_one,
        deletes_completed=True,
    ),
    "delete, sweep, claim": Story(
        LOST,
        {"person": once("delete"), "sweeper": once("sweep"), "fresh": once("claim")},
        lambda played: played.row == GONE or not played.told("person"),
    ),
}
MANY = 24  # orders; of more, a small run plays so many


@pytest.fixture
def stage(settings, monkeypatch) -> Iterator[Stage]:
    settings.PGJOBS = {"LOST_DELAY": 0}
    monkeypatch.setattr(store, "leases", lambda cursor: (interleavings.LEASE, timedelta(days=1)))
    with interleavings.stage() as opened:
        yield opened


def play(stage: Stage, story: Story, settings, chunk) -> int:
    """Play the orders of a story: all, or a sample where there are many. Returns how many were played."""
    if story.deletes_completed:
        settings.PGJOBS = {"LOST_DELAY": 0, "COMPLETED_RETENTION": 0}
    chosen = list(orders(story.scripts))
    if len(chosen) > MANY:
        chosen = chunk.random.sample(chosen, chunk.size(small=MANY, large=len(chosen)))
    for order in chosen:
        found = stage.play(story.row, story.scripts, order)
        expected = foretell(story.row, story.scripts, order, deletes_completed=story.deletes_completed)
        assert found == expected, f"in the order {order}"
        assert story.rule(found), f"the rule is broken in the order {order}: {found}"
    return len(chosen)


@pytest.mark.parametrize("name", STORIES)
def test_every_order_comes_out_as_it_must(chunk, stage, settings, name):
    chunk.record(orders=play(stage, STORIES[name], settings, chunk))


# ── Who takes a unique key ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("both_want", ["their own", "all"])
def test_of_two_jobs_with_one_unique_key_one_is_retried(stage, both_want):
    scripts = {"one": once("retry"), "two": once("retry")}
    for order in orders(scripts):
        BackgroundJob.objects.all()._raw_delete("default")
        jobs = [make_job("failed", unique_key="key") for _ in scripts]
        for name, job in zip(scripts, jobs, strict=True):
            stage.actor(name).jobs = [job.pk] if both_want == "their own" else [one.pk for one in jobs]

        answers, _ = stage.run(scripts, order)

        assert sorted(answers[name][0] for name in scripts) == [False, True], order
        assert sorted(row["status"] for row in rows().values()) == ["failed", "queued"], order


def test_a_key_is_taken_by_a_retry_or_by_a_new_job(stage, monkeypatch):
    def insert(actor):
        make_job(unique_key="key")
        return True

    monkeypatch.setitem(interleavings.STATEMENTS, "insert", Statement(lambda row, actor: None, insert))
    scripts = {"person": once("retry"), "code": once("insert")}
    for order in orders(scripts):
        BackgroundJob.objects.all()._raw_delete("default")
        stage.actor("person").jobs = [make_job("failed", unique_key="key").pk]

        answers, _ = stage.run(scripts, order)

        told = [answers[name][0] for name in scripts]
        assert told.count(True) == 1, order
        assert sum(row["status"] == "queued" for row in rows().values()) == 1, order


# ── The rules are seen to break ───────────────────────────────────────────────────────────────────────────

BY_STATUS = "job.status = 'processing'\n              AND "
BY_TOKEN = "AND job.locked_by = given.token\n              AND job.attempts = given.attempts"


BY_OWN_TOKEN = "AND job.locked_by = %(token)s\n   AND job.attempts = %(attempts)s"


def keeps_its_rule(stage: Stage, story: Story, order: Order) -> bool:
    return story.rule(stage.play(story.row, story.scripts, order))


OTHERS_FIRST = ("sweeper", "sweeper", "fresh", "fresh", "holder", "holder")

# what is weakened: (the statement, what it loses, the story whose rule breaks, in which order)
WEAKENED = {
    "no guard": (
        "COMPLETE",
        {BY_TOKEN: "", BY_STATUS: ""},
        "stale completion, claim and fail for good",
        ("fresh", "fresh", "fresh", "fresh", "stale", "stale"),
    ),
    "settling guarded by status alone": ("COMPLETE", {BY_TOKEN: ""}, "complete, sweep, claim", OTHERS_FIRST),
    "renewing guarded by status alone": ("RENEW", {BY_TOKEN: ""}, "renew, sweep, claim", OTHERS_FIRST),
    "an executor's completion guarded by status alone": (
        "COMPLETE_OWN",
        {BY_OWN_TOKEN: "AND (%(token)s::uuid, %(attempts)s) IS NOT NULL"},
        "complete own, complete own by a stale holder",
        ("stale", "stale", "holder", "holder"),
    ),
    "claims that are not counted": (
        "CLAIM",
        {"LEAST(job.attempts, 2147483646) + 1": "job.attempts"},
        "claim and go silent and sweep, claim",
        ("fresh",) * 5 + ("other",) * 2,
    ),
}


@pytest.mark.parametrize("name", WEAKENED)
def test_a_weakened_statement_breaks_a_rule(stage, monkeypatch, name):
    statement, losses, story, order = WEAKENED[name]
    assert keeps_its_rule(stage, STORIES[story], order)

    weakened = getattr(sql, statement)
    for part, instead in losses.items():
        assert part in weakened
        weakened = weakened.replace(part, instead)
    monkeypatch.setattr(sql, statement, weakened)

    assert not keeps_its_rule(stage, STORIES[story], order)


def collect(actor: Actor) -> bool:
    """Read what is lost, as a sweeper should not: to write it in another transaction."""
    actor.collected = store.lost(
        actor.cursor(), lease=interleavings.LEASE, timeout=interleavings.LEASE, limit=9
    )
    return bool(actor.collected)


def write_by_ids(actor: Actor) -> bool:
    cursor = actor.cursor()
    cursor.execute(
        "UPDATE background_jobs SET status = 'queued', locked_by = NULL WHERE id = ANY (%s)",
        [[claim.id for claim in actor.collected]],
    )
    return bool(cursor.rowcount)


def write_by_tokens(actor: Actor) -> bool:
    verdict = Verdict(Event.FAIL, 0.0, error=JobError("", "lost"))
    return bool(store.settle(actor.cursor(), [(claim, verdict) for claim in actor.collected]))


@pytest.mark.parametrize(
    ("write", "holder_does", "rule"),
    [
        pytest.param(write_by_ids, "complete", stays_completed("holder"), id="by ids"),
        pytest.param(write_by_tokens, "renew", exactly_one, id="by tokens"),
    ],
)
def test_a_sweep_that_reads_before_it_writes_takes_what_is_not_lost(
    stage, monkeypatch, write, holder_does, rule
):
    monkeypatch.setitem(interleavings.STATEMENTS, "collect", Statement(lambda row, actor: None, collect))
    monkeypatch.setitem(interleavings.STATEMENTS, "write", Statement(lambda row, actor: None, write))
    scripts = {"holder": once(holder_does), "sweeper": (*once("collect"), *once("write"))}

    order = ("sweeper", "sweeper", "holder", "holder", "sweeper", "sweeper")
    assert not keeps_its_rule(stage, Story(LOST, scripts, rule), order)
