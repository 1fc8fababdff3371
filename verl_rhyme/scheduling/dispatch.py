"""Starts of the rollout with length forecasts and placement.

The plan covers all prompts of a batch and is made when the first of them starts. A length-based policy of
:mod:`verl_rhyme.placement` makes it, from an account of what runs on which replica. The module is pure, as are the
modules it uses. An error in the plan costs only the plan: the router decides then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from verl_rhyme.lengths.predictor import Forecast
from verl_rhyme.placement import Load, Move, Placement, Progress, Request
from verl_rhyme.scheduling.attempts import Attempt, Start
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.samples import Prompt

#: Forecasts the final lengths of samples (uid, number) from the tokens that each has.
Lengths = Callable[[Sequence[tuple[str, int]], Sequence[int]], Forecast | None]
#: Returns the tokens of prompts, by uid; 0 where unknown.
PromptTokens = Callable[[Sequence[str]], Sequence[int]]


#: States of samples that have not ended.
_TO_COME = ("pending", "running")


class _Placed(NamedTuple):
    """Replica on which a sample runs, name of its attempt, and tokens that it had at the start there."""

    replica: str
    name: str
    had: int


class _Chosen(NamedTuple):
    """Placement of a start.

    Attributes:
        replica: Name of the replica; empty: the router decides.
        expected: Expected response tokens.
        p90: Their 90th percentile.
        had: Tokens that the sample has at the start.
    """

    replica: str
    expected: int | None
    p90: int | None
    had: int


class Dispatch:
    """Starts with forecasts and placement; see the module.

    Args:
        rollout: The rollout that starts samples.
        lengths: Forecast of response lengths.
        placement: Placement with a policy that plans; ``None``: the router decides.
        prompts: Lookup of prompt lengths.

    Attributes:
        moved: Number of samples that were moved to other replicas.
    """

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
        self._at: dict[str, _Placed] = {}  # running samples, by id
        self.moved = 0

    def serve(self, rooms: Mapping[str, int | None]) -> None:
        """Set the replicas that serve from now on.

        Args:
            rooms: KV cache tokens by replica; ``None`` where unknown.
        """
        if self.placement is None:
            return
        for name in [name for name in self.placement.fleet.names if name not in rooms]:
            self.placement.remove(name)
        for name, room in rooms.items():
            self.placement.add(name)
            if room and self.placement.fleet.room(name) != room:
                self.placement.report(name, room)

    def fill(self, limit: int | None = None, min_starts: int = 1) -> list[Start]:
        """Return the starts of :meth:`Rollout.fill` with forecasts and replicas."""
        starts = self.rollout.fill(limit, min_starts)
        if not starts:  # as after most events
            return starts
        chosen = self._choose([Attempt.named(start.name).sample for start in starts])
        return [self._placed(start, each) for start, each in zip(starts, chosen, strict=True)]

    def _placed(self, start: Start, chosen: _Chosen) -> Start:
        replica, expected, p90, had = chosen
        if replica:
            self._at[_id(*Attempt.named(start.name).sample)] = _Placed(replica, start.name, had)
        reason = self.reason(start.name)
        assignment = replace(start.assignment, replica=replica, reason=reason, expected_tokens=expected, p90_tokens=p90)
        return start._replace(assignment=assignment)

    def _choose(self, samples: Sequence[tuple[str, int]]) -> list[_Chosen]:
        had = [self.rollout.kept_tokens(*sample) for sample in samples]
        lengths = self._lengths(samples, had)
        none: list[int | None] = [None] * len(samples)
        expected = none if lengths is None else lengths.expected.tolist()
        p90 = none if lengths is None else lengths.p90.tolist()
        replicas = [""] * len(samples)
        if self.placement is not None and self.placement.fleet:
            for sample in samples:  # the end of the previous attempt was not reported
                if (before := self._at.pop(_id(*sample), None)) is not None:
                    self.placement.release(_id(*sample), before.replica)
            self._plan(dict.fromkeys(uid for uid, _ in samples))
            begin = map(operator.add, self._prompts([uid for uid, _ in samples]), had)
            replicas = [self.placement.acquire(r) for r in map(_request, samples, begin, expected, p90, had)]
        return list(map(_Chosen, replicas, expected, p90, had))

    @property
    def adrift(self) -> bool:
        """Whether a sample ran on a replica that no longer serves; :meth:`take_up` can name its new replica."""
        return self.placement is not None and any(at.replica not in self.placement.fleet for at in self._at.values())

    def take_up(self, running: Mapping[str, str]) -> None:
        """Account for attempts that run on replicas this dispatch did not choose; they belong to no plan.

        Attempts on unknown replicas and attempts already counted are ignored.

        Args:
            running: Replica by name of the attempt.
        """
        if self.placement is None:
            return
        ledger = self.rollout.scheduler.ledger
        for name, replica in running.items():
            uid, number, attempt = Attempt.named(name)
            if replica not in self.placement.fleet or uid not in ledger:
                continue
            samples = ledger.prompt(uid).samples
            sample, before = samples[number], self._at.get(_id(uid, number))
            if before is not None and before.replica in self.placement.fleet:
                continue
            if sample.state == "running" and sample.attempt == attempt:
                had = sample.kept_tokens if self.rollout.rules.continues else 0
                id_ = f"{uid}-{number}"
                begin = self._prompts([uid])[0] + had
                self.placement.acquire(Request(id_, uid, begin, replica=replica))
                self._at[id_] = _Placed(replica, name, had)

    def ended(self, name: str, tokens: int | None = None) -> None:
        """Release a finished attempt.

        Args:
            name: Name of the attempt.
            tokens: Response tokens at its end; ``None``: it was interrupted or abandoned.
        """
        attempt = Attempt.named(name)
        if self.placement is None:
            return
        at = self._at.get(_id(*attempt.sample))
        if at is not None and at.name == name:  # no later attempt runs
            del self._at[_id(*attempt.sample)]
            self.placement.release(
                _id(*attempt.sample), at.replica, None if tokens is None else max(0, tokens - at.had)
            )

    def keep(self, needed: Callable[[str], bool]) -> None:
        """Forget the prompts for which ``needed`` is false."""
        if self.placement is None:
            return
        for name in [at.name for at in self._at.values() if not needed(Attempt.named(at.name).uid)]:
            self.ended(name)
        gone = [uid for uid in self._planned if not needed(uid)]
        self._planned.difference_update(gone)
        self.placement.left(gone)

    def reason(self, name: str) -> str:
        """Return in a few words why a running attempt was placed on its replica.

        It is empty where the router decided, or where the policy's name is reason enough.
        """
        uid, number = Attempt.named(name).sample
        return "" if self.placement is None else self.placement.reason(f"{uid}-{number}")

    # ---- migration ----

    def watched(self) -> dict[str, list[str]]:
        """Return, by replica, the attempts whose progress :meth:`moves` needs."""
        found: dict[str, list[str]] = {}
        for name in () if self.placement is None else self.placement.watched():
            if (at := self._at.get(name)) is not None:
                found.setdefault(at.replica, []).append(at.name)
        return found

    def moves(self, emitted: Mapping[str, int]) -> list[Move]:
        """Return the moves of running attempts to other replicas.

        Args:
            emitted: Tokens that each attempt generated on its current replica, by name.
        """
        if self.placement is None:
            return []
        running = {}
        for name, made in emitted.items():
            attempt = Attempt.named(name)
            at = self._at.get(_id(*attempt.sample))
            if at is not None and at.name == name:
                running[_id(*attempt.sample)] = attempt.sample, at.had, made
        had = [had + made for _, had, made in running.values()]
        lengths = self._lengths([sample for sample, _, _ in running.values()], had) if running else None
        left: list[tuple[int | None, int | None]] = [(None, None)] * len(had)
        if lengths is not None:
            ends = zip(had, lengths.expected.tolist(), lengths.p90.tolist(), strict=True)
            left = [(max(1, t - n), max(1, most - n)) for n, t, most in ends]
        pairs = zip(running.items(), left, strict=True)
        progress = {name: Progress(made, *left) for (name, (_, _, made)), left in pairs}
        moves = []
        for move in self.placement.moves(progress):
            at = self._at[move.id]
            self._at[move.id] = _Placed(move.replica, at.name, at.had + progress[move.id].made)
            moves.append(move._replace(id=at.name))
        self.moved += len(moves)
        return moves

    # ---- within ----

    def _plan(self, uids: Iterable[str]) -> None:
        assert self.placement is not None
        new = {uid for uid in uids if uid not in self._planned}
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
                loads = [Load(p.uid, sum(s.state in _TO_COME for s in p.samples), p.expected, own) for p, own in sized]
                self.placement.plan(step, [load for load in loads if load.samples])
                self._planned.update(p.uid for p in unplanned)


def _id(uid: str, number: int) -> str:
    return f"{uid}-{number}"


def _request(sample: tuple[str, int], begin: int, expected: int | None, p90: int | None, had: int) -> Request:
    left, most = (None if tokens is None else max(1, tokens - had) for tokens in (expected, p90))
    return Request(_id(*sample), sample[0], begin, left, most)
