"""The history writer: the Ray actor on the trainer's node, and the only writer of the run's history.

Engines on its node read the store in place, through shared memory maps. Other nodes fetch the histories of their
requests (:mod:`verl_rhyme.history_writer.history_copies`).
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
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import Trajectory, version_of
from verl_rhyme.history.store import HistoryStore
from verl_rhyme.processes.stored_samples import StoredSamples, TrainedBatch

#: Highest niceness; Ray starts its processes with 15.
_NICENESS = 19
#: Counts per append, in addition to the store's statistics.
STORE_COUNTS = ("lost_steps", "dropped", "unkept", "evicted", "shed_epochs", "sent_bytes")
#: Counts per append for ``rollout/entropy`` and ``rollout/bad_logprobs``
#: (:class:`~verl_rhyme.trainer.recorder.Recorder`).
TOKEN_COUNTS = ("sampled", "nats", "bad_logprobs")

#: Concurrency group of :meth:`HistoryWriter.values`: a separate thread, in addition to recording.
READ = "read"
#: Share of the node's Ray object store for values that other nodes fetch: enough for those of one step.
_SHARED = 0.1
#: Bytes of values after which an answer is complete.
_ANSWER_BYTES = 64 << 20


def node_history_dir(base: str, node_id: str) -> str:
    """Return the folder of one node's store; two Ray nodes on one machine have two folders."""
    return str(Path(base) / node_id[:16])


def object_store(node_id: str) -> int:
    [node] = [node for node in ray.nodes() if node["NodeID"] == node_id]
    return int(node["Resources"].get("object_store_memory", 0))


def writer_name(base: str) -> str:
    """Return the writer's Ray actor name. It contains ``history.dir``, which no other run of the cluster uses."""
    return f"verl_rhyme_history:{base}"


class HistoryWriter:
    """Ray actor, the only writer of a run's history; see :func:`history_folder.acquire` for ``run``.

    Fetched values stay in a part of Ray's object store: samples of a prompt start on several nodes at about the same
    time, and a node that has a value passes it on.
    """

    def __init__(
        self, folder: str, namespace: str, config: HistoryConfig, run: str, object_store: int = 2 << 30
    ) -> None:
        self._folder, self._object_store = Path(folder), object_store
        self._shared_bytes = int(_SHARED * object_store)
        self._namespace, self._config, self._run = namespace, config, run
        self._opened: HistoryStore | None = None
        self._fetched: dict[str, list[list[Trajectory]]] = {}  # by the first key of each batch
        self._reader = HistoryReader(self._folder, namespace, refresh_interval=0.0)
        self._reading = threading.Lock()  # no thread may read while the size of the map changes
        self._shared: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()  # version -> value in Ray's store, its bytes
        self._sent = 0

    @property
    def _store(self) -> HistoryStore:
        if self._opened is None:
            with self._reading:
                config = self._config
                arguments = (self._folder, self._namespace, config.max_bytes, config.epochs, self._run)
                self._opened = self._opened or HistoryStore(*arguments, object_store=self._object_store)
        return self._opened

    def open(self) -> int:
        """Open the folder and return the process id; HistoryError if it belongs to another run that is alive."""
        assert self._store is not None
        return os.getpid()

    def lower_priority(self) -> None:
        """Lower the priority of the recording thread and the threads it starts: training and engines come first."""
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)

    def rewards(self, stored: StoredSamples) -> np.ndarray:
        """Return the rewards of samples in TransferQueue, float64[N], so that token rewards need not be sent."""
        return stored.rewards()

    def fetch(self, batch: TrainedBatch) -> None:
        """Fetch samples for :meth:`append`; the queue may clear them afterwards. MissingSamples: it already has."""
        if fetched := list(batch.trajectories()):
            self._fetched[batch.stored.keys[0]] = fetched

    def append(self, batch: TrainedBatch, step: int) -> dict[str, Any]:
        """Record samples piece by piece; samples that :meth:`fetch` did not fetch are fetched now.

        Return the store's statistics, :data:`STORE_COUNTS` and :data:`TOKEN_COUNTS` of the append, and the process id.
        After MissingSamples earlier pieces are recorded.
        """
        first = batch.stored.keys[0] if batch.stored.keys else ""
        fetched = None
        while first in self._fetched:  # drop earlier batches, which were never recorded
            fetched = self._fetched.pop(next(iter(self._fetched)))
        stats = self.record(batch.trajectories() if fetched is None else fetched, step)
        return {**stats, "pid": os.getpid()}

    def record(self, pieces: Iterable[list[Trajectory]], step: int) -> dict[str, Any]:
        """Record one step; no two pieces may contain the same prompt."""
        counts: dict[str, float] = dict.fromkeys((*STORE_COUNTS, *TOKEN_COUNTS), 0)
        for trajectories in pieces:
            appended = self._store.append(trajectories, step)
            for name in counts:
                counts[name] += getattr(appended, name, 0)
            for logprobs in (t.logprobs for t in trajectories if t.logprobs is not None):
                known = logprobs[np.isfinite(logprobs)]
                counts["sampled"] += len(known)
                counts["nats"] -= float(known.sum(dtype=np.float64))
                counts["bad_logprobs"] += len(logprobs) - len(known)
        counts["lost_steps"] = min(1, counts["lost_steps"])  # of one step, whatever number of pieces
        with self._reading:
            counts["sent_bytes"], self._sent = self._sent, 0
        return {**counts, **self._store.stats()}

    def snapshot(self, folder: str) -> None:
        self._store.snapshot(folder)

    def restore(self, folder: str) -> dict[str, Any]:
        self._store.restore(folder)
        return self._store.stats()

    def values(self, known: Mapping[bytes, bytes]) -> dict[bytes, Any]:
        """Return the values of prompts for another node; call it in the group :data:`READ`.

        ``known``: key -> ``version_of`` the caller's value, or empty. The answer has the first prompts, at least one: a
        reference to the value, uint8[n], in Ray's object store, empty if nothing is kept any more, or ``None`` if the
        caller's value is the latest.
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
        """Keep the value while other nodes are likely to request the same prompt."""
        version = version_of(value)
        if version not in self._shared:
            self._shared[version] = ray.put(np.frombuffer(value, np.uint8)), len(value)
            while len(self._shared) > 1 and sum(size for _, size in self._shared.values()) > self._shared_bytes:
                self._shared.popitem(last=False)
        self._shared.move_to_end(version)
        return self._shared[version][0]

    def close(self) -> None:
        """Close the store and delete the folder; a folder that was never opened is left alone."""
        with self._reading:
            self._reader.close()
        if self._opened is not None:
            self._opened.close(delete=True)
