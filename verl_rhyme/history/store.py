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
from verl_rhyme.history.environment import CorruptEnvironment, Environment, HistoryError, HistoryMismatch
from verl_rhyme.history.keys import KEY_BYTES
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import PromptHistory, Trajectory, encoded_bytes
from verl_rhyme.history.values import Values, stored_bytes

__all__ = ["AppendStats", "HistoryError", "HistoryMismatch", "HistoryReader", "HistoryStore"]

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

    An append is one transaction: a killed writer leaves complete appends. Files that were deleted, as by a cleaner of
    temporary folders, are written again by the next append. After damage the history starts empty, with a warning.
    Values stay within 0.7 of ``max_bytes``, and the file within ``max_bytes``; :mod:`verl_rhyme.history.retention`
    decides which values go. Methods may be called from several threads.

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
        self._warned: set[str] = set()
        self._mutex = threading.RLock()
        self._stale = False  # the ledger may differ from the environment
        self._lock: int | None = history_folder.acquire(self._path, run, _LOCK_TIMEOUT_S)
        try:
            self.max_bytes = (max_bytes or share.automatic(self._path, object_store)) // 4096 * 4096
            self._values = self._open_or_start()
        except BaseException:
            os.close(self._lock)
            raise

    def append(self, trajectories: Iterable[Trajectory], step: int) -> AppendStats:
        """Record a step's trajectories, in any order, and update the index of their prompts; skip empty responses.

        ``step`` is a number that a resumed run repeats for the same append; it replaces the samples that it recorded
        before. A step that cannot be written, as on a full disk, is logged and counted in ``lost_steps`` and
        ``dropped``, and the history is unchanged; the next append tries again. A full map is rewritten, with fewer and
        fewer prompts if the step needs their room or the disk has none for a copy.
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
            self._warn(f"{bad} trajectories with an invalid key, tokens or log-probs are not recorded")
        if not groups:
            return AppendStats(dropped=bad)
        with self._mutex:
            try:
                self._make_whole()
            except _FAILURES as error:
                return self._lose(groups, error, bad)
            before, kept = self._values.ledger.prompts, {key for key in groups if key in self._values.ledger}
            stats = self._append(groups, step)
            ledger = self._values.ledger
            stats.evicted = before + sum(key in ledger and key not in kept for key in groups) - ledger.prompts
            stats.dropped += bad
            if stats.evicted or stats.unkept:
                self._warn(
                    f"evicting prompts: history.max_bytes={self.max_bytes} keeps the latest visit of about "
                    f"{ledger.kept_share:.0%} of the {len(ledger)} prompts seen so far. The share falls until all "
                    "prompts have been seen (rollout/history/kept_share). The other prompts draft without a history. "
                    "Raise history.max_bytes to keep more"
                )
            return stats

    def _append(self, groups: dict[bytes, list[Trajectory]], step: int) -> AppendStats:
        error: Exception | None = None
        lost = 0
        for share_kept in (None, *_KEPT):
            if share_kept == 0 and not isinstance(error, lmdb.MapFullError):
                break  # a full disk may be temporary, so it must not cost the entire history
            copied = share_kept is None
            try:
                if share_kept is not None:
                    lost += self._rewrite(int(share_kept * self._values.ledger.total("bytes")))
                    copied = True
                stats = self._write(groups, step)
                stats.shed_epochs += lost
                return stats
            except lmdb.MapFullError as full:
                error = full
            except _FAILURES as failure:
                error = failure
                if copied:
                    break  # else a smaller copy may fit
        stats = self._lose(groups, error)
        stats.shed_epochs = lost
        return stats

    def _lose(self, groups: dict[bytes, list[Trajectory]], error: Exception | None, bad: int = 0) -> AppendStats:
        self._warn(
            f"a step is not recorded, and the history stays as it was: {error} (LMDB's input/output error may be "
            "a full disk): free disk space, or set history.dir to another disk"
        )
        return AppendStats(lost_steps=1, dropped=bad + sum(map(len, groups.values())))

    def _make_whole(self) -> None:
        """Write files again that another process deleted, from the map, which outlives them, and renew a stale ledger.

        The store stays usable after one of :data:`_FAILURES`: the next call tries again.
        """
        if self._lock is None:
            raise HistoryError("the store is closed")
        self._lock = history_folder.renew(self._path, self._run, self._lock, _LOCK_TIMEOUT_S)
        self._reload()
        opened = self._values.opened
        if not opened.is_on_disk():
            logger.warning("the files of the history in %s were deleted; they are written again", self._path)
            self._rewrite(self._values.ledger.total("bytes"))
        elif environment.current(self._path) != opened.folder:
            environment.publish(self._path, opened.folder)

    def _write(self, groups: dict[bytes, list[Trajectory]], step: int) -> AppendStats:
        """Append in one transaction; after an error the history and its ledger are as before."""
        opened = self._values.opened
        try:
            opened.env.reader_check()  # killed readers would hold old pages forever
            with opened.env.begin(write=True, buffers=True) as txn:
                stats = self._write_groups(txn, groups, step)
                self._values.save_ledger(txn)
            opened.fill_up()
            return stats
        except BaseException:
            self._stale = True
            self._reload()
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
            self._warn(
                f"{stats.dropped} trajectories of one step are not recorded, because one step exceeds "
                "history.max_bytes; raise history.max_bytes"
            )
        return stats

    # ---- snapshots ----

    def snapshot(self, dest_dir: str | os.PathLike[str]) -> None:
        """Copy the history, compacted, into a folder, atomically; an older snapshot is replaced.

        After an OSError or lmdb.Error no partial files remain.
        """
        dest = Path(dest_dir)
        dest.parent.mkdir(parents=True, exist_ok=True)
        temporary = dest.with_name(f".{dest.name}.new")
        with self._mutex:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(mode=0o700)
            try:
                self._values.opened.env.copy(str(temporary), compact=True)
                file = temporary / environment.DATA_FILE
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
        """Replace the history with a snapshot, found by :func:`find_snapshot`; return whether it succeeded.

        If the snapshot is missing, damaged, of another vocabulary or too large, or the folder cannot be written, the
        present history stays, with a warning.
        """
        source, folder = Path(src_dir), None
        with self._mutex:
            try:
                self._make_whole()
                folder = environment.new_folder(self._path, self._values.opened.folder)
                folder.mkdir(mode=0o700)
                shutil.copyfile(source / environment.DATA_FILE, folder / environment.DATA_FILE)
                (folder / environment.DATA_FILE).chmod(environment.FILE_MODE)
                self._replace(self._open_checked(folder))
            except _FAILURES as error:
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                logger.warning("the history in %s is not restored; the present history stays: %s", source, error)
                return False
            stats = self.stats()
            if stats["bytes"] > self._values.ledger.bound or stats["file_bytes"] > self.max_bytes:
                try:  # the snapshot was written with a higher bound
                    self._rewrite(self._values.ledger.bound)
                except _FAILURES as error:
                    self._warn(f"the file stays larger than history.max_bytes for now: {error}; free disk space")
            return True

    def clear(self) -> None:
        with self._mutex:
            self._replace(self._create())

    def stats(self) -> dict[str, float]:
        """Return statistics: ``bytes`` are of the values, ``epochs`` the most visits of a prompt, and ``kept_share`` is
        the share of the recently seen prompts that are kept."""
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
            if self._lock is not None:
                environment.release(self._values.opened)
                if delete:
                    with suppress(*_FAILURES):  # without it, what remains of a deleted folder would stay
                        self._lock = history_folder.renew(self._path, self._run, self._lock, timeout=0)
                history_folder.release(self._path, self._lock, delete)
                self._lock = None

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # ---- environments ----

    def _open_or_start(self) -> Values:
        folder, values = environment.current(self._path), None
        if folder is not None and folder.exists():
            try:
                opened = self._open_checked(folder)
                try:
                    values = self._load(opened)
                except BaseException:
                    environment.release(opened)
                    raise
            except (CorruptEnvironment, lmdb.Error) as error:
                logger.warning("the history in %s is damaged and starts empty: %s", folder, error)
        elif any(self._path.glob("env-[0-9]*")):
            logger.warning("the history in %s has no file 'current' and starts empty", self._path)
        values = values or self._load(self._create())
        environment.publish(self._path, values.opened.folder)
        return values

    def _create(self) -> Environment:
        others = (self._values.opened.folder,) if hasattr(self, "_values") else ()
        return environment.create(environment.new_folder(self._path, *others), self._namespace, self.max_bytes)

    def _open_checked(self, folder: Path) -> Environment:
        environment.check(folder)
        opened = environment.acquire(folder, self._namespace)
        try:
            opened.env.set_mapsize(self.max_bytes)
        except BaseException:
            environment.release(opened)
            raise
        return opened

    def _load(self, opened: Environment) -> Values:
        return Values(opened, int(self.max_bytes * HISTORY_FILL), self._epochs, self._warn)

    def _reload(self) -> None:
        if self._stale:
            self._values, self._stale = self._load(self._values.opened), False

    def _replace(self, opened: Environment) -> None:
        try:
            values = self._load(opened)
            environment.publish(self._path, opened.folder)
        except BaseException:
            environment.release(opened)
            shutil.rmtree(opened.folder, ignore_errors=True)
            raise
        before, self._values, self._stale = self._values.opened, values, False
        environment.release(before)

    def _rewrite(self, bound: int) -> int:
        """Copy the values that fit into ``bound`` bytes into a dense environment; return as ``Values.copy_to``."""
        opened = self._create()
        try:
            lost = self._values.copy_to(opened, bound)
        except BaseException:
            environment.release(opened)
            shutil.rmtree(opened.folder, ignore_errors=True)
            raise
        self._replace(opened)
        return lost

    def _warn(self, message: str) -> None:
        kind = message.lstrip("0123456789 ")[:32]
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("history in %s: %s (logged once)", self._path, message)


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


def find_snapshot(folder: str | os.PathLike[str]) -> Path | None:
    """Return the snapshot in a folder, or the previous one if a killed writer was replacing it; ``None`` without."""
    return next((path for path in (Path(folder), _before(Path(folder))) if path.is_dir()), None)


def _before(snapshot: Path) -> Path:
    return snapshot.with_name(f".{snapshot.name}.old")


def _is_sound(trajectory: Trajectory) -> bool:
    """Token ids are non-negative, because negative ids are separators, and fit int32."""
    tokens, logprobs = trajectory.tokens, trajectory.logprobs
    if len(trajectory.key) != KEY_BYTES or (logprobs is not None and len(logprobs) != len(tokens)):
        return False
    return int(np.min(tokens)) >= 0 and int(np.max(tokens)) < 1 << 31
