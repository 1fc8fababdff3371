"""The trainer's client of the history: starts and calls the writer (``history_writer.py``), ends the nodes' copies."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_rhyme.config import HistoryConfig
from verl_rhyme.history import history_folder
from verl_rhyme.history.store import HistoryError, find_snapshot
from verl_rhyme.history_writer.history_copies import fetchers
from verl_rhyme.history_writer.history_writer import (
    READ,
    HistoryWriter,
    node_history_dir,
    object_store,
    writer_name,
)
from verl_rhyme.observability.errors import first_line, last_line
from verl_rhyme.processes.stored_samples import StoredSamples, TrainedBatch

logger = logging.getLogger(__name__)

#: Subfolder of a verl checkpoint folder ``global_step_N``.
SNAPSHOT_FOLDER = "history"
#: Seconds for the writer to record a piece of a batch (128 MiB), before it is restarted.
_TIMEOUT_S = 300.0
#: Bytes per second assumed for copying a snapshot, in addition to :data:`_TIMEOUT_S`.
_COPY_RATE = 50e6
_CLOSE_TIMEOUT_S = 30.0
_LONGEST_PAUSE_S = 3600.0
#: Seconds for the writer to sum the rewards, before the trainer does it.
_REWARDS_TIMEOUT_S = 30.0


class HistoryUnavailable(RuntimeError):
    """The history writer is dead or does not answer."""


def tokenizer_namespace(tokenizer: Any) -> str:
    """Return the fingerprint of a vocabulary: drafts must never use token ids of another tokenizer."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()


