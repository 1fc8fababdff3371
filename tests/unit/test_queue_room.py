"""TransferQueue's limit against what a run keeps in it: our presets set none, and one that is too low is refused."""

import pytest
from omegaconf import OmegaConf

from verl_rhyme import config_tree, queue_room
from verl_rhyme.config import CONFIG_PATH
from verl_rhyme.preflight.compose import compose

VERL = 100_000  # its default


def refused(k, prompts, samples, in_flight=None, limit=VERL):
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
    tree = {"max_staleness": k, "scheduling": {"in_flight": in_flight}}
    OmegaConf.update(found, CONFIG_PATH, tree, force_add=True)
    OmegaConf.update(found, queue_room.SIZE, limit, force_add=True)
    return next(queue_room.refusals(found, config_tree.from_verl(found)), None)


@pytest.mark.parametrize(
    ("k", "prompts", "samples", "in_flight", "needed"),
    [
        (1, 1024, 16, None, 57_447),  # 3 batches of 17,408 entries and a tenth
        (1, 2048, 16, None, 114_893),
        (1, 1024, 16, 4, 95_744),
        (1, 1024, 16, 8, 172_340),
        (0, 1024, 16, 4, 260_199),  # two entries of what is regenerated and drafted for, and those put off
        (None, 8192, 16, None, None),  # verl's own schedule
    ],
)
def test_a_limit_below_what_is_in_flight_is_refused_with_the_number(k, prompts, samples, in_flight, needed):
    assert (refused(k, prompts, samples, in_flight) is not None) == ((needed or 0) > VERL)
    assert refused(k, prompts, samples, in_flight, limit=None) is None
    assert refused(k, prompts, samples, in_flight, limit=needed) is None
    if needed:
        found = refused(k, prompts, samples, in_flight, limit=needed - 1)
        assert f"{queue_room.SIZE}={needed}, or lower {CONFIG_PATH}.scheduling.in_flight" in found.remedy
        assert f"{in_flight or 2} update batches of {prompts} prompts x {samples}" in found.detail


def test_our_presets_set_no_limit_and_verl_takes_that():
    assert OmegaConf.select(compose(["+rhyme=full"]), queue_room.SIZE) is None
    assert OmegaConf.select(compose(["+rhyme=histospec"]), queue_room.SIZE) == VERL
