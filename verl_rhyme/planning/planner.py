"""The planner: which GPUs generate, which train, and which staleness bound is profitable.

Algorithm 1 (StreamRL, arXiv:2504.15930, section 4.2) takes, of all ``x + y <= n`` GPUs, the split with the least
``max(P_gen(x), P_train(y))``. Here both are the bounds of :mod:`~verl_rhyme.planning.times`, which include staleness.
Training has a share of one pool of GPUs, rollout a share of the same or another pool; memory and links limit the
splits. The objective is the time of a step, or the price of a trained sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from verl_rhyme.config import StreamingConfig
from verl_rhyme.planning.sites import Model, Pool
from verl_rhyme.planning.times import Floats, Work, rollout

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
    """An allocation problem."""

    pools: Sequence[Pool]  # available GPUs
    model: Model
    work: Work  # an update batch
    max_staleness: int = 1
    weights: float = 0.0  # seconds from a training step's end until its weights are available at the training site
    #: Seconds of these that block the trainer, where separate engines run on; None: all.
    copy: float | None = None
    links: Mapping[frozenset[str], float] = field(default_factory=dict)  # bytes a second, by pairs of sites
    objective: Literal["time", "cost"] = "time"  # seconds of a step, or price of a trained sample on the used GPUs
    slowest: float = math.inf  # most seconds of a step

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

    def transfer(self, train: Pool, share: Pool) -> float | None:
        """Return the seconds in which weights go from one pool's site to another's; ``None`` without a link."""
        speed = self.links.get(frozenset((train.site, share.site)))
        return 0.0 if train.site == share.site else self.model.bytes / speed if speed else None


@dataclass(frozen=True)
class Split:
    """A split of GPUs and its results."""

    problem: Problem
    train: Pool
    train_gpus: int
    rollout: Pool
    rollout_gpus: int  # the same as those that train where both alternate
    tp: int  # GPUs of a replica
    rolled_out: float  # least seconds of a step because of rollout, with the staleness bound
    trained: float  # the same of training: tokens, update and weights
    transfer: float  # seconds of weights over a link
    step: float  # seconds of the step
    colocated: bool = False  # both roles alternate on the same GPUs

    @property
    def arrangement(self) -> str:
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
        cost, count = self.rollout.replicas[self.tp], self.rollout_gpus / self.tp
        full = float(rollout(cost, count, self.problem.work, 1 << 30))  # all slots are always full
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
        """Price of all its GPUs an hour; ``None``: unknown."""
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
    """The result for one staleness bound."""

    max_staleness: int
    best: Split
    others: list[Split]  # best first: the best of each other arrangement, and both roles in turns on the same GPUs
    refused: list[str]  # reasons why other arrangements are impossible
    compared: int  # splits

    @property
    def turns(self) -> Split | None:
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
    """Return the plan with the best split; of those within :data:`WORTH` of it, the one with the fewest GPUs.

    Raises :class:`NoSplit` if none fits, or none takes at most ``slowest`` seconds.
    """
    refused: list[str] = []
    found: list[Split] = []
    compared, least = 0, np.inf
    for train, share, tp in _arrangements(problem, refused):
        seconds, value, ys, xs = _all_splits(problem, train, share, tp)
        compared += np.isfinite(seconds).sum().item()
        if not np.isfinite(seconds).any():
            refused.append(
                f"training on {train.name}, generation on {share.name} with tensor parallel size {tp}: its "
                f"{train.gpus} GPUs are too few for both"
            )
            continue
        if not np.isfinite(value).any():
            refused.append(
                f"no step takes {problem.slowest:.0f} s or less, the fastest takes {seconds.min():.0f} s: allow more, "
                f"or add GPUs (training on {train.name}, generation on {share.name})"
            )
            continue
        least = min(least, float(value.min()))
        # of the splits that are nearly the best, the smallest, and the best of these
        gpus = np.where(value <= (1 + WORTH) * value.min(), np.add.outer(ys, xs), np.inf)
        y, x = np.unravel_index(np.argmin(np.where(gpus == gpus.min(), value, np.inf)), value.shape)
        found.append(split(problem, (train, ys[int(y)]), (share, xs[int(x)]), tp))
    refused = list(dict.fromkeys(refused))
    if not found:
        raise NoSplit("no split is possible:\n" + "\n".join(f"- {reason}" for reason in refused))
    enough = (1 + WORTH) * least * (1 + 1e-9)  # rounding
    best = min((each for each in found if each.value <= enough), key=lambda each: (each.gpus, each.value))
    others = [each for each in found if each is not best] + _in_turns(problem, best)
    return Plan(problem.max_staleness, best, sorted(others, key=lambda each: each.value), refused, compared)


def split(problem: Problem, train: tuple[Pool, int], rollout_on: tuple[Pool, int], tp: int) -> Split:
    """Return the results of a given split that fits, with separate GPUs for both roles."""
    (pool, gpus), (other, share) = train, rollout_on
    assert pool.training is not None
    seconds, rolled_out, transfer = _seconds(problem, pool, other, tp, np.array([gpus]), np.array([share]))
    trained = float(pool.training.seconds(gpus, problem.work.trained_tokens)) + problem.blocked
    return Split(problem, pool, gpus, other, share, tp, rolled_out.item(), trained, transfer, seconds.item())


def colocated(problem: Problem, pool: Pool, gpus: int, tp: int) -> Split:
    """Return the split with both roles in turns on the same GPUs; responses continue across versions."""
    assert pool.training is not None
    rolled_out = float(rollout(pool.replicas[tp], gpus / tp, problem.work, problem.max_staleness))
    trained = float(pool.training.seconds(gpus, problem.work.trained_tokens)) + problem.weights
    return Split(problem, pool, gpus, pool, gpus, tp, rolled_out, trained, 0.0, rolled_out + trained, colocated=True)


def _seconds(
    problem: Problem, train: Pool, share: Pool, tp: int, ys: Floats, xs: Floats
) -> tuple[Floats, Floats, float]:
    """Return the seconds of a step and of rollout, float64[ys, xs], by GPUs that train and that generate, and those of
    the weights' transfer.
    """
    training, work, on_policy = train.training, problem.work, not problem.max_staleness
    assert training is not None
    transfer = problem.transfer(train, share) or 0.0
    ys = ys[:, None]
    # from the collection of a batch to engines with its policy: its last part, and fixed costs
    after = training.seconds(ys, work.trained_tokens, _PART) + problem.weights + transfer
    rolled_out = rollout(share.replicas[tp], xs / tp, work, problem.max_staleness, 0.0 if on_policy else after)
    tokens = training.seconds(ys, work.trained_tokens) - training.update
    fixed = training.update + problem.blocked + transfer * on_policy
    seconds = np.hypot(rolled_out, tokens) + fixed if on_policy else np.maximum(rolled_out, tokens + fixed)
    return np.maximum(seconds, transfer), rolled_out, transfer


def _arrangements(problem: Problem, refused: list[str]) -> Iterator[tuple[Pool, Pool, int]]:
    """Yield the pools that train and generate, and a replica's GPUs; append reasons against others to ``refused``."""
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
        if reason := train.check_training(problem.model, max(train.shares(train.training.copy_gpus), default=0)):
            refused.append(reason)
            continue
        for tp, share in able:
            if problem.transfer(train, share) is None:
                refused.append(f"training at {train.site}, generation at {share.site}: no link between them")
            else:
                yield train, share, tp


