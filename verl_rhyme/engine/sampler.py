"""Sampler for vLLM's V1 model runner: it verifies drafts by sampling from the target, with noise keyed by position.

It samples a token from the target's distribution at every drafted position. Sampled tokens count up to the first that
differs from the draft. For drafts without probabilities (one-hot) this *is* rejection sampling (Leviathan et al., 2023,
arXiv:2211.17192, section 2.3): a draft x is kept with probability p(x), and a token that differs is a draw from the
residual. One pass over B + D rows (B requests, D draft tokens) gives each row's token and log-probability, whatever the
requests' options. Requests with a thinking budget verify no drafts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from verl_rhyme.engine import draw
from verl_rhyme.engine.drawer import Drawer
from verl_rhyme.processes.request import FIELD


class DrawingSampler(Sampler):
    """Replacement for vLLM's sampler, used by steps without drafts."""

    def __init__(self, drawer: Drawer, logprobs_mode: Any, use_fp64_gumbel: bool) -> None:
        super().__init__(logprobs_mode, use_fp64_gumbel)
        self.drawer = drawer

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """``sampled_token_ids`` is int32[B, 1]. Only vLLM's rejection sampler would set the other arguments."""
        tokens, logprobs = self.drawer.draw(logits, sampling_metadata, np.ones(len(logits), dtype=np.int64))
        return SamplerOutput(tokens.to(torch.int32)[:, None], logprobs)


class DrawingVerifier(RejectionSampler):
    """Replacement for vLLM's rejection sampler, used by steps with drafts; it ignores draft probabilities."""

    sampler: DrawingSampler

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """``sampled_token_ids`` is int32[B, longest draft + 1], -1 after a row's last token."""
        drafted = np.array(metadata.num_draft_tokens, dtype=np.int64)
        drawer, drafts = self.sampler.drawer, metadata.draft_token_ids
        drawn, logprobs = drawer.draw(logits, sampling_metadata, drafted + 1)
        if len(budgeted := drawer.budgeted(sampling_metadata)):  # our proposer drafts nothing for them, vLLM's may
            of = torch.from_numpy(np.isin(np.arange(len(drafted)), budgeted).repeat(drafted))
            drafts = drafts.masked_fill(of.to(drafts.device, non_blocking=True), PLACEHOLDER_TOKEN_ID)
        tokens, at = accepted_tokens(drafts, drawn, drafted)
        if logprobs is None:
            return SamplerOutput(tokens, None)
        # vLLM expects one line for each entry of `tokens`, but reads none after a row's last token.
        columns = [
            column.new_zeros((tokens.numel(), *column.shape[1:])).index_copy_(0, at, column) for column in logprobs[:3]
        ]
        return SamplerOutput(tokens, LogprobsTensors(*columns))


