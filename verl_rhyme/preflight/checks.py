"""What would stop a run, found before anything heavy starts. Each finding says how to mend it.

Checks of the config look at nothing else; checks of the machine compare it with what is here. A dry run may happen on
another machine than the run, so there the latter warn where they would fail.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import ListConfig, OmegaConf

from verl_rhyme import config as rhyme_config
from verl_rhyme import doctor
from verl_rhyme.config import ConfigError
from verl_rhyme.doctor import FAIL, OK, WARN, Check
from verl_rhyme.preflight import model_folder
from verl_rhyme.preflight.architecture import Architecture, UnknownArchitecture
from verl_rhyme.preflight.estimate import Estimate, count, estimate, gib
from verl_rhyme.preflight.machine import Machine, free_disk, look
from verl_rhyme.preflight.plan import ENGINES, Plan, read, sequence_tokens

#: Which argument of ``examples.data.prepare`` makes a file, by its name.
PREPARED = {
    r"dapo-math-17k": "dapo",
    r"aime-2024": "aime",
    r"math-500": "math500",
    r"gsm8k-.+": "gsm8k",
    r"kk-.+": "kk",
}

#: A share of a GPU's memory above which an estimate within 15 % may not fit after all.
TIGHT = 0.87

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Preflight:
    """All that was found.

    Attributes:
        checks: In the order of what would stop a run first.
        plan: What verl will do with the config.
        estimate: ``None`` where the model or the strategy is not known; a check says why.
        machine: What is here.
    """

    checks: list[Check]
    plan: Plan
    estimate: Estimate | None
    machine: Machine

    @property
    def failed(self) -> int:
        """Findings that would stop the run."""
        return sum(check.status == FAIL for check in self.checks)


def examine(config: Any, dry_run: bool = False, with_doctor: bool = True) -> Preflight:
    """All checks of a resolved config on this machine.

    Args:
        config: From :func:`verl_rhyme.preflight.compose.compose`.
        dry_run: What only this machine lacks warns instead of failing, and the doctor looks at versions only.
        with_doctor: Look at Python, packages, plugin and patches at all; about 20 s unless ``dry_run``.

    Raises:
        ValueError: ``GPU_MEMORY_GB`` is no number.
    """
    machine = look()
    model_check, fields, model = _model(config)
    positions = fields.get("max_position_embeddings")
    plan = read(config, positions)
    memory = machine.host_bytes if plan.device == "cpu" else machine.gpu_bytes
    found = estimate(model, plan, memory) if model else None
    there: list[Check] = [*datasets(config), *model_check, *files(config), *gpus(plan, machine)]
    if found:
        there += [*gpu_memory(found, plan, machine), *host_memory(found, config, machine)]
    there += list(disk(config, found))
    if dry_run:
        there = [replace(check, status=WARN) if check.status == FAIL else check for check in there]
    checks = doctor.versions() if dry_run else doctor.examine(_history_dir(config)) if with_doctor else []
    checks += [*rhyme(config), *parallel(plan, model), *batches(config, plan), *rollout(config, plan, model), *there]
    if not found and model:
        known = ", ".join(ENGINES)
        checks.append(Check("memory", WARN, f"strategy {plan.strategy}: not estimated (known: {known})", "none needed"))
    return Preflight(checks, plan, found, machine)


# ---- the config alone ----


def rhyme(config: Any) -> Iterator[Check]:
    """The rhyme tree parses, and what it excludes is not set."""
    name = "rhyme"
    if isinstance(config.get("rhyme"), str):
        remedy = "the group is histospec; if that is what you gave, install verl-rhyme beside verl"
        yield Check(name, FAIL, f"+rhyme={config.rhyme} did not find its config group", remedy)
        return
    try:
        tree = rhyme_config.from_verl(config)
    except ConfigError as error:
        yield Check(name, FAIL, str(error), "mend the key that the message names")
        return
    if tree is None:
        yield Check(name, OK, "no rhyme tree, or enable=false: stock verl")
        return
    rollout, problems = config.actor_rollout_ref.rollout, []
    if rollout.name != "vllm":
        problems.append((f"{_R}.name={rollout.name}", f"set {_R}.name=vllm"))
    if not config.trainer.get("use_v1", True):
        problems.append(("trainer.use_v1=false", "drop it: rhyme extends verl's V1 trainer"))
    if rollout.get("disaggregation", {}).get("enabled", False):
        problems.append((f"{_R}.disaggregation.enabled=true", "drop it: rhyme does not work with it"))
    if tree.drafting.enable and ((rollout.get("engine_kwargs") or {}).get("vllm") or {}).get("speculative_config"):
        problems.append(("engine_kwargs.vllm.speculative_config beside drafting", "drop it or drafting.enable"))
    for detail, remedy in problems:
        yield Check(name, FAIL, detail, remedy)
    if not problems:
        yield Check(name, OK, f"drafting {'on' if tree.drafting.enable else 'off'}, policy {tree.drafting.policy}")


def parallel(plan: Plan, model: Architecture | None) -> Iterator[Check]:
    """GPU counts and the model's sizes against the parallel sizes, as Megatron, Ulysses and vLLM ask for."""
    name, problems = "parallel sizes", []
    mesh = "tensor x pipeline x context parallel" if plan.strategy == "megatron" else "Ulysses sequence parallel"
    if plan.train_gpus < 1 or plan.train_gpus % plan.model_parallel:
        detail = f"{plan.train_gpus} training GPUs are no multiple of {mesh} = {plan.model_parallel}"
        problems.append((detail, "change trainer.nnodes, trainer.n_gpus_per_node or the sizes"))
    shards = plan.training.shards if plan.training and plan.training.engine == "fsdp" else 1
    if plan.train_gpus % shards:
        detail = f"{plan.train_gpus} training GPUs are no multiple of fsdp_size = {shards}"
        problems.append((detail, f"set {_A}.fsdp_config.fsdp_size to a divisor, or to -1 for all"))
    pools = {"rollout": plan.train_gpus} if plan.colocated else {}
    if plan.standalone:
        pools["standalone rollout"] = plan.rollout_gpus
    for pool, held in pools.items():
        if held < 1 or held % plan.replica_gpus:
            detail = (
                f"{held} {pool} GPUs are no multiple of a replica's {plan.replica_gpus}; verl would leave some idle"
            )
            problems.append((detail, f"change the GPU count or {_R}.tensor_model_parallel_size"))
    if model:
        problems += list(_model_sizes(plan, model))
    for detail, remedy in problems:
        yield Check(name, FAIL, detail, remedy)
    if not problems:
        yield Check(
            name,
            OK,
            f"{plan.train_gpus} training GPUs: data parallel {plan.data_parallel} x model parallel "
            f"{plan.model_parallel}; {plan.replicas} rollout replicas of {plan.replica_gpus}",
        )


