"""Forecasts against worlds whose lengths are known."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import cpu_seconds
from tests.unit.lengths.worlds import World
from verl_rhyme.lengths.predictor import LengthPredictor, PromptLengths
from verl_rhyme.lengths.quality import Quality, rank_correlation

LIMIT = 1 << 20


def names(prompts: int) -> list[str]:
    return [str(prompt) for prompt in range(prompts)]


def learn(predictor: LengthPredictor, lengths: np.ndarray) -> None:
    """All groups of a visit."""
    for prompt, group in zip(names(len(lengths)), lengths.tolist(), strict=True):
        predictor.learn(prompt, group)


def test_history_predicts_nearly_as_well_as_the_truth():
    world, predictor = World(400), LengthPredictor(LIMIT)
    for _ in range(5):
        learn(predictor, world.visit(8))
    truth = np.repeat(world.location, 8)
    lengths = world.visit(8).ravel().astype(float)
    expected = np.repeat(predictor.forecast(names(400)).expected, 8)
    ours, best = (rank_correlation(predicted, lengths) for predicted in (expected, truth))
    assert ours > 0.93 * best > 0.5
    assert expected.mean() == pytest.approx(lengths.mean(), rel=0.07), "the forecast lags behind lengths that grow"


@pytest.mark.parametrize("tail", [3, 50])
def test_nine_in_ten_are_within_the_90th_percentile(tail: float):
    world, predictor, covered = World(300, tail=tail, drift=0), LengthPredictor(LIMIT), []
    for visit in range(6):
        lengths = world.visit(8)
        if visit >= 2:
            covered.append((lengths <= predictor.forecast(names(300)).p90[:, None]).mean())
        learn(predictor, lengths)
    assert np.mean(covered) == pytest.approx(0.88, abs=0.04)


def test_an_unknown_prompt_has_the_lengths_of_all():
    world, predictor = World(300, drift=0, wander=0), LengthPredictor(LIMIT)
    learn(predictor, world.visit(8))
    others = World(300, seed=1, drift=0, wander=0).visit(8).ravel()
    assert not predictor.knows("new")
    forecast = predictor.forecast(["new", "newer"])
    assert len(set(forecast.expected.tolist())) == 1
    assert forecast.expected[0] == pytest.approx(others.mean(), rel=0.15)
    assert (others <= forecast.p90[0]).mean() == pytest.approx(0.9, abs=0.06)


def test_ended_siblings_replace_the_lengths_of_all_prompts_but_not_a_ranking():
    predictor = LengthPredictor(LIMIT)
    learn(predictor, World(200).visit(8))
    predictor.rank("ranked", math.log(4000))
    forecast = predictor.forecast(["new", "ranked"], 0, {"new": [100] * 15, "ranked": [100]})
    assert forecast.expected.tolist() == [100, 2050]


def test_a_running_response_is_compared_with_longer_ones():
    predictor = LengthPredictor(1000)
    predictor.learn("p", [10, 100, 300])
    assert predictor.forecast(["p"] * 4, [0, 50, 200, 600]).expected.tolist() == [136, 200, 300, 900]
    assert predictor.forecast(["p"] * 2, [0, 800]).p90.tolist() == [300, 1000]


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 50) | st.integers(1, 131_072), min_size=1, max_size=64 + 9),
    st.lists(st.integers(1, 131_072), max_size=9),
    st.lists(st.integers(0, 60) | st.integers(0, 140_000), min_size=1, max_size=12),
)
def test_remaining_tokens_are_the_mean_excess_of_the_latest_lengths(lengths, siblings, emitted):
    predictor = LengthPredictor(LIMIT)
    predictor.learn("p", lengths)
    latest = [*lengths[-64:], *siblings][-64:]
    expected = []
    for done in emitted:
        excess = [length - done for length in latest if length > done]
        expected.append(max(1, int(done + (sum(excess) / len(excess) if excess else done / 2))))
    forecast = predictor.forecast(["p"] * len(emitted), emitted, {"p": siblings})
    assert forecast.expected.tolist() == expected


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(1, 5000), max_size=8)), max_size=30),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5000)), min_size=1, max_size=20),
    st.integers(1, 5000),
)
def test_forecasts_are_in_order_for_any_history(told, asked, limit):
    predictor = LengthPredictor(limit)
    for prompt, lengths in told:
        predictor.learn(str(prompt), [min(tokens, limit) for tokens in lengths])
    emitted = np.array([min(tokens, limit) for _, tokens in asked])
    forecast = predictor.forecast([str(prompt) for prompt, _ in asked], emitted)
    assert (np.maximum(emitted, 1) <= forecast.expected).all()
    assert (forecast.expected <= forecast.p90).all()
    assert (forecast.p90 <= limit).all()
    assert len(predictor.forecast([]).expected) == 0


def test_an_unreadable_state_changes_nothing():
    predictor = LengthPredictor(LIMIT)
    learn(predictor, World(50).visit(4))
    predictor.rank("waits", 7.0)
    before = predictor.state_dict()
    for torn in ({"lengths": {}}, {**before, "lengths": {"a": ["x"]}}, {**before, "bias": None}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            predictor.load_state_dict(torn)
    assert predictor.state_dict() == before


visits = st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(1, 1 << 20), max_size=70)), max_size=12)


@settings(max_examples=100)
@given(st.lists(visits, min_size=1, max_size=6), st.integers(0, 5))
def test_changes_make_another_predictor_equal(steps, restarted):
    """Prompts beyond the most go in the order of their visits, in both; a state keeps that order."""
    predictor, mirror = LengthPredictor(LIMIT, most=4), LengthPredictor(LIMIT, most=4)
    for number, step in enumerate(steps):
        for prompt, lengths in step:
            predictor.rank(f"ranked {prompt}", 5.0)
            predictor.learn(str(prompt), lengths)
        mirror.update(json.loads(json.dumps(predictor.pop_changes())))
        if number == restarted:
            predictor = LengthPredictor(LIMIT, most=4)
            predictor.load_state_dict(json.loads(json.dumps(mirror.state_dict())))
        assert len(predictor) <= 4
        assert mirror.state_dict() == predictor.state_dict()
    visited = [str(prompt) for step in steps for prompt, lengths in step if lengths]
    assert [*mirror._known] == [*dict.fromkeys(reversed(visited))][3::-1]


def test_an_epoch_of_dapo_is_learnt_and_a_large_step_forecast_in_time():
    """17,398 prompts x 16; then 100,000 samples at once. The bound is ten times what an idle core needs."""
    rng = np.random.default_rng(0)
    predictor = LengthPredictor(20480)
    lengths = np.minimum(np.exp(rng.normal(8, 0.6, (17398, 1)) + rng.normal(0, 0.3, (17398, 16))), 20480).astype(int)
    predictor.forecast(["compiled before"])
    learning = cpu_seconds(lambda: learn(predictor, lengths))
    asked = [str(prompt) for prompt in range(14_273, 20_523) for _ in range(16)]  # half of them new
    forecasting = cpu_seconds(lambda: predictor.forecast(asked, rng.integers(0, 4000, 100_000)))
    assert max(learning, forecasting) < 2, (learning, forecasting)


def ranked_world(miss: float, bias: float, prompts: int = 400, word: bool = True) -> tuple[float, LengthPredictor]:
    """A first epoch in which a ranker tells of each prompt, off by so much: how it then orders the second half."""
    world, predictor, rng = World(prompts, seed=3), LengthPredictor(20000), np.random.default_rng(4)
    locations = world.location - bias + miss * rng.standard_normal(prompts)
    lengths, means = world.visit(8), np.empty(prompts)
    for prompt, name in enumerate(names(prompts)):
        if word:
            predictor.rank(name, float(locations[prompt]))
        means[prompt] = predictor.forecast([name]).expected[0]
        predictor.learn(name, lengths[prompt].tolist())
    half = prompts // 2
    return rank_correlation(means[half:], lengths[half:].mean(axis=1)), predictor


def test_a_rankers_forecast_replaces_a_missing_history():
    assert ranked_world(0.2, 0.0)[0] > 0.8
    assert abs(ranked_world(0.2, 0.0, word=False)[0]) < 0.3


@pytest.mark.parametrize(("miss", "bias"), [(0.1, 0.0), (0.4, 0.5), (0.3, -0.4)])
def test_the_bias_of_a_ranker_is_learnt(miss: float, bias: float):
    _, predictor = ranked_world(miss, bias)
    assert predictor._bias == pytest.approx(bias, abs=0.25)


def test_a_rankers_forecast_ends_with_the_first_group_and_changes_no_history():
    _, predictor = ranked_world(0.2, 0.0)
    before = predictor.forecast(["5"]).expected
    predictor.rank("5", 1.0)
    predictor.rank("unfit", float("nan"))
    predictor.rank("endless", 1e9)
    assert predictor.forecast(["5"]).expected == before
    assert not predictor.ranked("5")
    assert not predictor.knows("unfit")
    assert predictor.forecast(["endless"]).expected.tolist() == [20000]


def test_the_quality_of_forecasts_is_reported_once():
    quality = Quality()
    quality.add(100.0, [90, 110], seen=False, ranked=False)
    quality.add(200.0, [300, 310], seen=True, ranked=True)
    metrics = quality.pop_metrics()
    assert metrics == {
        "rank_correlation": pytest.approx(0.894, abs=1e-3),
        "mean_ratio": 600 / 810,
        "seen": 0.5,
        "ranked": 0.5,
    }
    assert quality.pop_metrics() == {}


def test_ranks_are_scipys():
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    for _ in range(20):
        predicted, lengths = rng.integers(0, 9, (2, 50)).astype(float)  # ties
        assert rank_correlation(predicted, lengths) == pytest.approx(spearmanr(predicted, lengths).statistic)


@given(
    recorded=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 1 << 20)), max_size=40),
    most=st.integers(1, 6),
)
def test_the_latest_prompts_are_known_and_the_mean_is_theirs(recorded: Sequence[tuple[str, int]], most: int) -> None:
    lengths, model = PromptLengths(most), {}
    for prompt, tokens in recorded:
        lengths.record(prompt, tokens)
        model.pop(prompt, None)
        model[prompt] = tokens
        if len(model) > most:
            del model[next(iter(model))]
    again = PromptLengths(most)
    again.record("z", 1)
    again.load_state_dict(json.loads(json.dumps(lengths.state_dict())))
    for each in (lengths, again):
        assert len(each) == len(model)
        assert {prompt: each.expected(prompt) for prompt in model} == model
        assert abs(each.expected("new") - (mean(model.values()) if model else 0)) <= 0.5
