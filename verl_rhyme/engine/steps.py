"""A worker's steps under asynchronous scheduling: launched ahead, or with drafts.

vLLM's model runner launches a step ahead of the tokens of the step before: they stay on the device, and the host counts
a placeholder for each row. That is how steps without drafts run here, too. The drafter gets their tokens while the next
step runs. A step with drafts first lets vLLM update its batch. Then it waits for the tokens in flight, fills them in,
plans drafts, and adds them to the scheduler's plan (:mod:`.translation`).

The scheduler's plan says whether a step drafts, so that all ranks do the same; the first rank's drafter asked for it
with the output of an earlier step.
"""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID

from verl_rhyme.engine.proposer import HistoryProposer, Sampled
from verl_rhyme.engine.translation import Bounds, Report, add_drafts, has_ended, spread

#: Seconds: a shorter wait for a step's tokens means that the device waited for the host.
_AT_ONCE = 5e-5
#: Seconds that a step's output waits at most for the launch of the next step.
_YIELD = 0.05


@dataclass(slots=True)
class _InFlight:
    """A step whose tokens are not known yet, with the batch that it had: B rows."""

    output: Any  # keeps the tokens on the device until they are copied
    tokens: Any  # int32[B, longest draft + 1] on the host, once ``copied``
    copied: Any  # event
    requests: list[str]
    samples: np.ndarray  # bool[B], whether the row samples tokens: not amid a prompt
    lengths: np.ndarray  # int32[B], tokens, with one placeholder
    prompts: np.ndarray  # int32[B], tokens of the prompt
    drafted: np.ndarray  # int64[B]
    prefilled: int  # prompt tokens that the step computes
    launched_ahead: bool  # before the tokens of the step before were known


class _Output(AsyncModelRunnerOutput):
    """A step's output, which another thread makes: after the launch of the next step, if that waits for the tokens.

    Both need Python's lock, and the device waits for the launch alone.
    """

    def __init__(self, output: Any, steps: Steps) -> None:
        self._output, self._steps = output, steps

    def get_output(self) -> Any:
        self._output.async_copy_ready_event.synchronize()
        self._steps.launched.wait(_YIELD)
        return self._output.get_output()


