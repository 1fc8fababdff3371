"""Counts of the next tokens of contexts in all responses."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import kernels
from verl_rhyme.drafting.adaptive import AdaptiveDrafter
from verl_rhyme.drafting.kernels import MAX_COUNT, ORDERS, WAYS
from verl_rhyme.drafting.policy import DecodeStep

pytestmark = pytest.mark.xdist_group("kernels")


def counted(texts, entries=1 << 16):
    counts = np.zeros(entries, dtype=np.int64)
    for text in texts:
        kernels._count(counts, np.array(text, dtype=np.int32), 0, len(text))
    return counts


def counts_after(counts, context):
    """Return {(order, token): count} of the tokens counted after ``context``."""
    context = np.array(context, dtype=np.int32)
    keys = np.zeros(len(ORDERS), dtype=np.int64)
    result = {}
    for order in range(kernels._contexts(context, len(context), keys)):
        start, mark = kernels._bucket(counts, keys[order])
        for entry in counts[start : start + WAYS].tolist():
            if entry >> 40 == mark:
                result[ORDERS[order], entry & 0xFFFFFFFF] = (entry >> 32) & 0xFF
    return result


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 3), max_size=80), max_size=4), st.lists(st.integers(0, 3), max_size=12))
def test_counts_match_brute_force(texts, context):
    expected = Counter()
    for text in texts:
        for i in range(len(text)):
            for order in ORDERS:
                if order <= min(i, len(context)) and text[i - order : i] == context[len(context) - order :]:
                    expected[order, text[i]] += 1
    assert counts_after(counted(texts), context) == expected


def test_counts_are_halved_before_they_overflow():
    counts = counted([[0, 1] * (2 * MAX_COUNT), [0, 2]])
    after = counts_after(counts, [0])
    assert MAX_COUNT // 2 < after[1, 1] <= MAX_COUNT
    assert after[1, 2] == 1


def test_full_bucket_keeps_frequent_and_drops_formerly_frequent_tokens():
    counts = counted([[0, 1] * 6], entries=WAYS)
    rng = np.random.default_rng(0)
    rare = rng.integers(2, 1 << 30, 3)
    kernels._count(counts, rare.astype(np.int32), 1, 3)
    assert counts_after(counts, [0])[1, 1] > 1
    for _ in range(60):
        text = rng.integers(2, 1 << 30, 12).astype(np.int32)
        kernels._count(counts, text, 1, 12)
    assert (1, 1) not in counts_after(counts, [0])
    assert len(counts) == WAYS


@pytest.mark.parametrize("seed", range(3))
def test_sampled_tokens_are_counted_once(seed):
    """Rows come in any order, some missing, and are overwritten before a deferred call counts; prompts and texts of
    restarted requests are not counted.
    """
    rng, rows = np.random.default_rng(seed), 6
    drafter = AdaptiveDrafter(DraftingConfig(live_tokens=1 << 16), lambda key: None, 4, threads=3)
    counts, deferred = np.zeros_like(drafter._live.arrays.counts), []
    drafter._threads.defer = deferred.append
    tokens, lengths, seen = np.zeros((rows, 600), np.int32), rng.integers(1, 12, rows), [0] * rows
    tokens[:] = rng.integers(0, [5, 300, 152_064][seed], tokens.shape)
    for row in range(rows):
        drafter.start(str(row), bytes([row % 2]) * 16)
    for _ in range(40):
        batch = rng.permutation(rows)[: rng.integers(1, rows + 1)]
        for row in batch:
            if rng.random() < 0.05:
                drafter.start(str(row), bytes([row % 2]) * 16)
                seen[row] = 0
            lengths[row] += rng.integers(1, 9)
        nothing, budget = np.zeros(len(batch), int), int(rng.choice([0, 5, 10_000]))
        limits = np.full(len(batch), 32)
        names = [str(row) for row in batch]
        drafter.step(DecodeStep(names, batch, tokens, lengths[batch], nothing, nothing, limits, budget))
        kept = tokens.copy()
        tokens[:] = 7
        deferred.pop()()
        tokens[:] = kept
        for row in batch:  # the whole text in one call
            text = tokens[row, : lengths[row]].copy()
            kernels._count(counts, text, seen[row] or len(text) - 1, len(text))
            seen[row] = len(text)
    np.testing.assert_array_equal(drafter._live.arrays.counts, counts)
