"""Where engines and training live: who serves, what stops at a harvest, and for how long.

A topology decides nothing; the coordinator does.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Protocol

from ray.exceptions import ActorUnavailableError

from verl_rhyme.coordinator.replicas import Spares, serve
from verl_rhyme.processes.deaths import ReplicaDied, dead, is_death
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.weights.manager import RelayManager

#: Seconds between two looks at the replicas while the trainer waits.
_LOOK_S = 20.0
#: How often replicas may die while all are told one thing.
_DEATHS = 3


class Topology(Protocol):
    """What the pipeline asks of it."""

    #: The engines have devices of their own, and run while the actor trains (``Rules.separate``).
    separate: bool

    def begin(self, rules: Rules) -> None:
        """Training is about to begin, by these rules."""
        ...

    def servers(self) -> Any:
        """verl's manager of the engines that generate for training."""
        ...

    def resting(self) -> list[Any]:
        """Replicas that do not serve for a while."""
        ...

    def stop(self) -> None:
        """Interrupt what runs, and refuse what comes."""
        ...

    def resume(self) -> None:
        """Undo :meth:`stop`, under the same policy."""
        ...

    def give_way(self) -> None:
        """The actor is about to train."""
        ...

    def settle(self) -> None:
        """All engines are to have the newest weights now."""
        ...

    def mend(self, version: int, waits: bool = True) -> int:
        """Replace replicas that died; the actor does not train, and has the weights of the policy ``version``.

        Args:
            version: See above.
            waits: For replicas to answer whether they live; else by what they answered since the last look.

        Returns:
            How many had died.

        Raises:
            ReplicaDied: That cannot be done here.
        """
        ...


class _OnVerl:
    """Engines that one of verl's checkpoint managers syncs, stops and resumes."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def _engines(self) -> Any:
        raise NotImplementedError

    @property
    def _hung_s(self) -> float | None:
        """Seconds without an answer after which a replica is taken for dead."""
        rhyme = self._trainer._rhyme
        return None if rhyme is None else rhyme.scheduling.lost_after

    def begin(self, rules: Rules) -> None:
        pass

    def settle(self) -> None:
        pass

    def resting(self) -> list[Any]:
        return []

    def stop(self) -> None:
        # Not the gate alone: an attempt that waits there would hold up the step, or be let in under the next policy.
        self._engines.abort_replicas(reject_request=True)

    def resume(self) -> None:
        self._engines.resume_generation_replicas()


class Colocated(_OnVerl):
    """Engines and actor take turns on the same devices: stop, sleep, train, sync, on."""

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
                f"rollout replica {replica.replica_rank} died, on the devices of the actor: {why}\nThe same command "
                "goes on from the last checkpoint."
            )
        serve(self.servers())
        return 0


class Separate(_OnVerl):
    """Engines have devices of their own, and run while the actor trains; the weight sync interrupts what runs."""

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
        spares: Spares | None = vars(self).get("spares")  # made when the weights' manager is
        return [] if spares is None else list(spares.resting)

    def settle(self) -> None:
        if isinstance(self._engines, RelayManager):
            self._over_deaths(self._engines.settle)

    def stop(self) -> None:
        self._over_deaths(super().stop)

    def resume(self) -> None:
        self._over_deaths(super().resume)

    def _over_deaths(self, tell: Callable[[], None]) -> None:
        """Tell all replicas; those that died since the last look are replaced first, broken connections waited for."""
        for _ in range(_DEATHS):
            try:
                return tell()
            except Exception as error:
                broken = isinstance(error, ActorUnavailableError)
                if not (broken or is_death(error)):
                    raise
                if not self.mend(self._trainer.global_steps - 1) and not broken:
                    raise
        tell()

    def give_way(self) -> None:
        pass

    def mend(self, version: int, waits: bool = True) -> int:
        if self._trainer.current_mode.value == "rollout":
            # Engines on the actor's devices serve as well: there is no room to send weights from.
            return Colocated(self._trainer).mend(version)
        died = self.spares.mend(version, waits)
        if isinstance(self._engines, RelayManager):
            self._engines.check()
        return died

    @functools.cached_property
    def spares(self) -> Spares:
        """Who replaces replicas, and lets them rest."""
        return Spares(self.servers(), self._engines, self._hung_s)


def mend_while_waiting(trainer: Any, buffer: Any, mend: Callable[[int], object]) -> None:
    """Call ``mend`` now and then while a trainer waits for samples; verl's loop there has no other place for it.

    Args:
        trainer: verl's.
        buffer: Its replay buffer.
        mend: Is given the policy version that the engines run under.
    """
    wait = buffer._wait_for_next_poll
    looked = time.monotonic()

    def mended(partition_id: str, *args: Any) -> Any:
        nonlocal looked
        # Within a step of several updates the actor has other weights than the engines.
        if time.monotonic() - looked > _LOOK_S and (partition_id == "val" or not trainer.local_trigger_step):
            # A step waits before it publishes its policy, validation afterwards.
            mend(trainer.global_steps - (partition_id != "val"))
            looked = time.monotonic()
        return wait(partition_id, *args)

    buffer._wait_for_next_poll = mended
