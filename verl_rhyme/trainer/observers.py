"""What follows a run and decides nothing about what is trained: history, event log, length ranker, balance.

The trainer holds them in one list and calls each at the same points of a step. Recorder and ranker handle their own
failures: a counter and one warning, and the step goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transfer_queue import KVBatchMeta

from verl_rhyme.processes.messages import Reply
from verl_rhyme.trainer.driver import Driver


@dataclass(frozen=True)
class Step:
    """A step that ended.

    Attributes:
        number: Its number, from 1.
        seconds: Its duration.
        rollout_s: Seconds of the stage that lasts as long as its rollout.
        last: No step follows.
        replicas: Number of replicas that generate.
        waited: Seconds for which the trainer waited for the batch.
        reply: The pipeline's update batch; ``None`` in verl's own trainers.
    """

    number: int
    seconds: float
    rollout_s: float
    last: bool = False
    replicas: int = 0
    waited: float = 0.0
    reply: Reply | None = None


class Observer:
    """Overrides the points it needs; the others do nothing."""

    def begin(self, driver: Driver) -> None:
        """The coordinator is open, and no step has begun."""

    def on_prompts(self, prompts: Mapping[str, Any], driver: Driver) -> None:
        """Prompts are about to be handed to the coordinator.

        Args:
            prompts: Messages by prompt key.
            driver: The coordinator's.
        """

    def on_batch(self, batch: KVBatchMeta, reply: Reply, step: int, epoch: int) -> None:
        """An update batch is collected, its rewards are known, and its training begins.

        Args:
            batch: Its keys and tags, which verl pads and reorders later.
            reply: What the coordinator reported with it.
            step: Number of the step, from 1.
            epoch: Number of the epoch, from 0.
        """

    def on_step(self, step: Step) -> Mapping[str, float]:
        """A step ended, and its policy is published; returns metrics of it."""
        return {}

    def save(self, folder: str) -> None:
        """A checkpoint is written to this folder; verl names it the latest afterwards."""

    def load(self, folder: str) -> None:
        """The run resumes from the checkpoint in this folder."""

    def close(self) -> None:
        """The run ends."""
