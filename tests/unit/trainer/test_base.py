"""What the trainers' base class adds to verl's: own files in checkpoints, slots, adapters, validation."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from verl_rhyme.observability.metrics import fillable_slots
from verl_rhyme.scheduling.retries import RolloutError
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.trainer.base import RhymeTrainerMixin, _merge_adapters
from verl_rhyme.trainer.pipeline import RhymePipelineTrainer, _PromptsInFlight


class Recorded(RhymeTrainerMixin):
    on_sample_end = None


class Pipeline(RhymePipelineTrainer):
    on_sample_end = None


def run(folder, state):
    """A run whose workers keep the weights of two checkpoints."""
    made = object.__new__(Recorded)
    trainer = {"default_local_dir": str(folder), "resume_mode": "auto", "resume_from_path": None}
    made.config = SimpleNamespace(trainer=SimpleNamespace(**trainer))
    made._rhyme, made._history = SimpleNamespace(), SimpleNamespace(ready=lambda: None)
    made.observers = [_PromptsInFlight()]
    made.observers[0].on_train_begin(SimpleNamespace(state=lambda: state))
    made.workers = object.__new__(BaseCheckpointManager)
    made.workers.previous_saved_paths = []
    return made


def test_own_files_are_loaded_again_and_removed_with_the_weights(tmp_path, monkeypatch, caplog):
    def save(self):
        self.workers.ensure_checkpoint_capacity(2)
        self.workers.register_checkpoint(str(tmp_path / f"global_step_{self.global_steps}" / "actor"), 2)

    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", save)
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", lambda self: None)
    trainer = run(tmp_path, {"stock": [1]})
    for trainer.global_steps in (1, 2, 3):
        trainer._save_checkpoint()
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.json"))
    assert files == [Path(f"global_step_{step}", "actor", "prompts_in_flight.json") for step in (2, 3)]
    trainer._load_checkpoint()
    assert trainer.observers[0].state == {"stock": [1]}
    other = run(tmp_path / "other", {})
    other.global_steps = 1
    other._load_checkpoint()
    assert other.observers[0].state is None
    assert "prompts_in_flight.json does not exist" in caplog.text


@pytest.mark.parametrize(
    ("replicas", "each", "inflight", "rules", "slots"),
    [
        (2, 16, 1, None, 32),  # the engines' slots
        (2, 256, 2, None, 128),  # there are no more samples
        (2, 256, 1, {"max_staleness": 2, "take": "loaded"}, 192),
    ],
)
def test_the_slots_that_a_run_can_fill(replicas, each, inflight, rules, slots):
    """Of a trainer of 16 prompts x 4 samples, with or without the pipeline: one number for the training run."""
    made = object.__new__(Recorded if rules is None else Pipeline)
    made.rules = rules and Rules(16, 64, **rules)
    made.replay_buffer = SimpleNamespace(max_inflight_gen_batches=inflight)
    made.llm_server_manager = SimpleNamespace(get_replicas=lambda: [None] * replicas)
    rollout = {"n": 4, "max_num_seqs": each}
    made.config = OmegaConf.create({"data": {"train_batch_size": 16}, "actor_rollout_ref": {"rollout": rollout}})
    assert made.fillable_slots == slots
    made.llm_server_manager = SimpleNamespace(get_replicas=list)  # replicas come and go; Q stays the same
    assert made.fillable_slots == slots
    assert fillable_slots(0, 64) == fillable_slots(16, 0) == 1, "a division by zero"


@pytest.mark.parametrize(
    ("model", "merged"),
    [
        ({"lora_rank": 8}, True),
        ({"lora_rank": 0, "lora": {"rank": 8, "merge": False}}, True),
        ({"lora_rank": 0, "lora": {"rank": 0, "merge": False}}, False),
        ({}, None),
    ],
)
def test_adapters_reach_separate_engines_merged(model, merged):
    config = OmegaConf.create(model)
    OmegaConf.set_struct(config, True)
    _merge_adapters(config)
    assert OmegaConf.select(config, "lora.merge") == merged


def test_a_validation_without_a_sample_names_the_fault():
    """verl would ask its queue for no keys."""
    nothing = KVBatchMeta(partition_id="val", keys=[], tags=[])
    trainer = SimpleNamespace(replay_buffer=SimpleNamespace(sample=lambda **_: (nothing, {})))
    RhymeTrainerMixin._watch_validation(trainer)
    with pytest.raises(RolloutError, match="no validation sample succeeded"):
        trainer.replay_buffer.sample(partition_id="val")
