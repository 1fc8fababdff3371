"""The order in which an update batch is trained: sorted by length or shuffled, balanced over the ranks.

verl gives each data-parallel rank one contiguous part of the batch and cuts each part into mini-batches. The k-th
mini-batch is thus the k-th piece of every part (``verl/workers/engine_workers.py``, ``train_mini_batch``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def by_length(lengths: npt.ArrayLike, rng: np.random.Generator, shuffled: bool = False) -> np.ndarray:
    """Return int64[N], indices of int[N] tokens, shortest first; equal ones (``shuffled``: all) in random order."""
    chance = rng.permutation(len(np.asarray(lengths)))
    return chance if shuffled else np.lexsort((chance, np.asarray(lengths)))


def arrange(order: npt.ArrayLike, tokens: npt.ArrayLike, ranks: int, mini_batch: int) -> np.ndarray:
    """Lay out a batch so that verl's mini-batches follow ``order`` and its ranks have similar work in each.

    Of int[N] indices in the order of training and int[N] prompt and response tokens by index, return int64[N], indices
    rank by rank; each rank's piece of a mini-batch keeps the order. ``mini_batch`` counts trajectories over all ranks.
    Raises ValueError unless ``ranks`` divides ``mini_batch``, and that N.
    """
    indices, sizes = np.asarray(order, dtype=np.int64), np.asarray(tokens)
    if ranks < 1 or mini_batch % ranks or len(indices) % mini_batch:
        raise ValueError(
            f"{len(indices)} trajectories do not split into mini-batches of {mini_batch} over {ranks} ranks"
        )
    share = mini_batch // ranks
    parts: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for start in range(0, len(indices), mini_batch):
        # Longest first, to the rank with the least work that still has room.
        work, room = np.zeros(ranks), np.full(ranks, share)
        owner = np.empty(mini_batch, dtype=np.int64)
        for at in np.argsort(-sizes[indices[start : start + mini_batch]], kind="stable"):
            rank = int(np.argmin(np.where(room > 0, work, np.inf)))
            owner[at] = rank
            work[rank] += sizes[indices[start + at]]
            room[rank] -= 1
        for rank in range(ranks):
            parts[rank].append(indices[start + np.flatnonzero(owner == rank)])
    return np.concatenate([piece for part in parts for piece in part]) if len(indices) else indices


def sortedness(lengths: npt.ArrayLike) -> float:
    """Return the share of differing pairs in rising order less that in falling order (Goodman and Kruskal's gamma).

    ``lengths`` is int[N] in the order of training. The result is 1 also where no two lengths differ.
    """
    values = np.asarray(lengths, dtype=np.int64)
    # An even sample suffices; millions of pairs would delay the training step.
    values = values[:: max(1, -(-len(values) // 512))]
    signs = np.sign(values[None, :] - values[:, None])[np.triu_indices(len(values), 1)]
    differing = np.count_nonzero(signs)
    return float(signs.sum() / differing) if differing else 1.0
