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
        """Call each once; back when all have returned, also where one of them failed: its error is raised then.

        None begins before what was given to :meth:`later` has returned.
        """

    def later(self, call: Callable[[], None]) -> None:
        """Call it once, now or after this has returned; an error of it is raised here or by the next call of either."""


class OneThread:
    """The caller's."""

    count = 1

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """One after another."""
        for call in calls:
            call()

    def later(self, call: Callable[[], None]) -> None:
        """Now."""
        call()
