"""Warnings of loss averages that depend on the length order, and a check of them against verl's own loss."""

import math

import pytest
import torch
from verl.trainer.ppo.core_algos import agg_loss

from tests.unit.configs import verl_config
from verl_rhyme.checks import loss_normalisation
from verl_rhyme.config import RhymeConfig, SchedulingConfig

NORM = "seq-mean-token-sum-norm"


def warnings(average, rules, *, horizon="null"):
    actor = {"loss_agg_mode": average, "loss_scale_factor": horizon}
    sizes = ["data.max_response_length=384"]
    config = verl_config("off", *(f"actor_rollout_ref.actor.{key}={value}" for key, value in actor.items()), *sizes)
    rules = dict(rules)
    rhyme = RhymeConfig(max_staleness=rules.pop("max_staleness", None), scheduling=SchedulingConfig(**rules))
    return [str(refusal) for refusal in loss_normalisation.contradictions(config, rhyme)]


@pytest.mark.parametrize(
    "rules",
    [
        {"max_staleness": 0},  # tail batching
        {"max_staleness": 0, "in_flight": 4.0, "refill": "when_empty"},
        {"max_staleness": 1},
        {"max_staleness": 1, "in_flight": 4.0, "refill": "when_empty"},
    ],
)
def test_a_token_mean_of_batches_that_finish_first_is_reported(rules):
    (line,) = warnings("token-mean", rules)
    assert "scheduling.take=finished" in line
    assert "loss_scale_factor=384" in line
    assert not warnings("seq-mean-token-mean", rules)


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"max_staleness": 0, "in_flight": 1.0, "put_off": 0.0},  # a batch is trained as it was loaded
        {"max_staleness": 0, "take": "loaded"},
        {"max_staleness": 1, "take": "loaded"},
    ],
)
def test_a_token_mean_of_batches_as_they_were_loaded_is_not_reported(rules):
    assert not warnings("token-mean", rules)


def test_a_missing_loss_scale_factor_is_reported():
    (line,) = warnings(NORM, {"max_staleness": 0})
    assert "set actor_rollout_ref.actor.loss_scale_factor=384" in line
    assert not warnings(NORM, {"max_staleness": 0}, horizon=384)
    assert not warnings(NORM, {"max_staleness": 1, "take": "loaded"})


def _weights(average, horizon=None, **info):
    """Return a short response's token weight over a long one's: trained together, and in separate steps."""

    def weight(lengths, of):
        width = max(lengths)
        mask = torch.tensor([[1.0] * n + [0.0] * (width - n) for n in lengths])
        loss = torch.zeros_like(mask).requires_grad_()
        given = {**info, "batch_num_tokens": sum(lengths)}
        agg_loss(loss, mask, average, global_batch_size=len(lengths), loss_scale_factor=horizon, **given).backward()
        return float(loss.grad[of, 0])

    together = weight([10, 40], 0) / weight([10, 40], 1)
    apart = weight([10, 10], 0) / weight([40, 40], 0)
    return together, apart


def test_verls_loss_weighs_tokens_as_the_warnings_claim():
    """The warnings report the averages with which sorting changes the weight of a short response's token."""
    assert _weights("token-mean") == pytest.approx((1, 4))
    assert _weights(NORM) == pytest.approx((1, 4))
    for average, horizon in (
        (NORM, 384),
        ("seq-mean-token-sum", None),
        ("seq-mean-token-mean", None),
        ("token-sum", None),
    ):
        together, apart = _weights(average, horizon)
        assert math.isclose(together, apart, rel_tol=1e-4), average
