"""Warnings of stale tokens and of loss averages, and what verl's own loss does in these cases."""

import math

import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

from tests.unit.configs import composed, verl_config
from verl_rhyme.checks import loss
from verl_rhyme.checks.rules import of_config
from verl_rhyme.config import CONFIG_PATH, config_tree

SEPARATE = "trainer.v1.trainer_mode=separate_async"
NORM = "seq-mean-token-sum-norm"


IS = "algorithm.rollout_correction.rollout_is"


def warnings(preset, *changes):
    config = verl_config(preset, "data.max_response_length=384", *changes)
    return [str(refusal) for refusal in loss.warnings(config, of_config(config, config_tree.from_verl(config)))]


def average(name, horizon="null"):
    actor = "actor_rollout_ref.actor"
    return [f"{actor}.loss_agg_mode={name}", f"{actor}.loss_scale_factor={horizon}"]


@pytest.mark.parametrize(
    ("preset", "overrides", "level"),
    [
        ("full", [SEPARATE], "token"),
        ("sorted", [f"{CONFIG_PATH}.max_staleness=1"], "token"),
        # on-policy: verl's default
        ("full", [f"{CONFIG_PATH}.max_staleness=0"], None),
        ("histospec", ["trainer.v1.trainer_mode=colocate_async"], None),  # nothing but drafts
        ("stream", [f"{CONFIG_PATH}.enable=false"], None),  # stock verl
        # an override wins
        ("stream", [f"{IS}=sequence"], "sequence"),
    ],
)
def test_stale_tokens_have_token_level_importance_weights_unless_an_override_says_otherwise(preset, overrides, level):
    found = verl_config(preset, *overrides)
    assert OmegaConf.select(found, IS) == level
    assert found.algorithm.rollout_correction.rollout_is_threshold == 2.0, "verl's"


@pytest.mark.parametrize(
    ("preset", "overrides", "reported"),
    [
        ("stream", [], False),
        ("stream", [f"{IS}=null"], True),
        ("stream", [f"{IS}=null", "algorithm.rollout_correction.bypass_mode=true"], False),
        ("stream", [f"{IS}=null", "algorithm.rollout_correction.rollout_rs=token_k1"], False),
        ("sorted", [], False),
        ("histospec", [], False),
    ],
)
def test_stale_tokens_without_a_correction_are_reported(preset, overrides, reported):
    words = f"up to 1 version behind the policy, and without importance weights ({IS}=null)"
    assert [words in warning for warning in warnings(preset, *overrides)] == [True] * reported


R = "actor_rollout_ref.rollout"
MODE = f"{R}.logprobs_mode"
BYPASS = "algorithm.rollout_correction.bypass_mode=true"
NO_DRAFTS = f"{CONFIG_PATH}.drafting.enable=false"


@pytest.mark.parametrize(
    ("preset", "overrides", "mode"),
    [
        ("histospec", [], "policy_logprobs"),
        ("histospec", [NO_DRAFTS], "processed_logprobs"),  # vLLM's sampler
        ("full", [], "policy_logprobs"),
        ("full", [NO_DRAFTS], "policy_logprobs"),
        ("full", [f"{CONFIG_PATH}.enable=false"], "processed_logprobs"),
        ("stream", [f"{MODE}=raw_logprobs"], "raw_logprobs"),  # an override wins
    ],
)
def test_rollout_log_probabilities_are_the_policys_where_rhyme_draws_the_tokens(preset, overrides, mode):
    assert OmegaConf.select(verl_config(preset, *overrides), MODE) == mode


@pytest.mark.parametrize(
    ("preset", "overrides", "words"),
    [
        ("full", [f"{R}.top_p=0.8", f"{R}.top_k=20"], ""),
        ("full", [f"{MODE}=processed_logprobs"], ""),
        ("full", [f"{MODE}=processed_logprobs", f"{R}.top_p=0.8", f"{R}.top_k=20"], "with top_p=0.8 and top_k=20: "),
        ("full", [f"{MODE}=processed_logprobs", f"{R}.min_p=0.1"], "with min_p=0.1: "),
        ("full", [f"{MODE}=processed_logprobs", f"{R}.repetition_penalty=1.1"], "with repetition_penalty=1.1: "),
        ("full", [f"{MODE}=processed_logprobs", f"{R}.top_p=0.8", f"{CONFIG_PATH}.max_staleness=0"], ""),  # no weights
        ("histospec", [f"{R}.top_p=0.8", BYPASS], ""),
        ("histospec", [f"{R}.top_p=0.8", NO_DRAFTS], ""),
        ("histospec", [f"{R}.top_p=0.8", NO_DRAFTS, BYPASS], "logprobs_mode=processed_logprobs with top_p=0.8: "),
        ("full", [f"{MODE}=raw_logprobs", f"{R}.top_p=0.8"], ""),
        ("full", [f"{MODE}=raw_logprobs", f"{R}.temperature=0.7"], "raw_logprobs with temperature=0.7: "),
    ],
)
def test_weights_of_another_support_are_reported_with_their_size(preset, overrides, words):
    found = [line for line in warnings(preset, *overrides) if "another distribution" in line]
    assert len(found) == bool(words)
    for line in found:
        assert words in line
        assert "0.86 on average at top_p=0.8" in line
        assert f"set {MODE}=policy_logprobs" in line


