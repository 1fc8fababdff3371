"""Replay a trace with a drafter as an engine would.

Each recorded response is the path that the target model sampled. A draft token is accepted if it equals that path. This
is an unbiased estimate of one-hot rejection sampling: a draft x is accepted with probability p(x), and the trace has x
with probability p(x). Requests run interleaved in a fixed number of slots, so that drafters can learn from live
siblings. Each turn of a response is a request. The responses of a training step, without answers of tools, enter the
history at its end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from benchmarks.traces import Response
from verl_rhyme.drafting.policy import DecodeStep

#: Maximum draft tokens of a batch; only the arm limits them.
_NO_BUDGET = 1 << 30


class Arm(Protocol):
    """Drafter under test."""

    def start(self, response: Response) -> None:
        """Start a request after the prefill of its prompt; the arm must not look at ``response.tokens``."""

    def step(self, responses: Sequence[Response], done: DecodeStep) -> list[list[int]]:
        """Return drafts, as :meth:`verl_rhyme.drafting.policy.DraftPolicy.step`; requests are the responses' ids."""
        ...

    def finish(self, response: Response) -> None:
        """End the request of a finished response."""

    def end_step(self, responses: Sequence[Response]) -> None:
        """End a training step: its responses become history."""


@dataclass
class Tally:
    """Counts of one epoch.

    Attributes:
        emitted, drafted, accepted: Tokens; without each response's first token, which prefill gives.
        steps: Verify steps, one per request and decoding step.
        longest: For each training step, tokens per verify step of its longest request.
        seconds: Seconds in the arm, all methods except ``end_step``.
        per_request: Seconds of each decoding step divided by its requests.
    """

    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    longest: list[float] = field(default_factory=list)
    seconds: float = 0.0
    per_request: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Live:
    response: Response
    row: int
    position: int = 1  # tokens of the response emitted
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


def replay(
    steps: Sequence[Sequence[Response]],
    arm: Arm,
    slots: int = 64,
    bounds: Callable[[int], tuple[int, int]] = lambda rows: (32, _NO_BUDGET),
    clock: Callable[[int, int], float] | None = None,
) -> dict[int, Tally]:
    """Replay a trace with ``arm``.

    Args:
        steps: Responses of each training step.
        arm: Drafter.
        slots: Maximum concurrent requests.
        bounds: Returns the longest draft and the draft tokens of the batch for a number of rows.
        clock: Returns the seconds of a decoding step for a number of rows and draft tokens; default: the arm gets no
            times.

    Returns:
        A tally per epoch, from 0.
    """
    width = 1 + max(len(r.prompt) + len(r.tokens) for step in steps for r in step)
    tokens = np.zeros((slots, width), dtype=np.int32)
    tallies: dict[int, Tally] = {}
    for responses in steps:
        tally = tallies.setdefault(responses[0].epoch, Tally())
        turns = [(turn, request) for r in responses for turn, request in enumerate(r.turns())]
        queue = deque(request for _, request in sorted(turns, key=lambda each: each[0]))
        free = list(range(slots))
        live: list[_Live] = []
        taken: dict[str, int] = {}
        seconds: float | None = None
        while queue or live:
            started = time.perf_counter()
            while queue and free:
                request = _Live(queue.popleft(), free.pop())
                live.append(request)
                text = np.concatenate([request.response.prompt, request.response.tokens[:1]])
                tokens[request.row, : len(text)] = text
                arm.start(request.response)
            spent = time.perf_counter() - started
            ended = [request for request in live if request.position >= len(request.response.tokens)]
            for request in ended:
                started = time.perf_counter()
                arm.finish(request.response)
                spent += time.perf_counter() - started
                taken[request.response.id] = request.steps
                free.append(request.row)
                live.remove(request)
            tally.seconds += spent
            if not live:
                continue
            lengths = np.array([len(r.response.prompt) + r.position for r in live])
            responses_now = [request.response for request in live]
            longest, budget = bounds(len(live))
            done = DecodeStep(
                requests=[response.id for response in responses_now],
                rows=np.array([request.row for request in live]),
                tokens=tokens,
                lengths=lengths,
                drafted=[request.drafted for request in live],
                accepted=[request.accepted for request in live],
                limits=np.full(len(live), longest),
                budget=budget,
                seconds=seconds,
            )
            started = time.perf_counter()
            drafts = arm.step(responses_now, done)
            spent = time.perf_counter() - started
            tally.seconds += spent
            tally.per_request.append(spent / len(live))
            seconds = clock(len(live), sum(map(len, drafts))) if clock else None
            for request, draft in zip(live, drafts, strict=True):
                future = request.response.tokens[request.position :]
                accepted = 0
                while accepted < min(len(draft), len(future)) and draft[accepted] == future[accepted]:
                    accepted += 1
                emitted = future[: accepted + 1]
                end = len(request.response.prompt) + request.position
                tokens[request.row, end : end + len(emitted)] = emitted
                request.position += len(emitted)
                request.steps += 1
                request.drafted, request.accepted = len(draft), len(emitted) - 1
                tally.steps += 1
                tally.drafted += len(draft)
                tally.accepted += accepted
                tally.emitted += len(emitted)
        last = max((request for _, request in turns), key=lambda r: len(r.tokens))
        tally.longest.append((len(last.tokens) - 1) / max(1, taken[last.id]))
        arm.end_step([response.of_policy() for response in responses])
    return tallies
