"""A run in a simulated cluster: the real coordinator, pool, driver, agent loop workers, sessions and client.

Engines, rewards and training are simulated. Processes die at random; each trained batch is checked.
"""

import asyncio
import contextlib
import gc
import hashlib
import logging
import random
from array import array
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import torch
from ray.exceptions import RayActorError
from tensordict import TensorDict
from verl.tools.function_tool import FunctionTool
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from tests.unit.coordinator.cluster import Cluster, Handle, Killed, Queue
from verl_rhyme.agent_loop import reports, stored_attempts
from verl_rhyme.agent_loop import worker as worker_module
from verl_rhyme.agent_loop.client import RhymeLLMServerClient
from verl_rhyme.agent_loop.session import PROMPTS, SESSIONS, STARTS, current
from verl_rhyme.agent_loop.stored_attempts import TRAIN, KeptTurns
from verl_rhyme.agent_loop.tools import answer_once
from verl_rhyme.config import ElasticConfig, RhymeConfig
from verl_rhyme.coordinator import coordinator, worker_pool
from verl_rhyme.coordinator.coordinator import Coordinator
from verl_rhyme.engine.gate import Gate
from verl_rhyme.observability.request_record import RequestRecord
from verl_rhyme.processes.deaths import ReplicaDied
from verl_rhyme.processes.messages import LoadedPrompt, RunSettings
from verl_rhyme.router.router import PlacementRouter
from verl_rhyme.scheduling.attempts import Attempt
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.trainer import driver as driver_module
from verl_rhyme.trainer import replicas, topology
from verl_rhyme.trainer.driver import Driver
from verl_rhyme.trainer.elastic import ElasticReplicas
from verl_rhyme.trainer.replicas import SpareReplicas
from verl_rhyme.weights import manager
from verl_rhyme.weights.delivery import Delivery
from verl_rhyme.weights.manager import RelayManager

_Worker = worker_module.SessionAgentLoopWorker.__ray_metadata__.modified_class

SAMPLES, BATCH, STEPS, REPLICAS, WORKERS = 3, 3, 6, 2, 3
#: Of every prompt.
PROMPT_TOKENS = 2
#: Settings of the rules by name; in "elastic" ones replicas rest and return.
_RELAYED = {"separate": True, "relayed": True}
_LOADS = {"in_flight": 4, "refill": "when_empty"}
_LOADED = {"take": "loaded", "unit": "group"}
MODES: dict[str, dict] = {
    "full 0": {"max_staleness": 0, "put_off": 0.25, "in_flight": 1.5},
    "full 0 separate": {"max_staleness": 0, "put_off": 0.25, "in_flight": 1.5, **_RELAYED},
    "full 1": {"max_staleness": 1},
    "full 1 separate": {"max_staleness": 1, **_RELAYED},
    "full 3 at once": {"max_staleness": 3, "separate": True},
    "full 2 finishes": {"max_staleness": 2, "at_version": "finish", **_RELAYED},
    "full 1 elastic": {"max_staleness": 1, **_RELAYED},
    "sorted 0": {"max_staleness": 0, **_LOADS},
    "sorted 1": {"max_staleness": 1, **_LOADS},
    "histopipe 0": {"max_staleness": 0, **_LOADED},
    "histopipe 1": {"max_staleness": 1, **_LOADED, **_RELAYED},
    "stream 0": {"max_staleness": 0, **_LOADED, "separate": True},
    "stream 1 elastic": {"max_staleness": 1, **_LOADED, **_RELAYED},
}


MORTAL = ("coordinator", "unreachable", "worker", "workers", "replica", "run")


