"""Shape of a dense decoder, from the ``config.json`` of a Hugging Face model: for memory estimates and rooflines.

Some of its layers may be gated delta nets instead of attention (Qwen3.5). A vision tower is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Values of ``model_type`` with an estimate.
KNOWN = ("llama", "qwen2", "qwen3", "qwen3_5_text")

_KEYS = (
    *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
#: Shapes of models, as published in their ``config.json``: for commands on machines without these models.
PUBLISHED: dict[str, dict[str, Any]] = {
    name: dict(zip(_KEYS, shape, strict=True))
    for name, *shape in (
        ("Qwen/Qwen2.5-7B", "qwen2", 28, 3584, 18944, 28, 4, 152064),
        ("Qwen/Qwen2.5-14B", "qwen2", 48, 5120, 13824, 40, 8, 152064),
        ("Qwen/Qwen2.5-32B", "qwen2", 64, 5120, 27648, 40, 8, 152064),
        ("Qwen/Qwen2.5-72B", "qwen2", 80, 8192, 29568, 64, 8, 152064),
        ("Qwen/Qwen3-8B", "qwen3", 36, 4096, 12288, 32, 8, 151936),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama", 32, 4096, 14336, 32, 8, 128256),
    )
}

PUBLISHED["Qwen/Qwen3.5-9B"] = {
    "model_type": "qwen3_5",
    "text_config": {
        **dict(zip(_KEYS, ("qwen3_5_text", 32, 4096, 12288, 16, 4, 248320), strict=True)),
        **{"head_dim": 256, "layer_types": 8 * [*3 * ["linear_attention"], "full_attention"]},
        **{"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_conv_kernel_dim": 4},
        **{"linear_num_value_heads": 32, "linear_value_head_dim": 128},
    },
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class UnknownArchitecture(ValueError):
    """The architecture is not one of :data:`KNOWN`, and is not estimated."""


def is_hub_id(path: str) -> bool:
    """Whether ``path`` is ``owner/name``, and not a local folder."""
    return bool(_HUB_ID.fullmatch(path)) and not Path(path).exists()


def find(path: str) -> Path | None:
    """Return the ``config.json`` of a model folder or hub id; ``None`` if it is not on this machine."""
    local = Path(path).expanduser() / "config.json"
    if local.is_file():
        return local
    if not is_hub_id(path):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached) if isinstance(cached, str) else None


def read_json(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not contain a JSON object")
    return content


@dataclass(frozen=True)
class DeltaNets:
    """Gated delta nets in place of a model's attention in some layers (Yang et al., "Gated Delta Networks")."""

    layers: int
    keys: int  # width of all keys of a token
    values: int  # width of all values of a token
    value_heads: int
    state: int  # values of a layer's state: value heads x value width x key width
    window: int  # tokens before the present one that the convolution reads

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> DeltaNets | None:
        """Return those of a parsed ``config.json``, its language model's part; ``None`` without any."""
        layers = [str(kind) for kind in config.get("layer_types") or ()].count("linear_attention")
        if not layers:
            return None
        heads, width = int(config["linear_num_value_heads"]), int(config["linear_value_head_dim"])
        key = int(config["linear_key_head_dim"])
        keys = int(config["linear_num_key_heads"]) * key
        window = int(config["linear_conv_kernel_dim"]) - 1
        return cls(layers, keys, heads * width, heads, heads * width * key, window)

    def layer(self, hidden: int) -> int:
        """Return a layer's parameters in place of those of attention: projections in and out, gates, convolution."""
        convolved = 2 * self.keys + self.values
        inputs = hidden * (convolved + self.values + 2 * self.value_heads)
        return inputs + self.values * hidden + convolved * (self.window + 1) + 2 * self.value_heads

    def state_bytes(self, drafts: int, tp: int = 1) -> int:
        """Return a request's bytes of all layers on one of ``tp`` ranks, with up to ``drafts`` draft tokens a step.

        vLLM 0.24 keeps 1 + drafts states, in float32 as published configs ask, each with the convolution's window in
        bfloat16 for all of these tokens.
        """
        convolved = (2 * self.keys + self.values) * (self.window + drafts)
        return self.layers * (1 + drafts) * (4 * self.state + 2 * convolved) // tp


