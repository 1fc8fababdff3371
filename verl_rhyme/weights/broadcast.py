"""Carriers over verl's own backends: the actor sends a version to all replicas, which stop for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

from verl_rhyme.config.backends import backend
from verl_rhyme.processes.deaths import ReplicaDied
from verl_rhyme.weights.carrier import Carrier
from verl_rhyme.weights.folder import WeightsError
from verl_rhyme.weights.samples import Held, compare, log_uncompared, sent_by

#: Seconds that workers have to leave a group that may have a dead member.
_LEAVE_S = 120.0


class Broadcast(Carrier):
    """verl's manager, which compares the engines' weights with the actor's after each sync."""

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any], *_: Any) -> None:
        super().__init__(config, actor_wg, replicas)
        self._uncompared = backend(self.backend).uncompared

    def update_weights(self, global_steps: int | None = None) -> Any:  # type: ignore[override]
        metrics = super().update_weights(global_steps)
        if self._uncompared:
            log_uncompared(self._uncompared)
        elif (sent := sent_by(self.actor_wg)) is not None:
            held = ray.get([replica.servers[0].held_weights.remote() for replica in self.replicas])
            for replica, workers in zip(self.replicas, held, strict=True):
                compare(replica.replica_rank, sent, [Held(**each) for each in workers])
        return metrics

    def deliver(self, replicas: Iterable[Any], version: int) -> None:
        others, self.replicas = self.replicas, list(replicas)
        try:
            self.update_weights(version)
        except (ReplicaDied, WeightsError):
            raise
        except Exception as error:  # the actor may still be sending
            ranks = ", ".join(str(replica.replica_rank) for replica in self.replicas)
            raise ReplicaDied(
                f"rollout replica {ranks} did not get its weights before it served: {error}\n"
                "The same command continues from the last checkpoint."
            ) from error
        finally:
            self.replicas = others


class KeptGroup(Broadcast):
    """Carrier over engines that keep the process group of their first sync (``nccl``).

    Such a group cannot lose or gain a replica. When the set of replicas changes, all workers leave it (ReplicaDied if
    they cannot), and the next sync builds a new one. verl's ``rebuild_group=true`` builds one for each sync, which is
    slower.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any], *_: Any) -> None:
        super().__init__(config, actor_wg, replicas)
        self._rebuilds = bool((config.engine_kwargs.get(self.backend) or {}).get("rebuild_group"))
        self._members: list[Any] = []  # replicas in the group, in the order of their ranks

    def update_weights(self, global_steps: int | None = None) -> Any:
        if not self._rebuilds and self._members and self._members != self.replicas:
            self._leave()
        self._members = list(self.replicas)
        return super().update_weights(global_steps)

    def _leave(self) -> None:
        """Have the actor and all live members leave the group, as verl's engine does with ``rebuild_group``."""
        for method, *arguments in (
            ("__setattr__", "rebuild_group", True),
            ("finalize",),
            ("__setattr__", "rebuild_group", False),
        ):
            ranks = self.actor_wg.world_size
            actor_calls = list(
                self.actor_wg.execute_checkpoint_engine(*([value] * ranks for value in (method, *arguments)))
            )
            workers = [worker for replica in self._members for worker in replica.workers]
            member_calls = [worker.execute_checkpoint_engine.remote(method, *arguments) for worker in workers]
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
