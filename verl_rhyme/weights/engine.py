"""The two ends of the relay in verl: the actor writes a version to its node, the workers of a replica read it there."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_id, get_device_name

from verl_rhyme.weights import BACKEND
from verl_rhyme.weights.folder import PART_BYTES, Folder

#: Seconds for which a worker waits for a version that another node's relay was told to have.
_TIMEOUT_S = 600.0
_PAUSE_S = 0.02
#: Matrices that engines may hold in float32 whatever they compute in: routers of experts, scales of quantised ones.
_WIDE = re.compile(r"(^|\.)(gate|router)(\.|$)|_scale")


def narrowed(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """What an engine that computes in ``dtype`` makes of a tensor when it loads it, made before it travels.

    FSDP holds float32: half of the bytes, and all that makes one version unlike the next in nearly every word, would
    be dropped on arrival. Vectors (norms, biases), routers and scales are small, and may be held wider: they go as they
    are.
    """
    wide = dtype is not None and tensor.is_floating_point() and tensor.element_size() > dtype.itemsize
    return tensor.to(dtype) if wide and tensor.ndim > 1 and not _WIDE.search(name) else tensor


class RelayCheckpointEngine(CheckpointEngine):
    """verl's workers have one each; :class:`~verl_rhyme.weights.manager.RelayManager` tells them their folder.

    Args:
        bucket_size: Bytes that a worker hands to its engine at a time; a part has no more, but for larger tensors.
        is_master: The actor's rank 0, which writes.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **_: Any) -> None:
        self.is_master = is_master
        self._bucket, self._part_bytes = bucket_size, min(bucket_size, PART_BYTES)
        self._folder: Folder | None = None
        self._dtype: torch.dtype | None = None

    def prepare(self) -> dict[str, Any]:
        return {"node": ray.get_runtime_context().get_node_id()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        raise NotImplementedError(
            f"checkpoint_engine.backend={BACKEND} needs a trainer of verl-rhyme: +rhyme=..., with enable=true"
        )

    def init_process_group(self, path: str, dtype: str | None = None) -> None:
        """Where the node's weights lie and, to the actor, the type that matrices are written in (:func:`narrowed`)."""
        self._folder = Folder(path)
        self._dtype = None if dtype is None else getattr(torch, dtype)

    def finalize(self) -> None:
        pass

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        from verl.workers.rollout.utils import ensure_async_iterator

        assert self._folder is not None
        assert global_steps is not None
        writer = self._folder.writer(global_steps, self._part_bytes) if self.is_master else None
        async for name, weight in ensure_async_iterator(weights):  # every rank drains it: gathering is collective
            if writer is not None:
                writer.add(name, narrowed(name, weight, self._dtype))
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
            # verl hands one that is larger than its bucket to the engine as it is, by a handle that only devices have
            yield name, weight.to(_device()) if weight.nbytes > self._bucket else weight


def _device() -> str:
    return "cpu" if get_device_name() == "cpu" else f"{get_device_name()}:{get_device_id()}"


def register() -> None:
    CheckpointEngineRegistry.register(BACKEND)(RelayCheckpointEngine)
