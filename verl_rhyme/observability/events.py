"""Event log: Arrow files in the run folder, with a row per request, per stage of a step and per metric of a step, and
optionally a row per response with its tokens.

Each flush writes one small file under a temporary name and renames it, so a killed run leaves earlier files intact.
Every opened log is a new session, numbered in the file names. If a later session begins at step k (it resumed from the
checkpoint before k), readers drop the rows of earlier sessions from step k on. Those steps no longer belong to the
model, and no step counts twice. A resumed run may repeat validation before its first step; this replaces only earlier
validation of the same step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import numbers
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from verl_rhyme.drafting.policy import SOURCES
from verl_rhyme.observability.request_record import RequestRecord
from verl_rhyme.once import warn_once

logger = logging.getLogger(__name__)

_TYPES = {"str": pa.string(), "int": pa.int32(), "float": pa.float64(), "bool": pa.bool_()}
_OTHER_TYPES = {"prompt_key": pa.binary(16), "policy_version_start": pa.int64(), "policy_version_end": pa.int64()}
#: A column of several integers a request: shape [requests, 2 * sources].
_OTHER_TYPES["by_source"] = pa.list_(pa.int32(), 2 * len(SOURCES))


def _type(field: dataclasses.Field) -> pa.DataType:
    return _OTHER_TYPES.get(field.name) or _TYPES[str(field.type).removesuffix(" | None")]


#: One row per request: the server's :class:`RequestRecord` and the fate of the response. Times are in seconds since the
#: Unix epoch; ``*_at`` is null if the event never happened. ``step`` is the step that trained (or validated) the
#: response; ``epoch`` counts from 0, as in verl.
REQUESTS = pa.schema(
    [
        ("step", pa.int64()),
        ("epoch", pa.int64()),
        ("uid", pa.string()),
        *((field.name, _type(field)) for field in dataclasses.fields(RequestRecord) if field.name != "id"),
        ("reward", pa.float64()),
        ("trained", pa.bool_()),
        ("validate", pa.bool_()),
    ]
)

#: One row per stage of a step; ``stage`` is verl's timer name ("gen", "update_actor", "update_weights", ...).
STAGES = pa.schema(
    [
        ("step", pa.int64()),
        ("epoch", pa.int64()),
        ("stage", pa.string()),
        ("started_at", pa.float64()),
        ("duration_s", pa.float64()),
    ]
)

#: One row per metric of a step, as the trainer passes them to verl's loggers.
METRICS = pa.schema([("step", pa.int64()), ("epoch", pa.int64()), ("name", pa.string()), ("value", pa.float64())])

#: One row per trained response, for replays of the run (``benchmarks/``). Off by default.
RESPONSES = pa.schema(
    [
        ("step", pa.int64()),
        ("epoch", pa.int64()),
        ("prompt_key", pa.binary(16)),
        ("sample", pa.int32()),
        ("reward", pa.float64()),
        ("policy_version", pa.int64()),
        ("prompt", pa.list_(pa.int32())),
        ("tokens", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
    ]
)

_SCHEMAS = {"requests": REQUESTS, "stages": STAGES, "metrics": METRICS, "responses": RESPONSES}
#: Names of the run, engine and slots, for the report. Not the ``run.json`` of the checkpoint folder.
INFO_FILE = "run.json"
_FILE = re.compile(r"(requests|validation|stages|metrics|responses)-(\d+)-(\d+)-(\d+)\.arrow")


class EventLog:
    """Writer of the event log; it continues that of an earlier run. Only one process may write: the trainer.

    A full or read-only disk causes one warning and lost events, but never ends the run. The next flush tries again.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._files = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for unfinished in self.folder.glob(".*.tmp"):  # left by a run that was killed during a write
                unfinished.unlink()
            self._session = 1 + max((session for _, _, session, _, _ in _files(self.folder)), default=0)
        except OSError as error:
            self._session = 1
            self._warn(error)

    def append_requests(self, step: int, epoch: int, columns: Mapping[str, Any]) -> None:
        """Log requests of a step (from 1) and epoch (from 0, as in verl); several calls per step are allowed.

        ``columns`` are those of :data:`REQUESTS`: a sequence or array of shape [requests], or one value for all rows.
        Missing ones are null, unknown ones a ValueError. ``prompt_key`` takes 16 bytes or 32 hex digits.
        """
        if (keys := columns.get("prompt_key")) is not None:
            columns = {**columns, "prompt_key": [bytes.fromhex(k) if isinstance(k, str) else k for k in keys]}
        self._append("requests", step, epoch, columns, validation=bool(np.all(columns.get("validate", False))))

    def append_stages(self, step: int, epoch: int, columns: Mapping[str, Any]) -> None:  # STAGES
        self._append("stages", step, epoch, columns)

    def append_metrics(self, step: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of one finished step, with their values; those that are not numbers are left out."""
        values = {name: float(value) for name, value in metrics.items() if _is_number(value)}
        self._append("metrics", step, epoch, {"name": [*values], "value": [*values.values()]})

    def append_responses(self, step: int, epoch: int, columns: Mapping[str, Any]) -> None:  # RESPONSES
        self._append("responses", step, epoch, columns)

    def describe(self, run: str, **info: Any) -> None:
        """Write facts that the report needs as JSON: ``engine``, ``slots`` (Q of ``metrics.bubble_ratio``) and
        ``rollout`` (the stage that lasts as long as rollout); later values replace earlier ones. A run that resumes
        under another name keeps all its ``names``, oldest first.
        """
        before = read_info(self.folder)
        names = [*dict.fromkeys([*before.get("names", []), run])]
        self._write(INFO_FILE, json.dumps({**before, **info, "names": names}, indent=2).encode())

    def _append(self, kind: str, step: int, epoch: int, columns: Mapping[str, Any], validation: bool = False) -> None:
        batch = _record_batch(_SCHEMAS[kind], {**columns, "step": step, "epoch": epoch})
        if batch.num_rows == 0:
            return
        name = f"{'validation' if validation else kind}-{step:06d}-{self._session:03d}-{self._files:06d}.arrow"
        self._files += 1
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        self._write(name, sink.getvalue())

    def _write(self, name: str, content: bytes | pa.Buffer) -> None:
        temporary = self.folder / f".{name}.tmp"
        try:
            temporary.write_bytes(content)
            temporary.replace(self.folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        warn_once(
            logger,
            "event log: cannot write to %s (%s); training continues without these events. "
            "Free disk space or set actor_rollout_ref.rollout.custom.rhyme.events.dir to another folder",
            self.folder,
            error,
        )


def read_requests(folder: str | os.PathLike[str]) -> pa.Table:
    """Read all requests of a run, ordered by step; unreadable files are skipped with a warning."""
    return _read(Path(folder), "requests")


def read_stages(folder: str | os.PathLike[str]) -> pa.Table:
    return _read(Path(folder), "stages")


def read_metrics(folder: str | os.PathLike[str]) -> dict[int, dict[str, float]]:
    """Read the metrics of finished steps, by step and name."""
    steps: dict[int, dict[str, float]] = {}
    columns = _read(Path(folder), "metrics").to_pydict()
    for step, name, value in zip(*(columns[column] for column in ("step", "name", "value")), strict=True):
        steps.setdefault(step, {})[name] = value
    return steps


def read_responses(folder: str | os.PathLike[str]) -> pa.Table:
    return _read(Path(folder), "responses")


def read_info(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the facts that :meth:`EventLog.describe` wrote; empty if they are missing or unreadable."""
    try:
        info = json.loads((Path(folder) / INFO_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def to_numpy(table: pa.Table) -> dict[str, np.ndarray]:
    """Convert columns to numpy arrays: null becomes NaN in float columns, 0 in integers, False in booleans. Equal texts
    are one object.
    """
    columns = {}
    for field in table.schema:
        column = table[field.name]
        if column.null_count and (pa.types.is_integer(field.type) or pa.types.is_boolean(field.type)):
            column = column.fill_null(False if pa.types.is_boolean(field.type) else 0)
        if pa.types.is_string(field.type) or pa.types.is_fixed_size_binary(field.type):
            texts = column.dictionary_encode().unify_dictionaries().combine_chunks()
            known = np.append(texts.dictionary.to_numpy(zero_copy_only=False), np.array([None]))
            columns[field.name] = known[texts.indices.fill_null(len(known) - 1).to_numpy()]
        elif pa.types.is_fixed_size_list(field.type):
            zeros = [0] * field.type.list_size
            columns[field.name] = np.array([value or zeros for value in column.to_pylist()]).reshape(
                len(column), len(zeros) // 2, 2
            )
        else:
            columns[field.name] = column.to_numpy()
    return columns


def _record_batch(schema: pa.Schema, columns: Mapping[str, Any]) -> pa.RecordBatch:
    if unknown := set(columns) - set(schema.names):
        raise ValueError(f"event log: unknown columns {sorted(unknown)}; known: {schema.names}")
    rows = max((len(values) for values in columns.values() if _is_column(values)), default=1)
    arrays = []
    for field in schema:
        value = columns.get(field.name)
        if isinstance(value, np.ndarray) and value.ndim > 1:
            value = value.reshape(rows, math.prod(value.shape[1:])).tolist()
        if _is_column(value):
            arrays.append(pa.array(value, type=field.type, from_pandas=isinstance(value, np.ndarray)))
        else:
            arrays.append(pa.repeat(pa.scalar(value, type=field.type), rows))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real | np.bool_) or (isinstance(value, np.ndarray) and value.ndim == 0)


def _is_column(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _files(folder: Path) -> list[tuple[str, int, int, int, Path]]:
    """List (kind, step, session, number, path) of every complete file."""
    files = []
    for entry in os.scandir(folder):
        if match := _FILE.fullmatch(entry.name):
            kind, step, session, number = match.groups()
            files.append((kind, int(step), int(session), int(number), Path(entry.path)))
    return files


def _live_files(folder: Path, kind: str) -> list[Path]:
    """List files of ``kind`` that no later session replaced, by step, then age; requests include validation."""
    files = _files(folder)
    begins: dict[int, int] = {}
    validated: dict[int, int] = {}  # by step, the last session that validated it
    for file_kind, step, session, _, _ in files:
        if file_kind == "validation":
            validated[step] = max(session, validated.get(step, session))
        else:
            begins[session] = min(step, begins.get(session, step))
    live = [
        (step, session, number, path)
        for file_kind, step, session, number, path in files
        if (file_kind == kind or (file_kind == "validation" and kind == "requests" and session == validated[step]))
        and all(step < begin for later, begin in begins.items() if later > session)
    ]
    return [path for *_, path in sorted(live)]


def _read(folder: Path, kind: str) -> pa.Table:
    schema = _SCHEMAS[kind]
    tables = [schema.empty_table()]
    for path in _live_files(folder, kind) if folder.is_dir() else ():
        try:
            # Read, not mapped: truncating a mapped file would raise a bus error. Full validation, because a damaged
            # offset could otherwise point out of the buffer.
            table = pa.ipc.open_file(pa.py_buffer(path.read_bytes())).read_all()
            table.validate(full=True)
            tables.append(_conform(table, schema))
        except (OSError, pa.ArrowException, ValueError) as error:
            warnings.warn(f"event log: {path} is unreadable and is skipped ({error})", stacklevel=3)
    return pa.concat_tables(tables)


def _conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Convert a file of another version: missing columns become null, unknown ones are dropped."""
    return pa.table(
        [
            table[field.name].cast(field.type) if field.name in table.schema.names else pa.nulls(len(table), field.type)
            for field in schema
        ],
        schema=schema,
    )
