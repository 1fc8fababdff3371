"""Checks of a config against the machine: data, model, GPUs, memory, disk."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray._common.utils import get_ray_address_file

from tests.unit.checks.preflight.world import HERE, MEGATRON, MODEL, RELAY, ROW, A, R, complaints, only, preflight
from verl_rhyme.checks.preflight import checks, history_size, machine, machine_checks
from verl_rhyme.checks.preflight.estimate import gib
from verl_rhyme.checks.preflight.machine import Machine
from verl_rhyme.history import environment
from verl_rhyme.history.record import Trajectory
from verl_rhyme.history.store import HistoryStore
from verl_rhyme.lengths import ranker
from verl_rhyme.planning import architecture
from verl_rhyme.planning.architecture import PUBLISHED, Architecture

NO_RECOMPUTE = "actor_rollout_ref.model.enable_gradient_checkpointing=false"
HISTORY = f"{R}.custom.rhyme.history"


@pytest.mark.parametrize(
    ("overrides", "name", "status", "words"),
    [
        (["data.val_files=/nowhere/x.parquet"], "data.val_files", "fail", "recipes/README.md, Start"),
        (["data.train_files=null"], "data.train_files", "fail", "names no file"),
        (["data.train_batch_size=128"], "data.train_files", "fail", "larger than the 64 prompts of data.train_files"),
        (["data.train_max_samples=8"], "data.train_files", "fail", "(data.train_max_samples=8 of 64 rows)"),
        (["data.train_files=hdfs://far/away.parquet"], "data.train_files", "warn", "not checked"),
        (["actor_rollout_ref.model.path=/tmp/"], "model", "fail", "set actor_rollout_ref.model.path=/tmp"),
        (["actor_rollout_ref.model.path=/nowhere"], "model", "fail", "no such folder"),
        (["trainer.default_local_dir=/proc/x"], "checkpoints", "fail", "cannot be written"),
        (["trainer.max_actor_ckpt_to_keep=null"], "checkpoints", "warn", "keeps all checkpoints"),
        (["trainer.n_gpus_per_node=16"], "GPUs", "fail", "8 visible on this machine"),
        ([f"{A}.ppo_micro_batch_size_per_gpu=256", NO_RECOMPUTE], "GPU memory", "warn", "fewer tokens"),
        ([f"{R}.gpu_memory_utilization=0.999"], "GPU memory", "warn", "gpu_memory_utilization"),
        ([f"{R}.gpu_memory_utilization=0.001"], "KV cache", "warn", "leaves 0 tokens after weights and activations"),
        ([f"{R}.max_model_len=8000000"], "KV cache", "warn", "does not hold one request of 8000000"),
    ],
)
def test_problems_have_remedies(world, overrides, name, status, words):
    found = complaints(preflight(world, *overrides))
    assert words in found.get((name, status), ""), found


def test_ray_takes_a_relative_checkpoint_folder_from_its_own_folder(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine_checks, "in_cluster", lambda address: address is not None)
    overrides = ["trainer.default_local_dir=checkpoints/mine"]
    assert ("checkpoints", "warn") not in complaints(preflight(world, *overrides))
    overrides += ["+ray_kwargs.ray_init.address=head:6379"]
    assert "an absolute path" in complaints(preflight(world, *overrides))["checkpoints", "warn"]


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_a_ray_cluster_is_found_where_ray_notes_it(tmp_path, monkeypatch, variable):
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    assert not machine.in_cluster(None)
    note = Path(get_ray_address_file(None))
    note.parent.mkdir()
    note.write_text("head:6379")
    assert machine.in_cluster(None)


def test_the_relay_needs_room_for_two_or_three_versions(world, tmp_path, monkeypatch):
    folder = f"+{R}.checkpoint_engine.engine_kwargs.relay.folder"
    for overrides, place in ((RELAY, "/dev/shm"), ([*RELAY, f"{folder}={tmp_path}/made/later"], str(tmp_path))):
        monkeypatch.setattr(machine_checks, "free_disk", machine.free_disk)
        found = preflight(world, *overrides)
        [detail] = [check.detail for check in found.checks if check.name == "weights" and "free" in check.detail]
        assert detail.startswith(f"{place}: ")
        one = found.plan.sent_bytes * found.estimate.parameters
        assert f"{gib(2 * one)} for two versions of the weights, {gib(3 * one)} on the actor's node" in detail
        for free, warns in ((3 * one, True), (3 * one + 1, False)):
            monkeypatch.setattr(machine_checks, "free_disk", lambda path, free=free: (tmp_path, free))
            assert (("weights", "warn") in complaints(preflight(world, *overrides))) == warns


def test_a_mixture_is_estimated_with_its_experts_parallel_sizes(world, tmp_path):
    """verl's command for 30B-A3B; three versions of 61 GB in the relay take host memory."""
    (tmp_path / "model" / "config.json").write_text(json.dumps(PUBLISHED["Qwen/Qwen3-30B-A3B"]))
    sizes = "tensor_model_parallel_size=2", "expert_model_parallel_size=8", "expert_tensor_parallel_size=1"
    options = [MEGATRON, *(f"{A}.megatron.{size}" for size in sizes), "trainer.nnodes=2"]
    found = preflight(world, *options, *RELAY)
    assert (found.plan.training.expert_ranks, found.plan.training.expert_replicas) == (8, 2)
    assert found.estimate.host["relay"] == 3 * 2 * found.estimate.parameters == pytest.approx(3 * 61e9, rel=0.01)
    assert gib(found.estimate.host["relay"]) in only(found, "host memory").detail
    assert preflight(world, *options).estimate.host["relay"] == 0
    ranks = "16 training GPUs are not a multiple of expert model x expert tensor x pipeline parallel = 32"
    wrong = (
        (f"{A}.megatron.expert_model_parallel_size=3", "128 experts are not divisible by 3"),
        (f"{A}.megatron.expert_tensor_parallel_size=4", ranks),
        (f"{R}.expert_parallel_size=3", "expert_parallel_size=3 is neither 1 nor tensor x data parallel = "),
    )
    for option, problem in wrong:
        assert problem in complaints(preflight(world, *options, option))["parallel sizes", "fail"]


