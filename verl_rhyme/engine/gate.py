"""A server's request gate: requests wait for the policy version that they need, and weights wait for requests."""

from __future__ import annotations

import asyncio


class Gate:
    """Request gate for one event loop."""

    def __init__(self) -> None:
        self.version = 0  # of the served policy
        self.running = 0  # requests that entered and have not left
        self.closed = False  # all requests are refused
        self._waiting: dict[str, asyncio.Future[None]] = {}  # by request
        self._idle = asyncio.Event()

    async def enter(self, request: str, version: int) -> bool:
        """Wait until ``version`` or a newer one is served; False after :meth:`cancel` or while the gate is closed.

        A request that entered must :meth:`leave`.
        """
        while version > self.version and not self.closed:
            changed = self._waiting[request] = asyncio.get_running_loop().create_future()
            try:
                await changed
            finally:
                cancelled = self._waiting.pop(request, None) is None
            if cancelled:
                return False
        if self.closed:
            return False
        self.running += 1
        return True

    async def leave(self) -> None:
        self.running -= 1
        if not self.running:
            self._idle.set()

    async def open(self, version: int) -> None:
        """Open the gate for a policy whose weights the engine has loaded."""
        self.version, self.closed = version, False
        self._wake(*self._waiting.values())

    async def close(self) -> None:
        """Refuse all waiting requests, and new ones until :meth:`open`."""
        self.closed = True
        self._wake(*self._waiting.values())

    async def cancel(self, request: str) -> bool:
        """Cancel a waiting request; return whether it was waiting."""
        if (cancelled := self._waiting.pop(request, None)) is None:
            return False
        self._wake(cancelled)
        return True

    async def wait_until_idle(self) -> None:
        while self.running:
            self._idle.clear()
            await self._idle.wait()

    def _wake(self, *waiting: asyncio.Future[None]) -> None:
        for changed in waiting:
            if not changed.done():
                changed.set_result(None)
