"""Planning threads of an engine's worker.

Threads of our own, over compiled code that holds no lock of the interpreter, and not numba's ``prange``: its OpenMP
layer shares the process with the engine's OpenMP and its settings, and ends a process that forks after use; its
``workqueue`` layer aborts the process when two threads enter it; TBB is another package. Waking a thread takes some
30 us, which is why few rows stay with the caller.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

logger = logging.getLogger("vllm.verl_rhyme")  # below "vllm", so that vLLM's own handler prints it

#: More are not taken unless asked for: planning is bound by memory.
_MOST = 4


def sensible(wanted: int | None) -> int:
    """How many threads plan: as many as wanted, but no more than the cores that this thread may use.

    ``None``: half of these, 4 at most. An engine on CPU cores binds its thread to one of them: then it is one.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores // 2, _MOST) if wanted is None else min(wanted, cores))


class PlanningThreads:
    """The caller's thread and ``count - 1`` others; see :class:`verl_rhyme.drafting.threads.Threads`.

    The others start when they are first needed, and end with :meth:`close` or with this object.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._later: Future[None] | None = None
        self._pool = ThreadPoolExecutor(count - 1, "rhyme-plan") if count > 1 else None

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Call each once; back when all have returned: what they work on may go then.

        Where a thread cannot be started the caller calls all of them, some for the second time, now and from then on.
        """
        self._settle()
        others: list[Future[None]] = []
        if self._pool is not None:
            try:
                for call in calls[1:]:
                    others.append(self._pool.submit(call))
            except RuntimeError as error:
                self._alone(error)
                others = []
        try:
            for call in calls[:1] if others else calls:
                call()
        finally:
            wait(others)
        for other in others:
            other.result()

    def later(self, call: Callable[[], None]) -> None:
        """Call it once in another thread, where there is one, after what was given before."""
        self._settle()
        if self._pool is not None:
            try:
                self._later = self._pool.submit(call)
                return
            except RuntimeError as error:
                self._alone(error)
        call()

    def _settle(self) -> None:
        """Wait for what was given to :meth:`later`."""
        if self._later is not None:
            later, self._later = self._later, None
            later.result()

    def _alone(self, error: RuntimeError) -> None:
        logger.warning("one thread plans from now on: %s", error)
        assert self._pool is not None
        self._pool.shutdown(cancel_futures=True)  # the pool has queued that call, too, and would make it later
        self.count, self._pool = 1, None

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
