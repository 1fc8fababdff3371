"""Make vLLM's CPU expand kernel write its output: the original writes a copy, and sampling reads unset memory."""

from __future__ import annotations

from typing import Any

from verl_rhyme.patches.conditions import vllm_runs_on_cpu
from verl_rhyme.patches.core import Patch, around


def _write_into_output(
    original: Any,
    output: Any,
    input_val: Any,
    cu_num_tokens: Any,
    replace_from: Any,
    replace_to: Any,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Repeat ``input_val[i]``, [batch_size], over request i's tokens in ``output``, [num_tokens], like the Triton
    kernel. Both are float32 (temperature, top-p) or int32 (top-k); ``cu_num_tokens``, [batch_size], is inclusive.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    expanded = values.repeat_interleave(counts)
    output[: expanded.numel()] = expanded


PATCH = Patch(
    name="vllm_cpu_expand",
    target="vllm.utils.cpu_triton_utils:expand_kernel.func",
    why="on a CPU, temperature, top-k and top-p of draft tokens are uninitialised memory: samples are silently wrong",
    requires="vllm==0.24.0",
    source_sha256="cb72d4d389c5be6da303fd70bfd461aaacb238aa014a853e5fb49523fcd5056d",
    replace=around(_write_into_output),
    needed=vllm_runs_on_cpu,
)
