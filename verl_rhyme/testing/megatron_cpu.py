"""verl's Megatron engine on a machine without an accelerator: megatron-core on gloo.

megatron-core and mbridge name CUDA as their device in hundreds of places. :class:`CudaIsCpu` redirects that device to
the CPU while the engine runs. The patches ``megatron_*`` and ``mbridge_*`` of this folder cover the rest.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from verl_rhyme.testing.cpu import do_nothing

_CPU = torch.device("cpu")


_engine_run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    """Run backward within :class:`CudaIsCpu`: torch leaves a mode there, but activation recomputation needs it."""
    with CudaIsCpu():
        return _engine_run_backward(*args, **kwargs)


_all_to_all_single = torch.distributed.all_to_all_single


def _all_to_all(
    output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **kw: Any
) -> Any:
    """Accept splits that are tensors: megatron-core makes lists of those that it moves from a GPU."""
    splits = (
        None if sizes is None else [int(size) for size in sizes] for sizes in (output_split_sizes, input_split_sizes)
    )
    return _all_to_all_single(output, input, *splits, **kw)


class _Stream:
    """The only stream, and its only event."""

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


_STREAM = _Stream()

#: Replacements for functions that a torch function mode does not see: module, name, function.
_STAND_INS: tuple[tuple[ModuleType, str, Callable[..., Any]], ...] = (
    (torch.cuda, "current_device", lambda: _CPU),
    (torch.cuda, "synchronize", do_nothing),
    (torch.cuda, "Stream", lambda: _STREAM),
    (torch.cuda, "current_stream", lambda: _STREAM),
    (torch.cuda, "stream", lambda _: contextlib.nullcontext()),
    (torch.cuda, "empty_cache", do_nothing),
    (torch.cuda, "manual_seed", torch.manual_seed),
    (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
    (torch.cuda.random, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
    (torch.cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    (torch.autograd, "_engine_run_backward", _run_backward),
    (torch.distributed, "all_to_all_single", _all_to_all),
)


class CudaIsCpu(TorchFunctionMode):
    """Mode in which torch functions run on the CPU when called with device "cuda", and tensors report CUDA types.

    It applies to the thread that enters it, and to ``torch.cuda`` in the whole process. It may be nested.
    """

    _depth = 0
    _patches = contextlib.ExitStack()

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        if func is torch.Tensor.to:
            args = (args[0], *map(_on_cpu, args[1:]))
        return func(*args, **kwargs)

    def __enter__(self) -> CudaIsCpu:
        if not CudaIsCpu._depth:
            for module, name, stand_in in _STAND_INS:
                CudaIsCpu._patches.enter_context(mock.patch.object(module, name, stand_in))
            # without Transformer Engine the name is missing, and read
            gemm = mock.patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True)
            CudaIsCpu._patches.enter_context(gemm)
        CudaIsCpu._depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        CudaIsCpu._depth -= 1
        if not CudaIsCpu._depth:
            CudaIsCpu._patches.close()


def _on_cpu(device: Any) -> Any:
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    return _CPU if isinstance(device, str) and device.startswith("cuda") else device


def _within(method: Callable) -> Callable:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with CudaIsCpu():
            return method(*args, **kwargs)

    return call


#: Overrides of the config: the only bridge and the only layers that need no GPU.
_ENGINE = {"vanilla_mbridge": True, "sequence_parallel": False, "dtype": "float32"}
_TRANSFORMER = {
    "use_cpu_initialization": True,
    "attention_backend": "unfused",
    "sequence_parallel": False,  # megatron-core's local norms do not support it
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "persist_layer_norm": False,
}

#: Methods of verl's ``MegatronEngine`` that run code of megatron-core or mbridge.
_METHODS = (
    "initialize",
    "forward_backward_batch",
    "optimizer_zero_grad",
    "optimizer_step",
    "lr_scheduler_step",
    "to",
    "save_checkpoint",
)


def on_cpu(engine: type) -> type:
    """Return a subclass of verl's Megatron engine that runs on the CPU, in float32.

    verl accepts bfloat16 and float16 only. On a CPU both are slower than float32. vLLM's rollout uses float32 here, and
    log-probs in another precision would differ from it.
    """

    class EngineOnCpu(engine):  # type: ignore[misc, valid-type]
        def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any):
            transformer = {**engine_config.override_transformer_config, **_TRANSFORMER}
            for name, value in {**_ENGINE, "override_transformer_config": transformer}.items():
                object.__setattr__(engine_config, name, value)  # verl freezes it
            with CudaIsCpu():
                super().__init__(model_config, engine_config, *args, **kwargs)

        def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[Iterator, Any]:
            with CudaIsCpu():
                tensors, peft = super().get_per_tensor_param(*args, **kwargs)
            return _each_within(tensors), peft

        def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            # The distributed optimizer writes into views of the parameters; float32 parameters are autograd leaves.
            with CudaIsCpu(), torch.no_grad():
                _begin_adam(self.optimizer)
                super().load_checkpoint(*args, **kwargs)

    for name in _METHODS:
        setattr(EngineOnCpu, name, _within(getattr(engine, name)))
    EngineOnCpu.__name__ = EngineOnCpu.__qualname__ = f"{engine.__name__}OnCpu"
    return EngineOnCpu


def _begin_adam(optimizer: Any) -> None:
    """Create the state that torch's Adam creates at its first step: megatron-core loads into an existing state."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        adam = part.optimizer
        for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
            if not adam.state[parameter]:
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter].update(step=torch.tensor(0.0), **zeros)


def _each_within(items: Iterator) -> Iterator:
    end = object()
    while True:
        with CudaIsCpu():
            item = next(items, end)
        if item is end:
            return
        yield item


def register() -> None:
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.megatron import transformer_impl

    for model_type, engine in (
        ("language_model", transformer_impl.MegatronEngineWithLMHead),
        ("value_model", transformer_impl.MegatronEngineWithValueHead),
    ):
        EngineRegistry.register(model_type=model_type, backend="megatron", device="cpu")(on_cpu(engine))
