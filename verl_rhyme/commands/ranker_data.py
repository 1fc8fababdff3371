"""Training data of a length ranker: token ids of prompts, and the lengths of their responses.

A history contains lengths by prompt key, but no prompts. The prompts come from the data set; their keys also depend on
the policy's chat template (:mod:`verl_rhyme.history.keys`). A run with logged responses has both.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from verl_rhyme.history import environment, inspection
from verl_rhyme.history.keys import data_key, template_label
from verl_rhyme.lengths.pairs import Pairs, join_by_key
from verl_rhyme.observability import events


class DataError(ValueError):
    """Source without usable training data; the message says why and what to give."""


def read(
    source: Path,
    data: Sequence[Path] = (),
    tokenizer: Path | None = None,
    column: str = "prompt",
    template: Mapping[str, Any] = MappingProxyType({}),
) -> Pairs:
    """Read prompts and lengths of a history, a checkpoint's ``global_step_N``, or a run whose event log has responses.

    A history also needs the run's ``data`` files (parquet, as in ``data.train_files``, with each prompt's messages in
    ``column``), the policy's folder as ``tokenizer``, and ``data.apply_chat_template_kwargs`` as ``template``. Raises
    DataError if the source has no data, or none that matches ``data``.
    """
    if not source.is_dir():
        raise DataError(f"{source} is not a folder: give a run, its history or a checkpoint's global_step_N")
    if (log := _event_log(source)) is not None and not data:
        return _logged(log)
    try:
        folders = list(inspection.find(source))
    except FileNotFoundError as error:
        raise DataError(
            f"{source} contains neither a history nor logged responses: train with "
            "actor_rollout_ref.rollout.custom.rhyme.events.responses=true, or give a checkpoint's global_step_N"
        ) from error
    if not data or tokenizer is None:
        raise DataError(
            f"{source} is a history, which contains only keys of prompts: give the run's data (--data train.parquet) "
            "and the policy's folder (--tokenizer)"
        )
    lengths: dict[bytes, np.ndarray] = {}
    for folder in folders:  # a checkpoint has one for each node, with equal contents
        try:
            lengths |= inspection.lengths(folder)
        except environment.CorruptEnvironment as error:
            raise DataError(f"{folder}: {error}") from error
    prompts = _tokenized(data, tokenizer, column, template)
    pairs = join_by_key(prompts, {key: counts.tolist() for key, counts in lengths.items()})
    if not len(pairs):
        raise DataError(
            f"none of the {len(prompts)} prompts of {', '.join(map(str, data))} is among the {len(lengths)} of "
            f"{source}: --data may be another run's data, --tokenizer {tokenizer} another policy's, or the chat "
            "template may have other options (set --template to the run's data.apply_chat_template_kwargs)"
        )
    return pairs


def _event_log(source: Path) -> Path | None:
    folders = [source, *sorted(source.glob("events")), *sorted(source.glob("*/events"))]
    return next((path for path in folders if any(path.glob("responses-*.arrow"))), None)


def _logged(folder: Path) -> Pairs:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        table = events.read_responses(folder)
    if not len(table):
        raise DataError(f"{folder}: no readable response in the event log")
    prompts: dict[bytes, Any] = {}
    lengths: dict[bytes, list[int]] = {}
    sizes = np.diff(table["tokens"].combine_chunks().offsets.to_numpy())
    keys = table["prompt_key"].to_pylist()
    texts = table["prompt"].combine_chunks()
    for row, (key, size) in enumerate(zip(keys, sizes.tolist(), strict=True)):
        if key not in prompts:
            prompts[key] = texts[row].as_py()
        lengths.setdefault(key, []).append(size)
    return join_by_key(prompts, lengths)


def _tokenized(
    data: Iterable[Path], folder: Path, column: str, template: Mapping[str, Any] = MappingProxyType({})
) -> dict[bytes, Sequence[int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"--tokenizer {folder}: transformers cannot load a tokenizer: {error}") from error
    prompts: dict[bytes, Sequence[int]] = {}
    label = template_label(tokenizer, options=template)
    for file in data:
        try:
            extra = [name for name in pq.read_schema(file).names if name == "extra_info"]
            table = pq.read_table(file, columns=[column, *extra])
            rows = table[column].to_pylist()
            extras = table[extra[0]].to_pylist() if extra else [None] * len(rows)
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise DataError(f"--data {file}: cannot read column {column} of a parquet file: {error}") from error
        for messages, extra_info in zip(rows, extras, strict=True):
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False, **template
            )
            tools = {name: (extra_info or {}).get(name) for name in ("tools_kwargs", "interaction_kwargs")}
            key = data_key({"raw_prompt": messages, "extra_info": extra_info, **tools}, label)
            prompts[bytes.fromhex(key)] = ids
    return prompts
