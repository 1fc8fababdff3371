"""Samples of weights: elements that the actor has and sends, compared with those that an engine holds after a sync.

A sync compares whole layers in turn, and all tensors outside of layers: each tensor once in a few versions. Of each
tensor it compares :data:`POINTS` elements, spread over it; others each time. Values must be equal bit by bit, after the
rounding to the engine's dtype.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from verl_rhyme.once import warn_once
from verl_rhyme.weights.folder import WeightsError

#: Elements of a tensor that are compared.
POINTS = 32
#: Every how many versions a layer is compared, and of a layer that is, how often each expert.
_LAYERS, _EXPERTS = 4, 16
#: Dtypes to which a transfer may round values (``engine.narrow``, verl's merged adapters).
_ROUNDED = (torch.bfloat16, torch.float16)
_NUMBER, _LAYER = re.compile(r"\.(\d+)(?=\.)"), re.compile(r"\w+\.\d+(?=\.)")

logger = logging.getLogger(__name__)


def is_compared(name: str, version: int | None) -> bool:
    """Return whether a tensor, of verl's or of the engine's name, is compared at a version."""
    layer, expert = [*map(int, _NUMBER.findall(name)[:2]), None, None][:2]
    turn = version or 0
    return (layer is None or (layer - turn) % _LAYERS == 0) and (
        expert is None or (expert - turn // _LAYERS) % _EXPERTS == 0
    )


def points(count: int, version: int | None, device: Any = None) -> torch.Tensor:
    """Return the positions, int64[N], that are compared in a flat tensor of ``count`` elements. Their distance has no
    divisor in common with ``count``, so that they lie in different columns and rows.
    """
    distance = max(1, round(0.618 * count))
    while math.gcd(distance, count) > 1:
        distance += 1
    return (torch.arange(min(count, POINTS), device=device) + (version or 0) * POINTS) * distance % max(1, count)


def take(tensor: torch.Tensor, version: int | None) -> torch.Tensor:
    """Return the compared elements, [N], on the tensor's device."""
    where = points(tensor.numel(), version, tensor.device)
    return tensor.detach()[torch.unravel_index(where, tensor.shape)].reshape(-1)


@dataclass
class Sent:
    """Samples of the actor's weights of a version."""

    version: int | None
    values: dict[str, list[float]] = field(default_factory=dict)  # compared elements of each sent tensor
    unsent: list[str] = field(default_factory=list)  # adapters that were neither sent nor merged into what was sent


@dataclass
class Held:
    """Samples of the weights that a worker of an engine holds; plain values, which vLLM passes between processes."""

    version: int | None = None  # of the last load; None also if there was none
    #: For each tensor that the worker stored, or each piece of one: dtype, numbers of the elements, values, and the
    #: factor by which the engine scales them.
    values: dict[str, list[tuple[str, list[int], list[float], float]]] = field(default_factory=dict)
    altered: list[str] = field(default_factory=list)  # tensors that the loader converts in an unknown way
    unused: list[str] = field(default_factory=list)  # tensors that were stored nowhere
    incomplete: list[str] = field(default_factory=list)  # compared parameters that got fewer elements than they have
    blank: list[str] = field(default_factory=list)  # parameters that got none and were not read from a file either
    aside: list[str] = field(default_factory=list)  # compared parameters outside of the language model that got none
    obstacle: str = ""  # why the weights cannot be compared


def compare(replica: int, sent: Sent, workers: Iterable[Held]) -> None:
    """Compare what the workers of a replica hold with what the actor has. Raises WeightsError if they differ."""
    workers = list(workers)
    if difference := next(_differences(sent, workers), ""):
        raise WeightsError(
            f"replica {replica} does not have the actor's weights of version {sent.version}: {difference}\n"
            "The run ends before it trains on samples of other weights than it published. The same command continues "
            "from the last checkpoint; if this comes again, verl's loader and this model do not fit."
        )


