"""The threads that plan the rows of a batch; a draft policy creates none itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Threads:
    """The caller's thread; subclasses may call functions concurrently."""

    count = 1  # concurrent calls

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Call each once and return when all have returned; then raise the error of a failed call.

        No call begins before the call given to :meth:`defer` has returned.
        """
        for call in calls:
            call()

    def defer(self, call: Callable[[], None]) -> None:
        """Make the call once, now or later; its error is raised here or by the next call of either method."""
        call()
