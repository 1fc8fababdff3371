"""The weight relay among real actors: a version is written once, fetched by the other node's relay, loaded there, and
compared with what the actor sent.

The nodes are two names for one machine; each has a relay and a folder of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayActorError

from verl_rhyme.actor.sent_weights import SentWeights
from verl_rhyme.config import WeightsConfig
from verl_rhyme.weights import manager as managers
from verl_rhyme.weights import relay
from verl_rhyme.weights.broadcast import Broadcast, KeptGroup
from verl_rhyme.weights.carrier import carrier
from verl_rhyme.weights.engine import RelayCheckpointEngine, register
from verl_rhyme.weights.folder import Folder, WeightsError
from verl_rhyme.weights.manager import RelayManager
from verl_rhyme.weights.samples import Held, Sent
from verl_rhyme.weights.tracing import Trace

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker can import it

pytestmark = [
    pytest.mark.xdist_group("relay"),  # of one cluster
    pytest.mark.slow,  # its processes take seconds to start
]


def weights(version: int) -> dict[str, torch.Tensor]:
    return {f"layer.{n}": torch.full((1000,), float(version * 10 + n)) for n in range(6)}


class Actor:
    """A worker of verl's actor or of a replica, reduced to weight transfers."""

    def __init__(self, node: str, master: bool) -> None:
        self.node = node
        self.engine = RelayCheckpointEngine(8000, is_master=master)
        self.loaded: dict[str, torch.Tensor] = {}
        self.sent: Sent | None = None
        self.held: Held | None = None
        self.fault = ""

    async def execute_checkpoint_engine(self, method: str, **kwargs: Any) -> Any:
        result = getattr(self.engine, method)(**kwargs)
        return {"node": self.node} if method == "prepare" else result

    async def send(self, version: int) -> dict[str, Any]:
        engine = SimpleNamespace(get_per_tensor_param=lambda: (weights(version).items(), None), module=None)
        with SentWeights(engine, version) as sent:
            await self.engine.send_weights(engine.get_per_tensor_param()[0], global_steps=version)
        self.sent = sent.result()
        return {}

    async def sent_weights(self) -> Sent | None:
        return self.sent

    async def update_weights(self, global_steps: int) -> None:
        """Load as an engine does: into parameters, with a trace."""
        if self.fault == "old" and self.held is not None:
            self.held.version = global_steps - 1
            return
        received = {name: tensor async for name, tensor in self.engine.receive_weights(global_steps)}
        self.loaded = {name: torch.zeros_like(tensor) for name, tensor in received.items()}
        with Trace(received.items(), global_steps) as trace:
            for name, tensor in received.items():
                self.loaded[name].copy_(tensor)
        self.held = Held(global_steps, trace.values)
        if self.fault == "torn":
            self.held.values["layer.4"][0][2][-1] = 0.0

    async def held_weights(self) -> list[dict[str, Any]]:
        return [vars(self.held or Held())]

    async def break_down(self, fault: str) -> None:
        self.fault = fault

    async def first(self) -> float:
        return float(self.loaded["layer.0"][0])

    async def abort_all_requests(self) -> None: ...
    async def release_kv_cache(self) -> None: ...
    async def resume_kv_cache(self) -> None: ...
    async def resume_engine_generation(self) -> None: ...
    async def open_submission_gate(self) -> None: ...

    async def path(self) -> str:
        assert self.engine._folder is not None
        return str(self.engine._folder.path)


class ActorGroup:
    """verl's ``RayWorkerGroup`` of the actor."""

    def __init__(self, ranks: list[Any]) -> None:
        self.ranks, self.world_size = ranks, len(ranks)

    def execute_checkpoint_engine(self, method: list[str], **arguments: list[Any]) -> list[Any]:
        """Call all ranks as verl does: each argument has a value for each rank."""
        return [
            rank.execute_checkpoint_engine.remote(method[n], **{name: each[n] for name, each in arguments.items()})
            for n, rank in enumerate(self.ranks)
        ]

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        assert mode == "relay"
        return [rank.send.remote(global_steps) for rank in self.ranks]

    def sent_weights(self) -> list[Sent | None]:
        return ray.get([rank.sent_weights.remote() for rank in self.ranks])


class Replica:
    def __init__(self, rank: int, node: str) -> None:
        self.replica_rank = rank
        self.workers = self.servers = [on(node, False)]

    def serves(self) -> float:
        return ray.get(self.workers[0].first.remote())


