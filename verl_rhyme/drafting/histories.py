"""Histories of the prompts of live requests, read once for all requests of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from verl_rhyme.history.record import PromptHistory

#: Returns a prompt's history when its first request starts; None if there is none, or not yet: it may follow by
#: ``add_history`` of the drafter.
Get = Callable[[bytes], PromptHistory | None]
#: Frees a prompt's history when its last request has ended.
Release = Callable[[bytes, PromptHistory | None], None]
Request = TypeVar("Request")


def keep(key: bytes, history: PromptHistory | None) -> None:
    """The :data:`Release` of histories that are not freed."""


class Histories(Generic[Request]):
    """Histories of prompts with live requests."""

    def __init__(self, get: Get, release: Release = keep) -> None:
        self._get, self._release = get, release
        self._found: dict[bytes, PromptHistory | None] = {}
        self._requests: dict[bytes, list[Request]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def acquire(self, key: bytes, request: Request) -> PromptHistory | None:
        """Return the history for a new request, which must :meth:`release` it once."""
        if key not in self._found:
            self._found[key] = self._get(key)
        self._requests.setdefault(key, []).append(request)
        return self._found[key]

    def deliver(self, key: bytes, history: PromptHistory | None) -> list[Request]:
        """Set a history that was missing; return the requests that wait for it."""
        if self._found.get(key) is not None or key not in self._found:
            return []
        self._found[key] = history
        return self._requests[key]

    def release(self, key: bytes, request: Request) -> None:
        """Release the history for one request; the last request frees it."""
        self._requests[key].remove(request)
        if not self._requests[key]:
            del self._requests[key]
            self._release(key, self._found.pop(key))
