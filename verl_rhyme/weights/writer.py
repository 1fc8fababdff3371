"""Writer of a weight version: collects tensors into parts and writes these in the background."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

from verl_rhyme.weights.folder import Folder
from verl_rhyme.weights.transfer import CHUNK_BYTES, Part, digest

if TYPE_CHECKING:
    import torch

#: Maximum bytes of a part; a larger tensor has a part for itself.
PART_BYTES = 256 << 20
#: Parts written concurrently.
_WRITERS = 8


class Writer:
    """Writer of a version, which replaces any earlier one of the same number; :meth:`close` completes it.

    Each tensor is copied once, into a buffer that parts reuse, and written from there. A part holds tensors of one
    element size: safetensors has no padding for alignment.
    """

    def __init__(
        self, folder: Folder, version: int, part_bytes: int = PART_BYTES, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        folder.remove(version)
        self._folder, self._version = folder, version
        self._part_bytes, self._chunk_bytes = part_bytes, chunk_bytes
        self._open: dict[int, _OpenPart] = {}  # by element size
        self._buffers: list[torch.Tensor] = []  # free ones
        self._parts: list[Future[Part]] = []
        self._threads = ThreadPoolExecutor(_WRITERS, thread_name_prefix="weights")

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor to the CPU and add it to a part. Raises WeightsError if there is no room."""
        size = tensor.element_size()
        part = self._open.get(size)
        if part is not None and part.bytes + tensor.nbytes > len(part.buffer):
            self._write(self._open.pop(size))
            part = None
        if part is None:
            part = self._open[size] = _OpenPart(self._buffer(tensor))
        part.add(name, tensor)
        if part.bytes >= self._part_bytes:
            self._write(self._open.pop(size))

    def close(self) -> None:
        for size in list(self._open):
            self._write(self._open.pop(size))
        parts = [part.result() for part in self._parts]
        self._threads.shutdown()
        self._folder.complete(self._version, parts)

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return uint8[N] with room for a part and for the tensor; pinned if the tensor is on a GPU."""
        import torch

        if self._buffers and tensor.nbytes <= self._part_bytes:
            return self._buffers.pop()
        size = max(self._part_bytes, tensor.nbytes)
        return torch.empty(size, dtype=torch.uint8, pin_memory=tensor.device.type == "cuda")

    def _write(self, part: _OpenPart) -> None:
        for written in self._parts[:-_WRITERS]:  # this bounds the buffers in memory and raises errors early
            written.result()
        self._parts.append(self._threads.submit(self._write_now, len(self._parts), part))

    def _write_now(self, number: int, part: _OpenPart) -> Part:
        header, data = part.header(), part.buffer.numpy()[: part.bytes].data
        self._folder.write(self._version, number, 0, header, data)
        chunk = self._chunk_bytes
        first = -len(header) % chunk  # bytes of data that fill up the header's last chunk
        head = header + data[:first]
        digests = [digest(head[at : at + chunk]) for at in range(0, len(head), chunk)]
        digests += [digest(data[at : at + chunk]) for at in range(first, part.bytes, chunk)]
        if len(part.buffer) == self._part_bytes:
            self._buffers.append(part.buffer)
        return Part(len(header) + part.bytes, chunk, tuple(digests))


class _OpenPart:
    """An unwritten part, in safetensors' format; ``buffer``, uint8[N], is for the bytes of the tensors."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer, self.bytes = buffer, 0
        self._tensors: dict[str, dict[str, Any]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        end = self.bytes + tensor.nbytes
        self.buffer[self.bytes : end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        about = {"dtype": _format_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [self.bytes, end]}
        self._tensors[name], self.bytes = about, end

    def header(self) -> bytes:
        header = json.dumps(self._tensors, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        return len(header).to_bytes(8, "little") + header


@cache
def _format_name(dtype: torch.dtype) -> str:
    import torch
    from safetensors.torch import save

    saved = save({"tensor": torch.empty(0, dtype=dtype)})
    return str(json.loads(saved[8 : 8 + int.from_bytes(saved[:8], "little")])["tensor"]["dtype"])
