"""What batches, abandoned attempts and dropped prompts leave in TransferQueue, and when it goes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol

from verl_rhyme.agent_loop.session import PROMPTS, SESSIONS
from verl_rhyme.agent_loop.stored_attempts import TRAIN, clear, is_ours, trajectories

#: Seconds for which reports that are of no use any more wait for others to go with them.
_TOGETHER_S = 0.5


class Needs(Protocol):
    """Of :class:`~verl_rhyme.scheduling.rollout.Rollout`: what somebody still waits for."""

    def needs_prompt(self, uid: str) -> bool: ...

    def needs_trajectories(self, name: str) -> bool: ...

    def needs_turns(self, name: str) -> bool: ...


class Cleanup:
    """Takes them out of the queue, one lot after another, beside whatever else is done."""

    def __init__(self) -> None:
        self._taken: tuple[dict[str, Any], set[str]] | None = None
        self._clearing: asyncio.Task[None] | None = None
        self._dropped = set[str]()  # told before, and still there
        self._obsolete: list[str] = []
        self._sweeping: asyncio.Task[None] | None = None

    def reports(self, obsolete: list[str]) -> None:
        """What these attempts reported is of no use any more: it goes soon, so that a sample has one entry."""
        self._obsolete += obsolete
        if self._obsolete and (self._sweeping is None or self._sweeping.done()):
            self._sweeping = asyncio.ensure_future(self._sweep())

    async def _sweep(self) -> None:
        while self._obsolete:
            await asyncio.sleep(_TOGETHER_S)
            gone, self._obsolete = self._obsolete, []
            await clear({SESSIONS: gone}, None)

    def dropped(self, needs: Needs, listing: dict[str, Any], taken: set[str]) -> list[str]:
        """Keys of what is finished and whole, and neither in this batch nor, any more, of use for a later one; once.

        Args:
            needs: After the batch was taken.
            listing: Tags of all keys, by partition.
            taken: Attempts of the batch.
        """
        stored = listing.get(TRAIN, {})
        found = [
            key
            for name, keys in trajectories(stored).items()
            if name not in taken and is_ours(name) and not needs.needs_trajectories(name)
            for key in keys
            if not stored[key].get("is_padding")  # verl's, of parts that are being trained
        ]
        told, self._dropped = self._dropped & stored.keys(), {*found}
        return [key for key in found if key not in told]

    def taken(self, listing: dict[str, Any], keys: Iterable[str]) -> None:
        """A batch of these keys was taken; what it leaves goes when the trainer is known to have it.

        Args:
            listing: Tags of all keys then, by partition.
            keys: The trainer's own, which it clears itself, as it does those that were :meth:`dropped`.
        """
        self._taken = listing, {*keys, *self._dropped}

    def forget(self) -> None:
        """Nothing is known of a batch that was taken."""
        self._taken = None

    def after_batch(self, needs: Needs) -> None:
        """The trainer has the batch that was taken."""
        if self._taken is not None:
            (listing, keep), self._taken = self._taken, None
            padding = {key for key, tag in listing.get(TRAIN, {}).items() if tag.get("is_padding")}
            self.clear(needs, listing, keep | padding)  # verl's padding of parts goes with the trainer's batch

    def clear(self, needs: Needs, listing: dict[str, Iterable[str]], keep: set[str]) -> asyncio.Task[None]:
        """What nobody needs goes; also what is trained, but ``keep``."""

        def wanted(partition: str, key: str) -> bool:
            if partition == PROMPTS:
                return needs.needs_prompt(key)
            name = key.rpartition("_")[0] if partition == TRAIN else key
            if not is_ours(name):
                return False
            return needs.needs_trajectories(name) if partition == TRAIN else needs.needs_turns(name)

        gone = {
            partition: [key for key in listing.get(partition, ()) if key not in keep and not wanted(partition, key)]
            for partition in (SESSIONS, PROMPTS, TRAIN)
        }
        self._clearing = asyncio.ensure_future(clear(gone, self._clearing))
        return self._clearing
