"""Own files in verl's checkpoint folders are kept as long as the weights, by verl's retention."""

import shutil
from types import SimpleNamespace

import pytest
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from verl_rhyme.trainer import base, checkpoints
from verl_rhyme.trainer.base import RhymeTrainerMixin
from verl_rhyme.trainer.checkpoints import STATE_FILE

OWN = ("history", STATE_FILE)


class Run(RhymeTrainerMixin):
    """A process of a run. verl's checkpoint managers keep ``kept`` checkpoints of this process."""

    on_sample_end = None

    def __init__(self, folder, kept):
        self._rhyme, self.folder = SimpleNamespace(), folder
        self.config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir=str(folder)))
        self.observers = [SimpleNamespace(save=self.save_own)]
        self.managers = {part: (object.__new__(BaseCheckpointManager), most) for part, most in kept.items()}
        for manager, _ in self.managers.values():
            manager.previous_saved_paths = []

    def save(self, *steps):
        for self.global_steps in steps:
            self._save_checkpoint()

    def save_own(self, checkpoint):
        for name in OWN[:1]:
            (self.folder / checkpoint / name).mkdir(parents=True)
            (self.folder / checkpoint / name / "data").touch()
        (self.folder / checkpoint / STATE_FILE).touch()

    def save_verls(self):
        folder = self.folder / f"global_step_{self.global_steps}"
        for part, (manager, kept) in self.managers.items():
            manager.ensure_checkpoint_capacity(kept)
            (folder / part).mkdir()
            (folder / part / "model").touch()
            manager.register_checkpoint(str(folder / part), kept)
        (folder / "data.pt").touch()
        (self.folder / "latest_checkpointed_iteration.txt").write_text(str(self.global_steps))

    def ours(self):
        """Return the steps that still have own files; each has all of them."""
        found = [{int(path.parent.name.rpartition("_")[2]) for path in self.folder.glob(f"*/{name}")} for name in OWN]
        assert found[0] == found[1]
        return sorted(found[0])


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(base.PPOTrainer, "_save_checkpoint", Run.save_verls)
    return lambda **kept: Run(tmp_path / "checkpoints", kept or {"actor": 2})


def test_own_files_are_removed_with_the_actors_weights(run):
    made = run()
    made.save(4, 8, 12, 16)
    assert made.ours() == [12, 16]
    assert (made.folder / "global_step_4" / "data.pt").exists(), "removed a file of verl"
    again = run()  # verl keeps the checkpoints of earlier processes
    again.save(20, 24, 28)
    assert again.ours() == [12, 16, 24, 28]
    assert {path.parent for path in again.folder.glob("*/actor")} == {path.parent for path in again.folder.glob("*/h*")}


@pytest.mark.parametrize(
    ("kept", "ours"), [({"actor": None, "critic": 1}, [1, 2, 3]), ({"actor": 1, "critic": 3}, [3])]
)
def test_the_actors_checkpoints_decide(run, kept, ours):
    made = run(**kept)
    made.save(1, 2, 3)
    assert made.ours() == ours
    assert (made.folder / "global_step_1" / "critic" / "model").exists() == (kept["critic"] == 3)


def test_folder_without_other_files_is_removed(run):
    """A run may be killed while it saves, before it writes the actor."""
    made = run()
    made.save_own("global_step_1")
    made.save(2)
    assert [path.name for path in made.folder.glob("global_step_*")] == ["global_step_2"]


def test_checkpoint_of_verls_tracker_stays_until_later_weights(run, monkeypatch):
    """With ``async_save`` the tracker names an older checkpoint; weights on other nodes' disks are not visible."""
    made = run()
    made.save(1)
    shutil.rmtree(made.folder / "global_step_1" / "actor")
    monkeypatch.setattr(base.PPOTrainer, "_save_checkpoint", lambda self: None)
    made.save(2)
    assert made.ours() == [1, 2]
    monkeypatch.setattr(base.PPOTrainer, "_save_checkpoint", lambda self: (self.folder / "global_step_3/actor").mkdir())
    made.save(3)
    assert made.ours() == [1, 3]


def test_links_are_not_followed(run, tmp_path):
    made = run()
    made.save(1, 2)
    for name in ("precious", "elsewhere"):
        (tmp_path / name / "history").mkdir(parents=True)
    (made.folder / "global_step_5").symlink_to(tmp_path / "elsewhere")
    (made.folder / "global_step_6").mkdir()
    (made.folder / "global_step_6" / "history").symlink_to(tmp_path / "precious")
    (made.folder / "global_step_x" / "history").mkdir(parents=True)
    made.save(7)
    assert (tmp_path / "elsewhere" / "history").exists()
    assert (tmp_path / "precious" / "history").exists()
    assert (made.folder / "global_step_x" / "history").exists()


def test_removal_errors_do_not_stop_training(run, monkeypatch, caplog):
    made = run()
    made.save(1, 2)

    def refused(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoints.shutil, "rmtree", refused)
    made.save_own("global_step_9")
    checkpoints.remove_orphans(made.folder, 2)
    assert [record.message.count("global_step_9") for record in caplog.records] == [1]