def test_weights_of_a_temperature_that_vllm_raises_are_reported():
    (line,) = [line for line in warnings("full", f"{R}.temperature=0.005") if "temperature" in line]
    assert "vLLM samples at 0.01" in line
    assert not [line for line in warnings("full", f"{R}.temperature=0.01") if "temperature" in line]


@pytest.mark.parametrize("stale", [0, 1])
@pytest.mark.parametrize("preset", ["full", "sorted"])
def test_averages_of_batches_that_finish_first(preset, stale):
    run = [preset, f"{CONFIG_PATH}.max_staleness={stale}"]
    (line,) = warnings(*run, *average("token-mean"))
    assert "scheduling.take=finished" in line
    assert "loss_scale_factor=384" in line
    (line,) = warnings(*run, *average(NORM))
    assert "set actor_rollout_ref.actor.loss_scale_factor=384" in line
    assert not warnings(*run, *average(NORM, horizon=384))
    assert not warnings(*run, *average("seq-mean-token-mean"))


@pytest.mark.parametrize(
    "run",
    [
        ["histospec"],
        ["full", f"{CONFIG_PATH}.max_staleness=0", f"{CONFIG_PATH}.scheduling.in_flight=1"],
        ["full", f"{CONFIG_PATH}.max_staleness=0", f"{CONFIG_PATH}.scheduling.take=loaded"],
        ["histopipe"],
    ],
)
@pytest.mark.parametrize("name", ["token-mean", NORM])
def test_averages_of_batches_as_they_were_loaded_are_not_reported(run, name):
    assert not warnings(*run, *average(name))


def _weights(name, horizon=None, **info):
    """Return a short response's token weight over a long one's: trained together, and in separate steps."""

    def weight(lengths, of):
        width = max(lengths)
        mask = torch.tensor([[1.0] * n + [0.0] * (width - n) for n in lengths])
        losses = torch.zeros_like(mask).requires_grad_()
        given = {**info, "batch_num_tokens": sum(lengths)}
        agg_loss(losses, mask, name, global_batch_size=len(lengths), loss_scale_factor=horizon, **given).backward()
        return float(losses.grad[of, 0])

    together = weight([10, 40], 0) / weight([10, 40], 1)
    apart = weight([10, 10], 0) / weight([40, 40], 0)
    return together, apart


def test_verls_loss_weighs_tokens_as_the_warnings_claim():
    """The warnings report the averages with which sorting changes the weight of a short response's token."""
    assert _weights("token-mean") == pytest.approx((1, 4))
    assert _weights(NORM) == pytest.approx((1, 4))
    for name, horizon in (
        (NORM, 384),
        ("seq-mean-token-sum", None),
        ("seq-mean-token-mean", None),
        ("token-sum", None),
    ):
        together, apart = _weights(name, horizon)
        assert math.isclose(together, apart, rel_tol=1e-4), name


def test_the_weight_of_a_token_is_the_ratio_of_the_current_policy_to_the_sampling_policy():
    """verl's code with the preset's config, on a response that two policy versions sampled."""
    correction = composed("+rhyme=full", "actor_rollout_ref.rollout.name=vllm").algorithm.rollout_correction
    sampled = torch.log(torch.tensor([[0.5, 0.5, 0.1, 0.2]]))
    now = torch.log(torch.tensor([[0.5, 0.25, 0.9, 0.2]]))
    mask = torch.tensor([[1, 1, 1, 0]])
    batch = DataProto.from_dict({"old_log_probs": now, "rollout_log_probs": sampled, "response_mask": mask})
    batch, _ = compute_rollout_correction_and_add_to_batch(batch, correction)
    weights = batch.batch["rollout_is_weights"]
    assert weights[0].tolist() == pytest.approx([1.0, 0.5, 2.0, 0.0]), "9 is truncated to 2, padding has none"


def test_only_the_adaptive_drafter_drafts_from_interrupted_text():
    for policy, drafts in (("adaptive", True), ("paper", False)):
        config = verl_config("full", f"{CONFIG_PATH}.drafting.policy={policy}", f"{CONFIG_PATH}.max_staleness=0")
        rules = of_config(config, config_tree.from_verl(config))
        assert rules is not None
        assert rules.redrafts is drafts
