"""Token draws for a batch of logits: noise keys, sampling options, log-probabilities.

The noise is keyed by position and by the request's own key (so that it repeats when it is regenerated), ``seed`` or id.
Options other than the temperature go through vLLM's processors first, a few rows at a time.

Log-probabilities are those of vLLM's ``logprobs_mode``, or with :data:`POLICY_LOGPROBS` the policy's: over the whole
vocabulary at the request's temperature, as verl's actor computes them, before any option that masks or shifts logits.

In vLLM's V1 model runner a row's ``num_tokens_no_spec`` counts prompt and sampled tokens, hence it is the position of
the next token; while a prompt is prefilled in chunks, the draw is discarded. ``InputBatch.add_request`` sets it, and
``_bookkeeping_sync`` advances it. In asynchronous engines of ours :mod:`.steps` corrects it for accepted drafts. vLLM's
own asynchronous drafts leave it wrong, so that combination is refused.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler

from verl_rhyme.config.presets import POLICY_LOGPROBS
from verl_rhyme.engine import draw
from verl_rhyme.engine.draw import Rows, ranks
from verl_rhyme.processes.request import RequestMeta
from verl_rhyme.sampling.noise import key_of

#: Bytes of float32 logits processed at a time: they fit into a CPU's caches, or fill a GPU. Temporaries take a few
#: times as many.
CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
#: Start of the ids of all requests but the first that vLLM makes from one with ``n`` above 1; the options are the same.
_LATER_TEXT = re.compile("([1-9][0-9]*)_")


class BatchNoise:
    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._ids: list[str] = []  # vLLM's request ids of the latest batch
        self._keys = np.empty(0, dtype=np.uint64)
        self._keyed = np.empty(0, dtype=bool)

    def rows(self, counts: np.ndarray) -> Rows:
        """Return the inputs of all rows; ``counts`` are int64[B], rows of each request: its drafted tokens plus one."""
        requests = len(counts)
        batch = self._runner.input_batch
        request = np.repeat(np.arange(requests), counts)
        offset = np.arange(len(request)) - np.repeat(counts.cumsum() - counts, counts)
        if not batch.req_ids:  # vLLM profiles its samplers without requests
            keys, at, keyed = (np.zeros(len(request), dtype=kind) for kind in (np.uint64, np.int64, bool))
            return Rows(request, keys, at, np.ones(len(request), dtype=np.float32), keyed)
        if batch.req_ids != self._ids:
            known = dict(zip(self._ids, zip(self._keys, self._keyed, strict=True), strict=True))
            self._ids = list(batch.req_ids)
            both = [known.get(id) or self._key(id) for id in self._ids]
            self._keys = np.array([key for key, _ in both], dtype=np.uint64)
            self._keyed = np.array([keyed for _, keyed in both], dtype=bool)
        positions = batch.num_tokens_no_spec[:requests].astype(np.int64)
        return Rows(
            request,
            self._keys[request],
            positions[request] + offset,
            batch.temperature_cpu[:requests][request],
            self._keyed[request],
        )

    def budgeted(self) -> np.ndarray:
        params = [self._runner.requests[id].sampling_params for id in self._runner.input_batch.req_ids]
        return np.flatnonzero([each.thinking_token_budget is not None for each in params])

    def _key(self, id: str) -> tuple[int, bool]:
        """Return a request's noise key, and whether its noise must be reproducible."""
        params = self._runner.requests[id].sampling_params
        if noise := RequestMeta.of(params.extra_args).noise:
            later = _LATER_TEXT.match(id)
            return key_of(noise, int(later[1])) if later else int(noise, 16), True
        if params.seed is not None:
            return key_of("seed", params.seed), False
        # vLLM's ids end in eight random characters and are the same on all ranks.
        return key_of("request", id), False


#: Drawn tokens, int64[N], and, if requested, vLLM's table of log-probabilities.
Drawn = tuple[torch.Tensor, LogprobsTensors | None]


