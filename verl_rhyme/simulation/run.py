"""Simulation of a training run in virtual time: replicas, rollout, tools, rewards, training and weight syncs.

Rollout (:class:`~verl_rhyme.scheduling.rollout.Rollout` with its rules, scheduler and ledger), capacity, placement and
length predictor are the code of training. Simulated are the engines, the trainer, messages and the clock.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import cast

from verl_rhyme.config import OVERSUBSCRIPTION, PLACEMENTS
from verl_rhyme.lengths.predictor import Forecast
from verl_rhyme.placement import Placement
from verl_rhyme.placement import Request as PlacementRequest
from verl_rhyme.planning.workload import Prompt
from verl_rhyme.scheduling.attempts import Attempt, AttemptReport, Start
from verl_rhyme.scheduling.capacity import Capacity
from verl_rhyme.scheduling.dispatch import Dispatch
from verl_rhyme.scheduling.expectations import Expectations
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.simulation.engine import Engine, Request, Segment
from verl_rhyme.simulation.replicas import Replicas
from verl_rhyme.simulation.sample import Sample
from verl_rhyme.simulation.scenario import Part, Scenario, Step


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
        self._under_way: dict[Attempt, Sample] = {}  # samples in flight
        self._seen: dict[str, int] = {}
        self._updates = len(prompts) // scenario.rules.batch_prompts if updates is None else updates
        self._training = self._in_part = False
        self._version = self._count_loaded = 0
        engines: dict[str, Engine] = {}
        for i, cost in enumerate(scenario.replicas):
            name = f"replica-{i}"
            on_segment = None if segments is None else (lambda segment, name=name: segments.append((name, segment)))
            engines[name] = Engine(cost, on_segment)
            self.placement.fleet.add(name, int(cost.room) if math.isfinite(cost.room) else None)
        self.replicas = Replicas(engines, self._generated, scenario.slots)
        self.cluster = self.replicas.cluster
        slots, room = (OVERSUBSCRIPTION * sum(getattr(c, of) for c in scenario.replicas) for of in ("slots", "room"))
        self.capacity = Capacity(math.ceil(slots), int(room) if math.isfinite(room) else None, (), scenario.replicas[0])
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
        if self.replicas.stopped:
            return
        self._load_prompts()
        limit = self.capacity.limit if self.scenario.limited else None
        # in training, half of the requests that queue at the engines
        self._start(self.rollout.fill(limit, 1 if limit is None else max(1, limit // 4)))

    def _lengths(self, samples: Sequence[tuple[str, int]], had: Sequence[int]) -> Forecast | None:
        if self.scenario.forecasts == "none":
            return None
        return self.expectations.lengths([uid for uid, _ in samples], had)

    def _prompt_tokens(self, uids: Sequence[str]) -> list[int]:
        return [0] * len(uids) if self.scenario.forecasts == "none" else self.expectations.prompt_tokens(uids)

    def _start(self, starts: list[Start]) -> None:
        for start in starts:
            attempt, assignment = start.attempt, start.assignment
            loaded = self._loaded[attempt.uid]
            prompt = loaded.prompt
            turns = prompt.turns_of(attempt.number)
            text = loaded.texts.get(attempt.number, 0) if self.scenario.redrafts else 0
            drafts = self.scenario.drafts.of(self._seen.get(prompt.key, 0), int(prompt.lengths[attempt.number]), text)
            sample = Sample(attempt, prompt, turns, *drafts, assignment.priority, assignment.oldest_version)
            self._under_way[attempt] = sample
            sample.replica = assignment.replica or self._route(start, attempt, prompt)
            self._submit(sample)

    def _submit(self, sample: Sample) -> None:
        self.replicas.submit(sample.replica, sample.needs, sample.request(self.cluster.now))

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

    def _release(self, sample: Sample, tokens: int | None = None) -> None:
        """The attempt left the router's replica: finished with ``tokens``, or aborted (``None``)."""
        if self.dispatch.placement is None:
            self.placement.release(self._name(sample.attempt), tokens)

    def _move(self) -> None:
        if not (watched := self.dispatch.watched()):
            return
        emitted = {}
        for attempt in (attempt for attempts in watched.values() for attempt in attempts):
            sample = self._under_way[attempt]
            made = self.replicas.progress(sample.replica, attempt)
            if made is not None:
                emitted[attempt] = int(sample.done + made)
        for move in self.dispatch.moves(emitted):
            sample = self._under_way[move.id]
            taken = self.replicas.withdraw(sample.replica, move.id)
            assert taken is not None  # of a sample with progress
            sample.aborted(taken[1], taken[0].cached, self.cluster.now, self.replicas.versions[sample.replica])
            sample.replica = move.replica
            self._submit(sample)

    def _generated(self, replica: str, request: Request) -> None:
        sample = self._under_way[cast(Attempt, request.name)]
        wait = sample.turn_ended(request, self.cluster.now, self.replicas.versions[replica])
        self.replicas.update_if_idle(replica)
        if wait is None:
            self._sample_generated(sample)
        else:
            self.cluster.call(wait, lambda: self._tool_returned(sample))

    def _tool_returned(self, sample: Sample) -> None:
        if self._under_way.get(sample.attempt) is sample:  # else it was abandoned
            self._submit(sample)

    def _sample_generated(self, sample: Sample) -> None:
        attempt, prompt, tokens = sample.attempt, sample.prompt, int(sample.done)
        uid, number, _ = attempt
        self._release(sample, tokens)
        self.rollout.ended(AttemptReport(attempt, "generated", tokens, sample.first))
        self.capacity.observe(sample.records)
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
        if self._stops and not self.replicas.stopped:
            self.replicas.stopped = True
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
            self.replicas.stopped = False
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
        """Abort all requests; their samples continue in place at the next version. They end where they may not, or have
        no token."""
        now, continues = self.cluster.now, self.scenario.rules.continues
        ends = [] if continues else [sample for sample in self._under_way.values() if not sample.ended]
        for replica in self.cluster.engines:
            held = []
            for request, emitted in self.replicas.withdraw_all(replica):
                sample = self._under_way[cast(Attempt, request.name)]
                sample.aborted(emitted, request.cached, now, self.replicas.versions[replica])
                if continues and sample.made:
                    held.append(sample.request(now))
                elif continues:
                    ends.append(sample)
            self.replicas.hold(replica, held)
        for sample in ends:
            self._end(sample)

    def _end(self, sample: Sample) -> None:
        """End an interrupted attempt."""
        del self._under_way[sample.attempt]
        self.replicas.withdraw(sample.replica, sample.attempt)  # it may wait for a version
        tokens = int(sample.made)
        self._release(sample)
        self.capacity.observe(sample.records)
        self._loaded[sample.attempt.uid].texts[sample.attempt.number] = tokens
        self.rollout.ended(AttemptReport(sample.attempt, "interrupted", tokens, sample.first if tokens else None))

    def _arrive(self, version: int) -> None:
        """Make a version available to the engines."""
        self.replicas.arrived = version
        finishes = self.scenario.rules.finishes
        if version and not self._stops and not finishes:
            self._interrupt()
        for replica in self.cluster.engines:
            if finishes:
                self.replicas.update_if_idle(replica)
                self.cluster.reschedule(replica)
            else:
                self.replicas.set_newest_version(replica)

    def _take(self, version: int) -> None:
        self._arrive(version)
        self._begin()

    def _publish(self) -> None:
        """Publish the version to the rollout; its weights may still be on their way to the engines."""
        self._training = self.replicas.stopped = False
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
        if sample is not None and not sample.ended:
            self.replicas.withdraw(sample.replica, attempt)
            self._release(sample)
