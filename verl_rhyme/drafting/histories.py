"""Histories of the prompts that are being answered, read once for all requests of a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from verl_rhyme.history.record import PromptHistory


class Histories:
    """Held while a request of the prompt lives.

    Args:
        lookup: A prompt's history by its key, or ``None``; called when the first of a prompt's requests starts.
    """

    def __init__(self, lookup: Callable[[bytes], PromptHistory | None]) -> None:
        self._lookup = lookup
        self._found: dict[bytes, PromptHistory | None] = {}
        self._users: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """Prompts with a live request."""
        return len(self._found)

    def take(self, key: bytes) -> PromptHistory | None:
        """For a request that starts; each is to be given back once."""
        if key not in self._found:
            self._found[key] = self._lookup(key)
        self._users[key] += 1
        return self._found[key]

    def give_back(self, key: bytes) -> None:
        """A request of the prompt is over."""
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key], self._found[key]
