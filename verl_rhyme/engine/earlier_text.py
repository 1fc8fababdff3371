"""A stop string may begin before a response was interrupted and end after it: the front end of vLLM, which looks for
it, gets to know the text before."""

from __future__ import annotations

import functools
from typing import Any

from msgspec.structs import replace
from vllm.v1.engine.detokenizer import IncrementalDetokenizer, SlowIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor

from verl_rhyme.processes.request import RequestMeta


def install(processor: OutputProcessor) -> None:
    """Let an engine's front end look for stop strings from a response's first token on (``RequestMeta.made``)."""
    original = processor.add_request

    @functools.wraps(original)
    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        original(request, *args, **kwargs)
        state = processor.request_states[request.request_id]
        made = RequestMeta.of(request.sampling_params.extra_args).made if request.sampling_params else 0
        if made and getattr(state.detokenizer, "stop", None):
            state.detokenizer = _knowing(processor.tokenizer, request, made)

    processor.add_request = add_request  # type: ignore[method-assign]


def _knowing(tokenizer: Any, request: Any, made: int) -> Any:
    """A detokenizer of a request whose prompt ends in so many tokens of its response, with the end of their text: as
    long as any stop string. Token ids and log-probs are of the request's own tokens; its text begins with that end.
    """
    prompt = request.prompt_token_ids
    last = 16
    while True:
        last = min(last, made)
        detokenizer: Any = IncrementalDetokenizer.from_new_request(
            tokenizer, replace(request, prompt_token_ids=prompt[:-last])
        )
        stop, detokenizer.stop = detokenizer.stop, []  # below `min_tokens` it may have been there
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
