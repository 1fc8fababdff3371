"""vLLM looks for a stop string once a step, after all of the step's tokens: what follows it stays in ``token_ids``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from verl_rhyme.patches.core import Patch


def _one_token_at_a_time(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def process_outputs(self: Any, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        # As an engine without speculation gives them: at the token that ends the stop string the request leaves
        # `request_states`, and the original ignores what comes for it after that.
        single: list[Any] = []
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            stops = getattr(getattr(state, "detokenizer", None), "stop", None)
            split = stops and len(output.new_token_ids) > 1 and not state.streaming_input
            single += _tokens(output) if split else [output]
        return original(self, single, *args, **kwargs)

    return process_outputs


def _tokens(output: Any) -> Iterator[Any]:
    """A step's output as one for each of its tokens; what comes once comes with the first, the end with the last."""
    from msgspec.structs import replace

    tokens, logprobs, experts = output.new_token_ids, output.new_logprobs, output.routed_experts
    count = len(tokens)
    before = 0 if experts is None else len(experts) - count  # a first token has its prompt's
    for at, token in enumerate(tokens):
        once: dict[str, Any] = {}
        if at > 0:
            once |= {"new_prompt_logprobs_tensors": None, "events": None, "prefill_stats": None}
        if at < count - 1:
            once |= {"finish_reason": None, "stop_reason": None, "kv_transfer_params": None}
        yield replace(
            output,
            new_token_ids=[token],
            new_logprobs=None if logprobs is None else logprobs.slice_request(at, 1),
            routed_experts=None if experts is None else experts[before + at if at else 0 : before + at + 1],
            **once,
        )


PATCH = Patch(
    name="vllm_stop_strings",
    target="vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
    why="with speculation a response that ends at a stop string keeps the tokens accepted after it: they would be "
    "trained as the model's own, and an agent loop would take a drafted tool's answer for the tool's",
    upstream="vllm-project/vllm#47616",
    requires="vllm==0.24.0",
    source_sha256="337dee57e36992f169e0660dcb76e740f2dda9c14135651925556594b461f339",
    replace=_one_token_at_a_time,
)
