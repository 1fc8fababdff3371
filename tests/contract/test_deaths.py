"""Replicas that die, hang or are busy, and their replacement, with real actors.

``tests/unit/trainer/training_world.py`` runs the same replacement, and replicas that rest, in virtual time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import ray
from ray.exceptions import OutOfMemoryError, RayError
from verl.single_controller.ray.base import RayResourcePool

from verl_rhyme.engine.replica import RhymeReplica
from verl_rhyme.processes import deaths
from verl_rhyme.processes.deaths import ReplicaDied, WatchedCheckpointManager, dead, is_death
from verl_rhyme.router.router import PlacementRouter
from verl_rhyme.trainer import replicas
from verl_rhyme.trainer.replicas import SpareReplicas

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker can import it

pytestmark = [
    pytest.mark.xdist_group("deaths"),  # they share a cluster
    pytest.mark.slow,  # their processes take seconds to start
]


class EngineDeadError(Exception):
    """Engine exception with the name of vLLM's."""


class Server:
    """Server of a replica that answers health checks; with the error of its engine, once it has one."""

    error: Exception | None = None

    async def healthy(self) -> int:
        if self.error is not None:
            raise self.error
        return os.getpid()

    async def fail(self) -> None:
        self.error = EngineDeadError()

    async def cache_tokens(self) -> int:
        return 4096

    async def suspend(self) -> None:
        await self.healthy()

    async def generate(self) -> None:
        await asyncio.Event().wait()


class Replica:
    """A replica of verl without an engine; its resource pool holds processors as devices."""

    #: Processors of a replica on each node, number of nodes, and errors of the next starts.
    needs, nnodes, troubles = 0, 1, deque[str]()

    def __init__(self, replica_rank: int = 0, **_: Any) -> None:
        self.replica_rank = replica_rank
        self.servers: list[Any] = []
        self.workers: list[Any] = []
        self.resource_pool: Any = None
        self._server_address, self._server_handle = f"s{replica_rank}", None

    async def init_standalone(self) -> None:
        if self.troubles:
            raise ValueError(self.troubles.popleft())
        if self.needs:
            name = f"rollout_pool_{self.replica_rank}"
            nodes = [1] * self.nnodes
            self.resource_pool = RayResourcePool(nodes, use_gpu=False, max_colocate_count=self.needs, name_prefix=name)
            self.resource_pool.get_placement_groups(device_name="cpu")
        self._server_handle = ray.remote(num_cpus=0)(Server).remote()
        self.servers = [self._server_handle]

    def pid(self) -> int:
        return ray.get(self._server_handle.healthy.remote())


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def _served(rank: int) -> Iterator[Replica]:
    made = Replica(rank)
    asyncio.run(made.init_standalone())
    yield made
    ray.kill(made._server_handle)


@pytest.fixture
def replica(cluster: None) -> Iterator[Replica]:
    yield from _served(0)


@pytest.fixture
def other(cluster: None) -> Iterator[Replica]:
    yield from _served(1)


def test_server_with_many_requests_can_answer_health_checks() -> None:
    """At DAPO's batch sizes a replica has 2048 requests and more: each holds one of its actor's calls."""
    ours = object.__new__(RhymeReplica)
    ours.config, ours._rhyme = SimpleNamespace(max_num_seqs=1024), True
    assert ours.max_concurrency > 10_000


def test_busy_replica_is_awaited_and_hung_one_is_dead(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pid = replica.pid()
    monkeypatch.setattr(deaths, "_SILENT_S", 0.3)
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1.5, os.kill, (pid, signal.SIGCONT)).start()
    assert dead([replica], 30.0) == {}
    assert "replicas [0] are alive but do not answer" in caplog.text
    os.kill(pid, signal.SIGSTOP)
    assert dead([replica], 1.0) == {replica: "no answer for 1 s"}


def test_replica_without_its_process_is_dead_at_once(replica: Replica, other: Replica) -> None:
    os.kill(other.pid(), signal.SIGKILL)
    [(found, why)] = dead([replica, other], 30.0).items()
    assert found is other
    assert why


class Weights:
    """The carrier of weights, which waits for the workers of its replicas."""

    sent: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, config: Any = None, actor_wg: Any = None, replicas: Any = ()) -> None:
        config = config or SimpleNamespace(backend="mooncake", engine_kwargs={})
        self.config, self.actor_wg, self.replicas = config, actor_wg, replicas

    def deliver(self, replicas: Any, version: int) -> None:
        self.sent += [(replica.replica_rank, version) for replica in replicas]

    def release(self, replica: Any) -> None: ...

    def update_weights(self, seconds: float) -> list[float]:
        return ray.get([worker.send.remote(seconds) for replica in self.replicas for worker in replica.workers])

    def resume_generation_replicas(self) -> None:
        ray.get([replica.servers[0].generate.remote() for replica in self.replicas])


