"""The length ranker of a run: its scores and its failures."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import PendingCallsLimitExceeded

from tests.unit.lengths.worlds import SMALL, VOCABULARY, pairs
from verl_rhyme.coordinator.ranker_service import RankerActor, unusable
from verl_rhyme.lengths import ranker
from verl_rhyme.observability import metrics as names
from verl_rhyme.scheduling.expectations import Expectations
from verl_rhyme.trainer import ranking

pytestmark = pytest.mark.slow  # they train a model

NEW = pairs(32, seed=1)
PROMPTS = {f"{i:032x}": prompt.tolist() for i, prompt in enumerate(NEW.prompts)}


class Tokenizer:
    def apply_chat_template(self, messages, **options):
        assert options["add_generation_prompt"]
        return messages


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("ranker")
    ranker.fit(ranker.tiny(VOCABULARY, **SMALL), pairs(128), epochs=6, rate=1e-2).save(path)
    return str(path)


def test_each_prompt_is_scored_once_and_the_coordinator_expects_its_length(folder, monkeypatch) -> None:
    monkeypatch.setattr("os.nice", lambda level: None)
    sent: list[dict[str, float]] = []
    coordinator = SimpleNamespace(rank=SimpleNamespace(remote=sent.append))
    actor = RankerActor(folder, Tokenizer(), {})
    actor.score(dict(list(PROMPTS.items())[:20]), coordinator)
    actor.score(PROMPTS, coordinator)
    actor.score(PROMPTS, coordinator)
    assert [len(each) for each in sent] == [20, 12]
    expectations = Expectations(4096)
    alike = expectations.add_prompts({f"uid {key}": key for key in PROMPTS})
    assert len(set(alike.values())) == 1
    expected = expectations.rank({**sent[0], **sent[1]})
    assert np.corrcoef(np.log([expected[f"uid {key}"] for key in PROMPTS]), NEW.locations)[0, 1] > 0.5
    assert expectations.rank({"nobody": 5.0}) == {}
    assert not expectations.errors


def test_failures_are_counted_and_logged_once(monkeypatch, caplog) -> None:
    """Also calls that a hung ranker does not take: it has at most three."""
    results, sent = {0: RuntimeError("broken"), 1: RuntimeError("broken"), 2: None}, []

    def score(*call):
        if len(sent) == 3:
            raise PendingCallsLimitExceeded("3 calls are pending")
        sent.append(call)
        return len(sent) - 1

    def get(call):
        if results[call] is not None:
            raise results[call]

    actor = SimpleNamespace(score=SimpleNamespace(remote=score))
    made = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: actor))
    for name, value in {"wait": lambda pending, **_: (pending, []), "get": get, "remote": lambda cls: made}.items():
        monkeypatch.setattr(ranking.ray, name, value)
    observer = ranking.Ranking("folder", None, {})
    observer.on_train_begin(SimpleNamespace(coordinator="coordinator"))
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            observer.on_prompts({"key": "text", "": "text"})
        measured = observer.on_step(None)
    assert sent == [({"key": "text"}, "coordinator")] * 3
    assert measured == {names.RANKER_FAILURES: 4.0}
    assert len([r for r in caplog.records if "length ranker" in r.getMessage()]) == 1


def test_unusable_folders_are_reported_before_a_run(folder, tmp_path) -> None:
    assert unusable(folder, 1 << 17) == "", "a small vocabulary folds the ids"
    assert "verl-rhyme ranker train" in unusable(str(tmp_path), None)
    ranker.load(ranker.Path(folder)).save(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 40000}')
    assert "has 40000 token ids" in unusable(str(tmp_path), 50_000)
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in unusable(str(tmp_path), None)
