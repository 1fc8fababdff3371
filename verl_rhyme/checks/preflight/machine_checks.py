"""What would stop a run on this machine: data, model, GPUs, memory, disk."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import ListConfig, OmegaConf

from verl_rhyme import config as rhyme_config
from verl_rhyme.checks import engine_packages
from verl_rhyme.checks.doctor import FAIL, OK, WARN, Check
from verl_rhyme.checks.preflight import model_folder
from verl_rhyme.checks.preflight.architecture import Architecture, UnknownArchitecture
from verl_rhyme.checks.preflight.estimate import Estimate, count, gib
from verl_rhyme.checks.preflight.machine import Machine, can_write, free_disk
from verl_rhyme.checks.preflight.plan import Plan
from verl_rhyme.config import ConfigError, config_tree
from verl_rhyme.coordinator.ranker_service import lacking
from verl_rhyme.weights import BACKEND as RELAY
from verl_rhyme.weights.folder import SHARED_MEMORY

#: Which argument of ``examples.data.prepare`` makes a file, by its name.
PREPARED = {
    r"dapo-math-17k": "dapo",
    r"aime-2024": "aime",
    r"math-500": "math500",
    r"gsm8k-.+": "gsm8k",
    r"amc-2023": "amc",
    r"minerva": "minerva",
    r"olympiad-bench": "olympiad",
    r"kk-.+": "kk",
}

#: Characters of a JSON file that are read.
_LOOKED_AT = 1 << 16

#: A share of a GPU's memory above which an estimate within 15 % may not fit after all.
TIGHT = 0.87

_R = "actor_rollout_ref.rollout"


def datasets(config: Any) -> Iterator[Check]:
    """Each file of ``data.train_files`` and ``data.val_files`` is one that verl reads, with the prompt's column."""
    column = config.data.get("prompt_key") or "prompt"
    own = OmegaConf.select(config, "data.custom_cls.path")  # a dataset class of the user's own reads what it likes
    for option in ("train_files", "val_files"):
        listed = config.data.get(option) or []
        for file in listed if isinstance(listed, list | tuple | ListConfig) else [listed]:
            yield _dataset(f"data.{option}", str(file), column, own)


def _dataset(name: str, file: str, column: str, own: str | None) -> Check:
    import pyarrow
    import pyarrow.parquet as pq

    if "://" in file:
        return Check(name, WARN, f"{file}: remote, not looked at", "none needed if verl can read it")
    path = Path(file).expanduser()
    if not path.is_file():
        return Check(name, FAIL, f"no file {path}", _prepare(path))
    if own:
        return Check(name, OK, f"{path}: read by data.custom_cls.path={own}, not looked into")
    if path.suffix in (".json", ".jsonl"):
        return _json_dataset(name, path, column)
    if path.suffix != ".parquet":
        remedy = "convert it, or set data.custom_cls to a dataset class of your own that reads it"
        return Check(name, FAIL, f"{path}: verl reads .parquet, .json and .jsonl only", remedy)
    try:
        footer = pq.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        return Check(
            name, FAIL, f"{path} is no readable parquet file: {error}", f"convert it, or delete it; {_prepare(path)}"
        )
    if column not in footer.schema_arrow.names:
        return _no_column(name, path, column, footer.schema_arrow.names)
    rows = footer.metadata.num_rows
    return Check(name, OK if rows else FAIL, f"{path}: {rows} prompts", "" if rows else _prepare(path))


def _json_dataset(name: str, path: Path, column: str) -> Check:
    """By its first object; a file may be one list of them, which is not read to its end."""
    with path.open(errors="replace") as file:
        begin = file.read(_LOOKED_AT).lstrip()
    try:
        first, _ = json.JSONDecoder().raw_decode(begin.lstrip("[ \n"))
    except ValueError:
        if begin.startswith(("{", "[")) and len(begin) > _LOOKED_AT // 2:  # its first object is a long one
            return Check(name, OK, f"{path}: JSON")
        first = None
    if not isinstance(first, dict):
        return Check(name, FAIL, f"{path} holds no JSON object, one a line or in a list", _prepare(path))
    return Check(name, OK, f"{path}: JSON") if column in first else _no_column(name, path, column, list(first))


def _no_column(name: str, path: Path, column: str, there: list[str]) -> Check:
    detail = f"{path} has no column {column!r}, only {', '.join(there)}"
    return Check(name, FAIL, detail, "set data.prompt_key, or convert the file")


