"""Hard bounds of drafts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting.bounds import affordable_tokens, engine_tokens, logits_budget, request_limits, step_budget

MEMORY = DraftingConfig().logits_memory
sizes = {"vocab": st.integers(1, 300_000), "rows": st.integers(1, 1024), "memory": st.integers(0, 16 << 30)}


@given(**sizes, idle=st.integers(0, 1024), itemsize=st.sampled_from([2, 4]), ranks=st.sampled_from([1, 2, 4, 8]))
def test_the_logits_budget_is_the_largest_that_fits(vocab, rows, memory, idle, itemsize, ranks):
    slots = rows + idle
    budget = logits_budget(vocab, rows, slots, memory, itemsize, ranks)
    room = memory + slots * vocab * (2 * itemsize + 2 * 4)  # two rows of logits and two float32 tables were profiled
    row = vocab * itemsize if ranks == 1 else 2 * vocab * itemsize + -(-vocab * itemsize // ranks)
    assert not budget or (rows + budget) * row <= room
    assert (rows + budget + 1) * row > room


@pytest.mark.parametrize("slots", [8, 64, 256, 1024])
def test_memory_suffices_for_any_step_of_verls_size(slots):
    """152k entries in bf16, one GPU, verl's 8192 tokens a step and at most 32 draft tokens a request."""
    for rows in {1, slots // 2, slots}:
        wanted = min(step_budget(8192, rows, False), 32 * rows)
        assert logits_budget(152_064, rows, slots, MEMORY) >= wanted


@given(step=st.integers(0, 10_000), rows=st.integers(0, 1024))
def test_step_has_room_for_rows_and_prompts(step, rows):
    assert step_budget(step, rows, False) == max(0, step - rows)
    left = step - rows - step_budget(step, rows, True)
    assert left >= step_budget(step, rows, True) or step <= rows


def test_request_never_drafts_past_its_end():
    limits = request_limits(
        lengths=np.array([10, 10, 10, 95, 99, 100, 10]),
        generated=np.array([0, 5, 9, 0, 0, 0, 20]),
        max_tokens=np.array([1000, 8, 10, 1000, 1000, 1000, 10]),
        max_model_len=100,
        cap=32,
    )
    assert limits.tolist() == [32, 2, 0, 3, 0, 0, 0]
    vllms = request_limits(np.array([0]), np.array([0]), np.array([10**6]), 10**6, 1000)
    assert vllms.tolist() == [128]


@given(wanted=st.integers(1, 128), slots=st.integers(1, 1024), step=st.integers(1, 20_000))
def test_adapters_take_the_longest_drafts_that_vllm_starts_with(wanted, slots, step):
    tokens = engine_tokens(wanted, recurrent=False, adapters=True, slots=slots, step_tokens=step)
    assert not tokens or slots * (tokens + 1) <= step
    assert tokens == wanted or slots * (tokens + 2) > step
    assert engine_tokens(wanted, recurrent=False, adapters=False, slots=slots, step_tokens=step) == wanted


def test_at_verls_sizes_adapters_take_one_token_and_recurrent_layers_most():
    sizes = {"slots": 256, "step_tokens": 8192}
    assert engine_tokens(32, recurrent=False, adapters=True, **sizes) == 31
    assert [engine_tokens(wanted, recurrent=True, adapters=True, **sizes) for wanted in (32, 2)] == [4, 2]


@given(longest=st.integers(1, 8), requests=st.integers(0, 300), room=st.floats(0, 1e6), state=st.floats(0, 100))
def test_states_of_drafts_take_no_request_that_the_run_wants(longest, requests, room, state):
    def capacity(tokens):
        return room / (100 + state * (1 + tokens))

    tokens = affordable_tokens(longest, requests, capacity)
    assert 1 <= tokens <= longest
    wanted = min(requests, capacity(0))
    assert tokens == 1 or capacity(tokens) >= wanted
    assert tokens == longest or capacity(tokens + 1) < wanted


def test_without_drafts_none_are_affordable():
    assert affordable_tokens(0, 8, lambda tokens: 9.0) == 0
