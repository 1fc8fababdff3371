"""The agent loop workers of a coordinator, and the attempts that each runs."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import ray
from ray.exceptions import RayActorError

from verl_rhyme.observability.errors import first_line
from verl_rhyme.placement import Move
from verl_rhyme.processes.waiting import waiting_for
from verl_rhyme.scheduling.attempts import Attempt, Start

logger = logging.getLogger(__name__)

#: Seconds that a worker has to store all turns that it keeps.
_STORING_S = 300.0
#: Seconds between two queries for the attempts of a worker.
_ROLL_CALL_S = 10.0
#: Seconds that a new worker has to start: imports from a cold shared filesystem take longer than an answer.
START_S = 1800.0


class WorkerPool:
    """Sends starts to the workers, and detects lost attempts.

    A worker that died or does not answer is given up. It is killed, because a worker that only hangs must not return
    after its attempts have started elsewhere, and its attempts are lost. An attempt is also lost if its worker does not
    know it and has not reported its end. ``lost`` gets names of lost attempts, the reason, and names of ended attempts
    whose turns are lost.
    """

    def __init__(self, coordinator: Any, patience_s: float, lost: Callable[[list[str], str, list[str]], None]) -> None:
        self._coordinator, self._patience_s, self._lost = coordinator, patience_s, lost
        self._about: dict[Any, set[str]] = {}  # worker -> names of the attempts that it was sent
        self._worker: dict[str, Any] = {}  # name of an attempt -> worker
        self._kept: dict[str, Any] = {}  # name of an ended attempt -> worker that keeps its turns
        self._unsure: set[str] = set()  # sent, but not acknowledged by the worker
        self._tasks: set[asyncio.Task[Any]] = set()
        self.start_error = ""  # of a worker that did not start; empty if all did

    def __len__(self) -> int:
        return len(self._about)

    async def join(self, workers: Iterable[Any], limit_s: float = START_S) -> dict[str, str]:
        """Use ``SessionAgentLoopWorker`` actors once they have started; :meth:`watch` them then. Give up one without an
        answer for ``limit_s``. Return the attempts that they run, with each one's replica address; empty where it is
        unknown."""
        workers = list(workers)
        missing = lambda: f"{len(workers) - len(self)} of {len(workers)} agent loop workers to start or answer"  # noqa: E731
        with waiting_for(missing):
            found = await asyncio.gather(*(self._join(worker, limit_s) for worker in workers))
        return {name: replica for about in found for name, replica in about.items()}

    def watch(self) -> None:
        """Detect lost attempts from now on; before, the ends of attempts may have been reported and not recorded."""
        for worker in self._about:
            self._run(self._watch(worker))

    @property
    def kept(self) -> Collection[str]:
        """Names of ended attempts whose turns the workers keep."""
        return self._kept.keys()

    def start(self, starts: list[Start], step: int) -> None:
        """Send starts to the workers: to the one that keeps the sample's turns, else a prompt's samples together to the
        worker with the fewest attempts."""
        groups: dict[tuple[str, Any], list[Start]] = defaultdict(list)
        for start in starts:
            groups[Attempt.named(start.name).uid, self._kept.get(start.predecessor or "")].append(start)
        orders: dict[Any, list[Start]] = defaultdict(list)
        for (_, keeper), group in groups.items():
            worker = keeper or min(self._about, key=lambda worker: len(self._about[worker]))
            orders[worker] += group
            for start in group:
                self._about[worker].add(start.name)
                self._worker[start.name] = worker
        for worker, order in orders.items():
            self._unsure.update(start.name for start in order)
            self._run(self._send(worker, order, step))

    def has_attempt(self, name: str) -> bool:
        return name in self._worker

    def ended(self, name: str, kept: bool = False) -> None:
        """Forget an attempt that has ended; ``kept``: its worker keeps its turns."""
        worker = self._worker.pop(name, None)
        if worker in self._about:
            self._about[worker].discard(name)
            if kept:
                self._kept[name] = worker
        elif kept and name not in self._kept:  # it was lost or abandoned before its report: its sample starts over
            for each in self._about:
                each.forget.remote([name])

    def forget(self, names: Iterable[str]) -> None:
        orders: dict[Any, list[str]] = defaultdict(list)
        for name in names:
            if (worker := self._kept.pop(name, None)) is not None:
                orders[worker].append(name)
        for worker, order in orders.items():
            worker.forget.remote(order)

    async def store_turns(self) -> None:
        """Let the workers store in TransferQueue the turns that they keep (``KeptTurns.store``)."""
        stored = [asyncio.wait_for(worker.store_turns.remote(), _STORING_S) for worker in {*self._kept.values()}]
        for answer in await asyncio.gather(*stored, return_exceptions=True):
            if isinstance(answer, BaseException):
                logger.warning(
                    "an agent loop worker did not store interrupted responses for the checkpoint (%r): a run that "
                    "resumes from it regenerates them",
                    answer,
                )

    def abandon(self, names: list[str]) -> None:
        orders: dict[Any, list[str]] = defaultdict(list)
        for name in names:
            if (worker := self._worker.get(name)) is not None:
                orders[worker].append(name)
            self.ended(name)
        for worker, order in orders.items():
            worker.abandon.remote(order)

    def move(self, moves: Iterable[Move]) -> None:
        orders: dict[Any, list[Move]] = defaultdict(list)
        for move in moves:
            if (worker := self._worker.get(move.id)) is not None:
                orders[worker].append(move)
        for worker, order in orders.items():
            worker.move.remote(order)

    async def replica_by_attempt(self) -> dict[str, str]:
        """Return the replica's address of each running attempt, as :meth:`join`; silent workers are left out."""
        pending = [asyncio.wait_for(worker.replica_by_attempt.remote(), self._patience_s) for worker in self._about]
        answers = await asyncio.gather(*pending, return_exceptions=True)  # _watch gives up silent workers
        return {name: at for found in answers if isinstance(found, dict) for name, at in found.items()}

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    # ---- internal ----

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, worker: Any, limit_s: float) -> dict[str, str]:
        try:
            about, kept = await asyncio.wait_for(self._attach(worker), limit_s)
        except (RayActorError, asyncio.TimeoutError) as error:
            self.start_error = str(error) or f"no answer for {limit_s:.0f} s"
            logger.warning("an agent loop worker is given up: %s", self.start_error.strip().splitlines()[0])
            ray.kill(worker)  # one that only hangs must not return after its attempts have started elsewhere
            return {}
        self._about[worker] = set(about)
        self._worker.update(dict.fromkeys(about, worker))
        self._kept.update(dict.fromkeys(kept, worker))
        return about

    async def _attach(self, worker: Any) -> tuple[dict[str, str], list[str]]:
        """Return a worker's running attempts, and then those whose turns it keeps, so that none is missed."""
        about = await worker.attach.remote(self._coordinator)
        return about, await worker.kept.remote()

    async def _send(self, worker: Any, starts: list[Start], step: int) -> None:
        try:
            await asyncio.wait_for(worker.start_attempts.remote(starts, step), self._patience_s)
        except (RayActorError, asyncio.TimeoutError) as error:  # in Python 3.10 not the builtin
            self._give_up(worker, error)
        except Exception as error:
            self._report_lost([start.name for start in starts], f"a worker could not start them: {error}")
        finally:
            self._unsure.difference_update(start.name for start in starts)

    async def _watch(self, worker: Any) -> None:
        while worker in self._about:
            await asyncio.sleep(_ROLL_CALL_S)
            asked = self._about.get(worker, set()) - self._unsure  # this query may overtake a start
            try:
                found = await asyncio.wait_for(worker.attempts.remote(), self._patience_s)
            except (RayActorError, asyncio.TimeoutError) as error:
                self._give_up(worker, error)
                return
            missing = (asked - set(found)) & self._about.get(worker, set())
            if missing:
                self._report_lost(sorted(missing), "their agent loop worker does not know them")

    def _give_up(self, worker: Any, error: BaseException) -> None:
        about = self._about.pop(worker, None)
        if about is None:
            return  # already given up
        turns = [name for name, keeper in self._kept.items() if keeper is worker]
        for name in turns:
            del self._kept[name]
        why = first_line(error) if str(error) else f"no answer for {self._patience_s:.0f} s"
        logger.warning("an agent loop worker is given up (%s); its samples start again on others", why)
        ray.kill(worker)
        self._report_lost(sorted(about), "their agent loop worker died or hangs", turns)

    def _report_lost(self, names: list[str], why: str, turns: list[str] | None = None) -> None:
        for name in names:
            self.ended(name)
        self._lost(names, why, turns or [])
