"""Prompt keys: what makes two prompts the same one across epochs.

A prompt is what the user's data say: its messages, with the images, videos and audio in them, what its tools are given,
and what else ``extra_info`` holds for an agent loop, such as an environment's seed; but for the row's number: data that
repeat a prompt number each of its rows. What a chat template adds is no part of it: some add today's date, which
would make another prompt of each at midnight. The template itself is, with its options: under another one the policy
answers otherwise. (A date in the data's own messages makes another prompt.)

Lengths, drafts, placement and event log go by this one key. A prompt whose data are not known, such as one that another
client sends to an engine, goes by its token ids.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

#: Bytes of a prompt key.
KEY_BYTES = 16
#: Columns of a row of the data that make its key.
KEY_COLUMNS = ("raw_prompt", "multi_modal_data", "tools_kwargs", "interaction_kwargs", "extra_info")
#: Of ``extra_info``, where a row stands in the data.
_NUMBERING = ("index", "split")


def prompt_key(token_ids: Sequence[int]) -> bytes:
    """Key of a prompt whose data are not known: blake2b-128 of its token ids as little-endian int32.

    Args:
        token_ids: Token ids of the first-turn prompt, chat template applied.

    Returns:
        16 bytes.

    Raises:
        OverflowError: A token id does not fit in int32.
    """
    tokens = np.asarray(token_ids, dtype=np.int64)
    if tokens.size and not (tokens.min() >= -(1 << 31) and tokens.max() < 1 << 31):
        raise OverflowError(f"a prompt's token ids must fit in int32, found {tokens.min()}..{tokens.max()}")
    return hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=KEY_BYTES).digest()


def data_key(row: Mapping[str, Any], template: str = "") -> str:
    """Key of a prompt by its data, the same in every process. Never raises: a row that cannot be read has none.

    Args:
        row: Columns by name, of which :data:`KEY_COLUMNS` count; ``raw_prompt`` are verl's messages, dicts with
            ``role`` and ``content``, or one text. Entries that are ``None`` or empty count as missing. Images count by
            their encoded bytes, or by their pixels; files that a path names are not read.
        template: See :func:`template_label`.

    Returns:
        32 hex digits; empty where the row has no message with a content.
    """
    try:
        return _data_key(row, template)
    except Exception as error:
        _warn(f"{type(error).__name__}: {error}")
        return ""


@functools.lru_cache(maxsize=16)
def _warn(error: str) -> None:
    logger.warning("prompts whose data cannot be read go by their token ids (told once): %s", error)


def _data_key(row: Mapping[str, Any], template: str) -> str:
    messages = row.get("raw_prompt")
    if not any(_content(message) for message in ([messages] if isinstance(messages, str) else _listed(messages))):
        return ""
    digest = hashlib.blake2b(template.encode(), digest_size=KEY_BYTES)
    columns = {name: row.get(name) for name in KEY_COLUMNS}
    if isinstance(extra := columns["extra_info"], Mapping):
        columns["extra_info"] = {name: value for name, value in extra.items() if name not in _NUMBERING}
    _feed(digest, columns)
    return digest.hexdigest()


def template_label(tokenizer: Any, processor: Any = None, options: Mapping[str, Any] | None = None) -> str:
    """What tells one chat template from another.

    Args:
        tokenizer: With a ``chat_template``, or ``None``.
        processor: The same, of a model with images; where it has a template, that one counts.
        options: Of the template (``data.apply_chat_template_kwargs``).

    Returns:
        32 hex digits.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    _feed(digest, getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None))
    _feed(digest, dict(options or {}))
    return digest.hexdigest()


def visit_label(uid: str) -> int:
    """Label of a prompt's visit, by verl's uid, which each prompt that is loaded gets anew: 0 to 2**31 - 1."""
    return zlib.crc32(uid.encode()) >> 1


def _listed(messages: Any) -> Iterable[Any]:
    return messages if isinstance(messages, Iterable) and not isinstance(messages, Mapping | bytes) else ()


def _content(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else message
    return content is not None and (not hasattr(content, "__len__") or len(content) > 0)


def _feed(digest: Any, value: Any) -> None:
    """Feed a value to a hash, without ambiguity: what it is, how much of it there is, and its bytes."""

    def put(kind: bytes, of: bytes | memoryview = b"") -> None:
        digest.update(kind + len(of).to_bytes(8, "little"))
        digest.update(of)

    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None:
        put(b"0")
    elif isinstance(value, str):
        put(b"s", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray | memoryview):
        put(b"b", memoryview(value))
    elif isinstance(value, bool | int | float):
        put(b"n", repr(value).encode())
    elif isinstance(value, Mapping):
        # An image that was opened from bytes which stand beside it (verl's ``RLHFDataset``) is not decoded for this.
        skipped = "image" if isinstance(value.get("bytes"), bytes) else None
        entries = {str(name): each for name, each in value.items() if name != skipped and not _is_missing(each)}
        put(b"m", str(len(entries)).encode())
        for name in sorted(entries):
            _feed(digest, name)
            _feed(digest, entries[name])
    elif isinstance(value, set | frozenset):
        _feed(digest, sorted(map(repr, value)))
    elif (array := _array(value)) is not None:
        put(b"a", f"{array.dtype} {array.shape}".encode())
        put(b"b", array.tobytes())
    elif hasattr(value, "tobytes") and hasattr(value, "mode"):  # PIL's
        _feed_image(digest, value)
    elif isinstance(value, Iterable):
        parts = list(value)
        put(b"l", str(len(parts)).encode())
        for each in parts:
            _feed(digest, each)
    else:
        put(b"o", type(value).__qualname__.encode())


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping | list | tuple) and not value)


def _array(value: Any) -> np.ndarray | None:
    """Numbers of an array or a tensor; ``None`` where it is neither."""
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else value
    if not hasattr(value, "numpy"):
        return None
    try:
        return np.asarray(value.detach().cpu().numpy())
    except (AttributeError, TypeError):  # numpy has no bfloat16
        return np.asarray(value.detach().cpu().float().numpy())


def _feed_image(digest: Any, image: Any) -> None:
    try:
        palette = image.getpalette() if image.mode == "P" else None
        _feed(digest, [image.mode, image.size, palette, image.tobytes()])
    except OSError:  # truncated: whoever wants its pixels says so
        _feed(digest, [image.mode, image.size])
