"""The trainer's hand on the history of every node: one writer each (``history_writer.py``), told what to fetch."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_rhyme.config import HistoryConfig
from verl_rhyme.history import owner
from verl_rhyme.history.store import HistoryError
from verl_rhyme.observability.errors import first_line
from verl_rhyme.workers.history_writer import STORE_COUNTS, TOKEN_COUNTS, HistoryWriter, node_history_dir
from verl_rhyme.workers.stored_samples import StoredSamples, TrainedBatch

logger = logging.getLogger(__name__)

#: Below a verl checkpoint folder ``global_step_N``.
SNAPSHOT_FOLDER = "history"
#: Bytes a second that copying a snapshot is granted, on top of ``history.timeout``.
_COPY_RATE = 50e6
_CLOSE_TIMEOUT_S = 30.0
_LONGEST_PAUSE_S = 3600.0
_PIECE_BYTES = 64 << 20
#: Seconds that a writer has to sum the rewards, before the trainer does it.
_REWARDS_TIMEOUT_S = 30.0


class HistoryUnavailable(RuntimeError):
    """A writer is dead or does not answer."""


def tokenizer_namespace(tokenizer: Any) -> str:
    """Fingerprint of a vocabulary: token ids of another tokenizer must never be drafted."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()


@dataclass
class _Failures:
    """Of a node's writers, since the last one that answered."""

    count: int = 0
    retry_at: float = 0.0


