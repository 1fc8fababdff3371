"""Which CUDA graphs an engine is to have that drafts as ragged as ours: the same replay with each.

``FULL_AND_PIECEWISE`` has full graphs for steps of one token a row by the patched query length
(``patches/vllm_undrafted_graphs.py``), and runs what drafts in piecewise ones.
"""

from __future__ import annotations

from benchmarks.gpu_check import engines
from benchmarks.gpu_check.telling import quick, tell

MODES = ("PIECEWISE", "FULL", "FULL_AND_PIECEWISE")


def main() -> None:
    quick()
    engines.prepare()
    from benchmarks import rollout

    widths, rounds = (8, 64), 3
    with engines.recorded("1.5B") as (model, cell_of, history):
        for mode in MODES:
            try:
                settings = {**engines.settings(0.8), **engines.graphs(mode, max(widths))}
                engine = rollout.Engine(model, rollout.RHYME, history, max(widths), **settings)
                for rows in widths:
                    runs = [rollout.once(cell_of(rows), engine, history) for _ in range(rounds + 1)][1:]
                    speeds = sorted(run["tokens"] / run["seconds"] for run in runs)
                    steps = sorted(1e3 * (run["seconds"] - run["draft_seconds"]) / run["steps"] for run in runs)
                    tell(
                        mode=mode,
                        rows=rows,
                        tokens_per_s=round(speeds[len(speeds) // 2], 1),
                        step_ms=round(steps[len(steps) // 2], 3),
                        tokens_per_s_range=[round(speeds[0], 1), round(speeds[-1], 1)],
                    )
                del engine
            except Exception as error:  # a mode that a backend refuses says something, too
                tell(mode=mode, refused=f"{type(error).__name__}: {error}"[:300])
            engines.let_go()


if __name__ == "__main__":
    main()
