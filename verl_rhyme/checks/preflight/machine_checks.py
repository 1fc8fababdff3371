"""Checks of a config against this machine: model, GPUs, memory, disk. Sizes are estimates, and only warn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.checks import engine_packages
from verl_rhyme.checks.doctor import FAIL, OK, WARN, Check, problems, verdict
from verl_rhyme.checks.predicates import ADAPTER, MEGATRON_ADAPTER
from verl_rhyme.checks.preflight.estimate import RELAYED, Estimate, count, gib
from verl_rhyme.checks.preflight.machine import (
    ADDRESS,
    OBJECT_STORE,
    Machine,
    can_write,
    free_disk,
    in_cluster,
    object_store,
)
from verl_rhyme.checks.preflight.plan import RELAY_FOLDER, Plan
from verl_rhyme.config import CONFIG_PATH
from verl_rhyme.coordinator.ranker_service import unusable
from verl_rhyme.drafting.recurrent import undrafted
from verl_rhyme.history import history_folder
from verl_rhyme.planning import architecture
from verl_rhyme.planning.architecture import PUBLISHED, Architecture, UnknownArchitecture, is_hub_id
from verl_rhyme.weights import BACKEND as RELAY
from verl_rhyme.weights.claims import SHARED_MEMORY

#: Share of a GPU's memory above which an estimate with an error of 15 % may not fit.
TIGHT = 0.87

#: Files of which a tokenizer has at least one.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")

_R = "actor_rollout_ref.rollout"


def adapters(config: Any) -> Iterator[Check]:
    """Check the folders of LoRA adapters; the training workers load them."""
    for key, file in ((ADAPTER, "adapter_config.json"), (MEGATRON_ADAPTER, "")):
        path = str(OmegaConf.select(config, key) or "")
        if path and "://" not in path and not is_hub_id(path) and not (Path(path) / file).exists():
            detail = f"{key}={path}: no such folder{f', or no {file} in it' if file else ''}"
            yield Check("model", FAIL, detail, "set it to an adapter's folder, or to null")


def model(config: Any) -> tuple[list[Check], dict[str, Any], Architecture | None]:
    """Check the model's folder or hub id; also return the fields of ``config.json``, and the architecture if known."""
    name, key, path = "model", "actor_rollout_ref.model.path", str(config.actor_rollout_ref.model.path)
    if path.startswith("~") or path.endswith("/"):
        plain = Path(path).expanduser() if path.startswith(("~", "/")) else path.rstrip("/")
        return (
            [Check(name, FAIL, f"{key}={path}: verl accepts no ~ and no / at the end", f"set {key}={plain}")],
            {},
            None,
        )
    if "://" in path:
        return [Check(name, WARN, f"{path}: remote, not checked", "none needed if verl can read it")], {}, None
    file = architecture.find(path)
    if file is None and not is_hub_id(path):
        remedy = f"set {key} to a folder with config.json, or to a hub id (owner/name)"
        return [Check(name, FAIL, f"{path}: no such folder, or no config.json in it", remedy)], {}, None
    if file is None:
        fields = PUBLISHED.get(path, {})
        known = Architecture.read(fields) if fields else None
        return [not_cached(name, path, "" if known else "; no memory estimate before that")], fields, known
    try:
        fields = architecture.read_json(file)
    except ValueError as error:
        return [Check(name, FAIL, f"{file}: {error}", "download the model again")], {}, None
    checks = [] if is_hub_id(path) else list(_incomplete(config, file.parent))
    try:
        if sign := undrafted(fields):
            raise UnknownArchitecture(f"no estimate for recurrent layers ({sign}) and their states")
        shape = Architecture.read(fields)
    except UnknownArchitecture as error:
        remedy = "check its memory by hand: a dense model of that size needs as much"
        return [*checks, Check(name, WARN, f"{path}: {error}", remedy)], fields, None
    return [*checks, Check(name, OK, f"{path}: {shape.name}, {count(shape.parameters)} parameters")], fields, shape


