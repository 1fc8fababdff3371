"""Waits that are never silent, and calls that are repeated after an error."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Seconds between two lines about a wait.
EVERY_S = 120.0
#: Pauses between the tries of a call, in which a dead process restarts.
RETRIES_S = (0.5, 2.0, 8.0, 15.0, 30.0, 60.0)


@contextmanager
def waiting_for(what: str | Callable[[], str]) -> Iterator[None]:
    """Log every two minutes what the block waits for, from a thread: also if it blocks an event loop."""
    over, began = threading.Event(), time.monotonic()

    def log() -> None:
        while not over.wait(EVERY_S):
            logger.warning(
                "waiting for %s, for %.0f s", what if isinstance(what, str) else what(), time.monotonic() - began
            )

    threading.Thread(target=log, daemon=True, name="rhyme-waiting").start()
    try:
        yield
    finally:
        over.set()


async def insist(
    call: Callable[[], Awaitable[T]],
    what: str,
    limit_s: float | None = 240.0,
    permanent: tuple[type[Exception], ...] = (),
) -> T:
    """Return the result of a call that may be repeated; after an error or no answer in ``limit_s``, try again for two
    minutes, then raise. ``permanent`` errors are raised at once; ``what`` names the receiver."""
    for pause_s in (*RETRIES_S, None):
        try:
            return await asyncio.wait_for(call(), limit_s)
        except permanent:
            raise
        except Exception as error:
            if pause_s is None:
                raise
            logger.warning("%s failed (%r): trying again", what, error)
            await asyncio.sleep(pause_s)
    raise AssertionError
