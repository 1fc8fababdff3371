"""The coordinator, an actor that drives the rollout of a run, also while the trainer trains.

It is an asyncio Ray actor around :class:`~verl_rhyme.scheduling.rollout.Rollout`. Agent loop workers report ended
attempts, and it starts the next ones at once. The trainer adds prompts, waits for a batch, takes it, and publishes
policy versions. Token text does not pass through it. When its process dies, Ray restarts it under the same handle, and
:class:`~verl_rhyme.trainer.driver.Driver` opens it with the state of the last batch. Later events are recovered from
TransferQueue, to which agent loop workers write before they report, and from the attempts that the workers run.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import ray
import transfer_queue as tq

from verl_rhyme.agent_loop.session import PROMPTS
from verl_rhyme.agent_loop.stored_attempts import TRAIN, attempt_of, fetch_reports, trajectories
from verl_rhyme.coordinator.cleanup import Cleanup
from verl_rhyme.coordinator.migrations import Migrations
from verl_rhyme.coordinator.worker_pool import START_S, WorkerPool
from verl_rhyme.lengths.predictor import Forecast
from verl_rhyme.observability.batches import batch_metrics, forecast_metrics, placement_metrics, tool_metrics
from verl_rhyme.observability.log_handler import add_log_handler
from verl_rhyme.placement import Move, Placement
from verl_rhyme.processes import queue
from verl_rhyme.processes.messages import (
    Handover,
    LoadedPrompt,
    NotOpen,
    Part,
    Reply,
    ResumeState,
    RunSettings,
    TrainerWork,
)
from verl_rhyme.scheduling.attempts import Attempt, AttemptReport, Record
from verl_rhyme.scheduling.capacity import Capacity
from verl_rhyme.scheduling.dispatch import Dispatch
from verl_rhyme.scheduling.expectations import Expectations
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.rules import STOP_WAIT_S
from verl_rhyme.scheduling.samples import State

logger = logging.getLogger(__name__)

#: Seconds between two log lines about what a batch still waits for.
_PATIENCE_S = 60.0
#: Seconds between two requests to the trainer to check the replicas.
_LOOK_S = 20.0
#: Seconds between two checks while a batch settles.
_TICK_S = 0.05
#: Consecutive failures of all agent loop workers to start after which the run ends.
_OPENINGS = 5
#: Characters kept of an error's text, from its end.
_ERROR_CHARS = 4000


@dataclass
class _Opened:
    """Parts of an open coordinator that messages use."""

    setting: RunSettings
    rollout: Rollout
    pool: WorkerPool
    migrations: Migrations


class Coordinator:
    """The coordinator; :func:`start` makes it an actor. Before :meth:`open`, reports are kept and all other calls raise
    :class:`NotOpen`."""

    def __init__(self) -> None:
        add_log_handler()
        queue.join()
        gc.freeze()  # a collection over half a million imported objects would stall the event loop
        self._openings = 0
        self._opened: _Opened | None = None
        self._early: list[AttemptReport] = []
        self._queue_lock = asyncio.Lock()  # for changes of entries of TransferQueue that a deletion may reach
        self._dispatching = False
        self._error: Exception | None = None
        self._complained_at: float | None = None  # time of the last log line about what a batch waits for
        self._without_workers = 0  # consecutive times that no worker started
        self._waking: asyncio.TimerHandle | None = None  # next start of a failed sample
        self._waiting: set[asyncio.Future[None]] = set()  # calls that wait for the next change

    # ---- called by the trainer ----

    async def open(self, setting: RunSettings, workers: list[Any], resume: ResumeState, fresh: bool) -> dict[str, Any]:
        """Begin the rollout or resume it, and return its state; no sample starts before :meth:`publish`. ``fresh``: no
        batch is being trained, and entries of TransferQueue that are no longer needed are deleted before this
        returns."""
        self._openings = opening = self._openings + 1
        if self._opened is not None:
            self._opened.pool.close()
            self._opened.migrations.close()
            self._opened = None  # later reports are for the new rollout
        self._expectations = expectations = Expectations(setting.response_limit)
        if resume.lengths is not None:
            expectations.load_state_dict(resume.lengths)
        placement = None if setting.placement is None else Placement(*setting.placement, cost=setting.cost)
        dispatch = partial(Dispatch, lengths=self._lengths, placement=placement, prompts=expectations.prompt_tokens)
        rollout = Rollout(setting.rules, setting.filters, resume.generation, setting.outage_s, dispatch)
        rollout.scheduler.version = resume.version
        pool = self._new_pool(setting)
        # Workers of an earlier coordinator have started: one that does not answer hangs.
        running, reports = await pool.join(workers, START_S if fresh else setting.lost_after)
        listing = await _listing()
        self._still(opening, pool)
        if resume.state is not None:
            stored = await fetch_reports(listing)
            self._still(opening, pool)
            known: dict[Attempt, AttemptReport | None] = {**stored, **dict.fromkeys(running)}
            known |= {report.attempt: report for report in reports}
            known |= {attempt: report for attempt, report in stored.items() if report.stored}  # also unreported ones
            prompts = listing.get(PROMPTS, {})
            added = [prompt[:2] for prompt in resume.prompts]
            for uid in rollout.restore(
                resume.state, resume.version, resume.batches_left, known, prompts, added, _clock()
            ):
                logger.warning("the data of prompt %s are missing from TransferQueue: another prompt is loaded", uid)
            earlier = resume.state.get("expectations", {})
            rollout.expect(expectations.restore_prompts(earlier, rollout.content.needs_prompt))
            keys = {prompt.uid: prompt.key for prompt in resume.prompts if rollout.content.needs_prompt(prompt.uid)}
            rollout.expect(expectations.add_prompts(keys))
        locate, active = lambda: self._open.pool.replica_by_attempt(), lambda: self._dispatching
        migrations = Migrations(rollout.dispatch, setting.router, self._move, locate, active)
        await migrations.refresh_replicas()
        self._still(opening, pool)
        rollout.dispatch.count_running(running)
        self._opened, self._error = _Opened(setting, rollout, pool, migrations), None
        migrations.start()
        known_capacity = (resume.state or {}).get("capacity", ())
        self._capacity = Capacity(setting.limit, setting.room, known_capacity, setting.cost)
        self._capacity.share = resume.share
        self._cleanup = Cleanup(self._queue_lock, () if fresh else (resume.state or {}).get("dropped", ()))
        pool.abandon(
            [attempt for attempt in running if not rollout.content.may_train(attempt)], rollout.content.needs_turns
        )
        pool.forget([report.attempt for report in reports if not rollout.content.needs_turns(report.attempt)])
        if fresh:
            # Awaited: a trainer that dies before it is done opens the coordinator as fresh again.
            await self._cleanup.clear(rollout, listing, keep=set())
            self._still(opening)
        early, self._early = self._early, []
        await self.report_ended(early)
        unknown = [attempt for attempt in rollout.attempts() if not pool.has_attempt(attempt)]
        self._lost(unknown, "their worker died in the meantime")
        pool.watch()
        gc.freeze()  # also the lengths of all known prompts
        return self._state()

    async def add_workers(self, workers: list[Any]) -> None:
        """Replace all agent loop workers by these."""
        opened, opening = self._open, self._openings
        opened.pool.close()
        pool = self._new_pool(opened.setting)
        await pool.join(workers)
        self._still(opening, pool)
        self._without_workers = 0 if len(pool) else self._without_workers + 1
        if self._without_workers == _OPENINGS:
            raise RuntimeError(
                f"no agent loop worker started in {_OPENINGS} tries; last error:\n{pool.start_error[-_ERROR_CHARS:]}"
            )
        opened.pool = pool
        pool.watch()
        self._go()

    async def add_prompts(self, prompts: list[LoadedPrompt]) -> None:
        """Accept prompts whose data are in partition :data:`PROMPTS` of TransferQueue."""
        rollout = self._open.rollout
        rollout.add_prompts(prompt[:2] for prompt in prompts)
        rollout.expect(self._expectations.add_prompts({prompt.uid: prompt.key for prompt in prompts}))
        self._go()

    async def rank(self, locations: dict[str, float]) -> None:
        """Set the expected log lengths of responses, by prompt key, that the ranker predicts."""
        self._open.rollout.expect(self._expectations.rank(locations))

    async def publish(self, version: int, batches_left: int) -> TrainerWork:
        """Continue under the policy version that the engines have now, for so many update batches."""
        opened, opening = self._open, self._openings
        self._cleanup.delete_remembered(opened.rollout)
        await opened.migrations.refresh_replicas()
        self._still(opening)
        opened.rollout.publish(version, batches_left)
        self._dispatching = batches_left > 0
        self._go()
        return await self.pending_work() if self._dispatching else TrainerWork()

    async def set_serving(self, share: float, leaves: str = "") -> int:
        """Let a share of the replicas in :class:`RunSettings` generate from now on. The samples of ``leaves``, a
        replica's address that the router no longer has, continue on others; return their number."""
        migrations, self._capacity.share, moved = self._open.migrations, share, 0
        if leaves:
            moved = await migrations.drain(leaves)
        else:
            await migrations.refresh_replicas()
        self._go()
        return moved

    async def pause(self) -> None:
        """Start no sample until :meth:`publish`: the engines are about to receive new weights."""
        if self._opened is not None:
            self._cleanup.delete_remembered(self._opened.rollout)
        self._dispatching = False

    async def wait_for_batch(self, rewarded: bool, stopping: bool, part: int | None = None) -> TrainerWork | None:
        """Wait until the engines may be stopped (:meth:`Scheduler.has_batch`), or there is work for the trainer: also a
        ``part`` of so many samples, and what dropped prompts left, once that is as much as a batch. ``stopping``: the
        caller will stop the engines, and no sample starts until :meth:`publish` or the next call. Raise the error after
        which the rollout cannot continue."""
        rollout, clock, opening = self._open.rollout, asyncio.get_running_loop().time, self._openings
        self._cleanup.delete_remembered(rollout)
        await self._open.migrations.refresh_replicas()  # replicas may have been replaced
        self._still(opening)
        began = clock()
        self._complained_at = self._complained_at or began
        self._dispatching = True
        self._go()
        while True:
            self._raise()
            if rollout.scheduler.has_batch(rewarded):
                self._dispatching, self._complained_at = not stopping, None
                return None
            if any(work := await self.pending_work()):
                return work
            if part is not None and (attempts := rollout.part(part)):
                return TrainerWork(part=_stored(attempts, await _listing()))
            if rollout.dropped_samples >= rollout.rules.batch_samples:
                listing = await _listing()
                self._still(opening)
                return TrainerWork(handover=self._hand_over(listing, rollout.pop_wasted()))
            self._complained_at = self._complain(self._complained_at, "an update batch")
            await self._change(_LOOK_S)
            self._still(opening)
            if clock() - began > _LOOK_S:
                return TrainerWork(replicas=True)

    async def take_batch(self) -> Reply | None:
        """Wait until all that the update batch waits for has arrived (:meth:`Scheduler.has_settled`), and take it.
        Return ``None`` if it is not ready, because a reward failed or is late: the engines must continue."""
        setting, rollout, opening = self._open.setting, self._open.rollout, self._openings
        clock = asyncio.get_running_loop().time
        began = complained_at = looked = clock()
        while not rollout.scheduler.has_settled(looked - began):
            self._raise()
            complained_at = self._complain(complained_at, "attempts to end after the abort")
            # With thousands of pending rewards a check takes milliseconds: it gets at most a fifth of the time.
            await asyncio.sleep(4 * (clock() - looked))
            await self._change(_TICK_S)
            self._still(opening)
            looked = clock()
        self._raise()
        if given_up := rollout.abandon_running():
            logger.warning(
                "%d samples did not end within %.0f s of the abort (a slow tool?) and start again; the first: %s",
                *(len(given_up), STOP_WAIT_S, given_up[:8]),
            )
        self._abandon()
        if not rollout.scheduler.ready():
            return None
        taken = time.time() if setting.rules.starts_through_training else None
        batch = rollout.take()
        for sample, tokens in zip(batch.collected.samples, batch.collected.lengths, strict=True):
            self._expectations.generated(*sample, tokens)  # an earlier coordinator may have received the reports
        listing = await _listing()  # after take(): later, shorter samples must not join the batch
        self._still(opening)
        keys, tags = _stored(batch.attempts, listing)
        handover = self._hand_over(listing, batch.wasted, keys, batch.attempts)
        self._go()
        return Reply(
            keys=keys,
            tags=tags,
            metrics={
                **batch_metrics(batch, setting.slots, taken),
                **forecast_metrics(self._expectations),
                **placement_metrics(rollout.dispatch),
                **tool_metrics(setting.rules, self._capacity.away),
            },
            filtered=batch.filtered,
            failed=batch.failed,
            handover=handover,
        )

    async def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON, with the lengths learnt since the last batch. Interrupted
        responses are in TransferQueue then, whose content verl saves with the checkpoint."""
        opening, pool = self._openings, self._open.pool
        async with self._queue_lock:
            await pool.store_turns()
        self._still(opening)
        return {**self._state(), "lengths": self._expectations.pop_changes()}

    async def pending_work(self) -> TrainerWork:
        """Return the work for the trainer, without waiting."""
        return TrainerWork(self._open.rollout.missing_prompts(), not len(self._open.pool))

    # ---- called by the agent loop workers ----

    async def report_ended(self, reports: list[AttemptReport]) -> None:
        """Record how attempts ended, in the order in which they ended."""
        if self._opened is None:
            self._early += reports
            return
        rollout, pool = self._opened.rollout, self._opened.pool
        for report in reports:
            attempt = report.attempt
            if report.status != "generated":
                pool.ended(attempt, report.leaves_turns)
            try:
                records = rollout.ended(report, _clock())
                if report.status == "generated" and rollout.content.may_train(attempt):
                    self._expectations.generated(*attempt.sample, report.tokens)
                if records and not records[0]["request"]:  # prompts of later requests include earlier responses
                    self._expectations.set_prompt_tokens(attempt.uid, records[0]["prompt_tokens"])
                self._capacity.observe(records)
            except Exception as error:
                self._fail(error)
        for warning in rollout.pop_warnings():
            logger.warning("%s", warning)
        self._go()

    # ---- internal ----

    def _state(self) -> dict[str, Any]:
        return {
            **self._open.rollout.state_dict(),
            "capacity": self._capacity.state,
            "expectations": self._expectations.prompt_state,
            "dropped": [*self._cleanup.dropped],
        }

    def _hand_over(
        self, listing: dict[str, Any], wasted: list[Record], keys: Sequence[str] = (), taken: Sequence[Attempt] = ()
    ) -> Handover:
        """Return the state, and what has left the rollout without being trained, after a batch of trajectories ``keys``
        was taken from attempts ``taken``, or none. The other entries of ``listing`` that nobody needs then are deleted
        with the next call."""
        rollout = self._open.rollout
        self._expectations.retain(rollout.content.needs_prompt)
        dropped = self._cleanup.find_dropped(rollout, listing, {*taken})
        self._cleanup.remember(listing, keys)
        left = Part(dropped, [listing[TRAIN][key] for key in dropped])
        return Handover(self._state(), self._expectations.pop_changes(), left, wasted)

    def _new_pool(self, setting: RunSettings) -> WorkerPool:
        return WorkerPool(ray.get_runtime_context().current_actor, setting.lost_after, self._lost)

    @property
    def _open(self) -> _Opened:
        if self._opened is None:
            raise NotOpen("the coordinator was restarted")
        return self._opened

    def _still(self, opening: int, pool: WorkerPool | None = None) -> None:
        """Raise :class:`NotOpen` after a wait in which the coordinator was opened again; then close ``pool``, which is
        not in use yet and would watch its workers forever."""
        if opening != self._openings:
            if pool is not None:
                pool.close()
            raise NotOpen("the coordinator was opened again")

    def _go(self) -> None:
        """Start the attempts that may start, end the abandoned ones, and wake waiting calls."""
        setting, rollout, pool = self._open.setting, self._open.rollout, self._open.pool
        pool.forget(rollout.content.pop_obsolete())
        if self._error is None:
            try:
                self._abandon()  # a worker keeps its turns before a start asks for them
                if self._dispatching and len(pool):
                    limit = self._capacity.limit
                    min_starts = max(1, setting.min_starts * limit // setting.limit)
                    starts = rollout.fill(limit, min_starts, _clock())
                    self._open.migrations.report_errors()
                    pool.start(starts, rollout.scheduler.version + 1)
                    self._wake_at(rollout.retries.next_start())
            except Exception as error:
                self._fail(error)
        for waiter in self._waiting:
            _release(waiter)

    def _wake_at(self, start: float | None) -> None:
        if self._waking is not None:
            self._waking.cancel()
        self._waking = None
        if start is not None:
            self._waking = asyncio.get_running_loop().call_at(max(start, _clock() + _TICK_S), self._wake)

    def _wake(self) -> None:
        if self._opened is not None:
            self._go()

    def _move(self, moves: list[Move]) -> None:
        self._open.pool.move(moves)
        self._go()  # samples may have waited for the progress of others

    def _abandon(self) -> None:
        rollout = self._open.rollout
        self._open.pool.abandon(rollout.pop_abandoned(), rollout.content.needs_turns)

    def _lengths(self, samples: Sequence[tuple[str, int]], had: Sequence[int]) -> Forecast | None:
        return self._expectations.lengths([uid for uid, _ in samples], had)

    def _lost(self, attempts: list[Attempt], why: str, turns: Sequence[Attempt] = ()) -> None:
        if self._opened is None:
            return
        if lost := self._opened.rollout.lost(attempts, turns):
            logger.warning("%d samples start again (%s); the first: %s", len(lost), why, lost[:8])
        if turns:
            logger.warning("%d interrupted samples start over (%s); the first: %s", len(turns), why, turns[:8])
        self._go()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            logger.error("the rollout cannot continue", exc_info=error)
            self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    async def _change(self, timeout: float) -> None:
        """Wait for the next change, at most ``timeout`` seconds."""
        loop = asyncio.get_running_loop()  # not wait_for(): it makes a task, after each report of a response
        waiter = loop.create_future()
        timer = loop.call_later(timeout, _release, waiter)
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiting.discard(waiter)

    def _complain(self, complained_at: float, what: str) -> float:
        now = asyncio.get_running_loop().time()
        if now - complained_at < _PATIENCE_S:
            return complained_at
        rollout = self._open.rollout
        counts = {state: sum(1 for _ in rollout.scheduler.ledger.samples(state)) for state in get_args(State)}
        dropped = ""
        if filtered := rollout.filtered:
            dropped = f"; filter_groups dropped {sum(filtered.values())} groups; number by score: {filtered}"
        outage = rollout.retries.summary(now)
        logger.warning("waiting for %s; samples by state: %s%s%s", what, counts, dropped, outage and f"; {outage}")
        return now


async def _listing() -> dict[str, Any]:
    """Return the tags of all keys in TransferQueue, by partition."""
    return await tq.async_kv_list() or {}


def _clock() -> float:
    return asyncio.get_running_loop().time()


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _stored(attempts: Sequence[Attempt], listing: dict[str, Any]) -> Part:
    """Return the trajectories that attempts wrote to partition ``train`` of TransferQueue."""
    wanted = {*attempts}
    stored = trajectories({key: tag for key, tag in listing.get(TRAIN, {}).items() if attempt_of(key) in wanted})
    keys = [key for attempt in attempts for key in stored[attempt]]
    return Part(keys, [listing[TRAIN][key] for key in keys])


def start() -> Any:
    """Start a coordinator as a Ray actor on this node; its handle survives restarts of its process."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(Coordinator)
        .options(
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=1000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=here, soft=False),
        )
        .remote()
    )
