"""Where sorting pays: decoding steps of a sorted rollout by the engine's slots, in virtual time.

    python -m benchmarks.sorted_slots [--json] [--quick] [--arm ARM] [TRACE.parquet ...]

The real scheduler over the simulated engine of :mod:`benchmarks.length_bias`, under a constant policy: prompts have the
lengths that a recorded run sampled for them, and a decoding step takes as long however many slots are full, as on a GPU
that waits for its weights. Nothing is drafted, and neither rewards nor updates take time. Arms are ``fresh``, plain
on-policy regeneration, ``partial``, and ``rolling``, partial with prompts loaded as others leave, so that no load has
an end, as many at a time as the others load or (``one version``) as a staleness of 1 lets begin, two updates' worth;
what they are compared with generates one update's samples after the other's, or (``large``) all that a load has at
once, which then is trained in several optimizer steps, of which all but the first train older tokens: what we take
SortedRL's comparison to be.

Figures are ratios to that, of trained responses and of trained tokens per decoding step; beside them tokens that were
thrown away for each that was trained, and all bubbles, which count all slots. ``partial`` and ``rolling`` train tokens
of up to four versions, with ``one version`` of two.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import traces
from benchmarks.length_bias import BATCH, ROLLING, SAMPLES, Engine, recorded, trained_lengths
from benchmarks.machine import commit

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

LOAD, ROUNDS = 4, 8
ARMS = ("fresh", "partial", *ROLLING)
#: In which what rolls begins and ends once.
ROLLING_EPOCHS = 4
#: Of the engine, by the samples of an update.
SHARES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)


def synchronous(
    lengths: list[np.ndarray], rng: np.random.Generator, slots: int, prompts: int = BATCH
) -> tuple[int, int]:
    """Tokens, and decoding steps that batches of so many prompts take one after the other."""
    tokens = steps = 0
    for first in range(0, len(lengths), prompts):
        engine = Engine(slots)
        engine.queue = [
            ((str(prompt), sample), 0, int(rng.choice(lengths[prompt])))
            for prompt in range(first, first + prompts)
            for sample in range(SAMPLES)
        ]
        while engine.queue or engine.running:
            engine.run()
        tokens, steps = tokens + engine.made, steps + engine.steps
    return tokens, steps


def measure(path: Path, arm: str, unit: str, share: float, rounds: int) -> dict[str, Any]:
    """A row: means over rounds, each of other prompts in another order."""
    there, slots = recorded(path), int(share * BATCH * SAMPLES)
    count = len(there) // (BATCH * LOAD) * BATCH * LOAD
    found = []
    for seed in range(rounds):
        rng = np.random.default_rng(seed)
        epochs = ROLLING_EPOCHS if arm in ROLLING else 1
        chosen = [there[i] for _ in range(epochs) for i in rng.permutation(len(there))[:count]]
        trained, _, engine = trained_lengths(chosen, arm, unit, LOAD, rng, slots)
        tokens, steps = synchronous(chosen, rng, slots)
        large_tokens, large_steps = synchronous(chosen, rng, slots, LOAD * BATCH)
        found.append(
            {
                "responses_ratio": steps / engine.steps,
                "tokens_ratio": trained.sum() / engine.steps / (tokens / steps),
                "wasted": engine.made / trained.sum() - 1,
                "bubble": 1 - engine.made / (engine.steps * slots),
                "bubble_sync": 1 - tokens / (steps * slots),
                "tokens_ratio_large": trained.sum() / engine.steps / (large_tokens / large_steps),
                "bubble_large": 1 - large_tokens / (large_steps * slots),
            }
        )
    means = {name: round(float(np.mean([row[name] for row in found])), 4) for name in found[0]}
    spread = round(float(np.std([row["tokens_ratio"] for row in found], ddof=1) / np.sqrt(rounds)), 4)
    about = {"benchmark": "sorted_slots", "trace": path.stem, "arm": arm, "unit": unit}
    return {**about, "slots": slots, "update_samples": BATCH * SAMPLES, "load": LOAD, **means, "standard_error": spread}


@app.command()
def main(
    files: Annotated[list[Path] | None, typer.Argument(help="default: all in benchmarks/traces")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="one trace, few rounds")] = False,
    arm: Annotated[list[str] | None, typer.Option(help="may be given again; default: all")] = None,
) -> None:
    """Simulate and print."""
    if unknown := sorted(set(arm or ()) - set(ARMS)):
        raise typer.BadParameter(f"no arm {'; '.join(unknown)}; there are: {'; '.join(ARMS)}")
    paths = files or sorted(traces.FOLDER.glob("*.parquet"))
    for path in paths[:1] if quick else paths:
        for unit in ("group", "trajectory"):
            for one in arm or ARMS:
                for share in SHARES:
                    row = measure(path, one, unit, share, 2 if quick else ROUNDS)
                    print(json.dumps({**row, "commit": commit()}) if as_json else row, flush=True)


if __name__ == "__main__":
    app()
