"""Siblings met: which samples of a prompt were, at their replica, beside another one or after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np


class Meetings(NamedTuple):
    """Over all samples.

    Attributes:
        met: Share that met a sibling.
        siblings: That a sample met, on average.
    """

    met: float
    siblings: float


def meetings(
    groups: Sequence[Hashable], replicas: Sequence[Hashable], began: np.ndarray, ended: np.ndarray
) -> Meetings:
    """A sample meets those of its group whose text its replica's drafter can know before the sample ends: all that
    began there before then, running or finished.

    Args:
        groups: Of each sample, its prompt and step.
        replicas: Where it ran.
        began, ended: float [samples], seconds.

    Raises:
        ValueError: No samples.
    """
    if not len(groups):
        raise ValueError("siblings met by no sample: there are none in what was measured")
    together: dict[Hashable, list[int]] = defaultdict(list)
    for row, place in enumerate(zip(groups, replicas, strict=True)):
        together[place].append(row)
    found = np.zeros(len(groups), dtype=np.int64)
    for rows in together.values():
        found[rows] = np.searchsorted(np.sort(began[rows]), ended[rows], side="left") - 1
    found = np.maximum(found, 0)  # one that ended as it began
    return Meetings(float((found > 0).mean()), float(found.mean()))