def on(node: str, master: bool) -> Any:
    return ray.remote(num_cpus=0)(Actor).remote(node, master)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    register()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def manager(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayManager]:
    """One manager for all tests, which build on each other: each process takes seconds to start."""
    here, start = ray.get_runtime_context().get_node_id(), relay.start
    folder = str(tmp_path_factory.mktemp("relay"))
    config = SimpleNamespace(backend="relay", custom_backend_module=None, engine_kwargs={"relay": {"folder": folder}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay, "start", lambda node, root, *options: start(here, root, *options))
        replicas = [Replica(0, "near"), Replica(1, "far")]
        yield RelayManager(config, ActorGroup([on("near", True)]), replicas, WeightsConfig(), {})


def kill(relay: Any) -> None:
    """Kill a relay and wait until it is dead."""
    ray.kill(relay)
    for _ in range(300):
        try:
            ray.get(relay.folder.remote())
        except RayActorError:
            return
        time.sleep(0.1)
    raise AssertionError("the relay is still alive")


def served(manager: RelayManager) -> list[float]:
    return [replica.serves() for replica in manager.replicas]


def test_each_node_has_one_copy_and_its_replicas_load_it(manager: RelayManager) -> None:
    for version in (1, 2, 3):
        manager.update_weights(version)
        assert served(manager) == [version * 10.0] * 2
    paths = [ray.get(replica.workers[0].path.remote()) for replica in manager.replicas]
    assert len(set(paths)) == 2, "each worker reads on its own node"
    assert [Folder(path).versions() for path in paths] == [[2, 3]] * 2


def test_another_site_gets_a_difference_and_the_update_returns_its_size(
    manager: RelayManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managers, "sites_of", lambda nodes, label: {node: node for node in nodes})
    manager._sites = {}
    ray.get([each.take_tally.remote() for each in manager._relays.values()])
    metrics = manager.update_weights(4)
    size = sum(tensor.nbytes for tensor in weights(4).values())
    assert 0 < metrics["rollout/weights/slow_link_mb"] * 1e6 < size / 4
    assert metrics["rollout/weights/damaged_chunks"] == metrics["rollout/weights/lost_chunks"] == 0
    assert served(manager) == [40.0] * 2
    manager._sites = {}


def test_a_dead_relay_is_replaced(manager: RelayManager) -> None:
    """That of the actor's node; a new replica loads what the dead one had."""
    manager.waits = False
    publish(manager, 7)
    kill(manager._relays["near"])
    manager.deliver([new := Replica(2, "far")])
    assert new.serves() == 70.0
    publish(manager, 8)
    assert served(manager) == [80.0] * 2


@pytest.mark.parametrize(
    ("fault", "waits", "named"),
    [
        ("old", True, r"worker 0 has loaded version \d+ last"),
        ("torn", False, r"layer\.4: worker 0 has 0, the actor 1\d4"),
    ],
)
def test_a_replica_with_other_weights_ends_the_run_before_it_serves(
    manager: RelayManager, fault: str, waits: bool, named: str
) -> None:
    manager.waits = waits
    version = manager._newest.version + 1
    [worker] = manager.replicas[1].workers
    ray.get(worker.break_down.remote(fault))
    with pytest.raises(
        WeightsError, match=f"replica 1 does not have the actor's weights of version {version}: {named}"
    ):
        publish(manager, version)
    ray.get(worker.break_down.remote(""))
    manager._behind.clear()
    publish(manager, version + 1)
    assert served(manager) == [10.0 * (version + 1)] * 2


def publish(manager: RelayManager, version: int) -> None:
    manager.update_weights(version)
    manager.finish_deliveries()


def test_a_backend_has_its_carrier() -> None:
    register()
    for name, kind in (("relay", RelayManager), ("nccl", KeptGroup), ("nixl", Broadcast), ("mine", Broadcast)):
        config = SimpleNamespace(backend="relay", custom_backend_module=None, engine_kwargs={})
        theirs = SimpleNamespace(backend=name, config=config, actor_wg=None, replicas=[])
        ours = carrier(theirs, WeightsConfig(pack=False), {"dtype": "bfloat16"})
        assert type(ours) is kind
        assert kind is not RelayManager or (ours._dtype, ours._options.pack) == ("bfloat16", False)
