"""The serving replicas, and migration of samples between them: the coordinator's calls to router and servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError

from verl_rhyme.once import warn_once
from verl_rhyme.placement import Move
from verl_rhyme.scheduling.attempts import Attempt
from verl_rhyme.scheduling.dispatch import Dispatch

logger = logging.getLogger(__name__)

#: Seconds after which a request that was under way to a replica has arrived.
_STRAY_S = 0.2
#: Seconds between two searches for samples to move, and seconds that a server or router has to answer.
_MOVE_S = 2.0
_ANSWER_S = 20.0


class Migrations:
    """Migrations of an open coordinator."""

    def __init__(
        self,
        dispatch: Dispatch,
        router: Any,  # a PlacementRouter; None for verl's router, which cannot list the serving replicas
        moves: Callable[[list[Move]], None],  # carries out moves of attempts
        locate: Callable[[], Awaitable[dict[Attempt, str]]],  # the replica of each attempt; empty: unknown
        active: Callable[[], bool],  # whether samples run: false while the engines stand still or are about to
    ) -> None:
        self._dispatch, self._router, self._moves, self._active = dispatch, router, moves, active
        self._locate = locate
        self._servers: dict[str, Any] = {}  # replica address -> handle
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Search for samples to move at intervals, until :meth:`close`."""
        if self._dispatch.placement is not None:
            self._task = asyncio.ensure_future(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def refresh_replicas(self) -> None:
        if self._dispatch.placement is None or self._router is None:
            return
        try:
            fleet = await asyncio.wait_for(self._router.fleet.remote(), _ANSWER_S)
        except (RayError, asyncio.TimeoutError) as error:
            logger.warning("the router did not list the serving replicas (%s): the last known ones are used", error)
            return
        self._servers = {address: handle for address, (handle, _) in fleet.items()}
        self._dispatch.serve({address: room for address, (_, room) in fleet.items()})
        if self._dispatch.has_unplaced:
            try:
                self._dispatch.count_running(await asyncio.wait_for(self._locate(), _ANSWER_S))
            except asyncio.TimeoutError:  # a worker is stuck; the next call tries again
                logger.warning("an agent loop worker did not answer where requests of a dead replica continue")

    async def drain(self, replica: str) -> int:
        """Continue the samples of a replica on others, with their tokens; return their number. The router no longer
        lists the replica, and its server rejects requests that arrive later."""
        await self.refresh_replicas()
        moved: set[Attempt] = set()
        try:
            while True:
                at = await asyncio.wait_for(self._locate(), _ANSWER_S)
                here = [attempt for attempt, address in at.items() if address == replica and attempt not in moved]
                if not here:
                    break
                self._moves([Move(attempt, "", "its replica rests") for attempt in here])
                moved.update(here)
                await asyncio.sleep(_STRAY_S)
        except asyncio.TimeoutError:
            logger.warning("an agent loop worker did not answer what runs on a leaving replica: this is aborted")
        await self.refresh_replicas()
        return len(moved)

    def report_errors(self) -> None:
        """Log a failed plan, once; samples start nonetheless."""
        placement = self._dispatch.placement
        if placement is not None and placement.errors:
            warn_once(logger, "placement failed, and samples go to the least loaded replica: %s", placement.last_error)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_MOVE_S)
            try:
                if self._active() and (watched := self._dispatch.watched()):
                    await self._move(watched)
            except Exception:  # a sample that is not moved is not lost
                logger.warning("samples could not be moved between replicas", exc_info=True)

    async def _move(self, watched: dict[str, list[Attempt]]) -> None:
        answers = [
            asyncio.wait_for(self._servers[replica].progress.remote([each.name for each in attempts]), _ANSWER_S)
            for replica, attempts in watched.items()
            if replica in self._servers
        ]
        emitted: dict[str, int] = {}
        for answer in await asyncio.gather(*answers, return_exceptions=True):  # dead servers are detected elsewhere
            emitted.update(answer if isinstance(answer, dict) else {})
        if not self._active():
            return
        moves = self._dispatch.moves({Attempt.named(name): tokens for name, tokens in emitted.items()})
        self._moves(moves)
        if moves:
            logger.info("%d samples continue on another replica; the first, %s on %s: %s", len(moves), *moves[0])