def test_the_relay_holds_weights_in_the_type_of_the_engines(world):
    for dtype, more, bytes_each in (
        ("bfloat16", [], 2),  # of FSDP's float32
        ("bfloat16", [f"{R}.quantization=fp8"], 4),
        ("float32", [f"{A}.fsdp_config.model_dtype=bfloat16"], 2),
    ):
        assert preflight(world, *RELAY, f"{R}.dtype={dtype}", *more).plan.sent_bytes == bytes_each


def test_requirements_of_a_ranker(world, tmp_path):
    def finding(folder):
        overrides = (f"{R}.calculate_log_probs=true", f"{R}.custom.rhyme.lengths.ranker={folder}")
        return only(preflight(world[1:], "+rhyme=sorted", *overrides), "ranker")

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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ('{"model_type": "gpt2"}', "no estimate for this family (gpt2; only for llama, "),
        ('{"model_type": "qwen2", "hidden_size": 4}', "no estimate"),
        ('{"model_type": "llama", "mamba_d_state": 16}', "no estimate for recurrent layers (mamba_d_state)"),
    ],
)
def test_an_unknown_architecture_is_reported_and_not_estimated(world, tmp_path, fields, words):
    (tmp_path / "model" / "config.json").write_text(fields)
    found = preflight(world)
    assert found.estimate is None
    assert words in complaints(found)["model", "warn"]
    assert (("rhyme", "fail") in complaints(found)) == ("mamba" in fields)


