"""Layout of an update batch for training: verl's padding, mini-batches, and metrics of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_rhyme.observability import metrics as names
from verl_rhyme.scheduling.training_order import arrange, by_length, sortedness


def arrange_batch(
    tags: Sequence[dict[str, Any]], order: float, ranks: int, mini_batch: int, rng: np.random.Generator
) -> tuple[list[int], dict[str, float]]:
    """Arrange mini-batches by length (``order`` 1) or shuffled (0), balanced over the data parallel ranks. Return
    indices, rank by rank, and metrics of the order. ``tags`` are TransferQueue's, with ``response_len``, ``seq_len``
    (tokens) and ``is_padding``; ``mini_batch`` counts trajectories over all ranks: if it does not divide the batch,
    that is one. ``rng`` also orders equal lengths."""
    tokens = np.array([tag["seq_len"] for tag in tags])
    if len(tokens) % mini_batch or mini_batch % ranks:
        mini_batch = len(tokens)
    trained = spread_padding(tags, order, rng)
    return arrange(trained, tokens, ranks, mini_batch).tolist(), _metrics([tags[i] for i in trained], mini_batch)


def spread_padding(tags: Sequence[dict[str, Any]], order: float, rng: np.random.Generator) -> np.ndarray:
    """Return the order of training, int64[N], with verl's untrained padding at even distances."""
    padding = np.array([tag.get("is_padding", False) for tag in tags], dtype=bool)
    real, fill = np.flatnonzero(~padding), np.flatnonzero(padding)
    lengths = np.array([tags[index]["response_len"] for index in real])
    trained = real[by_length(lengths, rng, shuffled=not order)]
    return np.insert(trained, (np.arange(len(fill)) * len(trained) // max(1, len(fill))), fill)


def _metrics(tags: Sequence[dict[str, Any]], mini_batch: int) -> dict[str, float]:
    lengths = [tag["response_len"] for tag in tags if not tag.get("is_padding", False)]
    means = np.array([tag["seq_len"] for tag in tags]).reshape(-1, mini_batch).mean(axis=1)
    return {
        names.BATCH_ORDER: sortedness(lengths),
        names.MINI_BATCH_SPREAD: float(means.max() / means.min()) if means.min() > 0 else 1.0,
    }
