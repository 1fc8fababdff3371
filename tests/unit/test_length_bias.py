"""benchmarks.length_bias and sorted_gradients: no schedule biases an epoch's lengths; orders are what they say."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import length_bias, sorted_gradients, traces

TRACE = sorted(traces.FOLDER.glob("*.parquet"))[0]


@pytest.mark.parametrize("arm", [arm for arm in length_bias.ARMS if not arm.endswith("fresh")])
def test_lengths_are_unbiased_over_an_epoch(arm: str) -> None:
    row = length_bias.measure(Path(TRACE), arm, "group", 3)
    assert abs(row["shift"]) < 0.03, "the draw of lengths"


def test_updates_of_a_load_have_whole_groups_the_short_first():
    lengths = np.arange(32) % 7 + np.repeat([9, 2, 40, 20], sorted_gradients.GROUP)
    found = dict(sorted_gradients.orders(lengths))["groups"]
    assert sorted(found) == list(range(32))
    assert [int(i) // sorted_gradients.GROUP for i in found[:: sorted_gradients.GROUP]] == [1, 0, 3, 2]
    assert all(len({int(i) // sorted_gradients.GROUP for i in part}) == 1 for part in np.split(found, 4))
