"""Own files in verl's checkpoint folders are kept as long as the weights, by verl's retention."""

import shutil
from types import SimpleNamespace

import pytest
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from verl_rhyme.coordinator import ranker_service
from verl_rhyme.trainer import base, checkpoints
from verl_rhyme.trainer.base import RhymeTrainerMixin
from verl_rhyme.trainer.checkpoints import STATE_FILE


class Verl:
    """The saving part of verl's trainer: actor and critic use its manager, whose list ends with its process."""

    def begin(self):
        self.managers = [(object.__new__(BaseCheckpointManager), part, kept) for part, kept in self.parts.items()]
        for manager, _, _ in self.managers:
            manager.previous_saved_paths = []

    def _save_checkpoint(self):
        for manager, part, kept in self.managers:
            folder = self.folder / f"global_step_{self.global_steps}" / part
            manager.ensure_checkpoint_capacity(kept)
            folder.mkdir(parents=True)
            (folder / "model").touch()
            manager.register_checkpoint(str(folder), kept)
        (folder.parent / "data.pt").touch()
        (self.folder / "latest_checkpointed_iteration.txt").write_text(str(self.global_steps))


class Run(RhymeTrainerMixin):
    def __init__(self, folder, parts):
        self._rhyme, self.folder, self.parts = SimpleNamespace(), folder, parts
        self.config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir=str(folder)))
        self.observers = [SimpleNamespace(save=self.snapshot)]
        self.begin()

    def snapshot(self, checkpoint):
        """Write history, ranker and rollout state, as the trainer does before verl's parts."""
        for name in ("history", ranker_service.FOLDER):
            (self.folder / checkpoint / name).mkdir(parents=True)
            (self.folder / checkpoint / name / "data").touch()
        (self.folder / checkpoint / STATE_FILE).touch()

    def on_sample_end(self, *_):
        raise NotImplementedError  # abstract in verl

    def save(self, *steps):
        for self.global_steps in steps:
            self._save_checkpoint()

    def ours(self):
        """Return the steps that still have each of the own entries."""
        found = {name: [] for name in ("history", ranker_service.FOLDER, STATE_FILE)}
        for name, steps in found.items():
            steps += sorted(int(path.parent.name.rpartition("_")[2]) for path in self.folder.glob(f"*/{name}"))
        return found


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(base.PPOTrainer, "_save_checkpoint", Verl._save_checkpoint)
    monkeypatch.setattr(base.PPOTrainer, "begin", Verl.begin, raising=False)
    return lambda **parts: Run(tmp_path / "checkpoints", parts or {"actor": 2})


def all_of(*steps):
    return {"history": list(steps), ranker_service.FOLDER: list(steps), STATE_FILE: list(steps)}


def test_own_files_are_removed_with_the_actors_weights(run):
    made = run()
    made.save(4, 8, 12, 16)
    assert made.ours() == all_of(12, 16)
    assert (made.folder / "global_step_4" / "data.pt").exists(), "removed a file of verl"
    again = run()  # verl keeps the checkpoints of earlier processes
    again.save(20, 24, 28)
    assert again.ours() == all_of(12, 16, 24, 28)
    assert {path.parent for path in again.folder.glob("*/actor")} == {path.parent for path in again.folder.glob("*/h*")}


def test_with_all_checkpoints_kept_nothing_is_removed(run):
    made = run(actor=None, critic=1)
    made.save(1, 2, 3)
    assert made.ours() == all_of(1, 2, 3)


def test_checkpoint_with_a_critic_only_loses_own_files(run):
    made = run(actor=1, critic=3)
    made.save(1, 2)
    assert made.ours() == all_of(2)
    assert (made.folder / "global_step_1" / "critic" / "model").exists()


def test_folder_without_other_files_is_removed(run):
    """A run may be killed while it saves, before it writes the actor."""
    made = run()
    made.snapshot("global_step_1")
    made.save(2)
    assert [path.name for path in made.folder.glob("global_step_*")] == ["global_step_2"]


def test_checkpoint_of_verls_tracker_stays_until_later_weights(run, monkeypatch):
    """With ``async_save`` the tracker names an older checkpoint; weights on other nodes' disks are not visible."""
    made = run()
    made.save(1)
    shutil.rmtree(made.folder / "global_step_1" / "actor")
    monkeypatch.setattr(base.PPOTrainer, "_save_checkpoint", lambda self: None)
    made.save(2)
    assert made.ours() == all_of(1, 2)
    monkeypatch.setattr(base.PPOTrainer, "_save_checkpoint", lambda self: (self.folder / "global_step_3/actor").mkdir())
    made.save(3)
    assert made.ours() == all_of(1, 3)


def test_links_are_not_followed(run, tmp_path):
    made = run()
    made.save(1, 2)
    for name in ("precious", "elsewhere"):
        (tmp_path / name / "history").mkdir(parents=True)
    (made.folder / "global_step_5").symlink_to(tmp_path / "elsewhere")
    (made.folder / "global_step_6").mkdir()
    (made.folder / "global_step_6" / "history").symlink_to(tmp_path / "precious")
    (made.folder / "global_step_x").mkdir()
    (made.folder / "global_step_x" / "history").mkdir()
    made.save(7)
    assert (tmp_path / "elsewhere" / "history").exists()
    assert (tmp_path / "precious" / "history").exists()
    assert (made.folder / "global_step_x" / "history").exists()


def test_removal_errors_do_not_stop_training(run, monkeypatch):
    made, logged = run(), []
    made.save(1, 2)

    def refused(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("verl_rhyme.trainer.checkpoints.shutil.rmtree", refused)
    monkeypatch.setattr(checkpoints.logger, "warning", lambda text, *of, **_: logged.append(text % of))
    made.snapshot("global_step_9")
    checkpoints.remove_orphans(made.folder, 2)
    assert len(logged) == 1
    assert "global_step_9" in logged[0]
