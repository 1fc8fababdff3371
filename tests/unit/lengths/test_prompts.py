"""Prompt lengths: known ones exactly, others by the mean, within bounds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import mean

from hypothesis import given
from hypothesis import strategies as st

from verl_rhyme.lengths.prompts import PromptLengths


@given(
    recorded=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 1 << 20)), max_size=40),
    most=st.integers(1, 6),
)
def test_the_latest_prompts_are_known_and_the_mean_is_theirs(recorded: Sequence[tuple[str, int]], most: int) -> None:
    lengths, model = PromptLengths(most), {}
    for prompt, tokens in recorded:
        lengths.record(prompt, tokens)
        model.pop(prompt, None)
        model[prompt] = tokens
        if len(model) > most:
            del model[next(iter(model))]
    again = PromptLengths(most)
    again.record("z", 1)
    again.load_state_dict(json.loads(json.dumps(lengths.state_dict())))
    for each in (lengths, again):
        assert len(each) == len(model)
        assert {prompt: each.expected(prompt) for prompt in model} == model
        assert abs(each.expected("new") - (mean(model.values()) if model else 0)) <= 0.5
