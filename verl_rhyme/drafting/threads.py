"""Who plans the rows of a batch: a policy knows no thread, and is handed what has some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Threads(Protocol):
    """Calls functions, at the same time where it can."""

    @property
    def count(self) -> int:
        """How many at a time."""

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Call each once; back when all have returned, also where one of them failed: its error is raised then."""


class OneThread:
    """The caller's."""

    count = 1

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """One after another."""
        for call in calls:
            call()
