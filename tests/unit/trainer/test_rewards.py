"""Rewards of a colocated reward model, which the trainer computes once a batch is collected."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.v1 import trainer_base

from verl_rhyme.processes import stored_samples
from verl_rhyme.scheduling.retries import RolloutError
from verl_rhyme.trainer.base import RhymeTrainerMixin
from verl_rhyme.trainer.pipeline import RhymePipelineColocated


@pytest.mark.parametrize("partition", ["train", "val"])
@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 0.5])
def test_rewards_that_are_not_finite_are_refused_before_training(monkeypatch, reward, partition):
    """A NaN makes the advantages of its whole group NaN. In a validation it is only shown."""
    stored = {}

    def get(keys, partition_id, select_fields):
        if select_fields == ["rm_scores"]:
            return stored["data"]
        tokens = torch.nested.as_nested_tensor([torch.ones(3, dtype=torch.long)] * 2, layout=torch.jagged)
        return {"prompts": tokens, "responses": tokens, "raw_prompt": [["a"], ["b"]]}

    def put(keys, partition_id, fields):
        stored["data"] = fields

    def scores(data):
        return DataProto(batch=TensorDict({"rm_scores": torch.tensor([[0.0, 0, 1], [0.0, 0, reward]])}, batch_size=2))

    for module in (trainer_base, stored_samples):
        monkeypatch.setattr(module, "tq", SimpleNamespace(kv_batch_get=get, kv_batch_put=put))
    class_ = type("Trainer", (RhymePipelineColocated,), {"__getattr__": lambda self, name: getattr(self.parts, name)})
    trainer = object.__new__(class_)
    manager = SimpleNamespace(compute_rm_score=scores)
    trainer.parts = SimpleNamespace(reward_loop_manager=manager, tokenizer=SimpleNamespace(pad_token_id=0))
    batch = KVBatchMeta(partition_id=partition, keys=["p7_0_0", "p7_65537_0"], tags=[{"response_len": 3}] * 2)
    if np.isfinite(reward) or partition == "val":
        assert trainer._compute_reward_colocate(batch) is batch
        return
    with pytest.raises(RolloutError, match=f"returned {reward} for sample 1 of prompt p7, and 1 of 2 rewards"):
        trainer._compute_reward_colocate(batch)


def test_a_validation_without_a_sample_names_the_fault():
    """verl would ask its queue for no keys."""
    nothing = KVBatchMeta(partition_id="val", keys=[], tags=[])
    trainer = SimpleNamespace(replay_buffer=SimpleNamespace(sample=lambda **_: (nothing, {})))
    RhymeTrainerMixin._watch_validation(trainer)
    with pytest.raises(RolloutError, match="no validation sample succeeded"):
        trainer.replay_buffer.sample(partition_id="val")