class World:
    """One schedule: a run that is killed and resumed at random.

    Args:
        mode: Name in :data:`MODES`.
        seed: Seed of all random events.
        kills: Maximum number of deaths.
        troubles: Whether the judge is away for minutes, and a worker hangs as the coordinator dies.
        flat: Share of the prompts whose samples all have one score; more than the default are filtered in any case.
        mortal: What may die.
    """

    def __init__(self, mode, seed, kills, troubles=False, flat=0.15, mortal=MORTAL):
        self.mortal = mortal
        self.cluster = Cluster(seed)
        self.random = random.Random(seed + 1)
        self.queue = Queue(self.cluster)
        given = {"unit": self.random.choice(["group", "group", "trajectory"]), "drafts": self.random.random() < 0.8}
        filtered = {"unit": "group"} if flat > 0.15 else {}
        self.rules = Rules(BATCH, BATCH * SAMPLES, **given | filtered | MODES[mode])
        self.separate = self.rules.separate
        self.flat_share = flat
        self.filters = self.rules.unit == "group" and (self.random.random() < 0.5 or bool(filtered))
        self.slow_tools = self.random.random() < 0.3
        self.elastic = "elastic" in mode
        self.launched = REPLICAS + self.elastic
        slots = self.launched * 8
        limit = self.random.choice([slots, 2 * slots, 4])
        self.placed = seed % 2 == 1
        # With a tail of 1 a whole group may move, and does so once it gets longer than expected.
        self.placement = ("histopipe", {"groups": 2, "tail": random.Random(seed).choice([1.0, 1.0, 0.34])})
        if seed % 3 == 2:
            self.placement = ("longest_first", {})
        self.streams = self.separate and seed % 4 != 1
        self.setting = RunSettings(
            self.rules,
            "reward" if self.filters else None,
            limit,
            min_starts=self.random.choice([1, 1, 2]),
            slots=slots,
            lost_after=30.0,
            part_samples=random.Random(seed).choice([1, SAMPLES, 2 * SAMPLES]),
        )
        self.save_every = self.random.choice([1, 2, 3])
        self.troubles, self.luck = troubles, random.Random(seed + 2)
        self.away = [(self.luck.uniform(0, 60), self.luck.choice([0.0, 5.0, 300.0])) for _ in range(2)] * troubles
        self.replaced = set()
        self.kills_left, self.deaths, self.died_at = kills, [], {}
        self.salt = self.random.getrandbits(60)
        self.tokens = []  # ((uid, sample, turn, place), policy version) of each generated one
        self.tools = Counter()  # calls, by (uid, sample, turn)
        self.answers, self.replayed = Counter(), 0  # of tools in this lineage, and answers that attempts began with
        self.checkpoint = 0, None, None, {}, 0, 0, {}  # as save() makes it; trained: (row, number) -> step
        self.runs = self.reopened = self.parts = self.rested = self.returned = 0
        self.uids, self.index = {}, {}  # of this lineage: row of the data -> uid, and the reverse
        self.replays = seed % 2 == 0
        rollout = SimpleNamespace(name="vllm", response_length=10**6, enable_rollout_routing_replay=self.replays)
        self.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
        # As verl's trainers have them; this is also the manager of the servers.
        self.llm_server_manager = self.standalone_server_manager = self
        self.current_mode, self._rhyme = HybridEngineMode.TRAINER, RhymeConfig()

    # ---- data ----

    def about(self, *what):
        """Return a random number that depends only on the question."""
        return random.Random(hashlib.blake2b(repr((self.salt, *what)).encode(), digest_size=8).digest())

    def bad(self, row):
        """Whether its reward or its agent loop raises."""
        return self.about("bad", row).random() < 0.06

    def judge_is_away(self):
        return any(began <= self.cluster.clock.time() <= began + seconds for began, seconds in self.away)

    def flat(self, row):
        """Whether all its samples have one score."""
        return self.about("flat", row).random() < self.flat_share

    def drops(self, row):
        """Whether it is never trained."""
        return self.bad(row) or (self.filters and self.flat(row))

    def turns(self, row, number):
        """Return the tokens of each turn, and the seconds of the tool after it."""
        chance = self.about("turns", row, number)
        slow = 60.0 if self.slow_tools and chance.random() < 0.1 else 2.0
        return [
            (chance.choice([1, 4, 20, 40]), chance.choice([0.0, 0.1, slow])) for _ in range(chance.choice([1, 1, 2, 3]))
        ]

    # ---- a run ----

    def train(self):
        """Run to the end, despite all deaths."""
        while True:
            self.runs += 1
            assert self.runs < 40, "the run was resumed too often"
            self.cluster.begin_run()
            self._plan_death()
            try:
                self._run()
                return
            except (Killed, RayActorError, ReplicaDied) as error:
                self.deaths.append(f"run ({type(error).__name__})")
                self.cluster.kill_run()
                self.cluster.clock.run_until_complete(asyncio.sleep(1))
            finally:
                self.reopened += self.driver.reopened if self.driver is not None else 0

    def _run(self):
        self.driver = None
        step, state, queue, trained, self.loaded, self.gone, answers = self.checkpoint
        self.answers = Counter(answers)
        self.queue.restore(queue)
        self.trained = dict(trained)
        self.uids = {row: uid for row, uid in self.uids.items() if row < self.loaded}
        self.named, self.deliveries, self.version = 0, {}, step
        self.rollout_replicas = [self.make_replica(step) for _ in range(self.launched)]
        servers = dict(self.replicas)
        balancer = PlacementRouter if self.placed else GlobalRequestLoadBalancer
        self.balancer = Handle(self.cluster, lambda: balancer(servers))
        if self.placed:
            self.setting = replace(self.setting, router=self.balancer, placement=self.placement)
        self.coordinator = Handle(self.cluster, Coordinator, restarts=True)
        self.global_steps = step + 1
        self.global_load_balancer = self.balancer
        self.weights = self.checkpoint_manager = self.standalone_checkpoint_manager = Weights(self)
        self.spares = WorldReplicas(self)
        self.spares._set(self.rollout_replicas)
        self.topology = (topology.Separate if self.separate else topology.Colocated)(self)
        self.topology.prepare(self.rules)
        self.driver = Driver(self.setting, self.load, self.make_workers, self.take_over)
        self.dropped = []  # keys that the recorder has not cleared yet
        self.driver.open(self.make_workers(), state, step, STEPS - step)
        if state is not None:
            assert put_off(self.driver.state()) == put_off(state), "a resume forgets which prompts are put off"
        if self.elastic:
            self.scaler = ElasticReplicas(ElasticConfig(1), self, self.weights.config, self.spares)
            self.scaler.on_train_begin(self.driver)
        self.driver.publish(step, STEPS - step)
        while step < STEPS:
            step += 1
            self.global_steps = step
            self.early = set()
            reopened = self.driver.reopened
            reply = self.driver.next_batch(self.topology, self.work_on if self.streams else None)
            # A reopened coordinator may choose another batch: the trainer then begins the training step again.
            assert self.early <= set(reply.keys) or self.driver.reopened > reopened, "a part is not in the batch"
            self.taken_at = self.cluster.clock.time()
            if self.separate:
                self.driver.load_prompts()
            self.check(reply, step)
            self.cluster.sleep(self.random.uniform(0.5, 8.0))  # the actor trains
            if step % self.save_every == 0:
                self.save(step)
            self.driver.pause()
            self.version = step
            self.publish(step)
            self.driver.publish(step, STEPS - step)
            padding = [self.padding] if self.early else []
            self.cluster.sleep(0.1)
            ours = [*reply.keys, *padding, *self.dropped]
            assert set(self.queue.partitions[TRAIN]) >= set(ours), "the trainer's batch is cleared"
            self.cluster.run(self.queue.clear(ours, TRAIN))
            self.dropped = []
            if self.elastic and step < STEPS:
                changes = self.scaler.scale(self.random.choice([-1, -1, 0, 1, 1]), step)
                self.rested += "rollout/replicas/moved_samples" in changes
                self.returned += {*changes} == {"rollout/replicas/serving", "rollout/replicas/change_s"}
        self.finish()

    def take_over(self, handover):
        """Record dropped trajectories, which are cleared once they are fetched."""
        keys = handover.dropped.keys
        assert not any(key.startswith("pad") for key in keys), "padding is reported as dropped"
        assert not {*keys} & {*self.dropped}, "dropped twice"
        if self.dropped:
            self.cluster.run(self.queue.clear(self.dropped, TRAIN))
        self.dropped = keys

    def work_on(self, part):
        """Run the first stages of a part of the next batch, while the rollout continues."""
        assert part.keys
        rows = self.queue.partitions[TRAIN]
        for key, tag in zip(*part, strict=True):
            uid, number = Attempt.named(key.rpartition("_")[0]).sample
            assert tag["status"] == "success"
            self.check_text(rows[key][1]["turns"], uid, number, self.global_steps - 1)
        if not self.early:  # verl pads a part
            self.padding = f"pad{self.global_steps}_0_0"
            self.cluster.run(
                self.queue.put([self.padding], TRAIN, fields=[{}], tags=[{"is_padding": True, "status": "success"}])
            )
        self.parts += not self.early.issuperset(part.keys)
        self.early |= set(part.keys)
        self.cluster.sleep(self.random.uniform(0.0, 3.0))

    def save(self, step):
        """Save in verl's order: the state, the position in the data, the queue, and then the tracker."""
        answers = dict(self.answers)  # those that come while the turns are stored may be among them
        state = self.driver.state()
        self.cluster.sleep(self.random.choice([0.0, 0.5]))
        queue = self.queue.snapshot()
        self.cluster.sleep(self.random.choice([0.0, 0.1]))
        self.checkpoint = step, state, queue, dict(self.trained), self.loaded, self.gone, answers

    def load(self, count):
        rows = range(self.loaded, self.loaded + count + -count % self.random.choice([1, BATCH]))
        uids = [f"{row}-{self.runs}" for row in rows]
        data = [{"index": row, "uid": uid} for row, uid in zip(rows, uids, strict=True)]
        self.cluster.run(self.queue.put(uids, PROMPTS, fields=data, tags=[{}] * len(uids)))
        self.loaded = rows.stop
        self.uids |= zip(rows, uids, strict=True)
        self.index |= zip(uids, rows, strict=True)
        return [LoadedPrompt(uid, SAMPLES, f"prompt {row % 7}") for row, uid in zip(rows, uids, strict=True)]

    def make_workers(self):
        self.workers = [Handle(self.cluster, lambda: Worker(self)) for _ in range(WORKERS)]
        return list(self.workers)

    def publish(self, version):
        """Sync the weights; with the relay the trainer continues, and deaths meanwhile are replaced."""
        if self.separate:
            self.topology.replace_dead(version)
        if self.rules.one_by_one:
            for replica in self.rollout_replicas:
                self.weights.send(replica, version, self.rules.finishes)
            return
        if self.separate:
            self.weights.abort_replicas(False)
            self.cluster.sleep(self.random.choice([0.0, 1.0]))
        self.weights.call("update", version)
        self.weights.resume_generation_replicas()

    # ---- replicas, as in verl's LLMServerManager ----

    def get_replicas(self):
        return self.rollout_replicas

    def make_replica(self, version):
        """Make a replica with verl's attributes."""
        handle, rank = Handle(self.cluster, lambda: Engine(self, version)), self.named
        self.named += 1
        server = {"_server_address": f"r{rank}", "_server_handle": handle, "servers": [handle]}
        return Mock(replica_rank=rank, nnodes=1, workers=[], resource_pool=None, **server)

    @property
    def replicas(self):
        """Return handles of the serving replicas, by address."""
        return {replica._server_address: replica._server_handle for replica in self.rollout_replicas}

    # ---- deaths ----

    def _plan_death(self):
        if self.kills_left > 0:
            self.cluster.call_soon(self.random.choice([2.0, 10.0, 30.0]) * self.random.random(), self._die, self.runs)

    def _die(self, run):
        if run != self.runs or self.cluster.killed.done():
            return
        self.kills_left -= 1
        whom = self.random.choice(self.mortal)
        if self.troubles:
            whom = "hung worker"
        self.deaths.append(whom)
        self.died_at[whom] = self.cluster.clock.time()
        if whom in ("coordinator", "hung worker"):
            self.random.choice(self.workers).hangs = whom == "hung worker"
            self.coordinator.die()
        elif whom == "unreachable":
            self.coordinator.lose_touch()
        elif whom == "worker":
            self.random.choice(self.workers).die()
        elif whom == "workers":
            for worker in self.workers:
                worker.die()
        elif whom == "replica":
            if there := [*self.rollout_replicas, *self.spares.resting]:
                self.random.choice(there)._server_handle.die()
        else:
            self.cluster.kill_run()
        self._plan_death()

    # ---- checks ----

    def check(self, reply, step):
        """Check an update batch at its training."""
        assert reply.keys, "nothing to train"
        assert "rollout/lengths/forecast_errors" not in reply.metrics
        assert "rollout/placement/errors" not in reply.metrics
        rows = self.queue.partitions[TRAIN]
        samples = [Attempt.named(key.rpartition("_")[0]).sample for key in reply.keys]
        for key, (uid, number), tag in zip(reply.keys, samples, reply.tags, strict=True):
            row = self.index[uid]
            assert self.uids[row] == uid, "a prompt of another lineage"
            assert (row, number) not in self.trained, "trained twice"
            assert not self.drops(row), "a failed or filtered prompt was trained"
            self.trained[row, number] = step
            assert tag["status"] == "success"
            self.check_text(rows[key][1]["turns"], uid, number, step - 1)
        if self.rules.unit == "group":
            assert all(samples.count((uid, n)) == 1 for uid in {uid for uid, _ in samples} for n in range(SAMPLES))
            assert len(samples) == BATCH * SAMPLES, "the batch is too small"
        self.gone += reply.failed + sum(reply.filtered.values())

    def check_text(self, turns, uid, number, version):
        """Check that the sample is complete, in order, and not too stale."""
        assert [len(turn) for turn in turns] == [length for length, _ in self.turns(self.index[uid], number)]
        for t, turn in enumerate(turns):
            for place, name in enumerate(turn):
                of, made_by = self.tokens[name]
                assert of == (uid, number, t, place)
                assert 0 <= version - made_by <= self.rules.max_staleness, "too stale"

    def check_experts(self, text, experts):
        """Check that each token's experts are of the version that made the token after it."""
        assert experts[:, 0, 0].tolist() == [*range(len(text) - 1)]
        for made_by, token in zip(experts[PROMPT_TOKENS - 1 :, 0, 1].tolist(), text[PROMPT_TOKENS:], strict=True):
            assert token >= 10**8 or self.tokens[token][1] == made_by, "experts of other weights"

    def finish(self):
        kept = self.rules.continues and self.rules.batches <= self.rules.max_staleness + 1  # none gets too stale
        if kept and not {*self.deaths} & {"worker", "workers", "hung worker"}:
            made = self.tools if self.runs == 1 else self.answers
            again = {at for at, calls in made.items() if calls > 1}
            assert not again, f"tools were called again: {again}"
        state = self.driver.state()
        self.twice = {key.rpartition("_")[0] for key in self.queue.partitions[TRAIN]}
        assert set(state["lengths"]["prompt_tokens"].values()) == {PROMPT_TOKENS}, "wrong prompt lengths"
        self.cluster.sleep(400.0)  # until all pending work has ended
        self.twice &= self.queue.partitions.get(SESSIONS, {}).keys()
        for worker in self.workers:
            if worker.alive:
                assert worker.process.object._attempts == {}, "an attempt never ended"
                kept = {report.attempt.sample for report in worker.process.object._kept.reports}
                left = {(prompt["uid"], n) for prompt in state["ledger"]["prompts"] for n in range(SAMPLES)}
                assert kept <= left, "turns of trained samples stay in memory"
        waiting = {self.index[uid] for uid, _ in state["stock"]}
        left = {self.index[prompt["uid"]]: prompt["samples"] for prompt in state["ledger"]["prompts"]}
        gone = 0
        for row in range(self.loaded):
            trained = sum((row, number) in self.trained for number in range(SAMPLES))
            if row in left:
                assert [sample["state"] == "trained" for sample in left[row]].count(True) == trained
            elif row in waiting:
                assert trained == 0
            elif trained == 0 and self.drops(row):
                gone += 1
            elif trained < SAMPLES and self.troubles:
                self.replaced.add(row)  # an outage costs so small a run a few
                gone += 1
            else:
                assert trained == SAMPLES, f"lost: prompt {row} has {trained} trained samples"
        assert len(self.replaced) <= 2 * len(self.away)
        untold = state["failed"] + sum(count for _, count in state["filtered"])  # since the last batch
        assert gone == self.gone + untold, f"{gone} prompts dropped, {self.gone} reported, {untold} to be reported"
        self.check_queue({*waiting, *left}, untold)

    def check_queue(self, needed, untold):
        """Check that nothing is left, except what the next batch would have cleared."""
        dropped = set()  # since the last batch
        for partition, keys in self.queue.partitions.items():
            for key in keys:
                session = key.rpartition("_")[0] if partition == TRAIN else key
                row = self.index[key if partition == PROMPTS else Attempt.named(session).uid]
                # Written since the last batch, or to be cleared by a process that died.
                late = max(self.queue.written[partition, key], self.died_at.get("coordinator", 0.0)) >= self.taken_at
                if self.drops(row) or row in self.replaced:
                    dropped |= {row} if not late and row not in needed else set()
                else:
                    assert late or row in needed, f"{partition}: {key} is not needed"
        assert len(dropped) <= untold, f"of {dropped} {untold} were dropped since the last batch"


