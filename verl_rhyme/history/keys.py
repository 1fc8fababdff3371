"""Prompt keys, which identify a prompt across epochs.

The key covers the user's data: the messages with their images, videos and audio, the arguments of the tools, and the
rest of ``extra_info``, such as an environment's seed. It leaves out the row number, because repeated prompts have
different row numbers. It leaves out text that a chat template adds: some templates add today's date, and the key would
change at midnight. It covers the template itself with its options, because they change the policy's answers. (A date in
the data's messages is part of the key.)

Lengths, drafts, placement and the event log all use this key. A prompt without known data, such as a request of another
client, uses a key of its token ids.
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
#: Columns of a data row that enter the key.
KEY_COLUMNS = ("raw_prompt", "multi_modal_data", "tools_kwargs", "interaction_kwargs", "extra_info")
#: Entries of ``extra_info`` that number the rows.
_NUMBERING = ("index", "split")


def prompt_key(token_ids: Sequence[int]) -> bytes:
    """Return the key of a prompt without known data: blake2b-128 of its token ids as little-endian int32.

    Args:
        token_ids: Token ids of the first-turn prompt, chat template applied.

    Returns:
        The key, 16 bytes.

    Raises:
        OverflowError: A token id does not fit in int32.
    """
    tokens = np.asarray(token_ids, dtype=np.int64)
    if tokens.size and not (tokens.min() >= -(1 << 31) and tokens.max() < 1 << 31):
        raise OverflowError(f"a prompt's token ids must fit in int32, but they are {tokens.min()} to {tokens.max()}")
    return hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=KEY_BYTES).digest()


def data_key(row: Mapping[str, Any], template: str = "") -> str:
    """Return the key of a prompt from its data, the same in every process. Never raises.

    Args:
        row: Columns by name; :data:`KEY_COLUMNS` count. ``raw_prompt`` holds verl's messages, dicts with ``role`` and
            ``content``, or one text. ``None`` and empty entries count as missing. Images count by their encoded bytes
            or their pixels; files named by a path are not read.
        template: Label from :func:`template_label`.

    Returns:
        32 hex digits; empty if the row has no message with content or cannot be read.
    """
    try:
        return _data_key(row, template)
    except Exception as error:
        _warn(f"{type(error).__name__}: {error}")
        return ""


@functools.lru_cache(maxsize=16)
def _warn(error: str) -> None:
    logger.warning("prompts whose data cannot be read use a key of their token ids (logged once): %s", error)


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
    """Return a label that identifies a chat template and its options.

    Args:
        tokenizer: Tokenizer with a ``chat_template``, or ``None``.
        processor: Processor of a multimodal model; its template, if any, takes precedence.
        options: Options of the template (``data.apply_chat_template_kwargs``).

    Returns:
        32 hex digits.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    _feed(digest, getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None))
    _feed(digest, dict(options or {}))
    return digest.hexdigest()


def visit_label(uid: str) -> int:
    """Return the label of a prompt's visit, 0 to 2**31 - 1, from the uid that verl assigns at each loading."""
    return zlib.crc32(uid.encode()) >> 1


def _listed(messages: Any) -> Iterable[Any]:
    return messages if isinstance(messages, Iterable) and not isinstance(messages, Mapping | bytes) else ()


def _content(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else message
    return content is not None and (not hasattr(content, "__len__") or len(content) > 0)


def _feed(digest: Any, value: Any) -> None:
    """Feed a value to a hash unambiguously: its kind, its length, and its bytes."""

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
        # Do not decode an image whose encoded bytes are in the same dict (verl's ``RLHFDataset``).
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
    elif hasattr(value, "tobytes") and hasattr(value, "mode"):  # a PIL image
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
    """Return the numbers of an array or a tensor; ``None`` for other values."""
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
    except OSError:  # truncated image; the code that needs its pixels reports it
        _feed(digest, [image.mode, image.size])
