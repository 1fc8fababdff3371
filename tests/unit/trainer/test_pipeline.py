"""Rewards of a colocated reward model, and the order of a batch in training."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.v1 import trainer_base

from verl_rhyme.config import RhymeConfig, SchedulingConfig
from verl_rhyme.processes import stored_samples
from verl_rhyme.scheduling.retries import RolloutError
from verl_rhyme.trainer.pipeline import RhymePipelineColocated, spread_padding


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


def test_padding_is_spread_and_other_rows_are_sorted():
    lengths = np.random.default_rng(0).permutation(np.arange(1, 31))
    tags = [{"response_len": length} for length in lengths] + [{"response_len": 1, "is_padding": True}] * 6
    order = spread_padding(tags, 1.0, np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(36))
    places = np.flatnonzero(order >= 30)
    assert (np.diff(places) == 6).all(), "padding is not in each mini-batch of six"
    assert lengths[order[order < 30]].tolist() == list(range(1, 31))
    without = spread_padding([{"response_len": length} for length in (3, 1, 2)], 1.0, np.random.default_rng(0))
    assert without.tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("chosen", "mini_batch", "aggregation", "wanted"),
    [
        (None, 8, "token-mean", 1.0),  # one mini-batch: its order does not matter
        (None, 2, "token-mean", 0.0),
        (None, 2, "seq-mean-token-mean", 1.0),
        (1.0, 2, "token-mean", 1.0),
        (None, 8, "seq-mean-token-sum-norm", 0.0),  # verl divides each micro-batch by its longest response
        (1.0, 8, "seq-mean-token-sum-norm", 1.0),
    ],
)
def test_default_order_does_not_bias_the_gradient(chosen, mini_batch, aggregation, wanted):
    trainer = object.__new__(RhymePipelineColocated)
    trainer._rhyme = RhymeConfig(max_staleness=0, scheduling=SchedulingConfig(order=chosen))
    actor = {"ppo_mini_batch_size": mini_batch, "loss_agg_mode": aggregation}
    trainer.config = OmegaConf.create({"actor_rollout_ref": {"actor": actor}, "data": {"train_batch_size": 8}})
    assert trainer._sortedness() == wanted
