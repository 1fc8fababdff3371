"""Ray's actors and asyncio's clock in one process and in virtual time: an hour of a run is as long as its code takes.

The objects are the real ones, and asyncio runs them; what is made up is that messages arrive at once, in their order,
and that nobody waits. What each actor's code takes is its thread's processor time, slice by slice: a slice is what it
does between two waits, and for as long as it lasts a real actor answers nobody.
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
    """Time passes at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen: a simulated part does not answer")
        self.now += max(0.0, timeout)
        return []


class Clock(asyncio.SelectorEventLoop):
    """asyncio's loop in virtual time; tasks that an actor begins are counted as its own."""

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
    """A coroutine whose slices are timed."""

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
    """A handle, as Ray's: ``actor.method.remote(...)`` is a future of the answer.

    Args:
        make: Makes the object.

    Attributes:
        object: Itself.
        slices: By method or task, nanoseconds of each slice.
        messages: That came, by method.
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
    """As much of TransferQueue as a coordinator asks for: which keys there are, with their tags."""

    def __init__(self) -> None:
        self.partitions: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)

    def init(self) -> None:
        pass

    async def async_kv_list(self) -> dict[str, dict[str, dict[str, Any]]]:
        return {name: dict(keys) for name, keys in self.partitions.items()}

    async def async_kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.partitions[partition_id].pop(key, None)
