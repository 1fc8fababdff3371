"""Every check passes on a valid run, and reports a problem with its remedy on an invalid one."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from tests.unit.configs import composed
from verl_rhyme.checks import doctor, engine_packages
from verl_rhyme.checks.preflight import checks, config_checks, history_room, machine, machine_checks, model_folder
from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.checks.preflight.estimate import gib
from verl_rhyme.checks.preflight.machine import Machine
from verl_rhyme.cli import app
from verl_rhyme.config import ConfigError
from verl_rhyme.history import environment
from verl_rhyme.history.record import Trajectory
from verl_rhyme.history.store import HistoryStore

MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
HERE = Machine(gpus=8, gpu_bytes=80 << 30, gpu_source="nvidia-smi", host_bytes=512 << 30, host_free=400 << 30)


@pytest.fixture(autouse=True)
def this_machine(monkeypatch):
    monkeypatch.setattr(checks, "look", lambda: HERE)
    monkeypatch.setattr(machine_checks, "free_disk", lambda folder: (folder, 1 << 40))
    monkeypatch.setattr(engine_packages, "_installed", lambda module: True)


@pytest.fixture
def world(tmp_path):
    """Arguments of a run, in a folder with a dataset, a model and a reward function."""
    pq.write_table(pa.table({"prompt": ["a"], "data_source": ["x"]}), tmp_path / "train.parquet")
    (tmp_path / "model").mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / file).write_text(json.dumps(MODEL))
    (tmp_path / "reward.py").write_text("def compute_score(): ...\n")
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
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.max_num_seqs=64",
    ]


def preflight(world, *overrides, **options):
    return checks.examine(composed(*world, *overrides), with_doctor=False, **options)


def complaints(found):
    """Return the texts of warnings and failures by name and status."""
    complaints = {}
    for check in found.checks:
        if check.status != "ok":
            assert check.remedy
            complaints.setdefault((check.name, check.status), []).append(f"{check.detail} {check.remedy}")
    return {key: "\n".join(texts) for key, texts in complaints.items()}


def test_a_valid_run_has_no_complaints(world):
    found = preflight(world)
    assert not complaints(found)
    assert found.estimate is not None
    assert found.estimate.parameters == 494_032_768
    assert found.plan.replicas == 4
    names = {check.name for check in found.checks}
    assert names >= {"rhyme", "parallel sizes", "batches", "rollout", "data.train_files", "data.val_files", "model"}
    assert names >= {
        "run folder",
        "reward function",
        "GPUs",
        "GPU memory",
        "KV cache",
        "host memory",
        "checkpoints",
        "history store",
    }


R, A = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
RANKER = f"{R}.custom.rhyme.lengths.ranker"
MEGATRON = "model_engine=megatron"
RELAY = [
    "trainer.v1.trainer_mode=separate_async",
    f"{R}.nnodes=1",
    f"{R}.n_gpus_per_node=8",
    "data.train_batch_size=32",
    f"{R}.checkpoint_engine.backend=relay",
]
NO_RECOMPUTE = "actor_rollout_ref.model.enable_gradient_checkpointing=false"


@pytest.mark.parametrize(
    ("overrides", "name", "words"),
    [
        ([f"+{R}.custom.rhyme.drafting.flor=1"], "rhyme", "drafting.flor"),
        (["trainer.v1.trainer_mode=rhyme_sorted"], "trainer mode", "rhyme_sorted is not one of sync, colocate_async"),
        ([MEGATRON, f"{A}.megatron.tensor_model_parallel_size=3"], "parallel sizes", "8 training GPUs"),
        ([MEGATRON, f"{A}.megatron.tensor_model_parallel_size=4"], "parallel sizes", "14 attention heads"),
        (
            [MEGATRON, f"{A}.megatron.pipeline_model_parallel_size=16", "trainer.nnodes=2"],
            "parallel sizes",
            "24 layers",
        ),
        ([f"{A}.fsdp_config.fsdp_size=3"], "parallel sizes", "fsdp_size"),
        ([f"{A}.ulysses_sequence_parallel_size=4"], "parallel sizes", "Ulysses: 14 attention heads"),
        ([f"{R}.tensor_model_parallel_size=3"], "parallel sizes", "8 rollout GPUs"),
        ([f"{R}.tensor_model_parallel_size=4"], "parallel sizes", "vLLM: 14 attention heads"),
        (["data.train_batch_size=48"], "batches", "ppo_mini_batch_size=32"),
        ([f"{R}.n=1", f"{A}.ppo_mini_batch_size=4"], "batches", "8 data-parallel ranks"),
        ([f"{A}.ppo_micro_batch_size_per_gpu=null"], "batches", "no micro-batch size"),
        ([f"{A}.ppo_micro_batch_size=8"], "batches", "set twice"),
        ([f"{R}.log_prob_micro_batch_size_per_gpu=null"], "batches", "log-probs"),
        ([f"{A}.use_dynamic_bsz=true", f"{A}.ppo_max_token_len_per_gpu=1000"], "batches", "raise it to 1536"),
        (
            ["model_engine=megatron", f"{A}.optim.lr_warmup_steps=10", "trainer.total_training_steps=5"],
            "batches",
            "lr_warmup_steps=10",
        ),
        (["actor_rollout_ref.hybrid_engine=false"], "batches", "separate_async"),
        (["trainer.v1.trainer_mode=separate_async", f"{R}.nnodes=1"], "batches", "parameter_sync_step"),
        (["trainer.v1.trainer_mode=separate_async"], "batches", "rollout pool"),
        (["trainer.v1.trainer_mode=separate_async", f"{R}.nnodes=1"], "batches", "naive"),
        (["trainer.v1.trainer_mode=separate_async", f"{R}.nnodes=0"], "batches", "without a rollout pool"),
        (
            ["trainer.v1.trainer_mode=separate_async", f"{R}.nnodes=1", f"{R}.n_gpus_per_node=3"],
            "parallel sizes",
            "3 standalone rollout GPUs are not a multiple of the 2 GPUs of a replica",
        ),
        ([f"{R}.checkpoint_engine.backend=rellay"], "weights", "backend=rellay is not one of naive, nccl"),
        ([f"{R}.checkpoint_engine.backend=rellay"], "weights", "did you mean relay?"),
        ([*RELAY, f"+{R}.checkpoint_engine.engine_kwargs.relay.foldr=/x"], "weights", "did you mean folder?"),
        ([*RELAY, f"+{R}.checkpoint_engine.engine_kwargs.relay=/x"], "weights", "takes folder only, not /x"),
        ([*RELAY, f"+{R}.checkpoint_engine.engine_kwargs.relay.folder=4"], "weights", "relay.folder=4 is not a path"),
        (["trainer.v1.trainer_mode=separate_async", f"{R}.nnodes=1"], "batches", "set it to relay (with rhyme), nccl"),
        (["trainer.v1.trainer_mode=colocate_asnyc"], "trainer mode", "did you mean colocate_async?"),
        ([f"{R}.enforce_eager=maybe"], "types", f"{R}.enforce_eager must be true or false, not 'maybe'"),
        ([f"{A}.optim.lr=fast"], "types", f"{A}.optim.lr must be a number, not 'fast'"),
        ([MEGATRON, f"{A}.megatron.param_offload=some"], "types", "param_offload must be true or false, not 'some'"),
        ([f"{R}.max_model_len=1000"], "rollout", "prompt + response = 1536"),
        ([f"{R}.enable_chunked_prefill=false"], "rollout", "chunked prefill"),
        ([f"{R}.max_num_batched_tokens=32"], "rollout", "max_num_seqs=64"),
        (["data.train_files=/nowhere/dapo-math-17k.parquet"], "data.train_files", "prepare dapo --out /nowhere"),
        (["data.val_files=/nowhere/gsm8k-test.parquet"], "data.val_files", "prepare gsm8k --out /nowhere"),
        (["data.val_files=/nowhere/x.parquet"], "data.val_files", "create or download the dataset, or correct"),
        (
            ["data.val_files=/nowhere/tiny_cpu/run/data/test.parquet"],
            "data.val_files",
            "none needed with recipes/run_tiny",
        ),
        (["data.val_files=/nowhere/olympiad-bench.parquet"], "data.val_files", "prepare olympiad --out /nowhere"),
        (["data.val_files=[/nowhere/eval/minerva.parquet]"], "data.val_files", "prepare eval --out /nowhere"),
        (["data.prompt_key=question"], "data.train_files", "no column 'question'"),
        (["actor_rollout_ref.model.path=/nowhere"], "model", "no such folder"),
        (["reward.custom_reward_function.path=/nowhere.py"], "reward function", "no file"),
        (["trainer.n_gpus_per_node=16"], "GPUs", "8 on this machine"),
        ([f"{A}.ppo_micro_batch_size_per_gpu=256", NO_RECOMPUTE], "GPU memory", "fewer tokens"),
        ([f"{R}.gpu_memory_utilization=0.999"], "GPU memory", "gpu_memory_utilization"),
        ([f"{R}.gpu_memory_utilization=0.001"], "KV cache", "weights and activations"),
    ],
)
def test_an_invalid_run_fails(world, overrides, name, words):
    found = complaints(preflight(world, *overrides))
    assert words in found.get((name, "fail"), ""), found


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


def test_carriers_are_the_registered_backends():
    package = importlib.util.find_spec("verl").submodule_search_locations[0]
    texts = [file.read_text() for file in (Path(package) / "checkpoint_engine").glob("*.py")]
    registered = {name for text in texts for name in re.findall(r'Registry\.register\("(\w+)"\)', text)}
    assert registered | {"relay"} == set(config_checks.CARRIERS)


@pytest.mark.parametrize(
    ("preset", "overrides", "rules"),
    [
        ("histopipe", [], "max_staleness 1, in_flight 2, put_off 0, take loaded, refill always, at_version continue"),
        ("full", RELAY, "max_staleness 1, in_flight 2, put_off 0, take finished, refill always, at_version continue"),
        (
            "full",
            [f"{R}.custom.rhyme.max_staleness=0"],
            "max_staleness 0, in_flight 3, put_off 0, take finished, refill when_empty, at_version regenerate",
        ),
        (
            "full",
            [f"{R}.custom.rhyme.max_staleness=0", f"{R}.custom.rhyme.sampling.coupled=false"],
            "max_staleness 0, in_flight 1.125, put_off 0.25, take finished, refill always, at_version regenerate",
        ),
        ("sorted", [], "max_staleness 0, in_flight 4, put_off 0, take finished, refill when_empty, at_version regen"),
    ],
)
def test_the_rules_in_force_are_reported(world, preset, overrides, rules):
    found = preflight(world[1:], f"+rhyme={preset}", f"{R}.calculate_log_probs=true", *overrides)
    assert [check.detail for check in found.checks if f"rules in force: {rules}" in check.detail], found.checks


def test_requirements_of_a_ranker(world, tmp_path, monkeypatch):
    def finding(*overrides):
        found = preflight(world[1:], "+rhyme=sorted", f"{R}.calculate_log_probs=true", *overrides)
        ((status, words),) = [(c.status, f"{c.detail} {c.remedy}") for c in found.checks if c.name == "ranker"]
        return status, words

    boosting = f"{RANKER}.kind=boosting"
    assert finding(boosting) == ("ok", "boosting, trained during the run ")
    status, words = finding(f"{RANKER}.kind=model", f"{RANKER}.model={tmp_path}/none")
    assert status == "fail"
    assert "none is not a folder" in words
    with monkeypatch.context() as patched:
        patched.setattr(machine_checks, "lacking", lambda *_: "no scikit-learn: install it")
        assert finding(boosting) == ("fail", "no scikit-learn install it")
    assert "ranker" not in {check.name for check in preflight(world).checks}


def test_a_placement_policy_needs_several_replicas(world):
    def warned(*overrides):
        return complaints(preflight(world, f"{R}.custom.rhyme.placement.policy=histopipe", *overrides)).get(
            ("placement", "warn"), ""
        )

    assert "placement.policy=histopipe has no effect with a single replica" in warned("trainer.n_gpus_per_node=2")
    assert not warned()


@pytest.mark.parametrize(
    ("overrides", "name", "words"),
    [
        ([f"{R}.max_num_seqs=200", f"{R}.max_num_batched_tokens=300"], "rollout", "leaves no room for draft tokens"),
        (["trainer.max_actor_ckpt_to_keep=null"], "checkpoints", "keeps all checkpoints"),
        (["data.train_files=hdfs://far/away.parquet"], "data.train_files", "remote"),
        ([f"{A}.ppo_micro_batch_size_per_gpu=3"], "batches", "not a multiple of ppo_micro_batch_size_per_gpu=3"),
    ],
)
def test_inefficient_settings_warn(world, overrides, name, words):
    found = preflight(world, *overrides)
    assert words in complaints(found)[name, "warn"]


def test_a_hub_id_warns_and_fails_offline(world, monkeypatch):
    monkeypatch.setattr(model_folder, "find", lambda path: None)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert "downloads" in complaints(preflight(world, "actor_rollout_ref.model.path=own/er"))["model", "warn"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "hf download own/er" in complaints(preflight(world, "actor_rollout_ref.model.path=own/er"))["model", "fail"]


def test_an_unknown_architecture_is_reported_and_not_estimated(world, tmp_path):
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    found = preflight(world)
    assert found.estimate is None
    assert "unknown architecture 'gpt2': not estimated" in complaints(found)["model", "warn"]
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "mamba_d_state": 16}')
    found = preflight(world)
    assert found.estimate is None
    assert "recurrent layers (mamba_d_state) and their states is not estimated" in complaints(found)["model", "warn"]
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
    assert not complaints(preflight(world, shell, "data.custom_cls.path=pkg://mine"))
    lines = tmp_path / "train.jsonl"
    for text, problem in (
        ('{"prompt": []}\n', None),
        ("echo\n", "neither a list of JSON objects"),
        ("", "neither a list of JSON objects"),
        ('{"question": ""}\n{}', "has no column 'prompt', only question"),
    ):
        lines.write_text(text)
        found = complaints(preflight(world, f"data.train_files={lines}"))
        assert problem is None if not found else problem in found["data.train_files", "fail"]


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
    assert ("model", "warn") in complaints(preflight(world, own, dry_run=True))
    megatron = [MEGATRON, f"{A}.megatron.use_dist_checkpointing=true", f"{A}.megatron.dist_checkpointing_path=/x"]
    assert not complaints(preflight(world, own, *megatron))


def test_a_users_trainer_mode_is_registered_by_an_external_module(world, monkeypatch):
    mode = "trainer.v1.trainer_mode=my_async"
    assert ("trainer mode", "fail") in complaints(preflight(world, mode))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "verl_rhyme.plugin,mine")
    found = complaints(preflight(world, mode))
    assert "a module of VERL_USE_EXTERNAL_MODULES (verl_rhyme.plugin, mine) registers" in found["trainer mode", "warn"]
    found = complaints(preflight(world, mode, f"{R}.custom.rhyme.max_staleness=1"))
    assert "trainer_mode=my_async" in found["rhyme", "fail"]
    assert not [name for name, _ in found if name == "trainer mode"], (
        "with the pipeline, the table of combinations reports it, once"
    )


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
    [cache] = [check.detail for check in found.checks if check.name == "KV cache"]
    tokens = found.estimate.serving.tokens
    assert cache == f"{tokens} tokens per replica, {tokens / 1536:.1f} requests of 1536 tokens at once"
    assert found.plan.rollout.max_model_len == 32768, "the model's limit; vLLM needs room for one such request"
    long = complaints(preflight(world, f"{R}.max_model_len=8000000"))
    assert "do not hold one request of 8000000" in long["KV cache", "fail"]


def test_a_history_folder_that_cannot_be_written(world, monkeypatch):
    monkeypatch.setattr(machine_checks, "free_disk", machine.free_disk)
    nowhere = [f"{R}.custom.rhyme.history.dir=/proc/nope", "trainer.save_freq=-1"]
    found = complaints(preflight(world, *nowhere, dry_run=True))
    assert found["history folder", "warn"] == (
        "/proc/nope: cannot be created or written set history.dir to a writable folder"
    )
    assert not [name for name, _ in found if name == "history store"]


def test_little_memory_and_disk(world, monkeypatch):
    small = Machine(gpus=8, gpu_bytes=6 << 30, gpu_source="assumed", host_bytes=8 << 30, host_free=1 << 30)
    monkeypatch.setattr(checks, "look", lambda: small)
    monkeypatch.setattr(machine_checks, "free_disk", lambda folder: (folder, 1 << 30))
    found = complaints(preflight(world, f"{R}.custom.rhyme.history.max_bytes=8000000000"))
    assert {("GPU memory", "fail"), ("host memory", "fail"), ("checkpoints", "fail")} <= found.keys()
    assert "history.max_bytes" in found["history store", "warn"]
    assert "GPU_MEMORY_GB" in found["GPU memory", "warn"]
    assert " needed, 1.0 GiB free: " in found["host memory", "fail"]
    dry = preflight(world, "trainer.n_gpus_per_node=16", "data.train_files=/nowhere.parquet", dry_run=True)
    assert not dry.failed, "these problems are of this machine only"


def test_each_checkpoint_holds_a_copy_of_the_history(world, monkeypatch):
    """17k prompts x 16 x 8k tokens are more than the weights of a small model."""
    monkeypatch.setattr(history_room, "_prompts", lambda config: history_room._Counted(17_398, 17_398))
    sizes = [f"{R}.n=16", "data.max_response_length=16384", f"{R}.custom.rhyme.history.max_bytes=400000000000"]
    monkeypatch.setattr(machine_checks, "free_disk", lambda folder: (folder, 24 << 30))
    assert ("checkpoints", "fail") not in complaints(preflight(world))
    assert "history" in complaints(preflight(world, *sizes))["checkpoints", "fail"]
    monkeypatch.setattr(machine_checks, "free_disk", lambda folder: (folder, 100 << 30))
    assert "history" in complaints(preflight(world, *sizes))["checkpoints", "warn"]
    monkeypatch.setattr(machine_checks, "free_disk", lambda folder: (folder, 1 << 40))
    assert ("checkpoints", "warn") not in complaints(preflight(world, *sizes))
    off = f"{R}.custom.rhyme.enable=false"
    monkeypatch.setattr(machine_checks, "free_disk", lambda folder: (folder, 24 << 30))
    assert ("checkpoints", "fail") not in complaints(preflight(world, *sizes, off))


def history_store(found):
    [check] = [check for check in found.checks if check.name == "history store"]
    return check


def test_size_of_the_history_and_visits_kept(world, tmp_path):
    rows = {"prompt": [str(i) for i in range(17_398)], "data_source": ["x"] * 17_398}
    pq.write_table(pa.table(rows), tmp_path / "train.parquet")
    dapo = [*world, f"{R}.n=16", "data.max_response_length=20480", "trainer.total_epochs=10"]
    history = f"{R}.custom.rhyme.history"
    found = history_store(preflight(dapo, f"{R}.max_model_len=20992", f"{history}.max_bytes={20 << 30}"))
    assert found.status == "warn"
    assert "17398 prompts x 16 responses x 2560 to 10240 tokens (1/8 to 1/2 of max_response_length)" in found.detail
    per_epoch = 17_398 * 16 * (5.75 * 2560 + 27) / (1 << 30)
    assert f"= {4 * per_epoch:.1f} GiB to " in found.detail
    levels = 0.7 * 20 / per_epoch, 0.7 * 20 / (17_398 * 16 * (5.75 * 10240 + 27) / (1 << 30))
    assert levels[0] > 1 > levels[1]
    assert f"kept: {levels[0]:.1f} of 4 visits to {levels[1]:.0%} of the prompts" in found.detail
    assert "history.max_bytes" in found.remedy
    assert history_store(preflight(dapo, f"{history}.max_bytes=600000000000")).status == "ok"
    few = history_store(preflight(dapo, "data.train_max_samples=100"))
    assert few.status == "ok"
    assert "100 prompts" in few.detail
    assert "kept: all" in few.detail
    assert "(null: the smaller of half the free disk and half the free memory" in few.detail


@pytest.mark.parametrize("shape", ["text", "messages", "parts"])
def test_repeated_prompts_are_counted_once(world, tmp_path, monkeypatch, shape):
    """verl's DAPO-Math file repeats prompts. If reading takes too long, the count is extrapolated."""

    def row(i):
        content = [{"type": "text", "text": f"find {i}"}] if shape == "parts" else f"find {i}"
        return (
            content
            if shape == "text"
            else [{"role": "system", "content": content}, {"role": "user", "content": content}]
        )

    prompts = [row(i % 700) for i in np.random.default_rng(0).permutation(70_000)]
    pq.write_table(pa.table({"prompt": prompts, "data_source": ["x"] * 70_000}), tmp_path / "train.parquet")
    once = preflight(world, "trainer.total_epochs=1")
    assert "700 prompts (in 70000 rows) x 8 responses" in history_store(once).detail
    assert "x 4 visits" in history_store(once).detail
    monkeypatch.setattr(history_room, "_COUNTING_S", 0.0)
    assert "1496 prompts (in 70000 rows)" in history_store(preflight(world)).detail, "700 of the first 32768 rows"
    monkeypatch.undo()
    pictures = {"prompt": prompts, "data_source": ["x"] * 70_000, "images": [[{"bytes": b"x"}]] * 70_000}
    pq.write_table(pa.table(pictures), tmp_path / "train.parquet")
    assert "70000 prompts x 8 responses" in history_store(preflight(world)).detail, "images are not compared"


