"""Which lengths does a schedule train? A simulation with the real scheduler and a policy that does not move.

    python -m benchmarks.selection [--json] [--quick] [--all]

Each prompt is loaded once. Lengths are log-normal, between prompts and within them. An engine makes a token a step for
each running request. A regenerated response keeps its length, since its noise is the same; ``fresh`` draws another, to
show what the noise prevents. ``shift`` is the mean trained length against the mean of the first draws of the same
prompts. With a filter (DAPO) both count only the groups that it keeps at their first draws, as a synchronous schedule
does. ``token-mean`` and ``norm`` are what a loss average adds: the mean length of the response that a token of the
gradient belongs to, against that of equal weights; ``norm`` is ``seq-mean-token-sum-norm`` without a factor. ``steps``
are decoding steps without drafts, against those of one batch at a time. ``--all`` runs the product of presets, bounds,
devices, units and filters; without it the table of ``docs/pipeline.md`` is printed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine import print_row
from verl_rhyme.config import config_tree
from verl_rhyme.config.presets import PIPELINES, tree
from verl_rhyme.config.scheduling import training_order
from verl_rhyme.scheduling.admission import priority
from verl_rhyme.scheduling.rules import Rules, of_options
from verl_rhyme.scheduling.scheduler import Scheduler

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

#: Prompts of a batch, samples of a prompt, slots of the engine, responses of a micro-batch.
BATCH, SAMPLES, SLOTS, MICRO = 16, 8, 128, 8
#: Spread of the logarithm of lengths between prompts and within them, and the median.
BETWEEN, WITHIN, MEDIAN = 0.6, 0.6, 200.0
#: Decoding steps that training takes on separate engines.
TRAINING = 200
NORM = "seq-mean-token-sum-norm"

_Sample = tuple[str, int]


class Prompts:
    """Lengths and scores of the draws of each sample.

    Args:
        count: Number of prompts.
        seed: Seed of all draws.
    """

    def __init__(self, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.hard = rng.normal(size=count)
        self.scale = MEDIAN * np.exp(BETWEEN * self.hard)
        self._rng = rng
        self.first = [[self.draw(row) for _ in range(SAMPLES)] for row in range(count)]
        self.expected = [np.mean([self.draw(row)[0] for _ in range(4)]) for row in range(count)]

    def draw(self, row: int) -> tuple[int, bool]:
        """Return a response's length and whether it is right; hard prompts and long responses are so less often."""
        within = self._rng.normal()
        right = self._rng.normal() > self.hard[row] + within
        return max(1, round(self.scale[row] * np.exp(WITHIN * within))), bool(right)

    def mixed(self, row: int) -> bool:
        """Whether the filter keeps a prompt's group at its first draws."""
        return 0 < sum(right for _, right in self.first[row]) < SAMPLES


@dataclass
class Engine:
    """Slots that make a token a step each; the queue is in the scheduler's order."""

    slots: int
    now: int = 0
    made: int = 0
    queue: list[tuple[int, int, _Sample, int]] = field(default_factory=list)  # priority, turn, sample, tokens left
    running: list[tuple[int, int, _Sample]] = field(default_factory=list)  # end, turn, sample
    turn: int = 0

    def add(self, place: int, sample: _Sample, left: int) -> None:
        self.turn += 1
        heapq.heappush(self.queue, (place, self.turn, sample, left))

    def advance(self, limit: int | None = None) -> _Sample | None:
        """Run until the next response ends, which is returned, or until ``limit`` (a time)."""
        while self.queue and len(self.running) < self.slots:
            _, turn, sample, left = heapq.heappop(self.queue)
            heapq.heappush(self.running, (self.now + left, turn, sample))
        if not self.running or (limit is not None and self.running[0][0] > limit):
            self.now = self.now if limit is None else limit
            return None
        self.now, _, sample = heapq.heappop(self.running)
        return sample

    def stop(self) -> list[tuple[_Sample, int]]:
        """Return the samples that were running or queued, with the tokens they lacked."""
        left = [(sample, end - self.now) for end, _, sample in self.running]
        left += [(sample, tokens) for _, _, sample, tokens in self.queue]
        self.running, self.queue = [], []
        return left

    def remove(self, sample: _Sample) -> None:
        self.running = [each for each in self.running if each[2] != sample]
        self.queue = [each for each in self.queue if each[2] != sample]
        heapq.heapify(self.running)
        heapq.heapify(self.queue)


