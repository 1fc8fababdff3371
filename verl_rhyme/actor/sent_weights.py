"""Samples of the weights that an actor sends, and whether its adapters are among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from verl_rhyme.weights.samples import Sent, is_compared, take

#: Part of the names of verl's adapter tensors.
_ADAPTER = "lora_"


class SentWeights:
    """Context of a weight sync: it watches what verl's engine gives out (``get_per_tensor_param``)."""

    def __init__(self, engine: Any, version: int | None) -> None:
        self._engine, self._version = engine, version
        self._watched = False
        self._values: dict[str, torch.Tensor] = {}
        self._adapters = set[str]()  # modules whose adapters are sent
        self._unmerged = set[str]()  # adapters that were not merged while tensors were sent

    def __enter__(self) -> SentWeights:
        give = self._engine.get_per_tensor_param

        def watched(*args: Any, **kwargs: Any) -> tuple[Iterable[tuple[str, torch.Tensor]], Any]:
            self._watched = True
            tensors, adapter_config = give(*args, **kwargs)
            return self._watch(tensors), adapter_config

        self._engine.get_per_tensor_param = watched
        return self

    def __exit__(self, *_: Any) -> None:
        del self._engine.get_per_tensor_param

    def result(self) -> Sent | None:
        """Return the samples; ``None`` if the weights went another way."""
        if not self._watched:
            return None
        values = {name: value.float().tolist() for name, value in self._values.items()}
        unsent = sorted(self._unmerged) if len(self._adapters) < len(self._unmerged) else []
        return Sent(self._version, values, [name for name in unsent if _plain(name) not in self._adapters])

    def _watch(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        first = True
        for name, tensor in tensors:
            if first:  # verl merges all adapters before the first tensor
                self._unmerged.update(unmerged_adapters(self._engine))
                first = False
            if _ADAPTER in name:
                self._adapters.add(_plain(name.partition(f".{_ADAPTER}")[0]))
            if is_compared(name, self._version):
                self._values[name] = take(tensor, self._version)
            yield name, tensor


def unmerged_adapters(engine: Any) -> Iterator[str]:
    """Yield the modules with adapters that are not merged into the weights now."""
    if getattr(engine, "peft_cls", None) is not None:  # Megatron-Bridge merges them one by one
        if not engine.model_config.lora.get("merge", False):
            yield "of Megatron"
        return
    if isinstance(engine.module, torch.nn.Module):
        for name, module in engine.module.named_modules():
            if hasattr(module, "lora_A") and not getattr(module, "merged", True):
                yield name


def _plain(name: str) -> str:
    """Return a module's name without what FSDP and PEFT add."""
    return name.replace("_fsdp_wrapped_module.", "").replace("base_model.model.", "", 1)