def test_the_history_needs_disk_for_its_rewrite(world, monkeypatch):
    bound = f"{R}.custom.rhyme.history.max_bytes={10 << 30}"
    for free, short in ((11, True), (16, True), (18, False)):
        monkeypatch.setattr(machine_checks, "free_disk", lambda folder, free=free: (folder, free << 30))
        found = [check for check in preflight(world, bound).checks if check.name == "history store"]
        assert any("free disk space" in check.remedy for check in found) == short
        assert "17.0 GiB while it is rewritten" in found[0].detail
    monkeypatch.setattr(machine_checks, "free_disk", lambda folder: (folder, 4 << 30))
    assert history_store(preflight(world)).status == "ok"


def test_a_rewrite_takes_the_disk_that_the_preflight_computes(tmp_path, monkeypatch):
    bound, peaks, publish = 2 << 20, [], environment.publish

    def watched(path, folder):
        peaks.append(sum(file.stat().st_blocks * 512 for file in path.glob("env-*/*")))
        publish(path, folder)

    monkeypatch.setattr(environment, "publish", watched)
    with HistoryStore(tmp_path / "h", "a", bound, epochs=1) as store:
        for step in range(20):
            new = [Trajectory(bytes([step % 2, i] * 8), np.arange(8000), 0.0, 0, step // 2, i) for i in range(18)]
            assert store.append(new, step).dropped == 0
    assert 1.5 * bound < max(peaks) < 1.02 * history_room.PEAK * bound


def test_a_separate_rollout_pool(world):
    found = preflight(
        world,
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "actor_rollout_ref.hybrid_engine=false",
        f"{R}.nnodes=2",
        f"{R}.n_gpus_per_node=8",
        f"{R}.checkpoint_engine.backend=nccl",
    )
    assert not complaints(found)
    assert found.plan.replicas == 8
    assert set(found.estimate.phases) == {"update", "optimizer step", "old log-probs", "rollout pool"}


SEPARATE = [
    "+rhyme=sorted",
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.hybrid_engine=false",
    f"{R}.nnodes=2",
    f"{R}.n_gpus_per_node=8",
    f"{R}.checkpoint_engine.backend=nccl",
]


def test_the_load_reports_batches_in_flight_and_warns_of_several_mini_batches(world):
    def load_of(*overrides):
        (load,) = [check for check in preflight(world[1:], *overrides).checks if check.name == "load"]
        return load

    load = load_of("+rhyme=sorted")
    assert load.detail.startswith("4 batches of 64 prompts x 8 in flight: 2048 samples for 256 request slots;")
    assert load.detail.endswith("a training step is 2 optimizer steps, shuffled (order 0)")
    in_flight = f"{R}.custom.rhyme.scheduling.in_flight=8"
    assert load.remedy.startswith(f"set data.train_batch_size=32 and {in_flight} for training steps of one optimizer")
    assert "the run then has 2 times the steps: multiply save_freq, test_freq, " in load.remedy
    load = load_of("+rhyme=sorted", "data.train_batch_size=32", in_flight)
    assert (load.status, load.remedy) == ("ok", "")
    assert load.detail.endswith("a training step is 1 optimizer step, sorted by length (order 1)")
    remedy = "set data.train_batch_size=32 for training steps of one optimizer step"
    assert load_of("+rhyme=full").remedy.startswith(remedy)
    on_policy = load_of("+rhyme=full", f"{R}.custom.rhyme.max_staleness=0")
    assert on_policy.detail.startswith("3 batches of 64 prompts x 8 in flight: 1536 samples")
    assert on_policy.remedy.startswith(remedy)
    assert not [check for check in preflight(world).checks if check.name == "load"]


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("rhyme.scheduling.take=loaded", "rhyme"),
        ("custom.rhyme.drafting.max_tokens=4", "custom.rhyme"),
        ("actor_rollout_ref.rhyme.drafting.max_tokens=4", "actor_rollout_ref.rhyme"),
        ("actor_rollout_ref.rollout.rhyme.enable=false", "actor_rollout_ref.rollout.rhyme"),
        ("actor_rollout_ref.rollout.rhyme=false", "actor_rollout_ref.rollout.rhyme"),
    ],
)
def test_a_rhyme_tree_in_another_place_is_refused(world, key, place):
    refused = [f"{place} is not read: did you mean {R}.custom.rhyme?"]
    for preset in (["+rhyme=sorted"], []):
        details = [check.detail for check in preflight(world[1:], *preset, f"+{key}").checks if check.name == "rhyme"]
        assert details == refused


