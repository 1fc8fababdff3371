"""The replay counts right, and on a real trace our drafter is ahead of the paper's."""

import numpy as np
import pytest

from benchmarks import eviction, lengths, placement, scheduler, simulated_fleet, traces
from benchmarks.arms import Hindsight, NoDrafts, Rhyme, released
from benchmarks.draft_quality import summary
from benchmarks.real_sizes import budget
from benchmarks.regrowth import Regrown, previous_of
from benchmarks.replay import replay
from verl_rhyme.config import DraftingConfig


@pytest.fixture(scope="module")
def two_epochs():
    steps = traces.load(traces.FOLDER / "qwen2-t1.parquet")
    return [step for step in steps if step[0].epoch < 2]


def figures(steps, arm):
    tallies = replay(steps, arm)
    return summary([tallies[0]]), summary([tallies[1]])


def test_the_trace_is_whole(two_epochs):
    assert [len(step) for step in two_epochs] == [128] * 8
    for response in two_epochs[0]:
        assert len(response.tokens) == len(response.logprobs) > 0
        assert (response.logprobs <= 0).all()
        assert len(response.key) == 16


def test_plain_decoding_emits_a_token_a_step(two_epochs):
    tallies = replay(two_epochs, NoDrafts())
    for tally in tallies.values():
        assert tally.emitted == tally.steps
        assert tally.drafted == tally.accepted == 0
    tokens = sum(len(r.tokens) - 1 for step in two_epochs for r in step)
    assert sum(t.emitted for t in tallies.values()) == tokens


def test_hindsight_is_always_right(two_epochs):
    for tally in replay(two_epochs, Hindsight()).values():
        assert tally.accepted == tally.drafted > 0
        assert tally.emitted <= tally.steps + tally.accepted


def test_ours_is_ahead_of_both_histospecs_at_no_higher_cost(two_epochs):
    cold, warm = figures(two_epochs, Rhyme(DraftingConfig(floor=0.3, weigh_cost=False)))
    _, paper = figures(two_epochs, Rhyme(DraftingConfig(policy="paper")))
    _, theirs = figures(two_epochs, released())
    assert cold["tokens_per_step"] > 2, "the first epoch gains from live texts"
    assert warm["tokens_per_step"] > 1.3 * paper["tokens_per_step"]
    assert warm["tokens_per_step"] > 1.5 * theirs["tokens_per_step"]
    assert warm["verified_per_token"] < 1.1 * paper["verified_per_token"]
    assert np.isfinite(warm["us_per_request_step"])


def test_an_interrupted_text_is_worth_more_than_all_else_known(two_epochs):
    config = DraftingConfig(weigh_cost=False, tail_weight=1.0)
    previous = previous_of(two_epochs, 1, 0.93)
    arm = Regrown(config, previous)
    tally = replay(two_epochs, arm)[1]
    _, without = figures(two_epochs, Rhyme(config))
    assert set(previous) == {r.id for step in two_epochs for r in step if r.epoch == 1}
    assert summary([tally])["tokens_per_step"] > 1.7 * without["tokens_per_step"]
    assert 0.5 * arm.accepted < arm.reverified <= arm.accepted <= tally.accepted


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


def test_the_store_hits_what_it_has_room_for_and_oldest_first_far_less():
    tokens = eviction.lengths(200, 500)
    before = eviction.summary(eviction.oldest_first(0.4, tokens, passes=4, batch=10, seed=1))
    after = eviction.summary(eviction.by_hash(0.4, tokens, passes=4, batch=10, seed=1))
    assert before["hit_rate"] == pytest.approx(0.4 * 0.4 / 2, abs=0.04)
    assert after["hit_rate"] == pytest.approx(0.4, abs=0.04)
    assert after["written"] < 0.55
    assert before["written"] == 1


def test_groups_come_together_and_home_within_the_bound():
    least = placement.measure("least_loaded", "sync", 8, 600)
    group = placement.measure("sticky_group", "sync", 8, 600)
    assert least["pairs"] == pytest.approx(1 / 8, abs=0.02)
    assert least["home"] == pytest.approx(1 / 8, abs=0.05)
    assert group["pairs"] > 0.99
    assert group["home"] > 0.9
    assert least["requests_to_mean_greatest"] == 1 < group["requests_to_mean_greatest"] <= 1.25


@pytest.mark.parametrize("arm", scheduler.ARMS)
def test_the_scheduler_is_timed_at_every_kind_of_event(arm):
    run = scheduler.Run(arm, 256, 1)
    for version in range(5):
        run.update(version)
    kinds = {"begin", "start", "generate", "finish", "harvest"} | ({"interrupt"} if run.rules.stops else set())
    assert set(run.microseconds) == kinds
    assert len(run.microseconds["harvest"]) == 5
    assert run.scheduler.ledger.loaded == 32, "four updates consume what was loaded first"


def test_a_start_takes_the_slot_that_was_free_longest_and_pauses_do_not_count():
    worker = {"begun": np.array([0.1, 0.1, 1.3, 1.4, 6.0]), "freed": np.array([1.0, 1.2, 3.0])}
    windows = [(0.0, 2.0), (5.0, 7.0)]
    assert simulated_fleet.latencies([worker], 2, windows) == pytest.approx([0.3, 0.2])


def test_forecasts_of_lengths_come_near_to_what_siblings_tell():
    """What is left is what no history can know: the spread of a prompt's own responses."""
    rows = list(lengths.evaluate(*lengths.made_up(between=0.8, within=0.3, prompts=512, epochs=2)))
    last = {row["arm"]: row for row in rows if row["epoch"] == 1}
    ours, ceiling = last["ours"], last["siblings' mean"]
    assert ours["rank_correlation"] > 0.97 * ceiling["rank_correlation"]
    assert last["ours, half a group on"]["recall_10"] > ours["recall_10"]
    assert ours["coverage_90"] == pytest.approx(0.9, abs=0.03)
    assert abs({row["arm"]: row for row in rows if row["epoch"] == 0}["ours"]["rank_correlation"]) < 0.2