@pytest.mark.parametrize(
    ("content", "overrides", "words"),
    [
        (b"no parquet", [], "not a readable parquet"),
        ([], [], "0 prompts"),
        ({"prompt": "a"}, [], "column 'prompt' has string, not a list of messages"),
        ({"reward_model": None}, [], ""),
        ({"reward_model": "b"}, [], "no column 'reward_model' with ground_truth"),
        ({"reward_model": "b"}, ["reward.reward_manager.source=importlib"], ""),
        ({"data_source": ...}, [], "no column 'data_source'; verl's reward manager 'naive' reads it"),
        ({}, ["data.train_files=FOLDER/*.parquet"], ""),
        ({}, ["data.train_files=FOLDER/reward.py"], "verl reads .parquet, .json and .jsonl"),
        ({}, ["data.train_files=FOLDER/reward.py", "data.custom_cls.path=pkg://tests.mine"], ""),
    ],
)
def test_training_data_has_what_verl_reads(world, tmp_path, content, overrides, words):
    file = tmp_path / "train.parquet"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif isinstance(content, list):
        pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), file)
    else:
        row = {name: value for name, value in {**ROW, **content}.items() if value is not ...}
        pq.write_table(pa.Table.from_pylist([row] * 64), file)
    found = complaints(preflight(world, *(each.replace("FOLDER", str(tmp_path)) for each in overrides)))
    problem = found.get(("data.train_files", "fail"), "")
    assert words in problem
    assert bool(words) == bool(problem)


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("def compute_score(:", "compute_score", "invalid syntax (reward.py, line 1)"),
        ("def score(**k): ...", "compute_score", "has no compute_score; did you mean score?"),
        ("import no_such_module\ndef compute_score(**k): ...", "compute_score", "imports no_such_module, which is not"),
        ("from examples.tiny_world.reward import compute_score as mine", "mine", ""),
        ("try:\n    import no_such_module\nexcept ImportError: pass\ndef compute_score(**k): ...", "compute_score", ""),
        ("import sys\nsys.path += ['/a']\nimport no_such_module\ndef compute_score(**k): ...", "compute_score", ""),
        ("raise SystemExit  # not run\ncompute_score = print", "compute_score", ""),
    ],
)
def test_a_reward_function_is_checked_without_running_it(world, tmp_path, text, name, words):
    (tmp_path / "reward.py").write_text(text)
    found = complaints(preflight(world, f"reward.custom_reward_function.name={name}"))
    problem = found.get(("reward.custom_reward_function.path", "fail"), "")
    assert words in problem
    assert bool(words) == bool(problem), found


def test_a_reward_manager_of_a_file(world, tmp_path):
    module = "reward.reward_manager.module.path"
    own = ["reward.reward_manager.source=importlib", f"{module}={tmp_path}/managers.py"]
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
    run = [*world, f"actor_rollout_ref.model.tokenizer_path={tmp_path}/tokenizer"]
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert not complaints(preflight(run)), "without an index, the number of shards is unknown"
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "missing, such as model-00002" in complaints(preflight(run))["model", "fail"]
    for file in folder.glob("model*"):
        file.unlink()
    assert "missing, such as *.safetensors or *.bin" in complaints(preflight(run))["model", "fail"]
    assert ("model", "warn") in complaints(preflight(run, elsewhere=True))
    megatron = [MEGATRON, "trainer.device=cpu", f"{A}.megatron.use_dist_checkpointing=true"]
    assert not complaints(preflight(run, *megatron, f"{A}.megatron.dist_checkpointing_path=/x"))


def test_the_kv_cache_is_counted_in_requests_of_this_run(world):
    found = preflight(world)
    tokens = found.estimate.serving.tokens
    assert (
        only(found, "KV cache").detail
        == f"{tokens} tokens per replica, {tokens / 1536:.1f} requests of 1536 tokens at once"
    )
    assert found.plan.rollout.max_model_len == 32768, "the model's limit; vLLM needs room for one such request"


@pytest.mark.parametrize(
    ("more", "tokens", "words"),
    [
        ([f"{R}.n=8", "data.max_response_length=9728"], 4, ""),
        ([f"{R}.n=16", "data.max_response_length=1536"], 3, "room for 128 requests of 2048 tokens at once"),
        ([f"{R}.n=16", "data.max_response_length=9728"], 1, "94 requests of 10240 tokens at once, since even drafts"),
        (["trainer.v1.trainer_mode=colocate_async", "data.max_response_length=9728"], 1, "without drafts, 107"),
        ([f"{R}.n=16", f"{R}.custom.rhyme.drafting.enable=false"], 0, ""),
    ],
)
def test_states_of_drafts_leave_room_for_the_runs_requests(world, tmp_path, more, tokens, words):
    """Eight engines on GPUs of 80 GB; 64 prompts in a batch."""
    (tmp_path / "model" / "config.json").write_text(json.dumps(architecture.PUBLISHED["Qwen/Qwen3.5-9B"]))
    sizes = [f"{R}.tensor_model_parallel_size=1", f"{R}.gpu_memory_utilization=0.7", f"{R}.max_num_seqs=128"]
    found = preflight(world, *sizes, f"{R}.enable_prefix_caching=false", *more)
    assert found.draft_tokens == tokens
    warned = complaints(found).get(("drafts", "warn"), "")
    assert words in warned
    assert bool(words) == bool(warned)


