"""A node's history writer: the Ray actor that alone writes its node's store, which engines read through shared maps."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from verl_rhyme.config import HistoryConfig
from verl_rhyme.history import owner, share
from verl_rhyme.history.record import Trajectory
from verl_rhyme.history.store import HistoryStore
from verl_rhyme.workers.stored_samples import StoredSamples, TrainedBatch

_NICENESS = 10
#: In a writer's folder: what ``history.max_bytes=null`` stands for.
_BOUND_FILE = "max_bytes"
#: What the store counts by append, as opposed to what it says of itself.
STORE_COUNTS = ("dropped", "unkept", "evicted", "shed_epochs")
#: The same, of which :class:`~verl_rhyme.trainer.recorder.Recorder` makes ``rollout/history/similarity*``.
TOKEN_COUNTS = ("compared", "similar", "by_chance_compared", "by_chance_similar")


def node_history_dir(base: str, node_id: str) -> str:
    """Folder of one node's store; two Ray nodes on one machine have two."""
    return str(Path(base) / node_id[:16])


class HistoryWriter:
    """Ray actor: the one writer of its node's store.

    Args:
        folder: The node's own; see :func:`node_history_dir`.
        living: Folders of all nodes that are alive. Beside its own it deletes those of dead writers
            (:func:`~verl_rhyme.history.owner.remove_dead`), but for these: a neighbour on this machine, killed with it,
            is started anew as well.
        run: What another run left in this node's folder is deleted; what a dead writer of this run left is taken over.
        serves: The node whose prompts alone are kept (``history.keep=served``); ``None``: all are.
    """

    def __init__(
        self,
        folder: str,
        living: set[str],
        namespace: str,
        config: HistoryConfig,
        run: str,
        serves: str | None = None,
    ) -> None:
        self._folder, self._serves = Path(folder), serves
        self._living = set(map(Path, living)) | {self._folder}
        self._namespace, self._config, self._run = namespace, config, run
        self._opened: HistoryStore | None = None
        self._fetched: dict[str, list[list[Trajectory]]] = {}  # by the first of their keys

    @property
    def _store(self) -> HistoryStore:
        if self._opened is None:
            folder, config = self._folder, self._config
            owner.make(folder)
            owner.remove_dead(folder.parent, self._living)
            # What is free now, until it is settled: not where a writer of this run settled it and died, for engines and
            # trainer have most of the memory since, and what does not fit goes.
            bound = config.max_bytes or self._settled() or share.automatic(folder, ())[0]
            self._opened = HistoryStore(folder, self._namespace, bound, config.epochs, self._run)
        return self._opened

    def _settled(self) -> int:
        """What :meth:`settle` found, this writer's or a dead one's of this run; 0 before."""
        wrote, file = owner.Owner.of(self._folder), self._folder / _BOUND_FILE
        return int(file.read_text()) if wrote is not None and wrote.run == self._run and file.is_file() else 0

    def settle(self) -> str:
        """Find what ``history.max_bytes=null`` stands for, once those it is shared with have their folders.

        Returns: What came of it, in words; empty where the option says it, or it is settled.
        """
        store = self._store
        if self._config.max_bytes is not None or self._settled():
            return ""
        bound, told = share.automatic(self._folder, self._living)
        store.limit(bound)
        part = self._folder / f".{_BOUND_FILE}"
        part.write_text(str(bound))
        part.replace(self._folder / _BOUND_FILE)
        return told

    def open(self) -> int:
        """Take the folder; a second call does nothing. Returns the process's id.

        Raises:
            HistoryError: It is another run's that is alive.
        """
        assert self._store is not None
        return os.getpid()

    def give_way(self) -> None:
        """Let training and engines of this node have the cores first: of this thread, and of those that it starts."""
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)

    def rewards(self, stored: StoredSamples) -> np.ndarray:
        """float64[N], of samples in TransferQueue; sent, instead of the tokens' rewards, to the trainer."""
        return stored.rewards()

    def fetch(self, batch: TrainedBatch) -> None:
        """Fetch samples from TransferQueue and hold them for :meth:`append`, after which they may be cleared there.

        Raises:
            SamplesGone: They have been.
        """
        if mine := list(self._mine(batch).trajectories()):
            self._fetched[batch.stored.keys[0]] = mine

    def append(self, batch: TrainedBatch, step: int) -> dict[str, Any]:
        """Record samples, which are fetched from TransferQueue where :meth:`fetch` has not, piece by piece.

        A killed writer leaves whole prompts, and what it held is lost.

        Returns:
            The store's statistics, what was dropped and evicted (:data:`STORE_COUNTS`), and tokens that were compared.

        Raises:
            SamplesGone: They were cleared before they were fetched; the pieces before are recorded.
        """
        first = batch.stored.keys[0] if batch.stored.keys else ""
        held = None
        while first in self._fetched:  # those before it, which nobody asked to record, go
            held = self._fetched.pop(next(iter(self._fetched)))
        told = self.record(self._mine(batch).trajectories() if held is None else held, step)
        if self._serves is None:
            return told
        self._store.leave(batch.served_by(self._serves)[1])
        return {**told, **self._store.stats()}

    def _mine(self, batch: TrainedBatch) -> TrainedBatch:
        """The samples that this node keeps."""
        return batch if self._serves is None else batch.served_by(self._serves)[0]

    def record(self, pieces: Iterable[list[Trajectory]], step: int) -> dict[str, Any]:
        """Record one step, of which no two pieces have the same prompt; see :meth:`append`."""
        counts: Counter[str] = Counter(dict.fromkeys((*STORE_COUNTS, *TOKEN_COUNTS), 0))
        for trajectories in pieces:
            did = self._store.append(trajectories, step)
            counts.update({name: getattr(did, name) for name in counts})
        return {**counts, **self._store.stats()}

    def snapshot(self, folder: str) -> None:
        self._store.snapshot(folder)

    def restore(self, folder: str) -> dict[str, Any]:
        self._store.restore(folder)
        return self._store.stats()

    def receive(self, name: str, piece: bytes, first: bool) -> None:
        """A part of a snapshot, for a node that may not see the checkpoint folder."""
        assert self._store is not None
        self._incoming.mkdir(exist_ok=True)
        with open(self._incoming / Path(name).name, "wb" if first else "ab") as file:
            file.write(piece)

    def restore_received(self) -> dict[str, Any]:
        try:
            self._store.restore(self._incoming, take=True)
            return self._store.stats()
        finally:
            shutil.rmtree(self._incoming, ignore_errors=True)

    @property
    def _incoming(self) -> Path:
        return self._folder / "incoming"

    def close(self) -> None:
        """End, and delete the folder; a folder that was never taken is left alone."""
        if self._opened is not None:
            self._opened.close(delete=True)
