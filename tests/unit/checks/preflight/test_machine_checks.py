"""Checks of a config against the machine: data, model, GPUs, memory, disk."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.checks.preflight.world import MEGATRON, MODEL, RELAY, ROW, SEPARATE, A, R, complaints, only, preflight
from verl_rhyme.checks.preflight import checks, machine, machine_checks
from verl_rhyme.checks.preflight.components import REWARD_ARGUMENTS
from verl_rhyme.checks.preflight.estimate import gib
from verl_rhyme.checks.preflight.machine import Machine
from verl_rhyme.lengths import ranker
from verl_rhyme.planning import architecture

RANKER = f"{R}.custom.rhyme.lengths.ranker"
NO_RECOMPUTE = "actor_rollout_ref.model.enable_gradient_checkpointing=false"


@pytest.mark.parametrize(
    ("overrides", "name", "status", "words"),
    [
        (
            ["data.train_files=/nowhere/dapo-math-17k.parquet"],
            "data.train_files",
            "fail",
            "prepare dapo --out /nowhere",
        ),
        (["data.val_files=/nowhere/x.parquet"], "data.val_files", "fail", "create or download the dataset, or correct"),
        (["data.val_files=/x/tiny_cpu/data/test.parquet"], "data.val_files", "fail", "with recipes/run_tiny_cpu.sh"),
        (["data.val_files=[/nowhere/eval/minerva.parquet]"], "data.val_files", "fail", "prepare eval --out /nowhere"),
        (["data.prompt_key=question"], "data.train_files", "fail", "no column 'question'"),
        (["data.train_files=hdfs://far/away.parquet"], "data.train_files", "warn", "remote"),
        (["actor_rollout_ref.model.path=/tmp/"], "model", "fail", "set actor_rollout_ref.model.path=/tmp"),
        (["trainer.default_local_dir=/proc/x"], "checkpoints", "fail", "cannot be written"),
        ([f"{R}.n=1", f"{A}.ppo_mini_batch_size=64"], "batches", "warn", "compares the samples of a prompt"),
        (["actor_rollout_ref.model.path=/nowhere"], "model", "fail", "no such folder"),
        (["reward.custom_reward_function.path=/nowhere.py"], "reward function", "fail", "no file"),
        (["trainer.n_gpus_per_node=16"], "GPUs", "fail", "8 on this machine"),
        ([f"{A}.ppo_micro_batch_size_per_gpu=256", NO_RECOMPUTE], "GPU memory", "warn", "fewer tokens"),
        ([f"{R}.gpu_memory_utilization=0.999"], "GPU memory", "warn", "gpu_memory_utilization"),
        ([f"{R}.gpu_memory_utilization=0.001"], "KV cache", "fail", "weights and activations"),
        ([f"{R}.max_model_len=8000000"], "KV cache", "fail", "do not hold one request of 8000000"),
        (["trainer.max_actor_ckpt_to_keep=null"], "checkpoints", "warn", "keeps all checkpoints"),
    ],
)
def test_problems_have_remedies(world, overrides, name, status, words):
    found = complaints(preflight(world, *overrides))
    assert words in found.get((name, status), ""), found


def test_the_relay_needs_room_for_two_or_three_versions(world, tmp_path, monkeypatch):
    folder = f"+{R}.checkpoint_engine.engine_kwargs.relay.folder"
    for overrides, place in ((RELAY, "/dev/shm"), ([*RELAY, f"{folder}={tmp_path}/made/later"], str(tmp_path))):
        monkeypatch.setattr(machine_checks, "free_disk", machine.free_disk)
        found = preflight(world, *overrides)
        [detail] = [check.detail for check in found.checks if check.name == "weights" and "free" in check.detail]
        assert detail.startswith(f"{place}: ")
        one = found.plan.sent_bytes * found.estimate.parameters
        assert f"{gib(2 * one)} for two versions of the weights, {gib(3 * one)} for three on the actor's node" in detail
        for free, status in ((2 * one, "fail"), (2 * one + 1, "warn"), (3 * one, "warn"), (3 * one + 1, None)):
            monkeypatch.setattr(machine_checks, "free_disk", lambda path, free=free: (tmp_path, free))
            found = complaints(preflight(world, *overrides))
            assert [each for each in ("fail", "warn") if ("weights", each) in found] == ([status] if status else [])
            assert status is None or "--shm-size" in found["weights", status]
    monkeypatch.setattr(machine_checks, "free_disk", machine.free_disk)
    nowhere = [*RELAY, f"{folder}=/proc/x", "actor_rollout_ref.model.path=/nowhere"]
    assert "/proc: 0.0 MiB free" in complaints(preflight(world, *nowhere))["weights", "fail"]


@pytest.mark.parametrize(
    ("overrides", "bytes_each"),
    [
        ([f"{R}.dtype=bfloat16"], 2),  # of FSDP's float32
        ([f"{R}.dtype=float32"], 4),
        ([f"{R}.dtype=bfloat16", f"{R}.quantization=fp8"], 4),
        ([f"{R}.dtype=float32", "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16"], 2),
    ],
)
def test_the_relay_holds_weights_in_the_type_of_the_engines(world, overrides, bytes_each):
    assert preflight(world, *RELAY, *overrides).plan.sent_bytes == bytes_each


def test_requirements_of_a_ranker(world, tmp_path):
    def finding(folder):
        overrides = ("+rhyme=sorted", f"{R}.calculate_log_probs=true", f"{RANKER}={folder}")
        return only(preflight(world[1:], *overrides), "ranker")

    assert finding(tmp_path / "none").status == "fail"
    assert "verl-rhyme ranker train" in finding(tmp_path / "none").remedy
    ranker.tiny(64).save(tmp_path)
    assert finding(tmp_path).status == "ok"


def test_a_hub_id_warns_and_fails_offline(world, monkeypatch):
    monkeypatch.setattr(architecture, "find", lambda path: None)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert "downloads" in complaints(preflight(world, "actor_rollout_ref.model.path=own/er"))["model", "warn"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "hf download own/er" in complaints(preflight(world, "actor_rollout_ref.model.path=own/er"))["model", "fail"]


def test_an_unknown_architecture_is_reported_and_not_estimated(world, tmp_path):
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    found = preflight(world)
    assert found.estimate is None
    assert "no estimate for this family (gpt2; only for llama, " in complaints(found)["model", "warn"]
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "mamba_d_state": 16}')
    found = preflight(world)
    assert found.estimate is None
    assert "no estimate for recurrent layers (mamba_d_state)" in complaints(found)["model", "warn"]
    assert "drafting.enable=false" in complaints(found)["rhyme", "fail"]
    (tmp_path / "model" / "config.json").write_text("{")
    assert ("model", "fail") in complaints(preflight(world))


def test_a_broken_or_empty_dataset(world, tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"no parquet")
    assert "not a readable parquet" in complaints(preflight(world))["data.train_files", "fail"]
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "train.parquet")
    assert "0 prompts" in complaints(preflight(world))["data.train_files", "fail"]


def test_only_formats_that_verl_reads_pass(world, tmp_path):
    (tmp_path / "train.sh").write_text("echo\n")
    shell = f"data.train_files={tmp_path}/train.sh"
    assert "verl reads .parquet, .json and .jsonl" in complaints(preflight(world, shell))["data.train_files", "fail"]
    assert not complaints(preflight(world, shell, "data.custom_cls.path=pkg://tests.mine"))
    lines = tmp_path / "train.jsonl"
    lines.write_text(json.dumps(ROW) * 1)
    read = f"data.train_files={lines}"
    assert "larger than the 1 prompts" in complaints(preflight(world, read))["data.train_files", "fail"]
    for text in ("\n".join([json.dumps(ROW)] * 64), json.dumps([ROW] * 64)):
        lines.write_text(text)
        assert not complaints(preflight(world, read))
    mixed = [{**ROW, "reward_model": {"ground_truth": answer}, "extra_info": answer} for answer in ("b", 2, [3])]
    lines.write_text("\n".join(map(json.dumps, [*mixed, *[ROW] * 61])))
    assert not complaints(preflight(world, read)), "types that differ by row are not refused"
    lines.write_text("\n".join(map(json.dumps, [{**ROW, "prompt": "a"}] * 64)))
    assert "has plain text" in complaints(preflight(world, read))["data.train_files", "fail"]
    lines.write_text("a line")
    assert "not a readable JSON file" in complaints(preflight(world, read))["data.train_files", "fail"]
    folder = f"data.train_files={tmp_path}"
    assert (
        f"[{tmp_path}/train.jsonl,{lines.parent}/train.p"
        in complaints(preflight(world, folder))["data.train_files", "fail"]
    )


@pytest.mark.parametrize(
    ("row", "overrides", "words"),
    [
        ({"prompt": "a"}, [], "column 'prompt' has plain text, not a list of messages"),
        ({"prompt": ["a"]}, [], "column 'prompt' has list<text>, not a list of messages"),
        ({"prompt": None}, ["data.prompt_key=promt"], "did you mean prompt?"),
        ({"reward_model": None}, [], ""),
        ({"reward_model": "b"}, [], "column 'reward_model' has plain text, not {"),
        ({"reward_model": "b"}, ["reward.reward_manager.source=importlib"], ""),
        ({"reward_model": "b"}, [f"{R}.agent.agent_loop_config_path=mine.yaml"], ""),
        (
            {},
            ["data.train_batch_size=128"],
            "data.train_batch_size=128 is larger than the 64 prompts of data.train_files",
        ),
        (
            {},
            ["data.train_max_samples=8", "data.filter_overlong_prompts=true"],
            "the 8 prompts of data.train_files (data.train_max_samples=8 of 64 rows), and data.filter_overlong_prompts",
        ),
        ({}, ["data.train_files=null"], "names no file"),
    ],
)
def test_columns_have_the_types_that_verl_reads(world, tmp_path, row, overrides, words):
    pq.write_table(pa.Table.from_pylist([{**ROW, **row}] * 64), tmp_path / "train.parquet")
    found = complaints(preflight(world, *overrides)).get(("data.train_files", "fail"), "")
    assert words in found
    assert bool(words) == bool(found)


@pytest.mark.parametrize(
    ("override", "name", "words"),
    [
        ("data.train_files=FOLDER/*.parquet", "data.train_files", "a pattern, not checked"),
        ("data.val_files=['FOLDER/train-?.parquet']", "data.val_files", "a pattern, not checked"),
        ("data.train_files=s3://bucket/train.parquet", "data.train_files", "remote, not checked"),
        ("actor_rollout_ref.model.path=hdfs://models/qwen2", "model", "remote, not checked"),
    ],
)
def test_what_cannot_be_looked_at_from_here_only_warns(world, tmp_path, override, name, words):
    found = complaints(preflight(world, override.replace("FOLDER", str(tmp_path))))
    assert words in found.pop((name, "warn"))
    assert not found


def test_a_column_that_verls_reward_managers_read_is_missing(world, tmp_path):
    row = {"prompt": ROW["prompt"], "reward_model": ROW["reward_model"], "source": "x"}
    pq.write_table(pa.Table.from_pylist([row] * 64), tmp_path / "train.parquet")
    found = complaints(preflight(world, "data.reward_fn_key=source"))["data.train_files", "fail"]
    assert "no column 'data_source'; verl's reward manager 'naive' reads it rename column 'source'" in found


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("def compute_score(:", "compute_score", "line 1: invalid syntax"),
        ("def score(**k): ...", "compute_score", "has no compute_score; did you mean score?"),
        ("def compute_scores(**k): ...", "compute_score", "did you mean compute_scores?"),
        ("import no_such_module\ndef compute_score(**k): ...", "compute_score", "line 1: no module no_such_module"),
        ("def compute_score(answer): ...", "compute_score", "has no argument data_source, solution_str, ground_truth"),
        (
            f"def compute_score({', '.join(REWARD_ARGUMENTS)}, scale): ...",
            "compute_score",
            "requires scale; verl calls",
        ),
        (f"async def compute_score({', '.join(REWARD_ARGUMENTS)}, scale=1): ...", "compute_score", ""),
        (f"def compute_score({', '.join(REWARD_ARGUMENTS)}, *, scale=1): ...", "compute_score", ""),
        ("from math import *", "compute_score", ""),
        ("from examples.tiny_world.reward import compute_score as mine", "mine", ""),
        ("try:\n    import no_such_module\nexcept ImportError: pass\ndef compute_score(**k): ...", "compute_score", ""),
        (
            "import sys\nsys.path += ['/a']\nimport no_such_module\ndef compute_score(**k): ...",
            "compute_score",
            "",
        ),
        ("raise SystemExit  # not run\ncompute_score = print", "compute_score", ""),
        (
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass Score:\n    value: float\ndef compute_score(**k): ...",
            "compute_score",
            "a dataclass with `from __future__ import annotations` fails in verl",
        ),
    ],
)
def test_a_reward_function_is_checked_without_running_it(world, tmp_path, text, name, words):
    (tmp_path / "reward.py").write_text(text)
    found = complaints(preflight(world, f"reward.custom_reward_function.name={name}")).get(
        ("reward function", "fail"), ""
    )
    assert words in found
    assert bool(words) == bool(found), found


def test_a_reward_model_passes_its_address_and_tokenizer(world, tmp_path):
    more = "reward_router_address, reward_model_tokenizer"
    (tmp_path / "reward.py").write_text(f"def compute_score({', '.join(REWARD_ARGUMENTS)}, {more}): ...")
    assert f"requires {more}" in complaints(preflight(world))["reward function", "fail"]
    assert ("reward function", "fail") not in complaints(preflight(world, "reward.reward_model.enable=true"))


def test_a_reward_manager_of_a_file_calls_the_reward_function_its_own_way(world, tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(answers): ...")
    assert "has no argument data_source" in complaints(preflight(world))["reward function", "fail"]
    module = "reward.reward_manager.module.path"
    own = ["reward.reward_manager.source=importlib", f"{module}={tmp_path}/managers.py"]
    assert "no file" in complaints(preflight(world, *own))[module, "fail"]
    (tmp_path / "managers.py").write_text("class Mine: ...")
    found = complaints(preflight(world, *own, "reward.reward_manager.name=Mien"))
    assert "has no Mien; did you mean Mine?" in found[module, "fail"]
    assert not complaints(preflight(world, *own, "reward.reward_manager.name=Mine"))


def test_an_incomplete_model_folder(world, tmp_path):
    folder = tmp_path / "model"
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer (tokenizer.json, " in complaints(preflight(world))["model", "fail"]
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.json").touch()
    own = f"actor_rollout_ref.model.tokenizer_path={tmp_path}/tokenizer"
    assert not complaints(preflight(world, own))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert not complaints(preflight(world, own)), "without an index, the number of shards is unknown"
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "1 of 2 weight files is missing, such as model-00002" in complaints(preflight(world, own))["model", "fail"]
    for file in folder.glob("model*"):
        file.unlink()
    found = complaints(preflight(world, own))["model", "fail"]
    assert "no weights (*.safetensors or *.bin)" in found
    assert ("model", "warn") in complaints(preflight(world, own, elsewhere=True))
    megatron = [
        MEGATRON,
        "trainer.device=cpu",
        f"{A}.megatron.use_dist_checkpointing=true",
        f"{A}.megatron.dist_checkpointing_path=/x",
    ]
    assert not complaints(preflight(world, own, *megatron))


@pytest.mark.parametrize("place", ["actor/huggingface", "actor/model/huggingface"])
def test_checkpoints_of_another_model_are_refused(world, tmp_path, place):
    """A folder that no run script marked has no other sign of its model."""
    step = tmp_path / "checkpoints" / "global_step_5"
    (step / place).mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("5")
    (step / place / "config.json").write_text(json.dumps(MODEL))
    assert not complaints(preflight(world))
    (step / place / "config.json").write_text(json.dumps(MODEL | {"hidden_size": 1024, "extra": 1}))
    words = f"{step} is of another model: hidden_size 1024 there, 896 in this run"
    assert words in complaints(preflight(world))["resume", "fail"]
    assert not complaints(preflight(world, "trainer.resume_mode=disable"))
    assert not complaints(preflight(world, "+actor_rollout_ref.model.override_config.hidden_size=1024"))
    nested = "+actor_rollout_ref.model.override_config.model_config.hidden_size=1024"
    assert not complaints(preflight(world, nested))
    other = [
        "trainer.default_local_dir=/nowhere",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={step}",
    ]
    assert words in complaints(preflight(world, *other))["resume", "fail"]


def test_unneeded_engines_on_training_gpus(world):
    """``separate_async`` with verl's ``hybrid_engine=true`` keeps engines on the training GPUs as well."""
    crowded = [*SEPARATE, f"{R}.gpu_memory_utilization=0.9"]
    crowded[crowded.index("actor_rollout_ref.hybrid_engine=false")] = "actor_rollout_ref.hybrid_engine=true"
    found = preflight(world[1:], *crowded)
    assert "set actor_rollout_ref.hybrid_engine=false" in complaints(found)["GPU memory", "warn"]
    mended = preflight(world[1:], *crowded, "actor_rollout_ref.hybrid_engine=false")
    assert found.estimate.peak[0] == "rollout"
    assert "rollout" not in mended.estimate.phases


