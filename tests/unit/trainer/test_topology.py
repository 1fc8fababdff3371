"""Replacement of dead replicas while a trainer waits."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from ray.exceptions import ActorUnavailableError
from verl.checkpoint_engine import CheckpointEngineManager
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

from verl_rhyme.checks import startup
from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.config import RhymeConfig
from verl_rhyme.processes.deaths import ReplicaDied, WatchedCheckpointManager
from verl_rhyme.trainer import topology
from verl_rhyme.trainer.registry import TRAINERS, RhymeTrainerSync
from verl_rhyme.trainer.topology import Colocated, Separate

MODES = {"colocate_async": Colocated, "separate_async": Separate}


@pytest.fixture(params=MODES)
def trainer(request, monkeypatch):
    """A trainer of each mode, whose last replica is found dead at the third check."""
    mode, looks = request.param, []

    def replace_dead(self, version):
        looks.append(version)
        if len(looks) == 3:
            raise ReplicaDied("none is left")

    monkeypatch.setattr(MODES[mode], "replace_dead", replace_dead)
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
    monkeypatch.setattr(topology, "_CHECK_S", 0.0)
    monkeypatch.setattr(ReplayBufferAsync, "_sync_metadata_from_transfer_queue", lambda self: None)
    monkeypatch.setattr(startup, "begin", lambda config: None)  # of data and model, which this run lacks
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
    trainer = SimpleNamespace(current_mode=HybridEngineMode.ROLLOUT, _rhyme=RhymeConfig(), **managers)
    monkeypatch.setattr(topology, "dead", lambda replicas, hung_s: dict.fromkeys(replicas, "gone"))
    monkeypatch.setattr(topology, "readmit", lambda servers: None)
    assert Separate(trainer).replace_dead(1) == 0
    servers["llm_server_manager"].append(replica)
    with pytest.raises(ReplicaDied, match="on the devices of the actor: gone"):
        Separate(trainer).replace_dead(1)


def test_separate_engines_replace_dead_replicas_and_retry_deliveries():
    weights = Mock()
    separate = Separate(SimpleNamespace(current_mode=HybridEngineMode.TRAINER, standalone_checkpoint_manager=weights))
    separate.spares = SimpleNamespace(replace_dead=lambda version, waits: (version, waits))
    assert separate.replace_dead(7, waits=False) == (7, False)
    weights.check.assert_called_once_with()


@pytest.mark.parametrize("gone", [0, 1])
def test_a_broken_connection_is_tried_again(monkeypatch, gone):
    """``gone``: replicas that died meanwhile."""
    abort = Mock(side_effect=[ActorUnavailableError("the network", None), None, ValueError("no death")])
    engines = SimpleNamespace(abort_replicas=abort)
    monkeypatch.setattr(Separate, "replace_dead", lambda self, version: gone)
    separate = Separate(SimpleNamespace(standalone_checkpoint_manager=engines, global_steps=1))
    separate.stop()
    assert abort.call_count == 2
    with pytest.raises(ValueError, match="no death"):
        separate.stop()


def test_weight_syncs_outlive_replicas(monkeypatch):
    names = ("checkpoint_manager", "standalone_checkpoint_manager")
    config = SimpleNamespace(backend="naive", custom_backend_module=None)
    managers = {name: CheckpointEngineManager(config, None, []) for name in names}
    monkeypatch.setattr(PPOTrainer, "_setup", lambda self: self.__dict__.update(managers))
    trainer = object.__new__(RhymeTrainerSync)
    trainer._rhyme, trainer._event_log = RhymeConfig(), None
    trainer.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=None))
    trainer._setup()
    assert all(isinstance(getattr(trainer, name), WatchedCheckpointManager) for name in names)
