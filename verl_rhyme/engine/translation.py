"""From the step that an asynchronous scheduler planned to the step that a synchronous one would have planned.

The scheduler plans a step before the tokens of the step in flight are known. It counts one token of each row; accepted
drafts add more, and a row may have ended. When the worker gets the plan, it knows the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

from vllm.v1.core.sched.utils import check_stop


@dataclass(slots=True)
class Report:
    """What a worker reports to the scheduler with a step's output."""

    FIELD: ClassVar[str] = "rhyme"  # attribute of vLLM's ModelRunnerOutput

    drafted: dict[str, int]  # draft tokens that the step verified, by request; none without drafts
    drafts: bool  # whether the worker wants to draft: to know a step's tokens before the next step begins


@dataclass(frozen=True, slots=True)
class Bounds:
    step_tokens: int  # most tokens of a step
    model_len: int  # most tokens of a request
    blocks: Mapping[int, int]  # tokens of a block, by number of an attention layer's group of KV caches
    reserved: int = 0  # slots of each row that the model's own drafter takes


def translate(
    output: Any,
    sampled: Mapping[str, Sequence[int]],
    requests: Mapping[str, Any],
    drafts: Mapping[str, list[int]],
    bounds: Bounds,
) -> Any:
    """Return ``output``, a SchedulerOutput, as a synchronous scheduler would plan it.

    ``sampled``: tokens that the step before gave each request of its batch; none while a prompt is prefilled.
    ``requests``: vLLM's CachedRequestState with these tokens. ``drafts``: planned draft tokens.
    """
    cached = output.scheduled_cached_reqs
    tokens, verified = dict(output.num_scheduled_tokens), {}
    computed, outputs = list(cached.num_computed_tokens), list(cached.num_output_tokens)
    room, ended = bounds.step_tokens - output.total_num_scheduled_tokens, []
    # The scheduler masks a grammar's rows after this step's drafts, if tokens of the step before were pending.
    masked = output.has_structured_output_requests and not output.pending_structured_output_tokens
    for i, name in enumerate(cached.req_ids):
        new = sampled.get(name)
        if not new or name in cached.resumed_req_ids:
            continue
        state = requests[name]
        if has_ended(state, new, bounds.model_len):
            ended.append(i)
            room += tokens.pop(name)
            continue
        known = state.num_tokens
        computed[i], outputs[i] = known - 1, len(state.output_token_ids)
        draft = drafts.get(name)
        if not draft or (masked and state.sampling_params.structured_outputs is not None):
            continue
        # One slot remains for the row's next token, which comes in any case.
        most = min(room, _slots(state, cached.new_block_ids[i], bounds) - known - 1 - bounds.reserved)
        if most > 0:
            verified[name] = draft = draft[:most]
            tokens[name] += len(draft)
            room -= len(draft)
    return replace(
        output,
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=bounds.step_tokens - room,
        scheduled_spec_decode_tokens=verified,
        scheduled_cached_reqs=replace(
            cached,
            req_ids=_without(cached.req_ids, ended),
            new_block_ids=_without(cached.new_block_ids, ended),
            num_computed_tokens=_without(computed, ended),
            num_output_tokens=_without(outputs, ended),
        ),
    )


def has_ended(state: Any, new: Sequence[int], model_len: int) -> bool:
    """Return whether vLLM's scheduler ends a request after one of its ``new`` tokens; ``state``: with all of them."""
    params, count = state.sampling_params, len(state.output_token_ids)
    stops = params.stop_token_ids or ()
    if count < params.max_tokens and state.num_tokens < model_len:
        eos = params.eos_token_id
        if not any(token == eos or token in stops for token in new):
            return False
    request = SimpleNamespace(pooling_params=None, sampling_params=params, max_tokens=params.max_tokens)
    for length in range(count - len(new) + 1, count + 1):
        request.output_token_ids, request.num_output_tokens = state.output_token_ids[:length], length
        request.num_tokens = state.num_tokens - count + length
        if check_stop(request, model_len):
            return True
    return False


def _slots(state: Any, new_blocks: Any, bounds: Bounds) -> int:
    """Return the most tokens whose keys and values a request has blocks for."""
    return min(
        size * (len(state.block_ids[group]) + (len(new_blocks[group]) if new_blocks is not None else 0))
        for group, size in bounds.blocks.items()
    )


def _without(entries: list[Any], ended: list[int]) -> list[Any]:
    return [each for i, each in enumerate(entries) if i not in ended] if ended else entries
