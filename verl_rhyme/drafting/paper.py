"""The paper's drafter (RhymeRL section 4, HistoSpec): match, choose, window. A state machine, no clock, no thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import choice
from verl_rhyme.drafting.budget import grant
from verl_rhyme.drafting.histories import PENDING, Get, Histories, Pending, Source
from verl_rhyme.drafting.policy import DecodeStep, RequestCounts
from verl_rhyme.drafting.window import WindowPolicy
from verl_rhyme.history import suffix_index
from verl_rhyme.history.record import PromptHistory

#: Requests remembered; beyond it the one drafted for longest ago is forgotten, as if it had finished unseen.
MAX_LIVE = 16_384

_NO_DRAFT = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class _Request:
    key: bytes
    history: PromptHistory | Pending | None
    window: WindowPolicy
    drafted: int = 0
    accepted: int = 0
    verify_steps: int = 0


class PaperDrafter:
    """Drafts from each prompt's history: the latest seven tokens, backing off to three, are looked up in it and
    continued by :func:`verl_rhyme.drafting.choice.choose`. A :class:`verl_rhyme.drafting.policy.DraftPolicy`.

    Args:
        config: The drafting tree.
        histories: Where they come from; a function gives a prompt's history by its key, or ``None``.
        vocabulary: Token ids that may be drafted are below it.
        match: Tokens of the latest text that must reappear in the history before it is continued: least, most.
        reward_weight: See :mod:`verl_rhyme.drafting.choice`.
    """

    def __init__(
        self,
        config: DraftingConfig,
        histories: Source | Get,
        vocabulary: int = 1 << 31,
        match: tuple[int, int] = (3, 7),
        reward_weight: float = 1.0,
    ):
        self._max_tokens, self._match, self._reward_weight = config.max_tokens, match, reward_weight
        self._vocabulary = vocabulary
        self._histories = Histories(histories)
        self._live: OrderedDict[str, _Request] = OrderedDict()

    def __len__(self) -> int:
        """Live requests."""
        return len(self._live)

    def start(self, request: str, key: bytes, previous: np.ndarray | None = None) -> None:
        """Begin a request; starting it again (after a preemption, say) begins it anew.

        The paper's drafter knows the history only: ``previous`` is ignored.
        """
        self._forget(request)
        while len(self._live) >= MAX_LIVE:
            self._forget(next(iter(self._live)))
        self._live[request] = _Request(key, self._histories.take(key), self._window())

    def arrived(self, key: bytes, history: PromptHistory | None) -> bool:
        """See :meth:`verl_rhyme.drafting.policy.DraftPolicy.arrived`."""
        if not self._histories.arrive(key, history):
            return False
        for live in self._live.values():
            if live.key == key:
                live.history = history
        return history is not None

    def _window(self) -> WindowPolicy:
        return WindowPolicy(cap=min(32, self._max_tokens))

    def step(self, done: DecodeStep) -> list[list[int]]:
        """See :meth:`verl_rhyme.drafting.policy.DraftPolicy.step`."""
        for request, drafted, accepted in zip(done.requests, done.drafted, done.accepted, strict=True):
            self.observe(request, int(drafted), int(accepted))
        longest = self._match[1]
        contexts = [
            done.tokens[row, max(0, length - longest) : length]
            for row, length in zip(done.rows, done.lengths, strict=True)
        ]
        return [draft.tolist() for draft in self.draft_batch(done.requests, contexts, done.limits, done.budget)]

    def draft_batch(
        self, requests: Sequence[str], contexts: Sequence[np.ndarray], limits: np.ndarray, budget: int
    ) -> list[np.ndarray]:
        """Draft for every row of a decode step.

        Args:
            requests: B request ids; one that was never started gets no draft.
            contexts: B arrays of the latest tokens, newest last, at least ``match[1]`` of them where there are.
            limits: int[B], draft tokens each row may have (:func:`verl_rhyme.drafting.bounds.request_limits`).
            budget: Draft tokens for the whole batch; where the wishes exceed it, each row gets an equal share.

        Returns:
            B arrays int32[k], 0 <= k <= limit; together at most ``budget``.
        """
        if budget <= 0:
            return [_NO_DRAFT] * len(requests)
        drafts = [
            self._draft(request, context, int(limit))
            for request, context, limit in zip(requests, contexts, limits, strict=True)
        ]
        if sum(map(len, drafts)) > budget:
            lengths = np.array([len(draft) for draft in drafts])
            reach = np.tile(1 / np.arange(1.0, lengths.max() + 1), (len(drafts), 1))  # one token each, in turn
            granted = grant(reach, lengths, budget)
            drafts = [draft[:k] for draft, k in zip(drafts, granted.tolist(), strict=True)]
        return drafts

    def observe(self, request: str, drafted: int, accepted: int) -> None:
        """Take in the verification of a request's last draft: tokens drafted, and how many of them were accepted."""
        live = self._live.get(request)
        if live is None or drafted <= 0:
            return
        accepted = min(max(accepted, 0), drafted)
        live.window.observe(drafted, accepted)
        live.drafted += drafted
        live.accepted += accepted
        live.verify_steps += 1

    def finish(self, request: str) -> RequestCounts:
        """End a request and tell what drafting did for it; zeros for one that is not known."""
        live = self._forget(request)
        if live is None:
            return RequestCounts()
        hit = live.history is not None and live.history is not PENDING
        return RequestCounts(live.drafted, live.accepted, live.verify_steps, hit)

    def _draft(self, request: str, context: np.ndarray, limit: int) -> np.ndarray:
        live = self._live.get(request)
        if live is None:
            return _NO_DRAFT
        self._live.move_to_end(request)
        limit = min(limit, live.window.size)
        least, most = self._match
        if live.history is None or live.history is PENDING or limit <= 0 or len(context) < least:
            return _NO_DRAFT
        length, low, high = suffix_index.longest_match(live.history, context, most)
        if length < least:
            return _NO_DRAFT
        draft = choice.choose(live.history, low, high, limit, self._reward_weight)
        unknown = np.flatnonzero(draft >= self._vocabulary)
        return draft[: unknown[0]] if len(unknown) else draft

    def _forget(self, request: str) -> _Request | None:
        live = self._live.pop(request, None)
        if live is not None:
            self._histories.give_back(live.key)
        return live


def warm() -> None:
    """Compile (or load from numba's disk cache) all that drafting needs, so that no request waits for it."""
    suffix_index.warm()
    choice.warm()
    grant(np.ones((1, 1)), np.ones(1, dtype=np.int64), 1)
