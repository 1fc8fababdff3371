"""Puts our rollout replica into verl's registry."""

from __future__ import annotations


def _load_vllm_replica() -> type:
    from verl_rhyme.workers.vllm.replica import RhymeReplica  # imports vLLM: only when a replica is needed

    return RhymeReplica


def register() -> None:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register("vllm", _load_vllm_replica)
