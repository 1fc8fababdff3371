"""Work that goes on beside the trainer, which looks later what came of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def begin(work: Callable[..., T], *arguments: Any) -> Future[T]:
    """Begin some work in a thread of its own, for which the end of the process does not wait."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=f"rhyme-{getattr(work, '__name__', 'work')}").start()
    return future
