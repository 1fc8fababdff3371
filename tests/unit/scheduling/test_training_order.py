import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rhyme.scheduling.training_order import arrange, by_length, sortedness


def lengths_of(count, seed=0):
    return np.random.default_rng(seed).integers(1, 10_000, count)


def test_shortest_come_first_or_all_are_shuffled():
    lengths = lengths_of(400)
    orders = [by_length(lengths, np.random.default_rng(i), shuffled=True) for i in range(20)]
    assert abs(np.mean([sortedness(lengths[order]) for order in orders])) < 0.05
    assert sortedness(lengths[by_length(lengths, np.random.default_rng(0))]) == 1


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [([], 1), ([4], 1), ([2, 2], 1), ([1, 2, 2, 3], 1), ([3, 2, 2, 1], -1), ([1, 3, 2], 1 / 3), ([2, 1, 2], 0)],
)
def test_only_pairs_that_differ_are_in_an_order(lengths, wanted):
    assert sortedness(lengths) == pytest.approx(wanted)


@given(st.lists(st.integers(1, 50), max_size=60), st.booleans(), st.integers(0, 5))
def test_it_is_a_permutation(lengths, shuffled, seed):
    order = by_length(lengths, np.random.default_rng(seed), shuffled)
    assert sorted(order.tolist()) == list(range(len(lengths)))


def test_equal_lengths_are_shuffled():
    orders = {tuple(by_length([5] * 6, np.random.default_rng(seed)).tolist()) for seed in range(50)}
    assert len(orders) > 25


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 9))
def test_mini_batches_follow_the_order_on_every_rank(ranks, share, batches, seed):
    mini_batch = ranks * share
    tokens = lengths_of(mini_batch * batches, seed)
    order = np.random.default_rng(seed).permutation(len(tokens))
    laid = arrange(order, tokens, ranks, mini_batch)
    parts = laid.reshape(ranks, batches, share)  # as verl cuts it
    for k in range(batches):
        assert set(parts[:, k].ravel()) == set(order[k * mini_batch : (k + 1) * mini_batch])
    place = {index: at for at, index in enumerate(order)}
    for part in parts:
        assert [place[i] for i in part.ravel()] == sorted(place[i] for i in part.ravel())


def test_ranks_have_like_work():
    tokens = lengths_of(512)
    laid = arrange(np.argsort(tokens), tokens, 4, 128)
    work = tokens[laid.reshape(4, 4, 32)].sum(axis=2)
    assert (work.max(axis=0) / work.min(axis=0)).max() < 1.05


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="10 trajectories do not split into mini-batches of 4 over 2 ranks"):
        arrange(range(10), np.ones(10), 2, 4)
