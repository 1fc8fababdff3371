"""Validation samples that fail start again, by the rules of training samples (:mod:`verl_rhyme.scheduling.retries`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from verl_rhyme.observability.errors import is_broken
from verl_rhyme.processes.deadline import NoAnswer
from verl_rhyme.scheduling.retries import HANG_TRIES, Retries, RolloutError

logger = logging.getLogger(__name__)

#: Shortest and longest pause in which a failed sample looks whether it may start again, in seconds.
_POLL_S = 0.01, 1.0


class Validation:
    """The validation samples of a worker; ``outage_s`` without a success, the remaining ones fail."""

    def __init__(self, outage_s: float) -> None:
        self.prompts: set[str] = set()  # ids of those that run
        self._retries = Retries(outage_s)
        self._open = self._running = 0
        self._hopeless: RolloutError | None = None

    async def run(self, sample: tuple[str, int], call: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of a sample's call, which is repeated after errors; verl leaves a sample out that
        raises."""
        clock = asyncio.get_running_loop().time
        if not self._open:  # a new validation
            self._retries.trained()
            self._hopeless = None
        self._open += 1
        try:
            while True:
                self._running += 1
                try:
                    result = await call()
                except (Exception, asyncio.CancelledError) as error:  # a tool may cancel its task; none else does
                    self._running -= 1
                    if not self._fails(sample, error, clock()):
                        raise
                else:
                    self._running -= 1
                    self._retries.succeeded(sample, clock())
                    return result
                while sample in self._retries.waiting:
                    if self._hopeless is not None:
                        raise self._hopeless
                    pause = (self._retries.next_start() or 0.0) - clock()
                    await asyncio.sleep(min(max(pause, _POLL_S[0]), _POLL_S[1]))
                    self._retries.release(clock())
        finally:
            self._open -= 1
            self._retries.forget([sample])

    def _fails(self, sample: tuple[str, int], error: BaseException, now: float) -> bool:
        """Record a failure; return whether the sample starts again."""
        uid, number = sample
        text = f"sample {number} of validation prompt {uid}: {error!r}"
        tries = HANG_TRIES if isinstance(error, NoAnswer) else 1
        try:
            again = self._retries.failed(sample, text, now, self._running, is_broken(error), tries)
        except RolloutError as hopeless:
            if self._hopeless is None:
                logger.error("validation goes on without the samples that fail: %s", hopeless)
            self._hopeless = hopeless
            return False
        if not again:
            logger.warning("validation goes on without %s, which failed too often", text)
        return again
