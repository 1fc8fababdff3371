"""The trainer's side of the history: its writer (``history_writer.py``), and the end of the copies on other nodes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import uuid
from collections import Counter
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
from verl_rhyme.history import owner
from verl_rhyme.history.share import available_memory
from verl_rhyme.history.store import HistoryError
from verl_rhyme.history_writer.history_copies import fetchers
from verl_rhyme.history_writer.history_writer import (
    READ,
    STORE_COUNTS,
    TOKEN_COUNTS,
    HistoryWriter,
    node_history_dir,
    writer_name,
)
from verl_rhyme.observability.errors import first_line
from verl_rhyme.processes.stored_samples import StoredSamples, TrainedBatch

logger = logging.getLogger(__name__)

#: Below a verl checkpoint folder ``global_step_N``.
SNAPSHOT_FOLDER = "history"
#: Seconds that the writer has for a piece of an update (128 MiB), before it is started anew.
_TIMEOUT_S = 300.0
#: Bytes a second that copying a snapshot is granted, on top of :data:`_TIMEOUT_S`.
_COPY_RATE = 50e6
_CLOSE_TIMEOUT_S = 30.0
#: Of the node's part of Ray's store, what values that other nodes fetch may take: a step's, where there is room.
_SHARED = 0.1
_LONGEST_PAUSE_S = 3600.0
#: Seconds that a writer has to sum the rewards, before the trainer does it.
_REWARDS_TIMEOUT_S = 30.0


class HistoryUnavailable(RuntimeError):
    """The writer is dead or does not answer."""


def tokenizer_namespace(tokenizer: Any) -> str:
    """Fingerprint of a vocabulary: token ids of another tokenizer must never be drafted."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()


