"""Ray actors and asyncio in one process with virtual time: an hour of a run takes only its CPU time.

The actors' objects are real, and asyncio runs them. Messages arrive at once and in order, and waiting takes no time. A
slice is an actor's CPU time between two waits; a real actor answers no other message during a slice. Slices are
recorded per actor.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

_OWNER: contextvars.ContextVar[Actor | None] = contextvars.ContextVar("owner", default=None)


class _Selector(selectors.SelectSelector):
    """Selector whose time passes at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock: all tasks wait, because a simulated part does not answer")
        self.now += max(0.0, timeout)
        return []


class Clock(asyncio.SelectorEventLoop):
    """asyncio's loop in virtual time; an actor's tasks count as the actor's."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self.set_task_factory(_of_its_actor)

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual.now


def _of_its_actor(loop: asyncio.AbstractEventLoop, work: Any, **about: Any) -> asyncio.Task[Any]:
    owner = _OWNER.get()
    return asyncio.Task(work if owner is None else _Timed(work, owner), loop=loop, **about)


class _Timed(Coroutine[Any, Any, Any]):
    """Coroutine with timed slices."""

    def __init__(self, work: Any, owner: Actor) -> None:
        self._work, self._slices = work, owner.slices[work.__qualname__]

    def send(self, value: Any) -> Any:
        began = time.thread_time_ns()
        try:
            return self._work.send(value)
        finally:
            self._slices.append(time.thread_time_ns() - began)

    def throw(self, *error: Any) -> Any:
        return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        return self._work.__await__()


class Actor:
    """Handle as in Ray: ``actor.method.remote(...)`` returns a future of the result.

    Args:
        make: Creates the object.

    Attributes:
        object: The actor's object.
        slices: Nanoseconds of each slice, by method or task.
        messages: Number of received messages, by method.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.slices: defaultdict[str, list[int]] = defaultdict(list)
        self.messages: defaultdict[str, int] = defaultdict(int)
        self._context = contextvars.copy_context()
        self._context.run(_OWNER.set, self)
        self.object = self._context.run(make)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        def remote(*args: Any, **kwargs: Any) -> asyncio.Future[Any]:
            loop = asyncio.get_running_loop()
            answer = loop.create_future()
            loop.call_soon(self._receive, method, args, kwargs, answer, context=self._context)
            return answer

        handle = SimpleNamespace(remote=remote)
        self.__dict__[method] = handle
        return handle

    def _receive(self, method: str, args: Any, kwargs: Any, answer: asyncio.Future[Any]) -> None:
        self.messages[method] += 1
        began = time.thread_time_ns()
        try:
            value = getattr(self.object, method)(*args, **kwargs)
        except Exception as error:
            answer.set_exception(error)
            return
        if asyncio.iscoroutine(value):
            task = asyncio.get_running_loop().create_task(value)
            task.add_done_callback(lambda done: _pass_on(done, answer))
            return
        self.slices[method].append(time.thread_time_ns() - began)
        if not answer.done():
            answer.set_result(value)


def _pass_on(done: asyncio.Task[Any], answer: asyncio.Future[Any]) -> None:
    if answer.done():
        return
    if done.cancelled():
        answer.cancel()
    elif (error := done.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(done.result())


class Queue:
    """The part of TransferQueue that a coordinator uses: keys with their tags."""

    def __init__(self) -> None:
        self.partitions: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)

    def init(self) -> None:
        pass

    async def async_kv_list(self) -> dict[str, dict[str, dict[str, Any]]]:
        return {name: dict(keys) for name, keys in self.partitions.items()}

    async def async_kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.partitions[partition_id].pop(key, None)
