"""What the drafters did for each request, fetched from the rollout servers once a step.

A response does not wait for it: the record that comes with it is filled in here, by the request's id.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import ray

logger = logging.getLogger(__name__)

#: Seconds that servers have to answer; what comes later goes to the records of a later step.
_TIMEOUT_S = 10.0
#: Counts kept for records still to come (of samples trained later, or interrupted), about 500 bytes each.
_MAX_KEPT = 1 << 16


class DraftCounts:
    """One question and one answer for each server, however many requests it served. For use by one thread.

    Args:
        servers: Those that run now, by a name that stays theirs.
    """

    def __init__(self, servers: Callable[[], dict[str, Any]]) -> None:
        self._servers = servers
        self._answers: dict[str, Any] = {}  # to come, by server
        self._counts: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._warned = False

    def fill(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Records with the counts that have arrived, zeros where they have not; without their ids.

        Waits for the servers, but not for one that has not even answered the last question.
        """
        try:
            self._fetch()
        except Exception as error:  # counts are for the log
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
        asked = {name: servers[name].take_counts.remote() for name in servers.keys() - self._answers.keys()}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=_TIMEOUT_S)
        self._answers |= asked
        if not self._answers:
            return
        answered, silent = ray.wait(list(self._answers.values()), num_returns=len(self._answers), timeout=0)
        arrived = set(answered)
        for name in [name for name, answer in self._answers.items() if answer in arrived]:
            try:
                self._counts.update(ray.get(self._answers.pop(name)))
            except ray.exceptions.RayError as error:
                self._warn(f"rollout server {name}: {error}")
        if silent:
            self._warn(f"{len(silent)} rollout servers did not answer within {_TIMEOUT_S:.0f} s")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("draft counts are missing in the metrics of this step (told once): %s", what)
