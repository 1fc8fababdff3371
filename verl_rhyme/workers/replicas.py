"""Rollout replicas that died: which they are, and others in their place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.ray_utils import auto_await

logger = logging.getLogger(__name__)

#: Seconds without an answer after which a server is warned of, and after which it is taken for dead. Where a process is
#: gone Ray says so: one that is silent lives and may be busy, but one that hangs would hold up the next weight sync.
_SILENT_S, _HUNG_S = 60.0, 300.0


class ReplicaDied(RuntimeError):
    """A replica is gone that nothing can replace while the run goes on."""


def dead(replicas: Iterable[Any]) -> dict[Any, str]:
    """Those of verl's replicas that cannot serve any more, and why: a process of theirs is gone, or an engine."""
    replicas = list(replicas)
    asked = {
        (server.healthy if server is replica.servers[0] else server.__ray_ready__).remote(): replica
        for replica in replicas
        for server in replica.servers
    }
    asked |= {worker.__ray_ready__.remote(): replica for replica in replicas for worker in replica.workers}
    told, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_SILENT_S) if asked else ([], [])
    if silent:
        ranks = sorted({asked[answer].replica_rank for answer in silent})
        logger.warning(
            "replicas %s live, but have not answered for %.0f s; after %.0f s they are taken for dead",
            ranks,
            _SILENT_S,
            _HUNG_S,
        )
        told, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_HUNG_S - _SILENT_S)
    found = {asked[answer]: f"no answer for {_HUNG_S:.0f} s" for answer in silent}
    for answer in told:
        try:
            ray.get(answer)
        except Exception as error:
            found[asked[answer]] = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return found


def serve(servers: Any) -> None:
    """Living replicas that a client has taken for dead are in service again.

    Args:
        servers: verl's ``LLMServerManager`` of them.
    """
    router = servers.global_load_balancer
    known = set(ray.get(router.get_all_servers.remote()))
    all_of_them = zip(servers.server_addresses, servers.server_handles, strict=True)
    if missing := {address: handle for address, handle in all_of_them if address not in known}:
        ray.get(router.add_servers.remote(missing))


class Spares:
    """Puts new replicas in the place of dead ones among those that have devices of their own.

    Args:
        servers: verl's ``LLMServerManager`` of them.
        weights: verl's ``CheckpointEngineManager`` of them.
    """

    def __init__(self, servers: Any, weights: Any) -> None:
        self._servers, self._weights = servers, weights
        #: Replicas that were started in the place of dead ones.
        self.started = 0

    def mend(self, version: int) -> int:
        """Take dead replicas out of service, and start as many with the actor's weights, which are ``version``'s.

        Returns:
            How many had died.

        Raises:
            ReplicaDied: None is left, and none could be started.
        """
        gone = dead(self._servers.rollout_replicas)
        if not gone:
            serve(self._servers)
            return 0
        for replica, why in gone.items():
            logger.warning("replica %d (%s) is gone: %s", replica.replica_rank, replica._server_address, why)
        manager = self._servers
        router = manager.global_load_balancer
        ray.get(router.remove_servers.remote([replica._server_address for replica in gone]))
        self._set([replica for replica in manager.rollout_replicas if replica not in gone])
        for replica in gone:
            _end(replica)
        for replica in gone:
            try:
                new = self._start(replica, version)
            except Exception as error:
                logger.warning("no other could be started in the place of replica %d: %s", replica.replica_rank, error)
                continue
            self._set([*manager.rollout_replicas, new])
            ray.get(router.add_servers.remote({new._server_address: new._server_handle}))
            self.started += 1
            logger.warning("replica %d takes the place of %d", new.replica_rank, replica.replica_rank)
        if not manager.rollout_replicas:
            raise ReplicaDied(
                "no rollout replica is left, and none could be started, see the warnings before; the same command goes "
                "on from the last checkpoint"
            )
        return len(gone)

    def _start(self, replica: Any, version: int) -> Any:
        manager = self._servers
        highest = max((other.replica_rank for other in manager.rollout_replicas), default=0)
        new = manager.rollout_replica_class(
            # A new name for its actors: Ray may know the dead ones for a while.
            replica_rank=max(highest, replica.replica_rank) + 1 + self.started,
            config=manager.rollout_config,
            model_config=manager.model_config,
            gpus_per_node=manager.rollout_config.n_gpus_per_node,
        )
        try:
            auto_await(_init)(new)
            CheckpointEngineManager(self._weights.config, self._weights.actor_wg, [new]).update_weights(version)
        except BaseException:
            _end(new)
            raise
        return new

    def _set(self, replicas: list[Any]) -> None:
        manager = self._servers
        manager.rollout_replicas = replicas
        manager.server_handles = [replica._server_handle for replica in replicas]
        manager.server_addresses = [replica._server_address for replica in replicas]
        self._weights.replicas = list(replicas)


async def _init(replica: Any) -> None:
    await asyncio.gather(replica.init_standalone())


def _end(replica: Any) -> None:
    """What is left of it goes, with the devices that it held."""
    for actor in [*replica.servers, *replica.workers]:
        ray.kill(actor)
    pool = replica.resource_pool
    for group in (pool.pgs or []) if pool is not None else []:
        remove_placement_group(group)
