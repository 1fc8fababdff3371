"""TransferQueue has no room: what is to be stored waits for it, since training frees entries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from verl_rhyme.scheduling.rules import Rules

logger = logging.getLogger(__name__)

#: What its storage units say (``StorageUnitData.put_data``).
FULL = "Storage capacity exceeded"
#: Seconds between two tries.
RETRY_S = 5.0

T = TypeVar("T")


def no_room(rules: Rules, when: str, error: str) -> RuntimeError:
    """TransferQueue is full, and nothing can make room.

    Args:
        rules: The scheduler's.
        when: What shows it.
        error: What its storage said.
    """
    size = "transfer_queue.backend.SimpleStorage.total_storage_size"
    return RuntimeError(
        f"TransferQueue is full {when}: set {size}=null (no limit), or to {rules.queue_entries} or more (more where an "
        "agent loop gives several trajectories a sample); the same command goes on from the last checkpoint. Its "
        f"storage said: {error}"
    )


class Room:
    """One in each agent loop worker; the coordinator, which knows whether anything is left to free entries, is told."""

    def __init__(self) -> None:
        self._coordinator: Any = None
        self._line = asyncio.Lock()

    def attach(self, coordinator: Any) -> None:
        """``coordinator`` is told from now on that something waits."""
        self._coordinator = coordinator

    async def wait(self, put: Callable[[], Awaitable[T]]) -> T:
        """What ``put`` gives, as soon as there is room for it; other errors of it are raised."""
        try:
            return await put()
        except Exception as error:
            self._check(error)
        if not self._line.locked():
            logger.warning("TransferQueue is full: what is finished waits until training frees entries")
        async with self._line:  # one tries for all: each try stores whole trajectories, and thousands may wait
            while True:
                try:
                    return await put()
                except Exception as error:
                    self._check(error)
                await asyncio.sleep(RETRY_S)

    def _check(self, error: Exception) -> None:
        """Tell the coordinator; raise what says something else."""
        if FULL not in str(error):
            raise error
        if self._coordinator is not None:
            self._coordinator.full.remote(str(error))
