"""verl's checkpoint engine of the relay: the actor writes a version to its node, workers of replicas read it there."""

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
from verl_rhyme.weights.folder import Folder
from verl_rhyme.weights.writer import PART_BYTES, Writer

#: Seconds for which a worker waits for a version to arrive on its node.
_TIMEOUT_S = 600.0
_PAUSE_S = 0.02
#: Matrices that engines may hold in float32 whatever their dtype: expert routers, scales of quantised matrices.
_WIDE = re.compile(r"(^|\.)(gate|router)(\.|$)|_scale")


def narrow(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Cast a tensor to the engine's ``dtype`` before the transfer, as the engine would on load.

    FSDP holds float32. The engine would drop half of its bytes, and these make versions differ in nearly every word.
    Vectors (norms, biases), routers and scales are small, and engines may hold them wider: they stay as they are.
    """
    wide = dtype is not None and tensor.is_floating_point() and tensor.element_size() > dtype.itemsize
    return tensor.to(dtype) if wide and tensor.ndim > 1 and not _WIDE.search(name) else tensor


class RelayCheckpointEngine(CheckpointEngine):
    """Checkpoint engine of one verl worker; :class:`~verl_rhyme.weights.manager.RelayManager` sends it its folder.

    ``bucket_size`` are the bytes that a worker passes to its engine at a time, and the largest part's. ``is_master``:
    the actor's rank 0, which writes.
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
            f"actor_rollout_ref.rollout.checkpoint_engine.backend={BACKEND} needs a trainer of verl-rhyme: add "
            "+rhyme=PRESET and leave actor_rollout_ref.rollout.custom.rhyme.enable=true"
        )

    def init_process_group(self, path: str, dtype: str | None = None) -> None:
        self._folder = Folder(path)
        self._dtype = None if dtype is None else getattr(torch, dtype)

    def finalize(self) -> None:
        pass

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        from verl.workers.rollout.utils import ensure_async_iterator

        assert self._folder is not None
        assert global_steps is not None
        writer = Writer(self._folder, global_steps, self._part_bytes) if self.is_master else None
        async for name, weight in ensure_async_iterator(weights):  # on every rank: gathering is collective
            if writer is not None:
                writer.add(name, narrow(name, weight, self._dtype))
        if writer is not None:
            writer.close()

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        assert self._folder is not None
        assert global_steps is not None
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._folder.has(global_steps):  # nodes of one replica receive it at different times
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"weights of version {global_steps} did not arrive in {self._folder.path} within {_TIMEOUT_S:.0f} s"
                )
            await asyncio.sleep(_PAUSE_S)
        for name, weight in self._folder.read(global_steps):
            # verl passes a tensor larger than its bucket by a device memory handle, which a mapped file has not
            yield name, weight.to(_device()) if weight.nbytes > self._bucket else weight


def _device() -> str:
    return "cpu" if get_device_name() == "cpu" else f"{get_device_name()}:{get_device_id()}"


def register() -> None:
    CheckpointEngineRegistry.register(BACKEND)(RelayCheckpointEngine)
