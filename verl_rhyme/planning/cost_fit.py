"""The cost model's coefficients, from what a run's servers and trainer told (:mod:`verl_rhyme.planning.cost`).

A request's steps are the integral, over its time in the engine, of ``dt / step_seconds(rows, cached, drafts)``; what
runs beside it at any time is known from all requests' intervals. Coefficients are those, none below 0, with which each
request makes as many steps as it did make, by a robust loss. One that the run does not tell stays 0 and says why.

That the drafter learns on line (:mod:`verl_rhyme.drafting.cost`) is the same step without the caches' part, from steps
that it times itself, with a memory; here nothing has timed a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from verl_rhyme.planning.cost import StepCost

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Whole requests below which nothing is fitted.
LEAST_REQUESTS = 16
#: Of a step's seconds: standard error of a coefficient's part above which it is not told, unless it is twice that.
_UNSURE = 0.05
#: Standard deviation over mean of a column below which it has not varied.
_VARIES = 0.02
#: Parts of the run that are left out in turn, for the standard errors.
_FOLDS = 8
_STEP = ("base", "row", "cached", "draft", "drafting")
_ALL = (*_STEP, "prefill", "delay")


class FitError(ValueError):
    """Too little to fit; the message says what is missing."""


@dataclass(frozen=True)
class Requests:
    """Requests of replicas of one kind, each array of shape [requests]; times in seconds, of one clock.

    Attributes:
        replica: int, which served it.
        started, first_token, finished: When its slot was taken, its prompt was computed, its end was told.
        own: Tokens in its cache at its start that it shares with nobody: what a resumed one had said before.
        prompt: int, a number of the prompt; requests of one share the cache of their ``prompt_tokens``.
        prompt_tokens: Of that.
        computed: Tokens that were computed before its first one: prompt and own, without what was cached.
        tokens: Response tokens that it made.
        steps: Decode steps for them; with drafts fewer than tokens.
        drafted: Draft tokens that were verified for it.
        whole: bool, it came to its own end: nobody cut it short.
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
        """Some of them."""
        return Requests(*(getattr(self, field.name)[chosen] for field in fields(self)))


@dataclass(frozen=True)
class StepFit:
    """What :func:`fit_steps` found.

    Attributes:
        step: Of a decode step.
        prefill: Seconds of a computed prompt token.
        delay: Seconds from a request's last step until its end was told.
        errors: Standard error of each coefficient that was fitted, by leaving out parts of the run in turn.
        untold: Coefficients that the run does not tell, and why.
        requests: That were fitted.
        error, worst: Median and ninth decile of the relative error of their seconds.
        pace: Seconds of a replica's requests as a multiple of the fitted ones, by replica.
    """

    step: StepCost
    prefill: float
    delay: float
    errors: dict[str, float]
    untold: dict[str, str]
    requests: int
    error: float
    worst: float
    pace: dict[int, float]


def fit_steps(requests: Requests) -> StepFit:
    """Coefficients of a replica's step, its prefill and how late ends are told.

    Raises:
        FitError: Fewer than :data:`LEAST_REQUESTS` of them were whole.
    """
    known = np.isfinite(requests.started) & (requests.finished > requests.started) & (requests.steps >= 1)
    requests = requests.of(known)
    count = int(requests.whole.sum())
    if count < LEAST_REQUESTS:
        raise FitError(
            f"{count} requests that came to their end and tell when they started: at least {LEAST_REQUESTS} are needed"
        )
    problem = _Problem(requests)
    untold = problem.constant()
    names = [name for name in _ALL if name not in untold]
    while True:
        theta = problem.solve(names)
        errors = problem.errors(names)
        unsure = problem.unsure(names, theta, errors)
        if unsure is None:
            break
        untold[unsure] = "cannot be told from the others' part"
        names.remove(unsure)
    found = {**dict.fromkeys(_ALL, 0.0), **dict(zip(names, theta.tolist(), strict=True))}
    off = problem.off(names, theta)
    whole = requests.replica[requests.whole]
    return StepFit(
        step=StepCost(**{name: found[name] for name in _STEP}),
        prefill=found["prefill"],
        delay=found["delay"],
        errors=dict(zip(names, errors.tolist(), strict=True)),
        untold=untold,
        requests=count,
        error=float(np.median(np.abs(off - 1))),
        worst=float(np.quantile(np.abs(off - 1), 0.9)),
        pace={int(replica): float(np.median(off[whole == replica])) for replica in np.unique(whole)},
    )


