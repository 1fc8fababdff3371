"""Speed of drafts by rows for mixtures of experts and dense models, by the roofline of an H100.

    python -m benchmarks.mixtures [--json] [--quick]

The real adaptive drafter replays the last epoch of a trace with a constant number of rows, after the epochs before it.
A step takes the seconds of the cost model, with contexts of 3,000 tokens: weights and experts that its tokens choose
independently, and the measured host time of a step with drafts. ``of_known_price`` compares with the same drafter that
knows these seconds from the start. Nothing is timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
import typer

from benchmarks import traces
from benchmarks.arms import Rhyme
from benchmarks.machine import print_row
from benchmarks.replay import replay
from benchmarks.traces import Response
from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import cost
from verl_rhyme.drafting.adaptive import AdaptiveDrafter
from verl_rhyme.drafting.weighing import Weighing
from verl_rhyme.planning import roofline
from verl_rhyme.planning.architecture import PUBLISHED, Architecture
from verl_rhyme.planning.cost import StepCost

CONTEXT = 3000
#: Models and tensor parallel sizes.
REPLICAS = (
    *(("Qwen/Qwen3-30B-A3B", 1), ("Qwen/Qwen3-30B-A3B", 4), ("zai-org/GLM-4.5-Air", 4), ("openai/gpt-oss-20b", 1)),
    *(("Qwen/Qwen3-8B", 1), ("Qwen/Qwen2.5-32B", 4)),
)
#: Traces of which an epoch fills wide batches, and their entropies in nats per token.
TRACES = {"qwen2-t1": 0.22, "countdown": 0.43}


@dataclass
class Clock:
    """Seconds of each step, and of the same steps without drafts."""

    cost: StepCost
    seconds: float = 0.0
    stock: float = 0.0
    rows: int = 0

    def of(self, rows: int, drafted: int) -> float:
        return self.cost.seconds(rows, CONTEXT * rows, drafted)

    def __call__(self, rows: int, drafted: int) -> float:
        seconds = self.of(rows, drafted)
        self.seconds += seconds
        self.stock += self.of(rows, 0)
        self.rows += rows
        return seconds


class KnownCost(cost.StepCost):
    """The price of a clock."""

    ready = True

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def room(self, rows: int) -> int:
        return 1 << 12

    def prices(self, rows: int, most: int) -> np.ndarray:
        return np.array([self._clock.of(rows, drafted) for drafted in range(most + 1)])


class Informed(Weighing):
    """Weighs by the price of a clock, without experiments."""

    def __init__(self, longest: int, clock: Clock) -> None:
        super().__init__(longest, enabled=True)
        self.cost = KnownCost(clock)

    def _experiment(self, rows: int) -> int:
        return 0

    def _omits(self, rows: int, gain: float) -> bool:
        return False


def speed(model: Architecture, tp: int, past: list, now: list[Response], rows: int, known: bool) -> float:
    """Return tokens per second over those of the same steps without drafts."""
    clock = Clock(roofline.replica(model, roofline.GPUS["H100"], tp).step)
    experts = model.mixture.experts if model.mixture else None
    arm = Rhyme(DraftingConfig(), make=partial(AdaptiveDrafter, experts=experts), slots=rows)
    if known:
        arm.policy.weighing = Informed(DraftingConfig().max_tokens, clock)  # type: ignore[attr-defined]
    for step in past:
        arm.histories.record(step)
    [tally] = replay([now], arm, rows, clock=clock).values()
    return tally.emitted / clock.seconds / (clock.rows / clock.stock)


def main(
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
    quick: Annotated[bool, typer.Option(help="one model, one trace, two numbers of rows")] = False,
) -> None:
    """Print the speed over no drafts by model, trace and rows."""
    for trace in [*TRACES][: 1 if quick else None]:
        steps = traces.load(traces.FOLDER / f"{trace}.parquet")
        last = steps[-1][0].epoch
        past = [step for step in steps if step[0].epoch < last]
        whole = [response for step in steps if step[0].epoch == last for response in step if len(response.tokens) > 1]
        for name, tp in REPLICAS[: 1 if quick else None]:
            model = Architecture.read(PUBLISHED[name])
            for rows in (4, 64) if quick else (1, 4, 16, 64, 256):
                now = whole[: max(32, 4 * rows)]
                ours, known = (speed(model, tp, past, now, rows, each) for each in (False, True))
                row = {
                    "benchmark": "mixtures",
                    "model": name,
                    "tp": tp,
                    "trace": trace,
                    "entropy": TRACES[trace],
                    "rows": rows,
                    "speed": round(ours, 3),
                    "of_known_price": round(ours / known, 3),
                }
                text = f"{trace:10} {name:22} TP{tp} {rows:4} rows: {ours:.2f} ({ours / known:.3f} of the known price)"
                print_row(row, as_json, text)


if __name__ == "__main__":
    typer.run(main)
