"""Reports of ended attempts, from an agent loop worker to the coordinator."""

from __future__ import annotations

import asyncio
from typing import Any

from verl_rhyme.processes.waiting import insist
from verl_rhyme.scheduling.attempts import AttemptReport

#: Seconds that a report waits for others to be sent with it.
_DELAY_S = 0.01
#: Seconds that the coordinator has for a report.
_TIMEOUT_S = 30.0


class NotReported(RuntimeError):
    """The end of an attempt could not be reported. Its sample is sound, and starts again."""


class Reports:
    """Sends reports, one message at a time: several attempts end at about the same time, as at an abort."""

    def __init__(self) -> None:
        self.coordinator: Any = None
        self._reports: list[AttemptReport] = []
        self._sending: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    async def send(self, report: AttemptReport) -> None:
        """Return when the coordinator has the report, for which the next one of the attempt must wait. Raise
        :class:`NotReported` if it does not take it."""
        self._reports.append(report)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        await asyncio.shield(self._sending)

    async def _send(self) -> None:
        await asyncio.sleep(_DELAY_S)
        async with self._turn:  # reports that arrive during a delivery form the next message
            self._sending = None
            reports, self._reports = self._reports, []
            what = f"{len(reports)} reports to the coordinator"
            try:
                await insist(lambda: self.coordinator.report_ended.remote(reports), what, _TIMEOUT_S)
            except Exception as error:
                raise NotReported(f"the coordinator does not accept reports: {error!r}") from error
