"""A run in virtual time: replicas, rollout, rewards, training and weight syncs.

The rollout is training's own (:class:`~verl_rhyme.scheduling.rollout.Rollout` with its rules, scheduler and ledger), as
are placement and the length predictor; what stands in is who carries their messages, the engines and the clock.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from verl_rhyme.config import PLACEMENTS
from verl_rhyme.lengths.predictor import Forecast
from verl_rhyme.observability.batches import Occupancy
from verl_rhyme.placement import Placement
from verl_rhyme.placement import Request as Asked
from verl_rhyme.scheduling.attempts import Attempt, Ended, Start
from verl_rhyme.scheduling.dispatch import Dispatch
from verl_rhyme.scheduling.expectations import Expectations
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.simulation.cluster import Cluster
from verl_rhyme.simulation.engine import Engine, Request, Segment
from verl_rhyme.simulation.scenario import Scenario, Step
from verl_rhyme.simulation.trainer import Trainer
from verl_rhyme.simulation.workload import Prompt


@dataclass(slots=True)
class _Sample:
    """A sample under way: which attempt, of which prompt, the version that it needs, and the version and number of the
    tokens that it keeps."""

    attempt: Attempt
    prompt: Prompt
    needs: int = 0
    replica: str = ""
    first_version: int | None = None
    kept: float = 0.0
    started: int = 0  # version of its replica when it started there

    @property
    def first(self) -> int:
        """Version of the oldest of the tokens that it has."""
        return self.started if self.first_version is None else min(self.first_version, self.started)


class Simulation:
    """See the module.

    Args:
        scenario: What runs.
        prompts: In the order of the loader; the run ends when no whole batch is left.
        updates: After which it ends; ``None``: when the prompts do.
        segments: Where stretches of requests in slots go, with the replica's name; ``None``: nowhere.

    Attributes:
        steps: Those that ended.
        cluster: Clock and engines.
        expectations: Of lengths.
        trained: Tokens of each response of the last update batch.
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
        self.trained: list[int] = []
        self.rollout = Rollout(scenario.rules)
        drawn = {"seed": 0} if scenario.placement == "least_loaded" else {}  # the same run each time
        self.placement = Placement(scenario.placement, {**drawn, **scenario.options}, cost=scenario.replicas[0])
        planned = self.placement if scenario.placement in PLACEMENTS else None
        self.dispatch = Dispatch(self.rollout, self._lengths, planned, self._prompt_tokens)
        self._trainer = Trainer(scenario.training, scenario.streaming)
        self._prompts: Iterator[Prompt] = iter(prompts)
        self._loaded: dict[str, Prompt] = {}
        self._open: dict[str, int] = {}  # samples of each prompt that have not ended
        self._texts: dict[str, dict[int, int]] = {}  # tokens that each sample of a prompt has to draft from
        self._latest: dict[str, float] = {}  # when the latest of them ended that did
        self._under_way: dict[str, _Sample] = {}  # by attempt
        self._seen: dict[str, int] = {}
        self._updates = updates
        self._exhausted = self._training = self._stopped = False
        self._version = self._arrived = self._count_loaded = 0  # the policy's; the newest that replicas can take
        self._versions: dict[str, int] = {}
        self._gates: dict[str, dict[Hashable, tuple[int, Request]]] = {}  # who waits for a version, by replica
        engines: dict[str, Engine] = {}
        for i, cost in enumerate(scenario.replicas):
            name = f"replica-{i}"
            told = None if segments is None else (lambda segment, name=name: segments.append((name, segment)))
            engines[name] = Engine(cost, told)
            self._versions[name] = 0
            self.placement.add(name)
            if math.isfinite(cost.room):
                self.placement.report(name, int(cost.room))
        self._occupancy = Occupancy(scenario.slots, 0.0)
        self.cluster = Cluster(engines, self._generated, self._occupancy.at)
        self._began = 0.0

    def run(self, told: Callable[[Step], object] = lambda step: None) -> list[Step]:
        """All of it; ``told`` is called with each step that ended.

        Raises:
            RuntimeError: It stands still though updates are left: a rule waits for what never comes.
        """
        self._told = told
        collects = gc.isenabled()
        gc.disable()  # a fifth of the time: nothing here is cyclic, and all samples of a load are alive
        try:
            self._arrive(0)
            self._publish()
            self.cluster.run(lambda: self._ended)
        finally:
            if collects:
                gc.enable()
        if not self._ended:
            running = self.rollout.scheduler.running
            raise RuntimeError(f"it stands still at {self.cluster.now:.1f} s with {running} samples under way")
        return self.steps

    # ---- prompts and starts ----

    @property
    def _ended(self) -> bool:
        if self._updates is not None and len(self.steps) >= self._updates:
            return True
        return self._exhausted and not self._training and not len(self.rollout.scheduler.ledger)

    def _batches_left(self) -> int | None:
        if self._updates is not None:
            return self._updates - self._version
        rules, scheduler = self.scenario.rules, self.rollout.scheduler
        return math.ceil(scheduler.ledger.tally.untrained / rules.batch_samples) if self._exhausted else None

    def _hand(self) -> None:
        while (wanted := self.rollout.wanted()) and not self._exhausted:
            handed = []
            for prompt in self._prompts:
                uid = str(self._count_loaded)
                self._count_loaded += 1
                self._loaded[uid] = prompt
                self._open[uid] = len(prompt.lengths)
                self._texts[uid] = {}
                handed.append((uid, len(prompt.lengths)))
                if len(handed) == wanted:
                    break
            self._exhausted = len(handed) < wanted
            self.rollout.hand(handed)
            prompts = {uid: self._loaded[uid] for uid, _ in handed}
            expected = self.expectations.hand({uid: prompt.key for uid, prompt in prompts.items()})
            if self.scenario.forecasts == "oracle":
                expected = {uid: float(prompt.lengths.mean()) for uid, prompt in prompts.items()}
            if self.scenario.forecasts != "none":
                self.rollout.expect(expected)

    def _dispatch(self) -> None:
        if self._stopped:
            return
        self._hand()
        starts = self.dispatch.fill(self.scenario.limit, self.scenario.min_starts)
        if starts:
            self._start(starts)

    def _lengths(self, samples: Sequence[tuple[str, int]], had: Sequence[int]) -> Forecast | None:
        """What is expected of samples (:attr:`Scenario.forecasts`)."""
        if self.scenario.forecasts == "history":
            return self.expectations.lengths([uid for uid, _ in samples], had)
        if self.scenario.forecasts == "none":
            return None
        tokens = np.array([int(self._loaded[uid].lengths[number]) for uid, number in samples], np.int64)
        return Forecast(tokens, tokens)

    def _prompt_tokens(self, uids: Sequence[str]) -> list[int]:
        """Of prompts, as far as it is known (:attr:`Scenario.forecasts`)."""
        if self.scenario.forecasts == "none":
            return [0] * len(uids)
        if self.scenario.forecasts == "oracle":
            return [self._loaded[uid].tokens for uid in uids]
        return self.expectations.prompt_tokens(uids)

    def _start(self, starts: list[Start]) -> None:
        touched = set()
        for start in starts:
            attempt, assignment = Attempt.named(start.name), start.assignment
            prompt = self._loaded[attempt.uid]
            before = self._under_way.pop(start.predecessor, None) if start.predecessor else None
            sample = _Sample(attempt, prompt, assignment.oldest_version)
            if start.partial and before is not None:
                sample.kept, sample.first_version = before.kept, before.first_version
            sample.replica = replica = assignment.replica or self._route(start, attempt, prompt)
            sample.started = max(self._versions[replica], assignment.oldest_version)
            self._under_way[start.name] = sample
            length = int(prompt.lengths[attempt.number])
            text = self._texts[attempt.uid].get(attempt.number, 0) if self.scenario.redrafts else 0
            drafts = self.scenario.drafts.of(self._seen.get(prompt.key, 0), length, text)
            request = Request(
                *(start.name, prompt.key, prompt.tokens, length, sample.kept, assignment.priority, *drafts),
            )
            self._submit(replica, assignment.oldest_version, request)
            touched.add(replica)
        for replica in touched:
            self._renew(replica)
            self.cluster.touch(replica)

    def _submit(self, replica: str, version: int, request: Request) -> None:
        """A replica that serves an older version answers it when it has a newer one."""
        if version > self._versions[replica]:
            self._gates.setdefault(replica, {})[request.name] = version, request
        else:
            self.cluster.engines[replica].submit(request, self.cluster.now)

    def _renew(self, replica: str) -> None:
        """Where nothing runs any more a replica takes the newest version, and what waited for it begins."""
        engine = self.cluster.engines[replica]
        if not (self._versions[replica] == self._arrived or engine.running or engine.waiting):
            self._serve(replica)

    def _serve(self, replica: str) -> None:
        """A replica has the newest version."""
        self._versions[replica] = self._arrived
        self.cluster.engines[replica].forget()
        waited = self._gates.pop(replica, {})
        for version, request in waited.values():
            self._submit(replica, version, request)
        if waited:
            self.cluster.touch(replica)

    def _route(self, start: Start, attempt: Attempt, prompt: Prompt) -> str:
        """As the router does."""
        return self.placement.acquire(
            Asked(
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

    def _left(self, name: str, sample: _Sample, tokens: int | None = None) -> None:
        """An attempt left its replica, where it came to its end with so many tokens; ``None``: it was cut short."""
        if self.dispatch.placement is None:
            self.placement.release(self._name(sample.attempt), sample.replica, tokens)
        self.dispatch.ended(name, tokens)

    def _move(self) -> None:
        """What is better off elsewhere goes on there."""
        if not (watched := self.dispatch.watched()):
            return
        engines, now = self.cluster.engines, self.cluster.now
        emitted = {}
        for name in (name for names in watched.values() for name in names):
            sample = self._under_way[name]
            if name not in self._gates.get(sample.replica, ()):
                emitted[name] = int(engines[sample.replica].progress(name, now) - sample.kept)
        for move in self.dispatch.moves(emitted):
            sample = self._under_way[move.id]
            request, had = engines[sample.replica].withdraw(move.id, now)
            self._go_on(sample, request, move.replica, had)

    def _go_on(self, sample: _Sample, request: Request, replica: str, had: float) -> None:
        """At another replica, with what it has; where that is too old a version, when it has a newer one."""
        left = sample.replica
        if had:
            sample.first_version = sample.first
        self._submit(replica, sample.needs, request._replace(emitted=had))
        for each in (left, replica):
            if each in self.cluster.engines:
                self._renew(each)
                self.cluster.touch(each)
        sample.replica, sample.kept = replica, had
        sample.started = max(self._versions[replica], sample.needs)

    def _generated(self, replica: str, request: Request) -> None:
        name, tokens = str(request.name), int(request.tokens)
        sample = self._under_way[name]
        prompt, (uid, number, _) = sample.prompt, sample.attempt
        self._renew(replica)
        self._left(name, sample, tokens)
        self.rollout.ended(Ended(name, "generated", tokens, sample.first))
        self.expectations.prompted(uid, prompt.tokens)
        self.expectations.generated(uid, number, tokens)
        self._open[uid] -= 1
        self._texts[uid][number] = tokens
        self._latest[uid] = self.cluster.now
        if not self._open[uid]:
            self._seen[prompt.key] = self._seen.get(prompt.key, 0) + 1
        if self.scenario.training.reward:
            self.cluster.call(self.scenario.training.reward, lambda: self._rewarded(name))
        else:
            self._reward(name)
        self._dispatch()
        self._move()
        self._look()

    def _rewarded(self, name: str) -> None:
        self._reward(name)
        self._look()

    def _reward(self, name: str) -> None:
        self._under_way.pop(name, None)
        self.rollout.ended(Ended(name, "finished"))

    # ---- updates ----

    def _look(self) -> None:
        """Harvest if that may be, or else begin a part."""
        scheduler, rules = self.rollout.scheduler, self.scenario.rules
        if self._training or self._trainer.busy:
            return
        if not scheduler.ready():
            if not scheduler.enough():  # else it waits for rewards of what it is about to take
                self._stream()
            return
        if self._stops and not self._stopped:
            self._stopped = True
            self._interrupt()
        if not self.scenario.rests:
            self._settle()
        else:  # the span ends with the last request, as in training, which may have ended just now
            for replica in self.cluster.engines:
                self.cluster.touch(replica)
        bubble = self._occupancy.take()
        batch = self.rollout.take()
        self._training = True
        self.trained, stale = batch.collected.lengths, batch.collected.group_staleness
        ahead = self.cluster.now - max(self._latest.get(uid, 0.0) for uid, _ in batch.collected.samples)
        self.expectations.keep(self.rollout.needs_prompt)
        self.dispatch.keep(self.rollout.needs_prompt)
        tokens = sum(batch.collected.lengths)
        collected, began = self.cluster.now, self._began
        prompts = sum(self._loaded[uid].tokens for uid, _ in batch.collected.samples)
        seconds, parts, rest = self._trainer.update(tokens + prompts)
        for uid in {uid for uid, _ in batch.collected.samples}:
            if uid not in scheduler.ledger:
                del self._loaded[uid], self._open[uid], self._texts[uid]
                self._latest.pop(uid, None)

        def ended() -> None:
            self._began = self.cluster.now
            self.steps.append(
                Step(
                    *(batch.version, began, collected, self._began, tokens, len(batch.collected.samples)),
                    *(batch.counts.wasted_tokens, bubble, len(stale), fmean(stale), max(stale)),
                    self.expectations.measures(),
                    parts=parts,
                    rest=rest,
                    ahead=ahead,
                )
            )
            self._told(self.steps[-1])
            version = self._version = self._version + 1
            if left := self.scenario.training.sync - self.scenario.held:  # parts of the next batch train meanwhile
                self.cluster.call(left, lambda: self._take(version))
            else:
                self._arrive(version)
            self._publish()

        self.cluster.call(seconds + self.scenario.held, ended)
        if rules.starts_through_training:
            self._dispatch()

    def _stream(self) -> None:
        """Train what of the next batch is finished, if it is enough."""
        if (samples := self._trainer.wants) is None or not (names := self.rollout.part(samples)):
            return
        attempts = [Attempt.named(name) for name in names]
        ledger = self.rollout.scheduler.ledger
        tokens = sum(ledger.prompt(a.uid).samples[a.number].tokens + self._loaded[a.uid].tokens for a in attempts)

        def through() -> None:
            self._trainer.through()
            self._look()

        self.cluster.call(self._trainer.begin(len(names), tokens, self.cluster.now), through)

    @property
    def _stops(self) -> bool:
        rules = self.scenario.rules
        return self.scenario.colocated or rules.stops

    def _interrupt(self) -> None:
        """All that runs is cut short."""
        for replica, engine in self.cluster.engines.items():
            for request, emitted in engine.withdraw_all(self.cluster.now):
                name = str(request.name)
                sample = self._under_way[name]
                tokens = int(emitted)
                self._left(name, sample)
                if tokens:
                    sample.first_version = sample.first
                self._texts[sample.attempt.uid][sample.attempt.number] = tokens
                sample.kept = emitted
                self.rollout.ended(Ended(name, "interrupted", tokens, sample.first_version if tokens else None))
            self.cluster.touch(replica)

    def _arrive(self, version: int) -> None:
        """The engines can take the weights of a version."""
        self._arrived = version
        finishes = self.scenario.rules.finishes
        if version and not self._stops and not finishes:
            self._interrupt()
        for replica in self.cluster.engines:
            if finishes:
                self._renew(replica)
                self.cluster.touch(replica)
            else:
                self._serve(replica)

    def _take(self, version: int) -> None:
        """The engines can take a version that is published already."""
        self._arrive(version)
        self._after_start()

    def _publish(self) -> None:
        """The weights of the current version are there, or on their way to the engines."""
        self._training = self._stopped = False
        self.rollout.publish(self._version, self._batches_left())
        for name in self.rollout.take_abandoned():
            self._withdraw(name)
        self._after_start()

    def _after_start(self) -> None:
        if self.scenario.training.start:
            self.cluster.call(self.scenario.training.start, self._begin)
        else:
            self._begin()

    def _begin(self) -> None:
        """The first requests of a version reach the engines."""
        if self.scenario.rests:
            self._settle()
            self._occupancy.take()
        self._dispatch()
        self._look()

    def _withdraw(self, name: str) -> None:
        sample = self._under_way.pop(name, None)
        if sample is None:
            return
        engine = self.cluster.engines[sample.replica]
        if self._gates.get(sample.replica, {}).pop(name, None) is not None:
            self._left(name, sample)
        elif name in engine.names():
            engine.withdraw(name, self.cluster.now)
            self._left(name, sample)
            self._renew(sample.replica)
            self.cluster.touch(sample.replica)

    def _settle(self) -> None:
        """Count until now."""
        self._occupancy.at(self.cluster.now, sum(engine.running for engine in self.cluster.engines.values()))