@dataclass
class World:
    """An engine and a trainer around a scheduler.

    Attributes:
        fresh: Whether a regenerated response has a new length.
        filtered: Whether groups with equal scores are dropped, and replaced by other prompts.
        restarts: Whether an interrupted response cannot continue from its tokens (penalties, grammars).
    """

    rules: Rules
    prompts: Prompts
    steps: int
    fresh: bool = False
    filtered: bool = False
    restarts: bool = False

    def __post_init__(self) -> None:
        self.scheduler, self.engine = Scheduler(self.rules), Engine(SLOTS)
        self.drawn: dict[_Sample, tuple[int, bool]] = {}  # of the running or finished attempt
        self.made: dict[_Sample, int] = {}  # tokens kept from earlier attempts
        self.first: dict[_Sample, int] = {}  # version of the oldest token
        self.loaded: list[int] = []

    def run(self) -> list[list[tuple[_Sample, int]]]:
        """Return the trained samples of each batch with their lengths."""
        batches = []
        for version in range(self.steps):
            self._publish(version)
            self._until(None)
            if self.rules.stops:
                self._interrupt()
            collected = self.scheduler.collect()
            batches.append(list(zip(collected.samples, collected.lengths, strict=True)))
            if not self.rules.stops:
                end = self.engine.now + TRAINING
                self._until(end)
        return batches

    def _publish(self, version: int) -> None:
        if version and not (self.rules.stops or self.rules.finishes):
            self._interrupt()
        for sample in self.scheduler.begin(version, self.steps - version):
            self.engine.remove(sample)
            self._forget(sample)

    def _interrupt(self) -> None:
        for sample, left in self.engine.stop():
            tokens = self.drawn[sample][0] - left
            if tokens and self.rules.continues:  # in place
                if self.restarts:
                    self._forget(sample)
                    self.first[sample] = self.scheduler.version + 1
                    self._draw(sample)
                    left = self.drawn[sample][0]
                self.engine.add(self._place(sample), sample, left)
                continue
            tokens = 0 if self.restarts else tokens
            if not self.scheduler.interrupt(*sample, tokens, self.first[sample] if tokens else None) or not tokens:
                self._forget(sample)
            else:
                self.made[sample] = tokens

    def _forget(self, sample: _Sample) -> None:
        self.made.pop(sample, None)
        self.first.pop(sample, None)

    def _until(self, end: int | None) -> None:
        """Run until a batch can be collected, or until a time."""
        scheduler = self.scheduler
        while True:
            while count := scheduler.loadable():
                rows = range(scheduler.ledger.loaded, scheduler.ledger.loaded + count)
                for row in rows:
                    scheduler.load(str(row), SAMPLES)
                for row in rows:
                    scheduler.expect(str(row), self.prompts.expected[row])
                    self.loaded.append(row)
            for sample in scheduler.dispatch():
                self._start(sample)
            if end is None and scheduler.has_batch() and (self.rules.stops or scheduler.ready()):
                return
            ended = self.engine.advance(end)
            if ended is None:
                assert end is not None, "the scheduler is stuck"
                return
            self._end(ended)

    def _start(self, sample: _Sample) -> None:
        self._draw(sample)
        self.first.setdefault(sample, self.scheduler.version)
        self.engine.add(self._place(sample), sample, self.drawn[sample][0] - self.made.get(sample, 0))

    def _draw(self, sample: _Sample) -> None:
        uid, number = sample
        if sample not in self.drawn:
            self.drawn[sample] = self.prompts.first[int(uid)][number]
        elif self.fresh and sample not in self.made:
            self.drawn[sample] = self.prompts.draw(int(uid))

    def _place(self, sample: _Sample) -> int:
        return priority(self.rules, self.scheduler.ledger.prompt(sample[0]))

    def _end(self, sample: _Sample) -> None:
        uid, number = sample
        trainable = self.scheduler.generate(uid, number, self.drawn[sample][0], self.first[sample])
        self._forget(sample)
        if not trainable:
            return
        self.scheduler.finish(uid, number)
        if not self.filtered or not self.scheduler.ledger.prompt(uid).complete("finished"):
            return
        if len({self.drawn[uid, number][1] for number in range(SAMPLES)}) == 1:
            self.scheduler.drop(uid)


def weighted_length(batches: list[list[int]], loss_agg_mode: str) -> float:
    """Return the mean length of the response that a token of the gradient belongs to, against equal weights."""
    rng, weighted = np.random.default_rng(0), np.zeros(2)
    for batch in batches:
        lengths = np.array(batch, dtype=float)  # shortest first
        if training_order(None, 1, loss_agg_mode) == 0:
            lengths = rng.permutation(lengths)
        parts = [lengths] if loss_agg_mode == "token-mean" else np.split(lengths, range(MICRO, len(lengths), MICRO))
        for part in parts:
            divisor = part.sum() if loss_agg_mode == "token-mean" else part.max()
            weighted += np.array([(part**2).sum(), part.sum()]) / divisor
    every = np.concatenate([np.array(batch, dtype=float) for batch in batches])
    return float(weighted[0] / weighted[1] / ((every**2).sum() / every.sum()) - 1)


