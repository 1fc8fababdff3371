"""A valid run and a machine for it."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.checks.preflight.world import HERE, MODEL, ROW
from verl_rhyme.checks.preflight import checks, machine_checks, user_code


@pytest.fixture(autouse=True)
def this_machine(monkeypatch):
    monkeypatch.setattr(checks, "detect_machine", lambda: HERE)
    monkeypatch.setattr(machine_checks, "free_disk", lambda folder: (folder, 1 << 40))
    monkeypatch.setenv("WANDB_MODE", "offline")  # one of verl's default loggers
    monkeypatch.setattr(user_code, "own_main", False)  # a start in this process may have found one


@pytest.fixture
def world(tmp_path):
    """Arguments of a run, in a folder with a dataset, a model and a reward function."""
    pq.write_table(pa.Table.from_pylist([ROW] * 64), tmp_path / "train.parquet")
    (tmp_path / "model").mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / file).write_text(json.dumps(MODEL))
    (tmp_path / "reward.py").write_text("def compute_score(**arguments): ...\n")
    return [
        "+rhyme=histospec",
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files=[{tmp_path}/train.parquet]",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
        f"trainer.default_local_dir={tmp_path}/checkpoints",
        "trainer.save_freq=5",
        "trainer.max_actor_ckpt_to_keep=2",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=64",
        "data.max_prompt_length=512",
        "data.max_response_length=1024",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.max_num_seqs=64",
    ]