class Engine:
    """A replica: each token takes time; new weights and stops interrupt requests."""

    def __init__(self, world, version):
        self.world, self.version, self.rejecting = world, version, False
        self.open, self.running = asyncio.Event(), {}
        self.open.set()
        self.gate = Gate()
        self.gate.version = version
        self.asleep = False

    async def generate(self, request_id, prompt_ids, sampling_params, rhyme, **_):
        if not await self.gate.enter(request_id, rhyme["assignment"].oldest_version):
            return self._output([], "aborted", rhyme, prompt_ids)
        try:
            return await self._generate(request_id, prompt_ids, sampling_params, rhyme)
        finally:
            await self.gate.leave()

    async def idle(self):
        await self.gate.wait_until_idle()

    async def _generate(self, request_id, prompt_ids, sampling_params, rhyme):
        while not self.open.is_set():
            if self.rejecting:
                return self._output([], "aborted", rhyme, prompt_ids)
            await self.open.wait()
        clock, world, pace = asyncio.get_running_loop(), self.world, 0.25
        if self.asleep:
            world.cluster.faults.append(AssertionError("a request runs at a replica that rests"))
        began, cut = clock.time(), clock.create_future()
        made = lambda: rhyme["earlier_tokens"] + int((clock.time() - began) / pace)  # noqa: E731
        self.running[request_id] = cut, rhyme["name"], made
        await asyncio.wait({cut}, timeout=pace * sampling_params["max_tokens"])
        self.running.pop(request_id, None)
        count = sampling_params["max_tokens"]
        if self.asleep and not cut.done():
            world.cluster.faults.append(AssertionError("a request ran on at a replica that rests"))
        if cut.done():
            count = min(count, made() - rhyme["earlier_tokens"])
        *of, base = world.open_turns[rhyme["name"]]
        first, before = len(world.tokens), len(prompt_ids) - base
        world.tokens += [((*of, before + place), self.version) for place in range(count)]
        said, experts = list(range(first, first + count)), None
        if self.world.replays and said:
            places = np.arange(sampling_params["routed_experts_prompt_start"], len(prompt_ids) + count - 1)
            experts = np.stack([places, np.full_like(places, self.version)], -1)[:, None]
        return self._output(said, "aborted" if cut.done() else "completed", rhyme, prompt_ids, experts)

    def _output(self, made, reason, meta, prompt_ids, experts=None):
        now = asyncio.get_running_loop().time()
        record = RequestRecord(
            id=f"{len(self.world.tokens)}/{now}",
            prompt_key=meta["key"],
            **{name: meta[name] for name in ("sample", "request")},
            **{"replica": 0, "node": "", "stop_reason": reason},
            **dict.fromkeys(("queued_at", "started_at", "first_token_at", "finished_at"), now),
            **{"prompt_tokens": len(prompt_ids), "response_tokens": len(made)},
            **dict.fromkeys(("policy_version_start", "policy_version_end"), self.version),
        )
        return TokenOutput(
            token_ids=made,
            log_probs=[0.0] * len(made),
            routed_experts=experts,
            stop_reason=reason,
            extra_fields={"global_steps": self.version, "rhyme": [record.to_dict()]},
        )

    def stop(self, reject):
        self.rejecting = reject
        self.open.clear()
        for request_id in list(self.running):
            self._cut(request_id)

    async def abort_request(self, request_id, reset_prefix_cache=True):
        if not await self.gate.cancel(request_id):
            self._cut(request_id)

    def _cut(self, request_id):
        cut = self.running[request_id][0] if request_id in self.running else None
        if cut is not None and not cut.done():
            cut.set_result(None)

    def progress(self, names):
        return {name: made() for _, name, made in self.running.values() if name in names}

    def resume(self):
        self.open.set()

    async def update(self, version):
        self.version, self.asleep = version, False
        await self.gate.open(version)

    async def suspend(self):
        await self.gate.close()
        self.stop(True)
        self.asleep = True

    def cache_tokens(self):
        return 0


