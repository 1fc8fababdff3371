"""How long responses will be: by a prompt's earlier responses and its siblings that ended, a ranker's word, or all.

Before a response begins a plain mean of its prompt's earlier ones tells as much as anything that was tried; one that is
longer than all of them goes on for half of what it has (:mod:`.earlier`). A state machine without a clock. At 17,000
prompts x 16: 5 MB of memory, and as much of JSON.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from verl_rhyme.lengths.earlier import LATEST, EarlierLengths

#: Responses of all prompts that tell of one of which nothing is known; share of a new group in a ranker's bias.
_ALL, _NEW = 1024, 0.1
#: Share of a group of lengths in the growth over earlier ones. Small: the groups of a batch that end first are short.
_GROWING = 1 / 256
#: Quantile of the lengths that a response will hardly exceed.
_MOST = 0.9


class Forecast(NamedTuple):
    """Of B responses.

    Attributes:
        expected: int64[B], tokens at the end, those that are there included.
        p90: int64[B], their 90th percentile.
    """

    expected: npt.NDArray[np.int64]
    p90: npt.NDArray[np.int64]


class LengthPredictor:
    """See the module.

    Args:
        limit: Tokens a response can have (``data.max_response_length``).
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._known: dict[str, array[int]] = {}  # lengths by prompt, oldest first
        self._all: deque[int] = deque([max(1, limit // 4)], _ALL)
        self._words: dict[str, float] = {}  # a ranker's: log lengths of prompts never answered
        self._ranker, self._bias = 0, 0.0
        self._growth = 0.0  # mean log ratio of new lengths to the known ones of their prompt

    def __len__(self) -> int:
        """Prompts of which something is known."""
        return len(self._known)

    def knows(self, prompt: str) -> bool:
        """By history, or by a ranker's word."""
        return prompt in self._known or prompt in self._words

    def ranked(self, prompt: str) -> bool:
        """By a ranker's word alone."""
        return prompt in self._words

    def rank(self, prompt: str, location: float, ranker: int = 0) -> None:
        """A ranker, by its number, expects responses of this log length; it counts until the first of them is known."""
        if prompt in self._known or not math.isfinite(location):
            return
        if ranker != self._ranker:
            self._ranker, self._bias = ranker, 0.0
        self._words[prompt] = location

    def learn(self, prompt: str, lengths: Sequence[int]) -> None:
        """A visit's responses ended, with so many tokens."""
        if not lengths:
            return
        if (word := self._words.pop(prompt, None)) is not None:
            self._bias += _NEW * (float(np.log(np.maximum(lengths, 1)).mean()) - word - self._bias)
        known = self._known.setdefault(prompt, array("i"))
        if known:
            ratio = max(1.0, sum(lengths) / len(lengths)) / max(1.0, sum(known) / len(known))
            self._growth += _GROWING * (math.log(ratio) - self._growth)
        known.extend(lengths)
        del known[:-LATEST]
        self._all.extend(lengths)

    def forecast(
        self, prompts: Sequence[str], emitted: npt.ArrayLike = 0, ended: Mapping[str, Sequence[int]] | None = None
    ) -> Forecast:
        """Final lengths.

        Args:
            prompts: Of B responses.
            emitted: int[B] or one number, tokens that each has so far.
            ended: Tokens of siblings that ended, by prompt.
        """
        rows = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
        lengths, p90, typical = EarlierLengths(max(1, len(rows))), np.zeros(len(rows)), self._typical(rows)
        growth = np.where([prompt in self._known for prompt in rows], math.exp(self._growth), 1.0)
        for prompt, row in rows.items():
            before = [*self._known.get(prompt, ())] or self._told(prompt) or typical
            known = [*before, *(ended or {}).get(prompt, ())]
            lengths.set(row, known)
            p90[row] = sorted(known)[int(_MOST * len(known))]  # np.quantile takes twenty times as long
        of = np.fromiter((rows[prompt] for prompt in prompts), np.int64, len(prompts))
        emitted = np.broadcast_to(np.asarray(emitted, np.int64), of.shape)
        remaining = growth[of] * lengths.remaining(of, (emitted / growth[of]).astype(np.int64))
        expected = (emitted + remaining).clip(1, self.limit)
        p90 = np.maximum(expected, (growth * p90)[of]).clip(1, self.limit)
        return Forecast(expected.astype(np.int64), p90.astype(np.int64))

    def _told(self, prompt: str) -> list[int]:
        """By a ranker; empty where none told."""
        word = self._words.get(prompt)
        return [] if word is None else [round(math.exp(min(max(0.0, word + self._bias), math.log(self.limit))))]

    def _typical(self, prompts: Mapping[str, int]) -> list[int]:
        """Lengths that stand for those of all prompts, where one of these needs them: evenly spaced by their rank."""
        if all(map(self.knows, prompts)):
            return []
        ranked = sorted(self._all)
        count = min(LATEST, len(ranked))
        return [ranked[(2 * i + 1) * len(ranked) // (2 * count)] for i in range(count)]

    def state_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        words = {"ranked": self._words, "ranker": self._ranker, "bias": self._bias, "growth": self._growth}
        return {
            "lengths": {prompt: known.tolist() for prompt, known in self._known.items()},
            "all": [*self._all],
            **words,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: It is not of this class, or torn.
        """
        known = {prompt: array("i", lengths) for prompt, lengths in state["lengths"].items()}
        every = deque(map(int, state["all"]), _ALL)
        self._words, self._ranker, self._bias = dict(state["ranked"]), int(state["ranker"]), float(state["bias"])
        self._growth = float(state["growth"])
        self._known, self._all = known, every
