"""Typed configuration: the options, their defaults, their ranges, and the checks between them.

Every option is a field of these dataclasses with its help text (:func:`.checks.option`). :mod:`.generate` writes
``docs/options.md`` from them, ``verl-rhyme options`` prints them, and hydra's plugin registers them for overrides.

Each section has a module: :mod:`.drafting` (history, drafting, sampling), :mod:`.scheduling` (scheduling, streaming),
:mod:`.placement` (placement, lengths), :mod:`.root` (root, weights, events). :mod:`.presets` reads the settings of
``+rhyme=NAME``. :mod:`.config_tree` reads the options from verl's config.

Process: all. Engines: none.
"""

from __future__ import annotations

from verl_rhyme.config.checks import CONFIG_PATH, V1_ONLY, ConfigError
from verl_rhyme.config.drafting import HISTORY_FILL, MAX_DRAFT_TOKENS, DraftingConfig, HistoryConfig
from verl_rhyme.config.placement import PLACEMENTS, PlacementConfig
from verl_rhyme.config.presets import PIPELINES, PRESETS, STOCK
from verl_rhyme.config.root import RhymeConfig, WeightsConfig, options
from verl_rhyme.config.scheduling import (
    OVERSUBSCRIPTION,
    SINGLE_ESTIMATORS,
    TOPOLOGIES,
    ElasticConfig,
    SchedulingConfig,
    StreamingConfig,
    trained_unit,
    training_order,
)

__all__ = [
    "CONFIG_PATH",
    "HISTORY_FILL",
    "MAX_DRAFT_TOKENS",
    "OVERSUBSCRIPTION",
    "PIPELINES",
    "PLACEMENTS",
    "PRESETS",
    "SINGLE_ESTIMATORS",
    "STOCK",
    "TOPOLOGIES",
    "V1_ONLY",
    "ConfigError",
    "DraftingConfig",
    "ElasticConfig",
    "HistoryConfig",
    "PlacementConfig",
    "RhymeConfig",
    "SchedulingConfig",
    "StreamingConfig",
    "WeightsConfig",
    "options",
    "trained_unit",
    "training_order",
]