@dataclass(frozen=True)
class Architecture:
    """Decoder with RMSNorm, grouped-query attention and SwiGLU; its sizes count parameters, not bytes."""

    name: str  # model_type
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool  # input and output embedding are one tensor
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # queries and keys are normalised per head (Qwen3)
    gated: bool = False  # attention's output has a gate, as wide as the queries (Qwen3.5)
    delta_nets: DeltaNets | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Architecture:
        """Return that of a parsed ``config.json``; raises :class:`UnknownArchitecture` if a size is missing."""
        config = config.get("text_config") or config
        kind = config.get("model_type")
        if kind not in KNOWN:
            raise UnknownArchitecture(f"no estimate for this family ({kind}; only for {', '.join(KNOWN)})")
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            bias = bool(config.get("attention_bias", False))
            return cls(
                name=kind,
                layers=int(config["num_hidden_layers"]),
                hidden=hidden,
                ffn=int(config["intermediate_size"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads)),
                vocab=int(config["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                qkv_bias=kind == "qwen2" or bias,
                out_bias=kind != "qwen2" and bias,
                mlp_bias=bool(config.get("mlp_bias", False)),
                qk_norm=kind in ("qwen3", "qwen3_5_text"),
                gated=kind == "qwen3_5_text",
                delta_nets=DeltaNets.read(config),
            )
        except KeyError as missing:
            raise UnknownArchitecture(f"no estimate: config.json of {kind} has no {missing}") from None

    @property
    def query(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of one embedding table, V x h."""
        return self.vocab * self.hidden

    @property
    def attention_layers(self) -> int:
        return self.layers - (self.delta_nets.layers if self.delta_nets else 0)

    def layer(self, tp: int = 1) -> int:
        """Return a layer's parameters on one of ``tp`` tensor-parallel ranks, which split matrices but not norms.

        It is the mean layer of a model with gated delta nets.
        """
        key = self.head_dim * max(1, self.kv_heads // tp) * tp  # each rank holds at least one key head
        mixer = self.hidden * ((2 + self.gated) * self.query + 2 * key)
        if self.delta_nets:
            nets = self.delta_nets.layers * self.delta_nets.layer(self.hidden)
            mixer = -(-(self.attention_layers * mixer + nets) // self.layers)
        matrices = mixer + self.hidden * 3 * self.ffn
        biases = self.qkv_bias * (self.query + 2 * key) + self.mlp_bias * 2 * self.ffn
        whole = 2 * self.hidden + self.qk_norm * 2 * self.head_dim + (self.out_bias + self.mlp_bias) * self.hidden
        return (matrices + biases) // tp + whole

    def adapter(self, rank: int, tp: int = 1) -> int:
        """Return the parameters of a LoRA adapter of all matrices of a layer on one tensor-parallel rank.

        vLLM splits the side of each that its layer splits.
        """
        return rank * (7 * self.hidden + (2 * self.query + 2 * self.key + 3 * self.ffn) // tp)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer() + self.hidden + self.embedding * (1 if self.tied else 2)

    def rank_parameters(self, tp: int = 1, pp: int = 1) -> int:
        """Return the parameters of the largest pipeline stage on one tensor-parallel rank.

        The first stage has the input embedding. The last one has the output embedding (a copy if tied) and the final
        norm.
        """
        tables = self.embedding * (1 if self.tied or pp > 1 else 2)
        return -(-self.layers // pp) * self.layer(tp) + self.hidden + tables // tp

    def cache_values(self, tp: int = 1, pp: int = 1) -> int:
        """Return a token's keys and values on one GPU: 2 x attention's layers x key heads x head_dim.

        If there are fewer key heads than tensor-parallel ranks, each rank holds a copy of one.
        """
        return 2 * -(-self.attention_layers // pp) * max(1, self.kv_heads // tp) * self.head_dim
