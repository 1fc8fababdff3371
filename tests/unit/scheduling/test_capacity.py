"""Engines get no more samples than their caches hold."""

import numpy as np
import pytest

from verl_rhyme.scheduling.capacity import Capacity


def test_tokens_held_by_running_requests_match_a_simulation():
    rng = np.random.default_rng(0)
    lengths, prompts = rng.lognormal(5, 1, 3000).astype(int) + 1, rng.integers(10, 400, 3000)
    capacity = Capacity(10**6, 10**9)
    slots, held, samples = [(int(lengths[i]), int(prompts[i]), 0) for i in range(16)], 0, 0
    started = 16
    while started < 3000:
        for place, (length, prompt, done) in enumerate(slots):
            if done == length:
                capacity.observe(prompt, length)
                slots[place] = (int(lengths[started]), int(prompts[started]), 0)
                started = min(started + 1, 3000 - 1) if started < 2999 else 3000
                if started == 3000:
                    break
            else:
                slots[place] = (length, prompt, done + 1)
        held += sum(prompt + done for _, prompt, done in slots)
        samples += len(slots)
    assert capacity.held == pytest.approx(held / samples, rel=0.1)


def test_slots_limit_large_caches_and_cache_size_limits_small_ones():
    capacity = Capacity(256, room=100_000)
    assert capacity.limit == 256  # nothing is known yet
    for _ in range(100):
        capacity.observe(100, 200)
    assert capacity.limit == 256
    for _ in range(100_000):
        capacity.observe(100, 16_000)
    assert capacity.limit == 100_000 // 8_100
    for _ in range(100_000):
        capacity.observe(100, 1_000_000)
    assert capacity.limit == 1


def test_slots_alone_limit_where_the_cache_size_is_unknown():
    capacity = Capacity(64)
    capacity.observe(10, 10**6)
    assert capacity.limit == 64


def test_replicas_that_rest_hold_nothing():
    for capacity in (Capacity(100), Capacity(1000, 60_000)):
        capacity.observe(500, 200)
        whole = capacity.limit
        capacity.share = 0.25
        assert capacity.limit == whole // 4
        capacity.share = 0.001
        assert capacity.limit == 1
