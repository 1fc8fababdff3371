"""Registers this package's trainers in verl's registry, under verl's names: no new trainer mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from verl_rhyme.agent_loop.client import rhymed
from verl_rhyme.checks import startup
from verl_rhyme.config import config_tree
from verl_rhyme.trainer.base import RhymeTrainerMixin, continue_metrics
from verl_rhyme.trainer.pipeline import RhymePipelineColocated, RhymePipelineSeparate
from verl_rhyme.trainer.topology import Colocated, Separate, Topology, check_while_waiting


class _VerlsSchedule(RhymeTrainerMixin):
    """Recording and drafts around one of verl's schedules; with rhyme disabled it equals verl's trainer."""

    topology_class: type[Topology] = Colocated

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self._topology = self.topology_class(self)
        # A user's own sampler waits in its own way; there a request without a replica fails, as in verl.
        self._replaces_dead = self._rhyme is not None and type(self.replay_buffer) in (ReplayBuffer, ReplayBufferAsync)
        if self._replaces_dead:
            check_while_waiting(self, self.replay_buffer, self._topology.replace_dead)

    def get_llm_client(self) -> Any:
        client = super().get_llm_client()
        return rhymed(client, patient=True) if self._replaces_dead else client


class RhymeTrainerSync(_VerlsSchedule, PPOTrainerSync):
    pass


class RhymeTrainerColocateAsync(_VerlsSchedule, PPOTrainerColocateAsync):
    pass


class RhymeTrainerSeparateAsync(_VerlsSchedule, PPOTrainerSeparateAsync):
    topology_class = Separate

    def on_step_end(self) -> None:
        if self._rhyme is not None:
            self._topology.replace_dead(self.global_steps)
        super().on_step_end()


def _chosen(stock: type, schedule: type, pipeline: type) -> Callable[[DictConfig], Any]:
    """Return the function that verl calls in place of a trainer's class."""

    def trainer(config: DictConfig) -> Any:
        if config_tree.is_used(config):
            startup.begin(config)
        rhyme = config_tree.from_verl(config)
        if rhyme is None:
            continue_metrics(config)
        chosen = stock if rhyme is None else pipeline if rhyme.pipeline else schedule
        return chosen(config)

    return trainer


#: Trainers by ``trainer.v1.trainer_mode``: verl's class with rhyme disabled, the pipeline with a ``max_staleness``.
TRAINERS = {
    "sync": _chosen(PPOTrainerSync, RhymeTrainerSync, RhymePipelineColocated),
    "colocate_async": _chosen(PPOTrainerColocateAsync, RhymeTrainerColocateAsync, RhymePipelineColocated),
    "separate_async": _chosen(PPOTrainerSeparateAsync, RhymeTrainerSeparateAsync, RhymePipelineSeparate),
}


def register() -> None:
    TRAINER_REGISTRY.update(TRAINERS)
