"""Checks of ``data.train_files`` and ``data.val_files``: what verl's ``RLHFDataset`` and its reward managers read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pyarrow.types as kinds
from omegaconf import OmegaConf

from verl_rhyme.checks.doctor import FAIL, OK, WARN, Check
from verl_rhyme.checks.preflight.plan import data_files
from verl_rhyme.checks.preflight.values import REWARD_MANAGERS
from verl_rhyme.config.checks import nearest

_MESSAGES = 'a list of messages: [{"role": "user", "content": PROMPT}]'


def check(config: Any) -> Iterator[Check]:
    """Check that verl can read each file and finds its columns, and that one batch of training prompts is left."""
    rows: int | None = 0
    for option in ("train_files", "val_files"):
        files = data_files(config, option)
        if not files:
            yield Check(f"data.{option}", FAIL, f"data.{option} names no file", f"set data.{option}=FILE.parquet")
        for file in files:
            found, count = _file(config, f"data.{option}", file)
            yield from found
            if option == "train_files":
                rows = None if rows is None or count is None else rows + count
    if rows:
        yield from _batch(config, rows)


def _batch(config: Any, rows: int) -> Iterator[Check]:
    """Check that the training prompts make a batch: verl drops an incomplete one, and then trains nothing."""
    key = "train_batch_size"
    batch, loaded, most = (int(config.data.get(each) or 0) for each in (key, "gen_batch_size", "train_max_samples"))
    if loaded > batch:
        key, batch = "gen_batch_size", loaded
    prompts = min(rows, most) if most > 0 else rows
    if prompts < batch:
        detail = f"data.{key}={batch} is larger than the {prompts} prompts of data.train_files"
        detail += f" (data.train_max_samples={most} of {rows} rows)" if prompts < rows else ""
        yield Check("data.train_files", FAIL, detail, f"set data.{key} to at most {prompts}, or add prompts")


def _file(config: Any, name: str, file: str) -> tuple[list[Check], int | None]:
    own = OmegaConf.select(config, "data.custom_cls.path")  # a custom dataset class reads any format
    path = Path(file).expanduser()
    if own or "://" in file or any(each in file for each in "*?["):
        return [
            Check(name, WARN if "://" in file else OK, f"{file}: not checked", "none needed if verl reads it")
        ], None
    if not path.is_file():
        remedy = "name its files" if path.is_dir() else "create it (recipes/README.md, Start), or correct the path"
        return [Check(name, FAIL, f"no file {path}", remedy)], None
    if path.suffix in (".json", ".jsonl"):
        return [Check(name, OK, f"{path}: JSON, content not checked")], None
    if path.suffix != ".parquet":
        remedy = "convert it, or set data.custom_cls to a dataset class that reads it"
        return [Check(name, FAIL, f"{path}: verl reads .parquet, .json and .jsonl only", remedy)], None
    try:
        with pq.ParquetFile(path) as opened:
            rows, schema = opened.metadata.num_rows, opened.schema_arrow
    except (OSError, ValueError) as error:  # ArrowException is a ValueError
        detail = f"{path} is not a readable parquet file: {str(error).splitlines()[0]}"
        return [Check(name, FAIL, detail, "convert it, or create it anew")], None
    if not rows:
        return [Check(name, FAIL, f"{path}: 0 prompts", "create it anew")], 0
    problems = [Check(name, FAIL, f"{path}: {detail}", remedy) for detail, remedy in _columns(config, schema)]
    return problems or [Check(name, OK, f"{path}: {rows} prompts")], rows


def _columns(config: Any, schema: Any) -> Iterator[tuple[str, str]]:
    """Yield the faults of the columns that verl reads, each with its remedy."""

    def has(kind: Any, *names: str) -> bool:
        return kinds.is_null(kind) or (kinds.is_struct(kind) and {*names} <= {field.name for field in kind})

    column = str(config.data.get("prompt_key") or "prompt")
    if column not in schema.names:
        detail = f"no column {column!r}{nearest(column, schema.names)}, only {', '.join(schema.names)}"
        yield detail, "set data.prompt_key, or convert the file"
    else:
        kind = schema.field(column).type
        listed = kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)
        if not (listed and has(kind.value_type, "role", "content")):
            yield f"column {column!r} has {str(kind)[:60]}, not {_MESSAGES}", "convert the column"
    manager: Any = OmegaConf.select(config, "reward.reward_manager") or {}
    if (
        manager.get("source") != "register"
        or manager.get("name") not in REWARD_MANAGERS
        or OmegaConf.select(config, "reward.reward_model.enable")
        or OmegaConf.select(config, "actor_rollout_ref.rollout.agent.agent_loop_config_path")  # may give rewards itself
    ):
        return
    reads = f"verl's reward manager {manager.name!r} reads it"
    if "data_source" not in schema.names:
        yield f"no column 'data_source'; {reads}, not data.reward_fn_key", "add it: the name of the dataset"
    if "reward_model" not in schema.names or not has(schema.field("reward_model").type, "ground_truth"):
        yield f"no column 'reward_model' with ground_truth; {reads}", 'add it: {"ground_truth": ANSWER}'
