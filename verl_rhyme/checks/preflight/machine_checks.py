"""Checks of a config against this machine: data, model, GPUs, memory, disk."""

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
from verl_rhyme.coordinator.ranker_service import missing_requirement
from verl_rhyme.weights import BACKEND as RELAY
from verl_rhyme.weights.claims import SHARED_MEMORY

#: Argument of ``examples.data.prepare`` that creates a file, by the pattern of its name.
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

#: Characters that are read of a JSON file.
_READ_CHARACTERS = 1 << 16

#: Share of a GPU's memory above which an estimate with an error of 15 % may not fit.
TIGHT = 0.87

_R = "actor_rollout_ref.rollout"


def datasets(config: Any) -> Iterator[Check]:
    """Check that verl can read the files of ``data.train_files`` and ``data.val_files`` and finds the prompt column."""
    column = config.data.get("prompt_key") or "prompt"
    own = OmegaConf.select(config, "data.custom_cls.path")  # a custom dataset class reads any format
    for option in ("train_files", "val_files"):
        listed = config.data.get(option) or []
        for file in listed if isinstance(listed, list | tuple | ListConfig) else [listed]:
            yield _dataset(f"data.{option}", str(file), column, own)


def _dataset(name: str, file: str, column: str, own: str | None) -> Check:
    import pyarrow
    import pyarrow.parquet as pq

    if "://" in file:
        return Check(name, WARN, f"{file}: remote, not checked", "none needed if verl can read it")
    path = Path(file).expanduser()
    if not path.is_file():
        return Check(name, FAIL, f"no file {path}", _prepare(path))
    if own:
        return Check(name, OK, f"{path}: content not checked, data.custom_cls.path={own} reads it")
    if path.suffix in (".json", ".jsonl"):
        return _json_dataset(name, path, column)
    if path.suffix != ".parquet":
        remedy = "convert it, or set data.custom_cls to a dataset class that reads it"
        return Check(name, FAIL, f"{path}: verl reads .parquet, .json and .jsonl only", remedy)
    try:
        footer = pq.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        return Check(
            name, FAIL, f"{path} is not a readable parquet file: {error}", f"convert or delete it; {_prepare(path)}"
        )
    if column not in footer.schema_arrow.names:
        return _no_column(name, path, column, footer.schema_arrow.names)
    rows = footer.metadata.num_rows
    return Check(name, OK if rows else FAIL, f"{path}: {rows} prompts", "" if rows else _prepare(path))


def _json_dataset(name: str, path: Path, column: str) -> Check:
    """Check the first object of a JSON file, which may be a list or have one object a line."""
    with path.open(errors="replace") as file:
        begin = file.read(_READ_CHARACTERS).lstrip()
    try:
        first, _ = json.JSONDecoder().raw_decode(begin.lstrip("[ \n"))
    except ValueError:
        if begin.startswith(("{", "[")) and len(begin) > _READ_CHARACTERS // 2:  # an object longer than that
            return Check(name, OK, f"{path}: JSON")
        first = None
    if not isinstance(first, dict):
        return Check(name, FAIL, f"{path} is neither a list of JSON objects nor has one a line", _prepare(path))
    return Check(name, OK, f"{path}: JSON") if column in first else _no_column(name, path, column, list(first))


def _no_column(name: str, path: Path, column: str, present: list[str]) -> Check:
    detail = f"{path} has no column {column!r}, only {', '.join(present)}"
    return Check(name, FAIL, detail, "set data.prompt_key, or convert the file")


def _prepare(path: Path) -> str:
    if path.parent.name == "eval":  # all evaluation sets together, with the number of samples per problem
        return f"python -m examples.data.prepare eval --out {path.parent.parent}"
    for pattern, argument in PREPARED.items():
        if re.fullmatch(pattern, path.stem):
            return f"python -m examples.data.prepare {argument} --out {path.parent}"
    if "tiny_cpu" in path.parts:
        return "none needed with recipes/run_tiny_cpu.sh, which creates it; else create or download the dataset"
    return "create or download the dataset, or correct the path"


