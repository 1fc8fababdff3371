"""Measure the verification of a batch's drafts in time and memory, at a real vocabulary: our sampler and vLLM's.

    python -m benchmarks.real_sizes sampler [--json] [--quick]

Steps of B requests with K draft tokens each, temperature 1, with log-probabilities as verl requests them. The arms are
vLLM's rejection sampler (vLLM's sampler without drafts), ours with fresh noise, and ours with keyed noise.
They get the same logits in turn, several times. The logits resemble a language model's: a few
probable tokens and a Zipf tail; every other draft is the most probable token.

Memory is the peak of a call's allocations by torch's allocator, without the input logits and with the results. numpy's
arrays are not included; they have a few bytes per row.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine import print_row

VOCABULARY = 151_936
#: (requests, draft tokens of each)
SETTINGS = [(64, 0), (64, 8), (256, 0), (256, 4)]
ARMS = ("vllm", "ours", "ours, keyed")


def logits_of(rows: int, vocabulary: int) -> Any:
    """float32 [rows, vocabulary]."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tail = -1.1 * torch.arange(1, vocabulary + 1, dtype=torch.float32).log()
    logits = torch.empty(rows, vocabulary)
    for row in logits:
        row[torch.randperm(vocabulary, generator=generator)] = tail
    return logits.add_(torch.randn(rows, 1, generator=generator)).mul_(1.5)


class Step:
    """Input of vLLM's samplers: ``rows`` requests with ``drafts`` draft tokens each."""

    def __init__(self, rows: int, drafts: int, vocabulary: int) -> None:
        import torch
        from vllm.v1.sample.logits_processor import LogitsProcessors
        from vllm.v1.sample.metadata import SamplingMetadata
        from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

        total = rows * (drafts + 1)
        self.rows, self.logits = rows, logits_of(total, vocabulary)
        self.sampling = SamplingMetadata(
            temperature=torch.ones(rows),
            all_greedy=False,
            all_random=True,
            top_p=None,
            top_k=None,
            generators={},
            max_num_logprobs=0,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=torch.zeros(rows),
            presence_penalties=torch.zeros(rows),
            repetition_penalties=torch.ones(rows),
            output_token_ids=[],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        )
        self.drafts: SpecDecodeMetadata | None = None
        if drafts:
            best = self.logits.argmax(-1).to(torch.int32).view(rows, -1)[:, :drafts].clone()
            best[:, 1::2] = 0
            self.drafts = SpecDecodeMetadata.make_dummy(best.tolist(), torch.device("cpu"))
            at = torch.arange(total, dtype=torch.int32).view(rows, -1)
            self.drafts.target_logits_indices = at[:, :-1].flatten()
            self.drafts.bonus_logits_indices = at[:, -1].clone()

    def runner(self, keyed: bool) -> Any:
        """Return the part of vLLM's model runner that a sampler uses."""
        from vllm.v1.sample.rejection_sampler import RejectionSampler
        from vllm.v1.sample.sampler import Sampler

        from verl_rhyme.processes.request import RequestMeta

        ids = [str(row) for row in range(self.rows)]
        meta = [RequestMeta(noise=f"{row:016x}" if keyed else "").put({}) for row in range(self.rows)]
        params = [SimpleNamespace(extra_args=each["extra_args"], seed=None) for each in meta]
        sampler = Sampler("processed_logprobs")
        return SimpleNamespace(
            sampler=sampler,
            rejection_sampler=RejectionSampler(sampler),
            requests={id: SimpleNamespace(sampling_params=each) for id, each in zip(ids, params, strict=True)},
            input_batch=SimpleNamespace(
                req_ids=ids,
                num_tokens_no_spec=np.full(self.rows, 1000, dtype=np.int32),
                temperature_cpu=np.ones(self.rows, dtype=np.float32),
            ),
        )

    def sampler(self, arm: str) -> Callable[[], Any]:
        """Return a function that samples this step."""
        from verl_rhyme.engine.drawer import Drawer
        from verl_rhyme.engine.sampler import DrawingSampler, DrawingVerifier

        runner = self.runner(keyed=arm == "ours, keyed")
        plain, verifier = runner.sampler, runner.rejection_sampler
        if arm != "vllm":
            plain = DrawingSampler(Drawer(runner), "processed_logprobs", False)
            verifier = DrawingVerifier(plain, None, self.logits.device)
        if self.drafts is None:
            return lambda: plain(self.logits, self.sampling)
        return lambda: verifier(self.drafts, None, self.logits, self.sampling)


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the peak bytes that a call holds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        kept = call()
    held = most = 0
    events = (e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]")
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    del kept
    return most


def main(
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
    quick: Annotated[bool, typer.Option(help="a small vocabulary, one round")] = False,
    rounds: Annotated[int, typer.Option(help="rounds over all arms")] = 5,
) -> None:
    """Measure all arms at all settings, and print a row for each."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM logs to standard output
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from verl_rhyme import patches

    # vLLM's CPU worker applies this; its rejection sampler needs it on a CPU.
    patches.apply_vllm()
    CPUModelRunner._postprocess_triton(None)  # type: ignore[arg-type]
    vocabulary, rounds = (4096, 1) if quick else (VOCABULARY, rounds)
    for rows, drafts in SETTINGS:
        step = Step(rows, drafts, vocabulary)
        calls = {arm: step.sampler(arm) for arm in ARMS}
        memory = {arm: peak_bytes(call) for arm, call in calls.items()}  # this call also compiles
        seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for _ in range(rounds):
            for arm, call in calls.items():
                started = time.perf_counter()
                call()
                seconds[arm].append(time.perf_counter() - started)
        for arm in ARMS:
            ratios = [theirs / ours for theirs, ours in zip(seconds["vllm"], seconds[arm], strict=True)]
            row = {
                "benchmark": "real_sizes",
                "part": "sampler",
                "arm": arm,
                "vocabulary": vocabulary,
                "rows": rows,
                "drafts_a_row": drafts,
                "ms": round(1e3 * statistics.median(seconds[arm]), 2),
                "times_vllm": round(statistics.median(ratios), 2),
                "times_vllm_range": [round(min(ratios), 2), round(max(ratios), 2)],
                "mib_beyond_logits": round(memory[arm] / 2**20, 1),
            }
            print_row(row, as_json)
