"""Rules that follow from the options, and those that contradict each other."""

import pytest

from verl_rhyme.config import SchedulingConfig
from verl_rhyme.scheduling.rules import Rules, of_options


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"max_staleness": 0, "at_version": "continue"}, ["at_version=continue", "max_staleness to at least 1"]),
        ({"max_staleness": 0, "start_early": True}, ["start_early", "max_staleness to at least 1"]),
        ({"max_staleness": 0, "take": "loaded", "in_flight": 2}, ["in_flight=2", "take=finished"]),
        ({"max_staleness": 1, "in_flight": 2.5}, ["in_flight=2.5", "at most 2"]),
        ({"max_staleness": 1, "put_off": 0.2}, ["put_off=0.2", "max_staleness=0", "put_off=0"]),
        ({"max_staleness": 1, "at_version": "finish"}, ["trainer_mode=separate_async", "relay"]),
        ({"in_flight": float("inf"), "max_staleness": 0}, ["in_flight=inf", "finite"]),
        ({"batch_samples": 0}, ["one sample of each"]),
    ],
)
def test_contradictory_rules_name_the_fix(rules, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the words are looked at below)
        Rules(**{"batch_prompts": 1, "batch_samples": 2, **rules})
    assert not [word for word in words if word not in str(caught.value)]


@pytest.mark.parametrize(
    ("rules", "batches"),
    [
        ({"max_staleness": 0}, 1),
        ({"max_staleness": 0, "put_off": 0.25}, 1.125),
        ({"max_staleness": 1}, 2),
        ({"max_staleness": 2}, 2),
        ({"max_staleness": 3}, 2.5),
        ({"max_staleness": 4}, 3),
        ({"max_staleness": 2, "take": "loaded"}, 3),
        ({"max_staleness": 1, "in_flight": 1.5}, 1.5),
    ],
)
def test_batches_in_flight_follow_from_the_bound(rules, batches):
    assert Rules(1, 2, **rules).batches == batches


@pytest.mark.parametrize(
    ("options", "batches", "refill", "put_off"),
    [
        ({}, 3, "when_empty", 0),
        ({"put_off": 0.25}, 1.125, "always", 0.25),
        ({"in_flight": 2.0}, 2, "when_empty", 0),
        ({"in_flight": 1.5}, 1.5, "always", 0),
        ({"refill": "when_empty"}, 3, "when_empty", 0),
        ({"refill": "always"}, 1, "always", 0),
        ({"take": "loaded"}, 1, "always", 0),
    ],
)
@pytest.mark.parametrize("drafts", [True, False])
def test_on_policy_whole_batches_are_loaded_together_with_and_without_drafts(options, batches, refill, put_off, drafts):
    found = of_options(SchedulingConfig(**options), 0, separate=False, drafts=drafts)
    assert (found.batches, found.refill, found.put_off) == (batches, refill, put_off)


@pytest.mark.parametrize(
    ("changes", "away", "wants"),
    [
        ({}, 0.7, True),
        ({"max_staleness": 2}, 0.7, True),
        ({}, 0.2, False),
        ({"max_staleness": 3, "in_flight": 2}, 0.7, False),  # what it advises
        ({"max_staleness": 4}, 0.7, False),
        ({"max_staleness": 0}, 0.7, False),
        ({"separate": False}, 0.7, False),
        ({"take": "loaded"}, 0.7, False),
    ],
)
def test_slack_is_advised_only_where_tools_are_slow_and_it_keeps_the_mean_staleness(changes, away, wants):
    rules = Rules(**{"batch_prompts": 4, "batch_samples": 16, "max_staleness": 1, "separate": True, **changes})
    assert rules.wants_slack(away) is wants
