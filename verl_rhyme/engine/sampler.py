"""One sampler for vLLM's V1 model runner: a draft is verified by drawing the token that would have come.

Every token is drawn from the target's own distribution, at each drafted position as well; as long as it equals the
draft, the next position counts. For drafts without probabilities (one-hot) that *is* rejection sampling (Leviathan et
al., 2023, arXiv:2211.17192, section 2.3): a draft x is kept with probability p(x), and a token that differs is a draw
from the residual. It needs neither the residual nor a table of log-probabilities for each row and draft length: one
look at each of B + D rows (B requests, D draft tokens in all) gives a token and its log-probability.

:mod:`verl_rhyme.engine.drawer` draws. What it cannot do for drafted positions is left to vLLM's sampler, and that
step's drafts are dropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
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
from verl_rhyme.engine.draw import Rows
from verl_rhyme.engine.drawer import Drawer, ranks


class DrawingSampler(Sampler):
    """vLLM's sampler, for steps without drafts."""

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
        """As the base class: ``sampled_token_ids`` is int32 [B, 1]."""
        if predict_bonus_token or logprobs_mode_override is not None or _foreign(sampling_metadata):
            return super().forward(logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)
        drawn = self.drawer.draw(logits, sampling_metadata, np.ones(len(logits), dtype=np.int64))
        return SamplerOutput(drawn.tokens.to(torch.int32)[:, None], drawn.logprobs)


class DrawingVerifier(RejectionSampler):
    """vLLM's rejection sampler, for steps with drafts, whatever their probabilities."""

    def __init__(self, sampler: DrawingSampler, spec_config: Any, device: torch.device) -> None:
        super().__init__(sampler, spec_config, device)

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """As the base class; ``sampled_token_ids`` is int32 [B, longest draft + 1], -1 after a row's last token."""
        drafted = np.array(metadata.num_draft_tokens, dtype=np.int64)
        counts = drafted + 1
        if _foreign(sampling_metadata):  # the token that would have come without drafts
            first = torch.from_numpy(counts.cumsum() - counts).to(logits.device)
            return self.sampler(logits[first], replace(sampling_metadata, spec_token_ids=None))
        drawn = self.sampler.drawer.draw(logits, sampling_metadata, counts)
        tokens, at = until_first_difference(metadata.draft_token_ids, drawn.tokens, drafted)
        if drawn.logprobs is None:
            return SamplerOutput(tokens, None)
        # One line for each entry of `tokens`, as vLLM has it; of those after a row's last token nobody reads any.
        lines = (column.new_zeros((tokens.numel(), *column.shape[1:])) for column in drawn.logprobs[:3])
        filled = (line.index_copy_(0, at, column) for line, column in zip(lines, drawn.logprobs[:3], strict=True))
        return SamplerOutput(tokens, LogprobsTensors(*filled))


def until_first_difference(
    drafts: torch.Tensor, tokens: torch.Tensor, drafted: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each request's tokens up to the first that is not the draft, and the one after all drafts where there is none.

    Args:
        drafts: int [sum(drafted)].
        tokens: int64 [sum(drafted + 1)], what was drawn at each drafted position and after the last of them.
        drafted: int64 [B].

    Returns:
        int32 [B, drafted.max() + 1], filled up with -1; and int64 like ``tokens``, where each stands in it, flattened.
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


def _foreign(metadata: SamplingMetadata) -> bool:
    """Whether only vLLM's own sampler can do what a request wants."""
    holder = metadata.thinking_budget_state_holder
    ours = (LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor)
    return bool(
        metadata.logprob_token_ids
        or (holder is not None and holder.has_tracked_requests())
        or any(type(processor) not in ours for processor in metadata.logitsprocs.all)
    )


def install(runner: Any) -> str:
    """Let a V1 model runner draw all its tokens here.

    Returns:
        Why not, and nothing changed; empty when it does.
    """
    sampler, verifier = getattr(runner, "sampler", None), getattr(runner, "rejection_sampler", None)
    batch: Any = getattr(runner, "input_batch", None)
    if not isinstance(sampler, Sampler) or not hasattr(batch, "num_tokens_no_spec"):
        return "this is not vLLM's V1 model runner (VLLM_USE_V2_MODEL_RUNNER=0 chooses it)"
    if getattr(runner, "use_async_spec_decode", False):
        return "asynchronous scheduling of drafts leaves the positions of the next tokens unknown"
    if getattr(verifier, "synthetic_mode", False):
        return "acceptance is simulated (speculative_config.rejection_sample_method=synthetic)"
    if is_installed(runner):
        return ""
    drawing = DrawingSampler(Drawer(runner), sampler.logprobs_mode, sampler.use_fp64_gumbel)
    runner.sampler = drawing
    if verifier is not None:
        runner.rejection_sampler = DrawingVerifier(drawing, runner.speculative_config, runner.device)
        # With speculation vLLM leaves these two out, as its rejection sampler does not know them.
        present = {type(processor) for processor in batch.logitsprocs.all}
        for kind, among in (
            (MinPLogitsProcessor, batch.logitsprocs.argmax_invariant),
            (LogitBiasLogitsProcessor, batch.logitsprocs.non_argmax_invariant),
        ):
            if kind not in present:
                among.append(kind(runner.vllm_config, runner.device, PIN_MEMORY))
    _warm_up(runner)
    return ""


def is_installed(runner: Any) -> bool:
    """Whether both of a runner's samplers are ours, and draw alike."""
    sampler, verifier = getattr(runner, "sampler", None), getattr(runner, "rejection_sampler", None)
    if not isinstance(sampler, DrawingSampler):
        return False
    return verifier is None or (isinstance(verifier, DrawingVerifier) and verifier.sampler is sampler)


def allow_all_options(engine: Any) -> None:
    """Let an engine take min_p and logit_bias beside speculation, once all its workers draw here.

    Args:
        engine: vLLM's ``AsyncLLM`` or ``LLMEngine``.
    """
    engine.input_processor.speculative_config = None


def _warm_up(runner: Any) -> None:
    """Compile what is compiled on first use, before a request waits for it."""
    vocabulary = runner.model_config.get_vocab_size()
    dtype = runner.model_config.dtype
    logits = torch.zeros((2, vocabulary), dtype=dtype, device=runner.device)
    one = np.ones(2)
    for keyed in (False, True):
        rows = Rows(np.arange(2), one.astype(np.uint64), one.astype(np.int64), one.astype(np.float32), one == keyed)
        if draw.has_kernel(logits.device):
            from verl_rhyme.engine import draw_kernel

            draw_kernel.ranks(logits, draw.by_kernel(logits, rows, scaled=False, raw=False)[0])
        else:
            target = logits.float()
            ranks(target, draw.by_inversion(target, rows, torch.empty(target.numel()), want_logprobs=True)[0])
