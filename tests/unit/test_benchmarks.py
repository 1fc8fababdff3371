"""Our drafter on a real trace compared with the paper's, and its choice of profitable drafts at real sizes."""

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


def test_plain_decoding_emits_one_token_per_step(two_epochs):
    tallies = replay(two_epochs, NoDrafts())
    for tally in tallies.values():
        assert tally.emitted == tally.steps
        assert tally.drafted == tally.accepted == 0
    tokens = sum(len(r.tokens) - 1 for step in two_epochs for r in step)
    assert sum(t.emitted for t in tallies.values()) == tokens


def test_our_drafter_beats_both_histospecs_at_no_higher_cost(two_epochs):
    cold, warm = figures(two_epochs, Rhyme(DraftingConfig(floor=0.3, weigh_cost=False)))
    _, paper = figures(two_epochs, Rhyme(DraftingConfig(policy="paper")))
    _, theirs = figures(two_epochs, released())
    assert cold["tokens_per_step"] > 2, "the first epoch gains from live texts"
    assert warm["tokens_per_step"] > 1.3 * paper["tokens_per_step"]
    assert warm["tokens_per_step"] > 1.5 * theirs["tokens_per_step"]
    assert warm["verified_per_token"] < 1.1 * paper["verified_per_token"]
    assert np.isfinite(warm["us_per_request_step"])


@pytest.mark.parametrize("certain", [False, True])
def test_a_wide_batch_has_profitable_drafts(certain):
    """With a real vocabulary and a GPU's cost; the earlier bounds cut most of the drafts."""
    past, now = budget.responses()

    def granted(bounds):
        return budget.drive(256, certain, budget.gpu, bounds, past[-8:], now).granted

    profitable = granted(budget.unbounded)
    assert np.mean(profitable) > 200
    assert granted(budget.after) == profitable
    assert np.mean(granted(budget.before)) < np.mean(profitable) / 2
