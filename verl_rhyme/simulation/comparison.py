"""Presets compared in virtual time, for the shape of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from statistics import fmean

from verl_rhyme.planning import plan_file
from verl_rhyme.planning.planner import NoSplit, Split, plan
from verl_rhyme.planning.shape import OVERHEAD, SOURCE, Shape
from verl_rhyme.planning.typed_yaml import ClusterError
from verl_rhyme.simulation import cluster_file
from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Step

#: Preset, bound on staleness and whether engines are separate, of each row; the simplest first.
ROWS = tuple(
    (preset, bound, separate)
    for separate in (False, True)
    for preset, bound in (("off", None), ("histospec", None), ("full", 0), ("full", 1), ("full", 2))
)
#: Training steps of an epoch and epochs. Figures are of the first cycle of three steps at k = 0, and of twelve steps
#: after two epochs; prompts in flight and the end of the data then do not matter.
STEPS, EPOCHS = 4, 6
FIRST, WARM, COUNTED = 3, 8, 12
#: Least speed over stock verl's that is worth a preset, and the share of the best speed that a simpler one may miss.
WORTH, NEAR = 1.05, 0.05


@dataclass(frozen=True)
class Row:
    """A preset's figures; those without ``_first`` are of later epochs."""

    preset: str
    max_staleness: int | None  # k; None: verl's schedule
    separate: bool
    step_first_s: float
    step_s: float
    rollout: float  # share of the step in which the trainer waits for samples
    staleness_mean: float
    staleness_max: int
    tokens_per_s: float  # trained response tokens
    split: Split | None  # of separate engines


@dataclass(frozen=True)
class Refused:
    """A row that is not possible."""

    preset: str
    max_staleness: int | None
    separate: bool
    reason: str


def compare(shape: Shape, processes: int) -> Iterator[Row | Refused]:
    """Yield the rows, in order, as soon as they are simulated. Raises ClusterError for an impossible shape."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(_row, shape), ROWS)


def _row(shape: Shape, which: tuple[str, int | None, bool]) -> Row | Refused:
    preset, bound, separate = which
    drafts = preset != "off"
    split, gpus = None, (shape.gpus, shape.gpus)
    if separate:
        try:
            split = _split(shape, bound, drafts)
        except NoSplit as error:
            return Refused(preset, bound, separate, str(error).rpartition("\n- ")[2])
        gpus = split.rollout_gpus, split.train_gpus
    parts = shape.slices(gpus[0])
    tree = shape.cluster_file(*gpus, parts, epochs=EPOCHS, steps=STEPS)
    tree |= {"preset": preset, "topology": "separate" if separate else "colocated"}
    tree |= {"max_staleness": bound} if bound is not None else {}
    tree["drafts"] = {"acceptance": list(shape.acceptance) if drafts else [1.0], "overhead": OVERHEAD}
    loaded = cluster_file.of_tree(tree, SOURCE)
    steps = Simulation(loaded.scenario, loaded.prompts, loaded.updates).run(steps=WARM + COUNTED)
    later = steps[WARM:]
    return Row(
        preset,
        bound,
        separate,
        step_first_s=_seconds(steps[:FIRST]),
        step_s=_seconds(later),
        rollout=sum(step.idle_s for step in later) / (later[-1].ended - later[0].began),
        staleness_mean=fmean(step.staleness_mean for step in later),
        staleness_max=max(step.staleness_max for step in later),
        tokens_per_s=parts * sum(step.tokens for step in later) / (later[-1].ended - later[0].began),
        split=split,
    )


def _seconds(steps: Sequence[Step]) -> float:
    return (steps[-1].ended - steps[0].began) / len(steps)


def _split(shape: Shape, bound: int | None, drafts: bool) -> Split:
    """Return the planner's split of the GPUs; verl's ``separate_async`` has its own bound."""
    bound = cluster_file.VERLS_STALENESS if bound is None else bound
    tree = shape.plan_file(bound, shape.acceptance[-1] if drafts else 1.0)
    return plan(plan_file.of_tree(tree, SOURCE).problem).best


def chosen(rows: Sequence[Row | Refused]) -> Row | None:
    """Return a row near the best speed, the one with the lowest staleness, the simplest of these.

    ``None`` if none is worth it, next to stock verl at its best.
    """
    possible = [row for row in rows if isinstance(row, Row)]
    if not possible:
        raise ClusterError(f"{SOURCE}: no preset is possible")
    stock = max(row.tokens_per_s for row in possible if row.preset == "off")
    ours = [row for row in possible if row.preset != "off" and row.tokens_per_s >= WORTH * stock]
    best = max((row.tokens_per_s for row in ours), default=0.0)
    near = (row for row in ours if row.tokens_per_s >= (1 - NEAR) * best)
    return min(near, key=lambda row: row.staleness_max, default=None)
