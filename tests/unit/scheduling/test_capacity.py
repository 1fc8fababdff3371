"""Engines get no more samples than their slots and caches hold, and tools do not leave them empty."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.planning.cost import ReplicaCost, StepCost
from verl_rhyme.scheduling.capacity import Capacity

COST = ReplicaCost(StepCost(base=0.01), prefill=3e-5, slots=64)


def records(turns, prompt=100, tool_tokens=50, tool_s=10.0, seconds=5.0, cached=1.0, version=0, began=0.0):
    """Return the records of a sample; ``turns`` are tokens, ``cached`` the share of a context that is found."""
    found, now, context = [], began, 0
    for tokens in turns:
        before = prompt + (context + tool_tokens if found else 0)
        found.append(
            {
                "prompt_tokens": before,
                "response_tokens": tokens,
                "cached_tokens": int(cached * (prompt + context)),
                "queued_at": now,
                "finished_at": now + seconds,
                "policy_version_start": version,
                "policy_version_end": version,
            }
        )
        context, now = before - prompt + tokens, now + seconds + tool_s
    return found


def test_tokens_held_by_running_requests_match_random_moments():
    """Every token of a request is one moment; its cache then has the prompt and the tokens before."""
    rng = np.random.default_rng(0)
    lengths, prompts = rng.lognormal(5, 1, 500).astype(int) + 1, rng.integers(10, 400, 500)
    capacity = Capacity(10**6, 10**9)
    for prompt, length in zip(prompts.tolist() * 100, lengths.tolist() * 100, strict=True):
        capacity.observe(records([length], prompt))
    held = np.concatenate([prompt + np.arange(length) for prompt, length in zip(prompts, lengths, strict=True)])
    assert capacity.held == pytest.approx(held.mean(), rel=0.02)


@pytest.mark.parametrize(
    ("room", "prompt", "response", "limit"),
    [(100_000, 100, 200, 256), (100_000, 100, 16_000, 12), (100_000, 100, 10**6, 1), (None, 10, 10**6, 256)],
)
def test_slots_or_the_caches_limit_and_replicas_that_rest_hold_nothing(room, prompt, response, limit):
    capacity = Capacity(256, room)
    assert capacity.limit == 256  # nothing is known yet
    capacity.observe(records([response], prompt))
    assert capacity.limit == limit
    assert Capacity(256, room, capacity.state).limit == limit
    assert Capacity(256, room, capacity.state[:2]).limit == limit, "the state of an older checkpoint"
    capacity.share = 0.25
    assert capacity.limit == max(1, limit // 4)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 2000), st.floats(0.1, 1e4), st.floats(0, 1)), min_size=1, max_size=50),
    st.one_of(st.none(), st.integers(1, 10**6)),
)
def test_single_turns_count_as_before_also_where_requests_go_on_at_a_new_version(samples, room):
    """The limit is that of requests, whatever the prefix cache found."""
    capacity, lengths, held = Capacity(128, room, (), COST), 0.0, 0.0
    for tokens, seconds, cached in samples:
        half = tokens // 2
        whole = records([tokens], seconds=seconds, cached=cached)[0]
        first = whole | {"response_tokens": half, "finished_at": seconds / 3}
        second = whole | {
            **{"prompt_tokens": whole["prompt_tokens"] + half, "response_tokens": tokens - half},
            **{"queued_at": seconds / 2, "policy_version_start": 1, "policy_version_end": 1},
        }
        capacity.observe([first, second])
        for record in (first, second):
            response = record["response_tokens"]
            lengths = lengths * 0.5 ** (1 / 4096) + response
            held = held * 0.5 ** (1 / 4096) + response * (record["prompt_tokens"] + response / 2)
    assert capacity.away == 0
    assert capacity.limit == max(1, int(min(128.0, 128 if room is None else room * lengths / held)))


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3000), min_size=1, max_size=9),
            st.floats(0, 300),
            st.floats(0.1, 50),
            st.floats(0, 1),
            st.integers(0, 1),
        ),
        min_size=1,
        max_size=200,
    ),
    st.integers(1, 10**7),
)
def test_the_limit_stays_between_what_fits_for_certain_and_what_fills_the_engines(samples, room):
    capacity = Capacity(128, room, (), COST)
    for turns, tool_s, seconds, cached, version in samples:
        capacity.observe(records(turns, tool_s=tool_s, seconds=seconds, cached=cached, version=version))
        assert 0 <= capacity.away <= 1
        if capacity.held:
            requests = min(128, room / capacity.held)
            most = requests / max(0.01, 1 - capacity.away)
            assert max(1, int(min(requests, room / 2 / capacity.held))) <= capacity.limit <= max(1, int(most)) + 1
        assert Capacity(128, room, capacity.state, COST).limit == capacity.limit


def test_samples_in_tools_hold_no_slot():
    """Of 14 turns of 5 s with 13 tools of 10 s between, 7 of 20 parts of its life are at the engine."""
    capacity = Capacity(128, 10**9, (), COST)
    capacity.observe(records([100] * 14))
    assert capacity.away == pytest.approx(130 / 200)
    assert capacity.limit == int(128 / 0.35)


@pytest.mark.parametrize("room", [10**6, 20_000])
def test_conversations_of_a_sample_hold_a_slot_each_and_evict_nothing_of_each_other(room):
    """Four at once, each with a longer prompt of its own; in the order in which they end."""
    capacity = Capacity(128, room, (), COST)
    for _ in range(300):
        each = [records([20], prompt=1000 * (n + 1), cached=0.1, began=0.1 * n, seconds=5.0)[0] for n in range(4)]
        capacity.observe([{**record, "request": 0} for record in each])
    assert capacity.away == 0
    assert capacity.limit == int(min(128, room / capacity.held) / (20 / 5.3))


def test_only_a_cache_that_evicts_limits_started_samples_and_it_recovers():
    room = 2 * 250_000
    capacity = Capacity(128, room, (), COST)

    def run(count, cached, version=0):
        for _ in range(count):
            capacity.observe(records([200] * 8, prompt=3000, cached=cached, version=version))
        return capacity.limit

    assert (free := run(50, 1.0)) == pytest.approx(min(128, room / capacity.held) / (1 - capacity.away), abs=1)
    assert run(50, 0.97) == free, "a few evictions are worth more samples"
    tight = run(500, 0.2)
    fits = room / 2 / capacity.held
    assert tight == int(min(2 * fits, fits / (1 - capacity.away)))
    assert tight < run(200, 1.0) < free + 1
    assert run(2000, 1.0) == free


def test_drafts_accepted_beyond_a_texts_end_shorten_no_steps():
    """Few evictions are worth the samples, also where five steps accept more tokens than a turn has."""
    capacity = Capacity(128, 500_000, (), COST)
    for _ in range(300):
        turns = records([30] * 8, prompt=3000, cached=0.98)
        capacity.observe([{**turn, "accepted_tokens": 31, "verify_steps": 5} for turn in turns])
    assert capacity.limit == int(min(128, 500_000 / capacity.held) / (1 - capacity.away))


def test_without_prefix_caching_no_limit_keeps_contexts():
    """Each turn is prefilled as a whole, however few samples start."""
    capacity, other = (Capacity(128, 100_000, (), COST) for _ in range(2))
    other.observe(records([200] * 8))
    for _ in range(300):
        capacity.observe(records([200] * 8, prompt=3000, cached=0.0))
        other.observe(records([200] * 8, prompt=3000, cached=0.0))
    assert capacity.state[4] == 0
    assert other.state[4] > 0


def test_contexts_that_new_weights_emptied_count_for_nothing():
    capacity = Capacity(128, 100_000, (), COST)
    capacity.observe(records([200] * 8))
    for _ in range(300):
        turns = records([200] * 8, cached=0.0)
        for version, record in enumerate(turns):
            record["policy_version_start"] = record["policy_version_end"] = version
        capacity.observe(turns)
    assert capacity.state[4] == 0


@pytest.mark.parametrize("target", [100, 200, 400])
def test_the_limit_finds_the_number_of_contexts_from_which_the_cache_evicts(target):
    """A world in which the share of evicted contexts rises steeply above so many samples."""
    rng, capacity = random.Random(0), Capacity(256, 2 * 250_000, (), COST)
    capacity.observe(records([100]))  # finds its prompt, of a sibling
    seen = []
    for i in range(6000):
        evicted = min(1.0, max(0.0, capacity.limit / target - 1))
        capacity.observe(records([100] * 8, 3000, cached=float(rng.random() > evicted), tool_s=40.0))
        if i > 3000:
            seen.append(capacity.limit)
    assert target * 0.95 < np.mean(seen) < target * 1.5