class Replica:
    """A replica as a relay sees it."""

    def __init__(self, world, engine):
        self._world, self._engine = world, engine

    async def wait_idle(self):
        await self._engine.idle.remote()

    async def load(self, version, sent):
        await self._engine.stop.remote(False)
        await asyncio.sleep(self._world.random.choice([0.0, 1.0, 10.0]))
        await self._engine.update.remote(version)
        await self._engine.resume.remote()


class Weights(RelayManager):
    """The trainer's side of the relay, with simulated deliveries."""

    def __init__(self, world):
        self._world, self._nodes, self._behind = world, {}, {}
        self.config, self.replicas = SimpleNamespace(backend="relay"), []

    def call(self, method, *arguments):
        self._world.cluster.get([getattr(r, method).remote(*arguments) for r in self._world.replicas.values()])

    def abort_replicas(self, reject_request):
        self.call("stop", reject_request)

    def resume_generation_replicas(self):
        self.call("resume")

    def check(self):
        return 0

    def send(self, replica, version, patient):
        delivery = self._world.deliveries.setdefault(replica, Delivery(contextlib.nullcontext))
        taking = delivery.update(Replica(self._world, replica._server_handle), version, patient)
        self._behind[replica] = task = self._world.cluster.clock.create_task(_unless_dead(taking))
        return task

    def deliver(self, replicas, version=None):
        self._world.cluster.get([self.send(replica, self._world.version, False) for replica in replicas])
        if not all(replica._server_handle.alive for replica in replicas):
            raise RayActorError

    def release(self, replica):
        try:
            super().release(replica)
        finally:
            self._world.deliveries.pop(replica, None)


