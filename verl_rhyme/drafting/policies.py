"""The available drafters by their names in ``drafting.policy``."""

from __future__ import annotations

from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import adaptive, paper
from verl_rhyme.drafting.histories import Get, Release, keep
from verl_rhyme.drafting.policy import DraftPolicy
from verl_rhyme.planning.experts import Experts


def build(
    config: DraftingConfig,
    get: Get,
    slots: int,
    vocabulary: int,
    threads: int = 1,
    release: Release = keep,
    experts: Experts | None = None,
) -> DraftPolicy:
    """Build the configured drafter and compile its kernels; arguments as of :class:`.adaptive.AdaptiveDrafter`."""
    if config.policy == "paper":
        paper.warm()
        return paper.PaperDrafter(config, get, vocabulary, release)
    adaptive.warm()
    return adaptive.AdaptiveDrafter(config, get, slots, vocabulary, threads, release, experts)
