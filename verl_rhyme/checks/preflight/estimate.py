"""Memory estimate of a plan (phases, vLLM's share, host and disk) and its text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from verl_rhyme.checks.preflight import memory
from verl_rhyme.checks.preflight.memory import CONTEXT, Drafter, Phase, Serving
from verl_rhyme.checks.preflight.plan import Plan
from verl_rhyme.planning.architecture import Architecture

#: Most versions of the weights in a relay: the newest two, and on the actor's node one that a slow replica reads.
RELAYED = 3


@dataclass(frozen=True)
class Estimate:
    """Estimated bytes on one GPU by phase, of vLLM, on one host and of one checkpoint."""

    parameters: int
    gpu_bytes: int  # of a GPU; on a CPU, the host's memory, which the node's ranks share
    #: On a GPU: "update", "optimizer step", "old log-probs", "rollout" (colocated), "rollout pool" (separate engines).
    phases: dict[str, Phase]
    serving: Serving  # vLLM's share
    #: On one node by component: offloaded states, reference, the model during loading, texts for drafts, KV
    #: blocks of vLLM's offloading, weights of sleeping engines, versions in the relay.
    host: dict[str, int]
    checkpoint: int  # of the actor
    left_out: tuple[str, ...]  # components

    @property
    def peak(self) -> tuple[str, int]:
        return max(((name, phase.total) for name, phase in self.phases.items()), key=lambda item: item[1])

    def to_dict(self) -> dict[str, Any]:
        """Return a nested dict; all sizes in bytes."""
        return {
            **asdict(self),
            "phases": {name: {**phase.components, "total": phase.total} for name, phase in self.phases.items()},
            "left_out": list(self.left_out),
        }


def estimate(model: Architecture, plan: Plan, gpu_bytes: int, drafter: Drafter | None = None) -> Estimate | None:
    training = plan.training
    if training is None:
        return None
    context = {} if plan.device == "cpu" else {"context": CONTEXT}
    serving = memory.serve(model, plan.rollout, gpu_bytes, drafter)
    served = {"vLLM": serving.share, "drafts": plan.rollout.draft_bytes}
    asleep = served if plan.colocated and not plan.sleeps else {}
    reference = memory.states(model, training)["parameters"] if plan.reference and not plan.lora else 0
    trained = {
        "update": memory.update(model, training),
        "optimizer step": memory.optimizer_step(model, training),
        "old log-probs": memory.log_prob(model, training),
    }
    on_gpu_reference = reference if training.engine == "megatron" and not training.parameter_offload else 0
    ref = {"reference": on_gpu_reference} if on_gpu_reference else {}
    phases = {name: Phase({**phase.components, **ref, **asleep, **context}) for name, phase in trained.items() if phase}
    if plan.colocated:
        phases["rollout"] = Phase({"actor at rest": memory.resident(model, training), **ref, **served, **context})
    if plan.standalone:
        phases["rollout pool"] = Phase({**served, **context})
    node = min(plan.gpus_per_node, plan.train_gpus)
    gpus = min(plan.gpus_per_node, plan.train_gpus if plan.colocated else plan.rollout_gpus)
    replicas = max(1, gpus // plan.replica_gpus)
    host = {
        "offloaded states": node * memory.offloaded(model, training),
        "reference": node * (reference - on_gpu_reference),
        # the first rank reads the whole model before it is split
        "model while loading": (4 if training.engine != "megatron" else 2) * model.parameters,
        "texts for drafts": replicas * plan.rollout.text_bytes,
        "KV blocks": replicas * plan.rollout.host_cache,
        "sleeping engines": plan.keeps_weights * gpus * serving.weights,
        "relay": plan.relayed * RELAYED * plan.sent_bytes * model.parameters,
    }
    left_out = [name for name, present in (("the critic", plan.critic), ("LoRA's savings", plan.lora > 0)) if present]
    return Estimate(model.parameters, gpu_bytes, phases, serving, host, memory.checkpoint_bytes(model), tuple(left_out))


def lines(found: Estimate, plan: Plan, source: str) -> list[str]:
    has = gib(found.gpu_bytes)
    text = [
        f"model: {count(found.parameters)} parameters; "
        + (f"this host has {has}" if plan.device == "cpu" else f"a GPU has {has} ({source})"),
        f"training: {plan.train_gpus} GPUs, {plan.strategy}, data parallel {plan.data_parallel} x model parallel "
        f"{plan.model_parallel}, {plan.training.tokens if plan.training else 0} tokens per micro-batch on a GPU",
    ]
    for name, phase in found.phases.items():
        parts = ", ".join(f"{part} {gib(size)}" for part, size in phase.components.items() if size >= 1 << 16)
        text.append(f"{name}: {gib(phase.total)} per GPU ({parts})")
    serving = found.serving
    text += [
        f"vLLM: {plan.replicas} replicas of {plan.replica_gpus} GPUs; {gib(serving.share)} per GPU: weights "
        f"{gib(serving.weights)}, activations {gib(serving.activations)}, KV cache {gib(max(0, serving.cache))}",
        f"KV cache: {serving.bytes_per_token} bytes per token on each GPU, "
        + (f"{gib(serving.state_bytes)} of states per request, " if serving.state_bytes else "")
        + f"{serving.tokens} tokens per replica, "
        f"{serving.sequences:.1f} sequences of {plan.rollout.longest} tokens at once",
        "host, each node: " + ", ".join(f"{part} {gib(size)}" for part, size in found.host.items() if size),
        f"checkpoint: {gib(found.checkpoint)}",
    ]
    return text + [f"not included: {', '.join(found.left_out)}"] * bool(found.left_out)


def count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def gib(size: float) -> str:
    return f"{size / (1 << 30):.1f} GiB" if abs(size) >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
