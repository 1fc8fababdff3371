"""Boosted trees as rankers, on prompts whose lengths a few tokens determine."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.ensemble import GradientBoostingRegressor

from tests.unit.lengths.worlds import pairs
from verl_rhyme.lengths import boosting
from verl_rhyme.lengths.boosting import Boosting
from verl_rhyme.lengths.pairs import Pairs

pytestmark = pytest.mark.slow  # they train


def test_boosting_finds_the_longest_and_its_trees_are_scikit_learns(tmp_path) -> None:
    known, new = pairs(256), pairs(256, seed=1)
    ours = Boosting.fit(known)
    found = ours.expected(new.prompts)
    assert new.evaluate(found)["rank_correlation"] > 0.7
    counted = boosting._varying(known.prompts)
    theirs = GradientBoostingRegressor(
        learning_rate=boosting._RATE,
        max_features=boosting._FEATURES,
        random_state=0,
        init="zero",
        **boosting._GROWN,
    )
    slope, height = np.polyfit(np.log([len(prompt) for prompt in known.prompts]), known.locations, 1)

    def line(pairs: Pairs) -> np.ndarray:
        return height + slope * np.log([len(prompt) for prompt in pairs.prompts])

    left = known.locations - line(known)
    theirs.fit(boosting.features(known.prompts, counted), left, sample_weight=np.full(256, 4.0))
    wanted = line(new) + theirs.predict(boosting.features(new.prompts, counted))
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    ours.save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["boosting.safetensors"], "nothing is pickled"
    again = Boosting.load(tmp_path)
    np.testing.assert_array_equal(again.expected(new.prompts), found)
    assert again.trained == ours.trained


def test_boosting_extrapolates_beyond_known_prompts() -> None:
    """Responses twice as long as their prompts; those asked are longer than all that were known."""
    rng = np.random.default_rng(0)
    known, new = (
        Pairs.from_rows((rng.integers(4, 24, size), [2 * size] * 2) for size in sizes)
        for sizes in (rng.integers(10, 60, 256), range(60, 240, 20))
    )
    np.testing.assert_allclose(np.exp(Boosting.fit(known).expected(new.prompts)), new.means, rtol=0.1)
    alike = Pairs.from_rows(([7, 8, i], [5 + i % 2]) for i in range(32))
    assert np.isfinite(Boosting.fit(alike).expected(alike.prompts)).all()


def test_a_token_with_equal_counts_in_all_prompts_is_no_feature() -> None:
    prompts = [np.array(ids, np.int32) for ids in ([5, 1, 1], [5, 2], [5, 3, 3, 3])]
    assert boosting._varying(prompts).tolist() == [1, 2, 3]


def test_unreadable_trees_say_why(tmp_path) -> None:
    from safetensors.numpy import load_file, save_file

    with pytest.raises(ValueError, match="boosted trees"):
        Boosting.load(tmp_path)
    Boosting.fit(pairs(64)).save(tmp_path)
    kept = load_file(tmp_path / boosting.FILE)
    save_file({**kept, "value": kept["value"][1:]}, tmp_path / boosting.FILE)
    with pytest.raises(ValueError, match="incomplete tree"):
        Boosting.load(tmp_path)
