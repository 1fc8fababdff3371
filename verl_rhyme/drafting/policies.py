"""The drafters there are, by the name that ``drafting.policy`` gives them."""

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
    """The configured drafter, compiled and ready.

    Args:
        config: The drafting tree.
        histories: Where histories come from; a function gives a prompt's history by its key, or ``None``.
        slots: Requests that run at a time.
        vocabulary: Token ids that may be drafted are below it.
        threads: What plans a batch's rows; ``None``: the thread that asks.
        head: A draft head; ``None``: there is none.
    """
    request_limits(np.zeros(1), np.zeros(1), np.zeros(1), 1, 1)
    (paper if config.policy == "paper" else adaptive).warm()
    if config.policy == "paper":
        return paper.PaperDrafter(config, histories, vocabulary)
    return adaptive.AdaptiveDrafter(config, histories, slots, vocabulary, threads or OneThread(), head)
