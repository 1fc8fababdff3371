"""Measure which samples of a prompt share their replica with an earlier or running sample of that prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np


class Meetings(NamedTuple):
    """Means over all samples.

    Attributes:
        met: Share of samples that meet at least one sibling.
        siblings: Mean number of siblings that a sample meets.
    """

    met: float
    siblings: float


def meetings(
    groups: Sequence[Hashable], replicas: Sequence[Hashable], began: np.ndarray, ended: np.ndarray
) -> Meetings:
    """Return how many siblings samples meet: samples of the group that start on the same replica before the sample
    ends, and so are known to the replica's drafter.

    Args:
        groups: Prompt and step of each sample.
        replicas: Replica of each sample.
        began, ended: float [samples], seconds.

    Raises:
        ValueError: There are no samples.
    """
    if not len(groups):
        raise ValueError("cannot count siblings: the measurement has no samples")
    together: dict[Hashable, list[int]] = defaultdict(list)
    for row, place in enumerate(zip(groups, replicas, strict=True)):
        together[place].append(row)
    found = np.zeros(len(groups), dtype=np.int64)
    for rows in together.values():
        found[rows] = np.searchsorted(np.sort(began[rows]), ended[rows], side="left") - 1
    found = np.maximum(found, 0)  # a sample that ends at its start
    return Meetings(float((found > 0).mean()), float(found.mean()))
