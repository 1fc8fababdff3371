"""Backends of weight transfer (``actor_rollout_ref.rollout.checkpoint_engine.backend``), and what each can do.

The classes are carriers (:mod:`verl_rhyme.weights.carrier`). A new backend is a line of :data:`BACKENDS`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    carrier: str = "broadcast:Broadcast"  # module of verl_rhyme.weights, and class
    one_by_one: bool = False  # each replica takes a version by itself, while others generate
    least: int = 0  # workers of engines that receive a version together, at least
    whole: str = ""  # why it cannot send a version to a single replica
    uncompared: str = ""  # why the weights of engines are not compared with the actor's

    def obstacle(self, workers: int | None = None) -> str:
        """Return why weights cannot be sent to a single replica of so many workers; empty if they can."""
        few = workers is not None and workers < self.least
        return f"it needs at least {self.least} workers of engines" if few else self.whole


BACKENDS = {
    "naive": Backend(),
    "nccl": Backend("broadcast:KeptGroup"),
    "nixl": Backend(least=2),
    "mooncake": Backend(),
    "kimi_ckpt_engine": Backend(whole="it keeps the process group of the first weight transfer"),
    "delta_sharded": Backend(
        whole="it sends only the changes since the last weight transfer",
        uncompared="the backend delta_sharded sends only what changed",
    ),
    "relay": Backend("manager:RelayManager", one_by_one=True),
}


def backend(name: str) -> Backend:
    """Return what a backend can do; one that a user registered can do what verl's manager does with it."""
    return BACKENDS.get(name, Backend())
