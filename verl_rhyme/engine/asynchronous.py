"""Whether an engine schedules asynchronously: one step ahead of the device, as vLLM does without our drafts.

An engine is ours if its ``additional_config`` has our field. The patch ``vllm_asynchronous`` calls :func:`configure`
for such an engine in the place of vLLM's own checks.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from verl_rhyme.processes.request import FIELD

logger = init_logger(f"vllm.{__name__}")

SCHEDULER = "verl_rhyme.engine.scheduler.DraftScheduler"
#: Key in our field of ``additional_config``: why the engine schedules synchronously, if it does.
REASON = "synchronous"


def wanted(config: Any) -> bool:
    return FIELD in (config.additional_config or {})


def configure(config: Any, chosen: bool | None) -> None:
    """Turn asynchronous scheduling on in a VllmConfig of ours, or tell why it is off; ``chosen``: the user's setting."""
    reason = refusal(config, chosen)
    config.scheduler_config.async_scheduling = not reason
    if reason:
        config.additional_config[FIELD][REASON] = reason
        logger.warning_once("verl-rhyme: this engine schedules synchronously, because it has %s", reason)
    elif config.speculative_config is not None:
        config.scheduler_config.scheduler_cls = SCHEDULER


def refusal(config: Any, chosen: bool | None) -> str:
    """Return the option for which an engine cannot schedule asynchronously; empty if it can."""
    from vllm.v1.executor.abstract import Executor

    if chosen is False:
        return "async_scheduling=false"
    if config.scheduler_config.scheduler_cls not in (None, SCHEDULER):
        return f"scheduler_cls={config.scheduler_config.scheduler_cls}"
    if config.parallel_config.pipeline_parallel_size > 1:
        return f"pipeline_parallel_size={config.parallel_config.pipeline_parallel_size}"
    if not Executor.get_class(config).supports_async_scheduling():
        return f"distributed_executor_backend={config.parallel_config.distributed_executor_backend}"
    return ""
