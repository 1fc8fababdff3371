"""Background loading of prompts' histories, so that a step that admits requests does not wait for them.

To read, check and prepare a history of 500k tokens (4.5 MB) takes several milliseconds, mostly without the GIL. A copy
from another node (:mod:`verl_rhyme.history.copies`) is read once it has arrived. All histories in memory have a bound:
16 responses of 32k tokens in each of 4 visits take 24 MiB when decoded. A prompt beyond it waits until others are
released; its requests draft from other texts meanwhile.
"""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor

from verl_rhyme.history.copies import CopyReader
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import PromptHistory
from verl_rhyme.once import warn_once

logger = logging.getLogger("vllm.verl_rhyme")  # below "vllm", so that vLLM's own handler prints it

#: Seconds between two checks for an expected copy, and the longest wait for it in blocking mode.
_POLL_S, _COPY_TIMEOUT_S = 0.02, 10.0


class _Full(Exception):
    """Decoded histories take all of their memory."""


class HistoryLoader:
    """Histories that :meth:`get` only asks for, and that are :meth:`ready` later.

    A history that no live request needs is not read, or is dropped after reading. The engine's thread calls all
    methods; the loader's thread uses the readers. With ``wait`` the caller's thread reads, so that drafts do not depend
    on timing, and a prompt beyond ``max_bytes`` of decoded histories has none. ``copies`` come from another node.
    """

    def __init__(
        self, reader: HistoryReader, wait: bool = False, copies: CopyReader | None = None, max_bytes: int = 1 << 62
    ) -> None:
        self._own, self._copies = reader, copies
        self._pool = None if wait else ThreadPoolExecutor(1, "rhyme-history")
        if self._pool is not None:
            self._pool.submit(int)  # start the thread here: later there may be none left
        self._asked: dict[bytes, int] = {}
        self._due: set[bytes] = set()  # prompts whose copy has not arrived, or that do not fit
        self._reading: dict[bytes, Future[PromptHistory | None]] = {}
        self._looked_at = -math.inf
        self._failed = 0
        self._max_bytes = max_bytes
        self._held: dict[bytes, int] = {}  # bytes of decoded histories; both threads change it

    @property
    def errors(self) -> int:
        """Unusable histories and failed accesses to the store."""
        return self._failed + self._own.errors + (0 if self._copies is None else self._copies.errors)

    @property
    def pending(self) -> int:
        """Prompts whose history has not been read or not been taken yet."""
        return len(self._due) + len(self._reading)

    def expect(self, key: bytes, asked: int) -> None:
        """Expect a copy requested at ``asked`` (``RequestMeta.history_requested_ns``). Called before :meth:`get`."""
        if asked:
            self._asked.setdefault(key, asked)

    def get(self, key: bytes) -> PromptHistory | None:
        if self._pool is None:
            end = time.monotonic() + _COPY_TIMEOUT_S
            while not self._arrived(key) and time.monotonic() < end:
                time.sleep(_POLL_S)
            try:
                return self._read(key)
            except _Full:
                return None
        if self._arrived(key):
            self._reading[key] = self._pool.submit(self._read, key)
        else:
            self._due.add(key)
        return None

    def ready(self) -> list[tuple[bytes, PromptHistory | None]]:
        """Return the prompts read since the last call with their histories."""
        if self._due and self._pool and (now := time.monotonic()) >= self._looked_at + _POLL_S:
            self._looked_at = now
            for key in [] if self._is_full() else list(filter(self._arrived, self._due)):
                self._reading[key] = self._pool.submit(self._read, key)
                self._due.remove(key)
        read = []
        for key in [key for key, reading in self._reading.items() if reading.done()]:
            try:
                read.append((key, self._reading.pop(key).result()))
            except _Full:
                self._due.add(key)
        return read

    def release(self, key: bytes, history: PromptHistory | None) -> None:
        """The loader's thread frees the memory."""
        self._asked.pop(key, None)
        self._due.discard(key)
        self._held.pop(key, None)
        if (reading := self._reading.pop(key, None)) is not None and not reading.cancel():
            reading.add_done_callback(lambda _: self._held.pop(key, None))
        if history is not None and self._pool is not None:
            # This is the last reference: the drafter drops its own before it calls this.
            self._pool.submit([history].clear)

    def _arrived(self, key: bytes) -> bool:
        asked = self._asked.get(key)
        return asked is None or self._copies is None or self._copies.arrived(key, asked)

    def _is_full(self) -> bool:
        return sum(list(self._held.values())) >= self._max_bytes

    def _read(self, key: bytes) -> PromptHistory | None:
        if self._is_full():
            warn_once(
                logger,
                "decoded histories take %d bytes (drafting.history_memory): further prompts draft without theirs "
                "until others are done (logged once)",
                self._max_bytes,
            )
            raise _Full
        try:
            source = self._own if self._copies is None or key not in self._asked else self._copies
            history = source.get(key)
            if history is not None:
                history.first_tokens  # noqa: B018 - a cached property, computed here so that no step waits for it
                self._held[key] = history.nbytes
            return history
        except Exception:
            self._failed += 1
            warn_once(
                logger, "cannot read a prompt's history; its requests draft without it (logged once)", exc_info=True
            )
            return None