def measure(rules: Rules, steps: int, seeds: int, **how: bool) -> dict[str, float]:
    """Return the means over ``seeds`` runs, and the standard error of ``shift``."""
    rows = []
    for seed in range(seeds):
        prompts = Prompts(steps * BATCH * (6 if how.get("filtered") else 1) + 8 * BATCH, seed)
        world = World(rules, prompts, steps, **how)
        batches = world.run()
        lengths = [[length for _, length in batch] for batch in batches]
        kept = [row for row in world.loaded if not world.filtered or prompts.mixed(row)]
        wanted = np.mean([length for row in kept for length, _ in prompts.first[row]])
        trained = np.concatenate(lengths)
        rows.append(
            (
                trained.mean() / wanted - 1,
                weighted_length(lengths, "token-mean"),
                weighted_length(lengths, NORM),
                world.engine.now / trained.sum(),
            )
        )
    means = np.mean(rows, axis=0)
    error = np.std([row[0] for row in rows], ddof=1) / np.sqrt(seeds) if seeds > 1 else 0.0
    names = ("shift", "token-mean", "norm", "steps")
    return {**{name: float(value) for name, value in zip(names, means, strict=True)}, "error": float(error)}


def rules(preset: str, changes: Mapping[str, Any] | None = None, separate: bool = False, unit: Any = "group") -> Rules:
    """Return the rules of a preset with changed options.

    Raises:
        ValueError: The options contradict each other.
    """
    rhyme = config_tree.parse(tree(preset, changes))
    assert rhyme.max_staleness is not None
    return of_options(
        rhyme.scheduling,
        rhyme.max_staleness,
        separate=separate,
        batch_prompts=BATCH,
        samples=SAMPLES,
        unit=unit,
        relayed=separate,
        drafts=rhyme.drafting.enable,
    )


#: Options of each preset that the product adds, one at a time.
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"drafting.enable": False},
    {"scheduling.take": "loaded"},
    {"scheduling.take": "finished"},
    {"scheduling.refill": "always"},
    {"scheduling.refill": "when_empty"},
    {"scheduling.in_flight": 1.0},
    {"scheduling.in_flight": 1.5},
    {"scheduling.in_flight": 2.0},
    {"scheduling.in_flight": None},
    {"scheduling.put_off": 0.25},
    {"scheduling.at_version": "regenerate"},
    {"scheduling.at_version": "finish"},
)


def product() -> Iterator[tuple[dict[str, Any], Rules, dict[str, bool]]]:
    """Yield each combination that is allowed: its name, rules and world; equal rules once."""
    seen = set()
    for preset, k, separate, unit, changes, filtered, restarts in itertools.product(
        PIPELINES, (0, 1, 2, 4), (False, True), ("group", "trajectory"), CHANGES, (False, True), (False, True)
    ):
        try:
            found = rules(preset, {"max_staleness": k, **changes}, separate, unit)
        except ValueError:
            continue
        if (filtered and unit == "trajectory") or (found, filtered, restarts) in seen:  # the filter compares a group
            continue
        seen.add((found, filtered, restarts))
        name = {"preset": preset, "k": k, "separate": separate, "unit": unit, **changes}
        yield name, found, {"filtered": filtered, "restarts": restarts}


#: Rows of the table in ``docs/pipeline.md``: name, preset, options, separate engines.
TABLE: tuple[tuple[str, str, dict[str, Any], bool], ...] = (
    ("one batch at a time", "full", {"max_staleness": 0, "scheduling.in_flight": 1.0}, False),
    ("`full`, k = 0", "full", {"max_staleness": 0}, False),
    ("tail batching, k = 0", "full", {"max_staleness": 0, "scheduling.put_off": 0.25}, False),
    ("`sorted`, k = 0", "sorted", {}, False),
    ("`sorted`, k = 1", "sorted", {"max_staleness": 1}, False),
    ("`full`, k = 1", "full", {}, False),
    ("`full`, k = 1, separate", "full", {}, True),
    ("the same, `at_version=regenerate`", "full", {"scheduling.at_version": "regenerate"}, True),
    ("`full`, k = 4, separate", "full", {"max_staleness": 4}, True),
    ("`stream`, k = 1, separate", "stream", {}, True),
)


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="few training steps")] = False,
    every: Annotated[bool, typer.Option("--all", help="the product of all options")] = False,
) -> None:
    """Simulate and print."""
    steps, seeds = (12, 2) if quick else (48, 6)
    if every:
        for name, found, how in product():
            print_row({"benchmark": "selection", **name, **how, **_rounded(measure(found, steps, 1, **how))}, as_json)
        return
    one = 0.0
    for label, preset, changes, separate in TABLE:
        group, single = (rules(preset, changes, separate, unit) for unit in ("group", "trajectory"))
        row = measure(group, steps, seeds)
        one = one or row["steps"]
        shown = {
            "benchmark": "selection",
            "schedule": label,
            **{**row, "steps": row["steps"] / one},
            "filter": measure(group, steps, seeds, filtered=True)["shift"],
            "fresh": (fresh := measure(group, steps, seeds, fresh=True))["shift"],
            "fresh_error": fresh["error"],
            "fresh_trajectories": measure(single, steps, seeds, fresh=True)["shift"],
            "fresh_restarts": measure(group, steps, seeds, fresh=True, restarts=True)["shift"],
        }
        print_row(_rounded(shown), as_json)


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) + 0.0 if isinstance(value, float) else value for name, value in row.items()}


if __name__ == "__main__":
    app()
