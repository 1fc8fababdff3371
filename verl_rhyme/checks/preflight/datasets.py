"""Checks of ``data.train_files`` and ``data.val_files``: what verl's ``RLHFDataset`` and its reward managers read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.checks.doctor import FAIL, OK, WARN, Check
from verl_rhyme.checks.preflight.plan import data_files
from verl_rhyme.config.checks import nearest

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

#: Values of ``reward.reward_manager.name`` of verl 0.9.1; all read ``data_source`` and ``reward_model.ground_truth``.
REWARD_MANAGERS = ("naive", "dapo", "remote", "gdpo", "rate_limited")

_JSON = (".json", ".jsonl")
#: JSON rows whose types are compared.
_ROWS = 100
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
    if prompts >= batch:
        return
    kept = f" (data.train_max_samples={most} of {rows} rows)" if prompts < rows else ""
    filtered = ", and data.filter_overlong_prompts drops the longest of them" if _filters(config) else ""
    detail = f"data.{key}={batch} is larger than the {prompts} prompts of data.train_files{kept}{filtered}"
    yield Check("data.train_files", FAIL, detail, f"set data.{key} to at most {prompts}, or add prompts")


def _filters(config: Any) -> bool:
    return bool(config.data.get("filter_overlong_prompts"))


def _file(config: Any, name: str, file: str) -> tuple[list[Check], int | None]:
    own = OmegaConf.select(config, "data.custom_cls.path")  # a custom dataset class reads any format
    path = Path(file).expanduser()
    if "://" in file:
        return [Check(name, WARN, f"{file}: remote, not checked", "none needed if verl can read it")], None
    if own:
        return [Check(name, OK, f"{path}: content not checked, data.custom_cls.path={own} reads it")], None
    if any(each in file for each in "*?["):
        return [Check(name, WARN, f"{file}: a pattern, not checked", "none needed if it matches files")], None
    if path.is_dir():
        inside = sorted(each.name for each in path.iterdir() if each.suffix in (".parquet", *_JSON))[:3]
        remedy = f"name its files: {name}=[{','.join(str(path / each) for each in inside)}]"
        return [Check(name, FAIL, f"{path} is a folder", remedy if inside else "name a file")], None
    if not path.is_file():
        return [Check(name, FAIL, f"no file {path}", _prepare(path))], None
    if path.suffix not in (".parquet", *_JSON):
        remedy = "convert it, or set data.custom_cls to a dataset class that reads it"
        return [Check(name, FAIL, f"{path}: verl reads .parquet, .json and .jsonl only", remedy)], None
    kind = "parquet" if path.suffix == ".parquet" else "JSON"
    try:
        rows, schema = _read_parquet(path) if kind == "parquet" else _read_json(path)
    except (OSError, ValueError) as error:  # ArrowException is a ValueError
        detail = f"{path} is not a readable {kind} file: {str(error).splitlines()[0]}"
        return [Check(name, FAIL, detail, f"convert or delete it; {_prepare(path)}")], None
    if not rows:
        return [Check(name, FAIL, f"{path}: 0 prompts", _prepare(path))], 0
    problems = [Check(name, FAIL, f"{path}: {detail}", remedy) for detail, remedy in _columns(config, schema)]
    return problems or [Check(name, OK, f"{path}: {rows} prompts")], rows


def _read_parquet(path: Path) -> tuple[int, Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as opened:
        return opened.metadata.num_rows, opened.schema_arrow


def _read_json(path: Path) -> tuple[int, Any]:
    """Return rows and schema of a file of JSON lines or of one JSON list, as ``datasets`` reads both."""
    import pyarrow as pa

    with path.open(encoding="utf-8") as lines:
        if lines.read(1) == "[":
            lines.seek(0)
            table = json.load(lines)
            rows = len(table)
        else:
            lines.seek(0)
            filled = (line for line in lines if line.strip())
            table = [json.loads(line) for _, line in zip(range(_ROWS), filled, strict=False)]
            rows = len(table) + sum(1 for _ in filled)
    if not all(isinstance(row, dict) for row in table[:_ROWS]):
        raise ValueError("its rows are not JSON objects")
    columns = {key: [row.get(key) for row in table[:_ROWS]] for row in table[:_ROWS] for key in row}
    return rows, pa.schema([(key, _type(values)) for key, values in columns.items()])


def _type(values: list[Any]) -> Any:
    """Return the type of a column; null, which no check refuses, where the rows differ in type."""
    import pyarrow as pa

    try:
        return pa.array(values).type
    except pa.ArrowException:
        return pa.null()


def _columns(config: Any, schema: Any) -> Iterator[tuple[str, str]]:
    import pyarrow.types as kinds

    def has(kind: Any, *names: str) -> bool:
        return kinds.is_null(kind) or (kinds.is_struct(kind) and {*names} <= {field.name for field in kind})

    def listed(kind: Any) -> bool:
        return kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)

    column = str(config.data.get("prompt_key") or "prompt")
    if column not in schema.names:
        near = nearest(column, schema.names).removeprefix("; ")
        yield (
            f"no column {column!r}, only {', '.join(schema.names)}",
            f"set data.prompt_key, or convert the file{f' ({near})' if near else ''}",
        )
    else:
        kind = schema.field(column).type
        if not (listed(kind) and has(kind.value_type, "role", "content")):
            yield f"column {column!r} has {_describe(kind)}, not {_MESSAGES}", "convert the column"
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
        unread = str(config.data.get("reward_fn_key"))
        remedy = "add it: the name of the dataset"
        if unread in schema.names:
            remedy = f"rename column {unread!r}: verl 0.9.1 does not read data.reward_fn_key"
        yield f"no column 'data_source'; {reads}", remedy
    if "reward_model" not in schema.names:
        yield f"no column 'reward_model'; {reads}", 'add it: {"ground_truth": ANSWER}'
    elif not has(kind := schema.field("reward_model").type, "ground_truth"):
        yield f"column 'reward_model' has {_describe(kind)}, not {{\"ground_truth\": ANSWER}}", "convert the column"


def _describe(kind: Any) -> str:
    text = re.sub("(?:large_)?string(?:_view)?", "text", re.sub(r"element: |item: ", "", str(kind)))
    return "plain text" if text == "text" else text if len(text) <= 60 else f"{text[:57]}..."


def _prepare(path: Path) -> str:
    if path.parent.name == "eval":  # all evaluation sets together, with the number of samples per problem
        return f"python -m examples.data.prepare eval --out {path.parent.parent}"
    for pattern, argument in PREPARED.items():
        if re.fullmatch(pattern, path.stem):
            return f"python -m examples.data.prepare {argument} --out {path.parent}"
    if "tiny_cpu" in path.parts:
        return "none needed with recipes/run_tiny_cpu.sh, which creates it; else create or download the dataset"
    return "create or download the dataset, or correct the path"
