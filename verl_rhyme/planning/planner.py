"""Which GPUs roll out and which train, and which bound of staleness is profitable: Algorithm 1 (StreamRL,
arXiv:2504.15930, section 4.2) for sites, kinds, prices, and a pipeline.

Published: of all ``x + y <= n`` that with the least ``max(P_gen(x), P_train(y))``. Here both are the floors of
:mod:`~verl_rhyme.planning.times`, which have the bound of staleness in them; training has a share of one
pool of GPUs (it waits for its slowest), rollout a share of one pool and further pools as a whole, with one tensor
parallel size; memory and links bound what may be; and what is least is the time of a step, or the price of a trained
sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
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
#: Points at which rollout's seconds are looked at with training of another length.
_BETWEEN = 24
#: Where it is asked how many GPUs would do.
_MOST_NODES = 128


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
        rollout: Pools and GPUs that roll out; the same as those that train where they take turns.
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
    rollout: tuple[tuple[Pool, int], ...]
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
    def arrangement(self) -> tuple[object, ...]:
        """The same for splits that use the same GPUs in the same way."""
        rollout = tuple((pool.name, gpus) for pool, gpus in self.rollout)
        return self.train.name, self.train_gpus, rollout, self.tp, self.colocated

    @property
    def rollout_gpus(self) -> int:
        return sum(gpus for _, gpus in self.rollout)

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
        others: What it was compared with, from the best on: the best of each other arrangement, half of the GPUs for
            each role, and both roles in turns on the same GPUs, where these are possible.
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
            refused.append(_why_none(problem, *arrangement[:4]))
    if not found:
        if looked_at:
            refused.insert(
                0, f"no step takes {slowest:.0f} s or less, the fastest {fastest:.0f} s: allow more, or add GPUs"
            )
        raise NoSplit("no split is possible:\n" + "\n".join(f"- {why}" for why in dict.fromkeys(refused)))
    enough = (1 + WORTH) * least * (1 + 1e-9)  # rounding
    good = (split for split in found if value(split, objective) <= enough)
    best = min(good, key=lambda split: (split.gpus, value(split, objective)))
    others = [split for split in found if split is not best]
    seen = {split.arrangement for split in found}
    others += [split for split in _baselines(problem, best) if split.arrangement not in seen]
    others.sort(key=lambda split: value(split, objective))
    return Plan(problem.max_staleness, best, others, list(dict.fromkeys(refused)), looked_at)


def split(
    problem: Problem, train: tuple[Pool, int], rollout_on: Sequence[tuple[Pool, int]], tp: int, what: str
) -> Split:
    """What comes of a given split, both roles on GPUs of their own.

    Raises:
        NoSplit: It does not fit.
    """
    pool, gpus = train
    assert pool.training is not None
    transfer = problem.links.seconds(pool.site, {each.site for each, _ in rollout_on}, problem.model.bytes)
    whys = [each.why_no_replica(problem.model, problem.work, tp) for each, _ in rollout_on]
    whys.append(pool.why_no_training(problem.model, gpus))
    whys += ["no link between the sites"] if transfer is None else []
    if why := "; ".join(filter(None, whys)):
        raise NoSplit(why)
    after = float(_after(problem, pool.training, np.array(gpus), transfer or 0.0))
    fleet = [(each.replicas[tp], np.array([share / tp])) for each, share in rollout_on]
    rolled_out = float(rollout(fleet, problem.work, problem.max_staleness, after)[0])
    return _told(problem, train, rollout_on, tp, what, rolled_out)


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
    problem: Problem, train: tuple[Pool, int], rollout_on: Sequence[tuple[Pool, int]], tp: int, what: str, floor: float
) -> Split:
    """A split whose rollout allows a step of so many seconds."""
    pool, gpus = train
    assert pool.training is not None
    work = problem.work
    fleet = [(each.replicas[tp], np.array([share / tp])) for each, share in rollout_on]
    trained = pool.training.seconds(gpus, work.trained_tokens)
    transfer = problem.links.seconds(pool.site, {each.site for each, _ in rollout_on}, problem.model.bytes) or 0.0
    seconds = float(_step(problem, pool.training, np.array(floor), trained, transfer))
    hourly, cost = _price([*rollout_on, train], seconds, work)
    return Split(
        what,
        pool,
        gpus,
        tuple((each, share) for each, share in rollout_on if share),
        tp,
        rolled_out=floor,
        slots=float(slots(fleet, work)[0]),
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


#: Where it trains, where it generates with a share of a pool, and which pools generate as a whole beside it; GPUs of a
#: replica; seconds of weights over a link.
_Arrangement = tuple[Pool, Pool, tuple[Pool, ...], int, float]


def _arrangements(problem: Problem, refused: list[str]) -> Iterator[_Arrangement]:
    """What may be; ``refused`` is told why other things may not."""
    able: dict[int, list[Pool]] = {}
    for pool in problem.pools:
        for tp in sorted(pool.replicas):
            if why := pool.why_no_replica(problem.model, problem.work, tp):
                refused.append(why)
            else:
                able.setdefault(tp, []).append(pool)
    if not able and not refused:
        refused.append("no GPUs may generate")
    if not any(pool.training for pool in problem.pools):
        refused.append("no GPUs may train")
    for train in problem.pools:
        if train.training is None:
            continue
        sizes = train.shares(train.training.copy_gpus)
        if why := train.why_no_training(problem.model, max(sizes, default=0)):
            elsewhere = any(pool is not train for pools in able.values() for pool in pools)
            enough = _enough(problem, train, () if elsewhere else train.replicas)
            refused.append(
                why + ("" if enough is None else f"; {enough} GPUs would do" + " for both" * (not elsewhere))
            )
            continue
        for tp, pools in able.items():
            for share in pools:
                others = [pool for pool in pools if pool not in (share, train)]
                refused += [why for pool in others if (why := pool.why_not_whole(tp))]
                others = [pool for pool in others if not pool.why_not_whole(tp)]
                for whole in itertools.chain(*(itertools.combinations(others, n) for n in range(len(others) + 1))):
                    if len({pool.node for pool in (share, *whole)}) > 1:
                        if len(whole) == 1:
                            refused.append(_why_apart(share, *whole))
                        continue
                    sites = {share.site, *(pool.site for pool in whole)}
                    transfer = problem.links.seconds(train.site, sites, problem.model.bytes)
                    if transfer is None:
                        refused.append(f"training at {train.site}, generation at {', '.join(sorted(sites))}: no link")
                    else:
                        yield train, share, whole, tp, transfer


def _why_apart(one: Pool, other: Pool) -> str:
    names = " and ".join(sorted([one.name, other.name]))
    return f"generation on {names} together: their nodes differ, and verl has one number of GPUs in a node"


def _enough(problem: Problem, pool: Pool, tps: Collection[int]) -> int | None:
    """The fewest GPUs of a pool that train, and beside that generate with one of these tensor parallel sizes, if any
    are given; ``None`` where none of :data:`_MOST_NODES` nodes do."""
    assert pool.training is not None
    for gpus in (*range(1, pool.node), *range(pool.node, pool.node * (_MOST_NODES + 1), pool.node)):
        larger = replace(pool, gpus=gpus)
        trains = [y for y in larger.shares(pool.training.copy_gpus) if not larger.why_no_training(problem.model, y)]
        least = [larger.shares(tp)[:1] for tp in tps if not larger.why_no_replica(problem.model, problem.work, tp)]
        if trains and (not tps or any(larger.fits(x, trains[0]) for xs in least for x in xs)):
            return gpus
    return None


def _why_none(problem: Problem, train: Pool, share: Pool, whole: tuple[Pool, ...], tp: int) -> str:
    """Why an arrangement has no split."""
    names = ", ".join(pool.name for pool in (share, *whole))
    what = f"training on {train.name}, generation on {names} with tensor parallel size {tp}"
    if share is train:
        enough = _enough(problem, train, (tp,))
        return f"{what}: its {train.gpus} GPUs do not do for both" + ("" if enough is None else f", {enough} would")
    return f"{what}: {share.name} has no whole node for it"


def _search(
    problem: Problem,
    objective: Objective,
    slowest: float,
    train: Pool,
    share: Pool,
    whole: tuple[Pool, ...],
    tp: int,
    transfer: float,
) -> tuple[Split | None, int, float, float]:
    """The best split of an arrangement (within :data:`WORTH` that of the fewest GPUs), how many were looked at;
    the least seconds of these, and the least of ``objective`` within ``slowest``."""
    assert train.training is not None
    model, work = problem.model, problem.work
    ys = [y for y in train.shares(train.training.copy_gpus) if not train.why_no_training(model, y)]
    xs = [x for x in share.shares(tp) if not whole or x % share.node == 0]
    if not ys or not xs:
        return None, 0, np.inf, np.inf
    fleet = [(share.replicas[tp], np.array(xs) / tp)]
    fleet += [(pool.replicas[tp], np.full(len(xs), pool.gpus // tp)) for pool in whole]
    rolled_out = _rolled_out(fleet, problem, _after(problem, train.training, np.array(ys), transfer))  # [ys, xs]
    trained = train.training.seconds(ys, work.trained_tokens)[:, None]
    seconds = _step(problem, train.training, rolled_out, trained, transfer)
    if share is train:
        seconds = np.where([[train.fits(x, y) for x in xs] for y in ys], seconds, np.inf)
    looked_at, fastest = int(np.isfinite(seconds).sum()), float(seconds.min())
    possible = np.isfinite(seconds) & (seconds <= slowest)
    if not possible.any():
        return None, looked_at, fastest, np.inf
    gpus = np.add.outer(ys, xs) + sum(pool.gpus for pool in whole)
    worth = seconds
    if objective == "cost":
        price = np.add.outer(np.array(ys) * (train.price or 0.0), np.array(xs) * (share.price or 0.0))
        price = price + sum(pool.gpus * (pool.price or 0.0) for pool in whole)
        worth = np.where(possible, seconds, 0.0) * price / 3600 / work.samples
    worth = np.where(possible, worth, np.inf)
    least = float(worth.min())
    good = worth <= (1 + WORTH) * least
    fewest = np.where(good, gpus, np.inf)
    at = np.unravel_index(np.argmin(np.where(fewest == fewest.min(), worth, np.inf)), worth.shape)
    y, x = ys[int(at[0])], xs[int(at[1])]
    rollout_on = [(share, x), *((pool, pool.gpus) for pool in whole)]
    what = "one pool" if {train, *(pool for pool, _ in rollout_on)} == {train} else "two pools"
    what = "pools together" if whole else what
    return _told(problem, (train, y), rollout_on, tp, what, float(rolled_out[at])), looked_at, fastest, least


def _rolled_out(fleet: list, problem: Problem, after: Floats) -> Floats:
    """float64[len(after), counts]: rollout's floor with training of each length."""
    points = np.unique(after)
    if len(points) > _BETWEEN:
        points = np.geomspace(points[0], points[-1], _BETWEEN)
    rows = np.stack([rollout(fleet, problem.work, problem.max_staleness, point) for point in points])
    if len(points) == 1:
        return np.broadcast_to(rows, (len(after), rows.shape[1]))
    at = np.clip(np.searchsorted(points, after) - 1, 0, len(points) - 2)
    part = ((after - points[at]) / (points[at + 1] - points[at])).clip(0, 1)[:, None]
    return np.where(part > 0, (1 - part) * rows[at] + part * rows[at + 1], rows[at])


