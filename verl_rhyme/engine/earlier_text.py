"""Stop strings that begin before an interruption of a response and end after it.

vLLM's front end looks for stop strings; it is given the end of the text before the interruption.
"""

from __future__ import annotations

import functools
from typing import Any

from msgspec.structs import replace
from vllm.v1.engine.detokenizer import IncrementalDetokenizer, SlowIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor

from verl_rhyme.processes.request import RequestMeta


def install(processor: OutputProcessor) -> None:
    """Look for stop strings from a response's first token on (``RequestMeta.resumed_tokens``)."""
    original = processor.add_request

    @functools.wraps(original)
    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        original(request, *args, **kwargs)
        state = processor.request_states[request.request_id]
        made = RequestMeta.of(request.sampling_params.extra_args).resumed_tokens if request.sampling_params else 0
        if made and getattr(state.detokenizer, "stop", None):
            state.detokenizer = _detokenizer_with_earlier_text(processor.tokenizer, request, made)

    processor.add_request = add_request  # type: ignore[method-assign]


def _detokenizer_with_earlier_text(tokenizer: Any, request: Any, made: int) -> Any:
    """Return a detokenizer of a request whose prompt ends in ``made`` tokens of its response.

    Its text begins with the end of their text, at least as long as any stop string. Its token ids and log-probs are
    those of the request's new tokens only.
    """
    prompt = request.prompt_token_ids
    last = 16
    while True:
        last = min(last, made)
        detokenizer: Any = IncrementalDetokenizer.from_new_request(
            tokenizer, replace(request, prompt_token_ids=prompt[:-last])
        )
        stop, detokenizer.stop = detokenizer.stop, []  # the text below `min_tokens` may contain a stop string
        detokenizer.update(prompt[-last:], False)
        detokenizer.stop = stop
        if last == made or len(detokenizer.output_text) >= max(map(len, stop)):
            break
        last *= 2
    if isinstance(detokenizer, SlowIncrementalDetokenizer):
        detokenizer.prompt_len += last
    else:
        detokenizer.token_ids.clear()
    detokenizer._last_output_text_offset = len(detokenizer.output_text)
    return detokenizer
