"""The torch implementation is the numba one bit for bit, and verification keeps what it should."""

import numpy as np
import pytest
import torch

from verl_rhyme.sampling.noise import draw, key_of, words

# The module imports vLLM's samplers.
coupled = pytest.importorskip("verl_rhyme.workers.vllm.coupled_sampler")

ROWS = 64
KEYS = np.array([key_of("test", i) for i in range(ROWS)], dtype=np.uint64)
POSITIONS = np.random.default_rng(0).integers(0, 1 << 40, ROWS)


@pytest.mark.parametrize("blocks", [(0, 5), (3, 2), (37_000, 40)])
def test_the_same_bits(blocks):
    first, count = blocks
    found = coupled.torch_words(torch.from_numpy(KEYS.view(np.int64)), torch.from_numpy(POSITIONS), first, count)
    expected = words(KEYS, POSITIONS, 4 * (first + count))[:, 4 * first :]
    assert (found.numpy() == expected).all()


@pytest.mark.parametrize("vocabulary", [1, 3, 12, 97, 4099])
@pytest.mark.parametrize("chunk", [1, 3000, 1 << 22])
def test_the_same_tokens(vocabulary, chunk):
    rng = np.random.default_rng(vocabulary)
    logits = (rng.normal(0, 3, (ROWS, vocabulary))).astype(np.float32)
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    logits[:, 0] = np.where(np.isinf(logits).all(1), 0, logits[:, 0])
    plain = rng.random(ROWS) < 0.3
    arrays = torch.from_numpy(KEYS.view(np.int64)), torch.from_numpy(POSITIONS), torch.from_numpy(plain)
    found = coupled.torch_draw(torch.from_numpy(logits), *arrays, chunk=chunk * ROWS)
    assert found.tolist() == draw(logits, KEYS, POSITIONS, plain).tolist()


def test_output_ends_with_the_first_difference():
    drafted = np.array([2, 0, 3, 1, 3])
    drafts = torch.tensor([5, 6, 1, 2, 3, 9, 1, 2, 3])
    tokens = torch.tensor([5, 6, 1, 7, 3, 8, 1, 2, 4])
    bonus = torch.tensor([10, 11, 12, 13, 14])
    found = coupled.until_first_difference(drafts, tokens, bonus, drafted, 3)
    assert found.dtype == torch.int32
    assert found.tolist() == [[5, 6, 10, -1], [11, -1, -1, -1], [1, 7, -1, -1], [8, -1, -1, -1], [1, 2, 4, -1]]


def test_a_runner_whose_positions_are_unknown_is_left_alone():
    class Runner:
        pass

    assert coupled.couple(Runner()) is False
