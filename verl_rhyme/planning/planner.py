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
from typing import Literal

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
    """

    pools: Sequence[Pool]
    model: Model
    work: Work
    max_staleness: int = 1
    weights: float = 0.0
    copy: float | None = None
    links: Links = field(default_factory=Links)

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must be at least 0 (versions), not {self.max_staleness}")
        if not (0 <= self.weights < math.inf and 0 <= (self.copy or 0.0) < math.inf):
            raise ValueError(f"sync and copy must be seconds, at least 0, not {self.weights} and {self.copy}")

    @property
    def held(self) -> float:
        """Seconds for which new weights block the trainer, on separate engines."""
        return self.weights if self.copy is None or not self.max_staleness else self.copy


@dataclass(frozen=True)
class Split:
    """A split of GPUs and its results.

    Attributes:
        what: Name of the split, for tables.
        train, train_gpus: Pool and GPUs that train.
        rollout, rollout_gpus: Pool and GPUs that generate; the same as those that train where they alternate.
        tp: GPUs of a replica.
        colocated: Whether both roles alternate on the same GPUs.
        rolled_out: Minimum seconds of a step because of rollout, with the staleness bound.
        slots: The same with unbounded staleness: slots are always full.
        trained: Minimum seconds of a step because of training: tokens, update, and weights.
        transfer: Seconds of weights over a link.
        step: Seconds of the step.
        tokens_per_s: Trained response tokens a second.
        hourly: Price of all its GPUs an hour; ``None``: a price is unknown.
        cost: Price of a trained sample.
    """

    what: str
    train: Pool
    train_gpus: int
    rollout: Pool
    rollout_gpus: int
    tp: int
    rolled_out: float
    slots: float
    trained: float
    transfer: float
    step: float
    tokens_per_s: float
    hourly: float | None
    cost: float | None
    colocated: bool = False

    @property
    def binds(self) -> str:
        """The bound that determines a step.

        One of ``trainer``, ``longest response`` (within its staleness bound), ``slots`` (always full), ``link``, or
        ``all, in turns``.
        """
        if self.colocated:
            return "all, in turns"
        if self.transfer >= max(self.rolled_out, self.trained):
            return "link"
        if self.trained >= self.rolled_out:
            return "trainer"
        return "slots" if self.slots >= self.rolled_out * (1 - 1e-9) else "longest response"

    @property
    def gpus(self) -> int:
        """GPUs of both roles."""
        return self.train_gpus + (0 if self.colocated else self.rollout_gpus)

    @property
    def train_idle(self) -> float:
        """Share of a step in which training waits for samples or weights."""
        return max(0.0, 1 - self.trained / self.step)


@dataclass(frozen=True)
class Plan:
    """The result for one staleness bound.

    Attributes:
        max_staleness: The bound.
        best: Best split.
        others: Alternatives, best first: the best split of each other arrangement, and both roles in turns on the same
            GPUs, where possible.
        refused: Reasons why other arrangements are impossible.
        looked_at: Number of compared splits.
    """

    max_staleness: int
    best: Split
    others: list[Split]
    refused: list[str]
    looked_at: int

    @property
    def turns(self) -> Split | None:
        """The split with both roles in turns on the same GPUs."""
        return next((split for split in self.others if split.colocated), None)


def dial(problem: Problem, objective: Objective = "time", slowest: float = np.inf) -> list[Plan]:
    """Return the plans of all :data:`BOUNDS` with a split within ``slowest``; arguments and errors as :func:`plan`."""
    found, none = [], None
    for bound in BOUNDS:
        try:
            found.append(plan(replace(problem, max_staleness=bound), objective, slowest))
        except NoSplit as error:
            none = error
    if none is not None and not found:
        raise none
    return found


def profitable(plans: Sequence[Plan], objective: Objective = "time") -> Plan:
    """Return the plan of the smallest staleness bound whose split is within :data:`PROFIT` of the best of all."""
    least = min(value(plan.best, objective) for plan in plans)
    return min(
        (plan for plan in plans if value(plan.best, objective) <= (1 + PROFIT) * least),
        key=lambda plan: plan.max_staleness,
    )


def plan(problem: Problem, objective: Objective = "time", slowest: float = np.inf) -> Plan:
    """Return the plan with the best split.

    Args:
        problem: Allocation problem.
        objective: ``time``: seconds of a step; ``cost``: price of a trained sample on the used GPUs.
        slowest: Maximum seconds of a step.

    Raises:
        NoSplit: No split is possible; the message lists the reasons.
        ValueError: ``objective="cost"`` without prices.
    """
    if objective == "cost" and (unknown := [pool.name for pool in problem.pools if pool.price is None]):
        raise ValueError(f"objective=cost needs the price of a GPU-hour: set price for {', '.join(unknown)}")
    refused: list[str] = []
    found: list[Split] = []
    looked_at, fastest, least = 0, np.inf, np.inf
    for arrangement in _arrangements(problem, refused):
        best, count, seconds, lowest = _search(problem, objective, slowest, *arrangement)
        looked_at, fastest, least = looked_at + count, min(fastest, seconds), min(least, lowest)
        found += [] if best is None else [best]
        if not count:
            refused.append(_why_none(*arrangement[:3]))
    if not found:
        if looked_at:
            refused.insert(
                0,
                f"no step takes {slowest:.0f} s or less, the fastest takes {fastest:.0f} s: allow more, or add GPUs "
                "(training and rollout use one pool each)",
            )
        raise NoSplit("no split is possible:\n" + "\n".join(f"- {why}" for why in dict.fromkeys(refused)))
    enough = (1 + WORTH) * least * (1 + 1e-9)  # rounding
    good = (split for split in found if value(split, objective) <= enough)
    best = min(good, key=lambda split: (split.gpus, value(split, objective)))
    others = [split for split in found if split is not best]
    others += _in_turns(problem, best)
    others.sort(key=lambda split: value(split, objective))
    return Plan(problem.max_staleness, best, others, list(dict.fromkeys(refused)), looked_at)


def split(problem: Problem, train: tuple[Pool, int], rollout_on: tuple[Pool, int], tp: int, what: str) -> Split:
    """Return the results of a given split, with separate GPUs for both roles.

    Raises:
        NoSplit: It does not fit.
    """
    (pool, gpus), (other, share) = train, rollout_on
    assert pool.training is not None
    transfer = problem.links.seconds(pool.site, other.site, problem.model.bytes)
    whys = [other.why_no_replica(problem.model, problem.work, tp), pool.why_no_training(problem.model, gpus)]
    whys += ["no link between the sites"] if transfer is None else []
    if why := "; ".join(filter(None, whys)):
        raise NoSplit(why)
    after = _after(problem, pool.training, np.array(gpus), transfer or 0.0)
    rolled_out = rollout(other.replicas[tp], share / tp, problem.work, problem.max_staleness, after)
    return _split(problem, train, rollout_on, tp, what, float(rolled_out))


def _after(problem: Problem, training: Training, gpus: Floats, transfer: float) -> Floats:
    """Return the seconds from the collection of a batch to engines with its policy: its last part, and fixed costs.

    On-policy these are not part of the rollout bound (:func:`_step`).
    """
    if not problem.max_staleness:
        return np.zeros(np.shape(gpus))
    return training.seconds(gpus, problem.work.trained_tokens, _PART) + problem.weights + transfer


def _step(problem: Problem, training: Training, rolled_out: Floats, trained: Floats, transfer: float) -> Floats:
    """Return the seconds of a step from the bounds of rollout and training."""
    on_policy, fixed = not problem.max_staleness, training.update + problem.held
    seconds = step(rolled_out, trained - training.update, fixed + transfer * on_policy, on_policy)
    return np.maximum(seconds, transfer)


def _split(
    problem: Problem, train: tuple[Pool, int], rollout_on: tuple[Pool, int], tp: int, what: str, bound_s: float
) -> Split:
    """Return a split whose rollout allows a step of ``bound_s`` seconds."""
    (pool, gpus), (other, share) = train, rollout_on
    assert pool.training is not None
    work = problem.work
    trained = pool.training.seconds(gpus, work.trained_tokens)
    transfer = problem.links.seconds(pool.site, other.site, problem.model.bytes) or 0.0
    seconds = float(_step(problem, pool.training, np.array(bound_s), trained, transfer))
    hourly, cost = _price([rollout_on, train], seconds, work)
    return Split(
        what,
        pool,
        gpus,
        other,
        share,
        tp,
        rolled_out=bound_s,
        slots=float(slots(other.replicas[tp], share / tp, work)),
        trained=float(trained) + problem.held,
        transfer=transfer,
        step=seconds,
        tokens_per_s=work.tokens / seconds,
        hourly=hourly,
        cost=cost,
    )


def _price(used: Sequence[tuple[Pool, int]], seconds: float, work: Work) -> tuple[float | None, float | None]:
    """Return the price of GPUs in an hour, and for a trained sample."""
    if any(each.price is None for each, _ in used):
        return None, None
    hourly = sum((each.price or 0.0) * share for each, share in used)
    return hourly, hourly * seconds / 3600 / work.samples


def value(split: Split, objective: Objective) -> float:
    """Return the seconds of a step, or the price of a trained sample."""
    return split.step if objective == "time" else float(split.cost or 0.0)


#: Training pool, generation pool, GPUs of a replica, seconds of weights over a link.
_Arrangement = tuple[Pool, Pool, int, float]


def _arrangements(problem: Problem, refused: list[str]) -> Iterator[_Arrangement]:
    """Yield the possible arrangements, and append the reasons against the others to ``refused``."""
    able: list[tuple[int, Pool]] = []
    for pool in problem.pools:
        for tp in sorted(pool.replicas):
            if why := pool.why_no_replica(problem.model, problem.work, tp):
                refused.append(why)
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
        if why := train.why_no_training(problem.model, max(sizes, default=0)):
            refused.append(why)
            continue
        for tp, share in able:
            transfer = problem.links.seconds(train.site, share.site, problem.model.bytes)
            if transfer is None:
                refused.append(f"training at {train.site}, generation at {share.site}: no link between them")
            else:
                yield train, share, tp, transfer


def _why_none(train: Pool, share: Pool, tp: int) -> str:
    """Return why an arrangement has no split."""
    what = f"training on {train.name}, generation on {share.name} with tensor parallel size {tp}"
    return f"{what}: its {train.gpus} GPUs are too few for both"


def _search(
    problem: Problem, objective: Objective, slowest: float, train: Pool, share: Pool, tp: int, transfer: float
) -> tuple[Split | None, int, float, float]:
    """Return the best split of an arrangement (within :data:`WORTH`, the one with the fewest GPUs).

    Also returned: the number of compared splits, the least seconds of these, and the least ``objective`` within
    ``slowest``.
    """
    assert train.training is not None
    model, work = problem.model, problem.work
    ys = [y for y in train.shares(train.training.copy_gpus) if not train.why_no_training(model, y)]
    xs = share.shares(tp)
    after = _after(problem, train.training, np.array(ys), transfer)[:, None]
    rolled_out = rollout(share.replicas[tp], np.array(xs) / tp, work, problem.max_staleness, after)  # [ys, xs]
    trained = train.training.seconds(ys, work.trained_tokens)[:, None]
    seconds = _step(problem, train.training, rolled_out, trained, transfer)
    if share is train:
        seconds = np.where([[train.fits(x, y) for x in xs] for y in ys], seconds, np.inf)
    looked_at, fastest = int(np.isfinite(seconds).sum()), float(seconds.min())
    possible = np.isfinite(seconds) & (seconds <= slowest)
    if not possible.any():
        return None, looked_at, fastest, np.inf
    gpus = np.add.outer(ys, xs)
    worth = seconds
    if objective == "cost":
        price = np.add.outer(np.array(ys) * (train.price or 0.0), np.array(xs) * (share.price or 0.0))
        worth = np.where(possible, seconds, 0.0) * price / 3600 / work.samples
    worth = np.where(possible, worth, np.inf)
    least = float(worth.min())
    good = worth <= (1 + WORTH) * least
    fewest = np.where(good, gpus, np.inf)
    at = np.unravel_index(np.argmin(np.where(fewest == fewest.min(), worth, np.inf)), worth.shape)
    y, x = ys[int(at[0])], xs[int(at[1])]
    what = "one pool" if share is train else "two pools"
    return _split(problem, (train, y), (share, x), tp, what, float(rolled_out[at])), looked_at, fastest, least


def _in_turns(problem: Problem, best: Split) -> list[Split]:
    """Return the split with both roles in turns on all GPUs of the training pool, where possible."""
    pool = best.train
    if best.tp not in pool.replicas or pool.why_no_replica(problem.model, problem.work, best.tp):
        return []
    assert pool.training is not None
    gpus = max((n for n in pool.shares(pool.training.copy_gpus) if not n % best.tp), default=0)
    return [colocated(problem, pool, gpus, best.tp)] if gpus and not pool.why_no_training(problem.model, gpus) else []


def colocated(problem: Problem, pool: Pool, gpus: int, tp: int) -> Split:
    """Return the split with rollout and training in turns on the same GPUs.

    Responses continue across versions, but the two roles never run at the same time.
    """
    assert pool.training is not None
    work, cost_of, count = problem.work, pool.replicas[tp], gpus / tp
    rolled_out = float(rollout(cost_of, count, work, problem.max_staleness))
    trained = float(pool.training.seconds(gpus, work.trained_tokens)) + problem.weights
    seconds = rolled_out + trained
    hourly, cost = _price([(pool, gpus)], seconds, work)
    return Split(
        f"in turns on {pool.name}",
        pool,
        gpus,
        pool,
        gpus,
        tp,
        rolled_out=rolled_out,
        slots=float(slots(cost_of, count, work)),
        trained=trained,
        transfer=0.0,
        step=seconds,
        tokens_per_s=work.tokens / seconds,
        hourly=hourly,
        cost=cost,
        colocated=True,
    )
