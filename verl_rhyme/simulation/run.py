"""Simulation of a training run in virtual time: replicas, rollout, rewards, training and weight syncs.

Rollout (:class:`~verl_rhyme.scheduling.rollout.Rollout` with its rules, scheduler and ledger), placement and length
predictor are the code of training. Simulated are the engines, the trainer, messages and the clock.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import cast

from verl_rhyme.config import PLACEMENTS
from verl_rhyme.lengths.predictor import Forecast
from verl_rhyme.placement import Placement
from verl_rhyme.placement import Request as PlacementRequest
from verl_rhyme.planning.workload import Prompt
from verl_rhyme.scheduling.attempts import Attempt, AttemptReport, Start
from verl_rhyme.scheduling.dispatch import Dispatch
from verl_rhyme.scheduling.expectations import Expectations
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.simulation.cluster import Cluster
from verl_rhyme.simulation.engine import Engine, Request, Segment
from verl_rhyme.simulation.scenario import Part, Scenario, Step


@dataclass(slots=True)
class _Sample:
    attempt: Attempt
    prompt: Prompt
    needs: int = 0  # minimum policy version
    replica: str = ""
    first_version: int | None = None  # version of the first kept token
    kept: float = 0.0  # tokens of earlier requests
    started: int = 0  # version of the replica when the sample started there

    @property
    def first(self) -> int:
        """Version of its oldest token."""
        return self.started if self.first_version is None else min(self.first_version, self.started)


@dataclass(slots=True)
class _Loaded:
    prompt: Prompt
    unfinished: int  # samples
    texts: dict[int, int] = field(default_factory=dict)  # tokens that each sample can draft from


class Simulation:
    """Simulation of a training run; its ``cluster`` has the clock and the engines.

    ``prompts`` come in the order of the data loader. ``updates=None``: as many training steps as they have whole
    batches. ``segments`` receives segments of requests with the replica's name.
    """

    def __init__(
        self,
        scenario: Scenario,
        prompts: Iterable[Prompt],
        updates: int | None = None,
        segments: list[tuple[str, Segment]] | None = None,
    ) -> None:
        self.scenario = scenario
        self.expectations = Expectations(scenario.response_limit)
        self.steps: list[Step] = []
        seed = {"seed": 0} if scenario.placement == "least_loaded" else {}  # reproducible runs
        self.placement = Placement(scenario.placement, {**seed, **scenario.options}, cost=scenario.replicas[0])
        planned = self.placement if scenario.placement in PLACEMENTS else None
        dispatch = partial(Dispatch, lengths=self._lengths, placement=planned, prompts=self._prompt_tokens)
        self.rollout = Rollout(scenario.rules, dispatch=dispatch)
        self.dispatch = self.rollout.dispatch
        self._parts: list[Part] = []  # of the next batch
        prompts = list(prompts)
        self._prompts: Iterator[Prompt] = iter(prompts)
        self._loaded: dict[str, _Loaded] = {}
        self._under_way: dict[Attempt, _Sample] = {}  # samples in flight
        self._seen: dict[str, int] = {}
        self._updates = len(prompts) // scenario.rules.batch_prompts if updates is None else updates
        self._training = self._in_part = self._stopped = False
        self._version = self._arrived = self._count_loaded = 0  # the policy's; the newest that replicas can load
        self._versions: dict[str, int] = {}
        self._gates: dict[str, dict[Hashable, tuple[int, Request]]] = {}  # requests that wait for a version, by replica
        engines: dict[str, Engine] = {}
        for i, cost in enumerate(scenario.replicas):
            name = f"replica-{i}"
            on_segment = None if segments is None else (lambda segment, name=name: segments.append((name, segment)))
            engines[name] = Engine(cost, on_segment)
            self._versions[name] = 0
            self.placement.fleet.add(name, int(cost.room) if math.isfinite(cost.room) else None)
        self.cluster = Cluster(engines, self._generated, scenario.slots)
        self._began = 0.0

    def run(self, on_step: Callable[[Step], object] = lambda step: None, steps: int | None = None) -> list[Step]:
        """Call ``on_step`` with each finished step; end after ``steps``, as if the run went on.

        Raises RuntimeError if a rule waits for ever: no event is left, steps are.
        """
        self._last = self._updates if steps is None else min(steps, self._updates)
        self._on_step = on_step
        collects = gc.isenabled()
        gc.disable()  # collection takes a fifth of the time, and there are no reference cycles
        try:
            self._arrive(0)
            self._publish()
            self.cluster.run(lambda: self._ended)
        finally:
            if collects:
                gc.enable()
        if not self._ended:
            running = self.rollout.scheduler.running
            raise RuntimeError(
                f"the simulation is stuck at {self.cluster.now:.1f} s with {running} samples in flight: "
                "a scheduling rule waits for ever"
            )
        return self.steps

    # ---- prompts and starts ----

    @property
    def _ended(self) -> bool:
        return len(self.steps) >= self._last

    def _load_prompts(self) -> None:
        while prompts := [*itertools.islice(self._prompts, self.rollout.missing_prompts())]:
            loaded = []
            for prompt in prompts:
                uid = str(self._count_loaded)
                self._count_loaded += 1
                self._loaded[uid] = _Loaded(prompt, len(prompt.lengths))
                loaded.append((uid, len(prompt.lengths)))
            self.rollout.add_prompts(loaded)
            expected = self.expectations.add_prompts({uid: self._loaded[uid].prompt.key for uid, _ in loaded})
            if self.scenario.forecasts == "history":
                self.rollout.expect(expected)

    def _dispatch(self) -> None:
        if self._stopped:
            return
        self._load_prompts()
        starts = self.rollout.fill(self.scenario.limit, self.scenario.min_starts)
        if starts:
            self._start(starts)

    def _lengths(self, samples: Sequence[tuple[str, int]], had: Sequence[int]) -> Forecast | None:
        if self.scenario.forecasts == "none":
            return None
        return self.expectations.lengths([uid for uid, _ in samples], had)

    def _prompt_tokens(self, uids: Sequence[str]) -> list[int]:
        return [0] * len(uids) if self.scenario.forecasts == "none" else self.expectations.prompt_tokens(uids)

    def _start(self, starts: list[Start]) -> None:
        touched = set()
        for start in starts:
            attempt, assignment = start.attempt, start.assignment
            loaded = self._loaded[attempt.uid]
            prompt = loaded.prompt
            before = self._under_way.pop(start.predecessor, None) if start.predecessor else None
            sample = _Sample(attempt, prompt, assignment.oldest_version)
            if start.partial and before is not None:
                sample.kept, sample.first_version = before.kept, before.first_version
            sample.replica = replica = assignment.replica or self._route(start, attempt, prompt)
            sample.started = max(self._versions[replica], assignment.oldest_version)
            self._under_way[attempt] = sample
            length = int(prompt.lengths[attempt.number])
            text = loaded.texts.get(attempt.number, 0) if self.scenario.redrafts else 0
            drafts = self.scenario.drafts.of(self._seen.get(prompt.key, 0), length, text)
            request = Request(
                *(attempt, prompt.key, prompt.tokens, length, sample.kept, assignment.priority, *drafts),
            )
            self._submit(replica, assignment.oldest_version, request)
            touched.add(replica)
        for replica in touched:
            self._update_if_idle(replica)
            self.cluster.reschedule(replica)

    def _submit(self, replica: str, version: int, request: Request) -> None:
        """Submit a request; it waits while the replica has an older version than it needs."""
        if version > self._versions[replica]:
            self._gates.setdefault(replica, {})[request.name] = version, request
        else:
            self.cluster.engines[replica].submit(request, self.cluster.now)

    def _update_if_idle(self, replica: str) -> None:
        engine = self.cluster.engines[replica]
        if not (self._versions[replica] == self._arrived or engine.running or engine.waiting):
            self._set_newest_version(replica)

    def _set_newest_version(self, replica: str) -> None:
        self._versions[replica] = self._arrived
        self.cluster.engines[replica].forget()
        waited = self._gates.pop(replica, {})
        for version, request in waited.values():
            self._submit(replica, version, request)
        if waited:
            self.cluster.reschedule(replica)

    def _route(self, start: Start, attempt: Attempt, prompt: Prompt) -> str:
        return self.placement.acquire(
            PlacementRequest(
                id=self._name(attempt),
                key=prompt.key,
                prompt_tokens=prompt.tokens,
                response_tokens=start.assignment.expected_tokens,
            )
        )

    @staticmethod
    def _name(attempt: Attempt) -> str:
        return f"{attempt.uid}-{attempt.number}"

    # ---- ends ----

    def _release(self, sample: _Sample, tokens: int | None = None) -> None:
        """The attempt left the router's replica: finished with ``tokens``, or aborted (``None``)."""
        if self.dispatch.placement is None:
            self.placement.release(self._name(sample.attempt), tokens)

    def _move(self) -> None:
        if not (watched := self.dispatch.watched()):
            return
        engines, now = self.cluster.engines, self.cluster.now
        emitted = {}
        for attempt in (attempt for attempts in watched.values() for attempt in attempts):
            sample = self._under_way[attempt]
            if attempt not in self._gates.get(sample.replica, ()):
                emitted[attempt] = int(engines[sample.replica].progress(attempt, now))
        for move in self.dispatch.moves(emitted):
            sample = self._under_way[move.id]
            request, had = engines[sample.replica].withdraw(move.id, now)
            self._migrate(sample, request, move.replica, had)

    def _migrate(self, sample: _Sample, request: Request, replica: str, had: float) -> None:
        left = sample.replica
        if had:
            sample.first_version = sample.first
        self._submit(replica, sample.needs, request._replace(emitted=had))
        for each in (left, replica):
            if each in self.cluster.engines:
                self._update_if_idle(each)
                self.cluster.reschedule(each)
        sample.replica, sample.kept = replica, had
        sample.started = max(self._versions[replica], sample.needs)

    def _generated(self, replica: str, request: Request) -> None:
        attempt, tokens = cast(Attempt, request.name), int(request.tokens)
        sample = self._under_way[attempt]
        prompt, (uid, number, _) = sample.prompt, attempt
        self._update_if_idle(replica)
        self._release(sample, tokens)
        self.rollout.ended(AttemptReport(attempt, "generated", tokens, sample.first))
        self.expectations.set_prompt_tokens(uid, prompt.tokens)
        self.expectations.generated(uid, number, tokens)
        loaded = self._loaded[uid]
        loaded.unfinished -= 1
        loaded.texts[number] = tokens
        if not loaded.unfinished:
            self._seen[prompt.key] = self._seen.get(prompt.key, 0) + 1
        if self.scenario.training.reward:
            self.cluster.call(self.scenario.training.reward, lambda: self._rewarded(attempt))
        else:
            self._reward(attempt)
        self._dispatch()
        self._move()
        self._collect_if_ready()

    def _rewarded(self, attempt: Attempt) -> None:
        self._reward(attempt)
        self._collect_if_ready()

    def _reward(self, attempt: Attempt) -> None:
        self._under_way.pop(attempt, None)
        self.rollout.ended(AttemptReport(attempt, "finished"))

    # ---- updates ----

    def _collect_if_ready(self) -> None:
        scheduler, rules = self.rollout.scheduler, self.scenario.rules
        if self._training or self._in_part:
            return
        if not scheduler.ready():
            if not scheduler.has_batch():  # else only rewards of the batch are missing
                self._stream()
            return
        if self._stops and not self._stopped:
            self._stopped = True
            self._interrupt()
        if not self.scenario.pauses:
            self.cluster.count_running()
        else:  # as in training, the bubble's time span ends with the last request, which may have ended just now
            for replica in self.cluster.engines:
                self.cluster.reschedule(replica)
        bubble = self.cluster.end_interval()
        batch = self.rollout.take()
        self._training = True
        stale, uids = batch.collected.group_staleness, [uid for uid, _ in batch.collected.samples]
        self.expectations.retain(self.rollout.content.needs_prompt)
        self.dispatch.retain(self.rollout.content.needs_prompt)
        tokens = sum(batch.collected.lengths)
        collected, began = self.cluster.now, self._began
        prompts = sum(self._loaded[uid].prompt.tokens for uid in uids)
        parts, self._parts = tuple(self._parts), []
        rest = tokens + prompts - sum(part.tokens for part in parts)
        training = self.scenario.training
        seconds = training.update + training.token * rest + self.scenario.blocked_s
        for uid in set(uids):
            if uid not in scheduler.ledger:
                del self._loaded[uid]

        def ended() -> None:
            self._began = self.cluster.now
            self.steps.append(
                Step(
                    *(batch.version, began, collected, self._began, tokens, len(uids)),
                    *(batch.counts.wasted_tokens, bubble, len(stale), fmean(stale), max(stale)),
                    self.expectations.measures(),
                    parts,
                )
            )
            self._on_step(self.steps[-1])
            version = self._version = self._version + 1
            if left := training.sync - self.scenario.blocked_s:  # parts of the next batch train meanwhile
                self.cluster.call(left, lambda: self._take(version))
            else:
                self._arrive(version)
            self._publish()

        self.cluster.call(seconds, ended)
        if rules.starts_through_training:
            self._dispatch()

    def _stream(self) -> None:
        if (samples := self.scenario.part_samples) is None or not (attempts := self.rollout.part(samples)):
            return
        ledger = self.rollout.scheduler.ledger
        tokens = sum(
            ledger.prompt(a.uid).samples[a.number].tokens + self._loaded[a.uid].prompt.tokens for a in attempts
        )

        def trained() -> None:
            self._in_part = False
            self._collect_if_ready()

        seconds = self.scenario.training.part + self.scenario.training.token * tokens
        self._in_part = True
        self._parts.append(Part(self.cluster.now, self.cluster.now + seconds, len(attempts), tokens))
        self.cluster.call(seconds, trained)

    @property
    def _stops(self) -> bool:
        rules = self.scenario.rules
        return self.scenario.colocated or rules.stops

    def _interrupt(self) -> None:
        for replica, engine in self.cluster.engines.items():
            for request, emitted in engine.withdraw_all(self.cluster.now):
                attempt = cast(Attempt, request.name)
                sample = self._under_way[attempt]
                tokens = int(emitted)
                self._release(sample)
                if tokens:
                    sample.first_version = sample.first
                self._loaded[attempt.uid].texts[attempt.number] = tokens
                sample.kept = emitted
                first = sample.first_version if tokens else None
                self.rollout.ended(AttemptReport(attempt, "interrupted", tokens, first))
            self.cluster.reschedule(replica)

    def _arrive(self, version: int) -> None:
        """Make a version available to the engines."""
        self._arrived = version
        finishes = self.scenario.rules.finishes
        if version and not self._stops and not finishes:
            self._interrupt()
        for replica in self.cluster.engines:
            if finishes:
                self._update_if_idle(replica)
                self.cluster.reschedule(replica)
            else:
                self._set_newest_version(replica)

    def _take(self, version: int) -> None:
        self._arrive(version)
        self._begin()

    def _publish(self) -> None:
        """Publish the version to the rollout; its weights may still be on their way to the engines."""
        self._training = self._stopped = False
        self.rollout.publish(self._version, self._updates - self._version)
        for attempt in self.rollout.pop_abandoned():
            self._withdraw(attempt)
        self._begin()

    def _begin(self) -> None:
        if self.scenario.pauses:
            self.cluster.count_running()
            self.cluster.end_interval()
        self._dispatch()
        self._collect_if_ready()

    def _withdraw(self, attempt: Attempt) -> None:
        sample = self._under_way.pop(attempt, None)
        if sample is None:
            return
        engine = self.cluster.engines[sample.replica]
        if self._gates.get(sample.replica, {}).pop(attempt, None) is not None:
            self._release(sample)
        elif attempt in engine.names():
            engine.withdraw(attempt, self.cluster.now)
            self._release(sample)
            self._update_if_idle(sample.replica)
            self.cluster.reschedule(sample.replica)