class Steps:
    """Takes the place of a V1 model runner's ``execute_model`` and ``sample_tokens``."""

    def __init__(self, runner: Any, proposer: HistoryProposer, ranks: Any) -> None:
        """``ranks``: vLLM's group of tensor-parallel ranks."""
        self._runner, self._proposer, self._ranks = runner, proposer, ranks
        self._execute, self._sample, self._take = (
            runner.execute_model,
            runner.sample_tokens,
            runner.take_draft_token_ids,
        )
        self._update, self._book = runner._update_states, runner._bookkeeping_sync
        runner.execute_model, runner.sample_tokens = self.execute_model, self.sample_tokens
        runner.take_draft_token_ids = self.take_draft_token_ids
        runner._update_states, runner._bookkeeping_sync = self._updated, self._booked
        runner.use_async_spec_decode = False  # drafts are on the host
        runner.rhyme_steps = self
        scheduler = runner.scheduler_config
        caches = {number: group.kv_cache_spec for number, group in enumerate(runner.kv_cache_config.kv_cache_groups)}
        self._bounds = Bounds(
            step_tokens=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
            groups=tuple(number for number, cache in caches.items() if not isinstance(cache, MambaSpec)),
            ranks=runner.dcp_world_size,
            reserved=proposer.model_tokens,
        )
        self._model_len = runner.max_model_len
        self._recurrent = len(self._bounds.groups) < len(caches)
        self._kept: dict[str, int] = {}  # tokens of a request's latest step, of recurrent layers
        self._in_flight: _InFlight | None = None
        self._over: set[str] = set()  # requests that have ended, of which the scheduler does not know yet
        # Of the rows of these requests: their most tokens, int64[B], and all tokens that end one of them.
        self._limited: list[str] = []
        self._longest, self._stops = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self._drafting = self._waits = False
        #: Of the last tokens that were taken in: whether the next step had been launched, and the host waited for them.
        self._noticed = False, False
        #: Clear from the end of a step that the next one waits for to that one's launch.
        self.launched = threading.Event()
        self.launched.set()

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        runner, flight = self._runner, self._in_flight
        cached = scheduler_output.scheduled_cached_reqs
        self._drafting = scheduler_output.num_spec_tokens_to_schedule > 0
        self._waits = self._drafting or (flight is not None and bool(flight.drafted.any()))
        if flight is not None and cached.resumed_req_ids:  # the scheduler drops the tokens of a forced preemption
            flight.samples &= ~np.isin(flight.requests, list(cached.resumed_req_ids))
        self._over -= scheduler_output.finished_req_ids | cached.resumed_req_ids
        if self._recurrent:
            for name in (*scheduler_output.finished_req_ids, *cached.resumed_req_ids):
                self._kept.pop(name, None)
            here = runner.input_batch.req_id_to_index
            self._waits |= any(self._kept.get(name, 1) != 1 for name in cached.req_ids if name not in here)
        try:
            return self._execute(copy.copy(scheduler_output), *args, **kwargs)
        finally:
            self.launched.set()
            runner.use_async_scheduling = True

    def _updated(self, scheduler_output: Any) -> Any:
        self._update(scheduler_output)
        if self._waits:
            if scheduler_output.total_num_scheduled_tokens:
                self.launched.clear()
            self._settle(scheduler_output)
            self._runner.use_async_scheduling = False  # recurrent layers take their counts from the host

    def _settle(self, scheduler_output: Any) -> None:
        """Wait for the tokens in flight, plan drafts and add them to the step."""
        runner, flight, self._in_flight = self._runner, self._in_flight, None
        batch, drafts = runner.input_batch, dict[str, list[int]]()
        if flight is not None:
            drafts = self._take_in(flight, next_launched=False)
            batch.prev_sampled_token_ids = batch.sampled_token_ids_cpu = batch.prev_req_id_to_index = None
        if self._recurrent:
            for name, row in batch.req_id_to_index.items():
                batch.num_accepted_tokens_cpu[row] = self._kept.get(name, 1)
        if not self._drafting:
            return
        if self._ranks.world_size > 1:  # the first rank alone plans
            drafts = self._ranks.broadcast_object(drafts)
        add_drafts(scheduler_output, drafts, batch, runner.requests, self._bounds)
        if scheduler_output.scheduled_spec_decode_tokens and runner.reorder_batch_threshold is not None:
            runner._may_reorder_batch(scheduler_output)
            batch.refresh_metadata()

    def sample_tokens(self, grammar_output: Any) -> Any:
        runner = self._runner
        state = runner.execute_model_state
        output = self._sample(grammar_output)
        if state is None or not isinstance(output, AsyncModelRunnerOutput):  # an empty step
            return output
        plan = state.scheduler_output
        drafted = {name: len(draft) for name, draft in plan.scheduled_spec_decode_tokens.items()}
        for name in drafted:
            runner.requests[name].prev_num_draft_len = 0  # vLLM would count them as accepted
        before = self._in_flight
        self._in_flight = self._record(output, plan.total_num_scheduled_tokens, drafted)
        if before is not None:
            self._take_in(before, next_launched=True)
        report = Report(drafted, self._proposer.wants_drafts)
        setattr(output._model_runner_output, Report.FIELD, report)
        return _Output(output, self)

    def _booked(self, scheduler_output: Any, sampler_output: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self._runner.input_batch
        if batch.prev_sampled_token_ids is None and scheduler_output.scheduled_spec_decode_tokens:
            # vLLM expects one token a row unless it is set. Nothing reads it, because the next step waits.
            batch.prev_sampled_token_ids = sampler_output.sampled_token_ids
        return self._book(scheduler_output, sampler_output, *args, **kwargs)

    def take_draft_token_ids(self) -> Any:
        """Return the drafts of the step that has not sampled yet, for the scheduler to check against grammars."""
        state = self._runner.execute_model_state
        if state is None:
            return self._take()
        drafts = state.scheduler_output.scheduled_spec_decode_tokens
        return DraftTokenIds(list(drafts), [list(draft) for draft in drafts.values()])

    def _record(self, output: Any, computed: int, drafted: dict[str, int]) -> _InFlight:
        batch, requests = self._runner.input_batch, output._model_runner_output.req_ids
        rows = len(requests)
        samples = np.ones(rows, dtype=bool)
        samples[output._invalid_req_indices] = False
        return _InFlight(
            output=output,
            tokens=output.sampled_token_ids_cpu,
            copied=output.async_copy_ready_event,
            requests=requests,
            samples=samples,
            lengths=batch.num_tokens_no_spec[:rows].copy(),
            prompts=batch.num_prompt_tokens[:rows].copy(),
            drafted=np.array([drafted.get(name, 0) for name in requests] if drafted else [0] * rows, dtype=np.int64),
            prefilled=computed - sum(drafted.values()) - int(samples.sum()),
            launched_ahead=not self._waits,
        )

    def _take_in(self, step: _InFlight, next_launched: bool) -> dict[str, list[int]]:
        """Fill in a step's tokens and give them to the drafter; return its drafts.

        ``next_launched``: the next step runs already, and cannot have them.
        """
        begun = time.perf_counter()
        step.copied.synchronize()
        known = time.perf_counter()
        # Tokens that the host waited for were known at once; others, as late in each step only of one kind.
        now = next_launched, known - begun > _AT_ONCE
        before, self._noticed = self._noticed, now
        runner, batch, names = self._runner, self._runner.input_batch, step.requests
        tokens, counts = step.tokens.numpy(), step.samples.astype(np.int64)
        if tokens.shape[1] > 1:
            counts *= ((tokens != PLACEHOLDER_TOKEN_ID) & (tokens < batch.vocab_size)).sum(axis=1)
        begins = step.lengths.astype(np.int64) - 1
        rows = self._rows(names)
        columns = names, tokens.tolist(), counts.tolist(), (begins - step.prompts).tolist()
        for name, new, count, place in zip(*columns, strict=True):
            state = runner.requests.get(name)
            if state is None or not count:
                continue
            if count == 1:
                state.output_token_ids[place : place + 1] = new[:1]
            else:
                state.output_token_ids[place:] = new[:count]
                state.num_computed_tokens = state.num_prompt_tokens + place + count - 1
            if self._recurrent:
                self._kept[name] = count
        at = np.flatnonzero((rows >= 0) & (counts > 0))
        _fill(batch, tokens, rows[at], at, begins[at], counts[at])
        lengths = begins + counts
        if self._over:
            at = np.array([i for i in at.tolist() if names[i] not in self._over], dtype=np.int64)
        ended = self._ended(step, at, lengths, tokens, counts)
        names = names if len(at) == len(names) else [names[i] for i in at.tolist()]
        model = None if next_launched else self._proposer.model_drafter
        drafts = self._proposer.take_in(
            Sampled(
                requests=names,
                rows=rows[at],
                tokens=batch.token_ids_cpu,
                lengths=lengths[at],
                prompts=step.prompts[at],
                drafted=step.drafted[at],
                accepted=counts[at] - 1,
                ended=ended,
                batch=len(step.requests),
                prefilled=step.prefilled,
                chains=None if model is None else model.chains(names),
                known=known,
                waited=not step.launched_ahead and not step.drafted.any(),
                hidden=all(now),
                timed=before == now or (before[1] and now[1]),
                next_launched=next_launched,
            )
        )
        return dict(zip(names, drafts, strict=True))

    def _rows(self, names: list[str]) -> np.ndarray:
        """Return the rows of requests in the batch, int64[B]; -1 for one that is not there."""
        batch = self._runner.input_batch
        if names == batch.req_ids:
            return np.arange(len(names))
        return np.array([batch.req_id_to_index.get(name, -1) for name in names], dtype=np.int64)

    def _ended(
        self, step: _InFlight, at: np.ndarray, lengths: np.ndarray, tokens: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """Return which rows ``at`` of a step end with its tokens, bool[len(at)]; they are left out of later steps."""
        names = [step.requests[i] for i in at.tolist()]
        if names != self._limited:
            params = [self._runner.requests[name].sampling_params for name in names]
            self._limited = names
            longest = step.prompts[at] + np.array([each.max_tokens for each in params], dtype=np.int64)
            self._longest = np.minimum(longest, self._model_len)
            stops = {token for each in params for token in (each.eos_token_id, *(each.stop_token_ids or ()))}
            self._stops = np.array(sorted(stops - {None}), dtype=tokens.dtype)
        ending = lengths[at] >= self._longest
        if len(self._stops):
            ending |= np.isin(tokens[at], self._stops).any(axis=1)
        for k in np.flatnonzero(ending).tolist():
            i, name = at[k], names[k]
            if has_ended(self._runner.requests[name], tokens[i, : counts[i]].tolist(), self._model_len):
                self._over.add(name)
            else:
                ending[k] = False
        return ending


def _fill(
    batch: Any, tokens: np.ndarray, rows: np.ndarray, steps: np.ndarray, begins: np.ndarray, counts: np.ndarray
) -> None:
    """Write the first ``counts`` tokens of rows ``steps`` of a step to ``rows`` of the batch, from ``begins``."""
    if tokens.shape[1] == 1:
        batch.token_ids_cpu[rows, begins] = tokens[steps, 0]
        return
    row, column = np.repeat(rows, counts), spread(begins, counts)
    batch.token_ids_cpu[row, column] = tokens[np.repeat(steps, counts), spread(np.zeros_like(counts), counts)]
    batch.is_token_ids[row, column] = True
    batch.num_tokens_no_spec[rows] = begins + counts
    # Not added: after a pause the scheduler may have counted them already.
    batch.num_computed_tokens_cpu[rows] = begins + counts - 1
