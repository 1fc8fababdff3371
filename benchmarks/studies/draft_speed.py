"""Speed and memory of drafting against the size of a prompt's history.

    python -m benchmarks.studies.draft_speed [--json] [--quick]

Histories are a trace's responses with one token in twenty replaced; 32 requests follow further such responses. Every
arm has the same histories and the same requests, in rounds that take turns. A request's step is all that the drafter
does for it: taking in what was sampled, learning, drafting.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import numpy as np
import typer

from benchmarks import traces
from benchmarks.arms import Arctic, Rhyme
from benchmarks.draft_quality import available
from benchmarks.machine import print_row
from benchmarks.replay import Arm, replay
from benchmarks.traces import Response
from verl_rhyme.config import DraftingConfig
from verl_rhyme.history import suffix_index

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

KEY = b"speed".ljust(16, b"\0")
REQUESTS, REPLACED = 32, 0.05


def responses(rng: np.random.Generator, source: list[Response], tokens: int, step: int) -> list[Response]:
    """About ``tokens`` tokens of altered responses to one prompt."""
    found: list[Response] = []
    total = 0
    vocabulary = 1 + max(int(r.tokens.max()) for r in source)
    while total < tokens:
        original = source[rng.integers(len(source))]
        altered = np.where(
            rng.random(len(original.tokens)) < REPLACED,
            rng.integers(0, vocabulary, len(original.tokens)),
            original.tokens,
        ).astype(np.int32)
        logprobs = np.full(len(altered), -0.1, np.float32)
        name = f"{step}-{len(found)}-{rng.integers(1 << 40)}"
        found.append(Response(name, step, step, KEY, len(found), 1.0, original.prompt, altered, logprobs))
        total += len(altered)
    return found


def rhyme(history: list[Response], floor: float) -> Rhyme:
    """Our drafter, knowing a history."""
    arm = Rhyme(DraftingConfig(floor=floor, weigh_cost=False), epochs=1 << 30)
    arm.end_step(history)
    return arm


def arctic(history: list[Response]) -> Arctic:
    """arctic's cache, given a history as its adapter would have: as responses it saw."""
    arm = Arctic(1.0, cached=(1 << 31) - 1)
    for response in history:
        arm.start(response)
        arm.cache.add_active_response(response.id, response.tokens)
        arm.finish(response)
    return arm


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="two sizes, one round")] = False,
    trace: str = "qwen2-t1",
) -> None:
    """Measure every arm at growing histories."""
    sizes = [1_000, 16_000] if quick else [1_000, 4_000, 16_000, 65_000, 262_000]
    rounds = 1 if quick else 5
    source = [r for step in traces.load(traces.FOLDER / f"{trace}.parquet") for r in step if len(r.tokens) > 1]
    rng = np.random.default_rng(0)
    replay([responses(rng, source, 500, 0)], Rhyme(DraftingConfig()))  # compiles
    for size in sizes:
        history = responses(rng, source, size, 0)
        paths = [responses(rng, source, 100 * REQUESTS, 1 + i)[:REQUESTS] for i in range(rounds)]
        count = sum(len(r.tokens) for r in history)

        arms: dict[str, Callable[[], Arm]] = {
            "adaptive floor 0.1": partial(rhyme, history, 0.1),
            "adaptive floor 0.2": partial(rhyme, history, 0.2),
        }
        if available("arctic"):
            arms["arctic factor 1"] = partial(arctic, history)
        made = {name: make() for name, make in arms.items()}
        costs: dict[str, list[float]] = {name: [] for name in arms}
        for path in paths:
            for name, arm in made.items():
                end_step, arm.end_step = arm.end_step, lambda responses: None  # type: ignore[method-assign]
                for tally in replay([path], arm, slots=REQUESTS).values():
                    costs[name].extend(tally.per_request)
                arm.end_step = end_step  # type: ignore[method-assign]
        for name, arm in made.items():
            q1, median, q3 = 1e6 * np.quantile(costs[name], [0.25, 0.5, 0.75])
            figures = {
                "us_per_request_step": round(float(median), 2),
                "q1": round(float(q1), 2),
                "q3": round(float(q3), 2),
            }
            if isinstance(arm, Rhyme):
                stored = arm.histories[KEY]
                figures["bytes_per_token"] = round(len(stored.encode()) / count, 2)
                figures["build_us_per_token"] = round(build_seconds(stored.tokens, stored.bounds) * 1e6 / count, 3)
            else:
                figures["bytes_per_token"] = round(arm.cache._global_tree.estimate_memory() / count, 1)
            row = {"benchmark": "draft_speed", "arm": name, "history_tokens": count, **figures}
            print_row(row, as_json)
    if not available("arctic"):
        print("left out, arctic_inference is not installed: arctic factor 1", file=sys.stderr)


def build_seconds(tokens: np.ndarray, bounds: np.ndarray) -> float:
    """Median of three builds of the suffix array."""
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        suffix_index.build(tokens)
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))


if __name__ == "__main__":
    app()
