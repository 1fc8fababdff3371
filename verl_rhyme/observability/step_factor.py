"""Measured over calculated time of a run's decode steps: the ``factor`` of plan and cluster files."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from verl_rhyme.observability.slot_time import busy_until
from verl_rhyme.planning.cost import StepCost

#: Minimum decode steps of a request, and minimum number of such requests.
_STEPS, _REQUESTS = 8, 16


def step_factor(requests: Mapping[str, np.ndarray], cost: StepCost) -> float | None:
    """Return the median, over a run's requests, of measured over calculated decode seconds; ``None``: too few requests.
    A request's steps count with the requests that ran on its replica meanwhile, on average. What else takes time is in
    the factor: prefills, gaps between steps.
    """
    began, ended = requests["first_token_at"], requests["finished_at"]
    tokens, verified = requests["response_tokens"], requests["verify_steps"]
    steps = np.maximum(tokens - requests["accepted_tokens"] - 1, verified).astype(float)
    timed = np.isfinite(began) & np.isfinite(ended) & (ended > began) & (steps > 0)
    ratios = []
    for replica in np.unique(requests["replica"][timed]):
        of = timed & (requests["replica"] == replica)
        first, last, span = began[of], ended[of], (ended - began)[of]
        rows = (busy_until(first, last, last) - busy_until(first, last, first)) / span
        held = np.average((requests["prompt_tokens"] + tokens / 2)[of], weights=span)
        drafts = requests["drafted_tokens"][of].sum() / steps[of].sum()
        calculated = steps[of] * cost.seconds(rows, rows * held, rows * drafts)
        ratios.append((span / calculated)[steps[of] >= _STEPS])
    found = np.concatenate([[], *ratios])
    return float(np.median(found)) if len(found) >= _REQUESTS else None
