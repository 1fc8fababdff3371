"""benchmarks.studies.length_bias: schedules train each response of an epoch as it was drawn, and longer ones less where
it is drawn again."""

import numpy as np
import pytest

from benchmarks.studies import length_bias


@pytest.mark.parametrize("unit", ["group", "trajectory"])
def test_over_an_epoch_lengths_are_what_was_drawn_and_shorter_where_it_is_drawn_again(unit):
    spread = np.random.default_rng(0).lognormal(5, 0.6, (64, 1)) * np.random.default_rng(1).lognormal(0, 0.6, (64, 32))
    pools = list(spread.astype(int) + 1)
    for arm in length_bias.ARMS:
        updates, drawn, engine = length_bias.trained_lengths(pools, arm, unit, np.random.default_rng(2))
        assert [len(lengths) for lengths in updates] == [64] * 8, "each prompt is trained once"
        trained = np.concatenate(updates)
        if arm.endswith("fresh"):
            assert trained.mean() < drawn.mean()
        else:
            assert sorted(trained) == sorted(drawn.ravel())
        assert (engine.made == trained.sum()) == (not arm.startswith(("full, k = 0", "tail batching", "sorted, k = 0")))
