"""The available drafters by their names in ``drafting.policy``."""

from __future__ import annotations

from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import adaptive, paper
from verl_rhyme.drafting.histories import Get, Source
from verl_rhyme.drafting.policy import DraftPolicy
from verl_rhyme.drafting.threads import Threads


def build(
    config: DraftingConfig,
    histories: Source | Get,
    slots: int,
    vocabulary: int,
    threads: Threads | None = None,
) -> DraftPolicy:
    """Build the configured drafter and compile its kernels; arguments as of :class:`.adaptive.AdaptiveDrafter`."""
    if config.policy == "paper":
        paper.warm()
        return paper.PaperDrafter(config, histories, vocabulary)
    adaptive.warm()
    return adaptive.AdaptiveDrafter(config, histories, slots, vocabulary, threads)
