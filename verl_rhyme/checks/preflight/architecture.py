"""Shape of a dense decoder, read from the ``config.json`` of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_rhyme.drafting.recurrent import recurrent

#: Values of ``model_type`` with an estimate.
KNOWN = ("llama", "qwen2", "qwen3")


class UnknownArchitecture(ValueError):
    """The architecture is not one of :data:`KNOWN`, or has recurrent layers, and is not estimated."""


@dataclass(frozen=True)
class Architecture:
    """Decoder with RMSNorm, grouped-query attention and SwiGLU; its sizes count parameters, not bytes.

    Attributes:
        name: ``model_type``.
        layers, hidden, ffn, heads, kv_heads, head_dim, vocab: Sizes of ``config.json``.
        tied: Whether input and output embedding are one tensor.
        qkv_bias, out_bias, mlp_bias: Whether these linear layers have a bias.
        qk_norm: Whether queries and keys are normalised per head (Qwen3).
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Architecture:
        """Return the architecture of a parsed ``config.json``.

        Raises:
            UnknownArchitecture: ``model_type`` is not in :data:`KNOWN`, the model is recurrent, or a size is missing.
        """
        if sign := recurrent(config):
            raise UnknownArchitecture(f"no memory estimate for this family: recurrent layers ({sign}) and their states")
        kind = config.get("model_type")
        if kind not in KNOWN:
            raise UnknownArchitecture(f"no memory estimate for this family ({kind}; only for {', '.join(KNOWN)})")
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
                qk_norm=kind == "qwen3",
            )
        except KeyError as missing:
            raise UnknownArchitecture(f"no memory estimate: config.json of {kind} has no {missing}") from None

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

    def layer(self, tp: int = 1) -> int:
        """Return a layer's parameters on one of ``tp`` tensor-parallel ranks, which split matrices but not norms."""
        key = self.head_dim * max(1, self.kv_heads // tp) * tp  # each rank holds at least one key head
        matrices = self.hidden * (2 * self.query + 2 * key + 3 * self.ffn)
        biases = self.qkv_bias * (self.query + 2 * key) + self.mlp_bias * 2 * self.ffn
        whole = 2 * self.hidden + self.qk_norm * 2 * self.head_dim + (self.out_bias + self.mlp_bias) * self.hidden
        return (matrices + biases) // tp + whole

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.layers * self.layer() + self.hidden + self.embedding * (1 if self.tied else 2)

    def rank_parameters(self, tp: int = 1, pp: int = 1) -> int:
        """Return the parameters of the largest pipeline stage on one tensor-parallel rank.

        The first stage has the input embedding. The last one has the output embedding (a copy if tied) and the final
        norm.
        """
        if pp == 1:
            tables = self.embedding * (1 if self.tied else 2)
        else:
            tables = self.embedding
        return -(-self.layers // pp) * self.layer(tp) + self.hidden + tables // tp
