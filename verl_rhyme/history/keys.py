"""Prompt keys: what makes two prompts the same one across epochs."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

#: Bytes of a prompt key.
KEY_BYTES = 16


def prompt_key(token_ids: Sequence[int]) -> bytes:
    """Key of a prompt: blake2b-128 of its first turn's token ids as little-endian int32.

    verl's uid is drawn anew every step, so the text itself is the identity.

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


def visit_label(uid: str) -> int:
    """Label of a prompt's visit, by verl's uid, which each prompt that is loaded gets anew: 0 to 2**31 - 1."""
    return zlib.crc32(uid.encode()) >> 1


def messages_key(messages: Any) -> str:
    """Key of a prompt before it is tokenized: of the texts and roles of its messages, what is no text left out.

    Args:
        messages: verl's ``raw_prompt``: dicts with ``role`` and ``content``, the latter a text or parts of which some
            have a ``text``; or one text.

    Returns:
        32 hex digits, another name than :func:`prompt_key` gives for the same prompt; empty where there is no text.
    """
    digest, known = hashlib.blake2b(digest_size=KEY_BYTES), False
    for text in _texts(messages):
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
        known = True
    return digest.hexdigest() if known else ""


def _texts(content: Any) -> Iterator[str]:
    """Of a prompt, message or part, whatever it is made of."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        for name in ("role", "content", "text"):
            yield from _texts(content.get(name))
    elif isinstance(content, Iterable) and not isinstance(content, bytes):
        for part in content:
            yield from _texts(part)
