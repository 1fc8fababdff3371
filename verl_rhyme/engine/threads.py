"""Planning threads of an engine's worker.

They run compiled code without the GIL. numba's ``prange`` is no alternative: its OpenMP layer conflicts with the
engine's OpenMP settings and aborts a process that forks after use. Its ``workqueue`` layer aborts when two threads
enter it, and TBB is another package. Waking a thread takes some 30 us, so the caller plans small batches itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Barrier

from verl_rhyme.drafting.threads import Threads

logger = logging.getLogger("vllm.verl_rhyme")  # below "vllm", so that vLLM's own handler prints it

#: Most threads by default: planning is bound by memory.
_MOST = 4


def thread_count(wanted: int | None) -> int:
    """Return ``wanted``, at most the cores that this thread may use; ``None``: half of these cores, at most 4.

    An engine on a CPU binds its thread to one core: one thread plans.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores // 2, _MOST) if wanted is None else min(wanted, cores))


class PlanningThreads(Threads):
    """The caller's thread and ``count - 1`` others, or none if they cannot start; they end with this object."""

    def __init__(self, count: int) -> None:
        self._deferred: Future[None] | None = None
        self._pool: ThreadPoolExecutor | None = None
        if count == 1:
            return
        pool, started = ThreadPoolExecutor(count - 1, "rhyme-plan"), Barrier(count - 1)
        try:
            wait([pool.submit(started.wait) for _ in range(count - 1)])  # later no step may find that one cannot start
        except RuntimeError as error:
            logger.warning("cannot start planning threads: %s; one thread plans all drafts", error)
            started.abort()
            pool.shutdown(cancel_futures=True)
            return
        self.count, self._pool = count, pool

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        self._settle()
        others = [] if self._pool is None else [self._pool.submit(call) for call in calls[1:]]
        try:
            super().run(calls[:1] if others else calls)
        finally:
            wait(others)
        for other in others:
            other.result()

    def defer(self, call: Callable[[], None]) -> None:
        self._settle()
        if self._pool is None:
            call()
        else:
            self._deferred = self._pool.submit(call)

    def _settle(self) -> None:
        if self._deferred is not None:
            deferred, self._deferred = self._deferred, None
            deferred.result()