class Drawer:
    """Draws a token for each row of logits under its request's sampling options."""

    def __init__(self, runner: Any, logprobs_mode: str | None = None) -> None:
        self._noise = BatchNoise(runner)
        self.mode: str = logprobs_mode or runner.sampler.logprobs_mode
        self._processors = RejectionSampler(runner.sampler)  # vLLM's logits processors at drafted positions
        self._scratch = torch.empty(0)
        self._kept: list[tuple[np.ndarray, torch.Tensor]] = []  # rows (int64) and their logits, of this step

    def keep(self, rows: np.ndarray, logits: torch.Tensor) -> None:
        """Keep a copy of some rows of logits [N, V] that are masked before the step's draw, for the policy's sake."""
        if len(rows) and self.mode == POLICY_LOGPROBS:
            self._kept.append((rows, logits[torch.from_numpy(rows).to(logits.device, non_blocking=True)]))

    def budgeted(self, metadata: SamplingMetadata) -> np.ndarray:
        holder = metadata.thinking_budget_state_holder
        return self._noise.budgeted() if holder is not None and holder.has_tracked_requests() else np.empty(0, np.int64)

    def draw(self, logits: torch.Tensor, metadata: SamplingMetadata, counts: np.ndarray) -> Drawn:
        """Draw a token for each row of ``logits``, float[N, V]; ``counts`` are int64[B], adjacent rows of a request."""
        if len(budgeted := self.budgeted(metadata)):
            self.keep((counts.cumsum() - counts)[budgeted], logits)
            logits = _within_budgets(logits, metadata, counts)
            metadata = replace(metadata, thinking_budget_state_holder=None)
        rows = self._noise.rows(counts)
        wanted = _wanted(metadata)
        plain = not (_changed(metadata) or wanted) and not self.mode.endswith("logits")
        if plain and logits.device.type == "cuda":
            tokens, logprobs = draw.draw_on_gpu(logits, rows, scaled=False, raw=self.mode.startswith("raw"))
            table = None if wanted is None else _table_of_one(tokens, logprobs, ranks(logits, tokens))
        else:
            parts = [
                self._draw_some(logits[at], rows.part(at), metadata, len(counts))
                for at in _chunks(logits, counts, metadata)
            ]
            tokens = torch.cat([drawn for drawn, _ in parts])
            tables = [each[:3] for _, each in parts if each is not None]
            table = LogprobsTensors(*map(torch.cat, zip(*tables, strict=True))) if tables else None
        if table is not None:
            self._restore(table, tokens, rows, metadata)
        self._kept = []
        return tokens, table

    def _restore(self, table: LogprobsTensors, tokens: torch.Tensor, rows: Rows, metadata: SamplingMetadata) -> None:
        for masked, logits in reversed(self._kept):  # a row of two masks was kept twice, at first as the model's
            for part in _slices(len(logits), _most(logits)):
                at = masked[part]
                where = torch.from_numpy(at).to(logits.device, non_blocking=True)
                policy = _scaled(logits[part].float(), rows.part(at))
                of_policy = self._table(policy, tokens[where], rows.request[at], metadata)
                for column, new in zip(table[:3], of_policy[:3], strict=True):
                    column[where] = new.to(column.dtype)

    def _draw_some(self, logits: torch.Tensor, rows: Rows, metadata: SamplingMetadata, requests: int) -> Drawn:
        raw = logits.float().contiguous()
        policy = _scaled(raw, rows)
        target = self._target(raw, policy, rows, metadata, requests) if _changed(metadata) else policy
        base = raw if self.mode.startswith("raw") else policy if self.mode == POLICY_LOGPROBS else target
        wanted = _wanted(metadata)
        if logits.device.type == "cuda":
            tokens, logprobs = draw.draw_on_gpu(target, rows, scaled=True, raw=False)
        else:
            if self._scratch.numel() < target.numel():
                self._scratch = torch.empty(target.numel())
            wants = wanted == 0 and base is target
            tokens, logprobs = draw.draw_on_cpu(target, rows, self._scratch, want_logprobs=wants)
        if wanted is None:
            return tokens, None
        return tokens, self._table(base, tokens, rows.request, metadata, logprobs if base is target else None)

    def _table(
        self,
        base: torch.Tensor,
        tokens: torch.Tensor,
        request: np.ndarray,
        metadata: SamplingMetadata,
        logprobs: torch.Tensor | None = None,
    ) -> LogprobsTensors:
        """Return vLLM's table from logits ``base``, float32[N, V]; ``logprobs``: of the tokens, if known."""
        wanted = _wanted(metadata)
        assert wanted is not None
        if wanted == 0 and not self.mode.endswith("logits"):
            if logprobs is None:
                logprobs = base.gather(1, tokens[:, None])[:, 0] - base.logsumexp(dim=-1)
            return _table_of_one(tokens, logprobs, ranks(base, tokens))
        table = base if self.mode.endswith("logits") else base.log_softmax(dim=-1)
        ids = table.topk(wanted, dim=-1).indices
        if asked := metadata.logprob_token_ids:
            for row, of in enumerate(request.tolist()):
                ids[row, : len(asked.get(of, ()))] = torch.tensor(asked.get(of, ()), dtype=ids.dtype)
        ids = torch.cat([tokens[:, None], ids], dim=1)
        return LogprobsTensors(ids.to(torch.int32), table.gather(1, ids), ranks(base, tokens))

    def _target(
        self, raw: torch.Tensor, policy: torch.Tensor, rows: Rows, metadata: SamplingMetadata, requests: int
    ) -> torch.Tensor:
        """Return new logits with all sampling options applied; ``policy`` is ``raw`` divided by the temperatures."""
        if _positional(metadata):
            target = _scaled(self._processed(raw.clone(), rows, metadata, requests), rows)
        else:
            target = policy.clone()
        if not _masked(metadata):
            return target.contiguous()
        request = torch.from_numpy(rows.request).to(target.device, non_blocking=True)
        for processor in metadata.logitsprocs.argmax_invariant:
            if processor.min_p_count:
                each = copy.copy(processor)
                each.min_p = processor.min_p[request]
                target = each.apply(target)
        k, p = (None if column is None else column[request] for column in (metadata.top_k, metadata.top_p))
        return apply_top_k_top_p(target, k, p)

    def _processed(self, logits: torch.Tensor, rows: Rows, metadata: SamplingMetadata, requests: int) -> torch.Tensor:
        """Apply the options that depend on earlier tokens; ``rows`` has all rows of each of its requests."""
        first, last = int(rows.request[0]), int(rows.request[-1]) + 1
        counts = np.bincount(rows.request, minlength=requests)
        for processor in metadata.logitsprocs.non_argmax_invariant:
            for request, biases in getattr(processor, "biases", {}).items():
                if first <= request < last:
                    at = np.flatnonzero(rows.request == request)
                    tokens = torch.tensor(list(biases), device=logits.device)
                    values = torch.tensor(list(biases.values()), device=logits.device)
                    logits[at[0] : at[-1] + 1, tokens] += values
        # vLLM takes every row for a drafted position, also the last of each request, whose draft it never reads.
        drafts = metadata.spec_token_ids or [[] for _ in counts]
        padded = [[*drafts[i][: n - 1], PLACEHOLDER_TOKEN_ID] if n else [] for i, n in enumerate(counts.tolist())]
        return self._processors.apply_logits_processors(
            logits,
            replace(metadata, spec_token_ids=padded),
            SimpleNamespace(num_draft_tokens=counts.tolist()),  # type: ignore[arg-type]
        )


