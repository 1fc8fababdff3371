"""Q of the bubble ratio: one number of a run, whatever asks for it."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_rhyme.config import RhymeConfig, SortingConfig
from verl_rhyme.observability.metrics import fillable_slots
from verl_rhyme.trainer.base import RhymeTrainerMixin


class Trainer(RhymeTrainerMixin):
    on_sample_end = None


def trainer(mode, replicas, slots_each, sorting=None, inflight=1, **settings):
    """16 prompts x 4 samples."""
    made = object.__new__(Trainer)
    made._rhyme = RhymeConfig(sorting=sorting or SortingConfig())
    made.trainer_mode = mode
    made.replay_buffer = SimpleNamespace(max_inflight_gen_batches=inflight)
    made._rollout_server_managers = lambda: [SimpleNamespace(get_replicas=lambda: [None] * replicas)]
    rollout = {"n": 4, "max_num_seqs": slots_each}
    made.config = OmegaConf.create(
        {
            "data": {"train_batch_size": 16},
            "actor_rollout_ref": {"rollout": rollout},
            "trainer": {"v1": {"trainer_mode": mode, mode: settings}},
        }
    )
    return made


@pytest.mark.parametrize(
    ("made", "slots"),
    [
        (lambda: trainer("sync", 2, 16), 32),  # the engines' slots
        (lambda: trainer("sync", 2, 256), 64),  # no schedule could fill more
        (lambda: trainer("sync", 2, 256, inflight=2), 128),
        (lambda: trainer("separate_async", 2, 256, num_warmup_batches=1.5), 160),
        (lambda: trainer("colocate_async", 1, 128, num_warmup_batches=1), 128),
        (lambda: trainer("rhyme_sorted", 2, 256, SortingConfig(mode="partial", group_batches=4)), 256),
        (lambda: trainer("rhyme_sorted", 1, 48, SortingConfig(mode="partial")), 48),
    ],
)
def test_the_slots_that_a_run_can_fill(made, slots):
    run = made()
    assert run.fillable_slots == slots
    run._rollout_server_managers = list  # replicas come and go: the denominator stays
    assert run.fillable_slots == slots


def test_an_engine_that_has_not_come_up_is_no_division_by_zero():
    assert fillable_slots(0, 64) == fillable_slots(16, 0) == 1
