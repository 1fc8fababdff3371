"""verl's trainers with the rhyme base, in verl's own registry and under verl's own names.

Under their own names, because verl gives any mode but ``sync`` the asynchronous semantics.
"""

from __future__ import annotations

from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from verl_rhyme.trainer.base import RhymeTrainerMixin


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
}


def register() -> None:
    TRAINER_REGISTRY.update(TRAINERS)
