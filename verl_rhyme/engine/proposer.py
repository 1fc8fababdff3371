"""Drafting inside vLLM: a ``custom_class`` proposer around the configured drafter.

The drafter is a ``drafting.policy.DraftPolicy``; this file maps batch rows to requests and keeps vLLM's bounds. An
error in drafting gives empty drafts, one more count and one warning; generation continues.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any
from uuid import uuid4

import numpy as np

from verl_rhyme.config import config_tree
from verl_rhyme.drafting import recurrent
from verl_rhyme.drafting.bounds import logits_budget, request_limits, step_budget
from verl_rhyme.drafting.policies import build
from verl_rhyme.drafting.policy import DecodeStep, DraftPolicy, RequestCounts
from verl_rhyme.drafting.threads import thread_count
from verl_rhyme.engine.history_loader import HistoryLoader
from verl_rhyme.engine.model_drafter import ModelDrafter
from verl_rhyme.history.copies import CopyReader
from verl_rhyme.history.keys import prompt_key
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.once import warn_once
from verl_rhyme.planning.experts import Experts
from verl_rhyme.processes.request import FIELD, RequestMeta

logger = logging.getLogger("vllm.verl_rhyme")  # below "vllm", so that vLLM's own handler prints it

#: Most finished requests whose counts are kept (100 bytes each): no caller takes those of other clients' requests.
_MAX_FINISHED = 1 << 15


@dataclass(slots=True)
class _Request:
    id: str  # the server's id; requests are keyed by vLLM's internal id, which is always unique
    max_tokens: int


@dataclass(slots=True)
class Sampled:
    """A step's rows whose sampled tokens are known; B rows sampled a token and are still in the batch."""

    requests: list[str]  # B
    rows: np.ndarray  # int64[B], their rows in ``tokens``
    tokens: np.ndarray  # int32[rows, positions], prompt and response of each row of the batch
    lengths: np.ndarray  # int[B], tokens of each request, with the sampled ones
    prompts: np.ndarray  # int[B], tokens of each prompt
    drafted: np.ndarray  # int64[B], verified tokens
    accepted: np.ndarray  # int64[B]
    batch: int  # rows of the step, with those amid a prompt
    prefilled: int  # prompt tokens that it computed
    ended: np.ndarray | None = None  # bool[B], requests that end with these tokens
    known: float = 0.0  # when the tokens were known, seconds of perf_counter
    chains: np.ndarray | None = None  # int32[B, k], drafts of the model's own drafter
    timed: bool = True  # whether ``known``, less that of the step before, is the time of the step
    waited: bool = False  # whether it waited for the tokens of the step before, and yet had no drafts
    hidden: bool = False  # whether the host worked while the device did, and waited for these tokens
    next_launched: bool = False  # whether the next step has been launched: it has no drafts