def test_keys_of_the_user_are_not_refused(world):
    mine = ["+weights.mine=1", "+events=x", "+history={}", "+reward.custom_reward_function.reward_kwargs.rhyme=0.5"]
    found = preflight(world[1:], "+rhyme=histospec", *mine, "+trainer.rhyme.scheme=abab")
    assert [check.status for check in found.checks if check.name == "rhyme"] == ["ok"]
    found = preflight(world[1:], "+history.dir=/mine")
    assert [check.status for check in found.checks if check.name == "rhyme"] == ["ok"]


def test_engines_and_training_on_one_host(world):
    """On a CPU, training and engines share the memory; with GPUs, each has its own pool."""
    cpu = ["trainer.device=cpu", f"{R}.nnodes=1", f"{R}.n_gpus_per_node=1", f"{R}.tensor_model_parallel_size=1"]
    found = preflight(world[1:], *SEPARATE, *cpu, "trainer.n_gpus_per_node=1")
    phases = {name: phase.total for name, phase in found.estimate.phases.items()}
    pool = phases.pop("rollout pool")
    [detail] = [check.detail for check in found.checks if check.name == "memory"]
    phase, peak = max(phases, key=phases.get), max(phases.values())
    assert detail.startswith(f"{phase} with the rollout pool: {gib(peak + pool)}")


