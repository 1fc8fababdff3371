"""Assignment of starting samples: length forecasts, and placement on replicas.

The plan covers all prompts of a batch and is made when the first of them starts. A length-based policy of
:mod:`verl_rhyme.placement` makes it, from an account of what runs on which replica. The module is pure, as are the
modules it uses. An error in the plan costs only the plan: the router decides then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from verl_rhyme.lengths.predictor import Forecast
from verl_rhyme.placement import Load, Move, Placement, Progress, Request
from verl_rhyme.placement.assignment import Assignment
from verl_rhyme.scheduling.admission import priority
from verl_rhyme.scheduling.attempts import Attempt
from verl_rhyme.scheduling.samples import Prompt
from verl_rhyme.scheduling.scheduler import Scheduler

#: Forecasts the final lengths of samples (uid, number) from the tokens that each has.
Lengths = Callable[[Sequence[tuple[str, int]], Sequence[int]], Forecast | None]
#: Returns the tokens of prompts, by uid; 0 where unknown.
PromptTokens = Callable[[Sequence[str]], Sequence[int]]


class _Placed(NamedTuple):
    attempt: Attempt
    start_tokens: int  # of the sample at the start on its replica


class Dispatch:
    """Assignments of a scheduler's samples; without a ``placement`` the router chooses the replicas."""

    def __init__(
        self,
        scheduler: Scheduler,
        lengths: Lengths = lambda samples, tokens: None,
        placement: Placement | None = None,
        prompts: PromptTokens = lambda uids: [0] * len(uids),
    ) -> None:
        self.placement = placement
        self._scheduler, self._lengths, self._prompts = scheduler, lengths, prompts
        self._planned: set[str] = set()  # ids of planned prompts
        self._placed: dict[str, _Placed] = {}  # by id of the sample; its replica may have left since
        self.moved = 0  # samples moved to other replicas

    def serve(self, rooms: Mapping[str, int | None]) -> None:
        """Set the replicas that serve from now on, by their KV cache tokens (``None`` where unknown)."""
        if self.placement is None:
            return
        for name in [name for name in self.placement.fleet.names if name not in rooms]:
            self.placement.remove(name)
        for name, room in rooms.items():
            self.placement.fleet.add(name, room)

    def assign(self, attempts: Sequence[Attempt], tokens: Sequence[int]) -> list[Assignment]:
        """Return the assignments of attempts that start from so many ``tokens``, and count them on their replicas."""
        forecasts = self._forecast([attempt.sample for attempt in attempts], tokens)
        uids = [attempt.uid for attempt in attempts]
        placement = self.placement if self.placement is not None and self.placement.fleet else None
        if placement is not None:
            self._plan(placement, uids)
        made = []
        prompt_tokens = self._prompts(uids) if placement is not None else [0] * len(uids)
        for attempt, had, before, (expected, p90) in zip(attempts, tokens, prompt_tokens, forecasts, strict=True):
            replica = reason = ""
            if placement is not None:
                left, p90_left = _left(expected, had), _left(p90, had)
                request = Request(_id(attempt.sample), attempt.uid, before + had, left, p90_left)
                replica = self._place(placement, attempt, had, request)
                reason = placement.reason(request.id)
            place = priority(self._scheduler.rules, self._scheduler.ledger.prompt(attempt.uid))
            oldest = self._scheduler.oldest_version(attempt.uid)
            made.append(Assignment(replica, reason, oldest, place, expected, p90))
        return made

    def _forecast(
        self, samples: Sequence[tuple[str, int]], tokens: Sequence[int]
    ) -> list[tuple[int | None, int | None]]:
        """Return the expected response tokens of samples and their 90th percentile; ``None`` where unknown."""
        lengths = self._lengths(samples, tokens) if samples else None
        if lengths is None:
            return [(None, None)] * len(samples)
        return list(zip(lengths.expected.tolist(), lengths.p90.tolist(), strict=True))

    def _place(self, placement: Placement, attempt: Attempt, had: int, request: Request) -> str:
        self._placed[request.id] = _Placed(attempt, had)
        return placement.acquire(request)

    def _plan(self, placement: Placement, uids: Iterable[str]) -> None:
        new = set(uids) - self._planned
        if not new:
            return
        scheduler, batch = self._scheduler, self._scheduler.rules.batch_prompts
        steps: dict[int, list[Prompt]] = {}  # prompts by expected training step, in loading order
        for place, prompt in enumerate(prompt for prompt in scheduler.ledger if not prompt.put_off):
            steps.setdefault(scheduler.version + place // batch, []).append(prompt)
        for step, prompts in steps.items():
            if any(prompt.uid in new for prompt in prompts):
                unplanned = [p for p in prompts if p.uid not in self._planned]
                sized = zip(unplanned, self._prompts([p.uid for p in unplanned]), strict=True)
                # after a restart some samples have ended
                loads = [Load(p.uid, _unfinished(p), p.expected, tokens) for p, tokens in sized]
                placement.plan(step, [load for load in loads if load.samples])
                self._planned.update(p.uid for p in unplanned)

    @property
    def has_unplaced(self) -> bool:
        """Whether a sample ran on a replica that no longer serves; :meth:`count_running` can name its new replica."""
        return self.placement is not None and not all(map(self.placement.replica, self._placed))

    def count_running(self, running: Mapping[Attempt, str]) -> None:
        """Account for attempts that run on replicas this dispatch did not choose; they belong to no plan.

        Attempts on unknown replicas and attempts already counted are ignored.
        """
        if self.placement is None:
            return
        ledger = self._scheduler.ledger
        for attempt, replica in running.items():
            uid, request_id = attempt.uid, _id(attempt.sample)
            if replica not in self.placement.fleet or uid not in ledger or self.placement.replica(request_id):
                continue
            sample = ledger.prompt(uid).samples[attempt.number]
            if sample.state == "running" and sample.attempt == attempt.attempt:
                had = sample.kept_tokens
                request = Request(request_id, uid, self._prompts([uid])[0] + had, replica=replica)
                self._place(self.placement, attempt, had, request)

    def ended(self, attempt: Attempt, tokens: int | None = None) -> None:
        """Release an attempt that finished with so many response tokens, or (``None``) was interrupted or abandoned."""
        if self.placement is not None and self._runs(attempt):
            request_id = _id(attempt.sample)
            had = self._placed.pop(request_id).start_tokens
            self.placement.release(request_id, None if tokens is None else max(0, tokens - had))

    def retain(self, needed: Callable[[str], bool]) -> None:
        if self.placement is None:
            return
        for attempt in [at.attempt for at in self._placed.values() if not needed(at.attempt.uid)]:
            self.ended(attempt)
        gone = [uid for uid in self._planned if not needed(uid)]
        self._planned.difference_update(gone)
        self.placement.forget_prompts(gone)

    # ---- migration ----

    def watched(self) -> dict[str, list[Attempt]]:
        """Return, by replica, the attempts whose progress :meth:`moves` needs."""
        found: dict[str, list[Attempt]] = {}
        if self.placement is not None:
            for request_id in self.placement.watched():
                found.setdefault(self.placement.replica(request_id), []).append(self._placed[request_id].attempt)
        return found

    def moves(self, emitted: Mapping[Attempt, int]) -> list[Move]:
        """Return the moves of attempts to other replicas, by the response tokens that each has so far."""
        if self.placement is None:
            return []
        running = {attempt.sample: tokens for attempt, tokens in emitted.items() if self._runs(attempt)}
        forecasts = self._forecast(list(running), list(running.values()))
        progress = {
            _id(sample): Progress(
                max(0, tokens - self._placed[_id(sample)].start_tokens), *(_left(each, tokens) for each in forecast)
            )
            for (sample, tokens), forecast in zip(running.items(), forecasts, strict=True)
        }
        moves = []
        for move in self.placement.moves(progress):
            attempt, start_tokens = self._placed[move.id]
            self._placed[move.id] = _Placed(attempt, start_tokens + progress[move.id].made)
            moves.append(move._replace(id=attempt))
        self.moved += len(moves)
        return moves

    def _runs(self, attempt: Attempt) -> bool:
        placed = self._placed.get(_id(attempt.sample))
        return placed is not None and placed.attempt == attempt


def _left(tokens: int | None, had: int) -> int | None:
    return None if tokens is None else max(1, tokens - had)


def _unfinished(prompt: Prompt) -> int:
    return sum(sample.state in ("pending", "running") for sample in prompt.samples)


def _id(sample: tuple[str, int]) -> str:
    return f"{sample[0]}-{sample[1]}"