def not_cached(name: str, path: str, without: str) -> Check:
    """Return the finding of a hub id that is not on this machine; ``without``: what is not known until it is."""
    offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
    way = "HF_HUB_OFFLINE is set" if offline else "the run downloads it"
    detail = f"{path} is not in the local hub cache: {way}{without}"
    return Check(name, FAIL if offline else WARN, detail, f"hf download {path}")


def _incomplete(config: Any, folder: Path) -> Iterator[Check]:
    separate = config.actor_rollout_ref.model.get("tokenizer_path")
    tokenizer = Path(str(separate)).expanduser() if separate else folder
    own = (*tokenizer.glob("*.tiktoken"), *tokenizer.glob("tokenization_*.py"))
    has_one = bool(own) or any((tokenizer / name).is_file() for name in TOKENIZERS)
    yield from problems(
        "model",
        (
            tokenizer.is_dir() and not has_one,  # not a folder: a hub id
            f"{tokenizer}: no tokenizer ({', '.join(TOKENIZERS)})",
            "copy the tokenizer files into that folder, or set actor_rollout_ref.model.tokenizer_path",
        ),
    )
    if OmegaConf.select(config, "actor_rollout_ref.actor.megatron.use_dist_checkpointing"):
        return  # Megatron loads the weights from dist_checkpointing_path
    indices = [*folder.glob("*.safetensors.index.json")] or [*folder.glob("*.bin.index.json")]
    shards = {shard for index in indices for shard in architecture.read_json(index).get("weight_map", {}).values()}
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing or not (shards or any((*folder.glob("*.safetensors"), *folder.glob("*.bin")))):
        what = missing[0] if missing else "*.safetensors or *.bin"
        detail = f"{folder}: weight files are missing, such as {what}"
        yield Check("model", FAIL, detail, "download the model again, or correct the path")


def engine(config: Any, plan: Plan, imports: bool) -> list[Check]:
    """Check the packages of the training engine; ``imports`` (15 s) finds broken ones as well."""
    if not (packages := _engine_packages(config, plan)):
        return []
    missing = engine_packages.missing(packages) if imports else engine_packages.absent(packages)
    passed = Check("training engine", OK, f"{plan.strategy}: {', '.join(package.module for package in packages)}")
    wrong = [Check("training engine", FAIL, detail, package.remedy) for package, detail in missing.items()]
    return wrong or [passed]


def _engine_packages(config: Any, plan: Plan) -> list[engine_packages.Package]:
    ref, cpu = config.actor_rollout_ref, plan.device == "cpu"
    if plan.strategy in ("fsdp", "fsdp2"):
        attention = (ref.model.get("override_config") or {}).get("attn_implementation", "flash_attention_2")
        return [engine_packages.FSDP_ATTENTION] if attention == "flash_attention_2" and not cpu else []
    if plan.strategy != "megatron":
        return []
    megatron = ref.actor.megatron
    if cpu:  # testing/megatron_cpu.py
        return [engine_packages.MEGATRON, engine_packages.MBRIDGE]
    bridge = engine_packages.MBRIDGE if megatron.get("vanilla_mbridge") else engine_packages.MEGATRON_BRIDGE
    flash = (megatron.get("override_transformer_config") or {}).get("attention_backend") == "flash"
    attention = [engine_packages.MEGATRON_ATTENTION] * flash
    return [engine_packages.MEGATRON, bridge, engine_packages.TRANSFORMER_ENGINE, *attention]


