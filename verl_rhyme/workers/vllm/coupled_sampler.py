"""vLLM's sampling with the noise of :mod:`verl_rhyme.sorting.noise`: the same key draws the same tokens again.

Every token of the engine is ``argmax(processed logits / T + Gumbel noise of (key, position))``. Drafts are verified by
drawing: at each drafted position the coupled token is the output, and it decides whether the next position counts.
So the output is what it would have been without drafts, whatever was drafted, and needs no residual distribution.
Only equal logits give equal tokens: a model whose logits depend on the batch's shape repeats all but near-ties.

For vLLM's V1 model runner. There a row's ``num_tokens_no_spec`` is its prompt and the tokens sampled so far, hence the
position of the next one: ``InputBatch.add_request`` sets it for new and resumed requests, ``_bookkeeping_sync`` moves
it on, and of a prompt that is still prefilled in chunks the draw is discarded. Asynchronous scheduling with drafts of
a model leaves it behind, so that is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import (
    MAX_SPEC_LEN,
    PLACEHOLDER_TOKEN_ID,
    RejectionSampler,
    apply_sampling_constraints,
)
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from verl_rhyme.sorting.noise import BLOCK, INCREMENTS, MULTIPLIERS, ROUNDS, draw, key_of
from verl_rhyme.workers.request import RequestMeta

#: Logits that the torch implementation perturbs at a time: some 200 MB of temporaries.
CHUNK = 1 << 22

_LOW = 0xFFFFFFFF


def torch_words(keys: torch.Tensor, positions: torch.Tensor, first: int, blocks: int) -> torch.Tensor:
    """:func:`verl_rhyme.sorting.noise.words` on any device, in wrapping int64 arithmetic.

    Args:
        keys: int64 [N], the bits of the uint64 keys.
        positions: int64 [N].
        first: First Philox block.
        blocks: Number of blocks.

    Returns:
        int64 [N, 4 * blocks], each below 2**32: those of vocabulary entries ``4 * first`` and on.
    """
    c0 = torch.arange(first, first + blocks, device=keys.device)[None]
    c1, c2 = (positions & _LOW)[:, None], (positions >> 32)[:, None]
    c3 = torch.zeros_like(c1)
    k0, k1 = (keys & _LOW)[:, None], (keys >> 32 & _LOW)[:, None]
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _LOW) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32 & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = k0 + INCREMENTS[0] & _LOW, k1 + INCREMENTS[1] & _LOW
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1).flatten(1)


def torch_draw(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, plain: torch.Tensor, chunk: int = CHUNK
) -> torch.Tensor:
    """:func:`verl_rhyme.sorting.noise.draw` on any device: the same noise, bit for bit.

    Args:
        logits: float [N, V].
        keys, positions: int64 [N], as for :func:`torch_words`.
        plain: bool [N], greedy rows.
        chunk: Logits perturbed at a time.

    Returns:
        int64 [N].
    """
    n, vocabulary = logits.shape
    best = torch.full((n,), -torch.inf, dtype=torch.float64, device=logits.device)
    token = torch.zeros(n, dtype=torch.int64, device=logits.device)
    width = max(chunk // max(n, 1) // BLOCK, 1)
    for first in range(0, -(-vocabulary // BLOCK), width):
        part = logits[:, first * BLOCK : (first + width) * BLOCK].double()
        noise = torch_words(keys, positions, first, -(-part.shape[1] // BLOCK))[:, : part.shape[1]].double()
        noise = noise.add_(0.5).mul_(-(2.0**-32)).log1p_().neg_().log_().neg_()
        score, at = part.add_(noise.masked_fill_(plain[:, None], 0)).max(dim=1)
        token = torch.where(score > best, at + first * BLOCK, token)
        best = torch.maximum(score, best)
    return token


class BatchNoise:
    """Keys and positions of the rows of a model runner's batch, and the draws made with them."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._keys: dict[str, int] = {}  # by vLLM's request id, of the latest batch
        self._ahead: np.ndarray | None = None

    @contextmanager
    def ahead(self, tokens: np.ndarray) -> Iterator[None]:
        """Within, the rows' next draws lie so many tokens further on (int [rows])."""
        self._ahead = tokens
        try:
            yield
        finally:
            self._ahead = None

    def next_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """One token for each row of the batch; int64 [rows]. Greedy rows are sampled like all others.

        Args:
            logits: float32 [rows, V], processed, divided by the temperature, masked by top-k and top-p.
        """
        keys, positions, _ = self._rows(len(logits))
        if self._ahead is not None:
            positions = positions + self._ahead
        return self._draw(logits, keys, positions, np.zeros(len(logits), dtype=bool))

    def drafted_tokens(self, logits: torch.Tensor, drafted: np.ndarray) -> torch.Tensor:
        """The token of each drafted position, given the drafts before it; int64 [sum(drafted)].

        Args:
            logits: float32 [sum(drafted), V], as above; rows of a request lie together.
            drafted: int64 [rows], draft tokens of each row.
        """
        keys, positions, plain = self._rows(len(drafted))
        offsets = np.arange(len(logits)) - np.repeat(drafted.cumsum() - drafted, drafted)
        return self._draw(
            logits, np.repeat(keys, drafted), np.repeat(positions, drafted) + offsets, np.repeat(plain, drafted)
        )

    def _rows(self, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Key (uint64), next position (int64) and whether greedy (bool) of each row of the batch."""
        batch = self._runner.input_batch
        ids = batch.req_ids
        if not ids:  # vLLM measures its sampler on logits of no request
            return np.zeros(rows, dtype=np.uint64), np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=bool)
        if len(ids) != rows:
            raise RuntimeError(f"{rows} rows to sample for a batch of {len(ids)} requests: whose noise is unknown")
        self._keys = {id: self._keys[id] if id in self._keys else self._key(id) for id in ids}
        keys = np.fromiter(self._keys.values(), dtype=np.uint64, count=rows)
        positions = batch.num_tokens_no_spec[:rows].astype(np.int64)
        return keys, positions, batch.temperature_cpu[:rows] == 0

    def _key(self, id: str) -> int:
        params = self._runner.requests[id].sampling_params
        noise = RequestMeta.of({"extra_args": params.extra_args}).noise
        # vLLM's own ids end in eight random characters, and are the same on all ranks.
        return int(noise, 16) if noise else key_of("request", id)

    @staticmethod
    def _draw(logits: torch.Tensor, keys: np.ndarray, positions: np.ndarray, plain: np.ndarray) -> torch.Tensor:
        if logits.device.type == "cpu":
            return torch.from_numpy(draw(logits.float().contiguous().numpy(), keys, positions, plain))
        arrays = keys.view(np.int64), positions, plain
        return torch_draw(logits, *(torch.from_numpy(array).to(logits.device, non_blocking=True) for array in arrays))


class CoupledTopKTopPSampler(nn.Module):
    """In place of vLLM's ``TopKTopPSampler``: same masks and log-probabilities, our noise, generators unused."""

    def __init__(self, noise: BatchNoise, logprobs_mode: str) -> None:
        super().__init__()
        self.noise = noise
        self.logprobs_mode = logprobs_mode

    def forward(
        self, logits: torch.Tensor, generators: Any, k: torch.Tensor | None, p: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens (int64 [rows]) and what ``logprobs_mode`` wants of the processed logits (float32 [rows, V])."""
        logits = apply_top_k_top_p(logits, k, p)
        processed = None
        if self.logprobs_mode == "processed_logits":
            processed = logits
        elif self.logprobs_mode == "processed_logprobs":
            processed = logits.log_softmax(dim=-1, dtype=torch.float32)
        return self.noise.next_tokens(logits), processed


class CoupledRejectionSampler(RejectionSampler):
    """vLLM's, with drafts verified by drawing the coupled tokens; whatever the drafts' probabilities."""

    def __init__(self, sampler: Any, spec_config: Any, device: torch.device, noise: BatchNoise) -> None:
        super().__init__(sampler, spec_config, device)
        self.noise = noise

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """As the base class; ``sampled_token_ids`` is int32 [rows, longest draft + 1], -1 after a row's last token."""
        assert metadata.max_spec_len <= MAX_SPEC_LEN
        drafted = np.array(metadata.num_draft_tokens, dtype=np.int64)
        with self.noise.ahead(drafted):
            bonus = self.sampler(
                logits=logits[metadata.bonus_logits_indices],
                sampling_metadata=replace(sampling_metadata, max_num_logprobs=-1),
                predict_bonus_token=True,
                logprobs_mode_override="processed_logits" if self.is_processed_logprobs_mode else "raw_logits",
            )
        raw = logits[metadata.target_logits_indices].to(torch.float32)
        target = raw if self.is_processed_logprobs_mode else raw.clone()  # the next two work in place
        target = self.apply_logits_processors(target, sampling_metadata, metadata)
        target = apply_sampling_constraints(target, metadata.cu_num_draft_tokens, sampling_metadata)
        output = until_first_difference(
            metadata.draft_token_ids,
            self.noise.drafted_tokens(target, drafted),
            bonus.sampled_token_ids[:, 0],
            drafted,
            metadata.max_spec_len,
        )
        logprobs = None
        if sampling_metadata.max_num_logprobs is not None:
            logprobs = self._get_logprobs_tensors(
                sampling_metadata.max_num_logprobs,
                metadata,
                logits,
                target if self.is_processed_logprobs_mode else raw,
                bonus.logprobs_tensors.logprobs,
                output,
            )
        return SamplerOutput(sampled_token_ids=output, logprobs_tensors=logprobs)


def until_first_difference(
    drafts: torch.Tensor, tokens: torch.Tensor, bonus: torch.Tensor, drafted: np.ndarray, longest: int
) -> torch.Tensor:
    """Each row's coupled tokens up to the first that is not the draft, and the bonus token where there is none.

    Args:
        drafts: int [sum(drafted)].
        tokens: int64 [sum(drafted)], the coupled token of each drafted position.
        bonus: int [rows], the coupled token after all drafts.
        drafted: int64 [rows].
        longest: ``drafted.max()``.

    Returns:
        int32 [rows, longest + 1], filled up with -1.
    """
    rows, device = len(drafted), tokens.device
    row = np.repeat(np.arange(rows), drafted)
    column = np.arange(len(row)) - np.repeat(drafted.cumsum() - drafted, drafted)
    at, end = (torch.from_numpy(a).to(device, non_blocking=True) for a in (np.stack([row, column]), drafted))
    output = torch.full((rows, longest + 1), PLACEHOLDER_TOKEN_ID, dtype=torch.int32, device=device)
    output[at[0], at[1]] = tokens.to(torch.int32)
    output.scatter_(1, end[:, None], bonus[:, None].to(torch.int32))
    reached = torch.ones((rows, longest + 1), dtype=torch.int32, device=device)
    reached[at[0], at[1] + 1] = (tokens == drafts).to(torch.int32)
    return output.masked_fill_(reached.cumprod(dim=1) == 0, PLACEHOLDER_TOKEN_ID)


def couple(runner: Any) -> bool:
    """Let all sampling of a V1 model runner be coupled.

    Returns:
        Whether it is: false, and nothing changed, where positions are unknown (a runner without V1's batch,
        asynchronous scheduling of drafts) or acceptance is simulated.
    """
    sampler: Any = getattr(runner, "sampler", None)
    batch, rejection = getattr(runner, "input_batch", None), getattr(runner, "rejection_sampler", None)
    if not hasattr(sampler, "topk_topp_sampler") or not hasattr(batch, "num_tokens_no_spec"):
        return False
    if getattr(runner, "use_async_spec_decode", False) or getattr(rejection, "synthetic_mode", False):
        return False
    noise = BatchNoise(runner)
    sampler.topk_topp_sampler = CoupledTopKTopPSampler(noise, sampler.logprobs_mode)
    if rejection is not None:
        runner.rejection_sampler = CoupledRejectionSampler(sampler, runner.speculative_config, runner.device, noise)
    return is_coupled(runner)


def is_coupled(runner: Any) -> bool:
    """Whether both of a runner's samplers are ours, and draw with the same noise."""
    inner = runner.sampler.topk_topp_sampler
    verify = getattr(runner, "rejection_sampler", None)
    if verify is None:
        return isinstance(inner, CoupledTopKTopPSampler)
    return (
        isinstance(inner, CoupledTopKTopPSampler)
        and isinstance(verify, CoupledRejectionSampler)
        and verify.sampler is runner.sampler
        and verify.noise is inner.noise
    )
