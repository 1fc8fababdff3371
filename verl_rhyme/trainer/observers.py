"""Observers of a run, which do not affect what is trained: history, event log, length ranker, balance.

The trainer holds them in one list and calls each at the same points of a step. Recorder and ranker handle their own
failures: a counter, one warning, and the step continues.
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
        last: Whether no step follows.
        replicas: Number of replicas that generate.
        wait_s: Seconds for which the trainer waited for the batch.
        reply: The pipeline's update batch; ``None`` in verl's trainers.
    """

    number: int
    seconds: float
    rollout_s: float
    last: bool = False
    replicas: int = 0
    wait_s: float = 0.0
    reply: Reply | None = None


class Observer:
    """Base class whose methods do nothing; subclasses override the ones they need."""

    def begin(self, driver: Driver) -> None:
        """Called when the coordinator is open and no step has begun."""

    def on_prompts(self, prompts: Mapping[str, Any]) -> None:
        """Called with messages by prompt key, before their prompts are passed to the coordinator."""

    def on_batch(self, batch: KVBatchMeta, reply: Reply, step: int, epoch: int) -> None:
        """Called when an update batch is collected and its rewards are known, before it trains.

        Args:
            batch: Keys and tags of the batch, which verl pads and reorders later.
            reply: The coordinator's report of the batch.
            step: Number of the step, from 1.
            epoch: Number of the epoch, from 0.
        """

    def on_step(self, step: Step) -> Mapping[str, float]:
        """Called when a step has ended and its policy is published; returns metrics of it."""
        return {}

    def save(self, folder: str) -> None:
        """Called to write to a checkpoint's folder, before verl marks it as the latest."""

    def load(self, folder: str) -> None:
        """Called when the run resumes from the checkpoint in this folder."""

    def close(self) -> None:
        """Called when the run ends."""
