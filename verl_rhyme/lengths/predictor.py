"""How long responses will be, learnt as they end: from a prompt's history, from siblings, from all prompts.

Log lengths of a prompt's responses lie around a location of the prompt's own. From one visit to the next (an epoch, or
less where the data repeat prompts) the locations of all drift together, for policies grow longer or shorter, and each
wanders by itself: one Kalman filter a prompt, over visits, whose parameters are estimated from what all prompts do.
Within a visit the siblings that ended, and those that are longer than what they have so far, move the location
(:mod:`.location`). A prompt never seen is taken for one drawn from among all; where a ranker has told what it expects
of it (:mod:`.ranker`; here a number), for one near that, as near as what the ranker told before has turned out to be.

How far lengths then fall from their location is counted, not assumed (:mod:`.residuals`), with one distribution for
prompts that were seen and one for others, so that quantiles hold whatever the task's tail looks like.

A state machine without a clock. At 17,000 prompts x 16: 1.5 MB, and 0.1 ms for a group that is learnt.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from verl_rhyme.lengths.forecast import Forecast
from verl_rhyme.lengths.location import hazard, posterior
from verl_rhyme.lengths.residuals import Residuals

Floats = npt.NDArray[np.float64]

#: Draws for which the spread of all prompts counts in the spread of one.
_SPREAD_PRIOR = 12.0
#: What a prompt's own spread keeps from one visit to the next.
_SPREAD_KEPT = 0.7
#: The least variances: rounding to whole tokens alone makes some.
_LEAST = 1e-4
#: Groups after which what is common to all prompts counts 1/e.
_MEMORY = 1024

#: What is kept of each prompt, and of all together.
_COLUMNS = ("location", "variance", "squares", "draws", "visits")
_COMMON = ("typical", "between", "within", "drift", "wander", "bias", "miss")


class Learnt(NamedTuple):
    """A group whose B responses all ended, and what was forecast of them before any had begun.

    Attributes:
        forecast: Of one response, for all were alike then.
        tokens: int64[B].
        ended: bool[B], false for one that was cut short.
        ranked: The prompt had no history, and a ranker had told of it.
    """

    forecast: Forecast
    tokens: npt.NDArray[np.int64]
    ended: npt.NDArray[np.bool_]
    ranked: bool = False


@dataclass
class _Open:
    """Siblings of a group that have ended."""

    tokens: list[int] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)


class _Average:
    """An average that forgets: of all at first, then with 1/``memory`` for each new one."""

    def __init__(self, value: float, memory: float, weight: float = 1.0) -> None:
        self.value, self.weight, self._memory = value, weight, memory

    def move(self, error: float, weight: float) -> None:
        """By ``error / weight``, the estimate of one observation less the value, with its weight among all."""
        self.weight = min(self.weight + weight, self._memory)
        self.value += error / max(self.weight, 1.0)

    @property
    def state(self) -> tuple[float, float]:
        return float(self.value), float(self.weight)

    @state.setter
    def state(self, state: Sequence[float]) -> None:
        self.value, self.weight = state


class LengthPredictor:
    """See the module.

    Args:
        limit: Tokens a response can have (``data.max_response_length``).

    Raises:
        ValueError: ``limit`` is not positive.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit}: a response must have room for a token")
        self.limit = limit
        self._rows: dict[Hashable, int] = {}
        self._location, self._variance = np.zeros(0), np.zeros(0)
        self._squares, self._draws = np.zeros(0), np.zeros(0)  # a prompt's own spread
        self._visits = np.zeros(0, dtype=np.int64)
        self._open: dict[int, _Open] = {}
        # Common to all prompts, from weak guesses.
        self._typical = _Average(np.log(max(limit / 4, 1.0)), _MEMORY, 0.1)
        self._between = _Average(0.5, _MEMORY, 2.0)
        self._within = _Average(0.2, 16.0 * _MEMORY, 4.0)
        self._drift = _Average(0.0, _MEMORY / 4, 8.0)
        self._wander = _Average(0.01, _MEMORY, 8.0)
        # Of prompts that a ranker told of: how much longer they are than that, and the variance around it.
        self._ranked: dict[int, float] = {}
        self._ranker = 0
        self._bias, self._miss = self._trust()
        self._shapes = (Residuals(), Residuals())  # of prompts never seen, and of others

    def __len__(self) -> int:
        """Prompts of which something is known or has been asked."""
        return len(self._rows)

    # ---- what is known ----

    def rank(self, prompt: Hashable, location: float, ranker: int = 0) -> None:
        """A ranker expects responses of this log length; it counts while nothing is known of the prompt.

        Args:
            prompt: Of which it told.
            location: Its word; one that is not finite is no word.
            ranker: Which one, by number: of another it is not known yet how far off it is.
        """
        row = self._row(prompt)
        if self._visits[row] or not np.isfinite(location):
            return
        if ranker != self._ranker:
            self._ranker, self._bias = ranker, self._trust()[0]
        self._ranked[row] = float(np.clip(location, 0.0, np.log(self.limit)))

    def ended(self, prompt: Hashable, tokens: int, complete: bool = True) -> None:
        """A response ended, and tells about its siblings.

        Args:
            prompt: Whose.
            tokens: That it has.
            complete: False: it was cut short, by the limit or otherwise, and would have been longer.
        """
        group = self._open.setdefault(self._row(prompt), _Open())
        group.tokens.append(max(1, int(tokens)))
        group.ended.append(complete and tokens < self.limit)

    def close(self, prompt: Hashable) -> Learnt | None:
        """All of a visit's responses have ended, or no more will be told: it becomes the prompt's history.

        Returns:
            The group, to be compared with its forecast; ``None`` when nothing had ended.
        """
        row = self._rows.get(prompt)
        group = None if row is None else self._open.pop(row, None)
        if row is None or group is None:
            return None
        tokens, ended = np.array(group.tokens, dtype=np.int64), np.array(group.ended)
        before = self._forecast(np.array([row]), np.zeros(1, dtype=np.int64), siblings=False)
        ranked = row in self._ranked
        self._learn(row, np.log(tokens), ended)
        return Learnt(before, tokens, ended, ranked)

    def forecast(
        self,
        prompts: Sequence[Hashable],
        emitted: npt.ArrayLike | int = 0,
        ended: Mapping[Any, Sequence[int]] | None = None,
    ) -> Forecast:
        """Distributions of final lengths.

        Args:
            prompts: Of B responses; siblings stand there once each, and those that run tell about each other.
            emitted: int[B] or one number, tokens that each has so far.
            ended: Tokens of siblings that ended, by prompt, beside those of whom :meth:`ended` told; they count here
                only.
        """
        rows = np.fromiter((self._row(prompt) for prompt in prompts), dtype=np.int64, count=len(prompts))
        by_row = {self._row(prompt): tokens for prompt, tokens in (ended or {}).items() if tokens}
        emitted = np.broadcast_to(np.asarray(emitted, dtype=np.int64), rows.shape)
        return self._forecast(rows, emitted, siblings=True, ended=by_row)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Plain, for JSON, where prompts are named by strings; groups that are not closed are left out."""
        count = len(self._rows)
        return {
            "prompts": list(self._rows),
            **{name: getattr(self, f"_{name}")[:count].tolist() for name in _COLUMNS},
            **{name: list(getattr(self, f"_{name}").state) for name in _COMMON},
            "ranked": [[row, location] for row, location in self._ranked.items()],
            "ranker": self._ranker,
            "shapes": [shape.state_dict() for shape in self._shapes],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave.

        Raises:
            ValueError: It is not of this class, or torn.
        """
        prompts = state.get("prompts")
        names = (*_COLUMNS, *_COMMON, "shapes", "ranked")
        columns: dict[str, list[Any]] = {name: state[name] for name in names if isinstance(state.get(name), list)}
        if not isinstance(prompts, list) or len(columns) < len(names):
            raise ValueError(
                f"no state of a length predictor: of prompts, {', '.join(names)} it has {', '.join(state)}"
            )
        if len({len(columns[name]) for name in _COLUMNS} | {len(prompts)}) > 1:
            raise ValueError("a torn state of a length predictor: its columns are of unequal length")
        self._rows = {prompt: row for row, prompt in enumerate(prompts)}
        self._open = {}
        self._ranked = {int(row): float(location) for row, location in columns["ranked"]}
        self._ranker = int(state["ranker"])
        for name in _COLUMNS:
            column = getattr(self, f"_{name}")
            setattr(self, f"_{name}", np.array(columns[name], dtype=column.dtype))
        for name in _COMMON:
            getattr(self, f"_{name}").state = columns[name]
        for shape, kept in zip(self._shapes, columns["shapes"], strict=True):
            shape.load_state_dict(kept)

    # ---- within ----

    @staticmethod
    def _trust() -> tuple[_Average, _Average]:
        """Bias and variance of a ranker's word, before anything of it is known."""
        return _Average(0.0, _MEMORY / 4, 8.0), _Average(0.2, _MEMORY, 8.0)

    def _known(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Of which prompts anything is known: history, or a ranker's word."""
        return (self._visits[rows] > 0) | np.fromiter((row in self._ranked for row in rows.tolist()), bool, len(rows))

    def _row(self, prompt: Hashable) -> int:
        row = self._rows.get(prompt)
        if row is None:
            row = self._rows[prompt] = len(self._rows)
            if row == len(self._visits):
                for name in _COLUMNS:
                    column = getattr(self, f"_{name}")
                    setattr(self, f"_{name}", np.concatenate([column, np.zeros(max(1024, row), column.dtype)]))
        return row

    def _prior(self, rows: npt.NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
        """Location, its variance and the variance around it, before anything of this visit is known."""
        seen = self._visits[rows] > 0
        location = np.where(seen, self._location[rows] + self._drift.value, self._typical.value)
        variance = np.where(seen, self._variance[rows] + max(self._wander.value, 0.0), self._between.value)
        if self._ranked:
            word = np.array([self._ranked.get(row, np.nan) for row in rows.tolist()])
            told = ~seen & np.isfinite(word)
            location = np.where(told, word + self._bias.value, location)
            variance = np.where(told, max(self._miss.value, 0.0), variance)
        noise = (_SPREAD_PRIOR * self._within.value + self._squares[rows]) / (_SPREAD_PRIOR + self._draws[rows])
        return location, np.maximum(variance, _LEAST), np.maximum(noise, _LEAST)

    def _forecast(
        self,
        rows: npt.NDArray[np.int64],
        emitted: npt.NDArray[np.int64],
        siblings: bool,
        ended: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> Forecast:
        distinct, of = np.unique(rows, return_inverse=True)
        location, variance, noise = self._prior(distinct)
        seen = self._known(distinct)
        if siblings:
            logs, done, whose = [np.log(np.maximum(emitted[emitted > 0], 1))], [], [of[emitted > 0]]
            done.append(np.zeros(len(logs[0]), dtype=bool))
            if self._open or ended:
                tokens, told, groups = list[int](), list[bool](), list[int]()
                for g, row in enumerate(distinct.tolist()):
                    group, others = self._open.get(row), ended.get(row, ())
                    if group is not None:
                        tokens += group.tokens
                        told += group.ended
                    tokens += others
                    told += [length < self.limit for length in others]
                    groups += [g] * (len(tokens) - len(groups))
                logs.append(np.log(np.maximum(tokens, 1)))
                done.append(np.array(told, dtype=bool))
                whose.append(np.array(groups, dtype=np.int64))
                seen[whose[-1]] = True
            if any(map(len, logs)):
                draws, cut = np.concatenate(logs), np.concatenate(done)
                location, variance = posterior(location, variance, noise, draws, cut, np.concatenate(whose))
        return Forecast(location[of], np.sqrt(variance + noise)[of], emitted, seen[of], self.limit, self._shapes)

    def _learn(self, row: int, logs: Floats, ended: npt.NDArray[np.bool_]) -> None:
        at = np.array([row])
        (location,), (variance,), (noise,) = prior = self._prior(at)
        seen, ranked = bool(self._visits[row]), self._ranked.pop(row, None) is not None
        self._shapes[seen or ranked].add((logs - location) / np.sqrt(variance + noise), ended)
        (now,), (left,) = posterior(*prior, logs, ended, np.zeros(len(logs), dtype=np.int64))
        # Each parameter moves by the score of what came, divided by what it tells about the parameter: unlike the
        # plain averages of what ended, this is right for groups that were cut short too.
        gain = min(max(1 - left / variance, 1e-6), 1.0)
        moved, surprise = now - location, (now - location) ** 2 - gain * variance
        if seen:
            self._drift.move(moved, gain)
            self._wander.move(surprise, gain**2)
        elif ranked:
            self._bias.move(moved, gain)
            self._miss.move(surprise, gain**2)
        if seen or ranked:
            self._typical.move(now - self._typical.value, 1.0)
            self._between.move((now - self._typical.value) ** 2 + left - self._between.value, 1.0)
        else:
            self._typical.move(moved, gain)
            self._between.move(surprise, gain**2)
        z = (logs - now) / np.sqrt(noise)
        pull = hazard(z)
        told = np.where(ended, 1.0, pull * (pull - z))  # of its spread, by each draw
        excess = float((noise * np.where(ended, z * z - 1, z * pull) + told * left).sum())
        draws = float(told.sum()) - 1
        if draws > 0:
            self._within.move(excess, draws)
            self._squares[row] = _SPREAD_KEPT * self._squares[row] + max(noise * draws + excess, 0.0)
            self._draws[row] = _SPREAD_KEPT * self._draws[row] + draws
        self._location[row], self._variance[row] = now, left
        self._visits[row] += 1
