"""Deletion of the entries that batches, abandoned attempts and dropped prompts leave in TransferQueue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from verl_rhyme.agent_loop.session import PROMPTS, SESSIONS
from verl_rhyme.agent_loop.stored_attempts import TRAIN, attempt_of, clear, trajectories
from verl_rhyme.scheduling.attempts import Attempt
from verl_rhyme.scheduling.rollout import Rollout


class Cleanup:
    """Deletes obsolete entries from TransferQueue in the background. ``lock`` is held for each deletion, and by those
    who change entries that one may reach; ``dropped`` are keys that an earlier coordinator handed over."""

    def __init__(self, lock: asyncio.Lock, dropped: Iterable[str] = ()) -> None:
        self._lock = lock
        self._taken: tuple[dict[str, Any], set[str]] | None = None
        self._clearing: asyncio.Task[None] | None = None
        self.dropped = {*dropped}  # keys that find_dropped() has returned and that are still stored

    def find_dropped(self, rollout: Rollout, listing: dict[str, Any], taken: set[Attempt]) -> list[str]:
        """Return keys of finished trajectories that neither this batch (of attempts ``taken``, which have left
        ``rollout``) nor a later one uses, from the tags of all keys by partition; each key once."""
        stored = listing.get(TRAIN, {})
        unused = [
            key
            for attempt, keys in trajectories(stored).items()
            if attempt not in taken and not rollout.content.needs_trajectories(attempt)
            for key in keys
            if not stored[key].get("is_padding")  # verl's padding of parts that are being trained
        ]
        returned, self.dropped = self.dropped & stored.keys(), {*unused}
        return [key for key in unused if key not in returned]

    def remember(self, listing: dict[str, Any], keys: Iterable[str]) -> None:
        """Remember a handover, with the listing of that time: entries that nobody needs are deleted when the trainer is
        known to have it, except ``keys`` and those of :meth:`find_dropped`, which the trainer deletes itself."""
        self._taken = listing, {*keys, *self.dropped}

    def delete_remembered(self, rollout: Rollout) -> None:
        """Delete the entries of the last handover: the trainer has it."""
        if self._taken is not None:
            (listing, keep), self._taken = self._taken, None
            padding = {key for key, tag in listing.get(TRAIN, {}).items() if tag.get("is_padding")}
            self.clear(rollout, listing, keep | padding)  # the trainer deletes verl's padding of parts with its batch

    def clear(self, rollout: Rollout, listing: dict[str, Iterable[str]], keep: set[str]) -> asyncio.Task[None]:
        """Delete all entries that are not needed, including trained ones, except the keys in ``keep``."""

        def wanted(partition: str, key: str) -> bool:
            if partition == PROMPTS:
                return rollout.content.needs_prompt(key)
            if partition == SESSIONS:
                return rollout.content.needs_turns(Attempt.named(key))
            attempt = attempt_of(key)
            return attempt is not None and rollout.content.needs_trajectories(attempt)

        gone = {
            partition: [key for key in listing.get(partition, ()) if key not in keep and not wanted(partition, key)]
            for partition in (SESSIONS, PROMPTS, TRAIN)
        }
        self._clearing = asyncio.ensure_future(self._clear(gone))
        return self._clearing

    async def _clear(self, gone: dict[str, list[str]]) -> None:
        async with self._lock:
            await clear(gone)
