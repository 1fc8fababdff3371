"""Shape of a decoder, from the ``config.json`` of a Hugging Face model: for memory estimates and rooflines.

Some of its layers may have gated delta nets instead of attention (Qwen3.5), and experts instead of one MLP. A vision
tower and MTP layers are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_rhyme.planning.experts import Mixture, first

#: Values of ``model_type`` with an estimate.
KNOWN = (
    *("llama", "qwen2", "qwen3", "qwen3_5_text"),
    *("qwen3_moe", "qwen3_5_moe_text", "qwen3_next", "mixtral", "glm4_moe", "gpt_oss", "deepseek_v3"),
)

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

PUBLISHED |= {
    name: dict(zip(_KEYS, shape, strict=True)) | {"head_dim": width, "num_experts_per_tok": chosen} | rest
    for name, shape, width, chosen, rest in (
        (
            *("Qwen/Qwen3-30B-A3B", ("qwen3_moe", 48, 2048, 6144, 32, 4, 151936), 128, 8),
            {"num_experts": 128, "moe_intermediate_size": 768},
        ),
        (
            *("Qwen/Qwen3-235B-A22B", ("qwen3_moe", 94, 4096, 12288, 64, 4, 151936), 128, 8),
            {"num_experts": 128, "moe_intermediate_size": 1536},
        ),
        (
            *("zai-org/GLM-4.5-Air", ("glm4_moe", 46, 4096, 10944, 96, 8, 151552), 128, 8),
            {"n_routed_experts": 128, "moe_intermediate_size": 1408, "n_shared_experts": 1}
            | {"first_k_dense_replace": 1, "attention_bias": True},
        ),
        (
            *("openai/gpt-oss-20b", ("gpt_oss", 24, 2880, 2880, 64, 8, 201088), 64, 4),
            {"num_local_experts": 32, "attention_bias": True}
            | {"layer_types": 12 * ["sliding_attention", "full_attention"]},
        ),
    )
}

PUBLISHED["Qwen/Qwen3-30B-A3B-Base"] = PUBLISHED["Qwen/Qwen3-30B-A3B"]

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
        every = int(config.get("full_attention_interval") or 0)  # Qwen3-Next's published config has no layer_types
        kinds = config.get("layer_types") or ["linear_attention"] * (every - 1) + ["full_attention"] * (every > 0)
        layers = int(config["num_hidden_layers"]) * [*map(str, kinds)].count("linear_attention") // (len(kinds) or 1)
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
class Latent:
    """Attention whose cache has a latent vector, from which keys and values are projected (DeepSeek-V2)."""

    queries: int  # rank of the queries' projection; 0: none
    values: int  # rank of the projection of keys and values
    rope: int  # width of the key that all heads share
    value_dim: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Latent | None:
        if not (rank := first(config, "kv_lora_rank")):
            return None
        return cls(first(config, "q_lora_rank"), rank, int(config["qk_rope_head_dim"]), int(config["v_head_dim"]))

    def matrices(self, hidden: int, heads: int, head_dim: int) -> int:
        """Return a layer's parameters that tensor-parallel ranks split, in place of those of attention."""
        keys = head_dim - self.rope + self.value_dim
        return heads * ((self.queries or hidden) * head_dim + self.values * keys + self.value_dim * hidden)

    def whole(self, hidden: int) -> int:
        """Return a layer's parameters that each rank holds: projections to the latent vectors, and their norms."""
        return (hidden + 1) * (self.queries + self.values) + hidden * self.rope


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
    mixture: Mixture | None = None
    latent: Latent | None = None
    sinks: bool = False  # each head has a sink (gpt-oss)
    windows: int = 0  # layers whose cache has a window of the latest tokens, which is not counted

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Architecture:
        """Return that of a parsed ``config.json``; raises :class:`UnknownArchitecture` if a size is missing."""
        config = config.get("text_config") or config
        kind = config.get("model_type")
        if kind not in KNOWN:
            raise UnknownArchitecture(f"no estimate for this family ({kind}; only for {', '.join(KNOWN)})")
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            bias, latent = bool(config.get("attention_bias", False)), Latent.read(config)
            head = latent.rope + int(config["qk_nope_head_dim"]) if latent else int(config.get("head_dim") or 0)
            return cls(
                name=kind,
                layers=int(config["num_hidden_layers"]),
                hidden=hidden,
                ffn=first(config, "intermediate_size", "moe_intermediate_size"),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=head or (128 if kind == "qwen3" else hidden // heads),
                vocab=int(config["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                qkv_bias=kind == "qwen2" or bias,
                out_bias=kind not in ("qwen2", "glm4_moe") and bias,
                mlp_bias=bool(config.get("mlp_bias", False)),
                qk_norm=kind.startswith("qwen3") or bool(config.get("use_qk_norm")),
                gated=kind in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
                delta_nets=DeltaNets.read(config),
                mixture=Mixture.read(config),
                latent=latent,
                sinks=kind == "gpt_oss",
                windows=[*(config.get("layer_types") or ())].count("sliding_attention"),
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

    @property
    def mlp(self) -> int:
        """Width of the MLP that computes a token, with all of its experts, of the mean layer."""
        if (mixture := self.mixture) is None:
            return self.ffn
        sparse = round(mixture.experts.chosen) * mixture.width + mixture.shared
        return self._mean((self.layers - mixture.layers) * self.ffn + mixture.layers * sparse)

    @property
    def dispatched(self) -> int:
        """Hidden values of a token that go to its experts, of the mean layer: a copy for each."""
        mixture = self.mixture
        return self._mean(mixture.layers * round(mixture.experts.chosen) * self.hidden) if mixture else 0

    @property
    def matrix(self) -> int:
        """Parameters of the largest matrix of a layer; transformers keeps a layer's experts in one."""
        mixture = self.mixture
        experts = 2 * mixture.experts.count * mixture.width if mixture else 0
        return self.hidden * max(self.ffn, experts)

    def _mean(self, total: int) -> int:
        return -(-total // self.layers)

    def layer(self, tp: int = 1, expert_ranks: int | None = None) -> int:
        """Return the mean layer's parameters on one of ``tp`` tensor-parallel ranks, which split matrices but not
        norms.

        ``expert_ranks``: ranks that split the routed experts, which ``None`` are the same.
        """
        key = self.head_dim * max(1, self.kv_heads // tp) * tp  # each rank holds at least one key head
        mixer = self.hidden * ((2 + self.gated) * self.query + 2 * key)
        if self.delta_nets:
            nets = self.delta_nets.layers * self.delta_nets.layer(self.hidden)
            mixer = self._mean(self.attention_layers * mixer + nets)
        mlp, routed = 3 * self.hidden * self.ffn, 0
        biases = self.qkv_bias * (self.query + 2 * key) + self.mlp_bias * 2 * self.ffn + self.sinks * self.heads
        whole = 2 * self.hidden + self.qk_norm * 2 * self.head_dim + (self.out_bias + self.mlp_bias) * self.hidden
        if self.latent:
            mixer = self.latent.matrices(self.hidden, self.heads, self.head_dim)
            whole += self.latent.whole(self.hidden)
        if mixture := self.mixture:
            dense = (self.layers - mixture.layers) * self.ffn + mixture.layers * mixture.shared
            mlp = self._mean(3 * self.hidden * dense)
            routed = self._mean(mixture.routed) // (expert_ranks or tp)
            whole += self._mean(mixture.layers * mixture.router)
        return (mixer + mlp + biases) // tp + whole + routed

    def adapter(self, rank: int, tp: int = 1) -> int:
        """Return the parameters of a LoRA adapter of all matrices of a layer on one tensor-parallel rank.

        vLLM splits the side of each that its layer splits.
        """
        return rank * (7 * self.hidden + (2 * self.query + 2 * self.key + 3 * self.ffn) // tp)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer() + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def active(self) -> int:
        """Parameters that compute a token, with the embeddings: all but the experts that it does not choose."""
        if (mixture := self.mixture) is None:
            return self.parameters
        return self.parameters - round(mixture.routed * (1 - mixture.experts.share))

    def rank_parameters(self, tp: int = 1, pp: int = 1, expert_ranks: int | None = None) -> int:
        """Return the parameters of the largest pipeline stage on one tensor-parallel rank.

        The first stage has the input embedding. The last one has the output embedding (a copy if tied) and the final
        norm. ``expert_ranks``: as of :meth:`layer`.
        """
        tables = self.embedding * (1 if self.tied or pp > 1 else 2)
        return -(-self.layers // pp) * self.layer(tp, expert_ranks) + self.hidden + tables // tp

    def rank_experts(self, ranks: int, pp: int = 1) -> int:
        """Return the parameters of routed experts among those of :meth:`rank_parameters`."""
        return -(-self.layers // pp) * (self._mean(self.mixture.routed) // ranks) if self.mixture else 0

    def cache_values(self, tp: int = 1, pp: int = 1) -> int:
        """Return a token's keys and values on one GPU: 2 x attention's layers x key heads x head_dim.

        If there are fewer key heads than tensor-parallel ranks, each rank holds a copy of one, as of latent vectors.
        """
        layers = -(-(self.attention_layers - self.windows) // pp)
        if self.latent:
            return layers * (self.latent.values + self.latent.rope)
        return 2 * layers * max(1, self.kv_heads // tp) * self.head_dim
