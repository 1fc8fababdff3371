"""Lets vLLM's kernels for a CPU run and report a mixture of experts: imported in a test's process, or by verl in every
process of a run (``VERL_USE_EXTERNAL_MODULES``).

In vLLM 0.24 they never call the hook that captures a token's experts. Those for grouped experts pack the weights, so
that a weight sync writes into the packed form. The others' activation fails outside of the engine's start.
"""

import torch.nn.functional as F
import wrapt

_RUNNERS = []  # layers that run


@wrapt.when_imported("vllm.model_executor.layers.fused_moe.cpu_fused_moe")
def _report(module):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    choose = module.select_experts

    def chosen(*args, **kwargs):
        weights, experts = choose(*args, **kwargs)
        if _RUNNERS and _RUNNERS[-1].router.capture_fn is not None:
            _RUNNERS[-1].router.capture_fn(experts)
        return weights, experts

    def silu_and_mul(x):
        half = x.shape[-1] // 2
        return F.silu(x[..., :half]) * x[..., half:]

    module.select_experts = chosen
    module.CPUFusedMOE.check_grouped_gemm = lambda self, layer: (False, "none")
    module._CPU_MOE_ACT_FN[MoEActivation.SILU] = silu_and_mul


@wrapt.when_imported("vllm.model_executor.layers.fused_moe.runner.moe_runner")
def _note_the_layer(module):
    run = module.MoERunner._apply_quant_method

    def running(self, *args, **kwargs):
        _RUNNERS.append(self)
        try:
            return run(self, *args, **kwargs)
        finally:
            _RUNNERS.pop()

    module.MoERunner._apply_quant_method = running
