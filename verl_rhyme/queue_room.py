"""Whether TransferQueue has room for all that a run of ours keeps in it; start-up and preflight refuse it otherwise."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.combinations import Refusal
from verl_rhyme.config import TOPOLOGIES, RhymeConfig, sorting_unit
from verl_rhyme.scheduling import rules

SIZE = "transfer_queue.backend.SimpleStorage.total_storage_size"


def refusal(config: Any, rhyme: RhymeConfig | None) -> Refusal | None:
    """A limit that somebody set (our presets set none) and that a full rollout exceeds.

    Args:
        config: verl's whole config.
        rhyme: Our tree in it; ``None`` without rhyme. verl's own trainer modes are not looked at.
    """
    keys = (SIZE, "data.train_batch_size", "actor_rollout_ref.rollout.n", "transfer_queue.backend.storage_backend")
    limit, prompts, samples, backend = (OmegaConf.select(config, key) for key in keys)
    if rhyme is None or rhyme.sorting.mode is None or None in (limit, prompts, samples) or backend != "SimpleStorage":
        return None
    try:
        found = rules.of_options(
            rhyme.sorting,
            apart=TOPOLOGIES.get(str(config.trainer.v1.trainer_mode)) == "separate",
            batch_prompts=int(prompts),
            samples=int(samples),
            unit=sorting_unit(rhyme.sorting.unit, str(OmegaConf.select(config, "algorithm.adv_estimator"))),
            drafts=rhyme.drafting.enable,
        )
    except ValueError:  # options that exclude each other: combinations.py reports it
        return None
    if int(limit) >= found.queue_entries:
        return None
    batches = found.load_batches(None)
    return Refusal(
        f"{SIZE}={limit} is less than the {found.queue_entries} entries that {batches} update batches of {prompts} "
        f"prompts x {samples}, and what is trained, may take",
        f"drop it (+rhyme=sorted, histopipe, stream and full set no limit), or set {SIZE}={found.queue_entries}",
    )
