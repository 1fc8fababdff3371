"""Q of the bubble ratio: one number for the whole run."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_rhyme.observability.metrics import fillable_slots
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.trainer.base import RhymeTrainerMixin
from verl_rhyme.trainer.pipeline import RhymePipelineTrainer


class Recorded(RhymeTrainerMixin):
    on_sample_end = None


class Pipeline(RhymePipelineTrainer):
    on_sample_end = None


def trainer(replicas, slots, inflight=1, rules=None):
    """A trainer of 16 prompts x 4 samples, with or without the pipeline."""
    made = object.__new__(Recorded if rules is None else Pipeline)
    made.rules = rules and Rules(16, 64, **rules)
    made.replay_buffer = SimpleNamespace(max_inflight_gen_batches=inflight)
    made.llm_server_manager = SimpleNamespace(get_replicas=lambda: [None] * replicas)
    rollout = {"n": 4, "max_num_seqs": slots}
    made.config = OmegaConf.create({"data": {"train_batch_size": 16}, "actor_rollout_ref": {"rollout": rollout}})
    return made


@pytest.mark.parametrize(
    ("replicas", "each", "settings", "slots"),
    [
        (2, 16, {}, 32),  # the engines' slots
        (2, 256, {}, 64),  # there are no more samples
        (2, 256, {"inflight": 2}, 128),
        (2, 256, {"rules": {"max_staleness": 1, "in_flight": 4, "refill": "when_empty"}}, 256),
        (2, 256, {"rules": {"max_staleness": 2, "take": "loaded"}}, 192),
        (1, 48, {"rules": {"max_staleness": 1}}, 48),
        (2, 256, {"rules": {"max_staleness": 0}}, 64),  # one batch at a time
    ],
)
def test_the_slots_that_a_run_can_fill(replicas, each, settings, slots):
    run = trainer(replicas, each, **settings)
    assert run.fillable_slots == slots
    run.llm_server_manager = SimpleNamespace(get_replicas=list)  # replicas come and go; Q stays the same
    assert run.fillable_slots == slots


def test_missing_engine_causes_no_division_by_zero():
    assert fillable_slots(0, 64) == fillable_slots(16, 0) == 1
