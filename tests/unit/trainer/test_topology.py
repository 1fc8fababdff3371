"""Replacement of dead replicas while a trainer waits."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from ray.exceptions import ActorUnavailableError
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.coordinator import replicas
from verl_rhyme.coordinator.replicas import SpareReplicas, single_transfer_obstacle
from verl_rhyme.processes.deaths import ReplicaDied, WatchedCheckpointManager
from verl_rhyme.trainer import topology
from verl_rhyme.trainer.registry import TRAINERS, RhymeTrainerSync
from verl_rhyme.trainer.topology import Colocated, Separate
from verl_rhyme.weights.manager import RelayManager

MODES = {"colocate_async": Colocated, "separate_async": Separate}


@pytest.fixture(params=MODES)
def trainer(request, monkeypatch):
    """A trainer of each mode, whose last replica is found dead at the third check."""
    mode, looks = request.param, []

    def mend(self, version):
        looks.append(version)
        if len(looks) == 3:
            raise ReplicaDied("none is left")

    monkeypatch.setattr(MODES[mode], "mend", mend)
    config = compose(
        [
            "+rhyme=histospec",
            f"trainer.v1.trainer_mode={mode}",
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "trainer.v1.separate_async.parameter_sync_step=1",
            "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.n_gpus_per_node=1",
            "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
            "actor_rollout_ref.rollout.custom.rhyme.events.enable=false",
        ]
    )
    monkeypatch.setattr(topology, "_LOOK_S", 0.0)
    monkeypatch.setattr(ReplayBufferAsync, "_sync_metadata_from_transfer_queue", lambda self: None)
    made = TRAINERS[mode](config)
    made.replay_buffer.poll_interval = 0.001
    client = SimpleNamespace(get_client=lambda client_cls: client_cls(config))
    made.llm_server_manager = made.standalone_server_manager = client
    made.global_steps, made.looks = 3, looks
    return made


@pytest.mark.parametrize(("partition", "version"), [("train", 2), ("val", 3)])
def test_waiting_trainer_replaces_dead_replicas(trainer, partition, version):
    """If no replica is left, requests wait for new ones, or for the end of the run."""
    client = trainer.get_llm_client()
    assert isinstance(client, FullyAsyncLLMServerClient)
    assert client._patient
    with pytest.raises(ReplicaDied, match="none is left"):
        trainer.replay_buffer.sample(global_steps=3, partition_id=partition, batch_size=4)
    assert trainer.looks == [version] * 3


def test_no_replica_starts_while_the_actors_devices_serve(monkeypatch):
    replica = Mock(replica_rank=0)
    servers = {"llm_server_manager": [], "standalone_server_manager": [replica]}
    managers = {name: SimpleNamespace(get_replicas=lambda held=held: held) for name, held in servers.items()}
    trainer = SimpleNamespace(current_mode=HybridEngineMode.ROLLOUT, _rhyme=None, **managers)
    monkeypatch.setattr(topology, "dead", lambda replicas, hung_s: dict.fromkeys(replicas, "gone"))
    monkeypatch.setattr(topology, "readmit", lambda servers: None)
    assert Separate(trainer).mend(1) == 0
    servers["llm_server_manager"].append(replica)
    with pytest.raises(ReplicaDied, match="on the devices of the actor: gone"):
        Separate(trainer).mend(1)


@pytest.mark.parametrize(("gone", "expected"), [(0, 2), (1, 2)])
def test_a_broken_connection_is_tried_again(monkeypatch, gone, expected):
    """``gone``: replicas that died meanwhile."""
    answers = [ActorUnavailableError("the network", None)]
    calls = []

    def abort_replicas(**_):
        calls.append(1)
        if answers:
            raise answers.pop()

    trainer = SimpleNamespace(
        standalone_checkpoint_manager=SimpleNamespace(abort_replicas=abort_replicas), global_steps=1
    )
    monkeypatch.setattr(Separate, "mend", lambda self, version: gone)
    Separate(trainer).stop()
    assert len(calls) == expected
    answers.append(ValueError("no death"))
    with pytest.raises(ValueError, match="no death"):
        Separate(trainer).stop()


def test_backends_that_cannot_send_to_a_single_replica():
    for backend, workers, stopped in (("nixl", 1, True), ("nixl", 2, False), ("kimi_ckpt_engine", 8, True)):
        assert bool(single_transfer_obstacle(SimpleNamespace(backend=backend, engine_kwargs={}), workers)) is stopped
    for backend in ("mooncake", "nccl"):
        assert not single_transfer_obstacle(SimpleNamespace(backend=backend, engine_kwargs={}), 1)


@pytest.mark.parametrize("rhyme", [None, SimpleNamespace(placement=SimpleNamespace(policy=None), weights=None)])
def test_with_rhyme_trainers_replace_dead_replicas(monkeypatch, rhyme):
    names = ("checkpoint_manager", "standalone_checkpoint_manager")
    managers = {name: SimpleNamespace(replicas=[], backend="naive") for name in names}
    monkeypatch.setattr(PPOTrainer, "_setup", lambda self: self.__dict__.update(managers))
    trainer = object.__new__(RhymeTrainerSync)
    trainer._rhyme, trainer._event_log = rhyme, None
    trainer.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=None))
    trainer._setup()
    for name, manager in managers.items():
        assert isinstance(getattr(trainer, name), WatchedCheckpointManager) == (rhyme is not None)
        assert getattr(trainer, name) == manager


@pytest.mark.parametrize(("relayed", "expected"), [(True, ActorUnavailableError), (False, ReplicaDied)])
def test_with_the_relay_another_replica_starts_after_a_failed_send(monkeypatch, relayed, expected):
    """With other backends the actor may still be sending."""

    def fail(*_):
        raise ActorUnavailableError("it died", None)

    weights = Mock(config=None, actor_wg=None)
    if relayed:
        weights = object.__new__(RelayManager)
        monkeypatch.setattr(weights, "deliver", fail)
    monkeypatch.setattr(replicas, "watched", lambda _: nullcontext())
    monkeypatch.setattr(replicas, "CheckpointEngineManager", fail)
    spares = SpareReplicas(SimpleNamespace(rollout_replicas=[Mock(replica_rank=0)]), weights)
    with pytest.raises(expected):
        spares._send(Mock(replica_rank=1), 1)


def test_slow_replica_does_not_delay_publication(monkeypatch):
    """Deaths are found at the end of a later step; a trainer that waits anyway waits for the answers."""
    one, other = (Mock(replica_rank=rank, nnodes=1, servers=[], workers=[None]) for rank in range(2))
    servers = SimpleNamespace(rollout_replicas=[one, other], global_load_balancer=Mock())
    spares = SpareReplicas(servers, SimpleNamespace(config=SimpleNamespace(backend="relay"), replicas=[]))
    answers, looks = threading.Event(), []

    def slow(replicas, hung_s):
        looks.append(list(replicas))
        assert answers.wait(10)
        return {other: "its process is gone"} if other in replicas else {}

    monkeypatch.setattr(replicas, "dead", slow)
    monkeypatch.setattr(replicas, "readmit", lambda servers: None)
    monkeypatch.setattr(replicas, "kill_replica", lambda replica: None)
    monkeypatch.setattr(replicas, "ray", Mock())
    monkeypatch.setattr(SpareReplicas, "_fill", lambda self, version: None)
    assert [spares.replace_dead(version, waits=False) for version in (1, 2)] == [0, 0]
    assert servers.rollout_replicas == [one, other]
    answers.set()
    spares._looking.result(10)
    assert spares.replace_dead(3, waits=False) == 1
    assert (servers.rollout_replicas, spares.missing) == ([one], 1)
    spares._looking.result(10)
    assert spares.replace_dead(4, waits=False) == 0, "a dead replica was replaced twice"
    assert looks[0] == [one, other]
    assert looks[-1] == [one]