def model(config: Any) -> tuple[list[Check], dict[str, Any], Architecture | None]:
    """Check the model's folder or hub id.

    Returns:
        The findings, the fields of ``config.json``, and the architecture, ``None`` where it is unknown.
    """
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
                detail += f"; its published shape has {count(known.parameters)} parameters"
            return [Check(name, FAIL if offline else WARN, detail, f"hf download {path}")], fields, known
        remedy = "set actor_rollout_ref.model.path to a folder with config.json, or to a hub id (owner/name)"
        return [Check(name, FAIL, f"{path}: no such folder, or no config.json in it", remedy)], {}, None
    try:
        fields = model_folder.read(file)
    except ValueError as error:
        return [Check(name, FAIL, f"{file}: {error}", "download the model again")], {}, None
    missing = [] if model_folder.is_hub_id(path) else list(_incomplete(config, file.parent))
    try:
        shape = Architecture.read(fields)
    except UnknownArchitecture as error:
        return (
            [
                *missing,
                Check(
                    name,
                    WARN,
                    f"{path}: {error}",
                    "none needed if verl and vLLM support the model: only the memory estimate is missing",
                ),
            ],
            fields,
            None,
        )
    return [*missing, Check(name, OK, f"{path}: {shape.name}, {count(shape.parameters)} parameters")], fields, shape


def _incomplete(config: Any, folder: Path) -> Iterator[Check]:
    """Yield findings for missing tokenizer and weight files of a model folder."""
    separate = config.actor_rollout_ref.model.get("tokenizer_path")
    tokenizer = Path(str(separate)).expanduser() if separate else folder
    if tokenizer.is_dir() and not model_folder.has_tokenizer(tokenizer):  # not a folder: a hub id
        detail = f"{tokenizer}: no tokenizer ({', '.join(model_folder.TOKENIZERS)})"
        remedy = "copy the tokenizer files into that folder, or set actor_rollout_ref.model.tokenizer_path"
        yield Check("model", FAIL, detail, remedy)
    if OmegaConf.select(config, "actor_rollout_ref.actor.megatron.use_dist_checkpointing"):
        return  # Megatron loads the weights from dist_checkpointing_path
    if problem := model_folder.lacking_weights(folder):
        yield Check("model", FAIL, f"{folder}: {problem}", "download the model again, or correct the path")


def reward_function(config: Any, load: bool) -> Iterator[Check]:
    """Check that verl can load the reward function; otherwise, a run waits for its reward workers forever.

    Args:
        config: Resolved config.
        load: Whether verl loads the function in a subprocess (about 10 s); else only its file is checked.
    """
    name, key = "reward function", "reward.custom_reward_function"
    path, function = (str(OmegaConf.select(config, f"{key}.{part}") or "") for part in ("path", "name"))
    if not path or "://" in path:
        return
    if not Path(path).expanduser().is_file():
        yield Check(name, FAIL, f"no file {path}", f"correct {key}.path")
        return
    if load:
        code = (
            "import sys; from verl.utils.import_utils import load_extern_object as load\n"
            "try: load(*sys.argv[1:])\n"
            "except Exception as e: why = e.__cause__ or e; sys.exit(f'{type(why).__name__}: {why}')"
        )
        command = [sys.executable, "-c", code, path, function]
        loaded = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if loaded.returncode:
            error = (loaded.stderr.strip() or f"exit code {loaded.returncode}").splitlines()[-1]
            yield Check(name, FAIL, f"{path}: {function} cannot be loaded: {error}", f"fix the file, or correct {key}")
            return
    yield Check(name, OK, path)