class Sender:
    """The worker that sends weights to an engine: it blocks until they are received."""

    def send(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds


@pytest.fixture
def sender(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(deaths, "_WATCH_S", 0.1)
    monkeypatch.setattr(deaths, "_NOTICE_S", 0.1)
    made = ray.remote(num_cpus=0)(Sender).remote()
    replica.workers = [made]
    yield made
    ray.kill(made)


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        ("dies", r"replica 1 died during its weight sync: .*\n.* from the last checkpoint"),
        ("hangs", "no answer for 3 s"),
        ("a worker dies", r"died during a weight sync: .*\n.* from the last checkpoint"),  # its server lives
    ],
)
def test_weight_sync_does_not_wait_for_a_dead_replica(
    replica: Replica, other: Replica, sender: Any, monkeypatch: pytest.MonkeyPatch, happens: str, words: str
) -> None:
    """Nor does it wait for the other replica, whose call blocks."""
    pid = other.pid()
    [worker] = other.workers = [ray.remote(num_cpus=0)(Sender).remote()]
    what: dict[str, Any] = {
        "dies": lambda: os.kill(pid, signal.SIGKILL),
        "hangs": lambda: os.kill(pid, signal.SIGSTOP),
        "a worker dies": lambda: ray.kill(worker),
    }
    threading.Timer(0.5, what[happens]).start()
    hung_s = 3.0 if happens == "hangs" else 300.0  # the other answers also on a busy machine
    with pytest.raises(ReplicaDied, match=words):
        WatchedCheckpointManager(Weights(replicas=[replica, other]), hung_s).update_weights(600)
    assert replica.pid()
    ray.kill(worker)


def test_calls_to_a_dead_engine_are_not_awaited(replica: Replica, sender: Any) -> None:
    """The server outlives its engine, and its call does not end."""
    threading.Timer(0.5, lambda: replica.servers[0].fail.remote()).start()
    with pytest.raises(RayError) as raised:
        WatchedCheckpointManager(Weights(replicas=[replica]), 300.0).resume_generation_replicas()
    assert is_death(raised.value)
    assert is_death(OutOfMemoryError("the node ran low on memory"))


def test_slow_weight_load_is_awaited(replica: Replica, sender: Any) -> None:
    pid = replica.pid()
    weights = WatchedCheckpointManager(Weights(replicas=[replica]), 300.0)
    os.kill(pid, signal.SIGSTOP)
    assert weights.update_weights(1.0) == [1.0]
    os.kill(pid, signal.SIGCONT)
    assert weights.update_weights(0.5) == [0.5]
    assert replica.pid() == pid


@pytest.fixture(scope="module")
def router(cluster: None) -> Any:
    """One for all worlds: its process imports verl."""
    return ray.remote(PlacementRouter).remote({})


class World:
    """Two replicas in service."""

    def __init__(self, router: Any) -> None:
        made = [Replica(rank) for rank in range(2)]
        for replica in made:
            asyncio.run(replica.init_standalone())
        handles = {replica._server_address: replica._server_handle for replica in made}
        ray.get(router.remove_servers.remote(ray.get(router.get_all_servers.remote())))
        ray.get(router.add_servers.remote(handles))
        self.servers = SimpleNamespace(
            rollout_replicas=made,
            rollout_replica_class=Replica,
            rollout_config=SimpleNamespace(n_gpus_per_node=1),
            model_config=None,
            server_addresses=list(handles),
            server_handles=list(handles.values()),
            global_load_balancer=router,
        )
        self.weights = Weights(replicas=made)
        self.spares = SpareReplicas(self.servers, self.weights, 300.0)

    def kill(self, *ranks: int) -> None:
        for replica in self.servers.rollout_replicas:
            if replica.replica_rank in ranks:
                os.kill(replica.pid(), signal.SIGKILL)

    def mended(self, version: int, ranks: list[int]) -> None:
        """Wait until these replicas serve."""
        deadline = time.monotonic() + 60
        while sorted(self.ranks()) != ranks:
            assert time.monotonic() < deadline, self.ranks()
            assert self.spares.replace_dead(version) == 0
            time.sleep(0.02)

    def ranks(self) -> list[int]:
        serving = ray.get(self.servers.global_load_balancer.get_all_servers.remote())
        ranks = [replica.replica_rank for replica in self.weights.replicas]
        assert sorted(serving) == sorted(self.servers.server_addresses) == [f"s{rank}" for rank in sorted(ranks)]
        return ranks

    def capacities(self) -> dict[str, int]:
        fleet = ray.get(self.servers.global_load_balancer.fleet.remote())
        return {address: tokens for address, (_, tokens) in fleet.items() if tokens is not None}

    def close(self) -> None:
        for replica in self.servers.rollout_replicas:
            ray.kill(replica._server_handle)


