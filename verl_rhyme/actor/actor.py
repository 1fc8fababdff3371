"""verl's actor worker with training steps in parts (:mod:`verl_rhyme.actor.streamed_update`), and with samples of the
weights that it sends (:mod:`verl_rhyme.actor.sent_weights`).

:func:`streamed` puts the mixin before verl's ``ActorRolloutRefWorker``, ``DetachActorWorker`` or a class derived from
them. ``update_actor`` is unchanged, unless the data are marked as a part (:data:`PART`): then it accumulates gradients,
and ``finish_update`` takes the optimizer's step.
"""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.metric.utils import Metric
from verl.utils.tensordict_utils import maybe_fix_3d_position_ids
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from verl_rhyme.actor.sent_weights import SentWeights
from verl_rhyme.actor.streamed_update import BY_TOKENS, StreamedUpdate, find_unsupported_engine_option
from verl_rhyme.processes import queue
from verl_rhyme.weights.samples import Sent

#: Key in the data of ``update_actor``: they are a part of a mini-batch.
PART = "rhyme_part"


class StreamedActor(ActorRolloutRefWorker):
    """Mixin that accumulates gradients of parts, and samples the weights that it sends."""

    _update: StreamedUpdate | None = None
    _sent: Sent | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        queue.join()  # verl fetches and stores data around each method

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> TensorDict | None:
        if not tu.pop(data, key=PART, default=False):
            return super().update_actor(data)
        assert self.actor is not None, "this worker has no actor"
        began = time.perf_counter()
        maybe_fix_3d_position_ids(data)
        if self.enable_routing_replay:
            tu.assign_non_tensor_data(data, "enable_routing_replay", True)
        if self._update is None:
            by_tokens = self.config.actor.loss_agg_mode == BY_TOKENS
            self._update = StreamedUpdate(self.actor.engine, self.actor.loss_fn, by_tokens)
            self._sequences: list[int] = []
            self._seconds = 0.0
        try:
            self._sequences += data["input_ids"].offsets().diff().tolist()
            self._update.add(_with_defaults(data, self.actor))
        except BaseException:
            self.drop_update()  # its gradients are incomplete
            raise
        self._seconds += time.perf_counter() - began
        if not self.actor.engine.is_mp_src_rank_with_outputs():
            return None
        # verl's trainer needs this metric.
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": {"mfu": [0.0]}}).cpu()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        assert self.actor is not None, "this worker has no actor"
        if torch.distributed.get_rank() != 0:
            return await super().update_weights(global_steps=global_steps, mode=mode)
        self._sent = None
        with SentWeights(self.actor.engine, global_steps) as sent:
            result = await super().update_weights(global_steps=global_steps, mode=mode)
        self._sent = sent.result()
        return result

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sent_weights(self) -> Sent | None:
        """Return samples of the weights that this worker has sent last; ``None`` on other ranks than the first."""
        return self._sent

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def find_unsupported_feature(self) -> str | None:
        """Return what in the engine or a derived class requires the whole batch at once; ``None``: nothing."""
        if self.actor is None:
            return None
        if super(StreamedActor, type(self)).update_actor is not ActorRolloutRefWorker.update_actor:
            return f"{type(self).__name__}.update_actor overrides verl's, and needs whole batches"
        for name in ("train_mini_batch", "train_batch"):
            if getattr(type(self.actor), name) is not getattr(TrainingWorker, name):
                return f"{type(self.actor).__name__}.{name} overrides verl's, and needs whole mini-batches"
        return find_unsupported_engine_option(self.actor.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_update(self) -> dict[str, Any] | None:
        """Take the steps of the optimizer and of the learning rate schedule. Return metrics of the whole mini-batch
        like verl's ``update_actor``; ``None`` on ranks without outputs."""
        update, actor = self._update, self.actor
        if update is None or actor is None:
            raise RuntimeError("finish_update was called, but no part was added")
        self._update = None
        began = time.perf_counter()
        output = update.finish()
        rate = actor.engine.lr_scheduler_step()
        actor.profiler.step()
        sequences: list[Any] = [self._sequences]
        if (group := actor.engine.get_data_parallel_group()) is not None:
            sequences = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(sequences, self._sequences, group)
        if not actor.engine.is_mp_src_rank_with_outputs():
            return None
        output["metrics"]["lr"] = rate
        processed = actor._postprocess_output(
            output,
            global_token_num=list(chain.from_iterable(sequences)),
            delta_time=self._seconds + time.perf_counter() - began,
            forward_only=False,
            images_seqlens=None,
        )
        return {name: _over_ranks(value) for name, value in tu.get(processed, "metrics").items()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def drop_update(self) -> None:
        """Drop the gradients accumulated since the last step."""
        update, self._update = self._update, None
        if update is not None:
            update.drop()


def streamed(worker: type[ActorRolloutRefWorker]) -> type[ActorRolloutRefWorker]:
    """Return the class with :class:`StreamedActor` before it, or unchanged if it has the mixin."""
    if issubclass(worker, StreamedActor):
        return worker
    return type(f"Streamed{worker.__name__}", (StreamedActor, worker), {"__module__": worker.__module__})


def _over_ranks(value: Any) -> list[Any]:
    if isinstance(value, Metric):
        return [value.aggregate()]
    if not isinstance(value, list):
        return [value]
    if value and isinstance(value[0], Metric):
        return [Metric.aggregate_dp(value)]
    return list(chain.from_iterable(each if isinstance(each, list) else [each] for each in value))


def _with_defaults(data: TensorDict, actor: TrainingWorker) -> TensorDict:
    """Add the options that ``train_batch`` would add to the data."""
    options = actor.engine_config
    defaults = {
        "use_remove_padding": actor.model_config.get("use_remove_padding", False),
        "use_dynamic_bsz": options.use_dynamic_bsz,
        "max_token_len_per_gpu": options.max_token_len_per_gpu,
        "micro_batch_size_per_gpu": options.micro_batch_size_per_gpu,
        "use_fused_kernels": options.use_fused_kernels,
    }
    for name, value in defaults.items():
        if name not in data.keys():  # noqa: SIM118  (a TensorDict's "in" differs)
            tu.assign_non_tensor(data, **{name: value})
    return data
