"""What asynchronous scheduling is worth to stock vLLM, which drafting has to do without: milliseconds a step.

Drafts by a class of one's own also keep vLLM at its V1 model runner, where for some models (Qwen3, Llama) V2 is what it
comes with: a third arm.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import engines, models
from benchmarks.gpu_check.reporting import asked, report

#: Tokens of two runs, whose difference is of decoding alone.
SHORT, LONG, PROMPT = 16, 144, 128
ARMS = {
    "V1, asynchronous": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "V1, not asynchronous": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "V2, asynchronous": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
}


def step_ms(llm: Any, rows: int, rounds: int) -> list[float]:
    """Of a decoding step of so many rows, each time."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(7 * row + 13 * i) % 1000 for i in range(PROMPT)]} for row in range(rows)]
    found = []
    for _ in range(rounds + 1):
        seconds = []
        for tokens in (SHORT, LONG):
            params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
        found.append(1e3 * (seconds[1] - seconds[0]) / (LONG - SHORT))
    return found[1:]


def measure(arm: str, small: bool) -> None:
    """All widths of one engine."""
    engines.prepare()
    from vllm import LLM

    size, widths, rounds = ("tiny", (4,), 1) if small else ("7B", (1, 8, 64, 256), 2)
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            model=models.described(size, Path(folder)),
            max_model_len=1024,
            max_num_seqs=max(widths),
            skip_tokenizer_init=True,
            async_scheduling=arm.endswith(", asynchronous"),
            **{"load_format": "dummy", "dtype": "bfloat16", **engines.settings(0.8)},
        )
        for rows in widths:
            ms = step_ms(llm, rows, rounds)
            middle, spread = round(statistics.median(ms), 3), [round(min(ms), 3), round(max(ms), 3)]
            report(arm=arm, model=size, rows=rows, step_ms=middle, step_ms_range=spread)


def main() -> None:
    chosen = asked()
    if chosen.one:
        measure(chosen.one, chosen.quick)
    else:
        engines.each("benchmarks.gpu_check.asynchronous", ARMS, report)


if __name__ == "__main__":
    main()
