"""Requests have the key of their prompt's data and the number of their sample, in both workers."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import NonTensorData
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, _agent_loop_registry
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils import tensordict_utils as tu

from tests.unit.agent_loop.test_session import Client
from verl_rhyme.agent_loop import worker as workers
from verl_rhyme.agent_loop.session import STARTS
from verl_rhyme.agent_loop.validation import Validation
from verl_rhyme.agent_loop.worker import RhymeAgentLoopWorker, SessionAgentLoopWorker, _Order
from verl_rhyme.history.keys import prompt_key
from verl_rhyme.processes.request import FIELD
from verl_rhyme.scheduling.attempts import Attempt, Start
from verl_rhyme.trainer.pipeline import RhymePipelineTrainer

#: Tokens that the template puts before each prompt; they change at midnight.
DATE = [24, 11]


class Loop:
    """Agent loop of two turns that puts the date into the messages, and keeps none of the engine's extra fields."""

    def __init__(self, server_manager, **_):
        self.client = server_manager

    async def run(self, sampling_params, session_id, raw_prompt=None, **_):
        if raw_prompt:
            raw_prompt[0]["content"] += f" {DATE}"
        await asyncio.sleep(0.01 * session_id)
        ids = [*DATE, *(raw_prompt[0]["content"].encode() if raw_prompt else [])]
        for answer in ([], [9]):
            said = await self.client.generate(
                f"{id(self)}", prompt_ids=[*ids, *answer], sampling_params=sampling_params
            )
        return AgentLoopOutput(prompt_ids=ids, response_ids=said.token_ids, response_mask=[1], metrics={})


ROLLOUT = SimpleNamespace(n=2, val_kwargs=SimpleNamespace(n=1))
CONFIG = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=ROLLOUT), data={})


def answered(worker_class, prompt, validate=False):
    """Return keys of a prompt's requests, and the records stored with its trajectories, by sample."""
    stored, starts = {}, []

    class Worker(worker_class.__ray_metadata__.modified_class):
        def __init__(self):
            self.config, self.llm_client = CONFIG, Client()
            self.tokenizer, self.processor = SimpleNamespace(chat_template="{{ messages }}"), None
            self.hf_model_type = self.dataset_cls = self.tools = self._filter_metric = None
            self._seed, self._attempts, self._sessions, self._reports = 0, {}, {}, self
            self._tool_timeout, self._validation = 60.0, Validation(60.0)

        async def send(self, ended):
            assert ended.status != "failed", ended.error

    async def run():
        worker = Worker()
        row = {"uid": "a", "agent_name": "dated", "global_steps": 1, **prompt}
        if worker_class is SessionAgentLoopWorker and not validate:
            starts.extend(Start(Attempt("a", number)) for number in range(2))
            worker._attempts = dict.fromkeys(start.attempt for start in starts)
            row[STARTS] = _Order(starts, {})
        trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": validate}
        await worker._run_prompt(row, {"max_tokens": 1}, trajectory)
        return [meta.key for _, _, meta, _ in worker.llm_client.requests]

    async def store(self, output, validate, session_id, **kwargs):
        stored[session_id] = output.extra_fields.get(FIELD)

    async def put(**_): ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent_loop_tq.tq, "async_kv_put", put)
        patch.setattr(workers._AgentLoopWorker, "_agent_loop_postprocess", store)
        patch.setitem(_agent_loop_registry, "dated", {"_target_": f"{__name__}.Loop"})
        return asyncio.run(run()), stored


def row(text="find x", **columns):
    return {"raw_prompt": [{"role": "user", "content": text}], **columns}


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("worker", [RhymeAgentLoopWorker, SessionAgentLoopWorker])
def test_prompt_key_does_not_depend_on_the_date(worker, validate, monkeypatch):
    today, stored = answered(worker, row(), validate)
    monkeypatch.setattr(f"{__name__}.DATE", [25, 11])
    tomorrow, _ = answered(worker, row(), validate)
    [key] = {*today, *tomorrow}
    record = {"prompt_key": key, "response_tokens": 1}
    for records in stored.values():
        for each in records:
            del each["id"]
    assert stored == {
        number: [{**record, "sample": number, "request": turn, "reason": ""} for turn in range(2)]
        for number in range(1 if validate else 2)
    }
    other, _ = answered(worker, row(tools_kwargs={"search": {"create_kwargs": {"corpus": "a"}}}), validate)
    assert set(other).isdisjoint(today)
    nothing, _ = answered(worker, {"index": 3}, validate)
    assert set(nothing) == {prompt_key(DATE).hex()}, "without data by its token ids"


def test_lengths_use_the_same_key():
    rows = [
        row("find x", extra_info={"index": 1}, tools_kwargs={}),
        row("find y", extra_info={"tool_selection": ["search"]}, tools_kwargs={"search": {"create_kwargs": {"k": 3}}}),
    ]
    batch = tu.get_tensordict(
        {
            "dummy_tensor": torch.zeros(2, 1),
            **{name: np.fromiter((each[name] for each in rows), dtype=object, count=2) for name in rows[0]},
        }
    )
    batch["multi_modal_data"] = NonTensorData("none")
    trainer = SimpleNamespace(
        config=SimpleNamespace(data={}), tokenizer=SimpleNamespace(chat_template="{{ messages }}"), processor=None
    )
    columns = ["dummy_tensor", *rows[0]]
    keys = RhymePipelineTrainer._prompt_keys(trainer, batch, columns)
    asked = [answered(SessionAgentLoopWorker, {**each, "multi_modal_data": "none"})[0] for each in rows]
    assert asked == [[key] * 4 for key in keys]  # two samples of two turns
