"""Histories of the prompts of live requests, read once for all requests of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Generic, Protocol, TypeVar

from verl_rhyme.history.record import PromptHistory


class Pending(Enum):
    PENDING = 0


#: Placeholder for a history that the source is still reading; :meth:`Histories.deliver` delivers it.
PENDING = Pending.PENDING


class Source(Protocol):
    def get(self, key: bytes) -> PromptHistory | Pending | None:
        """Called when the first request of the prompt starts."""

    def release(self, key: bytes, history: PromptHistory | None) -> None:
        """Called when the last request of the prompt ends, to free its history."""


Get = Callable[[bytes], PromptHistory | None]
Request = TypeVar("Request")


class _Function:
    def __init__(self, get: Get) -> None:
        self.get = get

    def release(self, key: bytes, history: PromptHistory | None) -> None:
        pass


class Histories(Generic[Request]):
    """Histories of prompts with live requests."""

    def __init__(self, source: Source | Get) -> None:
        self._source = _Function(source) if callable(source) else source
        self._found: dict[bytes, PromptHistory | Pending | None] = {}
        self._requests: dict[bytes, list[Request]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def acquire(self, key: bytes, request: Request) -> PromptHistory | Pending | None:
        """Return the history for a new request, which must :meth:`release` it once."""
        if key not in self._found:
            self._found[key] = self._source.get(key)
        self._requests.setdefault(key, []).append(request)
        return self._found[key]

    def deliver(self, key: bytes, history: PromptHistory | None) -> list[Request]:
        """Set a pending history. Returns the requests that wait for it."""
        if self._found.get(key) is not PENDING:
            return []
        self._found[key] = history
        return self._requests[key]

    def release(self, key: bytes, request: Request) -> None:
        """Release the history for one request; the last request frees it."""
        self._requests[key].remove(request)
        if not self._requests[key]:
            del self._requests[key]
            history = self._found.pop(key)
            self._source.release(key, None if history is PENDING else history)
