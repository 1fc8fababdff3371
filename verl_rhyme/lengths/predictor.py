"""Predictor of response lengths.

The sources, in this order: the prompt's earlier responses and ended siblings, a ranker's forecast, all prompts. Before
a response starts, the mean of earlier ones is as good as any tried alternative. A response with e tokens is compared
with the earlier responses longer than e: it is expected to add the mean of their tokens beyond e (mean residual life).
If it is longer than all of them, it is expected to add half of its tokens: the mean excess of a Pareto tail with
index 3.

A state machine without a clock. 100,000 prompts with 64 responses take 60 MB of memory, and 45 MB of JSON.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

#: Number of the latest responses of a prompt that are kept.
_LATEST = 64
#: Number of responses that represent all prompts; weight of a new group in a ranker's bias.
_ALL, _NEW = 1024, 0.1
#: Weight of a group of lengths in the growth. Small, because the groups of a batch that end first are short.
_GROWING = 1 / 256
#: Quantile of the lengths that a response rarely exceeds.
_MOST = 0.9


class Forecast(NamedTuple):
    """Forecast of B responses."""

    expected: npt.NDArray[np.int64]  # int64[B], final tokens, including present ones
    p90: npt.NDArray[np.int64]  # int64[B], their 90th percentile


class LengthPredictor:
    """Predictor of responses of at most ``limit`` tokens (``data.max_response_length``), from the history of at most
    ``most`` prompts; the one visited longest ago goes first.
    """

    def __init__(self, limit: int, most: int = 1 << 18) -> None:
        self.limit, self._most = limit, most
        self._known: OrderedDict[str, array[int]] = OrderedDict()  # lengths by prompt, oldest first
        self._changed: dict[str, None] = {}  # prompts learnt from since the last pop_changes(), in this order
        self._all: deque[int] = deque([max(1, limit // 4)], _ALL)
        self._rankings: dict[str, float] = {}  # a ranker's log lengths of prompts without responses
        self._bias = 0.0
        self._growth = 0.0  # mean log ratio of new lengths to the known ones of their prompt

    def __len__(self) -> int:
        return len(self._known)

    def knows(self, prompt: str) -> bool:
        return prompt in self._known or prompt in self._rankings

    def ranked(self, prompt: str) -> bool:
        """Whether a prompt has only a ranker's forecast."""
        return prompt in self._rankings

    def rank(self, prompt: str, location: float) -> None:
        """Set a ranker's expected log length of a prompt, used until its first responses are known."""
        if prompt not in self._known and math.isfinite(location):
            self._rankings[prompt] = location

    def learn(self, prompt: str, lengths: Sequence[int]) -> None:
        """Record the tokens of a prompt's responses of one visit."""
        if not lengths:
            return
        if (location := self._rankings.pop(prompt, None)) is not None:
            self._bias += _NEW * (float(np.log(np.maximum(lengths, 1)).mean()) - location - self._bias)
        known = self._known.pop(prompt, array("i"))
        if known:
            ratio = max(1.0, sum(lengths) / len(lengths)) / max(1.0, sum(known) / len(known))
            self._growth += _GROWING * (math.log(ratio) - self._growth)
        known.extend(lengths)
        del known[:-_LATEST]
        self._all.extend(lengths)
        self._keep(prompt, known)
        self._changed.pop(prompt, None)
        self._changed[prompt] = None

    def forecast(
        self, prompts: Sequence[str], emitted: npt.ArrayLike = 0, ended: Mapping[str, Sequence[int]] | None = None
    ) -> Forecast:
        """Return the final lengths of B responses, by their prompts' keys.

        ``emitted``, int[B] or one number, are tokens that each has; ``ended`` are those of ended siblings, by prompt.
        """
        rows = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
        earlier, counts = np.zeros((len(rows), _LATEST), np.int32), np.zeros(len(rows), np.int64)
        p90, typical = np.zeros(len(rows)), self._typical(rows)
        growth = np.where([prompt in self._known for prompt in rows], math.exp(self._growth), 1.0)
        for prompt, row in rows.items():
            own = [*self._known.get(prompt, ())] or self._ranking(prompt)
            known = [*own, *(ended or {}).get(prompt, ())] or typical
            counts[row] = min(len(known), _LATEST)
            earlier[row, : counts[row]] = known[-_LATEST:]
            p90[row] = sorted(known)[int(_MOST * len(known))]  # np.quantile takes twenty times as long
        of = np.fromiter((rows[prompt] for prompt in prompts), np.int64, len(prompts))
        emitted = np.broadcast_to(np.asarray(emitted, np.int64), of.shape)
        remaining = growth[of] * _remaining(earlier[of], counts[of], (emitted / growth[of]).astype(np.int64))
        expected = (emitted + remaining).clip(1, self.limit)
        p90 = np.maximum(expected, (growth * p90)[of]).clip(1, self.limit)
        return Forecast(expected.astype(np.int64), p90.astype(np.int64))

    def _ranking(self, prompt: str) -> list[int]:
        location = self._rankings.get(prompt)
        if location is None:
            return []
        return [round(math.exp(min(max(0.0, location + self._bias), math.log(self.limit))))]

    def _typical(self, prompts: Mapping[str, int]) -> list[int]:
        """Return evenly spaced quantiles of all lengths, if any of these prompts is unknown."""
        if all(map(self.knows, prompts)):
            return []
        ranked = sorted(self._all)
        count = min(_LATEST, len(ranked))
        return [ranked[(2 * i + 1) * len(ranked) // (2 * count)] for i in range(count)]

    def pop_changes(self) -> dict[str, Any]:
        """Return what changed since the last call, or since :meth:`load_state_dict`, for JSON."""
        changed, self._changed = self._changed, {}
        return {"lengths": {prompt: self._known[prompt].tolist() for prompt in changed if prompt in self._known}} | {
            "all": [*self._all],
            "ranked": self._rankings,
            "bias": self._bias,
            "growth": self._growth,
        }

    def update(self, changes: Mapping[str, Any]) -> None:
        """Take over the :meth:`pop_changes` of a predictor that was equal to this one.

        Raises KeyError, TypeError or ValueError if they are invalid or incomplete.
        """
        self._all = deque(map(int, changes["all"]), _ALL)
        self._rankings = dict(changes["ranked"])
        self._bias, self._growth = float(changes["bias"]), float(changes["growth"])
        for prompt, lengths in changes["lengths"].items():
            self._known.pop(prompt, None)
            self._keep(prompt, array("i", lengths))

    def state_dict(self) -> dict[str, Any]:
        lengths = {prompt: known.tolist() for prompt, known in self._known.items()}
        return {**self.pop_changes(), "lengths": lengths}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`; errors as :meth:`update`, after which nothing has changed."""
        restored = LengthPredictor(self.limit, self._most)
        restored.update(state)
        vars(self).update(vars(restored))

    def _keep(self, prompt: str, lengths: array[int]) -> None:
        self._known[prompt] = lengths
        if len(self._known) > self._most:
            self._known.popitem(last=False)


class PromptLengths:
    """Lengths of prompts, as their requests report them; an unknown prompt has the mean of the others.

    It keeps at most ``most`` prompts; the one recorded longest ago goes first.
    """

    def __init__(self, most: int = 1 << 20) -> None:
        self._most = most
        self._tokens: OrderedDict[str, int] = OrderedDict()
        self._sum = 0
        self._changed: dict[str, None] = {}  # recorded since the last pop_changes(), in this order

    def __len__(self) -> int:
        return len(self._tokens)

    def record(self, prompt: str, tokens: int) -> None:
        self._sum += tokens - self._tokens.pop(prompt, 0)
        self._tokens[prompt] = tokens
        self._changed.pop(prompt, None)
        self._changed[prompt] = None
        if len(self._tokens) > self._most:
            self._sum -= self._tokens.popitem(last=False)[1]

    def expected(self, prompt: str) -> int:
        """Return the tokens of a prompt, or the mean of all; 0 before any is known."""
        tokens = self._tokens.get(prompt)
        return round(self._sum / max(1, len(self._tokens))) if tokens is None else tokens

    def pop_changes(self) -> dict[str, int]:
        """Return the tokens recorded since the last call, or since :meth:`load_state_dict`, for JSON."""
        changed, self._changed = self._changed, {}
        return {prompt: self._tokens[prompt] for prompt in changed if prompt in self._tokens}

    def update(self, changes: Mapping[str, int]) -> None:
        """Take over the :meth:`pop_changes` of an object that was equal to this one."""
        for prompt, tokens in changes.items():
            self.record(prompt, int(tokens))
        self._changed = {}

    def state_dict(self) -> dict[str, int]:
        return dict(self._tokens)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._tokens, self._sum = OrderedDict(), 0
        self.update(state)


def _remaining(earlier: npt.NDArray[np.int32], counts: npt.NDArray, emitted: npt.NDArray) -> npt.NDArray[np.float64]:
    """Return float64[B], the expected remaining tokens.

    Of ``earlier``, int32[B, _LATEST], the first ``counts`` lengths of each row count, at least 1.
    """
    longer = (np.arange(_LATEST) < counts[:, None]) & (earlier > emitted[:, None])
    count, excess = longer.sum(axis=1), np.where(longer, earlier - emitted[:, None], 0).sum(axis=1)
    return np.where(count > 0, excess / np.maximum(count, 1), 0.5 * emitted)
