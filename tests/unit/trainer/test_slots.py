"""Q of the bubble ratio: one number for the whole run."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_rhyme.config import RhymeConfig
from verl_rhyme.observability.metrics import fillable_slots
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.trainer.base import RhymeTrainerMixin
from verl_rhyme.trainer.pipeline import RhymePipelineTrainer


class Trainer(RhymeTrainerMixin):
    on_sample_end = None


class Sorted(RhymePipelineTrainer):
    on_sample_end = None


def trainer(mode, replicas, slots_each, inflight=1, made=None, bound=None, **settings):
    """A trainer of 16 prompts x 4 samples."""
    made = made or object.__new__(Trainer)
    made._rhyme = RhymeConfig(max_staleness=bound)
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


def by_rules(replicas, slots_each, bound, **rules):
    made = object.__new__(Sorted)
    made.rules = Rules(16, 64, max_staleness=bound, **rules)
    servers = SimpleNamespace(get_replicas=lambda: [None] * replicas)
    made.topology = SimpleNamespace(servers=lambda: servers)
    return trainer("colocate_async", replicas, slots_each, made=made, bound=bound)


@pytest.mark.parametrize(
    ("made", "slots"),
    [
        (lambda: trainer("sync", 2, 16), 32),  # the engines' slots
        (lambda: trainer("sync", 2, 256), 64),  # there are no more samples
        (lambda: trainer("sync", 2, 256, inflight=2), 128),
        (lambda: trainer("separate_async", 2, 256, num_warmup_batches=1.5), 160),
        (lambda: trainer("colocate_async", 1, 128, num_warmup_batches=1), 128),
        (lambda: by_rules(2, 256, 1, in_flight=4, refill="when_empty"), 256),
        (lambda: by_rules(2, 256, 2, take="loaded"), 192),
        (lambda: by_rules(1, 48, 1), 48),
        (lambda: by_rules(2, 256, 0), 64),  # one batch at a time
        (lambda: by_rules(2, 256, 3, separate=True), 160),
    ],
)
def test_the_slots_that_a_run_can_fill(made, slots):
    run = made()
    assert run.fillable_slots == slots
    run._rollout_server_managers = list  # replicas come and go; Q stays the same
    assert run.fillable_slots == slots


def test_missing_engine_causes_no_division_by_zero():
    assert fillable_slots(0, 64) == fillable_slots(16, 0) == 1
