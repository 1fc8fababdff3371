"""Prompt keys, which identify a prompt across epochs.

The key covers the user's data: messages with images, videos and audio, tool arguments, and the rest of ``extra_info``,
such as an environment's seed. It leaves out the row number, because repeated prompts have different ones, and text
that a chat template adds, because a date would change the key at midnight. It covers the template itself with its
options, because they change the policy's answers. A prompt without known data has a key of its token ids.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import numpy as np

from verl_rhyme.once import warn_once

logger = logging.getLogger(__name__)

#: Bytes of a prompt key.
KEY_BYTES = 16
#: Columns of a data row that enter the key.
KEY_COLUMNS = ("raw_prompt", "multi_modal_data", "tools_kwargs", "interaction_kwargs", "extra_info")
#: Entries of ``extra_info`` that number the rows.
_NUMBERING = ("index", "split")


def prompt_key(token_ids: Sequence[int]) -> bytes:
    """Return the key of a prompt without known data, 16 bytes, from the token ids of its first turn.

    Raises OverflowError if one does not fit in int32.
    """
    tokens = np.asarray(token_ids, dtype=np.int64)
    if tokens.size and not (tokens.min() >= -(1 << 31) and tokens.max() < 1 << 31):
        raise OverflowError(f"a prompt's token ids must fit in int32, but they are {tokens.min()} to {tokens.max()}")
    return hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=KEY_BYTES).digest()


def turn_key(
    token_ids: Sequence[int], inputs: Mapping[str, Any], seen: dict[int, tuple[Any, Any]] | None = None
) -> str:
    """Return the key of what a turn answers, 64 hex digits: the tokens before it and its media and sampling options.

    ``None`` and empty inputs count as missing; unreadable ones give a unique key. ``seen`` holds media with their
    hashes, by identity, so that an object of several turns is hashed once. Raises as :func:`prompt_key`.
    """
    try:
        others = _digest(inputs, seen)
    except Exception as error:
        warn_once(logger, "turns whose inputs cannot be read are never continued (logged once): %r", error)
        others = uuid4().hex
    return prompt_key(token_ids).hex() + others


def data_key(row: Mapping[str, Any], template: str = "") -> str:
    """Return the key of a prompt from its data, 32 hex digits, the same in every process. Never raises.

    ``row`` holds columns by name, of which :data:`KEY_COLUMNS` count. ``raw_prompt`` is verl's messages or one text;
    empty entries count as missing, images count by encoded bytes or pixels, and files named by a path are not read.
    Empty if no message has content or the row cannot be read.
    """
    try:
        messages = row.get("raw_prompt")
        if not any(_content(message) for message in ([messages] if isinstance(messages, str) else _listed(messages))):
            return ""
        columns = {name: row.get(name) for name in KEY_COLUMNS}
        if isinstance(extra := columns["extra_info"], Mapping):
            columns["extra_info"] = {name: value for name, value in extra.items() if name not in _NUMBERING}
        return _digest([template, columns])
    except Exception as error:
        warn_once(logger, "prompts whose data cannot be read use a key of their token ids (logged once): %r", error)
        return ""


def template_label(tokenizer: Any, processor: Any = None, options: Mapping[str, Any] | None = None) -> str:
    """Return a label, 32 hex digits, of a chat template and its options (``data.apply_chat_template_kwargs``).

    The template of a multimodal model's processor takes precedence.
    """
    template = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    return _digest([template, dict(options or {})])


def visit_label(uid: str) -> int:
    """Return the label of a prompt's visit, 0 to 2**31 - 1, from the uid that verl assigns at each loading."""
    return zlib.crc32(uid.encode()) >> 1


def _listed(messages: Any) -> Iterable[Any]:
    return messages if isinstance(messages, Iterable) and not isinstance(messages, Mapping | bytes) else ()


def _content(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else message
    return content is not None and (not hasattr(content, "__len__") or len(content) > 0)


def _digest(value: Any, seen: dict[int, tuple[Any, Any]] | None = None) -> str:
    return _hash(json.dumps(_plain(value, {} if seen is None else seen), sort_keys=True).encode())


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=KEY_BYTES).hexdigest()


def _plain(value: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
    """Return data for JSON: media by a hash (``seen``: by identity), other objects by their type."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if (known := seen.get(id(value))) is not None:
        return known[1]
    if (media := _plain_media(value)) is not None:
        seen[id(value)] = value, media
        return media
    if isinstance(value, Mapping):
        # Do not decode an image whose encoded bytes are in the same dict (verl's ``RLHFDataset``).
        skipped = "image" if isinstance(value.get("bytes"), bytes) else None
        given = {str(name): each for name, each in value.items() if name != skipped and not _is_missing(each)}
        return {name: _plain(each, seen) for name, each in given.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return [_plain(each, seen) for each in value] if isinstance(value, Iterable) else type(value).__qualname__


def _plain_media(value: Any) -> list[Any] | None:
    if isinstance(value, bytes | bytearray | memoryview):
        return ["bytes", _hash(bytes(value))]
    if (array := _array(value)) is not None:
        return [str(array.dtype), array.shape, _hash(array.tobytes())]
    return _plain_image(value) if hasattr(value, "tobytes") and hasattr(value, "mode") else None


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping | list | tuple) and not value)


def _array(value: Any) -> np.ndarray | None:
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else value
    if not hasattr(value, "numpy"):
        return None
    try:
        return np.asarray(value.detach().cpu().numpy())
    except (AttributeError, TypeError):  # numpy has no bfloat16
        return np.asarray(value.detach().cpu().float().numpy())


def _plain_image(image: Any) -> list[Any]:
    try:
        palette = image.getpalette() if image.mode == "P" else None
        return [image.mode, image.size, palette, _hash(image.tobytes())]
    except OSError:  # truncated image; the code that needs its pixels reports it
        return [image.mode, image.size]
