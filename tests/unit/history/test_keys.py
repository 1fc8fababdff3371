"""Prompt keys."""

import hashlib
import struct

import numpy as np
import pytest

from verl_rhyme.history.keys import KEY_BYTES, messages_key, prompt_key


def test_is_blake2b_of_little_endian_int32():
    tokens = [1, 2, 151_643]
    assert prompt_key(tokens) == hashlib.blake2b(struct.pack("<3i", *tokens), digest_size=16).digest()
    assert len(prompt_key([])) == KEY_BYTES


@pytest.mark.parametrize("kind", [tuple, np.array, lambda t: np.array(t, dtype=">i8"), lambda t: np.array(t, np.int32)])
def test_the_same_prompt_has_the_same_key_in_any_container(kind):
    assert prompt_key(kind([5, 6, 7])) == prompt_key([5, 6, 7])


def test_another_prompt_has_another_key():
    assert len({prompt_key(t) for t in ([], [0], [0, 0], [1, 0], [0, 1])}) == 5


def test_a_token_beyond_int32_is_an_error():
    with pytest.raises(OverflowError, match="int32"):
        prompt_key([2**31])


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "add 1 and 2"}],
        [{"role": "user", "content": [{"type": "image", "image": object()}, {"type": "text", "text": "add 1 and 2"}]}],
        np.array([{"role": "user", "content": np.array(["add 1 and 2"], dtype=object)}], dtype=object),
        [{"role": "user", "content": {"text": "add 1 and 2"}}],
    ],
)
def test_messages_are_known_by_their_texts(messages):
    assert messages_key(messages) == messages_key([{"role": "user", "content": "add 1 and 2"}])
    assert len(messages_key(messages)) == 2 * KEY_BYTES


def test_messages_that_differ_have_other_keys():
    prompts = ["one text", "\ud800", [{"role": "user", "content": "ab"}], [{"role": "userab", "content": None}]]
    prompts += [[{"role": "user", "content": ["a", "b"]}], [{"role": "system", "content": "ab"}]]
    assert len({messages_key(messages) for messages in prompts}) == len(prompts)
    for nothing in ([], None, 3, [{"role": None, "content": [{"text": 5}, b"x"]}]):
        assert messages_key(nothing) == ""