def test_little_memory_and_disk_warn(world, monkeypatch):
    small = Machine(gpus=8, gpu_bytes=6 << 30, gpu_source="assumed", host_bytes=8 << 30, host_free=1 << 30)
    monkeypatch.setattr(checks, "detect_machine", lambda: small)
    monkeypatch.setattr(machine_checks, "free_disk", lambda folder: (folder, 1 << 30))
    found = complaints(preflight(world, f"{HISTORY}.max_bytes=8000000000"))
    warned = {"GPU memory", "host memory", "checkpoints", "history store"}
    assert {(name, "warn") for name in warned} <= found.keys()
    assert "fail" not in {status for _, status in found}, "sizes are estimates"
    assert "GPU_MEMORY_GB" in found["GPU memory", "warn"]
    dry = preflight(world, "trainer.n_gpus_per_node=16", "data.train_files=/nowhere.parquet", elsewhere=True)
    assert "fail" not in {status for _, status in complaints(dry)}, "these problems are of this machine only"


def test_host_memory_counts_decoded_histories_and_live_texts(world):
    """16 x 4 x 32k tokens of each of 256 prompts take 8 GiB an engine without the bound; there are eight of them."""
    long = ["data.max_response_length=32768", f"{R}.n=16", f"{R}.max_num_seqs=256", f"{R}.tensor_model_parallel_size=1"]
    drafting = f"{R}.custom.rhyme.drafting"
    for more, size in (
        ([], "33.0 GiB"),
        ([f"{drafting}.history_memory={1 << 30}"], "9.0 GiB"),
        ([f"{drafting}.enable=false"], "0.0 MiB"),
    ):
        assert f"texts for drafts ({size})" in only(preflight(world, *long, *more), "host memory").detail


def test_the_models_own_drafter_is_examined(world, tmp_path):
    """Before, vLLM refused it while the engine started, or it rested in silence."""
    key, mtp = f"{R}.custom.rhyme.drafting.model", [f"{R}.mtp.enable=true", f"{R}.mtp.enable_rollout=true"]
    assert "no such folder" in complaints(preflight(world, f"{key}=/nowhere"))["drafter", "fail"]
    assert "has no MTP layers" in complaints(preflight(world, f"{key}=mtp"))["drafter", "fail"]
    assert "has no MTP layers" in complaints(preflight(world, *mtp))["drafter", "fail"]
    assert ("drafter", "warn") in complaints(preflight(world, *mtp, elsewhere=True))
    assert "hf download own/eagle3-er" in complaints(preflight(world, f"{key}=own/eagle3-er"))["drafter", "fail"]
    head = MODEL | {"num_hidden_layers": 1, "draft_vocab_size": 32000, "max_position_embeddings": 2048}
    (tmp_path / "head").mkdir()
    file = tmp_path / "head" / "config.json"
    file.write_text(json.dumps(head | {"hidden_size": 1024}))
    assert "hidden state" in complaints(preflight(world, f"{key}={file.parent}"))["drafter", "fail"]
    file.write_text(json.dumps(head))
    assert not complaints(preflight(world, f"{key}={file.parent}"))
    long = [f"{key}={file.parent}", "data.max_response_length=1536"]
    warned = complaints(preflight(world, *long))["drafter", "warn"]
    assert "longer than 2016 tokens, it drafts for none, and sequences of this run reach 2048" in warned
    assert not complaints(preflight(world, *long, f"{R}.max_model_len=2048")), "vLLM's limit is not the head's"
    layers = MODEL | {"num_nextn_predict_layers": 3}
    (tmp_path / "model" / "config.json").write_text(json.dumps(layers))
    found = only(preflight(world, f"{key}=mtp"), "drafter")
    assert found.detail == "mtp: mtp; 30 draft tokens instead of 32, a multiple of its 3 layers"


