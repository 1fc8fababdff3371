"""Copies of histories on nodes without the writer: each request's history is fetched from the trainer's node.

A server calls the :class:`HistoryFetcher` of its node, an actor that all servers of the node share, and does not wait.
The fetcher fetches changed histories through Ray's object store into a folder that the engines read
(:mod:`verl_rhyme.history.copies`). Until the copy arrives, an engine drafts from other sources. A failure here costs
requests their history, nothing else.
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
from verl_rhyme.history import environment, history_folder
from verl_rhyme.history.copies import Copies
from verl_rhyme.history_writer.history_writer import READ, node_history_dir, object_store, writer_name

logger = logging.getLogger(__name__)

#: Seconds for the history writer's answer, and again for the values to arrive.
_FETCH_TIMEOUT_S = 60.0
#: Prompts per request to the writer; the writer bounds the bytes.
_AT_A_TIME = 64
#: Seconds until a server looks for the successor of a dead fetcher.
_RETRY_S = 1.0


def node_copies_dir(base: str, node_id: str) -> str:
    return f"{node_history_dir(base, node_id)}.copies"


def fetchers(base: str) -> list[Any]:
    found = []
    for name in ray.util.list_named_actors():
        if name.startswith(_fetcher_name(base, "")):
            with suppress(ValueError):  # it died just now
                found.append(ray.get_actor(name))
    return found


def _fetcher_name(base: str, node_id: str) -> str:
    return f"{writer_name(base)}:{node_id}"


class HistoryFetcher:
    """Ray actor that keeps the copies of its node, bounded by ``max_bytes`` of the config as a store."""

    def __init__(self, node_id: str, config: HistoryConfig) -> None:
        self._base, self._node_id, self._config = str(config.dir), node_id, config
        self._copies: Copies | None = None
        self._writer: Any = None

    def fetch(self, asked: Mapping[bytes, int]) -> None:
        """Bring copies up to the times of their requests; servers that request the same prompts share one fetch.

        ``asked``: prompt key -> time of the request, in ns since the epoch. Raises RayError or ValueError if the
        history writer is dead or does not answer, HistoryError or OSError if the folder cannot be written.
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
                self._writer = None  # a new writer may have replaced it
                raise
            for key, ref in answers.items():
                del outdated[key]
                as_of = max(began, asked[key])  # the clock may be set back
                if ref is not None:
                    copies.put(key, next(values), as_of)
                elif not known[key]:
                    copies.put(key, b"", as_of)
                elif not copies.confirm(key, as_of):
                    outdated[key] = b""

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()

    def _opened(self) -> Copies:
        if self._copies is None:
            taken = object_store(self._node_id) if self._config.max_bytes is None else 0
            self._copies = Copies(node_copies_dir(self._base, self._node_id), self._config.max_bytes, taken)
        return self._copies


class HistoryRequests:
    """Client of a server to its node's fetcher, in the server's event loop."""

    def __init__(self, node_id: str, config: HistoryConfig) -> None:
        self._node_id, self._config = node_id, config
        self._errors = self._reported = 0
        self._asked: dict[bytes, int] = {}
        self._sending: asyncio.Task[None] | None = None
        self._fetcher: Any = None
        self._recorded_here = False

    def start(self) -> None:
        """Start the node's fetcher early, so that the first request does not wait for the process."""
        if not self._records():
            self._start()

    def ask(self, key: bytes) -> int:
        """Request the latest history of a prompt; returns at once.

        Return the time of the request, in ns since the epoch; a valid copy is at least as recent. 0: the node has the
        store.
        """
        if self._records():
            return 0
        now = self._asked[key] = time.time_ns()
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send())
        return now

    def take_errors(self) -> int:
        """Return the number of fetches that failed since the last call."""
        new, self._reported = self._errors - self._reported, self._errors
        return new

    def _records(self) -> bool:
        """On the node with the history store engines read it in place."""
        if not self._recorded_here:
            folder = Path(node_history_dir(str(self._config.dir), self._node_id))
            with history_folder.excluding_writer(folder) as unused:
                self._recorded_here = not unused and environment.current(folder) is not None
        return self._recorded_here

    async def _send(self) -> None:
        while self._asked:
            await asyncio.sleep(0)  # collect the requests that start together
            asked, self._asked = self._asked, {}
            try:
                await self._fetch(asked)
            except Exception as error:
                self._errors += 1
                if self._errors == 1:
                    logger.warning(
                        "fetching prompt histories from the trainer's node failed; requests run without them "
                        "(logged once): %s",
                        error,
                    )

    async def _fetch(self, asked: dict[bytes, int]) -> None:
        for again in (True, False):
            try:
                await self._start().fetch.remote(asked)
                return
            except RayActorError:  # the fetcher died, or it reports the writer's death with the same class
                self._fetcher = None
                if not again:
                    raise
                await asyncio.sleep(_RETRY_S)

    def _start(self) -> Any:
        if self._fetcher is None:
            actor = ray.remote(HistoryFetcher).options(
                name=_fetcher_name(str(self._config.dir), self._node_id),
                get_if_exists=True,  # another server of this node may have started it
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=self._node_id, soft=False),
            )
            self._fetcher = actor.remote(self._node_id, self._config)
        return self._fetcher
