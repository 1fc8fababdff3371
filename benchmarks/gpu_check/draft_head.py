"""Measure the time of a draft head at the hidden sizes of real models: its guesses for a batch, and a training step.

Proposals are for one decoding step: four draft positions in sequence, each with a copy to the host. ``step_ms`` is the
time to read the model's weights once at :data:`BANDWIDTH`, the minimum of a decoding step.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from benchmarks.gpu_check.reporting import VOCABULARY, device, milliseconds, quick, report
from verl_rhyme.drafting.head import DraftHead, HeadTrainer, PolicyRows
from verl_rhyme.drafting.head_inference import HeadInference
from verl_rhyme.drafting.head_interface import HEAD_BUFFER, MOST_TOKENS

#: Hidden size, and bytes of all weights in bf16 on a GPU (the 32 B model's on four).
SHAPES = {"8B": (4096, 16.0e9), "32B on 4 GPUs": (5120, 16.4e9)}
#: Memory bandwidth of an H100 in bytes per second.
BANDWIDTH = 3.0e12
STEPS = 4


def head_of(hidden: int, entries: int, at: torch.device) -> tuple[DraftHead, PolicyRows]:
    """Return a new head, and random output rows of a policy."""
    torch.manual_seed(0)
    head = DraftHead(hidden).to(at)
    head.half = at.type == "cuda"
    kind = torch.bfloat16 if head.half else torch.float32
    tokens = torch.randperm(VOCABULARY, device=at)[:entries]
    output, embedding = (torch.randn(entries, hidden, dtype=kind, device=at) / hidden**0.5 for _ in range(2))
    return head, PolicyRows.of(tokens, output, embedding, VOCABULARY)


def guesses_ms(head: DraftHead, rows: PolicyRows, batch: int, rounds: int) -> float:
    """Return the milliseconds of a step's guesses by the host's clock, because the engine waits for them."""
    inference = HeadInference(head, STEPS)
    inference.rows = rows
    states = torch.randn(batch, head.hidden, device=head.scale.device)
    going, times = np.arange(batch), []
    for _ in range(rounds + 2):
        began = time.perf_counter()
        inference.begin(states)
        latest = np.full(batch, int(rows.tokens[0]), dtype=np.int32)
        for position in range(STEPS):
            latest = inference.propose(position, going, latest)[0][:, 0].copy()
        times.append(1e3 * (time.perf_counter() - began))
    return float(np.median(times[2:]))


def main() -> None:
    small, at = quick(), device()
    shapes = {"tiny": (64, 1e6)} if small else SHAPES
    for name, (hidden, weights) in shapes.items():
        head, rows = head_of(hidden, 512 if small else MOST_TOKENS, at)
        trainer = HeadTrainer(head, 4096 if small else HEAD_BUFFER // (2 * hidden), STEPS)
        tokens = np.random.default_rng(0).integers(VOCABULARY, size=2048)
        trainer.add(torch.randn(len(tokens), hidden, device=at), tokens, -1 - np.arange(len(tokens)))
        update = milliseconds(lambda: trainer.update(rows, 1.0), 2 if small else 20)  # noqa: B023
        for batch in (4,) if small else (1, 64, 256):
            report(
                model=name,
                rows=batch,
                guesses_ms=round(guesses_ms(head, rows, batch, 2 if small else 50), 3),
                update_ms=round(update, 3),
                step_ms=round(1e3 * weights / BANDWIDTH, 3),
                mib=round(torch.cuda.memory_allocated() / 2**20) if at.type == "cuda" else 0,
            )


if __name__ == "__main__":
    main()
