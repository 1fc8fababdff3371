"""Fit of the cost model's coefficients to the records of a run's servers (:mod:`verl_rhyme.planning.cost`).

The seconds of a request are those of its steps and of the prompts computed meanwhile. Each step counts with the average
number of concurrent requests, known from all requests' intervals. The fit is least squares of the relative errors, with
no negative coefficients (``scipy.optimize.nnls``); outliers get less weight. A coefficient whose column did not vary
stays 0: the base includes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from verl_rhyme.planning.cost import StepCost

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Minimum number of complete requests for a fit.
LEAST_REQUESTS = 16
#: Standard deviation over mean below which a column counts as constant.
_VARIES = 0.02
#: Number of reweighting iterations.
_ROUNDS = 5
_STEP = ("base", "row", "cached", "draft", "drafting")


class FitError(ValueError):
    """Too few requests for a fit; the message says what is missing."""


@dataclass(frozen=True)
class Requests:
    """Requests of replicas of one kind, each array of shape [requests]; times in seconds, of one clock.

    Attributes:
        replica: int, replica that served it.
        started, first_token, finished: Times when its slot was taken, its prompt was computed, its end was reported.
        own: Unshared tokens in its cache at its start: the earlier tokens of a resumed request.
        prompt: int, number of the prompt; requests of one prompt share the cache of their ``prompt_tokens``.
        prompt_tokens: Tokens of the prompt.
        computed: Tokens that were computed before its first token: prompt and own, without cached ones.
        tokens: Response tokens that it generated.
        steps: Decode steps for them; with drafts fewer than tokens.
        drafted: Draft tokens that were verified for it.
        whole: bool, whether it finished without an interruption.
    """

    replica: Ints
    started: Floats
    first_token: Floats
    finished: Floats
    own: Floats
    prompt: Ints
    prompt_tokens: Floats
    computed: Floats
    tokens: Floats
    steps: Floats
    drafted: Floats
    whole: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.replica)

    def of(self, chosen: npt.NDArray[np.bool_] | Ints) -> Requests:
        """Return some of the requests."""
        return Requests(*(getattr(self, field.name)[chosen] for field in fields(self)))


@dataclass(frozen=True)
class StepFit:
    """Cost of a decode step, seconds of a computed prompt token, number of fitted requests, and the median and ninth
    decile of the relative error of their seconds.
    """

    step: StepCost
    prefill: float
    requests: int
    error: float
    worst: float


def fit_steps(requests: Requests) -> StepFit:
    """Fit the coefficients of a replica's step, and its prefill. Raises FitError if requests are too few."""
    known = np.isfinite(requests.started) & (requests.finished > requests.started) & (requests.steps >= 1)
    requests = requests.of(known)
    if (count := int(requests.whole.sum())) < LEAST_REQUESTS:
        raise FitError(
            f"{count} requests finished without an interruption and have a start time; at least {LEAST_REQUESTS} are "
            "needed: record more steps"
        )
    parts = [requests.of(requests.replica == replica) for replica in np.unique(requests.replica)]
    pieces = [_pieces(of) for of in parts]

    def whole(values: Iterable[Floats]) -> Floats:
        """Concatenate the values of the complete requests of all replicas."""
        return np.concatenate([value[of.whole] for value, of in zip(values, parts, strict=True)])

    steps, seconds = whole(of.steps for of in parts), whole(at.within(at.seconds) for at in pieces)
    computed = whole(at.within(at.computed) for at in pieces)
    step, prefill, weight = np.eye(1, len(_STEP))[0], 0.0, 1 / seconds
    for _ in range(_ROUNDS):
        step_content = whole(at.step_content(step, prefill) for at in pieces)
        varies = np.append(True, step_content[:, 1:].std(axis=0) >= _VARIES * step_content[:, 1:].mean(axis=0))
        rows = np.column_stack([steps[:, None] * step_content * varies, computed])
        scale = np.maximum(rows.max(axis=0), 1e-12)
        try:
            found, _ = nnls(rows / scale * weight[:, None], seconds * weight)
        except RuntimeError as error:  # too many iterations
            raise FitError(f"no cost model fits these requests: {error}") from error
        off = np.abs(rows / scale @ found / seconds - 1)
        spread = max(1e-4, 1.4826 * float(np.median(off)))
        weight = 1 / seconds / (1 + (off / spread) ** 2) ** 0.25
        step, prefill = (found / scale)[:-1], float((found / scale)[-1])
    cost = StepCost(**dict(zip(_STEP, step.tolist(), strict=True)))
    return StepFit(cost, prefill, count, float(np.median(off)), float(np.quantile(off, 0.9)))


@dataclass(frozen=True)
class _Pieces:
    """Intervals of one replica's time with constant running requests.

    Each has the content of a step, the computed prompt tokens, and the first and last interval of each request.
    """

    seconds: Floats
    columns: Floats
    computed: Floats
    first: Ints
    last: Ints

    def within(self, values: Floats) -> Floats:
        """Return the sum of values over each request's intervals."""
        sums = np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])
        return sums[self.last] - sums[self.first]

    def step_content(self, step: Floats, prefill: float) -> Floats:
        """Return the average content of each request's steps, given their seconds."""
        took = self.columns @ step
        free = np.maximum(self.seconds - prefill * self.computed, 0.0)
        made = np.divide(free, took, out=np.zeros_like(took), where=took > 0)
        return self.within(self.columns * made[:, None]) / np.maximum(self.within(made), 1e-12)[:, None]


def _pieces(requests: Requests) -> _Pieces:
    """Return the intervals of one replica."""
    times = np.unique(np.concatenate([requests.started, requests.first_token, requests.finished]))
    first = np.searchsorted(times, requests.started)
    last = np.searchsorted(times, requests.finished)
    seconds = np.diff(times)
    middle = times[:-1] + seconds / 2
    count = len(seconds)

    def running(value: Floats) -> Floats:
        """Return the sum over the requests that run in an interval."""
        change = np.zeros(count + 1)
        np.add.at(change, first, value)
        np.add.at(change, last, -value)
        return np.cumsum(change)[:-1]

    span = requests.finished - requests.started
    pace = requests.tokens / span
    rows = np.round(running(np.ones(len(requests))))
    # a request's tokens grow evenly
    generated = running(requests.own - pace * requests.started) + middle * running(pace)
    drafts = np.where(rows > 0, running(requests.drafted / requests.steps), 0.0)
    drafts[drafts < 1e-9] = 0.0
    cached = np.maximum(0.0, generated) + _shared(requests, first, last, count)
    computed = np.zeros(count)
    np.add.at(computed, np.clip(np.searchsorted(times, requests.first_token) - 1, 0, count - 1), requests.computed)
    columns = np.stack([np.ones(count), rows, cached, drafts, (drafts > 0).astype(float)], axis=1)
    return _Pieces(seconds, columns * (rows > 0)[:, None], computed, first, last)


def _shared(requests: Requests, first: Ints, last: Ints, count: int) -> Floats:
    """Return the cached prompt tokens by interval; each prompt counts once."""
    change = np.zeros(count + 1)
    order = np.lexsort((first, requests.prompt))
    prompt, end, tokens = -1, -1, 0.0
    for i in order.tolist():
        if requests.prompt[i] != prompt or first[i] > end:  # not in the cache
            prompt, tokens = int(requests.prompt[i]), float(requests.prompt_tokens[i])
            change[first[i]] += tokens
            change[last[i]] -= tokens
            end = int(last[i])
        elif last[i] > end:
            change[end] += tokens
            change[last[i]] -= tokens
            end = int(last[i])
    return np.cumsum(change)[:-1]
