"""Options of the placement of requests on replicas, and of the expected lengths behind it."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_rhyme.config.checks import nearest, option, option_metadata, require, typed_options

#: Values of ``placement.policy``; each with its ``placement.options`` and their types, as its class declares them.
PLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "longest_first": {},
    "histopipe": {"groups": int, "two_tier": bool, "migrate": bool, "tail": float},
    "skewness_aware": {"tail": float},
}


@dataclass(frozen=True)
class PlacementConfig:
    """Placement of requests on replicas."""

    policy: str | None = option(
        None,
        "Placement policy. null: verl's router (least loaded). With the pipeline, a policy that uses expected lengths: "
        "longest_first (preset full), or for comparison histopipe or skewness_aware.",
        public=True,
    )
    options: dict[str, Any] = field(
        default_factory=dict,
        metadata=option_metadata(
            "Options of the policy; add each with +. histopipe: groups=4, two_tier=true, migrate=true, tail=0.1. "
            "skewness_aware: tail=0.2.",
        ),
    )
    profile: str | None = option(
        None,
        "File of a replica's measured costs (docs/papers/streamrl.md). null: calculated from model, GPU and tensor "
        "parallel size; of a 32B model on four H800s where these are unknown (only ratios matter).",
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
    """The ``lengths.ranker.options`` for ``lengths.ranker.kind=model``.

    Attributes:
        loss: ``"listwise"`` or ``"margin"`` (losses on ranks), or ``"regression"`` (StreamRL's loss).
        rate: Learning rate; about 1e-5 for a large model.
    """

    loss: Literal["listwise", "margin", "regression"] = "listwise"
    rate: float = 1e-3

    def __post_init__(self) -> None:
        require(self.rate > 0, "lengths.ranker.options.rate", self.rate, "above 0")


#: Values of ``lengths.ranker.kind``; each with its ``lengths.ranker.options`` and their types.
RANKERS: Mapping[str, Mapping[str, Any]] = {"boosting": {}, "model": typing.get_type_hints(ModelRankerOptions)}


@dataclass(frozen=True)
class RankerConfig:
    """Length ranker: predicts response lengths of new prompts, trained alongside the run (StreamRL section 5)."""

    kind: Literal["boosting", "model"] | None = option(
        None,
        "Kind of ranker: boosting (gradient boosting on features of the prompt), or model (a small language model). "
        "Needs the pipeline. It runs in a process of low priority. null: no ranker.",
    )
    model: str | None = option(
        None,
        "For kind=model: a folder of transformers weights with the policy's vocabulary, or of `verl-rhyme ranker "
        "train`. null: a tiny model from random weights.",
    )
    refresh: int = option(512, "Retrain the ranker after this number of answered prompts.")
    minutes: float = option(20.0, "For kind=model: time limit of one training in minutes.")
    options: dict[str, Any] = field(
        default_factory=dict,
        metadata=option_metadata(
            "Options of the kind; add each with +. model: loss=listwise (or margin, regression), rate=0.001."
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
        """The ``options`` of ``kind="model"`` with their defaults."""
        return ModelRankerOptions(**self.options)


@dataclass(frozen=True)
class LengthsConfig:
    """Expected lengths of responses."""

    ranker: RankerConfig = field(default_factory=RankerConfig)
