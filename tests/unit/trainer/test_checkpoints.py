"""What is ours in verl's checkpoint folders stays as long as the weights there, by verl's own retention."""

import shutil
from types import SimpleNamespace

import pytest
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from verl_rhyme.coordinator import ranker_service
from verl_rhyme.trainer import base
from verl_rhyme.trainer.base import RhymeTrainerMixin
from verl_rhyme.trainer.checkpoints import STATE_FILE


class Verl:
    """verl's trainer as far as it saves: actor and critic by verl's manager, which forgets them with its process."""

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
        """As the history's, the ranker's and the rollout's are saved, before verl's parts."""
        for name in ("history", ranker_service.FOLDER):
            (self.folder / checkpoint / name).mkdir(parents=True)
            (self.folder / checkpoint / name / "data").touch()
        (self.folder / checkpoint / STATE_FILE).touch()

    def on_sample_end(self, *_):
        raise NotImplementedError  # verl's trainers have one each

    def save(self, *steps):
        for self.global_steps in steps:
            self._save_checkpoint()

    def ours(self):
        """Steps by what is kept of ours."""
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


def test_ours_goes_with_the_actors_weights(run):
    made = run()
    made.save(4, 8, 12, 16)
    assert made.ours() == all_of(12, 16)
    assert (made.folder / "global_step_4" / "data.pt").exists(), "verl's own stays as verl has it"
    again = run()  # verl keeps what an earlier process has saved
    again.save(20, 24, 28)
    assert again.ours() == all_of(12, 16, 24, 28)
    assert {path.parent for path in again.folder.glob("*/actor")} == {path.parent for path in again.folder.glob("*/h*")}


def test_with_all_checkpoints_kept_nothing_goes(run):
    made = run(actor=None, critic=1)
    made.save(1, 2, 3)
    assert made.ours() == all_of(1, 2, 3)


def test_without_the_actor_a_critic_resumes_nothing(run):
    made = run(actor=1, critic=3)
    made.save(1, 2)
    assert made.ours() == all_of(2)
    assert (made.folder / "global_step_1" / "critic" / "model").exists()


def test_a_folder_in_which_nothing_else_is_goes_whole(run):
    """Of a run that was killed while it saved, before the actor was."""
    made = run()
    made.snapshot("global_step_1")
    made.save(2)
    assert [path.name for path in made.folder.glob("global_step_*")] == ["global_step_2"]


def test_where_weights_come_later_the_one_that_verl_names_stays(run, monkeypatch):
    """With ``async_save`` the tracker names an older one; on other nodes' disks no weights are seen here."""
    made = run()
    made.save(1)
    shutil.rmtree(made.folder / "global_step_1" / "actor")
    monkeypatch.setattr(base.PPOTrainer, "_save_checkpoint", lambda self: None)
    made.save(2)
    assert made.ours() == all_of(1, 2)
    monkeypatch.setattr(base.PPOTrainer, "_save_checkpoint", lambda self: (self.folder / "global_step_3/actor").mkdir())
    made.save(3)
    assert made.ours() == all_of(1, 3)


def test_nothing_goes_through_a_link(run, tmp_path):
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


def test_what_cannot_be_removed_stops_no_training(run, monkeypatch):
    made, told = run(), []
    made.save(1, 2)

    def refused(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("verl_rhyme.trainer.checkpoints.shutil.rmtree", refused)
    monkeypatch.setattr(base.logger, "warning", lambda text, *of, **_: told.append(text % of))
    made.snapshot("global_step_9")
    made._remove_orphans()
    assert len(told) == 1
    assert "global_step_9" in told[0]
