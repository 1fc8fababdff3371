"""How an update batch is laid out for training: verl's padding in it, its mini-batches, and what is told of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_rhyme.observability import metrics as names
from verl_rhyme.scheduling.training_order import arrange, by_length, sortedness


def lay_out(
    tags: Sequence[dict[str, Any]], order: float, ranks: int, mini_batch: int, rng: np.random.Generator
) -> tuple[list[int], dict[str, float]]:
    """Mini-batches by length, balanced over the data-parallel ranks.

    Args:
        tags: Of each trajectory, from TransferQueue: ``response_len``, ``seq_len`` (tokens), ``is_padding``.
        order: 1: sorted by length; 0: shuffled.
        ranks: Data-parallel ranks.
        mini_batch: Trajectories of an optimizer step over all ranks. Where the batch does not split into such, it is
            laid out as one.
        rng: Decides among equal lengths, too.

    Returns:
        Indices, rank by rank, and the metrics of the order.
    """
    tokens = np.array([tag["seq_len"] for tag in tags])
    if len(tokens) % mini_batch or mini_batch % ranks:
        mini_batch = len(tokens)
    found = with_padding_spread(tags, order, rng)
    return arrange(found, tokens, ranks, mini_batch).tolist(), _told([tags[index] for index in found], mini_batch)


def with_padding_spread(tags: Sequence[dict[str, Any]], order: float, rng: np.random.Generator) -> np.ndarray:
    """int64[N], the order of training; verl's padding, which trains nothing, at even distances in it."""
    padding = np.array([tag.get("is_padding", False) for tag in tags], dtype=bool)
    real, fill = np.flatnonzero(~padding), np.flatnonzero(padding)
    lengths = np.array([tags[index]["response_len"] for index in real])
    found = real[by_length(lengths, rng, shuffled=not order)]
    return np.insert(found, (np.arange(len(fill)) * len(found) // max(1, len(fill))), fill)


def _told(tags: Sequence[dict[str, Any]], mini_batch: int) -> dict[str, float]:
    lengths = [tag["response_len"] for tag in tags if not tag.get("is_padding", False)]
    means = np.array([tag["seq_len"] for tag in tags]).reshape(-1, mini_batch).mean(axis=1)
    return {
        names.SORTED_ORDER: sortedness(lengths),
        names.SORTED_MINI_BATCH_SPREAD: float(means.max() / means.min()) if means.min() > 0 else 1.0,
    }
