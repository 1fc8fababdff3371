"""Language models as rankers, on prompts whose lengths a few tokens determine."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.lengths.worlds import SMALL, VOCABULARY, pairs
from verl_rhyme.lengths import ranker
from verl_rhyme.lengths.pairs import Pairs

pytestmark = pytest.mark.slow  # they train


@pytest.fixture(scope="module")
def trained() -> dict[str, ranker.LengthRanker]:
    known = pairs(256)
    how = {"epochs": 8, "rate": 1e-2}
    return {loss: ranker.fit(ranker.tiny(VOCABULARY, **SMALL), known, loss=loss, **how) for loss in ranker.LOSSES}


@pytest.mark.parametrize("loss", ranker.LOSSES)
def test_it_finds_the_longest_of_prompts_never_seen(trained, loss) -> None:
    new = pairs(256, seed=1)
    found = new.evaluate(trained[loss].scores(new.prompts))
    assert found["rank_correlation"] > 0.8
    assert found["share_20"] > 0.75


@pytest.mark.parametrize("loss", ranker.LOSSES)
def test_its_scores_mean_lengths(trained, loss) -> None:
    new = pairs(256, seed=2)
    expected = trained[loss].expected(new.prompts)
    assert abs(float((expected - new.locations).mean())) < 0.15
    assert float((expected - new.locations).std()) < 0.6 * float(new.locations.std())


def test_an_untrained_ranker_gives_no_forecast() -> None:
    new, made = pairs(32), ranker.tiny(VOCABULARY, **SMALL)
    assert not made.scores(new.prompts).any()
    with pytest.raises(ValueError, match="not trained"):
        made.expected(new.prompts)


def test_padding_and_neighbours_change_no_score(trained) -> None:
    prompts = pairs(40).prompts
    alone = np.concatenate([trained["listwise"].scores([prompt]) for prompt in prompts])
    np.testing.assert_allclose(trained["listwise"].scores(prompts), alone, atol=1e-4)


def test_long_prompts_are_cut_in_the_middle_and_unknown_ids_folded(monkeypatch) -> None:
    made = ranker.tiny(VOCABULARY, **SMALL)
    monkeypatch.setattr(ranker, "_MOST_TOKENS", 8)
    assert made._cut(np.arange(20)).tolist() == [0, 1, 2, 3, 16, 17, 18, 19]
    assert made._cut(np.array([VOCABULARY + 2])).tolist() == [2]


@given(st.integers(0, 1000), st.integers(2, 12))
@settings(max_examples=25)
def test_losses_have_the_right_minimum(seed, count) -> None:
    lengths = torch.tensor(np.random.default_rng(seed).uniform(1, 500, count), dtype=torch.float32)
    shift, wrong = 3.0, torch.randn(count, generator=torch.Generator().manual_seed(seed))
    right = lengths.log() + shift  # neither minds where scores begin
    for loss, wanted in ((ranker.listwise, lengths), (ranker.margin, lengths.log())):
        assert loss(right, wanted).item() == pytest.approx(0, abs=1e-4)
        assert loss(right + wrong, wanted) >= loss(right, wanted) - 1e-5
    assert ranker.regression(lengths, lengths) == 0


def test_a_saved_ranker_is_the_same_and_pickles_nothing(trained, tmp_path) -> None:
    new, saved = pairs(16, seed=3), trained["listwise"]
    saved.save(tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} <= {".json", ".safetensors"}
    again = ranker.load(tmp_path)
    np.testing.assert_allclose(again.expected(new.prompts), saved.expected(new.prompts), atol=1e-5)
    assert again.trained == saved.trained


def test_unreadable_rankers_say_why(trained, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"no length ranker in it.*ranker\.json"):
        ranker.load(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json"):
        ranker.from_folder(tmp_path)
    trained["margin"].save(tmp_path)
    about = json.loads((tmp_path / ranker.ABOUT).read_text())
    (tmp_path / ranker.ABOUT).write_text(json.dumps({**about, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        ranker.load(tmp_path)
    (tmp_path / ranker.ABOUT).write_text(json.dumps(about))
    (tmp_path / ranker.HEAD).write_bytes(b"torn")
    with pytest.raises(ValueError, match="cannot be read"):
        ranker.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors"):
        ranker.from_folder(tmp_path)


def test_training_ends_when_its_time_has_passed() -> None:
    gone = iter([0.2, 0.5, 1.0, 9.0])
    known = pairs(64)
    made = ranker.fit(ranker.tiny(VOCABULARY, **SMALL), known, batch=16, gone=lambda: next(gone))
    assert next(gone) == 9.0
    assert made.calibration is not None


@pytest.mark.parametrize("loss", ranker.LOSSES)
def test_training_starts_from_the_number_of_tokens(loss) -> None:
    rng = np.random.default_rng(0)
    known = Pairs.from_rows((rng.integers(4, VOCABULARY, size), [3 * size] * 2) for size in rng.permutation(64) + 8)
    # The head's own rate is greater, for two steps.
    made = ranker.fit(ranker.tiny(VOCABULARY, **SMALL), known, loss=loss, epochs=1, rate=1e-9)
    assert known.evaluate(made.scores(known.prompts))["rank_correlation"] > 0.95
    np.testing.assert_allclose(made.expected(known.prompts), np.log(known.means), atol=0.4)


def test_a_large_vocabulary_is_folded() -> None:
    assert ranker.tiny_for(Pairs.from_rows([([150_000, 7], [3])])).vocabulary == ranker._VOCABULARY


@pytest.mark.parametrize(
    ("prompts", "how", "error"),
    [(16, {"loss": "lambda"}, "listwise"), (16, {"batch": 1}, "two prompts"), (4, {}, "eight prompts")],
)
def test_invalid_settings_are_rejected(prompts, how, error) -> None:
    with pytest.raises(ValueError, match=error):
        ranker.fit(ranker.tiny(VOCABULARY, **SMALL), pairs(prompts), **how)
