"""Options of the placement of requests on replicas, and of the expected lengths behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
class LengthsConfig:
    """Expected lengths of responses."""

    ranker: str | None = option(
        None,
        "Folder of a length ranker (`verl-rhyme ranker train`): it predicts the lengths of prompts without earlier "
        "responses. Needs the pipeline. null: no ranker.",
    )
