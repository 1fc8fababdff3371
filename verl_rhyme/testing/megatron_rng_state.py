"""Set torch's CPU generator where megatron-core sets the CUDA generator."""

from __future__ import annotations

from typing import Any

from verl_rhyme.patches.conditions import megatron_runs_on_cpu
from verl_rhyme.patches.core import Patch, around


def _torch_state(original: Any, new_state: Any, device: int = -1, graph_safe: bool = False) -> None:
    import torch

    torch.set_rng_state(new_state)


PATCH = Patch(
    name="megatron_rng_state",
    target="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
    why="Megatron training on a CPU fails at weight initialisation: there is no CUDA generator",
    requires="megatron-core==0.16.1",
    source_sha256="dea947ca0b7dc92be0bb70f6161b4d04bdcac7e3223e3be967bd05a40898d0de",
    replace=around(_torch_state),
    needed=megatron_runs_on_cpu,
)
