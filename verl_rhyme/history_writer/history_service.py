"""The trainer's client of the history: starts and calls the writer (``history_writer.py``), ends the nodes' copies."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_rhyme.config import HistoryConfig
from verl_rhyme.history import history_folder
from verl_rhyme.history.environment import DATA_FILE, HistoryError
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
#: Seconds for the writer to sum the rewards, before the trainer does it, and to close.
_SHORT_TIMEOUT_S = 30.0


class HistoryUnavailable(RuntimeError):
    """The history writer is dead or does not answer."""


def tokenizer_namespace(tokenizer: Any) -> str:
    """Return the fingerprint of a vocabulary: drafts must never use token ids of another tokenizer."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()


class HistoryService:
    """The trainer's client of the history writer; no two threads may call it at the same time.

    Ray starts a writer that died again, with the call that it did not answer. A writer that does not answer in time
    fails that call only, and is killed. The next one takes over its folder.
    """

    def __init__(self, config: HistoryConfig, namespace: str) -> None:
        assert config.dir is not None
        self._base, self._node = str(config.dir), ray.get_runtime_context().get_node_id()
        self._folder = node_history_dir(self._base, self._node)
        actor = ray.remote(concurrency_groups={READ: 1})(HistoryWriter).options(
            name=writer_name(self._base),
            num_cpus=0,
            max_restarts=-1,  # a long run outlives many; a call that kills it twice ends
            max_task_retries=1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=self._node, soft=False),
        )
        self._writer = actor.remote(self._folder, namespace, config, uuid.uuid4().hex[:12], object_store(self._node))
        self._opening = self._writer.open.remote()
        self._pid: int | None = None
        self._in_use: int | None = None
        self._bytes = 0
        #: Number of writers started to replace a failed one.
        self.restarts = 0

    def ready(self) -> None:
        """Wait until the writer has opened its folder; HistoryError if a live run owns it, else a warning."""
        try:
            ray.get(self._opening, timeout=_TIMEOUT_S)
            # While the writer restarts, the folder still belongs to this run, even if no engine reads it.
            self._in_use = history_folder.mark_in_use(Path(self._folder))
        except HistoryError:
            raise
        except Exception as error:
            logger.warning(
                "the history writer failed to start in %s; training continues without a history: %s: set history.dir "
                "to another folder",
                *(self._folder, last_line(error)),
            )

    def rewards(self, stored: StoredSamples) -> np.ndarray:
        """Return float64[N]. The writer sums the token rewards, so they are not sent here."""
        try:
            return ray.get(self._writer.rewards.remote(stored), timeout=_SHORT_TIMEOUT_S)
        except RayError as error:
            raise HistoryUnavailable(f"the history writer failed to sum the rewards: {error}") from error

    def fetch(self, piece: TrainedBatch) -> None:
        """Let the writer fetch a piece of :meth:`TrainedBatch.pieces`; it may then be cleared, and appended later.

        Raises :class:`HistoryUnavailable`, or MissingSamples if the samples were cleared before the fetch.
        """
        self._answer(self._writer.fetch.remote(piece), _TIMEOUT_S)

    def append(self, piece: TrainedBatch, step: int) -> dict[str, Any]:
        """Let the writer record a piece, fetching it if necessary; return its statistics. Raises as :meth:`fetch`."""
        stats = self._answer(self._writer.append.remote(piece, step), _TIMEOUT_S)
        self._bytes = int(stats["bytes"])
        if (pid := stats.pop("pid")) != self._pid:
            if self._pid is not None:
                self.restarts += 1
                logger.warning("the history writer died and was started again; training continues")
            self._pid = pid
            self._writer.lower_priority.remote()
        return stats

    def snapshot(self, checkpoint: str) -> None:
        self._answer(self._writer.snapshot.remote(os.path.join(checkpoint, SNAPSHOT_FOLDER)), self._copy_timeout)

    def restore(self, checkpoint: str) -> dict[str, Any] | None:
        """Load a checkpoint's snapshot; ``None``, with a warning, without one. Raises :class:`HistoryUnavailable`."""
        folder = Path(checkpoint, SNAPSHOT_FOLDER)
        if not (folder / DATA_FILE).exists():
            logger.warning("the checkpoint %s has no history: drafting starts with an empty history", checkpoint)
            return None
        self._bytes = (folder / DATA_FILE).stat().st_size
        return self._answer(self._writer.restore.remote(str(folder)), self._copy_timeout)

    @property
    def _copy_timeout(self) -> float:
        return _TIMEOUT_S + self._bytes / _COPY_RATE

    def close(self) -> None:
        """Close the writer and the copies on other nodes, and delete their folders; never raises."""
        try:
            calls = [actor.close.remote() for actor in (*fetchers(self._base), self._writer)]
            ended, rest = ray.wait(calls, num_returns=len(calls), timeout=_SHORT_TIMEOUT_S)
            ray.get(ended)
            if rest:
                logger.warning(
                    "%d of %d actors of the history did not close within %.0f s; their folders may remain",
                    *(len(rest), len(calls), _SHORT_TIMEOUT_S),
                )
        except Exception:
            logger.warning("closing the history failed; its folders may remain", exc_info=True)
        if self._in_use is not None:
            os.close(self._in_use)
            self._in_use = None

    def _answer(self, call: Any, timeout: float) -> Any:
        """Pass on the exceptions of the writer's methods."""
        try:
            return ray.get(call, timeout=timeout)
        except RayActorError as error:
            raise HistoryUnavailable(f"the history writer for {self._folder} died: {first_line(error)}") from error
        except GetTimeoutError as error:
            message = f"the history writer for {self._folder} did not answer within {timeout:.0f} s, and is killed"
            logger.warning(message)
            with suppress(Exception):  # a stopped process would hold the folder's lock
                ray.kill(self._writer, no_restart=False)
            raise HistoryUnavailable(message) from error
