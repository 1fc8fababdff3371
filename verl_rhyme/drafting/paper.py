"""The paper's drafter (RhymeRL section 4, HistoSpec): match, choose, window. It has no clock and no threads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import choice
from verl_rhyme.drafting.budget import FREE, Waiting, select_tokens
from verl_rhyme.drafting.histories import Get, Histories, Release, keep
from verl_rhyme.drafting.policy import DecodeStep, RequestCounts
from verl_rhyme.history import suffix_index
from verl_rhyme.history.record import PromptHistory, Trajectory

_NO_DRAFT = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class Window:
    """Draft window of one request: grows with fully accepted drafts, resets at any rejection (RhymeRL, HistoSpec)."""

    cap: int = 32  # most tokens
    size: int = 2

    def observe(self, drafted: int, accepted: int) -> None:
        self.size = min(self.size + 2 if accepted >= drafted else 2, self.cap)


@dataclass(slots=True, eq=False)
class _Request:
    key: bytes
    window: Window
    history: PromptHistory | None = None
    drafted: int = 0
    accepted: int = 0
    verify_steps: int = 0


class PaperDrafter:
    """The paper's drafter; a :class:`verl_rhyme.drafting.policy.DraftPolicy`.

    It looks up the latest seven tokens, backing off to three, in the prompt's history, and continues the match by
    :func:`verl_rhyme.drafting.choice.choose`.
    """

    def __init__(
        self,
        config: DraftingConfig,
        get: Get,
        vocabulary: int = 1 << 31,  # exclusive upper bound of drafted token ids
        release: Release = keep,
        match: tuple[int, int] = (3, 7),  # shortest and longest, in tokens
        reward_weight: float = 1.0,
    ):
        self._max_tokens, self._match, self._reward_weight = config.max_tokens, match, reward_weight
        self._vocabulary = vocabulary
        self._histories: Histories[_Request] = Histories(get, release)
        self._live: dict[str, _Request] = {}
        self._waiting, self.waits = Waiting(), False

    def start(self, request: str, key: bytes, previous: np.ndarray | None = None) -> None:
        self._forget(request)
        live = _Request(key, Window(cap=self._max_tokens))
        live.history = self._histories.acquire(key, live)
        self._live[request] = live

    def add_history(self, key: bytes, history: PromptHistory | None) -> bool:
        waiting = self._histories.deliver(key, history)
        for live in waiting:
            live.history = history
        return bool(waiting) and history is not None

    def step(self, done: DecodeStep) -> list[list[int]]:
        drafts = []
        for request, row, length, drafted, accepted, limit in zip(
            done.requests, done.rows, done.lengths, done.drafted, done.accepted, done.limits, strict=True
        ):
            live = self._live[request]
            if drafted:
                live.window.observe(int(drafted), int(accepted))
                live.drafted += int(drafted)
                live.accepted += int(accepted)
                live.verify_steps += 1
            context = done.tokens[row, max(0, length - self._match[1]) : length]
            drafts.append(self._draft(live, context, min(int(limit), live.window.size, live.window.cap)))
        lengths = np.array([len(draft) for draft in drafts])
        if lengths.sum() > done.budget:
            reach = np.tile(1 / np.arange(1.0, lengths.max() + 1), (len(drafts), 1))  # one token each, in turn
            granted = select_tokens(reach, lengths, done.budget, FREE).tolist()
            drafts = [draft[:k] for draft, k in zip(drafts, granted, strict=True)]
        self.waits = self._waiting.observe(float(any(map(len, drafts))), 0.0)
        return [draft.tolist() for draft in drafts]

    def proposes(self, rows: int) -> bool:
        return False

    def finish(self, request: str) -> RequestCounts:
        live = self._forget(request)
        if live is None:
            return RequestCounts()
        return RequestCounts(live.drafted, live.accepted, live.verify_steps, history_hit=live.history is not None)

    def _draft(self, live: _Request, context: np.ndarray, limit: int) -> np.ndarray:
        if live.history is None or limit <= 0:
            return _NO_DRAFT
        least, most = self._match
        length, low, high = suffix_index.longest_match(live.history, context, most)
        if length < least:
            return _NO_DRAFT
        draft = choice.choose(live.history, low, high, limit, self._reward_weight)
        unknown = np.flatnonzero(draft >= self._vocabulary)
        return draft[: unknown[0]] if len(unknown) else draft

    def _forget(self, request: str) -> _Request | None:
        live = self._live.pop(request, None)
        if live is not None:
            self._histories.release(live.key, live)
        return live


def warm() -> None:
    suffix_index.warm()
    text = np.ones(5, dtype=np.int32)
    history = PromptHistory.build([Trajectory(b"", text, 1.0, 0, 0, 0)])
    drafter = PaperDrafter(DraftingConfig(policy="paper"), lambda key: history)
    drafter.start("", b"")
    one = np.ones(1, dtype=np.int64)
    drafter.step(DecodeStep([""], 0 * one, text[None, :], 3 * one, 0 * one, 0 * one, one, budget=0))
