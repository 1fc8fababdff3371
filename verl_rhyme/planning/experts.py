"""Experts of a mixture's layers, from the ``config.json`` of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Experts:
    """Routed experts of a layer."""

    count: int = 0  # E
    chosen: float = 0  # k, by each token

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Experts | None:
        """Return those of a parsed ``config.json`` of any family; ``None`` without any."""
        config = config.get("text_config") or config
        count = first(config, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
        names = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")
        chosen = first(config, *names)
        return cls(count, chosen) if count > 1 and chosen else None

    @property
    def share(self) -> float:
        """Share of the experts that a token chooses."""
        return self.chosen / (self.count or 1)

    def loaded(self, tokens: Any) -> Any:
        """Return the expected number of experts that ``tokens`` tokens choose, if independently: E (1 - (1 - k/E)^n).

        ``tokens``: int, float or float64[...].
        """
        return self.count * (1 - (1 - self.share) ** tokens)


def first(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of these entries that is neither missing nor 0, else 0."""
    value = next((config[name] for name in names if config.get(name)), 0)
    return int(max(value) if isinstance(value, list | tuple) else value)  # some families have one for each layer


@dataclass(frozen=True)
class Mixture:
    """Experts in place of the MLP in some layers; counts are of one such layer."""

    layers: int
    experts: Experts
    expert: int  # parameters of a routed expert
    width: int  # of a routed expert
    shared: int  # width of the experts that every token takes, together
    router: int  # parameters of the router, and of the shared experts' gate

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Mixture | None:
        """Return that of a parsed ``config.json``, its language model's part; ``None`` for a dense model."""
        if (experts := Experts.read(config)) is None:
            return None
        layers, hidden, kind = int(config["num_hidden_layers"]), int(config["hidden_size"]), config["model_type"]
        width = first(config, "moe_intermediate_size", "intermediate_size")
        gated = first(config, "shared_expert_intermediate_size")
        every, dense = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
        sparse = [
            layer >= int(config.get("first_k_dense_replace") or 0) and layer not in dense and not (layer + 1) % every
            for layer in range(layers)
        ]
        bias = kind == "gpt_oss"
        return cls(
            layers=sum(sparse),
            experts=experts,
            expert=3 * hidden * width + bias * (2 * width + hidden),
            width=width,
            shared=gated or int(config.get("n_shared_experts") or 0) * width,
            router=hidden * experts.count + bias * experts.count + bool(gated) * hidden,
        )

    @property
    def routed(self) -> int:
        """Parameters of the routed experts of all layers."""
        return self.layers * self.experts.count * self.expert
