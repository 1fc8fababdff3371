"""The drafters there are, by the name that ``drafting.policy`` gives them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import adaptive, kernels, paper
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
    _warm(paper.warm if config.policy == "paper" else adaptive.warm)
    if config.policy == "paper":
        return paper.PaperDrafter(config, lookup, vocabulary)
    return adaptive.AdaptiveDrafter(config, lookup, slots, vocabulary)


def _warm(compile: Callable[[], None]) -> None:
    """Compile all that drafting needs, or load it from numba's disk cache."""
    try:
        request_limits(np.zeros(1), np.zeros(1), np.zeros(1), 1, 1)
        compile()
    except Exception:
        # numba unpickles a cache's index before it looks whether that is out of date, and fails where an older
        # version of this package had its types elsewhere.
        for index in Path(kernels.step.stats.cache_path).glob("*.nbi"):
            index.unlink(missing_ok=True)
        compile()
