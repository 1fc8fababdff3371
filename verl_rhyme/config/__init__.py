"""The typed configuration: what options there are, their defaults, ranges and contradictions.

A file for each part of the tree, with what each option means: :mod:`.drafting` (history, drafting, sampling),
:mod:`.sorting` (sorting, streaming), :mod:`.placement` (placement, lengths); here the root and the small ones.
:mod:`verl_rhyme.config_tree` reads the tree from verl's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from verl_rhyme.config.checks import CONFIG_PATH, ConfigError, coerce, require
from verl_rhyme.config.drafting import (
    AUTOMATIC_HISTORY_SHARE,
    DRAFTERS,
    HISTORY_FILL,
    MAX_DRAFT_TOKENS,
    VERIFIERS,
    DraftingConfig,
    HistoryConfig,
    MatchConfig,
    SamplingConfig,
    WindowConfig,
)
from verl_rhyme.config.placement import (
    LENGTH_PLACEMENTS,
    PLACEMENTS,
    RANKER_LOSSES,
    RANKERS,
    LengthsConfig,
    PlacementConfig,
    RankerConfig,
)
from verl_rhyme.config.sorting import (
    MAX_OVERSUBSCRIPTION,
    SINGLE_ESTIMATORS,
    SORTING_CHOICES,
    SORTING_MODES,
    SORTING_UNITS,
    TOPOLOGIES,
    ElasticConfig,
    SortingConfig,
    StreamingConfig,
    sorting_order,
    sorting_unit,
)

__all__ = [
    "AUTOMATIC_HISTORY_SHARE",
    "CONFIG_PATH",
    "DRAFTERS",
    "HISTORY_FILL",
    "LENGTH_PLACEMENTS",
    "MAX_DRAFT_TOKENS",
    "MAX_OVERSUBSCRIPTION",
    "PLACEMENTS",
    "RANKERS",
    "RANKER_LOSSES",
    "SINGLE_ESTIMATORS",
    "SORTING_CHOICES",
    "SORTING_MODES",
    "SORTING_UNITS",
    "STOCK_ARM",
    "TOPOLOGIES",
    "VERIFIERS",
    "ConfigError",
    "DraftingConfig",
    "ElasticConfig",
    "EventsConfig",
    "HistoryConfig",
    "LengthsConfig",
    "MatchConfig",
    "PlacementConfig",
    "RankerConfig",
    "RhymeConfig",
    "SamplingConfig",
    "SortingConfig",
    "StreamingConfig",
    "WeightsConfig",
    "WindowConfig",
    "coerce",
    "sorting_order",
    "sorting_unit",
]

#: The arm of a run without rhyme.
STOCK_ARM = "off"


@dataclass(frozen=True)
class WeightsConfig:
    """Weights by the relay (``checkpoint_engine.backend=relay``), where engines stand at several sites.

    Attributes:
        site_label: Label of Ray nodes that says which site one is at (``ray start --labels="rhyme-site=north"``).
            Nodes without it are at one site. ``None``: all nodes are.
        pack: What goes from site to site is packed, and as what differs from the version before where both ends have
            it; else all bytes go as they are.
        link_patience: Seconds for which a node waits for one that sends nothing, before it asks another or gives up.
    """

    site_label: str | None = "rhyme-site"
    pack: bool = True
    link_patience: float = 600.0

    def __post_init__(self) -> None:
        require(self.link_patience > 0, "weights.link_patience", self.link_patience, "above 0")
        require(self.site_label != "", "weights.site_label", self.site_label, "null, or the name of a label")


@dataclass(frozen=True)
class EventsConfig:
    """The event log.

    Attributes:
        dir: ``None`` writes below ``trainer.default_local_dir``.
        responses: Log the tokens of every trained response as well, about 8 bytes a token, to replay the run with
            ``python -m benchmarks.draft_quality``.
    """

    enable: bool = True
    dir: str | None = None
    responses: bool = False


@dataclass(frozen=True)
class RhymeConfig:
    """Root of the tree. ``enable=false`` leaves stock verl, or somebody's own trainer without our hooks.

    Attributes:
        poll_interval: Seconds between two looks of verl's replay buffer at its queue; ``None`` keeps verl's 2 s.
    """

    enable: bool = True
    poll_interval: float | None = 0.25
    history: HistoryConfig = field(default_factory=HistoryConfig)
    drafting: DraftingConfig = field(default_factory=DraftingConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sorting: SortingConfig = field(default_factory=SortingConfig)
    streaming: StreamingConfig = field(default_factory=StreamingConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    lengths: LengthsConfig = field(default_factory=LengthsConfig)
    events: EventsConfig = field(default_factory=EventsConfig)

    def __post_init__(self) -> None:
        require(
            self.poll_interval is None or self.poll_interval > 0, "poll_interval", self.poll_interval, "null or above 0"
        )
        allowed = "false without sorting.mode (+rhyme=sorted, histopipe, stream): verl's own order asks no forecast"
        require(not self.lengths.ranker.enable or bool(self.sorting.mode), "lengths.ranker.enable", True, allowed)

    @property
    def coupled(self) -> bool:
        """``sampling.coupled``; ``None`` stands for on-policy sorted rollout whose drafts our sampler verifies."""
        if self.sampling.coupled is not None:
            return self.sampling.coupled
        return self.sorting.mode == "on_policy" and self.drafting.enable and self.sampling.verify == "ours"

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict; :func:`verl_rhyme.config_tree.parse` reads it back."""
        return dataclasses.asdict(self)
@dataclass(frozen=True)
class SchedulingConfig:
    in_flight: float | None = None
    put_off: float | None = None
    take: str = "finished"
    refill: str = "always"
    at_version: str | None = None
    unit: str | None = None
OVERSUBSCRIPTION = 2.0
trained_unit = sorting_unit
training_order = sorting_order
