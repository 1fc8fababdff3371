"""What the loss is divided by, where updates are chosen by length: what is told, and that verl's own loss does it."""

import math

import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import agg_loss

from verl_rhyme.checks import loss_normalisation
from verl_rhyme.config import RhymeConfig, SortingConfig

NORM = "seq-mean-token-sum-norm"


def told(average, sorting, *, mini_batch=8, horizon=None, trainer_mode="rhyme_sorted"):
    actor = {"loss_agg_mode": average, "loss_scale_factor": horizon, "ppo_mini_batch_size": mini_batch}
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": actor},
            "data": {"train_batch_size": 8, "max_response_length": 384},
            "trainer": {"v1": {"trainer_mode": trainer_mode}},
        }
    )
    rhyme = None if sorting is None else RhymeConfig(sorting=SortingConfig(**sorting))
    return [str(refusal) for refusal in loss_normalisation.contradictions(config, rhyme)]


@pytest.mark.parametrize("mode", ["on_policy", "partial"])
@pytest.mark.parametrize("load", ["group", "refill"])
def test_updates_of_the_shortest_divided_by_their_own_tokens_are_told(mode, load):
    (line,) = told("token-mean", {"mode": mode, "load": load})
    assert "harvest=shortest" in line
    assert "loss_scale_factor=384" in line


@pytest.mark.parametrize(
    "sorting",
    [
        None,
        {"mode": None},
        {"mode": "on_policy", "group_batches": 1},  # all that is loaded is trained
        {"mode": "partial", "harvest": "loaded"},
        {"mode": "histopipe"},
    ],
)
@pytest.mark.parametrize("average", ["token-mean", "seq-mean-token-mean", "token-sum"])
def test_updates_as_they_were_loaded_are_not(sorting, average):
    assert not told(average, sorting)


def test_what_takes_the_first_that_is_finished_is_one_of_them():
    assert told("token-mean", {"mode": "stream", "harvest": "shortest"}, trainer_mode="separate_async")
    assert not told("token-mean", {"mode": "stream"}, trainer_mode="separate_async")


def test_sorted_mini_batches_are_told_where_somebody_asked_for_them():
    sorting = {"mode": "on_policy", "group_batches": 1}
    (line,) = told("token-mean", {**sorting, "order": 1.0}, mini_batch=2)
    assert "mini-batches of 2 of 8" in line
    for order in (None, 0.0):  # null is what does not bias
        assert not told("token-mean", {**sorting, "order": order}, mini_batch=2)
    assert not told("token-mean", {**sorting, "order": 1.0}, mini_batch=8)
    assert not told("seq-mean-token-mean", {**sorting, "order": 1.0}, mini_batch=2)


def test_a_horizon_is_to_be_one_number():
    (line,) = told(NORM, {"mode": "on_policy"})
    assert "set actor_rollout_ref.actor.loss_scale_factor=384" in line
    assert not told(NORM, {"mode": "on_policy"}, horizon=384)
    for order in (None, 0.0):
        assert not told(NORM, {"mode": "histopipe", "order": order})
    assert told(NORM, {"mode": "histopipe", "order": 1.0})


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
