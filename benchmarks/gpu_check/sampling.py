"""Measure drawing and verifying tokens at a real vocabulary: our kernel, and torch as in vLLM.

Verification draws a token for each row of logits, so a row is a request's next token or one of its drafts. Both return
tokens, log-probabilities and ranks. Bytes are the maximum that a call allocates in addition to the logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu_check.kernel import logits_of
from benchmarks.gpu_check.reporting import VOCABULARY, device, milliseconds, quick, report
from verl_rhyme.engine import draw_kernel


def by_torch(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample as vLLM does without its kernels: float32, a division by exponential noise, a log-softmax."""
    raw = logits.float()
    probabilities = raw.softmax(-1)
    tokens = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)
    logprobs = raw.log_softmax(-1)
    own = logprobs.gather(1, tokens[:, None])
    return tokens, own[:, 0], (logprobs >= own).sum(-1)


def measure(rows: int, vocabulary: int, rounds: int) -> None:
    """Measure both, and print a row of each."""
    at = device()
    logits = logits_of(rows, vocabulary, at).to(torch.bfloat16)
    keys = torch.arange(rows, device=at)
    ones = torch.ones(rows, device=at)

    def ours() -> object:
        tokens, logprobs = draw_kernel.draw(logits, keys, keys, ones)
        return logprobs, draw_kernel.ranks(logits, tokens)

    arms: dict[str, Callable[[], object]] = {"ours": ours, "torch": lambda: by_torch(logits)}
    for arm, call in arms.items():
        taken = milliseconds(call, rounds)
        memory = 0
        if at.type == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call()
            memory = torch.cuda.max_memory_allocated() - before
        report(arm=arm, rows=rows, vocabulary=vocabulary, ms=round(taken, 4), mib=round(memory / 2**20, 1))


def main() -> None:
    if quick():
        measure(4, 4099, 1)
        return
    for rows in (16, 64, 256, 1024):
        measure(rows, VOCABULARY, 50)


if __name__ == "__main__":
    main()
