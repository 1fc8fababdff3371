"""Which replicas serve, and which samples are better off on another one: the coordinator's migrations for its dispatch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError

from verl_rhyme.placement import Move
from verl_rhyme.scheduling.dispatch import Dispatch

logger = logging.getLogger(__name__)

#: Seconds in which a request that was on its way to a replica has come there.
_STRAY_S = 0.2
#: Seconds between two looks whether samples are better off elsewhere, and those that a server or router has to answer.
_MOVE_S = 2.0
_ANSWER_S = 20.0


class Migrations:
    """One for an opened coordinator.

    Args:
        dispatch: Whose migrations these are.
        router: A ``PlacementRouter``; ``None``: verl's, which does not say who serves.
        moves: Orders moves, by attempts' names.
        where: At which replicas attempts run, by their names; empty where that is not known.
        active: Samples are started and run; else the engines stand still, or are about to.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        router: Any,
        moves: Callable[[list[Move]], None],
        where: Callable[[], Awaitable[dict[str, str]]],
        active: Callable[[], bool],
    ) -> None:
        self._dispatch, self._router, self._moves, self._active = dispatch, router, moves, active
        self._where = where
        self._servers: dict[str, Any] = {}  # handles of the replicas, by address
        self._warned = False
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Look for samples to move, now and then, until :meth:`close`."""
        if self._dispatch.placement is not None:
            self._task = asyncio.ensure_future(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def look(self) -> None:
        """Which replicas serve: the router knows."""
        if self._dispatch.placement is None or self._router is None:
            return
        try:
            fleet = await asyncio.wait_for(self._router.fleet.remote(), _ANSWER_S)
        except (RayError, asyncio.TimeoutError) as error:
            logger.warning("the router does not say which replicas serve; those that did are planned with (%s)", error)
            return
        self._servers = {address: handle for address, (handle, _) in fleet.items()}
        self._dispatch.serve({address: room for address, (_, room) in fleet.items()})
        if self._dispatch.adrift:
            try:
                self._dispatch.take_up(await asyncio.wait_for(self._where(), _ANSWER_S))
            except asyncio.TimeoutError:  # a worker is stuck; the next look asks again
                logger.warning("it is not known where requests of a replica that died went on")

    async def vacate(self, replica: str) -> int:
        """Let what runs at a replica go on at others, with the tokens it has; the router knows it no more.

        Returns:
            How many samples. What came there since is turned away by the replica's server.
        """
        await self.look()
        moved: set[str] = set()
        try:
            while True:
                at = await asyncio.wait_for(self._where(), _ANSWER_S)
                names = [name for name, address in at.items() if address == replica and name not in moved]
                if not names:
                    break
                self._moves([Move(name, "", "its replica rests") for name in names])
                moved.update(names)
                await asyncio.sleep(_STRAY_S)
        except asyncio.TimeoutError:
            logger.warning("it is not known what runs at a replica that is to rest: it is cut short")
        await self.look()
        return len(moved)

    def report_errors(self) -> None:
        """A plan that failed is told, once: samples start all the same."""
        placement = self._dispatch.placement
        if placement is not None and placement.errors and not self._warned:
            self._warned = True
            logger.warning("a plan failed, and samples go to the least loaded replica: %s", placement.last_error)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_MOVE_S)
            try:
                if self._active() and (watched := self._dispatch.watched()):
                    await self._move(watched)
            except Exception:  # nothing is lost by what stays where it is
                logger.warning("samples could not be moved", exc_info=True)

    async def _move(self, watched: dict[str, list[str]]) -> None:
        asked = [
            asyncio.wait_for(self._servers[replica].progress.remote(names), _ANSWER_S)
            for replica, names in watched.items()
            if replica in self._servers
        ]
        emitted: dict[str, int] = {}
        for answer in await asyncio.gather(*asked, return_exceptions=True):  # who died is seen elsewhere
            emitted.update(answer if isinstance(answer, dict) else {})
        if not self._active():
            return
        moves = self._dispatch.moves(emitted)
        self._moves(moves)
        for move in moves:
            logger.debug("%s goes on at %s: %s", *move)
        if moves:
            logger.info("%d samples go on at another replica; the first, %s at %s: %s", len(moves), *moves[0])
