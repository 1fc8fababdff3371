"""The root of the configuration tree, and its small sections."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from verl_rhyme.config.checks import CONFIG_PATH, ConfigError, option, require
from verl_rhyme.config.drafting import DraftingConfig, HistoryConfig, SamplingConfig
from verl_rhyme.config.placement import LengthsConfig, PlacementConfig
from verl_rhyme.config.scheduling import SchedulingConfig, StreamingConfig


@dataclass(frozen=True)
class WeightsConfig:
    """Weights by the relay (``checkpoint_engine.backend=relay``), where engines are at several sites."""

    site_label: str | None = option(
        "rhyme-site",
        "Label of Ray nodes that says at which site one is (ray start --labels); nodes without it are at one site.",
    )
    pack: bool = option(True, "Pack what goes from site to site, as the difference from the version before.")

    def __post_init__(self) -> None:
        require(self.site_label != "", "weights.site_label", self.site_label, "null, or the name of a label")


@dataclass(frozen=True)
class EventsConfig:
    """The event log, which `verl-rhyme report` reads."""

    enable: bool = option(True, "Write the event log.", public=True)
    dir: str | None = option(None, "Its folder; null: below trainer.default_local_dir.", public=True)
    responses: bool = option(
        False,
        "Also log the tokens of every trained response (8 bytes each), to replay the run in benchmarks/.",
        public=True,
    )


@dataclass(frozen=True)
class RhymeConfig:
    """verl-rhyme."""

    enable: bool = option(True, "false leaves stock verl, or your own trainer without our hooks.", public=True)
    max_staleness: int | None = option(
        None,
        "The dial: policy versions between a trained token and the policy it trains, at most. 0 is on-policy, 1 and "
        "more train faster; null: verl's own schedule.",
        public=True,
    )
    history: HistoryConfig = field(default_factory=HistoryConfig)
    drafting: DraftingConfig = field(default_factory=DraftingConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    streaming: StreamingConfig = field(default_factory=StreamingConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    lengths: LengthsConfig = field(default_factory=LengthsConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    events: EventsConfig = field(default_factory=EventsConfig)

    def __post_init__(self) -> None:
        stale = self.max_staleness
        require(stale is None or stale >= 0, "max_staleness", stale, "null, or at least 0 (policy versions)")
        allowed = "null without max_staleness (+rhyme=full): verl's own order asks for no expected length"
        kind = self.lengths.ranker.kind
        require(kind is None or self.pipeline, "lengths.ranker.kind", kind, allowed)
        patience = SchedulingConfig(tool_timeout=self.scheduling.tool_timeout, lost_after=self.scheduling.lost_after)
        if self.enable and not self.pipeline and self.scheduling != patience:
            remedy = "use +rhyme=full or another preset with max_staleness, or drop it"
            raise ConfigError(f"{CONFIG_PATH}.scheduling: only the pipeline has what is set there; {remedy}")

    @property
    def pipeline(self) -> bool:
        """Our pipeline schedules, not verl."""
        return self.max_staleness is not None

    @property
    def coupled(self) -> bool:
        """``sampling.coupled``; ``None`` stands for the on-policy pipeline with drafts."""
        if self.sampling.coupled is not None:
            return self.sampling.coupled
        return self.max_staleness == 0 and self.drafting.enable

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict; :func:`verl_rhyme.config.config_tree.parse` reads it back."""
        return dataclasses.asdict(self)
