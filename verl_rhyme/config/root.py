"""Root of the configuration, its small sections, and the list of all options."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from verl_rhyme.config.checks import CONFIG_PATH, ConfigError, option, require, type_name
from verl_rhyme.config.drafting import DraftingConfig, HistoryConfig
from verl_rhyme.config.placement import LengthsConfig, PlacementConfig
from verl_rhyme.config.presets import leaves
from verl_rhyme.config.scheduling import SchedulingConfig, StreamingConfig


@dataclass(frozen=True)
class WeightsConfig:
    """Weight transfer by the relay (``checkpoint_engine.backend=relay``), also to engines at other sites."""

    site_label: str | None = option(
        "rhyme-site",
        "Ray node label that names the node's site (ray start --labels). All nodes without the label are at one site.",
    )
    pack: bool = option(True, "Compress weights between sites as the difference from the previous version.")


@dataclass(frozen=True)
class EventsConfig:
    """Event log, the input of `verl-rhyme report`."""

    enable: bool = option(True, "Write the event log.", public=True)
    dir: str | None = option(None, "Folder of the event log. null: below trainer.default_local_dir.", public=True)
    responses: bool = option(
        False,
        "Also log the tokens of every trained response (8 bytes each), to replay the run in benchmarks/.",
        public=True,
    )

    def __post_init__(self) -> None:
        require(self.enable or not self.responses, "events.responses", True, "false with events.enable=false")


#: Values of the options that only the pipeline uses; verl's own schedule uses two of the timeouts among them.
_DEFAULTS = {
    "scheduling": dict(leaves(dataclasses.asdict(SchedulingConfig()))),
    "streaming": dict(leaves(dataclasses.asdict(StreamingConfig()))),
}


@dataclass(frozen=True)
class RhymeConfig:
    """Options of verl-rhyme."""

    enable: bool = option(True, "Enable verl-rhyme. false: stock verl, or your own trainer without hooks.", public=True)
    max_staleness: int | None = option(
        None,
        "Maximum staleness: policy versions between a trained token and the policy that trains on it. 0 is on-policy; "
        "higher values train faster. null: verl's own schedule.",
        public=True,
    )
    history: HistoryConfig = field(default_factory=HistoryConfig)
    drafting: DraftingConfig = field(default_factory=DraftingConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    streaming: StreamingConfig = field(default_factory=StreamingConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    lengths: LengthsConfig = field(default_factory=LengthsConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    events: EventsConfig = field(default_factory=EventsConfig)

    def __post_init__(self) -> None:
        stale = self.max_staleness
        require(stale is None or stale >= 0, "max_staleness", stale, "null, or at least 0 (policy versions)")
        allowed = "null without max_staleness (+rhyme=full): verl's own schedule uses no expected lengths"
        ranker = self.lengths.ranker
        require(ranker is None or self.pipeline, "lengths.ranker", ranker, allowed)
        if self.enable and not self.pipeline:
            given = [
                f"{section}.{name}"
                for section, mine in (("scheduling", self.scheduling), ("streaming", self.streaming))
                for name, value in leaves(dataclasses.asdict(mine))
                if value != _DEFAULTS[section][name] and name not in ("tool_timeout", "lost_after")
            ]
            if given:
                listed = ", ".join(f"{CONFIG_PATH}.{name}" for name in given)
                verb = "needs" if len(given) == 1 else "need"
                raise ConfigError(f"{listed} {verb} the pipeline: use +rhyme=full, or drop {given[0]}")

    @property
    def pipeline(self) -> bool:
        """Whether the pipeline schedules samples instead of verl."""
        return self.max_staleness is not None

    @property
    def draws(self) -> bool:
        """Whether engines draw tokens with rhyme's sampler: to verify drafts, and to regenerate with the same noise."""
        return self.pipeline or self.drafting.enable

    def to_dict(self) -> dict[str, Any]:
        """Return a nested dict; :func:`verl_rhyme.config.config_tree.parse` reads it back."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Option:
    """One option."""

    name: str  # path below CONFIG_PATH, such as "drafting.floor"
    default: Any
    type: str  # for users, such as "int or null"
    public: bool  # for users; else for experts
    help: str


def options() -> list[Option]:
    """Return all options in declared order."""
    return list(_walk(RhymeConfig, ""))


def _walk(cls: type[Any], where: str) -> Iterator[Option]:
    hints = typing.get_type_hints(cls)
    for of in dataclasses.fields(cls):
        kind = hints[of.name]
        if dataclasses.is_dataclass(kind):
            yield from _walk(typing.cast("type[Any]", kind), f"{where}{of.name}.")
        else:
            default = of.default if of.default_factory is dataclasses.MISSING else of.default_factory()
            yield Option(f"{where}{of.name}", default, type_name(kind), of.metadata["public"], of.metadata["help"])
