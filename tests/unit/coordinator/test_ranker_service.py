"""The length ranker of a run: its training, its checkpoints, and its failures."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import RayActorError

from tests.unit.lengths.worlds import SMALL, VOCABULARY, pairs
from verl_rhyme.config import RankerConfig
from verl_rhyme.coordinator import ranker_service
from verl_rhyme.coordinator.ranker_service import RankerActor, RankerService, missing_requirement
from verl_rhyme.lengths import ranker
from verl_rhyme.observability import metrics as names
from verl_rhyme.scheduling.expectations import Expectations
from verl_rhyme.trainer import ranking

pytestmark = pytest.mark.slow  # they train models

KNOWN = pairs(96)
PROMPTS = {f"{i:032x}": prompt.tolist() for i, prompt in enumerate(KNOWN.prompts)}
LENGTHS = {key: lengths.tolist() for key, lengths in zip(PROMPTS, KNOWN.lengths, strict=True)}


@pytest.fixture(autouse=True)
def few(monkeypatch) -> None:
    monkeypatch.setattr(ranker_service, "_MOST", 80)


def service(**options) -> RankerService:
    return RankerService(RankerConfig(**{"kind": "boosting", "refresh": 64, **options}), lambda messages: messages)


def some(of: dict, start: int, end: int) -> dict:
    return dict(list(of.items())[start:end])


@pytest.fixture(scope="module")
def learnt() -> RankerService:
    made = service()
    assert made.score(some(PROMPTS, 0, 64)) == ({}, 0)
    assert not made.learn(some(LENGTHS, 0, 63))
    assert made.learn(some(LENGTHS, 63, 64))
    return made


def test_prompts_without_answers_are_scored(learnt) -> None:
    scores, number = learnt.score(some(PROMPTS, 48, 96))
    assert number == 1
    assert list(scores) == list(PROMPTS)[64:]
    assert np.corrcoef(list(scores.values()), KNOWN.locations[64:])[0, 1] > 0.5


def test_predictor_uses_the_scores(learnt) -> None:
    expectations = Expectations(4096)
    new = list(PROMPTS)[64:]
    alike = expectations.add_prompts({f"uid {key}": key for key in new})
    assert len(set(alike.values())) == 1
    scores = expectations.rank(*learnt.score(some(PROMPTS, 64, 96)))
    assert set(scores) == {f"uid {key}" for key in new}
    assert np.corrcoef(np.log(list(scores.values())), KNOWN.locations[64:])[0, 1] > 0.5
    assert expectations.rank({"nobody": 5.0}, 1) == {}
    assert not expectations.errors


def test_latest_prompts_are_kept_for_training() -> None:
    made = service()
    made.score(PROMPTS)
    assert made.learn(LENGTHS)
    assert list(made._pairs) == list(PROMPTS)[16:]
    assert made.learn({"stranger": [3]}) is False


def test_checkpoint_restores_ranker_and_pairs(learnt, tmp_path) -> None:
    learnt.save(tmp_path)
    again = service()
    assert again.restore(tmp_path)
    new = some(PROMPTS, 64, 96)
    scores, number = again.score(new)
    assert number == 1
    np.testing.assert_allclose(list(scores.values()), list(learnt.score(new)[0].values()), atol=1e-6)
    assert {k: v[1].tolist() for k, v in again._pairs.items()} == some(LENGTHS, 0, 64)
    assert not service().restore(tmp_path / "none")
    other = service(kind="model")  # another kind can use the pairs
    assert other.restore(tmp_path)
    assert other.score(new) == ({}, 0)
    (tmp_path / "ranker" / "pairs.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="cannot be read"):
        service().restore(tmp_path)


def test_empty_ranker_is_saved(tmp_path) -> None:
    service().save(tmp_path)
    again = service()
    assert again.restore(tmp_path)
    assert again.number == 0


def test_model_serves_while_it_is_trained_again(tmp_path, monkeypatch) -> None:
    ranker.fit(ranker.tiny(VOCABULARY, **SMALL), pairs(16), epochs=1).save(tmp_path)
    made = service(kind="model", model=str(tmp_path))
    assert made.score(some(PROMPTS, 0, 64))[1] == 1  # without training here
    entered, leave = threading.Event(), threading.Event()
    fit = ranker.fit

    def slow(*arguments, **options):
        entered.set()
        assert leave.wait(60)
        return fit(*arguments, **options)

    monkeypatch.setattr(ranker, "fit", slow)
    thread = threading.Thread(target=made.learn, args=(some(LENGTHS, 0, 64),))
    thread.start()
    assert entered.wait(60)
    scores, number = made.score(some(PROMPTS, 64, 96))
    assert (len(scores), number) == (32, 1)
    leave.set()
    thread.join(60)
    assert made.score(some(PROMPTS, 64, 96))[1] == 2


class Calls:
    """Replacement of ray and the actor: it records calls, and decides their results by name."""

    def __init__(self, monkeypatch, **comes) -> None:
        self.made: list[tuple] = []
        self.comes, self.done = comes, True
        fake = SimpleNamespace(wait=self.wait, get=self.get, kill=lambda actor: None)
        monkeypatch.setattr(ranking, "ray", fake)
        self.hand = ranking.Ranking(RankerConfig(kind="boosting"), None, {}, actor=self)
        self.hand.on_train_begin(SimpleNamespace(coordinator="coordinator"))

    def __getattr__(self, method):
        return SimpleNamespace(remote=lambda *arguments: self.made.append((method, *arguments)) or method)

    def wait(self, calls, **_):
        return (list(calls), []) if self.done else ([], list(calls))

    def get(self, call, timeout=None):
        if isinstance(comes := self.comes.get(call, 0), Exception):
            raise comes
        return comes


def test_failures_are_counted_and_logged_once(monkeypatch, caplog) -> None:
    calls = Calls(monkeypatch, **dict.fromkeys(("announce", "learn", "save"), RuntimeError("broken")))
    with caplog.at_level(logging.WARNING):
        calls.hand.on_prompts({"key": "text", "": "text"})
        calls.hand.on_batch(None, SimpleNamespace(answered={"key": [7, 9]}), 1, 0)
        calls.hand.save("folder")
        measured = calls.hand.on_step(None)
    wanted = [("announce", {"key": "text"}, "coordinator"), ("learn", {"key": [7, 9]}), ("save", "folder")]
    assert calls.made == wanted
    assert measured == {names.RANKER_TRAINED: 0.0, names.RANKER_FAILURES: 3.0}
    assert len([r for r in caplog.records if "length ranker" in r.getMessage()]) == 1


def test_dead_ranker_restores_the_last_checkpoint(monkeypatch) -> None:
    calls = Calls(monkeypatch, learn=3)
    calls.hand.save("step 2")
    calls.hand.on_batch(None, SimpleNamespace(answered={"key": [7]}), 1, 0)
    calls.comes = {"learn": RayActorError(), "announce": RayActorError()}
    calls.hand.on_prompts({"key": "text"})
    calls.hand.on_step(None)
    assert calls.made[-1] == ("restore", "step 2")
    assert [method for method, *_ in calls.made].count("restore") == 2, "once for each look that found it dead"
    calls.comes = {"restore": RayActorError()}  # the process has not restarted
    calls.hand.on_step(None)
    calls.comes = {"restore": 2}
    calls.hand.on_step(None)
    made = len(calls.made)
    assert calls.hand.on_step(None) == {names.RANKER_TRAINED: 2.0, names.RANKER_FAILURES: 3.0}
    assert len(calls.made) == made


def test_hung_ranker_delays_one_checkpoint_only(monkeypatch) -> None:
    calls = Calls(monkeypatch, save=TimeoutError())
    calls.hand.save("step 2")
    calls.done = False
    calls.hand.save("step 4")
    assert calls.made == [("save", "step 2")]
    for _ in range(ranking._MAX_PENDING):
        calls.hand.on_batch(None, SimpleNamespace(answered={"key": [7]}), 1, 0)
    assert calls.hand.failures == 2
    calls.hand.on_batch(None, SimpleNamespace(answered={"key": [7]}), 1, 0)
    assert calls.hand.failures == 3, "what is left out is counted"


def test_number_of_trainings_never_decreases(monkeypatch) -> None:
    calls = Calls(monkeypatch, learn=2)
    calls.hand.on_batch(None, SimpleNamespace(answered={"key": [7]}), 1, 0)
    assert calls.hand.on_step(None)[names.RANKER_TRAINED] == 2
    calls.comes = {"learn": 1}  # called later, answered earlier: the other call trained
    calls.hand.on_batch(None, SimpleNamespace(answered={"key": [7]}), 1, 0)
    assert calls.hand.on_step(None)[names.RANKER_TRAINED] == 2


def test_waiting_prompts_are_scored_again_by_a_new_ranker(tmp_path) -> None:
    sent: list[tuple[dict, int]] = []
    coordinator = SimpleNamespace(rank=SimpleNamespace(remote=lambda *arguments: sent.append(arguments)))
    actor = RankerActor.__new__(RankerActor)
    actor._service, actor._coordinator = service(), None
    assert actor.announce(PROMPTS, coordinator) == 0
    assert not sent
    assert actor.learn(some(LENGTHS, 0, 64)) == 1
    ((locations, number),) = sent
    assert (list(locations), number) == (list(PROMPTS)[64:], 1)
    actor.save(str(tmp_path))
    again = RankerActor.__new__(RankerActor)
    again._service, again._coordinator = service(), None
    again.announce(some(PROMPTS, 90, 96), coordinator)
    assert len(sent) == 1
    assert again.restore(str(tmp_path)) == 1
    assert list(sent[1][0]) == list(PROMPTS)[90:]


def test_no_training_without_unknown_prompts() -> None:
    made = service()
    made.score(PROMPTS)
    assert made.learn(LENGTHS)
    made.score(some(PROMPTS, 16, 96))  # the next epoch: all prompts are known
    assert not made.learn(LENGTHS)
    made.score({"another": [5, 6]})
    assert made.learn(some(LENGTHS, 0, 1))


def test_prompts_that_left_without_a_response_keep_earlier_lengths(learnt) -> None:
    made = service()
    made.score(some(PROMPTS, 0, 64))
    made.learn(some(LENGTHS, 0, 1))
    made.learn(dict.fromkeys(PROMPTS, ()))
    assert not made._announced
    assert len(made._pairs) == 1


def test_pairs_learnt_before_a_restore_are_kept(learnt, tmp_path) -> None:
    learnt.save(tmp_path)
    made = service()
    made.score(some(PROMPTS, 60, 70))
    first = list(PROMPTS)[60]
    made.learn({**some(LENGTHS, 64, 70), first: [9]})
    assert made.restore(tmp_path)
    assert made.number == 1
    assert len(made._pairs) == 70
    assert made._pairs[first][1].tolist() == [9]


def test_training_keeps_its_time_limit(monkeypatch) -> None:
    """The clock advances by a minute at each call."""
    times = iter(range(0, 60 * 10_000, 60))
    config = RankerConfig(kind="model", refresh=64, minutes=3)
    made = RankerService(config, lambda messages: messages, clock=lambda: float(next(times)))
    steps = []
    loss = ranker._LOSSES["listwise"]
    monkeypatch.setitem(ranker._LOSSES, "listwise", lambda *a: steps.append(1) or loss(*a))
    made.score(PROMPTS)
    assert made.learn(LENGTHS)
    assert len(steps) == 3
    assert len(made.score({"new": [4, 5, 6]})[0]) == 1


def test_missing_requirements_are_reported_before_a_run(tmp_path, monkeypatch) -> None:
    def lacks(vocabulary=None, **options) -> str:
        return missing_requirement(RankerConfig(**{"kind": "boosting", **options}), vocabulary)

    assert lacks() == lacks(kind="model") == ""
    there = str(tmp_path / "model")
    assert "is not a folder with config.json" in lacks(kind="model", model=there)
    ranker.tiny(VOCABULARY, **SMALL).body.save_pretrained(there)
    assert lacks(VOCABULARY, kind="model", model=there) == ""
    assert "has 24 token ids" in lacks(VOCABULARY + 1, kind="model", model=there)
    made = ranker.fit(ranker.tiny(VOCABULARY, **SMALL), pairs(16), epochs=1)
    made.save(tmp_path / "ranker")
    assert lacks(1 << 17, kind="model", model=str(tmp_path / "ranker")) == ""
    (tmp_path / "model" / "config.json").write_text("{")
    assert "cannot be read" in lacks(kind="model", model=there)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "scikit-learn" in lacks()
