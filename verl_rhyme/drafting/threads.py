"""Interface to the threads that plan the rows of a batch; a draft policy creates none itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Threads(Protocol):
    """Calls functions, concurrently if possible."""

    @property
    def count(self) -> int:
        """Number of concurrent calls."""

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Call each once and return when all have returned; then raise the error of a failed call.

        No call begins before the call given to :meth:`later` has returned.
        """

    def later(self, call: Callable[[], None]) -> None:
        """Make the call once, now or later; its error is raised here or by the next call of either method."""


class OneThread:
    """The caller's thread."""

    count = 1

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make the calls one after another."""
        for call in calls:
            call()

    def later(self, call: Callable[[], None]) -> None:
        """Make the call now."""
        call()
