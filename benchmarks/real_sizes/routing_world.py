"""Simulated run with many replicas and the real router and coordinator, for :mod:`benchmarks.real_sizes.routing`.

Coordinator, worker pool, reports, router, placement, forecasts and rules are the product's, driven by asyncio
(:mod:`benchmarks.real_sizes.virtual`). Agent loop workers and the trainer call them as real ones do. Engines are
:class:`verl_rhyme.simulation.engine.Engine`, which decode in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.real_sizes.virtual import Actor, Clock, Queue
from verl_rhyme.agent_loop import stored_attempts
from verl_rhyme.agent_loop.reports import Reports
from verl_rhyme.agent_loop.session import PROMPTS, SESSIONS
from verl_rhyme.agent_loop.stored_attempts import TRAIN
from verl_rhyme.config import PLACEMENTS
from verl_rhyme.coordinator import coordinator, worker_pool
from verl_rhyme.coordinator.coordinator import Coordinator
from verl_rhyme.observability.request_record import RequestRecord
from verl_rhyme.placement import Move
from verl_rhyme.planning.cost import ReplicaCost
from verl_rhyme.processes.messages import LoadedPrompt, ResumeState, RunSettings
from verl_rhyme.processes.request import FIELD
from verl_rhyme.router.router import PlacementRouter
from verl_rhyme.scheduling.attempts import Attempt, Ended, Start
from verl_rhyme.scheduling.expectations import Expectations
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.simulation.engine import Engine, Request

PROMPT_TOKENS, MOST_TOKENS, WORKERS = 200, 20_480, 16
#: Seconds of a training step with weight sync, of a reward, and between two samples of the loads.
TRAIN_S, REWARD_S, LOOK_S = 120.0, 0.5, 2.0


@dataclass
class Ran:
    """Requests of a training step, and the loads of the replicas during it.

    Attributes:
        groups, replicas, began, ended, tokens: Values of each request.
        seconds: Virtual seconds from the new weights to the last response's reward.
        running, cached: float [looks, replicas], requests and tokens in KV caches.
    """

    groups: list[str] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    seconds: float = 0.0
    running: list[list[int]] = field(default_factory=list)
    cached: list[list[float]] = field(default_factory=list)


class Replica:
    """One engine, and the futures of its requests."""

    def __init__(self, number: int, cost: ReplicaCost) -> None:
        self.number, self.engine = number, Engine(cost)
        self._answers: dict[str, asyncio.Future[float]] = {}
        self._had: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, request: Request) -> float:
        """Generate and return the request's tokens; fewer than wanted if the request moves to another replica."""
        loop = asyncio.get_running_loop()
        answer = self._answers[str(request.name)] = loop.create_future()
        self._had[str(request.name)] = request.emitted
        self.engine.submit(request, loop.time())
        self._plan()
        return await answer

    def leave(self, name: str) -> None:
        """Withdraw a request that moves to another replica or is interrupted; ignore an unknown one."""
        if name in self._answers:
            _, emitted = self.engine.withdraw(name, asyncio.get_running_loop().time())
            self._end(name, emitted)
            self._plan()

    def progress(self, names: Sequence[str]) -> dict[str, int]:
        """Return the tokens generated on this replica by its requests."""
        now = asyncio.get_running_loop().time()
        here = [name for name in names if name in self._answers]
        return {name: int(self.engine.progress(name, now) - self._had[name]) for name in here}

    def cache_tokens(self) -> int:
        return int(self.engine.cost.room)

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if (when := self.engine.next_event()) < math.inf:
            self._timer = asyncio.get_running_loop().call_at(when, self._step)

    def _step(self) -> None:
        for request in self.engine.step(asyncio.get_running_loop().time()):
            self._end(str(request.name), request.tokens)
        self._plan()

    def _end(self, name: str, emitted: float) -> None:
        del self._had[name]
        self._answers.pop(name).set_result(emitted)


