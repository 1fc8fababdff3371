"""The training order of a batch, and verl's padding in it."""

import numpy as np
import pytest
from omegaconf import OmegaConf

from verl_rhyme.config import RhymeConfig, SchedulingConfig
from verl_rhyme.trainer.layout import spread_padding
from verl_rhyme.trainer.pipeline import RhymePipelineColocated


def test_padding_is_spread_and_other_rows_are_sorted():
    lengths = np.random.default_rng(0).permutation(np.arange(1, 31))
    tags = [{"response_len": length} for length in lengths] + [{"response_len": 1, "is_padding": True}] * 6
    order = spread_padding(tags, 1.0, np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(36))
    places = np.flatnonzero(order >= 30)
    assert (np.diff(places) == 6).all(), "padding is not in each mini-batch of six"
    assert lengths[order[order < 30]].tolist() == list(range(1, 31))


def test_without_padding_nothing_is_inserted():
    order = spread_padding([{"response_len": length} for length in (3, 1, 2)], 1.0, np.random.default_rng(0))
    assert order.tolist() == [1, 2, 0]


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
