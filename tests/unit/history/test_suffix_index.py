"""The suffix index against brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.history import suffix_index
from verl_rhyme.history.record import PromptHistory, Trajectory

few_tokens = st.lists(st.integers(0, 2), max_size=80)
any_tokens = st.lists(st.sampled_from([0, 1, 255, 256, 65_535, 151_935, 2**31 - 1]), max_size=40)
texts = st.lists(few_tokens | any_tokens, max_size=6)


def index(responses):
    return PromptHistory.build([Trajectory(b"k", np.array(r, np.int32), 0.0, 0, 0, i) for i, r in enumerate(responses)])


def occurrences(responses, context):
    """Return every (response, position) where the context ends."""
    k = len(context)
    return {
        (i, end - 1)
        for i, r in enumerate(responses)
        for end in range(k, len(r) + 1)
        if list(r[end - k : end]) == context
    }


def found(history, low, high):
    owners = np.searchsorted(history.bounds, history.suffixes[low:high]) - 1
    return {(int(i), int(p - history.bounds[i] - 1)) for i, p in zip(owners, history.suffixes[low:high], strict=True)}


def in_order(text):
    """Sort positions by the tokens read backwards to the start of the response, by brute force."""

    def backwards(position):
        tokens = text[: position + 1][::-1]
        return tokens[: tokens.index(-1) + 1][: suffix_index.DEPTH], position

    return sorted((p for p, token in enumerate(text) if token >= 0), key=backwards)


loops = st.builds(lambda head, loop, times: head + loop * times, few_tokens, few_tokens, st.integers(0, 6))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(loops | few_tokens | any_tokens, max_size=4), min_size=1, max_size=5), st.data())
def test_an_incrementally_updated_array_equals_a_rebuilt_one(steps, data):
    """Matches and their order do not depend on the responses that were added and removed before."""
    history = PromptHistory.build([])
    for step, responses in enumerate(steps):
        epoch = data.draw(st.integers(0, 3), label="epoch")
        again = data.draw(st.booleans(), label="a step is repeated")
        new = [Trajectory(b"k", np.array(r, np.int32), 0.0, 0, epoch, i) for i, r in enumerate(responses)]
        history = history.extended(new, max(0, step - again), epochs=2)
        assert history.suffixes.tolist() == in_order(history.tokens.tolist())
        assert history.suffixes.dtype == np.int32
        found = PromptHistory.decode(history.encode())
        assert found.suffixes.tolist() == history.suffixes.tolist()


@pytest.mark.parametrize("largest", [0, 1, 2, 255, 152_063, 2**31 - 1])
def test_many_entries_of_few_tokens_are_in_order(largest):
    """More entries than are compared one by one, equal to any depth and beyond the compared depth."""
    rng = np.random.default_rng(largest)
    made = [rng.choice([largest, largest // 2, 0], 150, p=[0.9, 0.05, 0.05]) for _ in range(4)]
    history = index([*made, np.full(150, largest), np.full(90, largest)])
    assert history.suffixes.tolist() == in_order(history.tokens.tolist())


@settings(max_examples=300, deadline=None)
@given(texts, st.lists(st.integers(-1, 2), max_size=12), st.integers(1, 70), st.data())
def test_longest_match_is_the_longest_and_complete(responses, context, max_len, data):
    """A placeholder of -1 in the context matches no separator."""
    if responses and data.draw(st.booleans(), label="take the context from a response"):
        source = data.draw(st.sampled_from(responses))
        context = source[: data.draw(st.integers(0, len(source)))]
    history = index(responses)
    strided = np.repeat(np.array(context, np.int64), 2)[::2]
    length, low, high = suffix_index.longest_match(history, strided, max_len)
    longest = max(
        (k for k in range(1, min(max_len, 64, len(context)) + 1) if occurrences(responses, context[-k:])), default=0
    )
    assert length == longest
    if length:
        assert found(history, low, high) == occurrences(responses, context[-length:])
        assert high > low
    else:
        assert (low, high) == (0, len(history.suffixes))


@settings(max_examples=300, deadline=None)
@given(texts)
def test_first_tokens_give_the_range_of_entries_of_each_token(responses):
    history = index(responses)
    table = suffix_index.first_tokens(history.tokens)
    there = table[table[:, 0] >= 0]
    assert len(there) <= len(table) / 2
    firsts = history.tokens[history.suffixes]
    assert sorted(there[:, 0]) == np.unique(firsts).tolist()
    for token, first, last in there.tolist():
        assert np.flatnonzero(firsts == token).tolist() == list(range(first, last))
        at = token & (len(table) - 1)
        while table[at, 0] != token:  # search from the row of its lowest bits
            assert table[at, 0] >= 0
            at = (at + 1) & (len(table) - 1)
