"""Check stop strings after each token: vLLM checks once a step and keeps the tokens after a stop string
(vllm-project/vllm#47616).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_rhyme.patches.core import Patch, around


def _one_token_at_a_time(original: Any, self: Any, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
    # An engine without speculation sends one token at a time. The request leaves `request_states` at the token
    # that completes the stop string, and the original ignores later tokens of that request.
    single: list[Any] = []
    for output in engine_core_outputs:
        state = self.request_states.get(output.request_id)
        stops = getattr(getattr(state, "detokenizer", None), "stop", None)
        split = stops and len(output.new_token_ids) > 1 and not state.streaming_input
        single += _tokens(output) if split else [output]
    return original(self, single, *args, **kwargs)


def _tokens(output: Any) -> Iterator[Any]:
    """One output per token; fields that come once go with the first token, the finish reason with the last."""
    from msgspec.structs import replace

    tokens, logprobs, experts = output.new_token_ids, output.new_logprobs, output.routed_experts
    count = len(tokens)
    before = 0 if experts is None else len(experts) - count  # the first token also carries the prompt's experts
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
    why="with speculation, a response that ends at a stop string keeps the draft tokens accepted after it: training "
    "would use them, and an agent loop would read a drafted tool answer as the tool's answer",
    requires="vllm==0.24.0",
    source_sha256="337dee57e36992f169e0660dcb76e740f2dda9c14135651925556594b461f339",
    replace=around(_one_token_at_a_time),
)
