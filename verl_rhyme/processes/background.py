"""Background work of the trainer, which collects the result later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_in_thread(work: Callable[..., T], *arguments: Any) -> Future[T]:
    """Start ``work`` in a daemon thread and return its future; the process does not wait for it at exit."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=f"rhyme-{getattr(work, '__name__', 'work')}").start()
    return future
