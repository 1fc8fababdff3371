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
    """Repeat ``input_val[i]`` over request i's tokens, in place, like the Triton kernel.

    Args:
        output: Result, [num_tokens], dtype of ``input_val`` (float32 temperature and top-p, int32 top-k).
        input_val: Value per request, [batch_size].
        cu_num_tokens: Inclusive cumulative token counts, [batch_size].
        replace_from, replace_to: Value to replace, and its replacement.
        MAX_NUM_TOKENS: Compile-time constant of the Triton kernel; unused.
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
