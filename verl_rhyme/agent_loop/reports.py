"""How attempts ended, from an agent loop worker to TransferQueue and the coordinator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_rhyme.agent_loop.session import SESSIONS
from verl_rhyme.agent_loop.stored_attempts import TRAIN
from verl_rhyme.scheduling.attempts import Ended

logger = logging.getLogger(__name__)

#: Seconds that a report waits for others to go with it.
_DELAY_S = 0.01
#: Seconds that each of the two has to take a report, and between the tries: a coordinator that died starts meanwhile.
_TIMEOUT_S = 30.0
_RETRIES_S = (0.5, 2.0, 8.0, 15.0, 30.0, 60.0)


class NotReported(RuntimeError):
    """How an attempt ended could not be told: nothing is wrong with its sample, which starts again."""


class Reports:
    """In one message where several end at about the same time, as they do at an abort.

    What an attempt left is in TransferQueue before the coordinator is told: one that is started anew finds it there.
    Reports that leave nothing do not wait for those that do.
    """

    def __init__(self) -> None:
        self._leaving, self._telling = _Lane(), _Lane()

    def attach(self, coordinator: Any) -> None:
        """``coordinator`` is told from now on."""
        self._leaving.coordinator = self._telling.coordinator = coordinator

    async def send(self, ended: Ended, left: dict[str, Any] | None = None) -> None:
        """Returns when both have it; of one attempt nothing may be sent again before.

        Args:
            ended: For the coordinator.
            left: Columns for TransferQueue; ``None``: none.

        Raises:
            NotReported: One of them does not take it.
        """
        await (self._telling if left is None else self._leaving).send(ended, left)


class _Lane:
    """Reports that go one message at a time."""

    def __init__(self) -> None:
        self.coordinator: Any = None
        self._rows: list[tuple[Ended, dict[str, Any] | None]] = []
        self._sending: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    async def send(self, ended: Ended, left: dict[str, Any] | None) -> None:
        self._rows.append((ended, left))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        await asyncio.shield(self._sending)

    async def _send(self) -> None:
        await asyncio.sleep(_DELAY_S)
        async with self._turn:  # what ends while these two are busy goes together: one message at a time from here
            self._sending = None
            rows, self._rows = self._rows, []
            await self._deliver(rows)

    async def _deliver(self, rows: list[tuple[Ended, dict[str, Any] | None]]) -> None:
        if stored := [(ended, left) for ended, left in rows if left is not None]:
            report = {
                "keys": [ended.name for ended, _ in stored],
                "tags": [_tag(ended) for ended, _ in stored],
                "fields": list_of_dict_to_tensordict([left for _, left in stored]),
            }
            await self._insist(
                lambda: tq.async_kv_batch_put(partition_id=SESSIONS, **report), "TransferQueue", len(stored)
            )
        if scored := [ended for ended, _ in rows if ended.scores]:
            scores = {"keys": [f"{of.name}_0" for of in scored], "tags": [{"scores": of.scores} for of in scored]}
            await self._insist(
                lambda: tq.async_kv_batch_put(partition_id=TRAIN, **scores), "TransferQueue", len(scored)
            )
        reports = [ended for ended, _ in rows]
        await self._insist(lambda: self.coordinator.ended.remote(reports), "the coordinator", len(reports))

    async def _insist(self, send: Callable[[], Awaitable[Any]], whom: str, count: int) -> None:
        for retry_s in (*_RETRIES_S, None):
            try:
                await asyncio.wait_for(send(), _TIMEOUT_S)
                return
            except Exception as error:
                if retry_s is None:
                    raise NotReported(f"{whom} does not take reports: {error!r}") from error
                logger.warning("%d reports did not reach %s (%r): trying again", count, whom, error)
                await asyncio.sleep(retry_s)


def _tag(ended: Ended) -> dict[str, Any]:
    """``status``: what the entry holds; whether trajectories are stored as well, they show themselves."""
    return {"status": ended.status, "tokens": ended.tokens, "first_version": ended.first_version}