def _prepare(path: Path) -> str:
    if path.parent.name == "eval":  # the sets together, with how often each problem is answered
        return f"python -m examples.data.prepare eval --out {path.parent.parent}"
    for pattern, argument in PREPARED.items():
        if re.fullmatch(pattern, path.stem):
            return f"python -m examples.data.prepare {argument} --out {path.parent}"
    if "tiny_cpu" in path.parts:
        return "none needed with recipes/run_tiny_cpu.sh, which makes it; else make or download the dataset"
    return "make or download the dataset, or mend the path"


def model(config: Any) -> tuple[list[Check], dict[str, Any], Architecture | None]:
    """The model's folder or hub id: findings, the fields of its ``config.json``, and its shape where that is known."""
    name, path = "model", str(config.actor_rollout_ref.model.path)
    file = model_folder.find(path)
    if file is None:
        if model_folder.is_hub_id(path):
            offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
            detail = f"{path} is not in the local hub cache: " + (
                "HF_HUB_OFFLINE is set" if offline else "verl downloads it"
            )
            fields = model_folder.PUBLISHED.get(path, {})
            known = Architecture.read(fields) if fields else None
            if known is not None:
                detail += f"; counted by its published shape, {count(known.parameters)} parameters"
            return [Check(name, FAIL if offline else WARN, detail, f"hf download {path}")], fields, known
        remedy = "set actor_rollout_ref.model.path to a folder with config.json, or to a hub id (owner/name)"
        return [Check(name, FAIL, f"{path}: no such folder with a config.json", remedy)], {}, None
    try:
        fields = model_folder.read(file)
    except ValueError as error:
        return [Check(name, FAIL, f"{file}: {error}", "download the model again")], {}, None
    lacks = [] if model_folder.is_hub_id(path) else list(_incomplete(config, file.parent))
    try:
        shape = Architecture.read(fields)
    except UnknownArchitecture as error:
        return (
            [
                *lacks,
                Check(
                    name,
                    WARN,
                    f"{path}: {error}",
                    "none needed where verl and vLLM have the model: only the estimate is missing",
                ),
            ],
            fields,
            None,
        )
    return [*lacks, Check(name, OK, f"{path}: {shape.name}, {count(shape.parameters)} parameters")], fields, shape


def _incomplete(config: Any, folder: Path) -> Iterator[Check]:
    """What verl reads of a model's folder, and is not there."""
    elsewhere = config.actor_rollout_ref.model.get("tokenizer_path")
    tokenizer = Path(str(elsewhere)).expanduser() if elsewhere else folder
    if tokenizer.is_dir() and not model_folder.has_tokenizer(tokenizer):  # else it is a hub id
        detail = f"{tokenizer}: no tokenizer ({', '.join(model_folder.TOKENIZERS)})"
        remedy = "copy the tokenizer's files there, or set actor_rollout_ref.model.tokenizer_path"
        yield Check("model", FAIL, detail, remedy)
    if OmegaConf.select(config, "actor_rollout_ref.actor.megatron.use_dist_checkpointing"):
        return  # weights come from there
    if lacking := model_folder.lacking_weights(folder):
        yield Check("model", FAIL, f"{folder}: {lacking}", "download the model again, or mend the path")


def reward_function(config: Any, load: bool) -> Iterator[Check]:
    """Its file, and that verl can load it: a run waits for ever for reward workers that could not.

    Args:
        config: The resolved config.
        load: Let verl load it, in a process of its own (some 10 s).
    """
    name, key = "reward function", "reward.custom_reward_function"
    path, function = (str(OmegaConf.select(config, f"{key}.{part}") or "") for part in ("path", "name"))
    if not path or "://" in path:
        return
    if not Path(path).expanduser().is_file():
        yield Check(name, FAIL, f"no file {path}", f"mend {key}.path")
        return
    if load:
        code = "import sys; from verl.utils.import_utils import load_extern_object as load; load(*sys.argv[1:])"
        command = [sys.executable, "-c", code, path, function]
        loaded = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if loaded.returncode:
            error = (loaded.stderr.strip() or f"exit code {loaded.returncode}").splitlines()[-1]
            yield Check(name, FAIL, f"{path}: {function} cannot be loaded: {error}", f"mend the file, or {key}")
            return
    yield Check(name, OK, path)


def engine(config: Any, plan: Plan, load: bool) -> Iterator[Check]:
    """What the chosen training engine imports on a GPU can be imported.

    Args:
        config: The resolved config.
        plan: What verl makes of it.
        load: Import it, in a process of its own (some 15 s); else look whether it is installed.
    """
    name = "training engine"
    packages = _engine_packages(config, plan)
    if plan.device == "cpu" or not packages:
        return
    missing = engine_packages.missing(packages, load)
    for package, error in missing:
        yield Check(name, FAIL, f"{package.module}: {error}; used for: {package.used_for}", package.remedy)
    if not missing:
        yield Check(name, OK, f"{plan.strategy}: {', '.join(package.module for package in packages)}")


