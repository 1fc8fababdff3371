"""Compare greedy text before and after vLLM's deepest sleep, which reloads the weights."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check import engines, models
from benchmarks.gpu_check.reporting import device, quick, report


def free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30


def greedy(llm: Any, rows: int, length: int) -> list[list[int]]:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(31 * row + 7 * i) % 1000 for i in range(64)]} for row in range(rows)]
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def main() -> None:
    size, rows, length = ("tiny", 2, 8) if quick() else ("0.5B", 16, 64)
    engines.prepare()
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        model = models.saved(size, Path(folder), device())
        engines.free_memory()
        llm = LLM(
            model=model,
            max_model_len=512,
            max_num_seqs=rows,
            skip_tokenizer_init=True,
            enable_sleep_mode=True,
            **{**engines.settings(0.5), "load_format": "auto"},
        )
        before, again = greedy(llm, rows, length), greedy(llm, rows, length)
        awake = free_gib()
        began = time.perf_counter()
        llm.sleep(level=2)
        asleep, slept = free_gib(), time.perf_counter()
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
        woken = time.perf_counter()
        after = greedy(llm, rows, length)
        report(
            model=size,
            same_twice_awake=before == again,
            same_after_sleep=before == after,
            given_back_gib=round(asleep - awake, 2),
            sleep_s=round(slept - began, 2),
            wake_and_load_s=round(woken - slept, 2),
        )


if __name__ == "__main__":
    main()