def test_a_reward_model_must_not_share_gpus_with_separate_engines(world):
    shared = ["reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool=false"]
    found = complaints(preflight(world[1:], *SEPARATE, *shared))
    assert "enable_resource_pool=true" in found[("batches", "fail")]


def test_tokens_of_a_micro_batch(world):
    assert preflight(world).plan.training.tokens == 4 * 1536
    dynamic = [f"{A}.use_dynamic_bsz=true", f"{A}.ppo_max_token_len_per_gpu=3000"]
    assert preflight(world, *dynamic).plan.training.tokens == 3000
    split = preflight(world, f"{A}.ulysses_sequence_parallel_size=2", f"{A}.ppo_micro_batch_size_per_gpu=1").plan
    assert (split.data_parallel, split.training.tokens) == (4, 768)


def test_gpu_memory_is_set_detected_or_assumed(monkeypatch):
    monkeypatch.setattr(machine, "_nvidia_smi", lambda: [])
    monkeypatch.delenv("GPU_MEMORY_GB", raising=False)
    assert (machine.look().gpu_bytes, machine.look().gpu_source) == (80 << 30, "assumed")
    monkeypatch.setenv("GPU_MEMORY_GB", "141")
    assert (machine.look().gpu_bytes, machine.look().gpu_source) == (141 << 30, "GPU_MEMORY_GB")
    monkeypatch.setenv("GPU_MEMORY_GB", "many")
    with pytest.raises(ValueError, match="GPU_MEMORY_GB='many'"):
        machine.look()
    monkeypatch.setenv("GPU_MEMORY_GB", "141")
    monkeypatch.setattr(machine, "_nvidia_smi", lambda: [80 << 30, 40 << 30])
    assert (machine.look().gpus, machine.look().gpu_bytes) == (2, 40 << 30)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense=1"], "nonsense"),
        (["trainer.save_frq=1"], "did you mean trainer.save_freq"),
        (
            ["+rhyme=histospec", f"{R}.custom.rhyme.placment.policy=x"],
            r"placment\.policy=x: unknown key; did you mean .*\.rhyme\.placement\.policy\?$",
        ),
        (["trainr.v1.trainer_mode=sync"], r"did you mean trainer\.v1\.trainer_mode\?$"),
        (
            ["rhyme.enable=false"],
            rf"rhyme\.enable=false: unknown key; did you mean {R}\.custom\.rhyme\.enable\?$",
        ),
        (["+rhyme=sorted", "rhyme.scheduling.order=0"], rf"did you mean {R}\.custom\.rhyme\.scheduling\.order\?$"),
        ([f"{R}.rhyme.enable=false"], rf"did you mean {R}\.custom\.rhyme\.enable\?$"),
        (["model_engine=nope"], "Available options in 'model_engine': dp; megatron; [^/]*$"),
        (
            ["trainer.default_local_dir=A b=c/ckpt"],
            "^trainer.default_local_dir=A b=c/ckpt: mismatched input '='.*quote",
        ),
        (["--config-name", "absent"], "absent"),
        (["--config-dir", "/nowhere"], "/nowhere"),
        (["--config-path", "/nowhere", "--config-name", "x"], "--config-path /nowhere: no such folder"),
        (["--bogus", "x=1"], "bogus"),
        (["--multirun"], "multirun"),
        (["trainer.project_name=${nothing.here}"], "nothing.here"),
    ],
)
def test_errors_of_composition_have_a_reason(arguments, words):
    with pytest.raises(ConfigError, match=words):
        compose(arguments)


