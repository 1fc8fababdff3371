"""A run resumes from its own checkpoint folder, and is refused in the folder of another run."""

import json

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from tests.unit.checks.preflight.world import R
from tests.unit.configs import composed
from verl_rhyme.checks.preflight import run_folder
from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.cli import app
from verl_rhyme.commands.claim import FINISHED
from verl_rhyme.config import ConfigError


@pytest.fixture
def run(world):
    """Arguments of a run without a preset: 64 prompts in batches of 32 for 3 epochs, 6 steps."""
    return [*world[1:], "data.train_batch_size=32", "data.seed=1", "trainer.total_epochs=3"]


def checkpoint(folder, step):
    (folder / f"global_step_{step}" / "actor").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


RUNS = {
    "off": [],
    "histospec": ["+rhyme=histospec"],
    "sorted": ["+rhyme=sorted"],
    "partial": ["+rhyme=sorted", f"{R}.custom.rhyme.max_staleness=1"],
    "separate": ["+rhyme=sorted", "trainer.v1.trainer_mode=separate_async"],
    "mode": ["trainer.v1.trainer_mode=colocate_async"],
    "engine": ["model_engine=megatron"],
    "GPUs": ["trainer.n_gpus_per_node=4"],
    "seed": ["data.seed=2"],
}


def run_in(folder, name):
    return composed(f"trainer.default_local_dir={folder}", f"{R}.name=vllm", "data.seed=1", *RUNS[name])


@pytest.mark.parametrize("other", RUNS)
def test_a_folder_belongs_to_one_run(tmp_path, other):
    folder = tmp_path / "checkpoints"
    config, second = run_in(folder, "sorted"), run_in(folder, other)
    run_folder.claim(config)
    checkpoint(folder, 2)
    (folder / "run.lock").unlink()  # its content has a time
    before = contents(folder)
    run_folder.claim(config)
    assert [check.status for check in run_folder.check(config)] == ["ok"]
    if other == "sorted":
        run_folder.claim(second)
    else:
        with pytest.raises(ConfigError, match=f"^{folder} belongs to another run: .* there, .* in this run -> set an"):
            run_folder.claim(second)
        [check] = run_folder.check(second)
        assert check.status == "fail"
        assert "RUN_DIR" in check.remedy
    (folder / "run.lock").unlink()
    assert contents(folder) == before


def test_another_model_data_or_note_is_refused(run, tmp_path):
    run_folder.claim(compose(run), {"puzzles": "64"})
    for wrong, part in (
        (["actor_rollout_ref.model.path=/other/llama"], f"model {tmp_path.name}/model there, other/llama in this run"),
        ([f"data.train_files=[{tmp_path}/other.parquet]"], "data train.parquet there, other.parquet in this run"),
    ):
        assert part in run_folder.refusal(compose([*run, *wrong]), {"puzzles": "64"})
    assert "puzzles 64 there, 16 in this run" in run_folder.refusal(compose(run), {"puzzles": "16"})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("histospec", "trainer.total_epochs", 9),
        ("histospec", "actor_rollout_ref.actor.optim.lr", 1e-4),
        ("histospec", f"{R}.custom.rhyme.drafting.max_tokens", 3),
        ("histospec", f"{R}.custom.rhyme.drafting.enable", False),
        ("sorted", f"{R}.custom.rhyme.drafting.enable", False),
        ("sorted", "trainer.v1.trainer_mode", "colocate_async"),
    ],
)
def test_settings_that_may_change_between_starts(tmp_path, name, key, value):
    config, changed = run_in(tmp_path, name), run_in(tmp_path, name)
    OmegaConf.update(changed, key, value)
    for first, second in ((config, changed), (changed, config)):
        run_folder.claim(first)
        assert run_folder.refusal(second) is None


@pytest.mark.parametrize("damage", ["", "[]"])
def test_a_damaged_marker_is_not_overwritten(tmp_path, damage):
    marker = tmp_path / "run.json"
    config = run_in(tmp_path, "off")
    marker.write_text(damage)
    with pytest.raises(ConfigError, match=r"run\.json cannot be read"):
        run_folder.claim(config)
    assert [check.status for check in run_folder.check(config)] == ["fail"]
    assert marker.read_text() == damage


