"""A prompt's history: the kept responses, and their encoding."""

import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.history import packing
from verl_rhyme.history.record import CorruptRecord, PromptHistory, Trajectory, encoded_bytes

KEY = b"k" * 16


def trajectory(tokens, epoch=0, sample=0, reward=0.0, version=0):
    return Trajectory(KEY, np.array(tokens, np.int32), reward, version, epoch, sample)


def same(a, b):
    return all(np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True) for name in a.__dataclass_fields__)


responses = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=20), max_size=5)


@settings(deadline=None)  # the first example compiles
@given(responses)
def test_encode_and_decode(tokens):
    history = PromptHistory.build([trajectory(t, i, i + 1, i / 3, i + 2) for i, t in enumerate(tokens)], step=7)
    decoded = PromptHistory.decode(history.encode())
    assert same(history, decoded)
    assert [decoded.response(i).tolist() for i in range(len(decoded))] == tokens
    assert decoded.step.tolist() == [7] * len(tokens)


def test_a_decoded_history_does_not_keep_its_value_in_memory():
    tokens = [np.arange(500, dtype=np.int32)] * 4
    value = np.frombuffer(PromptHistory.build([trajectory(each) for each in tokens]).encode(), np.uint8).copy()
    kept, tokens_bytes = weakref.ref(value), 500 * 4
    history = PromptHistory.decode(value)
    del value
    assert kept() is None
    assert 9 * tokens_bytes < history.nbytes < 10 * tokens_bytes
    history.first_tokens  # noqa: B018 - counts too
    assert history.nbytes > 12 * tokens_bytes


def test_bytes_per_token():
    """A token of a vocabulary of 151,936 takes 18 bits, its suffix among 65,553 17, its probability 8."""
    tokens = np.linspace(0, 151_935, 4096)
    history = PromptHistory.build([trajectory(tokens, sample=i) for i in range(16)])
    value = history.encode()
    assert len(value) / (16 * 4096) < (18 + 17 + 8) / 8 + 0.01
    assert len(value) == encoded_bytes(16 * 4096, 16, 151_935)


@settings(deadline=None)
@given(st.integers(1, 32), st.data())
def test_packing_round_trip(width, data):
    values = data.draw(st.lists(st.integers(0, 2**width - 1), max_size=70))
    array = np.array(values, np.uint32).view(np.int32)
    packed = packing.pack(array, width)
    assert len(packed) == packing.words(len(values), width)
    assert packing.unpack(packed, len(values), width).view(np.uint32).tolist() == values


def test_confidence_follows_its_response():
    logprobs = np.log(np.array([0.5, 0.999, 1e-9], np.float32))
    known = Trajectory(KEY, np.array([1, 2, 3], np.int32), 0.0, 0, 0, 0, logprobs=logprobs)
    unknown = trajectory([4, 5], sample=1)
    history = PromptHistory.decode(PromptHistory.build([known]).extended([unknown], step=2, epochs=2).encode())
    assert history.response(0).tolist() == [1, 2, 3]
    codes = history.confidence[history.bounds[0] + 1 : history.bounds[1]]
    assert codes[0] == 128
    assert codes[1] > 230
    assert codes[2] == 1
    assert not history.confidence[history.bounds[1] :].any()


@settings(deadline=None)  # the first example compiles
@given(st.data())
def test_any_altered_byte_and_any_truncation_is_detected(data):
    value = bytearray(PromptHistory.build([trajectory([1, 2, 3]), trajectory([4, 5])]).encode())
    if data.draw(st.booleans(), label="truncate"):
        value = value[: data.draw(st.integers(0, len(value) - 1))]
    else:
        value[data.draw(st.integers(0, len(value) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptRecord):
        PromptHistory.decode(value)


def kept(history):
    labels = zip(history.step.tolist(), history.visit.tolist(), history.sample.tolist(), strict=True)
    return [(*each, history.response(i).tolist()) for i, each in enumerate(labels)]


def test_keeps_the_latest_visits():
    history = PromptHistory.build([])
    for step, epoch in enumerate([6, 7, 8, 0]):  # a restarted run counts its epochs anew
        new = [trajectory([step], epoch, sample) for sample in range(2)]
        history = history.extended(new, step, epochs=2)
    assert kept(history) == [(2, 8, 0, [2]), (2, 8, 1, [2]), (3, 0, 0, [3]), (3, 0, 1, [3])]
    history = history.extended([trajectory([4], 0, 1)], step=3, epochs=2)
    assert kept(history)[2:] == [(3, 0, 0, [3]), (3, 0, 1, [4])], "a repeated step replaces its samples"
    history = history.extended([trajectory([5], 0, 2)], step=4, epochs=1)
    assert kept(history) == [(3, 0, 0, [3]), (3, 0, 1, [4]), (4, 0, 2, [5])], "parts of one visit"
