"""What a length ranker is trained on, from where runs leave it: prompts' token ids and the lengths of their responses.

A history knows lengths by prompt key and no prompts: the data set has these, of which the key is made together with the
policy's chat template (:mod:`verl_rhyme.history.keys`). A run that logged its responses has both.
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
from verl_rhyme.lengths.pairs import Pairs, joined
from verl_rhyme.observability import events


class DataError(ValueError):
    """There is nothing to train on; the message says why, and what to give."""


def read(
    source: Path,
    data: Sequence[Path] = (),
    tokenizer: Path | None = None,
    column: str = "prompt",
    template: Mapping[str, Any] = MappingProxyType({}),
) -> Pairs:
    """Prompts and lengths.

    Args:
        source: A history folder or a checkpoint's ``global_step_N``; or a run folder whose event log has responses.
        data: Of a history: the run's data files (parquet, as verl's ``data.train_files``).
        tokenizer: Of a history: the policy's folder.
        column: Of ``data``, with the messages of each prompt.
        template: Of a history: options of the chat template (``data.apply_chat_template_kwargs``).

    Raises:
        DataError: Nothing there, or nothing that fits.
    """
    if not source.is_dir():
        raise DataError(f"{source} is no folder: give a run's, its history's or a checkpoint's global_step_N")
    if (log := _event_log(source)) is not None and not data:
        return _logged(log)
    try:
        folders = list(inspection.find(source))
    except FileNotFoundError as error:
        raise DataError(
            f"{source}: no history in it, and no responses of a run: train with "
            "actor_rollout_ref.rollout.custom.rhyme.events.responses=true, or give a checkpoint's global_step_N"
        ) from error
    if not data or tokenizer is None:
        raise DataError(
            f"{source}: a history knows prompts by their keys alone: name the run's data (--data train.parquet) and "
            "its policy's folder (--tokenizer)"
        )
    lengths: dict[bytes, np.ndarray] = {}
    for folder in folders:  # nodes of a checkpoint hold the same
        try:
            lengths |= inspection.lengths(folder)
        except environment.Damaged as error:
            raise DataError(f"{folder}: {error}") from error
    prompts = _tokenized(data, tokenizer, column, template)
    found = joined(prompts, {key: of.tolist() for key, of in lengths.items()})
    if not len(found):
        raise DataError(
            f"none of the {len(prompts)} prompts of {', '.join(map(str, data))} is among the {len(lengths)} of "
            f"{source}: it is another run's data, or {tokenizer} another policy's tokenizer, or its chat template has "
            "other options (--template: the run's data.apply_chat_template_kwargs)"
        )
    return found


def _event_log(source: Path) -> Path | None:
    found = [source, *sorted(source.glob("events")), *sorted(source.glob("*/events"))]
    return next((path for path in found if any(path.glob("responses-*.arrow"))), None)


def _logged(folder: Path) -> Pairs:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        table = events.read_responses(folder)
    if not len(table):
        raise DataError(f"{folder}: no response in it can be read")
    prompts: dict[bytes, Any] = {}
    lengths: dict[bytes, list[int]] = {}
    sizes = np.diff(table["tokens"].combine_chunks().offsets.to_numpy())
    keys = table["prompt_key"].to_pylist()
    texts = table["prompt"].combine_chunks()
    for row, (key, size) in enumerate(zip(keys, sizes.tolist(), strict=True)):
        if key not in prompts:
            prompts[key] = texts[row].as_py()
        lengths.setdefault(key, []).append(size)
    return joined(prompts, lengths)


def _tokenized(
    data: Iterable[Path], folder: Path, column: str, template: Mapping[str, Any] = MappingProxyType({})
) -> dict[bytes, Sequence[int]]:
    """Token ids of a data set's prompts, by key."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"--tokenizer {folder}: transformers finds none there: {error}") from error
    found: dict[bytes, Sequence[int]] = {}
    label = template_label(tokenizer, options=template)
    for file in data:
        try:
            extra = [name for name in pq.read_schema(file).names if name == "extra_info"]
            table = pq.read_table(file, columns=[column, *extra])
            rows = table[column].to_pylist()
            extras = table[extra[0]].to_pylist() if extra else [None] * len(rows)
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise DataError(f"--data {file}: no column {column} of a parquet file can be read: {error}") from error
        for messages, extra_info in zip(rows, extras, strict=True):
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False, **template
            )
            tools = {name: (extra_info or {}).get(name) for name in ("tools_kwargs", "interaction_kwargs")}
            key = data_key({"raw_prompt": messages, "extra_info": extra_info, **tools}, label)
            found[bytes.fromhex(key)] = ids
    return found
