"""The history of a node: one writer, one LMDB transaction per training step, bounded by bytes and by epochs."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import msgpack
import numpy as np

from verl_rhyme.history import environment
from verl_rhyme.history.environment import Damaged, Environment, HistoryError, HistoryMismatch
from verl_rhyme.history.keys import KEY_BYTES
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import CorruptRecord, PromptHistory, Trajectory

__all__ = ["AppendStats", "HistoryError", "HistoryMismatch", "HistoryReader", "HistoryStore"]

logger = logging.getLogger(__name__)

#: Of ``max_bytes``, what values may fill; the rest takes a step's new pages before its old ones are free again.
_FILL = 0.7
#: Part of the present bytes that is kept, at each successive attempt to make room.
_KEPT = (1.0, 0.6, 0.3, 0.0)
#: Seconds to wait for a writer that is just ending, or a reader that is just checking.
_LOCK_TIMEOUT_S = 10.0
_META_FILE = "meta.json"


@dataclass(frozen=True, slots=True)
class AppendStats:
    """What one append did.

    Attributes:
        prompts, trajectories, tokens: Recorded.
        dropped: Trajectories that could not be recorded (full disk, too large, bad tokens).
        evicted: Prompts that had to go for the byte bound.
    """

    prompts: int = 0
    trajectories: int = 0
    tokens: int = 0
    dropped: int = 0
    evicted: int = 0


class _Seen(NamedTuple):
    """What the writer remembers of a prompt without reading its value."""

    sequence: int
    bytes: int
    tokens: int
    responses: int
    epochs: int


class HistoryStore:
    """The one writer of a history folder; any number of :class:`HistoryReader` may read it meanwhile.

    An append is one transaction: a killed writer leaves the steps it finished, whole. A damaged environment is set
    aside in the folder, with a warning, and the history starts empty. Values are kept within 0.7 of ``max_bytes`` and
    the file within ``max_bytes``; the prompts seen longest ago go first. Methods may be called from several threads.

    Args:
        path: Node-local folder, made where it is missing.
        namespace: Fingerprint of tokenizer and vocabulary.
        max_bytes: Bound of the file; at least 1 MiB.
        epochs: How many of a prompt's latest epochs are kept.

    Raises:
        HistoryMismatch: The folder holds the history of another vocabulary.
        HistoryError: Another process writes here.
        OSError: The folder cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], namespace: str, max_bytes: int, epochs: int):
        self._path = Path(path)
        self._namespace = namespace
        self._map_size = max_bytes // 4096 * 4096
        self._epochs = epochs
        self._warned: set[str] = set()
        self._seen: dict[bytes, _Seen] = {}  # seen longest ago first
        self._mutex = threading.RLock()
        self._path.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = environment.lock_writer(self._path, _LOCK_TIMEOUT_S)
        try:
            self._env = self._open_or_start()
            self._shrink()
        except BaseException:
            os.close(self._lock)
            raise

    def append(self, trajectories: Iterable[Trajectory], step: int) -> AppendStats:
        """Record a step's trajectories and index their prompts anew.

        Recording a step again replaces what it recorded before.

        Args:
            trajectories: Of any prompts, in any order; empty responses are passed over.
            step: The trainer's step, or any other number of this append that a resumed run gives it again.

        Returns:
            What was recorded. A full disk or map is a warning and ``dropped``; the history stays as it was.
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
                self._warn(f"{bad} trajectories with a bad key, bad tokens or bad log-probs are not recorded")
            error: Exception | None = None
            evicted = 0
            for kept in (None, *_KEPT):
                try:
                    if kept is not None:
                        evicted += self._rewrite(int(kept * sum(s.bytes for s in self._seen.values())))
                    stats = self._append(groups, step)
                    return AppendStats(
                        stats.prompts, stats.trajectories, stats.tokens, stats.dropped + bad, stats.evicted + evicted
                    )
                except lmdb.MapFullError as full:
                    error = full
                except (lmdb.Error, OSError, MemoryError) as failure:
                    error = failure
                    break
            self._warn(f"a step is not recorded, the history stays as it was: {error}")
            return AppendStats(dropped=sum(map(len, groups.values())) + bad, evicted=evicted)

    def snapshot(self, dest_dir: str | os.PathLike[str]) -> None:
        """Copy the history, compacted, into a folder; it appears whole or not at all, replacing an older one.

        Raises:
            OSError, lmdb.Error: It cannot be written; nothing is left behind.
        """
        dest = Path(dest_dir)
        dest.parent.mkdir(parents=True, exist_ok=True)
        temporary = dest.with_name(f".{dest.name}.new")
        with self._mutex:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            try:
                self._env.env.copy(str(temporary), compact=True)
                meta = {"format": environment.FORMAT, "namespace": self._namespace, **self.stats()}
                (temporary / _META_FILE).write_text(json.dumps(meta, indent=1) + "\n")
                for file in temporary.iterdir():
                    with open(file, "rb") as opened:
                        os.fsync(opened.fileno())
                old = dest.with_name(f".{dest.name}.old")
                shutil.rmtree(old, ignore_errors=True)
                if dest.exists():
                    dest.rename(old)
                temporary.rename(dest)
                shutil.rmtree(old, ignore_errors=True)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise

    def restore(self, src_dir: str | os.PathLike[str]) -> bool:
        """Replace the history by a snapshot's.

        Returns:
            True; or False, with a warning and the present history kept, where the snapshot is missing or damaged or
            does not fit on the disk.

        Raises:
            HistoryMismatch: The snapshot is of another vocabulary.
        """
        source = Path(src_dir)
        with self._mutex:
            folder = environment.new_folder(self._path)
            try:
                folder.mkdir()
                shutil.copyfile(source / environment.DATA_FILE, folder / environment.DATA_FILE)
                self._replace(self._open_checked(folder), folder)
            except (OSError, lmdb.Error, Damaged) as error:
                shutil.rmtree(folder, ignore_errors=True)
                logger.warning("the history in %s is not restored, the present one stays: %s", source, error)
                return False
            except HistoryMismatch:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._shrink()
            return True

    def clear(self) -> None:
        """Forget everything."""
        with self._mutex:
            folder = environment.new_folder(self._path)
            self._replace(environment.create(folder, self._namespace, self._map_size), folder)

    def stats(self) -> dict[str, int]:
        """``prompts``, ``responses``, ``tokens``, ``bytes`` (of their values), ``file_bytes``, and ``epochs``: the most
        that any prompt has."""
        with self._mutex:
            seen = self._seen.values()
            return {
                "prompts": len(seen),
                "responses": sum(s.responses for s in seen),
                "tokens": sum(s.tokens for s in seen),
                "bytes": sum(s.bytes for s in seen),
                "file_bytes": os.stat(self._env.folder / environment.DATA_FILE).st_size,
                "epochs": max((s.epochs for s in seen), default=0),
            }

    def close(self) -> None:
        """End writing; readers go on reading. Closing twice does nothing."""
        with self._mutex:
            if self._lock is not None:
                environment.release(self._env)
                os.close(self._lock)
                self._lock = None

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # ---- one append ----

    def _append(self, groups: dict[bytes, list[Trajectory]], step: int) -> AppendStats:
        bound = int(self._map_size * _FILL)
        seen: dict[bytes, _Seen] = {}
        sequence = self._seen[next(reversed(self._seen))].sequence if self._seen else 0
        written = dropped = recorded = tokens = 0
        self._env.env.reader_check()  # readers that were killed would hold old pages for ever
        with self._env.env.begin(write=True, buffers=True) as txn:
            for key, trajectories in groups.items():
                history = self._old(txn, key).extended(trajectories, step, self._epochs)
                value = history.encode()
                size = _stored(len(value))
                if written + size > bound:
                    dropped += len(trajectories)
                    continue
                written += size
                sequence += 1
                kept = len(history.tokens) - len(history.bounds)
                seen[key] = _Seen(sequence, size, kept, len(history), len(np.unique(history.epoch)))
                txn.put(key, value, db=self._env.prompts)
                txn.put(key, msgpack.packb(seen[key]), db=self._env.seen)
                recorded += len(trajectories)
                tokens += sum(len(t.tokens) for t in trajectories)
            # Seen longest ago first; those of this very step fit by themselves.
            excess = written + sum(s.bytes for k, s in self._seen.items() if k not in seen) - bound
            evicted = []
            for key, entry in self._seen.items():
                if excess <= 0:
                    break
                if key not in seen:
                    excess -= entry.bytes
                    evicted.append(key)
                    txn.delete(key, db=self._env.prompts)
                    txn.delete(key, db=self._env.seen)
        environment.fill_up(self._env.folder, self._env.env)
        for key in (*evicted, *seen):
            self._seen.pop(key, None)
        self._seen.update(seen)
        if dropped:
            self._warn(
                f"{dropped} trajectories of one step are not recorded: a step takes more than history.max_bytes holds"
            )
        return AppendStats(len(seen), recorded, tokens, dropped, len(evicted))

    def _old(self, txn: Any, key: bytes) -> PromptHistory:
        value = txn.get(key, db=self._env.prompts)
        if value is not None:
            try:
                return PromptHistory.decode(value)
            except CorruptRecord as error:
                self._warn(f"the history of prompt {key.hex()} starts anew: {error}")
        return PromptHistory.build([])

    # ---- environments ----

    def _open_or_start(self) -> Environment:
        folder = environment.current(self._path) or environment.newest(self._path)
        environment.remove_others(self._path, keep=folder)
        if folder is not None and folder.exists():
            try:
                opened = self._open_checked(folder)
                try:
                    self._seen = _load(opened)
                except Damaged:
                    environment.release(opened)
                    raise
                environment.publish(self._path, folder)
                return opened
            except (Damaged, lmdb.Error) as error:
                aside = environment.set_aside(folder)
                logger.warning("the history in %s is damaged and starts empty (kept as %s): %s", folder, aside, error)
        folder = environment.new_folder(self._path)
        opened = environment.create(folder, self._namespace, self._map_size)
        environment.publish(self._path, folder)
        return opened

    def _open_checked(self, folder: Path) -> Environment:
        environment.check(folder)
        opened = environment.acquire(folder)
        try:
            found = opened.namespace()
            if found != self._namespace:
                raise HistoryMismatch(
                    f"the history in {folder} belongs to the vocabulary {found}, this run's is {self._namespace}: "
                    f"its tokens would mean other text; give this run its own history.dir, or delete {self._path}"
                )
            opened.env.set_mapsize(self._map_size)
        except BaseException:
            environment.release(opened)
            raise
        return opened

    def _replace(self, opened: Environment, folder: Path) -> None:
        try:
            seen = _load(opened)
            environment.publish(self._path, folder)
        except BaseException:
            environment.release(opened)
            raise
        environment.release(self._env)
        self._env, self._seen = opened, seen
        environment.remove_others(self._path, keep=folder)

    def _shrink(self) -> None:
        """Obey a bound that is lower than the one the environment was written under."""
        bound = int(self._map_size * _FILL)
        stats = self.stats()
        if stats["bytes"] > bound or stats["file_bytes"] > self._map_size:
            try:
                self._rewrite(bound)
            except (lmdb.Error, OSError) as error:
                self._warn(f"it stays larger than history.max_bytes for now: {error}")

    def _rewrite(self, bound: int) -> int:
        """Copy the prompts seen last, up to ``bound`` bytes, into a new, dense environment. Returns how many went."""
        kept, total = [], 0
        for key in reversed(self._seen):
            total += self._seen[key].bytes
            if total > bound:
                break
            kept.append(key)
        folder = environment.new_folder(self._path)
        opened = environment.create(folder, self._namespace, self._map_size)
        before = len(self._seen)
        try:
            with (
                self._env.env.begin(db=self._env.prompts, buffers=True) as old,
                opened.env.begin(write=True) as new,
            ):
                for key in reversed(kept):
                    new.put(key, old.get(key, b""), db=opened.prompts)
                    new.put(key, msgpack.packb(self._seen[key]), db=opened.seen)
        except BaseException:
            environment.release(opened)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._replace(opened, folder)
        return before - len(kept)

    def _warn(self, message: str) -> None:
        kind = message.lstrip("0123456789 ")[:32]
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("history in %s: %s (told once)", self._path, message)


def _is_sound(trajectory: Trajectory) -> bool:
    """Token ids are neither negative, as the separators of the index are, nor beyond int32; log-probs go with them."""
    tokens, logprobs = trajectory.tokens, trajectory.logprobs
    if logprobs is not None and len(logprobs) != len(tokens):
        return False
    return int(np.min(tokens)) >= 0 and int(np.max(tokens)) < 1 << 31


def _stored(value_bytes: int) -> int:
    """Bytes of the file that a value takes: whole pages, with LMDB's page header."""
    return -(-(value_bytes + 16) // 4096) * 4096


def _load(opened: Environment) -> dict[bytes, _Seen]:
    """Prompts, seen longest ago first."""
    with opened.env.begin() as txn:
        try:
            rows = [(bytes(key), _Seen(*msgpack.unpackb(value))) for key, value in txn.cursor(db=opened.seen)]
            rows.sort(key=lambda row: row[1].sequence)
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise Damaged(f"its list of prompts is unreadable: {error}") from error
    return dict(rows)
