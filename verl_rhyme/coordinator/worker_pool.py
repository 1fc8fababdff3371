"""The agent loop workers of a coordinator, and the attempts that each runs."""

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
from verl_rhyme.processes.waiting import waiting_for
from verl_rhyme.scheduling.attempts import Attempt, AttemptReport, Start

logger = logging.getLogger(__name__)

#: Seconds between two queries for the attempts of a worker.
_ROLL_CALL_S = 10.0
#: Seconds that a new worker has to start: imports from a cold shared filesystem take longer than an answer.
START_S = 1800.0


class WorkerPool:
    """Sends starts to the workers, and detects lost attempts.

    A worker that died or does not answer is given up. It is killed, because a worker that only hangs must not return
    after its attempts have started elsewhere, and its attempts are lost. An attempt is also lost if its worker does not
    know it and has not reported its end. ``lost`` gets lost attempts, the reason, and ended attempts whose turns are
    lost.
    """

    def __init__(
        self, coordinator: Any, patience_s: float, lost: Callable[[list[Attempt], str, list[Attempt]], None]
    ) -> None:
        self._coordinator, self._patience_s, self._lost = coordinator, patience_s, lost
        self._about: dict[Any, set[Attempt]] = {}  # worker -> attempts that it was sent
        self._worker: dict[Attempt, Any] = {}
        self._kept: dict[Attempt, Any] = {}  # ended attempt -> worker that keeps its turns
        self._unsure: set[Attempt] = set()  # sent, but not acknowledged by the worker
        self._tasks: set[asyncio.Task[Any]] = set()
        self.start_error = ""  # of a worker that did not start; empty if all did

    def __len__(self) -> int:
        return len(self._about)

    async def join(
        self, workers: Iterable[Any], limit_s: float = START_S
    ) -> tuple[dict[Attempt, str], list[AttemptReport]]:
        """Use ``SessionAgentLoopWorker`` actors once they have started; :meth:`watch` them then. Give up one without an
        answer for ``limit_s``. Return what all workers return (``attach``)."""
        workers = list(workers)
        with waiting_for(lambda: f"{len(workers) - len(self)} of {len(workers)} agent loop workers to start or answer"):
            found = await asyncio.gather(*(self._join(worker, limit_s) for worker in workers))
        running = {attempt: replica for about, _ in found for attempt, replica in about.items()}
        return running, [report for _, reports in found for report in reports]

    def watch(self) -> None:
        """Detect lost attempts from now on; before, the ends of attempts may have been reported and not recorded."""
        for worker in self._about:
            self._run(self._watch(worker))

    def start(self, starts: list[Start], step: int) -> None:
        """Send starts to the workers: to the one that keeps the sample's turns, else a prompt's samples together to the
        worker with the fewest attempts."""
        groups: dict[tuple[str, Any], list[Start]] = defaultdict(list)
        for start in starts:
            keeper = self._kept.get(start.predecessor) if start.predecessor else None
            groups[start.attempt.uid, keeper].append(start)
        orders: dict[Any, list[Start]] = defaultdict(list)
        for (_, keeper), group in groups.items():
            worker = keeper or min(self._about, key=lambda worker: len(self._about[worker]))
            orders[worker] += group
            for start in group:
                self._about[worker].add(start.attempt)
                self._worker[start.attempt] = worker
        for worker, order in orders.items():
            self._unsure.update(start.attempt for start in order)
            self._run(self._send(worker, order, step))

    def has_attempt(self, attempt: Attempt) -> bool:
        return attempt in self._worker

    def ended(self, attempt: Attempt, kept: bool = False) -> None:
        """Forget an attempt that has ended; ``kept``: its worker keeps its turns."""
        worker = self._worker.pop(attempt, None)
        if worker in self._about:
            self._about[worker].discard(attempt)
            if kept:
                self._kept[attempt] = worker
        elif kept and attempt not in self._kept:  # it was lost or abandoned before its report: its sample starts over
            for each in self._about:
                each.forget.remote([attempt])

    def forget(self, attempts: Iterable[Attempt]) -> None:
        for worker, order in self._by_worker(self._kept, attempts):
            worker.forget.remote(order)
        for attempt in attempts:
            self._kept.pop(attempt, None)

    async def store_turns(self) -> None:
        """Let the workers store in TransferQueue the turns that they have (``KeptTurns.store``). A worker that hangs is
        killed (:meth:`watch`): none writes any more when this returns."""
        stored = [worker.store_turns.remote() for worker in self._about]
        for answer in await asyncio.gather(*stored, return_exceptions=True):
            if isinstance(answer, BaseException):
                logger.warning(
                    "an agent loop worker did not store unfinished responses for the checkpoint (%r): a run that "
                    "resumes from it regenerates them",
                    answer,
                )

    def abandon(self, attempts: Iterable[Attempt], needs_turns: Callable[[Attempt], bool]) -> None:
        """End attempts without reports; workers keep the needed turns of generated ones."""
        for worker, order in self._by_worker(self._worker, attempts):
            worker.abandon.remote(order, [attempt for attempt in order if needs_turns(attempt)])
        for attempt in attempts:
            self.ended(attempt, attempt in self._worker and needs_turns(attempt))

    def move(self, moves: Iterable[Move]) -> None:
        by_attempt = {move.id: move for move in moves}
        for worker, order in self._by_worker(self._worker, by_attempt):
            worker.move.remote([by_attempt[attempt] for attempt in order])

    async def replica_by_attempt(self) -> dict[Attempt, str]:
        """Return the replica's address of each running attempt, as :meth:`join`; silent workers are left out."""
        pending = [asyncio.wait_for(worker.replica_by_attempt.remote(), self._patience_s) for worker in self._about]
        answers = await asyncio.gather(*pending, return_exceptions=True)  # _watch gives up silent workers
        return {attempt: at for found in answers if isinstance(found, dict) for attempt, at in found.items()}

    def close(self) -> None:
        self._about.clear()  # before Python 3.12, wait_for() may swallow a cancellation: _watch() ends all the same
        for task in self._tasks:
            task.cancel()

    # ---- internal ----

    @staticmethod
    def _by_worker(workers: dict[Attempt, Any], attempts: Iterable[Attempt]) -> Iterable[tuple[Any, list[Attempt]]]:
        orders: dict[Any, list[Attempt]] = defaultdict(list)
        for attempt in attempts:
            if attempt in workers:
                orders[workers[attempt]].append(attempt)
        return orders.items()

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, worker: Any, limit_s: float) -> tuple[dict[Attempt, str], list[AttemptReport]]:
        try:
            about, reports = await asyncio.wait_for(worker.attach.remote(self._coordinator), limit_s)
        except (RayActorError, asyncio.TimeoutError) as error:
            self.start_error = str(error) or f"no answer for {limit_s:.0f} s"
            logger.warning("an agent loop worker is given up: %s", self.start_error.strip().splitlines()[0])
            ray.kill(worker)  # one that only hangs must not return after its attempts have started elsewhere
            return {}, []
        self._about[worker] = set(about)
        self._worker.update(dict.fromkeys(about, worker))
        self._kept.update({report.attempt: worker for report in reports if report.leaves_turns})
        return about, reports

    async def _send(self, worker: Any, starts: list[Start], step: int) -> None:
        try:
            await asyncio.wait_for(worker.start_attempts.remote(starts, step), self._patience_s)
        except (RayActorError, asyncio.TimeoutError) as error:  # in Python 3.10 not the builtin
            self._give_up(worker, error)
        except Exception as error:
            self._report_lost([start.attempt for start in starts], f"a worker could not start them: {error}")
        finally:
            self._unsure.difference_update(start.attempt for start in starts)

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
        turns = [attempt for attempt, keeper in self._kept.items() if keeper is worker]
        for attempt in turns:
            del self._kept[attempt]
        why = first_line(error) if str(error) else f"no answer for {self._patience_s:.0f} s"
        logger.warning("an agent loop worker is given up (%s); its samples start again on others", why)
        ray.kill(worker)
        self._report_lost(sorted(about), "their agent loop worker died or hangs", turns)

    def _report_lost(self, attempts: list[Attempt], why: str, turns: list[Attempt] | None = None) -> None:
        for attempt in attempts:
            self.ended(attempt)
        self._lost(attempts, why, turns or [])
