"""The history on every node: one writer per node, fed by the trainer, read by the vLLM workers through shared maps."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_rhyme.config import HistoryConfig
from verl_rhyme.history.record import Trajectory
from verl_rhyme.history.store import HistoryStore

logger = logging.getLogger(__name__)

#: Below a verl checkpoint folder ``global_step_N``.
SNAPSHOT_FOLDER = "history"
_OWNER_FILE = "owner.pid"


def node_history_dir(base: str, node_id: str) -> str:
    """Folder of one node's store; two Ray nodes on one machine have two."""
    return str(Path(base) / node_id[:16])


def tokenizer_namespace(tokenizer: Any) -> str:
    """Fingerprint of a vocabulary: token ids of another tokenizer must never be drafted."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()


def pack(trajectories: list[Trajectory]) -> dict[str, np.ndarray]:
    """Columns of a list of trajectories: one object that Ray ships to all nodes without pickling each."""
    lengths = [len(trajectory.tokens) for trajectory in trajectories]
    logprobs = [
        np.full(length, np.nan, np.float32) if t.logprobs is None else t.logprobs
        for t, length in zip(trajectories, lengths, strict=True)
    ]
    return {
        "keys": np.frombuffer(b"".join(t.key for t in trajectories), dtype="V16"),
        "tokens": np.concatenate([t.tokens for t in trajectories]) if trajectories else np.empty(0, np.int32),
        "logprobs": np.concatenate(logprobs, dtype=np.float32) if trajectories else np.empty(0, np.float32),
        "ends": np.cumsum(lengths, dtype=np.int64),
        "rewards": np.array([t.reward for t in trajectories], np.float32),
        "versions": np.array([t.policy_version for t in trajectories], np.int64),
        "epochs": np.array([t.epoch for t in trajectories], np.int64),
        "samples": np.array([t.sample for t in trajectories], np.int64),
    }


def unpack(columns: dict[str, np.ndarray]) -> list[Trajectory]:
    """Inverse of :func:`pack`."""
    ends = columns["ends"]
    starts = np.concatenate([np.zeros(1, np.int64), ends])[: len(ends)]
    return [
        Trajectory(
            key=columns["keys"][i].tobytes(),
            tokens=columns["tokens"][start : ends[i]],
            reward=float(columns["rewards"][i]),
            policy_version=int(columns["versions"][i]),
            epoch=int(columns["epochs"][i]),
            sample=int(columns["samples"][i]),
            logprobs=columns["logprobs"][start : ends[i]],
        )
        for i, start in enumerate(starts)
    ]


class HistoryWriter:
    """Ray actor: the one writer of its node's store."""

    def __init__(self, base: str, namespace: str, max_bytes: int, epochs: int) -> None:
        self._node_id = ray.get_runtime_context().get_node_id()
        folder = Path(node_history_dir(base, self._node_id))
        _remove_orphans(Path(base))
        shutil.rmtree(folder, ignore_errors=True)  # a new run starts empty, or from its checkpoint
        folder.mkdir(parents=True)
        (folder / _OWNER_FILE).write_text(str(os.getpid()))
        self._folder = folder
        self._store = HistoryStore(folder, namespace, max_bytes, epochs)

    def append(self, columns: dict[str, np.ndarray], step: int) -> dict[str, Any]:
        """Record one step. Returns the store's statistics and what was dropped."""
        appended = self._store.append(unpack(columns), step)
        return {"dropped": appended.dropped, **self._store.stats()}

    def snapshot(self, folder: str) -> None:
        self._store.snapshot(folder)

    def restore(self, folder: str) -> dict[str, Any]:
        self._store.restore(folder)
        return self._store.stats()

    def restore_bytes(self, files: dict[str, bytes]) -> dict[str, Any]:
        """Like :meth:`restore` on a node that does not see the checkpoint folder."""
        incoming = self._folder.with_name(self._folder.name + ".incoming")
        incoming.mkdir(exist_ok=True)
        try:
            for name, content in files.items():
                (incoming / Path(name).name).write_bytes(content)
            return self.restore(str(incoming))
        finally:
            shutil.rmtree(incoming, ignore_errors=True)

    def close(self) -> None:
        self._store.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class HistoryService:
    """The trainer's hand on all writers."""

    def __init__(self, config: HistoryConfig, namespace: str) -> None:
        assert config.dir is not None
        self._config, self._namespace = config, namespace
        self._here = ray.get_runtime_context().get_node_id()
        self._writers: dict[str, Any] = {}
        self.add_nodes()

    def add_nodes(self) -> None:
        """Start a writer on each node that has none: all that are alive, since any may host a replica.

        Does not wait for them: they come up beside the engines, and Ray keeps their calls.
        """
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        for gone in set(self._writers) - alive:
            del self._writers[gone]
        for node_id in alive - set(self._writers):
            actor = ray.remote(HistoryWriter).options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
            )
            self._writers[node_id] = actor.remote(
                self._config.dir, self._namespace, self._config.max_bytes, self._config.epochs
            )

    def append(self, trajectories: list[Trajectory], step: int) -> dict[str, Any]:
        """Record on every node; returns this node's statistics."""
        columns = ray.put(pack(trajectories))
        stats = {node: writer.append.remote(columns, step) for node, writer in self._writers.items()}
        ray.get(list(stats.values()))
        return ray.get(stats[self._here])

    def snapshot(self, checkpoint: str) -> None:
        """One copy for all: every node holds the same history."""
        ray.get(self._writers[self._here].snapshot.remote(os.path.join(checkpoint, SNAPSHOT_FOLDER)))

    def restore(self, checkpoint: str) -> dict[str, Any] | None:
        """Load the snapshot of a checkpoint on every node; ``None`` and a warning when it has none."""
        folder = Path(checkpoint, SNAPSHOT_FOLDER)
        if not folder.is_dir():
            logger.warning("no history in %s: drafting starts with an empty one", checkpoint)
            return None
        elsewhere = [writer for node, writer in self._writers.items() if node != self._here]
        waiting = [self._writers[self._here].restore.remote(str(folder))]
        if elsewhere:
            files = ray.put({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})
            waiting += [writer.restore_bytes.remote(files) for writer in elsewhere]
        return ray.get(waiting)[0]

    def close(self) -> None:
        ray.get([writer.close.remote() for writer in self._writers.values()])


def _remove_orphans(base: Path) -> None:
    """Stores on this machine whose writer was killed."""
    for owner in base.glob(f"*/{_OWNER_FILE}"):
        if not Path("/proc", owner.read_text().strip() or "none").exists():
            shutil.rmtree(owner.parent, ignore_errors=True)
