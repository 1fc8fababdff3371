"""Check whether coupled samples repeat in other batch shapes, with and without vLLM's batch invariance.

Some requests have noise keys and are generated alone and in batches of 33 and 256 rows; all other requests have fresh
noise. `kept` is the mean share of a response before its first token that differs from the response alone; after that
token all differ. `differs_a_token` is the rate at which a token is the first to differ. vLLM reads its switch at
import, so each setting has a process.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_check import engines, models
from benchmarks.gpu_check.reporting import device, parse_arguments, report

#: Number of compared requests, and their tokens.
PROBES, LENGTH = 8, 128
PLAIN, INVARIANT = "plain", "batch invariant"
ARMS = {PLAIN: {"VLLM_BATCH_INVARIANT": "0"}, INVARIANT: {"VLLM_BATCH_INVARIANT": "1"}}


def generate(llm: Any, rows: int, length: int) -> tuple[np.ndarray, float]:
    """Return int [PROBES, length], the tokens of the probes among ``rows`` rows (1: each alone), and the seconds."""
    from vllm import SamplingParams

    from verl_rhyme.processes.request import RequestMeta
    from verl_rhyme.sampling.noise import key_of

    common = {"max_tokens": length, "ignore_eos": True, "detokenize": False, "temperature": 1.0}
    probes = [
        SamplingParams(**RequestMeta(noise=f"{key_of('probe', i):016x}").put(dict(common))) for i in range(PROBES)
    ]
    prompts = [{"prompt_token_ids": [(31 * i + 7 * j) % 1000 for j in range(64)]} for i in range(max(rows, PROBES))]
    began = time.perf_counter()
    if rows == 1:
        done = [llm.generate([p], [s], use_tqdm=False)[0] for p, s in zip(prompts, probes, strict=False)]
    else:
        others = [SamplingParams(**common) for _ in range(rows - PROBES)]
        done = llm.generate(prompts, [*probes, *others], use_tqdm=False)
    taken = time.perf_counter() - began
    return np.array([list(output.outputs[0].token_ids) for output in done[:PROBES]]), taken


def measure(small: bool, invariant: bool) -> None:
    """Measure one engine with each batch size."""
    engines.prepare()
    from vllm import LLM

    size, widths, length = ("tiny", (1, 33), 16) if small else ("1.5B", (1, 33, 256), LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        model = models.saved(size, Path(folder), device())
        engines.free_memory()
        llm = LLM(
            model=model,
            max_model_len=512,
            max_num_seqs=max(widths),
            skip_tokenizer_init=True,
            async_scheduling=False,
            enable_prefix_caching=False,
            worker_extension_cls="verl_rhyme.engine.extension.RhymeWorkerMethods",
            **{**engines.settings(0.5), "dtype": "bfloat16", "load_format": "auto"},
        )
        if refused := llm.collective_rpc("install_sampler")[0]:
            raise RuntimeError(f"cannot install our sampler: {refused}")
        alone, _ = generate(llm, 1, length)
        for rows in widths:
            tokens, taken = generate(llm, rows, length)
            same = (tokens == alone).cumprod(1).sum(1)
            report(
                arm=INVARIANT if invariant else PLAIN,
                model=size,
                rows=rows,
                responses_kept=int((same == length).sum()),
                of=PROBES,
                kept=round(float(same.mean() / length), 4),
                differs_a_token=round(float((same < length).sum() / np.minimum(same + 1, length).sum()), 5),
                step_ms=round(1e3 * taken / (length * (PROBES if rows == 1 else 1)), 3),
            )


def main() -> None:
    chosen = parse_arguments()
    if chosen.one:
        measure(chosen.quick, chosen.one == INVARIANT)
        return
    arms = dict(ARMS)
    if device().type != "cuda":
        del arms[INVARIANT]
        report(arm=INVARIANT, skipped="vLLM's batch-invariant kernels are for GPUs")
    engines.each("benchmarks.gpu_check.coupled", arms, report)


if __name__ == "__main__":
    main()
