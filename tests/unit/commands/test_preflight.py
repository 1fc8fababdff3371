"""``verl-rhyme preflight``: YAML or JSON of a dry run, and its exit status."""

import json

from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_rhyme.checks import doctor
from verl_rhyme.checks.preflight import checks
from verl_rhyme.checks.preflight.machine import Machine
from verl_rhyme.cli import app

R, A = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
MICRO = [f"{A}.ppo_micro_batch_size_per_gpu=4", f"{R}.log_prob_micro_batch_size_per_gpu=4"]


def dry_run(*overrides, options=()):
    run = ["+rhyme=histospec", f"{R}.name=vllm", *overrides]
    return CliRunner().invoke(app, ["preflight", "--dry-run", *options, "--", *run])


def test_the_dry_run_prints_yaml_on_a_machine_that_lacks_everything(monkeypatch):
    bare = Machine(gpus=0, gpu_bytes=1 << 30, gpu_source="assumed", host_bytes=1 << 30, host_free=1 << 20)
    monkeypatch.setattr(checks, "detect_machine", lambda: bare)
    monkeypatch.setattr(doctor, "installed_version", lambda package: None)
    found = dry_run(*MICRO, "algorithm.adv_estimator=grpo")
    assert found.exit_code == 0, found.output
    printed = OmegaConf.create(found.stdout)
    assert printed.actor_rollout_ref.rollout.custom.rhyme.drafting.enable is True
    for missing in ("data.train_files: no file", "GPUs: 0 visible on this machine", "verl: not installed"):
        assert f"# warn: {missing}" in found.stdout
    unset = dry_run(f"{R}.name=???")
    error = f"verl-rhyme preflight: {R}.name is not set: add {R}.name=vllm\n"
    assert (unset.exit_code, unset.stderr) == (1, error)
    broken = dry_run("nonsense=1")
    assert broken.exit_code == 1
    assert "Key 'nonsense' is not in struct" in broken.stderr


def test_the_dry_run_fails_where_the_run_would():
    found = dry_run(*MICRO, "algorithm.adv_estimator=grpo", f"{A}.ppo_mini_batch_size=100")
    assert found.exit_code == 1
    assert found.stderr.startswith("verl-rhyme preflight: batches: ")
    assert OmegaConf.create(found.stdout).actor_rollout_ref.rollout.name == "vllm"


def test_json():
    report = json.loads(dry_run("actor_rollout_ref.model.path=Qwen/Qwen3-8B", *MICRO, options=["--json"]).stdout)
    assert report["config"]["data"]["train_batch_size"] == 1024
    assert report["estimate"]["phases"]["update"]["total"] > 1 << 30