@pytest.fixture
def world(router: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(replicas, "_PAUSE_S", 0.05)
    monkeypatch.setattr(replicas, "_LOOK_S", 0.05)
    monkeypatch.setattr(Replica, "troubles", deque())
    monkeypatch.setattr(Weights, "sent", [])
    made = World(router)
    yield made
    made.close()


def test_resting_replica_is_out_of_service_and_wakes_with_weights(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """One that died is replaced then."""
    [first, second], left = world.servers.rollout_replicas, []
    assert world.spares.suspend(first, lambda address: left.append((address, world.ranks())) or 3) == 3
    assert left == [("s0", [1])], "it is out of the router before what runs there moves"
    assert world.spares.replace_dead(5) == 0
    assert world.ranks() == [1]
    assert world.spares.wake_up(7) is first
    assert (world.ranks(), Weights.sent) == ([1, 0], [(0, 7)])
    assert world.capacities() == {"s0": 4096}
    assert world.spares.wake_up(7) is None, "nobody rests"
    ray.get(second._server_handle.fail.remote())
    world.spares.suspend(second, lambda address: 0)
    assert "replica 1 could not rest" in caplog.text
    assert world.spares.replace_dead(8) == 0
    assert world.spares.wake_up(9) is None
    world.mended(9, [0, 2])
    assert (Weights.sent, world.spares.resting) == ([(0, 7), (2, 9)], [])


def test_no_replica_starts_if_weights_cannot_be_sent_to_it_alone(world: World) -> None:
    world.weights.config = SimpleNamespace(backend="delta_sharded", engine_kwargs={})
    world.kill(0)
    with pytest.raises(
        ReplicaDied, match=r"replica 0 died .* replaced.*: .* only the changes since.*\nThe same command"
    ):
        world.spares.replace_dead(7)
    assert Weights.sent == []


def test_failed_start_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A replica that is up may die before a step ends, too; a failed weight transfer to it would end the run."""

    def deliver(self: Weights, replicas: Any, version: int) -> None:
        for replica in replicas:
            replica.pid()
        sent(self, replicas, version)

    def until(reached: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 30
        while not reached():
            assert time.monotonic() < deadline
            assert world.spares.replace_dead(8) == 0

    sent = Weights.deliver
    monkeypatch.setattr(Weights, "deliver", deliver)
    monkeypatch.setattr(replicas, "_PAUSE_S", 0.4)
    Replica.troubles.append("Total available GPUs 0 is less than total desired GPUs 1")
    world.kill(0)
    assert world.spares.replace_dead(7) == 1
    until(lambda: "1 replicas are missing" in caplog.text)
    assert "the next try to start one is in 0 s: Total available GPUs 0" in caplog.text
    assert world.spares.replace_dead(8) == 0, "not before the pause is over"
    assert (world.ranks(), world.spares._starts) == ([1], [])
    until(lambda: world.spares._starts)
    [start] = world.spares._starts
    start.up.result(60)
    os.kill(start.replica.pid(), signal.SIGKILL)
    until(lambda: "replica 3 died before it served" in caplog.text)
    world.mended(9, [1, 4])
    assert Weights.sent == [(4, 9)]


def test_run_ends_if_no_replica_is_left_or_can_start(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_NONE_LEFT_S", 1.0)
    Replica.troubles.extend(["no devices"] * 1000)
    world.kill(0, 1)
    began = time.monotonic()
    with pytest.raises(ReplicaDied, match=r"no rollout replica is left, .*no devices\nThe same command"):
        world.spares.replace_dead(7)
    assert 1.0 <= time.monotonic() - began < 20.0


def test_replicas_that_span_nodes_start_one_by_one(
    cluster: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    async def init_standalone(self: Replica) -> None:
        begun.append(self)
        seated.append([bool(each.resource_pool and each.resource_pool.pgs) for each in begun[:-1]])
        await start(self)

    begun: list[Replica] = []
    seated: list[list[bool]] = []
    monkeypatch.setattr(Replica, "nnodes", 2)
    world: World = request.getfixturevalue("world")
    start = Replica.init_standalone
    monkeypatch.setattr(Replica, "init_standalone", init_standalone)
    monkeypatch.setattr(Replica, "needs", 1)  # of two processors: devices for one replica of two nodes
    world.kill(0, 1)
    assert world.spares.replace_dead(7) == 2
    world.mended(7, [2])
    world.kill(2)
    assert world.spares.replace_dead(8) == 1
    world.mended(8, [3])
    assert seated[:2] == [[], [True]]
    replicas.kill_replica(world.servers.rollout_replicas[0])
