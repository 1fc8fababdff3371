"""Prompts with the lengths of their responses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.lengths.worlds import pairs
from verl_rhyme.lengths.pairs import Pairs, identity


@given(st.integers(2, 60), st.integers(0, 1000))
@settings(max_examples=25)
def test_held_out_prompts_stay_held_out_when_others_are_added(count, seed) -> None:
    known = Pairs.from_rows(([i, seed], [1]) for i in range(count + 40))
    before, after = known.select(range(count)).split(0.15), known.split(0.15)
    sides = [[{identity(prompt) for prompt in side.prompts} for side in split] for split in (before, after)]
    assert all(sides[0])
    assert len(sides[0][0] | sides[0][1]) == count
    border = max(sides[1][1])
    assert all((name <= border) == (name in sides[1][1]) for side in sides[0] for name in side), "one border for all"


def test_pairs_are_split_and_evaluated() -> None:
    known = pairs(20)
    kept, aside = known.split(0.25)
    assert (len(kept), len(aside)) == (15, 5)
    assert not {identity(p) for p in kept.prompts} & {identity(p) for p in aside.prompts}
    assert len(known.excluding({identity(p) for p in kept.prompts})) == 5
    found = known.evaluate(known.means)
    assert found["share_20"] == 1.0
    assert found["rank_correlation"] == pytest.approx(1.0)
    assert found["oracle_5"] == found["recall_5"] < 1
    assert known.evaluate(-known.means)["recall_20"] < 0.1
    assert Pairs.from_rows([([7], [5, 0])]).lengths[0].tolist() == [5, 1]
