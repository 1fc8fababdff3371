"""Engines get no more samples than their caches hold."""

import numpy as np
import pytest

from verl_rhyme.scheduling.capacity import Capacity


def test_tokens_held_by_running_requests_match_random_moments():
    """Every token of a request is one moment; its cache then has the prompt and the tokens before."""
    rng = np.random.default_rng(0)
    lengths, prompts = rng.lognormal(5, 1, 500).astype(int) + 1, rng.integers(10, 400, 500)
    capacity = Capacity(10**6, 10**9)
    for prompt, length in zip(prompts.tolist() * 100, lengths.tolist() * 100, strict=True):
        capacity.observe(prompt, length)
    held = np.concatenate([prompt + np.arange(length) for prompt, length in zip(prompts, lengths, strict=True)])
    assert capacity.held == pytest.approx(held.mean(), rel=0.02)


@pytest.mark.parametrize(
    ("room", "prompt", "response", "limit"),
    [(100_000, 100, 200, 256), (100_000, 100, 16_000, 12), (100_000, 100, 10**6, 1), (None, 10, 10**6, 256)],
)
def test_slots_or_the_caches_limit_and_replicas_that_rest_hold_nothing(room, prompt, response, limit):
    capacity = Capacity(256, room)
    assert capacity.limit == 256  # nothing is known yet
    capacity.observe(prompt, response)
    assert capacity.limit == limit
    assert Capacity(256, room, capacity.state).limit == limit
    capacity.share = 0.25
    assert capacity.limit == max(1, limit // 4)
