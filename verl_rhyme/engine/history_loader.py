"""Prompts' histories for a drafter, read by a thread of its own: a step that admits requests waits for none.

A history of 500k tokens has 4.5 MB to be copied out of the store (from disk, where it is not in memory), checked and
prepared: several milliseconds, most of them without the interpreter's lock. Giving its memory back takes time, too, and
is this thread's as well. On a node that does not record, a history is read once its copy is there
(:mod:`verl_rhyme.history.copies`), for as long as a request needs it.
"""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from verl_rhyme.drafting.histories import PENDING, Pending
from verl_rhyme.history.copies import CopyReader
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import PromptHistory

logger = logging.getLogger("vllm.verl_rhyme")  # below "vllm", so that vLLM's own handler prints it

#: Seconds between two looks for a copy of an engine that waits for it, and those for which it waits at most.
_POLL_S, _COPY_TIMEOUT_S = 0.02, 10.0


class HistoryLoader:
    """A :class:`verl_rhyme.drafting.histories.Source` whose histories are pending first, and then :meth:`ready`.

    What is asked for is what live requests need: a prompt that none needs any more is not read, or dropped once it is.
    All methods are for one thread, the engine's; the readers belong to this object's.

    Args:
        reader: Where histories are read.
        wait: Read at once, in the caller's thread: what is drafted then depends on no clock.
        copies: Where histories of another node are read.
    """

    def __init__(self, reader: HistoryReader, wait: bool = False, copies: CopyReader | None = None) -> None:
        self._own, self._copies = reader, copies
        self._pool = None if wait else ThreadPoolExecutor(1, "rhyme-history")
        self._asked: dict[bytes, int] = {}
        self._due: dict[bytes, int] = {}  # whose copy is not there yet
        self._reading: dict[bytes, Future[PromptHistory | None]] = {}
        self._looked_at = -math.inf
        self._failed = 0

    @property
    def errors(self) -> int:
        """Histories that could not be used, or looks at the store that failed."""
        return self._failed + self._own.errors + (0 if self._copies is None else self._copies.errors)

    @property
    def pending(self) -> int:
        """Prompts whose history is not there yet, or not yet taken."""
        return len(self._due) + len(self._reading)

    def expect(self, key: bytes, asked: int) -> None:
        """Before :meth:`get`: the history is a copy, which was asked for at that time (``RequestMeta.asked``)."""
        if asked:
            self._asked.setdefault(key, asked)

    def get(self, key: bytes) -> PromptHistory | Pending | None:
        """Have a prompt's history read."""
        asked = self._asked.get(key, 0)
        if self._pool is None:
            end = time.monotonic() + _COPY_TIMEOUT_S
            while not self._arrived(key, asked) and time.monotonic() < end:
                time.sleep(_POLL_S)
            return self._read(key, asked)
        if self._arrived(key, asked):
            self._begin(key, asked)
        else:
            self._due[key] = asked
        return PENDING

    def ready(self) -> list[tuple[bytes, PromptHistory | None]]:
        """Prompts whose history was read since the last call, each with it; none without one is left out."""
        if self._due and (now := time.monotonic()) >= self._looked_at + _POLL_S:
            self._looked_at = now
            for key, asked in [due for due in self._due.items() if self._arrived(*due)]:
                self._begin(key, asked)
                del self._due[key]
        read = [key for key, reading in self._reading.items() if reading.done()]
        return [(key, self._reading.pop(key).result()) for key in read]

    def release(self, key: bytes, history: PromptHistory | None) -> None:
        """Nobody needs a prompt's history any more; let go of it in the other thread."""
        self._asked.pop(key, None)
        self._due.pop(key, None)
        if (reading := self._reading.pop(key, None)) is not None:
            reading.cancel()
        if history is not None and self._pool is not None:
            with suppress(RuntimeError):  # the thread has ended
                # The last reference: requests let theirs go before they said so.
                self._pool.submit([history].clear)

    def close(self) -> None:
        """End the thread; what was pending stays so."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._own.close()

    def _begin(self, key: bytes, asked: int) -> None:
        assert self._pool is not None
        try:
            self._reading[key] = self._pool.submit(self._read, key, asked)
        except RuntimeError:  # no thread can start
            self._reading[key] = Future()
            self._reading[key].set_result(self._read(key, asked))

    def _arrived(self, key: bytes, asked: int) -> bool:
        return not asked or self._copies is None or self._copies.arrived(key, asked)

    def _read(self, key: bytes, asked: int) -> PromptHistory | None:
        try:
            history = self._copies.get(key) if asked and self._copies is not None else self._own.get(key)
            if history is not None:
                history.first_tokens  # noqa: B018 - made here, and not where a step would wait for it
            return history
        except Exception:
            self._failed += 1
            if self._failed == 1:
                logger.warning("a prompt's history cannot be read, drafting goes on without (told once)", exc_info=True)
            return None
