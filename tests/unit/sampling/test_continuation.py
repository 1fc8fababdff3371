"""Sampling options of a response that continues after an interruption."""

import pytest
from vllm import SamplingParams

from verl_rhyme.sampling.continuation import ADAPTED, UNCHANGED, restart_options

#: Options of vLLM 0.24.0 that depend on the tokens of the response only, or keep state over them.
OF_THE_RESPONSE = {
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "structured_outputs",
    "thinking_token_budget",
    "repetition_detection",
    "extra_args",
}
NO_OPTIONS = {"_eos_token_id", "_all_stop_token_ids", "_bad_words_token_ids"}


def test_every_option_of_vllm_is_classified():
    """A new option of vLLM restarts a response until it is classified."""
    fields = set(SamplingParams.__struct_fields__) - NO_OPTIONS
    assert fields - UNCHANGED - ADAPTED == OF_THE_RESPONSE
    assert (UNCHANGED | ADAPTED) - fields == {"max_new_tokens"}, "verl's name of max_tokens"
    assert not UNCHANGED & ADAPTED


@pytest.mark.parametrize("option", [{"presence_penalty": 0.1}, {"bad_words": ["no"]}, {"of_a_later_vllm": True}])
def test_option_with_state_over_the_response_restarts_it(option):
    plain = {"temperature": 1.0, "repetition_penalty": 1.2, "min_tokens": 5, "stop": ["x"], "logprobs": True}
    assert restart_options(plain) == []
    assert restart_options({**plain, **option}) == list(option)


def test_default_values_do_not_restart_a_response():
    defaults = {name: getattr(SamplingParams(), name) for name in OF_THE_RESPONSE}
    assert restart_options(defaults) == []
    assert restart_options({"bad_words": [], "extra_args": {}}) == []
