"""Schedule one step ahead of the device also with our drafts, whose tokens are known to the worker alone.

vLLM allows asynchronous scheduling for drafts that stay on the device, and turns it off for drafts of a custom class.
An engine whose ``additional_config`` has our field has :mod:`verl_rhyme.engine.scheduler` and
:mod:`verl_rhyme.engine.steps` instead, which do without drafts in the scheduler.
"""

from __future__ import annotations

import logging
from typing import Any

from verl_rhyme.patches.core import Patch, around

logger = logging.getLogger("vllm.verl_rhyme")  # below "vllm", so that vLLM's own handler prints it

_SCHEDULER = "verl_rhyme.engine.scheduler.DraftScheduler"


def _schedule_ahead(original: Any, self: Any) -> None:
    more, scheduler = self.additional_config, self.scheduler_config
    ours = more.get("rhyme") if isinstance(more, dict) else None
    if ours is None:
        original(self)
        return
    if "drafting" in ours and self.parallel_config.pipeline_parallel_size > 1:
        raise ValueError(
            "verl-rhyme drafts in the only pipeline stage of an engine: set pipeline_parallel_size=1, and "
            f"tensor_parallel_size={self.parallel_config.world_size} for the same number of devices"
        )
    # False skips vLLM's checks, which refuse drafts of a custom class. Its log then says "disabled".
    chosen, scheduler.async_scheduling = scheduler.async_scheduling, False
    synchronised = self.parallel_config.disable_nccl_for_dp_synchronization
    original(self)
    reason = ours["synchronous"] = _obstacle(self, chosen)
    scheduler.async_scheduling = not reason
    if scheduler.async_scheduling and synchronised is None:  # as vLLM chooses it for an asynchronous engine
        self.parallel_config.disable_nccl_for_dp_synchronization = True
    if reason:
        logger.warning("verl-rhyme: this engine schedules synchronously, because it has %s", reason)
    elif self.speculative_config is not None:
        scheduler.scheduler_cls = _SCHEDULER


def _obstacle(config: Any, chosen: bool | None) -> str:
    """Return why an engine schedules synchronously; empty if it does not."""
    from vllm.v1.executor.abstract import Executor

    scheduler, parallel = config.scheduler_config, config.parallel_config
    if chosen is False:
        return "async_scheduling=false"
    if scheduler.scheduler_cls not in (None, _SCHEDULER):
        return f"scheduler_cls={scheduler.scheduler_cls}"
    if parallel.pipeline_parallel_size > 1:
        return f"pipeline_parallel_size={parallel.pipeline_parallel_size}"
    if not Executor.get_class(config).supports_async_scheduling():
        return f"distributed_executor_backend={parallel.distributed_executor_backend}"
    return ""


PATCH = Patch(
    name="vllm_asynchronous",
    target="vllm.config.vllm:VllmConfig.__post_init__",
    why="with drafts of a custom class vLLM schedules each step only after the step before: the device waits for the "
    "host in every step, also in those without drafts",
    requires="vllm==0.24.0",
    source_sha256="7654459b0e0a30c7765a6d46acf4c7815e548fb613e2efc232e084a180fcfeaf",
    replace=around(_schedule_ahead),
)
