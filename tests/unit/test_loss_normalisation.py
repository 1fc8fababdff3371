"""What the loss is divided by, where updates are chosen by length: what is told, and that verl's own loss does it."""

import math

import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import agg_loss

from verl_rhyme.checks import loss_normalisation
from verl_rhyme.config import RhymeConfig, SchedulingConfig

NORM = "seq-mean-token-sum-norm"


def told(average, rules, *, horizon=None):
    actor = {"loss_agg_mode": average, "loss_scale_factor": horizon}
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": actor},
            "data": {"max_response_length": 384},
            "trainer": {"v1": {"trainer_mode": "sync"}},
        }
    )
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
def test_updates_of_what_finishes_first_divided_by_their_own_tokens_are_told(rules):
    (line,) = told("token-mean", rules)
    assert "scheduling.take=finished" in line
    assert "loss_scale_factor=384" in line
    assert not told("seq-mean-token-mean", rules)


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"max_staleness": 0, "in_flight": 1.0, "put_off": 0.0},  # all that is loaded is trained
        {"max_staleness": 0, "take": "loaded"},
        {"max_staleness": 1, "take": "loaded"},
    ],
)
@pytest.mark.parametrize("average", ["token-mean", "seq-mean-token-mean", "token-sum"])
def test_updates_as_they_were_loaded_are_not(rules, average):
    assert not told(average, rules)


def test_a_horizon_is_to_be_one_number():
    (line,) = told(NORM, {"max_staleness": 0})
    assert "set actor_rollout_ref.actor.loss_scale_factor=384" in line
    assert not told(NORM, {"max_staleness": 0}, horizon=384)
    assert not told(NORM, {"max_staleness": 1, "take": "loaded"})


def _weights(average, horizon=None, **info):
    """Of a token of a short response and of one of a long one: trained together, and in updates of their own."""

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


def test_that_is_what_verl_divides_by():
    """What is told of is where sorting changes how much a short response's token weighs beside a long one's."""
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
