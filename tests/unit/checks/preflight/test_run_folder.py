"""A run resumes from its own checkpoint folder, and is refused in the folder of another run."""

import copy
import functools
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_rhyme.checks.preflight import run_folder
from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.cli import app
from verl_rhyme.commands.claim import FINISHED
from verl_rhyme.config import ConfigError

R = "actor_rollout_ref.rollout"
SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"intermediate_size": 96, "vocab_size": 128}


@pytest.fixture
def world(tmp_path):
    """Arguments of a run of 10 prompts in batches of 4 for 3 epochs: 6 steps."""
    for name in ("qwen2", "llama"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text(json.dumps({"model_type": name, **SHAPE}))
    pq.write_table(pa.table({"prompt": ["a"] * 10}), tmp_path / "train.parquet")
    return [
        f"actor_rollout_ref.model.path={tmp_path}/models/qwen2",
        f"data.train_files={tmp_path}/train.parquet",
        f"trainer.default_local_dir={tmp_path}/run/checkpoints",
        f"{R}.name=vllm",
        "data.train_batch_size=4",
        "data.seed=1",
        "trainer.total_epochs=3",
    ]


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


@functools.cache
def composed(name):
    return compose(["trainer.default_local_dir=x", f"{R}.name=vllm", "data.seed=1", *RUNS[name]])


def run_in(folder, name):
    config = copy.deepcopy(composed(name))
    config.trainer.default_local_dir = str(folder)
    return config


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


def test_another_model_data_or_note_is_refused(world, tmp_path):
    run_folder.claim(compose(world), {"puzzles": "64"})
    for wrong, part in (
        (
            [f"actor_rollout_ref.model.path={tmp_path}/models/llama"],
            "model models/qwen2 there, models/llama in this run",
        ),
        ([f"data.train_files=[{tmp_path}/other.parquet]"], "data train.parquet there, other.parquet in this run"),
    ):
        assert part in run_folder.refusal(compose([*world, *wrong]), {"puzzles": "64"})
    assert "puzzles 64 there, 16 in this run" in run_folder.refusal(compose(world), {"puzzles": "16"})


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


@pytest.mark.parametrize("damage", ["", "[]", "\xff"])
def test_a_damaged_marker_is_not_overwritten(tmp_path, damage):
    marker = tmp_path / "run.json"
    config = run_in(tmp_path, "off")
    marker.write_text(damage)
    with pytest.raises(ConfigError, match=r"run\.json cannot be read"):
        run_folder.claim(config)
    assert [check.status for check in run_folder.check(config)] == ["fail"]
    assert marker.read_text() == damage


def test_steps(world, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    assert run_folder.latest_step(folder) is None
    checkpoint(folder, 4)
    assert run_folder.latest_step(folder) == 4
    (folder / "latest_checkpointed_iteration.txt").write_text("6")
    assert run_folder.latest_step(folder) is None, "verl starts from the beginning if the folder is missing"
    assert run_folder.total_steps(compose(world)) == 6
    assert run_folder.total_steps(compose([*world, "data.train_max_samples=8", "trainer.total_epochs=5"])) == 10
    assert run_folder.total_steps(compose([*world, "trainer.total_training_steps=7"])) == 7
    assert run_folder.total_steps(compose([*world, "data.train_files=/nowhere.parquet"])) is None


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


def test_the_command_names_a_run(world):
    for changes, notes, name in (
        ([], [], "off-qwen2-fsdp-sync"),
        (["+rhyme=histospec", "model_engine=megatron"], [], "histospec-qwen2-megatron-sync"),
        (
            ["+rhyme=full", f"{R}.custom.rhyme.max_staleness=2", "trainer.v1.trainer_mode=colocate_async"],
            ["--note", "replicas=2"],
            "full-k2-qwen2-fsdp-colocated-2_replicas",
        ),
    ):
        result = CliRunner().invoke(app, ["run-name", *notes, "--", *world, *changes])
        assert (result.exit_code, result.output) == (0, f"{name}\n")
    result = CliRunner().invoke(app, ["run-name", "--", *world, "+rhyme=full", f"{R}.custom.rhyme.max_staleness=-1"])
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
    assert "max_staleness must be null, or at least 0" in result.stderr


def claim(*arguments):
    return CliRunner().invoke(app, ["claim", "--note", "puzzles=10", "--", *arguments])


def test_the_command_starts_resumes_and_finishes_a_run(world, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    assert (claim(*world).exit_code, claim(*world).output) == (0, "")
    assert json.loads((folder / "run.json").read_text())["puzzles"] == "10"
    checkpoint(folder, 4)
    found = claim(*world)
    assert (found.exit_code, found.output) == (0, "resuming after step 4 of 6\n")
    checkpoint(folder, 6)
    found = claim(*world)
    assert found.exit_code == FINISHED
    assert found.output.startswith("already finished: 6 of 6 steps, ")
    assert "raise EPOCHS" in found.output
    assert claim(*world, "trainer.total_epochs=4").exit_code == 0


def test_the_command_refuses_in_one_line(world, tmp_path):
    claim(*world)
    file = tmp_path / "file"
    file.write_text("")
    for wrong, problem in (
        (["data.seed=2"], "seed 1 there, 2 in this run"),
        (["trainer.totl_epochs=2"], "did you mean trainer.total_epochs?"),
        ([f"+{R}.custom.rhyme.drafting.max_token=2"], "drafting.max_tokens?"),
        ([f"trainer.default_local_dir={file}/run"], f"cannot write to {file}/run (Not a directory)"),
    ):
        found = claim(*world, *wrong)
        assert found.exit_code == 1
        assert problem in found.stderr
        assert len(found.stderr.splitlines()) == 1
    found = CliRunner().invoke(app, ["claim", "--check", "--", *world, "data.train_batch_size=6"])
    assert (found.exit_code, "batches: data.train_batch_size=6 is not" in found.stderr) == (1, True)
