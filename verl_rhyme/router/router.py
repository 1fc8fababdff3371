"""verl's router, extended to follow the coordinator's placement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.router import DEFAULT_ROUTING_CACHE_SIZE, GlobalRequestLoadBalancer

from verl_rhyme.placement.assignment import ANYWHERE
from verl_rhyme.processes.request import FIELD


class PlacementRouter(GlobalRequestLoadBalancer):
    """Sends a request to its assigned replica if that serves, else where verl's router would. It also keeps the KV
    cache capacity of each replica for the coordinator."""

    def __init__(self, servers: dict[str, Any], config: Mapping[str, Any] | None = None) -> None:
        super().__init__(servers, DEFAULT_ROUTING_CACHE_SIZE)
        self._rooms: dict[str, int] = {}  # address -> KV tokens

    def require_acquire_fields(self) -> list[str]:
        return [FIELD]

    def acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        assignment = (extra.get(FIELD) or {}).get("assignment", ANYWHERE)
        if assignment.replica in self._servers:
            self._request_id_to_server[request_id] = assignment.replica
        return super().acquire_server(request_id)

    def remove_servers(self, server_ids: list[str]) -> None:
        super().remove_servers(server_ids)
        for server_id in server_ids:
            self._rooms.pop(server_id, None)

    def report_capacity(self, server_id: str, kv_tokens: int) -> None:
        self._rooms[server_id] = kv_tokens

    def fleet(self) -> dict[str, tuple[Any, int | None]]:
        """Return handle and KV token capacity of each serving replica, by address; ``None`` if it is unknown."""
        return {address: (handle, self._rooms.get(address)) for address, handle in self._servers.items()}
