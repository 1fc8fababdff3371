"""Inversion of the cumulative distribution samples from it despite rounding, and never a masked token."""

import numpy as np
import pytest
from scipy import stats

from verl_rhyme.sampling.inversion import invert, ranks
from verl_rhyme.sampling.noise import key_of, uniforms


def keys(n):
    return np.array([key_of("test", i) for i in range(n)], dtype=np.uint64)


@pytest.mark.parametrize("vocabulary", [1, 2, 1023, 1024, 1025, 5000, 151_936])
def test_draws_the_first_token_whose_cumulative_weight_exceeds_the_uniform(vocabulary):
    rng = np.random.default_rng(vocabulary)
    rows = 32
    weights = rng.exponential(1.0, (rows, vocabulary)).astype(np.float32) ** 4
    weights[rng.random(weights.shape) < 0.5] = 0
    weights[:, rng.integers(vocabulary)] += 1e-3
    u = rng.random(rows)
    u[:3] = 1e-300, 1 - 2**-53, 0.5
    cumulative = weights.cumsum(axis=1, dtype=np.float64)
    tokens = invert(weights, u)
    assert (np.take_along_axis(weights, tokens[:, None], 1) > 0).all()
    at = np.take_along_axis(cumulative, tokens[:, None], 1)[:, 0] / cumulative[:, -1]
    mass = np.take_along_axis(weights, tokens[:, None], 1)[:, 0] / cumulative[:, -1]
    # float32 sums may move a border by rounding only.
    assert (at > u - 1e-6).all()
    assert (at - mass < u + 1e-6).all()


def test_rows_without_weight_give_a_token():
    weights = np.zeros((3, 2000), dtype=np.float32)
    weights[1] = np.nan
    weights[2, 1999] = 1
    assert invert(weights, np.array([0.5, 0.5, 1 - 2**-53])).tolist() == [0, 0, 1999]


def test_uniforms_are_uniform_and_within_bounds():
    sample = uniforms(keys(20_000), np.arange(20_000) % 7)
    assert 0 < sample.min() < sample.max() < 1
    assert stats.kstest(sample, "uniform").pvalue > 1e-4
    along = uniforms(np.repeat(keys(1), 20_000), np.arange(20_000))
    assert stats.kstest(along, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(along[1:], along[:-1])[0, 1]) < 0.03


def test_ranks_count_entries_that_are_at_least_as_likely():
    logits = np.random.default_rng(0).integers(-5, 5, (50, 700)).astype(np.float32)
    tokens = np.random.default_rng(1).integers(0, 700, 50)
    expected = (logits >= logits[np.arange(50), tokens][:, None]).sum(1)
    assert (ranks(logits, tokens) == expected).all()
