"""Where an engine's loader puts the elements of a tensor: it is watched, because only the loader knows.

An engine fuses, splits and shards the tensors that it is sent, by rules of each model. A :class:`Trace` follows the
compared elements of these tensors through views and copies to the parameters, and reads them there.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from verl_rhyme.weights.samples import points

_ATEN = torch.ops.aten
#: Operations whose result holds the elements of their first argument, in its order.
_COPIES = {_ATEN._to_copy, _ATEN.to, _ATEN.clone, _ATEN.contiguous, _ATEN._pin_memory, _ATEN.pin_memory}
_SCALINGS = {_ATEN.mul_.Tensor, _ATEN.mul_.Scalar}


@dataclass(frozen=True)
class _Elements:
    """Compared elements of a tensor, in one piece of memory."""

    name: str
    which: NDArray[np.int64]  # numbers of the elements
    addresses: NDArray[np.int64]
    bytes: int  # of one
    scale: float

    def inside(self, view: torch.Tensor) -> tuple[_Elements, tuple[NDArray[np.int64], ...]]:
        """Return those that a view has, and their indices in it."""
        at, rest = (self.addresses - view.data_ptr()) // self.bytes, (self.addresses - view.data_ptr()) % self.bytes
        ok = (rest == 0) & (view.element_size() == self.bytes)
        index = [np.zeros_like(at) for _ in view.shape]
        for stride, dim in sorted(((view.stride(dim), dim) for dim in range(view.ndim)), reverse=True):
            if view.shape[dim] > 1 and stride > 0:
                index[dim] = at // stride
                ok &= (index[dim] >= 0) & (index[dim] < view.shape[dim])
                at = at - index[dim] * stride
        ok &= at == 0
        which, addresses = self.which[ok], self.addresses[ok]
        return replace(self, which=which, addresses=addresses), tuple(each[ok] for each in index)

    def at(self, view: torch.Tensor, index: tuple[NDArray[np.int64], ...]) -> _Elements:
        """Return the same elements at these indices of another tensor."""
        offset = sum((i * stride for i, stride in zip(index, view.stride(), strict=True)), np.zeros_like(self.which))
        addresses = view.data_ptr() + offset * view.element_size()
        return replace(self, addresses=addresses, bytes=view.element_size())


class Trace(TorchDispatchMode):
    """Context in which a loader is called. Its results are there at its end; it keeps no tensor then.

    Args:
        tensors: Tensors that the loader gets, by name.
        version: Policy version, which chooses the compared elements.
    """

    #: Compared elements as the parameters hold them (``Held.values``).
    values: dict[str, list[tuple[str, list[int], list[float], float]]]
    #: Tensors that were stored nowhere.
    unused: list[str]

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int | None) -> None:
        super().__init__()
        self._sources: list[tuple[int, int, int, _Elements]] = []  # by the memory of their tensors, with a number
        self._longest = 0  # bytes of a source
        self._kept: list[torch.Tensor] = []  # memory that must not be used for other tensors
        #: Elements in parameters, with their memory, by storage.
        self._stored = defaultdict[int, list[tuple[int, int, _Elements, torch.Tensor, tuple[Any, ...]]]](list)
        self._names = list[str]()
        #: Tensors from which the loader computed something, so that they cannot be followed.
        self.altered = set[str]()
        #: Elements written into each storage, by its address.
        self.written = Counter[int]()
        #: Why the elements could not be followed.
        self.error = ""
        for name, tensor in tensors:
            self._names.append(name)
            where = points(tensor.numel(), version).numpy()
            index = np.unravel_index(where, tensor.shape) if tensor.ndim else ()
            elements = _Elements(name, np.arange(len(where)), where, 0, 1.0)
            self._follow(elements.at(tensor, index), tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.error:
            try:
                self._note(func, out, args, kwargs or {})
            except Exception as error:  # the weights are loaded all the same
                self.error = f"{func}: {error!r}"
        return out

    def _note(self, func: Any, out: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if func is _ATEN.copy_.default:
            self._copy(args[0], args[1])
        elif func.overloadpacket in _COPIES:
            if out.data_ptr() != args[0].data_ptr():
                for each, index in list(self._inside(args[0])):
                    self._follow(each.at(out, index), out)
        elif func in _SCALINGS and (not isinstance(args[1], torch.Tensor) or args[1].ndim == 0):
            self._scale(args[0], float(args[1]))
        elif func._schema.is_mutable:
            self._overwrite(args[0])
            self._alter(args[1:])
        elif not func.is_view:
            self._alter((*args, *kwargs.values()))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.values = {}
        for *_, each, view, index in () if self.error else chain.from_iterable(self._stored.values()):
            values = view[tuple(map(torch.from_numpy, index))] if index else view.reshape(1)
            dtype = str(view.dtype).removeprefix("torch.")
            piece = dtype, each.which.tolist(), values.tolist(), each.scale
            self.values.setdefault(each.name, []).append(piece)
        self.unused = [name for name in self._names if name not in self.altered | self.values.keys()]
        self._sources, self._kept, self._stored = [], [], defaultdict(list)

    # ---- operations ----

    def _follow(self, elements: _Elements, memory: torch.Tensor) -> None:
        self._kept.append(memory)
        start, end = _memory(memory)
        self._longest = max(self._longest, end - start)
        insort(self._sources, (start, end, len(self._kept), elements))

    def _over(self, tensor: torch.Tensor) -> Iterator[_Elements]:
        """Yield the sources whose memory a tensor touches."""
        start, end = _memory(tensor)
        for number in range(bisect_left(self._sources, (start - self._longest,)), len(self._sources)):
            first, last, _, elements = self._sources[number]
            if first >= end:
                return
            if last > start:
                yield elements

    def _inside(self, tensor: torch.Tensor) -> Iterator[tuple[_Elements, tuple[NDArray[np.int64], ...]]]:
        for each in self._over(tensor):
            elements, index = each.inside(tensor)
            if len(elements.which):
                yield elements, index

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._overwrite(target)
        if source.shape != target.shape:
            return self._alter((source,))
        stored = self._stored[target.untyped_storage().data_ptr()]
        stored += [(*_memory(target), each, target, index) for each, index in self._inside(source)]

    def _scale(self, tensor: torch.Tensor, factor: float) -> None:
        if not (found := list(self._over(tensor))):
            return self._overwrite(tensor)
        for each in found:
            whole, _ = each.inside(tensor)
            scaled = replace(each, scale=each.scale * factor)
            self._sources = [(*memory, scaled if old is each else old) for *memory, old in self._sources]  # type: ignore[misc]
            if len(whole.which) < len(each.which):
                self.altered.add(each.name)

    def _overwrite(self, target: torch.Tensor) -> None:
        """Note a write: what was stored there is not the sent value any more."""
        storage = target.untyped_storage().data_ptr()
        self.written[storage] += target.numel()
        start, end = _memory(target)
        for each in [each for each in self._stored[storage] if each[0] < end and start < each[1]]:
            _, _, elements, view, index = each
            if len(elements.at(view, index).inside(target)[0].which):
                self.altered.add(elements.name)
                self._stored[storage] = [other for other in self._stored[storage] if other is not each]

    def _alter(self, arguments: Iterable[Any]) -> None:
        for each in arguments:
            if isinstance(each, torch.Tensor):
                self.altered.update(source.name for source in self._over(each))
            elif isinstance(each, list | tuple):
                self._alter(each)


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses at which the elements of a tensor begin and end."""
    start, shape = tensor.data_ptr(), zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in shape)
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start
