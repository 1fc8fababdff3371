"""Placement of engines and training: which engines serve, and which stop for a training step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from ray.exceptions import ActorUnavailableError

from verl_rhyme.processes.deaths import ReplicaDied, dead, is_death
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.trainer.replicas import SpareReplicas, readmit

#: Seconds between two checks of the replicas while the trainer waits.
_CHECK_S = 20.0
#: Deaths of replicas during one call to all of them that are tolerated.
_DEATHS = 3


class Topology:
    """Interface between a trainer of verl and its engines. It decides nothing; the coordinator does."""

    _engines: Any  # verl's checkpoint manager, which syncs, stops and resumes the engines
    _holds = False  # whether requests wait while engines are stopped; else they are rejected

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def _lost_after(self) -> float:
        return self._trainer._rhyme.scheduling.lost_after

    def prepare(self, rules: Rules) -> None:
        """Prepare for training under these rules."""
        self._holds = rules.continues

    def idle_replicas(self) -> list[Any]:
        """Return the replicas that are launched and do not serve."""
        return []

    def stop(self) -> None:
        """Abort running requests. New ones wait for :meth:`resume` if samples may continue, else they are rejected."""
        self._engines.abort_replicas(reject_request=not self._holds)

    def resume(self) -> None:
        """Undo :meth:`stop`; the policy is unchanged."""
        self._engines.resume_generation_replicas()

    def free_devices(self) -> None:
        """Free the devices for the actor, which is about to train."""

    def sync_weights(self) -> None:
        """Give all engines the newest weights now."""

    def replace_dead(self, version: int, waits: bool = True) -> int:
        """Replace dead replicas; the actor, which has the weights of policy ``version``, must not train. Without
        ``waits``, use answers since the last check. Return the number of replicas that had died; raise
        :class:`ReplicaDied` if they cannot be replaced."""
        raise NotImplementedError


class Colocated(Topology):
    """Engines and actor alternate on the same devices: stop, sleep, train, sync, resume."""

    @property
    def _engines(self) -> Any:
        return self._trainer.checkpoint_manager

    def free_devices(self) -> None:
        self._engines.sleep_replicas()

    def replace_dead(self, version: int, waits: bool = True) -> int:
        servers = self._trainer.llm_server_manager
        gone = dead(servers.get_replicas(), self._lost_after)
        if gone:
            replica, why = next(iter(gone.items()))
            raise ReplicaDied(
                f"rollout replica {replica.replica_rank} died on the devices of the actor: {why}\nThe same command "
                "continues from the last checkpoint."
            )
        readmit(servers)
        return 0


class Separate(Topology):
    """Separate (disaggregated) engines, which run while the actor trains; the weight sync interrupts requests."""

    @property
    def _engines(self) -> Any:
        return self._trainer.standalone_checkpoint_manager

    @functools.cached_property
    def spares(self) -> SpareReplicas:
        return SpareReplicas(self._trainer.standalone_server_manager, self._engines, self._lost_after)

    def prepare(self, rules: Rules) -> None:
        super().prepare(rules)
        if rules.one_by_one:
            self._engines.waits, self._engines.patient = False, rules.finishes

    def idle_replicas(self) -> list[Any]:
        return list(self.spares.resting) if "spares" in vars(self) else []

    def sync_weights(self) -> None:
        self._over_deaths(self._engines.finish_deliveries)

    def stop(self) -> None:
        self._over_deaths(super().stop)

    def resume(self) -> None:
        self._over_deaths(super().resume)

    def _over_deaths(self, call: Callable[[], None]) -> None:
        """Call all replicas. If some died meanwhile, replace them, wait out broken connections, and try again."""
        for _ in range(_DEATHS):
            try:
                return call()
            except Exception as error:
                broken = isinstance(error, ActorUnavailableError)
                if not (broken or is_death(error)):
                    raise
                if not self.replace_dead(self._trainer.global_steps - 1) and not broken:
                    raise
        call()

    def replace_dead(self, version: int, waits: bool = True) -> int:
        if self._trainer.current_mode.value == "rollout":
            # Engines on the actor's devices serve as well, so that there is no memory to send weights from.
            return Colocated(self._trainer).replace_dead(version)
        died = self.spares.replace_dead(version, waits)
        self._engines.check()
        return died


def check_while_waiting(trainer: Any, buffer: Any, check: Callable[[int], object]) -> None:
    """Call ``check`` with the engines' policy version at intervals while a trainer of verl waits for samples in its
    replay buffer; verl's loop has no hook for that."""
    wait = buffer._wait_for_next_poll
    checked = time.monotonic()

    def wait_and_check(partition_id: str, *args: Any) -> Any:
        nonlocal checked
        # In a step of several mini-batches the actor's weights differ from the engines'.
        if time.monotonic() - checked > _CHECK_S and (partition_id == "val" or not trainer.local_trigger_step):
            # Training waits before it publishes its policy, validation after.
            check(trainer.global_steps - (partition_id != "val"))
            checked = time.monotonic()
        return wait(partition_id, *args)

    buffer._wait_for_next_poll = wait_and_check