class HistoryService:
    """The trainer's hand on all writers.

    Nothing here waits for ever, and a writer that died or does not answer is an error of that call only: it is ended,
    and a new one takes over its folder, at once the first time, then after pauses that grow with the time lost.
    Methods are not called at the same time from two threads.
    """

    def __init__(self, config: HistoryConfig, namespace: str) -> None:
        assert config.dir is not None
        self._config, self._namespace = config, namespace
        self._run = uuid.uuid4().hex[:12]
        self._here = ray.get_runtime_context().get_node_id()
        self._writers: dict[str, Any] = {}
        self._opening: dict[str, Any] = {}
        self._failures: dict[str, _Failures] = {}
        self._ready = False
        self._in_use: int | None = None
        self._bytes = 0
        #: Of the values that other nodes have, the mean over these; ``None`` where there are none.
        self.bytes_elsewhere: float | None = None
        #: Writers that were started in the place of one that failed.
        self.restarts = 0
        #: What writers of other nodes could not do, although they answered.
        self.errors = 0
        self.add_nodes()

    def add_nodes(self) -> None:
        """Start a writer on each node that has none: all that are alive, since any may host a replica.

        Does not wait for them: they come up beside the engines, and Ray keeps their calls.
        """
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        folders = {node_id: node_history_dir(str(self._config.dir), node_id) for node_id in alive}
        for gone in set(self._writers) - alive:
            del self._writers[gone]
        for node_id in alive - set(self._writers):
            failed = self._failures.get(node_id)
            if failed is not None:
                if time.monotonic() < failed.retry_at:
                    continue
                self.restarts += 1
            actor = ray.remote(HistoryWriter).options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
            )
            serves = node_id if self._config.keep == "served" and node_id != self._here else None
            writer = actor.remote(
                *(folders[node_id], set(folders.values()), self._namespace, self._config, self._run, serves)
            )
            self._writers[node_id], self._opening[node_id] = writer, writer.open.remote()
            writer.give_way.remote()
            if self._ready:
                writer.settle.remote()

    def ready(self) -> None:
        """Wait until the writers have their folders; one that fails otherwise is a warning.

        Raises:
            HistoryError: A folder is another run's that is alive.
        """
        try:
            self._answers({node: self._opening[node] for node in self._writers}, self._config.timeout)
            self._ready = True
            # What a writer that dies leaves is this run's, which goes on, also where no engine reads it.
            self._in_use = owner.use(Path(node_history_dir(str(self._config.dir), self._here)))
            settling = {node: writer.settle.remote() for node, writer in self._writers.items()}
            for node, told in self._answers(settling, self._config.timeout).items():
                if told:
                    logger.info("history.max_bytes on node %s: %s", node[:16], told)
        except HistoryError:
            raise
        except Exception as error:
            logger.warning("a history writer could not start; training goes on without it: %s", error)

    def rewards(self, stored: StoredSamples) -> np.ndarray:
        """float64[N], each sample's; summed by this node's writer, so that those of the tokens don't pass through here.

        Raises:
            HistoryUnavailable: It does not answer now. That is no failure of the writer's.
        """
        writer = self._writers.get(self._here)
        if writer is None:
            raise HistoryUnavailable("this node has no history writer now")
        try:
            return ray.get(writer.rewards.remote(stored), timeout=min(self._config.timeout, _REWARDS_TIMEOUT_S))
        except RayError as error:
            raise HistoryUnavailable(f"this node's history writer summed no rewards: {error}") from error

    def fetch(self, piece: TrainedBatch) -> None:
        """Have every node's writer fetch samples into its memory: they may be cleared then, and recorded later.

        Args:
            piece: One of :meth:`TrainedBatch.pieces`; :meth:`append` must be given the same one.

        Raises:
            HistoryUnavailable: This node's writer does not fetch now.
            SamplesGone: They were cleared before they were fetched.
        """
        put = ray.put(piece)
        self._ask(lambda writer: writer.fetch.remote(put), self._config.timeout)

    def append(self, batch: TrainedBatch, step: int) -> dict[str, Any]:
        """Have every node's writer record samples, which it fetches where it has not; returns this node's statistics.

        ``history.timeout`` bounds each piece (:meth:`TrainedBatch.pieces`), not the whole: a writer may take as long as
        it makes progress, and one that is started anew is asked for the piece that is missing, not for those before.

        Raises:
            HistoryUnavailable: This node's writer does not record now.
            SamplesGone: They were cleared before they were fetched.
        """
        counts: Counter[str] = Counter()
        stats: dict[str, Any] = {}
        for piece in list(batch.pieces()) or [batch]:
            stats = self._append(ray.put(piece), step)
            counts.update({name: stats[name] for name in (*STORE_COUNTS, *TOKEN_COUNTS)})
        self._bytes = int(stats["bytes"])
        return {**stats, **counts}

    def _append(self, put: Any, step: int) -> dict[str, Any]:
        return self._ask(lambda writer: writer.append.remote(put, step), self._config.timeout, others=self._look)

    def _look(self, others: dict[str, dict[str, Any]]) -> None:
        self.bytes_elsewhere = float(np.mean([told["bytes"] for told in others.values()])) if others else None

    def snapshot(self, checkpoint: str) -> None:
        """One copy for all, this node's: it has all prompts, also where other nodes keep those alone that they serve.

        Raises:
            HistoryUnavailable: This node's writer does not write now.
        """
        folder = os.path.join(checkpoint, SNAPSHOT_FOLDER)
        timeout = self._config.timeout + self._bytes / _COPY_RATE
        self._ask(lambda writer: writer.snapshot.remote(folder), timeout, nodes={self._here})

    def restore(self, checkpoint: str) -> dict[str, Any] | None:
        """Load the snapshot of a checkpoint on every node; ``None`` and a warning when it has none, or none answers."""
        folder = Path(checkpoint, SNAPSHOT_FOLDER)
        if not folder.is_dir() and (before := folder.with_name(f".{folder.name}.old")).is_dir():
            folder = before  # a run that was killed while it replaced a snapshot
        if not folder.is_dir():
            logger.warning("no history in %s: drafting starts with an empty one", checkpoint)
            return None
        self.add_nodes()
        files = [path for path in folder.iterdir() if path.is_file()]
        elsewhere = set(self._writers) - {self._here}
        for file in files if elsewhere else []:
            elsewhere &= self._send(file, elsewhere)
        calls = {n: self._writers[n].restore_received.remote() for n in elsewhere}
        if self._here in self._writers:
            calls[self._here] = self._writers[self._here].restore.remote(str(folder))
        self._bytes = sum(path.stat().st_size for path in files)
        try:
            answers = self._answers(calls, self._config.timeout + self._bytes / _COPY_RATE)
        except HistoryError:
            raise
        except Exception:
            logger.warning("the history could not be restored", exc_info=True)
            answers = {}
        if self._here not in answers:
            logger.warning("the history in %s is not restored: drafting starts with an empty one", checkpoint)
        return answers.get(self._here)

    def close(self) -> None:
        """End the writers, and delete their folders; never raises."""
        try:
            calls = {node: writer.close.remote() for node, writer in self._writers.items()}
            self._answers(calls, min(self._config.timeout, _CLOSE_TIMEOUT_S))
        except Exception:
            logger.warning("a history writer did not end in order", exc_info=True)
        if self._in_use is not None:
            os.close(self._in_use)
            self._in_use = None

    def _send(self, file: Path, nodes: set[str]) -> set[str]:
        """A file to several nodes, piece by piece: a history may be larger than Ray's store. Returns who has it."""
        with open(file, "rb") as opened:
            first = True
            while (piece := opened.read(_PIECE_BYTES)) or first:
                put = ray.put(piece)
                calls = {node: self._writers[node].receive.remote(file.name, put, first) for node in nodes}
                nodes = set(self._answers(calls, self._config.timeout))
                first = False
        return nodes

    def _ask(
        self,
        call: Callable[[Any], Any],
        timeout: float,
        nodes: set[str] | None = None,
        others: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> Any:
        """Call the writers, of some nodes or all; this node's answer. One that had to be started anew is asked again.

        Args:
            call: Of one writer.
            timeout: Seconds.
            nodes: To ask; ``None``: all.
            others: Is given what the other nodes answered.

        Raises:
            HistoryUnavailable: This node's writer gave none.
        """
        answers: dict[str, Any] = {}
        asked: dict[str, Any] = {}
        for _ in range(2):
            self.add_nodes()
            wanted = {n: w for n, w in self._writers.items() if asked.get(n) is not w and (nodes is None or n in nodes)}
            asked |= wanted
            answers |= self._answers({node: call(writer) for node, writer in wanted.items()}, timeout)
        for node in answers:
            self._failures.pop(node, None)
        others({node: answer for node, answer in answers.items() if node != self._here})
        if self._here not in answers:
            raise HistoryUnavailable("this node's history writer does not record now; see the warnings before")
        return answers[self._here]

    def _answers(self, calls: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Answers by node, of the writers that gave one in time; the others are replaced.

        Raises:
            HistoryError: A folder is another run's, on any node.
            Exception: What the writer of this node raised, after all were heard; other nodes go without their history.
        """
        if not calls:
            return {}
        started = time.monotonic()
        ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout)
        lost = time.monotonic() - started
        answers, raised = {}, None
        for node, call in calls.items():
            if call not in ready:
                self._fail(node, f"did not answer within {timeout:.0f} s", lost)
                continue
            try:
                answers[node] = ray.get(call, timeout=timeout)
            except RayActorError as error:
                self._fail(node, f"died: {first_line(error)}", lost)
            except Exception as error:
                # Ray's error is of the writer's own kind as well.
                if node == self._here or isinstance(error, HistoryError):
                    raised = error
                else:
                    self.errors += 1
                    if self.errors == 1:
                        logger.warning("the history of node %s (told once): %s", node, error)
        if raised is not None:
            raise raised
        return answers

    def _fail(self, node: str, what: str, lost: float) -> None:
        """End a node's writer; :meth:`add_nodes` starts the next one when its time has come."""
        failed = self._failures.setdefault(node, _Failures())
        failed.count += 1
        pause = 0.0 if failed.count == 1 else min(_LONGEST_PAUSE_S, max(lost, 1.0) * 2**failed.count)
        failed.retry_at = time.monotonic() + pause
        logger.warning(
            "the history writer on node %s %s; training goes on, it is started anew %s (folder %s)",
            node[:16],
            what,
            f"after {pause:.0f} s" if pause else "at once",
            node_history_dir(str(self._config.dir), node),
        )
        writer = self._writers.pop(node, None)
        if writer is not None:
            with suppress(Exception):  # its process may be gone; a stopped one holds the folder's lock until it is
                ray.kill(writer)
