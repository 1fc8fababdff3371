"""The available drafters by their names in ``drafting.policy``."""

from __future__ import annotations

import numpy as np

from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import adaptive, paper
from verl_rhyme.drafting.bounds import request_limits
from verl_rhyme.drafting.guesses import Guesser
from verl_rhyme.drafting.histories import Get, Source
from verl_rhyme.drafting.policy import DraftPolicy
from verl_rhyme.drafting.threads import OneThread, Threads


def build(
    config: DraftingConfig,
    histories: Source | Get,
    slots: int,
    vocabulary: int,
    threads: Threads | None = None,
    head: Guesser | None = None,
) -> DraftPolicy:
    """Build the configured drafter and compile its kernels.

    Args:
        config: ``drafting`` section of the config.
        histories: Source of histories, or a function from a prompt's key to its history or ``None``.
        slots: Expected number of running requests.
        vocabulary: Exclusive upper bound of drafted token ids.
        threads: Threads that plan a batch's rows; ``None``: the caller's.
        head: Draft head, or ``None``.
    """
    request_limits(np.zeros(1), np.zeros(1), np.zeros(1), 1, 1)
    (paper if config.policy == "paper" else adaptive).warm()
    if config.policy == "paper":
        return paper.PaperDrafter(config, histories, vocabulary)
    return adaptive.AdaptiveDrafter(config, histories, slots, vocabulary, threads or OneThread(), head)
