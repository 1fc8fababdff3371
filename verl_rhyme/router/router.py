"""verl's router, but that a request goes where the coordinator assigned it, if that replica serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.router import DEFAULT_ROUTING_CACHE_SIZE, GlobalRequestLoadBalancer

from verl_rhyme.placement.assignment import ANYWHERE
from verl_rhyme.processes.request import FIELD


class PlacementRouter(GlobalRequestLoadBalancer):
    """See the module. It is also told how many KV tokens each replica has room for, and tells the coordinator.

    Args:
        servers: Actor handle of each replica, by its address.
        config: Content of the file of ``router_config_path``, as verl gives it.
    """

    def __init__(self, servers: dict[str, Any], config: Mapping[str, Any] | None = None) -> None:
        super().__init__(servers, DEFAULT_ROUTING_CACHE_SIZE)
        self._rooms: dict[str, int] = {}

    def require_acquire_fields(self) -> list[str]:
        """Keywords of ``generate`` that :meth:`acquire_server` is to be given."""
        return [FIELD]

    def acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        """Address and handle of the replica for a request.

        Raises:
            RuntimeError: There is none; verl's client waits for one where it knows that one will come.
        """
        assignment = (extra.get(FIELD) or {}).get("assignment", ANYWHERE)
        if assignment.replica in self._servers:
            self._request_id_to_server[request_id] = assignment.replica
        return super().acquire_server(request_id)

    def remove_servers(self, server_ids: list[str]) -> None:
        """Take them out of service."""
        super().remove_servers(server_ids)
        for server_id in server_ids:
            self._rooms.pop(server_id, None)

    def report_capacity(self, server_id: str, kv_tokens: int) -> None:
        """KV tokens a replica has room for."""
        self._rooms[server_id] = kv_tokens

    def fleet(self) -> dict[str, tuple[Any, int | None]]:
        """Handle of each replica in service by its address, and the KV tokens that it has room for, if it told."""
        return {address: (handle, self._rooms.get(address)) for address, handle in self._servers.items()}
