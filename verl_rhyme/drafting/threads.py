"""The threads that plan the rows of a batch.

They run compiled code without the GIL. numba's ``prange`` is no alternative: its OpenMP layer conflicts with the
engine's OpenMP settings and aborts a process that forks after use. Its ``workqueue`` layer aborts when two threads
enter it, and TBB is another package. Waking a thread takes some 30 us, so the caller plans small batches itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Barrier

#: Most threads by default: planning is bound by memory.
_MOST = 4


def thread_count(wanted: int | None) -> int:
    """Return ``wanted``, at most the cores that this thread may use; ``None``: half of these cores, at most 4.

    An engine on a CPU binds its thread to one core: one thread plans.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores // 2, _MOST) if wanted is None else min(wanted, cores))


class Threads:
    """The caller's thread and ``count - 1`` others, which end with this object."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        self._deferred: Future[None] | None = None
        if count > 1:  # all threads start here: in a step a call would stay queued, and plan with memory freed since
            self._pool, started = ThreadPoolExecutor(count - 1, "rhyme-plan"), Barrier(count - 1)
            wait([self._pool.submit(started.wait, 10) for _ in range(count - 1)])

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Call each once and return when all have returned; then raise the error of a failed call.

        No call begins before the call given to :meth:`defer` has returned.
        """
        self._settle()
        others = [] if self._pool is None else [self._pool.submit(call) for call in calls[1:]]
        try:
            for call in calls[:1] if others else calls:
                call()
        finally:
            wait(others)
        for other in others:
            other.result()

    def defer(self, call: Callable[[], None]) -> None:
        """Make the call once, now or later; its error is raised here or by the next call of either method."""
        self._settle()
        if self._pool is None:
            call()
        else:
            self._deferred = self._pool.submit(call)

    def _settle(self) -> None:
        if self._deferred is not None:
            deferred, self._deferred = self._deferred, None
            deferred.result()
