"""Which GPUs roll out and which train, and which bound of staleness is profitable: Algorithm 1 (StreamRL,
arXiv:2504.15930, section 4.2) for sites, kinds, prices, and a pipeline.

Published: of all ``x + y <= n`` that with the least ``max(P_gen(x), P_train(y))``. Here both are the floors of
:mod:`~verl_rhyme.planning.times`, which have the bound of staleness in them; training has a share of one pool of
GPUs, rollout a share of one, of the same or of another; memory and links bound what may be; and what is least is the
time of a step, or the price of a trained sample.
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

#: A split that is slower (or dearer) than the best by less is as good: of such the one with the fewest GPUs is taken.
WORTH = 0.01
#: A larger bound of staleness is profitable where a step is faster (or a sample cheaper) by more.
PROFIT = 0.1
#: Bounds that are compared.
BOUNDS = (0, 1, 2, 4, 8)
#: Share of a batch that a streamed part has.
_PART = StreamingConfig().part or 1.0


class NoSplit(ValueError):
    """Nothing fits; the message says why, line by line."""


@dataclass(frozen=True)
class Problem:
    """What is to be allocated.

    Attributes:
        pools: GPUs.
        model: What is trained.
        work: An update batch.
        max_staleness: Policy versions between a trained token and the policy it trains, at most (k).
        weights: Seconds from an update's end until its weights are handed out at the site that trains.
        copy: Seconds of these for which the trainer is held, where engines are separate and run on
            (:class:`~verl_rhyme.planning.cost.TrainingCost`); ``None``: all.
        links: Between sites.
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
            raise ValueError(f"sync and copy must be seconds of at least 0, not {self.weights} and {self.copy}")

    @property
    def held(self) -> float:
        """Seconds for which new weights hold the trainer, on separate engines."""
        return self.weights if self.copy is None or not self.max_staleness else self.copy


@dataclass(frozen=True)
class Split:
    """A way to use GPUs, and what comes of it.

    Attributes:
        what: It is, in a table.
        train, train_gpus: Where it trains.
        rollout, rollout_gpus: Where it rolls out; the same as those that train where they take turns.
        tp: GPUs of a replica.
        colocated: Both take turns on the same GPUs.
        rolled_out: Seconds of a step that rollout allows: its floor, with the bound of staleness.
        slots: The same of an unbounded staleness: slots are always full.
        trained: Seconds of a step that training allows: tokens, update, and weights.
        transfer: Seconds of weights over a link.
        step: Seconds of the whole.
        tokens_per_s: Trained tokens of responses.
        hourly: Price of all its GPUs; ``None``: one is not known.
        cost: Of a trained sample.
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
        """The floor that a step stands on: ``trainer``, ``longest response`` (the time that it has by the bound of
        staleness), ``slots`` (always full), ``link``, or ``all, in turns``."""
        if self.colocated:
            return "all, in turns"
        if self.transfer >= max(self.rolled_out, self.trained):
            return "link"
        if self.trained >= self.rolled_out:
            return "trainer"
        return "slots" if self.slots >= self.rolled_out * (1 - 1e-9) else "longest response"

    @property
    def gpus(self) -> int:
        """Of both."""
        return self.train_gpus + (0 if self.colocated else self.rollout_gpus)

    @property
    def train_idle(self) -> float:
        """Share of a step in which training waits for samples or weights."""
        return max(0.0, 1 - self.trained / self.step)


@dataclass(frozen=True)
class Plan:
    """The answer for one bound of staleness.

    Attributes:
        max_staleness: The bound.
        best: The split.
        others: What it was compared with, from the best on: the best of each other arrangement, and both roles in
            turns on the same GPUs, where that is possible.
        refused: Why arrangements are not possible.
        looked_at: Splits that were.
    """

    max_staleness: int
    best: Split
    others: list[Split]
    refused: list[str]
    looked_at: int

    @property
    def turns(self) -> Split | None:
        """Both roles in turns on the same GPUs."""
        return next((split for split in self.others if split.colocated), None)


def dial(problem: Problem, objective: Objective = "time", slowest: float = np.inf) -> list[Plan]:
    """The best split at each of :data:`BOUNDS`; those within ``slowest``. Arguments and errors as :func:`plan`."""
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
    """The least bound of staleness whose split is within :data:`PROFIT` of the best of all bounds."""
    least = min(value(plan.best, objective) for plan in plans)
    return min(
        (plan for plan in plans if value(plan.best, objective) <= (1 + PROFIT) * least),
        key=lambda plan: plan.max_staleness,
    )


def plan(problem: Problem, objective: Objective = "time", slowest: float = np.inf) -> Plan:
    """The best split.

    Args:
        problem: What there is.
        objective: ``time``: seconds of a step; ``cost``: price of a trained sample, of the GPUs that are used.
        slowest: Seconds that a step may take.

    Raises:
        NoSplit: There is none, and why.
        ValueError: No prices for ``objective="cost"``.
    """
    if objective == "cost" and (unknown := [pool.name for pool in problem.pools if pool.price is None]):
        raise ValueError(f"objective=cost needs the price of a GPU and hour, and {', '.join(unknown)} has none")
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
                f"no step takes {slowest:.0f} s or less, the fastest {fastest:.0f} s: allow more, or add GPUs "
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
    """What comes of a given split, both roles on GPUs of their own.

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
    return _told(problem, train, rollout_on, tp, what, float(rolled_out))


