"""The presets: what ``+rhyme=NAME`` sets. A preset is a setting of the one pipeline; none has code of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What each preset is, in a line.
WHAT: Mapping[str, str] = {
    "histospec": "Drafts from earlier responses, verified by the model (lossless), under verl's own schedule.",
    "full": "Drafts, scheduling, placement, streamed parts: one dial, max_staleness.",
    "sorted": "SortedRL's schedule: four update batches loaded together, what finishes first is trained first.",
    "histopipe": "RhymeRL's HistoPipe: updates as they were loaded, placed by the lengths of earlier responses.",
    "stream": "StreamRL's schedule: updates as they were loaded, from separate engines, placed by predicted lengths.",
    "off": "Nothing: stock verl, for a YAML that names a preset by default.",
}

#: Options of ours by preset, where they are not at their default.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "histospec": {},
    "full": {"max_staleness": 1, "placement.policy": "longest_first"},
    "sorted": {"max_staleness": 0, "scheduling.in_flight": 4.0, "scheduling.refill": "when_empty"},
    "histopipe": {"max_staleness": 1, "scheduling.take": "loaded", "placement.policy": "histopipe"},
    "stream": {"max_staleness": 1, "scheduling.take": "loaded", "placement.policy": "skewness_aware"},
    "off": {},
}


def tree(preset: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Options of a preset, nested as in our tree.

    Args:
        preset: Its name.
        changes: Options that are otherwise, by path.
    """
    nested: dict[str, Any] = {}
    for path, value in {**PRESETS[preset], **(changes or {})}.items():
        *sections, option = path.split(".")
        inside = nested
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[option] = value
    return nested


#: Presets that run the pipeline.
PIPELINES = tuple(name for name, options in PRESETS.items() if "max_staleness" in options)

MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
DRAFTING_MANAGER = "verl_rhyme.agent_loop.agent_loop.RhymeAgentLoopManager"
PIPELINE_MANAGER = "verl_rhyme.agent_loop.agent_loop.SessionAgentLoopManager"

#: verl's keys that presets with the pipeline set, and why.
_PIPELINE_KEYS: Mapping[str, tuple[Any, str]] = {
    "actor_rollout_ref.rollout.scheduling_policy": (
        "priority",
        "engines take samples in the scheduler's order, whatever agent loop worker they come from",
    ),
    MANAGER: (PIPELINE_MANAGER, ""),
    "actor_rollout_ref.hybrid_engine": ("${rhyme.if_separate:false,true}", "all engines are the pipeline's"),
    "actor_rollout_ref.rollout.checkpoint_engine.backend": (
        "${rhyme.if_separate:relay,naive}",
        "separate engines: through shared memory and the network, each replica by itself; nccl sends to all at once",
    ),
    "algorithm.rollout_correction.rollout_is": (
        "${rhyme.rollout_is:}",
        "token where tokens of earlier policies are trained (max_staleness above 0): verl's truncated importance "
        "sampling, threshold rollout_is_threshold (2.0); else null",
    ),
    "transfer_queue.backend.SimpleStorage.total_storage_size": (
        None,
        "entries; null: no limit. The scheduler bounds what is in flight, which verl's 100000 may be less than",
    ),
    "trainer.v1.separate_async.parameter_sync_step": (1, "a policy version is an update; verl's 4 would be four"),
}


def verl_keys(preset: str) -> Mapping[str, tuple[Any, str]]:
    """verl's keys that a preset sets, each with its value and why (or nothing)."""
    if preset == "off":
        return {}
    if preset == "histospec":
        return {MANAGER: (DRAFTING_MANAGER, "")}
    own = {"trainer.v1.trainer_mode": ("separate_async", "engines and training on GPUs of their own")}
    return {**_PIPELINE_KEYS, **(own if preset == "stream" else {})}
