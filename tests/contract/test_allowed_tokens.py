"""Masks of allowed tokens in vLLM's batch: each row has those of its own request, whatever rows are moved."""

import inspect
import random

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from verl_rhyme.patches import VLLM

VOCABULARY, ROWS = 8, 6
BY_NAME = {patch.name: patch for patch in VLLM}
PATCHES = ("vllm_allowed_added", "vllm_allowed_swapped")


def request(name, allowed):
    return CachedRequestState(
        req_id=name,
        prompt_token_ids=[1],
        mm_features=[],
        sampling_params=SamplingParams(max_tokens=4, allowed_token_ids=allowed),
        generator=None,
        block_ids=([0],),
        num_computed_tokens=0,
        output_token_ids=[],
    )


def wrong_rows(mended):
    """Add, remove, move and swap rows at random with these patches; return how often a row had another's mask."""

    class Batch(InputBatch):
        add_request = inspect.unwrap(InputBatch.add_request)
        swap_states = inspect.unwrap(InputBatch.swap_states)

    for name in mended:
        found = BY_NAME[name]
        method = found.qualname.rpartition(".")[2]
        setattr(Batch, method, found.replace(getattr(Batch, method)))
    batch = Batch(ROWS, 16, 64, torch.device("cpu"), VOCABULARY, block_sizes=[4], kernel_block_sizes=[4])
    rng, allowed, wrong = random.Random(0), {}, 0
    for number in range(400):
        for name in [name for name in allowed if rng.random() < 0.2]:
            batch.remove_request(name)
            del allowed[name]
        if len(allowed) < ROWS:
            name = str(number)
            allowed[name] = rng.choice([None, rng.sample(range(VOCABULARY), 3)])
            batch.add_request(request(name, allowed[name]))
        batch.condense()
        if len(allowed) > 1:
            batch.swap_states(*rng.sample(range(len(allowed)), 2))
        batch.refresh_metadata()
        masks = batch.allowed_token_ids_mask_cpu_tensor
        for name, tokens in allowed.items():
            free = [] if masks is None else (~masks[batch.req_id_to_index[name]]).nonzero().flatten().tolist()
            wrong += masks is not None and free != sorted(tokens or range(VOCABULARY))
    return wrong


def test_each_row_has_the_mask_of_its_request():
    assert wrong_rows(PATCHES) == 0


@pytest.mark.parametrize("only", [(), *((name,) for name in PATCHES)])
def test_vllm_needs_both_patches(only):
    """If it fails, vLLM may have mended what a patch is for."""
    assert wrong_rows(only) > 0
