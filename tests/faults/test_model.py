"""The protocol keeps its promises in every state that it can get into, and each of its rules is needed.

The weakened variants are the measure of the model: were it blind, they would pass. Those whose
counter-example is a matter of statements are played on a real database in `test_interleavings`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from django_pgjobs.lifecycle import decide
from tests.faults import model
from tests.faults.model import Protocol, explore

FEW = frozenset({"ok", "failed", "interrupted"})

SOUND = {
    "every outcome": Protocol(),
    "at most once": Protocol(rerun_if_lost=False),
    "three workers": Protocol(workers=3, outcomes=FEW),
    "three workers, at most once": Protocol(workers=3, max_attempts=1, outcomes=FEW, rerun_if_lost=False),
}
SOUND_LARGE = {
    "three workers, every outcome": Protocol(workers=3),
    "three attempts": Protocol(workers=3, max_attempts=3),
    "two jobs": Protocol(jobs=2, max_attempts=1, outcomes=FEW),
    "two jobs, at most once": Protocol(jobs=2, max_attempts=1, outcomes=FEW, rerun_if_lost=False),
}

# A world in which less happens, so that the shortest ways to a violation tell most.
PLAIN = Protocol(outcomes=FEW, answers_get_lost=False, people=False)

# name: (the variant, what it violates, a shortest way there)
WEAKENED = {
    "no guard": (
        replace(PLAIN, guard="none"),
        model.FINAL,
        ["claim", "start", "end: ok", "expire", "sweep", "claim", "expire", "sweep", "settle ok"],
    ),
    "a guard by status alone": (
        replace(PLAIN, guard="status"),
        model.STALE,
        ["claim", "start", "end: ok", "expire", "sweep", "claim", "settle ok"],
    ),
    "a guard by status alone, renewing": (
        replace(PLAIN, guard="status"),
        model.STALE_RENEWAL,
        ["claim", "expire", "sweep", "claim", "expire", "renew"],
    ),
    "sweep by ids that were collected before": (
        replace(PLAIN, sweep="ids"),
        model.FINAL,
        ["claim", "start", "end: ok", "expire", "sweeper reads", "settle ok", "sweeper writes"],
    ),
    "sweep that reads before it writes, by token": (
        replace(PLAIN, sweep="guarded ids"),
        model.LIVE_CLAIM_SWEPT,
        ["claim", "expire", "sweeper reads", "renew", "sweeper writes"],
    ),
    "attempts counted at a failure": (
        replace(PLAIN, counts_at_claim=False, max_attempts=1),
        model.TOO_MANY_STARTS,
        ["claim", "start", "expire", "sweep", "claim", "start"],
    ),
    "a holder that believes its refused settle": (
        replace(PLAIN, looks_at_row_count=False),
        model.EFFECT_WITHOUT_COMPLETION,
        ["claim", "start", "end: ok", "expire", "sweep", "settle ok, refused"],
    ),
    "a job given back before its body has ended": (
        replace(PLAIN, awaits_kill=False),
        model.TWO_BODIES,
        ["claim", "start", "interrupted", "settle interrupted", "claim", "start"],
    ),
    "start on an old claim": (
        replace(PLAIN, looks_at_age=False, rerun_if_lost=False, people=True),
        model.STARTED_AGAIN,
        ["claim", "expire", "sweep", "retry", "start", "claim", "start"],
    ),
    "no sweep": (
        replace(PLAIN, sweep="none"),
        model.STUCK,
        ["claim", "kill holding"],
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_the_protocol_violates_no_property(name):
    found = explore(SOUND[name])

    print(f"{name}: {found.states} states, {found.steps} steps")
    assert found.counterexamples == {}
    assert found.states > 1000


@pytest.mark.parametrize("name", SOUND_LARGE)
def test_the_protocol_violates_no_property_in_larger_worlds(chunk, name):
    if not chunk.large:
        pytest.skip("takes a minute; run with --large")

    found = explore(SOUND_LARGE[name])

    chunk.record(states=found.states, steps=found.steps)
    assert found.counterexamples == {}


@pytest.mark.parametrize("name", WEAKENED)
def test_without_one_of_its_rules_the_protocol_fails(name):
    protocol, violated, way = WEAKENED[name]

    found = explore(protocol, until=violated)

    assert found.counterexamples.get(violated) == way


def test_the_weakened_variants_are_weakened_by_one_rule_each():
    """In their world the sound protocol is sound, so it is the missing rule that they fail for."""
    assert explore(PLAIN).counterexamples == {}
    assert explore(replace(PLAIN, max_attempts=1)).counterexamples == {}
    assert explore(replace(PLAIN, rerun_if_lost=False)).counterexamples == {}


def test_the_model_asks_the_code_what_an_outcome_means(monkeypatch):
    def forgetful(outcome, facts, policy):
        return decide(outcome, replace(facts, rerun_if_lost=True), policy)

    monkeypatch.setattr(model, "decide", forgetful)

    found = explore(replace(PLAIN, rerun_if_lost=False), until=model.STARTED_AGAIN)

    way = ["claim", "start", "interrupted", "settle interrupted", "claim", "start"]
    assert found.counterexamples[model.STARTED_AGAIN] == way
