"""vLLM's asynchronous scheduler for workers that plan the drafts.

vLLM's own schedules K placeholders a row ahead of drafts that it does not know: they take the step's token budget from
prompts, whether or not drafts follow. This one schedules every decoding row with one token, as without speculation. A
worker adds the drafts to what it gets (:mod:`.translation`), within the blocks that the row holds, and reports with its
output how many it verified. :meth:`DraftScheduler.update_from_output` books them as scheduled, and vLLM's own code goes
on from there. So the scheduler never counts tokens that may be rejected.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from verl_rhyme.config import config_tree
from verl_rhyme.engine.translation import Report
from verl_rhyme.processes.request import FIELD

#: Slots that a request gets for later drafts: so many, and a multiple of its latest draft's tokens.
_FIRST, _GROWTH = 8, 4


class DraftScheduler(AsyncScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = config_tree.parse({"drafting": self.vllm_config.additional_config[FIELD]["drafting"]})
        assert config is not None
        self._longest = self.num_spec_tokens
        # Whether the workers want to draft: at first with a model's drafter, whose trial needs steps that wait.
        self._drafts = self.num_lookahead_tokens > 0
        self._drafted: dict[str, int] = {}  # tokens of the latest drafts, by request
        self.num_lookahead_tokens: int
        if self.num_lookahead_tokens:  # the model's own drafter writes keys and values of its tokens
            self.num_lookahead_tokens = 2 * self._longest + config.drafting.model_tokens + 1
        self._groups = len(self.kv_cache_config.kv_cache_groups)
        self._allocate = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_ahead  # type: ignore[method-assign]

    def _allocate_ahead(
        self, request: Any, num_new_tokens: int, *args: Any, num_lookahead_tokens: int = 0, **kwargs: Any
    ) -> Any:
        """Reserve slots for drafts of this step and of the one in flight, if no running request needs the blocks.

        Blocks of a cache that comes from another engine (``delay_cache_blocks``) must be as many as there.
        """
        if self._drafts and not num_lookahead_tokens and not kwargs.get("delay_cache_blocks"):
            latest = self._drafted.get(request.request_id, 0)
            slots = min(2 * self._longest + 1, _FIRST + _GROWTH * latest)
            free = self.kv_cache_manager.block_pool.get_num_free_blocks()
            if free > self._groups * (len(self.running) + slots // self.block_size + 1):
                blocks = self._allocate(request, num_new_tokens, *args, num_lookahead_tokens=slots, **kwargs)
                if blocks is not None:
                    return blocks
        return self._allocate(request, num_new_tokens, *args, num_lookahead_tokens=num_lookahead_tokens, **kwargs)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        scheduler_output.num_spec_tokens_to_schedule = 0  # no placeholders
        super()._update_after_schedule(scheduler_output)
        scheduler_output.num_spec_tokens_to_schedule = self._longest if self._drafts else 0

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        report: Report | None = getattr(model_runner_output, Report.FIELD, None)
        if report is not None:
            self._drafts, self._drafted = report.drafts, report.drafted
            for name, tokens in report.drafted.items():
                self._book(scheduler_output, name, tokens)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _book(self, scheduler_output: Any, name: str, tokens: int) -> None:
        """Count draft tokens as scheduled, which the worker verified in this step."""
        scheduler_output.num_scheduled_tokens[name] += tokens
        request = self.requests.get(name)
        if request is None or request.is_finished() or request.async_tokens_to_discard:
            scheduler_output.scheduled_spec_decode_tokens.pop(name, None)
            return
        scheduler_output.scheduled_spec_decode_tokens[name] = [-1] * tokens
        request.num_output_placeholders += tokens
        if request.num_computed_tokens > 0:  # else it has been preempted
            request.num_computed_tokens += tokens

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        """Check drafts that a step has verified against grammars, before the step samples."""
        for name, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(name)
            if request is not None and request.use_structured_output and name in scheduler_output.num_scheduled_tokens:
                scheduler_output.scheduled_spec_decode_tokens[name] = [-1] * len(tokens)
        super().update_draft_token_ids_in_output(draft_token_ids, scheduler_output)