def test_steps(run, tmp_path):
    folder = tmp_path / "checkpoints"
    assert run_folder.latest_step(folder) is None
    checkpoint(folder, 4)
    assert run_folder.latest_step(folder) == 4
    (folder / "latest_checkpointed_iteration.txt").write_text("6")
    assert run_folder.latest_step(folder) is None, "verl starts from the beginning if the folder is missing"
    for changes, steps in (
        (["data.train_max_samples=40", "trainer.total_epochs=5"], 5),
        (["trainer.total_training_steps=7"], 7),
        (["data.train_files=/nowhere.parquet"], None),
    ):
        assert run_folder.total_steps(compose([*run, *changes])) == steps


def test_what_a_resume_does_not_restore_is_a_warning(tmp_path):
    def warned(name, **changes):
        config = run_in(tmp_path, name)
        config.trainer.save_freq = 4
        for key, value in changes.items():
            OmegaConf.update(config, key.replace("__", "."), value)
        return " ".join(check.detail for check in run_folder.resume(config))

    actor = "actor_rollout_ref__actor"
    parts = {f"{actor}__checkpoint__load_contents": ["model"]}
    assert warned("histospec") == warned("engine") == ""
    assert "what is left out" in warned("histospec", **parts)
    assert warned("histospec", trainer__save_freq=-1, **parts) == ""
    assert "leaves no checkpoint" in warned("histospec", trainer__max_actor_ckpt_to_keep=1)
    warm_up = {f"{actor}__optim__lr_warmup_steps": 10}
    assert "schedule anew" in warned("engine", **warm_up)
    assert warned("engine", **warm_up, **{f"{actor}__optim__use_checkpoint_opt_param_scheduler": True}) == ""


def command(name, *arguments):
    return CliRunner().invoke(app, [name, "--note", "puzzles=10", "--", *arguments])


def test_the_command_names_a_run(run):
    k = f"{R}.custom.rhyme.max_staleness"
    for changes, name in (
        ([], "off-model-fsdp-sync-10_puzzles"),
        (["+rhyme=histospec", "model_engine=megatron"], "histospec-model-megatron-sync-10_puzzles"),
        (
            ["+rhyme=full", f"{k}=2", "trainer.v1.trainer_mode=colocate_async"],
            "full-k2-model-fsdp-colocated-10_puzzles",
        ),
    ):
        found = command("run-name", *run, *changes)
        assert (found.exit_code, found.output) == (0, f"{name}\n")


def test_the_command_starts_resumes_and_finishes_a_run(run, tmp_path):
    folder = tmp_path / "checkpoints"
    found = command("claim", *run)
    assert (found.exit_code, found.output) == (0, "")
    assert json.loads((folder / "run.json").read_text())["puzzles"] == "10"
    checkpoint(folder, 4)
    found = command("claim", *run)
    assert (found.exit_code, found.output) == (0, "resuming after step 4 of 6\n")
    checkpoint(folder, 6)
    found = command("claim", *run)
    assert found.exit_code == FINISHED
    assert found.output.startswith("already finished: 6 of 6 steps, ")
    assert "raise EPOCHS" in found.output
    assert command("claim", *run, "trainer.total_epochs=4").exit_code == 0


def test_the_command_refuses_in_one_line(run, tmp_path):
    command("claim", *run)
    for name, wrong, problem in (
        ("claim", "data.seed=2", "seed 1 there, 2 in this run"),
        ("claim", "trainer.totl_epochs=2", "did you mean trainer.total_epochs?"),
        ("claim", f"trainer.default_local_dir={tmp_path}/reward.py/run", "/reward.py/run (Not a directory)"),
        ("run-name", f"+{R}.custom.rhyme.drafting.max_token=2", "drafting.max_tokens?"),
    ):
        found = command(name, *run, wrong)
        assert (found.exit_code, found.stdout, len(found.stderr.splitlines())) == (1, "", 1)
        assert problem in found.stderr


def test_the_command_checks_this_machine_but_not_data_that_is_made_later(run, tmp_path, monkeypatch):
    def claim(*overrides):
        found = CliRunner().invoke(app, ["claim", "--check", "--", *run, *overrides])
        return found.exit_code, [line.removeprefix("verl-rhyme: ")[:30] for line in found.stderr.splitlines()]

    (tmp_path / "train.parquet").unlink()
    assert claim("data.train_batch_size=6") == (1, ["batches: data.train_batch_size"])
    too_many = "trainer.n_gpus_per_node=16"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert claim(too_many) == (1, ["GPUs: 8 visible on this machin"])
    assert not (tmp_path / "checkpoints").exists()
    for variable, value in (("SKIP_PREFLIGHT", "1"), ("RAY_ADDRESS", "head:6379")):  # of a node that may have them
        with monkeypatch.context() as patched:
            patched.setenv(variable, value)
            assert claim(too_many) == (0, [])
