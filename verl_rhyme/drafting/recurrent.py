"""Models with recurrent layers: which of them drafts are right for in vLLM 0.24.

An attention layer's cache holds every token, and rejected ones are overwritten. A gated delta net, a Mamba or a short
convolution holds one state for all tokens so far. vLLM keeps one state for each draft token of a step, in the columns
of the request's block table, and must resume from the column of the last accepted token. vLLM 0.24 does so only for a
request with drafts. For gated delta nets of Qwen3-Next and Qwen3.5, ``patches/vllm_gdn_*`` and ``engine/steps.py``
mend it. Mamba-2 reads stale states in steps without drafts; Mamba-1, short convolutions, lightning attention and KDA
never get the counts of accepted tokens: no drafts for these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from verl_rhyme.config import CONFIG_PATH, ConfigError

REASON = (
    "its recurrent layers (Mamba, short convolution, lightning attention) would go on from a wrong state after "
    "accepted drafts in vLLM 0.24"
)
REMEDY = f"set {CONFIG_PATH}.drafting.enable=false; everything else works with such models"
#: What is done about prefix caching, verl's default, and why.
UNCACHED = (
    "prefix caching is off in the engines, because vLLM 0.24 would cache the states of recurrent layers while drafts "
    "change them: agents with several turns prefill their context again in each turn"
)

#: ``model_type`` and ``architectures`` of recurrent families; a test compares them with vLLM's registry.
_NAMES = re.compile(
    r"mamba|jamba|bamba|zamba|rwkv|xlstm|recurrent|retnet|hybrid|nemotron_?h(_|[A-Z]|$)|falcon_?h1|qwen3_?next|qwen3_5|"
    r"lfm2|kimi_?linear|bailing_?moe_?(v2_5|linear)|plamo2|minicpmv4_6|interns2_?preview",
    re.IGNORECASE,
)
#: Kinds of layers, as a config's lists name them: ``linear_attention``, ``mamba``, ``conv``, ``recurrent``, ``hybrid``.
_KINDS = re.compile(r"linear|mamba|ssm|conv|recurrent|hybrid|delta|lightning|rwkv|kda", re.IGNORECASE)
_LISTS = ("layer_types", "layers_block_type", "block_types")
#: Config keys of recurrent layers only: Mamba, gated delta net, lightning attention, short convolution, RG-LRU.
_KEYS = re.compile(r"mamba_|ssm_|time_step_|linear_(attn|conv|key|num_key)|conv_L_cache$|lru_width$")
#: Parts of a config other than language models.
_OTHERS = re.compile(r"vision|audio|quantization|generation")
#: Families with gated delta nets that vLLM resumes by the counts of accepted tokens, and vLLM's class of such a layer.
_DRAFTED = re.compile(r"qwen3_?(next|5)", re.IGNORECASE)
_DRAFTED_LAYER = "QwenGatedDeltaNetAttention"
#: Drafts longer than this gain little there, and each token of them keeps a state of tens of megabytes a request.
MAX_TOKENS = 4


def recurrent(config: Mapping[str, Any]) -> str:
    """Return the entry of a model's config that shows recurrent layers, such as ``layer_types: linear_attention``.

    ``config`` is ``config.json`` with nested language models (``text_config``). Empty for attention layers only or an
    unknown family; the engine checks the layers themselves.
    """
    return next(_signs(config), "")


def undrafted(config: Mapping[str, Any]) -> str:
    """Return :func:`recurrent` of a model that drafts would be wrong for, else an empty string."""
    families = [config.get("model_type"), *(config.get("architectures") or ())]
    return "" if all(_DRAFTED.match(str(family)) for family in families) else recurrent(config)


def _signs(config: Mapping[str, Any]) -> Iterator[str]:
    kinds = {
        name: [str(kind) for kind in config[name]] for name in _LISTS if isinstance(config.get(name), list | tuple)
    }
    for name, listed in kinds.items():
        yield from (f"{name}: {kind}" for kind in listed if _KINDS.search(kind))
    # Granite's small models belong to a hybrid family and have its keys, but attention in every layer.
    if not kinds:
        names = [config.get("model_type"), *(config.get("architectures") or ())]
        yield from (f"model family {name}" for name in names if name and _NAMES.search(str(name)))
        yield from (key for key, value in config.items() if value is not None and _KEYS.match(str(key)))
        if 0 in (config.get("attn_type_list") or ()):  # MiniMax-Text-01; all of MiniMax-M2's are 1
            yield "attn_type_list: 0"
    for key, value in config.items():
        if isinstance(value, Mapping) and not _OTHERS.search(str(key)):
            yield from _signs(value)


def refuse(found: str) -> None:
    if found:
        raise ConfigError(f"cannot draft for this model ({found}): {REASON}; {REMEDY}")


def check_layer(name: str, kind: str, cache_mode: str, synchronous: str = "") -> None:
    """Raise ConfigError for a recurrent layer of the loaded model that drafts would be wrong for.

    ``kind``: name of vLLM's class. ``cache_mode``: ``mamba_cache_mode`` of vLLM, ``none`` without prefix caching.
    ``synchronous``: why the engine schedules synchronously, if it does: a request that sits out a step then loses its
    count of accepted tokens.
    """
    if kind != _DRAFTED_LAYER:
        refuse(f"layer {name} is a {kind}")
    if synchronous:
        raise ConfigError(
            f"cannot draft for this model: layer {name} is a {kind}, whose states need asynchronous scheduling, and "
            f"this engine has {synchronous}; remove that, or set {CONFIG_PATH}.drafting.enable=false"
        )
    if cache_mode != "none":
        raise ConfigError(
            f"cannot draft for this model with prefix caching: layer {name} is a {kind}, whose states vLLM 0.24 would "
            "cache while drafts change them; set actor_rollout_ref.rollout.enable_prefix_caching=false, or "
            f"{CONFIG_PATH}.drafting.enable=false"
        )