MICRO = [f"{A}.ppo_micro_batch_size_per_gpu=4", f"{R}.log_prob_micro_batch_size_per_gpu=4"]


def dry_run(*overrides):
    return CliRunner().invoke(app, ["preflight", "--dry-run", "--", "+rhyme=histospec", f"{R}.name=vllm", *overrides])


def test_the_dry_run_prints_yaml_on_a_machine_that_lacks_everything(monkeypatch):
    bare = Machine(gpus=0, gpu_bytes=1 << 30, gpu_source="assumed", host_bytes=1 << 30, host_free=1 << 20)
    monkeypatch.setattr(checks, "look", lambda: bare)
    monkeypatch.setattr(doctor, "installed_version", lambda package: None)
    found = dry_run(*MICRO, "algorithm.adv_estimator=grpo")
    assert found.exit_code == 0, found.output
    printed = OmegaConf.create(found.stdout)
    assert printed.actor_rollout_ref.rollout.custom.rhyme.drafting.enable is True
    for missing in ("data.train_files: no file", "GPUs: 0 on this machine", "verl: not installed"):
        assert f"# warn: {missing}" in found.stdout
    unset = dry_run(f"{R}.name=???")
    error = f"verl-rhyme preflight: Missing mandatory value: {R}.name -> set {R}.name=vllm\n"
    assert (unset.exit_code, unset.stderr) == (1, error)
    broken = dry_run("nonsense=1")
    assert broken.exit_code == 1
    assert "Key 'nonsense' is not in struct" in broken.stderr


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (f"+{R}.custom.rhyme.drafting.max_token=4", "rhyme: unknown key"),
        (f"{A}.ppo_mini_batch_size=100", "batches: "),
        (f"{R}.tensor_model_parallel_size=3", "parallel sizes: "),
    ],
)
def test_the_dry_run_fails_where_the_run_would(override, problem):
    found = dry_run(*MICRO, "algorithm.adv_estimator=grpo", override)
    assert found.exit_code == 1
    assert found.stderr.startswith(f"verl-rhyme preflight: {problem}")
    assert " -> " in found.stderr
    assert OmegaConf.create(found.stdout).actor_rollout_ref.rollout.name == "vllm"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("trainer.nnodes=two", "trainer.nnodes must be a whole number, not 'two'"),
        ("trainer.nnodes=null", "trainer.nnodes must be a whole number, not null"),
        ("data.train_batch_size=abc", "data.train_batch_size must be a whole number, not 'abc'"),
        (
            f"{A}.ppo_micro_batch_size_per_gpu=few",
            f"{A}.ppo_micro_batch_size_per_gpu must be a whole number, not 'few'",
        ),
        (f"{R}.max_num_seqs=[1]", f"{R}.max_num_seqs must be a whole number, not [1]"),
        (f"{R}.gpu_memory_utilization=high", f"{R}.gpu_memory_utilization must be a number, not 'high'"),
    ],
)
def test_a_size_that_is_not_a_number_is_reported(world, override, problem):
    found = CliRunner().invoke(app, ["preflight", "--dry-run", "--", *world, override])
    assert found.exit_code == 1
    assert isinstance(found.exception, SystemExit), found.exception
    assert problem in found.stderr
    assert len(found.stderr.splitlines()) == 1


