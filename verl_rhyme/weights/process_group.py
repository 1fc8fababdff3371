"""A process group of weight syncs that is kept until the set of replicas changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from verl.checkpoint_engine import CheckpointEngineManager

from verl_rhyme.processes.deaths import ReplicaDied

#: Seconds that workers have to leave a group that may have a dead member.
_LEAVE_S = 120.0


class ProcessGroupManager(CheckpointEngineManager):
    """verl's manager for engines that keep the process group of their first sync (``nccl``).

    Such a group cannot lose or gain a replica. When the set of replicas changes, all workers leave it (ReplicaDied if
    they cannot), and the next sync builds a new one. verl's ``rebuild_group=true`` builds one for each sync, which is
    slower.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any]) -> None:
        super().__init__(config, actor_wg, replicas)
        self.replicas: list[Any]
        self._members: list[Any] = []  # replicas in the group, in the order of their ranks

    def update_weights(self, global_steps: int | None = None) -> Any:  # type: ignore[override]
        if self._members and self._members != self.replicas:
            self._leave()
        self._members = list(self.replicas)
        return super().update_weights(global_steps)

    def send(self, replicas: Sequence[Any], version: int) -> None:
        """Send the actor's weights to these replicas. Raises ReplicaDied if workers cannot leave the last group."""
        others, self.replicas = self.replicas, list(replicas)
        try:
            self.update_weights(version)
        finally:
            self.replicas = others

    def _leave(self) -> None:
        """Have the actor and all live members leave the group, as verl's engine does with ``rebuild_group``."""
        for method, *arguments in (
            ("__setattr__", "rebuild_group", True),
            ("finalize",),
            ("__setattr__", "rebuild_group", False),
        ):
            ranks = self.actor_wg.world_size
            each = ([value] * ranks for value in (method, *arguments))
            actor_calls = list(self.actor_wg.execute_checkpoint_engine(*each))
            member_calls = [
                worker.execute_checkpoint_engine.remote(method, *arguments)
                for replica in self._members
                for worker in replica.workers
            ]
            calls = [*actor_calls, *member_calls]
            ray.wait(calls, num_returns=len(calls), timeout=_LEAVE_S)
            try:
                ray.get(actor_calls, timeout=0)
                for call in member_calls:
                    try:
                        ray.get(call, timeout=0)
                    except ActorUnavailableError:
                        raise
                    except RayActorError:  # it died: its group state is gone
                        pass
            except GetTimeoutError as error:
                raise ReplicaDied(
                    f"workers have not left the process group of a dead rollout replica within {_LEAVE_S:.0f} s\n"
                    "Run the same command again: it resumes from the last checkpoint."
                ) from error
        self._members = []
