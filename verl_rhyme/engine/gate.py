"""A server's gate: requests that need a newer policy than is served wait for it, and weights wait for requests."""

from __future__ import annotations

import asyncio


class Gate:
    """In one event loop. ``version`` is the policy's that is served, and ``running`` the requests within."""

    def __init__(self) -> None:
        self.version = 0
        self.running = 0
        self.shut = False
        self._waiting: dict[object, str] = {}  # who waits, by a mark of its own
        self._unwanted: set[object] = set()  # of these
        self._changed = asyncio.Condition()

    async def enter(self, request: str, version: int) -> bool:
        """Wait until that version or a newer one is served.

        Returns:
            False where :meth:`turn_away` came first, or the gate is shut; else :meth:`leave` is to follow.
        """
        if version > self.version and not self.shut:
            self._waiting[mark := object()] = request
            try:
                async with self._changed:
                    await self._changed.wait_for(lambda: version <= self.version or mark in self._unwanted or self.shut)
                if mark in self._unwanted:
                    return False
            finally:
                del self._waiting[mark]
                self._unwanted.discard(mark)
        if self.shut:
            return False
        self.running += 1
        return True

    async def leave(self) -> None:
        self.running -= 1
        if not self.running:
            await self._tell()

    async def serve(self, version: int) -> None:
        """This policy's weights are in the engine; whoever was turned away may come."""
        self.version, self.shut = version, False
        await self._tell()

    async def shut_out(self) -> None:
        """Whoever waits, or comes before :meth:`serve`, is turned away."""
        self.shut = True
        await self._tell()

    async def turn_away(self, request: str) -> bool:
        """One that waits is not wanted any more; whether it waits."""
        marks = {mark for mark, waits in self._waiting.items() if waits == request}
        self._unwanted |= marks
        if marks:
            await self._tell()
        return bool(marks)

    async def empty(self) -> None:
        """Wait until no request is within."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self.running)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
