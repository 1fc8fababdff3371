"""Store of a run's history: one writer, one LMDB transaction per append, bounded by bytes and visits."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lmdb
import numpy as np

from verl_rhyme.config import HISTORY_FILL
from verl_rhyme.history import environment, eviction, owner
from verl_rhyme.history.environment import Damaged, Environment, HistoryError, HistoryMismatch
from verl_rhyme.history.keys import KEY_BYTES
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import PromptHistory, Trajectory, encoded_bytes
from verl_rhyme.history.values import Values, entry_of, stored_bytes

__all__ = ["AppendStats", "HistoryError", "HistoryMismatch", "HistoryReader", "HistoryStore"]

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

#: A prompt's history before and after an append, and the encoded value.
_Extended = tuple[PromptHistory, PromptHistory, bytes]
#: Most threads that index prompts.
_MAX_THREADS = 8
#: Share of the present bytes to keep, at each successive attempt to make room.
_KEPT = (1.0, 0.6, 0.3, 0.0)
#: Seconds to wait for a writer that is just ending, or a reader that is verifying the file.
_LOCK_TIMEOUT_S = 10.0
_META_FILE = "meta.json"


@dataclass(frozen=True, slots=True)
class AppendStats:
    """Result of one append.

    Attributes:
        prompts, trajectories, tokens: Recorded prompts, trajectories and tokens.
        dropped: Trajectories that could not be recorded (full disk, too large, bad tokens).
        unkept: Trajectories of prompts above the level, which are not kept.
        evicted: Prompts evicted for the byte bound.
        shed_epochs: Visits evicted for the byte bound, except those of evicted prompts.
    """

    prompts: int = 0
    trajectories: int = 0
    tokens: int = 0
    dropped: int = 0
    unkept: int = 0
    evicted: int = 0
    shed_epochs: int = 0


class HistoryStore:
    """Writer of a history folder, one per folder; any number of :class:`HistoryReader` may read it at the same time.

    An append is one transaction: a killed writer leaves complete appends. A damaged environment is set aside in the
    folder with a warning, and the history starts empty. Values stay within 0.7 of ``max_bytes``, and the file within
    ``max_bytes``; :mod:`verl_rhyme.history.room` decides which values go. Methods may be called from several threads.

    Args:
        path: Node-local folder, created if missing.
        namespace: Fingerprint of tokenizer and vocabulary.
        max_bytes: Bound of the file; at least 1 MiB.
        epochs: Most visits per prompt; the latest are kept.
        run: Name of the run. Data of another run are deleted; data of a killed writer of this run stay. ``None``: keep
            all data.
        threads: Number of threads that index prompts; ``None``: a quarter of the cores.

    Raises:
        HistoryMismatch: The folder holds the history of another vocabulary.
        HistoryError: Another process writes to the folder.
        OSError: The folder cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        namespace: str,
        max_bytes: int,
        epochs: int,
        run: str | None = None,
        threads: int | None = None,
    ):
        self._path = Path(path)
        self._namespace = namespace
        self._map_size = max_bytes // 4096 * 4096
        self._epochs = epochs
        self._threads = threads or min(max(1, len(os.sched_getaffinity(0)) // 4), _MAX_THREADS)
        self._warned: set[str] = set()
        self._mutex = threading.RLock()
        self._lock: int | None = owner.claim(self._path, run, _LOCK_TIMEOUT_S)
        try:
            self._values = self._open_or_start()
            self._shrink()
        except BaseException:
            os.close(self._lock)
            raise

    def append(self, trajectories: Iterable[Trajectory], step: int) -> AppendStats:
        """Record a step's trajectories and update the index of their prompts.

        A repeated step replaces the samples that it recorded before.

        Args:
            trajectories: Trajectories of any prompts, in any order; empty responses are skipped.
            step: Training step, or any other number that a resumed run repeats for the same append.

        Returns:
            Counts of the append. A full disk or map is logged and counted in ``dropped``, and the history is unchanged.
            If the map is full and the disk has no room for a complete copy, a smaller copy evicts prompts.
        """
        with self._mutex:
            groups: dict[bytes, list[Trajectory]] = {}
            bad = 0
            for trajectory in trajectories:
                if len(trajectory.tokens) == 0:
                    continue
                if len(trajectory.key) != KEY_BYTES or not _is_sound(trajectory):
                    bad += 1
                else:
                    groups.setdefault(bytes(trajectory.key), []).append(trajectory)
            if bad:
                self._warn(f"{bad} trajectories with an invalid key, tokens or log-probs are not recorded")
            error: Exception | None = None
            gone: set[bytes] = set()
            for kept in (None, *_KEPT):
                if kept == 0 and not isinstance(error, lmdb.MapFullError):
                    break  # a full disk may be temporary, so it must not cost the entire history
                rewritten = kept is None
                try:
                    if kept is not None:
                        gone |= self._rewrite(int(kept * self._values.room.total("bytes")))
                        rewritten = True
                    stats = self._append(groups, step, gone)
                    stats = replace(stats, dropped=stats.dropped + bad)
                    self._warn_of_evictions(stats)
                    return stats
                except lmdb.MapFullError as full:
                    error = full
                except (lmdb.Error, OSError, MemoryError) as failure:
                    error = failure
                    if rewritten:
                        break
                    self._warn(f"the disk has no room for a complete copy, which eviction requires: {failure}")
            self._warn(
                f"a step is not recorded, and the history stays as it was: {error} (LMDB's input/output error may be "
                "a full disk): free disk space, or set history.dir to another disk"
            )
            return AppendStats(dropped=sum(map(len, groups.values())) + bad, evicted=len(gone))

    def snapshot(self, dest_dir: str | os.PathLike[str]) -> None:
        """Copy the history, compacted, into a folder, atomically; an older snapshot is replaced.

        Raises:
            OSError, lmdb.Error: The snapshot cannot be written; no partial files remain.
        """
        dest = Path(dest_dir)
        dest.parent.mkdir(parents=True, exist_ok=True)
        temporary = dest.with_name(f".{dest.name}.new")
        with self._mutex:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(mode=0o700)
            try:
                self._values.opened.env.copy(str(temporary), compact=True)
                meta = {"format": environment.FORMAT, "namespace": self._namespace, **self.stats()}
                (temporary / _META_FILE).write_text(json.dumps(meta, indent=1) + "\n")
                for file in temporary.iterdir():
                    file.chmod(environment.FILE_MODE)
                    with open(file, "rb") as opened:
                        os.fsync(opened.fileno())
                old = _before(dest)
                if dest.exists():  # otherwise the old one of a killed writer may be the only snapshot: keep it for now
                    shutil.rmtree(old, ignore_errors=True)
                    dest.rename(old)
                temporary.rename(dest)
                shutil.rmtree(old, ignore_errors=True)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise

    def restore(self, src_dir: str | os.PathLike[str]) -> bool:
        """Replace the history with a snapshot.

        Args:
            src_dir: Folder of the snapshot. If a killed writer was replacing it, the previous snapshot is used.

        Returns:
            True on success. False, with a warning and the present history kept, if the snapshot is missing or damaged
            or does not fit on the disk.

        Raises:
            HistoryMismatch: The snapshot belongs to another vocabulary.
        """
        source, before = Path(src_dir), _before(Path(src_dir))
        if not source.exists() and before.exists():
            source = before
        with self._mutex:
            folder = environment.new_folder(self._path)
            try:
                folder.mkdir(mode=0o700)
                shutil.copyfile(source / environment.DATA_FILE, folder / environment.DATA_FILE)
                (folder / environment.DATA_FILE).chmod(environment.FILE_MODE)
                self._replace(self._open_checked(folder), folder)
            except (OSError, lmdb.Error, Damaged) as error:
                shutil.rmtree(folder, ignore_errors=True)
                logger.warning("the history in %s is not restored; the present history stays: %s", source, error)
                return False
            except HistoryMismatch:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._shrink()
            return True

    def clear(self) -> None:
        """Delete all values."""
        with self._mutex:
            folder = environment.new_folder(self._path)
            self._replace(environment.create(folder, self._namespace, self._map_size), folder)

    def stats(self) -> dict[str, float]:
        """Return the store's statistics.

        They are ``prompts``, ``responses``, ``tokens``, ``bytes`` (of the values), ``file_bytes``, ``epochs`` (largest
        number of visits of a prompt), and ``kept_share`` (share of the recently seen prompts that are kept).
        """
        with self._mutex:
            room = self._values.room
            return {
                "prompts": room.prompts,
                **{column: room.total(column) for column in ("responses", "tokens", "bytes")},
                "file_bytes": os.stat(self._values.opened.folder / environment.DATA_FILE).st_size,
                "epochs": room.deepest,
                "kept_share": room.kept_share,
            }

    def close(self, delete: bool = False) -> None:
        """Close the store; readers continue. A second call does nothing.

        Args:
            delete: Whether to delete the folder.
        """
        with self._mutex:
            if self._lock is not None:
                environment.release(self._values.opened)
                owner.disclaim(self._path, self._lock, delete)
                self._lock = None

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # ---- one append ----

    def _append(self, groups: dict[bytes, list[Trajectory]], step: int, gone: set[bytes]) -> AppendStats:
        if not groups:
            return AppendStats()
        try:
            env = self._values.opened.env
            env.reader_check()  # killed readers would hold old pages forever
            with env.begin(write=True, buffers=True) as txn:
                stats = self._write(txn, groups, step, set(gone))
            environment.fill_up(self._values.opened.folder, env)
            return stats
        except BaseException:
            self._values = self._load(self._values.opened)  # state after the last transaction
            raise

    def _write(self, txn: Any, groups: dict[bytes, list[Trajectory]], step: int, gone: set[bytes]) -> AppendStats:
        values, room = self._values, self._values.room
        prompts = trajectories = written = dropped = unkept = cut = tokens = 0
        for key, group in groups.items():
            last = [t for t in group if t.visit == group[-1].visit]
            most = max(int(t.tokens.max()) for t in last)
            size = encoded_bytes(sum(len(t.tokens) for t in last), len(last), most)
            room.arrive(key, last[-1].epoch, last[-1].visit, stored_bytes(size), step)
        forgotten = room.forget()
        room.settle()
        kept = []
        for key, group in groups.items():
            if epochs := room.epochs_for(key):
                kept.append((key, group, epochs))
                continue
            unkept += len(group)
            if key in room:
                gone.add(key)
                values.evict(txn, key)

        def extended(key: bytes, value: np.ndarray | None, group: list[Trajectory], epochs: int) -> _Extended:
            old = values.decoded(key, value)
            history = old.extended(group, step, epochs)
            return old, history, history.encode()

        calls = (partial(extended, key, values.stored(txn, key), group, epochs) for key, group, epochs in kept)
        for (key, group, _), (old, history, value) in zip(kept, _results(calls, self._threads), strict=True):
            if written + stored_bytes(len(value)) > room.bound:
                dropped += len(group)
                continue
            entry = entry_of(value, history, group[-1].epoch)
            values.put(txn, key, value, entry)
            visits = len({*old.visit.tolist(), *(t.visit for t in group)})
            cut += min(visits, self._epochs) - entry.units
            written += stored_bytes(len(value))
            prompts += 1
            trajectories += len(group)
            tokens += sum(len(t.tokens) for t in group)
        shed = eviction.shed(values, txn)
        gone |= shed.gone
        values.note(txn, set(groups) | shed.shortened | shed.gone, forgotten)
        if dropped:
            self._warn(
                f"{dropped} trajectories of one step are not recorded, because one step exceeds history.max_bytes; "
                "raise history.max_bytes"
            )
        evicted = sum(key not in room for key in gone)
        shed_epochs = cut + shed.epochs
        return AppendStats(prompts, trajectories, tokens, dropped, unkept, evicted, shed_epochs)

    def _warn_of_evictions(self, stats: AppendStats) -> None:
        if stats.evicted or stats.unkept:
            room = self._values.room
            self._warn(
                f"evicting prompts: history.max_bytes={self._map_size} keeps the latest visit of about "
                f"{room.kept_share:.0%} of the {room.known} prompts seen so far. The share falls until all prompts "
                "have been seen (rollout/history/kept_share). The other prompts draft without a history. "
                "Raise history.max_bytes to keep more"
            )

    # ---- environments ----

    def _open_or_start(self) -> Values:
        folder = environment.current(self._path) or environment.newest(self._path)
        environment.remove_others(self._path, keep=folder)
        if folder is not None and folder.exists():
            try:
                opened = self._open_checked(folder)
                try:
                    values = self._load(opened)
                except Damaged:
                    environment.release(opened)
                    raise
                environment.publish(self._path, folder)
                return values
            except (Damaged, lmdb.Error) as error:
                aside = environment.set_aside(folder)
                logger.warning("the history in %s is damaged and starts empty (moved to %s): %s", folder, aside, error)
        folder = environment.new_folder(self._path)
        opened = environment.create(folder, self._namespace, self._map_size)
        environment.publish(self._path, folder)
        return self._load(opened)

    def _open_checked(self, folder: Path) -> Environment:
        environment.check(folder)
        opened = environment.acquire(folder)
        try:
            recorded = opened.namespace()
            if recorded != self._namespace:
                raise HistoryMismatch(
                    f"the history in {folder} belongs to vocabulary {recorded}, but this run's vocabulary is "
                    f"{self._namespace}, where its tokens mean other text: set another history.dir for this run, or "
                    f"delete {self._path}"
                )
            opened.env.set_mapsize(self._map_size)
        except BaseException:
            environment.release(opened)
            raise
        return opened

    def _replace(self, opened: Environment, folder: Path) -> None:
        try:
            values = self._load(opened)
            environment.publish(self._path, folder)
        except BaseException:
            environment.release(opened)
            raise
        environment.release(self._values.opened)
        self._values = values
        environment.remove_others(self._path, keep=folder)

    def _load(self, opened: Environment) -> Values:
        return Values(opened, int(self._map_size * HISTORY_FILL), self._epochs, self._warn)

    def _shrink(self) -> None:
        """Shrink an environment that was written with a higher bound."""
        stats = self.stats()
        if stats["bytes"] > self._values.room.bound or stats["file_bytes"] > self._map_size:
            try:
                self._rewrite(self._values.room.bound)
            except (lmdb.Error, OSError) as error:
                self._warn(f"the file stays larger than history.max_bytes for now: {error}; free disk space")

    def _rewrite(self, bound: int) -> set[bytes]:
        """Copy the values that fit into ``bound`` bytes into a dense environment; return the evicted prompts."""
        folder = environment.new_folder(self._path)
        opened = environment.create(folder, self._namespace, self._map_size)
        try:
            gone = eviction.rewrite(self._values, opened, bound)
        except BaseException:
            environment.release(opened)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._replace(opened, folder)
        return gone

    def _warn(self, message: str) -> None:
        kind = message.lstrip("0123456789 ")[:32]
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("history in %s: %s (logged once)", self._path, message)


def _results(calls: Iterable[Callable[[], _Result]], threads: int) -> Iterator[_Result]:
    """Yield the results of calls, in order; the caller's thread reads ``calls``, a few ahead of the results."""
    if threads == 1:
        for call in calls:
            yield call()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="rhyme-history") as pool:
        waiting: deque[Future[_Result]] = deque()
        for call in calls:
            waiting.append(pool.submit(call))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _before(snapshot: Path) -> Path:
    """Return the path of a snapshot while a new one replaces it."""
    return snapshot.with_name(f".{snapshot.name}.old")


def _is_sound(trajectory: Trajectory) -> bool:
    """Return whether token ids are non-negative (negative ids are separators) and fit int32, and log-probs match."""
    tokens, logprobs = trajectory.tokens, trajectory.logprobs
    if logprobs is not None and len(logprobs) != len(tokens):
        return False
    return int(np.min(tokens)) >= 0 and int(np.max(tokens)) < 1 << 31