def _engine_packages(config: Any, plan: Plan) -> list[engine_packages.Package]:
    ref = config.actor_rollout_ref
    if plan.strategy == "megatron":
        megatron = ref.actor.megatron
        bridge = engine_packages.MBRIDGE if megatron.get("vanilla_mbridge") else engine_packages.MEGATRON_BRIDGE
        found = [engine_packages.MEGATRON, bridge, engine_packages.TRANSFORMER_ENGINE]
        if (megatron.get("override_transformer_config") or {}).get("attention_backend") == "flash":
            found.append(engine_packages.MEGATRON_ATTENTION)
        return found
    attention = (ref.model.get("override_config") or {}).get("attn_implementation", "flash_attention_2")
    if plan.strategy in ("fsdp", "fsdp2") and attention == "flash_attention_2":
        return [engine_packages.FSDP_ATTENTION]
    return []


def gpus(plan: Plan, machine: Machine) -> Iterator[Check]:
    """As many GPUs on this machine as a node shall have."""
    name = "GPUs"
    if plan.device == "cpu":
        yield Check(name, OK, f"trainer.device=cpu: {plan.gpus_per_node} logical")
        return
    ok = machine.gpus >= plan.gpus_per_node
    detail = f"{machine.gpus} on this machine, trainer.n_gpus_per_node={plan.gpus_per_node}"
    yield Check(name, OK if ok else FAIL, detail, "" if ok else "lower it, or start on the node that has them")
    if machine.gpu_source == "assumed":
        detail = f"none seen: {gib(machine.gpu_bytes)} each is assumed"
        yield Check("GPU memory", WARN, detail, "set GPU_MEMORY_GB to what the run's GPUs have")


def gpu_memory(found: Estimate, plan: Plan) -> Iterator[Check]:
    """The fullest phase against a GPU; vLLM's share against its weights and one request of ``max_model_len``, without
    room for which vLLM does not start."""
    name, cpu = "GPU memory", plan.device == "cpu"
    phase, peak = found.peak
    if cpu:
        name, (phase, peak) = "memory", _on_one_host(found, plan)
    share, status = peak / found.gpu_bytes, OK
    if share > TIGHT:
        status = FAIL if share > 1 else WARN
    detail = f"{phase}: {gib(peak)} of {gib(found.gpu_bytes)} ({share:.0%}), estimated"
    yield Check(name, status, detail, "" if status == OK else _lighter(phase, plan))
    serving = found.serving
    if serving.cache <= 0:
        detail = (
            f"{gib(serving.share)} do not hold weights and activations ({gib(serving.weights + serving.activations)})"
        )
        yield Check("KV cache", FAIL, detail, f"raise {_R}.gpu_memory_utilization or tensor_model_parallel_size")
    elif serving.tokens < plan.rollout.max_model_len:
        detail = f"{serving.tokens} tokens do not hold one request of {plan.rollout.max_model_len}"
        yield Check("KV cache", FAIL, detail, f"raise {_R}.gpu_memory_utilization or lower {_R}.max_model_len")
    else:
        requests = f"{serving.sequences:.1f} requests of {plan.rollout.longest} tokens at once"
        detail = f"{serving.tokens} tokens a replica, {requests}"
        yield Check("KV cache", OK, detail)


def _on_one_host(found: Estimate, plan: Plan) -> tuple[str, int]:
    """The fullest phase of ranks that share a machine, with the engines that run beside it, if any; and its bytes."""
    beside = found.phases.get("rollout pool")
    if beside is None:
        phase, peak = found.peak
        return phase, peak * plan.gpus_per_node
    training = {name: phase for name, phase in found.phases.items() if phase is not beside}
    phase, peak = replace(found, phases=training).peak
    return f"{phase} beside the rollout pool", peak * plan.gpus_per_node + beside.total * plan.rollout_gpus


def _lighter(phase: str, plan: Plan) -> str:
    if phase == "rollout" and plan.standalone:
        return (
            "set actor_rollout_ref.hybrid_engine=false: rollout has GPUs of its own, and those that train then hold no "
            "engine"
        )
    if phase.startswith("rollout"):
        return f"lower {_R}.gpu_memory_utilization, or offload the actor (param_offload, optimizer_offload)"
    return (
        "more tensor parallelism or GPUs, full recomputation, or fewer tokens a micro-batch "
        "(ppo_max_token_len_per_gpu, ppo_micro_batch_size_per_gpu)"
    )