def engine(config: Any, plan: Plan, load: bool) -> Iterator[Check]:
    """Check that the packages of the chosen training engine can be imported, unless the run is on a CPU.

    Args:
        config: Resolved config.
        plan: Plan of that config.
        load: Whether to import the packages in a subprocess (about 15 s); else only their installation is checked.
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
        packages = [engine_packages.MEGATRON, bridge, engine_packages.TRANSFORMER_ENGINE]
        if (megatron.get("override_transformer_config") or {}).get("attention_backend") == "flash":
            packages.append(engine_packages.MEGATRON_ATTENTION)
        return packages
    attention = (ref.model.get("override_config") or {}).get("attn_implementation", "flash_attention_2")
    if plan.strategy in ("fsdp", "fsdp2") and attention == "flash_attention_2":
        return [engine_packages.FSDP_ATTENTION]
    return []


def gpus(plan: Plan, machine: Machine) -> Iterator[Check]:
    """Check that this machine has the GPUs of one node."""
    name = "GPUs"
    if plan.device == "cpu":
        yield Check(name, OK, f"trainer.device=cpu: {plan.gpus_per_node} logical")
        return
    ok = machine.gpus >= plan.gpus_per_node
    detail = f"{machine.gpus} on this machine, trainer.n_gpus_per_node={plan.gpus_per_node}"
    yield Check(name, OK if ok else FAIL, detail, "" if ok else _more_gpus(machine.gpus))
    if machine.gpu_source == "assumed":
        detail = f"no GPU found: {gib(machine.gpu_bytes)} per GPU is assumed"
        yield Check("GPU memory", WARN, detail, "set GPU_MEMORY_GB to the memory of the run's GPUs, in GiB")


def gpu_memory(found: Estimate, plan: Plan) -> Iterator[Check]:
    """Check the phase of highest memory against a GPU, and vLLM's share against its weights and one request.

    vLLM does not start without KV cache for one request of ``max_model_len``.
    """
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
            f"vLLM's share of {gib(serving.share)} is below weights and activations "
            f"({gib(serving.weights + serving.activations)})"
        )
        yield Check("KV cache", FAIL, detail, f"raise {_R}.gpu_memory_utilization or tensor_model_parallel_size")
    elif serving.tokens < plan.rollout.max_model_len:
        detail = f"{serving.tokens} tokens do not hold one request of {plan.rollout.max_model_len}"
        yield Check("KV cache", FAIL, detail, f"raise {_R}.gpu_memory_utilization or lower {_R}.max_model_len")
    else:
        requests = f"{serving.sequences:.1f} requests of {plan.rollout.longest} tokens at once"
        detail = f"{serving.tokens} tokens per replica, {requests}"
        yield Check("KV cache", OK, detail)


def _on_one_host(found: Estimate, plan: Plan) -> tuple[str, int]:
    """Return the phase of highest memory on a machine that ranks and rollout engines share, and its bytes."""
    engines = found.phases.get("rollout pool")
    if engines is None:
        phase, peak = found.peak
        return phase, peak * plan.gpus_per_node
    training = {name: phase for name, phase in found.phases.items() if phase is not engines}
    phase, peak = replace(found, phases=training).peak
    return f"{phase} with the rollout pool", peak * plan.gpus_per_node + engines.total * plan.rollout_gpus


def _more_gpus(found: int) -> str:
    if found:
        return "lower it, or start on a node with that many GPUs"
    return "start on a node with that many GPUs; recipes/run_tiny_cpu.sh trains a tiny model without one"


def _lighter(phase: str, plan: Plan) -> str:
    if plan.device == "cpu":
        return (
            "use a machine with more memory, a smaller model, or fewer tokens per micro-batch "
            "(ppo_max_token_len_per_gpu, ppo_micro_batch_size_per_gpu)"
        )
    if phase == "rollout" and plan.standalone:
        return (
            "set actor_rollout_ref.hybrid_engine=false: rollout has separate GPUs, and the training GPUs then hold no "
            "engine"
        )
    if phase.startswith("rollout"):
        return f"lower {_R}.gpu_memory_utilization, or offload the actor (param_offload, optimizer_offload)"
    return (
        "use more tensor parallelism or GPUs, full recomputation, or fewer tokens per micro-batch "
        "(ppo_max_token_len_per_gpu, ppo_micro_batch_size_per_gpu)"
    )


def host_memory(found: Estimate, config: Any, machine: Machine) -> Iterator[Check]:
    """Check offloaded states, the model during loading and Ray's object store against free host memory."""
    store = OmegaConf.select(config, "ray_kwargs.ray_init.object_store_memory")
    # Ray's default: 30 % of the memory, 200 GB at most
    ray = int(store) if store else min(int(0.3 * machine.host_bytes), 200_000_000_000)
    needed = sum(found.host.values()) + ray
    ok = needed <= machine.host_free
    detail = (
        f"{gib(needed)} needed, {gib(machine.host_free)} free: offloaded states, model loading and Ray's object store "
        f"({gib(ray)})"
    )
    remedy = "" if ok else "offload less, lower +ray_kwargs.ray_init.object_store_memory, or use a larger node"
    # a warning only if it fits without the object store, which Ray fills on demand
    yield Check("host memory", OK if ok else FAIL if needed - ray > machine.host_free else WARN, detail, remedy)


