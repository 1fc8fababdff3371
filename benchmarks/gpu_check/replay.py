"""Drafting against stock vLLM and against what it could gain at most: :mod:`benchmarks.rollout` on this machine.

Which token comes is the trace's word; reading it waits for the GPU in each step, so that stock has little of its
asynchronous scheduling here: :mod:`benchmarks.gpu_check.asynchronous` says what that is worth.
"""

from __future__ import annotations

import os

from benchmarks.gpu_check import engines
from benchmarks.gpu_check.telling import device, quick, tell


def main() -> None:
    small = quick()
    engines.prepare()
    from benchmarks import rollout

    if device().type != "cuda":
        os.environ.update(rollout.ENVIRONMENT)
    widths, rounds = ((8,), 1) if small else ((1, 8, 64, 256), 2)
    arms = (rollout.STOCK, rollout.RHYME, rollout.ORACLE)
    with engines.recorded("7B") as (model, cell_of, history):
        running = {}
        for arm in arms:
            drafts = arm != rollout.STOCK and device().type == "cuda"
            more = engines.graphs("FULL_AND_PIECEWISE", max(widths)) if drafts else {}
            settings = {**engines.settings(0.28), **more}
            running[arm] = rollout.Engine(model, arm, history, max(widths), **settings)
        for rows in widths:
            one = cell_of(rows)
            for row in rollout.summarise(one, rollout.measure(one, running, history, rounds)):
                row.pop("benchmark")
                tell(**row)


if __name__ == "__main__":
    main()
