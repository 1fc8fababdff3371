"""The gate of the draft head: on where it is profitable, by width, and both ways measured for ever."""

import numpy as np
import pytest

from verl_rhyme.drafting.guesses import HeadGate


def run(gate, rows, steps, rate, rng):
    """Which of the steps asked; ``rate`` gives tokens a second with and without."""
    asked = []
    for _ in range(steps):
        headed = gate.asks(rows)
        asked.append(headed)
        seconds = rng.uniform(0.8, 1.2)
        gate.observe(rows, headed, int(1000 * rows * rate(headed) * seconds), 1000 * seconds)
    return np.array(asked)


@pytest.mark.parametrize("better", [True, False])
def test_takes_the_faster_way_but_for_trials(better):
    gate = HeadGate()
    asked = run(gate, 16, 2000, lambda headed: 1.2 if headed == better else 1.0, np.random.default_rng(0))
    assert (asked[64:] == better).mean() > 0.9
    assert 0 < (asked[64:] != better).mean() < 0.1, "the other way is tried again"


def test_changes_its_mind_when_the_head_has_learnt():
    gate, rng = HeadGate(), np.random.default_rng(1)
    run(gate, 4, 500, lambda headed: 0.8 if headed else 1.0, rng)
    asked = run(gate, 4, 3000, lambda headed: 1.3 if headed else 1.0, rng)
    assert asked[-500:].mean() > 0.9


def test_wide_and_narrow_batches_are_decided_apart():
    gate, rng = HeadGate(), np.random.default_rng(2)
    for _ in range(20):
        narrow = run(gate, 2, 50, lambda headed: 1.3 if headed else 1.0, rng)
        wide = run(gate, 200, 50, lambda headed: 0.9 if headed else 1.0, rng)
    assert narrow.mean() > 0.7
    assert wide.mean() < 0.3
