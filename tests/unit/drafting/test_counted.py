"""Counting of sampled tokens against brute force: every token of every row counts once after each of its contexts."""

import threading

import numpy as np
import pytest

from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import kernels
from verl_rhyme.drafting.adaptive import AdaptiveDrafter
from verl_rhyme.drafting.policy import DecodeStep
from verl_rhyme.engine.threads import PlanningThreads

pytestmark = pytest.mark.xdist_group("kernels")


@pytest.mark.parametrize("seed", range(3))
def test_sampled_tokens_are_counted_once(seed):
    """Rows come in any order, some missing; prompts and texts of restarted requests are not counted."""
    rng, rows = np.random.default_rng(seed), 6
    pool = PlanningThreads(3)
    drafter = AdaptiveDrafter(DraftingConfig(live_tokens=1 << 16), lambda key: None, 4, threads=pool)
    counts = np.zeros_like(drafter._live.arrays.counts)
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
        for row in batch:  # the whole text in one call
            text = tokens[row, : lengths[row]].copy()
            kernels._count(counts, text, seen[row] or len(text) - 1, len(text))
            seen[row] = len(text)
    pool.run([])
    np.testing.assert_array_equal(drafter._live.arrays.counts, counts)
    pool.close()


def test_later_calls_run_in_order():
    """This holds without a plan in between, as for a resting drafter."""
    pool, hold, ended = PlanningThreads(3), threading.Event(), []
    pool.defer(lambda: (hold.wait(10), ended.append(1)))
    threading.Timer(0.1, hold.set).start()
    pool.defer(lambda: ended.append(2))
    pool.run([])
    assert ended == [1, 2]
    pool.close()


def test_later_call_runs_at_once_if_no_thread_starts(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    pool, ended = PlanningThreads(2), []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool.defer(lambda: ended.append(1))
    assert ended == [1]
    assert pool.count == 1
    pool.run([lambda: ended.append(2)])
    assert ended == [1, 2]
