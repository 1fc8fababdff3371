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


def test_an_override_wins_a_quotient_is_whole_and_an_invalid_run_has_a_name():
    config = compose(
        [
            *("+rhyme=full", "trainer.v1.trainer_mode=separate_async", f"{BACKEND}=nccl"),
            *(f"{CONFIG_PATH}.max_staleness=-1", "trainer.experiment_name=${rhyme.preset:}"),
            *("trainer.nnodes=${rhyme.quotient:512,30}", "trainer.save_freq=${rhyme.quotient:512,0}"),
        ]
    )
    assert OmegaConf.select(config, BACKEND) == "nccl"
    assert (config.trainer.experiment_name, config.trainer.nnodes, config.trainer.save_freq) == ("invalid", 17, 512)
