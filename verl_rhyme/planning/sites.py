"""GPUs available to a run: their sites, and what fits into them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from verl_rhyme.planning.cost import ReplicaCost
from verl_rhyme.planning.times import Training, Work

#: Bytes of a parameter in mixed-precision training with Adam: on each GPU that has it (bf16 weights, fp32 gradients),
#: and of states that are split over all GPUs (fp32 weights and two moments; Megatron-LM, docs/dist_optimizer.md).
_KEPT, _SPLIT = 6, 12


@dataclass
class Model:
    """The trained model: number of parameters, and bytes of each in the engines."""

    parameters: float
    weight_bytes: float = 2.0

    def __post_init__(self) -> None:
        if not (0 < self.parameters < math.inf and 0 < self.weight_bytes < math.inf):
            raise ValueError(f"a model needs parameters and weight_bytes above 0: {self}")

    @property
    def bytes(self) -> float:
        """Bytes of a version's weights, as sent and served."""
        return self.parameters * self.weight_bytes


@dataclass(frozen=True, eq=False)
class Pool:
    """GPUs of one kind at one site."""

    site: str
    kind: str
    gpus: int
    node: int  # GPUs of one node
    memory: float  # bytes of one GPU
    price: float | None = None  # of one GPU-hour, in any currency; None: unknown
    utilization: float = 0.8  # share of the memory that an engine takes (gpu_memory_utilization)
    #: Cost of a replica by tensor parallel size (GPUs); empty: the pool does not generate.
    replicas: Mapping[int, ReplicaCost] = field(default_factory=dict)
    training: Training | None = None  # None: the pool does not train

    def __post_init__(self) -> None:
        sizes = self.gpus >= 1 and self.node >= 1 and 0 < self.memory < math.inf
        if not (sizes and 0 < self.utilization <= 1):
            raise ValueError(f"{self.name}: gpus, node and memory must be above 0, utilization at most 1")
        if self.gpus > self.node and self.gpus % self.node:
            raise ValueError(f"{self.name}: {self.gpus} GPUs do not fill whole nodes of {self.node}")
        if self.price is not None and not 0 <= self.price < math.inf:
            raise ValueError(f"{self.name}: price must be finite and at least 0, not {self.price}")

    @property
    def name(self) -> str:
        return f"{self.site}/{self.kind}"

    def shares(self, unit: int) -> list[int]:
        """Return the numbers of GPUs that a role may take: multiples of ``unit``, within one node or of whole nodes."""
        within = range(unit, min(self.node, self.gpus + 1), unit)
        whole = range(self.node, self.gpus + 1, self.node)
        return [*within, *(gpus for gpus in whole if not gpus % unit)]

    def fits(self, one: int, other: int) -> bool:
        """Whether two such shares fit into the pool together."""
        if one + other <= min(self.node, self.gpus):
            return True
        nodes = -(-one // self.node) - (-other // self.node)
        return nodes * self.node <= self.gpus

    def check_replica(self, model: Model, work: Work, tp: int) -> str:
        """Return the reason why the pool cannot generate with ``tp`` GPUs a replica; empty if it can."""
        given = self.utilization * tp * self.memory
        longest = work.prompt_tokens + float(np.max(work.lengths))
        if model.bytes >= given:
            return (
                f"generation on {self.name} with tensor parallel size {tp}: {_gb(model.bytes)} of weights do not fit, "
                f"{self.utilization:.0%} of {tp} GPUs are {_gb(given)}"
            )
        if self.replicas[tp].room < longest:
            return (
                f"generation on {self.name} with tensor parallel size {tp}: a request may have {longest:.0f} tokens, "
                f"and the KV cache holds {self.replicas[tp].room:.0f}"
            )
        if not self.shares(tp):
            return f"generation on {self.name}: its {self.gpus} GPUs have no share for replicas of {tp} GPUs"
        return ""

    def check_training(self, model: Model, gpus: int) -> str:
        """As :meth:`check_replica`, for training on ``gpus`` of the pool."""
        assert self.training is not None
        if not gpus:
            return (
                f"training on {self.name}: its {self.gpus} GPUs, {self.node} in a node, have no share for model copies "
                f"over {self.training.copy_gpus} GPUs"
            )
        each = model.parameters * (_KEPT / self.training.copy_gpus + _SPLIT / gpus) + self.training.reserve
        if each > self.memory:
            return (
                f"training on {gpus} GPUs of {self.name}: each needs {_gb(each)} (states split over {gpus}, weights "
                f"and gradients over {self.training.copy_gpus}) and has {_gb(self.memory)}"
            )
        return ""


def _gb(size: float) -> str:
    return f"{size / 1e9:.0f} GB"
