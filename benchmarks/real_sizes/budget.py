"""Compare the draft tokens granted to a batch with the profitable ones, at a real vocabulary.

    python -m benchmarks.real_sizes budget [--json] [--quick]

The real adaptive drafter replays responses of the last two epochs of four traces with a constant number of rows. It
learns the step cost from a cost model. It runs without bounds except 32 tokens per request (profitable drafts), with
the earlier bounds (1 GiB of vLLM's float32 tables, the longest draft first), and with the current bounds. A further
case has certain drafts: every request regenerates an earlier response. Nothing is timed, so figures have no spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from verl_rhyme.drafting.bounds import logits_budget, step_budget
from verl_rhyme.drafting.cost import StepCost
from verl_rhyme.drafting.policy import DecodeStep

VOCABULARY = 151_936
LONGEST = 32
#: verl's default of ``max_num_batched_tokens``.
STEP_TOKENS = 8192
TRACES = ("qwen2-t1", "qwen2-t06", "llama-t1", "qwen2-hard")
FIRST = 4  # first replayed epoch, from 0

Bounds = Callable[[int], tuple[int, int]]


def gpu(rows: int, drafted: int) -> float:
    """Return estimated seconds of a decoding step: roofline of an 8B model in bf16 on an H100, contexts of 1k tokens.

    5 ms outside the kernels; weights and KV cache at 3.35 TB/s; arithmetic at half of the peak, overlapped with the
    memory reads.
    """
    reading = 16e9 / 3.35e12 + rows * 1024 * 131_072 / 3.35e12
    return 5e-3 + max(reading, 16e9 * (rows + drafted) / 495e12)


def cpu(rows: int, drafted: int) -> float:
    """Return seconds of a step of the tiny model on one CPU core, where a row of logits takes 1.8 ms plus its draw."""
    return 3e-3 + 2.7e-3 * rows + 2.5e-3 * drafted + (2e-3 if drafted else 0.0)


COSTS = {"GPU (roofline)": gpu, "CPU": cpu}


def unbounded(rows: int) -> tuple[int, int]:
    """Return no bounds except the longest draft: profitable drafts."""
    return LONGEST, 1 << 30


def before(rows: int, memory: int = 1 << 30) -> tuple[int, int]:
    """Return the earlier bounds: the longest draft that fits for all, then the remainder for the batch."""
    tables = memory // (4 * VOCABULARY)
    longest = max(0, min(LONGEST, (tables - 3 * rows) // (2 + 3 * rows)))
    return longest, max(0, min((tables - 3 * rows * (longest + 1)) // 2, STEP_TOKENS - rows))


def after(rows: int, itemsize: int = 2) -> tuple[int, int]:
    """Return the current bounds without waiting prompts."""
    logits = logits_budget(VOCABULARY, rows, rows, DraftingConfig().logits_memory, itemsize)
    return LONGEST, min(logits, step_budget(STEP_TOKENS, rows, False))


@dataclass
class Figures:
    """Figures of the steps with at least nine tenths of the slots in use."""

    granted: list[int]
    bound: int = 0
    emitted: int = 0
    seconds: float = 0.0


class GrantRecorder(Rhyme):
    """Our drafter with a record of its grants; ``certain``: every response was generated before."""

    def __init__(self, rows: int, certain: bool, clock: Callable[[int, int], float]) -> None:
        super().__init__(DraftingConfig(max_tokens=LONGEST), slots=rows)
        self._rows, self._certain, self._clock = rows, certain, clock
        self.figures = Figures([])
        self._learn(self.policy.cost)  # type: ignore[attr-defined]

    def _learn(self, cost: StepCost) -> None:
        """Learn the cost of steps of this width, with few and with many drafts."""
        rng = np.random.default_rng(0)
        for drafted in (rng.integers(0, 9, 512) * self._rows * rng.random(512)).astype(int).tolist():
            cost.observe(self._rows, drafted, self._clock(self._rows, drafted))

    def start(self, response: Response) -> None:
        self.policy.start(response.id, response.key, response.tokens if self._certain else None)

    def step(self, responses: Sequence[Response], done: DecodeStep) -> list[list[int]]:
        drafts = self.policy.step(done)
        if len(responses) >= 0.9 * self._rows:
            granted = sum(map(len, drafts))
            self.figures.granted.append(granted)
            self.figures.bound += granted >= done.budget
            self.figures.emitted += len(responses) + sum(done.accepted)
            self.figures.seconds += self._clock(len(responses), sum(done.drafted))
        return drafts

    def end_step(self, responses: Sequence[Response]) -> None:
        pass


def drive(
    rows: int, certain: bool, clock: Callable[[int, int], float], bounds: Bounds, past: list, now: list
) -> Figures:
    """Run one arm: ``past`` is history by step; enough responses of ``now`` fill ``rows`` slots several times."""
    arm = GrantRecorder(rows, certain, clock)
    if not certain:
        for step in past:
            arm.histories.record(step)
    count = min(len(now), max(256, 6 * rows))
    replay([now[:count]], arm, rows, bounds, clock)
    return arm.figures


def responses() -> tuple[list[list[Response]], list[Response]]:
    """Return the steps of the first four epochs, and the responses of the last two with a prompt's samples together."""
    past, now = [], []
    for name in TRACES:
        for step in traces.load(traces.FOLDER / f"{name}.parquet"):
            named = [replace(r, id=f"{name}-{r.id}") for r in step if len(r.tokens) > 1]
            if named[0].epoch < FIRST:
                past.append(named)
            else:
                now.extend(named)
    return past, now


def main(
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
    quick: Annotated[bool, typer.Option(help="two batch sizes")] = False,
    rows: Annotated[list[int] | None, typer.Option(help="batch sizes; default: 8 to 1024")] = None,
) -> None:
    """Print granted tokens per step, and the speed by the cost model, by rows, cost and kind of draft."""
    past, now = responses()
    for width in rows or ([8, 64] if quick else [8, 16, 32, 64, 128, 256, 384, 512, 1024]):
        for cost, clock in COSTS.items():
            itemsize = 4 if clock is cpu else 2
            for certain in (False, True):
                arms: dict[str, Bounds] = {
                    "pays": unbounded,
                    "before": before,
                    "after": partial(after, itemsize=itemsize),
                }
                found = {name: drive(width, certain, clock, bounds, past, now) for name, bounds in arms.items()}
                speeds = {name: f.emitted / f.seconds for name, f in found.items()}
                plain = width / clock(width, 0)
                for name, figures in found.items():
                    granted = np.array(figures.granted)
                    row = {
                        "benchmark": "real_sizes budget",
                        "arm": name,
                        "drafts": "certain" if certain else "real traces",
                        "cost": cost,
                        "vocabulary": VOCABULARY,
                        "rows": width,
                        "granted_a_step": round(float(granted.mean()), 1),
                        "granted_at_most": int(granted.max()),
                        "longest_draft": arms[name](width)[0],
                        "budget": None if name == "pays" else arms[name](width)[1],
                        "steps": len(granted),
                        "steps_at_the_budget": figures.bound,
                        "speed_to_no_drafts": round(speeds[name] / plain, 3),
                    }
                    print_row(row, as_json)
