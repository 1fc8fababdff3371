"""What asynchronous scheduling is worth to stock vLLM, which drafting has to do without: milliseconds a step."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import engines, models
from benchmarks.gpu_check.telling import quick, tell

#: Tokens of two runs, whose difference is of decoding alone.
SHORT, LONG, PROMPT = 16, 144, 128


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


def main() -> None:
    small = quick()
    engines.prepare()
    from vllm import LLM

    size, widths, rounds = ("tiny", (4,), 1) if small else ("7B", (1, 8, 64, 256), 3)
    with tempfile.TemporaryDirectory() as folder:
        model = models.described(size, Path(folder))
        taken: dict[tuple[bool, int], float] = {}
        for asynchronous in (True, False):
            llm = LLM(
                model=model,
                max_model_len=1024,
                max_num_seqs=max(widths),
                skip_tokenizer_init=True,
                async_scheduling=asynchronous,
                **{"load_format": "dummy", "dtype": "bfloat16", **engines.settings(0.8)},
            )
            for rows in widths:
                ms = step_ms(llm, rows, rounds)
                taken[asynchronous, rows] = statistics.median(ms)
                price = {} if asynchronous else {"times_asynchronous": taken[False, rows] / taken[True, rows]}
                tell(
                    model=size,
                    rows=rows,
                    asynchronous=asynchronous,
                    step_ms=round(statistics.median(ms), 3),
                    step_ms_range=[round(min(ms), 3), round(max(ms), 3)],
                    **{name: round(value, 3) for name, value in price.items()},
                )
            del llm
            engines.let_go()


if __name__ == "__main__":
    main()
