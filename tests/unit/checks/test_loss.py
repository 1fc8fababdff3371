"""Warnings of stale tokens and of loss averages."""

import pytest
from omegaconf import OmegaConf

from tests.unit.configs import verl_config
from verl_rhyme.checks import loss
from verl_rhyme.checks.rules import of_config
from verl_rhyme.config import CONFIG_PATH, config_tree

NORM = "seq-mean-token-sum-norm"
IS = "algorithm.rollout_correction.rollout_is"
BYPASS = "algorithm.rollout_correction.bypass_mode=true"
R = "actor_rollout_ref.rollout"
MODE = f"{R}.logprobs_mode"
SEPARATE = "trainer.v1.trainer_mode=separate_async"
NO_DRAFTS = f"{CONFIG_PATH}.drafting.enable=false"
ON_POLICY = f"{CONFIG_PATH}.max_staleness=0"
STOCK = f"{CONFIG_PATH}.enable=false"


def rules_of(config):
    return of_config(config, config_tree.from_verl(config))


def warnings(preset, *changes):
    config = verl_config(preset, "data.max_response_length=384", *changes)
    return [str(refusal) for refusal in loss.warnings(config, rules_of(config))]


def average(name, horizon="null"):
    actor = "actor_rollout_ref.actor"
    return [f"{actor}.loss_agg_mode={name}", f"{actor}.loss_scale_factor={horizon}"]


@pytest.mark.parametrize(
    ("preset", "overrides", "weights", "mode"),
    [
        ("full", [SEPARATE], "token", "policy_logprobs"),
        ("sorted", [f"{CONFIG_PATH}.max_staleness=1", NO_DRAFTS], "token", "policy_logprobs"),
        ("full", [ON_POLICY], None, "policy_logprobs"),
        ("histospec", ["trainer.v1.trainer_mode=colocate_async"], None, "policy_logprobs"),
        ("histospec", [NO_DRAFTS], None, "processed_logprobs"),  # vLLM's sampler
        ("stream", [STOCK], None, "processed_logprobs"),
        ("stream", [f"{IS}=sequence", f"{MODE}=raw_logprobs"], "sequence", "raw_logprobs"),  # an override wins
    ],
)
def test_weights_of_stale_tokens_and_log_probabilities_of_rhymes_sampler(preset, overrides, weights, mode):
    found = verl_config(preset, *overrides)
    assert (OmegaConf.select(found, IS), OmegaConf.select(found, MODE)) == (weights, mode)


@pytest.mark.parametrize(
    ("preset", "overrides", "reported"),
    [
        ("stream", [], False),
        ("stream", [f"{IS}=null"], True),
        ("stream", [f"{IS}=null", BYPASS], False),
        ("stream", [f"{IS}=null", "algorithm.rollout_correction.rollout_rs=token_k1"], False),
        ("sorted", [], False),
    ],
)
def test_stale_tokens_without_a_correction_are_reported(preset, overrides, reported):
    words = f"up to 1 version behind the policy, and without importance weights ({IS}=null)"
    assert [words in warning for warning in warnings(preset, *overrides)] == [True] * reported


@pytest.mark.parametrize(
    ("preset", "overrides", "words"),
    [
        ("full", [f"{R}.top_p=0.8", f"{R}.top_k=20"], ""),
        ("full", [f"{MODE}=processed_logprobs"], ""),
        ("full", [f"{MODE}=processed_logprobs", f"{R}.top_p=0.8", f"{R}.top_k=20"], "with top_p=0.8 and top_k=20: "),
        ("full", [f"{MODE}=processed_logprobs", f"{R}.top_p=0.8", ON_POLICY], ""),  # no weights
        ("histospec", [f"{R}.top_p=0.8", NO_DRAFTS], ""),
        ("histospec", [f"{R}.top_p=0.8", NO_DRAFTS, BYPASS], "logprobs_mode=processed_logprobs with top_p=0.8: "),
        ("full", [f"{MODE}=raw_logprobs", f"{R}.top_p=0.8"], ""),
        ("full", [f"{MODE}=raw_logprobs", f"{R}.temperature=0.7"], "raw_logprobs with temperature=0.7: "),
    ],
)
def test_weights_of_another_support_are_reported(preset, overrides, words):
    found = [line for line in warnings(preset, *overrides) if "another distribution" in line]
    assert len(found) == bool(words)
    assert all(words in line and f"set {MODE}=policy_logprobs" in line for line in found)


@pytest.mark.parametrize(("temperature", "reported"), [(0.005, 1), (0.01, 0)])
def test_weights_of_a_temperature_that_vllm_raises_are_reported(temperature, reported):
    found = [line for line in warnings("full", f"{R}.temperature={temperature}") if "vLLM samples at 0.01" in line]
    assert len(found) == reported


@pytest.mark.parametrize("run", [["full"], ["sorted", ON_POLICY]])
def test_averages_of_batches_that_finish_first(run):
    (line,) = warnings(*run, *average("token-mean"))
    assert ("cosine 0.96 to 1 " if run == ["full"] else "cosine 0.81 to 0.90 ") in line
    assert "loss_scale_factor=384" in line
    (line,) = warnings(*run, *average(NORM))
    assert "set actor_rollout_ref.actor.loss_scale_factor=384" in line
    assert not warnings(*run, *average(NORM, horizon=384))
    assert not warnings(*run, *average("seq-mean-token-mean"))


@pytest.mark.parametrize("name", ["token-mean", NORM])
def test_averages_of_batches_as_they_were_loaded_are_not_reported(name):
    loaded = [f"{CONFIG_PATH}.scheduling.{option}" for option in ("in_flight=1", "take=loaded")]
    for run in (["histospec"], ["histopipe"], *(["full", ON_POLICY, each] for each in loaded)):
        assert not warnings(*run, *average(name))


def test_only_the_adaptive_drafter_drafts_from_interrupted_text():
    for policy, drafts in (("adaptive", True), ("paper", False)):
        assert rules_of(verl_config("full", f"{CONFIG_PATH}.drafting.policy={policy}", ON_POLICY)).redrafts is drafts