def gpus(plan: Plan, machine: Machine, address: str | None) -> Iterator[Check]:
    """Check that this machine has the GPUs of one node, and that Ray connects several; ``address``: of its cluster."""
    if plan.device == "cpu":
        yield Check("GPUs", OK, f"trainer.device=cpu: {plan.gpus_per_node} logical")
        return
    yield from problems(
        "GPUs",
        (
            plan.train_gpus > plan.gpus_per_node and not in_cluster(address),
            f"trainer.nnodes={plan.train_gpus // plan.gpus_per_node}, but no Ray cluster is found here",
            "connect the nodes first: ray start --head, and ray start --address=HEAD:6379",
        ),
        status=WARN,
    )
    yield verdict(
        "GPUs",
        machine.gpus >= plan.gpus_per_node,
        f"{machine.gpus} visible on this machine, trainer.n_gpus_per_node={plan.gpus_per_node}",
        "lower it, or start on a node with that many GPUs (recipes/run_tiny_cpu.sh trains without one)",
        otherwise=FAIL if machine.gpus else WARN,  # GPUs of other makers are not counted
    )
    yield from problems(
        "GPU memory",
        (
            machine.gpu_source == "assumed",
            f"no GPU found: {gib(machine.gpu_bytes)} per GPU is assumed",
            "set GPU_MEMORY_GB to the memory of the run's GPUs, in GiB",
        ),
        status=WARN,
    )


def gpu_memory(found: Estimate, plan: Plan) -> Iterator[Check]:
    """Check the phase of highest memory against a GPU, and vLLM's share against its weights and one request: it does
    not start without KV cache for one of ``max_model_len``. Without GPUs, only this is checked.
    """
    phase, peak = found.peak
    share = peak / found.gpu_bytes
    if plan.device != "cpu":
        detail = f"{phase}: {gib(peak)} of {gib(found.gpu_bytes)} ({share:.0%}), estimated"
        yield verdict("GPU memory", share <= TIGHT, detail, _lighter(phase, plan), WARN)
    serving = found.serving
    detail = (
        f"{serving.tokens} tokens per replica, {serving.sequences:.1f} requests of {plan.rollout.longest} tokens "
        "at once"
    )
    if serving.state_bytes:
        detail += (
            f"; the states of a request take {gib(serving.state_bytes)} with {serving.draft_tokens} draft tokens: "
            f"{serving.undrafted:.1f} requests without drafts"
        )
    if serving.tokens < plan.rollout.max_model_len:
        detail = (
            f"vLLM's share of {gib(serving.share)} leaves {serving.tokens} tokens after weights and activations "
            f"({gib(serving.weights + serving.activations)}), and does not hold one request of "
            f"{plan.rollout.max_model_len}"
        )
    remedy = f"raise {_R}.gpu_memory_utilization or tensor_model_parallel_size, or lower {_R}.max_model_len"
    if serving.state_bytes:
        remedy += f", or {CONFIG_PATH}.drafting.max_tokens"
    yield verdict("KV cache", serving.tokens >= plan.rollout.max_model_len, detail, remedy, WARN)


def _lighter(phase: str, plan: Plan) -> str:
    if phase == "rollout" and plan.standalone:
        return "set actor_rollout_ref.hybrid_engine=false: the training GPUs then hold no engine"
    if phase.startswith("rollout"):
        return f"lower {_R}.gpu_memory_utilization, or offload the actor (param_offload, optimizer_offload)"
    return (
        "use more tensor parallelism or GPUs, full recomputation, or fewer tokens per micro-batch "
        "(ppo_max_token_len_per_gpu, ppo_micro_batch_size_per_gpu)"
    )


