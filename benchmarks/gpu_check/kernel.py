"""Check the compiled Triton kernel: its draws, log-probabilities and ranks.

The reference is torch in float64 (:mod:`benchmarks.gpu_check.philox`). With noise in float32 the choice may differ if
the two best entries are almost equal: `behind` is the largest difference of their scores.
"""

from __future__ import annotations

import time

import torch

from benchmarks.gpu_check import philox
from benchmarks.gpu_check.reporting import VOCABULARY, device, quick, report
from verl_rhyme.engine import draw_kernel

#: Rows per float64 computation.
_CHUNK = 16


def logits_of(rows: int, vocabulary: int, at: torch.device) -> torch.Tensor:
    """Return float32 [rows, vocabulary]: normal with a deviation of 3, a fifth of them impossible."""
    generator = torch.Generator(at).manual_seed(vocabulary)
    logits = 3 * torch.randn((rows, vocabulary), generator=generator, device=at)
    logits[torch.rand(logits.shape, generator=generator, device=at) < 0.2] = -torch.inf
    logits[:, -1] = 0
    return logits


def check(rows: int, vocabulary: int, dtype: torch.dtype, raw: bool) -> None:
    """Check one batch and print a row."""
    at = device()
    given = logits_of(rows, vocabulary, at).to(dtype)
    generator = torch.Generator().manual_seed(rows)
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator).to(at)
    positions = torch.randint(0, 2**40, (rows,), generator=generator).to(at)
    temperatures = torch.tensor([0.0, 0.6, 1.0, 1.5])[torch.arange(rows) % 4].to(at)
    began = time.perf_counter()
    tokens, logprobs = draw_kernel.draw(given, keys, positions, temperatures, raw=raw)
    ranks = draw_kernel.ranks(given, tokens)
    if at.type == "cuda":
        torch.cuda.synchronize()
    first_s = time.perf_counter() - began
    same, behind, error, ranked = 0, 0.0, 0.0, True
    for part in range(0, rows, _CHUNK):
        of = slice(part, part + _CHUNK)
        greedy = temperatures[of] == 0
        scaled = given[of].float() / torch.where(greedy, 1.0, temperatures[of])[:, None]
        noise = philox.gumbel(philox.words(keys[of], positions[of], vocabulary))
        score = scaled.double() + torch.where(greedy[:, None], 0.0, noise)
        best, chosen = score.max(-1).values, score.gather(1, tokens[of, None])[:, 0]
        same += int((score.argmax(-1) == tokens[of]).sum())
        behind = max(behind, float((best - chosen).max()))
        base = (given[of].float() if raw else scaled).double()
        expected = base.log_softmax(-1).gather(1, tokens[of, None])[:, 0]
        error = max(error, float((logprobs[of].double() - expected).abs().max()))
        least = given[of].gather(1, tokens[of, None])
        ranked &= bool(((given[of] >= least).sum(-1) == ranks[of]).all())
    report(
        rows=rows,
        vocabulary=vocabulary,
        dtype=str(dtype).removeprefix("torch."),
        raw=raw,
        same=same,
        behind=behind,
        logprob_error=error,
        ranks_right=ranked,
        first_call_s=round(first_s, 2),
        compiled=at.type == "cuda",
    )


def main() -> None:
    if quick():
        check(8, 4099, torch.bfloat16, False)
        return
    for rows, vocabulary in ((1, 1), (3, 97), (256, 4099), (33, VOCABULARY), (1024, VOCABULARY)):
        for dtype, raw in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
            check(rows, vocabulary, dtype, raw)


if __name__ == "__main__":
    main()
