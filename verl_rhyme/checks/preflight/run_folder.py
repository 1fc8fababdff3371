"""Whose checkpoints stand in a folder: a run resumes from its own, and from nobody else's.

``run.json`` in ``trainer.default_local_dir`` says what run marked the folder (:func:`claim`); the run scripts call the
folder after the same (:func:`name`). A run with another arm,
trainer mode, engine, model, seed or data is refused there, because it would resume from weights, from a data order or
from metrics that are not its own. What may change from one start to the next is not part of it: epochs, steps,
learning rates, batch sizes, drafting's options, ``drafting.enable`` among them: drafts change no sample's distribution,
and a run that they do not help goes on without.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import ListConfig, OmegaConf

from verl_rhyme.checks.doctor import FAIL, OK, Check
from verl_rhyme.config import TOPOLOGIES, ConfigError, RhymeConfig, config_tree
from verl_rhyme.config.run_name import run_name
from verl_rhyme.observability import steps
from verl_rhyme.observability.progress import LOGGER_VARIABLE

#: In the checkpoint folder. Not the event log's ``events/run.json`` (``observability.events.INFO_FILE``).
MARKER = "run.json"

#: What to do about a :class:`ForeignFolder`.
REMEDY = "set another folder (RUN_DIR=... of the recipes, trainer.default_local_dir=... of verl), or move this one away"


class ForeignFolder(ValueError):
    """A folder belongs to another run; the message says how they differ and what to do."""


def folder(config: Any) -> Path:
    """``trainer.default_local_dir``."""
    return Path(str(config.trainer.default_local_dir)).expanduser()


def describe(config: Any, notes: Mapping[str, str] | None = None) -> dict[str, str]:
    """What makes a run this run; names of parts to values, in the order in which differences are told.

    Args:
        config: verl's resolved config.
        notes: More of it that the config does not say.

    Raises:
        ConfigError: The rhyme tree is wrong.
    """
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    rhyme = config_tree.from_verl(config)
    run = {"run": run_name(rhyme, switches=False), "mode": _mode(rhyme, config)}
    run["engine"] = str(actor.strategy)
    if run["engine"].startswith("fsdp"):  # one file a rank
        run["training GPUs"] = str(int(trainer.nnodes) * int(trainer.n_gpus_per_node))
    path = str(config.actor_rollout_ref.model.path)
    run["model"] = "/".join(Path(path).parts[-2:])  # a run survives a move of its model
    run["seed"] = str(config.data.get("seed"))
    run["data"] = ", ".join(Path(file).name for file in _files(config))
    return run | dict(notes or {})


def name(config: Any, notes: Mapping[str, str] | None = None) -> str:
    """What the run scripts call a run's folder: preset, model, engine, mode, e.g. ``full-k2-qwen2-fsdp-colocated``.

    Args:
        config: verl's resolved config.
        notes: As of :func:`describe`; each becomes ``VALUE_NAME``.

    Raises:
        ConfigError: The rhyme tree is wrong.
    """
    rhyme = config_tree.from_verl(config)
    model = Path(str(config.actor_rollout_ref.model.path)).name
    engine = str(config.actor_rollout_ref.actor.strategy).removesuffix("2")  # of FSDP there is one engine in V1
    parts = [run_name(rhyme), model, engine, _mode(rhyme, config)]
    parts += [f"{value}_{what}" for what, value in (notes or {}).items()]
    return re.sub(r"[^A-Za-z0-9._@%+-]+", "_", "-".join(parts))  # of a path that hydra reads without quotes


def refusal(config: Any, notes: Mapping[str, str] | None = None) -> str | None:
    """How the folder's run differs from this one, in one line; ``None`` where it does not."""
    here, there = describe(config, notes), _owner(folder(config))
    differences = [
        f"{part} {there[part]} there, {value} here" for part, value in here.items() if there.get(part, value) != value
    ]
    return f"{folder(config)} belongs to another run: {'; '.join(differences)}" if differences else None


def check(config: Any, notes: Mapping[str, str] | None = None) -> Iterator[Check]:
    """The finding of a preflight."""
    try:
        told = refusal(config, notes)
    except ConfigError:  # a finding of its own
        return
    except ForeignFolder as error:
        told = str(error)
    yield Check("run folder", FAIL if told else OK, told or str(folder(config)), REMEDY if told else "")


def claim(config: Any, notes: Mapping[str, str] | None = None) -> None:
    """Mark the folder as this run's; a folder that already is stays as it is.

    Raises:
        ForeignFolder: It is another run's. Nothing was changed.
        OSError: It cannot be written.
    """
    if told := refusal(config, notes):
        raise ForeignFolder(told)
    marker = folder(config) / MARKER
    if not marker.exists():
        marker.parent.mkdir(parents=True, exist_ok=True)
        new = marker.with_suffix(f".{os.getpid()}.tmp")
        new.write_text(json.dumps(describe(config, notes), indent=2) + "\n")
        new.replace(marker)


def set_metrics_aside(config: Any) -> None:
    """Of an earlier start, where the config tells verl's logger which file is theirs."""
    path = OmegaConf.select(config, f"ray_kwargs.ray_init.runtime_env.env_vars.{LOGGER_VARIABLE}")
    if path:
        steps.set_aside(str(path))


def latest_step(checkpoints: Path) -> int | None:
    """The step from which verl resumes there."""
    try:
        step = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return None
    return step if (checkpoints / f"global_step_{step}").is_dir() else None


def total_steps(config: Any) -> int | None:
    """Steps of the whole training as verl counts them; ``None`` where the data can't be counted.

    An upper bound where prompts are filtered: that is known only once the tokenizer has seen them.
    """
    if (steps := config.trainer.total_training_steps) is not None:
        return int(steps)
    import pyarrow.parquet as pq

    try:
        rows = sum(pq.ParquetFile(Path(file).expanduser()).metadata.num_rows for file in _files(config))
    except (OSError, ValueError):  # ArrowException is one
        return None
    limit = int(config.data.get("train_max_samples", -1))
    prompts = min(rows, limit) if limit > 0 else rows
    return prompts // int(config.data.train_batch_size) * int(config.trainer.total_epochs)


def _mode(rhyme: RhymeConfig | None, config: Any) -> str:
    """The trainer mode; to the pipeline ``sync`` and ``colocate_async`` are one, ``colocated``."""
    mode = str(config.trainer.v1.trainer_mode)
    one = rhyme is not None and rhyme.pipeline and TOPOLOGIES.get(mode) == "colocated"
    return "colocated" if one else mode


def _owner(checkpoints: Path) -> dict[str, str]:
    """What the marker says; nothing without one."""
    marker = checkpoints / MARKER
    try:
        return {str(part): str(value) for part, value in json.loads(marker.read_text()).items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise ForeignFolder(f"{marker} cannot be read ({error})") from error


def _files(config: Any) -> list[str]:
    listed = OmegaConf.select(config, "data.train_files") or []
    return [str(file) for file in (listed if isinstance(listed, list | tuple | ListConfig) else [listed])]
