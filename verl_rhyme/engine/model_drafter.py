"""The model's own drafter (MTP, EAGLE, a small model) as one more source of drafts.

vLLM runs its proposer after a step. Its tokens are not drafted as they are: once the step's sampled tokens are known,
:class:`.proposer.HistoryProposer` plans the drafts from them and from texts. Where measured times speak against it,
vLLM's proposer does not run. Its KV cache misses such steps: MTP and EAGLE still have the policy's hidden state (first
tokens right, for SmolLM2, with every step and after 64 missed ones: an EAGLE head 0.26 and 0.25, an EAGLE-3 head 0.49
and 0.47, with every other step missed 0.44; not measured for MTP); a small model has its cache alone, so it takes in
every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from verl_rhyme.config import CONFIG_PATH, ConfigError
from verl_rhyme.drafting import own_drafter


def speculation(model: str, max_tokens: int, policy: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return vLLM's ``speculative_config`` with ``drafting.model``, for a policy with this ``config.json``.

    A request has room for ``num_speculative_tokens`` draft tokens, at most ``max_tokens``. vLLM would load the drafter
    as the policy: verl's is a dummy. Raises Unusable.
    """
    found = own_drafter.examine(model, policy)
    named = {} if found.method == own_drafter.MTP else {"model": found.model}
    if found.method != "draft_model":  # vLLM asks the path, which need not tell
        named["method"] = found.method
    tokens = found.draft_tokens(max_tokens)
    return {**named, "num_speculative_tokens": tokens, "draft_load_config": {"load_format": "auto"}}


class ModelDrafter:
    """Joins vLLM's proposer of a model runner, which drafts up to ``tokens`` a request, to ours (``proposer``)."""

    def __init__(self, runner: Any, proposer: Any, tokens: int) -> None:
        config = runner.speculative_config
        if not (config.use_eagle() or config.uses_draft_model()) or config.parallel_drafting:
            raise ConfigError(
                f"{CONFIG_PATH}.drafting.model={config.model} is a drafter of the kind {config.method}: give the "
                "folder of an EAGLE head or of a small model, or mtp"
            )
        self._runner, self._proposer, self._tokens = runner, proposer, tokens
        self._requests: list[str] = []  # of the last step
        self._drafts: Any = None  # int[requests, k] of that step: on the host, once copied
        self._copied: Any = None  # event
        self._propose, self._book = runner.propose_draft_token_ids, runner._bookkeeping_sync
        runner.drafter.num_speculative_tokens = tokens
        runner.propose_draft_token_ids = self._proposed
        if not runner.use_async_scheduling:  # else Steps plans, when the step's tokens are known
            runner._bookkeeping_sync = self._booked
        self._wake, runner.post_kv_cache_wake_up = runner.post_kv_cache_wake_up, self._woken

    def _proposed(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> list[list[int]]:
        # DraftScheduler sets it to 0 while steps are launched ahead: the next step could not have the drafts. Then an
        # EAGLE head does not run, and a small model runs only to fill its cache.
        wanted = self._wanted() if scheduler_output.num_spec_tokens_to_schedule else 0
        self._requests, self._drafts = list(self._runner.input_batch.req_ids), None
        if wanted or self._runner.speculative_config.uses_draft_model():
            scheduler_output.num_spec_tokens_to_schedule = wanted
            drafts = self._propose(scheduler_output, *args, **kwargs)
            self._drafts = drafts.to("cpu", non_blocking=True)
            if drafts.device.type != "cpu":
                self._copied = torch.Event()
                self._copied.record()
        return []  # the plan replaces it

    def _woken(self) -> None:
        self._wake()
        for name in self._runner.drafter._draft_attn_layer_names:  # of missed steps it is read as it is: no NaN
            self._runner.compilation_config.static_forward_context[name].kv_cache.zero_()

    def chains(self, requests: list[str]) -> np.ndarray:
        """Return the drafts of the last step for some of its requests, int32[requests, k]."""
        if self._drafts is None:
            return np.zeros((len(requests), 0), dtype=np.int32)
        if self._copied is not None:
            self._copied.synchronize()
        drafts = self._drafts.numpy().astype(np.int32)
        if requests == self._requests:
            return drafts
        rows = {name: row for row, name in enumerate(self._requests)}
        return drafts[[rows[name] for name in requests]]

    def _booked(self, *args: Any, **kwargs: Any) -> Any:
        booked = self._book(*args, **kwargs)
        batch = self._runner.input_batch
        self._runner._draft_token_ids = self._proposer.propose(
            booked[2], batch.num_tokens_no_spec, batch.token_ids_cpu, chains=self.chains(batch.req_ids)
        )
        return booked

    def _wanted(self) -> int:
        """Return the tokens to draft, the same on all ranks, whose passes are collective."""
        from vllm.distributed.parallel_state import get_tp_group

        group, wanted = get_tp_group(), None
        if group.rank_in_group == 0:  # it alone plans
            wanted = self._tokens if self._proposer.wants_model(self._runner.input_batch.num_reqs) else 0
        return group.broadcast_object(wanted)
