"""What of a request's sampling options keeps its meaning when a response goes on: after an interruption, or at another
replica. The engine is then given the prompt and the tokens so far as one longer prompt, and counts from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_rhyme.sampling.noise import key_of

#: Names in vLLM's ``SamplingParams`` (and verl's name of one) that mean the same in the middle of a response: they look
#: at a position's distribution alone, at prompt and response alike, or at what is returned.
AS_IT_IS = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids"),
        "repetition_penalty",  # of tokens in prompt or response
        *("stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
        *("max_tokens", "max_new_tokens"),  # whoever continues gives what is left
        *("n", "logprobs", "logprob_token_ids", "flat_logprobs", "prompt_logprobs", "routed_experts_prompt_start"),
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind"),
        *("skip_clone", "skip_reading_prefix_cache", "output_text_buffer_length"),
    }
)
#: Those that :func:`continued` adapts, but for ``stop``: the server's front end knows the text before
#: (:mod:`verl_rhyme.engine.earlier_text`).
ADAPTED = frozenset({"min_tokens", "seed", "stop"})


def starting_over(params: Mapping[str, Any]) -> list[str]:
    """Options with a state that no later request can take up: penalties and bans that look at the response's tokens
    only, grammars, budgets of thinking, whatever a plug-in reads, and options that are not known here. A response with
    any of them is generated anew from its first token, with its text so far as the draft.

    Args:
        params: Sampling options as an agent loop gives them.

    Returns:
        Names; empty where the response can go on.
    """
    return [name for name, value in params.items() if value and name not in AS_IT_IS | ADAPTED]


def continued(params: Mapping[str, Any], made: int, noise_by_position: bool) -> dict[str, Any]:
    """The options of a request for the rest of a response.

    Args:
        params: As for the whole response, but for ``max_tokens``; nothing of :func:`starting_over` is among them.
        made: Tokens of the response so far.
        noise_by_position: The engine draws by :mod:`verl_rhyme.sampling.noise`, where a seed means the same at any
            position. vLLM's own generator starts again with its seed, and the rest would be drawn with the numbers that
            the first tokens were drawn with.

    Returns:
        A copy.
    """
    rest = dict(params)
    if made and rest.get("min_tokens"):
        rest["min_tokens"] = max(0, rest["min_tokens"] - made)
    if made and rest.get("seed") is not None and not noise_by_position:
        rest["seed"] = key_of("continued", rest["seed"], made) >> 1  # torch's generators take 63 bits
    return rest
