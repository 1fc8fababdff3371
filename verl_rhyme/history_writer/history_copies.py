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
from verl_rhyme.once import warn_once

logger = logging.getLogger(__name__)

#: Seconds for the history writer's answer, and again for the values to arrive. Their engines draft without meanwhile.
_FETCH_TIMEOUT_S = 60.0
#: Prompts per request to the writer; the writer bounds the bytes.
_AT_A_TIME = 64


def node_copies_dir(base: str, node_id: str) -> str:
    """Return the folder of the copies on this node, which may lack the disk that the trainer's node has."""
    return f"{node_history_dir(str(history_folder.here(base)), node_id)}.copies"


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

    def fetch(self, asked: Mapping[bytes, int]) -> None:
        """Bring copies up to the times of their requests; servers that request the same prompts share one fetch.

        ``asked``: prompt key -> time of the request, in ns since the epoch. Raises if the history writer does not
        answer, or the folder cannot be written.
        """
        if self._copies is None:
            taken = object_store(self._node_id) if self._config.max_bytes is None else 0
            self._copies = Copies(node_copies_dir(self._base, self._node_id), self._config.max_bytes, taken)
        outdated = self._copies.outdated(asked)
        while outdated:
            began = time.time_ns()
            known = dict(list(outdated.items())[:_AT_A_TIME])
            for key, value in self._fetch(known).items():
                del outdated[key]
                as_of = max(began, asked[key])  # the clock may be set back
                if value is None and known[key]:
                    if not self._copies.confirm(key, as_of):
                        outdated[key] = b""
                    continue
                try:
                    self._copies.put(key, b"" if value is None else value, as_of)
                except OSError:  # a full disk, or a cleaner deleted the folder: the next fetch starts with another
                    self.close()
                    raise

    def _fetch(self, known: dict[bytes, bytes]) -> dict[bytes, Any]:
        """Return the values of the first prompts; ``None`` if the known one is the latest."""
        writer = ray.get_actor(writer_name(self._base))
        call = writer.values.options(concurrency_group=READ).remote(known)
        answers = ray.get(call, timeout=_FETCH_TIMEOUT_S)
        refs = {key: ref for key, ref in answers.items() if ref is not None}
        values = ray.get(list(refs.values()), timeout=_FETCH_TIMEOUT_S)
        return {**answers, **dict(zip(refs, values, strict=True))}

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()
            self._copies = None


class HistoryRequests:
    """Client of a server to its node's fetcher, in the server's event loop."""

    def __init__(self, node_id: str, config: HistoryConfig) -> None:
        self._node_id, self._config = node_id, config
        self._errors = 0
        self._asked: dict[bytes, int] = {}
        self._sending: asyncio.Task[None] | None = None
        self._fetcher: Any = None
        self._recorded_here = False

    def start(self) -> None:
        """Start the node's fetcher early, so that the first request does not wait for the process."""
        if not self._records():
            self._start()

    def ask(self, key: bytes) -> int:
        """Request the latest history of a prompt; return the time in ns since the epoch: a valid copy is as recent.

        0 on the node with the store.
        """
        if self._records():
            return 0
        now = self._asked[key] = time.time_ns()
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send())
        return now

    def take_errors(self) -> int:
        """Return the number of fetches that failed since the last call."""
        errors, self._errors = self._errors, 0
        return errors

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
                await self._start().fetch.remote(asked)
            except Exception as error:
                self._errors += 1
                if isinstance(error, RayActorError):
                    self._fetcher = None  # it died, as with the server that started it: the next request starts another
                message = "fetching histories from the trainer's node failed; requests run without (logged once): %s"
                warn_once(logger, message, error)

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
