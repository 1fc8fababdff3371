"""vLLM's offloading of KV blocks to host memory, for an engine that runs on a CPU."""

from collections import deque

import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.worker.worker import OffloadingHandler, TransferResult

#: Steps after which a copy is made: as late as a device may make it.
LATE = 3


class HostCopies(CPUOffloadingSpec):
    """All of vLLM's own but the copies, which need CUDA's streams."""

    def get_handlers(self, kv_caches):
        device = [cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes) for cache in kv_caches.tensors]
        host = [torch.full((self.num_blocks, cache.shape[1]), 127, dtype=torch.int8) for cache in device]
        self.stores, self.loads = LateCopies(device, host), LateCopies(host, device)
        yield GPULoadStoreSpec, CPULoadStoreSpec, self.stores
        yield CPULoadStoreSpec, GPULoadStoreSpec, self.loads


class LateCopies(OffloadingHandler):
    def __init__(self, sources, targets):
        self.pairs = list(zip(sources, targets, strict=True))
        self.waiting = deque()
        self._copied = []
        self.blocks = 0  # that were copied

    def transfer_async(self, job_id, spec):
        self.waiting.append([LATE, job_id, *(each.block_ids for each in spec)])
        return True

    def _copy(self):
        _, job, read, written = self.waiting.popleft()
        for source, target in self.pairs:
            target[written] = source[read]
        self.blocks += len(read)
        self._copied.append(TransferResult(job, True))

    def get_finished(self):
        for each in self.waiting:
            each[0] -= 1
        while self.waiting and self.waiting[0][0] <= 0:
            self._copy()
        copied, self._copied = self._copied, []
        return copied

    def wait(self, job_ids):
        while any(job in job_ids for _, job, *_ in self.waiting):
            self._copy()
