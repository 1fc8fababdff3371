"""Observers of a run, which do not affect what is trained: history, event log, length ranker, number of replicas. The
trainer calls each at the same points of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transfer_queue import KVBatchMeta

from verl_rhyme.processes.messages import Handover, Reply
from verl_rhyme.trainer.driver import Driver


@dataclass(frozen=True)
class Step:
    """A step that ended. Only the pipeline sets the fields with a default."""

    number: int  # from 1
    seconds: float
    rollout_s: float  # of the stage that lasts as long as the rollout
    last: bool = False
    replicas: int = 0  # that generate
    wait_s: float = 0.0  # seconds for which the trainer waited for the batch
    reply: Reply | None = None


class Observer:
    """Base class whose methods do nothing; subclasses override the ones they need."""

    def on_train_begin(self, driver: Driver) -> None:
        """The coordinator is open, and no step has begun."""

    def on_prompts(self, prompts: Mapping[str, Any]) -> None:
        """Messages by prompt key, before their prompts are passed to the coordinator."""

    def on_untrained(self, handover: Handover, step: int, epoch: int) -> None:
        """What will not be trained leaves the rollout: with a batch, or while a step waits for one."""

    def on_batch(self, batch: KVBatchMeta, step: int, epoch: int) -> None:
        """An update batch with its rewards, before verl pads and reorders it. Epochs count from 0."""

    def on_step(self, step: Step) -> Mapping[str, float]:
        """A step has ended, and its policy is published; returns metrics of it."""
        return {}

    def save(self, folder: str) -> None:
        """Write to a checkpoint's folder, before verl marks the checkpoint as the latest."""

    def load(self, folder: str) -> None:
        """The run resumes from the checkpoint in this folder."""

    def close(self) -> None:
        """The run ends."""
