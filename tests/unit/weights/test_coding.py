"""Coding of chunks for a slow link: lossless, and damage never passes unnoticed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.weights.coding import DamagedError, Form, decode, encode
from verl_rhyme.weights.transfer import digest


@settings(max_examples=300)
@given(
    size=st.integers(1, 3000),
    changed=st.floats(0, 1),
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["random", "zeros", "bf16"]),
)
def test_coding_is_lossless(size, changed, seed, kind):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, size, dtype=np.uint8)
    if kind == "bf16":
        old = (rng.normal(0, 0.02, size).astype(np.float32).view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    elif kind == "zeros":
        old = np.zeros(size, np.uint8)
    new = old.copy()
    where = rng.random(len(old)) < changed**3
    new[where] ^= rng.integers(0, 4, where.sum(), dtype=np.uint8)
    for base in (None, old):
        for pack in (True, False):
            coded = encode(new, base, pack)
            assert len(coded) <= len(new) + 1
            assert np.array_equal(decode(coded, len(new), base), new)


def test_gaps_of_any_width():
    old = np.zeros(2_000_001, np.uint8)
    new = old.copy()
    new[[0, 2, 2 * 254, 2 * 600, 1_500_001, 2_000_000]] = 7
    coded = encode(new, old)
    assert coded[0] == Form.GAPS
    assert len(coded) < 100
    assert np.array_equal(decode(coded, len(new), old), new)


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), few=st.booleans(), cut=st.booleans())
def test_damaged_bytes_raise_or_fail_the_checksum(seed, few, cut):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, 2001, dtype=np.uint8)
    new = old.copy()
    new[:: 400 if few else 3] ^= 1
    coded = encode(new, old).copy()
    assert coded[0] == (Form.GAPS if few else Form.DELTA)
    with pytest.raises(DamagedError, match="cannot be decoded here"):
        decode(coded, len(new), None)
    if cut:
        coded = coded[: rng.integers(len(coded))]
    else:
        coded[rng.integers(len(coded))] ^= 1 << rng.integers(8)
    try:
        made = decode(coded, len(new), old)
    except DamagedError:
        return
    assert digest(made.data) != digest(new.data) or np.array_equal(made, new)