def _baselines(problem: Problem, best: Split) -> Iterator[Split]:
    """What needs no planner: half of the GPUs each, and all of them in turns."""
    pool = best.train
    if best.tp not in pool.replicas or pool.why_no_replica(problem.model, problem.work, best.tp):
        return
    assert pool.training is not None
    half = max((n for n in pool.shares(pool.training.copy_gpus) if 2 * n <= pool.gpus), default=0)
    other = max((n for n in pool.shares(best.tp) if pool.fits(n, half)), default=0)
    if half and other and not pool.why_no_training(problem.model, half):
        yield split(problem, (pool, half), [(pool, other)], best.tp, f"half each of {pool.name}")
    gpus = max((n for n in pool.shares(pool.training.copy_gpus) if not n % best.tp), default=0)
    if gpus and not pool.why_no_training(problem.model, gpus):
        yield colocated(problem, pool, gpus, best.tp)


def colocated(problem: Problem, pool: Pool, gpus: int, tp: int) -> Split:
    """Rollout and training in turns on the same GPUs: responses go on across versions, but nothing runs at once."""
    assert pool.training is not None
    work, fleet = problem.work, [(pool.replicas[tp], np.array([gpus / tp]))]
    rolled_out = float(rollout(fleet, work, problem.max_staleness)[0])
    trained = float(pool.training.seconds(gpus, work.trained_tokens)) + problem.weights
    seconds = rolled_out + trained
    hourly, cost = _price([(pool, gpus)], seconds, work)
    return Split(
        f"in turns on {pool.name}",
        pool,
        gpus,
        ((pool, gpus),),
        tp,
        rolled_out=rolled_out,
        slots=float(slots(fleet, work)[0]),
        trained=trained,
        transfer=0.0,
        step=seconds,
        tokens_per_s=work.tokens / seconds,
        hourly=hourly,
        cost=cost,
        colocated=True,
    )
