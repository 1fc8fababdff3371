"""The length ranker beside a run: what it learns, when it trains, what it keeps, and what its failures cost."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from tests.unit.lengths.test_ranker import SMALL, VOCABULARY, world
from verl_rhyme.config import RankerConfig
from verl_rhyme.lengths import ranker
from verl_rhyme.lengths.boosting import Boosting
from verl_rhyme.observability import metrics as names
from verl_rhyme.scheduling.attempts import Attempt
from verl_rhyme.scheduling.expectations import Expectations
from verl_rhyme.trainer import ranking
from verl_rhyme.workers.ranker_service import RankerService

KNOWN = world(96)
PROMPTS = {f"{i:032x}": prompt.tolist() for i, prompt in enumerate(KNOWN.prompts)}
LENGTHS = {key: lengths.tolist() for key, lengths in zip(PROMPTS, KNOWN.lengths, strict=True)}


def service(**options) -> RankerService:
    return RankerService(RankerConfig(enable=True, **{"refresh": 64, "most": 80, **options}), lambda messages: messages)


def some(of: dict, start: int, end: int) -> dict:
    return dict(list(of.items())[start:end])


@pytest.fixture(scope="module")
def learnt() -> RankerService:
    made = service()
    assert made.score(some(PROMPTS, 0, 64)) == ({}, 0)
    assert not made.learn(some(LENGTHS, 0, 63))
    assert made.learn(some(LENGTHS, 63, 64))
    return made


def test_it_scores_what_was_never_answered(learnt) -> None:
    told, number = learnt.score(some(PROMPTS, 48, 96))
    assert number == 1
    assert list(told) == list(PROMPTS)[64:]
    assert np.corrcoef(list(told.values()), KNOWN.locations[64:])[0, 1] > 0.5


def test_the_predictor_goes_by_it(learnt) -> None:
    expectations = Expectations(4096)
    new = list(PROMPTS)[64:]
    alike = expectations.hand({f"uid {key}": key for key in new})
    assert len(set(alike.values())) == 1
    told = expectations.rank(*learnt.score(some(PROMPTS, 64, 96)))
    assert set(told) == {f"uid {key}" for key in new}
    assert np.corrcoef(np.log(list(told.values())), KNOWN.locations[64:])[0, 1] > 0.5
    assert expectations.rank({"nobody": 5.0}, 1) == {}
    assert not expectations.errors


def test_it_keeps_the_latest_prompts_and_trains_on_them() -> None:
    made = service()
    made.score(PROMPTS)
    assert made.learn(LENGTHS)
    assert list(made._pairs) == list(PROMPTS)[16:]
    assert made.learn({"stranger": [3]}) is False


def test_a_checkpoint_has_it_all(learnt, tmp_path) -> None:
    learnt.save(tmp_path)
    again = service()
    assert again.restore(tmp_path)
    new = some(PROMPTS, 64, 96)
    told, number = again.score(new)
    assert number == 1
    np.testing.assert_allclose(list(told.values()), list(learnt.score(new)[0].values()), atol=1e-6)
    assert {k: v[1].tolist() for k, v in again._pairs.items()} == some(LENGTHS, 0, 64)
    assert not service().restore(tmp_path / "none")
    other = service(kind="model")  # the pairs serve another kind, too
    assert other.restore(tmp_path)
    assert other.score(new) == ({}, 0)
    (tmp_path / "ranker" / "pairs.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="no pairs"):
        service().restore(tmp_path)


def test_an_empty_one_is_saved_too(tmp_path) -> None:
    service().save(tmp_path)
    again = service()
    assert again.restore(tmp_path)
    assert again.number == 0


def test_a_model_serves_while_it_is_trained_anew(tmp_path, monkeypatch) -> None:
    ranker.fit(ranker.tiny(VOCABULARY, **SMALL), world(16), ranker.Training(epochs=1)).save(tmp_path)
    made = service(kind="model", model=str(tmp_path))
    assert made.score(some(PROMPTS, 0, 64))[1] == 1  # from the start
    entered, leave = threading.Event(), threading.Event()
    fit = ranker.fit

    def slow(*arguments):
        entered.set()
        assert leave.wait(60)
        return fit(*arguments)

    monkeypatch.setattr(ranker, "fit", slow)
    thread = threading.Thread(target=made.learn, args=(some(LENGTHS, 0, 64),))
    thread.start()
    assert entered.wait(60)
    told, number = made.score(some(PROMPTS, 64, 96))
    assert (len(told), number) == (32, 1)
    leave.set()
    thread.join(60)
    assert made.score(some(PROMPTS, 64, 96))[1] == 2


def test_what_fails_is_counted_and_told_once(monkeypatch, caplog) -> None:
    calls: list[tuple] = []

    class Broken:
        def __getattr__(self, method):
            return SimpleNamespace(remote=lambda *arguments: calls.append((method, *arguments)) or len(calls))

    def get(call, timeout=None):
        raise RuntimeError(f"call {call} failed")

    fake = SimpleNamespace(wait=lambda calls, **_: (list(calls), []), get=get, kill=lambda actor: None)
    monkeypatch.setattr(ranking, "ray", fake)
    hand = ranking.Ranking(RankerConfig(enable=True), None, {}, actor=Broken())
    with caplog.at_level(logging.WARNING):
        hand.loaded({"u": ("key", "text"), "v": ("", "text")}, "coordinator")
        name = Attempt("u", 0, 0).name + "_0"
        hand.answered([name, name, "gone_0_0"], [{"response_len": 7}, {"response_len": 9}, {"response_len": 1}])
        hand.save("folder")
        told = hand.metrics()
    assert calls == [("announce", {"key": "text"}, "coordinator"), ("learn", {"key": [7, 9]}), ("save", "folder")]
    assert told == {names.RANKER_TRAINED: 0.0, names.RANKER_FAILURES: 3.0}
    assert len([r for r in caplog.records if "length ranker" in r.getMessage()]) == 1


def test_boosting_is_what_it_trains_by_default(learnt) -> None:
    assert isinstance(learnt._ranker, Boosting)
