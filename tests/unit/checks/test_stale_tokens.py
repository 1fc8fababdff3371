"""Which importance sampling corrects tokens of earlier policies, by preset and override, and what start-up reports."""

import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

from tests.unit.configs import composed, verl_config
from verl_rhyme.checks import stale_tokens
from verl_rhyme.config import CONFIG_PATH, config_tree
from verl_rhyme.scheduling.rules import of_config

IS = "algorithm.rollout_correction.rollout_is"
SEPARATE = "trainer.v1.trainer_mode=separate_async"


@pytest.mark.parametrize(
    ("preset", "overrides", "level"),
    [
        ("full", [SEPARATE], "token"),
        ("histopipe", [], "token"),
        ("sorted", [f"{CONFIG_PATH}.max_staleness=1"], "token"),
        # on-policy: verl's default
        ("full", [f"{CONFIG_PATH}.max_staleness=0"], None),
        ("histospec", ["trainer.v1.trainer_mode=colocate_async"], None),  # nothing but drafts
        ("stream", [f"{CONFIG_PATH}.enable=false"], None),  # stock verl
        # an override wins
        ("stream", [f"{IS}=sequence"], "sequence"),
        ("full", [f"{IS}=null"], None),
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
    found = verl_config(preset, *overrides)
    warning = stale_tokens.uncorrected(found, config_tree.from_verl(found))
    assert (warning is not None) == reported
    assert not reported or f"up to 1 version behind the policy, and without importance weights ({IS}=null)" in warning


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