def host_memory(found: Estimate, config: Any, machine: Machine) -> Check:
    """Check offloaded states, loading, texts for drafts, KV blocks, sleeping engines, relay and Ray's object store."""
    ray = object_store(OmegaConf.select(config, OBJECT_STORE), machine.host_bytes)
    needed = sum(found.host.values()) + ray
    remedy = (
        "offload less, lower +ray_kwargs.ray_init.object_store_memory or drafting.history_memory, or use a larger node"
    )
    if found.host["KV blocks"]:
        remedy += "; engine_kwargs.vllm.kv_offloading_size is GiB of each replica"
    if found.host["sleeping engines"]:
        remedy += "; engines with a drafter of the model (drafting.model, mtp.enable_rollout) or LoRA adapters "
        remedy += "(unless actor_rollout_ref.model.lora.merge=true) keep their weights on the host while they sleep"
    return verdict(
        "host memory",
        needed <= machine.host_free,
        f"{gib(needed)} needed, {gib(machine.host_free)} free: offloaded states, model loading, texts for drafts "
        f"({gib(found.host['texts for drafts'])}), KV blocks ({gib(found.host['KV blocks'])}), "
        f"weights of sleeping engines ({gib(found.host['sleeping engines'])}), "
        f"versions of the weights in the relay ({gib(found.host['relay'])}) "
        f"and Ray's object store ({gib(ray)})",
        remedy,
        WARN,
    )


def disk(config: Any, found: Estimate | None, history: int) -> Iterator[Check]:
    """Check the disk space for checkpoints, each with a copy of at most ``history`` bytes of the history."""
    trainer, path = config.trainer, Path(str(config.trainer.default_local_dir)).expanduser()
    if not can_write(path):
        remedy = "set it to a folder that you can write"
        yield Check("checkpoints", FAIL, f"trainer.default_local_dir={path} cannot be written", remedy)
        return
    yield from problems(
        "checkpoints",
        (
            not path.is_absolute() and in_cluster(OmegaConf.select(config, ADDRESS)),
            f"trainer.default_local_dir={path} is relative: each node takes it from the folder of its `ray start`",
            "set an absolute path that all nodes share",
        ),
        status=WARN,
    )
    if int(trainer.save_freq) <= 0 or found is None:
        return
    folder, free = free_disk(path)
    keep = max(0, int(trainer.get("max_actor_ckpt_to_keep") or 0))
    many = (keep or 1) + 1  # verl writes the new one before it deletes the oldest
    needed = many * (found.checkpoint + history)
    yield verdict(
        "checkpoints",
        bool(keep and free >= needed),
        f"{folder}: {gib(free)} free, {gib(needed)} for {many} checkpoints of {gib(found.checkpoint)} and up to "
        f"{gib(history)} of history" + ("" if keep else "; verl keeps all checkpoints"),
        "free disk space, set trainer.max_actor_ckpt_to_keep, or set trainer.default_local_dir to another disk",
        WARN,
    )


def ranker(plan: Plan) -> Iterator[Check]:
    if plan.rhyme is not None and plan.rhyme.lengths.ranker is not None:
        problem, _, remedy = unusable(plan.rhyme.lengths.ranker, None).partition(": ")
        yield verdict("ranker", not problem, problem or plan.rhyme.lengths.ranker, remedy)


def weights(config: Any, plan: Plan, found: Estimate | None) -> Iterator[Check]:
    """Check the room for two versions of the weights in the relay's folder. The actor's node also holds a third one
    while an engine or another site still uses an old version.
    """
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    if engine.backend != RELAY:
        return
    setting = OmegaConf.select(config, RELAY_FOLDER)
    folder, free = free_disk(Path(str(setting)) if setting else SHARED_MEMORY)
    one = plan.sent_bytes * found.parameters if found else 0
    writable = os.access(folder, os.W_OK)
    yield verdict(
        "weights",
        writable and free > RELAYED * one,
        f"{folder}: {gib(free)} free, shared with Ray's object store if that is in /dev/shm; the relay needs "
        f"{gib(2 * one)} for two versions of the weights, {gib(RELAYED * one)} on the actor's node",
        "start the container with a larger --shm-size, or set a writable folder with more room: "
        f"{_R}.checkpoint_engine.engine_kwargs.{RELAY}.folder",
        otherwise=WARN if writable else FAIL,
    )


def history_dir(plan: Plan) -> Path:
    """Return ``history.dir``, or the folder of the user's histories."""
    folder = None if plan.rhyme is None else plan.rhyme.history.dir
    return history_folder.place() if folder is None else Path(folder).expanduser()
