"""The planner: which GPUs generate, which train, and which staleness bound is profitable.

It extends Algorithm 1 (StreamRL, arXiv:2504.15930, section 4.2) to sites, GPU kinds, prices, and a pipeline. As
published: of all ``x + y <= n``, take the least ``max(P_gen(x), P_train(y))``. Here both are the bounds of
:mod:`~verl_rhyme.planning.times`, which include staleness. Training has a share of one pool of GPUs, rollout a share of
the same or another pool. Memory and links limit the splits. The objective is the time of a step, or the price of a
trained sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from verl_rhyme.config import StreamingConfig
from verl_rhyme.planning.sites import Links, Model, Pool
from verl_rhyme.planning.times import Floats, Training, Work, rollout, slots, step

Objective = Literal["time", "cost"]

#: Relative difference of time (or price) up to which splits count as equal; the one with the fewest GPUs is taken.
WORTH = 0.01
#: Minimum relative gain of time (or price) for which a larger staleness bound is profitable.
PROFIT = 0.1
#: Staleness bounds that are compared.
BOUNDS = (0, 1, 2, 4, 8)
#: Share of a batch in a streamed part.
_PART = StreamingConfig().part or 1.0


class NoSplit(ValueError):
    """No split is possible; the message lists the reasons."""


@dataclass(frozen=True)
class Problem:
    """An allocation problem.

    Attributes:
        pools: Available GPUs.
        model: Trained model.
        work: An update batch.
        max_staleness: Maximum number of policy versions between a trained token and the policy it trains (k).
        weights: Seconds from a training step's end until its weights are available at the training site.
        copy: Seconds of these that block the trainer, where separate engines run on
            (:class:`~verl_rhyme.planning.cost.TrainingCost`); ``None``: all.
        links: Links between sites.
        objective: ``time``: seconds of a step; ``cost``: price of a trained sample on the used GPUs.
        slowest: Maximum seconds of a step.
    """

    pools: Sequence[Pool]
    model: Model
    work: Work
    max_staleness: int = 1
    weights: float = 0.0
    copy: float | None = None
    links: Links = field(default_factory=Links)
    objective: Objective = "time"
    slowest: float = math.inf

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must be at least 0 (versions), not {self.max_staleness}")
        if not (0 <= self.weights < math.inf and 0 <= (self.copy or 0.0) < math.inf):
            raise ValueError(f"sync and copy must be seconds, at least 0, not {self.weights} and {self.copy}")
        if self.objective == "cost" and (unknown := [pool.name for pool in self.pools if pool.price is None]):
            raise ValueError(f"objective=cost needs the price of a GPU-hour: set price for {', '.join(unknown)}")

    @property
    def blocked(self) -> float:
        """Seconds for which new weights block the trainer, on separate engines."""
        return self.weights if self.copy is None or not self.max_staleness else self.copy


@dataclass(frozen=True)
class Split:
    """A split of GPUs and its results.

    Attributes:
        problem: The problem that it solves.
        train, train_gpus: Pool and GPUs that train.
        rollout, rollout_gpus: Pool and GPUs that generate; the same as those that train where they alternate.
        tp: GPUs of a replica.
        rolled_out: Minimum seconds of a step because of rollout, with the staleness bound.
        trained: Minimum seconds of a step because of training: tokens, update, and weights.
        transfer: Seconds of weights over a link.
        step: Seconds of the step.
        colocated: Whether both roles alternate on the same GPUs.
    """

    problem: Problem
    train: Pool
    train_gpus: int
    rollout: Pool
    rollout_gpus: int
    tp: int
    rolled_out: float
    trained: float
    transfer: float
    step: float
    colocated: bool = False

    @property
    def arrangement(self) -> str:
        """Name of the arrangement, for tables."""
        if self.colocated:
            return f"in turns on {self.train.name}"
        return "one pool" if self.rollout is self.train else "two pools"

    @property
    def binds(self) -> str:
        """The bound that determines a step, such as a ``longest response`` within its staleness bound."""
        if self.colocated:
            return "all, in turns"
        if self.transfer >= max(self.rolled_out, self.trained):
            return "link"
        if self.trained >= self.rolled_out:
            return "trainer"
        full = float(slots(self.rollout.replicas[self.tp], self.rollout_gpus / self.tp, self.problem.work))
        return "slots" if full >= self.rolled_out * (1 - 1e-9) else "longest response"

    @property
    def gpus(self) -> int:
        return self.train_gpus + (0 if self.colocated else self.rollout_gpus)

    @property
    def train_idle(self) -> float:
        """Share of a step in which training waits for samples or weights."""
        return max(0.0, 1 - self.trained / self.step)

    @property
    def tokens_per_s(self) -> float:
        """Trained response tokens a second."""
        return self.problem.work.tokens / self.step

    @property
    def hourly(self) -> float | None:
        """Price of all its GPUs an hour; ``None``: a price is unknown."""
        if self.train.price is None or self.rollout.price is None:
            return None
        return self.train.price * self.train_gpus + self.rollout.price * (self.gpus - self.train_gpus)

    @property
    def cost(self) -> float | None:
        """Price of a trained sample; ``None``: a price is unknown."""
        return None if self.hourly is None else self.hourly * self.step / 3600 / self.problem.work.samples

    @property
    def value(self) -> float:
        """Seconds of a step, or price of a trained sample: what the objective minimizes."""
        return self.step if self.problem.objective == "time" else self.cost or 0.0


@dataclass(frozen=True)
class Plan:
    """The result for one staleness bound.

    Attributes:
        max_staleness: The bound.
        best: Best split.
        others: Alternatives, best first: the best split of each other arrangement, and both roles in turns on the same
            GPUs, where possible.
        refused: Reasons why other arrangements are impossible.
        compared: Number of compared splits.
    """

    max_staleness: int
    best: Split
    others: list[Split]
    refused: list[str]
    compared: int

    @property
    def turns(self) -> Split | None:
        """The split with both roles in turns on the same GPUs."""
        return next((split for split in self.others if split.colocated), None)


def plan_bounds(problem: Problem) -> list[Plan]:
    """Return the plans of all :data:`BOUNDS` that have a split; errors as :func:`plan`."""
    found, error = [], None
    for bound in BOUNDS:
        try:
            found.append(plan(replace(problem, max_staleness=bound)))
        except NoSplit as none:
            error = none
    if error is not None and not found:
        raise error
    return found


def profitable(plans: Sequence[Plan]) -> Plan:
    """Return the plan of the smallest staleness bound whose split is within :data:`PROFIT` of the best of all."""
    least = min(plan.best.value for plan in plans)
    return min((plan for plan in plans if plan.best.value <= (1 + PROFIT) * least), key=lambda plan: plan.max_staleness)


def plan(problem: Problem) -> Plan:
    """Return the plan with the best split.

    Splits within :data:`WORTH` of the best count as equal; of these the one with the fewest GPUs is taken.

    Raises:
        NoSplit: No split fits, or none takes at most ``slowest`` seconds.
    """
    refused: list[str] = []
    found: list[Split] = []
    compared, fastest, least = 0, np.inf, np.inf
    for arrangement in _arrangements(problem, refused):
        searched = _search(problem, arrangement)
        compared, fastest = compared + searched.compared, min(fastest, searched.fastest)
        if searched.best is not None:
            found.append(searched.best)
            least = min(least, searched.least)
        if not searched.compared:
            train, share, tp, _ = arrangement
            refused.append(
                f"training on {train.name}, generation on {share.name} with tensor parallel size {tp}: its "
                f"{train.gpus} GPUs are too few for both"
            )
    if not found:
        if compared:
            refused.insert(
                0,
                f"no step takes {problem.slowest:.0f} s or less, the fastest takes {fastest:.0f} s: allow more, or add "
                "GPUs (training and rollout use one pool each)",
            )
        raise NoSplit("no split is possible:\n" + "\n".join(f"- {reason}" for reason in dict.fromkeys(refused)))
    enough = (1 + WORTH) * least * (1 + 1e-9)  # rounding
    best = min((split for split in found if split.value <= enough), key=lambda split: (split.gpus, split.value))
    others = [split for split in found if split is not best] + _in_turns(problem, best)
    others.sort(key=lambda split: split.value)
    return Plan(problem.max_staleness, best, others, list(dict.fromkeys(refused)), compared)


def split(problem: Problem, train: tuple[Pool, int], rollout_on: tuple[Pool, int], tp: int) -> Split:
    """Return the results of a given split, with separate GPUs for both roles. Raises NoSplit if it does not fit."""
    (pool, gpus), (other, share) = train, rollout_on
    assert pool.training is not None
    transfer = problem.links.seconds(pool.site, other.site, problem.model.bytes)
    reasons = [other.check_replica(problem.model, problem.work, tp), pool.check_training(problem.model, gpus)]
    reasons += ["no link between the sites"] if transfer is None else []
    if reason := "; ".join(filter(None, reasons)):
        raise NoSplit(reason)
    after = _after(problem, pool.training, np.array(gpus), transfer or 0.0)
    rolled_out = rollout(other.replicas[tp], share / tp, problem.work, problem.max_staleness, after)
    return _split(problem, _Arrangement(pool, other, tp, transfer or 0.0), gpus, share, float(rolled_out))


def colocated(problem: Problem, pool: Pool, gpus: int, tp: int) -> Split:
    """Return the split with rollout and training in turns on the same GPUs.

    Responses continue across versions, but the two roles never run at the same time.
    """
    assert pool.training is not None
    rolled_out = float(rollout(pool.replicas[tp], gpus / tp, problem.work, problem.max_staleness))
    trained = float(pool.training.seconds(gpus, problem.work.trained_tokens)) + problem.weights
    return Split(problem, pool, gpus, pool, gpus, tp, rolled_out, trained, 0.0, rolled_out + trained, colocated=True)


class _Arrangement(NamedTuple):
    """Pools of both roles, GPUs of a replica, seconds of weights over a link."""

    train: Pool
    rollout: Pool
    tp: int
    transfer: float


class _Searched(NamedTuple):
    """Best split of an arrangement, number of compared splits, least seconds of these, least value within limits."""

    best: Split | None
    compared: int
    fastest: float
    least: float


def _split(problem: Problem, on: _Arrangement, gpus: int, share: int, rolled_out: float) -> Split:
    assert on.train.training is not None
    trained = on.train.training.seconds(gpus, problem.work.trained_tokens)
    seconds = float(_step(problem, on.train.training, np.array(rolled_out), trained, on.transfer))
    trained_s = float(trained) + problem.blocked
    return Split(problem, on.train, gpus, on.rollout, share, on.tp, rolled_out, trained_s, on.transfer, seconds)


def _after(problem: Problem, training: Training, gpus: Floats, transfer: float) -> Floats:
    """Return the seconds from the collection of a batch to engines with its policy: its last part, and fixed costs.

    On-policy these are not part of the rollout bound (:func:`_step`).
    """
    if not problem.max_staleness:
        return np.zeros(np.shape(gpus))
    return training.seconds(gpus, problem.work.trained_tokens, _PART) + problem.weights + transfer


def _step(problem: Problem, training: Training, rolled_out: Floats, trained: Floats, transfer: float) -> Floats:
    """Return the seconds of a step from the bounds of rollout and training."""
    on_policy, fixed = not problem.max_staleness, training.update + problem.blocked
    seconds = step(rolled_out, trained - training.update, fixed + transfer * on_policy, on_policy)
    return np.maximum(seconds, transfer)


def _arrangements(problem: Problem, refused: list[str]) -> Iterator[_Arrangement]:
    """Yield the possible arrangements, and append the reasons against the others to ``refused``."""
    able: list[tuple[int, Pool]] = []
    for pool in problem.pools:
        for tp in sorted(pool.replicas):
            if reason := pool.check_replica(problem.model, problem.work, tp):
                refused.append(reason)
            else:
                able.append((tp, pool))
    if not able and not refused:
        refused.append("no GPUs can generate: give a pool replicas")
    if not any(pool.training for pool in problem.pools):
        refused.append("no GPUs can train: give a pool training costs")
    for train in problem.pools:
        if train.training is None:
            continue
        sizes = train.shares(train.training.copy_gpus)
        if reason := train.check_training(problem.model, max(sizes, default=0)):
            refused.append(reason)
            continue
        for tp, share in able:
            transfer = problem.links.seconds(train.site, share.site, problem.model.bytes)
            if transfer is None:
                refused.append(f"training at {train.site}, generation at {share.site}: no link between them")
            else:
                yield _Arrangement(train, share, tp, transfer)


def _search(problem: Problem, on: _Arrangement) -> _Searched:
    train, share, tp, transfer = on
    assert train.training is not None
    work = problem.work
    ys = [y for y in train.shares(train.training.copy_gpus) if not train.check_training(problem.model, y)]
    xs = share.shares(tp)
    after = _after(problem, train.training, np.array(ys), transfer)[:, None]
    rolled_out = rollout(share.replicas[tp], np.array(xs) / tp, work, problem.max_staleness, after)  # [ys, xs]
    trained = train.training.seconds(ys, work.trained_tokens)[:, None]
    seconds = _step(problem, train.training, rolled_out, trained, transfer)
    if share is train:
        seconds = np.where([[train.fits(x, y) for x in xs] for y in ys], seconds, np.inf)
    compared, fastest = int(np.isfinite(seconds).sum()), float(seconds.min())
    possible = np.isfinite(seconds) & (seconds <= problem.slowest)
    if not possible.any():
        return _Searched(None, compared, fastest, np.inf)
    value = seconds
    if problem.objective == "cost":
        price = np.add.outer(np.array(ys) * (train.price or 0.0), np.array(xs) * (share.price or 0.0))
        value = np.where(possible, seconds, 0.0) * price / 3600 / work.samples
    value = np.where(possible, value, np.inf)
    least = float(value.min())
    gpus = np.where(value <= (1 + WORTH) * least, np.add.outer(ys, xs), np.inf)
    at = np.unravel_index(np.argmin(np.where(gpus == gpus.min(), value, np.inf)), value.shape)
    y, x = ys[int(at[0])], xs[int(at[1])]
    return _Searched(_split(problem, on, y, x, float(rolled_out[at])), compared, fastest, least)


def _in_turns(problem: Problem, best: Split) -> list[Split]:
    """Return the split with both roles in turns on all GPUs of the training pool, where possible."""
    pool = best.train
    if best.tp not in pool.replicas or pool.check_replica(problem.model, problem.work, best.tp):
        return []
    assert pool.training is not None
    gpus = max((n for n in pool.shares(pool.training.copy_gpus) if not n % best.tp), default=0)
    return [colocated(problem, pool, gpus, best.tp)] if gpus and not pool.check_training(problem.model, gpus) else []
