"""Rankers on prompts whose lengths a few tokens determine; calibration; saved files and errors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.lengths import boosting, ranker
from verl_rhyme.lengths.boosting import Boosting
from verl_rhyme.lengths.calibration import Calibration
from verl_rhyme.lengths.pairs import Pairs, identity, joined

pytestmark = pytest.mark.slow  # they train

VOCABULARY = 24
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def world(prompts: int, samples: int = 4, seed: int = 0) -> Pairs:
    """Prompts of a dozen tokens; each 3 in one makes responses longer by half, on average."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(prompts):
        prompt = rng.integers(4, VOCABULARY, rng.integers(11, 14))
        prompt[rng.random(len(prompt)) < rng.random() * 0.5] = 3
        location = 3 + 0.4 * (prompt == 3).sum()
        rows.append((prompt, np.exp(location + 0.2 * rng.standard_normal(samples)).astype(int)))
    return Pairs.of(rows)


@pytest.fixture(scope="module")
def trained() -> dict[str, ranker.LengthRanker]:
    known = world(256)
    how = {"epochs": 8, "rate": 1e-2}
    return {
        loss: ranker.fit(ranker.tiny(VOCABULARY, **SMALL), known, ranker.Training(loss=loss, **how))
        for loss in ranker.LOSSES
    }


@pytest.mark.parametrize("loss", ranker.LOSSES)
def test_it_finds_the_longest_of_prompts_never_seen(trained, loss) -> None:
    new = world(256, seed=1)
    found = new.recalls(trained[loss].scores(new.prompts))
    assert found["rank_correlation"] > 0.8
    assert found["share_20"] > 0.75


@pytest.mark.parametrize("loss", ranker.LOSSES)
def test_its_scores_mean_lengths(trained, loss) -> None:
    new = world(256, seed=2)
    expected = trained[loss].expected(new.prompts)
    assert abs(float((expected - new.locations).mean())) < 0.15
    assert float((expected - new.locations).std()) < 0.6 * float(new.locations.std())


def test_an_untrained_ranker_gives_no_forecast() -> None:
    new, made = world(32), ranker.tiny(VOCABULARY, **SMALL)
    assert not made.scores(new.prompts).any()
    with pytest.raises(ValueError, match="not trained"):
        made.expected(new.prompts)


def test_padding_and_neighbours_change_no_score(trained) -> None:
    prompts = world(40).prompts
    alone = np.concatenate([trained["listwise"].scores([prompt]) for prompt in prompts])
    np.testing.assert_allclose(trained["listwise"].scores(prompts), alone, atol=1e-4)


def test_long_prompts_are_cut_in_the_middle_and_unknown_ids_folded() -> None:
    made = ranker.tiny(VOCABULARY, **SMALL)
    made.most = 8
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
    new = world(16, seed=3)
    for name, one in {"model": trained["listwise"], "trees": Boosting.fit(world(64))}.items():
        folder = tmp_path / name
        one.save(folder)
        assert {file.suffix for file in folder.iterdir()} <= {".json", ".safetensors"}
        again = ranker.load(folder) if name == "model" else Boosting.load(folder)
        np.testing.assert_allclose(again.expected(new.prompts), one.expected(new.prompts), atol=1e-5)
        assert again.trained == one.trained
    assert ranker.load(tmp_path / "model").about == trained["listwise"].about


