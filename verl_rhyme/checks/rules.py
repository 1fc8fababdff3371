"""The pipeline's rules of verl's config."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.config import TOPOLOGIES, RhymeConfig, trained_unit
from verl_rhyme.config.backends import backend
from verl_rhyme.scheduling.rules import Rules, of_options


def of_config(config: Any, rhyme: RhymeConfig | None) -> Rules | None:
    """Return the rules of verl's ``DictConfig`` and its ``rhyme`` section; ``None`` without a ``max_staleness``.

    Missing keys have the defaults of :func:`of_options`, and errors are the same.
    """
    if rhyme is None or rhyme.max_staleness is None:
        return None
    rollout = "actor_rollout_ref.rollout"
    return of_options(
        rhyme.scheduling,
        rhyme.max_staleness,
        separate=TOPOLOGIES.get(str(OmegaConf.select(config, "trainer.v1.trainer_mode"))) == "separate",
        batch_prompts=int(OmegaConf.select(config, "data.train_batch_size") or 1),
        samples=int(OmegaConf.select(config, f"{rollout}.n") or 1),
        unit=trained_unit(
            rhyme.scheduling.unit,
            str(OmegaConf.select(config, "algorithm.adv_estimator")),
            bool(OmegaConf.select(config, "algorithm.filter_groups.enable")),
        ),
        relayed=backend(str(OmegaConf.select(config, f"{rollout}.checkpoint_engine.backend"))).one_by_one,
        drafts=rhyme.drafting.enable and rhyme.drafting.policy == "adaptive",
    )