class HistoryService:
    """The trainer's client of the history writer; no two threads may call it at the same time.

    All waits have a timeout. A writer that died or does not answer fails that call only. It is killed, and a new
    writer takes over its folder: at once the first time, then after pauses that grow with the lost time.
    """

    def __init__(self, config: HistoryConfig, namespace: str) -> None:
        assert config.dir is not None
        self._config, self._namespace = config, namespace
        self._run = uuid.uuid4().hex[:12]
        self._node = ray.get_runtime_context().get_node_id()
        self._folder = node_history_dir(str(config.dir), self._node)
        self._writer: Any = None
        self._opening: Any = None
        self._in_use: int | None = None
        self._failures, self._retry_at = 0, 0.0  # failures since the last answer
        self._problem = ""  # of the latest failure
        self._bytes = 0
        #: Number of writers started to replace a failed one.
        self.restarts = 0
        self._start()

    def _start(self) -> None:
        """Start a writer if there is none, without waiting: Ray queues its calls."""
        if self._writer is not None or (self._failures and time.monotonic() < self._retry_at):
            return
        self.restarts += bool(self._failures)
        actor = ray.remote(concurrency_groups={READ: 1})(HistoryWriter)
        where = NodeAffinitySchedulingStrategy(node_id=self._node, soft=False)
        named = {"name": writer_name(str(self._config.dir))}
        arguments = (self._folder, self._namespace, self._config, self._run, object_store(self._node))
        try:
            writer = actor.options(num_cpus=0, scheduling_strategy=where, **named).remote(*arguments)
        except ValueError as error:  # another run has the name; opening its folder will fail too
            logger.warning(
                "the history writer's actor name is taken, so other nodes find no history (set history.dir to a "
                "folder of this run): %s",
                error,
            )
            writer = actor.options(num_cpus=0, scheduling_strategy=where).remote(*arguments)
        self._writer, self._opening = writer, writer.open.remote()
        writer.lower_priority.remote()

    def ready(self) -> None:
        """Wait until the writer has opened its folder; HistoryError if a live run owns it, else a warning."""
        try:
            self._answer(self._opening, _TIMEOUT_S)
            if self._config.max_bytes is None:  # keep the bound for the next writer: less memory is free by then
                bound = self._answer(self._writer.bound.remote(), _TIMEOUT_S)
                self._config = replace(self._config, max_bytes=bound)
                logger.info("history.max_bytes=null: %.2f GiB, half of the free disk or memory", bound / (1 << 30))
        except HistoryError:
            raise
        except Exception as error:
            logger.warning(
                "the history writer failed to start in %s; training continues without a history: %s: set history.dir "
                "to another folder",
                *(self._folder, last_line(error)),
            )

    def rewards(self, stored: StoredSamples) -> np.ndarray:
        """Return float64[N]. The writer sums the token rewards, so they are not sent here.

        :class:`HistoryUnavailable` does not count as a failure of the writer.
        """
        if self._writer is None:
            raise HistoryUnavailable("no history writer is running now")
        try:
            return ray.get(self._writer.rewards.remote(stored), timeout=_REWARDS_TIMEOUT_S)
        except RayError as error:
            raise HistoryUnavailable(f"the history writer failed to sum the rewards: {error}") from error

    def fetch(self, piece: TrainedBatch) -> None:
        """Let the writer fetch a piece of :meth:`TrainedBatch.pieces`; it may then be cleared, and appended later.

        Raises :class:`HistoryUnavailable`, or MissingSamples if the samples were cleared before the fetch.
        """
        self._ask(lambda writer: writer.fetch.remote(piece), _TIMEOUT_S)

    def append(self, piece: TrainedBatch, step: int) -> dict[str, Any]:
        """Let the writer record a piece, fetching it if necessary; return its statistics. Raises as :meth:`fetch`."""
        stats = self._ask(lambda writer: writer.append.remote(piece, step), _TIMEOUT_S)
        self._bytes = int(stats["bytes"])
        return stats

    def snapshot(self, checkpoint: str) -> None:
        folder = os.path.join(checkpoint, SNAPSHOT_FOLDER)
        self._ask(lambda writer: writer.snapshot.remote(folder), self._copy_timeout)

    def restore(self, checkpoint: str) -> dict[str, Any] | None:
        """Load a checkpoint's snapshot; ``None``, with a warning, without one. Raises :class:`HistoryUnavailable`."""
        folder = find_snapshot(Path(checkpoint, SNAPSHOT_FOLDER))
        if folder is None:
            logger.warning("the checkpoint %s has no history: drafting starts with an empty history", checkpoint)
            return None
        self._bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        return self._ask(lambda writer: writer.restore.remote(str(folder)), self._copy_timeout)

    @property
    def _copy_timeout(self) -> float:
        return _TIMEOUT_S + self._bytes / _COPY_RATE

    def close(self) -> None:
        """Close the writer and the copies on other nodes, and delete their folders; never raises."""
        try:
            calls = [actor.close.remote() for actor in fetchers(str(self._config.dir))]
            if self._writer is not None:
                calls.append(self._writer.close.remote())
            ended, _ = ray.wait(calls, num_returns=len(calls), timeout=_CLOSE_TIMEOUT_S) if calls else ([], [])
            ray.get(ended)
            if len(ended) < len(calls):
                logger.warning(
                    "%d of %d actors of the history did not close within %.0f s; their folders may remain",
                    *(len(calls) - len(ended), len(calls), _CLOSE_TIMEOUT_S),
                )
        except Exception:
            logger.warning("closing the history failed; its folders may remain", exc_info=True)
        if self._in_use is not None:
            os.close(self._in_use)
            self._in_use = None

    def _ask(self, call: Callable[[Any], Any], timeout: float) -> Any:
        """Call a method of the writer, and once more if the writer had to be restarted; pass on its exceptions."""
        for _ in range(2):
            self._start()
            if self._writer is not None:
                with suppress(HistoryUnavailable):
                    return self._answer(call(self._writer), timeout)
        raise HistoryUnavailable(f"the history in {self._folder} is not recorded now: its writer {self._problem}")

    def _answer(self, call: Any, timeout: float) -> Any:
        """A writer without an answer is killed, and :meth:`_start` starts the next one. Pass on its exceptions."""
        started = time.monotonic()
        try:
            answer = ray.get(call, timeout=timeout)
        except RayActorError as error:
            what = f"died: {first_line(error)}"
        except GetTimeoutError:
            what = f"did not answer within {timeout:.0f} s"
        else:
            self._failures = 0
            # If the writer dies, the folder still belongs to this run, even if no engine reads it.
            self._in_use = history_folder.mark_in_use(Path(self._folder), self._in_use)
            return answer
        self._failures += 1
        lost = max(time.monotonic() - started, 1.0)
        pause = 0.0 if self._failures == 1 else min(_LONGEST_PAUSE_S, lost * 2**self._failures)
        self._retry_at = time.monotonic() + pause
        logger.warning(
            "the history writer %s; training continues, and the writer restarts %s (folder %s)",
            what,
            f"after {pause:.0f} s" if pause else "at once",
            self._folder,
        )
        writer, self._writer, self._problem = self._writer, None, what
        with suppress(Exception):  # the process may be gone; a stopped process would hold the folder's lock
            ray.kill(writer)
        raise HistoryUnavailable(f"the history writer {what}")
