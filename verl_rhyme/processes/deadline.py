"""Deadlines for tools and rewards: one that never answers ends its sample, not the run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from verl_rhyme.config import CONFIG_PATH


class NoAnswer(RuntimeError):
    """A tool or a reward did not answer a sample in time."""


class Deadline:
    """Context manager that cancels its task after ``seconds`` in one wait outside of generation (``None``: unlimited),
    then raises :class:`NoAnswer`, which names ``where``. A task that survives is cancelled again after the same
    time."""

    def __init__(self, seconds: float | None = None, where: str = "") -> None:
        self._seconds, self.where = seconds, where
        self._passed = False
        self._pauses = 0
        self._task: asyncio.Task[object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Deadline:
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        self._wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task = None
        self._wait()
        if self._passed and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise NoAnswer(
                f"{self.where}: no answer from its tool or reward for {self._seconds:g} s "
                f"(raise {CONFIG_PATH}.scheduling.tool_timeout if the tool needs longer)"
            ) from error

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock within the block, since engines may be busy. Blocks may be nested, and in other threads."""
        self._shift(1)
        try:
            yield
        finally:
            self._shift(-1)

    def _shift(self, by: int) -> None:
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            self._loop.call_soon_threadsafe(self._shift_here, by)
        else:
            self._shift_here(by)

    def _shift_here(self, by: int) -> None:
        self._pauses += by
        self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None and self._seconds is not None and not self._pauses:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)

    def _end(self) -> None:
        self._passed = True
        self._wait()
        if self._task is not None:
            self._task.cancel()
