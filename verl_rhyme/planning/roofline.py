"""Costs by arithmetic: a roofline of the model's shape and the GPU's data sheet.

A decode step reads the weights once, of a mixture the experts that its tokens choose, and every cached token of its
rows. Each row, draft token and prompt token costs 2 operations for each parameter that computes it, and two all-reduces
of its hidden state a layer (Megatron-LM, arXiv:1909.08053, section 3). What an engine reaches of the data sheet is
assumed (:data:`READ`, :data:`COMPUTED`, :data:`TRAINED`). A measured factor corrects it: ``verl-rhyme report`` prints
the one of a run. The exchange of tokens between ranks that split experts is not counted.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from verl_rhyme.planning.architecture import Architecture
from verl_rhyme.planning.cost import ReplicaCost, StepCost
from verl_rhyme.planning.experts import Experts


class GPU(NamedTuple):
    """Figures of a data sheet."""

    flops: float  # dense bf16 operations a second
    bandwidth: float  # bytes a second of its memory
    memory: float  # bytes
    link: float  # bytes a second to the other GPUs of its node, each way


#: SXM modules and HGX boards, by the names that Ray gives them (``accelerator_type``).
GPUS = {
    "A100": GPU(312e12, 2.04e12, 80e9, 300e9),
    "H20": GPU(148e12, 4.0e12, 96e9, 450e9),
    "H800": GPU(989e12, 3.35e12, 80e9, 200e9),
    "H100": GPU(989e12, 3.35e12, 80e9, 450e9),
    "H200": GPU(989e12, 4.8e12, 141e9, 450e9),
    "B200": GPU(2250e12, 8.0e12, 180e9, 900e9),
    "MI300X": GPU(1307e12, 5.3e12, 192e9, 448e9),
}
#: Bytes of a weight. The KV cache has 2 bytes a value, and fp8 computes like bf16.
DTYPES = {"bfloat16": 2, "float16": 2, "fp8": 1}
#: Reached shares of the bandwidth and of the operations in decoding, and of the operations in training.
READ, COMPUTED, TRAINED = 0.75, 0.5, 0.35
#: Operations a parameter and trained token: 6 of forward and backward, 2 of the old log-probabilities.
TRAINING = 8
#: Seconds of a step's launches, and of its all-reduces for each doubling of the GPUs.
_LAUNCHES, _REDUCES = 1.5e-3, 1e-3
#: Seconds for which the device waits for the host in a step with drafts, and of each row in it: measured
#: (``benchmarks.host_time``, steps of 14 ms, two cores).
_DRAFTING, _WAITING = 2.1e-3, 15e-6
#: Share of a GPU's memory that an engine takes.
UTILIZATION = 0.8
#: Bytes of an engine's share that activations and sampler take.
_ACTIVATIONS = 2.5e9


def gpu_named(names: str) -> str:
    """Return the key of :data:`GPUS` in a device's name, such as ``NVIDIA H100 80GB HBM3``; empty without one."""
    words = re.findall(r"\w+", names.upper())
    return next((name for name in GPUS if name in words), "")


def replica(
    model: Architecture,
    gpu: GPU,
    tp: int = 1,
    dtype: str = "bfloat16",
    utilization: float = UTILIZATION,
    slots: int = 256,
    host: float = 0.0,
) -> ReplicaCost:
    """Return the cost of a replica of ``tp`` GPUs, whose engines take a share ``utilization`` of the memory.

    ``host``: bytes of the host's memory for KV cache (vLLM's ``kv_offloading_size``), of all its GPUs.

    Raises ValueError if ``tp`` does not divide the model's attention heads, or ``dtype`` is not in :data:`DTYPES`.
    """
    if tp < 1 or model.heads % tp:
        raise ValueError(f"tp={tp} must divide the model's {model.heads} attention heads")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be {', '.join(DTYPES)}, not {dtype!r}")
    weights, cache = DTYPES[dtype] * model.rank_parameters(tp), 2 * model.cache_values(tp)
    reduced = 2 * model.layers * 2 * model.hidden * 2 * (tp - 1) / tp  # bytes of a token in ring all-reduces
    token = 2 * model.active / (tp * COMPUTED * gpu.flops) + reduced / gpu.link
    mixture = model.mixture
    routed = DTYPES[dtype] * mixture.routed / tp if mixture else 0.0
    experts = mixture.experts if mixture else Experts()
    step = StepCost(
        base=(weights - routed) / (READ * gpu.bandwidth) + _LAUNCHES + _REDUCES * math.log2(tp),
        row=token,
        cached=cache / (READ * gpu.bandwidth),
        draft=token,
        drafting=_DRAFTING,
        waiting=_WAITING,
        expert=routed / max(1, experts.count) / (READ * gpu.bandwidth),
        experts=experts.count,
        chosen=experts.chosen,
    )
    room = (utilization * gpu.memory - weights - _ACTIVATIONS) / cache
    return ReplicaCost(step, prefill=token, slots=slots, room=max(1.0, room), gpus=tp, host=host / (tp * cache))


def training_token(model: Architecture, gpu: GPU) -> float:
    """Return the seconds in which one GPU trains a token, old log-probabilities included."""
    return TRAINING * model.active / (TRAINED * gpu.flops)
