"""Draft counts of each request, fetched from the rollout servers once a step. A response does not wait for its counts:
its record is completed here, by the request's id."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import ray

from verl_rhyme.once import warn_once

logger = logging.getLogger(__name__)

#: Seconds that servers have to answer; later answers go to records of a later step.
_TIMEOUT_S = 10.0
#: Maximum number of counts kept for later records (of samples trained later, or interrupted), about 500 bytes each.
_MAX_KEPT = 1 << 16


class DraftCounts:
    """Fetches counts with one call to each server, for any number of requests. For use by one thread."""

    def __init__(self, servers: Callable[[], dict[int, Any]]) -> None:
        self._servers = servers  # gives the running ones by the rank of their replica
        self._answers: dict[int, Any] = {}  # pending answers by rank
        self._counts: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def fill(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the records without ids, with their counts, or zeros for counts that have not arrived. Wait for the
        servers, except those that still owe their last answer."""
        try:
            self._fetch()
        except Exception as error:  # counts are only logged
            self._warn(repr(error))
        filled = []
        for record in records:
            counts = self._counts.pop(record.get("id", ""), {})
            filled.append({name: value for name, value in {**record, **counts}.items() if name != "id"})
        while len(self._counts) > _MAX_KEPT:
            self._counts.popitem(last=False)
        return filled

    def _fetch(self) -> None:
        servers = self._servers()
        asked = {rank: servers[rank].take_counts.remote() for rank in servers.keys() - self._answers.keys()}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=_TIMEOUT_S)
        self._answers |= asked
        for rank, answer in list(self._answers.items()):
            if not ray.wait([answer], num_returns=1, timeout=0)[0]:
                self._warn(f"rollout replica {rank} did not answer within {_TIMEOUT_S:.0f} s")
                continue
            del self._answers[rank]
            try:
                self._counts.update(ray.get(answer))
            except ray.exceptions.RayError as error:
                self._warn(f"rollout replica {rank}: {error}")

    def _warn(self, what: str) -> None:
        warn_once(logger, "draft counts are missing in the metrics of this step (reported once): %s", what)