class Worker:
    """Agent loop worker: calls the router, waits for the engine, reports."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._at: dict[str, str] = {}  # running attempts and their replicas
        self._planned: dict[str, str] = {}
        self._generating: set[str] = set()
        self._interrupted: set[str] = set()
        self._reports = Reports()
        self._tasks: set[asyncio.Task[None]] = set()

    async def attach(self, coordinator_handle: Any) -> dict[str, str]:
        self._reports.attach(coordinator_handle)
        return dict(self._at)

    async def kept(self) -> list[str]:
        return []

    def forget(self, names: list[str]) -> None:
        pass

    async def start_attempts(self, starts: list[Start], step: int) -> None:
        for start in starts:
            self._at[start.name], self._planned[start.name] = (start.assignment.replica,) * 2
            task = asyncio.ensure_future(self._run(start))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def attempts(self) -> list[str]:
        return list(self._at)

    async def replica_by_attempt(self) -> dict[str, str]:
        return dict(self._at)

    def abandon(self, names: list[str]) -> None:
        raise AssertionError(f"{len(names)} samples are abandoned, where every sample is trained")

    def move(self, moves: list[Move]) -> None:
        for move in moves:
            if (at := self._at.get(move.id)) in self._world.replicas:
                self._planned[move.id] = move.replica
                self._world.replicas[at].object.leave(move.id)

    def interrupt(self) -> None:
        """Interrupt the attempts that generate: their replicas take new weights."""
        for name, at in self._at.items():
            if name in self._generating:
                self._interrupted.add(name)
                self._world.replicas[at].object.leave(name)

    async def _run(self, start: Start) -> None:
        world, clock = self._world, asyncio.get_running_loop()
        uid, number, _ = Attempt.named(start.name)
        wanted, request = float(world.length(uid, number)), 0
        emitted, first_version, records = world.kept.pop((uid, number), (0.0, world.version, []))
        while emitted < wanted:
            known = {
                "key": world.key(uid),
                "sample": number,
                "attempt": request,
                "prompt_tokens": PROMPT_TOKENS + int(emitted),
            }
            asked = {"assignment": replace(start.assignment, replica=self._planned[start.name])}
            queued = clock.time()
            at, replica = await world.router.acquire_server.remote(start.name, **{FIELD: asked})
            self._at[start.name], began, had = at, clock.time(), emitted
            self._generating.add(start.name)
            emitted = await replica.object.generate(
                Request(start.name, uid, PROMPT_TOKENS, wanted, emitted, priority=start.assignment.priority)
            )
            self._generating.discard(start.name)
            world.router.release_server.remote(at, request_id=start.name)
            world.ran(uid, replica.object.number, began, emitted - had)
            records.append(self._record(known, replica.object.number, queued, int(emitted - had)))
            request += 1
            if emitted < wanted and start.name in self._interrupted:
                self._interrupted.discard(start.name)
                world.kept[uid, number] = emitted, first_version, records
                world.queue.partitions[SESSIONS][start.name] = {"status": "interrupted"}
                await self._reports.send(Ended(start.name, "interrupted", int(emitted), first_version, records))
                self._at.pop(start.name)
                return
        self._interrupted.discard(start.name)
        world.queue.partitions[SESSIONS][start.name] = {"status": "generated"}
        await self._reports.send(Ended(start.name, "generated", int(wanted), first_version, records))
        await asyncio.sleep(REWARD_S)
        world.queue.partitions[TRAIN][f"{start.name}_0"] = {"status": "success", "seq_len": int(wanted)}
        await self._reports.send(Ended(start.name, "finished"))
        self._at.pop(start.name)  # not earlier: the coordinator would take the attempt for lost

    def _record(self, known: dict[str, Any], replica: int, queued: float, made: int) -> dict[str, Any]:
        now = asyncio.get_running_loop().time()
        return RequestRecord(
            id=f"{known['key']}{known['sample']:08x}{int(1000 * now):x}",
            prompt_key=known["key"],
            sample=known["sample"],
            attempt=known["attempt"],
            replica=replica,
            node=str(replica // self._world.replicas_a_node),
            queued_at=queued,
            started_at=queued,
            first_token_at=queued,
            finished_at=now,
            prompt_tokens=known["prompt_tokens"],
            response_tokens=made,
            policy_version_start=self._world.version,
            policy_version_end=self._world.version,
            stop_reason="stop",
        ).to_dict()


class World:
    """Simulated run with one placement policy.

    Args:
        policy: Placement policy; ``least_loaded``: the router decides.
        options: Of the policy.
        replicas: How many.
        cost: Of each.
        lengths: int [epochs, prompts, samples], tokens.
        batch: Prompts of a training batch.
        replicas_a_node: Replicas that share a history.
        max_staleness: 0: engines stop while the actor trains. Else they are separate, and the trainer takes parts of a
            quarter of a batch.
        known: Prompts whose lengths are known from earlier epochs, 64 each.
    """

    def __init__(
        self,
        policy: str,
        options: dict[str, Any],
        replicas: int,
        cost: ReplicaCost,
        lengths: np.ndarray,
        batch: int,
        replicas_a_node: int = 8,
        max_staleness: int = 0,
        known: int = 0,
    ) -> None:
        self.max_staleness, self.known = max_staleness, known
        self.kept: dict[tuple[str, int], tuple[float, int, list[Any]]] = {}  # by interrupted sample
        self.policy, self.options, self.cost = policy, options, cost
        self.lengths, self.batch, self.samples = lengths, batch, lengths.shape[2]
        self.replicas_a_node = replicas_a_node
        self.queue, self.version, self.steps = Queue(), 0, list[Ran]()
        self.clock = Clock()
        self.replicas = {
            f"10.0.{i // 256}.{i % 256}:{40000 + 7 * i % 9973}": Actor(lambda i=i: Replica(i, cost))  # type: ignore[misc]
            for i in range(replicas)
        }
        self._order = self._prompts()
        self._of: dict[str, tuple[int, int]] = {}  # epoch and prompt of the current groups
        self._keys: dict[str, str] = {}
        self.router = Actor(lambda: PlacementRouter(self.replicas))
        self.takes: list[float] = []  # CPU seconds from the last report to the batch

    def _prompts(self) -> Iterator[tuple[int, int]]:
        for epoch in range(len(self.lengths)):
            for prompt in np.random.default_rng(epoch).permutation(self.lengths.shape[1]).tolist():
                yield epoch, prompt

    def length(self, uid: str, number: int) -> int:
        epoch, prompt = self._of[uid]
        return int(self.lengths[epoch, prompt, number])

    def key(self, uid: str) -> str:
        return self._keys[uid]

    def prompt(self, uid: str) -> tuple[int, int]:
        """Return the epoch and number of a group's prompt."""
        return self._of[uid]

    def ran(self, uid: str, replica: int, began: float, tokens: float) -> None:
        step = self.steps[-1]
        step.groups.append(uid)
        step.replicas.append(replica)
        step.began.append(began)
        step.ended.append(self.clock.time())
        step.tokens.append(tokens)

    def run(self, steps: int) -> None:
        """Run a number of training steps."""
        with self._installed():
            self.coordinator = Actor(Coordinator)
            try:
                self.clock.run_until_complete(self._train(steps))
            finally:
                for task in asyncio.all_tasks(self.clock):
                    task.cancel()
                self.clock.run_until_complete(asyncio.sleep(0))
                self.clock.close()

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        """Install the simulation in the modules that use Ray and TransferQueue."""
        ray = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(current_actor=self.coordinator))
        with contextlib.ExitStack() as stack:
            for module in (coordinator, stored_attempts):
                stack.enter_context(mock.patch.object(module, "tq", self.queue))
            for module in (coordinator, worker_pool):
                stack.enter_context(mock.patch.object(module, "ray", ray))
            stack.enter_context(mock.patch.object(coordinator, "add_log_handler"))
            stack.enter_context(mock.patch.object(coordinator, "time", SimpleNamespace(time=self.clock.time)))
            yield

    async def _train(self, steps: int) -> None:
        handle, count = self.coordinator, len(self.replicas)
        planned = self.policy in PLACEMENTS
        k = self.max_staleness
        rules = Rules(self.batch, self.batch * self.samples, max_staleness=k, separate=k > 0)
        slots = count * self.cost.slots
        finite = math.isfinite(self.cost.room)
        room = int(count * self.cost.room) if finite else None
        if finite:
            for name in self.replicas:
                await self.router.report_capacity.remote(name, int(self.cost.room))
        setting = RunSettings(
            rules=rules,
            filters=None,
            limit=slots,
            min_starts=1,
            slots=slots,
            lost_after=60.0,
            room=room,
            router=self.router,
            placement=(self.policy, self.options) if planned else None,
            cost=self.cost,
            response_limit=MOST_TOKENS,
        )
        workers = [Actor(lambda: Worker(self)) for _ in range(WORKERS)]
        await handle.open.remote(setting, workers, ResumeState(None, [], 0, steps, 1, self._lengths()), True)
        work = await handle.publish.remote(0, steps)
        for step in range(steps):
            began = self.clock.time()
            self.steps.append(Ran())
            looking = asyncio.ensure_future(self._look())
            while work is not None:
                if work.prompts:
                    await handle.add_prompts.remote(self._load(work.prompts))
                part = rules.batch_samples // 4 if k else None
                work = await handle.wait_for_batch.remote(False, rules.stops, part)
            reply = await handle.take_batch.remote()
            if reply is None:
                raise RuntimeError(f"step {step}: the batch was not ready though all samples had their rewards")
            self.steps[-1].seconds = self.clock.time() - began
            looking.cancel()
            if k:
                work = await handle.pending_work.remote()
                await handle.add_prompts.remote(self._load(work.prompts))
                await asyncio.sleep(TRAIN_S)
                await handle.pause.remote()
                for worker in workers:
                    worker.object.interrupt()
                await asyncio.sleep(REWARD_S)
            else:
                await handle.pause.remote()
                await asyncio.sleep(TRAIN_S)
            await self.queue.async_kv_clear([*reply.keys, *reply.dropped], TRAIN)
            self.version += 1
            for replica in self.replicas.values():
                replica.object.engine.forget()
            work = await handle.publish.remote(self.version, steps - self.version)

    def _lengths(self) -> dict[str, Any] | None:
        if not self.known:
            return None
        expectations = Expectations(MOST_TOKENS)
        for prompt, lengths in enumerate(np.random.default_rng(3).integers(1, MOST_TOKENS, (self.known, 64)).tolist()):
            expectations.predictor.learn(_key(prompt), lengths)
        return expectations.state_dict()

    def _load(self, count: int) -> list[LoadedPrompt]:
        handed = []
        for epoch, prompt in (next(self._order) for _ in range(count)):
            uid = f"{epoch * self.lengths.shape[1] + prompt:032x}"
            self._of[uid] = epoch, prompt
            self._keys[uid] = _key(prompt)
            self.queue.partitions[PROMPTS][uid] = {}
            handed.append(LoadedPrompt(uid, self.samples, self._keys[uid]))
        return handed

    async def _look(self) -> None:
        engines = [replica.object.engine for replica in self.replicas.values()]
        step = self.steps[-1]
        while True:
            await asyncio.sleep(LOOK_S)
            step.running.append([engine.running for engine in engines])
            step.cached.append([engine.cached for engine in engines])


def _key(prompt: int) -> str:
    return hashlib.blake2b(b"%d" % prompt, digest_size=16).hexdigest()


def tokens_by(step: Ran, replicas: int) -> np.ndarray:
    """Return float [replicas], the tokens that each generated in a step."""
    made: defaultdict[int, float] = defaultdict(float)
    for replica, tokens in zip(step.replicas, step.tokens, strict=True):
        made[replica] += tokens
    return np.array([made[i] for i in range(replicas)])
