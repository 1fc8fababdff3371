"""OmegaConf resolvers of the presets, composed by hydra."""

import pytest
from omegaconf import OmegaConf

from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.config import CONFIG_PATH

BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"


@pytest.mark.parametrize(
    ("mode", "carrier", "hybrid"),
    [("sync", "naive", True), ("colocate_async", "naive", True), ("separate_async", "relay", False)],
)
def test_the_trainer_mode_selects_backend_and_engines(mode, carrier, hybrid):
    config = compose(["+rhyme=full", f"trainer.v1.trainer_mode={mode}"])
    assert (OmegaConf.select(config, BACKEND), config.actor_rollout_ref.hybrid_engine) == (carrier, hybrid)


def test_an_override_wins():
    config = compose(["+rhyme=full", "trainer.v1.trainer_mode=separate_async", f"{BACKEND}=nccl"])
    assert OmegaConf.select(config, BACKEND) == "nccl"


@pytest.mark.parametrize(
    ("override", "nodes"),
    [("trainer.nnodes=${rhyme.quotient:512,32}", 16), ("trainer.nnodes=${rhyme.quotient:512,0}", 512)],
)
def test_a_quotient_is_a_whole_number(override, nodes):
    assert compose([override]).trainer.nnodes == nodes


@pytest.mark.parametrize(("staleness", "name"), [("2", "full-k2"), ("-1", "invalid")])
def test_a_run_is_named_after_its_preset(staleness, name):
    named = "trainer.experiment_name=${rhyme.preset:}"
    assert compose(["+rhyme=full", f"{CONFIG_PATH}.max_staleness={staleness}", named]).trainer.experiment_name == name
