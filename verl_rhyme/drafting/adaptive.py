"""The adaptive drafter: several sources, calibrated confidence, drafts that end where they stop being profitable.

The sources are the prompt's history, live texts of its group, the request's text, counts over all responses, the tokens
of the model's own drafter, and the previous text of a regenerated response. Each position takes the token most likely
to be accepted. The walk ends where the probability that a token is reached and accepted falls below
``drafting.floor``. A batch drafts the likeliest planned tokens that its budget allows and that are worth their
verification. There is no clock: compiled code learns from a step's sampled tokens, plans all rows with the same result
on any number of threads, then counts the tokens for later plans. A history may arrive while its requests run.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import confidence, kernels, regrowth
from verl_rhyme.drafting.arrays import Batch, Plans, SlotArrays
from verl_rhyme.drafting.histories import Get, Histories, Release, keep
from verl_rhyme.drafting.kernels import MAX_CANDIDATES, N_INPUTS
from verl_rhyme.drafting.live_texts import LiveTexts
from verl_rhyme.drafting.policy import SOURCES, DecodeStep, RequestCounts
from verl_rhyme.drafting.threads import Threads
from verl_rhyme.drafting.weighing import Weighing
from verl_rhyme.history import suffix_index
from verl_rhyme.history.record import PromptHistory
from verl_rhyme.planning.experts import Experts

#: Fewest rows that a thread plans: waking a thread costs as much as planning a few rows.
ROWS_A_THREAD = 32
#: Prompts whose history's latest step is remembered.
_MAX_NEWEST = 1 << 17
#: Weight of each step without a plan, relative to recent acceptance (-1 to 1), if not all rows can be planned.
_WAITING = 0.01


@dataclass(slots=True, eq=False)
class _Request:
    key: bytes
    slot: int
    previous: np.ndarray  # int32[n], tokens of the response that it regenerates, if any
    history: tuple[np.ndarray, ...] = ()  # the compiled code holds addresses of these arrays and of ``previous``
    history_hit: bool = False


class AdaptiveDrafter:
    """The adaptive drafter; a :class:`verl_rhyme.drafting.policy.DraftPolicy`."""

    def __init__(
        self,
        config: DraftingConfig,
        get: Get,
        slots: int = 256,  # expected running requests; more of them cost a copy of the state
        vocabulary: int = 1 << 31,  # exclusive upper bound of drafted token ids
        threads: int = 1,  # that plan the rows of a batch
        release: Release = keep,
        experts: Experts | None = None,  # of the policy's layers
    ):
        self._config, self._vocabulary = config, min(vocabulary, (1 << 31) - 1)
        self._shared: Histories[_Request] = Histories(get, release)
        self._threads = Threads(threads)
        self._slots, self._unused = (slot_arrays(n, config.max_tokens, config.model_tokens) for n in (slots, 1))
        self._live = LiveTexts(config.live_tokens, slots)
        self._model, self._agreement = confidence.prior(), regrowth.prior()
        self._scratch = [kernels.scratch(config.max_tokens) for _ in range(self._threads.count)]
        self.weighing = Weighing(config.max_tokens, config.weigh_cost, experts)
        self._steps = 0
        self._regrowing = 0  # requests with a previous text
        self.planned = False  # whether the last step was planned
        # Whether the model's own drafter is to draft, or is on trial.
        self._model_wanted = bool(config.model) and not config.weigh_cost
        self._free = list(range(slots))[::-1]
        self._requests: dict[str, _Request] = {}
        self._batch: tuple[tuple[str, ...], np.ndarray] | None = None  # the last step's requests and their slots
        self._newest: OrderedDict[bytes, int] = OrderedDict()  # step of the latest response in a prompt's history
        self._texts = 0
        #: Of the last step: probability that each planned token is reached and accepted, float64[B, K]; tokens granted
        #: to each row, int64[B].
        self.reach, self.granted = np.zeros((0, 1)), np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._requests)

    def start(self, request: str, key: bytes, previous: np.ndarray | None = None) -> None:
        self._forget(request)
        if not self._free:
            self._grow()
        earlier = np.array([] if previous is None else previous, dtype=np.int32)
        live = _Request(key, self._free[-1], earlier)
        history = self._shared.acquire(key, live)
        slot = self._free.pop()
        self._requests[request] = live
        self._batch = None
        slots = self._slots
        for array, unused in zip(slots, self._unused, strict=True):
            array[slot] = unused[0]
        slots.previous[slot], slots.previous_size[slot] = earlier.ctypes.data, len(earlier)
        self._regrowing += len(earlier) > 0
        slots.owner[slot] = self._texts
        self._texts += 1
        slots.visited[slot] = self._steps
        if history is None:
            slots.group[slot] = _group(key, self._newest.get(key, -1))
        else:
            self._set_history(history, key, [live])

    def add_history(self, key: bytes, history: PromptHistory | None) -> bool:
        waiting = self._shared.deliver(key, history)
        if waiting:
            self._set_history(history, key, waiting)
        return bool(waiting) and history is not None

    def step(self, done: DecodeStep) -> list[list[int]]:
        rows, weighing = len(done.requests), self.weighing
        drafted, accepted = np.asarray(done.drafted, dtype=np.int64), np.asarray(done.accepted, dtype=np.int64)
        budget = max(0, done.budget)
        batch = Batch(
            ids=self._slots_of(tuple(done.requests)),
            rows=np.asarray(done.rows, dtype=np.int32),
            tokens=done.tokens,
            lengths=np.asarray(done.lengths, dtype=np.int64),
            limits=np.minimum(done.limits, budget).astype(np.int64),
        )
        kept = np.where(drafted > 0, accepted, 0)
        sampled, spans, counts = kernels.observe(self._live.arrays, self._slots, self._model, batch, drafted, kept)
        chain = 0
        if done.chains is not None:
            chain = done.chains.shape[1]
            self._slots.chain[batch.ids, :chain] = done.chains
        self._slots.chain_size[batch.ids] = chain
        # A step that waits without need takes another time than one without drafts.
        proposed, timed = chain > 0, done.seconds is not None and not done.waited
        weighing.keep_promise(rows, int(kept.sum()), done.seconds is not None)
        if timed:
            assert done.seconds is not None
            weighing.observe(drafted, kept, counts, self.planned, done.seconds, done.planning, done.prefilled, proposed)
        self._slots.verify_steps[batch.ids] += drafted > 0
        self._steps += 1
        terms = weighing.terms(rows, budget, int(batch.limits.sum()), timed, proposed, done.next_launched)
        longest = max(1, min(int(batch.limits.max(initial=0)), self._config.max_tokens))
        plans = Plans(
            draft=np.empty((rows, longest), dtype=np.int32),
            reach=np.zeros((rows, longest)),
            planned=np.zeros(rows, dtype=np.int64),
        )
        floor = self._config.floor
        self.planned = weighing.plans(rows, terms)
        if self.planned or chain:
            within = batch._replace(limits=self._within(budget, batch))
            self._plan(within, plans, max(floor, weighing.least(rows, terms)))
        if self._regrowing:
            regrown = regrowth.plan(self._slots, self._agreement, batch, plans, 1 + accepted, floor, self._vocabulary)
            self._slots.source[batch.ids[regrown]] = kernels.PREVIOUS
        granted = weighing.grant(plans.reach, plans.planned, terms)
        if self._config.model:
            if done.seconds is not None and not done.prefilled:
                seconds = done.seconds - done.waited * weighing.cost.drafting(rows)
                verified = 0 if done.next_launched else int(granted.sum())
                weighing.promise(rows, proposed, seconds, int(drafted.sum()), verified, terms)
            self._model_wanted = weighing.waits_for_model(rows, self._slots.chain.shape[1], done.next_launched)
        self.reach, self.granted = plans.reach, granted
        self._threads.defer(partial(kernels.count, self._live.arrays.counts, sampled, spans))
        flat, ends = plans.draft[np.arange(longest) < granted[:, None]].tolist(), np.cumsum(granted)
        return [flat[begin:end] for begin, end in zip((ends - granted).tolist(), ends.tolist(), strict=True)]

    def _slots_of(self, requests: tuple[str, ...]) -> np.ndarray:
        """int32[B]; the result of the last step is reused for the same requests."""
        if self._batch is None or self._batch[0] != requests:
            ids = np.array([self._requests[request].slot for request in requests], dtype=np.int32)
            self._batch = requests, ids
        return self._batch[1]

    def _plan(self, batch: Batch, plans: Plans, floor: float) -> None:
        """Plan all rows; of a step that is not ``planned``, the model's chains alone, without a search in texts."""
        rows = len(batch.ids)
        parts = max(1, min(self._threads.count, rows // ROWS_A_THREAD))
        ends = [rows * part // parts for part in range(parts + 1)]
        state = self._live.arrays, self._slots, self._model
        common = batch, plans, floor, self._vocabulary, self.planned
        calls = (
            partial(kernels.plan, *state, scratch, *common, span)
            for scratch, span in zip(self._scratch, pairwise(ends), strict=False)
        )
        self._threads.run(list(calls))

    def _within(self, budget: int, batch: Batch) -> np.ndarray:
        """Return limits that restrict planning to as many rows as the budget has tokens.

        Rows with recently accepted first tokens and rows without a plan for long come first.
        """
        ids, limits, visited = batch.ids, batch.limits, self._slots.visited
        if (limits > 0).sum() > budget:
            worth = self._slots.recent[ids] + _WAITING * (self._steps - visited[ids])
            worth[limits <= 0] = -np.inf
            limits = limits.copy()
            limits[np.argsort(-worth, kind="stable")[budget:]] = 0
        visited[ids[limits > 0]] = self._steps
        return limits

    @property
    def waits(self) -> bool:
        return self.weighing.waits or self._model_wanted

    def proposes(self, rows: int) -> bool:
        return self.weighing.proposes(rows, self._slots.chain.shape[1])

    def finish(self, request: str) -> RequestCounts:
        live = self._requests.get(request)
        if live is None:
            return RequestCounts()
        by_source = self._slots.by_source[live.slot]
        drafted, accepted = by_source.sum(axis=0).tolist()
        counts = RequestCounts(
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            verify_steps=int(self._slots.verify_steps[live.slot]),
            history_hit=live.history_hit,
            reverified_tokens=int(by_source[kernels.PREVIOUS, 1]),
            by_source=by_source[: len(SOURCES)].tolist(),
        )
        self._forget(request)
        return counts

    def _set_history(self, history: PromptHistory | None, key: bytes, requests: list[_Request]) -> None:
        # The group's number changes with the history, because texts that it contains are no longer siblings.
        newest = int(history.step.max()) if history is not None and len(history) else -1
        self._newest[key] = newest
        self._newest.move_to_end(key)
        if len(self._newest) > _MAX_NEWEST:
            self._newest.popitem(last=False)
        group = _group(key, newest)
        slots = self._slots
        for live in requests:
            slot = live.slot
            live.history_hit = history is not None
            if history is not None and len(history.suffixes):
                # The compiled code reads by address. The request holds the arrays, and only this thread frees them,
                # between two steps: no planning thread works beyond its step (:class:`.threads.Threads`).
                live.history = history.tokens, history.suffixes, history.confidence, history.first_tokens
                slots.history[slot] = [array.__array_interface__["data"][0] for array in live.history]
                slots.history_size[slot] = len(history.tokens), len(history.suffixes), len(history.first_tokens)
            if slots.block[slot] >= 0 and slots.group[slot] != group:
                self._live.discard(int(slots.block[slot]))
                slots.block[slot], slots.length[slot] = -1, 0  # the next step takes the whole text in again
            slots.group[slot] = group

    def _forget(self, request: str) -> None:
        live = self._requests.pop(request, None)
        if live is None:
            return
        self._batch = None
        self._regrowing -= len(live.previous) > 0
        self._live.close(int(self._slots.block[live.slot]))
        live.history = ()
        self._free.append(live.slot)
        self._shared.release(live.key, live)  # the last reference to its history

    def _grow(self) -> None:
        """Double the slots. The live texts do not grow: if all of their blocks are open, new text is not indexed."""
        old, count = self._slots, len(self._slots.length)
        self._slots = slot_arrays(2 * count, self._config.max_tokens, self._config.model_tokens)
        for new_array, old_array in zip(self._slots, old, strict=True):
            new_array[:count] = old_array
        self._free = list(range(count, 2 * count))[::-1]


def _group(key: bytes, newest: int) -> int:
    """``newest`` is the step of the latest response in the prompt's history (-1: none)."""
    return zlib.crc32(key, newest & 0xFFFFFFFF)


def slot_arrays(slots: int, longest: int, chain: int) -> SlotArrays:
    """One entry for each live request; drafts have up to ``longest`` tokens, the model's up to ``chain``."""
    return SlotArrays(
        length=np.zeros(slots, dtype=np.int64),  # tokens taken in, prompt and response
        block=np.full(slots, -1, dtype=np.int32),  # last block of the text, or -1
        owner=np.zeros(slots, dtype=np.int64),  # number of the text
        group=np.zeros(slots, dtype=np.int64),
        # Of the prompt's history: addresses of text, suffix array, confidence and table of first tokens; and entries
        # of the text, the suffix array and the table.
        history=np.zeros((slots, 4), dtype=np.int64),
        history_size=np.zeros((slots, 3), dtype=np.int64),
        recent=np.zeros(slots),  # from -1 to 1, recent acceptance of first draft tokens
        # The plan of the last step, to learn from.
        planned=np.zeros(slots, dtype=np.int32),  # draft tokens, granted or not
        planned_at=np.full(slots, -1, dtype=np.int64),  # length of the text at the plan
        draft=np.zeros((slots, longest), dtype=np.int32),
        inputs=np.zeros((slots, longest, N_INPUTS), dtype=np.float32),
        weight_set=np.zeros((slots, longest), dtype=np.int8),
        bin=np.zeros((slots, longest), dtype=np.int8),
        candidates=np.zeros(slots, dtype=np.int32),  # candidates of the first token
        candidate=np.zeros((slots, MAX_CANDIDATES), dtype=np.int32),
        candidate_inputs=np.zeros((slots, MAX_CANDIDATES, N_INPUTS), dtype=np.float32),
        source=np.zeros((slots, longest), dtype=np.int8),  # the first source that proposed the token (policy.SOURCES)
        by_source=np.zeros((slots, len(SOURCES) + 1, 2), dtype=np.int32),  # verified and accepted draft tokens
        previous=np.zeros(slots, dtype=np.int64),  # address of the previous text
        previous_size=np.zeros(slots, dtype=np.int64),  # its tokens; 0 if there is none
        regrowth=np.zeros((slots, regrowth.N_STATE), dtype=np.int64),  # columns: see regrowth
        chain=np.zeros((slots, chain), dtype=np.int32),  # the model's draft after the last step
        chain_size=np.zeros(slots, dtype=np.int64),
        # Not read by the compiled core.
        verify_steps=np.zeros(slots, dtype=np.int64),
        visited=np.zeros(slots, dtype=np.int64),  # the step at which the slot was last planned
    )


def warm() -> None:
    suffix_index.warm()
    drafter = AdaptiveDrafter(DraftingConfig(live_tokens=1 << 10), lambda key: None, slots=1)
    drafter.start("", b"", np.array([2, 1], dtype=np.int32))
    tokens = np.array([[1, 2, 1, 2, 1, 2]], dtype=np.int32)
    for length in (5, 6):
        lengths, one = np.array([length]), np.ones(1)
        drafter.step(DecodeStep([""], np.zeros(1), tokens, lengths, [0], [0], one, budget=1, seconds=1e-3))
