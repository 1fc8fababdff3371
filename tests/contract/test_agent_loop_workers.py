"""Agent loop workers that die or hang under Ray: their work goes to others, and no call waits forever."""

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import ray
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu

from verl_rhyme.agent_loop import agent_loop
from verl_rhyme.agent_loop.agent_loop import RhymeAgentLoopManager, SessionAgentLoopManager
from verl_rhyme.agent_loop.worker import RhymeAgentLoopWorker
from verl_rhyme.coordinator.worker_pool import WorkerPool
from verl_rhyme.scheduling.attempts import Attempt, Start

pytestmark = [
    pytest.mark.xdist_group("agent loop workers"),  # they share a cluster
    pytest.mark.slow,  # their processes take seconds to start
]
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares actors the import


@pytest.mark.parametrize(
    ("custom", "worker"),
    [
        ({"rhyme": {}}, RhymeAgentLoopWorker),
        ({"rhyme": {"enable": False}}, AgentLoopWorkerTQ),
        ({}, AgentLoopWorkerTQ),
    ],
)
def test_without_rhyme_the_workers_are_verls_class(custom, worker):
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"custom": custom}, "model": {}}})
    assert RhymeAgentLoopManager(config, llm_client=None).agent_loop_workers_class is worker


@ray.remote(num_cpus=0)
class Worker:
    """Takes starts, and validation prompts by number; on command it dies, or blocks as a careless tool does."""

    def __init__(self, mood="well", validates=False):
        if validates:  # the real ones know what they are sent once they have started
            import tensordict  # noqa: F401
        self.mood, self.about, self.validated, self.running = mood, [], [], []

    async def attach(self, coordinator):
        return dict.fromkeys(self.about, ""), []

    async def start_attempts(self, starts, step):
        await asyncio.sleep(0)
        if self.mood == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mood == "hangs":
            time.sleep(60)
        self.about += [start.attempt for start in starts]

    async def attempts(self):
        return list(self.about)

    async def abandon(self, attempts, drafts):
        self.about = [attempt for attempt in self.about if attempt not in attempts]

    async def generate_sequences(self, chunk):
        if self.mood == "dies":
            ray.actor.exit_actor()
        if self.mood == "hangs":
            time.sleep(60)
        self.validated += chunk["number"].tolist()
        self.running += map(str, chunk["uid"]) if "uid" in chunk else ()

    async def validating(self):
        return self.running

    async def drop(self, uid):
        self.running.remove(uid)

    async def taken(self):
        return self.validated


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


async def names(worker):
    return sorted(attempt.name for attempt in await worker.attempts.remote())


class Watched:
    """A pool, and the attempts that it reports as lost."""

    def __init__(self, moods, patience_s=30.0):
        self.lost, self.workers = [], [Worker.remote(mood) for mood in moods]
        self.pool = WorkerPool(None, patience_s, self._lost)

    def _lost(self, attempts, why, turns):
        self.lost += [attempt.name for attempt in attempts]

    def start(self, *numbers, prompt="p"):
        self.pool.start([Start(Attempt(prompt, number)) for number in numbers], 1)

    async def about(self, *expected):
        """Wait until the workers run these attempts: Ray does not order messages to an async actor."""
        deadline = time.monotonic() + 30
        while (found := sorted([await names(worker) for worker in self.workers])) != [*expected]:
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.02)

    async def until(self, done):
        deadline = time.monotonic() + 30
        while not done():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


async def test_samples_of_a_prompt_go_to_the_least_loaded_worker():
    watched = Watched(["well", "well"])
    assert await watched.pool.join(watched.workers) == ({}, [])
    watched.start(0, 1, 2, prompt="a")
    watched.start(0, prompt="b")
    watched.start(0, 1, prompt="c")
    await watched.about(["a_0", "a_1", "a_2"], ["b_0", "c_0", "c_1"])
    watched.pool.abandon([Attempt("a", 1), Attempt("c", 0)], lambda attempt: False)
    await watched.about(["a_0", "a_2"], ["b_0", "c_1"])
    again = WorkerPool(None, 30.0, watched._lost)
    running, _ = await again.join(watched.workers)
    assert {attempt.name for attempt in running} == {"a_0", "a_2", "b_0", "c_1"}
    assert again.has_attempt(Attempt("a", 0))
    assert not again.has_attempt(Attempt("a", 1))


@pytest.mark.parametrize("mood", ["dies", "hangs"])
async def test_attempts_of_a_dead_worker_are_lost_and_others_get_the_next(mood):
    watched = Watched([mood], patience_s=1.0 if mood == "hangs" else 30.0)
    await watched.pool.join(watched.workers)
    watched.start(0, 1)
    await watched.until(lambda: watched.lost)
    assert sorted(watched.lost) == ["p_0", "p_1"]
    assert len(watched.pool) == 0, "others are wanted"
    assert not watched.pool.has_attempt(Attempt("p", 0))


# ---- validation ----


class Manager(SessionAgentLoopManager):
    def __init__(self, moods, patience_s):
        self.agent_loop_workers = [Worker.remote(mood, validates=True) for mood in moods]
        self._ready, self._sent, self._patience_s = [], [], patience_s

    async def _init_agent_loop_workers(self):
        self.agent_loop_workers = [Worker.remote(validates=True)]


def test_validation_prompts_of_dead_workers_go_to_others():
    manager = Manager(["dies", "hangs"], patience_s=3.0)
    manager.generate_sequences(TensorDict({"number": torch.arange(7)}, batch_size=7))
    taken = ray.get([worker.taken.remote() for worker in manager.agent_loop_workers])
    assert sorted(number for numbers in taken for number in numbers) == list(range(7))
    assert len(manager.agent_loop_workers) == 1


def test_accepted_validation_prompts_of_a_dead_worker_go_to_others(monkeypatch):
    manager = Manager(["well", "well"], patience_s=30.0)
    prompts = tu.get_tensordict({"number": torch.arange(6), "uid": [f"v{n}" for n in range(6)]})
    manager.generate_sequences(prompts)
    kept, dead = manager.agent_loop_workers
    assert ray.get([worker.taken.remote() for worker in (kept, dead)]) == [[0, 1, 2], [3, 4, 5]]
    status = {f"v{n}": {"is_prompt": True, "status": "finished" if n in (1, 4) else "running"} for n in range(6)} | {
        "v3_0_0": {"status": "success"}
    }
    monkeypatch.setattr(agent_loop, "tq", SimpleNamespace(kv_list=lambda: {"val": status}))
    manager.resend_validation()
    assert ray.get(kept.taken.remote()) == [0, 1, 2], "its worker runs them"
    ray.get([kept.drop.remote("v0"), kept.drop.remote("v1")])  # it could not store what became of v0
    manager.resend_validation()
    assert ray.get(kept.taken.remote()) == [0, 1, 2, 0]
    manager.resend_validation()
    assert ray.get(kept.taken.remote()) == [0, 1, 2, 0], "it runs again"
    ray.kill(dead)
    with suppress(ray.exceptions.RayActorError):
        while True:  # it answers until it has died
            ray.get(dead.__ray_ready__.remote(), timeout=60)
    manager.resend_validation()
    assert ray.get(kept.taken.remote()) == [0, 1, 2, 0, 3, 5]
    manager.generate_sequences(prompts)
    assert sum(map(len, (sent for _, sent in manager._sent))) == len(prompts), "earlier validations stay in memory"
    status.clear()  # as verl does with a validation that is done
    ray.kill(kept)
    manager.resend_validation()
    assert manager._sent == [], "an earlier validation begins again"
