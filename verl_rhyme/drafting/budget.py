"""Selection of the planned draft tokens that a batch verifies, and of the steps that are planned.

The selection maximises the tokens emitted per second under the price of a step (:mod:`verl_rhyme.drafting.cost`). With
the planned tokens of all rows sorted by value, v1 >= v2 >= ..., it grants the first k, for the k that maximises::

    (B + v1 + ... + vk) / price of a step with k draft tokens

A token's value is the probability that it is reached and accepted. If verification is nearly free (decoding bound by
memory), all tokens are granted. If every token has its price (a wide batch, a CPU), only likely tokens or none are
granted. When the choice is made, the plan has been paid for; :class:`Rest` weighs plans, :class:`Proposals` the model's
own drafter.
"""

from __future__ import annotations

import numpy as np

from verl_rhyme.compiled import compiled
from verl_rhyme.drafting.cost import WIDTHS, width_of

#: Price of a step whose draft tokens cost nothing: as many are granted as the budget allows.
FREE = np.ones(1)
#: Factor that keeps :func:`lowest_profitable` a lower bound under rounding.
_ROUNDING = 1 - 1e-6


@compiled
def select_tokens(reach: np.ndarray, planned: np.ndarray, budget: int, prices: np.ndarray) -> np.ndarray:
    """Choose the most valuable draft tokens of a batch; return int64[B], tokens granted to each row.

    ``reach`` is float64[B, K], the probability that each token is reached and accepted, decreasing along each row, and
    ``planned`` int64[B] its tokens. ``prices`` is float64[n], seconds of a step with 0, 1, ... draft tokens; more
    tokens than that cost nothing more. The sum is at most ``min(budget, sum(planned))``, and equal to it with
    :data:`FREE`.
    """
    rows = len(planned)
    granted = np.zeros(rows, dtype=np.int64)
    total = planned.sum()
    # A fit to steps that all drafted may give a step without drafts no price; such a step measures it.
    if budget <= 0 or total == 0 or prices[0] <= 0:
        return granted
    values, row = np.empty(total), np.empty(total, dtype=np.int64)
    n = 0
    for i in range(rows):
        for k in range(planned[i]):
            values[n], row[n] = -reach[i, k], i
            n += 1
    # A stable sort keeps the earlier token of a row first, so each row is granted a prefix.
    order = np.argsort(values, kind="mergesort")
    tokens = float(rows)
    best, most = 0, tokens / prices[0]
    for k in range(min(total, budget)):
        tokens -= values[order[k]]
        seconds = prices[min(k + 1, len(prices) - 1)]
        if tokens >= most * seconds:
            best, most = k + 1, tokens / seconds
    for k in range(best):
        granted[row[order[k]]] += 1
    return granted


def lowest_profitable(prices: np.ndarray, rows: int) -> float:
    """Return a lower bound of the value of every token that :func:`select_tokens` grants to a batch of ``rows`` rows.

    At the optimum the last granted token is worth its time at the rate without drafts, and no token after the first
    takes less than the least. The price of a mixture is not convex.
    """
    if len(prices) < 3 or prices[0] <= 0:
        return 0.0
    return _ROUNDING * float(np.diff(prices[1:]).min()) * rows / float(prices[0])


class Waiting:
    """Decides whether steps wait for their drafts: while recent plans gained more than waits cost, on average.

    A step with drafts waits for the tokens of the step before, and the device waits for the host. Without that wait the
    next drafts come two steps late.
    """

    #: Plans in the mean.
    MEMORY = 8
    #: Least cost of a wait that yields no drafts, in steps.
    LEAST = 0.02

    def __init__(self) -> None:
        self._gain = 0.0  # mean of a wait, in steps

    def observe(self, gain: float, wait: float) -> bool:
        """Take in what a plan's drafts gain, 0 without any, and what a wait costs, in steps; return whether to wait."""
        self._gain += ((gain or -max(wait, self.LEAST)) - self._gain) / self.MEMORY
        return self._gain > 0


