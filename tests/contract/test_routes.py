"""Routing replay: experts stay with their tokens, from an agent loop's output to verl's training engine."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.padding_utils import SYNTHETIC_PADDING_SEQ_LEN
from verl.utils.megatron.router_replay_utils import align_r3_router_replay_data, build_r3_replay_mask

from verl_rhyme.agent_loop.worker import _AgentLoopWorker
from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.trainer.stages import Stages

LONGEST = 6  # tokens of a response
#: Tokens of the prompt, of the response as the agent loop returns it, and of those whose experts it has.
SAMPLES = {
    "whole": (3, 5, 7),
    "cut at the longest response": (4, 9, 12),
    "ends with a tool's answer": (2, 6, 4),
    "short": (1, 1, 1),
}


def experts(sample, count):
    """Return experts that say whose they are, and of which token, uint8[count, 2 layers, 2]."""
    rows = np.stack([np.full(count, sample + 1), np.arange(count)], -1).astype(np.uint8)
    return np.stack([rows, rows + 100], 1)


@functools.cache
def composed():
    actor = "actor_rollout_ref.actor."
    return compose(
        [
            *("algorithm.adv_estimator=grpo", "data.train_batch_size=2", "actor_rollout_ref.rollout.n=2"),
            *(f"{actor}ppo_mini_batch_size=2", f"{actor}use_dynamic_bsz=true"),
        ]
    )


class Worker(_AgentLoopWorker):
    """Stores outputs of agent loops, without a reward model, a teacher or a processor."""

    reward_loop_worker_handles, distillation_enabled, processor = None, False, None

    def __init__(self):
        pass


@pytest.fixture
async def stored(queue):
    for number, (prompt, response, known) in enumerate(SAMPLES.values()):
        kept = min(response, LONGEST)
        output = AgentLoopOutput(
            prompt_ids=[1] * prompt,
            response_ids=[2] * kept,
            response_mask=[1] * kept,
            routed_experts=experts(number, known)[: prompt + LONGEST],  # as verl's agent loops cut them
            reward_score=1.0,
            metrics=AgentLoopMetrics(),
            extra_fields={"reward_extra_info": {}},
        )
        await Worker()._agent_loop_postprocess(
            output, False, uid="u", session_id=number, global_steps=1, raw_prompt=[{"role": "user", "content": ""}]
        )
    keys = [f"u_{number}_0" for number in range(len(SAMPLES))]
    tags = (await tq.async_kv_list())["train"]
    return KVBatchMeta(partition_id="train", keys=keys, tags=[tags[key] for key in keys])


def test_experts_stay_with_their_tokens(stored):
    trainer = SimpleNamespace(
        config=composed(), actor_ranks=3, use_reference_policy=False, tokenizer=SimpleNamespace(eos_token_id=0)
    )
    batch = Stages._pad_and_balance(SimpleNamespace(_trainer=trainer, _missing_padding=len), stored, None)
    assert len(batch.keys) == 6
    data = tq.kv_batch_get(batch.keys, "train", select_fields=["input_ids", "response_mask", "routed_experts"])
    routes = align_r3_router_replay_data(data["routed_experts"], data["input_ids"])
    mask = torch.nested.to_padded_tensor(data["response_mask"], 0)
    replayed = build_r3_replay_mask(data["input_ids"], mask)
    seen = set()
    for key, rows, marks in zip(batch.keys, routes.unbind(), replayed.unbind(), strict=True):
        if key.startswith("pad"):
            assert rows.shape == (SYNTHETIC_PADDING_SEQ_LEN, 2, 2)
            assert not rows.any()
            continue
        number = int(key.split("_")[1])
        prompt, response, known = [*SAMPLES.values()][number]
        tokens = prompt + min(response, LONGEST)
        known = min(known, tokens)
        expected = np.zeros((tokens, 2, 2), dtype=np.int64)
        expected[:known] = experts(number, known)
        assert rows.tolist() == expected.tolist(), key
        assert marks.tolist() == [True] * (tokens - 1) + [False]
        seen.add(number)
    assert len(seen) == len(SAMPLES)