def disk(config: Any, found: Estimate | None, history: tuple[int, int]) -> Iterator[Check]:
    """Check the disk space for checkpoints.

    Args:
        config: Resolved config.
        found: Memory estimate, ``None`` where the model is unknown.
        history: Minimum and maximum bytes of the history's copy in each checkpoint.
    """
    trainer = config.trainer
    if int(trainer.save_freq) > 0 and found:
        folder, free = free_disk(Path(str(trainer.default_local_dir)).expanduser())
        keep = trainer.get("max_actor_ckpt_to_keep")
        many = int(keep or 1) + 1  # verl writes the new one before it deletes the oldest
        least, needed = (many * (found.checkpoint + copy) for copy in history)
        every = "" if keep else "; verl keeps all checkpoints (trainer.max_actor_ckpt_to_keep is null)"
        status = FAIL if free < least else OK if keep and free >= needed else WARN
        fewer = "lower" if keep else "set"
        remedy = (
            f"free disk space, {fewer} trainer.max_actor_ckpt_to_keep, "
            "or set trainer.default_local_dir to a folder on another disk"
        )
        remedy = "" if status == OK else remedy
        copies = f" and {gib(history[0])} to {gib(history[1])} of history" if any(history) else ""
        sizes = f"{gib(needed)} for {many} checkpoints of {gib(found.checkpoint)}"
        detail = f"{folder}: {gib(free)} free, {sizes}{copies}{every}"
        yield Check("checkpoints", status, detail, remedy)


def ranker(config: Any) -> Iterator[Check]:
    """Check the package or model that the length ranker requires."""
    try:
        tree = config_tree.from_verl(config)
    except ConfigError:
        return  # the check of the rhyme tree reports it
    if tree is None or tree.lengths.ranker.kind is None:
        return
    if problem := missing_requirement(tree.lengths.ranker, None):
        detail, _, remedy = problem.partition(": ")
        yield Check("ranker", FAIL, detail, remedy)
    else:
        yield Check("ranker", OK, f"{tree.lengths.ranker.kind}, trained during the run")


def weights(config: Any, plan: Plan, found: Estimate | None) -> Iterator[Check]:
    """Check the room for two versions of the weights in the relay's folder.

    The actor's node also holds a third one while an engine or another site still uses an old version.
    """
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    if engine.backend != RELAY:
        return
    setting = OmegaConf.select(engine, f"engine_kwargs.{RELAY}.folder")
    folder, free = free_disk(Path(str(setting)) if setting else SHARED_MEMORY)
    one = plan.sent_bytes * found.parameters if found else 0  # for an unknown model, any free byte passes
    fits = int(free > 2 * one) + int(free > 3 * one) if os.access(folder, os.W_OK) else 0
    detail = (
        f"{folder}: {gib(free)} free, shared with Ray's object store if that is in /dev/shm; the relay needs "
        f"{gib(2 * one)} for two versions of the weights, {gib(3 * one)} for three on the actor's node while an engine "
        "or site is behind"
    )
    remedy = "start the container with a larger --shm-size, or set a writable folder with more room: "
    yield Check(
        "weights",
        (FAIL, WARN, OK)[fits],
        detail,
        "" if fits == 2 else f"{remedy}{_R}.checkpoint_engine.engine_kwargs.{RELAY}.folder",
    )


def history_folder(config: Any) -> Iterator[Check]:
    """Check that the history folder is writable; for runs whose doctor does not check it."""
    folder = history_dir(config)
    if folder is not None and not can_write(Path(folder)):
        remedy = "set history.dir to a writable folder"
        yield Check("history folder", FAIL, f"{folder}: cannot be created or written", remedy)


def history_dir(config: Any) -> str | None:
    setting = OmegaConf.select(config, f"{rhyme_config.CONFIG_PATH}.history.dir")
    return None if setting is None else str(Path(str(setting)).expanduser())
