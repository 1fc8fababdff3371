"""A worker's steps under asynchronous scheduling: with drafts, or launched ahead.

- **Launched ahead** of the tokens of the step before, as in stock vLLM: the sampled tokens stay on the device, where
  the next step takes them from. The drafter gets them while that step runs. Nothing is drafted.
- **With drafts**: the worker waits for the tokens of the step before, plans drafts, and translates the scheduler's plan
  (:mod:`.translation`). vLLM's model runner works as under synchronous scheduling.

The scheduler's plan of a step tells which, so that all ranks do the same; the first rank's drafter asked for it with the
output of an earlier step. Both leave the same state behind, once the tokens of a step launched ahead are filled in.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds

from verl_rhyme.engine.proposer import HistoryProposer, Sampled
from verl_rhyme.engine.translation import Bounds, Report, translate

#: Seconds: a shorter wait for a step's tokens means that the device waited for the host.
_AT_ONCE = 5e-5


@dataclass(slots=True)
class _Launched:
    """A step whose tokens are not known yet, and the batch that it had."""

    tokens: Any  # int32[B, 1] on the host, once ``copied``
    copied: Any  # event
    requests: list[str]  # B
    samples: np.ndarray  # bool[B], rows that sample a token: not amid a prompt
    lengths: np.ndarray  # int32[B], tokens of each request, with the sampled one
    prompts: np.ndarray  # int32[B], tokens of each prompt
    prefilled: int  # prompt tokens that the step computes
    follows: bool  # launched ahead of the step before


class Steps:
    """Takes the place of a V1 model runner's ``execute_model`` and ``sample_tokens``."""

    def __init__(self, runner: Any, proposer: HistoryProposer, ranks: Any) -> None:
        """``ranks``: vLLM's group of the tensor-parallel ranks."""
        self._runner, self._proposer, self._ranks = runner, proposer, ranks
        self._execute, self._sample, self._take = (
            runner.execute_model,
            runner.sample_tokens,
            runner.take_draft_token_ids,
        )
        runner.execute_model, runner.sample_tokens = self.execute_model, self.sample_tokens
        runner.take_draft_token_ids = self.take_draft_token_ids
        scheduler = runner.scheduler_config
        groups = enumerate(runner.kv_cache_config.kv_cache_groups)
        self._bounds = Bounds(
            step_tokens=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
            model_len=runner.max_model_len,
            blocks={
                number: group.kv_cache_spec.block_size * runner.dcp_world_size
                for number, group in groups
                if not isinstance(group.kv_cache_spec, MambaSpec)
            },
            reserved=proposer.model_tokens,
        )
        runner.use_async_spec_decode = False  # drafts are on the host
        self._launched: _Launched | None = None
        self._drafting = False  # whether the step between execute_model and sample_tokens is one with drafts
        self._sampled: dict[str, list[int]] = {}  # known tokens of the latest step, by request
        self._drafts: dict[str, list[int]] = {}  # planned after them

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        runner = self._runner
        self._drafting = scheduler_output.num_spec_tokens_to_schedule > 0
        if self._drafting or self._stale(scheduler_output):
            self._wait()
        if self._sampled:
            scheduler_output = translate(
                scheduler_output, self._sampled, runner.requests, self._planned() if self._drafting else {}, self._bounds
            )
            self._sampled = {}
        # vLLM prepares inputs as if tokens were on the device only if they are nowhere else.
        runner.use_async_scheduling = self._launched is not None
        try:
            return self._execute(scheduler_output, *args, **kwargs)
        finally:
            runner.use_async_scheduling = not self._drafting

    def sample_tokens(self, grammar_output: Any) -> Any:
        runner = self._runner
        state = runner.execute_model_state
        if state is None:  # an empty step
            return self._sample(grammar_output)
        drafted = {name: len(draft) for name, draft in state.scheduler_output.scheduled_spec_decode_tokens.items()}
        prefilled = state.scheduler_output.total_num_scheduled_tokens - sum(drafted.values())
        output = self._sample(grammar_output)
        if isinstance(output, AsyncModelRunnerOutput):
            before, self._launched = self._launched, self._record(output, prefilled)
            if before is not None:
                self._take_in(before, ahead=True)
            setattr(output._model_runner_output, Report.FIELD, Report({}, self._proposer.wants_drafts))
            return output
        self._sampled = {
            name: tokens for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True) if tokens
        }
        drafts = runner._draft_token_ids
        self._drafts = dict(zip(output.req_ids, drafts, strict=True)) if isinstance(drafts, list) else {}
        setattr(output, Report.FIELD, Report(drafted, self._proposer.wants_drafts))
        return output

    def take_draft_token_ids(self) -> Any:
        """Return the drafts of the step that has not sampled yet, for the scheduler to check against grammars."""
        state = self._runner.execute_model_state
        if state is None:
            return self._take()
        drafts = state.scheduler_output.scheduled_spec_decode_tokens
        return DraftTokenIds(list(drafts), [list(draft) for draft in drafts.values()])

    def _planned(self) -> dict[str, list[int]]:
        """Return the drafts that the first rank planned."""
        return self._drafts if self._ranks.world_size == 1 else self._ranks.broadcast_object(self._drafts)

    def _stale(self, scheduler_output: Any) -> bool:
        """Return whether a recurrent layer must resume a request from another state than that of one token."""
        return False

    def _record(self, output: Any, computed: int) -> _Launched:
        batch, made = self._runner.input_batch, output._model_runner_output
        rows = len(made.req_ids)
        samples = np.ones(rows, dtype=bool)
        samples[output._invalid_req_indices] = False
        return _Launched(
            tokens=output.sampled_token_ids_cpu,
            copied=output.async_copy_ready_event,
            requests=made.req_ids,
            samples=samples,
            lengths=batch.num_tokens_no_spec[:rows].copy(),
            prompts=batch.num_prompt_tokens[:rows].copy(),
            prefilled=computed - int(samples.sum()),
            follows=self._launched is not None,
        )

    def _wait(self) -> None:
        """Wait for the tokens of the step in flight; plan drafts from them."""
        launched, self._launched = self._launched, None
        if launched is not None:
            self._take_in(launched, ahead=False)
            batch = self._runner.input_batch
            batch.prev_sampled_token_ids = batch.sampled_token_ids_cpu = None  # inputs come from the host

    def _take_in(self, step: _Launched, ahead: bool) -> None:
        """Fill in a step's tokens; have the drafter take them in. ``ahead``: the next step has been launched."""
        begun = time.perf_counter()
        step.copied.synchronize()
        known = time.perf_counter()
        batch, requests = self._runner.input_batch, self._runner.requests
        sampled, rows, places = {}, [], []
        for i, (name, length, prompt, tokens) in enumerate(
            zip(step.requests, step.lengths.tolist(), step.prompts.tolist(), step.tokens.tolist(), strict=True)
        ):
            state = requests.get(name)
            if state is None or not step.samples[i]:
                continue
            place = length - 1 - prompt
            if place < len(state.output_token_ids):
                state.output_token_ids[place] = tokens[0]
            row = batch.req_id_to_index.get(name)
            if row is not None:
                batch.token_ids_cpu[row, length - 1] = tokens[0]
                sampled[name] = tokens
                rows.append(row)
                places.append(i)
        drafts = self._proposer.take_in(
            Sampled(
                requests=list(sampled),
                rows=np.array(rows, dtype=np.int64),
                lengths=step.lengths[places],
                prompts=step.prompts[places],
                drafted=np.zeros(len(rows), dtype=np.int64),
                accepted=np.zeros(len(rows), dtype=np.int64),
                batch=len(step.requests),
                prefilled=step.prefilled,
                known=known,
                hidden=ahead and known - begun > _AT_ONCE,
                ahead=ahead,
            )
        )
        if not ahead:
            self._sampled, self._drafts = sampled, dict(zip(sampled, drafts, strict=True))
