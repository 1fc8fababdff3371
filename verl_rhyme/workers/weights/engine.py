"""The two ends of the relay in verl: the actor writes a version to its node, the workers of a replica read it there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from verl_rhyme.workers.weights import BACKEND
from verl_rhyme.workers.weights.folder import PART_BYTES, Folder

#: Seconds for which a worker waits for a version that another node's relay was told to have.
_TIMEOUT_S = 600.0
_PAUSE_S = 0.02


class RelayCheckpointEngine(CheckpointEngine):
    """verl's workers have one each; :class:`~verl_rhyme.workers.weights.manager.RelayManager` tells them their folder.

    Args:
        bucket_size: Bytes of a part at most, but for larger tensors.
        is_master: The actor's rank 0, which writes.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **_: Any) -> None:
        self.is_master = is_master
        self._part_bytes = min(bucket_size, PART_BYTES)
        self._folder: Folder | None = None

    def prepare(self) -> dict[str, Any]:
        return {"node": ray.get_runtime_context().get_node_id()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        raise NotImplementedError(
            f"checkpoint_engine.backend={BACKEND} needs a trainer of verl-rhyme: +rhyme=..., with enable=true"
        )

    def init_process_group(self, path: str) -> None:
        self._folder = Folder(path)

    def finalize(self) -> None:
        pass

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        from verl.workers.rollout.utils import ensure_async_iterator

        assert self._folder is not None
        assert global_steps is not None
        writer = self._folder.writer(global_steps, self._part_bytes) if self.is_master else None
        async for name, weight in ensure_async_iterator(weights):  # every rank drains it: gathering is collective
            if writer is not None:
                writer.add(name, weight)
        if writer is not None:
            writer.close()

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        assert self._folder is not None
        assert global_steps is not None
        deadline = time.monotonic() + _TIMEOUT_S
        while global_steps not in self._folder.versions():  # a replica of several nodes: one may have it before others
            if time.monotonic() > deadline:
                raise TimeoutError(f"no weights {global_steps} in {self._folder.path} after {_TIMEOUT_S:.0f} s")
            await asyncio.sleep(_PAUSE_S)
        for name, weight in self._folder.read(global_steps):
            yield name, weight


def register() -> None:
    CheckpointEngineRegistry.register(BACKEND)(RelayCheckpointEngine)
