"""Records finished trajectories in history and event log, in a thread, while training runs.

A step ends once the history writer has fetched its samples, so that verl may clear them. They are recorded piece by
piece and in order while the next steps train. If recording falls more than :data:`MAX_LAG` steps behind, the history
leaves out whole batches (``rollout/history/dropped``). Errors are counted in ``rollout/history/errors``, steps that the
history misses in ``rollout/history/lost_steps``; training continues. Only request records and one reward per sample
pass through the trainer's process: the history writer fetches tokens itself. Responses for the event log are fetched
here.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from verl_rhyme.agent_loop.stored_attempts import TRAIN
from verl_rhyme.history.keys import prompt_key, visit_label
from verl_rhyme.history_writer.history_service import HistoryService, HistoryUnavailable
from verl_rhyme.history_writer.history_writer import STORE_COUNTS, TOKEN_COUNTS
from verl_rhyme.observability import metrics as names
from verl_rhyme.observability.alarms import BAD_LOGPROBS, AcceptanceAlarm
from verl_rhyme.observability.errors import last_line
from verl_rhyme.observability.events import EventLog
from verl_rhyme.observability.metrics import DRAFTER, drafter_metrics, step_metrics
from verl_rhyme.once import warn_once
from verl_rhyme.processes.messages import Handover
from verl_rhyme.processes.request import FIELD
from verl_rhyme.processes.stored_samples import StoredSamples, TrainedBatch
from verl_rhyme.processes.waiting import waiting_for
from verl_rhyme.scheduling.attempts import sample_of
from verl_rhyme.trainer.draft_counts import DraftCounts
from verl_rhyme.trainer.observers import Observer, Step

logger = logging.getLogger(__name__)

#: Number of steps that may end before samples of an earlier one are recorded.
MAX_LAG = 2


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of the recorder count its seconds and errors; it returns ``None`` instead of raising one."""

    @functools.wraps(method)
    def guarded(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        except Exception:
            self._errors += 1
            warn_once(logger, "recording failed; training continues (logged once)", exc_info=True)
            return None
        finally:
            self._seconds += time.perf_counter() - started

    return guarded


class Recorder(Observer):
    """Records a run. A step may come in several parts (verl's ``parameter_sync_step``); metrics cover all of them."""

    def __init__(
        self,
        history: HistoryService,
        events: EventLog | None,
        slots: Callable[[], int | None],
        counts: DraftCounts,
        logprobs: bool = True,
        log_responses: bool = False,
    ) -> None:
        self._history, self._events, self._slots, self._counts = history, events, slots, counts
        self._logprobs, self._log_responses = logprobs, log_responses
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rhyme-recorder")
        self._pending: list[Future] = []
        #: Fetched, not yet recorded: piece, number of its mini-batch, steps ended before. Used by the thread only.
        self._backlog: deque[tuple[TrainedBatch, int, int]] = deque()
        self._closing = False
        self._steps = 0  # ended steps
        self._lock = threading.Lock()  # guards _store, _tokens, _drafter
        self._requests: list[dict[str, Any]] = []
        self._seconds = 0.0
        self._drafter: Counter[str] = Counter()  # sums of DRAFTER in this step, also of untrained samples
        self._errors = 0
        self._alarm = AcceptanceAlarm()
        self._store: dict[str, Any] = {}
        self._untrained = 0  # recorded responses of this step that are not trained
        self._tokens: Counter[str] = Counter()  # TOKEN_COUNTS of this step

    def on_untrained(self, handover: Handover, step: int, epoch: int) -> None:
        self.log_wasted(handover.wasted, step, epoch)
        keys, tags = handover.dropped
        if keys:
            self.start_untrained(KVBatchMeta(partition_id=TRAIN, keys=keys, tags=tags), step, epoch)

    def on_batch(self, batch: KVBatchMeta, step: int, epoch: int) -> None:
        self.start(batch, step, step, epoch)

    def on_step(self, step: Step) -> dict[str, float]:
        self._steps += 1
        return self._take_metrics(step.rollout_s) or {names.HISTORY_ERRORS: float(self._errors)}

    def save(self, folder: str) -> None:
        self.join()
        try:
            with waiting_for("the history's snapshot"):
                self._executor.submit(self._history.snapshot, folder).result()
        except Exception as error:
            logger.warning(
                "the history could not be saved in %s; training continues, but a run that resumes there starts without "
                "it: %s",
                folder,
                last_line(error),
            )

    def load(self, folder: str) -> None:
        try:
            self._history.restore(folder)
        except Exception as error:
            logger.warning(
                "the history in %s is not restored: drafting starts with an empty history: %s", folder, last_line(error)
            )

    @_guarded
    def start(self, batch: KVBatchMeta, step: int, part: int, epoch: int) -> None:
        """Begin to record a training batch; returns at once."""
        with self._counting_losses():
            samples = _Samples.of(batch)  # now: verl pads and reorders it in place
            self._submit(self._record, samples, step, part, epoch)

    @_guarded
    def start_untrained(self, batch: KVBatchMeta, step: int, epoch: int) -> None:
        """Begin to record finished samples that are never trained (filtered groups, surplus) like trained ones; returns
        at once. They are cleared from TransferQueue once the writer has fetched them, or failed to; verl must not clear
        them before."""
        with self._counting_losses():
            self._submit(self._record_untrained, _Samples.of(batch), step, epoch)

    @_guarded
    def log_wasted(self, records: list[dict[str, Any]], step: int, epoch: int) -> None:
        """Log requests of attempts that are never trained."""
        if records:
            untrained = {"reward": float("nan"), "validate": False, "trained": False}
            self._submit(self._log_requests, [{**record, **untrained} for record in records], step, epoch)

    @_guarded
    def log_validation(self, batch: KVBatchMeta, step: int, epoch: int) -> None:
        """Log validation requests to the event log, at once: verl clears the batch soon after."""
        if self._events is not None:
            samples = _Samples.of(batch)
            rows, owners = samples.rows(validate=True)
            rewards = samples.stored.rewards()  # not by the writer, which the thread may be using
            rows = [{**row, "reward": rewards[owner]} for row, owner in zip(rows, owners, strict=True)]
            self._submit(self._log_requests, rows, step, epoch)

    @_guarded
    def log_step(
        self, metrics: Mapping[str, Any], stages: list[tuple[str, float, float]], step: int, epoch: int
    ) -> None:
        """Log the metrics of a step, and verl's timers, as (name, start, seconds)."""
        if self._events is not None:
            self._events.append_metrics(step, epoch, metrics)
            names, started, seconds = zip(*stages, strict=True)
            self._events.append_stages(step, epoch, {"stage": names, "started_at": started, "duration_s": seconds})

    def join(self) -> None:
        """Wait until everything started is in the event log, and fetched by the writer."""
        with waiting_for("the event log and the history writer to take a step's samples"):
            while self._pending:
                self._pending.pop().result()

    def drain(self) -> None:
        """Wait until the history has everything started."""
        self.join()
        with waiting_for("the history writer to record the samples"):
            while self._executor.submit(len, self._backlog).result():
                pass

    def close(self) -> None:
        self._closing = True  # after the current piece; the history leaves out the others
        with waiting_for("the history writer to record its last samples"):
            self._executor.shutdown(wait=True)

    def _submit(self, method: Callable[..., None], *args: Any) -> None:
        self._pending.append(self._executor.submit(method, *args))

    @_guarded
    def _take_metrics(self, rollout_s: float) -> dict[str, float]:
        with self._lock:
            requests, self._requests = self._requests, []
            metrics = {
                names.ROLLOUT_S: rollout_s,
                names.HISTORY_UPDATE_S: self._seconds,
                names.HISTORY_ERRORS: float(self._errors),
                names.HISTORY_RESTARTS: float(self._history.restarts),
                names.HISTORY_UNTRAINED: float(self._untrained),
                **{f"{names.HISTORY}/{name}": float(value) for name, value in self._store.items()},
            }
            if sampled := self._tokens["sampled"]:
                metrics[names.ENTROPY] = self._tokens["nats"] / sampled
            if bad := self._tokens["bad_logprobs"]:
                warn_once(logger, BAD_LOGPROBS, bad)
            metrics[names.BAD_LOGPROBS] = float(bad)
            drafter, self._drafter = self._drafter, Counter()
            self._untrained, self._seconds = 0, 0.0
            self._tokens.clear()
            self._store |= {name: 0 for name in STORE_COUNTS if name in self._store}
        if requests:
            metrics |= step_metrics(_columns(requests), slots=self._slots(), rollout_s=rollout_s)
            if warning := self._alarm.observe(metrics):
                logger.warning(warning)
            metrics[names.SPEC_ALARM] = float(self._alarm.active)
        if drafter:
            metrics |= drafter_metrics(drafter)  # also of untrained samples
        return metrics

    @_guarded
    def _record(self, samples: _Samples, step: int, part: int, epoch: int) -> None:
        with self._counting_losses():
            rows, owners = samples.rows(validate=False)
            rows = self._with_counts(rows)
            self._requests.extend(rows)
            rewards = self._rewards(samples.stored)
            batch = samples.batch(rewards, epoch, self._logprobs)
        try:  # the history gets the batch even if the event log fails
            if self._events is not None:
                self._events.append_requests(step, epoch, {**_columns(rows), "reward": rewards[owners]})
                if self._log_responses:
                    self._append_responses(batch, step)
        finally:
            with self._counting_losses():
                self._fetch(batch, part)

    def _fetch(self, batch: TrainedBatch, step: int) -> None:
        if self._backlog and self._steps - self._backlog[0][2] > MAX_LAG:
            self._lose(len(batch.prompts))
            warn_once(
                logger,
                "recording is more than %d steps behind training: the history leaves out whole batches, and drafts "
                "come from older responses (rollout/history/dropped; logged once). The trainer's node has too few free "
                "cores or a slow disk below history.dir; history.epochs limits the work per prompt",
                MAX_LAG,
            )
            return
        for piece in batch.pieces():
            self._history.fetch(piece)
            self._backlog.append((piece, step, self._steps))
            if len(self._backlog) == 1:
                self._executor.submit(self._record_next)

    def _record_next(self) -> None:
        """Record a piece; other work of the thread runs before the next one."""
        piece, step, _ = self._backlog[0]
        self._append(piece, step)
        self._backlog.popleft()
        if self._backlog and not self._closing:
            self._executor.submit(self._record_next)

    @_guarded
    def _append(self, batch: TrainedBatch, step: int) -> None:
        with self._counting_losses():
            stats = self._history.append(batch, step=step)
        with self._lock:
            self._tokens.update({name: stats.pop(name, 0) for name in TOKEN_COUNTS})
            self._store = {**stats, **{name: self._store.get(name, 0) + stats[name] for name in STORE_COUNTS}}

    @contextmanager
    def _counting_losses(self) -> Iterator[None]:
        """Count a step, or a part of it, that the history misses because of an error."""
        try:
            yield
        except Exception:
            self._lose()
            raise

    def _lose(self, samples: int = 0) -> None:
        """Count a step that the history misses, and samples that it leaves out."""
        with self._lock:
            for name, lost in (("dropped", samples), ("lost_steps", 1)):
                self._store[name] = self._store.get(name, 0) + lost

    @_guarded
    def _record_untrained(self, samples: _Samples, step: int, epoch: int) -> None:
        stored = samples.stored
        try:
            try:
                rewards = self._rewards(stored)
            except Exception:  # some trainers compute scores after the buffer, so that dropped samples have none
                rewards = np.full(len(stored.keys), np.nan)
            with self._counting_losses():
                self._fetch(samples.batch(rewards, epoch, self._logprobs), step)
            self._with_counts(samples.rows(validate=False)[0])
            self._untrained += len(stored.keys)
        finally:
            tq.kv_clear(keys=stored.keys, partition_id=stored.partition)

    def _rewards(self, stored: StoredSamples) -> np.ndarray:
        try:
            return self._history.rewards(stored)
        except HistoryUnavailable as error:
            warn_once(logger, "the trainer fetches rewards for the event log itself (logged once): %s", error)
            return stored.rewards()

    def _append_responses(self, batch: TrainedBatch, step: int) -> None:
        assert self._events is not None
        for rows, tokens, logprobs, policy in batch.stored.responses(batch.logprobs, batch.mixed):
            for known, generated in zip(logprobs, policy, strict=True):
                if known is not None:
                    known[np.setdiff1d(np.arange(len(known)), generated)] = np.nan
            (prompts,) = batch.stored.columns(rows, ["prompts"])
            columns = {
                "prompt_key": [batch.prompts[row] for row in rows],
                "sample": [batch.numbers[row] for row in rows],
                "reward": batch.rewards[rows],
                "policy_version": [batch.versions[row] for row in rows],
                "prompt": [prompt.numpy() for prompt in prompts],
                "tokens": tokens,
                "logprobs": logprobs,
            }
            self._events.append_responses(step, batch.epoch, columns)

    def _with_counts(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with their draft counts, which also go into the metrics."""
        rows = self._counts.fill(rows)
        with self._lock:
            for row in rows:
                self._drafter.update({name: row[name] for name in DRAFTER if name in row})
        return rows

    @_guarded
    def _log_requests(self, rows: list[dict[str, Any]], step: int, epoch: int) -> None:
        rows = self._with_counts(rows)
        if self._events is not None:
            self._events.append_requests(step, epoch, _columns(rows))


def _columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {name: np.array([row[name] for row in rows]) for name in (rows[0] if rows else {})}


@dataclass(frozen=True)
class _Samples:
    """A batch of verl without its padding: where it is stored, and the content of its keys and tags."""

    stored: StoredSamples
    uids: list[str]
    numbers: list[int]
    versions: list[int]

    @classmethod
    def of(cls, batch: Any) -> _Samples:
        """Copy from a ``KVBatchMeta``, which verl changes later."""
        kept = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        keys, tags = [batch.keys[i] for i in kept], [batch.tags[i] for i in kept]
        names = [sample_of(key.rpartition("_")[0]) for key in keys]
        lengths = np.array([tag["response_len"] for tag in tags], dtype=np.int64)
        return cls(
            StoredSamples(batch.partition_id, keys, lengths),
            [uid for uid, _ in names],
            [number for _, number in names],
            [int(tag.get("max_global_steps") or 0) for tag in tags],
        )

    @functools.cached_property
    def records(self) -> list[list[dict[str, Any]]]:
        """The request records of each sample, which are fetched."""
        (extras,) = self.stored.columns(range(len(self.uids)), ["extra_fields"])
        return [getattr(extra, "data", extra).get(FIELD) or [] for extra in extras]

    def rows(self, validate: bool) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the event log's rows without rewards, and the sample of each row."""
        owners = [i for i, records in enumerate(self.records) for _ in records]
        rows = [
            {**record, "uid": self.uids[i], "sample": self.numbers[i], "validate": validate, "trained": not validate}
            for i, records in enumerate(self.records)
            for record in records
        ]
        return rows, owners

    def batch(self, rewards: np.ndarray, epoch: int, logprobs: bool) -> TrainedBatch:
        made = [[record["response_tokens"] for record in records] for records in self.records]
        return TrainedBatch(
            stored=self.stored,
            prompts=self.prompts(),
            visits=list(map(visit_label, self.uids)),
            rewards=rewards,
            numbers=self.numbers,
            versions=self.versions,
            mixed=[tokens != [length] for tokens, length in zip(made, self.stored.lengths.tolist(), strict=True)],
            epoch=epoch,
            logprobs=logprobs,
        )

    def prompts(self) -> list[bytes]:
        """Return the keys of the prompts: from a sample's records or those of its group, else computed from tokens,
        which are fetched."""
        keys = [bytes.fromhex(records[0]["prompt_key"]) if records else b"" for records in self.records]
        groups = {uid: key for uid, key in zip(self.uids, keys, strict=True) if key}
        keys = [key or groups.get(uid, b"") for uid, key in zip(self.uids, keys, strict=True)]
        unknown = [row for row, key in enumerate(keys) if not key]
        (prompts,) = self.stored.columns(unknown, ["prompts"])
        for row, prompt in zip(unknown, prompts, strict=True):
            keys[row] = prompt_key(prompt.tolist())
        return keys
