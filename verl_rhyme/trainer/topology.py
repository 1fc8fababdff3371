"""Placement of engines and training: which engines serve, and which stop for a training step.

A topology decides nothing; the coordinator does.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Protocol

from ray.exceptions import ActorUnavailableError

from verl_rhyme.coordinator.replicas import SpareReplicas, readmit
from verl_rhyme.processes.deaths import ReplicaDied, dead, is_death
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.weights.manager import RelayManager

#: Seconds between two checks of the replicas while the trainer waits.
_LOOK_S = 20.0
#: Deaths of replicas during one call to all of them that are tolerated.
_DEATHS = 3


class Topology(Protocol):
    """Interface between the pipeline and its engines."""

    #: Whether engines are separate (disaggregated), and run while the actor trains (``Rules.separate``).
    separate: bool

    def begin(self, rules: Rules) -> None:
        """Prepare for training under these rules."""
        ...

    def servers(self) -> Any:
        """Return verl's manager of the engines that generate for training."""
        ...

    def resting(self) -> list[Any]:
        """Return the resting replicas."""
        ...

    def stop(self) -> None:
        """Interrupt running requests, and reject new ones."""
        ...

    def resume(self) -> None:
        """Undo :meth:`stop`; the policy is unchanged."""
        ...

    def give_way(self) -> None:
        """Free the devices for the actor, which is about to train."""
        ...

    def settle(self) -> None:
        """Give all engines the newest weights now."""
        ...

    def mend(self, version: int, waits: bool = True) -> int:
        """Replace dead replicas; the actor does not train, and has the weights of the policy ``version``.

        Args:
            version: Policy version of the actor's weights.
            waits: Whether to wait for the replicas' answers; else use answers since the last check.

        Returns:
            Number of replicas that had died.

        Raises:
            ReplicaDied: They cannot be replaced.
        """
        ...


class _OnVerl:
    """Engines that a checkpoint manager of verl syncs, stops and resumes."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def _engines(self) -> Any:
        raise NotImplementedError

    @property
    def _hung_s(self) -> float | None:
        """Seconds without an answer after which a replica counts as dead."""
        rhyme = self._trainer._rhyme
        return None if rhyme is None else rhyme.scheduling.lost_after

    def begin(self, rules: Rules) -> None:
        pass

    def settle(self) -> None:
        pass

    def resting(self) -> list[Any]:
        return []

    def stop(self) -> None:
        # Reject, not only hold: a held attempt would delay the step, or continue under the next policy.
        self._engines.abort_replicas(reject_request=True)

    def resume(self) -> None:
        self._engines.resume_generation_replicas()


class Colocated(_OnVerl):
    """Engines and actor alternate on the same devices: stop, sleep, train, sync, resume."""

    separate = False

    @property
    def _engines(self) -> Any:
        return self._trainer.checkpoint_manager

    def servers(self) -> Any:
        return self._trainer.llm_server_manager

    def give_way(self) -> None:
        self._engines.sleep_replicas()

    def mend(self, version: int, waits: bool = True) -> int:
        gone = dead(self.servers().get_replicas(), self._hung_s)
        if gone:
            replica, why = next(iter(gone.items()))
            raise ReplicaDied(
                f"rollout replica {replica.replica_rank} died on the devices of the actor: {why}\nThe same command "
                "continues from the last checkpoint."
            )
        readmit(self.servers())
        return 0


class Separate(_OnVerl):
    """Separate (disaggregated) engines, which run while the actor trains; the weight sync interrupts requests."""

    separate = True

    @property
    def _engines(self) -> Any:
        return self._trainer.standalone_checkpoint_manager

    def servers(self) -> Any:
        return self._trainer.standalone_server_manager

    def begin(self, rules: Rules) -> None:
        if rules.one_by_one:
            self._engines.waits, self._engines.patient = False, rules.finishes

    def resting(self) -> list[Any]:
        spares: SpareReplicas | None = vars(self).get("spares")  # set once the weights' manager exists
        return [] if spares is None else list(spares.resting)

    def settle(self) -> None:
        if isinstance(self._engines, RelayManager):
            self._over_deaths(self._engines.settle)

    def stop(self) -> None:
        self._over_deaths(super().stop)

    def resume(self) -> None:
        self._over_deaths(super().resume)

    def _over_deaths(self, call: Callable[[], None]) -> None:
        """Call all replicas. On failure, replace dead ones first, or wait out broken connections, and try again."""
        for _ in range(_DEATHS):
            try:
                return call()
            except Exception as error:
                broken = isinstance(error, ActorUnavailableError)
                if not (broken or is_death(error)):
                    raise
                if not self.mend(self._trainer.global_steps - 1) and not broken:
                    raise
        call()

    def give_way(self) -> None:
        pass

    def mend(self, version: int, waits: bool = True) -> int:
        if self._trainer.current_mode.value == "rollout":
            # Engines on the actor's devices serve as well, so that there is no memory to send weights from.
            return Colocated(self._trainer).mend(version)
        died = self.spares.replace_dead(version, waits)
        if isinstance(self._engines, RelayManager):
            self._engines.check()
        return died

    @functools.cached_property
    def spares(self) -> SpareReplicas:
        """Object that replaces replicas and lets them rest."""
        return SpareReplicas(self.servers(), self._engines, self._hung_s)


def mend_while_waiting(trainer: Any, buffer: Any, mend: Callable[[int], object]) -> None:
    """Call ``mend`` at intervals while a trainer waits for samples; verl's loop has no hook for that.

    Args:
        trainer: verl's trainer.
        buffer: Replay buffer of the trainer.
        mend: Function that gets the policy version of the engines.
    """
    wait = buffer._wait_for_next_poll
    looked = time.monotonic()

    def mended(partition_id: str, *args: Any) -> Any:
        nonlocal looked
        # In a step of several mini-batches the actor's weights differ from the engines'.
        if time.monotonic() - looked > _LOOK_S and (partition_id == "val" or not trainer.local_trigger_step):
            # Training waits before it publishes its policy, validation after.
            mend(trainer.global_steps - (partition_id != "val"))
            looked = time.monotonic()
        return wait(partition_id, *args)

    buffer._wait_for_next_poll = mended