def _after(problem: Problem, training: Training, gpus: Floats, transfer: float) -> Floats:
    """Seconds from the collection of a batch to engines with its policy: the last part of it, and what is fixed. On-
    policy these stand beside rollout (:func:`_step`)."""
    if not problem.max_staleness:
        return np.zeros(np.shape(gpus))
    return training.seconds(gpus, problem.work.trained_tokens, _PART) + problem.weights + transfer


def _step(problem: Problem, training: Training, rolled_out: Floats, trained: Floats, transfer: float) -> Floats:
    """Seconds of a step, of what rollout and an update allow."""
    on_policy, fixed = not problem.max_staleness, training.update + problem.held
    seconds = step(rolled_out, trained - training.update, fixed + transfer * on_policy, on_policy)
    return np.maximum(seconds, transfer)


def _told(
    problem: Problem, train: tuple[Pool, int], rollout_on: tuple[Pool, int], tp: int, what: str, floor: float
) -> Split:
    """A split whose rollout allows a step of so many seconds."""
    (pool, gpus), (other, share) = train, rollout_on
    assert pool.training is not None
    work = problem.work
    trained = pool.training.seconds(gpus, work.trained_tokens)
    transfer = problem.links.seconds(pool.site, other.site, problem.model.bytes) or 0.0
    seconds = float(_step(problem, pool.training, np.array(floor), trained, transfer))
    hourly, cost = _price([rollout_on, train], seconds, work)
    return Split(
        what,
        pool,
        gpus,
        other,
        share,
        tp,
        rolled_out=floor,
        slots=float(slots(other.replicas[tp], share / tp, work)),
        trained=float(trained) + problem.held,
        transfer=transfer,
        step=seconds,
        tokens_per_s=work.tokens / seconds,
        hourly=hourly,
        cost=cost,
    )


def _price(used: Sequence[tuple[Pool, int]], seconds: float, work: Work) -> tuple[float | None, float | None]:
    """What GPUs cost in an hour, and for a trained sample."""
    if any(each.price is None for each, _ in used):
        return None, None
    hourly = sum((each.price or 0.0) * share for each, share in used)
    return hourly, hourly * seconds / 3600 / work.samples


def value(split: Split, objective: Objective) -> float:
    """Seconds of a step, or the price of a trained sample."""
    return split.step if objective == "time" else float(split.cost or 0.0)


#: Where it trains, where it generates; GPUs of a replica; seconds of weights over a link.
_Arrangement = tuple[Pool, Pool, int, float]


def _arrangements(problem: Problem, refused: list[str]) -> Iterator[_Arrangement]:
    """What may be; ``refused`` is told why other things may not."""
    able: list[tuple[int, Pool]] = []
    for pool in problem.pools:
        for tp in sorted(pool.replicas):
            if why := pool.why_no_replica(problem.model, problem.work, tp):
                refused.append(why)
            else:
                able.append((tp, pool))
    if not able and not refused:
        refused.append("no GPUs may generate")
    if not any(pool.training for pool in problem.pools):
        refused.append("no GPUs may train")
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
                refused.append(f"training at {train.site}, generation at {share.site}: no link")
            else:
                yield train, share, tp, transfer


def _why_none(train: Pool, share: Pool, tp: int) -> str:
    """Why an arrangement has no split."""
    what = f"training on {train.name}, generation on {share.name} with tensor parallel size {tp}"
    return f"{what}: its {train.gpus} GPUs do not do for both"


def _search(
    problem: Problem, objective: Objective, slowest: float, train: Pool, share: Pool, tp: int, transfer: float
) -> tuple[Split | None, int, float, float]:
    """The best split of an arrangement (within :data:`WORTH` that of the fewest GPUs), how many were looked at;
    the least seconds of these, and the least of ``objective`` within ``slowest``."""
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
    return _told(problem, (train, y), (share, x), tp, what, float(rolled_out[at])), looked_at, fastest, least


def _in_turns(problem: Problem, best: Split) -> list[Split]:
    """All GPUs of the pool that trains, in turns, where that is possible."""
    pool = best.train
    if best.tp not in pool.replicas or pool.why_no_replica(problem.model, problem.work, best.tp):
        return []
    assert pool.training is not None
    gpus = max((n for n in pool.shares(pool.training.copy_gpus) if not n % best.tp), default=0)
    return [colocated(problem, pool, gpus, best.tp)] if gpus and not pool.why_no_training(problem.model, gpus) else []


def colocated(problem: Problem, pool: Pool, gpus: int, tp: int) -> Split:
    """Rollout and training in turns on the same GPUs: responses go on across versions, but nothing runs at once."""
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
