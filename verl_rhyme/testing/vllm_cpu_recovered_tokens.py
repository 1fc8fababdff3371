"""Accept ``USE_FP64_GUMBEL`` in vLLM's CPU recovered-token kernel: the rejection sampler passes it."""

from __future__ import annotations

from typing import Any

from verl_rhyme.patches.conditions import vllm_runs_on_cpu
from verl_rhyme.patches.core import Patch, around


def _accept_fp64_flag(original: Any, *args: Any, USE_FP64_GUMBEL: bool = False, **kwargs: Any) -> None:
    if USE_FP64_GUMBEL:  # the C++ kernel would read the float64 noise as float32
        raise NotImplementedError("float64 Gumbel noise is not supported on a CPU; set use_fp64_gumbel to false")
    original(*args, **kwargs)


PATCH = Patch(
    name="vllm_cpu_recovered_tokens",
    target="vllm.utils.cpu_triton_utils:sample_recovered_tokens_kernel.func",
    why="on a CPU, speculative decoding fails with TypeError: unexpected argument USE_FP64_GUMBEL",
    requires="vllm==0.24.0",
    source_sha256="99d4894628dfb9b64ae5aab321b801dbfa28ab5ff76d7a5c9e3d500be44e15ac",
    replace=around(_accept_fp64_flag),
    needed=vllm_runs_on_cpu,
)
