"""Forecasts against worlds whose lengths are known."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from tests.unit.lengths.worlds import World
from verl_rhyme.lengths.location import posterior
from verl_rhyme.lengths.predictor import LengthPredictor
from verl_rhyme.lengths.quality import Quality, measures, rank_correlation

LIMIT = 1 << 20


def learn(predictor: LengthPredictor, lengths: np.ndarray, limit: int = LIMIT) -> list:
    """All groups of a visit."""
    learnt = []
    for prompt, group in enumerate(lengths):
        for tokens in group:
            predictor.ended(prompt, min(int(tokens), limit), complete=tokens < limit)
        learnt.append(predictor.close(prompt))
    return learnt


def test_history_tells_nearly_as_much_as_the_truth():
    world, predictor = World(400), LengthPredictor(LIMIT)
    for _ in range(5):
        learn(predictor, world.visit(8))
    truth = np.repeat(world.location, 8)
    lengths = world.visit(8).ravel().astype(float)
    forecast = predictor.forecast(np.repeat(np.arange(400), 8))
    ours, best = (measures(p, lengths) for p in (forecast.quantile(0.5), truth))
    assert ours["rank_correlation"] > 0.95 * best["rank_correlation"] > 0.5
    assert ours["recall_20"] > 0.9 * best["recall_20"]
    assert forecast.mean().mean() == pytest.approx(lengths.mean(), rel=0.1)


@pytest.mark.parametrize("tail", [3, 50])
def test_quantiles_hold_whatever_the_tail(tail: float):
    world, predictor, quality = World(300, tail=tail), LengthPredictor(LIMIT), Quality()
    for visit in range(6):
        for group in learn(predictor, world.visit(8)):
            if visit >= 2:
                quality.add(group)
    told = quality.take()
    for share in (10, 50, 90):
        assert told[f"coverage_{share}"] == pytest.approx(share / 100, abs=0.03)
    assert told["seen"] == 1
    assert quality.take() == {}


def test_a_prompt_never_seen_is_one_of_all():
    world, predictor = World(300, drift=0, wander=0), LengthPredictor(LIMIT)
    learn(predictor, world.visit(8))
    others = World(300, seed=1, drift=0, wander=0).visit(8).ravel()
    forecast = predictor.forecast([("new", i) for i in range(len(others))])
    assert not forecast.seen.any()
    for share in (0.1, 0.5, 0.9):
        assert (others <= forecast.quantile(share)).mean() == pytest.approx(share, abs=0.06)


def test_what_was_cut_short_counts_as_longer():
    limit = 450  # a third or more of all lengths
    world, predictor = World(300, drift=0, wander=0, tail=50), LengthPredictor(limit)
    naive = []
    for _ in range(4):
        lengths = world.visit(8)
        learn(predictor, lengths, limit)
        naive.append(np.log(np.minimum(lengths, limit)).mean(axis=1))
    cut = (lengths >= limit).mean(axis=1)
    assert (lengths >= limit).mean() > 0.3
    some = (cut > 0.2) & (cut < 0.8)
    error = predictor.forecast(np.arange(300)).location - world.location
    assert abs(error[some].mean()) < 0.05 < abs((np.mean(naive, axis=0) - world.location)[some].mean())


def test_siblings_that_race_do_not_look_short():
    """Of those that run side by side the short ones end first: what still runs has to weigh against them."""
    world, predictor = World(300, drift=0, wander=0, between=0.8, tail=50), LengthPredictor(LIMIT)
    learn(predictor, world.visit(16))
    lengths = World(300, seed=1, drift=0, wander=0, between=0.8, tail=50).visit(16)
    now = np.median(lengths, axis=1, keepdims=True)  # half of each group has ended
    running, names, wanted = [], [], []
    for prompt, group in enumerate(lengths):
        for tokens in group:
            if tokens <= now[prompt]:
                predictor.ended(("new", prompt), tokens)
            else:
                names.append(("new", prompt))
                running.append(int(now[prompt, 0]))
                wanted.append(tokens)
    forecast = predictor.forecast(names, running)
    assert forecast.mean().mean() == pytest.approx(np.mean(wanted), rel=0.1)
    assert (wanted <= forecast.quantile(0.5)).mean() == pytest.approx(0.5, abs=0.07)
    before = predictor.forecast([("newer", name) for name in names], running)
    assert forecast.scale.mean() < 0.6 * before.scale.mean()  # and it knows that it knows more


def test_some_siblings_tell_of_the_others():
    world, predictor = World(300, drift=0, wander=0), LengthPredictor(LIMIT)
    learn(predictor, world.visit(8))
    lengths = World(300, seed=1, drift=0, wander=0).visit(8)
    correlations = []
    for probes in (0, 1, 4):
        names = [(probes, prompt) for prompt in range(300)]
        for name, group in zip(names, lengths, strict=True):
            for tokens in group[:probes]:
                predictor.ended(name, tokens)
        forecast = predictor.forecast(names).quantile(0.5)
        correlations.append(measures(forecast, lengths[:, 7].astype(float))["rank_correlation"])
    assert abs(correlations[0]) < 0.1
    assert correlations[0] + 0.4 < correlations[1] < correlations[2]


def test_drift_is_followed():
    world, predictor = World(200, drift=0.3, wander=0), LengthPredictor(LIMIT)
    for _ in range(5):
        learn(predictor, world.visit(8))
    assert (predictor.forecast(np.arange(200)).location - world.location).mean() == pytest.approx(0, abs=0.06)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5000), st.booleans()), max_size=30),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5000)), min_size=1, max_size=20),
    st.integers(1, 5000),
)
def test_whatever_was_told_forecasts_are_in_order(told, asked, limit):
    predictor = LengthPredictor(limit)
    for prompt, tokens, complete in told:
        predictor.ended(prompt, tokens, complete)
        if tokens % 3 == 0:
            predictor.close(prompt)
    emitted = np.array([tokens for _, tokens in asked])
    forecast = predictor.forecast([prompt for prompt, _ in asked], emitted)
    quantiles = np.array([forecast.quantile(share) for share in (0.0, 0.1, 0.5, 0.9, 0.999)])
    assert np.isfinite(quantiles).all()
    assert (np.diff(quantiles, axis=0) >= 0).all()
    assert (quantiles >= np.minimum(emitted + 1, limit)).all()
    assert (quantiles <= limit).all()
    mean = forecast.mean()
    assert (quantiles[0] <= mean + 1e-6).all()
    assert (mean <= limit + 1e-6).all()


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(-8, 12), st.booleans()), min_size=1, max_size=12), st.floats(0.05, 3))
def test_the_posterior_is_the_mode(draws, noise):
    values, ended = np.array([v for v, _ in draws]), np.array([e for _, e in draws])
    prior = 1.0, 2.0

    def loss(at: float) -> float:
        z = (values - at) / np.sqrt(noise)
        return (at - prior[0]) ** 2 / (2 * prior[1]) - np.where(ended, -z * z / 2, norm.logsf(z)).sum()

    best = minimize_scalar(loss, bounds=(-30, 30), method="bounded", options={"xatol": 1e-9}).x
    (at,), (variance,) = posterior(
        *(np.array([x]) for x in (*prior, noise)), values, ended, np.zeros(len(values), dtype=np.int64)
    )
    assert at == pytest.approx(best, abs=1e-3)
    assert 0 < variance <= prior[1]


def test_it_survives_a_restart():
    world, predictor = World(50), LengthPredictor(LIMIT)
    for _ in range(3):
        for prompt, group in enumerate(world.visit(4)):
            for tokens in group:
                predictor.ended(str(prompt), tokens)
            predictor.close(str(prompt))
    again = LengthPredictor(LIMIT)
    again.load_state_dict(json.loads(json.dumps(predictor.state_dict())))
    names = [*map(str, range(60)), "new"]
    for share in (0.1, 0.9):
        np.testing.assert_allclose(again.forecast(names).quantile(share), predictor.forecast(names).quantile(share))
    again.ended("fresh", 10)
    assert again.close("fresh") is not None
    with pytest.raises(ValueError, match="length predictor"):
        again.load_state_dict({"prompts": ["a"]})
    with pytest.raises(ValueError, match="torn"):
        again.load_state_dict({**predictor.state_dict(), "location": [1.0]})


def test_nothing_is_learnt_of_nothing():
    predictor = LengthPredictor(100)
    assert predictor.close("unknown") is None
    predictor.forecast(["asked"])
    assert predictor.close("asked") is None
    assert len(predictor.forecast([])) == 0
    with pytest.raises(ValueError, match="limit"):
        LengthPredictor(0)


def test_an_epoch_of_dapo_is_learnt_and_a_large_step_forecast_in_time():
    """17,398 prompts x 16; then 100,000 samples at once. Bounds are loose: the machine may be busy."""
    rng = np.random.default_rng(0)
    predictor = LengthPredictor(20480)
    lengths = np.minimum(np.exp(rng.normal(8, 0.6, (17398, 1)) + rng.normal(0, 0.3, (17398, 16))), 20480).astype(int)
    began = time.process_time()
    for prompt in range(0, 17398, 4):
        for tokens in lengths[prompt]:
            predictor.ended(prompt, tokens)
        predictor.close(prompt)
    learning = time.process_time() - began
    began = time.process_time()
    forecast = predictor.forecast(np.repeat(np.arange(6250), 16), rng.integers(0, 4000, 100_000))
    forecast.mean(), forecast.quantile(0.9)
    forecasting = time.process_time() - began
    assert max(learning / 10, forecasting / 3) < 1, (learning, forecasting)


def ranked_world(miss: float, bias: float, prompts: int = 400, word: bool = True) -> tuple[float, LengthPredictor]:
    """A first epoch in which a ranker tells of each prompt, off by so much: how it then orders the second half."""
    world, predictor, rng = World(prompts, seed=3), LengthPredictor(20000), np.random.default_rng(4)
    locations = world.location - bias + miss * rng.standard_normal(prompts)
    lengths, means = world.visit(8), np.empty(prompts)
    for prompt in range(prompts):
        if word:
            predictor.rank(prompt, locations[prompt])
        means[prompt] = predictor.forecast([prompt]).mean()[0]
        for tokens in lengths[prompt]:
            predictor.ended(prompt, int(tokens))
        predictor.close(prompt)
    half = prompts // 2
    return rank_correlation(means[half:], lengths[half:].mean(axis=1)), predictor


def test_a_rankers_word_stands_for_the_history_that_is_not_there():
    assert ranked_world(0.2, 0.0)[0] > 0.8
    assert abs(ranked_world(0.2, 0.0, word=False)[0]) < 0.3


@pytest.mark.parametrize(("miss", "bias"), [(0.1, 0.0), (0.4, 0.5), (0.3, -0.4)])
def test_how_far_off_a_ranker_is_is_learnt(miss: float, bias: float):
    _, predictor = ranked_world(miss, bias)
    assert predictor._bias.value == pytest.approx(bias, abs=0.1)
    assert predictor._miss.value == pytest.approx(miss**2, abs=0.06)
    # of another ranker nothing is known yet
    predictor.rank("new", 6.0, ranker=1)
    assert predictor._bias.value == 0


def test_a_rankers_word_ends_with_the_first_group_and_moves_nothing_that_is_known():
    _, predictor = ranked_world(0.2, 0.0)
    before = predictor.forecast([5]).mean()
    predictor.rank(5, 1.0)
    predictor.rank("unfit", float("nan"))
    assert predictor.forecast([5]).mean() == before
    assert not predictor._ranked


def test_a_rankers_words_survive_a_restart():
    _, predictor = ranked_world(0.2, 0.3)
    predictor.rank("waits", 7.0)
    again = LengthPredictor(20000)
    again.load_state_dict(json.loads(json.dumps(predictor.state_dict())))
    names = ["waits", 7, "never"]
    np.testing.assert_allclose(again.forecast(names).mean(), predictor.forecast(names).mean())


def test_ranks_are_scipys():
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    for _ in range(20):
        predicted, lengths = rng.integers(0, 9, (2, 50)).astype(float)  # ties
        assert rank_correlation(predicted, lengths) == pytest.approx(spearmanr(predicted, lengths).statistic)