def _all_splits(problem: Problem, train: Pool, share: Pool, tp: int) -> tuple[Floats, Floats, list[int], list[int]]:
    """Return seconds and value of all splits, float64[ys, xs] (infinite where impossible), and the GPUs ys and xs."""
    assert train.training is not None
    ys = [y for y in train.shares(train.training.copy_gpus) if not train.check_training(problem.model, y)]
    xs = share.shares(tp)
    seconds, *_ = _seconds(problem, train, share, tp, np.array(ys, float), np.array(xs, float))
    value = seconds
    if problem.objective == "cost":
        price = np.add.outer(np.array(ys) * (train.price or 0.0), np.array(xs) * (share.price or 0.0))
        value = seconds * price / 3600 / problem.work.samples
    if share is train:
        seconds = np.where([[train.fits(x, y) for x in xs] for y in ys], seconds, np.inf)
    possible = np.isfinite(seconds) & (seconds <= problem.slowest)
    return seconds, np.where(possible, value, np.inf), ys, xs


def _in_turns(problem: Problem, best: Split) -> list[Split]:
    pool = best.train
    if best.tp not in pool.replicas or pool.check_replica(problem.model, problem.work, best.tp):
        return []
    assert pool.training is not None
    gpus = max((n for n in pool.shares(pool.training.copy_gpus) if not n % best.tp), default=0)
    return [colocated(problem, pool, gpus, best.tp)] if gpus and not pool.check_training(problem.model, gpus) else []
