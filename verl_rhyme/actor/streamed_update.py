"""A training step whose samples come in parts: gradients are accumulated, and the optimizer steps after the last part.

verl's ``train_batch`` takes a whole mini-batch: zero, forward and backward over its micro-batches, step. Here the parts
of a mini-batch come as they finish, and the step equals verl's step on the whole (pipelined training of StreamRL,
arXiv:2504.15930, section 4): a loss is a sum over samples divided by a count of the mini-batch. The number of samples
is known beforehand. The number of tokens (``loss_agg_mode=token-mean``) is known only with the last response; until
then an estimate from the first part replaces it, and all gradients are scaled before the step.

FSDP reduces gradients into each rank's shard at the end of each part, and adds them there. Megatron's reduction cannot
be repeated: shards of a distributed optimizer, layer norms under sequence parallelism and tied embeddings would count
twice. So gradients of parts stay on their ranks, and are reduced once, before the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric.utils import AggregationType, Metric
from verl.utils.py_functional import append_to_dict
from verl.workers.engine import BaseEngine

#: ``loss_agg_mode`` whose divisor is known only with the last token of the mini-batch.
BY_TOKENS = "token-mean"


class StreamedUpdate:
    """One optimizer step of verl's ``engine``, which is in no mode's context and passes
    :func:`find_unsupported_engine_option`. All ranks call the same methods in the same order. ``by_tokens``: the loss
    is divided by the tokens of the mini-batch."""

    def __init__(self, engine: BaseEngine, loss: Callable[..., Any], by_tokens: bool) -> None:
        self._engine, self._loss, self._by_tokens = engine, loss, by_tokens
        self._reducer = _Megatron(engine) if hasattr(engine, "tf_config") else _Fsdp(engine)
        self._stand_in = 0  # estimated tokens of the mini-batch, the divisor until the step
        self._more = 1  # samples of the mini-batch for each sample of the first part
        self._tokens = 0
        self._losses: list[float] = []
        self._metrics: dict[str, Any] = {}
        self._stays = False
        self._parts = 0

    def add(self, data: TensorDict) -> None:
        """Accumulate the gradients of a part: any samples of the mini-batch, equally many on each data parallel rank.
        ``data`` are for ``train_batch``; their ``global_batch_size`` is the whole mini-batch's."""
        engine = self._engine
        if not self._parts:
            self._stay()
            self._more = max(1, tu.get(data, "global_batch_size") // (len(data) * engine.get_data_parallel_size()))
        with engine.train_mode(disable_auto_offload=True, zero_grad_on_exit=False), self._reducer.defer():
            if not self._parts:
                engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(data, self._divided, forward_only=False)
        tokens = int(tu.get(data, "batch_num_tokens"))  # of all ranks
        self._stand_in = self._stand_in or self._more * max(1, tokens)
        self._tokens += tokens
        self._parts += 1
        if engine.is_mp_src_rank_with_outputs():
            self._losses += output["loss"]
            for name, values in output["metrics"].items():
                for value in values.values if isinstance(values, Metric) else values:
                    one = Metric(values.aggregation, value) if isinstance(values, Metric) else value
                    append_to_dict(self._metrics, {name: one})

    def finish(self) -> dict[str, Any]:
        """Take the optimizer's step. Return ``loss`` and ``metrics`` of ``train_batch``, with the gradient norm; empty
        on ranks without outputs."""
        engine: Any = self._engine
        share = self._stand_in / max(1, self._tokens) if self._by_tokens else 1.0
        offloads = engine.is_optimizer_offload_enabled
        if offloads:
            engine.to(_device(), model=False, optimizer=True, grad=False)
        with engine.train_mode(disable_auto_offload=True):
            self._reducer.scale_and_reduce(share)
            norm = engine.optimizer_step()
        if offloads:
            engine.to("cpu", model=False, optimizer=True, grad=False)
        self._leave()
        for values in self._metrics.values():
            if isinstance(values, Metric) and values.aggregation is AggregationType.SUM:
                values.values = [share * value for value in values.values]
        if engine.is_mp_src_rank_with_outputs():
            self._metrics["grad_norm"] = norm
        return {"loss": [share * loss for loss in self._losses], "metrics": self._metrics}

    def drop(self) -> None:
        if self._parts:
            with self._engine.train_mode(disable_auto_offload=True):
                self._engine.optimizer_zero_grad()
        self._leave()

    def _stay(self) -> None:
        """Keep parameters and gradients on the device until the step, also over calls for log-probs: offloading would
        move the gradients too, and lose Megatron's."""
        engine: Any = self._engine
        if engine.is_param_offload_enabled:
            engine.to(_device(), model=True, optimizer=False, grad=True)
            engine._is_offload_param = False
            self._stays = True

    def _leave(self) -> None:
        engine: Any = self._engine
        if self._stays:
            engine._is_offload_param = True
            engine.to("cpu", model=True, optimizer=False, grad=True)
            self._stays = False

    def _divided(self, model_output: Any, data: TensorDict, dp_group: Any = None) -> Any:
        """Return the loss of a micro-batch, divided by the estimated count."""
        stand_in = self._stand_in or self._more * max(1, int(tu.get(data, "batch_num_tokens")))
        tu.assign_non_tensor(data, batch_num_tokens=stand_in)
        return self._loss(model_output=model_output, data=data, dp_group=dp_group)


class _Fsdp:
    """Reduces each part into shards, which accumulate."""

    def __init__(self, engine: Any) -> None:
        self._module = engine.module

    def defer(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def scale_and_reduce(self, share: float) -> None:
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(share)


class _Megatron:
    """Accumulates in each rank's buffers, and reduces once."""

    def __init__(self, engine: Any) -> None:
        from megatron.core.utils import get_model_config

        self._chunks = engine.module
        self._config = get_model_config(engine.module[0])
        self._finalize = self._config.finalize_model_grads_func

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """Disable the schedule's reductions, both at its end and bucket by bucket."""
        config, ddp = self._config, [chunk.ddp_config for chunk in self._chunks]
        before = config.finalize_model_grads_func, config.grad_sync_func, [each.overlap_grad_reduce for each in ddp]
        config.finalize_model_grads_func = config.grad_sync_func = None
        for each in ddp:
            each.overlap_grad_reduce = False
        try:
            yield
        finally:
            config.finalize_model_grads_func, config.grad_sync_func, overlaps = before
            for each, overlap in zip(ddp, overlaps, strict=True):
                each.overlap_grad_reduce = overlap

    def scale_and_reduce(self, share: float) -> None:
        for chunk in self._chunks:
            chunk.scale_gradients(share)
        with self.defer():
            self._finalize(self._chunks)


def find_unsupported_engine_option(engine: Any) -> str | None:
    """Return the engine option that prevents gradients of parts from being accumulated; ``None``: none does."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    if isinstance(engine, FSDPEngine):
        return None
    if not hasattr(engine, "tf_config"):
        return f"{type(engine).__name__}, which is neither FSDP nor Megatron"
    config, options = engine.tf_config, engine.engine_config
    for unsupported, option in (
        (config.calculate_per_token_loss, "calculate_per_token_loss (context parallelism)"),
        (config.defer_embedding_wgrad_compute, "defer_embedding_wgrad_compute"),
        (options.dynamic_context_parallel, "dynamic_context_parallel"),
        # The schedule divides these losses by the micro-batches of one call.
        (_auxiliary(config), "auxiliary losses of experts (moe_*_loss_coeff)"),
        (engine.model_config.mtp.enable, "multi-token prediction (mtp)"),
        # It reduces in each backward pass and cannot be stopped.
        (options.use_megatron_fsdp, "use_megatron_fsdp"),
        (any(not hasattr(chunk, "scale_gradients") for chunk in engine.module), "a module that is not Megatron's DDP"),
    ):
        if unsupported:
            return option
    return None


def _auxiliary(config: Any) -> bool:
    """A coefficient in the model's config is not enough: verl sets the load balancing type to ``none``."""
    if not config.num_moe_experts:
        return False
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    kinds = kinds if isinstance(kinds, list) else [kinds]
    coefficients = coefficients if isinstance(coefficients, list) else [coefficients] * len(kinds)
    balances = any(str(kind).endswith("aux_loss") and value for kind, value in zip(kinds, coefficients, strict=False))
    return balances or bool(config.moe_z_loss_coeff)


def _device() -> str:
    from verl.utils.device import get_device_name

    return str(get_device_name())
