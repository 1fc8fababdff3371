"""The noise is Philox with good statistics, and its argmax is a draw from the softmax."""

import numpy as np
import pytest
from scipy import stats

from verl_rhyme.sampling.noise import draw, gumbel, key_of, philox, words

KEYS = np.array([key_of("test", i) for i in range(20_000)], dtype=np.uint64)


def positions(n, at=0):
    return np.full(n, at, dtype=np.int64)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # kat_vectors of Random123
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter, key, expected):
    given = [np.uint64(int(word, 16)) for word in (*counter.split(), *key.split())]
    assert [f"{word:08x}" for word in philox(*given)] == expected.split()


def test_counter_is_block_and_position():
    key, position = 0x299F31D0A4093822, (7 << 32) + 5
    drawn = words(np.array([key], dtype=np.uint64), np.array([position]), 10)[0]
    low, high = np.uint64(0xA4093822), np.uint64(0x299F31D0)
    expected = [philox(*map(np.uint64, (block, 5, 7, 0)), low, high) for block in range(3)]
    assert drawn.tolist() == np.ravel(expected)[:10].tolist()


def test_keys_distinguish_their_parts():
    lists = [("ab", "c"), ("a", "bc"), ("abc",), (1, 2), ("1", 2), (12,), ("12",), (), ("",)]
    assert len({key_of(*parts) for parts in lists}) == len(lists)
    assert all(0 <= key_of(*parts) < 1 << 64 for parts in lists)
    assert key_of(1, "prompt", 2) == key_of(1, "prompt", 2)
    assert key_of(1, "prompt", 2) == key_of(np.int64(1), "prompt", np.int32(2))
    assert key_of("fixed", 1) == 0x10FE3F5159A56304  # the same in every process, for ever


def test_gumbel_noise_is_precise_for_small_exponentials():
    assert gumbel(np.array([0], dtype=np.uint32))[0] == pytest.approx(33 * np.log(2), abs=1e-9)
    assert np.isfinite(gumbel(np.array([2**32 - 1], dtype=np.uint32))).all()
    sample = gumbel(words(KEYS[:1], positions(1), 200_000))[0]
    assert stats.kstest(sample, "gumbel_r").pvalue > 1e-4


def test_argmax_is_a_draw_from_the_softmax():
    logits = np.random.default_rng(1).normal(0, 2, 50).astype(np.float32)
    rows = np.tile(logits, (len(KEYS), 1))
    counts = sum(np.bincount(draw(rows, KEYS, positions(len(KEYS), at)), minlength=50) for at in range(5))
    distribution = np.exp(logits - logits.max(), dtype=np.float64)
    expected = distribution / distribution.sum() * counts.sum()
    rare = expected < 8
    observed = np.append(counts[~rare], counts[rare].sum())
    predicted = np.append(expected[~rare], max(expected[rare].sum(), 1e-3))
    assert stats.chisquare(observed, predicted * observed.sum() / predicted.sum()).pvalue > 1e-4


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 4, 5, 12, 97, 1000])
def test_shortcuts_do_not_change_draws(vocabulary):
    rng = np.random.default_rng(vocabulary)
    scale = rng.choice([1e-3, 0.1, 1, 5, 30], size=(512, 1))
    logits = (rng.normal(0, 1, (512, vocabulary)) * scale + rng.normal(0, 20, (512, 1))).astype(np.float32)
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    logits[:, -1] = np.where(np.isinf(logits).all(1), 0, logits[:, -1])
    at = rng.integers(0, 1 << 20, 512)
    whole = (logits + gumbel(words(KEYS[:512], at, vocabulary))).argmax(1)
    assert (draw(logits, KEYS[:512], at) == whole).all()


def test_masked_entries_never_win():
    logits = np.full((2000, 33), -np.inf, dtype=np.float32)
    logits[:, [5, 31]] = -80, -80.5
    assert set(draw(logits, KEYS[:2000], positions(2000))) == {5, 31}
    logits[:, 31] = -np.inf
    assert set(draw(logits, KEYS[:2000], positions(2000))) == {5}
    assert draw(np.full((1, 7), -np.inf, np.float32), KEYS[:1], positions(1)).tolist() == [0]
