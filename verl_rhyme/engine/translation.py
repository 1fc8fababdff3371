"""From the step that an asynchronous scheduler planned to the step that a synchronous one would have planned.

The scheduler plans a step before the tokens of the step in flight are known, and without drafts: one token a row. When
the worker runs the step, it knows these tokens, which rows they end, and the drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from vllm.v1.core.sched.utils import check_stop

#: Planned draft tokens by request.
Drafts = Mapping[str, list[int]]


@dataclass(slots=True)
class Report:
    """What a worker reports to the scheduler with a step's output."""

    FIELD: ClassVar[str] = "rhyme"  # attribute of vLLM's ModelRunnerOutput

    drafted: dict[str, int]  # draft tokens that the step verified, by request; none without drafts
    drafts: bool  # whether the worker wants to draft: to know a step's tokens before the next step begins


@dataclass(frozen=True, slots=True)
class Bounds:
    step_tokens: int  # most tokens of a step
    groups: tuple[int, ...]  # numbers of the attention layers' groups of KV caches
    ranks: int = 1  # that share a sequence
    reserved: int = 0  # slots of each row that the model's own drafter takes


def add_drafts(output: Any, drafts: Drafts, batch: Any, requests: Mapping[str, Any], bounds: Bounds) -> None:
    """Add planned drafts to ``output``, a SchedulerOutput of one token a row, and to vLLM's batch, within the bounds.

    ``requests``: vLLM's CachedRequestState.
    """
    tokens, verified = dict(output.num_scheduled_tokens), {}
    names = [name for name, draft in drafts.items() if draft]
    if not names:
        return
    planned = [drafts[name] for name in names]
    rows = np.array([batch.req_id_to_index[name] for name in names], dtype=np.int64)
    lengths = batch.num_tokens_no_spec[rows].astype(np.int64)
    tables = [batch.block_table[group] for group in bounds.groups]
    slots = np.min([table.num_blocks_per_row[rows] * table.block_size for table in tables], axis=0) * bounds.ranks
    # One slot remains for the row's next token, which comes in any case.
    limits = np.maximum(slots - lengths - 1 - bounds.reserved, 0)
    # The scheduler masks a grammar's rows after this step's drafts only if tokens of the step before were pending.
    if output.has_structured_output_requests and not output.pending_structured_output_tokens:
        limits[[requests[name].sampling_params.structured_outputs is not None for name in names]] = 0
    counts = np.minimum(np.fromiter(map(len, planned), np.int64, len(planned)), limits)
    room = bounds.step_tokens - output.total_num_scheduled_tokens
    if (total := int(counts.sum())) > room:
        counts = np.diff(np.minimum(counts.cumsum(), room), prepend=0)
        total = room
    for name, row, draft, count in zip(names, rows.tolist(), planned, counts.tolist(), strict=True):
        if count:
            verified[name] = draft = draft[:count]
            tokens[name] += count
            batch.spec_token_ids[row] = list(draft)
    drafted = np.fromiter(chain.from_iterable(verified.values()), np.int64, total)
    row, column = np.repeat(rows, counts), spread(lengths, counts)
    batch.token_ids_cpu[row, column], batch.is_token_ids[row, column] = drafted, True
    output.num_scheduled_tokens, output.scheduled_spec_decode_tokens = tokens, verified
    output.total_num_scheduled_tokens += total


def spread(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return ``counts[i]`` positions from each ``begins[i]``, int64[sum(counts)]."""
    ends = counts.cumsum()
    return np.repeat(begins - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)


def has_ended(state: Any, new: Sequence[int], model_len: int) -> bool:
    """Return whether vLLM's scheduler ends a request after one of its ``new`` tokens; ``state``: with all of them."""
    params, count = state.sampling_params, len(state.output_token_ids)
    request = SimpleNamespace(pooling_params=None, sampling_params=params, max_tokens=params.max_tokens)
    for length in range(count - len(new) + 1, count + 1):
        request.output_token_ids, request.num_output_tokens = state.output_token_ids[:length], length
        request.num_tokens = state.num_tokens - count + length
        if check_stop(request, model_len):
            return True
    return False
