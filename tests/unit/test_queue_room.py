"""TransferQueue's limit against what a run keeps in it: our presets set none, and one that is too low is refused."""

import pytest
from omegaconf import OmegaConf

from verl_rhyme.checks import queue_room
from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.config import CONFIG_PATH, config_tree, presets

VERL = 100_000  # its default


def refused(preset, prompts, samples, *, limit=VERL, **changes):
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
    OmegaConf.update(found, CONFIG_PATH, presets.tree(preset, changes), force_add=True)
    OmegaConf.update(found, queue_room.SIZE, limit, force_add=True)
    return next(queue_room.refusals(found, config_tree.from_verl(found)), None)


@pytest.mark.parametrize(
    ("preset", "prompts", "samples", "needed"),
    [
        ("full", 1024, 16, 57_447),  # 3 batches of 17,408 entries and a tenth
        ("full", 2048, 16, 114_893),
        ("stream", 1024, 16, 57_447),
        ("stream", 2048, 16, 114_893),
        ("sorted", 512, 16, 92_928),
        ("sorted", 1024, 16, 185_856),  # two entries of what is regenerated and drafted for
        ("histospec", 8192, 16, None),  # verl's own schedule
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
        assert "scheduling.in_flight=" in found.detail
        assert "\n" not in str(found)
        assert refused(preset, prompts, samples, limit=needed) is None
    assert refused(preset, prompts, samples, limit=None) is None


def test_more_in_flight_than_the_queue_holds_is_refused():
    assert refused("full", 512, 16) is None
    found = refused("sorted", 512, 16, **{"max_staleness": 1, "scheduling.in_flight": 100.0})
    assert f"{queue_room.SIZE}=100000 is less than the 967015 entries" in found.detail
    assert f"100 update batches in flight ({CONFIG_PATH}.scheduling.in_flight=100)" in found.detail
    assert "lower scheduling.in_flight" in found.remedy


def test_our_presets_set_no_limit_and_verl_takes_that():
    assert OmegaConf.select(compose(["+rhyme=full"]), queue_room.SIZE) is None
    assert OmegaConf.select(compose(["+rhyme=histospec"]), queue_room.SIZE) == VERL
