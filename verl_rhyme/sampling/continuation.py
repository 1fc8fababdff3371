"""Sampling options of a response that continues after an interruption or on another replica.

The engine then gets the prompt and the tokens so far as one longer prompt, and counts from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_rhyme.sampling.noise import key_of

#: Options of vLLM's ``SamplingParams`` (and verl's name of one) that need no change in the middle of a response: they
#: concern one position's distribution, prompt and response alike, or the returned data.
UNCHANGED = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids"),
        "repetition_penalty",  # counts tokens in prompt or response
        *("stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
        *("max_tokens", "max_new_tokens"),  # the caller passes the remaining tokens
        *("n", "logprobs", "logprob_token_ids", "flat_logprobs", "prompt_logprobs", "routed_experts_prompt_start"),
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind"),
        *("skip_clone", "skip_reading_prefix_cache", "output_text_buffer_length"),
    }
)
#: Options that :func:`continued_options` adapts; for ``stop`` the server's front end has the earlier text
#: (:mod:`verl_rhyme.engine.earlier_text`).
ADAPTED = frozenset({"min_tokens", "seed", "stop"})


def restart_options(params: Mapping[str, Any]) -> list[str]:
    """Return the options whose state a later request cannot restore; empty if the response can continue.

    They are penalties and bans on the response's tokens only, grammars, thinking budgets, options of plug-ins, and
    unknown options. A response with any of them is regenerated from its first token, with its text so far as the draft.
    """
    return [name for name, value in params.items() if value and name not in UNCHANGED | ADAPTED]


def continued_options(params: Mapping[str, Any], made: int, noise_by_position: bool) -> dict[str, Any]:
    """Return a copy of the options, except ``max_tokens``, adapted to the rest of a response of ``made`` tokens so far.

    With ``noise_by_position`` (:mod:`verl_rhyme.sampling.noise`) a seed has the same effect at any position. vLLM's
    generator restarts with its seed, so the rest would repeat the numbers of the first tokens.
    """
    rest = dict(params)
    if made and rest.get("min_tokens"):
        rest["min_tokens"] = max(0, rest["min_tokens"] - made)
    if made and rest.get("seed") is not None and not noise_by_position:
        rest["seed"] = key_of("continued", rest["seed"], made) >> 1  # torch's generators take 63 bits
    return rest
