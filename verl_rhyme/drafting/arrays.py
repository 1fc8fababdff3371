"""State of the adaptive drafter for its compiled core: tuples of arrays, changed in place.

They are created, with shapes and meanings, in :class:`.live_texts.LiveTexts`, :func:`.adaptive.slot_arrays`,
:func:`.kernels.scratch` and :func:`.confidence.prior`.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import numpy as np

LiveArrays = namedtuple("LiveArrays", "text link_group head_group counts fill before after owner group open cursor")
SlotArrays = namedtuple(
    "SlotArrays",
    "length block owner group history history_size recent planned planned_at draft inputs weight_set bin candidates "
    "candidate candidate_inputs source by_source previous previous_size regrowth chain chain_size verify_steps "
    "visited",
)
Scratch = namedtuple(
    "Scratch", "position source match following which candidate votes mass known total active inputs keys context"
)
Model = namedtuple("Model", "weights calibration")


class Batch(NamedTuple):
    """The B rows of a step."""

    ids: np.ndarray  # int32[B], slots
    rows: np.ndarray  # int32[B], rows of the slots in ``tokens``
    tokens: np.ndarray  # int32[rows, positions], prompt and response of each request so far
    lengths: np.ndarray  # int64[B], tokens of each request
    limits: np.ndarray  # int64[B], most draft tokens of each request


class Plans(NamedTuple):
    """Planned drafts of the B rows of a step, of up to K tokens."""

    draft: np.ndarray  # int32[B, K]
    reach: np.ndarray  # float64[B, K], probability that each token is reached and accepted
    planned: np.ndarray  # int64[B], tokens of each plan
