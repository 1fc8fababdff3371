"""Workers that die or hang under Ray: their part goes to others, and nobody waits for ever."""

import asyncio
import sys
import time

import pytest
import ray
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from verl_rhyme.workers.agent_loop import RhymeAgentLoopManager, RhymeAgentLoopWorker, SessionAgentLoopManager

pytestmark = pytest.mark.xdist_group("agent loop workers")  # of one cluster


@pytest.mark.parametrize(
    ("custom", "worker"),
    [
        ({"rhyme": {}}, RhymeAgentLoopWorker),
        ({"rhyme": {"enable": False}}, AgentLoopWorkerTQ),
        ({}, AgentLoopWorkerTQ),
    ],
)
def test_without_rhyme_the_workers_are_verls(custom, worker):
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"custom": custom}, "model": {}}})
    assert RhymeAgentLoopManager(config, llm_client=None).agent_loop_workers_class is worker


@ray.remote(num_cpus=0)
class Worker:
    """Takes prompts by number; told to, it dies or blocks its event loop as a careless tool does."""

    def __init__(self, mood="well"):
        if mood == "starts late":
            time.sleep(8)
        self.mood, self.taken = mood, []

    async def generate_sequences(self, chunk):
        if self.mood == "dies":
            ray.actor.exit_actor()
        if self.mood == "hangs":
            time.sleep(60)
        self.taken += chunk

    async def attempts(self):
        await asyncio.sleep(0)
        if self.mood == "blocks":
            time.sleep(60)
        return [f"p_{number}" for number in self.taken]


class Manager(SessionAgentLoopManager):
    def __init__(self, moods, patience_s):
        self.agent_loop_workers = [Worker.remote(mood) for mood in moods]
        self._ready, self._asked, self._asked_at, self._patience_s = [], {}, 0.0, patience_s

    async def _init_agent_loop_workers(self):
        self.agent_loop_workers = [Worker.remote()]


def running(manager):
    """Asked until all have told."""
    deadline = time.monotonic() + 30
    while (found := manager.attempts()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def has_died(worker):
    try:
        ray.get(worker.attempts.remote(), timeout=30)
    except ray.exceptions.RayActorError:
        return True
    return False


@pytest.fixture(scope="module")
def cluster():
    # By value: the workers' processes would import this module, and verl and torch with it, which takes seconds each.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


class Prompts(list):
    """As much of a ``TensorDict`` as is asked for; one would have the workers import torch."""

    def chunk(self, parts):
        size = -(-len(self) // parts)
        return [Prompts(self[i : i + size]) for i in range(0, len(self), size)]


PROMPTS = Prompts(range(7))
ALL = {f"p_{number}" for number in range(7)}


@pytest.mark.parametrize("moods", [("well", "dies", "well"), ("dies",), ("hangs", "well"), ("dies", "hangs")])
def test_prompts_of_a_worker_that_is_gone_go_to_others(cluster, moods):
    manager = Manager(moods, patience_s=5.0 if "hangs" in moods else 30.0)
    manager.generate_sequences(PROMPTS)
    assert running(manager) == ALL
    assert len(manager.agent_loop_workers) == max(1, moods.count("well"))


def test_a_worker_that_still_starts_is_waited_for(cluster):
    manager = Manager(("well", "starts late"), patience_s=5.0)
    manager.generate_sequences(PROMPTS)
    assert running(manager) == ALL
    assert len(manager.agent_loop_workers) == 2


def test_a_worker_that_died_has_no_attempts_any_more(cluster):
    manager = Manager(("well", "well"), patience_s=30.0)
    manager.generate_sequences(PROMPTS)
    dead = manager.agent_loop_workers[0]
    lost = set(ray.get(dead.attempts.remote()))
    ray.kill(dead)
    deadline = time.monotonic() + 30
    while not has_died(dead):  # it may still answer for a moment
        assert time.monotonic() < deadline
    assert running(manager) == ALL - lost
    assert len(manager.agent_loop_workers) == 1


def test_one_that_does_not_answer_is_waited_for_and_then_given_up(cluster):
    manager = Manager(("well", "blocks"), patience_s=5.0)
    ray.get([worker.generate_sequences.remote(PROMPTS) for worker in manager.agent_loop_workers[:1]])
    began = time.monotonic()
    assert manager.attempts() is None
    assert running(manager) == ALL
    assert 4.5 < time.monotonic() - began < 20
    assert len(manager.agent_loop_workers) == 1
