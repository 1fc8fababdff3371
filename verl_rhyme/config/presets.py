"""The presets, ``+rhyme=NAME``: each is a setting of the same code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: One line about each preset.
SUMMARIES: Mapping[str, str] = {
    "histospec": "HistoSpec (RhymeRL): lossless drafts from earlier responses, with verl's own schedule.",
    "full": "Drafting, scheduling, placement and streamed training; max_staleness bounds the staleness.",
    "sorted": "SortedRL's schedule: four batches start together, and the samples that finish first are trained first.",
    "histopipe": "RhymeRL's HistoPipe: batches train in start order, placed by the lengths of earlier responses.",
    "stream": "StreamRL's schedule: separate engines, batches train in start order, placed by predicted lengths.",
    "off": "Stock verl, to override a YAML file that sets a preset by default.",
}

#: The options of each preset that differ from their defaults.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "histospec": {},
    "full": {"max_staleness": 1, "placement.policy": "longest_first"},
    "sorted": {"max_staleness": 0, "scheduling.in_flight": 4.0, "scheduling.refill": "when_empty"},
    "histopipe": {"max_staleness": 1, "scheduling.take": "loaded", "placement.policy": "histopipe"},
    "stream": {"max_staleness": 1, "scheduling.take": "loaded", "placement.policy": "skewness_aware"},
    "off": {},
}


def tree(preset: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the options of a preset, with ``changes`` by path, as a nested mapping."""
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

#: Value of ``rollout.logprobs_mode`` that only rhyme's sampler knows (:mod:`verl_rhyme.engine.drawer`).
POLICY_LOGPROBS = "policy_logprobs"

MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
DRAFTING_MANAGER = "verl_rhyme.agent_loop.agent_loop.RhymeAgentLoopManager"
PIPELINE_MANAGER = "verl_rhyme.agent_loop.agent_loop.SessionAgentLoopManager"

_LOGPROBS: Mapping[str, tuple[Any, str]] = {
    "actor_rollout_ref.rollout.logprobs_mode": (
        "${rhyme.logprobs_mode:}",
        "policy_logprobs: rollout_log_probs are the policy's over the whole vocabulary, as the actor computes them, "
        "also with top_p, top_k, min_p and penalties. Importance weights of an unmoved policy are then 1. "
        "processed_logprobs, verl's default, where rhyme does not draw the tokens",
    )
}

#: The keys of verl that pipeline presets set: value and reason.
_PIPELINE_KEYS: Mapping[str, tuple[Any, str]] = {
    "actor_rollout_ref.rollout.scheduling_policy": (
        "priority",
        "engines serve samples in the scheduler's order, from all agent loop workers",
    ),
    MANAGER: (PIPELINE_MANAGER, ""),
    "actor_rollout_ref.hybrid_engine": ("${rhyme.if_separate:false,true}", "the pipeline uses all engines"),
    "actor_rollout_ref.rollout.checkpoint_engine.backend": (
        "${rhyme.if_separate:relay,naive}",
        "separate engines: with relay each replica fetches weights independently, by shared memory or network; "
        "nccl sends to all replicas at once",
    ),
    "algorithm.rollout_correction.rollout_is": (
        "${rhyme.rollout_is:}",
        "token if samples of earlier policy versions are trained (max_staleness above 0): verl's truncated importance "
        "sampling with threshold rollout_is_threshold (2.0); else null",
    ),
    "transfer_queue.backend.SimpleStorage.total_storage_size": (
        None,
        "number of entries; null: no limit. The scheduler bounds the samples in flight, which can exceed verl's 100000",
    ),
    "trainer.v1.separate_async.parameter_sync_step": (1, "one policy version per training step; verl's default is 4"),
}


def verl_keys(preset: str) -> Mapping[str, tuple[Any, str]]:
    """Return the keys of verl that a preset sets, each with its value and the reason (or ``""``)."""
    if preset == "off":
        return {}
    if preset == "histospec":
        return {MANAGER: (DRAFTING_MANAGER, ""), **_LOGPROBS}
    own = {"trainer.v1.trainer_mode": ("separate_async", "engines and trainer on separate GPUs")}
    return {**_PIPELINE_KEYS, **_LOGPROBS, **(own if preset == "stream" else {})}