def test_the_kv_cache_is_counted_in_requests_of_this_run(world):
    found = preflight(world)
    tokens = found.estimate.serving.tokens
    assert (
        only(found, "KV cache").detail
        == f"{tokens} tokens per replica, {tokens / 1536:.1f} requests of 1536 tokens at once"
    )
    assert found.plan.rollout.max_model_len == 32768, "the model's limit; vLLM needs room for one such request"


def test_a_history_folder_that_cannot_be_written(world, monkeypatch):
    monkeypatch.setattr(machine_checks, "free_disk", machine.free_disk)
    nowhere = [f"{R}.custom.rhyme.history.dir=/proc/nope", "trainer.save_freq=-1"]
    found = complaints(preflight(world, *nowhere, elsewhere=True))
    assert found["history folder", "warn"].startswith("the history cannot be kept in /proc/nope (No such file")
    assert not [name for name, _ in found if name == "history store"]


def test_a_checkpoint_folder_that_is_a_file(world, tmp_path):
    for place in ("reward.py", "reward.py/below"):
        found = complaints(preflight(world, f"trainer.default_local_dir={tmp_path}/{place}"))
        assert "cannot be written" in found["checkpoints", "fail"]


def test_little_memory_and_disk(world, monkeypatch):
    small = Machine(gpus=8, gpu_bytes=6 << 30, gpu_source="assumed", host_bytes=8 << 30, host_free=1 << 30)
    monkeypatch.setattr(checks, "detect_machine", lambda: small)
    monkeypatch.setattr(machine_checks, "free_disk", lambda folder: (folder, 1 << 30))
    found = complaints(preflight(world, f"{R}.custom.rhyme.history.max_bytes=8000000000"))
    assert {("GPU memory", "fail"), ("host memory", "fail"), ("checkpoints", "fail")} <= found.keys()
    assert "history.max_bytes" in found["history store", "warn"]
    assert "GPU_MEMORY_GB" in found["GPU memory", "warn"]
    assert " needed, 1.0 GiB free: " in found["host memory", "fail"]
    dry = preflight(world, "trainer.n_gpus_per_node=16", "data.train_files=/nowhere.parquet", elsewhere=True)
    assert "fail" not in {status for _, status in complaints(dry)}, "these problems are of this machine only"


