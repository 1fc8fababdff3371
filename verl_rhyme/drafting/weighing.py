"""Weighs drafts against the time of a step: how many to verify, which steps to plan, and whether the model drafts.

The price of a step (:mod:`.cost`) meets the decisions of :mod:`.budget`. A price is known of steps that were made:
experiments verify more than is profitable, and some steps omit their drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_rhyme.drafting.budget import FREE, Proposals, Rest, Waiting, lowest_profitable, select_tokens
from verl_rhyme.drafting.cost import WIDTHS, StepCost, width_of
from verl_rhyme.planning.experts import Experts

#: Longest interval between two experiments of a width, in its steps; the first are at 2, 4, 8, ... An experiment
#: verifies more than is profitable (up to one token a row, or the longest draft if that is more), so that the price of
#: drafting becomes and stays known.
EXPLORE_EVERY = 128
#: Steps after which a step with drafts that was asked for has come.
_LATE = 4
#: Share of the least value of granted tokens, where more were planned, from which the next step plans tokens.
_MARGIN = 0.7
#: Share of the time that may be lost by steps that omit profitable drafts.
OMITTED = 1 / 200


@dataclass(frozen=True, slots=True)
class Terms:
    """What the next step's drafts cost and may cost."""

    prices: np.ndarray  # float64[n], seconds of a step with 0, 1, ... draft tokens
    most: int  # draft tokens of the batch
    more: int = 0  # draft tokens beyond the profitable ones: an experiment, if not 0
    weighed: bool = False  # whether the prices are known