def test_unreadable_rankers_say_why(trained, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"no length ranker in it.*ranker\.json"):
        ranker.load(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json"):
        ranker.from_folder(tmp_path)
    with pytest.raises(ValueError, match="boosted trees"):
        Boosting.load(tmp_path)
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


@given(st.integers(2, 60), st.integers(0, 1000))
@settings(max_examples=25)
def test_held_out_prompts_stay_held_out_when_others_are_added(count, seed) -> None:
    known = Pairs.of(([i, seed], [1]) for i in range(count + 40))
    before, after = known.take(range(count)).held_out(0.15), known.held_out(0.15)
    sides = [[{identity(prompt) for prompt in side.prompts} for side in split] for split in (before, after)]
    assert all(sides[0])
    assert len(sides[0][0] | sides[0][1]) == count
    border = max(sides[1][1])
    assert all((name <= border) == (name in sides[1][1]) for side in sides[0] for name in side), "one border for all"


def test_training_ends_when_its_time_has_passed() -> None:
    gone = iter([0.2, 0.5, 1.0, 9.0])
    known = world(64)
    made = ranker.fit(ranker.tiny(VOCABULARY, **SMALL), known, ranker.Training(batch=16), gone=lambda: next(gone))
    assert next(gone) == 9.0
    assert made.calibration is not None
    assert made.about["epochs"] <= 1


@pytest.mark.parametrize("loss", ranker.LOSSES)
def test_training_starts_from_the_number_of_tokens(loss) -> None:
    rng = np.random.default_rng(0)
    known = Pairs.of((rng.integers(4, VOCABULARY, size), [3 * size] * 2) for size in rng.permutation(64) + 8)
    how = ranker.Training(loss=loss, epochs=1, rate=1e-9)  # the head's own rate is greater, of two steps
    made = ranker.fit(ranker.tiny(VOCABULARY, **SMALL), known, how)
    assert known.recalls(made.scores(known.prompts))["rank_correlation"] > 0.95
    np.testing.assert_allclose(made.expected(known.prompts), np.log(known.means), atol=0.4)


def test_a_large_vocabulary_is_folded() -> None:
    assert ranker.tiny_for(Pairs.of([([150_000, 7], [3])])).vocabulary == ranker._VOCABULARY


def test_invalid_settings_are_rejected() -> None:
    with pytest.raises(ValueError, match="listwise"):
        ranker.Training(loss="lambda")
    with pytest.raises(ValueError, match="two prompts"):
        ranker.Training(batch=1)
    with pytest.raises(ValueError, match="eight prompts"):
        ranker.fit(ranker.tiny(VOCABULARY, **SMALL), world(4), ranker.Training())


def test_boosting_finds_the_longest_and_its_trees_are_scikit_learns() -> None:
    from sklearn.ensemble import GradientBoostingRegressor

    known, new = world(256), world(256, seed=1)
    ours = Boosting.fit(known)
    assert new.recalls(ours.scores(new.prompts))["rank_correlation"] > 0.7
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
    np.testing.assert_allclose(ours.scores(new.prompts), wanted, atol=1e-6)


def test_boosting_extrapolates_beyond_known_prompts() -> None:
    """Responses twice as long as their prompts; those asked are longer than all that were known."""
    rng = np.random.default_rng(0)
    known, new = (
        Pairs.of((rng.integers(4, 24, size), [2 * size] * 2) for size in sizes)
        for sizes in (rng.integers(10, 60, 256), range(60, 240, 20))
    )
    told = np.exp(Boosting.fit(known).scores(new.prompts))
    np.testing.assert_allclose(told, new.means, rtol=0.1)
    alike = Pairs.of(([7, 8, i], [5 + i % 2]) for i in range(32))
    assert np.isfinite(Boosting.fit(alike).scores(alike.prompts)).all()


@given(st.integers(0, 1000), st.integers(2, 60))
@settings(max_examples=40)
def test_calibration_never_reverses_the_order(seed, count) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal(count)
    known = Pairs.of(([i], np.exp(rng.normal(4 + s, 1, 3)).astype(int)) for i, s in enumerate(scores))
    made = Calibration.fit(scores, known)
    at = np.sort(rng.standard_normal(50))
    for told in (made.location(at), made.mean(at), made.quantile(at, 0.9)):
        assert (np.diff(told) >= -1e-9).all()
        assert np.isfinite(told).all()
    assert (made.quantile(at, 0.1) <= made.quantile(at, 0.9)).all()
    beyond = scores.max() + np.arange(1.0, 4.0)
    if np.corrcoef(scores, known.locations)[0, 1] > 0.1:
        assert (np.diff(made.location(beyond)) > 0).all(), "the longest are told apart"
    again = Calibration.from_state(json.loads(json.dumps(made.state_dict())))
    np.testing.assert_array_equal(again.location(at), made.location(at))


def test_a_torn_calibration_is_rejected() -> None:
    state = Calibration.fit(np.arange(8.0), world(8)).state_dict()
    for name, value in (("scores", [1.0]), ("locations", [float("nan")] * len(state["scores"])), ("residuals", [])):
        with pytest.raises(ValueError, match=r"torn|finite"):
            Calibration.from_state({**state, name: value})
    with pytest.raises(ValueError, match="no calibration"):
        Calibration.from_state({})
    with pytest.raises(ValueError, match="slope"):
        Calibration.from_state({**state, "slope": -1.0})


def test_pairs() -> None:
    pairs = world(20)
    kept, aside = pairs.split(0.25, seed=0)
    assert (len(kept), len(aside)) == (15, 5)
    assert not {identity(p) for p in kept.prompts} & {identity(p) for p in aside.prompts}
    assert len(pairs.unseen({identity(p) for p in kept.prompts})) == 5
    assert pairs.recalls(pairs.means)["share_20"] == 1.0
    found = joined({b"a": [1, 2], b"b": [3]}, {b"a": [5, 0], b"c": [9]})
    assert [lengths.tolist() for lengths in found.lengths] == [[5, 1]]
    with pytest.raises(ValueError, match="no tokens"):
        Pairs.of([([], [1])])


def test_calibration_extends_beyond_the_fitted_scores() -> None:
    known = Pairs([np.ones(2, np.int32)] * 20, [np.array([10 * (i + 1)], np.int32) for i in range(20)])
    made = Calibration.fit(np.arange(20.0), known)
    inside, beyond = made.location(np.array([19.0, 25.0]))
    assert beyond > inside


def test_a_token_with_equal_counts_in_all_prompts_is_no_feature() -> None:
    prompts = [np.array(ids, np.int32) for ids in ([5, 1, 1], [5, 2], [5, 3, 3, 3])]
    assert boosting._varying(prompts).tolist() == [1, 2, 3]