def test_host_memory_counts_decoded_histories_and_live_texts(world):
    """16 x 4 x 32k tokens of each of 256 prompts take 8 GiB an engine without the bound; there are eight of them."""
    long = ["data.max_response_length=32768", f"{R}.n=16", f"{R}.max_num_seqs=256", f"{R}.tensor_model_parallel_size=1"]
    drafting = f"{R}.custom.rhyme.drafting"
    for more, size in (([], 8 * 4 + 1), ([f"{drafting}.history_memory={1 << 30}"], 8 + 1)):
        text = only(preflight(world, *long, *more), "host memory").detail
        assert f"texts for drafts ({size:.1f} GiB)" in text
    text = only(preflight(world, *long, f"{drafting}.enable=false"), "host memory").detail
    assert "texts for drafts (0.0 MiB)" in text


def test_gpu_memory_is_set_detected_or_assumed(monkeypatch):
    monkeypatch.setattr(machine, "_nvidia_smi", lambda: [])
    monkeypatch.delenv("GPU_MEMORY_GB", raising=False)
    assert (machine.detect_machine().gpu_bytes, machine.detect_machine().gpu_source) == (80 << 30, "assumed")
    monkeypatch.setenv("GPU_MEMORY_GB", "141")
    assert (machine.detect_machine().gpu_bytes, machine.detect_machine().gpu_source) == (141 << 30, "GPU_MEMORY_GB")
    monkeypatch.setenv("GPU_MEMORY_GB", "many")
    with pytest.raises(ValueError, match="GPU_MEMORY_GB='many'"):
        machine.detect_machine()
    monkeypatch.setenv("GPU_MEMORY_GB", "141")
    monkeypatch.setattr(machine, "_nvidia_smi", lambda: [80 << 30, 40 << 30])
    assert (machine.detect_machine().gpus, machine.detect_machine().gpu_bytes) == (2, 40 << 30)
