"""Schedule one step ahead of the device also with our drafts, whose tokens are known to the worker alone.

vLLM allows asynchronous scheduling for drafts that stay on the device, and turns it off for drafts of a custom class.
:mod:`verl_rhyme.engine.scheduler` and :mod:`verl_rhyme.engine.steps` do without drafts in the scheduler.
"""

from __future__ import annotations

from typing import Any

from verl_rhyme.patches.core import Patch, around


def _schedule_ahead(original: Any, self: Any) -> None:
    from verl_rhyme.engine import asynchronous

    scheduler = self.scheduler_config
    if not asynchronous.wanted(self):
        original(self)
        return
    chosen, scheduler.async_scheduling = scheduler.async_scheduling, False  # no check of vLLM's on the drafts
    original(self)
    asynchronous.configure(self, chosen)


PATCH = Patch(
    name="vllm_asynchronous",
    target="vllm.config.vllm:VllmConfig.__post_init__",
    why="with drafts of a custom class vLLM schedules each step only after the step before: the device waits for the "
    "host in every step, also in those without drafts",
    requires="vllm==0.24.0",
    source_sha256="7654459b0e0a30c7765a6d46acf4c7815e548fb613e2efc232e084a180fcfeaf",
    replace=around(_schedule_ahead),
)
