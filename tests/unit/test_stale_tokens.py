"""Which importance sampling corrects tokens of earlier policies, by preset and override, and what start-up reports."""

from pathlib import Path

import pytest
import torch
import verl
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

import verl_rhyme
from verl_rhyme import plugin
from verl_rhyme.checks import stale_tokens
from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.config import CONFIG_PATH, config_tree

IS = "algorithm.rollout_correction.rollout_is"
SEPARATE = "trainer.v1.trainer_mode=separate_async"


CORRECTION = Path(verl.__file__).parent / "trainer/config/algorithm/rollout_correction.yaml"
PRESETS = Path(verl_rhyme.__file__).parent / "conf/rhyme"


def config(preset, *overrides):
    """What of a run's config matters here; composed by hydra it takes a second."""
    plugin.register_interpolations()
    found = OmegaConf.create({"algorithm": {"rollout_correction": OmegaConf.load(CORRECTION)}})
    found.trainer = {"v1": {"trainer_mode": "sync"}}
    for name in ("histospec", preset) if preset != "off" else ():  # as their defaults say
        found.merge_with(OmegaConf.load(PRESETS / f"{name}.yaml"))
    for key, _, value in (override.partition("=") for override in overrides):
        OmegaConf.update(found, key, OmegaConf.create(f"value: {value}").value, force_add=True)
    return found


@pytest.mark.parametrize(
    ("preset", "overrides", "level"),
    [
        ("stream", [], "token"),
        ("full", [], "token"),
        ("full", [SEPARATE], "token"),
        ("histopipe", [], "token"),
        ("sorted", [f"{CONFIG_PATH}.max_staleness=1"], "token"),
        # on-policy: verl's default
        ("sorted", [], None),
        ("full", [f"{CONFIG_PATH}.max_staleness=0"], None),
        ("stream", [f"{CONFIG_PATH}.max_staleness=0"], None),
        ("histospec", [], None),
        ("histospec", ["trainer.v1.trainer_mode=colocate_async"], None),  # nothing but drafts
        ("off", [], None),
        ("stream", [f"{CONFIG_PATH}.enable=false"], None),  # stock verl
        # an override has the last word
        ("stream", [f"{IS}=sequence"], "sequence"),
        ("full", [f"{IS}=null"], None),
        ("sorted", [f"{IS}=token"], "token"),
    ],
)
def test_stale_tokens_have_token_level_importance_weights_unless_an_override_says_otherwise(preset, overrides, level):
    found = config(preset, *overrides)
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
    found = config(preset, *overrides)
    told = stale_tokens.uncorrected(found, config_tree.from_verl(found))
    assert (told is not None) == reported
    assert not reported or f"at most 1 version old, and without importance weights ({IS}=null)" in told


def test_the_weight_of_a_token_is_what_the_current_policy_gives_it_over_what_its_own_policy_gave_it():
    """verl's own code on the preset's config: two versions in one response, each token by its own policy."""
    correction = compose(["+rhyme=full", "actor_rollout_ref.rollout.name=vllm"]).algorithm.rollout_correction
    made = torch.log(torch.tensor([[0.5, 0.5, 0.1, 0.2]]))
    now = torch.log(torch.tensor([[0.5, 0.25, 0.9, 0.2]]))
    mask = torch.tensor([[1, 1, 1, 0]])
    batch = DataProto.from_dict({"old_log_probs": now, "rollout_log_probs": made, "response_mask": mask})
    batch, _ = compute_rollout_correction_and_add_to_batch(batch, correction)
    weights = batch.batch["rollout_is_weights"]
    assert weights[0].tolist() == pytest.approx([1.0, 0.5, 2.0, 0.0]), "9 is truncated to 2, padding has none"
