"""The agent loop workers, as the coordinator sees them: who is about what, and who is there no more."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import ray
from ray.exceptions import RayActorError

from verl_rhyme.observability.errors import first_line
from verl_rhyme.placement import Move
from verl_rhyme.scheduling.attempts import Attempt, Start

logger = logging.getLogger(__name__)

#: Seconds between two questions to a worker what it is about.
_ROLL_CALL_S = 10.0


class WorkerPool:
    """Sends starts to the workers, and finds what got lost with them.

    A worker that died, or does not answer, is given up: killed, for one that only hangs must not come back with what
    others do by then, and its attempts are lost. So are attempts that a worker does not know though it was to start
    them and has not told of their end.

    Args:
        workers: Handles of ``SessionAgentLoopWorker``.
        coordinator: The handle that they report to.
        patience_s: Seconds that a worker has for an answer, once it has started.
        lost: Called with names of attempts that are lost, and why.
    """

    def __init__(
        self, workers: Iterable[Any], coordinator: Any, patience_s: float, lost: Callable[[list[str], str], None]
    ) -> None:
        self._coordinator, self._patience_s, self._lost = coordinator, patience_s, lost
        self._about: dict[Any, set[str]] = {}  # worker -> names of the attempts that it was sent
        self._worker: dict[str, Any] = {}  # the other way round
        self._unsure: set[str] = set()  # sent, and the worker has not said that it got them
        self._tasks: set[asyncio.Task[Any]] = set()
        self._joining = list(workers)
        #: Why a worker did not start, if one did not.
        self.start_error = ""

    def __len__(self) -> int:
        return len(self._about)

    async def join(self) -> dict[str, str]:
        """Take the workers into service as soon as they have started. Returns the attempts that they are about, with
        the address of the replica of each; empty where that is not known."""
        found = await asyncio.gather(*(self._join(worker) for worker in self._joining))
        self._joining = []
        return {name: replica for about in found for name, replica in about.items()}

    def start(self, starts: list[Start], step: int) -> None:
        """Send samples to the workers, those of a prompt together, each to the one that is about least."""
        groups: dict[str, list[Start]] = defaultdict(list)
        for start in starts:
            groups[Attempt.named(start.name).uid].append(start)
        orders: dict[Any, list[Start]] = defaultdict(list)
        for group in groups.values():
            worker = min(self._about, key=lambda worker: len(self._about[worker]))
            orders[worker] += group
            for start in group:
                self._about[worker].add(start.name)
                self._worker[start.name] = worker
        for worker, order in orders.items():
            self._unsure.update(start.name for start in order)
            self._run(self._send(worker, order, step))

    def knows(self, name: str) -> bool:
        """A worker was sent this attempt, and has not told how it ended."""
        return name in self._worker

    def ended(self, name: str) -> None:
        """An attempt has told how it ended; nobody asks for it any more."""
        worker = self._worker.pop(name, None)
        if worker in self._about:
            self._about[worker].discard(name)

    def abandon(self, names: list[str]) -> None:
        """End attempts nobody waits for, wherever they run. Does not wait."""
        orders: dict[Any, list[str]] = defaultdict(list)
        for name in names:
            if (worker := self._worker.get(name)) is not None:
                orders[worker].append(name)
            self.ended(name)
        for worker, order in orders.items():
            worker.abandon.remote(order)

    def move(self, moves: Iterable[Move]) -> None:
        """Let attempts, by their names, go on at other replicas. Does not wait."""
        orders: dict[Any, list[Move]] = defaultdict(list)
        for move in moves:
            if (worker := self._worker.get(move.id)) is not None:
                orders[worker].append(move)
        for worker, order in orders.items():
            worker.move.remote(order)

    async def where(self) -> dict[str, str]:
        """The attempts that are under way, with the address of the replica of each; empty where that is not known, none
        of a worker that does not answer."""
        asked = [asyncio.wait_for(worker.places.remote(), self._patience_s) for worker in self._about]
        answers = await asyncio.gather(*asked, return_exceptions=True)  # who is silent is given up elsewhere
        return {name: at for found in answers if isinstance(found, dict) for name, at in found.items()}

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    # ---- within ----

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, worker: Any) -> dict[str, str]:
        try:  # imports from a cold shared filesystem may take longer than a worker that runs may be silent
            about = await worker.attach.remote(self._coordinator)
        except RayActorError as error:
            logger.warning("an agent loop worker did not start: %s", first_line(error))
            self.start_error = str(error)
            return {}
        self._about[worker] = set(about)
        self._worker.update(dict.fromkeys(about, worker))
        self._run(self._watch(worker))
        return about

    async def _send(self, worker: Any, starts: list[Start], step: int) -> None:
        try:
            await asyncio.wait_for(worker.begin.remote(starts, step), self._patience_s)
        except (RayActorError, asyncio.TimeoutError) as error:  # in Python 3.10 not the builtin
            self._give_up(worker, error)
        except Exception as error:
            self._report_lost([start.name for start in starts], f"a worker could not start them: {error}")
        finally:
            self._unsure.difference_update(start.name for start in starts)

    async def _watch(self, worker: Any) -> None:
        while worker in self._about:
            await asyncio.sleep(_ROLL_CALL_S)
            asked = self._about.get(worker, set()) - self._unsure  # a question may overtake a start
            try:
                found = await asyncio.wait_for(worker.attempts.remote(), self._patience_s)
            except (RayActorError, asyncio.TimeoutError) as error:
                self._give_up(worker, error)
                return
            missing = (asked - set(found)) & self._about.get(worker, set())
            if missing:
                self._report_lost(sorted(missing), "the worker that was to start them does not know them")

    def _give_up(self, worker: Any, error: BaseException) -> None:
        about = self._about.pop(worker, None)
        if about is None:
            return  # already
        why = first_line(error) if str(error) else f"no answer for {self._patience_s:.0f} s"
        logger.warning("an agent loop worker is given up, its samples start again elsewhere: %s", why)
        ray.kill(worker)
        self._report_lost(sorted(about), "their agent loop worker is gone")

    def _report_lost(self, names: list[str], why: str) -> None:
        for name in names:
            self.ended(name)
        self._lost(names, why)
