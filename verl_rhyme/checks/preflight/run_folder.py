"""Ownership of checkpoint folders: a run resumes from its own checkpoints only.

``run.json`` in ``trainer.default_local_dir`` describes the run that owns the folder (:func:`claim`). The run scripts
name the folder after the same description (:func:`name`). A run with another preset, trainer mode, engine, model, seed
or data is refused, because it would resume from the weights, data order or metrics of another run. Settings that may
change between two starts are not part of the description: epochs, steps, learning rates, batch sizes and the options
of drafting. ``drafting.enable`` is one of them, since drafts do not change the distribution of samples.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_rhyme.checks import run_lock
from verl_rhyme.checks.doctor import WARN, Check, problems, verdict
from verl_rhyme.checks.preflight.plan import data_files
from verl_rhyme.config import TOPOLOGIES, ConfigError, RhymeConfig, config_tree
from verl_rhyme.config.run_name import run_name

#: File in the checkpoint folder; not the event log's ``events/run.json`` (``observability.events.INFO_FILE``).
MARKER = "run.json"

#: Remedy where another run has the folder.
REMEDY = "set another folder (RUN_DIR=... of the recipes, trainer.default_local_dir=... of verl), or move this one away"


def folder(config: Any) -> Path:
    return Path(str(config.trainer.default_local_dir)).expanduser()


def describe(config: Any, notes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings that identify a run, by name; ``notes`` are on what is not in the config. Raises ConfigError
    if the rhyme tree is invalid.
    """
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    rhyme = config_tree.from_verl(config)
    engine, gpus = str(actor.strategy), int(trainer.nnodes) * int(trainer.n_gpus_per_node)
    return {
        "run": run_name(rhyme, switches=False),
        "mode": _mode(rhyme, config),
        "engine": engine,
        # FSDP's checkpoints have one file per rank
        **({"training GPUs": str(gpus)} if engine.startswith("fsdp") else {}),
        # the model's folder may be moved between starts
        "model": "/".join(Path(str(config.actor_rollout_ref.model.path)).parts[-2:]),
        "seed": str(config.data.get("seed")),
        "data": ", ".join(Path(file).name for file in data_files(config, "train_files")),
        **(notes or {}),
    }


def name(config: Any, notes: Mapping[str, str] | None = None) -> str:
    """Return the folder name of a run: preset, model, engine, mode and ``VALUE_NAME`` of each note, for example
    ``full-k2-qwen2-fsdp-colocated``. Raises ConfigError if the rhyme tree is invalid.
    """
    rhyme = config_tree.from_verl(config)
    model = Path(str(config.actor_rollout_ref.model.path)).name
    engine = str(config.actor_rollout_ref.actor.strategy).removesuffix("2")  # the V1 trainer has one FSDP engine
    parts = [run_name(rhyme), model, engine, _mode(rhyme, config)]
    parts += [f"{value}_{key}" for key, value in (notes or {}).items()]
    return re.sub(r"[^A-Za-z0-9._@%+-]+", "_", "-".join(parts))  # characters that hydra reads without quotes


def refusal(config: Any, notes: Mapping[str, str] | None = None) -> str | None:
    """Return how the folder's run differs from this one, or that its marker cannot be read, in one line."""
    run, marker = describe(config, notes), folder(config) / MARKER
    try:
        owner = {str(part): str(value) for part, value in json.loads(marker.read_text()).items()}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, AttributeError) as error:
        return f"{marker} cannot be read ({error})"
    differences = [
        f"{part} {owner[part]} there, {value} in this run"
        for part, value in run.items()
        if owner.get(part, value) != value
    ]
    return f"{folder(config)} belongs to another run: {'; '.join(differences)}" if differences else None


def check(config: Any, notes: Mapping[str, str] | None = None) -> Iterator[Check]:
    try:
        problem = refusal(config, notes)
    except ConfigError:  # the check of the rhyme tree reports it
        return
    yield verdict("run folder", not problem, problem or str(folder(config)), REMEDY)
    if (user := run_lock.user(folder(config))) is not None:
        yield Check("run folder", WARN, user, "a start is refused until then")


def resume(config: Any) -> Iterator[Check]:
    """Warn of what a resume loses, or a kill can lose."""
    trainer, actor = config.trainer, config.actor_rollout_ref.actor
    if trainer.resume_mode == "disable" or trainer.save_freq <= 0:
        return
    parts = list(actor.checkpoint.load_contents)
    varies = actor.optim.get("lr_decay_style", "constant") != "constant" or any(
        (actor.optim.get(name) or 0) > 0 for name in ("lr_warmup_steps", "lr_warmup_steps_ratio")
    )
    yield from problems(
        "resume",
        (
            not {"optimizer", "extra"} <= {*parts},
            f"actor.checkpoint.load_contents={parts}: a resumed run begins anew with what is left out",
            "add optimizer (its state) and extra (random states and, with FSDP, the learning rate)",
        ),
        (
            str(actor.strategy) == "megatron" and varies and not actor.optim.use_checkpoint_opt_param_scheduler,
            "Megatron: a resumed run begins the learning rate's schedule anew",
            "set actor.optim.use_checkpoint_opt_param_scheduler=true",
        ),
        (
            trainer.max_actor_ckpt_to_keep == 1,
            "trainer.max_actor_ckpt_to_keep=1: a kill while verl saves leaves no checkpoint to resume from",
            "keep 2",
        ),
        status=WARN,
    )


def claim(config: Any, notes: Mapping[str, str] | None = None) -> None:
    """Lock the folder and mark it as this run's, unless it is already marked so.

    Raises ConfigError, and changes nothing, if it belongs to another run, is in use or cannot be written.
    """
    if problem := refusal(config, notes):
        raise ConfigError(f"{problem} -> {REMEDY}")
    marker = folder(config) / MARKER
    try:
        lock = run_lock.take(marker.parent, os.getppid())
        if not marker.exists():
            new = marker.with_suffix(f".{os.getpid()}.tmp")
            new.write_text(json.dumps(describe(config, notes), indent=2) + "\n")
            new.replace(marker)
        os.close(lock)  # the run script locks it next
    except OSError as error:
        raise ConfigError(
            f"cannot write to {marker.parent} ({error.strerror}): free space, or choose another RUN_DIR"
        ) from error


def latest_step(checkpoints: Path) -> int | None:
    try:
        step = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return None
    return step if (checkpoints / f"global_step_{step}").is_dir() else None


def total_steps(config: Any) -> int | None:
    """Return verl's number of training steps; ``None`` if the data cannot be counted. It is an upper bound if verl
    filters prompts by length, which requires the tokenizer.
    """
    if (steps := config.trainer.total_training_steps) is not None:
        return int(steps)
    import pyarrow.parquet as pq

    try:
        rows = sum(
            pq.ParquetFile(Path(file).expanduser()).metadata.num_rows for file in data_files(config, "train_files")
        )
    except (OSError, ValueError):  # ArrowException is a ValueError
        return None
    limit = int(config.data.get("train_max_samples", -1))
    prompts = min(rows, limit) if limit > 0 else rows
    return prompts // int(config.data.train_batch_size) * int(config.trainer.total_epochs)


def _mode(rhyme: RhymeConfig | None, config: Any) -> str:
    """Return the trainer mode; with the pipeline, ``sync`` and ``colocate_async`` are both ``colocated``."""
    mode = str(config.trainer.v1.trainer_mode)
    colocated = rhyme is not None and rhyme.pipeline and TOPOLOGIES.get(mode) == "colocated"
    return "colocated" if colocated else mode
