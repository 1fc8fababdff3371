"""GPUs that a run could have, where they are, and what they can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from verl_rhyme.planning.cost import ReplicaCost
from verl_rhyme.planning.times import Training, Work

#: Of mixed-precision training with Adam: bytes of a parameter on each GPU that has it (bf16 weights, fp32 gradients),
#: and of the states (fp32 weights and two moments) that are split over all (Megatron-LM, docs/dist_optimizer.md).
_KEPT, _SPLIT = 6, 12


@dataclass(frozen=True)
class Model:
    """What is trained: its parameters, and the bytes of one of them where it generates."""

    parameters: float
    weight_bytes: float = 2.0

    def __post_init__(self) -> None:
        if not (0 < self.parameters < math.inf and 0 < self.weight_bytes < math.inf):
            raise ValueError(f"a model has parameters, and bytes of each: {self}")

    @property
    def bytes(self) -> float:
        """Of a version's weights, as they are sent and served."""
        return self.parameters * self.weight_bytes


@dataclass(frozen=True, eq=False)
class Pool:
    """GPUs of one kind at one site.

    Attributes:
        site, kind: Names.
        gpus: How many.
        node: Of them in one node.
        memory: Bytes of one.
        price: Of one and hour, in whatever currency; ``None``: not known.
        utilization: Share of the memory that an engine takes (``gpu_memory_utilization``).
        replicas: What a replica costs, by its tensor parallel size (GPUs); none: it does not generate.
        training: What an update costs; ``None``: it does not train.

    Raises:
        ValueError: Sizes that cannot be.
    """

    site: str
    kind: str
    gpus: int
    node: int
    memory: float
    price: float | None = None
    utilization: float = 0.8
    replicas: Mapping[int, ReplicaCost] = field(default_factory=dict)
    training: Training | None = None

    def __post_init__(self) -> None:
        sizes = self.gpus >= 1 and self.node >= 1 and 0 < self.memory < math.inf
        if not (sizes and 0 < self.utilization <= 1):
            raise ValueError(f"{self.name}: GPUs, a node's, and memory must be above 0, utilization at most 1")
        if self.gpus > self.node and self.gpus % self.node:
            raise ValueError(f"{self.name}: {self.gpus} GPUs are no whole nodes of {self.node}")
        if self.price is not None and not 0 <= self.price < math.inf:
            raise ValueError(f"{self.name}: a price of {self.price}")

    @property
    def name(self) -> str:
        return f"{self.site}/{self.kind}"

    def shares(self, unit: int) -> list[int]:
        """GPUs that a role may have of it: units of so many GPUs, within one node, or of whole nodes."""
        within = range(unit, min(self.node, self.gpus + 1), unit)
        whole = range(self.node, self.gpus + 1, self.node)
        return [*within, *(gpus for gpus in whole if not gpus % unit)]

    def fits(self, one: int, other: int) -> bool:
        """Two such shares fit side by side."""
        if one + other <= min(self.node, self.gpus):
            return True
        nodes = -(-one // self.node) - (-other // self.node)
        return nodes * self.node <= self.gpus

    def why_no_replica(self, model: Model, work: Work, tp: int) -> str:
        """Why it cannot generate with so many GPUs a replica; empty where it can."""
        given = self.utilization * tp * self.memory
        longest = work.prompt_tokens + float(np.max(work.lengths))
        if model.bytes >= given:
            return (
                f"generation on {self.name} with tensor parallel size {tp}: {_gb(model.bytes)} of weights, and "
                f"{self.utilization:.0%} of {tp} GPUs are {_gb(given)}"
            )
        if self.replicas[tp].room < longest:
            return (
                f"generation on {self.name} with tensor parallel size {tp}: a request may have {longest:.0f} tokens, "
                f"and the cache has room for {self.replicas[tp].room:.0f}"
            )
        if not self.shares(tp):
            return f"generation on {self.name}: no share of its {self.gpus} GPUs is made of replicas of {tp}"
        return ""

    def why_no_training(self, model: Model, gpus: int) -> str:
        """Why so many GPUs of it cannot train; empty where they can."""
        assert self.training is not None
        if not gpus:
            return (
                f"training on {self.name}: no share of its {self.gpus} GPUs, {self.node} in a node, is made of copies "
                f"over {self.training.copy_gpus}"
            )
        each = model.parameters * (_KEPT / self.training.copy_gpus + _SPLIT / gpus) + self.training.reserve
        if each > self.memory:
            return (
                f"training on {gpus} GPUs of {self.name}: {_gb(each)} on each (states split over {gpus}, weights and "
                f"gradients over {self.training.copy_gpus}), of {_gb(self.memory)}"
            )
        return ""


@dataclass(frozen=True)
class Links:
    """What lies between sites: bytes a second, by pairs of their names in any order."""

    speeds: Mapping[frozenset[str], float] = field(default_factory=dict)

    def seconds(self, one: str, other: str, size: float) -> float | None:
        """Until a version of so many bytes is at the other site; ``None``: there is no link."""
        speed = self.speeds.get(frozenset((one, other)), 0.0)
        return 0.0 if one == other else size / speed if speed else None


def _gb(size: float) -> str:
    return f"{size / 1e9:.0f} GB"
