"""The drafters there are, by the name that ``drafting.policy`` gives them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import adaptive, paper
from verl_rhyme.drafting.bounds import request_limits
from verl_rhyme.drafting.policy import DraftPolicy
from verl_rhyme.history.record import PromptHistory


def build(
    config: DraftingConfig, lookup: Callable[[bytes], PromptHistory | None], slots: int, vocabulary: int
) -> DraftPolicy:
    """The configured drafter, compiled and ready.

    Args:
        config: The drafting tree.
        lookup: A prompt's history by its key, or ``None``.
        slots: Requests that run at a time.
        vocabulary: Token ids that may be drafted are below it.
    """
    request_limits(np.zeros(1), np.zeros(1), np.zeros(1), 1, 1)  # compiles
    if config.policy == "paper":
        paper.warm()
        return paper.PaperDrafter(config, lookup, vocabulary)
    adaptive.warm()
    return adaptive.AdaptiveDrafter(config, lookup, slots, vocabulary)
