"""Compare CUDA graph modes for an engine with ragged drafts such as ours, with the same replay in each.

``FULL_AND_PIECEWISE`` has full graphs for steps of one token per row by the patched query length
(``patches/vllm_undrafted_graphs.py``), and runs steps with drafts in piecewise graphs.
"""

from __future__ import annotations

from benchmarks.gpu_check import engines
from benchmarks.gpu_check.reporting import parse_arguments, report

MODES = ("PIECEWISE", "FULL", "FULL_AND_PIECEWISE")
WIDTHS, ROUNDS = (8, 64), 3


def measure(mode: str) -> None:
    """Measure one engine with each batch size."""
    engines.prepare()
    from benchmarks import rollout

    with engines.recorded("1.5B") as (model, cell_of, history):
        settings = {**engines.settings(0.8), **engines.graphs(mode, max(WIDTHS))}
        engine = rollout.Engine(model, rollout.RHYME, history, max(WIDTHS), **settings)
        for rows in WIDTHS:
            runs = [rollout.once(cell_of(rows), engine, history) for _ in range(ROUNDS + 1)][1:]
            speeds = sorted(run["tokens"] / run["seconds"] for run in runs)
            steps = sorted(1e3 * (run["seconds"] - run["draft_seconds"]) / run["steps"] for run in runs)
            report(
                mode=mode,
                rows=rows,
                tokens_per_s=round(speeds[len(speeds) // 2], 1),
                step_ms=round(steps[len(steps) // 2], 3),
                tokens_per_s_range=[round(speeds[0], 1), round(speeds[-1], 1)],
            )


def main() -> None:
    chosen = parse_arguments()
    if chosen.one:
        measure(chosen.one)
    else:
        engines.each("benchmarks.gpu_check.graphs", {mode: {} for mode in MODES}, report)


if __name__ == "__main__":
    main()
