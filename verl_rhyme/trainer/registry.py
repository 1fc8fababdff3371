"""Our trainers in verl's own registry: verl's with the rhyme base under verl's names, and modes of our own.

Under verl's names, because verl gives any mode but ``sync`` the asynchronous semantics.
"""

from __future__ import annotations

import functools
from typing import Any

from omegaconf import DictConfig
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from verl_rhyme import config_tree
from verl_rhyme.trainer.base import RhymeTrainerMixin
from verl_rhyme.trainer.pipeline import RhymePipelineColocated, RhymePipelineSeparate
from verl_rhyme.trainer.topology import Separate


class _InVerlsPlace(RhymeTrainerMixin):
    """Under verl's names nobody asked for rhyme: without it, these yield verl's own class.

    With rules of our own (``sorting.mode``) they yield the pipeline on their topology.
    """

    pipeline: Any = None

    def __new__(cls, config: DictConfig) -> Any:
        if cls in TRAINERS.values():
            rhyme = config_tree.from_verl(config)
            # no instance of cls: Python calls no second __init__
            if rhyme is None:
                stock: Any = next(base for base in cls.__mro__ if not issubclass(base, RhymeTrainerMixin))
                return stock(config)
            if rhyme.sorting.mode is not None and cls.pipeline is not None:
                return cls.pipeline(config)
        return super().__new__(cls)


class RhymeTrainerSync(_InVerlsPlace, PPOTrainerSync):
    """``trainer.v1.trainer_mode=sync``"""


class RhymeTrainerColocateAsync(_InVerlsPlace, PPOTrainerColocateAsync):
    """``trainer.v1.trainer_mode=colocate_async``"""

    pipeline = RhymePipelineColocated


class RhymeTrainerSeparateAsync(_InVerlsPlace, PPOTrainerSeparateAsync):
    """``trainer.v1.trainer_mode=separate_async``"""

    pipeline = RhymePipelineSeparate

    @functools.cached_property
    def _topology(self) -> Separate:
        return Separate(self)

    def on_step_end(self) -> None:
        if self._rhyme is not None:
            self._topology.mend(self.global_steps)
        super().on_step_end()


TRAINERS = {
    "sync": RhymeTrainerSync,
    "colocate_async": RhymeTrainerColocateAsync,
    "separate_async": RhymeTrainerSeparateAsync,
    "rhyme_sorted": RhymePipelineColocated,
}


def register() -> None:
    TRAINER_REGISTRY.update(TRAINERS)