def test_a_drafter_takes_memory_of_the_device(world, tmp_path):
    """Its weights and its cache; an EAGLE-3 head has one layer, an output embedding and no input embedding."""
    file = tmp_path / "head" / "config.json"
    file.parent.mkdir()
    plain = preflight(world).estimate.serving

    def more(config, model=file.parent, **policy):
        file.write_text(json.dumps(config))
        (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | policy))
        found = preflight(world, f"{R}.custom.rhyme.drafting.model={model}").estimate.serving
        assert found.cache == plain.cache - (found.weights - plain.weights)
        return (found.weights - plain.weights) // 2, (found.bytes_per_token - plain.bytes_per_token) // 2

    small = Architecture.read(MODEL)
    tp = 2
    layer, keys = small.layer(tp), 2 * small.head_dim
    assert more(MODEL | {"num_hidden_layers": 12}) == (
        small.rank_parameters(tp) - 12 * layer,
        12 * keys,
    )
    hidden, head = small.hidden, MODEL | {"num_hidden_layers": 1}
    assert more(head) == (layer + 2 * hidden**2, keys)
    first = hidden * (small.query + 2 * small.key)
    eagle3 = layer + 3 * hidden**2 + (32000 * hidden + first) // tp
    assert more(head | {"draft_vocab_size": 32000}) == (eagle3, keys)
    assert more(head, "mtp", num_nextn_predict_layers=2) == (2 * (layer + 2 * hidden**2), 2 * keys)
    assert more({"num_hidden_layers": 1}) == (0, 0)
    warned = complaints(preflight(world, f"{R}.custom.rhyme.drafting.model={file.parent}"))
    assert "no hidden_size" in warned["drafter", "warn"] or "no 'num_attention_heads'" in warned["drafter", "warn"]


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{R}.custom.rhyme.drafting.model=mtp"],
        [f"{R}.mtp.enable=true", f"{R}.mtp.enable_rollout=true"],
        [f"{R}.mtp.enable=true", f"{R}.mtp.enable_rollout=true", f"{R}.custom.rhyme.drafting.enable=false"],
        ["actor_rollout_ref.model.lora_rank=32", f"{R}.custom.rhyme.drafting.max_tokens=8"],
    ],
)
def test_engines_that_keep_their_weights_asleep_need_host_memory(world, tmp_path, monkeypatch, overrides):
    """vLLM's sleep level 1, which verl takes with MTP and adapters, and rhyme with a drafter of the model."""
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | {"num_nextn_predict_layers": 1}))
    monkeypatch.setattr(checks, "detect_machine", lambda: replace(HERE, host_free=1 << 30))
    none, found = preflight(world), preflight(world, *overrides)
    assert none.estimate.host["sleeping engines"] == 0
    assert "keep their weights" not in only(none, "host memory").remedy
    assert "keep their weights" in only(found, "host memory").remedy
    weights = found.estimate.serving.weights
    assert weights > none.estimate.serving.weights
    assert found.estimate.host["sleeping engines"] == 8 * weights
    assert f"sleeping engines ({gib(8 * weights)})" in only(found, "host memory").detail
    for awake in ([f"{R}.free_cache_engine=false"], ["trainer.device=cpu"]):
        assert preflight(world, *overrides, *awake).estimate.host["sleeping engines"] == 0


def test_an_adapter_needs_its_folder(world, tmp_path):
    lora = ["actor_rollout_ref.model.lora_rank=8", f"actor_rollout_ref.model.lora_adapter_path={tmp_path}"]
    missing = f"lora_adapter_path={tmp_path}: no such folder, or no adapter_config.json in it"
    assert missing in complaints(preflight(world, *lora))["model", "fail"]
    (tmp_path / "adapter_config.json").write_text("{}")
    assert ("model", "fail") not in complaints(preflight(world, *lora))


def test_kv_blocks_in_host_memory_are_counted_for_each_replica(world, monkeypatch):
    monkeypatch.setattr(checks, "detect_machine", lambda: replace(HERE, host_free=1 << 30))
    none, found = preflight(world), preflight(world, f"{R}.engine_kwargs.vllm.kv_offloading_size=1.5")
    assert none.estimate.host["KV blocks"] == 0
    assert "kv_offloading_size" not in only(none, "host memory").remedy
    assert found.estimate.host["KV blocks"] == 4 * 3 << 29
    assert f"KV blocks ({gib(4 * 3 << 29)})" in only(found, "host memory").detail
    assert "kv_offloading_size" in only(found, "host memory").remedy


def test_merged_adapters_are_not_kept(world):
    lora = ["actor_rollout_ref.model.lora_rank=32", f"{R}.custom.rhyme.drafting.max_tokens=8"]
    for merged in (["actor_rollout_ref.model.lora.merge=true"], RELAY):
        assert preflight(world, *lora, *merged).estimate.host["sleeping engines"] == 0


