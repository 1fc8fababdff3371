"""On a real trace our drafter is ahead of the paper's, and at real sizes it drafts what is profitable."""

import numpy as np
import pytest

from benchmarks import traces
from benchmarks.arms import NoDrafts, Rhyme, released
from benchmarks.draft_quality import summary
from benchmarks.real_sizes import budget
from benchmarks.replay import replay
from verl_rhyme.config import DraftingConfig


@pytest.fixture(scope="module")
def two_epochs():
    steps = traces.load(traces.FOLDER / "qwen2-t1.parquet")
    return [step for step in steps if step[0].epoch < 2]


def figures(steps, arm):
    tallies = replay(steps, arm)
    return summary([tallies[0]]), summary([tallies[1]])


def test_plain_decoding_emits_a_token_a_step(two_epochs):
    tallies = replay(two_epochs, NoDrafts())
    for tally in tallies.values():
        assert tally.emitted == tally.steps
        assert tally.drafted == tally.accepted == 0
    tokens = sum(len(r.tokens) - 1 for step in two_epochs for r in step)
    assert sum(t.emitted for t in tallies.values()) == tokens


def test_ours_is_ahead_of_both_histospecs_at_no_higher_cost(two_epochs):
    cold, warm = figures(two_epochs, Rhyme(DraftingConfig(floor=0.3, weigh_cost=False)))
    _, paper = figures(two_epochs, Rhyme(DraftingConfig(policy="paper")))
    _, theirs = figures(two_epochs, released())
    assert cold["tokens_per_step"] > 2, "the first epoch gains from live texts"
    assert warm["tokens_per_step"] > 1.3 * paper["tokens_per_step"]
    assert warm["tokens_per_step"] > 1.5 * theirs["tokens_per_step"]
    assert warm["verified_per_token"] < 1.1 * paper["verified_per_token"]
    assert np.isfinite(warm["us_per_request_step"])


@pytest.mark.parametrize("certain", [False, True])
def test_a_wide_batch_drafts_what_pays(certain):
    """At a real vocabulary, by a GPU's cost; the bounds as they were leave little of it."""
    past, now = budget.responses()

    def granted(bounds):
        return budget.drive(256, certain, budget.gpu, bounds, past[-8:], now).granted

    pays = granted(budget.unbounded)
    assert np.mean(pays) > 200
    assert granted(budget.after) == pays
    assert max(granted(budget.before)) < np.mean(pays) / 2
