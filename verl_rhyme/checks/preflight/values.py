"""Types and values of verl's keys, which verl and vLLM check in their workers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.checks.doctor import Check
from verl_rhyme.checks.preflight import compose, user_code
from verl_rhyme.config import ConfigError
from verl_rhyme.config.backends import BACKENDS

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_ABSENT = object()

#: Values of ``reward.reward_manager.name`` of verl 0.9.1; all read ``data_source`` and ``reward_model.ground_truth``.
REWARD_MANAGERS = ("naive", "dapo", "remote", "gdpo", "rate_limited")

#: Estimators of verl 0.9.1 that compare the samples of a prompt.
GROUP_ESTIMATORS = (
    *("grpo", "grpo_vectorized", "grpo_passk", "gdpo", "rloo", "rloo_vectorized", "opo", "gpg"),
    *("reinforce_plus_plus_baseline", "optimal_token_baseline", "tir_optimal_token_baseline"),
)

#: Values that verl 0.9.1 and vLLM know, by key.
CHOICES = {
    "algorithm.adv_estimator": (*GROUP_ESTIMATORS, "gae", "reinforce_plus_plus", "remax"),
    f"{_A}.policy_loss.loss_mode": (
        *("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo"),
        "bypass_mode",
    ),
    f"{_A}.loss_agg_mode": (
        *("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"),
    ),
    f"{_A}.strategy": ("fsdp", "fsdp2", "fsdp_turbo", "megatron", "veomni", "torchtitan", "automodel"),
    f"{_R}.dtype": ("auto", "half", "float16", "bfloat16", "float", "float32"),
    f"{_R}.checkpoint_engine.backend": tuple(BACKENDS),
    "data.truncation": ("error", "left", "right", "middle"),
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "reward.reward_manager.name": REWARD_MANAGERS,
}

#: Whole numbers of at least 1, by section.
_WHOLE = {
    "data": "train_batch_size max_prompt_length max_response_length",
    "trainer": "nnodes n_gpus_per_node total_epochs",
    _A: "ppo_mini_batch_size",
    f"{_A}.megatron": "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size",
    _R: "n max_num_seqs max_num_batched_tokens tensor_model_parallel_size data_parallel_size "
    "pipeline_model_parallel_size",
}

#: The same, or null.
_WHOLE_OR_NULL = {
    "trainer": "total_training_steps",
    _A: "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu ulysses_sequence_parallel_size",
    f"{_A}.fsdp_config": "ulysses_sequence_parallel_size",
    _R: "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu max_model_len",
}

_NUMBERS = {
    "trainer": "save_freq",
    f"{_A}.fsdp_config": "fsdp_size",
    _R: "nnodes n_gpus_per_node gpu_memory_utilization",
}

#: Limits of vLLM, which refuses other values at its start or in each request: lowest, highest, and those as text.
_LIMITS = {
    "temperature": (0, math.inf, "at least 0"),
    "top_p": (1e-9, 1, "above 0 and at most 1"),
    "top_k": (-1, math.inf, "at least -1 (all tokens)"),
    "gpu_memory_utilization": (1e-9, 1, "above 0 and at most 1"),
}

#: Numbers that may be ranges, as ``0.5_5.0``.
_RANGES = ("rollout_is_threshold",)


def check(config: Any) -> None:
    """Raise a ConfigError that names an unset engine, and values that have another type than verl's default or are no
    size. The other checks compute with them.
    """
    unset = OmegaConf.is_missing(config.actor_rollout_ref.rollout, "name")
    theirs = compose.defaults(str(config.actor_rollout_ref.actor.strategy))
    wrong = {f"{_R}.name": f"is not set: add {_R}.name=vllm"} if unset else {}
    wrong |= dict(_mistyped(OmegaConf.to_container(config, resolve=False), theirs, ""))
    for sections, fits, allowed in (
        (_WHOLE, _is_whole, "a whole number of at least 1"),
        (_WHOLE_OR_NULL, lambda value: value is None or _is_whole(value), "a whole number of at least 1"),
        (_NUMBERS, _is_number, "a number"),
    ):
        for key in (f"{section}.{name}" for section, names in sections.items() for name in names.split()):
            value = OmegaConf.select(config, key, default=_ABSENT)  # keys of other engines are absent
            if value is not _ABSENT and not fits(value):
                wrong[key] = f"must be {allowed}, not {'null' if value is None else repr(value)}"
    for section, (name, (least, most, allowed)) in itertools.product((_R, f"{_R}.val_kwargs"), _LIMITS.items()):
        value = OmegaConf.select(config, key := f"{section}.{name}")
        if _is_number(value) and not least <= float(value) <= most:
            wrong[key] = f"must be {allowed}, not {value!r}"
    if wrong:
        raise ConfigError("; ".join(f"{key} {problem}" for key, problem in wrong.items()))


def _mistyped(mine: Any, theirs: Any, path: str) -> Iterator[tuple[str, str]]:
    for key, default in theirs.items():
        value, where = mine.get(key), f"{path}{key}"
        if isinstance(default, dict) and isinstance(value, dict):
            yield from _mistyped(value, default, f"{where}.")
        elif isinstance(value, str) and isinstance(default, bool):
            yield where, f"must be true or false, not {value!r}"
        elif isinstance(value, str) and isinstance(default, int | float):
            numbers = value.split("_") if key in _RANGES else [value]
            if not all(map(_is_number, numbers)):
                yield where, f"must be a number, not {value!r}"


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and float(value) >= 1 and float(value).is_integer()


def choices(config: Any) -> Iterator[Check]:
    """Check values that verl's workers look up by name."""
    for key, known in CHOICES.items():
        value = str(OmegaConf.select(config, key, default=known[0]))
        if key == "reward.reward_manager.name" and (
            config.reward.reward_manager.source != "register" or config.reward.custom_reward_function.path
        ):
            continue  # code of the user may register it
        if value not in known:
            yield user_code.unknown("values", key, value, known, config)