class WorldReplicas(SpareReplicas):
    """The real spares of replicas, in this world."""

    def __init__(self, world):
        super().__init__(world, world.weights, world.setting.lost_after)
        self._world = world

    def _start(self):
        """Start replicas that are up after a while, or fail."""
        while self.missing > len(self._starts):
            at = self._world.cluster.clock.time() + self._world.random.choice([1.0, 5.0, 60.0])
            new = self._world.make_replica(self._world.version)
            up = SimpleNamespace(done=lambda at=at: self._world.cluster.clock.time() >= at, result=self._result)
            self._starts.append(replicas._Start(new, up, self._world.cluster.clock.time()))

    def _result(self):
        if self._world.random.random() < 0.2:
            raise ValueError("no devices are free")

    def _enter(self, replica):
        engine = replica._server_handle.process
        if engine is not None:
            assert not engine.object.asleep, "a serving replica sleeps"
            assert engine.object.version == self._world.version, "a replica lacks the current version"
        super()._enter(replica)


async def _unless_dead(taking):
    with contextlib.suppress(RayActorError):
        await taking


class Worker(_Worker):
    """The real worker, except for verl's start, its way from a batch to its prompts, and the agent loop."""

    def __init__(self, world):
        self.world = world
        self._seed, self._tool_timeout = 0, 3600.0
        self._attempts, self._sessions, self._kept = {}, {}, KeptTurns()
        self._filter_metric = "reward" if world.filters else None
        self.background_tasks = set()
        self._reports = reports.Reports()
        (self.tool,) = answer_once([FunctionTool("tool", self._tool, None, is_async=True)])
        self.client = RhymeLLMServerClient(world.config, world.balancer, interruptible=True)

    def _session(self, start, left):
        """Check that the ledger knows which samples have tokens to continue."""
        session = super()._session(start, left)
        assert self.world.troubles or start.partial == (session.tokens > 0), "the ledger has lost turns"
        return session

    async def _tool(self, at, seconds):
        self.world.tools[at] += 1
        await asyncio.sleep(seconds)
        self.world.answers[at] += 1
        return "answered"

    async def generate_sequences(self, batch):
        for row, (index, order) in enumerate(zip(batch["index"].tolist(), batch[STARTS], strict=True)):
            order = getattr(order, "data", order)
            prompt = {"uid": batch["uid"][row], "index": index, "global_steps": batch["global_steps"], STARTS: order}
            task = asyncio.create_task(self._run_prompt(prompt, {}, {"validate": False}))
            self.background_tasks.add(task)

    async def _run_agent_loop(self, sampling_params, trajectory, trace, session_id, uid, index, **prompt):
        world, session = self.world, current()
        assert session.attempt.sample == (uid, session_id)
        assert world.index[uid] == index, "another prompt's data"
        request_id = session.name
        ids, turns = [10**7 + index, session_id], []
        assert len(ids) == PROMPT_TOKENS
        kept = [turn.tokens[:] for turn in session.earlier_turns]
        assert world.rules.redrafts or not any(turn.draft for turn in session.earlier_turns)
        for number, (length, tool_s) in enumerate(world.turns(index, session_id)):
            world.open_turns[request_id] = uid, session_id, number, len(ids)
            before = kept[number] if number < len(kept) else array("i")
            output = await self.client.generate(
                request_id, prompt_ids=list(ids), sampling_params={**sampling_params, "max_tokens": length}
            )
            assert output.token_ids[: len(before)] == before.tolist(), "it does not continue the earlier tokens"
            turns.append(output.token_ids)
            ids += [*output.token_ids, 10**8 + number]
            calls = world.tools[at := (uid, session_id, number)]
            await self.tool.call({"at": at, "seconds": tool_s})
            world.replayed += world.tools[at] == calls
        if world.replays:
            world.check_experts(ids[:-1], output.routed_experts)
        if world.bad(index) and world.about("where", index).random() < 0.5:
            raise RuntimeError("a bad prompt")
        output = SimpleNamespace(
            extra_fields=dict(output.extra_fields),
            response_mask=[1] * sum(map(len, turns)),
            turns=turns,
            reward_score=None,
        )
        await self._agent_loop_postprocess(output, False, uid=uid, session_id=session_id, index=index, **prompt)