class HistoryService:
    """The trainer's side of the history.

    Nothing here waits for ever, and a writer that died or does not answer is an error of that call only: it is ended,
    and a new one takes over its folder, at once the first time, then after pauses that grow with the time lost.
    Methods are not called at the same time from two threads.
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
        self._failures, self._retry_at = 0, 0.0  # since a writer answered last
        self._bytes = 0
        #: Writers that were started in the place of one that failed.
        self.restarts = 0
        self._start()

    def _start(self) -> None:
        """Start a writer where there is none; does not wait for it: Ray keeps its calls."""
        if self._writer is not None or (self._failures and time.monotonic() < self._retry_at):
            return
        self.restarts += bool(self._failures)
        actor = ray.remote(concurrency_groups={READ: 1})(HistoryWriter)
        where = NodeAffinitySchedulingStrategy(node_id=self._node, soft=False)
        named = {"name": writer_name(str(self._config.dir))}
        [node] = [node for node in ray.nodes() if node["NodeID"] == self._node]
        shared = int(_SHARED * node["Resources"].get("object_store_memory", 0))
        arguments = (self._folder, self._namespace, self._config, self._run, shared)
        try:
            writer = actor.options(num_cpus=0, scheduling_strategy=where, **named).remote(*arguments)
        except ValueError as error:  # of another run, whose folder this one is refused, too
            logger.warning("other nodes find no history: %s", error)
            writer = actor.options(num_cpus=0, scheduling_strategy=where).remote(*arguments)
        self._writer, self._opening = writer, writer.open.remote()
        writer.give_way.remote()

    def ready(self) -> None:
        """Wait until the writer has its folder; one that fails otherwise is a warning.

        Raises:
            HistoryError: The folder is another run's that is alive.
        """
        try:
            self._answer(self._opening, _TIMEOUT_S)
            # What a writer that dies leaves is this run's, which goes on, also where no engine reads it.
            self._in_use = owner.use(Path(self._folder))
            if self._config.max_bytes is None:  # the next writer's, too: engines and trainer have the memory by then
                bound = self._answer(self._writer.bound.remote(), _TIMEOUT_S)
                self._config = replace(self._config, max_bytes=bound)
                logger.info("history.max_bytes: %.2f GiB, half of the free disk or memory", bound / (1 << 30))
                if bound > (free := available_memory()):
                    logger.warning(
                        "the history may grow to %.1f GiB, but %.1f GiB of memory are free next to models and engines: "
                        "if %s is a RAM disk, set history.max_bytes",
                        *(size / (1 << 30) for size in (bound, free)),
                        self._folder,
                    )
        except HistoryError:
            raise
        except Exception as error:
            logger.warning("the history writer could not start; training goes on without it: %s", error)

    def rewards(self, stored: StoredSamples) -> np.ndarray:
        """float64[N], each sample's; summed by the writer, so that those of the tokens don't pass through here.

        Raises:
            HistoryUnavailable: It does not answer now. That is no failure of the writer's.
        """
        if self._writer is None:
            raise HistoryUnavailable("there is no history writer now")
        try:
            return ray.get(self._writer.rewards.remote(stored), timeout=_REWARDS_TIMEOUT_S)
        except RayError as error:
            raise HistoryUnavailable(f"the history writer summed no rewards: {error}") from error

    def fetch(self, piece: TrainedBatch) -> None:
        """Have the writer fetch samples into its memory: they may be cleared then, and recorded later.

        Args:
            piece: One of :meth:`TrainedBatch.pieces`; :meth:`append` must be given the same one.

        Raises:
            HistoryUnavailable: The writer does not fetch now.
            SamplesGone: They were cleared before they were fetched.
        """
        self._ask(lambda writer: writer.fetch.remote(piece), _TIMEOUT_S)

    def append(self, batch: TrainedBatch, step: int) -> dict[str, Any]:
        """Have the writer record samples, which it fetches where it has not; returns its statistics.

        The deadline bounds each piece (:meth:`TrainedBatch.pieces`), not the whole: the writer may take as long as it
        makes progress, and one that is started anew is asked for the piece that is missing, not for those before.

        Raises:
            HistoryUnavailable: The writer does not record now.
            SamplesGone: They were cleared before they were fetched.
        """
        counts: Counter[str] = Counter()
        stats: dict[str, Any] = {}
        for piece in list(batch.pieces()) or [batch]:
            stats = self._append(piece, step)
            counts.update({name: stats[name] for name in (*STORE_COUNTS, *TOKEN_COUNTS)})
        self._bytes = int(stats["bytes"])
        return {**stats, **counts}

    def _append(self, piece: TrainedBatch, step: int) -> dict[str, Any]:
        return self._ask(lambda writer: writer.append.remote(piece, step), _TIMEOUT_S)

    def snapshot(self, checkpoint: str) -> None:
        """Copy the history into a checkpoint.

        Raises:
            HistoryUnavailable: The writer does not write now.
        """
        folder = os.path.join(checkpoint, SNAPSHOT_FOLDER)
        self._ask(lambda writer: writer.snapshot.remote(folder), _TIMEOUT_S + self._bytes / _COPY_RATE)

    def restore(self, checkpoint: str) -> dict[str, Any] | None:
        """Load the snapshot of a checkpoint; ``None`` and a warning when it has none, or the writer gives no answer."""
        folder = Path(checkpoint, SNAPSHOT_FOLDER)
        if not folder.is_dir() and (before := folder.with_name(f".{folder.name}.old")).is_dir():
            folder = before  # a run that was killed while it replaced a snapshot
        if not folder.is_dir():
            logger.warning("no history in %s: drafting starts with an empty one", checkpoint)
            return None
        self._bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        timeout = _TIMEOUT_S + self._bytes / _COPY_RATE
        try:
            return self._ask(lambda writer: writer.restore.remote(str(folder)), timeout)
        except HistoryError:
            raise
        except Exception:
            logger.warning(
                "the history in %s is not restored: drafting starts with an empty one", checkpoint, exc_info=True
            )
            return None

    def close(self) -> None:
        """End the writer and the copies of other nodes, and delete their folders; never raises."""
        try:
            calls = [actor.close.remote() for actor in fetchers(str(self._config.dir))]
            if self._writer is not None:
                calls.append(self._writer.close.remote())
            ended, _ = ray.wait(calls, num_returns=len(calls), timeout=_CLOSE_TIMEOUT_S) if calls else ([], [])
            ray.get(ended)
            if len(ended) < len(calls):
                logger.warning(
                    "%d of %d actors of the history did not end in order", len(calls) - len(ended), len(calls)
                )
        except Exception:
            logger.warning("the history did not end in order", exc_info=True)
        if self._in_use is not None:
            os.close(self._in_use)
            self._in_use = None

    def _ask(self, call: Callable[[Any], Any], timeout: float) -> Any:
        """Call the writer; one that had to be started anew is asked again.

        Args:
            call: Of one writer.
            timeout: Seconds.

        Raises:
            HistoryUnavailable: It gave no answer.
            Exception: What it raised.
        """
        for _ in range(2):
            self._start()
            if self._writer is not None:
                with suppress(HistoryUnavailable):
                    return self._answer(call(self._writer), timeout)
        raise HistoryUnavailable("the history writer does not record now; see the warnings before")

    def _answer(self, call: Any, timeout: float) -> Any:
        """The writer's answer; one that gives none in time is ended, and :meth:`_start` starts the next one.

        Raises:
            HistoryUnavailable: It gave none.
            Exception: What it raised.
        """
        started = time.monotonic()
        try:
            answer = ray.get(call, timeout=timeout)
        except RayActorError as error:
            what = f"died: {first_line(error)}"
        except GetTimeoutError:
            what = f"did not answer within {timeout:.0f} s"
        else:
            self._failures = 0
            return answer
        self._failures += 1
        lost = max(time.monotonic() - started, 1.0)
        pause = 0.0 if self._failures == 1 else min(_LONGEST_PAUSE_S, lost * 2**self._failures)
        self._retry_at = time.monotonic() + pause
        logger.warning(
            "the history writer %s; training goes on, it is started anew %s (folder %s)",
            what,
            f"after {pause:.0f} s" if pause else "at once",
            self._folder,
        )
        writer, self._writer = self._writer, None
        with suppress(Exception):  # its process may be gone; a stopped one holds the folder's lock until it is
            ray.kill(writer)
        raise HistoryUnavailable(f"the history writer {what}")
