"""Hard bounds and the sharing of a budget."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl_rhyme.drafting.bounds import batch_budget, longest_draft, request_limits, sampler_bytes, share

sizes = {"vocab": st.integers(1, 300_000), "rows": st.integers(1, 1024), "memory": st.integers(0, 16 << 30)}


@given(**sizes, kmax=st.integers(0, 128))
def test_budget_is_the_largest_that_fits(vocab, rows, memory, kmax):
    budget = batch_budget(vocab, rows, kmax, memory)
    if budget:
        assert sampler_bytes(vocab, rows, budget, kmax) <= memory
    assert sampler_bytes(vocab, rows, budget + 1, kmax) > memory


@given(**sizes, cap=st.integers(1, 128))
def test_longest_draft_leaves_room_for_one_of_its_length(vocab, rows, memory, cap):
    k = longest_draft(vocab, rows, memory, cap)
    assert 0 <= k <= cap
    if k:
        assert batch_budget(vocab, rows, k, memory) >= k
    if k < cap:
        assert batch_budget(vocab, rows, k + 1, memory) < k + 1


def test_a_request_never_drafts_past_its_end():
    limits = request_limits(
        lengths=np.array([10, 10, 10, 95, 99, 100, 10]),
        generated=np.array([0, 5, 9, 0, 0, 0, 20]),
        max_tokens=np.array([1000, 8, 10, 1000, 1000, 1000, 10]),
        max_model_len=100,
        cap=32,
    )
    assert limits.tolist() == [32, 2, 0, 4, 0, 0, 0]


def test_vllms_own_limit():
    assert request_limits(np.array([0]), np.array([0]), np.array([10**6]), 10**6, 1000).tolist() == [128]


def round_robin(wanted, budget):
    granted = [0] * len(wanted)
    while budget and granted != wanted:
        for i, want in enumerate(wanted):
            if budget and granted[i] < want:
                granted[i] += 1
                budget -= 1
    return granted


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(0, 500))
def test_share_is_a_round_robin(wanted, budget):
    assert share(np.array(wanted, dtype=np.int64), budget).tolist() == round_robin(wanted, budget)