def accepted_tokens(
    drafts: torch.Tensor, tokens: torch.Tensor, drafted: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each request's tokens up to the first that differs from its draft, int32[B, drafted.max() + 1].

    ``drafts`` are int[sum(drafted)], ``tokens`` int64[sum(drafted + 1)], ``drafted`` int64[B]. The result is padded
    with -1; also return the index of each entry of ``tokens`` in it, flattened, int64.
    """
    width = int(drafted.max()) + 1
    starts = np.arange(len(drafted)) * width
    at, at_drafts = (np.repeat(starts - (n.cumsum() - n), n) + np.arange(n.sum()) for n in (drafted + 1, drafted))
    where = torch.from_numpy(np.concatenate([at, at_drafts])).to(tokens.device, non_blocking=True)
    drawn = torch.full((len(drafted) * width,), PLACEHOLDER_TOKEN_ID, dtype=torch.int32, device=tokens.device)
    expected = torch.full_like(drawn, PLACEHOLDER_TOKEN_ID - 1)
    drawn[where[: len(at)]] = tokens.to(torch.int32)
    expected[where[len(at) :]] = drafts.to(torch.int32)
    drawn, agree = drawn.view(-1, width), (drawn == expected).view(-1, width)
    reached = agree.to(torch.int32).cumprod(dim=1).roll(1, dims=1)
    reached[:, 0] = 1
    return drawn.masked_fill(reached == 0, PLACEHOLDER_TOKEN_ID), where[: len(at)]


def install(runner: Any, logprobs_mode: str | None = None) -> str:
    """Install our samplers in a V1 model runner; return the reason for a refusal, after which nothing has changed."""
    sampler, verifier = getattr(runner, "sampler", None), getattr(runner, "rejection_sampler", None)
    batch: Any = getattr(runner, "input_batch", None)
    if not isinstance(sampler, Sampler) or not hasattr(batch, "num_tokens_no_spec"):
        return "the engine does not use vLLM's V1 model runner; set VLLM_USE_V2_MODEL_RUNNER=0"
    if getattr(runner, "use_async_spec_decode", False) and FIELD not in runner.vllm_config.additional_config:
        return "vLLM's asynchronous scheduling of drafts is not supported: it does not track the positions of tokens"
    if getattr(verifier, "synthetic_mode", False):
        return "simulated acceptance is not supported; unset speculative_config.rejection_sample_method=synthetic"
    if isinstance(sampler, DrawingSampler):
        return ""
    if refusal := _custom_processors(batch.logitsprocs.all):
        return refusal
    drawing = DrawingSampler(Drawer(runner, logprobs_mode), sampler.logprobs_mode, sampler.use_fp64_gumbel)
    runner.sampler = drawing
    runner.sample_tokens = functools.partial(_sample_tokens, runner, runner.sample_tokens, drawing.drawer)
    if verifier is not None:
        runner.rejection_sampler = DrawingVerifier(drawing, runner.speculative_config, runner.device)
        # With speculation vLLM omits these two, because its rejection sampler does not support them.
        present = {type(processor) for processor in batch.logitsprocs.all}
        for kind, among in (
            (MinPLogitsProcessor, batch.logitsprocs.argmax_invariant),
            (LogitBiasLogitsProcessor, batch.logitsprocs.non_argmax_invariant),
        ):
            if kind not in present:
                among.append(kind(runner.vllm_config, runner.device, PIN_MEMORY))
    _warm_up(runner)
    return ""


def _custom_processors(present: Iterable[Any]) -> str:
    """Return why processors other than vLLM's are refused: with speculation vLLM omits those of entry points."""
    known = (LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor)
    packages = [
        f"{point.value} (package {point.dist.name})" if point.dist else point.value
        for point in entry_points(group=LOGITSPROCS_GROUP)
    ]
    custom = packages or [f"{type(p).__module__}:{type(p).__qualname__}" for p in present if type(p) not in known]
    if not custom:
        return ""
    return (
        f"custom logits processors are not supported: {', '.join(custom)}; uninstall their packages (entry points of "
        f"the group {LOGITSPROCS_GROUP}), or drop engine_kwargs.vllm.logits_processors"
    )


def _sample_tokens(runner: Any, sample_tokens: Callable[[Any], Any], drawer: Drawer, grammar_output: Any) -> Any:
    """The runner's method masks the logits of requests with grammars in place, then samples."""
    if grammar_output is not None and runner.execute_model_state is not None:
        drafts = runner.execute_model_state.scheduler_output.scheduled_spec_decode_tokens
        ids = runner.input_batch.req_ids
        masked = np.isin(ids, grammar_output.structured_output_request_ids)
        rows = masked.repeat([1 + len(drafts.get(id, ())) for id in ids])
        drawer.keep(np.flatnonzero(rows), runner.execute_model_state.logits)
    return sample_tokens(grammar_output)


def allow_all_options(engine: Any) -> None:
    """Allow ``min_p`` and ``logit_bias`` with speculation in vLLM's engine; all workers use our samplers."""
    engine.input_processor.speculative_config = None


def _warm_up(runner: Any) -> None:
    dtype, device = runner.model_config.dtype, runner.device
    logits = torch.zeros((2, runner.model_config.get_vocab_size()), dtype=dtype, device=device)
    one = np.ones(2)
    for keyed in (False, True):
        rows = draw.Rows(
            np.arange(2), one.astype(np.uint64), one.astype(np.int64), one.astype(np.float32), one == keyed
        )
        if device.type == "cuda":
            tokens, _ = draw.draw_on_gpu(logits, rows, scaled=False, raw=False)
        else:
            logits = logits.float()
            tokens, _ = draw.draw_on_cpu(logits, rows, torch.empty(logits.numel()), want_logprobs=True)
        draw.ranks(logits, tokens)