class _Problem:
    """Pieces of time in which the same requests run on a replica, and which of them each request was there for."""

    def __init__(self, requests: Requests) -> None:
        pieces = [_pieces(requests.of(requests.replica == replica)) for replica in np.unique(requests.replica)]
        whole = [requests.whole[requests.replica == replica] for replica in np.unique(requests.replica)]
        order = np.argsort(requests.replica, kind="stable")
        self.seconds = np.concatenate([p.seconds for p in pieces])
        self.columns = np.concatenate([p.columns for p in pieces])  # [pieces, step coefficients]
        self.computed = np.concatenate([p.computed for p in pieces])
        starts = np.cumsum([0, *(len(p.seconds) for p in pieces)])
        chosen = np.concatenate(whole)
        self.first = np.concatenate([p.first + start for p, start in zip(pieces, starts, strict=False)])[chosen]
        self.last = np.concatenate([p.last + start for p, start in zip(pieces, starts, strict=False)])[chosen]
        self.steps = requests.steps[order][chosen]
        self.span = (requests.finished - requests.started)[order][chosen]
        self.replica = requests.replica[order][chosen]
        self.began = requests.started[order][chosen]
        self.scale = np.ones(len(self.steps))

    def constant(self) -> dict[str, str]:
        """Columns that no fit can tell from the base."""
        untold = {}
        weight = np.where(self.columns[:, 0] > 0, self.seconds, 0.0)
        weight = weight * (self.columns[:, 1] > 0)
        for index, name in enumerate(_STEP[1:], 1):
            column = self.columns[:, index]
            mean = np.average(column, weights=weight)
            deviation = np.sqrt(np.average((column - mean) ** 2, weights=weight))
            if mean == 0:
                untold[name] = "nothing was drafted" if name.startswith("draft") else "there were none"
            elif deviation < _VARIES * mean:
                untold[name] = "always in it" if name == "drafting" else "always as many"
        if not self.computed.any():
            untold["prefill"] = "no prompt was computed"
        return untold

    def solve(self, names: Sequence[str], left: npt.NDArray[np.bool_] | None = None) -> Floats:
        """Coefficients; ``left`` are the requests to go by."""
        left = np.ones(len(self.steps), bool) if left is None else left
        rate = float(np.median(self.span / self.steps))
        start = np.array([_START[name] for name in names]) * rate
        for name, size in (("row", 1), ("cached", 2), ("draft", 3)):
            if name in names:
                start[names.index(name)] /= max(1.0, self.columns[:, size].max())
        if "prefill" in names:
            start[names.index("prefill")] /= max(1.0, self.computed.max())

        def residual(scaled: Floats) -> Floats:
            return self._residual(names, scaled * start)[left]

        def jacobian(scaled: Floats) -> Floats:
            return self._jacobian(names, scaled * start)[left] * start

        scaled = np.ones(len(names))
        spread = 0.1
        for _ in range(3):
            found = least_squares(
                residual, scaled, jacobian, bounds=(0, np.inf), loss="soft_l1", f_scale=spread, x_scale="jac"
            )
            scaled = np.maximum(found.x, 1e-12)
            spread = max(1e-4, 1.4826 * float(np.median(np.abs(residual(scaled)))))
        return np.where(scaled > 1e-9, scaled, 0.0) * start

    def errors(self, names: Sequence[str]) -> Floats:
        """Standard errors: a stretch of the run is left out in turn (jackknife), since neighbours err together."""
        ranks = np.argsort(np.argsort(self.began))
        fold = ranks * _FOLDS // len(ranks)
        each = np.array([self.solve(names, fold != k) for k in range(_FOLDS)])
        return np.sqrt((_FOLDS - 1) / _FOLDS * ((each - each.mean(axis=0)) ** 2).sum(axis=0))

    def unsure(self, names: Sequence[str], theta: Floats, errors: Floats) -> str | None:
        """The coefficient that is least sure, if it is not sure enough."""
        mean = np.average(self.columns, axis=0, weights=np.maximum(self.seconds, 0) * (self.columns[:, 1] > 0))
        size = {**dict(zip(_STEP, mean, strict=True)), "delay": 0.0, "prefill": 0.0}
        step = sum(value * size[name] for name, value in zip(names, theta, strict=True))
        candidates = [
            (error * size[name], name)
            for name, value, error in zip(names, theta, errors, strict=True)
            if name != "base" and error * size[name] > _UNSURE * step and value < 2 * error
        ]
        return max(candidates)[1] if candidates else None

    def off(self, names: Sequence[str], theta: Floats) -> Floats:
        """Of each whole request, its seconds as a multiple of the fitted ones."""
        return self._made(names, theta)[0] / self.steps

    def _made(self, names: Sequence[str], theta: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        value = dict(zip(names, theta, strict=True))
        step = self.columns @ np.array([value.get(name, 0.0) for name in _STEP])
        step = np.where(self.columns[:, 1] > 0, np.maximum(step, 1e-12), 1.0)
        free = self.seconds - value.get("prefill", 0.0) * self.computed
        done = np.concatenate([[0.0], np.cumsum(free / step)])
        made = done[self.last] - done[self.first] - value.get("delay", 0.0) / step[self.last - 1]
        return made, step, free, done

    def _residual(self, names: Sequence[str], theta: Floats) -> Floats:
        # a step more or less at either end says nothing
        return (self._made(names, theta)[0] - self.steps) / np.sqrt(self.steps**2 + _ENDS * self.steps)

    def _jacobian(self, names: Sequence[str], theta: Floats) -> Floats:
        _, step, free, _ = self._made(names, theta)
        late = dict(zip(names, theta, strict=True)).get("delay", 0.0)
        columns = []
        for name in names:
            if name == "delay":
                columns.append(-1 / step[self.last - 1])
                continue
            if name == "prefill":
                change = -self.computed / step
            else:
                change = -free / step**2 * self.columns[:, _STEP.index(name)]
            done = np.concatenate([[0.0], np.cumsum(change)])
            column = done[self.last] - done[self.first]
            if name != "prefill":
                index = self.last - 1
                column += late / step[index] ** 2 * self.columns[index, _STEP.index(name)]
            columns.append(column)
        return np.stack(columns, axis=1) / np.sqrt(self.steps**2 + _ENDS * self.steps)[:, None]


#: Steps' worth of squares by which a request's ends are uncertain, for each step: short ones weigh less.
_ENDS = 4.0
#: Where the search begins, as parts of a step's seconds.
_START = {"base": 0.5, "row": 0.2, "cached": 0.1, "draft": 0.1, "drafting": 0.1, "prefill": 0.1, "delay": 0.1}


@dataclass(frozen=True)
class _Pieces:
    seconds: Floats
    columns: Floats
    computed: Floats
    first: Ints
    last: Ints


def _pieces(requests: Requests) -> _Pieces:
    """Of one replica."""
    times = np.unique(np.concatenate([requests.started, requests.first_token, requests.finished]))
    first = np.searchsorted(times, requests.started)
    last = np.searchsorted(times, requests.finished)
    seconds = np.diff(times)
    middle = times[:-1] + seconds / 2
    count = len(seconds)

    def running(value: Floats) -> Floats:
        """Of all that run in a piece, summed."""
        change = np.zeros(count + 1)
        np.add.at(change, first, value)
        np.add.at(change, last, -value)
        return np.cumsum(change)[:-1]

    span = requests.finished - requests.started
    pace = requests.tokens / span
    rows = np.round(running(np.ones(len(requests))))
    # what each has said grows evenly
    said = running(requests.own - pace * requests.started) + middle * running(pace)
    drafts = np.where(rows > 0, running(requests.drafted / requests.steps), 0.0)
    drafts[drafts < 1e-9] = 0.0
    cached = np.maximum(0.0, said) + _shared(requests, first, last, count)
    computed = np.zeros(count)
    np.add.at(computed, np.clip(np.searchsorted(times, requests.first_token) - 1, 0, count - 1), requests.computed)
    columns = np.stack([np.ones(count), rows, cached, drafts, (drafts > 0).astype(float)], axis=1)
    return _Pieces(seconds, columns * (rows > 0)[:, None], computed, first, last)


def _shared(requests: Requests, first: Ints, last: Ints, count: int) -> Floats:
    """Prompt tokens in the cache, those of each prompt once, by piece."""
    change = np.zeros(count + 1)
    order = np.lexsort((first, requests.prompt))
    prompt, end, tokens = -1, -1, 0.0
    for i in order.tolist():
        if requests.prompt[i] != prompt or first[i] > end:  # nobody has it
            prompt, tokens = int(requests.prompt[i]), float(requests.prompt_tokens[i])
            change[first[i]] += tokens
            change[last[i]] -= tokens
            end = int(last[i])
        elif last[i] > end:
            change[end] += tokens
            change[last[i]] -= tokens
            end = int(last[i])
    return np.cumsum(change)[:-1]


@dataclass(frozen=True)
class LineFit:
    """A robust line: ``at_zero`` + ``slope`` x, neither below 0, and the median relative error."""

    at_zero: float
    slope: float
    error: float


def fit_line(x: Floats, y: Floats) -> LineFit:
    """Seconds ``y`` by size ``x``: where they do not clearly grow with the size, the slope is 0."""
    slope, at_zero = 0.0, float(np.median(y))
    if len(y) >= _LINE and np.std(x) > _VARIES * abs(float(np.mean(x))):
        columns = np.stack([x / np.abs(x).max(), np.ones(len(x))], axis=1)
        spread = max(1e-9, 1.4826 * float(np.median(np.abs(y - at_zero))))
        found = least_squares(
            lambda theta: (columns @ theta - y) / spread, [at_zero / 2] * 2, bounds=(0, np.inf), loss="soft_l1"
        )
        off = columns @ found.x - y
        error = np.sqrt(float(off @ off) / (len(y) - 2) / float(((columns[:, 0] - columns[:, 0].mean()) ** 2).sum()))
        if found.x[0] > _SURE * error:
            slope, at_zero = float(found.x[0] / np.abs(x).max()), float(found.x[1])
    told = at_zero + slope * x
    return LineFit(at_zero, slope, float(np.median(np.abs(told / np.maximum(y, 1e-12) - 1))))


#: Points of a line, and standard errors by which its slope is above 0, at least.
_LINE, _SURE = 4, 3.0
