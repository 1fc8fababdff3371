"""Drop the ``flush`` argument that verl's separate_async trainer passes to a logger."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from verl_rhyme.patches.core import Patch


class _DropsFlush(logging.LoggerAdapter):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs.pop("flush", None)
        return msg, kwargs


PATCH = Patch(
    name="verl_logger_flush",
    target="verl.trainer.ppo.v1.trainer_separate_async:logger",
    why="separate_async with actor_rollout_ref.hybrid_engine=False fails at start-up with verl's default log level: "
    "TypeError: Logger._log() got an unexpected keyword argument 'flush'",
    requires="verl==0.9.1",
    source_sha256="00ce4634779ad097aed167e30de1e876f2ff294c6b471dfe3fe55a910231476b",
    replace=lambda original: _DropsFlush(original, {}),
    guard="PPOTrainerSeparateAsync._setup",
)