async def judge(self, outputs, kwargs):
    """Simulate verl's reward."""
    world, row, number = self.world, kwargs["index"], current().sample
    await asyncio.sleep(world.about("judge", row, number).choice([0.0, 0.1, 5.0]))
    if world.bad(row) or world.judge_is_away():
        raise RuntimeError("no reward")
    outputs[0].reward_score = 0.0 if world.flat(row) else float(number == 0)


async def store(self, output, validate, **kwargs):
    """Simulate verl's postprocessing: reward and trajectory."""
    world = self.world
    await self._compute_score([output], kwargs)
    key = f"{kwargs['uid']}_{kwargs['session_id']}_0"
    said = [([*turn, 10**8], [1] * len(turn) + [0]) for turn in output.turns]  # a tool's answer after each
    tokens, mask = (torch.tensor([value for column in of for value in column]) for of in zip(*said, strict=True))
    fields = {"turns": output.turns, "extra_fields": output.extra_fields, "responses": tokens, "response_mask": mask}
    await world.queue.put([key], TRAIN, fields=[fields], tags=[{"status": "success"}])


def install(world, monkeypatch):
    """Install the cluster in the modules that use Ray and TransferQueue."""
    queue, cluster = world.queue, world.cluster
    monkeypatch.setattr(gc, "freeze", lambda: None)  # all processes are this one: every world would be kept

    tq = SimpleNamespace(
        async_kv_batch_put=queue.put,
        async_kv_batch_get=queue.fetch,
        async_kv_list=queue.list,
        async_kv_clear=queue.clear,
    )

    async def tensors(keys, partition_id, select_fields=None):
        data = await queue.fetch(keys, partition_id, select_fields)
        from verl.utils import tensordict_utils as tu

        batch = TensorDict({"index": torch.tensor(data["index"])}, batch_size=len(data["index"]))
        tu.assign_non_tensor_stack(batch, "uid", data["uid"])
        return batch

    ray = SimpleNamespace(get=cluster.get, kill=cluster.kill, get_runtime_context=cluster.get_runtime_context)
    for module in (coordinator, stored_attempts):
        monkeypatch.setattr(module, "tq", tq)
    monkeypatch.setattr(worker_module, "tq", SimpleNamespace(async_kv_batch_get=tensors))
    monkeypatch.setattr(stored_attempts, "list_of_dict_to_tensordict", lambda rows: rows)
    monkeypatch.setattr(worker_module._AgentLoopWorker, "_agent_loop_postprocess", store)
    monkeypatch.setattr(worker_module._AgentLoopWorker, "_compute_score", judge)
    for module in (coordinator, worker_pool, driver_module, replicas, manager):
        monkeypatch.setattr(module, "ray", ray)
    for module in (driver_module, replicas):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=cluster.sleep, monotonic=cluster.clock.time))
    gone = lambda replicas, hung_s: {r: "gone" for r in replicas if not r._server_handle.alive}  # noqa: E731
    for module in (replicas, topology):
        monkeypatch.setattr(module, "dead", gone)
    monkeypatch.setattr(topology, "SpareReplicas", lambda *_: world.spares)
    monkeypatch.setattr(replicas, "watched", lambda replicas, hung_s: contextlib.nullcontext({}))
    monkeypatch.setattr(driver_module.coordinator, "start", lambda name=None: world.coordinator)
    monkeypatch.setattr(coordinator, "add_log_handler", lambda: None)


