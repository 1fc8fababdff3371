"""TransferQueue's limit against what a run keeps in it: our presets set none, and one that is too low is refused."""

import pytest
from omegaconf import OmegaConf

from verl_rhyme import config_tree, queue_room
from verl_rhyme.config import CONFIG_PATH
from verl_rhyme.preflight.compose import compose

VERL = 100_000  # its default


def refused(preset, prompts, samples, *overrides, limit=VERL):
    """Without hydra, which takes a second."""
    found = OmegaConf.create(
        {
            "data": {"train_batch_size": prompts},
            "actor_rollout_ref": {"rollout": {"n": samples}},
            "algorithm": {"adv_estimator": "grpo"},
            "trainer": {"v1": {"trainer_mode": "separate_async"}},
            "transfer_queue": {"backend": {"storage_backend": "SimpleStorage"}},
        }
    )
    sorting = {
        "histospec": None,
        "stream": {"mode": "stream", "max_staleness": 1},
        "full": {"mode": "partial", "max_staleness": 1},
        "sorted": {"mode": "on_policy"},
    }[preset]
    OmegaConf.update(found, CONFIG_PATH, {"sorting": sorting} if sorting else {}, force_add=True)
    OmegaConf.update(found, queue_room.SIZE, limit, force_add=True)
    return next(queue_room.refusals(found, config_tree.from_verl(found)), None)


@pytest.mark.parametrize(
    ("preset", "prompts", "samples", "needed"),
    [
        ("full", 512, 16, None),
        ("full", 1024, 16, 95_744),  # 5 batches of 17,408 entries and a tenth
        ("stream", 1024, 16, None),
        ("stream", 2048, 16, 114_893),
        ("sorted", 512, 16, None),
        ("sorted", 1024, 16, 185_856),  # two entries of what is regenerated and drafted for
        ("histospec", 8192, 16, None),  # verl's own modes
    ],
)
def test_a_limit_below_what_a_run_needs_is_refused_with_the_number(preset, prompts, samples, needed):
    found = refused(preset, prompts, samples)
    if needed is None or needed <= VERL:
        assert found is None
        found = refused(preset, prompts, samples, limit=(needed or 0) - 1) if needed else None
    if needed:
        assert f"{queue_room.SIZE}={needed}" in found.remedy
        assert f"prompts x {samples}" in found.detail
    assert refused(preset, prompts, samples, limit=None) is None


def test_our_presets_set_no_limit_and_verl_takes_that():
    assert OmegaConf.select(compose(["+rhyme=full"]), queue_room.SIZE) is None
    assert OmegaConf.select(compose(["+rhyme=histospec"]), queue_room.SIZE) == VERL
