"""The order of a batch with verl's padding in it."""

import numpy as np

from verl_rhyme.trainer.sorted import _spread_padding


def tags(lengths, padding=0):
    real = [{"response_len": length, "is_padding": False} for length in lengths]
    return [*real, *({"response_len": 1, "is_padding": True} for _ in range(padding))]


def test_padding_is_spread_and_the_rest_sorted():
    lengths = np.random.default_rng(0).permutation(np.arange(1, 31))
    order = _spread_padding(tags(lengths, padding=6), 1.0, np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(36))
    places = np.flatnonzero(order >= 30)
    assert (np.diff(places) == 6).all(), "each mini-batch of six has one"
    assert lengths[order[order < 30]].tolist() == list(range(1, 31))


def test_without_padding_nothing_is_inserted():
    order = _spread_padding(tags([3, 1, 2]), 1.0, np.random.default_rng(0))
    assert order.tolist() == [1, 2, 0]
