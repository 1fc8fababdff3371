"""Prompts' histories for a drafter, read by a thread of its own: a step that admits requests waits for none.

A history of 500k tokens has 4.5 MB to be copied out of the store (from disk, where it is not in memory), checked and
prepared: several milliseconds, most of them without the interpreter's lock. Giving its memory back takes time, too, and
is this thread's as well. On a node that does not record, it waits for the copy of a history as long as a request needs
it (:mod:`verl_rhyme.history.copies`).
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import deque

from verl_rhyme.drafting.histories import PENDING, Pending
from verl_rhyme.history.copies import CopyReader
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import PromptHistory

logger = logging.getLogger("vllm.verl_rhyme")  # below "vllm", so that vLLM's own handler prints it

#: Histories that were read and not yet taken, at most: beyond it the thread waits, and with it what they would take.
MOST_READY = 16
#: Seconds that :meth:`HistoryLoader.close` waits for a read that is just going on.
_PATIENCE_S = 5.0
#: Seconds between two looks for copies, and those for which an engine that waits for a copy waits at most.
_POLL_S, _COPY_TIMEOUT_S = 0.02, 10.0


class HistoryLoader:
    """A :class:`verl_rhyme.drafting.histories.Source` whose histories are pending first, and then :meth:`ready`.

    What is asked for is what live requests need: a prompt that none needs any more is not read, or dropped once it is.
    All methods are for one thread, the engine's; the reader belongs to this object's.

    Args:
        reader: Where histories are read.
        wait: Read at once, in the caller's thread: what is drafted then depends on no clock.
        copies: Where histories of another node are read.
    """

    def __init__(self, reader: HistoryReader, wait: bool = False, copies: CopyReader | None = None) -> None:
        self._readers, self._wait = _Readers(reader, copies), wait
        self._asked: dict[bytes, int] = {}
        self._work = _Work()
        self._thread: threading.Thread | None = None
        self._errors = 0
        self._finalizer = weakref.finalize(self, _Work.close, self._work)
        self._finalizer.atexit = False
        atexit.register(self._finalizer)  # while the interpreter is still whole

    @property
    def errors(self) -> int:
        """Histories that could not be used, or looks at the store that failed."""
        return self._readers.errors + self._work.errors

    @property
    def pending(self) -> int:
        """Prompts whose history is not there yet, or not yet taken."""
        return len(self._work.wanted) + len(self._work.done) + self._work.reading

    def expect(self, key: bytes, asked: int) -> None:
        """Before :meth:`get`: the history is a copy, which was asked for at that time (``RequestMeta.asked``)."""
        if asked:
            self._asked.setdefault(key, asked)

    def get(self, key: bytes) -> PromptHistory | Pending | None:
        """Have a prompt's history read."""
        asked = self._asked.get(key, 0)
        if self._wait:
            return self._read_when_arrived(key, asked)
        work = self._work
        with work.changed:
            if work.closed:
                return None
            work.wanted[key] = asked
            work.changed.notify()
        if self._thread is None or not self._thread.is_alive():  # the first one, or in a child of a fork
            self._thread = threading.Thread(target=_load, args=(self._readers, work), name="rhyme-history", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the system has no more threads; without one the reader is this thread's
                work.wanted.pop(key)
                return self._readers.read(key, asked)
        return PENDING

    def _read_when_arrived(self, key: bytes, asked: int) -> PromptHistory | None:
        end = time.monotonic() + _COPY_TIMEOUT_S
        while not self._readers.arrived(key, asked) and time.monotonic() < end:
            time.sleep(_POLL_S)
        return self._readers.read(key, asked)

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
        self._asked.pop(key, None)
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
        self.wanted: dict[bytes, int] = {}  # with when a copy was asked for; in the order of requests
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


class _Readers:
    """Both places of histories."""

    def __init__(self, own: HistoryReader, copies: CopyReader | None) -> None:
        self._own, self._copies = own, copies

    @property
    def errors(self) -> int:
        return self._own.errors + (0 if self._copies is None else self._copies.errors)

    def arrived(self, key: bytes, asked: int) -> bool:
        return not asked or self._copies is None or self._copies.arrived(key, asked)

    def read(self, key: bytes, asked: int) -> PromptHistory | None:
        history = self._copies.get(key) if asked and self._copies is not None else self._own.get(key)
        if history is not None:
            history.first_tokens  # noqa: B018 - made here, and not where a step would wait for it
        return history

    def close(self) -> None:
        self._own.close()


def _load(readers: _Readers, work: _Work) -> None:
    while True:
        with work.changed:
            while not work.closed and not work.rubbish and not (work.wanted and len(work.done) < MOST_READY):
                work.changed.wait()
            if work.closed:
                break
            wanted = list(work.wanted.items()) if len(work.done) < MOST_READY else []
        key, asked = next((each for each in wanted if readers.arrived(*each)), (None, 0))
        with work.changed:
            if key is None or work.wanted.pop(key, None) is None:  # nobody needs it any more
                if work.rubbish:
                    # The last reference: requests let theirs go before they said so.
                    work.rubbish.popleft()
                elif key is None and not work.closed:
                    work.changed.wait(_POLL_S)
                continue
            work.reading = True
        history = None
        try:
            history = readers.read(key, asked)
        except Exception:
            work.errors += 1
            if work.errors == 1:
                logger.warning("a prompt's history cannot be read, drafting goes on without (told once)", exc_info=True)
        with work.changed:
            work.done.append((key, history))
            work.reading = False
        del history
    readers.close()
