"""Measure the gain of asynchronous scheduling, in stock vLLM and in our engines, in milliseconds per step.

Our sampler and our drafts force vLLM's V1 model runner. For some models (Qwen3, Llama) vLLM uses V2 by default, so
V2 is another arm. Weights and texts are random: drafts rest. :mod:`benchmarks.host_time` has the cost of a step with
drafts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import engines, models
from benchmarks.gpu_check.reporting import parse_arguments, report

#: Tokens of two runs; their difference is only decoding.
SHORT, LONG, PROMPT = 16, 144, 128
ARMS = {
    "V1, asynchronous": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "V1, not asynchronous": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "V2, asynchronous": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
    "our sampler, asynchronous": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "our drafts at rest, asynchronous": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
}


def step_ms(llm: Any, rows: int, rounds: int) -> list[float]:
    """Return the milliseconds of a decoding step with so many rows, per round."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(7 * row + 13 * i) % 1000 for i in range(PROMPT)]} for row in range(rows)]
    times = []
    for _ in range(rounds + 1):
        seconds = []
        for tokens in (SHORT, LONG):
            params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
        times.append(1e3 * (seconds[1] - seconds[0]) / (LONG - SHORT))
    return times[1:]


def _ours(arm: str, folder: str) -> dict[str, Any]:
    """Return the options of an engine of ours."""
    extension = {"worker_extension_cls": "verl_rhyme.engine.extension.RhymeWorkerMethods"}
    if "sampler" in arm:
        return {"additional_config": {"rhyme": {}}, **extension}
    rhyme = {"drafting": {}, "history_dir": f"{folder}/history", "namespace": "asynchronous"}
    drafter = {"method": "custom_class", "model": "verl_rhyme.engine.proposer.HistoryProposer"}
    speculation = {"speculative_config": {**drafter, "num_speculative_tokens": 32}}
    return {"additional_config": {"rhyme": rhyme}, **speculation, **extension}


def measure(arm: str, small: bool) -> None:
    """Measure one engine with each batch size."""
    engines.prepare()
    from vllm import LLM

    size, widths, rounds = ("tiny", (4,), 1) if small else ("7B", (1, 8, 64, 256), 2)
    with tempfile.TemporaryDirectory() as folder:
        ours = _ours(arm, folder) if arm.startswith("our") else {}
        llm = LLM(
            model=models.described(size, Path(folder)),
            max_model_len=1024,
            max_num_seqs=max(widths),
            skip_tokenizer_init=True,
            async_scheduling=arm.endswith(", asynchronous"),
            **{"load_format": "dummy", "dtype": "bfloat16", **engines.settings(0.8), **ours},
        )
        if ours:
            if refused := llm.collective_rpc("install_sampler")[0]:
                raise RuntimeError(f"cannot install our sampler: {refused}")
            llm.collective_rpc("attach_proposer")
        for rows in widths:
            ms = step_ms(llm, rows, rounds)
            middle, spread = round(statistics.median(ms), 3), [round(min(ms), 3), round(max(ms), 3)]
            report(arm=arm, model=size, rows=rows, step_ms=middle, step_ms_range=spread)


def main() -> None:
    chosen = parse_arguments()
    if chosen.one:
        measure(chosen.one, chosen.quick)
    else:
        engines.each("benchmarks.gpu_check.asynchronous", ARMS, report)


if __name__ == "__main__":
    main()
