"""Drafters to compare: none, vLLM's ngram, arctic-inference, two HistoSpecs and ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.replay import Arm
from benchmarks.traces import Response
from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting.paper import PaperDrafter, Window
from verl_rhyme.drafting.policies import build
from verl_rhyme.drafting.policy import DecodeStep, DraftPolicy
from verl_rhyme.history.record import PromptHistory, Trajectory


class NoDrafts:
    """Plain decoding."""

    def start(self, response: Response) -> None:
        pass

    def step(self, responses: Sequence[Response], done: DecodeStep) -> list[list[int]]:
        return [[] for _ in responses]

    def finish(self, response: Response) -> None:
        pass

    def end_step(self, responses: Sequence[Response]) -> None:
        pass


class Ngram(NoDrafts):
    """vLLM's ``ngram``, by vLLM's function: the earliest longest match within the request's text."""

    def __init__(self, shortest: int = 2, longest: int = 5) -> None:
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for results
        from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

        self._find, self._shortest, self._longest = _find_longest_matched_ngram_and_propose_tokens, shortest, longest

    def step(self, responses: Sequence[Response], done: DecodeStep) -> list[list[int]]:
        return [
            self._find(
                origin_tokens=done.tokens[row, :length],
                min_ngram=self._shortest,
                max_ngram=self._longest,
                max_model_len=1 << 20,
                k=int(limit),
            ).tolist()
            for row, length, limit in zip(done.rows, done.lengths, done.limits, strict=True)
        ]


class Arctic(NoDrafts):
    """vLLM's ``suffix``: arctic-inference's C++, called as vLLM's adapter calls it, with vLLM's defaults."""

    def __init__(self, factor: float = 1.0, depth: int = 24, cached: int = 10_000, least: float = 0.1) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=cached)
        self._factor, self._depth, self._least = factor, depth, least
        self._seen: dict[str, int] = {}

    def start(self, response: Response) -> None:
        self.cache.start_request(response.id, response.prompt)
        self._seen[response.id] = len(response.prompt)

    def step(self, responses: Sequence[Response], done: DecodeStep) -> list[list[int]]:
        drafts = []
        for response, row, length, limit in zip(responses, done.rows, done.lengths, done.limits, strict=True):
            self.cache.add_active_response(response.id, done.tokens[row, self._seen[response.id] : length].tolist())
            self._seen[response.id] = length
            draft = self.cache.speculate(
                response.id,
                done.tokens[row, max(0, length - self._depth) : length],
                max_spec_tokens=int(limit),
                max_spec_factor=self._factor,
                min_token_prob=self._least,
            )
            drafts.append(draft.token_ids)
        return drafts

    def finish(self, response: Response) -> None:
        self.cache.stop_request(response.id)
        del self._seen[response.id]


class Histories(dict[bytes, PromptHistory]):
    """History of each prompt, as the store keeps it."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self._epochs = epochs

    def record(self, responses: Sequence[Response]) -> None:
        groups: dict[bytes, list[Trajectory]] = {}
        for r in responses:
            trajectory = Trajectory(r.key, r.tokens, r.reward, r.step, r.epoch, r.sample, r.logprobs)
            groups.setdefault(r.key, []).append(trajectory)
        for key, group in groups.items():
            old = self.get(key) or PromptHistory.build([])
            self[key] = old.extended(group, responses[0].step, self._epochs)


class Rhyme(NoDrafts):
    """A drafting policy of verl-rhyme with the history that its store would hold."""

    def __init__(
        self, config: DraftingConfig, epochs: int = 4, make: Callable[..., DraftPolicy] | None = None, slots: int = 64
    ) -> None:
        self.histories = Histories(epochs)
        self.policy = (make or build)(config, self.histories.get, slots, 1 << 30)

    def start(self, response: Response) -> None:
        self.policy.start(response.id, response.key)

    def step(self, responses: Sequence[Response], done: DecodeStep) -> list[list[int]]:
        return self.policy.step(done)

    def finish(self, response: Response) -> None:
        self.policy.finish(response.id)

    def end_step(self, responses: Sequence[Response]) -> None:
        self.histories.record(responses)


class _DoublingWindow(Window):
    """Window of the released HistoSpec: doubled on full acceptance, halved on a rejection, at most 16."""

    def observe(self, drafted: int, accepted: int) -> None:
        self.size = min(2 * self.size, self.cap) if accepted >= drafted else max(1, self.size // 2)


class _Released(PaperDrafter):
    def _window(self) -> Window:
        return _DoublingWindow(cap=16)


def released() -> Rhyme:
    """Return HistoSpec as its authors released it: matches of 7 to 4 tokens, most votes, no reward, only one epoch."""
    make = partial(_Released, match=(4, 7), reward_weight=0.0)
    return Rhyme(DraftingConfig(policy="paper"), epochs=1, make=lambda config, lookup, *_: make(config, lookup))


def adaptive(floor: float) -> Rhyme:
    """Return our adaptive drafter with a minimum acceptance probability of ``floor``, without weighing the cost."""
    return Rhyme(DraftingConfig(floor=floor, weigh_cost=False))


#: Factories of the drafters by name.
ARMS: dict[str, Callable[[], Arm]] = {
    "none": NoDrafts,
    "ngram": Ngram,
    **{f"arctic factor {factor}": (lambda factor=factor: Arctic(factor)) for factor in (1, 2, 4)},
    "released HistoSpec": released,
    "paper HistoSpec": lambda: Rhyme(DraftingConfig(policy="paper")),
    **{f"adaptive floor {floor}": (lambda floor=floor: adaptive(floor)) for floor in (0.6, 0.4, 0.2, 0.1, 0.05, 0.02)},
}
