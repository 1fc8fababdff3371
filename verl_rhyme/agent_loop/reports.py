"""Reports of ended attempts, from an agent loop worker to TransferQueue and the coordinator."""

from __future__ import annotations

import asyncio
from typing import Any

import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_rhyme.agent_loop.session import SESSIONS
from verl_rhyme.agent_loop.stored_attempts import TRAIN
from verl_rhyme.processes.waiting import insist
from verl_rhyme.scheduling.attempts import Ended

#: Seconds that a report waits for others to be sent with it.
_DELAY_S = 0.01
#: Seconds that the coordinator has for a report.
_TIMEOUT_S = 30.0


class NotReported(RuntimeError):
    """The end of an attempt could not be reported. Its sample is sound, and starts again."""


class Reports:
    """Sends reports, batched when several attempts end at about the same time, as at an abort. TransferQueue gets its
    columns before the coordinator gets the report, so that a restarted coordinator finds them."""

    def __init__(self) -> None:
        self._storing, self._plain = _Lane(), _Lane()  # with and without columns: these do not wait for those

    def attach(self, coordinator: Any) -> None:
        self._storing.coordinator = self._plain.coordinator = coordinator

    async def send(self, ended: Ended, left: dict[str, Any] | None = None) -> None:
        """Send a report, and columns ``left`` to TransferQueue; return when both have it, for which the next report of
        the attempt must wait. Raise :class:`NotReported` if one does not take it."""
        await (self._plain if left is None else self._storing).send(ended, left)


class _Lane:
    """A queue of reports that sends one message at a time."""

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
        async with self._turn:  # reports that arrive during a delivery form the next message
            self._sending = None
            rows, self._rows = self._rows, []
            await self._deliver(rows)

    async def _deliver(self, rows: list[tuple[Ended, dict[str, Any] | None]]) -> None:
        stored = [(ended, left) for ended, left in rows if left is not None]
        scored = [ended for ended, _ in rows if ended.scores]
        reports = [ended for ended, _ in rows]
        whom = "TransferQueue"
        try:
            if stored:
                await tq.async_kv_batch_put(
                    keys=[ended.name for ended, _ in stored],
                    partition_id=SESSIONS,
                    fields=list_of_dict_to_tensordict([left for _, left in stored]),
                    tags=[_tag(ended) for ended, _ in stored],
                )
            if scored:
                tags = [{"scores": ended.scores} for ended in scored]
                await tq.async_kv_batch_put(keys=[f"{of.name}_0" for of in scored], partition_id=TRAIN, tags=tags)
            whom = "the coordinator"
            what = f"{len(reports)} reports to {whom}"
            await insist(lambda: self.coordinator.report_ended.remote(reports), what, _TIMEOUT_S)
        except Exception as error:
            raise NotReported(f"{whom} does not accept reports: {error!r}") from error


def _tag(ended: Ended) -> dict[str, Any]:
    """Return the tag of an entry. It does not record whether trajectories are stored: their keys show that."""
    generated = ended.status == "generated"  # a failed attempt's turns are as good as an interrupted one's
    status = "generated" if generated else "interrupted"
    # turns: whether the entry has them; else the worker keeps them
    return {"status": status, "tokens": ended.tokens, "first_version": ended.first_version, "turns": generated}