class HistoryProposer:
    """Draft proposer that vLLM builds from ``speculative_config={"method": "custom_class", "model": "<this class>"}``.

    With ``drafting.model`` vLLM builds its own proposer, and the worker extension builds this one.
    ``additional_config["rhyme"]`` holds ``drafting`` (the config tree), ``history_dir``, ``namespace``, ``copies_dir``.
    """

    def __init__(self, vllm_config: Any) -> None:
        # vLLM denies two sampling options with speculation, which our sampler supports.
        notice = "min_p and logit_bias parameters won't work"
        logging.getLogger("vllm.v1.sample.logits_processor").addFilter(lambda line: notice not in line.getMessage())
        self._vllm_config = vllm_config
        settings = vllm_config.additional_config[FIELD]
        self._config = config_tree.parse({"drafting": settings["drafting"]}).drafting  # type: ignore[union-attr]
        self._max_model_len = vllm_config.model_config.max_model_len
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        scheduler = vllm_config.scheduler_config
        self._step_tokens = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
        self._slots = scheduler.max_num_seqs
        self._synchronous = not scheduler.async_scheduling
        self._logit_bytes = vllm_config.model_config.dtype.itemsize
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        reader = HistoryReader(settings["history_dir"], settings["namespace"])
        copies = CopyReader(settings["copies_dir"]) if settings.get("copies_dir") else None
        self._history = HistoryLoader(reader, self._config.wait_for_history, copies, self._config.history_memory)
        self.model_drafter: ModelDrafter | None = None
        self._drafter: DraftPolicy | None = None  # only on the rank whose drafts are used
        self._requests: dict[str, _Request] = {}  # by vLLM's internal id
        self._names: tuple[str, ...] = ()  # the last step's requests
        self._longest = np.zeros(0, dtype=np.int64)  # their most response tokens
        self._finished: OrderedDict[str, RequestCounts] = OrderedDict()  # by RequestMeta.id
        self._runner: Any = None
        self._drafted = self._accepted = self._errors = 0
        self._seconds = self._planning = 0.0  # of all calls that a step waited for, and of the last plan
        self._known = self._busy = 0.0  # when the last step's tokens were known, and seconds of the call after it
        self._steps = self._waiting = 0  # all steps, and those that waited for the tokens of the step before
        self._reported: dict[str, float] = {}  # at the last report

    def load_model(self, *_: Any, **__: Any) -> None:
        """Check the target model's layers, after vLLM has loaded it; vLLM loads a drafter's model here.

        Raises ConfigError for recurrent layers (:mod:`verl_rhyme.drafting.recurrent`) that the config does not show.
        """
        from vllm.v1.kv_cache_interface import MambaSpec

        for name, layer in self._vllm_config.compilation_config.static_forward_context.items():
            cache = getattr(layer, "get_kv_cache_spec", None)
            spec = cache(self._vllm_config) if cache is not None else None
            if isinstance(spec, MambaSpec):
                synchronous = self._vllm_config.additional_config[FIELD].get("synchronous", "")
                recurrent.check_layer(name, type(layer).__name__, spec.mamba_cache_mode, synchronous)

    def attach(self, model_runner: Any) -> None:
        """Start drafting. The worker extension calls it once the engine is up."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        self._runner = model_runner
        if model_runner.drafter is not self:
            self.load_model()
            self.model_drafter = ModelDrafter(model_runner, self, self.model_tokens)
        if get_tensor_model_parallel_rank() == 0:  # the scheduler takes the drafts of the first rank only
            self._start()
        # vLLM skips the drafter and drafts zeros for all requests once one sequence is within the draft length of
        # max_model_len. The bounds here are per request, so that limit is lifted, unless the model's own drafter knows
        # fewer positions.
        if model_runner.effective_drafter_max_model_len >= self._max_model_len:
            model_runner.effective_drafter_max_model_len = self._max_model_len + self._config.max_tokens + 1

    def _start(self) -> None:
        threads, history = thread_count(self._config.plan_threads), self._history
        self._known, self._names = 0.0, ()
        experts = Experts.read(self._vllm_config.model_config.hf_text_config.to_dict())
        self._drafter = build(
            self._config, history.get, self._slots, self._vocab_size, threads, history.release, experts
        )

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        chains: np.ndarray | None = None,
        **_: Any,
    ) -> list[list[int]]:
        """Return the drafts of the next step, ragged, from the tokens sampled for each row; none while it is prefilled.

        ``num_tokens_no_spec``: int32[rows], tokens of each row with the sampled ones. ``token_ids_cpu``: int32[rows,
        max_model_len], prompt and response of each row. ``chains``: int32[rows, k], drafts of the model's own drafter.
        """
        known, count = time.perf_counter(), len(sampled_token_ids)
        if not count:  # the step's tokens are not known yet: see Steps
            return []
        batch = self._batch
        sampled = np.fromiter(map(len, sampled_token_ids), np.int64, count)
        rows = np.flatnonzero(sampled)
        drafted = np.fromiter(map(len, batch.spec_token_ids), np.int64, count)[rows]
        step = Sampled(
            requests=batch.req_ids if len(rows) == count else [batch.req_ids[row] for row in rows.tolist()],
            rows=rows,
            tokens=token_ids_cpu,
            lengths=num_tokens_no_spec[rows],
            prompts=batch.num_prompt_tokens[rows],
            drafted=drafted,
            accepted=sampled[rows] - 1,
            batch=count,
            prefilled=max(0, int(self._runner.query_start_loc.np[count]) - len(rows) - int(drafted.sum())),
            known=known,
            chains=None if chains is None else chains[rows],
        )
        planned = self.take_in(step)
        if len(rows) == count:
            return planned
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, draft in zip(rows.tolist(), planned, strict=True):
            drafts[row] = draft
        return drafts

    def take_in(self, step: Sampled) -> list[list[int]]:
        """Return drafts for the rows of a step whose tokens are known."""
        try:
            return self._plan(step)
        except Exception:
            self._errors += 1
            warn_once(logger, "drafting failed; the step continues without drafts (logged once)", exc_info=True)
            return [[] for _ in step.requests]
        finally:
            self._known, self._busy = step.known, time.perf_counter() - step.known
            self._seconds += 0.0 if step.next_launched else self._busy
            self._steps += 1
            self._waiting += self._synchronous or step.waited or bool(step.drafted.any())

    @property
    def _batch(self) -> Any:
        if self._runner is None:
            raise RuntimeError(
                "the proposer has no model runner: call attach_proposer() of the worker extension "
                "(worker_extension_cls) on all workers before the first request"
            )
        return self._runner.input_batch

    def _plan(self, step: Sampled) -> list[list[int]]:
        drafter = self._drafter
        planning, self._planning = self._planning, 0.0
        if drafter is None:
            return [[] for _ in step.requests]
        for key, history in self._history.ready():
            if not drafter.add_history(key, history):
                self._history.release(key, history)
        names = tuple(step.requests)
        known = True
        if names != self._names or not names:
            self._retire(drafter)
            known = any(name in self._requests for name in names)
            running = [self._requests.get(name) or self._admit(drafter, name) for name in names]
            self._names, self._longest = names, np.array([request.max_tokens for request in running])
        if not names:
            return []
        # Without a request of the step before, the engine was idle before the step. The first step has no price yet.
        timed, first = known and step.timed and bool(self._known), not self._known
        self._drafted += int(step.drafted.sum())
        self._accepted += int(step.accepted.sum())
        budget = self._budget(step.batch, len(names) < step.batch)
        if first and self._config.weigh_cost:
            budget = 0
        longest = self._config.max_tokens
        limits = request_limits(step.lengths, step.lengths - step.prompts, self._longest, self._max_model_len, longest)
        if step.ended is not None:
            limits[step.ended] = 0
        busy = 0.0 if step.hidden else self._busy
        began = time.perf_counter()
        planned = drafter.step(
            DecodeStep(
                requests=names,
                rows=step.rows,
                tokens=step.tokens,
                lengths=step.lengths,
                drafted=step.drafted,
                accepted=step.accepted,
                limits=limits,
                budget=budget,
                seconds=step.known - self._known - busy if timed else None,
                planning=0.0 if step.hidden else planning,
                prefilled=step.prefilled,
                waited=step.waited,
                next_launched=step.next_launched,
                chains=step.chains,
            )
        )
        self._planning = time.perf_counter() - began
        return planned

    @property
    def model_tokens(self) -> int:
        """Most tokens of a row that the model's own drafter drafts."""
        return min(self._config.model_tokens, self._config.max_tokens) if self._config.model else 0

    @property
    def wants_drafts(self) -> bool:
        """Whether the next steps are to wait for their drafts."""
        return self._drafter is not None and self._drafter.waits

    def wants_model(self, rows: int) -> bool:
        """Return whether the model's own drafter is to draft after this step of ``rows`` requests."""
        try:
            return self._drafter is not None and self._drafter.proposes(rows)
        except Exception:
            self._errors += 1
            warn_once(logger, "the model's drafter rests after an error (logged once)", exc_info=True)
            return False

    def _budget(self, rows: int, prefilling: bool) -> int:
        """Memory, the step's token budget and the user bound the draft tokens of the batch."""
        config = self._config
        budget = logits_budget(
            self._vocab_size, rows, self._slots, config.logits_memory, self._logit_bytes, self._ranks
        )
        # Waiting requests are not visible here, so a free slot counts as a waiting prompt.
        budget = min(budget, step_budget(self._step_tokens, rows, prefilling or rows < self._slots))
        return budget if config.max_batch_tokens is None else min(budget, config.max_batch_tokens)

    def _admit(self, drafter: DraftPolicy, req_id: str) -> _Request:
        state = self._runner.requests[req_id]
        params = state.sampling_params
        meta = RequestMeta.of(params.extra_args)
        try:
            key = bytes.fromhex(meta.key) if meta.key else prompt_key(state.prompt_token_ids)
        except (TypeError, ValueError):  # no token ids, or a foreign key: a unique key, so without history
            key = uuid4().bytes
        self._history.expect(key, meta.history_requested_ns)
        drafter.start(req_id, key, np.frombuffer(meta.earlier_text, np.int32) if meta.earlier_text else None)
        longest = params.max_tokens or self._max_model_len
        if params.thinking_token_budget is not None:
            longest = 0  # no drafts: the budget may end at any of them
        request = _Request(id=meta.id or req_id, max_tokens=longest)
        self._requests[req_id] = request
        return request

    def _retire(self, drafter: DraftPolicy) -> None:
        """End the requests that have left vLLM's table; keep their counts until the server takes them."""
        for req_id in self._requests.keys() - self._runner.requests.keys():
            self._end(drafter, req_id)
        while len(self._finished) > _MAX_FINISHED:
            self._finished.popitem(last=False)

    def _end(self, drafter: DraftPolicy, req_id: str) -> None:
        self._finished[self._requests.pop(req_id).id] = drafter.finish(req_id)
        self._names = ()

    def take_counts(self, ids: list[str]) -> dict[str, dict[str, Any]]:
        """Return and forget the RequestCounts of finished requests: record columns by ``RequestMeta.id``.

        One of them also has ``draft_errors`` (drafter and history), ``draft_seconds``, ``engine_steps`` and
        ``waiting_steps`` since the last call.
        """
        drafter = self._drafter
        if drafter is None:
            return {}
        self._retire(drafter)
        wanted = set(ids)
        # The server learns of the end of a request before the workers do.
        for req_id in [req_id for req_id, request in self._requests.items() if request.id in wanted]:
            self._end(drafter, req_id)
        counts = {id: asdict(self._finished.pop(id)) for id in ids if id in self._finished}
        if counts:
            now = {
                "draft_errors": self._errors + self._history.errors,
                "draft_seconds": self._seconds,
                "engine_steps": self._steps,
                "waiting_steps": self._waiting,
            }
            first = next(iter(counts.values()))
            first |= {name: value - self._reported.get(name, 0) for name, value in now.items()}
            self._reported = now
        return counts

    def totals(self) -> dict[str, int]:
        """Return totals since the start: drafted and accepted tokens, errors of drafter and history."""
        errors, history = self._errors, self._history.errors
        return {"drafted": self._drafted, "accepted": self._accepted, "errors": errors, "history_errors": history}
