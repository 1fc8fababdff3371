"""Histories of the prompts that are being answered, read once for all requests of a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from verl_rhyme.history.record import PromptHistory


class Pending(Enum):
    """What a source answers that is still reading."""

    PENDING = 0


#: It will be told by :meth:`Histories.arrive`.
PENDING = Pending.PENDING


class Source(Protocol):
    """Where histories come from."""

    def get(self, key: bytes) -> PromptHistory | Pending | None:
        """A prompt's history; called when the first of its requests starts."""

    def release(self, key: bytes, history: PromptHistory | None) -> None:
        """The last of a prompt's requests is over, and nobody looks at its history any more."""


Get = Callable[[bytes], PromptHistory | None]


class _Function:
    def __init__(self, get: Get) -> None:
        self.get = get

    def release(self, key: bytes, history: PromptHistory | None) -> None:
        pass


class Histories:
    """Held while a request of the prompt lives.

    Args:
        source: Where they come from; a function gives a prompt's history by its key, or ``None``.
    """

    def __init__(self, source: Source | Get) -> None:
        self._source = _Function(source) if callable(source) else source
        self._found: dict[bytes, PromptHistory | Pending | None] = {}
        self._users: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """Prompts with a live request."""
        return len(self._found)

    def take(self, key: bytes) -> PromptHistory | Pending | None:
        """For a request that starts; each is to be given back once."""
        if key not in self._found:
            self._found[key] = self._source.get(key)
        self._users[key] += 1
        return self._found[key]

    def arrive(self, key: bytes, history: PromptHistory | None) -> bool:
        """What was pending is there.

        Returns:
            Whether somebody waits for it.
        """
        if self._found.get(key) is not PENDING:
            return False
        self._found[key] = history
        return True

    def give_back(self, key: bytes) -> None:
        """A request of the prompt is over."""
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            history = self._found.pop(key)
            self._source.release(key, None if history is PENDING else history)
