"""Siblings met: counted by hand, and bounded whatever happens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.meetings import meetings


def test_who_began_before_another_ends_is_met_at_the_same_replica_only():
    #          a   b   c: after both   d: elsewhere   e: another group
    began = np.array([0.0, 1.0, 5.0, 0.0, 0.0])
    ended = np.array([0.5, 2.0, 6.0, 9.0, 9.0])
    found = meetings(["p", "p", "p", "p", "q"], [0, 0, 0, 1, 0], began, ended)
    # a: nobody yet; b: a, which has finished; c: both; d, e: nobody
    assert found == (2 / 5, 3 / 5)


def test_no_samples_are_an_error():
    with pytest.raises(ValueError, match="none"):
        meetings([], [], np.zeros(0), np.zeros(0))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(0, 9), st.floats(0.1, 9)), min_size=1))
def test_as_by_looking_at_every_pair(samples):
    group, replica, began, took = map(list, zip(*samples, strict=True))
    began = np.array(began)
    ended = began + np.array(took)
    met = [
        sum(
            j != i and group[j] == group[i] and replica[j] == replica[i] and began[j] < ended[i]
            for j in range(len(samples))
        )
        for i in range(len(samples))
    ]
    found = meetings(group, replica, began, ended)
    assert found.siblings == pytest.approx(np.mean(met))
    assert found.met == pytest.approx(np.mean([n > 0 for n in met]))
