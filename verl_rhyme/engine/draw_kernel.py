"""Triton kernel that draws a token and its log-probability in one pass over each row of logits.

Rows are split into parts so that a few rows fill a GPU; ``_combine`` merges the parts. The noise is that of
:mod:`verl_rhyme.sampling.noise` in float32. It is generated in registers, so that only the logits are read from memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Vocabulary entries that a program processes together, four to a Philox block.
_BLOCK = 2048
#: Programs that fill a GPU.
_PROGRAMS = 1024

#: Arguments with a few entries a row.
_SMALL = (
    *("keys", "positions", "temperatures", "scores", "tokens", "chosen", "highest", "sums"),
    *("out_tokens", "out_logprobs", "ranks"),
)

_UNIT = tl.constexpr(2.0**-32)


@triton.jit
def _gumbel(word):
    """float32 Gumbel noise of uint32 bits, with full relative precision at both ends of (0, 1)."""
    u = (word.to(tl.float32) + 0.5) * _UNIT
    complement = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * _UNIT  # 1 - u
    # -log(1 - u), by its series where 1 - u has lost its leading digits
    near = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u / 6)))))
    return -tl.log(tl.where(u < 1 / 32, near, -tl.log(complement)))


# Compiled once per model. Specialising on one part or on alignment would recompile while requests wait.
@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=_SMALL)
def _draw(
    logits,  # float [N, V]
    stride,
    keys,  # int64 [N]
    positions,  # int64 [N]
    temperatures,  # float32 [N], 0 for greedy rows
    vocabulary,
    part_size,
    parts,
    scores,  # float32 [N, parts], best perturbed logit
    tokens,  # int32 [N, parts], its token
    chosen,  # float32 [N, parts], its logit as used by the log-probability
    highest,  # float32 [N, parts], largest such logit
    sums,  # float32 [N, parts], sum of exp(logit - largest)
    RAW: tl.constexpr,  # log-probabilities before the temperature
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    noisy = temperature > 0
    divisor = tl.where(noisy, temperature, 1.0)
    key = tl.load(keys + row)
    position = tl.load(positions + row)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    quads = tl.arange(0, BLOCK // 4)
    score = -float("inf")
    token = part * part_size
    logit = -float("inf")
    most = -float("inf")
    total = 0.0
    end = tl.minimum((part + 1) * part_size, vocabulary)
    for first in range(part * part_size, end, BLOCK):
        entries = first + quads[:, None] * 4 + tl.arange(0, 4)[None, :]
        raw = tl.load(logits + row * stride + entries, mask=entries < end, other=-float("inf")).to(tl.float32)
        scaled = raw / divisor
        block = (first // 4 + quads).to(tl.uint32)
        zero = tl.zeros_like(block)
        w0, w1, w2, w3 = tl.philox(key, block, zero + low, zero + high, zero)
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK // 4, 4])
        perturbed = tl.where(noisy, scaled + _gumbel(words), scaled)
        base = raw if RAW else scaled

        best = tl.max(tl.max(perturbed, axis=1), axis=0)
        if best > score:
            at = tl.where(perturbed == best, entries, 0x7FFFFFFF)
            token = tl.min(tl.min(at, axis=1), axis=0)
            logit = tl.max(tl.max(tl.where(entries == token, base, -float("inf")), axis=1), axis=0)
            score = best
        now = tl.maximum(most, tl.max(tl.max(base, axis=1), axis=0))
        reference = tl.where(now == -float("inf"), 0.0, now)
        total = total * tl.exp(most - reference) + tl.sum(tl.sum(tl.exp(base - reference), axis=1), axis=0)
        most = now
    out = row * parts + part
    tl.store(scores + out, score)
    tl.store(tokens + out, token)
    tl.store(chosen + out, logit)
    tl.store(highest + out, most)
    tl.store(sums + out, total)


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=_SMALL)
def _combine(scores, tokens, chosen, highest, sums, parts, out_tokens, out_logprobs, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    at = row * parts + part
    here = part < parts
    score = tl.load(scores + at, mask=here, other=-float("inf"))
    most = tl.load(highest + at, mask=here, other=-float("inf"))
    best = tl.max(score, axis=0)
    winner = tl.min(tl.where((score == best) & here, part, PARTS), axis=0)
    winner = tl.where(winner == PARTS, 0, winner)  # a row of NaN
    top = tl.max(most, axis=0)
    reference = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.load(sums + at, mask=here, other=0.0) * tl.exp(most - reference), axis=0)
    logit = tl.load(chosen + row * parts + winner)
    tl.store(out_tokens + row, tl.load(tokens + row * parts + winner).to(tl.int64))
    tl.store(out_logprobs + row, logit - reference - tl.log(total))


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _rank(logits, stride, tokens, vocabulary, part_size, ranks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    least = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32)
    count = tl.zeros([BLOCK], dtype=tl.int32)
    end = tl.minimum((part + 1) * part_size, vocabulary)
    for first in range(part * part_size, end, BLOCK):
        entries = first + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + entries, mask=entries < end, other=-float("inf")).to(tl.float32)
        count += ((value >= least) & (entries < end)).to(tl.int32)
    tl.atomic_add(ranks + row, tl.sum(count, axis=0))


def _parts(rows: int, vocabulary: int) -> tuple[int, int]:
    parts = max(1, min(-(-_PROGRAMS // rows), -(-vocabulary // _BLOCK)))
    size = -(-vocabulary // parts)
    size = -(-size // _BLOCK) * _BLOCK
    return -(-vocabulary // size), size


def draw(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, temperatures: torch.Tensor, raw: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row, ``argmax(logits / T + gumbel)``, int64[N], with its log-probability, float32[N].

    ``logits`` are float[N, V] of any float type, rows contiguous, -inf for masked tokens; ``keys`` and ``positions``
    are int64[N] as in :func:`verl_rhyme.sampling.noise.draw`; ``temperatures`` are float32[N], 0 for greedy rows, whose
    log-probability is that at temperature 1. With ``raw`` log-probabilities are those of ``logits``.
    """
    rows, vocabulary = logits.shape
    parts, size = _parts(rows, vocabulary)
    floats = torch.empty((4, rows, parts), dtype=torch.float32, device=logits.device)
    where = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    scores, chosen, highest, sums = floats
    _draw[(rows, parts)](
        logits, logits.stride(0), keys, positions, temperatures, vocabulary, size, parts,
        scores, where, chosen, highest, sums, RAW=raw, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _combine[(rows,)](
        scores, where, chosen, highest, sums, parts, tokens, logprobs,
        PARTS=triton.next_power_of_2(-(-vocabulary // _BLOCK)),
    )  # fmt: skip
    return tokens, logprobs


def ranks(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the ranks, int32[N], of tokens, int64[N]: entries of each row, float[N, V], that are at least it."""
    rows, vocabulary = logits.shape
    parts, size = _parts(rows, vocabulary)
    out = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    _rank[(rows, parts)](logits, logits.stride(0), tokens, vocabulary, size, out, BLOCK=_BLOCK, num_warps=8)
    return out
