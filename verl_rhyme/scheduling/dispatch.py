"""Starts of the rollout with length forecasts and placement.

The plan covers all prompts of a batch and is made when the first of them starts. A length-based policy of
:mod:`verl_rhyme.placement` makes it, from an account of what runs on which replica. The module is pure, as are the
modules it uses. An error in the plan costs only the plan: the router decides then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from verl_rhyme.lengths.predictor import Forecast
from verl_rhyme.placement import Load, Move, Placement, Progress, Request
from verl_rhyme.scheduling.attempts import Attempt, Start, sample_of
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.samples import Prompt

#: Forecasts the final lengths of samples (uid, number) from the tokens that each has.
Lengths = Callable[[Sequence[tuple[str, int]], Sequence[int]], Forecast | None]
#: Returns the tokens of prompts, by uid; 0 where unknown.
PromptTokens = Callable[[Sequence[str]], Sequence[int]]


class _Placed(NamedTuple):
    name: str
    start_tokens: int  # of the sample at the start on its replica


class Dispatch:
    """Starts with forecasts and placement; without a ``placement`` the router decides."""

    def __init__(
        self,
        rollout: Rollout,
        lengths: Lengths,
        placement: Placement | None = None,
        prompts: PromptTokens = lambda uids: [0] * len(uids),
    ) -> None:
        self.rollout, self.placement = rollout, placement
        self._lengths, self._prompts = lengths, prompts
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

    def fill(self, limit: int | None = None, min_starts: int = 1, now: float = 0.0) -> list[Start]:
        starts = self.rollout.fill(limit, min_starts, now)
        if not starts:  # as after most events
            return starts
        samples = [sample_of(start.name) for start in starts]
        tokens = [self.rollout.kept_tokens(*sample) for sample in samples]
        forecasts = self._forecast(samples, tokens)
        if self.placement is None or not self.placement.fleet:
            return [_assigned(start, *forecast) for start, forecast in zip(starts, forecasts, strict=True)]
        uids = [uid for uid, _ in samples]
        self._plan(uids)
        placed = []
        for start, had, prompt_tokens, forecast in zip(starts, tokens, self._prompts(uids), forecasts, strict=True):
            uid, number = sample_of(start.name)
            left, p90_left = (_left(each, had) for each in forecast)
            request = Request(_id(uid, number), uid, prompt_tokens + had, left, p90_left)
            replica = self._place(start.name, had, request)
            placed.append(_assigned(start, *forecast, replica, self.placement.reason(request.id)))
        return placed

    def _forecast(
        self, samples: Sequence[tuple[str, int]], tokens: Sequence[int]
    ) -> list[tuple[int | None, int | None]]:
        """Return the expected response tokens of samples and their 90th percentile; ``None`` where unknown."""
        lengths = self._lengths(samples, tokens) if samples else None
        if lengths is None:
            return [(None, None)] * len(samples)
        return list(zip(lengths.expected.tolist(), lengths.p90.tolist(), strict=True))

    def _place(self, name: str, had: int, request: Request) -> str:
        assert self.placement is not None
        self._placed[request.id] = _Placed(name, had)
        return self.placement.acquire(request)

    def _plan(self, uids: Iterable[str]) -> None:
        assert self.placement is not None
        new = set(uids) - self._planned
        if not new:
            return
        scheduler, batch = self.rollout.scheduler, self.rollout.rules.batch_prompts
        steps: dict[int, list[Prompt]] = {}  # prompts by expected training step, in loading order
        for place, prompt in enumerate(prompt for prompt in scheduler.ledger if not prompt.put_off):
            steps.setdefault(scheduler.version + place // batch, []).append(prompt)
        for step, prompts in steps.items():
            if any(prompt.uid in new for prompt in prompts):
                unplanned = [p for p in prompts if p.uid not in self._planned]
                sized = zip(unplanned, self._prompts([p.uid for p in unplanned]), strict=True)
                # after a restart some samples have ended
                loads = [Load(p.uid, _unfinished(p), p.expected, tokens) for p, tokens in sized]
                self.placement.plan(step, [load for load in loads if load.samples])
                self._planned.update(p.uid for p in unplanned)

    @property
    def has_unplaced(self) -> bool:
        """Whether a sample ran on a replica that no longer serves; :meth:`count_running` can name its new replica."""
        return self.placement is not None and not all(map(self.placement.replica, self._placed))

    def count_running(self, running: Mapping[str, str]) -> None:
        """Account for attempts, by name, that run on replicas this dispatch did not choose; they belong to no plan.

        Attempts on unknown replicas and attempts already counted are ignored.
        """
        if self.placement is None:
            return
        ledger = self.rollout.scheduler.ledger
        for name, replica in running.items():
            uid, number, attempt = Attempt.named(name)
            if replica not in self.placement.fleet or uid not in ledger or self.placement.replica(_id(uid, number)):
                continue
            sample = ledger.prompt(uid).samples[number]
            if sample.state == "running" and sample.attempt == attempt:
                had = sample.kept_tokens
                prompt_tokens = self._prompts([uid])[0] + had
                self._place(name, had, Request(_id(uid, number), uid, prompt_tokens, replica=replica))

    def ended(self, name: str, tokens: int | None = None) -> None:
        """Release an attempt that finished with so many response tokens, or (``None``) was interrupted or abandoned."""
        if self.placement is not None and self._runs(name):
            request_id = _id(*sample_of(name))
            had = self._placed.pop(request_id).start_tokens
            self.placement.release(request_id, None if tokens is None else max(0, tokens - had))

    def retain(self, needed: Callable[[str], bool]) -> None:
        if self.placement is None:
            return
        for name in [at.name for at in self._placed.values() if not needed(sample_of(at.name)[0])]:
            self.ended(name)
        gone = [uid for uid in self._planned if not needed(uid)]
        self._planned.difference_update(gone)
        self.placement.forget_prompts(gone)

    # ---- migration ----

    def watched(self) -> dict[str, list[str]]:
        """Return, by replica, the attempts whose progress :meth:`moves` needs."""
        found: dict[str, list[str]] = {}
        if self.placement is not None:
            for request_id in self.placement.watched():
                found.setdefault(self.placement.replica(request_id), []).append(self._placed[request_id].name)
        return found

    def moves(self, emitted: Mapping[str, int]) -> list[Move]:
        """Return the moves of attempts to other replicas, by the tokens that each generated on its current one."""
        if self.placement is None:
            return []
        running = {sample_of(name): tokens for name, tokens in emitted.items() if self._runs(name)}
        had = [self._placed[_id(*sample)].start_tokens + made for sample, made in running.items()]
        forecasts = self._forecast(list(running), had)
        progress = {
            _id(*sample): Progress(made, *(_left(each, tokens) for each in forecast))
            for (sample, made), tokens, forecast in zip(running.items(), had, forecasts, strict=True)
        }
        moves = []
        for move in self.placement.moves(progress):
            name, start_tokens = self._placed[move.id]
            self._placed[move.id] = _Placed(name, start_tokens + progress[move.id].made)
            moves.append(move._replace(id=name))
        self.moved += len(moves)
        return moves

    def _runs(self, name: str) -> bool:
        placed = self._placed.get(_id(*sample_of(name)))
        return placed is not None and placed.name == name


def _assigned(start: Start, expected: int | None, p90: int | None, replica: str = "", reason: str = "") -> Start:
    assignment = replace(start.assignment, replica=replica, reason=reason, expected_tokens=expected, p90_tokens=p90)
    return start._replace(assignment=assignment)


def _left(tokens: int | None, had: int) -> int | None:
    return None if tokens is None else max(1, tokens - had)


def _unfinished(prompt: Prompt) -> int:
    return sum(sample.state in ("pending", "running") for sample in prompt.samples)


def _id(uid: str, number: int) -> str:
    return f"{uid}-{number}"
