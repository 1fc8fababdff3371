"""Which sampling options a response keeps when it goes on after an interruption."""

import pytest
from vllm import SamplingParams

from verl_rhyme.sampling.continuation import ADAPTED, AS_IT_IS, continued, starting_over

#: Of vLLM 0.24.0, by what reads them: these look at the tokens of the response alone, or keep a state over them.
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


def test_each_of_vllms_options_is_decided():
    """A new one begins anew until somebody has looked."""
    fields = set(SamplingParams.__struct_fields__) - NO_OPTIONS
    assert fields - AS_IT_IS - ADAPTED == OF_THE_RESPONSE
    assert (AS_IT_IS | ADAPTED) - fields == {"max_new_tokens"}, "verl's other name"
    assert not AS_IT_IS & ADAPTED


@pytest.mark.parametrize("option", [{"presence_penalty": 0.1}, {"bad_words": ["no"]}, {"of_a_later_vllm": True}])
def test_what_looks_at_the_response_alone_begins_it_anew(option):
    plain = {"temperature": 1.0, "repetition_penalty": 1.2, "min_tokens": 5, "stop": ["x"], "logprobs": True}
    assert starting_over(plain) == []
    assert starting_over({**plain, **option}) == list(option)


def test_at_their_defaults_they_ask_for_nothing():
    defaults = {name: getattr(SamplingParams(), name) for name in OF_THE_RESPONSE}
    assert starting_over(defaults) == []
    assert starting_over({"bad_words": [], "extra_args": {}}) == []


def test_the_callers_options_stay_as_they_are():
    given = {"min_tokens": 5, "seed": 1}
    assert continued(given, 3, noise_by_position=False)["min_tokens"] == 2
    assert continued(given, 0, noise_by_position=False) == given == {"min_tokens": 5, "seed": 1}