OWN = "defaults:\n  - ppo_trainer\n  - rhyme: sorted\n  - _self_\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "did not find expected|expected the node content"),
        ("", "--config-name mine: no actor_rollout_ref, data, trainer in it; start its defaults with `- ppo_trainer`"),
        (b"a: \xd2\xff", "mine"),
        (OWN, "Could not load 'ppo_trainer'; add `hydra: {searchpath: [pkg://verl.trainer.config]}` to mine.yaml"),
    ],
)
def test_errors_of_a_users_yaml_have_a_reason(tmp_path, text, problem):
    (tmp_path / "mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        compose(["--config-path", str(tmp_path), "--config-name", "mine"])
    assert any(words in str(error.value) for words in (problem, *problem.split("|"))), error.value


def test_a_users_yaml_selects_a_preset_as_documented(tmp_path):
    """The two ways of ``recipes/README.md``, from a folder with a space in its name."""
    folder = tmp_path / "my configs"
    folder.mkdir()
    (folder / "mine.yaml").write_text(OWN)
    (folder / "alone.yaml").write_text(f"hydra:\n  searchpath: [pkg://verl.trainer.config]\n{OWN}")
    for way, name in (("--config-dir", "mine"), ("--config-path", "alone")):
        arguments = [way, str(folder), "--config-name", name]
        config = compose([*arguments, f"{R}.name=vllm"])
        assert OmegaConf.select(config, f"{R}.custom.rhyme.scheduling.refill") == "when_empty"
        assert config.trainer.v1.trainer_mode == "sync"
        assert compose([*arguments, f"{R}.name=vllm", "rhyme=stream"]).trainer.v1.trainer_mode == "separate_async"


ROOT = Path(__file__).parents[3]


def documented():
    """Yield the verl commands of README and docs, without a final ``...`` for the user's own arguments."""
    for file in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/papers/*.md"),
        *ROOT.glob("recipes/*.md"),
    ):
        text = file.read_text().replace("\\\n", " ")
        for command in re.findall(r"^ {4,}python -m verl\.trainer\.main_ppo (\+rhyme=.*)", text, re.M):
            arguments = command.partition("#")[0].removesuffix("...").split()
            if "..." not in arguments:
                yield pytest.param(arguments, id=f"{file.stem}-{arguments[0]}")


@pytest.mark.parametrize("arguments", documented())
def test_documented_commands_are_not_refused(world, arguments):
    found = complaints(preflight(world[1:], *arguments))
    assert ("rhyme", "fail") not in found, found["rhyme", "fail"]


def test_json(world):
    found = CliRunner().invoke(app, ["preflight", "--dry-run", "--json", "--", *world])
    report = json.loads(found.stdout)
    assert report["ok"]
    assert report["config"]["data"]["train_batch_size"] == 64
    assert report["estimate"]["phases"]["update"]["total"] > 1 << 30


def test_a_missing_package_of_the_training_engine_fails(world, monkeypatch):
    monkeypatch.setattr(engine_packages, "_installed", lambda module: module != "transformer_engine.pytorch")
    megatron = [MEGATRON, f"{A}.megatron.vanilla_mbridge=true"]
    found = preflight(world, *megatron)
    assert found.failed
    assert "bash requirements/build.sh transformer-engine" in complaints(found)[("training engine", "fail")]
    found = preflight(world, *megatron, dry_run=True)
    assert ("training engine", "warn") in complaints(found), "a dry run may happen on another machine"
    assert ("training engine", "fail") not in complaints(preflight(world))
