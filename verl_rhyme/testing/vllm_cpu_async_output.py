"""Asynchronous scheduling on a CPU: vLLM copies a step's tokens to the host on a CUDA stream."""

from __future__ import annotations

from typing import Any

from verl_rhyme.patches.conditions import vllm_runs_on_cpu
from verl_rhyme.patches.core import Patch, around


class Done:
    """Event of an operation that has finished."""

    def synchronize(self) -> None:
        return None


def _on_the_host(
    original: Any,
    self: Any,
    model_runner_output: Any,
    sampled_token_ids: Any,
    logprobs_tensors: Any,
    invalid_req_indices: list[int],
    async_output_copy_stream: Any,
    vocab_size: int,
    routed_experts: Any = None,
) -> None:
    self._model_runner_output, self._invalid_req_indices = model_runner_output, invalid_req_indices
    self.async_copy_ready_event, self.vocab_size = Done(), vocab_size
    self._sampled_token_ids = self.sampled_token_ids_cpu = sampled_token_ids
    self._logprobs_tensors = self._logprobs_tensors_cpu = logprobs_tensors
    self._routed_experts = self._routed_experts_cpu = routed_experts


PATCH = Patch(
    name="vllm_cpu_async_output",
    target="vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput.__init__",
    why="on a CPU asynchronous scheduling fails: there is no CUDA stream to copy tokens on",
    requires="vllm==0.24.0",
    source_sha256="f830e32376b5d6388d5e5e8712dfd7fb8176c1ee84caff6f0adeb6daa58611fe",
    replace=around(_on_the_host),
    needed=vllm_runs_on_cpu,
)
