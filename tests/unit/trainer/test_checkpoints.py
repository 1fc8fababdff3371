"""Own files of a checkpoint: in the actor's folder, which verl removes with old weights."""

from pathlib import Path
from types import SimpleNamespace

from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from verl_rhyme.trainer.base import RhymeTrainerMixin
from verl_rhyme.trainer.pipeline import _PromptsInFlight


class Run(RhymeTrainerMixin):
    """Its workers keep the weights of two checkpoints."""

    on_sample_end = None

    def __init__(self, folder, state):
        trainer = {"default_local_dir": str(folder), "resume_mode": "auto", "resume_from_path": None}
        self.config = SimpleNamespace(trainer=SimpleNamespace(**trainer))
        self._rhyme, self._history = SimpleNamespace(), SimpleNamespace(ready=lambda: None)
        self.observers = [_PromptsInFlight()]
        self.observers[0].on_train_begin(SimpleNamespace(state=lambda: state))
        self.workers = object.__new__(BaseCheckpointManager)
        self.workers.previous_saved_paths = []


def test_own_files_are_loaded_again_and_removed_with_the_weights(tmp_path, monkeypatch, caplog):
    def save(self):
        self.workers.ensure_checkpoint_capacity(2)
        self.workers.register_checkpoint(str(tmp_path / f"global_step_{self.global_steps}" / "actor"), 2)

    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", save)
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", lambda self: None)
    run = Run(tmp_path, {"stock": [1]})
    for run.global_steps in (1, 2, 3):
        run._save_checkpoint()
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.json"))
    assert files == [Path(f"global_step_{step}", "actor", "prompts_in_flight.json") for step in (2, 3)]
    run._load_checkpoint()
    assert run.observers[0].state == {"stock": [1]}
    other = Run(tmp_path / "other", {})
    other.global_steps = 1
    other._load_checkpoint()
    assert other.observers[0].state is None
    assert "prompts_in_flight.json does not exist" in caplog.text
