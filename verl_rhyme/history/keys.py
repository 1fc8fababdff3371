"""Prompt keys: what makes two prompts the same one across epochs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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


def messages_key(messages: Any) -> str:
    """Key of a prompt before it is tokenized: of the texts and roles of its messages, what is no text left out.

    Args:
        messages: verl's ``raw_prompt``: dicts with ``role`` and ``content``, the latter a text or parts of which some
            have a ``text``.

    Returns:
        32 hex digits. Another name than :func:`prompt_key` gives, for the same prompt.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for message in messages:
        content = message.get("content")
        parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content or ()]
        for text in (str(message.get("role")), *parts):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
