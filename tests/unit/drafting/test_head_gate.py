"""The gate of the draft head: open if the head is profitable, by batch width, with repeated trials of both choices."""

import numpy as np
import pytest

from verl_rhyme.drafting.head_interface import HeadGate


def run(gate, rows, steps, rate, rng):
    """Return which steps used the head; ``rate`` gives the tokens per second with and without it."""
    used = []
    for _ in range(steps):
        headed = gate.use_head(rows)
        used.append(headed)
        seconds = rng.uniform(0.8, 1.2)
        gate.observe(rows, headed, int(1000 * rows * rate(headed) * seconds), 1000 * seconds)
    return np.array(used)


@pytest.mark.parametrize("better", [True, False])
def test_takes_the_faster_choice_except_in_trials(better):
    gate = HeadGate()
    used = run(gate, 16, 2000, lambda headed: 1.2 if headed == better else 1.0, np.random.default_rng(0))
    assert (used[64:] == better).mean() > 0.9
    assert 0 < (used[64:] != better).mean() < 0.1, "the other choice is tried again"


def test_opens_when_the_head_improves():
    gate, rng = HeadGate(), np.random.default_rng(1)
    run(gate, 4, 500, lambda headed: 0.8 if headed else 1.0, rng)
    used = run(gate, 4, 3000, lambda headed: 1.3 if headed else 1.0, rng)
    assert used[-500:].mean() > 0.9


def test_wide_and_narrow_batches_are_decided_separately():
    gate, rng = HeadGate(), np.random.default_rng(2)
    for _ in range(20):
        narrow = run(gate, 2, 50, lambda headed: 1.3 if headed else 1.0, rng)
        wide = run(gate, 200, 50, lambda headed: 0.9 if headed else 1.0, rng)
    assert narrow.mean() > 0.7
    assert wide.mean() < 0.3