class Weighing:
    """Learns from finished steps with times; drafts have up to ``longest`` tokens. Not ``enabled``, all are granted."""

    #: Steps in the mean of right tokens.
    MEMORY = 16

    def __init__(self, longest: int, enabled: bool, experts: Experts | None = None) -> None:
        self._longest, self._enabled = longest, enabled
        self.cost, self.rest, self.proposals = StepCost(experts=experts), Rest(), Proposals()
        self._explored = False  # whether the last step was an experiment
        self._experiments = 0
        self._due = 0  # draft tokens of an experiment that waits for a step with drafts
        self._launched = 0  # steps that were launched without them meanwhile
        self._leads = False  # whether the engine launches steps ahead
        self._ahead = False  # whether the last plan came too late for the next step
        self._omitting = False  # whether drafts are omitted until a step without them was timed
        self._waiting = Waiting()
        self._pricing = False  # whether a trial of the model's drafter begins with an experiment
        #: First tokens of the model's drafter that were right, and all, a step; before the first, one of two.
        self._right = np.array([1.0, 2.0]) / self.MEMORY
        #: If the last plan had too many tokens: its rows, the most that it could grant, and the least value of those.
        self._cut: tuple[int, int, float] | None = None
        self.waits = False  # whether the next steps wait for the tokens before them, so that they can have drafts
        self._curious = False  # whether drafts would gain if they were cheap, and their price is not known
        self._owed = np.zeros(WIDTHS)  # loss by omitted drafts that is allowed, in steps
        #: Of the last plan: rows, whether the model drafted for it, and seconds of a step that verifies such drafts.
        self._promised: tuple[int, bool, float] | None = None

    def keep_promise(self, rows: int, accepted: int, timed: bool) -> None:
        """Count the tokens of a finished step for or against the model's drafter."""
        promised, self._promised = self._promised, None
        if promised is not None and timed and promised[0] == rows:
            self.proposals.observe(rows, promised[1], rows + accepted, promised[2])

    def promise(self, rows: int, proposed: bool, seconds: float, drafted: int, granted: int, terms: Terms) -> None:
        """Remember what a step takes that verifies ``granted`` tokens: one of ``drafted`` tokens took ``seconds``."""
        if terms.weighed and not terms.more:
            change = terms.prices[granted] - terms.prices[min(drafted, len(terms.prices) - 1)]
            self._promised = rows, proposed, max(seconds + float(change), 0.0)

    def observe(
        self,
        drafted: np.ndarray,  # int64[B], tokens that the step verified
        accepted: np.ndarray,  # int64[B]
        counts: np.ndarray,  # int64[3, 2], see kernels.observe
        planned: bool,
        seconds: float,  # of the step
        planning: float,  # seconds of its plan
        prefilled: int,
        proposed: bool,  # whether the model's drafter ran at its end
    ) -> None:
        rows, size = len(drafted), int(drafted.sum())
        self.cost.observe(rows, size, seconds, prefilled, proposed)
        self._omitting &= size > 0
        prices = self.cost.prices(rows, max(rows, size))
        row = float(prices[0]) / rows  # seconds of a token without drafts
        (unsearched, found), first, chained = counts.tolist()
        self._right += ((chained[1], chained[0]) - self._right * (chained[0] > 0)) / self.MEMORY
        gain = row * (accepted.sum() - found) - (prices[size] - prices[unsearched])
        if accepted.any() or not size:  # what they would have gained: the confidence may lag behind the text
            count, right = max(0, first[0] - chained[0]), first[1] - chained[1]
            gain = max(gain, row * right - (prices[count] - prices[0]))
            untried = rows + min(count, _affordable(prices)) > self.cost.largest and (gain > 0 or not self._explored)
            rests = self.rest.asleep(rows) or self._ahead
            self._curious = untried and rests and self.rest.pays(rows, row * right, row * rows)
        if not self._explored or gain > 0:
            self.rest.observe(rows, planned, planning, float(gain), row * rows)

    def terms(self, rows: int, budget: int, limit: int, timed: bool, proposed: bool, next_launched: bool) -> Terms:
        """Return the terms of the next step, of at most ``budget`` draft tokens, ``limit`` by the rows' own limits.

        ``next_launched``: that step has begun. Its drafts will be dropped; an experiment waits for a step with drafts.
        """
        if not (self._enabled and self.cost.ready):
            return Terms(FREE, budget)
        most, more = min(budget, self.cost.room(rows)), self._due or (self._experiment(rows) if timed else 0)
        if more and (next_launched or self._due):  # it costs a wait, whatever its size
            most, more = min(budget, max(most, rows)), max(more, rows)
        prices = self.cost.prices(rows, min(most, limit))
        if proposed:  # the next step mostly ends with a proposal, too
            if not self.proposals.faster(rows):
                more = self._due
                if self._pricing:
                    most = more = min(budget, rows)
                    prices = self.cost.prices(rows, most)
            self.proposals.begin(rows)
            prices = prices + self.cost.proposal(rows)
        self._ahead = next_launched
        self._leads |= next_launched
        self._due = more if next_launched else 0
        self._launched = self._launched + 1 if self._due else 0
        self._explored = more > 0 and not next_launched
        return Terms(prices, most, more, weighed=True)

    def plans(self, rows: int, terms: Terms) -> bool:
        """Return whether the next step is planned."""
        return not terms.weighed or terms.more > 0 or self.rest.plans(rows)

    def least(self, rows: int, terms: Terms) -> float:
        """Return a lower bound of the value of the tokens that :meth:`grant` grants."""
        if terms.more or self.rest.asleep(rows):
            return 0.0
        cut = _MARGIN * self._cut[2] if self._cut and self._cut[:2] == (rows, terms.most) else 0.0
        return max(cut, lowest_profitable(terms.prices, rows) if terms.weighed else 0.0)

    def grant(self, reach: np.ndarray, planned: np.ndarray, terms: Terms) -> np.ndarray:
        """Return the draft tokens of each row, int64[B]; arguments as of :func:`.budget.select_tokens`."""
        granted = select_tokens(reach, planned, terms.most, terms.prices)
        self._cut = None
        if int(granted.sum()) == terms.most < int(planned.sum()):
            drafted = np.flatnonzero(granted)
            self._cut = len(planned), terms.most, float(reach[drafted, granted[drafted] - 1].min())
        if not terms.weighed:
            self.waits = self._waiting.observe(float(granted.any()), 0.0)
            return granted
        if terms.more:
            most = min(terms.most, int(granted.sum()) + terms.more)
            granted = self._tried(reach, planned, granted, most, terms.prices)
            if not granted.any():
                self._due = 0
            if self._due:  # one step is enough, and it comes a few steps late
                self.waits = self._launched % _LATE == 1
            return granted
        size, rows = int(granted.sum()), len(granted)
        gain = 0.0
        if size:
            values = reach[np.arange(reach.shape[1]) < granted[:, None]].sum()
            gain = (1 + float(values) / rows) * terms.prices[0] / terms.prices[size] - 1
        self.waits = self._waiting.observe(gain, self.cost.drafting(rows) / terms.prices[0])
        if size and self._omits(rows, gain):
            granted[:] = 0
            self.waits = False
        return granted

    def proposes(self, rows: int, longest: int) -> bool:
        """Return whether the model's drafter is to draft ``longest`` tokens a row after this step."""
        if not self._enabled:
            return True
        wanted = self.proposals.wanted(rows, alternates=self.waits or not self._leads)
        if wanted and not self.proposals.faster(rows):
            self._pricing = not (self._priced(rows) and self._promises(rows, longest))
            if self._pricing and self.proposals.begun(rows):
                self.proposals.end_trial(rows)
                return False
        return wanted

    def waits_for_model(self, rows: int, longest: int, next_launched: bool) -> bool:
        """Return whether steps wait for the model's drafter; with ``next_launched`` they do not now."""
        if not self._enabled:
            return True
        if self._omitting:  # until a step without drafts, launched ahead, was timed
            return False
        if self.proposals.faster(rows) or self.proposals.on_trial(rows):
            return True
        return next_launched and self.proposes(rows, longest)

    def _promises(self, rows: int, longest: int) -> bool:
        """Return whether drafts of the model alone may gain.

        The first trial goes on if its tokens are right as often as lately, later ones if they were all right.
        """
        right = self._right[0] / self._right[1] if self.proposals.on_first_trial(rows) else 1.0
        tokens = np.cumsum(right ** np.arange(longest + 1))[1:]
        prices = self.cost.prices(rows, longest * rows)
        return bool((tokens * prices[0] > prices[rows::rows] + self.cost.proposal(rows)).any())

    def _priced(self, rows: int) -> bool:
        return 3 * rows <= 2 * self.cost.largest

    def _experiment(self, rows: int) -> int:
        """Return the draft tokens that the next step verifies in addition to the profitable ones; mostly 0."""
        steps = self.cost.steps[width_of(rows)]
        regular = steps > 1 and not (steps & (steps - 1) if steps < EXPLORE_EVERY else steps % EXPLORE_EVERY)
        curious, self._curious = self._curious, False
        if not regular and not curious:
            return 0
        self._experiments += 1
        return max(rows, self._longest) >> -self._experiments % 3

    def _tried(
        self, reach: np.ndarray, planned: np.ndarray, granted: np.ndarray, most: int, prices: np.ndarray
    ) -> np.ndarray:
        """An experiment grants up to ``most`` tokens that take no more than a step's time, if at all."""
        size = int(granted.sum())
        most = min(most, _affordable(prices, size))
        tried = select_tokens(reach, planned, most, FREE)
        value = reach[np.arange(reach.shape[1]) < planned[:, None]].sum() * prices[0] / len(planned)
        # A price that is hardly known may be half.
        worth = value >= (prices[tried.sum()] - prices[size]) / 2
        return tried if worth or self.cost.steps[width_of(len(planned))] >= EXPLORE_EVERY else granted

    def _omits(self, rows: int, gain: float) -> bool:
        """Return whether the next step omits drafts that gain so much, so that the price without them stays known.

        The less drafts gain, the more exact it must be, and the less is lost: :data:`OMITTED` of the time.
        """
        width = width_of(rows)
        if self._omitting:
            self._owed[width] -= gain
            return True
        self._owed[width] += OMITTED
        if self._owed[width] >= max(gain, 8 * OMITTED):
            self._owed[width] = 0
            self._omitting = True
        return self._omitting


def _affordable(prices: np.ndarray, size: int = 0) -> int:
    """Return the most draft tokens that take at most a step's time more than ``size`` of them."""
    return max(1, int(np.searchsorted(prices, prices[size] + prices[0], side="right")) - 1)
