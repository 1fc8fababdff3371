"""Store of a run's history: one writer, one LMDB transaction per append, bounded by bytes and visits."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lmdb
import numpy as np

from verl_rhyme.config import HISTORY_FILL
from verl_rhyme.history import environment, history_folder, share
from verl_rhyme.history.environment import CorruptEnvironment, Environment, HistoryError
from verl_rhyme.history.keys import KEY_BYTES
from verl_rhyme.history.record import PromptHistory, Trajectory, encoded_bytes
from verl_rhyme.history.values import Values, stored_bytes
from verl_rhyme.once import warn_once

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

#: Most threads that index prompts.
_MAX_THREADS = 8
#: Share of the present bytes to keep, at each successive attempt to make room.
_KEPT = (1.0, 0.6, 0.3, 0.0)
#: Errors of a disk, of memory or of a folder, after which the history continues as it was.
_FAILURES = (lmdb.Error, OSError, MemoryError, HistoryError, CorruptEnvironment)
#: Seconds to wait for a writer that is just ending, or a reader that is verifying the file.
_LOCK_TIMEOUT_S = 10.0


@dataclass
class AppendStats:
    """Result of one append."""

    prompts: int = 0
    trajectories: int = 0
    lost_steps: int = 0  # 1 if the step, or a part of it, could not be recorded
    dropped: int = 0  # trajectories that could not be recorded (full disk, too large, bad tokens)
    unkept: int = 0  # trajectories of prompts above the level
    evicted: int = 0  # prompts evicted for the byte bound
    shed_epochs: int = 0  # visits evicted for the byte bound, except those of evicted prompts


class HistoryStore:
    """Writer of a history folder, one per folder; any number of :class:`HistoryReader` may read it at the same time.

    An append is one transaction: a killed writer leaves complete appends. The history is a cache: if its files are
    damaged or were deleted, as by a cleaner of temporary folders, it starts empty, with a warning. Values stay within
    0.7 of ``max_bytes``, and the file within ``max_bytes``; :mod:`verl_rhyme.history.retention` decides which values
    go. Methods may be called from several threads.

    Raises HistoryMismatch for another vocabulary's folder, HistoryError for another writer's or user's, or OSError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],  # node-local folder
        namespace: str,  # fingerprint of tokenizer and vocabulary
        max_bytes: int | None,  # bound of the file, at least 1 MiB; None: share.automatic
        epochs: int,  # most visits per prompt; the latest are kept
        run: str | None = None,  # see history_folder.acquire; None: keep all data
        threads: int | None = None,  # that index prompts; None: a quarter of the cores
        object_store: int = 0,  # bytes of the node's Ray object store
    ):
        self._path = Path(path)
        self._namespace = namespace
        self._epochs = epochs
        self._run = run
        self._threads = threads or min(max(1, len(os.sched_getaffinity(0)) // 4), _MAX_THREADS)
        self._mutex = threading.RLock()
        self._stale = False  # the ledger may differ from the environment
        self._closed = False
        self._lock: int | None = history_folder.acquire(self._path, run, _LOCK_TIMEOUT_S)
        try:
            self.max_bytes = (max_bytes or share.automatic(self._path, object_store)) // 4096 * 4096
            self._values = self._open_or_start()
        except BaseException:
            os.close(self._lock)  # the folder stays signed: its data are this run's
            raise

    def append(self, trajectories: Iterable[Trajectory], step: int) -> AppendStats:
        """Record a step's trajectories, in any order; skip empty responses.

        ``step`` is a number that a resumed run repeats for the same append; it replaces the samples that it recorded
        before. A step that cannot be written, as on a full disk, is counted, and the history is unchanged.
        """
        groups: dict[bytes, list[Trajectory]] = {}
        bad = 0
        for trajectory in trajectories:
            if len(trajectory.tokens) == 0:
                continue
            if _is_sound(trajectory):
                groups.setdefault(bytes(trajectory.key), []).append(trajectory)
            else:
                bad += 1
        if bad:
            warn_once(logger, "%d trajectories with an invalid key, tokens or log-probs are not recorded", bad)
        if not groups:
            return AppendStats(dropped=bad)
        with self._mutex:
            stats = AppendStats(lost_steps=1, dropped=sum(map(len, groups.values())))
            before, kept = 0, set[bytes]()
            try:
                self._make_usable()
                before, kept = self._values.ledger.prompts, {key for key in groups if key in self._values.ledger}
                stats = self._append(groups, step)
            except _FAILURES as error:
                warn_once(
                    logger,
                    "a step is not recorded, and the history in %s stays as it was: %s (LMDB's input/output error may "
                    "be a full disk): free disk space, or set history.dir to another disk (logged once)",
                    *(self._path, error),
                )
            stats.dropped += bad
            ledger = self._values.ledger
            new = sum(key in ledger and key not in kept for key in groups)
            stats.evicted = max(0, before + new - ledger.prompts)
            if stats.evicted or stats.unkept:
                warn_once(
                    logger,
                    "evicting prompts: history.max_bytes=%d keeps the latest visit of about %.0f%% of the %d prompts "
                    "seen so far. The share falls until all prompts have been seen (rollout/history/kept_share). The "
                    "other prompts draft without a history. Raise history.max_bytes to keep more (logged once)",
                    *(self.max_bytes, 100 * ledger.kept_share, len(ledger)),
                )
            return stats

    def _append(self, groups: dict[bytes, list[Trajectory]], step: int) -> AppendStats:
        """Write a step. A full map is rewritten first, with fewer and fewer values if the step needs their room."""
        lost = 0
        for share_kept in (*_KEPT, None):
            try:
                stats = self._write(groups, step)
                break
            except lmdb.MapFullError:
                if share_kept is None:
                    raise
                lost += self._rewrite(int(share_kept * self._values.ledger.total("bytes")))
        stats.shed_epochs += lost
        return stats

    def _make_usable(self) -> None:
        """Start with an empty history if another process deleted files of it, and renew a stale ledger."""
        if self._closed:
            raise HistoryError("the store is closed")
        opened = self._values.opened
        held = self._lock is not None and history_folder.keep(self._path, self._lock)
        if held and environment.keep(self._path, opened):
            self._renew_ledger()
            return
        self._unlock()
        self._lock = history_folder.acquire(self._path, self._run, _LOCK_TIMEOUT_S)
        self.clear()
        logger.warning("files of the history in %s were deleted; it starts empty", self._path)

    def _renew_ledger(self) -> None:
        if self._stale:
            self._values, self._stale = self._load(self._values.opened), False

    def _write(self, groups: dict[bytes, list[Trajectory]], step: int) -> AppendStats:
        """Append in one transaction; after an error the history and its ledger are as before."""
        opened = self._values.opened
        try:
            opened.env.reader_check()  # killed readers would hold old pages forever
            with opened.env.begin(write=True, buffers=True) as txn:
                stats = self._write_groups(txn, groups, step)
                self._values.save_ledger(txn)
            return stats
        except BaseException:
            self._stale = True
            self._renew_ledger()
            raise

    def _write_groups(self, txn: Any, groups: dict[bytes, list[Trajectory]], step: int) -> AppendStats:
        values, ledger, stats = self._values, self._values.ledger, AppendStats()
        for key, group in groups.items():
            last = [t for t in group if t.visit == group[-1].visit]
            largest = max(int(t.tokens.max()) for t in last)
            size = encoded_bytes(sum(len(t.tokens) for t in last), len(last), largest)
            ledger.note_visit(key, last[-1].epoch, last[-1].visit, stored_bytes(size), step)
        ledger.drop_gone()
        ledger.set_level()
        kept = []
        for key, group in groups.items():
            if epochs := ledger.allowed_visits(key):
                kept.append((key, group, epochs))
                continue
            stats.unkept += len(group)
            if key in ledger:
                values.evict(txn, key)

        def extended(key: bytes, value: np.ndarray | None, group: list[Trajectory], epochs: int) -> _Extended:
            old = values.decoded(key, value)
            history = old.extended(group, step, epochs)
            return len({*old.visit.tolist(), *(t.visit for t in group)}), history, history.encode()

        calls = (partial(extended, key, values.stored(txn, key), group, epochs) for key, group, epochs in kept)
        written = 0
        for (key, group, _), (visits, history, value) in zip(kept, _results(calls, self._threads), strict=True):
            if written + stored_bytes(len(value)) > ledger.bound:
                stats.dropped += len(group)
                continue
            entry = values.put(txn, key, history, value, group[-1].epoch)
            written += entry.bytes
            stats.shed_epochs += min(visits, self._epochs) - entry.units
            stats.prompts += 1
            stats.trajectories += len(group)
        stats.shed_epochs += values.evict_excess(txn)
        if stats.dropped:
            warn_once(
                logger,
                "%d trajectories of one step are not recorded, because one step exceeds history.max_bytes; raise "
                "history.max_bytes (logged once)",
                stats.dropped,
            )
        return stats

    # ---- snapshots ----

    def snapshot(self, dest_dir: str | os.PathLike[str]) -> None:
        """Copy the history, compacted, into a file of a folder; an older one is replaced.

        After an OSError or lmdb.Error no partial files remain.
        """
        dest = Path(dest_dir)
        dest.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = dest / ".new"
        with self._mutex:
            shutil.rmtree(part, ignore_errors=True)
            try:
                part.mkdir(mode=0o700)
                self._values.opened.env.copy(str(part), compact=True)
                file = part / environment.DATA_FILE
                file.chmod(environment.FILE_MODE)
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
                file.replace(dest / environment.DATA_FILE)
            finally:
                shutil.rmtree(part, ignore_errors=True)

    def restore(self, src_dir: str | os.PathLike[str]) -> bool:
        """Replace the history with a snapshot; after a failure, as damage, the present one stays; return which."""
        source, folder = Path(src_dir), None
        with self._mutex:
            try:
                self._make_usable()
                folder = environment.new_folder(self._path, self._values.opened.folder)
                folder.mkdir(mode=0o700)
                shutil.copy(source / environment.DATA_FILE, folder)
                self._replace(self._open(folder))
            except _FAILURES as error:
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                logger.warning("the history in %s is not restored; the present history stays: %s", source, error)
                return False
            bound = self._values.ledger.bound
            if self._values.ledger.total("bytes") > bound or self._values.opened.bytes > self.max_bytes:
                with suppress(*_FAILURES):  # else an append does it once the map is full
                    self._rewrite(bound)
            return True

    def clear(self) -> None:
        with self._mutex:
            self._replace(self._create(self._values.opened.folder))

    def stats(self) -> dict[str, float]:
        with self._mutex:
            ledger = self._values.ledger
            return {
                "prompts": ledger.prompts,
                **{column: ledger.total(column) for column in ("responses", "tokens", "bytes")},
                "file_bytes": self._values.opened.bytes,
                "epochs": ledger.most_visits,
                "kept_share": ledger.kept_share,
            }

    def close(self, delete: bool = False) -> None:
        """Close the store, and perhaps delete its folder; readers continue. A second call does nothing."""
        with self._mutex:
            if not self._closed:
                self._closed = True
                environment.release(self._values.opened)
                self._unlock(delete)

    def _unlock(self, delete: bool = False) -> None:
        if self._lock is not None:
            held, self._lock = self._lock, None
            history_folder.release(self._path, held, delete)

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # ---- environments ----

    def _open_or_start(self) -> Values:
        folder, values = environment.current(self._path), None
        try:
            if folder is not None and folder.exists():
                values = self._open(folder)
            elif any(self._path.glob("env-[0-9]*")):
                raise CorruptEnvironment("it has no file 'current'")
        except (CorruptEnvironment, lmdb.Error) as error:
            logger.warning("the history in %s is damaged and starts empty: %s", self._path, error)
        values = values or self._create()
        environment.publish(self._path, values.opened.folder)
        return values

    def _open(self, folder: Path) -> Values:
        opened = environment.acquire(folder, self._namespace, unused=True)
        try:
            opened.env.set_mapsize(self.max_bytes)
            return self._load(opened)
        except BaseException:
            environment.release(opened)
            raise

    def _create(self, *others: Path) -> Values:
        opened = environment.create(environment.new_folder(self._path, *others), self._namespace, self.max_bytes)
        try:
            return self._load(opened)
        except BaseException:
            _discard(opened)
            raise

    def _load(self, opened: Environment) -> Values:
        return Values(opened, int(self.max_bytes * HISTORY_FILL), self._epochs)

    def _rewrite(self, bound: int) -> int:
        """Copy the values that fit into ``bound`` bytes into a dense environment; return as ``Values.copy_to``."""
        opened = self._create(self._values.opened.folder).opened
        try:
            lost = self._values.copy_to(opened, bound)
            values = self._load(opened)
        except BaseException:
            _discard(opened)
            raise
        self._replace(values)
        return lost

    def _replace(self, values: Values) -> None:
        try:
            environment.publish(self._path, values.opened.folder)
        except BaseException:
            _discard(values.opened)
            raise
        before, self._values, self._stale = self._values, values, False
        environment.release(before.opened)


def _discard(opened: Environment) -> None:
    environment.release(opened)
    shutil.rmtree(opened.folder, ignore_errors=True)


#: Visits of a prompt before an append and in it, its history afterwards, and the encoded value.
_Extended = tuple[int, PromptHistory, bytes]


def _results(calls: Iterable[Callable[[], _Result]], threads: int) -> Iterator[_Result]:
    """The caller's thread reads ``calls``, a few ahead of the results, which keep their order."""
    with ThreadPoolExecutor(threads, thread_name_prefix="rhyme-history") as pool:
        waiting: deque[Future[_Result]] = deque()
        for call in calls:
            waiting.append(pool.submit(call))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _is_sound(trajectory: Trajectory) -> bool:
    """Token ids are non-negative, because negative ids are separators, and fit int32."""
    tokens, logprobs = trajectory.tokens, trajectory.logprobs
    if len(trajectory.key) != KEY_BYTES or (logprobs is not None and len(logprobs) != len(tokens)):
        return False
    return int(np.min(tokens)) >= 0 and int(np.max(tokens)) < 1 << 31