def host_memory(found: Estimate, config: Any, machine: Machine) -> Iterator[Check]:
    """Offloaded states, the loading model and Ray's object store against free host memory."""
    store = OmegaConf.select(config, "ray_kwargs.ray_init.object_store_memory")
    # Ray takes 30 % of the memory unless told otherwise, 200 GB at most
    ray = int(store) if store else min(int(0.3 * machine.host_bytes), 200_000_000_000)
    needed = sum(found.host.values()) + ray
    ok = needed <= machine.host_free
    detail = (
        f"{gib(needed)} needed, {gib(machine.host_free)} free: offloading, loading and Ray's object store ({gib(ray)})"
    )
    remedy = "" if ok else "offload less, lower +ray_kwargs.ray_init.object_store_memory, or use a larger node"
    # the object store is filled as needed only
    yield Check("host memory", OK if ok else FAIL if needed - ray > machine.host_free else WARN, detail, remedy)


def disk(config: Any, found: Estimate | None, history: tuple[int, int]) -> Iterator[Check]:
    """Room for checkpoints.

    Args:
        config: The resolved config.
        found: What the model takes.
        history: Bytes of the history's copy in each, at least and at most.
    """
    trainer = config.trainer
    if int(trainer.save_freq) > 0 and found:
        folder, free = free_disk(Path(str(trainer.default_local_dir)).expanduser())
        keep = trainer.get("max_actor_ckpt_to_keep")
        many = int(keep or 1) + 1  # the new one is written before the oldest goes
        least, needed = (many * (found.checkpoint + copy) for copy in history)
        every = "" if keep else "; all are kept (max_actor_ckpt_to_keep is null)"
        status = FAIL if free < least else OK if keep and free >= needed else WARN
        remedy = "" if status == OK else "set trainer.max_actor_ckpt_to_keep, or trainer.default_local_dir elsewhere"
        copies = f" and {gib(history[0])} to {gib(history[1])} of history" if any(history) else ""
        detail = f"{folder}: {gib(free)} free, {gib(needed)} for {many} of {gib(found.checkpoint)}{copies}{every}"
        yield Check("checkpoints", status, detail, remedy)


def ranker(config: Any) -> Iterator[Check]:
    """The length ranker has what it is trained with."""
    try:
        tree = config_tree.from_verl(config)
    except ConfigError:
        return  # the check of the rhyme tree tells
    if tree is None or tree.lengths.ranker.kind is None:
        return
    if problem := lacking(tree.lengths.ranker, None):
        detail, _, remedy = problem.partition(": ")
        yield Check("ranker", FAIL, detail, remedy)
    else:
        yield Check("ranker", OK, f"{tree.lengths.ranker.kind}, alongside the run")


def weights(config: Any, plan: Plan, found: Estimate | None) -> Iterator[Check]:
    """Room for versions of the weights in the relay's folder: two, and on the actor's node a third while an engine or
    another site is still at an old one.
    """
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    if engine.backend != RELAY:
        return
    told = OmegaConf.select(engine, f"engine_kwargs.{RELAY}.folder")
    folder, free = free_disk(Path(str(told)) if told else SHARED_MEMORY)
    one = plan.sent_bytes * found.parameters if found else 0  # where the model is not known, anything at all
    fits = int(free > 2 * one) + int(free > 3 * one) if os.access(folder, os.W_OK) else 0
    detail = (
        f"{folder}: {gib(free)} free, beside Ray's object store where that lies there; {gib(2 * one)} for two versions "
        f"of the weights, {gib(3 * one)} for three on the actor's node while an engine or site is behind, by the relay"
    )
    remedy = "give the container a larger --shm-size, or name a folder with room that can be written: "
    yield Check(
        "weights",
        (FAIL, WARN, OK)[fits],
        detail,
        "" if fits == 2 else f"{remedy}{_R}.checkpoint_engine.engine_kwargs.{RELAY}.folder",
    )


def history_folder(config: Any) -> Iterator[Check]:
    """It can be made and written; where the doctor looks, it tries."""
    wanted = history_dir(config)
    if wanted is not None and not can_write(Path(wanted)):
        remedy = "set history.dir to a folder that can be written"
        yield Check("history folder", FAIL, f"{wanted}: cannot be made or written", remedy)


def history_dir(config: Any) -> str | None:
    found = OmegaConf.select(config, f"{rhyme_config.CONFIG_PATH}.history.dir")
    return None if found is None else str(Path(str(found)).expanduser())
