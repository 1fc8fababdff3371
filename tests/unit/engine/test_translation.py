"""What a worker adds to an asynchronous scheduler's plan, on vLLM's own batch, requests and rules of ending."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.request import Request
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from verl_rhyme.engine.translation import Bounds, add_drafts, has_ended, spread

LENGTH, BLOCK, ROWS, TOKENS = 64, 4, 6, 50


def batch_of(rows, grammar=()):
    """vLLM's batch of requests 0, 1, ... with ``(tokens, blocks)`` each, and their states."""
    batch = InputBatch(ROWS, LENGTH, 256, torch.device("cpu"), TOKENS, block_sizes=[BLOCK], kernel_block_sizes=[BLOCK])
    states = {}
    for number, (length, blocks) in enumerate(rows):
        params = SamplingParams(max_tokens=LENGTH)
        if number in grammar:
            params.structured_outputs = StructuredOutputsParams(regex="a")
        name, ids = str(number), (list(range(blocks)),)
        states[name] = CachedRequestState(name, [1] * length, [], params, None, ids, length - 1, [])
        batch.add_request(states[name])
    batch.refresh_metadata()
    return batch, states


def plan_of(rows, prompt=0, **grammar):
    """A scheduler's plan: one token a row, and ``prompt`` tokens of another request."""
    tokens = {str(number): 1 for number in range(len(rows))} | ({"prompt": prompt} if prompt else {})
    grammar = {"has_structured_output_requests": False, "pending_structured_output_tokens": False} | grammar
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_spec_decode_tokens={},
        total_num_scheduled_tokens=sum(tokens.values()),
        **grammar,
    )


@settings(max_examples=60)
@given(st.data())
def test_drafts_stay_within_blocks_and_step(data):
    lengths = data.draw(st.lists(st.integers(2, LENGTH - 1), min_size=1, max_size=ROWS))
    rows = [(length, -(-length // BLOCK) + data.draw(st.integers(0, 3))) for length in lengths]
    drafts = {
        # The drafter's own limit: below the longest text of the model.
        str(number): data.draw(st.lists(st.integers(0, TOKENS - 1), max_size=max(0, min(12, LENGTH - 2 - length))))
        for number, length in enumerate(lengths)
        if data.draw(st.booleans())
    }
    prompt, reserved = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 3))
    step = data.draw(st.integers(len(rows) + prompt, len(rows) + prompt + 40))
    (batch, states), plan = batch_of(rows), plan_of(rows, prompt)
    planned = dict(plan.num_scheduled_tokens)
    scheduled = plan.num_scheduled_tokens
    add_drafts(plan, drafts, batch, states, Bounds(step, (0,), reserved=reserved))
    assert scheduled == planned, "the scheduler's own counts stay"
    room = step - sum(planned.values())
    for name, draft in drafts.items():
        length, blocks = rows[int(name)]
        verified = plan.scheduled_spec_decode_tokens.get(name, [])
        fits = max(0, blocks * BLOCK - length - 1 - reserved)
        assert verified == draft[: min(fits, room)], "in order, as long as the step has room"
        room -= len(verified)
        row = batch.req_id_to_index[name]
        assert batch.token_ids_cpu[row, length : length + len(verified)].tolist() == verified
        assert batch.is_token_ids[row, length : length + len(verified)].all()
        assert list(batch.spec_token_ids[row]) == verified
        assert plan.num_scheduled_tokens[name] == 1 + len(verified)
    assert all(plan.scheduled_spec_decode_tokens.values()), "vLLM takes an empty draft for one"
    assert plan.total_num_scheduled_tokens == sum(plan.num_scheduled_tokens.values()) <= step


def test_rows_with_a_grammar_draft_only_if_their_masks_come_after_the_drafts():
    rows = [(8, 8), (8, 8)]
    for pending, wanted in ((False, {"1": [5, 6]}), (True, {"0": [5, 6], "1": [5, 6]})):
        batch, states = batch_of(rows, grammar={0})
        plan = plan_of(rows, has_structured_output_requests=True, pending_structured_output_tokens=pending)
        add_drafts(plan, {"0": [5, 6], "1": [5, 6]}, batch, states, Bounds(64, (0,)))
        assert plan.scheduled_spec_decode_tokens == wanted


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=8))
def test_spread(pairs):
    begins, counts = (np.array([pair[at] for pair in pairs], dtype=np.int64) for at in (0, 1))
    assert spread(begins, counts).tolist() == [begin + at for begin, count in pairs for at in range(count)]


@given(st.data())
def test_a_request_ends_where_vllms_scheduler_ends_it(data):
    token = st.integers(0, 4)
    params = SamplingParams(
        max_tokens=data.draw(st.integers(1, 12)),
        min_tokens=0,
        stop_token_ids=data.draw(st.one_of(st.none(), st.lists(token, max_size=2))),
    )
    params.min_tokens = data.draw(st.integers(0, 4))
    params._eos_token_id = data.draw(st.one_of(st.none(), token))
    before, new = data.draw(st.lists(token, max_size=6)), data.draw(st.lists(token, min_size=1, max_size=5))
    prompt, model_len = [7] * 3, data.draw(st.integers(6, 16))
    request = Request("r", prompt, params, None)
    request.append_output_token_ids(list(before))
    ended = False
    for each in new:
        request.append_output_token_ids(each)
        ended = ended or check_stop(request, model_len)
    state = CachedRequestState("r", prompt, [], params, None, ([0],), 0, before + new)
    assert has_ended(state, new, model_len) == ended
