"""A server's request gate: requests wait for the policy version that they need, and weights wait for requests."""

from __future__ import annotations

import asyncio


class Gate:
    """Request gate for one event loop."""

    def __init__(self) -> None:
        self.version = 0  # of the served policy
        self.running = 0  # requests that entered and have not left
        self.closed = False  # all requests are refused
        self._waiting: dict[object, str] = {}  # waiting requests by a unique mark
        self._changed = asyncio.Condition()

    async def enter(self, request: str, version: int) -> bool:
        """Wait until ``version`` or a newer one is served; False after :meth:`cancel` or while the gate is closed.

        A request that entered must :meth:`leave`.
        """
        if version > self.version and not self.closed:
            self._waiting[mark := object()] = request
            try:
                async with self._changed:
                    await self._changed.wait_for(
                        lambda: version <= self.version or mark not in self._waiting or self.closed
                    )
            finally:
                cancelled = self._waiting.pop(mark, None) is None
            if cancelled:
                return False
        if self.closed:
            return False
        self.running += 1
        return True

    async def leave(self) -> None:
        self.running -= 1
        if not self.running:
            await self._notify()

    async def open(self, version: int) -> None:
        """Open the gate for a policy whose weights the engine has loaded."""
        self.version, self.closed = version, False
        await self._notify()

    async def close(self) -> None:
        """Refuse all waiting requests, and new ones until :meth:`open`."""
        self.closed = True
        await self._notify()

    async def cancel(self, request: str) -> bool:
        """Cancel a waiting request; return whether it was waiting."""
        marks = [mark for mark, waits in self._waiting.items() if waits == request]
        for mark in marks:
            del self._waiting[mark]
        if marks:
            await self._notify()
        return bool(marks)

    async def wait_until_idle(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self.running)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
