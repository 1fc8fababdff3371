"""Histories on nodes that do not record: what requests need is fetched from the trainer's node when they start.

A server asks its node's one :class:`HistoryFetcher`, an actor that all servers of a node share, and goes on at once.
The fetcher fetches what has changed since it was last asked, through Ray's store, into a folder where engines find it
(:mod:`verl_rhyme.history.copies`). An engine drafts from other sources until the copy is there. Whatever fails here
costs requests their history, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_rhyme.config import HistoryConfig
from verl_rhyme.history import environment, owner
from verl_rhyme.history.copies import Copies
from verl_rhyme.history_writer.history_writer import READ, node_history_dir, writer_name

logger = logging.getLogger(__name__)

#: Seconds that the history writer has to answer, and values to come from its node.
_FETCH_TIMEOUT_S = 60.0
#: Prompts that are asked for at a time; the writer bounds the bytes.
_AT_A_TIME = 64
#: Seconds after which a server looks for the fetcher that takes a dead one's place.
_RETRY_S = 1.0


def node_copies_dir(base: str, node_id: str) -> str:
    """Folder of one node's copies, beside that of a store (:func:`node_history_dir`)."""
    return f"{node_history_dir(base, node_id)}.copies"


def fetchers(base: str) -> list[Any]:
    """The fetchers of all nodes."""
    found = []
    for name in ray.util.list_named_actors():
        if name.startswith(_fetcher_name(base, "")):
            with suppress(ValueError):  # it died just now
                found.append(ray.get_actor(name))
    return found


def _fetcher_name(base: str, node_id: str) -> str:
    return f"{writer_name(base)}:{node_id}"


class HistoryFetcher:
    """Ray actor: keeps the copies of its node.

    Args:
        node_id: Ray's id of the node.
        config: ``max_bytes`` bounds the copies; ``None``: as it bounds a store, when the first copy is needed.
    """

    def __init__(self, node_id: str, config: HistoryConfig) -> None:
        self._base, self._node_id, self._config = str(config.dir), node_id, config
        self._copies: Copies | None = None
        self._writer: Any = None

    def fetch(self, asked: Mapping[bytes, int]) -> None:
        """Have copies that are as late as was asked for; servers that ask for the same prompts share one fetch.

        Args:
            asked: Prompt key -> when it was asked for, in ns since the epoch.

        Raises:
            RayError, ValueError: The history writer is dead or does not answer.
            HistoryError, OSError: The folder cannot be written.
        """
        copies = self._opened()
        outdated = copies.outdated(asked)
        while outdated:
            began = time.time_ns()
            try:
                if self._writer is None:
                    self._writer = ray.get_actor(writer_name(self._base))
                known = dict(list(outdated.items())[:_AT_A_TIME])
                call = self._writer.values.options(concurrency_group=READ).remote(known)
                answers = ray.get(call, timeout=_FETCH_TIMEOUT_S)
                refs = [ref for ref in answers.values() if ref is not None]
                values = iter(ray.get(refs, timeout=_FETCH_TIMEOUT_S))
            except Exception:
                self._writer = None  # another one may have taken its place
                raise
            for key, ref in answers.items():
                del outdated[key]
                as_of = max(began, asked[key])  # a clock may be set back
                if ref is not None:
                    copies.put(key, next(values), as_of)
                elif known[key]:
                    copies.confirm(key, as_of)
                else:
                    copies.put(key, b"", as_of)

    def close(self) -> None:
        """Delete the copies."""
        if self._copies is not None:
            self._copies.close()

    def _opened(self) -> Copies:
        if self._copies is None:
            folder = Path(node_copies_dir(self._base, self._node_id))
            owner.remove_dead(folder.parent, {folder})
            self._copies = Copies(folder, self._config.max_bytes)
        return self._copies


class HistoryRequests:
    """A server's side of it, in the server's event loop.

    Args:
        node_id: Ray's id of the server's node.
    """

    def __init__(self, node_id: str, config: HistoryConfig) -> None:
        self._node_id, self._config = node_id, config
        self._errors = self._reported = 0
        self._asked: dict[bytes, int] = {}
        self._sending: asyncio.Task[None] | None = None
        self._fetcher: Any = None
        self._recorded_here = False

    def start(self) -> None:
        """Start the node's fetcher, so that the first request does not wait for its process."""
        if not self._records():
            self._start()

    def ask(self, key: bytes) -> int:
        """Have the latest history of a prompt fetched; returns at once.

        Returns:
            When it was asked for, in ns since the epoch: the copy must be as late. 0: the node records itself.
        """
        if self._records():
            return 0
        now = self._asked[key] = time.time_ns()
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send())
        return now

    def take_errors(self) -> int:
        """Fetches that failed since the last call."""
        new, self._reported = self._errors - self._reported, self._errors
        return new

    def _records(self) -> bool:
        """Whether the trainer's history is on this node, where engines read it in place."""
        if not self._recorded_here:
            folder = Path(node_history_dir(str(self._config.dir), self._node_id))
            with owner.without_writer(folder) as dead:
                self._recorded_here = not dead and environment.current(folder) is not None
        return self._recorded_here

    async def _send(self) -> None:
        while self._asked:
            await asyncio.sleep(0)  # requests that start together are asked for together
            asked, self._asked = self._asked, {}
            try:
                await self._fetch(asked)
            except Exception as error:
                self._errors += 1
                if self._errors == 1:
                    logger.warning("requests go without their prompts' history (told once): %s", error)

    async def _fetch(self, asked: dict[bytes, int]) -> None:
        for again in (True, False):
            try:
                await self._start().fetch.remote(asked)
                return
            except RayActorError:  # the writer's death is the fetcher's error, which is of this kind as well
                self._fetcher = None
                if not again:
                    raise
                await asyncio.sleep(_RETRY_S)

    def _start(self) -> Any:
        if self._fetcher is None:
            actor = ray.remote(HistoryFetcher).options(
                name=_fetcher_name(str(self._config.dir), self._node_id),
                get_if_exists=True,  # another server of this node's
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=self._node_id, soft=False),
            )
            self._fetcher = actor.remote(self._node_id, self._config)
        return self._fetcher