class Rest:
    """Decides which steps are planned: by width, as long as drafts gain more time than their plans take.

    Otherwise the drafter rests and probes at intervals that double. A plan that takes next to nothing is always made,
    because a rest misses the first steps of text that repeats.
    """

    #: Planned rows and steps before a rest; planned steps whose gain is remembered; longest interval between probes.
    ROWS, ENOUGH, MEMORY, SELDOM = 256, 4, 32, 64
    #: Share of a step that a plan may always take.
    NEGLIGIBLE = 1 / 200

    def __init__(self) -> None:
        self._planning = np.zeros((WIDTHS, 2))  # seconds of the drafter in a resting and in a planned step
        self._gain = np.zeros(WIDTHS)  # seconds, mean of planned steps
        self._count = np.zeros(WIDTHS, dtype=np.int64)
        self._interval = np.zeros(WIDTHS, dtype=np.int64)  # 0: every step is planned
        self._waited = np.zeros(WIDTHS, dtype=np.int64)

    def plans(self, rows: int) -> bool:
        width = width_of(rows)
        self._waited[width] += 1
        return bool(self._waited[width] > self._interval[width])

    def asleep(self, rows: int) -> bool:
        return bool(self._interval[width_of(rows)] == self.SELDOM)

    def pays(self, rows: int, gain: float, seconds: float) -> bool:
        """Return whether plans that gain so many seconds are worth their time; ``seconds``: a step without drafts."""
        resting, planned = self._planning[width_of(rows)]
        return bool(gain >= planned - resting - self.NEGLIGIBLE * seconds)

    def observe(self, rows: int, planned: bool, planning: float, gain: float, seconds: float) -> None:
        """Take in a finished step; times are in seconds.

        ``planning`` is the drafter's time for it, ``gain`` the time that its drafts saved less that of their
        verification, ``seconds`` the price of the step without drafts.
        """
        width = width_of(rows)
        mean = self._planning[width, int(planned)]
        # A pause of the machine counts as at most twice the mean, or as a step.
        known = (min(planning, 2 * mean) - mean) / 16 if mean else min(planning, seconds or planning)
        self._planning[width, int(planned)] += known
        if not planned:
            return
        self._waited[width] = 0
        if self._interval[width]:
            self._count[width] = 0  # only the probe counts
        self._count[width] = min(self._count[width] + 1, self.MEMORY)
        self._gain[width] += (gain - self._gain[width]) / self._count[width]
        if self.pays(rows, self._gain[width], seconds):
            self._interval[width] = 0
        elif self._interval[width] or self._count[width] >= max(self.ENOUGH, min(self.MEMORY, self.ROWS // rows)):
            self._interval[width] = min(max(2, 2 * self._interval[width]), self.SELDOM)


class Proposals:
    """Decides by width whether the model's own drafter drafts after a step: if tokens come faster with its drafts.

    It starts without. The slower way is tried at intervals that quadruple, until a trial has lost a step. Only trials
    and the first steps after a change decide: their rates are of the same time, while contexts grow and rows become
    fewer. Drafts gain more the fewer rows a step has: a width that was not tried takes the verdict of the next wider
    one if the drafter drafts there, and of the next narrower one if it does not.
    """

    #: Steps before the first trial, least before the next one, before one after a change, and most between two.
    FIRST, SECOND, SOON, SELDOM = 7, 64, 24, 512
    #: Most steps of a trial; least that change the verdict; steps that a rate remembers.
    TRIAL, LEAST, MEMORY = 25, 3, 64
    #: Steps that the result of the last trial counts as in the next.
    EARLIER = 4

    def __init__(self) -> None:
        self._drafts = np.zeros(WIDTHS, dtype=np.int64)  # whether the drafter drafts outside of trials
        self._sums = np.zeros((WIDTHS, 2, 3))  # tokens, seconds and steps, by whether the drafter drafts
        self._interval = np.full(WIDTHS, self.FIRST)  # longer where a verdict is known
        self._waited = np.zeros(WIDTHS, dtype=np.int64)
        self._trial = np.zeros(WIDTHS, dtype=np.int64)  # steps left of a trial
        self._begun = np.zeros(WIDTHS, dtype=bool)  # whether the model has drafted since the last trial began
        self._lost = np.zeros(WIDTHS)  # usual steps that the trial has cost
        self._pace = np.zeros(WIDTHS)  # usual tokens a second at the last trial or change

    def wanted(self, rows: int, alternates: bool = True) -> bool:
        """Return whether the drafter drafts after this step; a trial ``alternates`` where usual steps cost as usual."""
        width = width_of(rows)
        if self._interval[width] == self.FIRST:
            self._adopt(width)
        usual = self._drafts[width]
        if not self._trial[width]:
            self._waited[width] += 1
            if self._waited[width] < self._interval[width]:
                return bool(usual)
            self._waited[width], self._trial[width], self._lost[width] = 0, self.TRIAL, 0.0
            self._interval[width] = min(max(self.SECOND, 4 * self._interval[width]), self.SELDOM)
            self._begun[width] = False
            tokens, seconds, _ = self._sums[width, usual].tolist()
            pace = tokens / seconds if tokens else 0.0
            earlier = self._sums[width, 1 - usual]
            earlier *= min(1.0, self.EARLIER / max(1.0, earlier[2]))
            earlier[1] *= self._pace[width] / pace if pace and self._pace[width] else 1.0
            self._pace[width] = pace
        self._trial[width] -= 1
        # What a step of it gained is known a step later.
        return bool(usual if self._trial[width] % 2 and (alternates or usual) else 1 - usual)

    def _adopt(self, width: int) -> None:
        """Take the verdict of another width, if it holds for this one as well."""
        known = np.flatnonzero(self._interval > self.FIRST)
        for others, drafts in ((known[known > width][:1], 1), (known[known < width][-1:], 0)):
            if (self._drafts[others] == drafts).any():
                self._drafts[width], self._interval[width] = drafts, self._interval[others[0]]
                return

    def on_trial(self, rows: int) -> bool:
        return bool(self._trial[width_of(rows)])

    def on_first_trial(self, rows: int) -> bool:
        """Return whether the trial is a width's first, or the first after a change."""
        return bool(self._interval[width_of(rows)] == self.SECOND)

    def begin(self, rows: int) -> None:
        """Take in that the model has drafted."""
        self._begun[width_of(rows)] = True

    def begun(self, rows: int) -> bool:
        """Return whether the model has drafted since the last trial began."""
        return bool(self._begun[width_of(rows)])

    def end_trial(self, rows: int) -> None:
        self._trial[width_of(rows)] = 0

    def observe(self, rows: int, proposed: bool, tokens: float, seconds: float) -> None:
        """Take in a step's tokens; the model ``proposed`` at the end of the step before, or not.

        ``seconds``: of the step before, as if it had verified the drafts of this one.
        """
        width = width_of(rows)
        usual, other = self._drafts[width], 1 - self._drafts[width]
        if self._trial[width] and proposed == other:
            sums = self._sums[width, usual].tolist()
            self._lost[width] += sums[2] * (seconds / sums[1] - tokens / sums[0]) if sums[0] else 0.0
            if self._lost[width] > 1:
                self._trial[width] = 0
        self._sums[width, int(proposed)] *= 1 - 1 / self.MEMORY
        self._sums[width, int(proposed)] += tokens, seconds, 1
        if self._trial[width] or self._interval[width] <= self.SOON:
            (known, known_seconds, _), (tried, tried_seconds, steps) = self._sums[width, [usual, other]].tolist()
            if known > 0 and round(steps) >= self.LEAST and tried * known_seconds > known * tried_seconds:
                self._drafts[width], self._interval[width] = other, self.SOON
                self._waited[width] = self._trial[width] = 0
                self._pace[width] = tried / tried_seconds

    def faster(self, rows: int) -> bool:
        """Return whether the model's drafts are known to gain."""
        return bool(self._drafts[width_of(rows)])
