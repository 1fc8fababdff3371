"""Recovery of a coordinator that was restarted."""

from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from verl_rhyme.processes.messages import LoadedPrompt, TrainerWork
from verl_rhyme.scheduling.expectations import Expectations
from verl_rhyme.trainer import driver as module
from verl_rhyme.trainer.driver import Driver

#: Lengths that a coordinator learnt since the last batch.
LEARNT = {"lengths": {"key": [9]}, "all": [9], "ranked": {}, "bias": 0.0, "growth": 0.0}
ANSWERS = {"open": {}, "state": {"generation": 7, "lengths": LEARNT}, "publish": TrainerWork(3)}


class Coordinator:
    """Actor that dies at the calls with these numbers."""

    def __init__(self, dies):
        self.dies, self.calls = set(dies), []

    def __getattr__(self, method):
        def remote(*arguments):
            self.calls.append((method, arguments))
            return RayActorError() if len(self.calls) in self.dies else ANSWERS.get(method)

        return SimpleNamespace(remote=remote)


@pytest.fixture
def driver(monkeypatch):
    def get(answer):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(module.ray, "get", get)
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)

    def load(count):
        return [LoadedPrompt(f"p{i}", 2) for i in range(count)]

    def make(dies):
        actor = Coordinator(dies)
        monkeypatch.setattr(module.coordinator, "start", lambda: actor)
        return Driver(SimpleNamespace(response_limit=100), load, list, lambda handover: None), actor

    return make


def test_coordinator_is_reopened_with_its_state_and_starts_nothing(driver):
    """While the actor trains the engines sleep; only publish() and next_batch() let samples start."""
    made, actor = driver(dies={4})
    made.open(["w"], None, 2, 5)
    made.publish(2, 5)
    made.pause()
    assert [method for method, _ in actor.calls] == ["open", "publish", "add_prompts", "pause", "open", "pause"]
    before = actor.calls[4][1][2]
    assert (before.version, before.batches_left, before.generation) == (2, 5, 2)
    assert before.prompts == [("p0", 2, ""), ("p1", 2, ""), ("p2", 2, "")]
    assert made.reopened == 1


def test_checkpoint_and_reopened_coordinator_have_all_lengths_that_were_sent_by_change(driver, caplog):
    made, actor = driver(dies={3})
    made.open([], None, 0, 5)
    saved = made.state()
    made.pause()
    again = Expectations(100)
    for state in (saved["lengths"], actor.calls[3][1][2].lengths):
        again.load_state_dict(state)
        assert again.predictor.forecast(["key"]).expected.tolist() == [9]
    resumed, actor = driver(dies=())
    resumed.open([], saved, 1, 5)
    assert actor.calls[0][1][2].lengths == saved["lengths"]
    assert actor.calls[0][1][2].batches_left == 5, "a run without steps left has no round for prompts that are put off"
    resumed.open([], {"lengths": {"torn": 1}}, 1, 5)
    assert "the response lengths in the checkpoint cannot be read (KeyError" in caplog.text


def test_call_that_always_kills_the_coordinator_ends_the_run(driver):
    made, _ = driver(dies=range(2, 100, 2))
    made.open([], None, 0, 5)
    with pytest.raises(RuntimeError, match=r"8 times in one call \(state\).* continues from the last checkpoint"):
        made.state()


def test_slow_start_of_the_coordinator_is_awaited(driver, monkeypatch):
    """Ray fails calls to an actor that is still starting."""
    made, actor = driver(dies=range(2, 60))
    made.open([], None, 0, 5)
    assert made.state()["generation"] == 7
    assert made.reopened == 1
    monkeypatch.setattr(module, "_START_S", -1.0)
    actor.dies = set(range(1000))
    with pytest.raises(RuntimeError, match=r"did not start within .* continues from the last checkpoint"):
        made.state()
