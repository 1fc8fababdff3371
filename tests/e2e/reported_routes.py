"""Lets vLLM's kernels for a CPU report the experts of a mixture: imported in a test's process, or by verl in every
process of a run (``VERL_USE_EXTERNAL_MODULES``). In vLLM 0.24 they never call the hook that captures a token's experts.
"""

import wrapt

_RUNNERS = []  # layers that run


@wrapt.when_imported("vllm.model_executor.layers.fused_moe.cpu_fused_moe")
def _report(module):
    choose = module.select_experts

    def chosen(*args, **kwargs):
        weights, experts = choose(*args, **kwargs)
        if _RUNNERS and _RUNNERS[-1].router.capture_fn is not None:
            _RUNNERS[-1].router.capture_fn(experts)
        return weights, experts

    module.select_experts = chosen


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
