"""verl's router over a placement policy: decides, for each request, which replica serves it.

verl makes it one Ray actor, shared by all agent loop workers. Two ways lead to it: a file that
``actor_rollout_ref.rollout.router_config_path`` names,

    router_class: verl_rhyme.router.router.PlacementRouter
    policy: sticky_group
    options: {factor: 1.25}

or ``LLMServerManager(load_balancer_cls=router(policy="sticky_group"))``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import isfinite
from typing import Any

from verl_rhyme.history.keys import prompt_key
from verl_rhyme.placement import Placement, Request
from verl_rhyme.placement.assignment import ANYWHERE
from verl_rhyme.placement.fleet import REQUESTS
from verl_rhyme.processes.request import FIELD, PLACEMENT

logger = logging.getLogger(__name__)

#: Keywords of ``generate`` that a router can read a request's prompt key from, the first one given counts:
#: ``rhyme``: our client's, a mapping with any of :data:`~verl_rhyme.processes.request.PLACEMENT`;
#: ``prompt_ids``: token ids, for clients that know nothing of ours; a conversation's first ones are its key.
FIELDS = (FIELD, "prompt_ids")

#: Tokens; loads are summed as int64.
_MOST = 1 << 40


class PlacementRouter:
    """``verl.workers.rollout.router.RequestLoadBalancer``, by a policy of :mod:`verl_rhyme.placement`.

    A policy that fails, or a keyword that cannot be read, costs balance or locality only: the request goes to the least
    loaded replica, is counted, and the first time is warned of.

    Args:
        servers: Actor handle of each replica, by its address.
        config: ``policy`` (default ``sticky_group``), ``options`` of it, and ``fields``, those of :data:`FIELDS` that
            are sent along (default ``rhyme``: the others cost more bytes); over the class's ``defaults``.
        max_cache_size: Conversations that are remembered for their next turn.

    Raises:
        ValueError: Something in ``config`` that there is not.
    """

    #: A configured subclass has another one.
    defaults: Mapping[str, Any] = {}

    def __init__(
        self, servers: dict[str, Any], config: Mapping[str, Any] | None = None, max_cache_size: int = 65536
    ) -> None:
        given = {"policy": "sticky_group", "options": None, "fields": [FIELD], **self.defaults, **(config or {})}
        given.pop("router_class", None)
        policy, options, fields = (given.pop(name) for name in ("policy", "options", "fields"))
        if given:
            raise ValueError(f"the router's file has no {', '.join(sorted(given))}; it has policy, options and fields")
        if unknown := [name for name in fields if name not in FIELDS]:
            raise ValueError(f"the router's fields: {', '.join(unknown)} is none of {', '.join(FIELDS)}")
        self._fields = [name for name in FIELDS if name in fields]
        try:
            self._placement = Placement(policy, options, max_cache_size)
        except TypeError as error:
            raise ValueError(f"the router's options for {policy}: {error}") from None
        self._policy = policy
        self._servers: dict[str, Any] = {}
        self._keyless = self._unreadable = 0
        self._warned = False
        self.add_servers(servers)

    def require_acquire_fields(self) -> list[str]:
        """Keywords of ``generate`` that :meth:`acquire_server` is to be given."""
        return list(self._fields)

    def require_release_fields(self) -> list[str]:
        """A release is of a request, not of a server: one that comes after its server left changes nothing."""
        return ["request_id"]

    def acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        """Address and handle of the replica for a request.

        Raises:
            RuntimeError: There is none; verl's client waits for one where it knows that one will come.
        """
        request = self._read(request_id, extra)
        self._keyless += not request.key
        server_id = self._placement.acquire(request)
        if self._placement.errors and not self._warned:
            self._warn(f"placement by {self._policy} failed ({self._placement.last_error})")
        return server_id, self._servers[server_id]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """A request ended. Nothing happens when it is not known there."""
        if request_id is not None:
            self._placement.release(request_id, server_id)

    def add_servers(self, servers: dict[str, Any]) -> None:
        """Take them into service; one that is there keeps its load, under the handle given now."""
        for server_id, handle in servers.items():
            self._placement.add(server_id)
            self._servers[server_id] = handle

    def remove_servers(self, server_ids: list[str]) -> None:
        """Take them out of service and forget what ran there."""
        for server_id in server_ids:
            self._placement.remove(server_id)
            self._servers.pop(server_id, None)

    def report_capacity(self, server_id: str, kv_tokens: int) -> None:
        """KV tokens a replica has room for, at least 1."""
        self._placement.report(server_id, kv_tokens)

    def expect(self, requests: int, more: bool = False) -> None:
        """So many requests are about to come: bounds hold against the load there will be (:meth:`Placement.expect`)."""
        self._placement.expect(requests, more)

    def expect_running(self) -> None:
        """What runs is about to be cut short, and to come again; what was announced before is forgotten."""
        self._placement.expect(self.get_total_inflight())

    def fleet(self) -> dict[str, tuple[Any, int | None]]:
        """Handle of each replica in service by its address, and the KV tokens that it has room for, if it told."""
        fleet = self._placement.fleet
        rooms = {name: fleet.capacity[i] for name, i in fleet.index.items()}
        return {name: (self._servers[name], int(room) if isfinite(room) else None) for name, room in rooms.items()}

    def get_all_servers(self) -> list[str]:
        """Addresses of the replicas in service."""
        return list(self._servers)

    def get_inflight_count(self, server_id: str) -> int:
        """Requests that run on a replica; 0 for one that is not in service."""
        return self._placement.fleet.requests(server_id)

    def get_total_inflight(self) -> int:
        """Requests that run on the replicas in service."""
        return self._placement.fleet.totals[REQUESTS]

    def get_status(self) -> dict[str, Any]:
        """verl's keys, and the policy's name, loads and their imbalance, and counters."""
        status = self._placement.status()
        requests = status.pop("requests")
        return {
            "servers": requests,
            "total_inflight": sum(requests.values()),
            "active_servers": len(requests),
            "registered_handles": list(self._servers),
            "policy": self._policy,
            "without_key": self._keyless,
            "unreadable": self._unreadable,
            **status,
        }

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Place later turns, and samples of prompts that run, by hash and load alone."""
        return {"cleared_entries": self._placement.forget(), "server_loads": self._placement.status()["requests"]}

    def _read(self, request_id: str, extra: dict[str, Any]) -> Request:
        try:
            return Request(request_id, **_known(extra))
        except Exception as error:  # whatever a client sends, its request is served
            self._unreadable += 1
            if not self._warned:
                self._warn(f"cannot read what came with a request ({type(error).__name__}: {error})")
            return Request(request_id)

    def _warn(self, why: str) -> None:
        self._warned = True
        logger.warning("%s: such requests go to the least loaded replica; get_status() counts them", why)


def _known(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Of a request, what its keywords tell (see :data:`FIELDS`)."""
    meta = extra.get(FIELD)
    if meta and meta.get("key"):
        known = {name: value for name, value in meta.items() if name in PLACEMENT and value is not None}
        key = known["key"]
        known["key"] = key.hex() if isinstance(key, bytes) else str(key)
        assignment, before = known.pop("assignment", ANYWHERE), int(known.pop("before", 0))
        texts = {"key": known.pop("key"), "replica": assignment.replica}
        known["response_tokens"], known["p90_tokens"] = assignment.left(before)
        return {**texts, **{name: min(int(value), _MOST) for name, value in known.items() if value is not None}}
    if (tokens := extra.get("prompt_ids")) is not None:
        return {"key": prompt_key(tokens).hex(), "prompt_tokens": len(tokens)}
    return {}


def router(**config: Any) -> type[PlacementRouter]:
    """A router class with settings of its own, for ``LLMServerManager(load_balancer_cls=...)``.

    Args:
        config: See :class:`PlacementRouter`.
    """
    return type("ConfiguredPlacementRouter", (PlacementRouter,), {"defaults": config})
