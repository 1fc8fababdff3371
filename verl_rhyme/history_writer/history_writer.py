"""The history writer: the Ray actor on the trainer's node that alone writes the run's history.

Engines of its node read the store in place, through shared maps; other nodes fetch what their requests need
(:mod:`verl_rhyme.history_writer.history_copies`).
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray

from verl_rhyme.config import HistoryConfig
from verl_rhyme.history import owner, share
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import Trajectory, version_of
from verl_rhyme.history.store import HistoryStore
from verl_rhyme.processes.stored_samples import StoredSamples, TrainedBatch

#: The most: Ray starts all of its processes with 15.
_NICENESS = 19
#: What is counted by append, as opposed to what the store says of itself.
STORE_COUNTS = ("dropped", "unkept", "evicted", "shed_epochs", "sent_bytes")
#: The same, of which :class:`~verl_rhyme.trainer.recorder.Recorder` makes ``rollout/entropy``.
TOKEN_COUNTS = ("sampled", "nats")

#: The actor's concurrency group of :meth:`HistoryWriter.values`: a thread of its own, beside recording.
READ = "read"
#: Bytes of values that one answer has, and one value more.
_ANSWER_BYTES = 64 << 20


def node_history_dir(base: str, node_id: str) -> str:
    """Folder of the store on one node; two Ray nodes on one machine have two."""
    return str(Path(base) / node_id[:16])


def writer_name(base: str) -> str:
    """The writer's name among Ray's actors: by ``history.dir``, which no other run of a cluster writes to."""
    return f"verl_rhyme_history:{base}"


class HistoryWriter:
    """Ray actor: the one writer of a run's history.

    Args:
        folder: See :func:`node_history_dir`. What killed runs left beside it is deleted
            (:func:`~verl_rhyme.history.owner.remove_dead`).
        run: What another run left in the folder is deleted; what a dead writer of this run left is taken over.
        shared_bytes: Of values that other nodes fetched, how much stays in Ray's store: samples of a prompt start on
            several nodes at about the same time, and a node that has a value passes it on.
    """

    def __init__(
        self, folder: str, namespace: str, config: HistoryConfig, run: str, shared_bytes: int = 256 << 20
    ) -> None:
        self._folder, self._shared_bytes = Path(folder), shared_bytes
        self._namespace, self._config, self._run = namespace, config, run
        self._opened: HistoryStore | None = None
        self._bound = 0
        self._fetched: dict[str, list[list[Trajectory]]] = {}  # by the first of their keys
        self._reader = HistoryReader(self._folder, namespace, refresh_interval=0.0)
        self._reading = threading.Lock()  # nobody may read while the size of the map changes
        self._shared: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()  # version -> value in Ray's store, its bytes
        self._sent = 0

    @property
    def _store(self) -> HistoryStore:
        if self._opened is None:
            with self._reading:
                self._opened = self._opened or self._open()
        return self._opened

    def _open(self) -> HistoryStore:
        folder, epochs = self._folder, self._config.epochs
        owner.make(folder)
        owner.remove_dead(folder.parent, {folder})
        self._bound = self._config.max_bytes or share.automatic(folder)
        return HistoryStore(folder, self._namespace, self._bound, epochs, self._run)

    def open(self) -> int:
        """Take the folder; a second call does nothing. Returns the process's id.

        Raises:
            HistoryError: It is another run's that is alive.
        """
        assert self._store is not None
        return os.getpid()

    def bound(self) -> int:
        """Bytes that the history may take."""
        assert self._store is not None
        return self._bound

    def give_way(self) -> None:
        """Let training and engines of this node have the cores first: of the thread that records, and of those that it
        starts."""
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)

    def rewards(self, stored: StoredSamples) -> np.ndarray:
        """float64[N], of samples in TransferQueue; sent, instead of the tokens' rewards, to the trainer."""
        return stored.rewards()

    def fetch(self, batch: TrainedBatch) -> None:
        """Fetch samples from TransferQueue and hold them for :meth:`append`, after which they may be cleared there.

        Raises:
            SamplesGone: They have been.
        """
        if fetched := list(batch.trajectories()):
            self._fetched[batch.stored.keys[0]] = fetched

    def append(self, batch: TrainedBatch, step: int) -> dict[str, Any]:
        """Record samples, which are fetched from TransferQueue where :meth:`fetch` has not, piece by piece.

        A killed writer leaves whole prompts, and what it held is lost.

        Returns:
            The store's statistics, what was dropped, evicted and sent (:data:`STORE_COUNTS`), and tokens with their
            nats (:data:`TOKEN_COUNTS`).

        Raises:
            SamplesGone: They were cleared before they were fetched; the pieces before are recorded.
        """
        first = batch.stored.keys[0] if batch.stored.keys else ""
        held = None
        while first in self._fetched:  # those before it, which nobody asked to record, go
            held = self._fetched.pop(next(iter(self._fetched)))
        return self.record(batch.trajectories() if held is None else held, step)

    def record(self, pieces: Iterable[list[Trajectory]], step: int) -> dict[str, Any]:
        """Record one step, of which no two pieces have the same prompt; see :meth:`append`."""
        counts: dict[str, float] = dict.fromkeys((*STORE_COUNTS, *TOKEN_COUNTS), 0)
        for trajectories in pieces:
            did = self._store.append(trajectories, step)
            for name in counts:
                counts[name] += getattr(did, name, 0)
            known = [t.logprobs for t in trajectories if t.logprobs is not None]
            counts["sampled"] += sum(map(len, known))
            counts["nats"] -= sum(float(logprobs.sum(dtype=np.float64)) for logprobs in known)
        with self._reading:
            counts["sent_bytes"], self._sent = self._sent, 0
        return {**counts, **self._store.stats()}

    def snapshot(self, folder: str) -> None:
        self._store.snapshot(folder)

    def restore(self, folder: str) -> dict[str, Any]:
        self._store.restore(folder)
        return self._store.stats()

    def values(self, known: Mapping[bytes, bytes]) -> dict[bytes, Any]:
        """What is kept of prompts, for another node; to be called in the group :data:`READ`.

        Args:
            known: Prompt key -> :func:`~verl_rhyme.history.record.version_of` the value that is there; empty where
                there is none.

        Returns:
            Of the first of the prompts, one at least: reference of the value (uint8[n], ``PromptHistory.encode()``) in
            Ray's store, an empty one where nothing is kept any more; ``None`` where what is known is the latest.
        """
        answers: dict[bytes, Any] = {}
        size = 0
        assert self._store is not None
        with self._reading:
            for key, version in known.items():
                if size > _ANSWER_BYTES:
                    break
                with self._reader.value(key) as value:
                    answers[key] = None if version_of(value) == version else self._share(value)
                    size += len(value) if answers[key] is not None else 0
            self._sent += size
        return answers

    def _share(self, value: memoryview) -> Any:
        """A value's reference; held while its prompt is likely to be asked for by other nodes as well."""
        version = version_of(value)
        if version not in self._shared:
            self._shared[version] = ray.put(np.frombuffer(value, np.uint8)), len(value)
            while len(self._shared) > 1 and sum(size for _, size in self._shared.values()) > self._shared_bytes:
                self._shared.popitem(last=False)
        self._shared.move_to_end(version)
        return self._shared[version][0]

    def close(self) -> None:
        """End, and delete the folder; a folder that was never taken is left alone."""
        with self._reading:
            self._reader.close()
        if self._opened is not None:
            self._opened.close(delete=True)
