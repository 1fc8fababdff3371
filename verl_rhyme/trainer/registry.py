"""Our trainers in verl's own registry: verl's with the rhyme base under verl's names, and modes of our own.

Under verl's names, because verl gives any mode but ``sync`` the asynchronous semantics.
"""

from __future__ import annotations

from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from verl_rhyme.trainer.base import RhymeTrainerMixin
from verl_rhyme.trainer.sorted import RhymeTrainerSorted


class RhymeTrainerSync(RhymeTrainerMixin, PPOTrainerSync):
    """``trainer.v1.trainer_mode=sync``"""


class RhymeTrainerColocateAsync(RhymeTrainerMixin, PPOTrainerColocateAsync):
    """``trainer.v1.trainer_mode=colocate_async``"""


class RhymeTrainerSeparateAsync(RhymeTrainerMixin, PPOTrainerSeparateAsync):
    """``trainer.v1.trainer_mode=separate_async``"""


TRAINERS = {
    "sync": RhymeTrainerSync,
    "colocate_async": RhymeTrainerColocateAsync,
    "separate_async": RhymeTrainerSeparateAsync,
    "rhyme_sorted": RhymeTrainerSorted,
}


def register() -> None:
    TRAINER_REGISTRY.update(TRAINERS)
