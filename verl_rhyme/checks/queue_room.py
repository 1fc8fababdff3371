"""Whether TransferQueue has room for all that the pipeline keeps in it; start-up and preflight refuse it otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.checks.combinations import Refusal
from verl_rhyme.config import CONFIG_PATH, RhymeConfig
from verl_rhyme.scheduling.rules import of_config

SIZE = "transfer_queue.backend.SimpleStorage.total_storage_size"


def refusals(config: Any, rhyme: RhymeConfig | None) -> Iterator[Refusal]:
    """A limit that somebody set (our presets set none) and that the batches in flight exceed.

    Args:
        config: verl's whole config.
        rhyme: Our tree in it; ``None`` without rhyme. verl's own schedule is not looked at.

    Raises:
        ValueError: Options exclude each other (:func:`~verl_rhyme.scheduling.rules.of_config`).
    """
    keys = (SIZE, "transfer_queue.backend.storage_backend", "data.train_batch_size", "actor_rollout_ref.rollout.n")
    limit, backend, prompts, samples = (OmegaConf.select(config, key) for key in keys)
    rules = of_config(config, rhyme)
    if rules is None or limit is None or backend != "SimpleStorage" or int(limit) >= rules.queue_entries:
        return
    assert rhyme is not None, "it has rules"
    given = "null" if rhyme.scheduling.in_flight is None else f"{rhyme.scheduling.in_flight:g}"
    yield Refusal(
        f"{SIZE}={limit} is less than the {rules.queue_entries} entries that {rules.batches:g} update batches in "
        f"flight ({CONFIG_PATH}.scheduling.in_flight={given}) of {prompts} prompts x {samples}, and the one that is "
        "trained, may take",
        f"drop it (presets set no limit), set {SIZE}={rules.queue_entries}, or lower scheduling.in_flight",
    )
