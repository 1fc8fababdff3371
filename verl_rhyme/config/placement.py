"""Options of which replica serves a request, and of the forecasts of lengths that it goes by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_rhyme.config.checks import CONFIG_PATH, ConfigError, coerce, nearest, require

#: Values of ``placement.policy``, and the ``placement.options`` of each with their types, as its class has them.
PLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "least_loaded": {"seed": int | None},
    "sticky_group": {"factor": float},
    "longest_first": {},
    "histopipe": {"groups": int, "two_tier": bool, "migrate": bool, "tail": float},
    "makespan": {"migrate": bool, "gain": float, "sibling_gain": float},
    "skewness_aware": {"objective": str, "pools": int, "tail": float, "late": bool},
}

#: Those that go by forecasts of lengths: a coordinator plans with them.
LENGTH_PLACEMENTS = ("longest_first", "histopipe", "makespan", "skewness_aware")

#: Values of ``lengths.ranker.kind`` and ``lengths.ranker.loss``, as ``lengths/ranker.py`` has these.
RANKERS = ("boosting", "model")


RANKER_LOSSES = ("listwise", "margin", "regression")


@dataclass(frozen=True)
class PlacementConfig:
    """Which replica serves a request.

    Attributes:
        policy: A name in :data:`PLACEMENTS` (``scheduling/placement``). ``None``: verl's own router.
        options: Of the policy, by its row in :data:`PLACEMENTS`.
        profile: Of those that go by forecasts: what a replica's work costs, a name of ``simulation/profiles`` or a file
            (``verl-rhyme profile`` makes one of a run). ``None``: a 32B model's over four H800s; only ratios count.
    """

    policy: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    profile: str | None = None

    def __post_init__(self) -> None:
        policies = ", ".join(PLACEMENTS)
        if self.profile is not None:
            allowed = f"null, or placement.policy one of {', '.join(LENGTH_PLACEMENTS)}"
            require(self.policy in LENGTH_PLACEMENTS, "placement.profile", self.profile, allowed)
        if self.policy is None:
            require(not self.options, "placement.options", self.options, f"empty without a policy ({policies})")
            return
        near = nearest(self.policy, PLACEMENTS)
        require(self.policy in PLACEMENTS, "placement.policy", self.policy, f"null or one of {policies}", near)
        known = PLACEMENTS[self.policy]
        for name in self.options:
            if name not in known:
                whose = [policy for policy, options in PLACEMENTS.items() if name in options]
                hint = f"; it is of {' and '.join(whose)}" if whose else nearest(name, known)
                has = f"{self.policy} has {', '.join(known) or 'none'}"
                raise ConfigError(f"unknown option {CONFIG_PATH}.placement.options.{name}: {has}{hint}")
        typed = {name: coerce(value, known[name], f"placement.options.{name}") for name, value in self.options.items()}
        object.__setattr__(self, "options", typed)


@dataclass(frozen=True)
class RankerConfig:
    """What is expected of prompts never seen: a length ranker, trained beside the run (StreamRL section 5).

    Attributes:
        enable: For runs that a coordinator drives (``sorting.mode``); what it costs is a process of low priority.
        kind: ``"boosting"``: gradient boosting over features of a prompt. ``"model"``: a small language model.
        model: Of ``kind=model``: a folder of transformers weights with the policy's vocabulary to begin with, or a
            ranker of ``verl-rhyme ranker train``, which serves from the start. ``None``: a tiny one from nothing.
        loss: Of ``kind=model``: ``"listwise"``, ``"margin"``, or ``"regression"`` as published.
        rate: Of ``kind=model``: learning rate.
        refresh: It is trained anew when so many prompts have been answered since.
        most: Prompts that it is trained on, the latest ones.
        minutes: Of ``kind=model``: that a training may take; what is best until then is kept.
    """

    enable: bool = False
    kind: str = "boosting"
    model: str | None = None
    loss: str = "listwise"
    rate: float = 1e-3
    refresh: int = 512
    most: int = 8192
    minutes: float = 20.0

    def __post_init__(self) -> None:
        require(self.kind in RANKERS, "lengths.ranker.kind", self.kind, " or ".join(RANKERS))
        require(self.loss in RANKER_LOSSES, "lengths.ranker.loss", self.loss, f"one of {', '.join(RANKER_LOSSES)}")
        allowed = "null, or a folder with lengths.ranker.kind=model"
        require(self.model is None or self.kind == "model", "lengths.ranker.model", self.model, allowed)
        require(self.rate > 0, "lengths.ranker.rate", self.rate, "above 0")
        require(self.refresh >= 16, "lengths.ranker.refresh", self.refresh, "at least 16 (prompts)")
        require(self.minutes > 0, "lengths.ranker.minutes", self.minutes, "above 0")
        require(self.most >= self.refresh, "lengths.ranker.most", self.most, f"at least refresh ({self.refresh})")


@dataclass(frozen=True)
class LengthsConfig:
    """Forecasts of lengths."""

    ranker: RankerConfig = field(default_factory=RankerConfig)
