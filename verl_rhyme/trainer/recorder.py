"""Carries finished trajectories into history and event log, in a thread of its own, while training runs.

Recording can fail, training can't: an error is counted in ``rollout/history/errors`` and told once. Event log and
metrics do not wait for the history.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import transfer_queue as tq

from verl_rhyme.history.keys import prompt_key
from verl_rhyme.history.record import Trajectory
from verl_rhyme.observability import metrics as names
from verl_rhyme.observability.alarms import AcceptanceAlarm
from verl_rhyme.observability.events import EventLog
from verl_rhyme.observability.metrics import step_metrics
from verl_rhyme.scheduling.attempts import sample_of
from verl_rhyme.trainer.draft_counts import DraftCounts
from verl_rhyme.workers.history_service import HistoryService
from verl_rhyme.workers.request import FIELD

logger = logging.getLogger(__name__)

#: What the store counts by append, as opposed to what it says of itself.
_COUNTS = ("dropped", "unkept", "evicted", "shed_epochs")
_LOGGED = ("sample", "reward", "policy_version", "tokens", "logprobs")


class Recorder:
    """One step may come in several parts (verl's ``parameter_sync_step``); their metrics are computed over all."""

    def __init__(
        self,
        history: HistoryService,
        events: EventLog | None,
        slots: Callable[[], int],
        counts: DraftCounts,
        logprobs: bool = True,
        log_responses: bool = False,
    ) -> None:
        self._history, self._events, self._slots, self._counts = history, events, slots, counts
        self._logprobs, self._log_responses = logprobs, log_responses
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rhyme-recorder")
        self._pending: list[Future] = []
        self._requests: list[dict[str, Any]] = []
        self._seconds = 0.0
        self._errors = 0
        self._alarm = AcceptanceAlarm()
        self._store: dict[str, Any] = {}

    def start(self, batch: Any, step: int, part: int, epoch: int) -> None:
        """Begin to record a training batch (``KVBatchMeta``); returns at once."""
        self._pending.append(self._executor.submit(self._guarded, self._record, batch, step, part, epoch))

    def log_validation(self, batch: Any, step: int, epoch: int) -> None:
        """Event log only, and at once: verl clears the batch soon after."""
        self._guarded(self._log_validation, batch, step, epoch)

    def log_untrained(self, records: list[dict[str, Any]], step: int, epoch: int) -> None:
        """Request records, with ``uid``, of attempts whose tokens nobody will train: event log only."""
        if self._events is not None and records:
            rows = [{**record, "reward": float("nan"), "validate": False, "trained": False} for record in records]
            self._pending.append(self._executor.submit(self._guarded, self._log_requests, rows, step, epoch))

    def join(self) -> None:
        """Wait for what was started."""
        while self._pending:
            self._pending.pop().result()

    def take_metrics(self, rollout_s: float) -> dict[str, float]:
        """Metrics of the parts recorded since the last call."""
        requests, self._requests = self._requests, []
        metrics: dict[str, float] = {
            names.HISTORY_UPDATE_S: self._seconds,
            names.HISTORY_ERRORS: float(self._errors),
            names.HISTORY_RESTARTS: float(self._history.restarts),
            **{f"{names.HISTORY}/{name}": float(value) for name, value in self._store.items()},
        }
        self._seconds = 0.0
        self._store |= {name: 0 for name in _COUNTS if name in self._store}
        if requests:
            # A batch smaller than the engines leaves slots empty that no schedule could fill.
            slots = min(self._slots(), len(requests))
            metrics.update(step_metrics(_columns(requests), slots=slots, rollout_s=rollout_s))
            if told := self._alarm.observe(metrics):
                logger.warning(told)
            metrics[names.SPEC_ALARM] = float(self._alarm.ringing)
        return metrics

    def close(self) -> None:
        self._executor.shutdown(wait=True)

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        started = time.perf_counter()
        try:
            function(*args)
        except Exception:
            self._errors += 1
            if self._errors == 1:
                logger.warning("recording failed; training goes on (told once)", exc_info=True)
        finally:
            self._seconds += time.perf_counter() - started

    def _record(self, batch: Any, step: int, part: int, epoch: int) -> None:
        samples = _fetch(batch, epoch, validate=False, logprobs=self._logprobs)
        rows = self._counts.fill([row for sample in samples for row in sample["requests"]])
        self._requests.extend(rows)
        try:  # neither stops the other
            if self._events is not None:
                self._events.append_requests(step, epoch, _columns(rows))
                if self._log_responses:
                    self._events.append_responses(step, epoch, _responses(samples))
        finally:
            stats = self._history.append([sample["trajectory"] for sample in samples], step=part)
            self._store = {**stats, **{name: self._store.get(name, 0) + stats[name] for name in _COUNTS}}

    def _log_validation(self, batch: Any, step: int, epoch: int) -> None:
        if self._events is not None:
            rows = [row for sample in _fetch(batch, epoch, validate=True) for row in sample["requests"]]
            self._pending.append(self._executor.submit(self._guarded, self._log_requests, rows, step, epoch))

    def _log_requests(self, rows: list[dict[str, Any]], step: int, epoch: int) -> None:
        if self._events is not None:
            self._events.append_requests(step, epoch, _columns(self._counts.fill(rows)))


def _columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {name: np.array([row[name] for row in rows]) for name in (rows[0] if rows else {})}


def _responses(samples: list[dict[str, Any]]) -> dict[str, list]:
    trajectories = [sample["trajectory"] for sample in samples]
    return {
        "prompt_key": [t.key for t in trajectories],
        "prompt": [sample["prompt"] for sample in samples],
        **{name: [getattr(t, name) for t in trajectories] for name in _LOGGED},
    }


def _fetch(batch: Any, epoch: int, validate: bool, logprobs: bool = False) -> list[dict[str, Any]]:
    """Trajectory, prompt and request rows of each sample in a batch; padding left out."""
    kept = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
    keys = [batch.keys[i] for i in kept]
    per_token = ["prompts", "responses", "rm_scores", *(["rollout_log_probs"] if logprobs else [])]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=[*per_token, "extra_fields"])
    prompts, responses, scores, *sampled = (data[name].unbind() for name in per_token)
    samples = []
    for i, (key, extra) in enumerate(zip(keys, list(data["extra_fields"]), strict=True)):
        uid, number = sample_of(key.rpartition("_")[0])
        records = extra.get(FIELD) or []
        prompt = bytes.fromhex(records[0]["prompt_key"]) if records else prompt_key(prompts[i].tolist())
        reward = float(scores[i].sum())
        tag = batch.tags[kept[i]]
        trajectory = Trajectory(
            key=prompt,
            tokens=responses[i].numpy().astype(np.int32),
            reward=reward,
            policy_version=int(tag.get("max_global_steps") or 0),
            epoch=epoch,
            sample=number,
            logprobs=sampled[0][i].numpy().astype(np.float32) if sampled else None,
        )
        rows = [
            {
                **record,
                "uid": uid,
                "sample": number,
                "reward": reward,
                "validate": validate,
                "trained": not validate,
            }
            for record in records
        ]
        samples.append({"trajectory": trajectory, "prompt": prompts[i].numpy(), "requests": rows})
    return samples
