"""A process group of weight syncs that lasts, as verl has it, until other replicas get weights than the last time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from verl.checkpoint_engine import CheckpointEngineManager

from verl_rhyme.processes.deaths import ReplicaDied

#: Seconds that workers have to leave a group; one of its members may be dead.
_LEAVE_S = 120.0


class KeptGroupManager(CheckpointEngineManager):
    """As verl's, for engines that keep the process group of their first sync (``nccl``), into which a replica that is
    missing or new does not fit. All leave the group then, and the next sync builds another, which stays. To build one
    for each sync (``rebuild_group=true``) costs each step what only a death has to.

    Args:
        config: verl's, of the checkpoint engine.
        actor_wg: The actor's workers.
        replicas: Those that take weights.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any]) -> None:
        super().__init__(config, actor_wg, replicas)
        self.replicas: list[Any]
        self._members: list[Any] = []  # replicas whose workers are in the group, in the order of their ranks

    def update_weights(self, global_steps: int | None = None) -> Any:  # type: ignore[override]
        """As verl's.

        Raises:
            ReplicaDied: The group of before could not be left.
        """
        if self._members and self._members != self.replicas:
            self._leave()
        self._members = list(self.replicas)
        return super().update_weights(global_steps)

    def send(self, replicas: Sequence[Any], version: int) -> None:
        """The actor's weights to these alone. Raises as :meth:`update_weights`."""
        others, self.replicas = self.replicas, list(replicas)
        try:
            self.update_weights(version)
        finally:
            self.replicas = others

    def _leave(self) -> None:
        """Have the actor and all members that live leave the group: verl's engine does with ``rebuild_group``."""
        for method, *arguments in (
            ("__setattr__", "rebuild_group", True),
            ("finalize",),
            ("__setattr__", "rebuild_group", False),
        ):
            ranks = self.actor_wg.world_size
            each = ([value] * ranks for value in (method, *arguments))
            told = list(self.actor_wg.execute_checkpoint_engine(*each))
            members = [
                worker.execute_checkpoint_engine.remote(method, *arguments)
                for replica in self._members
                for worker in replica.workers
            ]
            ray.wait([*told, *members], num_returns=len(told) + len(members), timeout=_LEAVE_S)
            try:
                ray.get(told, timeout=0)
                for answer in members:
                    try:
                        ray.get(answer, timeout=0)
                    except ActorUnavailableError:
                        raise
                    except RayActorError:  # it died: what it knew of the group did as well
                        pass
            except GetTimeoutError as error:
                raise ReplicaDied(
                    f"workers have not left the process group of a dead rollout replica in {_LEAVE_S:.0f} s\n"
                    "The same command goes on from the last checkpoint."
                ) from error
        self._members = []


def kept(manager: CheckpointEngineManager) -> CheckpointEngineManager:
    """Ours in the place of verl's, where its engine keeps a process group."""
    if manager.backend != "nccl" or (manager.config.engine_kwargs.get("nccl") or {}).get("rebuild_group"):
        return manager
    return KeptGroupManager(manager.config, manager.actor_wg, manager.replicas)