def _differences(sent: Sent, workers: list[Held]) -> Iterator[str]:
    for name in sent.unsent:
        yield f"the adapter {name} was neither sent nor merged; set actor_rollout_ref.model.lora.merge=true"
    for number, worker in enumerate(workers):
        if worker.version != sent.version:
            yield f"worker {number} has loaded version {worker.version} last"
        for name in worker.blank:
            yield f"{name} of worker {number} got nothing and has random values"
    for obstacle in {each.obstacle for each in workers if each.obstacle}:
        return log_uncompared(obstacle)
    for number, worker in enumerate(workers):
        for name, held, ours in _other_values(sent, worker):
            yield f"{name}: worker {number} has {held:.9g}, the actor {ours:.9g}"
    found: dict[str, set[int]] = {}
    for worker in workers:
        for name, pieces in worker.values.items():
            found.setdefault(name, set()).update(*(which for _, which, *_ in pieces))
    known = {tuple(sent.values[name]) for name in found.keys() & sent.values.keys()} - {()}
    altered = {name for worker in workers for name in worker.altered}
    incomplete = {_layer(name): name for worker in workers for name in worker.incomplete}
    aside = {name for worker in workers for name in worker.aside}
    uncompared = set[str]()
    for name, values in sent.values.items():
        if len(found.get(name, ())) == len(values) or (name not in found and tuple(values) in known):  # or it is tied
            continue
        less = incomplete.get(_layer(name)) or next(filter(name.endswith, aside), "")
        if name not in altered and ("lora_" in name or less):
            part = "a part of it was" if name in found else "it was not"
            yield f"{name}: {part} loaded" + (f"; {less} got less than it holds" if less else "")
        uncompared.add(_NUMBER.sub(".*", name))
    for name in sorted(uncompared):
        warn_once(logger, f"{name} is not compared, since vLLM's loader computes other values of it or drops it")
    for tower in sorted({name.partition(".")[0] for name in aside}):
        warn_once(
            logger,
            f"the actor sends no weights for {tower} of the engines, outside of the language model: there the engines "
            "keep those that they started with (random ones with load_format=dummy)",
        )


def _other_values(sent: Sent, worker: Held) -> Iterator[tuple[str, float, float]]:
    rows: dict[tuple[str, float], list[tuple[str, float, float]]] = {}  # by dtype and scale
    for name, pieces in worker.values.items():
        if (ours := sent.values.get(name)) is not None:
            for dtype, which, held, scale in pieces:
                rows.setdefault((dtype, scale), []).extend((name, x, ours[i]) for i, x in zip(which, held, strict=True))
    for (dtype, scale), each in rows.items():
        theirs = torch.tensor([held for _, held, _ in each], dtype=getattr(torch, dtype))
        for i in _unequal(torch.tensor([value for *_, value in each]), theirs, scale):
            name, value, actors = each[i]
            yield name, value, scale * actors


def _layer(name: str) -> str:
    """Return a tensor's layer, such as ``layers.2``, in the actor's name or in the engine's."""
    return found[0] if (found := _LAYER.search(name)) else ""


def _unequal(sent: torch.Tensor, held: torch.Tensor, scale: float) -> list[int]:
    """Return where values differ; a transfer may have rounded those that were sent."""
    same = torch.zeros(len(held), dtype=torch.bool)
    for dtype in (torch.float32, *_ROUNDED):
        ours = (sent.to(dtype).to(held.dtype) * scale).double()  # an engine's buffers may be integers
        same |= torch.isclose(ours, held.double(), rtol=0, atol=0, equal_nan=True)
    return torch.nonzero(~same).flatten().tolist()


def log_uncompared(why: str) -> None:
    warn_once(logger, f"the weights of the engines are not compared with the actor's: {why}")


def sent_by(actor: Any) -> Sent | None:
    """Return the samples that an actor's workers took when they sent their weights; ``None`` if they took none."""
    take: Any = getattr(actor, "sent_weights", None)  # a method of our workers
    for sent in () if take is None else take():
        if sent is not None:
            return sent
    log_uncompared("the actor's worker or its backend sends them in another way than verl's")
    return None