def _model_sizes(plan: Plan, model: Architecture) -> Iterator[tuple[str, str]]:
    def odd(what: str, size: int, who: str, by: int, option: str) -> Iterator[tuple[str, str]]:
        if size % by:
            yield f"{who}: {size} {what} are not divisible by {by}", f"choose a divisor for {option}"

    training = plan.training
    if training and training.engine == "megatron":
        option = f"{_A}.megatron.tensor_model_parallel_size"
        yield from odd("attention heads", model.heads, "Megatron", training.tp, option)
        yield from odd("MLP columns", model.ffn, "Megatron", training.tp, option)
        yield from odd("vocabulary entries", model.vocab, "Megatron", training.tp, option)
        yield from odd("layers", model.layers, "Megatron", training.pp, f"{_A}.megatron.pipeline_model_parallel_size")
        if model.kv_heads % training.tp and training.tp % model.kv_heads:
            yield (
                f"Megatron: {model.kv_heads} key heads and tp={training.tp} do not divide each other",
                f"change {option}",
            )
    elif training:
        option = f"{_A}.ulysses_sequence_parallel_size"
        yield from odd("attention heads", model.heads, "Ulysses", plan.model_parallel, option)
    rollout, option = plan.rollout, f"{_R}.tensor_model_parallel_size"
    yield from odd("attention heads", model.heads, "vLLM", rollout.tp, option)
    yield from odd("MLP columns", model.ffn, "vLLM", rollout.tp, option)
    if model.kv_heads % rollout.tp and rollout.tp % model.kv_heads:
        yield f"vLLM: {model.kv_heads} key heads and tp={rollout.tp} do not divide each other", f"change {option}"
    if model.layers < rollout.pp:
        yield f"vLLM: {model.layers} layers for {rollout.pp} stages", f"lower {_R}.pipeline_model_parallel_size"


