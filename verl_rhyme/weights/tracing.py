"""Where an engine's loader puts the elements of a tensor: it is watched, because only the loader knows.

An engine fuses, splits and shards the tensors that it is sent, by rules of each model. A :class:`Trace` follows the
compared elements of these tensors through views, copies and changes to the memory that lasts, and reads them there.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from verl_rhyme.weights.samples import points

_ATEN = torch.ops.aten
#: Operations whose result holds the elements of their first argument, in its order.
_COPIES = {_ATEN._to_copy, _ATEN.to, _ATEN.clone, _ATEN.contiguous, _ATEN._pin_memory, _ATEN.pin_memory}
#: Operations that read only the shape of their arguments.
_NEW = {_ATEN.empty_like, _ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like}
_NEW |= {_ATEN.new_empty, _ATEN.new_empty_strided, _ATEN.new_zeros, _ATEN.new_ones, _ATEN.new_full}
_SCALINGS = {_ATEN.mul_.Tensor, _ATEN.mul_.Scalar}


@dataclass(frozen=True, eq=False)
class _Elements:
    """Compared elements of a tensor in one piece of memory, which they do not keep alive."""

    name: str
    which: NDArray[np.int64]  # numbers of the elements
    addresses: NDArray[np.int64]
    dtype: torch.dtype
    storage: StorageWeakRef
    stored: bool = False  # by a copy into memory that was there
    scale: float = 1.0

    def inside(self, view: torch.Tensor) -> tuple[_Elements, tuple[NDArray[np.int64], ...]]:
        """Return those that a view has, and their indices in it."""
        at, rest = np.divmod(self.addresses - view.data_ptr(), view.element_size())
        ok = (rest == 0) & (view.dtype == self.dtype)
        index = [np.zeros_like(at) for _ in view.shape]
        for stride, dim in sorted(((view.stride(dim), dim) for dim in range(view.ndim)), reverse=True):
            if view.shape[dim] > 1 and stride > 0:
                index[dim] = at // stride
                ok &= (index[dim] >= 0) & (index[dim] < view.shape[dim])
                at = at - index[dim] * stride
        ok &= at == 0
        which, addresses = self.which[ok], self.addresses[ok]
        return replace(self, which=which, addresses=addresses), tuple(each[ok] for each in index)

    def at(self, view: torch.Tensor, index: tuple[NDArray[np.int64], ...], stored: bool = False) -> _Elements:
        offset = sum((i * stride for i, stride in zip(index, view.stride(), strict=True)), np.zeros_like(self.which))
        addresses = view.data_ptr() + offset * view.element_size()
        storage = StorageWeakRef(view.untyped_storage())
        return replace(self, addresses=addresses, dtype=view.dtype, storage=storage, stored=stored)

    def read(self) -> list[Any] | None:
        """Return the values; ``None`` if the memory has been freed."""
        if (storage := torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)) is None:
            return None
        whole = torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage)
        return whole[torch.from_numpy((self.addresses - storage.data_ptr()) // self.dtype.itemsize)].tolist()


class Trace(TorchDispatchMode):
    """Context in which a loader is called with ``tensors``. Its results are there at its end; it keeps no memory alive.
    ``version`` chooses the compared elements.
    """

    #: Compared elements as the parameters hold them (``Held.values``).
    values: dict[str, list[tuple[str, list[int], list[float], float]]]

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int | None) -> None:
        super().__init__()
        #: Where elements lie, by the first and last address of their tensor, with a number.
        self._places: list[tuple[int, int, int, _Elements]] = []
        self._number = self._longest = 0  # of places; bytes of one
        #: Tensors from which the loader computed something, so that they cannot be followed.
        self.altered = set[str]()
        #: Elements written into each storage, by its address.
        self.written = Counter[int]()
        #: Why the elements could not be followed.
        self.error = ""
        for name, tensor in tensors:
            where = points(tensor.numel(), version).numpy()
            index = np.unravel_index(where, tensor.shape) if tensor.ndim else ()
            storage = StorageWeakRef(tensor.untyped_storage())
            elements = _Elements(name, np.arange(len(where)), where, tensor.dtype, storage)
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
            given = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | kwargs
            changed = [each.name for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
            for target in _tensors(given[name] for name in changed if name in given):
                self._overwrite(target)
            self._alter(value for name, value in given.items() if name not in changed)
        elif not func.is_view and func.overloadpacket not in _NEW:
            self._alter((*args, *kwargs.values()))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.values = {}
        for *_, each in () if self.error else self._places:
            if each.stored and (values := each.read()) is not None:
                piece = str(each.dtype).removeprefix("torch."), each.which.tolist(), values, each.scale
                self.values.setdefault(each.name, []).append(piece)
        self._places = []

    # ---- operations ----

    def _follow(self, elements: _Elements, memory: torch.Tensor) -> None:
        start, end = _memory(memory)
        self._longest, self._number = max(self._longest, end - start), self._number + 1
        insort(self._places, (start, end, self._number, elements))

    def _over(self, tensor: torch.Tensor) -> Iterator[tuple[int, _Elements]]:
        """Yield the places whose memory a tensor touches, with their positions in the list."""
        start, end = _memory(tensor)
        for position in range(bisect_left(self._places, (start - self._longest,)), len(self._places)):
            first, last, _, elements = self._places[position]
            if first >= end:
                return
            if last > start and not elements.storage.expired():
                yield position, elements

    def _inside(self, tensor: torch.Tensor) -> Iterator[tuple[_Elements, tuple[NDArray[np.int64], ...]]]:
        for _, each in self._over(tensor):
            if each.dtype != tensor.dtype:  # its bits under another type
                self.altered.add(each.name)
                continue
            elements, index = each.inside(tensor)
            if len(elements.which):
                yield elements, index

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if source.numel() == target.numel() and source.ndim <= target.ndim:
            source = source.expand(target.shape)  # dimensions of one element
            found = list(self._inside(source))
        else:
            found = []
            self._alter((source,))
        self._overwrite(target)
        for each, index in found:
            self._follow(each.at(target, index, stored=True), target)

    def _scale(self, tensor: torch.Tensor, factor: float) -> None:
        for position, each, inside in self._touched(tensor):
            if inside == len(each.which):
                self._places[position] = (*self._places[position][:3], replace(each, scale=each.scale * factor))
            else:
                self._lose(position)

    def _overwrite(self, target: torch.Tensor) -> None:
        """Note a write: what was there is not the sent value any more."""
        self.written[target.untyped_storage().data_ptr()] += target.numel()
        for position, *_ in self._touched(target):
            self._lose(position)

    def _touched(self, tensor: torch.Tensor) -> list[tuple[int, _Elements, int]]:
        """Return the places that a change of a tensor alters, last ones first, and how many of their elements."""
        over = reversed(list(self._over(tensor)))
        counts = ((n, each, len(each.inside(tensor)[0].which), each.dtype == tensor.dtype) for n, each in over)
        return [(position, each, count) for position, each, count, same in counts if count or not same]

    def _lose(self, position: int) -> None:
        self.altered.add(self._places.pop(position)[-1].name)

    def _alter(self, arguments: Iterable[Any]) -> None:
        for tensor in _tensors(arguments):
            self.altered.update(each.name for _, each in self._over(tensor))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    start, shape = tensor.data_ptr(), zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in shape)
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start
