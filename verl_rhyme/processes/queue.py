"""This process's client of TransferQueue, whose requests are repeated after an error: ours and verl's.

verl's agent loop workers, trainer and training workers make their calls with the process's one client as well. Without
this a failed call of theirs leaves a prompt pending for ever, drops a sample, or ends the run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, TypeVar

import ray
import transfer_queue
from transfer_queue import interface

from verl_rhyme.processes.waiting import insist

T = TypeVar("T")

#: Requests of the client that may be repeated: with a deletion all that ``tq.kv_*`` and verl's ``transferqueue_utils``
#: make. They read, or write again what they wrote, to places that keep their keys until a deletion.
_REQUESTS = (
    *("async_kv_retrieve_meta", "async_kv_retrieve_keys", "async_kv_list", "async_put", "async_get_data"),
    *("async_set_custom_meta", "async_save_controller_checkpoint", "async_save_storage_checkpoint"),
)
#: A deletion is repeated from the keys on: the place of one that was deleted may belong to a new key by then.
_DELETION = "async_kv_clear"
#: Errors that name missing or wrong data; TransferQueue wraps those of its processes in ``RuntimeError``.
PERMANENT = (ValueError, TypeError, LookupError)
_ONCE: ContextVar[bool] = ContextVar("verl_rhyme_queue_once", default=False)


def join() -> None:
    """Connect this process to the run's TransferQueue, if there is one, and repeat its requests from now on."""
    if interface._TQ_CLIENT is None and not (ray.is_initialized() and interface._init_from_existing()):
        return
    client: Any = interface._TQ_CLIENT
    if not hasattr(client, "rhyme_repeats"):
        client.rhyme_repeats = True
        for name in _REQUESTS:
            setattr(client, name, repeated(getattr(client, name), f"TransferQueue ({name})"))
        client._bind_sync_methods()
    if not hasattr(interface.async_kv_clear, "__wrapped__"):
        for module in (interface, transfer_queue):
            setattr(module, _DELETION, repeated(getattr(module, _DELETION), f"TransferQueue ({_DELETION})"))


@contextmanager
def once() -> Iterator[None]:
    """Repeat no request within the block."""
    token = _ONCE.set(True)
    try:
        yield
    finally:
        _ONCE.reset(token)


def repeated(request: Callable[..., Awaitable[T]], what: str) -> Callable[..., Awaitable[T]]:
    """Return the request, repeated for two minutes after an error (:func:`insist`); requests within it are not."""

    @wraps(request)
    async def repeats(*args: Any, **kwargs: Any) -> T:
        if _ONCE.get():
            return await request(*args, **kwargs)
        with once():
            return await insist(partial(request, *args, **kwargs), what, permanent=PERMANENT)

    return repeats