def _warm_up(config: Any) -> Iterator[tuple[str, str, str]]:
    """Megatron's scheduler asserts it, once all is loaded."""
    steps = config.trainer.total_training_steps
    if steps is None or config.actor_rollout_ref.actor.strategy != "megatron":
        return
    for key in (f"{_A}.optim.lr_warmup_steps", "critic.optim.lr_warmup_steps"):
        warm_up = OmegaConf.select(config, key)
        if warm_up and int(warm_up) >= int(steps):
            detail = f"{key}={warm_up} is no less than trainer.total_training_steps={steps}"
            yield FAIL, detail, f"lower it: {key}=0"


def batches(config: Any, plan: Plan) -> Iterator[Check]:
    """Batch, mini-batch and micro-batch against each other and the data-parallel size, as verl asserts later."""
    name, problems = "batches", []
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    batch, mini, n, dp = (
        int(config.data.train_batch_size),
        int(actor.ppo_mini_batch_size),
        int(rollout.n),
        plan.data_parallel,
    )
    if mini < 1 or batch % mini:
        problems.append(
            (FAIL, f"data.train_batch_size={batch} is no multiple of ppo_mini_batch_size={mini}", "align both")
        )
    elif mini * n % dp:
        detail = f"a mini-batch of {mini} x {n} responses does not divide over {dp} data-parallel ranks"
        problems.append((FAIL, detail, f"change {_A}.ppo_mini_batch_size or {_R}.n"))
    problems += list(_warm_up(config))
    if not actor.use_dynamic_bsz:
        micro, total = actor.ppo_micro_batch_size_per_gpu, actor.ppo_micro_batch_size
        if (micro is None) == (total is None):
            detail = "micro-batch size set twice" if micro is not None else "no micro-batch size"
            remedy = f"set {_A}.ppo_micro_batch_size_per_gpu, or {_A}.use_dynamic_bsz=true"
            problems.append((FAIL, detail, remedy))
        if micro is not None and (mini * n // dp) % int(micro):
            detail = f"{mini * n // dp} responses a rank are no multiple of ppo_micro_batch_size_per_gpu={micro}"
            problems.append((WARN, detail, "the last micro-batch is smaller; choose a divisor"))
        smallest = dp * int(micro) if micro is not None and plan.strategy == "megatron" else plan.train_gpus
        if batch * n % smallest:
            detail = f"{batch} x {n} responses are no multiple of {smallest}, as verl asks without dynamic batches"
            problems.append((FAIL, detail, "change data.train_batch_size"))
        if rollout.log_prob_micro_batch_size is None and rollout.log_prob_micro_batch_size_per_gpu is None:
            problems.append((FAIL, "no micro-batch size for log-probs", f"set {_R}.log_prob_micro_batch_size_per_gpu"))
    elif int(actor.ppo_max_token_len_per_gpu) * _split(plan) < sequence_tokens(config):
        detail = f"ppo_max_token_len_per_gpu={actor.ppo_max_token_len_per_gpu} is below prompt + response"
        problems.append((FAIL, detail, f"raise it to {-(-sequence_tokens(config) // _split(plan))} or more"))
    problems += [(FAIL, *problem) for problem in _modes(config, batch, mini)]
    for status, detail, remedy in problems:
        yield Check(name, status, detail, remedy)
    if not problems:
        yield Check(
            name, OK, f"{batch} prompts x {n}, {batch // mini} updates a step, {mini * n // dp} responses a rank each"
        )


def _split(plan: Plan) -> int:
    """Over how many GPUs one sequence is cut."""
    return plan.training.cp if plan.training and plan.training.engine == "megatron" else plan.model_parallel


def _modes(config: Any, batch: int, mini: int) -> Iterator[tuple[str, str]]:
    rollout, mode = config.actor_rollout_ref.rollout, config.trainer.v1.trainer_mode
    if mode != "separate_async":
        if not config.actor_rollout_ref.get("hybrid_engine", True):
            remedy = "set trainer.v1.trainer_mode=separate_async, or hybrid_engine=true"
            yield f"actor_rollout_ref.hybrid_engine=false with trainer_mode={mode}", remedy
        return
    steps = int(config.trainer.v1.separate_async.parameter_sync_step)
    if batch != steps * mini:
        detail = f"data.train_batch_size={batch} is not parameter_sync_step={steps} x ppo_mini_batch_size={mini}"
        yield detail, "separate_async asks for that: align the three"
    if int(rollout.nnodes) < 1 or int(rollout.n_gpus_per_node) < 1:
        yield "separate_async without a rollout pool", f"set {_R}.nnodes and {_R}.n_gpus_per_node"
    if rollout.checkpoint_engine.backend == "naive":
        yield f"{_R}.checkpoint_engine.backend=naive with separate_async", "set it to nccl, nixl or mooncake"


def rollout(config: Any, plan: Plan, model: Architecture | None) -> Iterator[Check]:
    """vLLM's lengths and the room of drafts."""
    name, problems = "rollout", []
    options, serving = config.actor_rollout_ref.rollout, plan.rollout
    if serving.max_model_len < sequence_tokens(config):
        detail = f"max_model_len={serving.max_model_len} is below prompt + response = {sequence_tokens(config)}"
        problems.append((FAIL, detail, f"raise {_R}.max_model_len, or lower data.max_response_length"))
    if not options.enable_chunked_prefill and serving.max_num_batched_tokens < serving.max_model_len:
        detail = f"max_num_batched_tokens={serving.max_num_batched_tokens} < max_model_len without chunked prefill"
        problems.append((FAIL, detail, f"raise it, or set {_R}.enable_chunked_prefill=true"))
    if serving.max_num_batched_tokens < serving.max_num_seqs:
        detail = f"max_num_batched_tokens={serving.max_num_batched_tokens} is below max_num_seqs={serving.max_num_seqs}"
        problems.append((FAIL, detail, f"raise {_R}.max_num_batched_tokens"))
    elif serving.sampler_bytes and serving.max_num_batched_tokens < 2 * serving.max_num_seqs:
        detail = "max_num_batched_tokens leaves no draft token a row when all rows run"
        problems.append((WARN, detail, f"raise {_R}.max_num_batched_tokens above {2 * serving.max_num_seqs}"))
    if serving.sampler_bytes and model and not _longest(model, serving.max_num_seqs, serving.sampler_bytes):
        detail = f"drafting.sampler_memory={gib(serving.sampler_bytes)} allows no draft at {serving.max_num_seqs} rows"
        problems.append((WARN, detail, f"raise it, or lower {_R}.max_num_seqs"))
    for status, detail, remedy in problems:
        yield Check(name, status, detail, remedy)
    if not problems:
        yield Check(name, OK, f"{serving.max_model_len} tokens a request, {serving.max_num_batched_tokens} a step")


def _longest(model: Architecture, rows: int, memory: int) -> int:
    from verl_rhyme.drafting.bounds import longest_draft  # compiles: only where it is needed

    return longest_draft(model.vocab, rows, memory, 1)


# ---- what is here ----


def datasets(config: Any) -> Iterator[Check]:
    """Each file of ``data.train_files`` and ``data.val_files`` is parquet with the prompt's column."""
    column = config.data.get("prompt_key") or "prompt"
    for option in ("train_files", "val_files"):
        listed = config.data.get(option) or []
        for file in listed if isinstance(listed, list | tuple | ListConfig) else [listed]:
            yield _dataset(f"data.{option}", str(file), column)


def _dataset(name: str, file: str, column: str) -> Check:
    import pyarrow
    import pyarrow.parquet as pq

    if "://" in file:
        return Check(name, WARN, f"{file}: remote, not looked at", "none needed if verl can read it")
    path = Path(file).expanduser()
    if not path.is_file():
        return Check(name, FAIL, f"no file {path}", _prepare(path))
    if path.suffix != ".parquet":
        return Check(name, OK, f"{path}: no parquet, not looked into")
    try:
        footer = pq.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        return Check(name, FAIL, f"{path} is no readable parquet file: {error}", f"delete it; {_prepare(path)}")
    if column not in footer.schema_arrow.names:
        detail = f"{path} has no column {column!r}, only {', '.join(footer.schema_arrow.names)}"
        return Check(name, FAIL, detail, "set data.prompt_key, or convert the file")
    rows = footer.metadata.num_rows
    return Check(name, OK if rows else FAIL, f"{path}: {rows} prompts", "" if rows else _prepare(path))


def _prepare(path: Path) -> str:
    for pattern, argument in PREPARED.items():
        if re.fullmatch(pattern, path.stem):
            return f"python -m examples.data.prepare {argument} --out {path.parent}"
    return "make or download the dataset, or mend the path"


def _model(config: Any) -> tuple[list[Check], dict[str, Any], Architecture | None]:
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
    try:
        model = Architecture.read(fields)
    except UnknownArchitecture as error:
        return [Check(name, WARN, f"{path}: {error}", "none needed: verl may know it all the same")], fields, None
    return [Check(name, OK, f"{path}: {model.name}, {count(model.parameters)} parameters")], fields, model


def files(config: Any) -> Iterator[Check]:
    """The reward function's file."""
    path = OmegaConf.select(config, "reward.custom_reward_function.path")
    if path and "://" not in str(path):
        there = Path(str(path)).expanduser().is_file()
        remedy = "" if there else "mend reward.custom_reward_function.path"
        yield Check("reward function", OK if there else FAIL, f"{path}" if there else f"no file {path}", remedy)


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


def gpu_memory(found: Estimate, plan: Plan, machine: Machine) -> Iterator[Check]:
    """The fullest phase against a GPU; vLLM's share against its weights and one full-length request."""
    name, cpu = "GPU memory", plan.device == "cpu"
    phase, peak = found.peak
    if cpu:  # the ranks of a node share the host
        name, peak = "memory", peak * plan.gpus_per_node
    share, status = peak / found.gpu_bytes, OK
    if share > TIGHT:
        status = FAIL if share > 1 else WARN
    detail = f"{phase}: {gib(peak)} of {gib(found.gpu_bytes)} ({share:.0%}), estimated"
    yield Check(name, status, detail, "" if status == OK else _lighter(phase))
    serving = found.serving
    if serving.cache <= 0:
        detail = (
            f"{gib(serving.share)} do not hold weights and activations ({gib(serving.weights + serving.activations)})"
        )
        yield Check("KV cache", FAIL, detail, f"raise {_R}.gpu_memory_utilization or tensor_model_parallel_size")
    elif serving.sequences < 1:
        detail = f"{serving.tokens} tokens do not hold one request of {plan.rollout.max_model_len}"
        yield Check("KV cache", FAIL, detail, f"raise {_R}.gpu_memory_utilization or lower {_R}.max_model_len")
    else:
        detail = f"{serving.tokens} tokens a replica, {serving.sequences:.1f} full-length requests at once"
        yield Check("KV cache", OK, detail)


def _lighter(phase: str) -> str:
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
    detail = f"{gib(needed)} of {gib(machine.host_free)} free: offloading, loading and Ray's store ({gib(ray)})"
    remedy = "" if ok else "offload less, lower +ray_kwargs.ray_init.object_store_memory, or use a larger node"
    # the object store is filled as needed only
    yield Check("host memory", OK if ok else FAIL if needed - ray > machine.host_free else WARN, detail, remedy)


def disk(config: Any, found: Estimate | None) -> Iterator[Check]:
    """Room for checkpoints and for the history store."""
    trainer = config.trainer
    if int(trainer.save_freq) > 0 and found:
        folder, free = free_disk(Path(str(trainer.default_local_dir)).expanduser())
        keep = trainer.get("max_actor_ckpt_to_keep")
        needed = found.checkpoint * (int(keep or 1) + 1)  # the new one is written before the oldest goes
        every = "" if keep else "; all are kept (max_actor_ckpt_to_keep is null)"
        status = FAIL if free < needed else OK if keep else WARN
        remedy = "" if status == OK else "set trainer.max_actor_ckpt_to_keep, or trainer.default_local_dir elsewhere"
        detail = f"{folder}: {gib(free)} free, {gib(needed)} for {int(keep or 1) + 1} of {gib(found.checkpoint)}{every}"
        yield Check("checkpoints", status, detail, remedy)
    try:
        tree = rhyme_config.from_verl(config)
    except ConfigError:  # a finding of its own
        return
    if tree is not None:
        folder, free = free_disk(Path(_history_dir(config) or tempfile.gettempdir()))
        ok = free >= tree.history.max_bytes
        detail = f"{folder}: {gib(free)} free, history.max_bytes {gib(tree.history.max_bytes)}"
        remedy = "" if ok else "free some, set history.dir elsewhere, or lower history.max_bytes"
        yield Check("history store", OK if ok else WARN, detail, remedy)


def _history_dir(config: Any) -> str | None:
    found = OmegaConf.select(config, f"{rhyme_config.CONFIG_PATH}.history.dir")
    return None if found is None else str(Path(str(found)).expanduser())