def put_off(state):
    """Return the prompts of a state that are put off."""
    return [prompt["uid"] for prompt in state["ledger"]["prompts"] if prompt["put_off"]]


def most_entries(rules, filters):
    """Return the maximum number of entries: one for each sample, one more for each regenerated sample's draft, one for
    each prompt; also those of the batch in training, those put off, and a batch of filtered ones."""
    samples = rules.batch_samples * (2 if rules.redrafts else 1)
    return (rules.batches + 1 + 2 * rules.rounds + filters) * (samples + rules.batch_prompts)


def simulate(mode, seed, kills, monkeypatch, troubles=False, flat=0.15, mortal=MORTAL):
    """Run a world, and return it."""
    world = World(mode, seed, kills, troubles, flat, mortal)
    world.open_turns = {}
    with monkeypatch.context() as patch:
        install(world, patch)
        logging.disable(logging.CRITICAL)
        try:
            world.train()
            if not kills:
                # Where samples continue, the last checkpoint's turns of samples that ran then are still stored.
                assert world.rules.continues or not world.twice, "a finished sample has a separate entry for its report"
                assert world.queue.most <= 1.1 * most_entries(world.rules, world.filters)
            assert not world.cluster.faults, world.cluster.faults
        except BaseException as error:
            error.add_note(f"mode {mode!r}, seed {seed}, kills {kills}: {world.deaths}, {world.rules}")
            raise
        finally:
            logging.disable(logging.NOTSET)
            world.cluster.close()
    return world
