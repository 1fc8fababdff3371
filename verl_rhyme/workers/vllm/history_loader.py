"""Prompts' histories for a drafter, read by a thread of its own: a step that admits requests waits for none.

A history of 500k tokens has 4.5 MB to be copied out of the store (from disk, where it is not in memory), checked and
prepared: several milliseconds, most of them without the interpreter's lock. Giving its memory back takes time, too, and
is this thread's as well.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque

from verl_rhyme.drafting.histories import PENDING, Pending
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import PromptHistory

logger = logging.getLogger("vllm.verl_rhyme")  # below "vllm", so that vLLM's own handler prints it

#: Histories that were read and not yet taken, at most: beyond it the thread waits, and with it what they would take.
MOST_READY = 16
#: Seconds that :meth:`HistoryLoader.close` waits for a read that is just going on.
_PATIENCE_S = 5.0


class HistoryLoader:
    """A :class:`verl_rhyme.drafting.histories.Source` whose histories are pending first, and then :meth:`ready`.

    What is asked for is what live requests need: a prompt that none needs any more is not read, or dropped once it is.
    All methods are for one thread, the engine's; the reader belongs to this object's.

    Args:
        reader: Where histories are read.
        wait: Read at once, in the caller's thread: what is drafted then depends on no clock.
    """

    def __init__(self, reader: HistoryReader, wait: bool = False) -> None:
        self._reader, self._wait = reader, wait
        self._work = _Work()
        self._thread: threading.Thread | None = None
        self._errors = 0
        self._finalizer = weakref.finalize(self, _Work.close, self._work)
        self._finalizer.atexit = False
        atexit.register(self._finalizer)  # while the interpreter is still whole

    @property
    def errors(self) -> int:
        """Histories that could not be used, or looks at the store that failed."""
        return self._reader.errors + self._work.errors

    @property
    def pending(self) -> int:
        """Prompts whose history is not there yet, or not yet taken."""
        return len(self._work.wanted) + len(self._work.done) + self._work.reading

    def get(self, key: bytes) -> PromptHistory | Pending | None:
        """Have a prompt's history read."""
        if self._wait:
            return _read(self._reader, key)
        work = self._work
        with work.changed:
            if work.closed:
                return None
            work.wanted[key] = None
            work.changed.notify()
        if self._thread is None or not self._thread.is_alive():  # the first one, or in a child of a fork
            self._thread = threading.Thread(target=_load, args=(self._reader, work), name="rhyme-history", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the system has no more threads; without one the reader is this thread's
                work.wanted.pop(key)
                return _read(self._reader, key)
        return PENDING

    def ready(self) -> list[tuple[bytes, PromptHistory | None]]:
        """Prompts whose history was read since the last call, each with it; none without one is left out."""
        work = self._work
        if not work.done:
            return []
        with work.changed:
            found = list(work.done)
            work.done.clear()
            work.changed.notify()
        return found

    def release(self, key: bytes, history: PromptHistory | None) -> None:
        """Nobody needs a prompt's history any more; let go of it in the other thread."""
        work = self._work
        with work.changed:
            work.wanted.pop(key, None)
            if history is not None and not self._wait:
                work.rubbish.append(history)
                work.changed.notify()

    def close(self) -> None:
        """End the thread; what was pending stays so."""
        self._work.close()
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)


class _Work:
    """What both threads know; the loader's thread holds no more than this, so that its owner can go."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.wanted: dict[bytes, None] = {}  # in the order in which they were asked for
        self.done: deque[tuple[bytes, PromptHistory | None]] = deque()
        self.rubbish: deque[PromptHistory] = deque()
        self.reading = False
        self.closed = False
        self.errors = 0

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.wanted.clear()
            self.rubbish.clear()
            self.changed.notify()


def _load(reader: HistoryReader, work: _Work) -> None:
    while True:
        key = None
        with work.changed:
            while not work.closed and not work.rubbish and not (work.wanted and len(work.done) < MOST_READY):
                work.changed.wait()
            if work.closed:
                break
            if work.wanted and len(work.done) < MOST_READY:
                key = next(iter(work.wanted))
                del work.wanted[key]
                work.reading = True
            elif work.rubbish:
                # The last reference: requests let theirs go before they said so.
                work.rubbish.popleft()
        if key is None:
            continue
        history = None
        try:
            history = _read(reader, key)
        except Exception:
            work.errors += 1
            if work.errors == 1:
                logger.warning("a prompt's history cannot be read, drafting goes on without (told once)", exc_info=True)
        with work.changed:
            work.done.append((key, history))
            work.reading = False
        del history
    reader.close()


def _read(reader: HistoryReader, key: bytes) -> PromptHistory | None:
    history = reader.get(key)
    if history is not None:
        history.first_tokens  # noqa: B018 - made here, and not where a step would wait for it
    return history