def _scaled(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return the logits divided by the rows' temperatures; the same tensor if all are 1."""
    divisors = np.where(rows.temperatures > 0, rows.temperatures, np.float32(1))
    if (divisors == 1).all():
        return logits
    return logits / torch.from_numpy(divisors).to(logits.device, non_blocking=True)[:, None]


def _table_of_one(tokens: torch.Tensor, logprobs: torch.Tensor, ranked: torch.Tensor) -> LogprobsTensors:
    return LogprobsTensors(tokens.to(torch.int32)[:, None], logprobs[:, None], ranked)


def _wanted(metadata: SamplingMetadata) -> int | None:
    asked = metadata.logprob_token_ids
    return max(metadata.max_num_logprobs or 0, *map(len, asked.values())) if asked else metadata.max_num_logprobs


def _within_budgets(logits: torch.Tensor, metadata: SamplingMetadata, counts: np.ndarray) -> torch.Tensor:
    """The end of thinking is forced in the first row of each request that exceeds its budget."""
    holder = metadata.thinking_budget_state_holder
    assert holder is not None
    holder.update_state(metadata.output_token_ids, None)
    if logits.dtype == torch.float16:  # the forced value exceeds it
        logits = logits.float()
    # vLLM gives each request as many rows as it has drafts here, hence one more draft than there are.
    return holder.apply_to_logits(logits, False, [[PLACEHOLDER_TOKEN_ID] * n for n in counts.tolist()])


def _changed(metadata: SamplingMetadata) -> bool:
    """Whether a request draws from another distribution than the policy's at its temperature."""
    return _positional(metadata) or _masked(metadata)


def _positional(metadata: SamplingMetadata) -> bool:
    """Whether a request has options that depend on earlier tokens or on the request alone."""
    return bool(
        not metadata.no_penalties
        or metadata.bad_words_token_ids
        or metadata.allowed_token_ids_mask is not None
        or any(
            getattr(p, "min_toks", None) or getattr(p, "biases", None)
            for p in metadata.logitsprocs.non_argmax_invariant
        )
    )


def _masked(metadata: SamplingMetadata) -> bool:
    return (
        metadata.top_k is not None
        or metadata.top_p is not None
        or any(processor.min_p_count for processor in metadata.logitsprocs.argmax_invariant)
    )


def _chunks(logits: torch.Tensor, counts: np.ndarray, metadata: SamplingMetadata) -> Iterator[slice]:
    """Slices of a few rows hold whole requests where vLLM's processors need that."""
    most = _most(logits)
    if not _positional(metadata):
        yield from _slices(logits.shape[0], most)
        return
    first = end = 0
    for count in counts.tolist():
        if end > first and end + count - first > most:
            yield slice(first, end)
            first = end
        end += count
    yield slice(first, end)


def _most(logits: torch.Tensor) -> int:
    return max(1, CHUNK_BYTES[logits.device.type] // (4 * logits.shape[1]))


def _slices(rows: int, most: int) -> Iterator[slice]:
    yield from (slice(first, min(first + most, rows)) for first in range(0, rows, most))
