"""Registration of our rollout replica and server adapter in verl's registries."""

from __future__ import annotations


def _load_vllm_replica() -> type:
    from verl_rhyme.engine.replica import RhymeReplica  # imports vLLM, so only when a replica is needed

    return RhymeReplica


def register() -> None:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register("vllm", _load_vllm_replica)


def register_adapter() -> None:
    from verl.workers.rollout import base

    base._ROLLOUT_REGISTRY["vllm", "async"] = "verl_rhyme.engine.weight_socket.RhymeServerAdapter"
