"""Options of which replica serves a request, and of the expected lengths that it goes by."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_rhyme.config.checks import about, nearest, option, require, typed_options

#: Values of ``placement.policy``, and the ``placement.options`` of each with their types, as its class has them.
PLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "longest_first": {},
    "histopipe": {"groups": int, "two_tier": bool, "migrate": bool, "tail": float},
    "skewness_aware": {"tail": float},
}


@dataclass(frozen=True)
class PlacementConfig:
    """Which replica serves a request."""

    policy: str | None = option(
        None,
        "null: verl's router (least loaded); under the pipeline, by expected lengths: longest_first (what full sets), "
        "and to compare histopipe, skewness_aware.",
        public=True,
    )
    options: dict[str, Any] = field(
        default_factory=dict,
        metadata=about(
            "Of the policy, each added with +: of histopipe groups=4, two_tier=true, migrate=true, tail=0.1; of "
            "skewness_aware tail=0.2.",
        ),
    )
    profile: str | None = option(
        None,
        "What a replica's work costs, as policies reckon: a file of `verl-rhyme profile`, or a name of "
        "planning/profiles; null: a 32B model's over four H800s (only ratios count).",
    )

    def __post_init__(self) -> None:
        policies = ", ".join(PLACEMENTS)
        if self.policy is None:
            require(self.profile is None, "placement.profile", self.profile, f"null without a policy ({policies})")
            require(not self.options, "placement.options", self.options, f"empty without a policy ({policies})")
            return
        near = nearest(self.policy, PLACEMENTS)
        require(self.policy in PLACEMENTS, "placement.policy", self.policy, f"null or one of {policies}", near)
        object.__setattr__(self, "options", typed_options("placement.options", self.policy, PLACEMENTS, self.options))


@dataclass(frozen=True)
class ModelRankerOptions:
    """``lengths.ranker.options`` of ``lengths.ranker.kind=model``.

    Attributes:
        loss: ``"listwise"`` or ``"margin"`` (by rank), or ``"regression"`` (as StreamRL publishes it).
        rate: Learning rate; 1e-5 or so for a large model.
    """

    loss: Literal["listwise", "margin", "regression"] = "listwise"
    rate: float = 1e-3

    def __post_init__(self) -> None:
        require(self.rate > 0, "lengths.ranker.options.rate", self.rate, "above 0")


#: Values of ``lengths.ranker.kind``, and the ``lengths.ranker.options`` of each with their types.
RANKERS: Mapping[str, Mapping[str, Any]] = {"boosting": {}, "model": typing.get_type_hints(ModelRankerOptions)}


@dataclass(frozen=True)
class RankerConfig:
    """What is expected of prompts never seen: a length ranker, trained alongside the run (StreamRL section 5)."""

    kind: Literal["boosting", "model"] | None = option(
        None,
        "null is off; boosting (gradient boosting over features of a prompt), or model (a small language model). Under "
        "the pipeline; it costs a process of low priority.",
    )
    model: str | None = option(
        None,
        "Of kind=model: a folder of transformers weights with the policy's vocabulary, or of `verl-rhyme ranker "
        "train`; null: a tiny model from nothing.",
    )
    refresh: int = option(512, "Prompts answered after which the ranker is trained again.")
    minutes: float = option(20.0, "Of kind=model: minutes that a training may take.")
    options: dict[str, Any] = field(
        default_factory=dict,
        metadata=about(
            "Of the kind, each added with +: of model loss=listwise (or margin, regression) and rate=0.001."
        ),
    )

    def __post_init__(self) -> None:
        allowed = "null, or a folder with lengths.ranker.kind=model"
        require(self.model is None or self.kind == "model", "lengths.ranker.model", self.model, allowed)
        require(self.refresh >= 16, "lengths.ranker.refresh", self.refresh, "at least 16 (prompts)")
        require(self.minutes > 0, "lengths.ranker.minutes", self.minutes, "above 0")
        if self.kind is None:
            allowed = f"empty without a kind ({', '.join(RANKERS)})"
            require(not self.options, "lengths.ranker.options", self.options, allowed)
            return
        object.__setattr__(self, "options", typed_options("lengths.ranker.options", self.kind, RANKERS, self.options))
        if self.kind == "model":
            ModelRankerOptions(**self.options)

    @property
    def training(self) -> ModelRankerOptions:
        """``options`` of ``kind="model"``, with their defaults."""
        return ModelRankerOptions(**self.options)


@dataclass(frozen=True)
class LengthsConfig:
    """Expected lengths of responses."""

    ranker: RankerConfig = field(default_factory=RankerConfig)
