"""Compare drafting with stock vLLM in tokens per second on the responses of a trace.

Stock is vLLM as shipped, with asynchronous scheduling and either model runner; it generates as many tokens per prompt
as the trace has. Engines with drafts generate the trace's tokens (:mod:`benchmarks.engine_worker`), which are read back
in each step. Each engine has a process; three start at once, and measure in turn.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.gpu_check import engines
from benchmarks.gpu_check.reporting import device, parse_arguments, quick, report

STOCK, V2 = "stock", "stock, V2 runner"
#: Variables of each arm.
ARMS: dict[str, dict[str, str]] = {
    STOCK: {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "rhyme": {},
    V2: {"VLLM_USE_V2_MODEL_RUNNER": "1"},
    "oracle": {},
}
#: GiB of KV cache, for the largest batch of a 7 B model and three engines.
CACHE = 3.5
#: Bytes of such an engine.
_ENGINE = 24 << 30


class Stock:
    """Stock vLLM on the lengths of a cell's responses."""

    def __init__(self, model: str, slots: int, settings: dict[str, Any]):
        from vllm import LLM

        self._llm = LLM(
            model=model,
            max_num_seqs=slots,
            skip_tokenizer_init=True,
            **{"max_model_len": 512, "max_num_batched_tokens": 8192, "seed": 0, **settings},
        )

    def run(self, cell: Any) -> float:
        """Return the seconds of the cell's measured responses."""
        from vllm import SamplingParams

        engine, waiting, running = self._llm.llm_engine, list(cell.measured)[::-1], 0
        began = time.perf_counter()
        while waiting or running:
            while waiting and running < cell.concurrency:
                response = waiting.pop()
                params = SamplingParams(
                    temperature=1.0, max_tokens=len(response.tokens), ignore_eos=True, detokenize=False, logprobs=0
                )
                engine.add_request(f"r{time.monotonic_ns()}", {"prompt_token_ids": response.prompt.tolist()}, params)
                running += 1
            running -= sum(output.finished for output in engine.step())
        return time.perf_counter() - began


def measure(arm: str, small: bool) -> None:
    """Measure one engine with each batch size."""
    engines.prepare()
    from benchmarks import rollout

    widths, rounds = ((8,), 1) if small else ((1, 8, 64, 256), 2)
    with engines.recorded("7B") as (model, cell_of, history):
        settings = engines.settings(0.3, CACHE)
        engine: Any
        if arm in (STOCK, V2):
            engine = Stock(model, max(widths), settings)
        else:
            more = engines.graphs("FULL_AND_PIECEWISE", max(widths)) if device().type == "cuda" else {}
            engine = rollout.Engine(model, arm, history, max(widths), **settings, **more)
        engines.wait_for_turn()
        for rows in widths:
            cell = cell_of(rows)
            tokens = sum(len(response.tokens) for response in cell.measured)
            figures: dict[str, Any] = {}
            turns = 1 if rows == 1 else rounds  # one row takes many steps
            if isinstance(engine, Stock):
                speeds = [tokens / engine.run(cell) for _ in range(turns + 1)][1:]
            else:
                runs = [rollout.once(cell, engine, history) for _ in range(turns)]
                speeds = [tokens / run["seconds"] for run in runs]
                run = runs[-1]
                if errors := run.get("errors"):
                    raise SystemExit(f"{arm}: {errors} errors in the drafter")
                figures = {
                    "step_ms": round(1e3 * (run["seconds"] - run["draft_seconds"]) / run["steps"], 3),
                    "draft_ms": round(1e3 * run["draft_seconds"] / run["steps"], 3),
                    "tokens_per_row_step": round(run["tokens"] / run["rows"], 3),
                    "verified_per_token": round((run["rows"] + run["drafted"]) / run["tokens"], 3),
                }
                if run.get("cost"):
                    figures["step_cost_us"] = [round(1e6 * part, 1) for part in run["cost"]]
            report(
                arm=arm,
                rows=rows,
                tokens_per_s=round(statistics.median(speeds), 1),
                tokens_per_s_range=[round(min(speeds), 1), round(max(speeds), 1)],
                **figures,
            )


def _fit() -> int:
    """Return how many engines fit this machine at once."""
    import torch

    return min(3, max(1, torch.cuda.mem_get_info()[1] // _ENGINE)) if device().type == "cuda" else 1


def main() -> None:
    chosen = parse_arguments()
    if chosen.one:
        measure(chosen.one, quick())
        return
    arms = dict(ARMS)
    if device().type != "cuda":
        del arms[V2]  # vLLM's CPU platform lacks it
    engines.each("benchmarks.gpu_check.replay", arms, report, at_once=_fit())


if __name__ == "__main__":
    main()
