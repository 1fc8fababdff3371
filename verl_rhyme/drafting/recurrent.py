"""Detection of models with recurrent layers, for which vLLM 0.24 uses a wrong state after accepted drafts.

An attention layer's cache holds every token, and rejected ones are overwritten. A gated delta net, a Mamba or a short
convolution holds one state for all tokens so far. vLLM keeps one state for each draft token of a step, in the columns
of the request's block table. It reads column ``accepted`` at the next step only if that step has drafts. Otherwise
(vLLM 0.24, ``GPUModelRunner._build_attention_metadata`` and ``_update_states``):

- A gated delta net reads a stale state for a request without drafts.
- Mamba-2 reads stale states in a step without any drafts.
- Mamba-1, short convolution and linear attention never get the counts of accepted tokens.
- A request left out of a step by the token budget loses its count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from verl_rhyme.config import CONFIG_PATH, ConfigError

REASON = (
    "its recurrent layers (gated delta net, Mamba, short convolution) would go on from a wrong state after accepted "
    "drafts in vLLM 0.24"
)
REMEDY = f"set {CONFIG_PATH}.drafting.enable=false; everything else works with such models"

#: ``model_type`` and ``architectures`` of recurrent families; a test compares them with vLLM's registry.
_NAMES = re.compile(
    r"mamba|jamba|bamba|zamba|rwkv|xlstm|recurrent|retnet|hybrid|nemotron_?h(_|[A-Z]|$)|falcon_?h1|qwen3_?next|qwen3_5|"
    r"lfm2|kimi_?linear|bailing_?moe_?(v2_5|linear)|plamo2|minicpmv4_6|interns2_?preview",
    re.IGNORECASE,
)
#: Families whose recurrent layers are gated delta nets of Qwen only: vLLM resumes them by the counts of accepted tokens
#: (``patches/vllm_gdn_*``).
_DRAFTED = re.compile(r"qwen3_?next|qwen3_?5", re.IGNORECASE)
_DRAFTED_KINDS = {"linear_attention", "full_attention"}
_DRAFTED_LAYERS = {"QwenGatedDeltaNetAttention"}
#: Kinds of layers, as a config's lists name them: ``linear_attention``, ``mamba``, ``conv``, ``recurrent``, ``hybrid``.
_KINDS = re.compile(r"linear|mamba|ssm|conv|recurrent|hybrid|delta|lightning|rwkv|kda", re.IGNORECASE)
_LISTS = ("layer_types", "layers_block_type", "block_types")
#: Config keys of recurrent layers only: Mamba, gated delta net, lightning attention, short convolution, RG-LRU.
_KEYS = re.compile(r"mamba_|ssm_|time_step_|linear_(attn|conv|key|num_key)|conv_L_cache$|lru_width$")
#: Parts of a config other than language models.
_OTHERS = re.compile(r"vision|audio|quantization|generation")


def recurrent(config: Mapping[str, Any]) -> str:
    """Return the entry of a model's config that shows recurrent layers, such as ``layer_types: linear_attention``.

    ``config`` is ``config.json`` with nested language models (``text_config``). Empty for attention layers only or an
    unknown family; the engine checks the layers themselves.
    """
    return next(_signs(config), "")


def _signs(config: Mapping[str, Any]) -> Iterator[str]:
    kinds = {
        name: [str(kind) for kind in config[name]] for name in _LISTS if isinstance(config.get(name), list | tuple)
    }
    names = [str(name) for name in (config.get("model_type"), *(config.get("architectures") or ())) if name]
    if (
        names
        and all(map(_DRAFTED.match, names))
        and {kind for found in kinds.values() for kind in found} <= _DRAFTED_KINDS
    ):
        return
    for name, listed in kinds.items():
        yield from (f"{name}: {kind}" for kind in listed if _KINDS.search(kind))
    # Granite's small models belong to a hybrid family and have its keys, but attention in every layer.
    if not kinds:
        yield from (f"model family {name}" for name in names if _NAMES.search(name))
        yield from (key for key, value in config.items() if value is not None and _KEYS.match(str(key)))
        if 0 in (config.get("attn_type_list") or ()):  # MiniMax-Text-01; all of MiniMax-M2's are 1
            yield "attn_type_list: 0"
    for key, value in config.items():
        if isinstance(value, Mapping) and not _OTHERS.search(str(key)):
            yield from _signs(value)


def refuse(found: str) -> None:
    if found:
        raise ConfigError(f"cannot draft for this model ({found}): {REASON}; {REMEDY}")


def check_layer(name: str, kind: str, cache_mode: str) -> None:
    """Raise ConfigError for a recurrent layer of the loaded model that cannot resume after drafts.

    ``kind``: name of vLLM's class. ``cache_mode``: ``mamba_cache_mode`` of vLLM, ``none`` without prefix caching.
    """
    if kind not in _DRAFTED_LAYERS:
        refuse(f"layer {name} is a {kind}")
    if cache_mode != "none":
        raise ConfigError(
            f"cannot draft for this model with prefix caching (layer {name} is a {kind}, its cache mode {cache_mode}): "
            "set actor_rollout_ref.rollout.enable_prefix_caching=false"
        )