def test_gpu_memory_is_set_detected_or_assumed(monkeypatch):
    def found(gpus, given):
        monkeypatch.setattr(machine, "_nvidia_smi", lambda: gpus)
        monkeypatch.setenv("GPU_MEMORY_GB", given) if given else monkeypatch.delenv("GPU_MEMORY_GB", raising=False)
        detected = machine.detect_machine()
        return detected.gpus, detected.gpu_bytes >> 30, detected.gpu_source

    assert found([], None) == (0, 80, "assumed")
    assert found([], "141") == (0, 141, "GPU_MEMORY_GB")
    assert found([80 << 30, 40 << 30], "141") == (2, 40, "nvidia-smi")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert found([80 << 30, 40 << 30], None) == (1, 40, "nvidia-smi")
    with pytest.raises(ValueError, match="GPU_MEMORY_GB='many'"):
        found([], "many")


# ---- the size of the history ----


def history_store(world, *overrides):
    return only(preflight(world, *overrides), "history store")


def test_size_of_the_history_and_visits_kept(world, tmp_path):
    rows = {"prompt": [str(i) for i in range(17_398)], "data_source": ["x"] * 17_398}
    pq.write_table(pa.table(rows), tmp_path / "train.parquet")
    dapo = [*world, f"{R}.n=16", "data.max_response_length=20480", "trainer.total_epochs=10"]
    found = history_store(dapo, f"{R}.max_model_len=20992", f"{HISTORY}.max_bytes={20 << 30}")
    assert found.status == "warn"
    assert "17398 prompts x 16 responses x 2560 to 10240 tokens (1/8 to 1/2 of max_response_length)" in found.detail
    low, high = (17_398 * 16 * (5.75 * mean + 27) / (1 << 30) for mean in (2560, 10240))
    assert f"= {4 * low:.1f} GiB to {4 * high:.1f} GiB" in found.detail
    assert f"kept: {14 / low:.1f} to {14 / high:.1f} of 4 visits" in found.detail
    assert "history.max_bytes" in found.remedy
    assert history_store(dapo, f"{HISTORY}.max_bytes=600000000000").status == "ok"
    few = history_store(dapo, "data.train_max_samples=100")
    assert few.status == "ok"
    assert "100 prompts" in few.detail
    assert "(null: the smaller of half the free disk and half the free memory" in few.detail


def test_repeated_prompts_are_counted_once(world, tmp_path, monkeypatch):
    """verl's DAPO-Math file repeats prompts. If reading takes too long, the count is extrapolated."""
    prompts = [[{"role": role, "content": f"{role} {i % 700}"} for role in ("system", "user")] for i in range(40_000)]
    columns = {"prompt": prompts, "data_source": ["x"] * 40_000}
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    once = history_store(world, "trainer.total_epochs=1").detail
    assert "700 prompts x 8 responses" in once
    assert "x 4 visits" in once
    monkeypatch.setattr(history_size, "_COUNTING_S", 0.0)
    assert "855 prompts" in history_store(world).detail, "700 of the first 32768 rows, and as many new ones of the rest"
    pq.write_table(pa.table({**columns, "images": [[{"bytes": b"x"}]] * 40_000}), tmp_path / "train.parquet")
    assert "40000 prompts x 8 responses" in history_store(world).detail, "images are not compared"


def test_a_rewrite_takes_the_disk_that_the_preflight_computes(world, tmp_path, monkeypatch):
    for free, short in ((16, True), (18, False)):
        monkeypatch.setattr(machine_checks, "free_disk", lambda folder, free=free: (folder, free << 30))
        found = complaints(preflight(world, f"{HISTORY}.max_bytes={10 << 30}"))
        assert ("17.0 GiB while it is rewritten" in found.get(("history store", "warn"), "")) == short
    bound, peaks, publish = 2 << 20, [], environment.publish

    def watched(path, folder):
        peaks.append(sum(file.stat().st_blocks * 512 for file in path.glob("env-*/*")))
        publish(path, folder)

    monkeypatch.setattr(environment, "publish", watched)
    with HistoryStore(tmp_path / "h", "a", bound, epochs=1) as store:
        for step in range(20):
            new = [Trajectory(bytes([step % 2, i] * 8), np.arange(8000), 0.0, 0, step // 2, i) for i in range(18)]
            assert store.append(new, step).dropped == 0
    assert 1.5 * bound < max(peaks) < 1.02 * history_size.PEAK * bound
