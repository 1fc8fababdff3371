"""Language models as rankers, on prompts whose lengths a few tokens determine."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.unit.lengths.worlds import SMALL, VOCABULARY, pairs
from verl_rhyme.lengths import ranker
from verl_rhyme.lengths.pairs import Pairs

pytestmark = pytest.mark.slow  # they train


@pytest.fixture(scope="module")
def trained() -> ranker.LengthRanker:
    return ranker.fit(ranker.tiny(VOCABULARY, **SMALL), pairs(256), epochs=8, rate=1e-2)


def test_it_finds_the_longest_of_prompts_never_seen(trained) -> None:
    new = pairs(256, seed=1)
    found = new.evaluate(trained.expected(new.prompts))
    assert found["rank_correlation"] > 0.8
    assert found["share_20"] > 0.75


def test_it_predicts_lengths(trained) -> None:
    new = pairs(256, seed=2)
    expected = trained.expected(new.prompts)
    assert abs(float((expected - new.locations).mean())) < 0.15
    assert float((expected - new.locations).std()) < 0.6 * float(new.locations.std())


def test_padding_and_neighbours_change_no_forecast(trained) -> None:
    prompts = pairs(40).prompts
    alone = np.concatenate([trained.expected([prompt]) for prompt in prompts])
    np.testing.assert_allclose(trained.expected(prompts), alone, atol=1e-4)


def test_long_prompts_are_cut_in_the_middle_and_unknown_ids_folded(monkeypatch) -> None:
    made = ranker.tiny(VOCABULARY, **SMALL)
    monkeypatch.setattr(ranker, "_MOST_TOKENS", 8)
    assert made._cut(np.arange(20)).tolist() == [0, 1, 2, 3, 16, 17, 18, 19]
    assert made._cut(np.array([VOCABULARY + 2])).tolist() == [2]
    assert ranker.tiny_for(Pairs.from_rows([([150_000, 7], [3])])).vocabulary == ranker._VOCABULARY


def test_a_saved_ranker_is_the_same_and_pickles_nothing(trained, tmp_path) -> None:
    new = pairs(16, seed=3)
    trained.save(tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} <= {".json", ".safetensors"}
    again = ranker.load(tmp_path)
    np.testing.assert_allclose(again.expected(new.prompts), trained.expected(new.prompts), atol=1e-5)
    assert again.trained == trained.trained


def test_unreadable_rankers_say_why(trained, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"no length ranker in it.*ranker\.json"):
        ranker.load(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json"):
        ranker.from_folder(tmp_path)
    trained.save(tmp_path)
    about = (tmp_path / ranker.ABOUT).read_text()
    (tmp_path / ranker.ABOUT).write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        ranker.load(tmp_path)
    (tmp_path / ranker.ABOUT).write_text(about)
    (tmp_path / ranker.HEAD).write_bytes(b"torn")
    with pytest.raises(ValueError, match="cannot be read"):
        ranker.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors"):
        ranker.from_folder(tmp_path)


def test_training_starts_from_the_number_of_tokens() -> None:
    rng = np.random.default_rng(0)
    known = Pairs.from_rows((rng.integers(4, VOCABULARY, size), [3 * size] * 2) for size in rng.permutation(64) + 8)
    # The head's own rate is greater, for two steps.
    made = ranker.fit(ranker.tiny(VOCABULARY, **SMALL), known, epochs=1, rate=1e-9)
    assert known.evaluate(made.expected(known.prompts))["rank_correlation"] > 0.95
    np.testing.assert_allclose(made.expected(known.prompts), np.log(known.means), atol=0.4)


@pytest.mark.parametrize(
    ("prompts", "how", "error"),
    [(16, {"rate": 0}, "positive rate"), (16, {"epochs": 0}, "one epoch"), (4, {}, "eight prompts")],
)
def test_invalid_settings_are_rejected(prompts, how, error) -> None:
    with pytest.raises(ValueError, match=error):
        ranker.fit(ranker.tiny(VOCABULARY, **SMALL), pairs(prompts), **how)
