"""The adaptive drafter: several sources, calibrated confidence, drafts that end where the next token no longer pays.

Sources are the prompt's history, the live texts of its group, the request's own text, and other prompts' recent texts
(:class:`~verl_rhyme.drafting.live_texts.LiveTexts`). At each draft position the token most likely to be accepted is
taken (:mod:`~verl_rhyme.drafting.confidence`); the walk ends where the probability that the token is reached and
accepted falls below ``drafting.floor``. Of all that was planned a batch drafts the likeliest tokens, as many as its
budget allows and as pay for their verification (:mod:`~verl_rhyme.drafting.budget`).

A request that generates an interrupted response anew has that response's text (:mod:`~verl_rhyme.drafting.regrowth`),
which is drafted instead wherever it promises as many tokens.

A state machine, no clock, no thread; all rows of a step are served by one call of compiled code.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import confidence, kernels
from verl_rhyme.drafting.arrays import SlotArrays
from verl_rhyme.drafting.budget import grant, tail_weights
from verl_rhyme.drafting.cost import EXPLORE_EVERY, StepCost
from verl_rhyme.drafting.histories import Histories
from verl_rhyme.drafting.kernels import MAX_CANDIDATES, N_INPUTS
from verl_rhyme.drafting.live_texts import LiveTexts
from verl_rhyme.drafting.policy import DecodeStep, RequestCounts
from verl_rhyme.drafting.regrowth import Regrowth
from verl_rhyme.history.record import PromptHistory
from verl_rhyme.lengths.earlier import EarlierLengths

#: After so many steps in a row whose plans did not pay, plans are made only every so many steps: planning costs, too.
#: Not those from a previous text, which cost next to nothing.
REST_AFTER, REST_EVERY = 32, 16


@dataclass(slots=True)
class _Request:
    key: bytes
    slot: int
    history_hit: bool
    drafted: int = 0
    accepted: int = 0
    verify_steps: int = 0


class AdaptiveDrafter:
    """See the module; the interface is :class:`verl_rhyme.drafting.policy.DraftPolicy`.

    Args:
        config: The drafting tree.
        lookup: A prompt's history by its key, or ``None``; called when the first of a prompt's requests starts.
        slots: Requests that run at a time; more may, at the price of a copy.
        vocabulary: Token ids that may be drafted are below it.
    """

    def __init__(
        self,
        config: DraftingConfig,
        lookup: Callable[[bytes], PromptHistory | None],
        slots: int = 256,
        vocabulary: int = 1 << 31,
    ):
        self._config, self._shared, self._vocabulary = config, Histories(lookup), min(vocabulary, (1 << 31) - 1)
        self._slots = _slot_arrays(max(1, slots), config.max_tokens)
        self._began = np.full(max(1, slots), -1, dtype=np.int64)  # tokens at a request's first step, or -1
        self._earlier = EarlierLengths(max(1, slots))
        self._live = LiveTexts(config.live_tokens, max(1, slots))
        self._regrowth = Regrowth(max(1, slots))
        self._model = confidence.prior()
        self._scratch = kernels.scratch(config.max_tokens)
        #: What a step costs.
        self.cost = StepCost()
        self._steps = 0
        self._refused = 0  # steps in a row whose plans did not pay
        self._free = list(range(max(1, slots)))[::-1]
        self._requests: dict[str, _Request] = {}
        self._histories: dict[int, tuple] = {}  # slot to the arrays whose addresses it holds
        self._texts = 0
        self._last: tuple[np.ndarray, np.ndarray] = np.zeros((0, 1)), np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        """Live requests."""
        return len(self._requests)

    def start(self, request: str, key: bytes, previous: np.ndarray | None = None) -> None:
        """Begin a request; starting it again (after a resume, say) begins it anew."""
        self._forget(request)
        history = self._shared.take(key)
        # Texts that the history has by now are no siblings any more: the group's number changes with it.
        newest = int(history.step.max()) if history is not None and len(history) else -1
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._requests[request] = _Request(key, slot, history is not None)
        slots = self._slots
        slots.length[slot] = slots.planned[slot] = slots.candidates[slot] = 0
        slots.planned_at[slot] = -1
        slots.recent[slot] = 0.0
        slots.block[slot] = -1
        slots.owner[slot] = self._texts
        slots.group[slot] = zlib.crc32(key, newest & 0xFFFFFFFF)
        self._texts += 1
        self._attach(slot, history)
        self._regrowth.start(slot, previous)

    def step(self, done: DecodeStep) -> list[list[int]]:
        """See :meth:`verl_rhyme.drafting.policy.DraftPolicy.step`."""
        rows = len(done.requests)
        if done.seconds is not None:
            self.cost.observe(rows, sum(done.drafted), done.seconds)
        ids = np.empty(rows, dtype=np.int32)
        for i, request in enumerate(done.requests):
            live = self._requests[request]
            ids[i] = live.slot
            if done.drafted[i]:
                live.drafted += done.drafted[i]
                live.accepted += done.accepted[i]
                live.verify_steps += 1
        self._steps += 1
        rests = self._refused >= REST_AFTER and self._steps % REST_EVERY
        limits = np.asarray(done.limits if done.budget > 0 else np.zeros(rows), dtype=np.int64)
        longest = max(1, min(int(limits.max(initial=0)), self._config.max_tokens))
        draft = np.empty((rows, longest), dtype=np.int32)
        reach = np.zeros((rows, longest))
        row, lengths = np.asarray(done.rows, dtype=np.int32), np.asarray(done.lengths, dtype=np.int64)
        planned = kernels.step(
            self._live.arrays,
            self._slots,
            self._model,
            self._scratch,
            ids,
            row,
            done.tokens,
            lengths,
            np.zeros_like(limits) if rests else limits,
            self._config.floor,
            self._vocabulary,
            draft,
            reach,
        )
        regrown = self._regrowth.plan(
            ids,
            row,
            done.tokens,
            lengths,
            1 + np.asarray(done.accepted, dtype=np.int64),
            limits,
            self._config.floor,
            self._vocabulary,
            draft,
            reach,
            planned,
        )
        weigh, weights = self._config.weigh_cost and self.cost.ready, self._weights(ids, done.lengths)
        granted = grant(reach, planned, done.budget, self.cost.coefficients if weigh else None, weights)
        if weigh and self._steps % EXPLORE_EVERY == 0:
            weigh = False
            # Of several sizes: what drafting costs at all is then told from what a token costs.
            more = max(rows, self._config.max_tokens) >> self._steps // EXPLORE_EVERY % 3
            granted = grant(reach, planned, min(done.budget, int(granted.sum()) + more), None, weights)
        found = ~regrown
        if weigh and planned[found].any():
            self._refused = 0 if granted[found].any() else self._refused + 1
        self._last = reach, granted
        return [row[:k] for row, k in zip(draft.tolist(), granted.tolist(), strict=True)]

    @property
    def reach(self) -> list[np.ndarray]:
        """Of the last step's drafts: the probability of each token to be reached and accepted, float64[k] a row."""
        return [row[:k] for row, k in zip(*self._last, strict=True)]

    def finish(self, request: str) -> RequestCounts:
        """End a request and tell what drafting did for it; zeros for one that is not known."""
        live = self._requests.get(request)
        if live is None:
            return RequestCounts()
        reverified = self._regrowth.reverified(live.slot)
        self._forget(request)
        return RequestCounts(live.drafted, live.accepted, live.verify_steps, live.history_hit, reverified)

    def _weights(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        began = self._began
        began[ids] = np.where(began[ids] < 0, lengths, began[ids])
        return tail_weights(self._earlier.remaining(ids, lengths - began[ids]), self._config.tail_weight)

    def _attach(self, slot: int, history: PromptHistory | None) -> None:
        slots = self._slots
        self._histories.pop(slot, None)
        slots.history_size[slot] = 0
        self._began[slot] = -1
        if history is None or not len(history.suffixes):
            self._earlier.set(slot, ())
            return
        arrays = (history.tokens, history.suffixes, history.confidence)
        self._histories[slot] = arrays  # their addresses are valid as long as this holds them
        slots.history[slot] = [array.ctypes.data for array in arrays]
        slots.history_size[slot] = len(history.tokens), len(history.suffixes)
        self._earlier.set(slot, history.lengths)

    def _forget(self, request: str) -> None:
        live = self._requests.pop(request, None)
        if live is None:
            return
        self._live.close(int(self._slots.block[live.slot]))
        self._attach(live.slot, None)
        self._regrowth.stop(live.slot)
        self._free.append(live.slot)
        self._shared.give_back(live.key)

    def _grow(self) -> None:
        """Twice the slots. The live texts stay: their blocks may all be open then, and new text goes unindexed."""
        old, count = self._slots, len(self._slots.length)
        self._slots = _slot_arrays(2 * count, self._config.max_tokens)
        for new_array, old_array in zip(self._slots, old, strict=True):
            new_array[:count] = old_array
        self._began = np.concatenate([self._began, np.full(count, -1, dtype=np.int64)])
        self._earlier.grow()
        self._regrowth.grow()
        self._free = list(range(count, 2 * count))[::-1]


def _slot_arrays(slots: int, longest: int) -> SlotArrays:
    return SlotArrays(
        length=np.zeros(slots, dtype=np.int64),
        block=np.full(slots, -1, dtype=np.int32),
        owner=np.zeros(slots, dtype=np.int64),
        group=np.zeros(slots, dtype=np.int64),
        history=np.zeros((slots, 3), dtype=np.int64),
        history_size=np.zeros((slots, 2), dtype=np.int64),
        recent=np.zeros(slots),
        planned=np.zeros(slots, dtype=np.int32),
        planned_at=np.full(slots, -1, dtype=np.int64),
        draft=np.zeros((slots, longest), dtype=np.int32),
        inputs=np.zeros((slots, longest, N_INPUTS), dtype=np.float32),
        weight_set=np.zeros((slots, longest), dtype=np.int8),
        bin=np.zeros((slots, longest), dtype=np.int8),
        candidates=np.zeros(slots, dtype=np.int32),
        candidate=np.zeros((slots, MAX_CANDIDATES), dtype=np.int32),
        candidate_inputs=np.zeros((slots, MAX_CANDIDATES, N_INPUTS), dtype=np.float32),
    )


def warm() -> None:
    """Compile (or load from numba's disk cache) all that drafting needs, so that no request waits for it."""
    drafter = AdaptiveDrafter(DraftingConfig(live_tokens=1 << 10), lambda key: None, slots=1)
    drafter.start("", b"", np.array([2, 1], dtype=np.int32))
    tokens = np.array([[1, 2, 1, 2, 1, 2]], dtype=np.int32)
    for length in (5, 6):
        lengths = np.array([length])
        drafter.step(DecodeStep([""], np.zeros(1), tokens, lengths, [0], [0], np.ones(1), budget=1))
