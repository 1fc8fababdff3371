"""Our trainers in verl's own registry, under verl's names: there is no trainer mode of ours to learn."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from verl_rhyme.agent_loop.client import rhymed
from verl_rhyme.config import config_tree
from verl_rhyme.trainer.base import RhymeTrainerMixin
from verl_rhyme.trainer.pipeline import RhymePipelineColocated, RhymePipelineSeparate
from verl_rhyme.trainer.topology import Colocated, Separate, Topology, mend_while_waiting


class _InVerlsPlace(RhymeTrainerMixin):
    """Under verl's names nobody asked for rhyme: without it, these yield verl's own class.

    With a ``max_staleness`` they yield the pipeline on their topology.
    """

    pipeline: Any = RhymePipelineColocated
    topology_class: Any = Colocated

    def __new__(cls, config: DictConfig) -> Any:
        if cls in TRAINERS.values():
            rhyme = config_tree.from_verl(config)
            # no instance of cls: Python calls no second __init__
            if rhyme is None:
                stock: Any = next(base for base in cls.__mro__ if not issubclass(base, RhymeTrainerMixin))
                return stock(config)
            if rhyme.pipeline:
                return cls.pipeline(config)
        return super().__new__(cls)

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        # A sampler of somebody's own waits in its own way; there a request that finds no replica fails, as in verl.
        self._mends = self._rhyme is not None and type(self.replay_buffer) in (ReplayBuffer, ReplayBufferAsync)
        self._topology: Topology = self.topology_class(self)
        if self._mends:
            mend_while_waiting(self, self.replay_buffer, self._topology.mend)

    def get_llm_client(self) -> Any:
        client = super().get_llm_client()
        return rhymed(client, patient=True) if self._mends else client


class RhymeTrainerSync(_InVerlsPlace, PPOTrainerSync):
    """``trainer.v1.trainer_mode=sync``"""


class RhymeTrainerColocateAsync(_InVerlsPlace, PPOTrainerColocateAsync):
    """``trainer.v1.trainer_mode=colocate_async``"""


class RhymeTrainerSeparateAsync(_InVerlsPlace, PPOTrainerSeparateAsync):
    """``trainer.v1.trainer_mode=separate_async``"""

    pipeline = RhymePipelineSeparate
    topology_class = Separate

    def on_step_end(self) -> None:
        if self._rhyme is not None:
            self._topology.mend(self.global_steps)
        super().on_step_end()


TRAINERS = {
    "sync": RhymeTrainerSync,
    "colocate_async": RhymeTrainerColocateAsync,
    "separate_async": RhymeTrainerSeparateAsync,
}


def register() -> None:
    TRAINER_REGISTRY.update(TRAINERS)
