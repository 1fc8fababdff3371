"""A checkpoint engine for ``separate_async`` on one machine: full weights through one file in shared memory.

verl's own engines for a separate rollout pool need NCCL, NIXL or RDMA. This one needs gloo only:
``rollout.checkpoint_engine.backend=shm``.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine

_FOLDER = Path("/dev/shm")
_PREFIX = "verl_rhyme_weights_"
_TIMEOUT_S = 600.0


class ShmCheckpointEngine(CheckpointEngine):
    """Rank 0 of the actor writes a safetensors file, every rollout worker reads it, rank 0 removes it."""

    def __init__(self, bucket_size: int, is_master: bool = False, **_: Any) -> None:
        self.is_master = is_master
        self.path: Path | None = None
        self._lock: Path | None = None

    def prepare(self) -> dict[str, Any]:
        if not self.is_master:
            return {}
        while self._lock is None or not self._lock.exists():  # a cleaner may find it before it is locked
            self._lock = _FOLDER / f"{_PREFIX}{uuid.uuid4().hex}.lock"
            _try_lock(self._lock, os.O_CREAT)  # held until this process ends
        _remove_leftovers()
        return {"path": str(self._lock.with_name(f"{self._lock.stem}_{time.monotonic_ns()}.safetensors"))}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        path = metadata[0]["path"]
        return {"path": [path] * actor_wg_world_size}, {"path": [path] * rollout_world_size}

    def init_process_group(self, path: str) -> None:
        self.path = Path(path)

    def finalize(self) -> None:
        if self.is_master and self.path is not None:
            self.path.unlink(missing_ok=True)
        self.path = None

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        from safetensors.torch import save_file
        from verl.workers.rollout.utils import ensure_async_iterator

        assert self.path is not None
        tensors = {}
        async for name, weight in ensure_async_iterator(weights):  # every rank drains it: gathering is collective
            if self.is_master:
                tensors[name] = weight.detach().to("cpu", copy=True).contiguous()
        if self.is_master:
            partial = self.path.with_suffix(".partial")
            save_file(tensors, partial)
            partial.rename(self.path)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        from safetensors import safe_open

        assert self.path is not None
        deadline = time.monotonic() + _TIMEOUT_S
        while not self.path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no weights at {self.path} after {_TIMEOUT_S:.0f} s: is the actor worker alive?")
            await asyncio.sleep(0.02)
        with safe_open(self.path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                yield name, tensors.get_tensor(name)


def _try_lock(file: Path, flags: int = 0) -> int:
    """The kernel's lock on a file, in whichever container its holder lives; -1 where a live process has it."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return -1
    return descriptor


def _remove_leftovers() -> None:
    """Files of actors that were killed in the middle of a transfer."""
    for lock in _FOLDER.glob(f"{_PREFIX}*.lock"):
        descriptor = _try_lock(lock)
        if descriptor >= 0:
            for path in _FOLDER.glob(f"{lock.stem}*"):
                path.unlink(missing_ok=True)
            os.close(descriptor)


def register() -> None:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    CheckpointEngineRegistry.register("shm")(ShmCheckpointEngine)
